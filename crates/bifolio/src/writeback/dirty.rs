//! The dirty list of a file, oldest first, and the count of what is in flight.
//!
//! Linked through the descriptors (rule 4 of `folio`), so that being dirty costs no memory. What is
//! in flight is counted in two epochs: to wait for everything submitted so far, a sync starts the
//! other epoch and waits for the old one to empty, however much is submitted meanwhile.

use crate::folio::{Flag, Folio, FolioId, FolioRef, NO_FOLIO};
use crate::lru::Memory;
use crate::sync::{Condvar, Mutex, Ordering};

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct DirtyList {
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
    epoch: usize,
    in_flight: [u64; 2],
}

impl Default for State {
    fn default() -> Self {
        Self { head: NO_FOLIO, tail: NO_FOLIO, folios: 0, epoch: 0, in_flight: [0; 2] }
    }
}

/// A write-out that has begun; [`DirtyList::end`] takes it back.
#[derive(Debug)]
#[must_use]
pub(super) struct InFlight {
    epoch: usize,
}

impl DirtyList {
    /// Folios on the list.
    pub(super) fn len(&self) -> u64 {
        self.state.lock().folios
    }

    /// Sets DIRTY; the caller holds the folio lock.
    pub(super) fn mark(&self, memory: &Memory, id: FolioId) {
        self.state.lock().mark(memory, id);
    }

    /// Clears DIRTY without a write-out: the bytes are no longer wanted. The folio is locked.
    pub(super) fn forget(&self, memory: &Memory, id: FolioId) {
        let mut state = self.state.lock();
        if memory.folio(id).flags.get(Flag::Dirty) {
            state.unmark(memory, id);
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

    /// Ends a write-out. One that failed leaves the folio dirty (WRITEBACK-1).
    pub(super) fn end(&self, memory: &Memory, id: FolioId, in_flight: InFlight, failed: bool) {
        let mut state = self.state.lock();
        if failed {
            state.mark(memory, id);
        }
        memory.folio(id).flags.end_writeback();
        state.in_flight[in_flight.epoch] -= 1;
        if state.in_flight[in_flight.epoch] == 0 {
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

    /// The oldest dirty folio, with a reference; it goes to the end of the list, so that as many
    /// calls as there are folios see each of them. `Err` if it is frozen for the moment.
    pub(super) fn rotate<'a>(&self, memory: &'a Memory) -> Result<Option<FolioRef<'a>>, ()> {
        let mut state = self.state.lock();
        let Some(id) = state.first() else { return Ok(None) };
        let folio = memory.folios.try_get(id).map_err(|_| ())?;
        state.unlink(memory, id);
        state.link(memory, id);
        Ok(Some(folio))
    }
}

impl State {
    fn first(&self) -> Option<FolioId> {
        (self.head != NO_FOLIO).then_some(FolioId(self.head))
    }

    fn mark(&mut self, memory: &Memory, id: FolioId) {
        let folio = memory.folio(id);
        if folio.flags.set(Flag::Dirty) {
            memory.dirty_pages.fetch_add(folio.pages(), Ordering::Relaxed);
            self.link(memory, id);
        }
    }

    fn unmark(&mut self, memory: &Memory, id: FolioId) {
        let folio = memory.folio(id);
        folio.flags.clear(Flag::Dirty);
        memory.dirty_pages.fetch_sub(folio.pages(), Ordering::Relaxed);
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
