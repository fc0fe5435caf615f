//! Errors of calls as Python exceptions.

use bifolio::ErrorKind;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The cache refused it.
    Cache(bifolio::Error),
    /// The door refused it, as a system call would: number, text, and name of the file.
    System(i32, String, String),
    /// An argument is not valid, or the file is not in a state for the call.
    Value(String),
}

/// The result of a call.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// Returns the number that a system call would fail with.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Self::Cache(error) => error.errno(),
            Self::System(errno, ..) => *errno,
            Self::Value(_) => libc::EINVAL,
        }
    }

    /// Returns `true` if the cache was closed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self, Self::Cache(error) if error.kind() == ErrorKind::Closed)
    }
}

impl From<bifolio::Error> for Failure {
    fn from(error: bifolio::Error) -> Self {
        Self::Cache(error)
    }
}

impl From<Failure> for PyErr {
    /// Returns `ValueError` for a closed cache or an invalid setting, as `io` raises, else the
    /// subclass of `OSError` for its number, with the name of the file.
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Value(text) => PyValueError::new_err(text),
            Failure::System(errno, text, file) => PyOSError::new_err((errno, text, file)),
            Failure::Cache(error) => {
                let text = error.to_string();
                if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Config) {
                    return PyValueError::new_err(text);
                }
                let file = error.file().map(str::to_owned);
                // Python adds the name at the end.
                let prefix = file.as_ref().map(|file| format!("{file}: ")).unwrap_or_default();
                let message = text.strip_prefix(&prefix).unwrap_or(&text).to_owned();
                PyOSError::new_err((error.errno(), message, file))
            }
        }
    }
}

/// Returns one exception for several failures: the first, with the others as notes.
pub(crate) fn exception_of(py: Python<'_>, failures: Vec<Failure>) -> Option<PyErr> {
    let mut failures = failures.into_iter().map(PyErr::from);
    let first = failures.next()?;
    for other in failures {
        // A note that cannot be added leaves the exception as it is.
        let _ = first.add_note(py, format!("also: {}", other.value(py)));
    }
    Some(first)
}
