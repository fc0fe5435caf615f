//! Which slots of the swap file are in use.
//!
//! Called by [`Swap`](super::Swap), under one lock. Runs of slots are handed out in the order of
//! their places: each search goes on where the last one ended (next fit), so that what leaves
//! memory one after the other lies in the file one behind the other, as in a log. It comes round to
//! what was freed meanwhile when it reaches the end.
//!
//! A search never looks at single slots where it can know better:
//!
//! ```text
//!   group reach   [ 512 ............ | 31 ............ | 4 ...    the largest of 512 groups
//!   group reach    [ 512 | 0 | 7 | 40 |                            longest run that begins there
//!   groups         [ bit a slot, 512  |                            slot_group.rs
//! ```
//!
//! A run is at most a group long, so one that begins in a group ends in it or in the next, and two
//! neighbours are all that must be looked at to know the reach of a group. So the longest run there
//! is, and then the first one of a length after the cursor, are found exactly, in some thousand
//! comparisons when the file has a TiB and is full of fragments.
//!
//! Storage may be refused for less than the capacity: the device is full. What was written once has
//! storage, so then runs come from there, however short, and only one a round from beyond, to find
//! out whether there is room again. Such a search looks at all groups.
//!
//! Metadata exists for slots up to the capacity, which grows by groups, as pages come to exist that
//! may need a slot. It never shrinks: groups that were once needed stay, and what is freed in them
//! is used again before anything grows.

use super::slot_group::{GROUP_SLOTS, SlotGroup};
use crate::page::VALUE_MAX;
use crate::sync::{AtomicU32, Mutex, Ordering};

/// The cost of a group, bytes: a word for each slot (`slot_metadata.rs`), and its bits and reach,
/// counted three times, because a vector that grows may hold them so often for a moment.
pub(crate) const GROUP_BYTES: u64 =
    GROUP_SLOTS as u64 * size_of::<u64>() as u64 + BOOKKEEPING_BYTES;
const BOOKKEEPING_BYTES: u64 = 256;
const _: () =
    assert!(3 * (size_of::<SlotGroup>() + 2 * size_of::<u16>()) <= BOOKKEEPING_BYTES as usize);

/// Slots there can be, slot 0 included: a value Entry names each (SWAP-2).
pub(super) const SLOTS_MAX: u64 = VALUE_MAX + 1;
/// The slot that is never handed out: 0 stands for "none" in a descriptor.
const HEADER_SLOT: u32 = 0;
/// Steps whose largest reach is kept; few in tests, so that a search crosses many groups.
const GROUP_STEPS: usize = if cfg!(test) { 3 } else { 512 };

/// Slots in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRun {
    /// The first one.
    pub(crate) first: u32,
    /// How many, one for each page.
    pub(crate) pages: u32,
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Slots {
    state: Mutex<State>,
    /// Slots from this one on are never handed out.
    end: u32,
    /// Mirror of the state's, for who only looks.
    capacity: AtomicU32,
    used: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    groups: Vec<SlotGroup>,
    /// The longest run of free slots that begins in a group, at most [`GROUP_SLOTS`].
    reach: Vec<u16>,
    /// The largest reach in each group of groups.
    group_reach: Vec<u16>,
    /// Where the next search begins.
    cursor: u32,
    /// One more than the highest slot that was ever written.
    written_end: u32,
    /// The last write beyond that was refused.
    is_refused: bool,
    /// Whether one more may be tried all the same.
    may_try: bool,
}

impl Slots {
    /// No slots yet; later, those whose pages lie in the first `bytes_max` bytes of the file.
    pub(super) fn new(bytes_max: u64) -> Self {
        let end = (bytes_max / super::PAGE_BYTES as u64).min(SLOTS_MAX) as u32;
        let state = Mutex::default();
        Self { state, end, capacity: AtomicU32::new(0), used: AtomicU32::new(0) }
    }

    /// One more than the highest slot there can be.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// See [`Swap::take`](super::Swap::take).
    pub(super) fn take(&self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        debug_assert!(0 < least_pages && least_pages <= wanted_pages);
        debug_assert!(wanted_pages <= GROUP_SLOTS, "{wanted_pages} pages");
        let mut state = self.state.lock();
        let run = state.choose(wanted_pages, least_pages)?;
        state.set(run, false);
        state.cursor = run.first + run.pages;
        self.used.fetch_add(run.pages, Ordering::Relaxed);
        Some(run)
    }

    /// A run, whose owner the caller is, was written, or refused by the storage.
    pub(super) fn note_written(&self, run: SlotRun, is_written: bool) {
        let mut state = self.state.lock();
        let end = run.first + run.pages;
        if end > state.written_end {
            state.is_refused = !is_written;
            if is_written {
                state.written_end = end;
            } else {
                // A smaller one may find room there.
                state.cursor = state.written_end;
            }
        }
    }

    /// A round begins: if the storage refuses more, it is asked once more.
    pub(super) fn try_again(&self) {
        self.state.lock().may_try = true;
    }

    /// Where the next search begins.
    pub(super) fn next(&self) -> u32 {
        self.state.lock().cursor
    }

    /// See [`Swap::give_back`](super::Swap::give_back).
    pub(super) fn give_back(&self, run: SlotRun) {
        debug_assert!(run.first > HEADER_SLOT && run.first < self.end);
        self.state.lock().set(run, true);
        self.used.fetch_sub(run.pages, Ordering::Relaxed);
    }

    /// Adds a group; `false` if there is one for every slot.
    pub(super) fn grow(&self) -> bool {
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
        state.push(group);
        true
    }

    /// The longest run of free slots, up to [`GROUP_SLOTS`].
    pub(super) fn longest(&self) -> u32 {
        self.state.lock().longest()
    }

    /// Slots for which there is metadata.
    pub(super) fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Slots there can be metadata for.
    pub(super) fn capacity_max(&self) -> u32 {
        self.end.saturating_sub(HEADER_SLOT + 1)
    }

    /// Slots that are taken.
    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }
}

impl State {
    /// The run of free slots that is handed out next.
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

    /// The longest run of free slots that were written once, or the first one that is long enough.
    fn find_written(&self, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        let mut longest = SlotRun { first: 0, pages: 0 };
        let mut last = longest;
        let groups = self.written_end.div_ceil(GROUP_SLOTS);
        // From the cursor on, and round: a place that fails again and again is not the first each
        // time.
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

    /// The longest run of free slots there is, at most [`GROUP_SLOTS`].
    fn longest(&self) -> u32 {
        self.group_reach.iter().max().map_or(0, |reach| (*reach).into())
    }

    /// The first slot of so many free ones: the first such place after the cursor, or, from the
    /// start on, the first of all.
    fn find(&self, pages: u32) -> Option<u32> {
        let group = (self.cursor / GROUP_SLOTS) as usize;
        let ahead = self.run_in(group, self.cursor % GROUP_SLOTS, pages);
        ahead
            .or_else(|| self.run_in(self.next_reaching(group + 1, pages)?, 0, pages))
            .or_else(|| self.run_in(self.next_reaching(0, pages)?, 0, pages))
    }

    /// The first slot of so many free ones, among those that begin in `group`, at or after `from`.
    fn run_in(&self, group: usize, from: u32, pages: u32) -> Option<u32> {
        let mut runs = self.groups.get(group)?.runs(from);
        let run =
            runs.find(|run| run.end - run.start + self.head_after(group, run.end) >= pages)?;
        Some(group as u32 * GROUP_SLOTS + run.start)
    }

    /// How much longer a run is that ends at `end` of `group`, because the next group goes on.
    fn head_after(&self, group: usize, end: u32) -> u32 {
        let next = self.groups.get(group + 1).filter(|_| end == GROUP_SLOTS);
        next.map_or(0, SlotGroup::head)
    }

    /// The first group at or after `from` in which a run of so many pages begins.
    fn next_reaching(&self, from: usize, pages: u32) -> Option<usize> {
        let mut group = from;
        while group < self.groups.len() {
            let is_start = group.is_multiple_of(GROUP_STEPS);
            if is_start && u32::from(self.group_reach[group / GROUP_STEPS]) < pages {
                group += GROUP_STEPS;
            } else if u32::from(self.reach[group]) < pages {
                group += 1;
            } else {
                return Some(group);
            }
        }
        None
    }

    /// Marks the slots of a run, all of which are the other way now.
    fn set(&mut self, run: SlotRun, free: bool) {
        let mut start = run.first;
        let end = run.first + run.pages;
        while start < end {
            let number = start / GROUP_SLOTS;
            let base = number * GROUP_SLOTS;
            let slots = start - base..(end - base).min(GROUP_SLOTS);
            let group = &mut self.groups[number as usize];
            debug_assert!(group.is_all(slots.clone(), !free), "free is already {free}: {run:?}");
            start = base + slots.end;
            group.set(slots, free);
        }
        self.measure_around(run.first / GROUP_SLOTS, (end - 1) / GROUP_SLOTS);
    }

    fn push(&mut self, group: SlotGroup) {
        let number = self.groups.len();
        self.groups.push(group);
        self.reach.push(0);
        if number.is_multiple_of(GROUP_STEPS) {
            self.group_reach.push(0);
        }
        self.measure_around(number as u32, number as u32);
    }

    /// Measures the groups from `first` to `last`, which have changed, and the one before: runs
    /// that begin there may now end elsewhere.
    fn measure_around(&mut self, first: u32, last: u32) {
        for group in first.saturating_sub(1)..=last {
            self.measure(group as usize);
        }
    }

    /// Finds out the reach of a group, and that of its group.
    fn measure(&mut self, group: usize) {
        let runs = self.groups[group].runs(0);
        let lengths = runs.map(|run| run.end - run.start + self.head_after(group, run.end));
        let reach = lengths.max().unwrap_or(0).min(GROUP_SLOTS) as u16;
        self.reach[group] = reach;
        let group = group / GROUP_STEPS;
        let groups = group * GROUP_STEPS..self.groups.len().min((group + 1) * GROUP_STEPS);
        self.group_reach[group] = self.reach[groups].iter().copied().max().unwrap_or(0);
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

    /// The same, in the plainest way.
    struct Model {
        is_free: Vec<bool>,
        cursor: usize,
    }

    impl Model {
        /// Free slots from each slot on, at most a group of them.
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

    /// A part of a random run, so that runs break into fragments and grow together again.
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
    fn slots_are_those_that_a_plain_search_finds() {
        for seed in 0..60 {
            compare_with_model(seed);
        }
    }

    #[test]
    fn runs_follow_each_other_and_come_round_to_what_was_freed() {
        let slots = with_groups(1 << 30, 2);
        assert_eq!(slots.take(30, 1), run(1, 30));
        assert_eq!(slots.take(481, 1), run(31, 481));
        slots.give_back(SlotRun { first: 1, pages: 30 });
        assert_eq!(slots.take(30, 1), run(512, 30), "not back to the start yet");
        assert_eq!(slots.take(482, 1), run(542, 482));
        assert_eq!(slots.take(30, 1), run(1, 30));
        assert_eq!(slots.take(1, 1), None);
    }

    #[test]
    fn a_whole_stretch_elsewhere_is_better_than_a_part_here() {
        let slots = with_groups(1 << 30, 2);
        while slots.take(1, 1).is_some() {}
        for (first, pages) in [(5, 40), (600, 8), (510, 4)] {
            slots.give_back(SlotRun { first, pages });
        }
        slots.state.lock().cursor = 500;
        assert_eq!(slots.take(4, 4), run(510, 4), "across the groups");
        assert_eq!(slots.take(9, 1), run(5, 9));
        assert_eq!(slots.take(512, 1), run(14, 31), "the longest there is");
        assert_eq!(slots.take(512, 9), None);
        assert_eq!(slots.take(512, 8), run(600, 8));
    }

    #[test]
    fn the_capacity_ends_where_the_file_may() {
        for (bytes_max, expected) in
            [(0, 0), (PAGE, 0), (2 * PAGE - 1, 0), (2 * PAGE, 1), (512 * PAGE, 511)]
        {
            let slots = Slots::new(bytes_max);
            assert_eq!(slots.capacity_max(), expected);
            assert_eq!((slots.take(1, 1), slots.used()), (None, 0), "nothing before it has grown");
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
            assert_eq!(slots.end(), 1 << 28);
            assert_eq!(u64::from(slots.capacity_max()), VALUE_MAX);
        }
        assert_eq!(Slots::new((1 << 40) - 1).end(), (1 << 28) - 1);
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
        let owners: Vec<_> = (0..slots.end()).map(|_| AtomicU32::new(0)).collect();
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
}
