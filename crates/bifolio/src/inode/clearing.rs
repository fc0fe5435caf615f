//! The state of a clear: whole folios of a file are zeroed together with their storage
//! (`punch_hole`, `zero_range`).
//!
//! PROTOCOL CLEAR, of a clear against a fill and a write-out. A clear changes the backing first,
//! because only the backing can fail, and then removes the folios, dirty or not. In between:
//!
//! ```text
//!  CLEAR, with `resizing`                      FILL, folio locked, in the table
//!  P1 lock `cutting`; begin: publish the       F1 insert
//!     pages; barrier                           F2 note the clear that has passed P3; read the
//!  P2 the backing clears them                     bytes from the backing
//!  P3 publish that; unlock `cutting`           F3 barrier; published pages? then set PUNCHED
//!  P4 remove each folio that is not               and, unless F2 followed P3, zeros
//!     PUNCHED, with its lock                   F4 store Entries READY, unlock
//!  P5 end: publish nothing; barrier
//!  P6 clear PUNCHED of each folio, with        WRITE-OUT, `cutting` shared, folio locked
//!     its lock                                 O1 published pages, and not PUNCHED? then
//!                                                 the folio becomes clean without a write
//! ```
//!
//! From P1 on, a fill gives zeros: a page does not have its old bytes again after it was seen
//! cleared. A folio without PUNCHED was filled before that, and P4 removes it: F1 and P1 each
//! store, then load the other's word, so that P4 finds the folio, whose lock it waits for, or F3
//! finds the pages published. A folio with PUNCHED has zeros and later writes, and stays. At P4 a
//! transfer of F2 may still bring old bytes: its folio is in the table, and F3 replaces them. A
//! read that begins after P3 must be kept: the page may have been written since, written out, and
//! evicted. (Before P3 no page is written out.)
//!
//! If P2 fails, P5 comes before P3, so that no write-out sees the pages, and P6 removes the clean
//! folios with PUNCHED, which have zeros instead of the backing's bytes. Those that were written
//! meanwhile stay.
//!
//! P4 and P6 wait for folio locks, and hold `resizing` only. F3 waits for nothing: the owner of a
//! `PageRefMut` may read pages that a clear has published while the clear waits for its folio.

use crate::page::{Flag, LockedFolio};
use crate::sync::{AtomicU64, Mutex, Ordering, barrier_of_store_and_load};
use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct Clearing {
    /// 0 if there is none; from P1 on, twice its number; from P3 on, 1 more.
    state: AtomicU64,
    current: Mutex<Clear>,
}

#[derive(Debug, Default)]
struct Clear {
    /// Number of the current clear, or of the last one.
    number: u64,
    /// Pages of the current clear; empty if there is none.
    pages: Range<u64>,
}

/// The clear that had cleared the storage when a read began (F2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClearedBefore(u64);

impl Clearing {
    /// P1. Callers serialize.
    pub(crate) fn begin(&self, pages: Range<u64>) {
        let mut current = self.current.lock();
        *current = Clear { number: current.number + 1, pages };
        // Relaxed: the barrier orders it, and the lock has the pages.
        self.state.store(2 * current.number, Ordering::Relaxed);
        barrier_of_store_and_load();
    }

    /// P3.
    pub(crate) fn note_storage_cleared(&self) {
        // Release: pairs with the Acquire in `cleared_before`: the storage is cleared.
        self.state.fetch_add(1, Ordering::Release);
    }

    /// P5.
    pub(crate) fn end(&self) {
        let mut current = self.current.lock();
        // Relaxed: as in `begin`.
        self.state.store(0, Ordering::Relaxed);
        current.pages = 0..0;
        barrier_of_store_and_load();
    }

    /// F2.
    pub(crate) fn cleared_before(&self) -> Option<ClearedBefore> {
        // Acquire: pairs with the Release in `note_storage_cleared`.
        let state = self.state.load(Ordering::Acquire);
        (state % 2 == 1).then_some(ClearedBefore(state / 2))
    }

    /// F3, for a folio, locked and in the table, before it is uptodate: marks it if its pages are
    /// being cleared. Returns `true` if its bytes must then be zeros: they were read before the
    /// storage was cleared.
    pub(crate) fn mark(&self, locked: &LockedFolio<'_>, before: Option<ClearedBefore>) -> bool {
        let Some(clear) = self.of_page(locked.index()) else { return false };
        locked.flags.set(Flag::Punched);
        before != Some(clear)
    }

    /// O1: returns `true` if the clear, whose storage is cleared, will remove a locked folio.
    pub(crate) fn will_remove(&self, locked: &LockedFolio<'_>) -> bool {
        !locked.flags.get(Flag::Punched) && self.of_page(locked.index()).is_some()
    }

    /// F3: returns the clear of the page at `index`. The caller has the lock of its folio.
    pub(crate) fn of_page(&self, index: u64) -> Option<ClearedBefore> {
        barrier_of_store_and_load();
        // Relaxed: the barrier orders it, and the lock has the pages.
        if self.state.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let current = self.current.lock();
        current.pages.contains(&index).then_some(ClearedBefore(current.number))
    }
}
