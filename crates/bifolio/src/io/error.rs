//! What failed, where, and how much of it was left to do.
//!
//! Made by `transfer.rs`; goes up through every layer unchanged and ends inside `crate::Error`.

use std::fmt;
use std::io;

use thiserror::Error;

/// What a backing was asked to do.
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
    /// What was asked.
    pub operation: Operation,
    /// The first byte that was not transferred; the length asked for by
    /// [`SetLen`](Operation::SetLen); otherwise 0.
    pub position_bytes: u64,
    /// How many bytes were not transferred; 0 for operations that transfer none.
    pub length_bytes: u64,
    /// What the backing answered.
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
