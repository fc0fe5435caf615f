//! The target of a call of SQLite on an exclusive database, and the reason why the call failed.

use crate::system::SystemFile;
use bifolio::Error;
use std::ffi::c_int;

/// Bytes of a database: in the cache, or in the system's file before the first lock.
pub(crate) enum Target<'a> {
    Cache(&'a bifolio::File),
    System(&'a mut SystemFile),
}

/// Reason why an access failed.
pub(crate) enum Problem {
    Code(c_int),
    Cache(Error),
}

impl From<c_int> for Problem {
    fn from(code: c_int) -> Self {
        Self::Code(code)
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Cache(error)
    }
}
