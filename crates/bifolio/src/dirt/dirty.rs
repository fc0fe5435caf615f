//! The dirty list of a file, oldest first, and the count of what is in flight.
//!
//! The list is linked through the descriptors (rule 4 of `page`), in the order of the numbers of
//! the markings: "everything that was dirty at the call" is a number. Removing a folio moves the
//! walks that point to it to the next one, so a walk is linear in the length of the list, however
//! often it unlocks. Write-outs in flight are counted in epochs; later ones delay no sync.
//!
//! PROTOCOL SYNC, of a folio being written out against a sync, as two columns (model-checked in
//! `loom_dirty`); each step on the left is one critical section of the list's lock:
//!
//! ```text
//!  WRITE-OUT                                   SYNC
//!  D1 mark: to dirty, on the list, a number    S1 count the errors so far
//!  D2 begin: to writing, off the list, into    S2 end = the number of the next marking
//!     the current epoch                        S3 write out the folios on the list with a
//!  D3 success: to written, out of its              number below `end`, in its range
//!     epoch                                    S4 close the epoch; wait until it, and those
//!  D4 failure: record the error; to                before it, are empty
//!     unwritten, on the list with a new        S5 errors since S1? then fail; else flush
//!     number; out of its epoch
//! ```
//!
//! A folio that was dirty at S1 is on the list at S3 with a number below `end` (D1 before S2), or
//! its D2 came before S3: then S4 waits for its epoch. If that write-out fails before S1, D4 has
//! put the folio on the list before S2, and S3 finds it; if after S1, S5 finds the error. If the
//! error were recorded before D4, a sync could begin in between: S1 would count the error, and S3
//! would find nothing. Another thread may run S3 and S4, with a later `end`: they still come
//! between this sync's S2 and S5 (`flush.rs`).
//!
//! Longer than 600 lines only with its tests, which use its private items.

use super::lsns::{Lsns, may_pass};
use super::throttle::DirtyPages;
use crate::page::{FolioId, FolioRef, Folios, Listing, NO_FOLIO};
use crate::sync::{Condvar, Mutex, Ordering, blocking};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of times remembered to tell the age of dirty folios, and number of them per age that is
/// asked for: together they cover four times that age.
const TICKS_MAX: usize = 64;
const TICKS_PER_AGE: u32 = 16;
/// Folios that a walk visits before it releases the lock of the list.
const EXAMINED_MAX: usize = 2048;

#[derive(Debug)]
pub(crate) struct DirtyList {
    pub(crate) pages: DirtyPages,
    state: Mutex<DirtyState>,
    epoch_ended: Condvar,
}

#[derive(Debug)]
struct DirtyState {
    head: u32,
    tail: u32,
    folios: u64,
    /// Number of the next marking.
    next: u64,
    /// Values of `next` at some times in the past, oldest first.
    ticks: VecDeque<(Instant, u64)>,
    cursors: Vec<(u64, u32)>,
    next_cursor: u64,
    /// Number of write-outs in flight in each epoch, from the oldest that is not empty to the
    /// current one. At most one more than syncs that wait.
    in_flight: VecDeque<u64>,
    oldest_epoch: u64,
    /// Set if the file is on the flusher's list of files that may have something dirty.
    is_enlisted: bool,
    lsns: Option<Box<Lsns>>,
}

impl Default for DirtyState {
    fn default() -> Self {
        Self {
            head: NO_FOLIO,
            tail: NO_FOLIO,
            folios: 0,
            next: 1,
            ticks: VecDeque::new(),
            cursors: Vec::new(),
            next_cursor: 0,
            in_flight: VecDeque::from([0]),
            oldest_epoch: 0,
            is_enlisted: false,
            lsns: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) is_new: bool,
    /// Set if the caller must put the file on the flusher's list. [`DirtyList::delist`] is not
    /// called before that.
    pub(crate) must_enlist: bool,
}

/// Write-out in progress; [`DirtyList::end`] or [`DirtyList::end_failed`] consumes it.
#[derive(Debug)]
#[must_use]
pub(crate) struct InFlight {
    epoch: u64,
}

/// Reason why a write-out did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotBegun {
    /// The folio is not dirty, or its write-out is in flight.
    NotDirty,
    /// The write gate holds the folio back.
    HeldBack {
        /// Highest LSN of the folio's changes.
        lsn: u64,
    },
}

#[derive(Debug)]
pub(crate) struct DirtyFolios<'a> {
    pub(crate) folios: Vec<FolioRef<'a>>,
    /// Set if `folios` ends before a folio that is frozen at the moment.
    pub(crate) is_cut_short: bool,
}

impl DirtyList {
    pub(crate) fn new(pages: DirtyPages) -> Self {
        Self { pages, state: Mutex::default(), epoch_ended: Condvar::default() }
    }

    pub(crate) fn len(&self) -> u64 {
        self.state.lock().folios
    }

    /// Returns `true` if nothing is dirty, and no write-out is in flight, which might fail.
    pub(crate) fn is_all_written(&self) -> bool {
        self.unwritten() == 0
    }

    /// Returns the number of folios that are dirty, or in flight.
    pub(crate) fn unwritten(&self) -> u64 {
        self.state.lock().unwritten()
    }

    /// Returns `true` if nothing is dirty or in flight: the next mark enlists the file again.
    pub(crate) fn delist(&self) -> bool {
        let mut state = self.state.lock();
        let is_all_written = state.unwritten() == 0;
        if is_all_written {
            state.is_enlisted = false;
            state.ticks = VecDeque::new();
        }
        is_all_written
    }

    /// Returns the number that all markings so far are below.
    pub(crate) fn now(&self) -> u64 {
        self.state.lock().next
    }

    /// Returns the number that all markings older than `age` are below. Dirty folios look younger
    /// than they are if it is not called regularly.
    pub(crate) fn older_than(&self, age: Duration) -> u64 {
        let mut state = self.state.lock();
        let now = Instant::now();
        let last = state.ticks.back().map(|(time, _)| *time);
        if last.is_none_or(|last| now.duration_since(last) >= age / TICKS_PER_AGE) {
            let tick = (now, state.next);
            if state.ticks.len() == TICKS_MAX {
                state.ticks.pop_front();
            }
            state.ticks.push_back(tick);
        }
        let is_old = |tick: &&(Instant, u64)| now.duration_since(tick.0) >= age;
        state.ticks.iter().rev().find(is_old).map_or(0, |tick| tick.1)
    }

    /// D1. The caller holds the folio lock.
    pub(crate) fn mark(&self, folios: &Folios, id: FolioId) -> Marked {
        let marked = self.mark_counted(folios, id);
        if marked.is_new {
            self.pages.add(folios.get(id).pages());
        }
        marked
    }

    /// D1, for a folio whose pages are counted already, if it is not dirty. The caller holds the
    /// folio lock.
    pub(crate) fn mark_counted(&self, folios: &Folios, id: FolioId) -> Marked {
        let mut state = self.state.lock();
        let is_new = Self::mark_in(&mut state, folios, id);
        let was_enlisted = std::mem::replace(&mut state.is_enlisted, true);
        Marked { is_new, must_enlist: !was_enlisted }
    }

    fn mark_in(state: &mut DirtyState, folios: &Folios, id: FolioId) -> bool {
        let is_new = folios.get(id).flags.transition_to_dirty() == Listing::Add;
        if is_new {
            state.link(folios, id);
        }
        is_new
    }

    /// Removes a locked folio, whose bytes are not needed, from the list without a write-out.
    pub(crate) fn forget(&self, folios: &Folios, id: FolioId) {
        self.pages.sub(Self::remove_in(&mut self.state.lock(), folios, id));
    }

    /// Removes a folio from the list, if it is on it. Returns the number of its pages that are
    /// still counted.
    fn remove_in(state: &mut DirtyState, folios: &Folios, id: FolioId) -> u64 {
        if folios.get(id).flags.transition_to_clean() != Listing::Remove {
            return 0;
        }
        state.unlink(folios, id);
        if let Some(lsns) = &mut state.lsns {
            lsns.remove(id);
        }
        folios.get(id).pages()
    }

    /// Removes the folio `old` from the list, and appends `new`, which is clean and has its bytes.
    /// One is frozen, one locked, and no write-out of them is in flight.
    pub(crate) fn replace(&self, folios: &Folios, old: FolioId, new: FolioId) {
        let mut state = self.state.lock();
        let counted_pages = Self::remove_in(&mut state, folios, old);
        let is_new = Self::mark_in(&mut state, folios, new);
        debug_assert!(is_new, "{new:?} was dirty before it had the bytes");
        // The count is never lower meanwhile: a writer would find room that does not exist.
        self.pages.add(folios.get(new).pages() - counted_pages);
    }

    /// D2, if the folio is dirty and its log record is durable: GATE-O3, with the `durable`
    /// LSN of GATE-O1. The caller holds the folio lock, and no write-out of the folio is in flight.
    pub(crate) fn begin(
        &self,
        folios: &Folios,
        id: FolioId,
        durable: u64,
    ) -> Result<InFlight, NotBegun> {
        let mut state = self.state.lock();
        if let Some(lsns) = &state.lsns {
            let lsn = lsns.highest_of(id);
            if !may_pass(lsn, durable) {
                return Err(NotBegun::HeldBack { lsn });
            }
        }
        if folios.get(id).flags.transition_to_writing() != Listing::Remove {
            return Err(NotBegun::NotDirty);
        }
        state.unlink(folios, id);
        let newest = state.in_flight.len() - 1;
        state.in_flight[newest] += 1;
        Ok(InFlight { epoch: state.oldest_epoch + newest as u64 })
    }

    /// D3 for several folios.
    pub(crate) fn end(&self, folios: &Folios, ended: impl Iterator<Item = (FolioId, InFlight)>) {
        let mut state = self.state.lock();
        let mut pages = 0;
        for (id, in_flight) in ended {
            pages += folios.get(id).pages();
            let listing = folios.get(id).flags.transition_to_written();
            debug_assert_eq!(listing, Listing::Keep);
            if let Some(lsns) = &mut state.lsns {
                lsns.note_written(id);
            }
            state.end_in_epoch(in_flight);
        }
        self.note_ended(&mut state, pages);
    }

    /// D4 for several folios. `record` records the error, and is called with the list locked.
    pub(crate) fn end_failed(
        &self,
        folios: &Folios,
        ended: impl Iterator<Item = (FolioId, InFlight)>,
        record: impl FnOnce(),
    ) {
        let mut state = self.state.lock();
        record();
        let mut pages = 0;
        for (id, in_flight) in ended {
            if folios.get(id).flags.transition_to_unwritten() == Listing::Add {
                state.link(folios, id);
            } else {
                pages += folios.get(id).pages();
            }
            state.end_in_epoch(in_flight);
        }
        self.note_ended(&mut state, pages);
    }

    fn note_ended(&self, state: &mut DirtyState, pages: u64) {
        self.pages.sub(pages);
        // The current epoch stays.
        while state.in_flight.len() > 1 && state.in_flight[0] == 0 {
            state.in_flight.pop_front();
            state.oldest_epoch += 1;
            self.epoch_ended.notify_all();
        }
    }

    pub(crate) fn keep_lsns(&self) {
        self.state.lock().lsns.get_or_insert_default();
    }

    /// Calls `use_lsns` with the LSNs of the folios; the default of `R` if the file keeps none.
    pub(crate) fn with_lsns<R: Default>(&self, use_lsns: impl FnOnce(&mut Lsns) -> R) -> R {
        self.state.lock().lsns.as_deref_mut().map(use_lsns).unwrap_or_default()
    }

    pub(crate) fn begin_flush(&self) {
        self.with_lsns(Lsns::begin_flush);
    }

    pub(crate) fn end_flush(&self, is_durable: bool) {
        self.with_lsns(|lsns| lsns.end_flush(is_durable));
    }

    /// S4: blocks until everything that was in flight at the call has ended.
    pub(crate) fn wait_for_in_flight(&self) {
        blocking::check("the write-outs of an epoch");
        let mut state = self.state.lock();
        if state.in_flight.back().is_some_and(|in_flight| *in_flight > 0) {
            state.in_flight.push_back(0);
        }
        let new_epoch = state.oldest_epoch + state.in_flight.len() as u64 - 1;
        while state.oldest_epoch < new_epoch {
            self.epoch_ended.wait(&mut state);
        }
    }

    /// Starts a walk over the folios whose markings have numbers below `end`, oldest first.
    pub(crate) fn walk(&self, end: u64) -> Walk<'_> {
        let mut state = self.state.lock();
        let (cursor, head) = (state.next_cursor, state.head);
        state.next_cursor += 1;
        state.cursors.push((cursor, head));
        Walk { list: self, cursor, end, is_over: false }
    }

    /// Returns those of `ids` that are on the list with a number below `end`. The ids were found in
    /// the table of the file at the address `owner`, where a folio is while it is on the list.
    pub(crate) fn among<'a>(
        &self,
        folios: &'a Folios,
        ids: &[FolioId],
        owner: u64,
        end: u64,
    ) -> DirtyFolios<'a> {
        let _state = self.state.lock();
        let mut found = DirtyFolios { folios: Vec::new(), is_cut_short: false };
        for &id in ids {
            let folio = folios.get(id);
            let is_listed = folio.flags.write_state().is_dirty() && folio.owner() == owner;
            if !is_listed || folio.dirtied.load(Ordering::Relaxed) >= end {
                continue;
            }
            match folios.try_get(id) {
                Ok(folio) => found.folios.push(folio),
                Err(_) => found.is_cut_short = true,
            }
        }
        found
    }
}

/// Walk over a dirty list in batches. Visits each folio that stays on the list exactly once.
#[derive(Debug)]
pub(crate) struct Walk<'l> {
    list: &'l DirtyList,
    cursor: u64,
    end: u64,
    is_over: bool,
}

impl Walk<'_> {
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Returns references to up to `folios_max` of the next folios that have pages `within`.
    /// Returns fewer, or none, if many other folios lie between them. A frozen folio is returned by
    /// the next call or, with `pass_frozen`, skipped.
    pub(crate) fn next_folios<'a>(
        &mut self,
        folios: &'a Folios,
        within: &Range<u64>,
        folios_max: usize,
        pass_frozen: bool,
    ) -> DirtyFolios<'a> {
        let mut found = DirtyFolios { folios: Vec::new(), is_cut_short: false };
        let mut state = self.list.state.lock();
        let cursor = state.cursors.iter().position(|(cursor, _)| *cursor == self.cursor);
        let cursor = cursor.expect("a walk has its cursor until it is dropped");
        let mut next = state.cursors[cursor].1;
        let mut examined = 0;
        while examined < EXAMINED_MAX && found.folios.len() < folios_max {
            let folio = (next != NO_FOLIO).then(|| folios.get(FolioId(next)));
            let Some(folio) = folio.filter(|it| it.dirtied.load(Ordering::Relaxed) < self.end)
            else {
                self.is_over = true;
                break;
            };
            examined += 1;
            let first = folio.index();
            if first < within.end && first + folio.pages() > within.start {
                match folios.try_get(FolioId(next)) {
                    Ok(reference) => found.folios.push(reference),
                    Err(_) if pass_frozen => {}
                    Err(_) => {
                        found.is_cut_short = true;
                        break;
                    }
                }
            }
            next = folio.dirty_next.load(Ordering::Relaxed);
        }
        state.cursors[cursor].1 = next;
        // References are dropped without the lock of the list.
        drop(state);
        found
    }
}

impl Drop for Walk<'_> {
    fn drop(&mut self) {
        self.list.state.lock().cursors.retain(|(cursor, _)| *cursor != self.cursor);
    }
}

impl DirtyState {
    fn unwritten(&self) -> u64 {
        self.folios + self.in_flight.iter().sum::<u64>()
    }

    fn end_in_epoch(&mut self, in_flight: InFlight) {
        self.in_flight[(in_flight.epoch - self.oldest_epoch) as usize] -= 1;
    }

    /// Appends a folio, with the next number.
    fn link(&mut self, folios: &Folios, id: FolioId) {
        let folio = folios.get(id);
        folio.dirtied.store(self.next, Ordering::Relaxed);
        self.next += 1;
        let previous = self.tail;
        folio.dirty_previous.store(previous, Ordering::Relaxed);
        folio.dirty_next.store(NO_FOLIO, Ordering::Relaxed);
        if previous == NO_FOLIO {
            self.head = id.0;
        } else {
            folios.get(FolioId(previous)).dirty_next.store(id.0, Ordering::Relaxed);
        }
        self.tail = id.0;
        self.folios += 1;
    }

    /// Takes a folio out of the list. A walk that has stopped at it goes on with the next one.
    fn unlink(&mut self, folios: &Folios, id: FolioId) {
        let folio = folios.get(id);
        let previous = folio.dirty_previous.load(Ordering::Relaxed);
        let next = folio.dirty_next.load(Ordering::Relaxed);
        if previous == NO_FOLIO {
            self.head = next;
        } else {
            folios.get(FolioId(previous)).dirty_next.store(next, Ordering::Relaxed);
        }
        if next == NO_FOLIO {
            self.tail = previous;
        } else {
            folios.get(FolioId(next)).dirty_previous.store(previous, Ordering::Relaxed);
        }
        self.folios -= 1;
        for (_, at) in self.cursors.iter_mut().filter(|(_, at)| *at == id.0) {
            *at = next;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::dirt::NO_LSN;
    use crate::sync::{AtomicBool, AtomicU64};
    use std::sync::Arc;

    fn folios() -> Folios {
        let folios = Folios::without_reaper(8);
        folios.init_free(FolioId(0), 8);
        folios
    }

    fn list() -> DirtyList {
        DirtyList::new(DirtyPages::alone(&Arc::new(AtomicU64::new(0))))
    }

    /// Returns folios 0, 1, ... of a file, dirty in this order; each has a leaked reference.
    fn dirty(folios: &Folios, list: &DirtyList, count: u32) -> Vec<FolioId> {
        let ids: Vec<_> = (0..count).map(FolioId).collect();
        for id in &ids {
            let _for_ever = folios.start(*id, 64, u64::from(id.0), 0).into_id();
            list.mark(folios, *id);
        }
        ids
    }

    const ALL: Range<u64> = 0..u64::MAX;

    fn ids(found: &DirtyFolios<'_>) -> Vec<FolioId> {
        found.folios.iter().map(FolioRef::id).collect()
    }

    /// Changes to the folio that a walk points to, before the next found.
    #[test]
    fn a_walk_in_parts_misses_no_folio_that_stays_on_the_list() {
        let clean = |list: &DirtyList, folios: &Folios, id| list.forget(folios, id);
        let again = |list: &DirtyList, folios: &Folios, id| {
            list.forget(folios, id);
            list.mark(folios, id);
        };
        type Interference = fn(&DirtyList, &Folios, FolioId);
        let cases: [Interference; 3] = [|_, _, _| {}, clean, again];
        for (case, change) in cases.into_iter().enumerate() {
            let (folios, list) = (folios(), list());
            let all = dirty(&folios, &list, 6);
            let mut walk = list.walk(list.now());
            let first = walk.next_folios(&folios, &ALL, 2, false);
            change(&list, &folios, all[1]);
            change(&list, &folios, all[2]);
            let second = walk.next_folios(&folios, &ALL, 2, false);
            let third = walk.next_folios(&folios, &ALL, 3, false);
            let met: Vec<_> = [&first, &second, &third].into_iter().flat_map(ids).collect();
            let expected =
                if case == 0 { &all[..] } else { &[all[0], all[1], all[3], all[4], all[5]] };
            assert_eq!(met, expected, "case {case}");
            assert!(walk.is_over());
            drop(walk);
            all.iter().for_each(|id| list.forget(&folios, *id));
            assert!(list.is_all_written() && list.state.lock().cursors.is_empty());
            assert_eq!(list.pages.own(), 0);
        }
    }

    #[test]
    fn a_walk_gives_only_what_lies_within_and_was_dirty_before_it() {
        let (folios, list) = (folios(), list());
        let all = dirty(&folios, &list, 5);
        let end = list.now();
        list.forget(&folios, all[1]);
        list.mark(&folios, all[1]);
        let mut walk = list.walk(end);
        assert_eq!(ids(&walk.next_folios(&folios, &(1..4), 10, false)), all[2..4]);
        assert!(walk.is_over());
        assert_eq!(ids(&list.among(&folios, &all[1..4], 64, end)), all[2..4]);
        assert!(
            list.among(&folios, &all[1..4], 128, end).folios.is_empty(),
            "folios of another file"
        );
    }

    #[test]
    fn a_frozen_folio_is_met_later_or_passed() {
        let (folios, list) = (folios(), list());
        let all = dirty(&folios, &list, 3);
        let end = list.now();
        let frozen = folios.adopt(all[1]).try_freeze(0).expect("one reference");
        let mut walk = list.walk(end);
        let found = walk.next_folios(&folios, &ALL, 10, false);
        assert_eq!((ids(&found), found.is_cut_short), (vec![all[0]], true));
        assert!(list.among(&folios, &all, 64, end).is_cut_short);
        assert_eq!(ids(&list.walk(end).next_folios(&folios, &ALL, 10, true)), [all[0], all[2]]);
        frozen.unfreeze().into_id();
        assert_eq!(ids(&walk.next_folios(&folios, &ALL, 10, false)), all[1..]);
        assert!(walk.is_over());
    }

    /// A sync looks at the list, locked, and at the count. One that came between the count and the
    /// mark would find neither an error since it began nor a dirty page.
    #[test]
    fn an_error_is_counted_while_no_sync_can_begin() {
        let (folios, list) = (folios(), list());
        let id = dirty(&folios, &list, 1)[0];
        let in_flight = list.begin(&folios, id, NO_LSN).expect("dirty");
        list.end_failed(&folios, std::iter::once((id, in_flight)), || {
            assert!(list.state.try_lock().is_none(), "a sync could begin here");
        });
        assert_eq!(list.len(), 1);
    }

    /// The folio is moved while another thread finds no room.
    #[test]
    fn the_bytes_of_a_moved_folio_are_counted_all_the_time() {
        let (folios, list) = (folios(), list());
        let old = dirty(&folios, &list, 1)[0];
        let new = FolioId(1);
        let _for_ever = folios.start(new, 64, 0, 0).into_id();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let counting = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(!list.pages.try_add_alone(1, 1), "there is room beside a dirty folio");
                }
            });
            for _ in 0..100_000 {
                list.replace(&folios, old, new);
                list.replace(&folios, new, old);
            }
            is_over.store(true, Ordering::Relaxed);
            counting.join().unwrap();
        });
        assert_eq!((list.len(), list.pages.own()), (1, 1));
    }

    #[test]
    fn epochs_that_have_ended_are_forgotten() {
        let (folios, list) = (folios(), list());
        let all = dirty(&folios, &list, 3);
        let mut in_flight = Vec::new();
        for id in &all {
            in_flight.push((*id, list.begin(&folios, *id, NO_LSN).expect("dirty")));
            let mut state = list.state.lock();
            state.in_flight.push_back(0);
        }
        assert!(!list.is_all_written());
        let oldest_epoch = || list.state.lock().oldest_epoch;
        let mut end = |at| list.end(&folios, std::iter::once(in_flight.remove(at)));
        end(1);
        assert_eq!(oldest_epoch(), 0, "the first one has not ended");
        end(0);
        assert_eq!(oldest_epoch(), 2);
        end(0);
        assert_eq!(oldest_epoch(), 3);
        assert!(list.is_all_written());
        list.wait_for_in_flight();
        assert_eq!(list.state.lock().in_flight, [0]);
    }
}
