//! An address and a length, laid out as the kernel's `iovec`.
//!
//! What buffers (`buf.rs`) and pieces of a transfer (`engine/pieces.rs`) have in common, so that
//! a row of either can be handed to a vectored system call as it stands. Pure arithmetic: nothing
//! here touches the memory.
//!
//! # Safety
//! A span promises nothing about its bytes: who makes buffers of it answers for IO-1.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

/// See the head of the file.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Span(libc::iovec);

// SAFETY: an address and a length; using them is somebody else's promise.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub(super) fn new(start: NonNull<u8>, length_bytes: usize) -> Self {
        Self(libc::iovec { iov_base: start.as_ptr().cast(), iov_len: length_bytes })
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(super) fn len(&self) -> usize {
        self.0.iov_len
    }

    /// The address behind the last byte.
    pub(super) fn end(&self) -> *mut u8 {
        self.start().wrapping_add(self.len())
    }

    /// So many bytes more, which the caller knows to follow.
    pub(super) fn grow(&mut self, length_bytes: usize) {
        self.0.iov_len += length_bytes;
    }

    /// `length_bytes` bytes from byte `offset` on.
    #[track_caller]
    pub(super) fn part(&self, offset: usize, length_bytes: usize) -> Self {
        self.check_range(offset, length_bytes);
        let start = self.start().wrapping_add(offset);
        Self(libc::iovec { iov_base: start.cast(), iov_len: length_bytes })
    }

    /// All but the first bytes.
    #[track_caller]
    pub(super) fn suffix(&self, skipped_bytes: usize) -> Self {
        self.check_range(skipped_bytes, 0);
        self.part(skipped_bytes, self.len() - skipped_bytes)
    }

    /// A row as the kernel takes it: at most as many as it takes at once (`IOV_MAX`); leaving out
    /// the rest makes a short transfer.
    pub(super) fn kernel_row(row: &[Self]) -> (*const libc::iovec, usize) {
        (row.as_ptr().cast(), row.len().min(libc::UIO_MAXIOV as usize))
    }

    /// What this span, the next of a row, has of `bytes` of the row. It begins at the row's byte
    /// `start`, which moves to its end.
    pub(super) fn overlap(&self, start: &mut usize, bytes: &Range<usize>) -> Option<Self> {
        let own = *start..*start + self.len();
        *start = own.end;
        let (from, to) = (own.start.max(bytes.start), own.end.min(bytes.end));
        (from < to).then(|| self.part(from - own.start, to - from))
    }

    #[track_caller]
    pub(super) fn check_range(&self, offset: usize, length_bytes: usize) {
        let buffer_bytes = self.len();
        assert!(
            offset <= buffer_bytes && length_bytes <= buffer_bytes - offset,
            "{length_bytes} bytes at {offset} are not in a buffer of {buffer_bytes} bytes"
        );
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:p}+{}", self.start(), self.len())
    }
}
