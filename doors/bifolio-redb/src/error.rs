//! The error types of redb's interface, in one place: redb 5 changes them.
//!
//! Called by `backend.rs`. The feature `experimental-api-5` has the interface of redb 5 today.

use std::io;

/// Error type of the I/O methods of [`StorageBackend`](redb::StorageBackend).
#[cfg(feature = "experimental-api-5")]
pub(crate) type BackendIoError = redb::BackendError;
#[cfg(not(feature = "experimental-api-5"))]
pub(crate) type BackendIoError = io::Error;

/// Converts an error of the cache. Kind, error number, file and position are kept.
pub(crate) fn from_cache(error: bifolio::Error) -> BackendIoError {
    from_io(error.into())
}

/// Returns the error of a call that comes after `close`. redb makes none.
pub(crate) fn closed() -> BackendIoError {
    from_io(io::Error::other("the database is closed: its backend cannot be used any more"))
}

fn from_io(error: io::Error) -> BackendIoError {
    #[cfg(feature = "experimental-api-5")]
    return redb::BackendError::Io(error);
    #[cfg(not(feature = "experimental-api-5"))]
    error
}
