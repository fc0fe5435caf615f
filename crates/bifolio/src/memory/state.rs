//! Whether a cache may be used: it is open, in the process that built it, and not poisoned.

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::process::Origin;
use std::io;
use std::sync::{Arc, OnceLock};

/// State of the cache: open or closed, and the number of maps in use.
#[derive(Debug)]
pub(crate) struct CacheState {
    /// Number of maps in use, and `CLOSED`. One word, so that a new map and a concurrent close see
    /// each other in either order.
    state: AtomicU64,
    origin: Origin,
}

/// Bit of a closed cache.
const CLOSED: u64 = 1 << 63;

impl CacheState {
    pub(crate) fn new(origin: Origin) -> Self {
        Self { state: AtomicU64::new(0), origin }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.origin.is_forked() {
            return Err(Error::forked());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        let is_closed = self.state.load(Ordering::Acquire) & CLOSED != 0;
        if is_closed {
            return Err(Error::new(ErrorKind::Closed, "the cache is closed"));
        }
        Ok(())
    }

    /// Fails if the cache is closed, belongs to a parent process, or is poisoned.
    pub(crate) fn check_sound(&self, soundness: &Soundness) -> Result<()> {
        self.check()?;
        soundness.check()
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Counts a map; the caller then checks the state.
    pub(crate) fn begin_map(&self) {
        // Relaxed: a close changes the same word, so one of the two sees the other.
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn end_map(&self) {
        // Release: pairs with the Acquire in `close`: what was stored through the map is found.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the state, or returns the number of maps in use.
    pub(crate) fn close(&self) -> std::result::Result<(), u64> {
        // AcqRel/Acquire: pairs with the Release in `end_map`, and with the Acquire in `check`.
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|state| state & !CLOSED)
    }

    /// Opens the state again after a failed close.
    pub(crate) fn reopen(&self) {
        // Release: pairs with the Acquire in `check`.
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Fails while maps are in use.
    pub(crate) fn check_maps(&self) -> Result<()> {
        // Acquire: pairs with the Release in `end_map`, as in `close`.
        match self.state.load(Ordering::Acquire) & !CLOSED {
            0 => Ok(()),
            maps => Err(Error::maps_alive(maps)),
        }
    }
}

/// Records that the kernel refused an operation that can be neither undone nor skipped: the cache
/// is *poisoned*.
///
/// Causes are a page of a map that cannot be unmapped or whose last bytes cannot be recovered, and
/// a fault that can be neither served nor answered with poison. The contents of the pages or of the
/// device are uncertain from then on. A poisoned cache stays poisoned. Resident pages can still be
/// read; nothing is filled, written or written back, and every other operation returns
/// [`ErrorKind::Poisoned`] with the first cause. (`ErrorKind::Fault`, for a page that could not be
/// filled when it was touched, then carries the same cause.)
///
/// Checked before a page is claimed or changed and before a transfer starts. Set by regions,
/// faults, reclaim and write-back.
#[derive(Debug, Default)]
pub(crate) struct Soundness {
    /// [`ErrorKind::Poisoned`] with the first cause.
    error: OnceLock<Error>,
}

impl Soundness {
    /// Poisons the cache. Only the first cause is kept.
    pub(crate) fn lose(&self, what: &'static str, source: &io::Error) {
        log::error!("the cache is poisoned: {what}: {source}");
        let copy = || io::Error::new(source.kind(), source.to_string());
        let source = source.raw_os_error().map_or_else(copy, io::Error::from_raw_os_error);
        let text = format!("the cache is poisoned: {what}: {source}");
        let error = Error::new(ErrorKind::Poisoned, text).because(Arc::new(source));
        let _ = self.error.set(error);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.error.get().is_some()
    }

    /// Returns an error if the cache is poisoned.
    ///
    /// # Errors
    /// [`ErrorKind::Poisoned`] with the first cause.
    pub(crate) fn check(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisoned_cache_keeps_its_first_cause() {
        let soundness = Soundness::default();
        assert!(!soundness.is_lost() && soundness.check().is_ok());
        soundness.lose("first", &io::Error::from_raw_os_error(libc::ENOMEM));
        soundness.lose("second", &io::Error::from_raw_os_error(libc::EIO));
        for _ in 0..2 {
            let error = soundness.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Poisoned);
            assert!(error.to_string().contains(": first: "), "{error}");
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        }
    }
}
