//! Reads without a reference: copy first, check afterwards (O1-O4 of `page/mapping.rs`), of one
//! page or of a [`Stretch`]; and the mark of use that they leave.
//!
//! The same idea as a sequence lock, with the sequence in the Entry; after the versioned pages of
//! vmcache (SIGMOD 2023) and a read without a reference that was proposed for the fast path of the
//! kernel's page cache (October 2025). It writes no shared memory. Where to copy from is the
//! caller's business, so that the protocol runs unchanged under the model checker.
//!
//! PROTOCOL of the first use of a page that was read ahead, which is not a second one. Its mark is
//! in the descriptor, and a folio may be moved to another one (`reclaim/evacuate.rs`) while a
//! reader that holds nothing uses it.
//!
//! ```text
//!  USE (here)                                 MOVE, both folios locked
//!  U1 load the Entry                          F1 new READAHEAD = old READAHEAD
//!  U2 READAHEAD of its folio? no: mark        F2 store the Entry (C5 of `collapse.rs`)
//!     the Entry by CAS; it changed: U1        F3 clear old READAHEAD; it was clear: clear
//!  U3 clear READAHEAD; it was clear: U1          new READAHEAD
//! ```
//!
//! - Of U3 and F3 on the old folio one comes first: U3, and F3 passes it on; or F3, and then U3
//!   sees that it came late, and U1 sees F2. Nor does a U2 after F3 get through: its CAS fails.
//! - F1 before F2: a use between them that finds the new folio without READAHEAD is a second one.
//! - F3 after F2: a use between them clears what nobody looks at any more.
//!
//! Without F3 a page that was used in the middle of a move counts as never used, and its next use
//! as the first.

use super::entry::Entry;
use super::lookup::recheck_ready;
use super::table::Table;
use super::{BATCH_SLOTS, Flag, FolioRef, Folios, Mapping};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::sys::copy;
use arrayvec::ArrayVec;
use std::ops::Range;

/// Reads one page's bytes without a reference: `copy` gets the Entry that says where they are.
///
/// `None`: the Entry was not `wanted`, or changed meanwhile; what `copy` produced means nothing
/// then. Everything is judged at once, after the copy: one branch instead of two lets the processor
/// keep more reads in flight. So `copy` is called whatever the Entry says, and must only touch
/// memory that stays mapped; ENTRY-1 sees to it that every Entry leads into the frames.
#[inline(always)]
pub(crate) fn read_validated<R>(
    word: &AtomicU64,
    is_wanted: impl FnOnce(Entry) -> bool,
    copy: impl FnOnce(Entry) -> R,
) -> Option<R> {
    // Acquire: pairs with the Release of W4 and I3: the bytes of this version are there.
    let seen = Entry(word.load(Ordering::Acquire));
    let result = copy(seen);
    // Acquire: pairs with the Release fences of W2 and of `insert`: if the copy saw a byte of a
    // later version, the load below sees READY gone.
    fence(Ordering::Acquire);
    let now = Entry(word.load(Ordering::Relaxed));
    // Exactly the same word: a mark that came or went meanwhile costs a retry, nothing else.
    (is_wanted(seen) & (now == seen)).then_some(result)
}

/// Pages of a stretch at the most: their Entries are kept on the stack.
const STRETCH_PAGES_MAX: usize = if cfg!(all(test, loom)) { 2 } else { 64 };

/// A stretch: pages in a row whose frames stand in a row, read with one copy.
///
/// All Entries first, then one copy, then all Entries again (O1-O4 for each). Each page is judged
/// by itself, so a page that changed meanwhile costs the pages from there on, and never those
/// before it. The length of the file is read with the Entries in hand: a cut sets it before it
/// changes the bytes behind it, and a growth after. Then a page that stands at both looks was,
/// when the length was read, what was copied.
///
/// Where frames may be unmapped, [`Stretch::hold`] comes between: a reference to each folio, and
/// READY with that in hand.
#[derive(Debug)]
pub(crate) struct Stretch<'a> {
    table: &'a Table,
    first: u64,
    seen: ArrayVec<Entry, STRETCH_PAGES_MAX>,
}

impl<'a> Stretch<'a> {
    /// The READY pages from the first of `pages` on whose frames follow that of the first (O1);
    /// those of a region (`in_place`) always do.
    #[inline(always)]
    pub(crate) fn find(table: &'a Table, pages: Range<u64>, in_place: bool) -> Self {
        // Made where it stays: it is large to move.
        let mut stretch = Self { table, first: pages.start, seen: ArrayVec::new() };
        for index in pages {
            // Acquire: pairs with the Release of W4 and I3: the bytes of this version are there.
            let entry = table.load(index, Ordering::Acquire);
            let follows = stretch.seen.last().is_none_or(|last| entry.frame() == last.frame() + 1);
            let follows = in_place || follows;
            if !entry.is_ready() || !follows || stretch.seen.try_push(entry).is_err() {
                break;
            }
        }
        stretch
    }

    /// The Entry of the first page, which says where the bytes are; `None` if it was not READY.
    #[inline(always)]
    pub(crate) fn start(&self) -> Option<Entry> {
        self.seen.first().copied()
    }

    /// References to the folios of the pages, for frames that do not stay mapped by themselves. The
    /// stretch ends before the first page of which none can be had, and after as many as a batch
    /// has.
    pub(crate) fn hold<'f>(&mut self, folios: &'f Folios) -> ArrayVec<FolioRef<'f>, BATCH_SLOTS> {
        self.seen.truncate(BATCH_SLOTS);
        for seen in &self.seen {
            // An atomic add waits for its line, and the next one for it.
            copy::prefetch_lines(std::ptr::from_ref(folios.get(seen.folio_id())).cast(), 1);
        }
        let named = self.seen.iter().zip(self.first..);
        let references = named.map_while(|(seen, index)| {
            let folio = folios.try_get(seen.folio_id()).ok()?;
            recheck_ready(self.table.word(index), folio, *seen).ok()
        });
        let held: ArrayVec<_, BATCH_SLOTS> = references.collect();
        self.seen.truncate(held.len());
        held
    }

    /// How many pages.
    #[inline(always)]
    pub(crate) fn pages(&self) -> u64 {
        self.seen.len() as u64
    }

    /// How many of the first `pages` pages, from the first on, were not changed since (O3, O4):
    /// what was copied of those is of one version each.
    #[inline(always)]
    pub(crate) fn unchanged(&self, pages: u64) -> u64 {
        // Acquire: pairs with the Release fences of W2 and of `insert`: if the copy saw a byte of
        // a later version, the loads below see READY gone.
        fence(Ordering::Acquire);
        let copied = self.seen.iter().take(pages as usize);
        let stand = copied.zip(self.first..).take_while(|(seen, index)| {
            self.table.load(*index, Ordering::Relaxed).is_same_version(**seen)
        });
        stand.count() as u64
    }
}

impl Mapping {
    /// Marks page `index` as used, for the replacement policy. The first use of a folio that was
    /// read ahead is what it was read for, and counts as its fill does: it ends with the last page,
    /// or where the reader leaves the order. One that is not reused is not marked.
    #[inline]
    pub(crate) fn note_use(
        &self,
        folios: &Folios,
        index: u64,
        in_order: bool,
        is_reused: impl Fn() -> bool,
    ) {
        // Again only if the page was used, moved or evicted meanwhile.
        while !self.try_note_use(folios, index, in_order, &is_reused) {}
    }

    fn try_note_use(
        &self,
        folios: &Folios,
        index: u64,
        in_order: bool,
        is_reused: impl Fn() -> bool,
    ) -> bool {
        // Acquire: pairs with the Release in `store_marked` (F2): a thread that sees F2 sees F1. A
        // word that is seen late is found out (U2, U3).
        let seen = self.table().load(index, Ordering::Acquire);
        // Marked already: most are, and their descriptors need not be looked at.
        if !seen.is_folio() || seen.is_referenced() {
            return true;
        }
        let flags = &folios.get(seen.folio_id()).flags;
        if !flags.get(Flag::Readahead) {
            return !is_reused() || self.table().mark_referenced(index, seen);
        }
        let is_over = !in_order || index + 1 == self.end_of_unit(index);
        !is_over || flags.clear(Flag::Readahead)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn table_of(entries: &[Entry]) -> Table {
        let table = Table::new(entries.len() as u64 + 1).unwrap();
        for (index, entry) in (0..).zip(entries) {
            table.store(index, *entry, Ordering::Relaxed);
        }
        table
    }

    fn ready(frame: u32) -> Entry {
        Entry::folio(frame, 5, 0).with_ready()
    }

    fn pages_of(entries: &[Entry]) -> u64 {
        Stretch::find(&table_of(entries), 0..entries.len() as u64, false).pages()
    }

    #[test]
    fn a_stretch_ends_where_the_frames_do_not_follow() {
        assert_eq!(pages_of(&[ready(7), ready(8), ready(9)]), 3);
        assert_eq!(pages_of(&[ready(7), ready(8), ready(10)]), 2);
        assert_eq!(pages_of(&[ready(7), ready(7)]), 1);
        assert_eq!(pages_of(&[ready(7), Entry::folio(8, 5, 0), ready(9)]), 1);
        assert_eq!(pages_of(&[Entry::HOLE, ready(1)]), 0);
        assert_eq!(pages_of(&[Entry::value(0), ready(1)]), 0);
        let long: Vec<Entry> = (0..100).map(ready).collect();
        assert_eq!(pages_of(&long), STRETCH_PAGES_MAX as u64);
    }

    #[test]
    fn a_page_that_changed_costs_those_behind_it_and_none_before() {
        let table = table_of(&[ready(7), ready(8), ready(9)]);
        let stretch = Stretch::find(&table, 0..3, false);
        assert_eq!((stretch.start(), stretch.unchanged(3)), (Some(ready(7)), 3));
        // Marks come and go without a change of the bytes.
        table.mark_referenced(1, ready(8));
        assert_eq!(stretch.unchanged(3), 3);
        table.store(1, ready(8).with_next_version(), Ordering::Relaxed);
        assert_eq!((stretch.unchanged(3), stretch.unchanged(1)), (1, 1));
        table.store(0, ready(7).without_ready(), Ordering::Relaxed);
        assert_eq!(stretch.unchanged(3), 0);
    }
}
