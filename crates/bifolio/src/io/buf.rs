//! Buffers over frame memory for transfers: a read fills an [`IoBufMut`], a write stores an
//! [`IoBuf`].
//!
//! Created above `io` (for a folio to be filled or written back) or from an [`IoBuffer`], and
//! passed to backings. They hold an address and a length instead of a slice, because a frame is
//! shared during a transfer: an optimistic reader may still read it (and discard what it read), a
//! writer may dirty it again during a write. A Rust reference to such memory would be unsound; the
//! copies below use `sys::copy`, the kernel gets the address.
//!
//! Invariant IO-1: while a buffer exists, its bytes are mapped, lie in whole aligned words of
//! memory allocated for frames, and are accessed only through `sys::copy` or by the kernel; those
//! of an `IoBufMut` are written through this buffer only.
//!
//! # Safety
//! The creator of a buffer guarantees IO-1; everything that takes one relies on it. A [`Span`]
//! guarantees nothing about its bytes. An [`IoBuffer`] owns its allocation; a buffer that borrows
//! it prevents reading or freeing it.
#![allow(unsafe_code)]

use super::transfer::ALIGNMENT_BYTES_MAX;
use crate::sys::{copy, file};
use smallvec::SmallVec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::{fmt, io, slice};

/// Memory that a read fills. Other threads may read it meanwhile.
#[derive(Debug)]
#[repr(transparent)]
pub struct IoBufMut<'a> {
    span: Span,
    frame: PhantomData<&'a mut [u8]>,
}

/// Memory that a write stores. Other threads may change it meanwhile.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct IoBuf<'a> {
    span: Span,
    frame: PhantomData<&'a [u8]>,
}

impl<'a> IoBufMut<'a> {
    /// Creates a buffer of `length_bytes` bytes at `start`.
    ///
    /// # Safety
    /// IO-1 must hold for those bytes during `'a`, with this buffer as the only writer.
    pub(crate) unsafe fn new(start: NonNull<u8>, length_bytes: usize) -> Self {
        Self { span: Span::new(start, length_bytes), frame: PhantomData }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Returns `true` if the length is 0.
    #[doc(hidden)]
    pub fn is_empty(&self) -> bool {
        self.span.len() == 0
    }

    /// Returns the address of the first byte, to check its alignment.
    #[doc(hidden)]
    pub fn as_ptr(&self) -> *const u8 {
        self.span.start()
    }

    /// Returns the address of the first byte, for a system call or another foreign function that
    /// fills the buffer.
    ///
    /// Do not create a reference from it: other threads may read the memory meanwhile.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.span.start()
    }

    /// Copies `bytes` into the buffer, from its byte `offset` on.
    ///
    /// # Panics
    /// If `bytes` does not fit after `offset`.
    pub fn copy_from_slice(&mut self, offset: usize, bytes: &[u8]) {
        self.span.check_range(offset, bytes.len());
        let target = self.span.start().wrapping_add(offset);
        // SAFETY: the bytes at `target` are in the buffer, which only this buffer writes (IO-1);
        // `bytes` is a live shared slice, so it cannot be frame memory.
        unsafe { copy::copy_in(target, bytes) }
    }

    /// Returns the parts that make up `bytes` of consecutive buffers.
    pub(super) fn part<'w>(
        buffers: &'w mut [IoBufMut<'_>],
        bytes: Range<usize>,
    ) -> SmallVec<[IoBufMut<'w>; 4]> {
        let mut start = 0;
        let part = buffers.iter_mut().filter_map(|buffer| {
            let span = buffer.span.overlap(&mut start, &bytes)?;
            Some(IoBufMut { span, frame: PhantomData })
        });
        part.collect()
    }

    /// Fills consecutive buffers from `file`, with one system call.
    pub(super) fn read_vectored_from(
        buffers: &mut [IoBufMut<'_>],
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        let (entries, count) = Span::kernel_entries(Self::spans(buffers));
        // SAFETY: the entries are those of `buffers`; each buffer's bytes are writable, and other
        // threads read only through `sys::copy` (IO-1).
        unsafe { file::read_vectored_at(file, entries, count, position_bytes) }
    }

    /// Returns the addresses and lengths of the buffers.
    pub(super) fn spans<'s>(buffers: &'s [IoBufMut<'_>]) -> &'s [Span] {
        // SAFETY: a buffer is a transparent span, and the result borrows the slice.
        unsafe { slice::from_raw_parts(buffers.as_ptr().cast(), buffers.len()) }
    }

    /// Fills the buffer from `file`, with one system call.
    pub(super) fn read_from(
        &mut self,
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        // SAFETY: the buffer's bytes are writable; other threads read only through `sys::copy`
        // (IO-1).
        unsafe { file::read_at(file, self.span.start(), self.span.len(), position_bytes) }
    }

    /// Returns the first `length_bytes` bytes as a buffer.
    ///
    /// # Panics
    /// If the buffer is shorter.
    #[doc(hidden)]
    pub fn prefix(&mut self, length_bytes: usize) -> IoBufMut<'_> {
        IoBufMut { span: self.span.part(0, length_bytes), frame: PhantomData }
    }

    /// Returns the buffer without its first `skipped_bytes` bytes.
    ///
    /// # Panics
    /// If the buffer is shorter.
    #[doc(hidden)]
    pub fn suffix(&mut self, skipped_bytes: usize) -> IoBufMut<'_> {
        IoBufMut { span: self.span.suffix(skipped_bytes), frame: PhantomData }
    }
}

impl<'a> IoBuf<'a> {
    /// Creates a buffer of `length_bytes` bytes at `start`.
    ///
    /// # Safety
    /// IO-1 must hold for those bytes during `'a`; other threads may write them.
    pub(crate) unsafe fn new(start: NonNull<u8>, length_bytes: usize) -> Self {
        Self { span: Span::new(start, length_bytes), frame: PhantomData }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Returns `true` if the length is 0.
    #[doc(hidden)]
    pub fn is_empty(&self) -> bool {
        self.span.len() == 0
    }

    /// Returns the address of the first byte, for a system call or another foreign function that
    /// stores the buffer.
    ///
    /// Do not create a reference from it: other threads may write the memory meanwhile.
    pub fn as_ptr(&self) -> *const u8 {
        self.span.start()
    }

    /// Copies part of the buffer, from its byte `offset` on, to `bytes`.
    ///
    /// If another thread writes the memory meanwhile, the copy may be a mixture of old and new
    /// bytes.
    ///
    /// # Panics
    /// If the buffer has fewer than `bytes.len()` bytes after `offset`.
    pub fn copy_to_slice(&self, offset: usize, bytes: &mut [u8]) {
        self.span.check_range(offset, bytes.len());
        let source = self.span.start().wrapping_add(offset);
        // SAFETY: the bytes at `source` are in the buffer, mapped and only changed as IO-1 allows;
        // `bytes` is a live unique slice, so it cannot be frame memory.
        unsafe { copy::copy_out(source, bytes) }
    }

    /// Returns the parts that make up `bytes` of consecutive buffers.
    pub(super) fn part(buffers: &[IoBuf<'a>], bytes: Range<usize>) -> SmallVec<[IoBuf<'a>; 4]> {
        let mut start = 0;
        let part = buffers.iter().filter_map(|buffer| {
            let span = buffer.span.overlap(&mut start, &bytes)?;
            Some(IoBuf { span, frame: PhantomData })
        });
        part.collect()
    }

    /// Stores consecutive buffers in `file`, with one system call.
    pub(super) fn write_vectored_to(
        buffers: &[IoBuf<'_>],
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        let (entries, count) = Span::kernel_entries(Self::spans(buffers));
        // SAFETY: the entries are those of `buffers`; each buffer's bytes are readable, and other
        // threads write only through `sys::copy` (IO-1).
        unsafe { file::write_vectored_at(file, entries, count, position_bytes) }
    }

    /// Returns the addresses and lengths of the buffers.
    pub(super) fn spans<'s>(buffers: &'s [IoBuf<'_>]) -> &'s [Span] {
        // SAFETY: a buffer is a transparent span, and the result borrows the slice.
        unsafe { slice::from_raw_parts(buffers.as_ptr().cast(), buffers.len()) }
    }

    /// Stores the buffer in `file`, with one system call.
    pub(super) fn write_to(&self, file: BorrowedFd<'_>, position_bytes: u64) -> io::Result<usize> {
        // SAFETY: the buffer's bytes are readable, and other threads write only through `sys::copy`
        // (IO-1).
        unsafe { file::write_at(file, self.span.start(), self.span.len(), position_bytes) }
    }

    /// Returns the first `length_bytes` bytes as a buffer.
    ///
    /// # Panics
    /// If the buffer is shorter.
    #[doc(hidden)]
    pub fn prefix(&self, length_bytes: usize) -> IoBuf<'a> {
        IoBuf { span: self.span.part(0, length_bytes), frame: PhantomData }
    }

    /// Returns the buffer without its first `skipped_bytes` bytes.
    ///
    /// # Panics
    /// If the buffer is shorter.
    #[doc(hidden)]
    pub fn suffix(&self, skipped_bytes: usize) -> IoBuf<'a> {
        IoBuf { span: self.span.suffix(skipped_bytes), frame: PhantomData }
    }
}

/// An address and a length, laid out as the kernel's `iovec`, so that a slice of them can be passed
/// to a vectored system call. Pure arithmetic: never accesses the memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Span(libc::iovec);

// SAFETY: an address and a length; every use of them has its own contract.
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

    /// Returns the address after the last byte.
    pub(super) fn end(&self) -> *mut u8 {
        self.start().wrapping_add(self.len())
    }

    /// Extends the span by bytes that directly follow it.
    pub(super) fn grow(&mut self, length_bytes: usize) {
        self.0.iov_len += length_bytes;
    }

    /// Returns `length_bytes` bytes from byte `offset` on.
    #[track_caller]
    pub(super) fn part(&self, offset: usize, length_bytes: usize) -> Self {
        self.check_range(offset, length_bytes);
        let start = self.start().wrapping_add(offset);
        Self(libc::iovec { iov_base: start.cast(), iov_len: length_bytes })
    }

    /// Returns all but the first bytes.
    #[track_caller]
    pub(super) fn suffix(&self, skipped_bytes: usize) -> Self {
        self.check_range(skipped_bytes, 0);
        self.part(skipped_bytes, self.len() - skipped_bytes)
    }

    /// Returns the spans for a system call: at most as many as one call accepts (`IOV_MAX`);
    /// omitting the rest makes a short transfer.
    pub(super) fn kernel_entries(buffers: &[Self]) -> (*const libc::iovec, usize) {
        (buffers.as_ptr().cast(), buffers.len().min(libc::UIO_MAXIOV as usize))
    }

    /// Returns the part of `bytes`, a range of consecutive spans, that lies in this span. `start`
    /// is the offset of this span, and is advanced to its end.
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

/// Memory for calling a [`Backing`](super::Backing) directly, aligned to 4096 bytes and
/// zero-filled. The cache itself transfers to and from frames.
#[doc(hidden)]
#[derive(Debug)]
pub struct IoBuffer {
    start: NonNull<u8>,
    length_bytes: usize,
    layout: Layout,
}

// SAFETY: the buffer owns its memory and lends it by the usual borrowing rules.
unsafe impl Send for IoBuffer {}
// SAFETY: a shared buffer can only be read.
unsafe impl Sync for IoBuffer {}

impl IoBuffer {
    /// Creates a buffer of `length_bytes` zeros.
    ///
    /// # Panics
    /// If `length_bytes` exceeds half the address space.
    pub fn new(length_bytes: usize) -> Self {
        let granule = ALIGNMENT_BYTES_MAX as usize;
        let layout = Layout::from_size_align(length_bytes.max(1), granule)
            .expect("a buffer fits in half the address space")
            .pad_to_align();
        // SAFETY: the layout has at least one granule of bytes.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, length_bytes, layout }
    }

    /// Creates a buffer that holds a copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.target().copy_from_slice(0, bytes);
        buffer
    }

    /// Returns the bytes of the buffer.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the allocation is initialized and this long; buffers that write it hold `&mut`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length_bytes) }
    }

    /// Returns the whole buffer, to be filled.
    pub fn target(&mut self) -> IoBufMut<'_> {
        // SAFETY: the allocation is whole pages and uniquely borrowed while the buffer lives.
        unsafe { IoBufMut::new(self.start, self.length_bytes) }
    }

    /// Returns the whole buffer, to be stored.
    pub fn source(&self) -> IoBuf<'_> {
        // SAFETY: the allocation is whole pages and is not written while the buffer exists.
        unsafe { IoBuf::new(self.start, self.length_bytes) }
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once; no buffer outlives the buffer.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use crate::io::IoBuffer;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn buffers_copy_exactly_the_given_range() {
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
    fn a_part_may_be_empty_but_not_outside_the_buffer() {
        let mut buffer = IoBuffer::new(100);
        assert!(buffer.target().suffix(100).is_empty());
        assert!(buffer.source().prefix(0).is_empty());
        let accesses: [fn(&mut IoBuffer); 7] = [
            |buffer| assert!(buffer.target().suffix(101).is_empty()),
            |buffer| assert!(buffer.target().prefix(101).is_empty()),
            |buffer| buffer.target().copy_from_slice(99, &[0; 2]),
            |buffer| buffer.target().copy_from_slice(usize::MAX, &[0; 2]),
            |buffer| buffer.source().copy_to_slice(1, &mut [0; 100]),
            |buffer| assert!(buffer.source().suffix(101).is_empty()),
            |buffer| assert!(buffer.source().prefix(101).is_empty()),
        ];
        for (i, access) in accesses.into_iter().enumerate() {
            let left = catch_unwind(AssertUnwindSafe(|| access(&mut buffer)));
            let message = left.unwrap_err();
            let message = message.downcast_ref::<String>().unwrap();
            assert!(message.contains("not in a buffer of 100 bytes"), "case {i}: {message}");
        }
    }

    #[test]
    fn a_new_buffer_is_page_aligned_and_zeroed() {
        for length in [0, 1, 4095, 4096, 4097] {
            let mut buffer = IoBuffer::new(length);
            assert_eq!(buffer.as_bytes(), vec![0; length]);
            assert_eq!(buffer.target().as_ptr().addr() % 4096, 0);
            assert_eq!((buffer.target().len(), buffer.source().len()), (length, length));
        }
    }

    #[test]
    fn a_buffer_made_of_bytes_holds_them() {
        let bytes: Vec<u8> = (0..5000).map(|i| i as u8).collect();
        assert_eq!(IoBuffer::from_bytes(&bytes).as_bytes(), bytes);
    }
}
