//! Errors of storage: the operation, the place, and how much was left to do.
//!
//! Made by `transfer.rs`; goes up through every layer unchanged and ends inside `crate::Error`.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::FileKind;

/// An operation of a backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Reading bytes.
    Read,
    /// Writing bytes.
    Write,
    /// Making bytes durable.
    SyncData,
    /// Making bytes and metadata durable.
    SyncAll,
    /// Cutting or growing.
    SetLen,
    /// Asking for the length.
    Len,
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::SyncData => "sync of data",
            Self::SyncAll => "sync",
            Self::SetLen => "change of length",
            Self::Len => "look at the length",
        })
    }
}

/// An operation on a backing that failed for good.
#[derive(Debug, Error)]
#[error("{file}: {operation}{} failed: {source}", self.place())]
#[non_exhaustive]
pub struct IoError {
    /// The file, as [`Backing::describe`](super::Backing::describe) names it.
    pub file: String,
    /// The operation.
    pub operation: Operation,
    /// The first byte that was not transferred; the length asked for by
    /// [`SetLen`](Operation::SetLen); otherwise 0.
    pub position_bytes: u64,
    /// How many bytes were not transferred; 0 for operations that transfer none.
    pub length_bytes: u64,
    /// The answer of the backing.
    #[source]
    pub source: io::Error,
}

impl IoError {
    /// The same error once more, for another caller: with the system's number, or else its kind and
    /// text.
    pub(crate) fn again(&self) -> Self {
        let of_text = || io::Error::new(self.source.kind(), self.source.to_string());
        Self {
            file: self.file.clone(),
            operation: self.operation,
            position_bytes: self.position_bytes,
            length_bytes: self.length_bytes,
            source: self.source.raw_os_error().map_or_else(of_text, io::Error::from_raw_os_error),
        }
    }

    fn place(&self) -> String {
        let Self { operation, position_bytes, length_bytes, .. } = self;
        match operation {
            Operation::Read | Operation::Write => {
                format!(" of {length_bytes} bytes at position {position_bytes}")
            }
            Operation::SetLen => format!(" to {position_bytes} bytes"),
            Operation::SyncData | Operation::SyncAll | Operation::Len => String::new(),
        }
    }
}

/// Why a file could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenDiskError {
    /// The options contradict each other.
    #[error("{}: {problem}", path.display())]
    Options {
        /// The path as it was given.
        path: PathBuf,
        /// The fault of the options.
        problem: &'static str,
    },
    /// Only regular files can be cached, and none whose length the kernel does not tell
    /// ([`FileKind::Generated`]).
    #[error("{}: it is {kind}, and only regular files can be cached", path.display())]
    NotRegular {
        /// The path as it was given.
        path: PathBuf,
        /// The kind of thing that it names.
        kind: FileKind,
    },
    /// The system refused.
    #[error("{}: cannot open: {source}", path.display())]
    System {
        /// The path as it was given.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// Direct I/O was required and cannot be had.
    #[error("{}: direct I/O was required, but {reason}", path.display())]
    DirectRefused {
        /// The path as it was given.
        path: PathBuf,
        /// Why it cannot be had.
        reason: String,
    },
    /// A descriptor that cannot be used.
    #[error("{}: the descriptor cannot be used: {problem}", path.display())]
    Descriptor {
        /// The name of the file when it was opened.
        path: PathBuf,
        /// Why not.
        problem: &'static str,
    },
    /// The path named another file each time it was looked at.
    #[error("{}: the file kept being replaced while it was opened", path.display())]
    Replaced {
        /// The path as it was given.
        path: PathBuf,
    },
}
