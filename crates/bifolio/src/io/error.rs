//! Errors of storage: the operation, the position, and the bytes that were not transferred.
//!
//! Created by `transfer.rs`; passed up through every layer unchanged, and wrapped in
//! `crate::Error`.

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
    /// Truncating or extending.
    SetLen,
    /// Querying the length.
    Len,
    /// Allocating storage.
    Allocate,
    /// Punching a hole.
    PunchHole,
    /// Zeroing a range.
    ZeroRange,
    /// Looking for data.
    SeekData,
    /// Looking for a hole.
    SeekHole,
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::SyncData => "sync of data",
            Self::SyncAll => "sync",
            Self::SetLen => "change of length",
            Self::Len => "query of the length",
            Self::Allocate => "allocation",
            Self::PunchHole => "punch of a hole",
            Self::ZeroRange => "zeroing",
            Self::SeekData => "search for data",
            Self::SeekHole => "search for a hole",
        })
    }
}

/// An operation on a backing that failed permanently.
#[derive(Debug, Error)]
#[error("{file}: {operation}{} failed: {source}{}", self.place(), limit_of(source))]
#[non_exhaustive]
pub struct IoError {
    /// The file, as [`Backing::describe`](super::Backing::describe) names it.
    pub file: String,
    /// The operation.
    pub operation: Operation,
    /// The first byte that was not transferred; the start of the range or of the search; the
    /// requested length for [`SetLen`](Operation::SetLen); otherwise 0.
    pub position_bytes: u64,
    /// Bytes that were not transferred, or of the range; 0 for operations that have none.
    pub length_bytes: u64,
    /// The error of the backing.
    #[source]
    pub source: io::Error,
}

impl IoError {
    /// Returns a copy of the error for another caller: with the errno or else the kind and text of
    /// the source.
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
            Operation::Read
            | Operation::Write
            | Operation::Allocate
            | Operation::PunchHole
            | Operation::ZeroRange => {
                format!(" of {length_bytes} bytes at position {position_bytes}")
            }
            Operation::SetLen => format!(" to {position_bytes} bytes"),
            Operation::SeekData | Operation::SeekHole => format!(" from position {position_bytes}"),
            Operation::SyncData | Operation::SyncAll | Operation::Len => String::new(),
        }
    }
}

/// Returns a hint at the limit to raise when the system refuses a descriptor or a longer file.
pub(crate) fn limit_of(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; RLIMIT_NOFILE (ulimit -n) is too low",
        Some(libc::ENFILE) => "; fs.file-max is too low",
        Some(libc::EFBIG) => "; RLIMIT_FSIZE (ulimit -f) or the file system forbids a longer file",
        _ => "",
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
        /// The contradiction between the options.
        problem: &'static str,
    },
    /// The file is not regular, or the kernel does not know its length ([`FileKind::Generated`]).
    #[error("{}: it is {kind}; only regular files can be cached", path.display())]
    NotRegular {
        /// The path as it was given.
        path: PathBuf,
        /// The kind of the file.
        kind: FileKind,
    },
    /// A system call failed.
    #[error("{}: cannot open: {source}{}", path.display(), limit_of(source))]
    System {
        /// The path as it was given.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// Direct I/O was required and is not available.
    #[error("{}: direct I/O was required, but {reason}", path.display())]
    DirectRefused {
        /// The path as it was given.
        path: PathBuf,
        /// Why it is not available.
        reason: String,
    },
    /// The descriptor cannot be used.
    #[error("{}: the descriptor cannot be used: {problem}", path.display())]
    Descriptor {
        /// The name of the file when it was opened.
        path: PathBuf,
        /// The reason.
        problem: &'static str,
    },
    /// The path named a different file at each attempt.
    #[error("{}: the file kept being replaced while it was opened", path.display())]
    Replaced {
        /// The path as it was given.
        path: PathBuf,
    },
}
