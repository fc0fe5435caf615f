//! Write errors of a file: recorded once, and reported once to every handle that was open.
//!
//! Modelled on the kernel's `errseq_t`: a number that grows with each error, and a cursor in each
//! handle. A clone of a handle shares its cursor, like a duplicated descriptor.

use crate::error::Error;
use crate::sync::{AtomicU64, Mutex, Ordering};

#[derive(Debug, Default)]
pub(crate) struct WriteErrors {
    last: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    count: u64,
    error: Option<Error>,
}

/// Number of the last error that a handle has reported.
#[derive(Debug)]
pub(crate) struct ErrorCursor(AtomicU64);

impl WriteErrors {
    pub(crate) fn record(&self, error: Error) {
        let mut last = self.last.lock();
        last.count += 1;
        last.error = Some(error);
    }

    /// Returns a cursor for a new handle, which reports later errors only.
    pub(crate) fn sample(&self) -> ErrorCursor {
        ErrorCursor(AtomicU64::new(self.last.lock().count))
    }

    pub(crate) fn count(&self) -> u64 {
        self.last.lock().count
    }

    /// Returns the last error that the cursor has not reported yet, once. Also returns the last
    /// error since there were `count`, reported or not: two syncs through one cursor may need the
    /// same page.
    pub(crate) fn check_since(&self, cursor: &ErrorCursor, count: u64) -> Option<Error> {
        let last = self.last.lock();
        // Relaxed: under the lock; clones of a handle race only for which one reports it.
        let told = cursor.0.swap(last.count, Ordering::Relaxed);
        if told.min(count) == last.count { None } else { last.error.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::io_error;

    fn error() -> Error {
        io_error("f", "write", Some(0..1), std::io::ErrorKind::Other.into())
    }

    #[test]
    fn every_open_handle_is_told_once_and_a_later_one_not_at_all() {
        let errors = WriteErrors::default();
        let check = |cursor: &ErrorCursor| errors.check_since(cursor, errors.count());
        let (a, b) = (errors.sample(), errors.sample());
        assert!(check(&a).is_none());
        errors.record(error());
        let late = errors.sample();
        assert!(check(&a).is_some());
        assert!(check(&a).is_none());
        assert!(check(&late).is_none());
        errors.record(error());
        assert!(check(&b).is_some(), "two errors are told as one, the last");
        assert!(check(&b).is_none());
        assert!(check(&late).is_some());
    }

    #[test]
    fn two_syncs_through_one_cursor_are_both_told_of_a_failure() {
        let errors = WriteErrors::default();
        let cursor = errors.sample();
        let begun = errors.count();
        errors.record(error());
        assert!(errors.check_since(&cursor, begun).is_some());
        assert!(errors.check_since(&cursor, begun).is_some());
        assert!(errors.check_since(&cursor, errors.count()).is_none());
    }
}
