//! Why a benchmark gave no figures.
//!
//! Two kinds matter to the program: it could not run (nothing is known about the library), or it
//! ran and the bytes were wrong ([`Error::WrongBytes`]: a bug, and no figure of that run counts).

use std::io;

/// The answer of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a benchmark gave no figures.
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
    /// Bytes that came through `series` are not those of the file.
    #[error("{series} answered wrong bytes at position {pos_bytes}")]
    WrongBytes {
        /// The path that answered them.
        series: String,
        /// Where in the file.
        pos_bytes: u64,
    },
    /// The child process that measures itself did not answer.
    #[error("the measuring child process failed: {0}")]
    Child(String),
}

impl Error {
    /// The message with all its causes, for a reason to skip a series.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }

    /// An [`Error::System`] maker for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::System { action, source: source.into() }
    }
}
