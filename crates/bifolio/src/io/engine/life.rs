//! The life of a transfer, from its first attempt to its answer.
//!
//! Called by the queue's own thread and by its helpers (`fallback.rs`). A ring makes first attempts
//! only; what is left after one (short, interrupted, refused) is made here with plain calls, by
//! `transfer.rs`. Whatever way a transfer goes, it ends here.
//!
//! # Safety
//! Makes buffers of a transfer's pieces: IO-1 is what `Queue::push` was promised.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;

use super::Pieces;
use crate::io::transfer::{read_full, write_full};
use crate::io::{Backing, IoError, IoRequest, Operation};

/// Bytes that are to go from a backing to memory or the other way.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// Whose bytes.
    pub(crate) backing: Arc<dyn Backing>,
    /// [`Operation::Read`] or [`Operation::Write`].
    pub(crate) operation: Operation,
    /// The first byte.
    pub(crate) position_bytes: u64,
    /// The memory.
    pub(crate) pieces: Pieces,
}

/// What a transfer came to: bytes before the end of a file, or all bytes of a write.
pub(super) type Answer = Result<usize, IoError>;

impl Transfer {
    /// What is asked of the backing.
    pub(super) fn request(&self) -> IoRequest {
        IoRequest::new(self.operation, self.position_bytes, self.pieces.spans())
    }

    /// Makes the whole transfer with plain calls.
    ///
    /// # Safety
    /// IO-1 holds for the pieces.
    pub(super) unsafe fn run(self) -> Answer {
        // SAFETY: the caller's contract.
        unsafe { self.finish(|_| None) }
    }

    /// Ends a transfer whose first attempt, made by a ring, was answered by `answer`.
    ///
    /// # Safety
    /// IO-1 holds for the pieces; the ring is done with them.
    pub(super) unsafe fn continue_after(
        self,
        request: &IoRequest,
        answer: io::Result<usize>,
    ) -> Answer {
        // SAFETY: the caller's contract.
        unsafe { self.finish(|backing| Some(backing.completed(request, answer))) }
    }

    /// # Safety
    /// IO-1 holds for the pieces.
    unsafe fn finish(
        mut self,
        first: impl FnOnce(&dyn Backing) -> Option<io::Result<usize>>,
    ) -> Answer {
        let backing = Arc::clone(&self.backing);
        let position = self.position_bytes;
        let first = first(&*backing);
        if self.operation == Operation::Write {
            // SAFETY: IO-1, the caller's contract.
            let sources = unsafe { self.pieces.sources() };
            write_full(&*backing, sources, position, first)
        } else {
            // SAFETY: IO-1, the caller's contract.
            let targets = unsafe { self.pieces.targets() };
            read_full(&*backing, targets, position, first)
        }
    }
}
