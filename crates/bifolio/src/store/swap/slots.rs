//! The slots of the swap file: which are used, and a word for each, with its checksum and shadow.
//!
//! Called by `Swap`, under one lock. Runs of slots are allocated in ascending order:
//! each search continues where the last one ended (next fit), so that pages evicted one after the
//! other are adjacent in the file, as in a log. At the end of the file the search wraps around and
//! reuses the slots freed meanwhile.
//!
//! A search uses a summary instead of examining single slots:
//!
//! ```text
//!   reach          [ 512 | 0 | 7 | 40 |                            longest run that begins there
//!   groups         [ 512 slots, a bit each |
//! ```
//!
//! A run is at most as long as a group, so one that begins in a group ends there or in the next;
//! two neighbouring groups determine the reach. So the longest run, and the first run of a length
//! after the cursor, are found exactly: by one comparison for each 2 MiB of the file.
//!
//! The storage may refuse writes below the capacity because the device is full. Slots that were
//! written before have storage, so runs then come from those, however short, and only one per round
//! from beyond them, to detect that there is space again. Such a search examines all groups.
use crate::memory::Shadow;
use crate::page::{ReservedArray, VALUE_MAX};
use crate::sync::{AtomicU32, AtomicU64, Mutex, Ordering};
use crate::sys::memory::PAGE_BYTES;
use std::ops::Range;
use std::{io, iter};
use thiserror::Error;

/// Cost of a group in bytes: a word for each slot ([`SlotMetadata`]), and its bits and reach,
/// counted three times because a vector holds them several times while it grows.
pub(crate) const GROUP_BYTES: u64 =
    GROUP_SLOTS as u64 * size_of::<u64>() as u64 + BOOKKEEPING_BYTES;
const BOOKKEEPING_BYTES: u64 = 256;
const _: () =
    assert!(3 * (size_of::<SlotGroup>() + 2 * size_of::<u16>()) <= BOOKKEEPING_BYTES as usize);

/// Maximum number of slots, including slot 0: a value Entry can name each (SWAP-2).
pub(super) const SLOTS_MAX: u64 = VALUE_MAX + 1;
/// The slot that is never allocated: 0 means "none" in a descriptor.
const HEADER_SLOT: u32 = 0;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRun {
    pub(crate) first: u32,
    pub(crate) pages: u32,
}

pub(crate) fn position_bytes(slot: u32) -> u64 {
    u64::from(slot) * PAGE_BYTES as u64
}

#[derive(Debug)]
pub(crate) struct Slots {
    pub(super) state: Mutex<SlotsState>,
    /// First slot past the end of the file.
    pub(super) end: u32,
    /// Mirror of the number of slots in `state`, read without the lock.
    capacity: AtomicU32,
    used: AtomicU32,
}

#[derive(Debug, Default)]
pub(super) struct SlotsState {
    groups: Vec<SlotGroup>,
    /// Longest run of free slots that begins in each group, at most [`GROUP_SLOTS`].
    reach: Vec<u16>,
    pub(super) cursor: u32,
    /// One more than the highest slot that was ever written.
    written_end: u32,
    /// `true` if the last write past `written_end` was refused.
    is_refused: bool,
    /// `true` if one more run past `written_end` may be tried.
    pub(super) may_try: bool,
}

impl Slots {
    /// Creates an allocator without capacity, for slots in the first `bytes_max` bytes of the file.
    pub(super) fn new(bytes_max: u64) -> Self {
        let end = (bytes_max / PAGE_BYTES as u64).min(SLOTS_MAX) as u32;
        let state = Mutex::default();
        Self { state, end, capacity: AtomicU32::new(0), used: AtomicU32::new(0) }
    }

    /// Takes a run of adjacent free slots: `wanted_pages`, at most [`GROUP_SLOTS`], or the longest
    /// free run if none is that long. Returns `None` if that is shorter than `least_pages`.
    ///
    /// The caller frees the slots that it does not use.
    pub(crate) fn take(&self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        debug_assert!(0 < least_pages && least_pages <= wanted_pages);
        debug_assert!(wanted_pages <= GROUP_SLOTS, "{wanted_pages} pages");
        let mut state = self.state.lock();
        let run = state.choose(wanted_pages, least_pages)?;
        state.set(run, false);
        state.cursor = run.first + run.pages;
        self.used.fetch_add(run.pages, Ordering::Relaxed);
        Some(run)
    }

    /// Records that the storage has accepted or refused a write to slots that the caller owns.
    pub(crate) fn note_written(&self, run: SlotRun, is_written: bool) {
        let mut state = self.state.lock();
        let end = run.first + run.pages;
        if end > state.written_end {
            state.is_refused = !is_written;
            if is_written {
                state.written_end = end;
            } else {
                // A smaller run may fit there.
                state.cursor = state.written_end;
            }
        }
    }

    /// Frees slots that the caller owns; they may be parts of several runs.
    pub(crate) fn give_back(&self, run: SlotRun) {
        debug_assert!(run.first > HEADER_SLOT && run.first < self.end);
        self.state.lock().set(run, true);
        self.used.fetch_sub(run.pages, Ordering::Relaxed);
    }

    /// Adds [`GROUP_SLOTS`] slots to the capacity, or as many as are left up to the maximum. The
    /// caller has charged [`GROUP_BYTES`] and must release the charge if this returns `false`,
    /// which means that the capacity is at its maximum.
    #[must_use]
    pub(crate) fn grow(&self) -> bool {
        let mut state = self.state.lock();
        let start = state.groups.len() as u32 * GROUP_SLOTS;
        let end = self.end.saturating_sub(start).min(GROUP_SLOTS);
        let first = if start == HEADER_SLOT { HEADER_SLOT + 1 } else { 0 };
        if first >= end {
            return false;
        }
        let mut group = SlotGroup::default();
        group.set(first..end, true);
        self.capacity.fetch_add(group.free_slots(), Ordering::Relaxed);
        let number = state.groups.len() as u32;
        state.groups.push(group);
        state.reach.push(0);
        state.measure_around(number, number);
        true
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Returns the number of slots after as many calls of [`Self::grow`] as possible.
    pub(crate) fn capacity_max(&self) -> u32 {
        self.end.saturating_sub(HEADER_SLOT + 1)
    }

    pub(crate) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }
}

impl SlotsState {
    /// Chooses adjacent free slots: `wanted_pages` of them or fewer, but at least `least_pages`.
    /// While the storage refuses to grow, prefers slots that were written before, and tries new
    /// ones once in a while.
    fn choose(&mut self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        if self.is_refused {
            let found = self.find_written(wanted_pages, least_pages);
            if found.is_some() || !std::mem::replace(&mut self.may_try, false) {
                return found;
            }
        }
        let wanted_pages = if self.is_refused { least_pages } else { wanted_pages };
        let pages = wanted_pages.min(self.longest());
        if pages < least_pages {
            return None;
        }
        Some(SlotRun { first: self.find(pages)?, pages })
    }

    /// Returns the first long enough run of free slots that were written before, or else the
    /// longest one.
    fn find_written(&self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        let mut longest = SlotRun { first: 0, pages: 0 };
        let mut last = longest;
        let groups = self.written_end.div_ceil(GROUP_SLOTS);
        // Starts at the cursor and wraps around, so that a position that keeps failing is not tried
        // first each time.
        let from = (self.cursor / GROUP_SLOTS).min(groups);
        for group in (from..groups).chain(0..from) {
            let base = group * GROUP_SLOTS;
            for run in self.groups.get(group as usize).into_iter().flat_map(|group| group.runs(0)) {
                let (first, end) = (base + run.start, (base + run.end).min(self.written_end));
                let pages = end.saturating_sub(first);
                let follows = first > 0 && last.first + last.pages == first;
                let (first, pages) =
                    if follows { (last.first, last.pages + pages) } else { (first, pages) };
                last = SlotRun { first, pages };
                if pages >= wanted_pages {
                    return Some(SlotRun { first, pages: wanted_pages });
                }
                if pages > longest.pages {
                    longest = last;
                }
            }
        }
        (longest.pages >= least_pages).then_some(longest)
    }

    /// Returns the length of the longest run of free slots, at most [`GROUP_SLOTS`].
    pub(super) fn longest(&self) -> u32 {
        self.reach.iter().max().map_or(0, |reach| (*reach).into())
    }

    /// Returns the first slot of a run of `pages` free slots, searching from the cursor and then
    /// from the start.
    fn find(&self, pages: u32) -> Option<u32> {
        let group = (self.cursor / GROUP_SLOTS) as usize;
        let ahead = self.run_in(group, self.cursor % GROUP_SLOTS, pages);
        ahead
            .or_else(|| self.run_in(self.next_reaching(group + 1, pages)?, 0, pages))
            .or_else(|| self.run_in(self.next_reaching(0, pages)?, 0, pages))
    }

    /// Returns the first slot of a run of `pages` free slots that begins in `group`, at or after
    /// `from`.
    fn run_in(&self, group: usize, from: u32, pages: u32) -> Option<u32> {
        let mut runs = self.groups.get(group)?.runs(from);
        let run =
            runs.find(|run| run.end - run.start + self.head_after(group, run.end) >= pages)?;
        Some(group as u32 * GROUP_SLOTS + run.start)
    }

    /// Returns how far a run that ends at `end` of `group` extends into the next group.
    fn head_after(&self, group: usize, end: u32) -> u32 {
        let next = self.groups.get(group + 1).filter(|_| end == GROUP_SLOTS);
        next.map_or(0, SlotGroup::head)
    }

    /// Returns the first group at or after `from` in which a run of `pages` slots begins.
    fn next_reaching(&self, from: usize, pages: u32) -> Option<usize> {
        let mut reach = self.reach.iter().skip(from);
        reach.position(|reach| u32::from(*reach) >= pages).map(|place| from + place)
    }

    /// Marks the slots of a run as free or used. All of them must be in the other state.
    fn set(&mut self, run: SlotRun, free: bool) {
        let mut start = run.first;
        let end = run.first + run.pages;
        while start < end {
            let number = start / GROUP_SLOTS;
            let base = number * GROUP_SLOTS;
            let slots = start - base..(end - base).min(GROUP_SLOTS);
            let group = &mut self.groups[number as usize];
            debug_assert!(
                group.is_all(slots.clone(), !free),
                "cannot set free = {free} for {run:?}: some of its slots have that state already"
            );
            start = base + slots.end;
            group.set(slots, free);
        }
        self.measure_around(run.first / GROUP_SLOTS, (end - 1) / GROUP_SLOTS);
    }

    /// Updates the reach of the changed groups from `first` to `last`, and of the group before,
    /// whose runs may extend into them.
    fn measure_around(&mut self, first: u32, last: u32) {
        for group in first.saturating_sub(1) as usize..=last as usize {
            let runs = self.groups[group].runs(0);
            let lengths = runs.map(|run| run.end - run.start + self.head_after(group, run.end));
            self.reach[group] = lengths.max().unwrap_or(0).min(GROUP_SLOTS) as u16;
        }
    }
}

pub(crate) const GROUP_SLOTS: u32 = 512;
const WORD_SLOTS: u32 = u64::BITS;
const WORDS: usize = (GROUP_SLOTS / WORD_SLOTS) as usize;

#[derive(Clone, Debug, Default)]
pub(super) struct SlotGroup {
    free: [u64; WORDS],
}

impl SlotGroup {
    pub(super) fn head(&self) -> u32 {
        self.next(0, false)
    }

    pub(super) fn free_slots(&self) -> u32 {
        self.free.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns `true` if all of `slots` are free, or, with `free` unset, all are used.
    pub(super) fn is_all(&self, slots: Range<u32>, free: bool) -> bool {
        self.next(slots.start, !free) >= slots.end
    }

    pub(super) fn set(&mut self, slots: Range<u32>, free: bool) {
        for (number, word) in (0..).zip(&mut self.free) {
            let base = number * WORD_SLOTS;
            let start = slots.start.clamp(base, base + WORD_SLOTS) - base;
            let end = slots.end.clamp(base, base + WORD_SLOTS) - base;
            if start < end {
                let mask = (u64::MAX >> (WORD_SLOTS - (end - start))) << start;
                *word = if free { *word | mask } else { *word & !mask };
            }
        }
    }

    /// Returns the runs of free slots at and after `from`, cut at the end of the group.
    pub(super) fn runs(&self, from: u32) -> impl Iterator<Item = Range<u32>> {
        let mut end = from;
        iter::from_fn(move || {
            let start = self.next(end, true);
            end = self.next(start, false);
            (start < GROUP_SLOTS).then_some(start..end)
        })
    }

    /// Returns the first slot at or after `from` that is free (or used, with `free` unset), or
    /// [`GROUP_SLOTS`] if there is none.
    fn next(&self, from: u32, free: bool) -> u32 {
        let mut slot = from;
        while slot < GROUP_SLOTS {
            let word = self.free[(slot / WORD_SLOTS) as usize];
            let ahead = (if free { word } else { !word }) >> (slot % WORD_SLOTS);
            if ahead != 0 {
                return slot + ahead.trailing_zeros();
            }
            slot = (slot / WORD_SLOTS + 1) * WORD_SLOTS;
        }
        GROUP_SLOTS
    }
}

const CHECKSUM_MASK: u64 = u32::MAX as u64;
const SHADOW_SHIFT: u32 = 32;
const _: () = assert!(VALUE_MAX << SHADOW_SHIFT >> SHADOW_SHIFT == VALUE_MAX);

/// Error for a page read from a slot that does not have the checksum of the page written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("its checksum is {found:#010x}, but {expected:#010x} was written")]
pub(crate) struct Mismatch {
    pub(crate) expected: u32,
    pub(crate) found: u32,
}

/// The words of all slots, one each: its shadow in bits 32 to 59, and below it the checksum of the
/// page that was written to it.
///
/// The checksum is the CRC-32 of the page: one that decayed, was torn, was misplaced by a transfer,
/// or is left from an earlier run passes only with a probability of 2^-32.
#[derive(Debug)]
pub(crate) struct SlotMetadata {
    words: ReservedArray<AtomicU64>,
}

impl SlotMetadata {
    pub(super) fn new(end: u32) -> io::Result<Self> {
        Ok(Self { words: ReservedArray::new(end as usize)? })
    }

    /// Stores the checksum of the page that is about to be written to a slot, and clears its
    /// shadow.
    pub(crate) fn seal(&self, slot: u32, page: &[u8; PAGE_BYTES]) {
        self.store(slot, crc32fast::hash(page).into());
    }

    pub(crate) fn check(&self, slot: u32, page: &[u8; PAGE_BYTES]) -> Result<(), Mismatch> {
        let expected = (self.load(slot) & CHECKSUM_MASK) as u32;
        let found = crc32fast::hash(page);
        if found == expected { Ok(()) } else { Err(Mismatch { expected, found }) }
    }

    pub(crate) fn set_shadow(&self, slot: u32, shadow: Shadow) {
        debug_assert!(shadow.0 <= VALUE_MAX, "{shadow:?}");
        self.store(slot, (self.load(slot) & CHECKSUM_MASK) | (shadow.0 << SHADOW_SHIFT));
    }

    pub(crate) fn shadow(&self, slot: u32) -> Shadow {
        Shadow(self.load(slot) >> SHADOW_SHIFT)
    }

    fn load(&self, slot: u32) -> u64 {
        // Relaxed: the caller owns the slot, and got it from its last owner (SWAP-1).
        self.words.get(slot as usize).load(Ordering::Relaxed)
    }

    fn store(&self, slot: u32, word: u64) {
        // Relaxed: as in `load`.
        self.words.get(slot as usize).store(word, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    const PAGE: u64 = 4096;

    fn with_groups(bytes_max: u64, groups: u32) -> Slots {
        let slots = Slots::new(bytes_max);
        for _ in 0..groups {
            assert!(slots.grow());
        }
        slots
    }

    fn run(first: u32, pages: u32) -> Option<SlotRun> {
        Some(SlotRun { first, pages })
    }

    /// A reference allocator that searches slot by slot.
    struct Model {
        is_free: Vec<bool>,
        cursor: usize,
    }

    impl Model {
        /// Returns the number of free slots from each slot on, at most a group.
        fn lengths(&self) -> Vec<u32> {
            let mut lengths = vec![0; self.is_free.len()];
            let mut length = 0;
            for (slot, is_free) in self.is_free.iter().enumerate().rev() {
                length = if *is_free { GROUP_SLOTS.min(length + 1) } else { 0 };
                lengths[slot] = length;
            }
            lengths
        }

        fn take(&mut self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
            let lengths = self.lengths();
            let pages = wanted_pages.min(*lengths.iter().max()?);
            let fits = |slot: &usize| lengths[*slot] >= pages;
            let first = (self.cursor..lengths.len()).find(fits);
            let first = first.or_else(|| (0..lengths.len()).find(fits))?;
            if pages < least_pages {
                return None;
            }
            self.cursor = first + pages as usize;
            self.is_free[first..self.cursor].fill(false);
            run(first as u32, pages)
        }

        fn give_back(&mut self, run: SlotRun) {
            self.is_free[run.first as usize..][..run.pages as usize].fill(true);
        }

        fn grow(&mut self, slots_max: usize) -> bool {
            let before = self.is_free.len();
            self.is_free.resize(slots_max.min(before + GROUP_SLOTS as usize), true);
            self.is_free[0] = false;
            self.is_free.len() > before
        }
    }

    /// Removes a part of a random run, so that runs split into fragments and merge again.
    fn pick(random: &mut Rng, taken: &mut Vec<SlotRun>) -> SlotRun {
        let picked = taken.swap_remove(random.usize(..taken.len()));
        let skipped = random.u32(..picked.pages);
        let pages = random.u32(1..=picked.pages - skipped);
        let (part, rest) = (picked.first + skipped, picked.first + skipped + pages);
        let sides = [(picked.first, skipped), (rest, picked.pages - skipped - pages)];
        let sides = sides.into_iter().filter(|(_, pages)| *pages > 0);
        taken.extend(sides.map(|(first, pages)| SlotRun { first, pages }));
        SlotRun { first: part, pages }
    }

    fn compare_with_model(seed: u64) {
        let mut random = Rng::with_seed(seed);
        let slots_max = random.u32(2..14 * GROUP_SLOTS);
        let slots = Slots::new(u64::from(slots_max) * PAGE + random.u64(..PAGE));
        let mut model = Model { is_free: Vec::new(), cursor: 0 };
        let mut taken: Vec<SlotRun> = Vec::new();
        let pages_max = [1, 8, 64, GROUP_SLOTS][random.usize(..4)];
        for _ in 0..600 {
            let tide = random.u32(..10);
            if tide == 0 && random.bool() {
                assert_eq!(slots.grow(), model.grow(slots_max as usize));
            } else if tide < 6 && !model.is_free.is_empty() {
                let wanted = random.u32(1..=pages_max);
                let least = random.u32(1..=wanted);
                let found = slots.take(wanted, least);
                assert_eq!(found, model.take(wanted, least), "seed {seed}, {wanted}, {least}");
                taken.extend(found);
            } else if !taken.is_empty() {
                let freed = pick(&mut random, &mut taken);
                slots.give_back(freed);
                model.give_back(freed);
            }
            let used: u32 = taken.iter().map(|run| run.pages).sum();
            assert_eq!(slots.used(), used);
            assert_eq!(slots.capacity() as usize, model.is_free.len().saturating_sub(1));
        }
    }

    #[test]
    fn slots_equal_those_of_the_reference_allocator() {
        for seed in 0..60 {
            compare_with_model(seed);
        }
    }

    #[test]
    fn runs_are_adjacent_and_wrap_around_to_freed_slots() {
        let slots = with_groups(1 << 30, 2);
        assert_eq!(slots.take(30, 1), run(1, 30));
        assert_eq!(slots.take(481, 1), run(31, 481));
        slots.give_back(SlotRun { first: 1, pages: 30 });
        assert_eq!(slots.take(30, 1), run(512, 30), "has not wrapped around yet");
        assert_eq!(slots.take(482, 1), run(542, 482));
        assert_eq!(slots.take(30, 1), run(1, 30));
        assert_eq!(slots.take(1, 1), None);
    }

    #[test]
    fn a_long_enough_run_is_preferred_to_a_nearer_short_one() {
        let slots = with_groups(1 << 30, 2);
        while slots.take(1, 1).is_some() {}
        for (first, pages) in [(5, 40), (600, 8), (510, 4)] {
            slots.give_back(SlotRun { first, pages });
        }
        slots.state.lock().cursor = 500;
        assert_eq!(slots.take(4, 4), run(510, 4), "across two groups");
        assert_eq!(slots.take(9, 1), run(5, 9));
        assert_eq!(slots.take(512, 1), run(14, 31), "the longest there is");
        assert_eq!(slots.take(512, 9), None);
        assert_eq!(slots.take(512, 8), run(600, 8));
    }

    #[test]
    fn the_capacity_ends_at_the_maximum_file_size() {
        for (bytes_max, expected) in
            [(0, 0), (PAGE, 0), (2 * PAGE - 1, 0), (2 * PAGE, 1), (512 * PAGE, 511)]
        {
            let slots = Slots::new(bytes_max);
            assert_eq!(slots.capacity_max(), expected);
            assert_eq!((slots.take(1, 1), slots.used()), (None, 0), "no slot before grow");
            assert_eq!(slots.grow(), expected > 0);
            assert!(!slots.grow());
            assert_eq!(slots.capacity(), expected);
        }
        let slots = with_groups(1000 * PAGE, 2);
        assert!(!slots.grow());
        assert_eq!((slots.capacity(), slots.capacity_max()), (999, 999));
        let mut taken = vec![false; 1000];
        while let Some(run) = slots.take(7, 1) {
            for slot in run.first..run.first + run.pages {
                assert!(slot > 0 && !std::mem::replace(&mut taken[slot as usize], true));
            }
        }
        assert_eq!((slots.used(), taken.iter().filter(|taken| **taken).count()), (999, 999));
    }

    #[test]
    fn the_largest_file_has_as_many_slots_as_an_entry_can_name() {
        for bytes_max in [1 << 40, (1 << 40) + PAGE, u64::MAX] {
            let slots = Slots::new(bytes_max);
            assert_eq!(slots.end, 1 << 28);
            assert_eq!(u64::from(slots.capacity_max()), VALUE_MAX);
        }
        assert_eq!(Slots::new((1 << 40) - 1).end, (1 << 28) - 1);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_slot_that_is_free_cannot_be_given_back() {
        let slots = with_groups(1 << 30, 1);
        let taken = slots.take(4, 4).unwrap();
        slots.give_back(taken);
        for freed in [taken, SlotRun { first: 100, pages: 1 }, SlotRun { first: 0, pages: 1 }] {
            let again = std::panic::AssertUnwindSafe(|| slots.give_back(freed));
            assert!(std::panic::catch_unwind(again).is_err(), "{freed:?}");
        }
    }

    #[test]
    fn threads_never_get_the_same_slot() {
        let slots = with_groups(1 << 30, 4);
        let owners: Vec<_> = (0..slots.end).map(|_| AtomicU32::new(0)).collect();
        let work = |owner: u32| {
            let mut random = Rng::with_seed(owner.into());
            let mut taken = Vec::new();
            for _ in 0..2000 {
                if let Some(run) = slots.take(random.u32(1..=64), 1) {
                    for slot in run.first..run.first + run.pages {
                        let before = owners[slot as usize].swap(owner, Ordering::Relaxed);
                        assert_eq!(before, 0, "slot {slot}");
                    }
                    taken.push(run);
                }
                if taken.len() > 20 {
                    let run = taken.swap_remove(random.usize(..taken.len()));
                    for slot in run.first..run.first + run.pages {
                        owners[slot as usize].store(0, Ordering::Relaxed);
                    }
                    slots.give_back(run);
                }
            }
            taken.iter().map(|run| run.pages).sum::<u32>()
        };
        let kept: u32 = std::thread::scope(|scope| {
            let threads = [1, 2, 3].map(|owner| scope.spawn(move || work(owner)));
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(slots.used(), kept);
    }

    fn with_free(ranges: &[Range<u32>]) -> SlotGroup {
        let mut group = SlotGroup::default();
        for range in ranges {
            group.set(range.clone(), true);
        }
        group
    }

    fn all_free() -> SlotGroup {
        SlotGroup { free: [u64::MAX; WORDS] }
    }

    #[test]
    fn runs_are_found_across_words_and_at_both_ends() {
        let ranges = [0..3, 60..70, 127..129, 192..256, 511..512];
        let group = with_free(&ranges);
        assert_eq!(group.runs(0).collect::<Vec<_>>(), ranges);
        assert_eq!(group.runs(65).next(), Some(65..70));
        assert_eq!(group.runs(70).next(), Some(127..129));
        assert_eq!((group.runs(510).next(), group.runs(510).count()), (Some(511..512), 1));
        assert_eq!((group.head(), group.free_slots()), (3, 3 + 10 + 2 + 64 + 1));
        assert_eq!(with_free(&[]).runs(0).next(), None);
        assert_eq!(all_free().head(), GROUP_SLOTS);
    }

    #[test]
    fn set_changes_exactly_the_slots_of_its_range() {
        for range in [0..1, 63..64, 63..65, 0..64, 64..128, 5..200, 448..512, 0..512] {
            let set = with_free(std::slice::from_ref(&range));
            let mut cleared = all_free();
            cleared.set(range.clone(), false);
            for slot in 0..GROUP_SLOTS {
                assert_eq!(set.is_all(slot..slot + 1, true), range.contains(&slot), "{range:?}");
                assert_eq!(cleared.is_all(slot..slot + 1, false), range.contains(&slot));
            }
            assert!(set.is_all(range.clone(), true) && cleared.is_all(range.clone(), false));
            assert!(range.end == GROUP_SLOTS || !set.is_all(range.start..range.end + 1, true));
        }
    }

    const END: u32 = (VALUE_MAX + 1) as u32;

    fn page_of(byte: u8) -> [u8; PAGE_BYTES] {
        let mut page = [byte; PAGE_BYTES];
        page[17] = 17;
        page
    }

    #[test]
    fn a_page_passes_where_it_was_sealed_and_any_other_bit_fails() {
        let words = SlotMetadata::new(END).unwrap();
        for slot in [1, 2, 511, END - 1] {
            words.seal(slot, &page_of(1));
            assert_eq!(words.check(slot, &page_of(1)), Ok(()));
            for bit in [0, 1, 4095 * 8, 4096 * 8 - 1] {
                let mut changed = page_of(1);
                changed[bit / 8] ^= 1 << (bit % 8);
                let Mismatch { expected, found } = words.check(slot, &changed).unwrap_err();
                assert_ne!(expected, found);
                assert_eq!(expected, crc32fast::hash(&page_of(1)));
            }
        }
    }

    #[test]
    fn the_page_of_another_slot_fails() {
        let words = SlotMetadata::new(END).unwrap();
        words.seal(1, &page_of(1));
        words.seal(2, &page_of(2));
        assert!(words.check(1, &page_of(2)).is_err());
        assert!(words.check(2, &page_of(1)).is_err());
        assert_eq!(words.check(2, &page_of(2)), Ok(()));
    }

    #[test]
    fn no_page_passes_for_a_slot_that_was_never_sealed() {
        let words = SlotMetadata::new(16).unwrap();
        assert!(words.check(1, &[0; PAGE_BYTES]).is_err());
        assert!(words.check(2, &page_of(1)).is_err());
    }

    #[test]
    fn shadow_and_checksum_are_independent() {
        let words = SlotMetadata::new(16).unwrap();
        words.seal(3, &page_of(1));
        assert_eq!(words.shadow(3), Shadow(0));
        for shadow in [VALUE_MAX, 1, 0x0ABC_DEF0] {
            words.set_shadow(3, Shadow(shadow));
            assert_eq!(words.shadow(3), Shadow(shadow));
            assert_eq!(words.check(3, &page_of(1)), Ok(()));
        }
        assert_eq!((words.shadow(2), words.shadow(4)), (Shadow(0), Shadow(0)));
        words.seal(3, &page_of(2));
        assert_eq!(words.shadow(3), Shadow(0), "a new page has no shadow");
        assert_eq!(words.check(3, &page_of(2)), Ok(()));
    }
}
