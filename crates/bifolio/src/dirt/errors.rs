//! Write errors of a file, recorded once, and reported once to every handle that was open.
//!
//! Modelled on the kernel's `errseq_t`: a number that grows with each error, and a cursor in each
//! handle. A clone of a handle shares its cursor, like a duplicated descriptor.

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Mutex, Ordering};

#[derive(Debug, Default)]
pub(crate) struct WriteErrors {
    last: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    count: u64,
    /// The count at the last report to a handle.
    reported: u64,
    error: Option<Error>,
}

#[derive(Debug)]
pub(crate) struct ErrorCursor(AtomicU64);

impl WriteErrors {
    /// Records an error. Of errors with one cause that were not reported yet, the one at the lowest
    /// position is kept: transfers of one write-out end in any order.
    pub(crate) fn record(&self, error: Error) {
        let start_of = |error: &Error| error.range().map(|range| range.start);
        let mut last = self.last.lock();
        let goes_on = last.reported < last.count
            && last.error.as_ref().is_some_and(|kept| {
                kept.errno() == error.errno() && start_of(kept) <= start_of(&error)
            });
        last.count += 1;
        if !goes_on {
            last.error = Some(error);
        }
    }

    /// Returns a cursor for a new handle, which reports later errors only.
    pub(crate) fn sample(&self) -> ErrorCursor {
        ErrorCursor(AtomicU64::new(self.last.lock().count))
    }

    pub(crate) fn count(&self) -> u64 {
        self.last.lock().count
    }

    /// Fails with the last error that the cursor has not reported yet, once. Also fails with the
    /// last error since there were `count`, at the begin of the call, reported or not: two syncs
    /// through one cursor may need the same page.
    pub(crate) fn check_since(&self, cursor: &ErrorCursor, count: u64) -> Result<()> {
        let mut last = self.last.lock();
        // Relaxed: under the lock; clones of a handle race only for which one reports it.
        let told = cursor.0.swap(last.count, Ordering::Relaxed);
        match &last.error {
            Some(error) if told.min(count) < last.count => {
                let error = Error::writeback(error.clone(), count == last.count);
                last.reported = last.count;
                Err(error)
            }
            _ => Ok(()),
        }
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
    fn the_lowest_of_the_positions_that_failed_is_reported() {
        let errors = WriteErrors::default();
        let cursor = errors.sample();
        for start in [8, 0, 16] {
            let cause = std::io::ErrorKind::StorageFull.into();
            errors.record(io_error("f", "write", Some(start..start + 1), cause));
        }
        let error = errors.check_since(&cursor, errors.count()).unwrap_err();
        assert_eq!(error.range(), Some(0..1));
    }

    #[test]
    fn every_open_handle_is_told_once_and_a_later_one_not_at_all() {
        let errors = WriteErrors::default();
        let check = |cursor: &ErrorCursor| errors.check_since(cursor, errors.count());
        let (a, b) = (errors.sample(), errors.sample());
        assert!(check(&a).is_ok());
        errors.record(error());
        let late = errors.sample();
        assert!(check(&a).is_err());
        assert!(check(&a).is_ok());
        assert!(check(&late).is_ok());
        errors.record(error());
        assert!(check(&b).is_err(), "two errors are told as one, the last");
        assert!(check(&b).is_ok());
        assert!(check(&late).is_err());
    }

    #[test]
    fn two_syncs_through_one_cursor_are_both_told_of_a_failure() {
        let errors = WriteErrors::default();
        let cursor = errors.sample();
        let begun = errors.count();
        errors.record(error());
        assert!(errors.check_since(&cursor, begun).is_err());
        assert!(errors.check_since(&cursor, begun).is_err());
        assert!(errors.check_since(&cursor, errors.count()).is_ok());
    }
}
