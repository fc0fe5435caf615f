//! Errors of the cache itself. What the store below answers is passed on as it is.

use super::object_store;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Name of the store in errors of `object_store`.
const STORE: &str = "bifolio";

/// An error of the cache, not of the store below. It is the source of an
/// [`object_store::Error::Generic`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A setting of the builder is invalid.
    #[error("{name}: {problem}")]
    Config {
        /// The setting.
        name: &'static str,
        /// Reason why its value is invalid, and the valid values.
        problem: String,
    },
    /// The disk tier cannot be opened.
    #[error("cannot open the disk tier {}: {source}", path.display())]
    Disk {
        /// The file or directory that failed.
        path: PathBuf,
        /// The error of the system.
        source: Arc<std::io::Error>,
    },
    /// Another store, in this process or another one, has the disk tier open.
    #[error("the disk tier {} is in use: give each process a directory of its own", path.display())]
    DiskInUse {
        /// The directory.
        path: PathBuf,
    },
    /// The disk of the tier hangs: it has answered nothing for ten times the `disk_timeout`. A thread
    /// goes on to wait for it; until that ends, the tier is in use.
    #[error("the disk tier {} did not answer for {} ms", path.display(), waited.as_millis())]
    DiskHangs {
        /// The directory.
        path: PathBuf,
        /// The time that was waited.
        waited: std::time::Duration,
    },
    /// The page cache refused a file.
    #[error("the page cache refused the file of the parts: {0}")]
    Cache(#[source] Arc<bifolio::Error>),
    /// The object changed while it was read.
    #[error("{location}: the object changed {changes} times while it was read; try again")]
    Changed {
        /// The object.
        location: String,
        /// Number of changes seen.
        changes: u32,
    },
    /// The store sent a body of the wrong length.
    #[error(
        "{location}: {got_bytes} bytes received, {expected_bytes} expected from position {}",
        range.start
    )]
    WrongLength {
        /// The object.
        location: String,
        /// Bytes of the object that were requested.
        range: Range<u64>,
        /// Length of the range.
        expected_bytes: u64,
        /// Length of the body, or more than that.
        got_bytes: u64,
    },
    /// The store sent another range than the one requested.
    #[error("{location}: bytes {got:?} received, {range:?} requested")]
    WrongRange {
        /// The object.
        location: String,
        /// Bytes of the object that were requested.
        range: Range<u64>,
        /// Bytes of the object that the store says it sent.
        got: Range<u64>,
    },
    /// A range ends before it starts, or starts at the end of the object or later.
    #[error("{location}: no bytes {range:?} in an object of {size_bytes} bytes")]
    InvalidRange {
        /// The object.
        location: String,
        /// The range.
        range: Range<u64>,
        /// Length of the object.
        size_bytes: u64,
    },
    /// There is no memory for the bytes of a range.
    #[error("{location}: no memory for the {length_bytes} bytes of a range")]
    NoMemory {
        /// The object.
        location: String,
        /// Length of the range.
        length_bytes: u64,
    },
    /// The store sent nothing for the time that the builder allows.
    #[error("{location}: no {} received for {} ms", described(range), waited.as_millis())]
    Stalled {
        /// The object.
        location: String,
        /// Bytes of the object that were requested; `None` for its metadata.
        range: Option<Range<u64>>,
        /// The time that was waited.
        waited: std::time::Duration,
    },
    /// A read that needs a request was polled outside of a tokio runtime.
    #[error("no tokio runtime: read inside of one, or give one to the builder")]
    NoRuntime,
    /// The request ended without a result, because its runtime shut down.
    #[error("{location}: the request was cancelled: the runtime that sent it shut down")]
    Cancelled {
        /// The object.
        location: String,
    },
}

impl From<CacheError> for object_store::Error {
    fn from(error: CacheError) -> Self {
        Self::Generic { store: STORE, source: Box::new(error) }
    }
}

fn described(range: &Option<Range<u64>>) -> String {
    range.as_ref().map_or("metadata".to_owned(), |range| format!("bytes of {range:?}"))
}

/// Reason why a part was not fetched; several readers may get the same one.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The object is not the version that was asked for.
    Changed,
    /// Nothing came, or not all: a second request may do better.
    Transient(Arc<object_store::Error>),
    /// The store refused the request.
    Store(Arc<object_store::Error>),
}

impl Failure {
    pub(crate) fn transient(error: CacheError) -> Self {
        Self::Transient(Arc::new(error.into()))
    }

    /// Returns the failure that a request for a known version ended with.
    pub(crate) fn of_request(error: object_store::Error) -> Self {
        match error {
            object_store::Error::Precondition { .. } => Self::Changed,
            error => Self::Store(Arc::new(error)),
        }
    }

    /// Returns the error for one of the readers, with the kind of the original.
    pub(crate) fn into_error(self, location: &object_store::path::Path) -> object_store::Error {
        use object_store::Error;
        let shared = match self {
            Self::Changed => {
                let location = location.to_string();
                return CacheError::Changed { location, changes: 1 }.into();
            }
            Self::Transient(shared) | Self::Store(shared) => shared,
        };
        let source = Box::new(SharedError(Arc::clone(&shared)));
        match &*shared {
            Error::NotFound { path, .. } => Error::NotFound { path: path.clone(), source },
            Error::Precondition { path, .. } => Error::Precondition { path: path.clone(), source },
            Error::NotModified { path, .. } => Error::NotModified { path: path.clone(), source },
            Error::PermissionDenied { path, .. } => {
                Error::PermissionDenied { path: path.clone(), source }
            }
            Error::Unauthenticated { path, .. } => {
                Error::Unauthenticated { path: path.clone(), source }
            }
            Error::NotSupported { .. } => Error::NotSupported { source },
            Error::Generic { store, .. } => Error::Generic { store, source },
            _ => Error::Generic { store: STORE, source },
        }
    }
}

/// An error that several readers share.
#[derive(Debug)]
struct SharedError(Arc<object_store::Error>);

impl fmt::Display for SharedError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The wrapping variant names store and path already.
        match std::error::Error::source(&*self.0) {
            Some(source) => write!(formatter, "{source}"),
            None => write!(formatter, "{}", self.0),
        }
    }
}

impl std::error::Error for SharedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&*self.0)
    }
}
