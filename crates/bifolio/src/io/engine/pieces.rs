//! The memory of one transfer: runs of frames, in the order of the bytes.
//!
//! Made by whoever pushes a transfer; read as buffers by `transfer.rs`, as spans by the ring.
//! Folios whose frames follow each other make one piece.
//!
//! # Safety
//! IO-1 is promised when a transfer is pushed, for all of its pieces, until it is complete.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::slice;

use smallvec::SmallVec;

use crate::io::span::Span;
use crate::io::{IoBuf, IoBufMut};

/// The most pages one transfer moves, unless a single folio has more: 1 MiB. So it has no more
/// pieces, either.
pub(crate) const RUN_PAGES_MAX: u64 = 256;

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    spans: SmallVec<[Span; 1]>,
}

impl Pieces {
    /// Those of memory, each with its length, that have `length_bytes` bytes together.
    pub(crate) fn of(length_bytes: u64, parts: impl Iterator<Item = (*mut u8, u64)>) -> Self {
        let mut pieces = Self::default();
        let mut left_bytes = length_bytes;
        for (start, part_bytes) in parts {
            let part_bytes = left_bytes.min(part_bytes);
            let start = NonNull::new(start).expect("frames are not at address 0");
            pieces.push(start, part_bytes as usize);
            left_bytes -= part_bytes;
        }
        pieces
    }

    /// Adds `length_bytes` bytes of frame memory at `start`, behind what there is.
    pub(crate) fn push(&mut self, start: NonNull<u8>, length_bytes: usize) {
        match self.spans.last_mut() {
            Some(last) if last.end() == start.as_ptr() => last.grow(length_bytes),
            _ => self.spans.push(Span::new(start, length_bytes)),
        }
        debug_assert!(self.spans.len() as u64 <= RUN_PAGES_MAX, "too many pieces");
    }

    /// The pieces as they are. A row of several lies on the heap: it stays where it is when the
    /// pieces move.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The pieces as buffers to be filled.
    ///
    /// # Safety
    /// IO-1 holds for all of them while the buffers live, which are the only writers.
    pub(super) unsafe fn targets(&mut self) -> &mut [IoBufMut<'_>] {
        let spans = self.spans.as_mut_slice();
        // SAFETY: an `IoBufMut` is a transparent `Span`; they are borrowed uniquely as long as the
        // result lives.
        unsafe { slice::from_raw_parts_mut(spans.as_mut_ptr().cast(), spans.len()) }
    }

    /// The pieces as buffers to be stored.
    ///
    /// # Safety
    /// IO-1 holds for all of them while the buffers live.
    pub(super) unsafe fn sources(&self) -> &[IoBuf<'_>] {
        let spans = self.spans.as_slice();
        // SAFETY: an `IoBuf` is a transparent `Span`; they are borrowed as long as the result.
        unsafe { slice::from_raw_parts(spans.as_ptr().cast(), spans.len()) }
    }
}
