//! Errors of benchmarks.
//!
//! The program distinguishes two kinds: the benchmark could not run (nothing is known about the
//! library), or the bytes were wrong ([`Error::WrongBytes`]: a bug, and all figures of that run are
//! invalid).

use std::io;

/// Result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a benchmark produced no figures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The run was refused before it started, or a parameter makes no sense.
    #[error("{0}")]
    Refused(String),
    /// A call to the system failed.
    #[error("{action}")]
    System {
        /// The step that failed, with its object.
        action: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A call to the cache failed.
    #[error("the cache failed")]
    Cache(#[from] bifolio::Error),
    /// The bytes read through `series` differ from those of the file.
    #[error("{series} answered wrong bytes at position {pos_bytes}")]
    WrongBytes {
        /// The series that returned them.
        series: String,
        /// Position in the file.
        pos_bytes: u64,
    },
    /// The child process that measures was killed, each time it was started.
    #[error(
        "its process was killed {attempts} times by SIGKILL, as the kernel does when the memory of \
         a control group or of the machine runs out"
    )]
    Killed {
        /// Number of times that it was started.
        attempts: usize,
    },
    /// The child process that measures itself returned no result.
    #[error("the measuring child process failed: {0}")]
    Child(String),
}

impl Error {
    /// Returns a function that creates an [`Error::System`], for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::System { action, source: source.into() }
    }
}
