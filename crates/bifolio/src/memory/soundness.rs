//! Whether the cache can be relied upon: until the kernel refuses something that can neither be
//! undone nor done without.
//!
//! A page of a map that cannot be unmapped, or whose last bytes cannot be had back, is such a case:
//! what is in the pages or on the device is not certain any more. So are faults that cannot be
//! served: a page that can neither be had nor be marked as one that cannot. The cache is *poisoned*
//! then, for good: what is resident can still be read, nothing is read in, written or written out,
//! and everything else answers [`ErrorKind::Poisoned`] with the first cause. (`ErrorKind::Fault`, a
//! page that could not be had when it was touched, has the same cause then.)
//!
//! Asked by whoever claims a page, changes one, or starts a transfer; told by regions, faults,
//! reclaim and write-outs.

use crate::error::{ErrorKind, Result};
use std::io;
use std::sync::{Arc, OnceLock};

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Soundness {
    cause: OnceLock<Cause>,
}

#[derive(Debug)]
struct Cause {
    what: &'static str,
    source: Arc<io::Error>,
}

impl Soundness {
    /// The cache cannot be relied upon from now on.
    pub(crate) fn lose(&self, what: &'static str, source: io::Error) {
        let cause = Cause { what, source: Arc::new(source) };
        log::error!("the cache is poisoned: {what}: {}", cause.source);
        // The first cause stays.
        let _ = self.cause.set(cause);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.cause.get().is_some()
    }

    /// Refuses what must not be done any more.
    ///
    /// # Errors
    /// The cache is poisoned.
    pub(crate) fn check(&self) -> Result<()> {
        let Some(cause) = self.cause.get() else { return Ok(()) };
        Err(ErrorKind::Poisoned { what: cause.what, source: Arc::clone(&cause.source) }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_is_told_for_good() {
        let soundness = Soundness::default();
        assert!(!soundness.is_lost() && soundness.check().is_ok());
        soundness.lose("first", io::Error::from_raw_os_error(libc::ENOMEM));
        soundness.lose("second", io::Error::from_raw_os_error(libc::EIO));
        for _ in 0..2 {
            let error = soundness.check().unwrap_err();
            let ErrorKind::Poisoned { what: "first", source } = error.kind() else {
                panic!("{error:?}")
            };
            assert_eq!(source.raw_os_error(), Some(libc::ENOMEM));
        }
    }
}
