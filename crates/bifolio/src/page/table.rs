//! The table of a mapping: a flat array of Entries, reserved at once and populated on first touch
//! ([`ReservedArray`]).
//!
//! The array never moves, because readers follow its address without a lock. The thread that
//! inserts charges what it touches ([`Table::is_charged`]), one table page (512 Entries) at a time.
//! Walks visit only charged pages, found through [`Bitmap`]. (The bitmap itself is not charged; one
//! page of it covers 64 GiB of file.)
//!
//! A table that must become longer ([`Table::reserve`]) gets another array for the pages after its
//! end, a [`Segment`]; those before stay in place. Each segment at least doubles the table, so few
//! are ever searched, and the hit path addresses the first directly. An extension is published
//! (Release, in `OnceLock::set`) before the limit of the length is raised, and the limit before any
//! page beyond the old one is in the table or below the length. So whatever tells a thread of such
//! a page also orders its search (Acquire, in `OnceLock::get`) after the publication.
//!
//! PROTOCOL TABLE. A table page without a folio and without a swap slot holds only holes and
//! shadows, which are hints. When memory for metadata is short, such pages are returned to the
//! kernel. They stay mapped and read as zeros, which are holes, so readers are not affected.
//!
//! ```text
//!  FILL, before a folio is inserted            RETURN PAGES
//!  T1 fillers + 1; CLOSED? undo, wait,         G1 fillers 0 -> CLOSED; else give up
//!     retry                                    G2 a charged page: does any Entry name a folio
//!  T2 charged? else charge, set the bit           or a slot? then skip it
//!  T3 insert (READ-I1..I2)                     G3 free the memory, clear the bit, uncharge
//!  T4 fillers - 1                              G4 reopen
//! ```
//!
//! Only T3 makes an Entry name a folio where none did (MAPPING-1): evictions, removals and
//! relocations store over Entries of a folio, and store its first page, which G2 checks first,
//! last. So between G1 and G4 a page that passed G2 does not change.
//!
//! A filler takes free frames between T1 and T3. If there are none, or the page cannot be charged,
//! it undoes T1 and reclaims, which may free this very page: then it does both again after T1,
//! once, and waits for memory from elsewhere.
//!
//! A reader that is preempted between its load of an Entry and its exchange of the mark may touch a
//! page that was freed in between: 4 KiB are then resident and not charged until the page is
//! charged again or the file is closed.
//!
//! Longer than 600 lines only with its tests, which use its private items.
//!
//! # Safety
//! Reserved memory is read as values that are valid when zero ([`ZeroValid`]).
#![allow(unsafe_code)]

use super::entry::{Entry, PAGE_BYTES};
use crate::sync::{AtomicU8, AtomicU64, Backoff, Ordering, store_owned};
use crate::sys::copy;
#[cfg(not(all(test, loom)))]
pub(crate) use crate::sys::memory::MemorySource;
#[cfg(not(all(test, loom)))]
use crate::sys::memory::{PAGE_BYTES as KERNEL_PAGE_BYTES, Reservation};
#[cfg(not(all(test, loom)))]
use std::marker::PhantomData;
#[cfg(not(all(test, loom)))]
use std::ops::Range;
use std::sync::OnceLock;

/// In a model run, the elements are in a vector.
#[cfg(all(test, loom))]
pub(crate) use crate::sync::{MemorySource, ReservedArray};

/// Types for which zero bytes are a valid value, and which are shared between threads.
///
/// # Safety
/// All-zero memory must be a valid `Self`, and `Self` must not need dropping.
pub(crate) unsafe trait ZeroValid: Sync + Send + Default {}

// SAFETY: an atomic word is valid when zero and needs no dropping.
unsafe impl ZeroValid for AtomicU64 {}

/// A fixed-size array of shared words in reserved memory: zero until touched, never moved, because
/// it is read without locks. A forked child sees zeros or, where the kernel cannot wipe, its own
/// copy.
#[cfg(not(all(test, loom)))]
#[derive(Debug)]
pub(crate) struct ReservedArray<T> {
    memory: Reservation,
    length: usize,
    elements: PhantomData<T>,
}

#[cfg(not(all(test, loom)))]
impl<T: ZeroValid> ReservedArray<T> {
    pub(crate) fn new(length: usize) -> std::io::Result<Self> {
        Self::new_in(&MemorySource::Private, length)
    }

    pub(crate) fn new_in(source: &MemorySource, length: usize) -> std::io::Result<Self> {
        let bytes = length.checked_mul(size_of::<T>());
        let bytes = bytes.ok_or(std::io::ErrorKind::OutOfMemory)?;
        let memory = Reservation::new_in(source, bytes, align_of::<T>())?;
        memory.wipe_on_fork();
        // Pages are charged as they are touched, so none may be larger.
        memory.refuse_huge_pages();
        Ok(Self { memory, length, elements: PhantomData })
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns an element. Panics past the end.
    #[inline(always)]
    pub(crate) fn get(&self, index: usize) -> &T {
        assert!(index < self.length, "element {index} of {}", self.length);
        // SAFETY: inside the reservation, aligned by `new`, zero or a value that was stored through
        // `&T` (ZeroValid), and mapped as long as `self`.
        unsafe { &*self.as_ptr().wrapping_add(index) }
    }

    /// Returns the pages of some elements to the kernel: they are zero afterwards. The elements
    /// must fill whole pages, except at the end of the array. Returns `true` on success. (In a
    /// model run `reset` zeroes them.)
    fn release(&self, elements: Range<usize>, _reset: impl Fn(&T)) -> bool {
        let bytes = elements.start * size_of::<T>()..elements.end * size_of::<T>();
        let length_bytes = (bytes.end - bytes.start).next_multiple_of(KERNEL_PAGE_BYTES);
        self.memory.release(bytes.start, length_bytes).is_ok()
    }

    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const T {
        self.memory.base.cast()
    }

    fn source(&self) -> MemorySource {
        self.memory.source()
    }

    /// Returns the offset of the first element in the shared memory; `None` in private memory.
    pub(super) fn shared_offset(&self) -> Option<u64> {
        self.memory.shared_place().map(|(_, offset_bytes)| offset_bytes)
    }
}

/// Entries per table page, the unit of charging.
const ENTRIES_PER_TABLE_PAGE: u64 = if cfg!(all(test, loom)) { 4 } else { 512 };
pub(crate) const TABLE_PAGE_BYTES: u64 = 4096;

#[derive(Debug)]
struct Segment {
    /// First page of the segment, which begins a table page.
    first_page: u64,
    entries: ReservedArray<AtomicU64>,
    /// One bit per charged table page, counted from the first of the segment.
    charged: Bitmap,
    next: OnceLock<Box<Segment>>,
}

impl Segment {
    fn new(source: &MemorySource, first_page: u64, pages: u64) -> std::io::Result<Self> {
        let table_pages = pages.div_ceil(ENTRIES_PER_TABLE_PAGE);
        let entries = usize::try_from(table_pages * ENTRIES_PER_TABLE_PAGE);
        let entries = entries.map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            first_page,
            entries: ReservedArray::new_in(source, entries)?,
            charged: Bitmap::new(table_pages)?,
            next: OnceLock::new(),
        })
    }

    fn end_page(&self) -> u64 {
        self.first_page + self.entries.len() as u64
    }

    fn next(&self, index: u64, is_wanted: impl Fn(Entry) -> bool) -> Option<u64> {
        let load = |place| self.entries.get(place as usize).load(Ordering::Relaxed);
        let mut place = index.saturating_sub(self.first_page);
        while let Some(table_page) = self.charged.next(place / ENTRIES_PER_TABLE_PAGE) {
            let first = table_page * ENTRIES_PER_TABLE_PAGE;
            let end = first + ENTRIES_PER_TABLE_PAGE;
            let mut places = place.max(first)..end;
            if let Some(found) = places.find(|place| is_wanted(Entry(load(*place)))) {
                return Some(self.first_page + found);
            }
            place = end;
        }
        None
    }
}

/// Meaning of an Entry without a folio, which decides when a page of the table is freed: hints,
/// which are dropped; locations of bytes; or those, and no page is freed, because a store to a map
/// must not fail for lack of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Values {
    Hints,
    Kept,
    KeptWithPages,
}

#[derive(Debug)]
pub(crate) struct Table {
    values: Values,
    first: Segment,
    charged_pages: AtomicU64,
    /// Number of threads that fill pages of the table, or [`CLOSED`].
    fillers: AtomicU64,
    /// 1 if the table is on the list of `tables.rs`.
    pub(super) listed: AtomicU8,
    /// Table page at which the next search for unused pages begins.
    looked_at: AtomicU64,
}

impl Table {
    pub(crate) fn new(source: &MemorySource, pages: u64, values: Values) -> std::io::Result<Self> {
        Ok(Self {
            values,
            first: Segment::new(source, 0, pages)?,
            charged_pages: AtomicU64::new(0),
            fillers: AtomicU64::new(0),
            listed: AtomicU8::new(0),
            looked_at: AtomicU64::new(0),
        })
    }

    /// Extends the table to at least `pages` pages of the file. Callers serialize, and tell other
    /// threads of a page beyond the old end only after the call. Changes nothing if the kernel
    /// refuses the address space.
    pub(crate) fn reserve(&self, pages: u64) -> std::io::Result<()> {
        let last = self.segments().last().unwrap_or(&self.first);
        let end_page = last.end_page();
        if pages <= end_page {
            return Ok(());
        }
        // Many small extensions would make a long chain.
        let pages = pages.max(2 * end_page) - end_page;
        let segment = Segment::new(&self.first.entries.source(), end_page, pages)?;
        let is_set = last.next.set(Box::new(segment)).is_ok();
        debug_assert!(is_set, "callers serialize");
        Ok(())
    }

    fn segments(&self) -> impl Iterator<Item = &Segment> {
        std::iter::successors(Some(&self.first), |segment| segment.next.get().map(Box::as_ref))
    }

    /// Returns the segment of a page. Panics past the end of the table.
    fn segment_of(&self, index: u64) -> &Segment {
        let found = self.segments().find(|segment| index < segment.end_page());
        found.unwrap_or_else(|| panic!("page {index} of {}", self.pages()))
    }

    pub(crate) fn pages(&self) -> u64 {
        self.segments().last().unwrap_or(&self.first).end_page()
    }

    /// Returns the first position without an Entry in the array at [`Self::as_ptr`].
    pub(crate) fn first_end_bytes(&self) -> u64 {
        self.first.end_page().saturating_mul(PAGE_BYTES)
    }

    #[inline(always)]
    pub(crate) fn load(&self, index: u64, ordering: Ordering) -> Entry {
        Entry(self.word(index).load(ordering))
    }

    /// Returns the address of the first Entry, for the hit path.
    #[cfg(not(all(test, loom)))]
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const AtomicU64 {
        self.first.entries.as_ptr()
    }

    /// Returns the offset of the array at [`Self::as_ptr`] in the shared memory.
    #[cfg(not(all(test, loom)))]
    pub(super) fn shared_offset(&self) -> Option<u64> {
        self.first.entries.shared_offset()
    }

    /// Returns the word of a page's Entry. Panics past the end of the table.
    #[inline(always)]
    pub(crate) fn word(&self, index: u64) -> &AtomicU64 {
        // The first segment begins at page 0: one comparison, which is also the bounds check.
        if index < self.first.entries.len() as u64 {
            return self.first.entries.get(index as usize);
        }
        self.later_word(index)
    }

    #[cold]
    #[inline(never)]
    fn later_word(&self, index: u64) -> &AtomicU64 {
        let segment = self.segment_of(index);
        segment.entries.get((index - segment.first_page) as usize)
    }

    pub(crate) fn touch(&self, index: u64) {
        copy::prefetch_lines(std::ptr::from_ref(self.word(index)).cast(), 1);
    }

    /// Stores an Entry that only the caller may change (MAPPING-1).
    pub(super) fn store(&self, index: u64, entry: Entry, ordering: Ordering) {
        store_owned(self.word(index), entry.0, ordering);
    }

    /// Sets REFERENCED if the Entry is READY. Returns `false` if the Entry is no longer `seen`.
    pub(crate) fn mark_referenced(&self, index: u64, seen: Entry) -> bool {
        !seen.is_ready()
            || seen.is_referenced()
            || self.exchange_mark(index, seen, seen.with_referenced())
    }

    pub(crate) fn test_and_clear_referenced(&self, index: u64) -> bool {
        let seen = self.load(index, Ordering::Relaxed);
        if seen.is_referenced() {
            self.exchange_mark(index, seen, seen.without_referenced());
        }
        seen.is_referenced()
    }

    /// Exchanges the Entry if it is still `seen`. After a lost race the mark is as the winner set
    /// it, which a hint tolerates.
    fn exchange_mark(&self, index: u64, seen: Entry, next: Entry) -> bool {
        // Relaxed: the mark publishes nothing (MAPPING-1: the CAS succeeds only on an unchanged
        // word).
        let exchange = (Ordering::Relaxed, Ordering::Relaxed);
        self.word(index).compare_exchange(seen.0, next.0, exchange.0, exchange.1).is_ok()
    }

    /// Announces an insertion; charged pages stay charged until the guard is dropped (T1). Waits
    /// while pages are being freed.
    pub(crate) fn fill(&self) -> Filling<'_> {
        let mut backoff = Backoff::default();
        loop {
            // Acquire: pairs with the Release of G4: this thread sees which pages are no longer
            // charged.
            if self.fillers.fetch_add(1, Ordering::Acquire) & CLOSED == 0 {
                return Filling(&self.fillers);
            }
            self.fillers.fetch_sub(1, Ordering::Relaxed);
            backoff.wait();
        }
    }

    /// Returns the memory of a table page to the kernel, if that succeeds: all its Entries are
    /// holes now. No thread is filling.
    fn discharge(&self, page: u64) -> bool {
        let index = page * ENTRIES_PER_TABLE_PAGE;
        let segment = self.segment_of(index);
        let first = (index - segment.first_page) as usize;
        let end = first + ENTRIES_PER_TABLE_PAGE as usize;
        let is_given = segment.entries.release(first..end, |word| {
            word.store(Entry::HOLE.0, Ordering::Relaxed);
        });
        if is_given {
            segment.charged.clear((index - segment.first_page) / ENTRIES_PER_TABLE_PAGE);
            self.charged_pages.fetch_sub(1, Ordering::Relaxed);
        }
        is_given
    }

    pub(crate) fn is_charged(&self, index: u64) -> bool {
        let segment = self.segment_of(index);
        segment.charged.is_set((index - segment.first_page) / ENTRIES_PER_TABLE_PAGE)
    }

    /// Returns the end of the uncharged pages, all holes, that start at `index`; `index` itself if
    /// its table page was charged.
    pub(crate) fn end_of_uncharged(&self, index: u64) -> u64 {
        let end = (index / ENTRIES_PER_TABLE_PAGE + 1) * ENTRIES_PER_TABLE_PAGE;
        if self.is_charged(index) { index } else { end }
    }

    /// Records that the table page of `index` has been charged. Returns `false` if it already was.
    pub(crate) fn set_charged(&self, index: u64) -> bool {
        let segment = self.segment_of(index);
        let fresh = segment.charged.set((index - segment.first_page) / ENTRIES_PER_TABLE_PAGE);
        self.charged_pages.fetch_add(fresh.into(), Ordering::Relaxed);
        fresh
    }

    pub(crate) fn charged_bytes(&self) -> u64 {
        self.charged_pages.load(Ordering::Relaxed) * TABLE_PAGE_BYTES
    }

    pub(crate) fn next_folio(&self, index: u64) -> Option<u64> {
        self.next(index, Entry::is_folio)
    }

    pub(crate) fn next_occupied(&self, index: u64) -> Option<u64> {
        self.next(index, |entry| entry != Entry::HOLE)
    }

    /// Returns the first page from `index` on whose Entry must not be dropped.
    pub(crate) fn next_needed(&self, index: u64) -> Option<u64> {
        if self.kept_among(1) > 0 { self.next_occupied(index) } else { self.next_folio(index) }
    }

    /// Returns the pages of the table, among `pages` of them, that evictions do not free.
    pub(crate) fn kept_among(&self, pages: u64) -> u64 {
        if self.values == Values::Hints { 0 } else { pages }
    }

    /// Returns the first page from `index` on whose Entry `is_wanted`. Touches charged table pages
    /// only.
    fn next(&self, index: u64, is_wanted: impl Fn(Entry) -> bool) -> Option<u64> {
        self.segments().find_map(|segment| segment.next(index, &is_wanted))
    }
}

const CLOSED: u64 = 1 << 63;
/// Charged pages examined per call; fillers wait meanwhile.
const LOOKED_AT_MAX: u64 = 64;

/// Guard of a filler: while it exists, no page of the table is freed.
#[derive(Debug)]
#[must_use]
pub(crate) struct Filling<'t>(&'t AtomicU64);

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of G1: the insertions are seen.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Table {
    /// Returns the unused of the next [`LOOKED_AT_MAX`] charged table pages to the kernel, and
    /// their number.
    pub(crate) fn give_back(&self) -> u64 {
        if self.charged_bytes() == 0 || self.values == Values::KeptWithPages {
            return 0;
        }
        let keeps = self.kept_among(1) > 0;
        let is_needed = |index| {
            // Acquire: pairs with the Release in `unlink`: a thread that sees the first page of a
            // folio removed sees the others removed.
            let entry = self.load(index, Ordering::Acquire);
            entry.is_folio() || keeps && entry != Entry::HOLE
        };
        // Acquire: pairs with the Release of T4: this thread sees what was inserted. On failure,
        // Relaxed: nothing is read.
        let exchange = (Ordering::Acquire, Ordering::Relaxed);
        if self.fillers.compare_exchange(0, CLOSED, exchange.0, exchange.1).is_err() {
            return 0;
        }
        let mut given = 0;
        // Relaxed: the position of the search, only a hint.
        let mut at = self.looked_at.load(Ordering::Relaxed);
        for _ in 0..LOOKED_AT_MAX {
            let next_charged = |segment: &Segment| {
                let first = segment.first_page / ENTRIES_PER_TABLE_PAGE;
                segment.charged.next(at.saturating_sub(first)).map(|bit| first + bit)
            };
            let Some(page) = self.segments().find_map(next_charged) else {
                at = 0;
                break;
            };
            at = page + 1;
            let mut entries = page * ENTRIES_PER_TABLE_PAGE..at * ENTRIES_PER_TABLE_PAGE;
            if !entries.any(is_needed) && self.discharge(page) {
                given += 1;
            }
        }
        self.looked_at.store(at, Ordering::Relaxed);
        // Release: pairs with the Acquire of T1.
        self.fillers.fetch_and(!CLOSED, Ordering::Release);
        given
    }
}

const WORD_BITS: u64 = u64::BITS as u64;
/// Levels of a bitmap of 2^64 bits.
const LEVELS_MAX: usize = 11;

/// A bitmap, a tree of words, whose search for the next set bit skips what was never set: a table
/// may describe 2^50 bytes of a file of which few pages were touched.
///
/// A bit of level 0 is what the caller sets; a bit of a higher level says that the word below it
/// may be nonzero, and is never cleared. The first word of each level is stored inline, so a small
/// file needs no page of words. The levels share one array, the highest first, so that those above
/// the lowest touch few pages.
///
/// BITMAP-1: a bit of level 0 is seen set only when the bits above it are: [`Bitmap::set`] goes
/// from the top down. Otherwise a walk could miss a folio inserted into a page that another thread
/// is just charging, and a truncation would leave the folio behind.
#[derive(Debug)]
pub(crate) struct Bitmap {
    /// `None` if there is no word but the first: opening a small file then costs one reservation,
    /// not two.
    words: Option<ReservedArray<AtomicU64>>,
    first: [AtomicU64; LEVELS_MAX],
    /// Words of each level, from level 0 on. The last level is one word.
    levels: Vec<std::ops::Range<u64>>,
}

impl Bitmap {
    pub(crate) fn new(bits: u64) -> std::io::Result<Self> {
        let mut sizes = vec![bits.div_ceil(WORD_BITS).max(1)];
        while let Some(below) = sizes.last().copied().filter(|words| *words > 1) {
            sizes.push(below.div_ceil(WORD_BITS));
        }
        let total = sizes.iter().sum::<u64>();
        let mut end = total;
        let mut place = |words: u64| {
            end -= words;
            end..end + words
        };
        let levels = sizes.into_iter().map(&mut place).collect();
        let total = usize::try_from(total).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let first = std::array::from_fn(|_| AtomicU64::new(0));
        let words = (total > 1).then(|| ReservedArray::new(total)).transpose()?;
        Ok(Self { words, first, levels })
    }

    pub(crate) fn is_set(&self, bit: u64) -> bool {
        // Acquire: pairs with the Release in `set`: a thread that sees the bit sees those above
        // (BITMAP-1).
        self.word(0, bit / WORD_BITS).load(Ordering::Acquire) & mask(bit) != 0
    }

    /// Sets the bit. Returns `false` if it was set before.
    pub(crate) fn set(&self, bit: u64) -> bool {
        for level in (1..self.levels.len()).rev() {
            let above = bit >> (level as u32 * WORD_BITS.trailing_zeros());
            // Relaxed: the Release below publishes it.
            self.word(level, above / WORD_BITS).fetch_or(mask(above), Ordering::Relaxed);
        }
        // Release: pairs with the Acquire in `is_set`: the bits above are seen first (BITMAP-1).
        self.word(0, bit / WORD_BITS).fetch_or(mask(bit), Ordering::Release) & mask(bit) == 0
    }

    /// Clears the bit. The caller excludes a concurrent [`Self::set`] of it.
    pub(crate) fn clear(&self, bit: u64) {
        // Relaxed: the exclusion of a concurrent `set` also orders the next one after this.
        self.word(0, bit / WORD_BITS).fetch_and(!mask(bit), Ordering::Relaxed);
    }

    pub(crate) fn next(&self, bit: u64) -> Option<u64> {
        let (mut level, mut at) = (0, bit);
        loop {
            let words = self.levels.get(level)?;
            let index = at / WORD_BITS;
            if index >= words.end - words.start {
                return None;
            }
            // Relaxed: a bit whose `set` happens before this call is seen set.
            let word = self.word(level, index).load(Ordering::Relaxed);
            let found = word & (u64::MAX << (at % WORD_BITS));
            if found == 0 {
                // No bit left in this word: the level above finds the next nonzero word.
                (level, at) = (level + 1, index + 1);
                continue;
            }
            at = index * WORD_BITS + u64::from(found.trailing_zeros());
            if level == 0 {
                return Some(at);
            }
            (level, at) = (level - 1, at * WORD_BITS);
        }
    }

    fn word(&self, level: usize, index: u64) -> &AtomicU64 {
        if index == 0 {
            return &self.first[level];
        }
        let words = &self.levels[level];
        debug_assert!(index < words.end - words.start, "word {index} of {words:?}");
        let array = self.words.as_ref().expect("a level with two words");
        array.get((words.start + index) as usize)
    }
}

fn mask(bit: u64) -> u64 {
    1 << (bit % WORD_BITS)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Pages of a file of 2^50 bytes.
    const PAGES_HUGE: u64 = 1 << 38;

    /// Returns a table with these Entries, its pages charged.
    fn table_with(pages: u64, entries: &[(u64, Entry)]) -> Table {
        let table = Table::new(&MemorySource::Private, pages, Values::Kept).unwrap();
        for (index, entry) in entries {
            table.set_charged(*index);
            table.store(*index, *entry, Ordering::Relaxed);
        }
        table
    }

    /// Returns the minor faults of this thread so far.
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The command, in parentheses, may contain anything; the tenth field is the eighth after
        // it.
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split(' ').nth(7).unwrap().parse().unwrap()
    }

    #[test]
    fn walks_find_folios_and_values_in_small_and_huge_tables() {
        let (folio, value) = (Entry::folio(3, 0, 0), Entry::value(5));
        for pages in [511, 512, 513, 1500, 70_000, PAGES_HUGE + 1] {
            let last = pages - 1;
            let table = table_with(pages, &[(0, value), (last / 2, value), (last, folio)]);
            assert_eq!(table.next_folio(0), Some(last));
            assert_eq!(table.next_folio(pages), None);
            assert_eq!(table.next_occupied(0), Some(0));
            assert_eq!(table.next_occupied(1), Some(last / 2));
            assert_eq!(table.next_occupied(last / 2 + 1), Some(last));
            assert_eq!(table.next_occupied(pages), None);
        }
    }

    #[test]
    fn a_walk_skips_charged_pages_without_entries() {
        let table = table_with(PAGES_HUGE, &[(PAGES_HUGE - 1, Entry::value(5))]);
        for index in [0, 600, 1 << 20, 1 << 37] {
            assert!(table.set_charged(index));
        }
        assert_eq!(table.next_occupied(0), Some(PAGES_HUGE - 1));
        assert_eq!(table.next_folio(0), None);
    }

    #[test]
    fn an_extended_table_keeps_its_entries_and_finds_the_new_ones() {
        let folio = Entry::folio(3, 0, 0);
        for pages in [2, 512, 513, 70_000] {
            let table = table_with(pages, &[(1, folio)]);
            let (start, end) = (table.as_ptr(), table.pages());
            assert_eq!(end, pages.next_multiple_of(ENTRIES_PER_TABLE_PAGE));
            table.reserve(end).unwrap();
            assert_eq!(table.pages(), end, "the table has them already");
            table.reserve(end + 1).unwrap();
            assert_eq!(table.pages(), 2 * end, "it doubles at least");
            table.reserve(20 * end + 1).unwrap();
            let last = 20 * end;
            for index in [end, 2 * end - 1, 2 * end, last] {
                table.set_charged(index);
                assert!(table.is_charged(index), "page {index}");
                table.store(index, folio, Ordering::Relaxed);
            }
            assert_eq!(table.as_ptr(), start);
            let found = std::iter::successors(table.next_folio(0), |at| table.next_folio(at + 1));
            assert_eq!(found.collect::<Vec<_>>(), [1, end, 2 * end - 1, 2 * end, last]);
            let charged = table.charged_bytes();
            for index in [end, last] {
                table.store(index, Entry::HOLE, Ordering::Relaxed);
            }
            let left = [1, 2 * end - 1, 2 * end].map(|index| index / ENTRIES_PER_TABLE_PAGE);
            let freed = [end, last].map(|index| index / ENTRIES_PER_TABLE_PAGE);
            let freed = freed.iter().filter(|page| !left.contains(page)).count() as u64;
            assert_eq!(table.give_back(), freed);
            assert_eq!(table.charged_bytes(), charged - freed * TABLE_PAGE_BYTES);
            assert!(table.reserve(u64::MAX / 4096).is_err());
            assert_eq!(table.pages(), (20 * end + 1).next_multiple_of(ENTRIES_PER_TABLE_PAGE));
        }
    }

    #[test]
    fn charges_are_counted_once() {
        let table = Table::new(&MemorySource::Private, PAGES_HUGE, Values::Hints).unwrap();
        assert!(table.set_charged(0) && !table.set_charged(511) && table.set_charged(512));
        assert!(table.set_charged(PAGES_HUGE - 1) && !table.is_charged(1 << 20));
        assert_eq!(table.charged_bytes(), 3 * TABLE_PAGE_BYTES);
    }

    #[test]
    fn a_walk_over_a_huge_file_touches_few_pages() {
        let folio = Entry::folio(3, 0, 0);
        let places = [7, 1 << 30, (1 << 37) + 12_345, PAGES_HUGE - 1];
        let table = table_with(PAGES_HUGE, &places.map(|index| (index, folio)));
        let before = faults();
        let first = table.next_folio(0);
        let found = std::iter::successors(first, |index| table.next_folio(index + 1));
        assert_eq!(found.collect::<Vec<_>>(), places);
        assert_eq!(table.charged_bytes(), 4 * TABLE_PAGE_BYTES);
        // Without the levels above level 0 the bitmap alone would cost 16384 faults.
        let faults = faults() - before;
        assert!(faults < 64, "{faults} pages touched");
    }

    /// Returns the set bits from `from` on.
    fn walk(bitmap: &Bitmap, from: u64) -> Vec<u64> {
        std::iter::successors(bitmap.next(from), |bit| bitmap.next(bit + 1)).collect()
    }

    #[test]
    fn a_walk_finds_every_set_bit_at_any_number_of_levels() {
        for bits in [1, 2, 63, 64, 65, 4096, 4097, (1 << 18) + 1, 1 << 29] {
            let bitmap = Bitmap::new(bits).unwrap();
            assert_eq!(bitmap.next(0), None);
            let mut wanted = vec![0, 1, 62, 63, 64, 65, 4095, 4096, bits / 2, bits - 1];
            wanted.retain(|bit| *bit < bits);
            for bit in &wanted {
                bitmap.set(*bit);
            }
            wanted.sort_unstable();
            wanted.dedup();
            assert_eq!(walk(&bitmap, 0), wanted, "{bits} bits");
            for (nth, bit) in wanted.iter().enumerate() {
                assert!(bitmap.is_set(*bit) && !bitmap.set(*bit), "{bit} of {bits}");
                assert_eq!(walk(&bitmap, *bit), wanted[nth..], "from {bit} of {bits}");
            }
            assert_eq!(bitmap.next(bits), None, "past the end");
            assert_eq!(bitmap.next(u64::MAX), None);
        }
    }
}
