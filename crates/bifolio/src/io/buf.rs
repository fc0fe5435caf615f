//! Buffers on frame memory for transfers: [`IoBufMut`] is filled, [`IoBuf`] is stored.
//!
//! Made above `io` (a folio about to be filled or written back) or on an [`IoBuffer`], taken by
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
//! The maker of a buffer answers for IO-1; everything that takes one counts on it. A [`Span`]
//! promises nothing about its bytes. An [`IoBuffer`] owns its allocation; what borrows it keeps it
//! from being read or freed.
#![allow(unsafe_code)]

use super::backing::ALIGNMENT_BYTES_MAX;
use crate::sys::{copy, file};
use smallvec::SmallVec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::{fmt, io, slice};

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

    /// The parts that make up `bytes` of a row of buffers, one behind the other.
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

    /// The parts that make up `bytes` of a row of buffers, one behind the other.
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

/// An address and a length, laid out as the kernel's `iovec`, so that a row of them can be handed
/// to a vectored system call as it stands. Pure arithmetic: nothing here touches the memory.
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

    /// The part of `bytes` of a row that lies in this span, the next one. It begins at the row's
    /// byte `start`, which moves to its end.
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

/// Memory to drive a [`Backing`](super::Backing) by hand, aligned to 4096 bytes and zeroed when
/// made. The cache itself transfers to and from frames.
#[derive(Debug)]
pub struct IoBuffer {
    start: NonNull<u8>,
    length_bytes: usize,
    layout: Layout,
}

// SAFETY: the buffer owns its memory and hands it out by the usual rules of borrowing.
unsafe impl Send for IoBuffer {}
// SAFETY: a shared buffer can only be read.
unsafe impl Sync for IoBuffer {}

impl IoBuffer {
    /// A buffer of `length_bytes` zeros.
    ///
    /// # Panics
    /// If `length_bytes` is more than half the address space.
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

    /// A buffer that holds a copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.target().copy_from_slice(0, bytes);
        buffer
    }

    /// The bytes of the buffer.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the allocation is initialised and this long; buffers that write it hold `&mut`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length_bytes) }
    }

    /// The whole buffer, to be filled.
    pub fn target(&mut self) -> IoBufMut<'_> {
        // SAFETY: the allocation is whole pages and uniquely borrowed while the buffer lives.
        unsafe { IoBufMut::new(self.start, self.length_bytes) }
    }

    /// The whole buffer, to be stored.
    pub fn source(&self) -> IoBuf<'_> {
        // SAFETY: the allocation is whole pages and nobody writes it while the buffer lives.
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

    #[test]
    fn a_buffer_is_page_aligned_zeroed_and_as_long_as_asked() {
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
