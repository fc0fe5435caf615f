//! Buffers on frame memory for transfers: [`IoBufMut`] is filled, [`IoBuf`] is stored.
//!
//! Made above `io` (a folio about to be filled or written back) and by `buffer.rs`, taken by
//! backings. They are an address and a length instead of a slice, because a frame is
//! shared while it is transferred: an optimistic reader may still be looking at it (it will throw
//! away what it saw), a writer may dirty it again during a write. A Rust reference to such memory
//! would be a lie; the copies below go through `sys::copy`, the kernel takes the bare address.
//!
//! Invariant IO-1: for as long as a buffer lives, its bytes are mapped, lie in whole aligned words
//! of memory made for frames, and nobody touches them but through `sys::copy` or the kernel; those
//! of an `IoBufMut` are written through this buffer only.
//!
//! # Safety
//! Whoever makes a buffer answers for IO-1; everything that takes one counts on it.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::slice;

use smallvec::SmallVec;

use super::span::Span;
use crate::sys::{copy, file};

/// Memory that a read fills. Others may be reading it meanwhile.
#[derive(Debug)]
#[repr(transparent)]
pub struct IoBufMut<'a> {
    span: Span,
    frame: PhantomData<&'a mut [u8]>,
}

/// Memory that a write stores. Others may be changing it meanwhile.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct IoBuf<'a> {
    span: Span,
    frame: PhantomData<&'a [u8]>,
}

impl<'a> IoBufMut<'a> {
    /// A buffer on `length_bytes` bytes at `start`.
    ///
    /// # Safety
    /// IO-1 holds for those bytes during `'a`, with this buffer as the only one who writes them.
    pub(crate) unsafe fn new(start: NonNull<u8>, length_bytes: usize) -> Self {
        Self { span: Span::new(start, length_bytes), frame: PhantomData }
    }

    /// How many bytes the buffer has.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.span.len() == 0
    }

    /// The first byte, to look at its alignment.
    pub fn as_ptr(&self) -> *const u8 {
        self.span.start()
    }

    /// The first byte, for a system call or another foreign function that fills the buffer.
    ///
    /// Do not make a reference of it: others may read the memory meanwhile.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.span.start()
    }

    /// Fills part of the buffer, from its byte `offset` on, with `bytes`.
    ///
    /// # Panics
    /// If `bytes` does not fit behind `offset`.
    pub fn copy_from_slice(&mut self, offset: usize, bytes: &[u8]) {
        self.span.check_range(offset, bytes.len());
        let target = self.span.start().wrapping_add(offset);
        // SAFETY: the bytes at `target` are in the buffer, which only we write (IO-1); `bytes`
        // is a live shared slice, so it cannot be frame memory.
        unsafe { copy::copy_in(target, bytes) }
    }

    /// What makes up `bytes` of a row of buffers, one behind the other.
    pub(super) fn part<'w>(
        row: &'w mut [IoBufMut<'_>],
        bytes: Range<usize>,
    ) -> SmallVec<[IoBufMut<'w>; 4]> {
        let mut start = 0;
        let part = row.iter_mut().filter_map(|buffer| {
            let span = buffer.span.overlap(&mut start, &bytes)?;
            Some(IoBufMut { span, frame: PhantomData })
        });
        part.collect()
    }

    /// Fills a row of buffers from `file`, with one system call.
    pub(super) fn read_row_from(
        row: &mut [IoBufMut<'_>],
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        let (entries, count) = Span::kernel_row(Self::spans(row));
        // SAFETY: the entries are those of `row`; each buffer's bytes are writable, and others look
        // only through `sys::copy` (IO-1).
        unsafe { file::read_vectored_at(file, entries, count, position_bytes) }
    }

    /// The addresses and lengths of a row of buffers.
    pub(super) fn spans<'s>(row: &'s [IoBufMut<'_>]) -> &'s [Span] {
        // SAFETY: a buffer is a transparent span, and the result borrows the row.
        unsafe { slice::from_raw_parts(row.as_ptr().cast(), row.len()) }
    }

    /// Fills the buffer from `file`, with one system call.
    pub(super) fn read_from(
        &mut self,
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        // SAFETY: the buffer's bytes are writable, and others look only through `sys::copy` (IO-1).
        unsafe { file::read_at(file, self.span.start(), self.span.len(), position_bytes) }
    }

    /// The first `length_bytes` bytes of the buffer, as a buffer.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn prefix(&mut self, length_bytes: usize) -> IoBufMut<'_> {
        IoBufMut { span: self.span.part(0, length_bytes), frame: PhantomData }
    }

    /// The buffer without its first `skipped_bytes` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn suffix(&mut self, skipped_bytes: usize) -> IoBufMut<'_> {
        IoBufMut { span: self.span.suffix(skipped_bytes), frame: PhantomData }
    }
}

impl<'a> IoBuf<'a> {
    /// A buffer on `length_bytes` bytes at `start`.
    ///
    /// # Safety
    /// IO-1 holds for those bytes during `'a`; others may write them.
    pub(crate) unsafe fn new(start: NonNull<u8>, length_bytes: usize) -> Self {
        Self { span: Span::new(start, length_bytes), frame: PhantomData }
    }

    /// How many bytes the buffer has.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.span.len() == 0
    }

    /// The first byte, for a system call or another foreign function that stores the buffer.
    ///
    /// Do not make a reference of it: others may write the memory meanwhile.
    pub fn as_ptr(&self) -> *const u8 {
        self.span.start()
    }

    /// Copies part of the buffer, from its byte `offset` on, to `bytes`.
    ///
    /// If somebody is writing the memory, the copy may be a mixture of old and new.
    ///
    /// # Panics
    /// If the buffer has fewer than `bytes.len()` bytes behind `offset`.
    pub fn copy_to_slice(&self, offset: usize, bytes: &mut [u8]) {
        self.span.check_range(offset, bytes.len());
        let source = self.span.start().wrapping_add(offset);
        // SAFETY: the bytes at `source` are in the buffer, mapped and changed only by those who
        // may (IO-1); `bytes` is a live unique slice, so it cannot be frame memory.
        unsafe { copy::copy_out(source, bytes) }
    }

    /// What makes up `bytes` of a row of buffers, one behind the other.
    pub(super) fn part(row: &[IoBuf<'a>], bytes: Range<usize>) -> SmallVec<[IoBuf<'a>; 4]> {
        let mut start = 0;
        let part = row.iter().filter_map(|buffer| {
            let span = buffer.span.overlap(&mut start, &bytes)?;
            Some(IoBuf { span, frame: PhantomData })
        });
        part.collect()
    }

    /// Stores a row of buffers in `file`, with one system call.
    pub(super) fn write_row_to(
        row: &[IoBuf<'_>],
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        let (entries, count) = Span::kernel_row(Self::spans(row));
        // SAFETY: the entries are those of `row`; each buffer's bytes are readable, and others
        // write only through `sys::copy` (IO-1).
        unsafe { file::write_vectored_at(file, entries, count, position_bytes) }
    }

    /// The addresses and lengths of a row of buffers.
    pub(super) fn spans<'s>(row: &'s [IoBuf<'_>]) -> &'s [Span] {
        // SAFETY: a buffer is a transparent span, and the result borrows the row.
        unsafe { slice::from_raw_parts(row.as_ptr().cast(), row.len()) }
    }

    /// Stores the buffer in `file`, with one system call.
    pub(super) fn write_to(&self, file: BorrowedFd<'_>, position_bytes: u64) -> io::Result<usize> {
        // SAFETY: the buffer's bytes are readable, and others write only through `sys::copy`
        // (IO-1).
        unsafe { file::write_at(file, self.span.start(), self.span.len(), position_bytes) }
    }

    /// The first `length_bytes` bytes of the buffer, as a buffer.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn prefix(&self, length_bytes: usize) -> IoBuf<'a> {
        IoBuf { span: self.span.part(0, length_bytes), frame: PhantomData }
    }

    /// The buffer without its first `skipped_bytes` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn suffix(&self, skipped_bytes: usize) -> IoBuf<'a> {
        IoBuf { span: self.span.suffix(skipped_bytes), frame: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use crate::io::IoBuffer;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn buffers_copy_to_and_from_exactly_their_place() {
        let mut buffer = IoBuffer::new(8192);
        let mut target = buffer.target();
        let mut part = target.suffix(4000);
        let mut part = part.prefix(200);
        part.copy_from_slice(100, &[7; 100]);
        let source = buffer.source();
        let mut seen = [1; 102];
        source.suffix(4099).copy_to_slice(0, &mut seen);
        assert_eq!(seen[0], 0);
        assert_eq!(seen[1..101], [7; 100]);
        assert_eq!(seen[101], 0);
        assert_eq!(buffer.as_bytes().iter().filter(|byte| **byte == 7).count(), 100);
    }

    #[test]
    fn a_buffer_can_be_emptied_but_not_left() {
        let mut buffer = IoBuffer::new(100);
        assert!(buffer.target().suffix(100).is_empty());
        assert!(buffer.source().prefix(0).is_empty());
        let leaves: [fn(&mut IoBuffer); 7] = [
            |buffer| assert!(buffer.target().suffix(101).is_empty()),
            |buffer| assert!(buffer.target().prefix(101).is_empty()),
            |buffer| buffer.target().copy_from_slice(99, &[0; 2]),
            |buffer| buffer.target().copy_from_slice(usize::MAX, &[0; 2]),
            |buffer| buffer.source().copy_to_slice(1, &mut [0; 100]),
            |buffer| assert!(buffer.source().suffix(101).is_empty()),
            |buffer| assert!(buffer.source().prefix(101).is_empty()),
        ];
        for (i, leave) in leaves.into_iter().enumerate() {
            let left = catch_unwind(AssertUnwindSafe(|| leave(&mut buffer)));
            let message = left.unwrap_err();
            let message = message.downcast_ref::<String>().unwrap();
            assert!(message.contains("not in a buffer of 100 bytes"), "case {i}: {message}");
        }
    }
}
