//! Whether the cache may be used: not closed, not in a forked child; and how many maps are in use,
//! which a close must not meet. Asked by every call before it takes a lock.

use crate::error::{ErrorKind, Result};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::process::Origin;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct CacheState {
    /// The number of maps in use, and `CLOSED`. One word: a map that begins and a close that comes
    /// see each other, whichever is first.
    state: AtomicU64,
    origin: Origin,
}

/// Set in the state of a gate that is closed.
const CLOSED: u64 = 1 << 63;

impl CacheState {
    pub(crate) fn new(origin: Origin) -> Self {
        Self { state: AtomicU64::new(0), origin }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.origin.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        let is_closed = self.state.load(Ordering::Acquire) & CLOSED != 0;
        if is_closed { Err(ErrorKind::Closed.into()) } else { Ok(()) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Counts a map; the caller checks the cache_state afterwards.
    pub(super) fn begin_map(&self) {
        // Relaxed: a close changes the same word, so one of the two sees the other.
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end_map(&self) {
        // Release: pairs with the Acquire in `close`: what was stored through the map is found.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the cache_state, unless maps are in use: then answers how many.
    pub(super) fn close(&self) -> std::result::Result<(), u64> {
        // AcqRel/Acquire: pairs with the Release in `end_map`, and with the Acquire in `check`.
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|state| state & !CLOSED)
    }

    /// Opens the cache_state again: the close has failed.
    pub(super) fn reopen(&self) {
        // Release: pairs with the Acquire in `check`.
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Refuses while maps are in use.
    pub(super) fn check_maps(&self) -> Result<()> {
        // Acquire: pairs with the Release in `end_map`, as in `close`.
        match self.state.load(Ordering::Acquire) & !CLOSED {
            0 => Ok(()),
            maps => Err(ErrorKind::MapsAlive { maps }.into()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_map_that_begins_and_a_close_see_each_other() {
        let cache_state = CacheState::new(Origin::here());
        cache_state.begin_map();
        assert_eq!(cache_state.close(), Err(1));
        assert!(cache_state.check().is_ok() && cache_state.check_maps().is_err());
        cache_state.end_map();
        cache_state.close().unwrap();
        // One that comes too late is refused by its own check.
        cache_state.begin_map();
        assert!(cache_state.check().is_err());
        cache_state.end_map();
        cache_state.reopen();
        assert!(cache_state.check().is_ok());
    }
}
