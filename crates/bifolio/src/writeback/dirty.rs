//! The dirty list of a file, oldest first, and the count of what is in flight.
//!
//! Linked through the descriptors (rule 4 of `folio`), so that being dirty costs no memory. Each
//! marking has a number, and the list is in its order: so "everything that was dirty at the call"
//! is a number, and a walk that many take part in misses nothing, whoever else takes folios off.
//!
//! What is in flight is counted in two epochs: to wait for everything submitted so far, a sync
//! starts the other epoch and waits for the old one to empty, however much is submitted meanwhile.

use crate::folio::{Flag, Folio, FolioId, FolioRef, NO_FOLIO};
use crate::lru::Memory;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How many times are remembered, to tell the age of dirt, and how many in the age that is asked
/// for: so those that are remembered go back four times as far.
const TICKS_MAX: usize = 64;
const TICKS_PER_AGE: u32 = 16;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct DirtyList {
    /// Which of the cache's pages are counted here: dirty ones, and those on their way.
    counter: fn(&Memory) -> &AtomicU64,
    state: Mutex<State>,
    /// Signalled when an epoch empties.
    emptied: Condvar,
    /// One waiter for an epoch at a time: there are only two.
    flipping: Mutex<()>,
}

#[derive(Debug)]
struct State {
    head: u32,
    tail: u32,
    folios: u64,
    /// The number of the next marking.
    next: u64,
    /// What `next` was at some times in the past, oldest first.
    ticks: VecDeque<(Instant, u64)>,
    epoch: usize,
    in_flight: [u64; 2],
}

impl Default for State {
    fn default() -> Self {
        let (head, tail) = (NO_FOLIO, NO_FOLIO);
        Self { head, tail, folios: 0, next: 1, ticks: VecDeque::new(), epoch: 0, in_flight: [0; 2] }
    }
}

/// A write-out that has begun; [`DirtyList::end`] takes it back.
#[derive(Debug)]
#[must_use]
pub(crate) struct InFlight {
    epoch: usize,
}

/// Some of the oldest dirty folios.
#[derive(Debug)]
pub(super) struct Oldest<'a> {
    pub(super) folios: Vec<FolioRef<'a>>,
    /// Where the walk goes on.
    pub(super) next: u64,
    /// It ended before a folio that is frozen for the moment.
    pub(super) is_cut_short: bool,
}

impl DirtyList {
    /// An empty list, whose pages are counted by `counter`, too.
    pub(super) fn new(counter: fn(&Memory) -> &AtomicU64) -> Self {
        Self {
            counter,
            state: Mutex::default(),
            emptied: Condvar::default(),
            flipping: Mutex::default(),
        }
    }

    /// Folios on the list.
    pub(super) fn len(&self) -> u64 {
        self.state.lock().folios
    }

    /// The number that all markings so far are below.
    pub(super) fn now(&self) -> u64 {
        self.state.lock().next
    }

    /// The number that all markings older than `age` are below, exact to a few calls: what is not
    /// asked for in time looks younger than it is.
    pub(super) fn older_than(&self, age: Duration) -> u64 {
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

    /// Sets DIRTY; the caller holds the folio lock.
    pub(super) fn mark(&self, memory: &Memory, id: FolioId) {
        self.state.lock().mark(memory, id, (self.counter)(memory));
    }

    /// Makes the folio `new`, locked, dirty in the place of `old`, if that is dirty: as old as that
    /// was; tells whether. Nobody has a reference to `old`.
    pub(super) fn replace(&self, memory: &Memory, old: FolioId, new: FolioId) -> bool {
        let mut state = self.state.lock();
        let is_dirty = memory.folio(old).flags.clear(Flag::Dirty);
        if is_dirty {
            memory.folio(new).flags.set(Flag::Dirty);
            state.replace(memory, old, new);
        }
        is_dirty
    }

    /// Clears DIRTY without a write-out: the bytes are no longer wanted. The folio is locked.
    pub(super) fn forget(&self, memory: &Memory, id: FolioId) {
        let mut state = self.state.lock();
        if memory.folio(id).flags.get(Flag::Dirty) {
            state.unmark(memory, id);
            let pages = memory.folio(id).pages();
            (self.counter)(memory).fetch_sub(pages, Ordering::Relaxed);
        }
    }

    /// Turns DIRTY into WRITEBACK, if it is set; the caller holds the folio lock and there is no
    /// write-out of the folio in flight.
    pub(super) fn begin(&self, memory: &Memory, id: FolioId) -> Option<InFlight> {
        let folio = memory.folio(id);
        let mut state = self.state.lock();
        if !folio.flags.get(Flag::Dirty) {
            return None;
        }
        state.unmark(memory, id);
        let fresh = folio.flags.set(Flag::Writeback);
        debug_assert!(fresh, "{id:?} is written out twice at a time");
        let epoch = state.epoch;
        state.in_flight[epoch] += 1;
        Some(InFlight { epoch })
    }

    /// Ends write-outs. Those that failed leave the folios dirty (WRITEBACK-1).
    pub(super) fn end(
        &self,
        memory: &Memory,
        ended: impl IntoIterator<Item = (FolioId, InFlight)>,
        failed: bool,
    ) {
        let mut state = self.state.lock();
        let mut pages = 0;
        let mut is_empty = false;
        for (id, in_flight) in ended {
            if failed {
                state.mark(memory, id, (self.counter)(memory));
            }
            pages += memory.folio(id).pages();
            memory.folio(id).flags.end_writeback();
            state.in_flight[in_flight.epoch] -= 1;
            is_empty |= state.in_flight[in_flight.epoch] == 0;
        }
        (self.counter)(memory).fetch_sub(pages, Ordering::Relaxed);
        if is_empty {
            self.emptied.notify_all();
        }
    }

    /// Blocks until everything that was in flight at the call has ended.
    pub(super) fn wait_for_in_flight(&self) {
        let _one_at_a_time = self.flipping.lock();
        let mut state = self.state.lock();
        let epoch = state.epoch;
        state.epoch ^= 1;
        while state.in_flight[epoch] > 0 {
            self.emptied.wait(&mut state);
        }
    }

    /// Up to `folios_max` of the oldest folios whose marking has a number in `range`. `last`, to
    /// which the caller has a reference, came before them: the walk need not begin at the head.
    pub(super) fn oldest<'a>(
        &self,
        memory: &'a Memory,
        range: Range<u64>,
        folios_max: usize,
        last: Option<FolioId>,
    ) -> Oldest<'a> {
        let state = self.state.lock();
        let mut found = Oldest { folios: Vec::new(), next: range.end, is_cut_short: false };
        let is_still_there = |last: &FolioId| {
            let folio = memory.folio(*last);
            folio.flags.get(Flag::Dirty) && folio.dirtied.load(Ordering::Relaxed) < range.start
        };
        let last = last.filter(is_still_there);
        let mut next =
            last.map_or(state.head, |last| memory.folio(last).dirty_next.load(Ordering::Relaxed));
        while next != NO_FOLIO {
            let id = FolioId(next);
            let folio = memory.folio(id);
            let number = folio.dirtied.load(Ordering::Relaxed);
            if number >= range.end {
                break;
            }
            next = folio.dirty_next.load(Ordering::Relaxed);
            if number < range.start {
                continue;
            }
            let reference = (found.folios.len() < folios_max).then(|| memory.folios.try_get(id));
            let Some(Ok(reference)) = reference else {
                found.is_cut_short = reference.is_some();
                found.next = number;
                break;
            };
            found.folios.push(reference);
        }
        found
    }
}

impl State {
    fn mark(&mut self, memory: &Memory, id: FolioId, counter: &AtomicU64) {
        let folio = memory.folio(id);
        if folio.flags.set(Flag::Dirty) {
            counter.fetch_add(folio.pages(), Ordering::Relaxed);
            folio.dirtied.store(self.next, Ordering::Relaxed);
            self.next += 1;
            self.link(memory, id);
        }
    }

    fn unmark(&mut self, memory: &Memory, id: FolioId) {
        memory.folio(id).flags.clear(Flag::Dirty);
        self.unlink(memory, id);
    }

    fn link(&mut self, memory: &Memory, id: FolioId) {
        let folio = memory.folio(id);
        let previous = self.tail;
        set_links(folio, previous, NO_FOLIO);
        if previous == NO_FOLIO {
            self.head = id.0;
        } else {
            memory.folio(FolioId(previous)).dirty_next.store(id.0, Ordering::Relaxed);
        }
        self.tail = id.0;
        self.folios += 1;
    }

    fn replace(&mut self, memory: &Memory, old: FolioId, new: FolioId) {
        let (old, successor) = (memory.folio(old), memory.folio(new));
        successor.dirtied.store(old.dirtied.load(Ordering::Relaxed), Ordering::Relaxed);
        let previous = old.dirty_previous.load(Ordering::Relaxed);
        let next = old.dirty_next.load(Ordering::Relaxed);
        set_links(successor, previous, next);
        if previous == NO_FOLIO {
            self.head = new.0;
        } else {
            memory.folio(FolioId(previous)).dirty_next.store(new.0, Ordering::Relaxed);
        }
        if next == NO_FOLIO {
            self.tail = new.0;
        } else {
            memory.folio(FolioId(next)).dirty_previous.store(new.0, Ordering::Relaxed);
        }
    }

    fn unlink(&mut self, memory: &Memory, id: FolioId) {
        let folio = memory.folio(id);
        let previous = folio.dirty_previous.load(Ordering::Relaxed);
        let next = folio.dirty_next.load(Ordering::Relaxed);
        if previous == NO_FOLIO {
            self.head = next;
        } else {
            memory.folio(FolioId(previous)).dirty_next.store(next, Ordering::Relaxed);
        }
        if next == NO_FOLIO {
            self.tail = previous;
        } else {
            memory.folio(FolioId(next)).dirty_previous.store(previous, Ordering::Relaxed);
        }
        self.folios -= 1;
    }
}

fn set_links(folio: &Folio, previous: u32, next: u32) {
    folio.dirty_previous.store(previous, Ordering::Relaxed);
    folio.dirty_next.store(next, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HugePages;
    use crate::frames::Arena;
    use crate::sys::probe::Features;

    fn memory() -> Memory {
        let bytes = 4 << 20;
        let arena = Arena::new(bytes, bytes, HugePages::Never, Features::probe(&[])).unwrap();
        Memory::new(arena, 1024, 1).unwrap()
    }

    /// A folio that has a reference for as long as the memory lives.
    fn start(memory: &Memory) -> FolioId {
        let id = memory.arena.allocate(0, None, &memory.folios).unwrap().expect("a free frame");
        memory.folios.start(id, 0, 0, 0).into_id()
    }

    fn oldest(list: &DirtyList, memory: &Memory, range: Range<u64>) -> Vec<FolioId> {
        list.oldest(memory, range, 10, None).folios.iter().map(FolioRef::id).collect()
    }

    /// What may become of the last one of a part before the next part is asked for.
    #[test]
    fn a_walk_in_parts_misses_none_whatever_becomes_of_the_last_one_meanwhile() {
        let clean = |list: &DirtyList, memory: &Memory, id| list.forget(memory, id);
        let again = |list: &DirtyList, memory: &Memory, id| {
            list.forget(memory, id);
            list.mark(memory, id);
        };
        type Meanwhile = fn(&DirtyList, &Memory, FolioId);
        let meanwhile: [Meanwhile; 3] = [|_, _, _| {}, clean, again];
        for (case, change) in meanwhile.into_iter().enumerate() {
            let memory = memory();
            let list = DirtyList::new(|memory| &memory.dirty_pages);
            let ids = [0; 5].map(|_| start(&memory));
            ids.iter().for_each(|id| list.mark(&memory, *id));
            let end = list.now();
            let first = list.oldest(&memory, 0..end, 2, None);
            change(&list, &memory, ids[1]);
            let second = list.oldest(&memory, first.next..end, 2, Some(ids[1]));
            let third = list.oldest(&memory, second.next..end, 2, Some(ids[3]));
            let parts = [first, second, third].map(|part| part.folios);
            let found: Vec<_> = parts.iter().flatten().map(FolioRef::id).collect();
            assert_eq!(found, ids, "case {case}");
            ids.iter().for_each(|id| list.forget(&memory, *id));
        }
    }

    #[test]
    fn a_folio_that_replaces_a_dirty_one_is_as_dirty_and_as_old() {
        let memory = memory();
        for place in 0..3 {
            let list = DirtyList::new(|memory| &memory.dirty_pages);
            let mut ids = [0; 3].map(|_| start(&memory));
            let numbers = ids.map(|id| {
                list.mark(&memory, id);
                list.now() - 1
            });
            let (old, new) = (ids[place], start(&memory));
            let dirty_pages = memory.dirty_pages.load(Ordering::Relaxed);
            assert!(list.replace(&memory, old, new));
            ids[place] = new;
            assert_eq!(oldest(&list, &memory, 0..list.now()), ids);
            let its_own = numbers[place]..numbers[place] + 1;
            assert_eq!(oldest(&list, &memory, its_own), [new]);
            assert_eq!(memory.dirty_pages.load(Ordering::Relaxed), dirty_pages);
            assert!(!memory.folio(old).flags.get(Flag::Dirty));
            // The next one is the youngest.
            let youngest = start(&memory);
            list.mark(&memory, youngest);
            let ids = [&ids[..], &[youngest]].concat();
            assert_eq!(oldest(&list, &memory, 0..list.now()), ids);
            // One in the place of a clean one is clean.
            assert!(!list.replace(&memory, old, start(&memory)));
            assert_eq!(oldest(&list, &memory, 0..list.now()), ids);
            for id in ids {
                list.forget(&memory, id);
            }
            assert_eq!(list.len(), 0);
        }
    }
}
