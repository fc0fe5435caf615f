//! Reads without a reference: copy first, check afterwards (READ-O1..O4), of one page or of a
//! [`FrameRun`]: a sequence lock with the sequence number in the Entry. And the mark of use that
//! they set. The caller supplies the copy, so the protocol runs unchanged under the model checker.
//!
//! PROTOCOL USE, of the first use of a page that was read ahead, which must be counted once. The
//! READAHEAD mark is in the descriptor, and a folio may be moved to another one
//! (`reclaim/evacuate.rs`) while a reader that holds nothing uses it.
//!
//! ```text
//!  USE (here)                                 MOVE, both folios locked
//!  U1 load the Entry                          F1 new READAHEAD = old READAHEAD
//!  U2 READAHEAD of its folio? no: mark        F2 store the Entry (RELOCATE-C5)
//!     the Entry by CAS; it changed: U1        F3 clear old READAHEAD; it was clear: clear
//!  U3 clear READAHEAD; it was clear: U1          new READAHEAD
//! ```
//!
//! - On the old folio either U3 comes first, and F3 passes the use on; or F3 comes first, U3 finds
//!   the flag clear, and the next U1 sees F2. A U2 after F3 fails, too: its CAS finds another
//!   Entry.
//! - F1 before F2: a use between them that finds the new folio without READAHEAD is counted as a
//!   second one.
//! - F3 after F2: a use between them clears a flag that is no longer read.

use super::entry::Entry;
use super::mapping::recheck_ready;
use super::table::Table;
use super::{BATCH_SLOTS, Flag, FolioId, FolioRef, Folios, Mapping};
use crate::sync::{AtomicU64, Ordering, fence};
use crate::sys::copy;
use arrayvec::ArrayVec;
use std::ops::Range;

/// Reads the bytes of one page without a reference: `copy` gets the Entry that names the frame.
///
/// Returns `None` if `is_wanted` rejects the Entry, or if it changed during the copy; the result of
/// `copy` is then discarded. Both are tested once, after the copy: one branch instead of two lets
/// the processor keep more reads in flight. So `copy` is called with any Entry, and must only touch
/// memory that stays mapped; by ENTRY-1 every Entry leads into the frames.
#[inline(always)]
pub(crate) fn read_validated<R>(
    word: &AtomicU64,
    is_wanted: impl FnOnce(Entry) -> bool,
    copy: impl FnOnce(Entry) -> R,
) -> Option<R> {
    // Acquire: pairs with the Release of READ-W4 and READ-I3: this thread sees the bytes of this
    // version.
    let seen = Entry(word.load(Ordering::Acquire));
    let result = copy(seen);
    // Acquire: pairs with the Release fences of READ-W2 and of `insert`: if the copy saw a byte of
    // a later version, the load below sees READY cleared.
    fence(Ordering::Acquire);
    let now = Entry(word.load(Ordering::Relaxed));
    // Compares the whole word: a mark set or cleared during the copy costs only a retry.
    (is_wanted(seen) & (now == seen)).then_some(result)
}

/// Reads `pages`, which lie in the folio `held`, while the caller holds a reference to it: the
/// frames stay, but the bytes may change, and the pages may be removed from the table.
///
/// Returns `None` if a page is not READY in that folio before the read or changes during it, or if
/// `read` returns `None`. `read` loads the length of the file itself: see [`FrameRun`].
pub(crate) fn read_held<R>(
    table: &Table,
    pages: Range<u64>,
    held: FolioId,
    read: impl FnOnce() -> Option<R>,
) -> Option<R> {
    let count = pages.end - pages.start;
    if count > RUN_PAGES_MAX as u64 {
        return read_held_in_runs(table, pages, held, read);
    }
    let run = FrameRun::find(table, pages);
    let is_whole = run.pages() == count && run.start()?.folio_id() == held;
    let result = if is_whole { read()? } else { return None };
    (run.unchanged(count) == count).then_some(result)
}

/// Does the work of [`read_held`] for more pages than fit in a [`FrameRun`]: all runs are loaded,
/// then the bytes are read once, then all runs are checked. A folio has adjacent frames, so the
/// runs need not be compared with each other.
#[inline(never)]
fn read_held_in_runs<R>(
    table: &Table,
    pages: Range<u64>,
    held: FolioId,
    read: impl FnOnce() -> Option<R>,
) -> Option<R> {
    let mut runs = ArrayVec::<FrameRun<'_>, FOLIO_RUNS_MAX>::new();
    for first in pages.clone().step_by(RUN_PAGES_MAX) {
        let end = pages.end.min(first + RUN_PAGES_MAX as u64);
        let run = FrameRun::find(table, first..end);
        let is_whole = run.pages() == end - first && run.start()?.folio_id() == held;
        if !is_whole || runs.try_push(run).is_err() {
            return None;
        }
    }
    let result = read()?;
    runs.iter().all(|run| run.unchanged(run.pages()) == run.pages()).then_some(result)
}

/// Maximum pages of a run: their Entries are on the stack.
const RUN_PAGES_MAX: usize = if cfg!(all(test, loom)) { 2 } else { 64 };
/// Maximum runs of a folio: of 512 pages, whose Entries take 4 KiB of stack, and of 4 pages under
/// the model checker, whose threads have small stacks.
const FOLIO_RUNS_MAX: usize = if cfg!(all(test, loom)) { 2 } else { 8 };

/// Run of consecutive pages that are read together.
///
/// Loads all Entries, copies, then loads all Entries again (READ-O1..O4 for each). A page that
/// changed invalidates itself and the pages after it. The caller reads the length of the file
/// between the two loads: a truncation sets the length before it changes the bytes beyond the end,
/// an extension after. So a page whose Entry is unchanged had the copied bytes when the length was
/// read.
///
/// Where frames may be unmapped, [`FrameRun::hold`] runs in between: it takes a reference to each
/// folio and then checks READY.
#[derive(Debug)]
pub(crate) struct FrameRun<'a> {
    table: &'a Table,
    first: u64,
    seen: ArrayVec<Entry, RUN_PAGES_MAX>,
}

impl<'a> FrameRun<'a> {
    /// Loads the READY pages from the first of `pages` on, wherever their frames are (READ-O1).
    #[inline(always)]
    pub(crate) fn gather(table: &'a Table, pages: Range<u64>) -> Self {
        Self::load(table, pages, |_, _| true)
    }

    /// Loads the READY pages from the first of `pages` on, up to the first whose frame does not
    /// follow the previous one (READ-O1).
    #[inline(always)]
    fn find(table: &'a Table, pages: Range<u64>) -> Self {
        Self::load(table, pages, |last, entry| entry.frame() == last.frame() + 1)
    }

    /// Loads the Entries of `pages`, in order, up to the first that is not READY, or may not follow
    /// the one before.
    #[inline(always)]
    fn load(
        table: &'a Table,
        pages: Range<u64>,
        may_follow: impl Fn(Entry, Entry) -> bool,
    ) -> Self {
        // Built in place: it is large to move.
        let mut run = Self { table, first: pages.start, seen: ArrayVec::new() };
        for index in pages {
            // Acquire: pairs with the Release of READ-W4 and READ-I3: this thread sees the bytes of
            // this version.
            let entry = table.load(index, Ordering::Acquire);
            let follows = run.seen.last().is_none_or(|last| may_follow(*last, entry));
            if !entry.is_ready() || !follows || run.seen.try_push(entry).is_err() {
                break;
            }
        }
        run
    }

    /// Returns the Entry of the first page, which names the frame; `None` if it was not READY.
    #[inline(always)]
    fn start(&self) -> Option<Entry> {
        self.seen.first().copied()
    }

    /// Takes references to the folios of the pages, for frames that may be unmapped otherwise.
    /// Truncates the run before the first page without a reference, and to the size of a batch.
    pub(crate) fn hold<'f>(&mut self, folios: &'f Folios) -> ArrayVec<FolioRef<'f>, BATCH_SLOTS> {
        self.seen.truncate(BATCH_SLOTS);
        for seen in &self.seen {
            // An atomic add waits for its cache line, and the next add waits for the first.
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

    /// Returns the Entries of the pages, as they were before the copy.
    #[inline(always)]
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.seen
    }

    #[inline(always)]
    pub(crate) fn pages(&self) -> u64 {
        self.seen.len() as u64
    }

    /// Returns how many of the first `pages` pages, counted from the first, are unchanged (READ-O3,
    /// READ-O4): each of these was copied in a single version.
    #[inline(always)]
    pub(crate) fn unchanged(&self, pages: u64) -> u64 {
        // Acquire: pairs with the Release fences of READ-W2 and of `insert`: if the copy saw a byte
        // of a later version, the loads below see READY cleared.
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
    /// read ahead is the one it was read for, so it sets no mark; it ends with the last page, or
    /// when the reader stops reading in order. A page for which `is_reused` returns `false` is not
    /// marked.
    #[inline]
    pub(crate) fn note_use(
        &self,
        folios: &Folios,
        index: u64,
        in_order: bool,
        is_reused: impl Fn() -> bool,
    ) {
        loop {
            // Acquire: pairs with the Release in `relocate` (F2): a thread that sees F2 sees F1. A
            // stale word is detected (U2, U3).
            let seen = self.table().load(index, Ordering::Acquire);
            // Most are marked already, and their descriptors need not be read.
            if !seen.is_folio() || seen.is_referenced() {
                return;
            }
            let flags = &folios.get(seen.folio_id()).flags;
            let is_noted = if flags.get(Flag::Readahead) {
                let is_over = !in_order || index + 1 == self.end_of_unit(index);
                !is_over || flags.clear(Flag::Readahead)
            } else {
                !is_reused() || self.table().mark_referenced(index, seen)
            };
            // Otherwise the page was used, moved or evicted since.
            if is_noted {
                return;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn table_of(entries: &[Entry]) -> Table {
        let table = Table::new(
            &crate::page::MemorySource::Private,
            entries.len() as u64 + 1,
            crate::page::Values::Hints,
        )
        .unwrap();
        for (index, entry) in (0..).zip(entries) {
            table.store(index, *entry, Ordering::Relaxed);
        }
        table
    }

    fn ready(frame: u32) -> Entry {
        Entry::folio(frame, 5, 0).with_ready()
    }

    #[derive(Debug)]
    struct NoReaper;

    impl crate::page::Reaper for NoReaper {
        fn reap(&self, frozen: crate::page::Frozen<'_>) {
            unreachable!("{:?} was freed", frozen.id());
        }
    }

    /// A page was evicted and claimed again, in the same frame, after its Entry was loaded. Its
    /// bytes are not there yet.
    #[test]
    fn a_page_that_is_being_filled_again_is_not_held() {
        let folios = Folios::new(3, Box::new(NoReaper)).unwrap();
        folios.init_free(FolioId(0), 3);
        for index in 0..3 {
            let _in_the_table = folios.start(FolioId(index), 64, u64::from(index), 0).into_id();
        }
        let table = table_of(&[ready(0), ready(1), ready(2)]);
        let held = |run: &mut FrameRun<'_>| {
            // The puts of these references are not the last ones.
            run.hold(&folios).len() as u64
        };
        assert_eq!(held(&mut FrameRun::gather(&table, 0..3)), 3);
        let mut run = FrameRun::gather(&table, 0..3);
        table.store(1, Entry::folio(1, 6, 0), Ordering::Relaxed);
        assert_eq!((held(&mut run), run.pages()), (1, 1));
    }

    fn pages_of(entries: &[Entry]) -> u64 {
        FrameRun::find(&table_of(entries), 0..entries.len() as u64).pages()
    }

    #[test]
    fn a_run_ends_where_the_frames_do_not_follow() {
        assert_eq!(pages_of(&[ready(7), ready(8), ready(9)]), 3);
        assert_eq!(pages_of(&[ready(7), ready(8), ready(10)]), 2);
        assert_eq!(pages_of(&[ready(7), ready(7)]), 1);
        assert_eq!(pages_of(&[ready(7), Entry::folio(8, 5, 0), ready(9)]), 1);
        assert_eq!(pages_of(&[Entry::HOLE, ready(1)]), 0);
        assert_eq!(pages_of(&[Entry::value(0), ready(1)]), 0);
        let long: Vec<Entry> = (0..100).map(ready).collect();
        assert_eq!(pages_of(&long), RUN_PAGES_MAX as u64);
    }

    #[test]
    fn a_gathered_run_ends_only_at_a_page_that_is_not_ready() {
        let gathered = |entries: &[Entry]| {
            let table = table_of(entries);
            let run = FrameRun::gather(&table, 0..entries.len() as u64);
            assert_eq!(run.entries(), &entries[..run.pages() as usize]);
            run.pages()
        };
        assert_eq!(gathered(&[ready(7), ready(2), ready(2), ready(9)]), 4);
        assert_eq!(gathered(&[ready(7), ready(2), Entry::folio(3, 5, 0), ready(9)]), 2);
        assert_eq!(gathered(&[Entry::HOLE, ready(1)]), 0);
        let long: Vec<Entry> = (0..100).map(|page| ready(3 * page)).collect();
        assert_eq!(gathered(&long), RUN_PAGES_MAX as u64);
    }

    #[test]
    fn a_changed_page_invalidates_itself_and_those_after_it() {
        let table = table_of(&[ready(7), ready(8), ready(9)]);
        let run = FrameRun::find(&table, 0..3);
        assert_eq!((run.start(), run.unchanged(3)), (Some(ready(7)), 3));
        // Marks change without a change of the bytes.
        table.mark_referenced(1, ready(8));
        assert_eq!(run.unchanged(3), 3);
        table.store(1, ready(8).with_next_version(), Ordering::Relaxed);
        assert_eq!((run.unchanged(3), run.unchanged(1)), (1, 1));
        table.store(0, ready(7).without_ready(), Ordering::Relaxed);
        assert_eq!(run.unchanged(3), 0);
    }
}
