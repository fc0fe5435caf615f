//! Requests: the direction, position and [`Alignment`] of a transfer, and its buffers over frame
//! memory: addresses instead of slices, because optimistic readers, and during a write also
//! writers, access a frame meanwhile. Copies use `sys::copy`, the kernel gets the address.
//!
//! Invariant IO-1: while a buffer exists, its bytes are mapped, lie in whole aligned words of
//! memory allocated for frames, and are accessed only through `sys::copy` or by the kernel; those
//! of an `IoBufMut` are written through this buffer only.
//!
//! # Safety
//! The creator of a buffer guarantees IO-1; everything that takes one relies on it. A [`Span`]
//! guarantees nothing about its bytes. A buffer that borrows an [`IoBuffer`] prevents reading or
//! freeing it.
#![allow(unsafe_code)]

use crate::sys::copy;
use crate::sys::memory::{PAGE_BYTES, Reservation};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::{fmt, io, slice};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Transfer from the storage to memory.
    Read,
    /// Transfer from memory to the storage.
    Write,
}

impl Operation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A transfer that is about to be made, for
/// [`DirectBacking::submission`](super::DirectBacking::submission), or was made, for
/// [`DirectBacking::completed`](super::DirectBacking::completed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoRequest {
    /// Direction of the transfer.
    pub operation: Operation,
    /// Position of the first byte.
    pub position_bytes: u64,
    /// Length in bytes.
    pub length_bytes: usize,
    /// The transfer's natural alignment, up to 4096: of its addresses in memory; of its position,
    /// and of the lengths of its buffers except the last.
    pub alignment: Alignment,
}

impl IoRequest {
    pub(super) fn new(operation: Operation, position_bytes: u64, spans: &[Span]) -> Self {
        let (mut addresses, mut offsets) = (ALIGNMENT_BYTES_MAX, ALIGNMENT_BYTES_MAX);
        let (mut length_bytes, mut last) = (0, position_bytes);
        for span in spans {
            addresses |= span.start().addr() as u64;
            offsets |= last;
            last = span.len() as u64;
            length_bytes += span.len();
        }
        let lowest_bit = |bits: u64| bits & bits.wrapping_neg();
        let alignment =
            Alignment { memory_bytes: lowest_bit(addresses), offset_bytes: lowest_bit(offsets) };
        Self { operation, position_bytes, length_bytes, alignment }
    }

    pub(super) fn fits(&self, needed: Alignment) -> bool {
        self.alignment.memory_bytes >= needed.memory_bytes
            && self.alignment.offset_bytes >= needed.offset_bytes
    }
}

/// File and length of a transfer that the cache makes itself.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// The file, at the positions of the transfer.
    pub file: BorrowedFd<'a>,
    /// Number of bytes, from the first on: at least one, at most all. The cache transfers the rest
    /// with `*_at`.
    pub length_bytes: usize,
}

/// Maximum alignment of a backing: frames and folios start at multiples of this.
pub(crate) const ALIGNMENT_BYTES_MAX: u64 = 4096;

/// Largest position: the kernel's positions are signed.
pub(crate) const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

/// Required alignment of transfers: powers of two from 1 to 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of addresses in memory.
    pub memory_bytes: u64,
    /// Alignment of positions and lengths.
    pub offset_bytes: u64,
}

impl Alignment {
    /// No requirement.
    pub const NONE: Self = Self { memory_bytes: 1, offset_bytes: 1 };

    /// Returns `true` if both are powers of two that frames and folios can satisfy.
    pub(crate) fn is_valid(self) -> bool {
        [self.memory_bytes, self.offset_bytes]
            .into_iter()
            .all(|bytes| bytes.is_power_of_two() && bytes <= ALIGNMENT_BYTES_MAX)
    }

    /// Returns the distance between positions where a transfer can be continued.
    pub(crate) fn granule_bytes(self) -> u64 {
        self.memory_bytes.max(self.offset_bytes)
    }
}

pub(crate) fn range_end(position_bytes: u64, length: usize) -> io::Result<u64> {
    let length_bytes = length as u64;
    let end = position_bytes.checked_add(length_bytes).filter(|end| *end <= POSITION_BYTES_MAX);
    end.ok_or_else(|| {
        let text = format!("{length} bytes at position {position_bytes} do not end below 2^63");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

pub(crate) fn round_down(value: usize, granule: u64) -> usize {
    debug_assert!(granule.is_power_of_two());
    value & !(granule as usize - 1)
}

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
    pub fn is_empty(&self) -> bool {
        self.span.len() == 0
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

    pub(super) fn part<'w>(
        buffers: &'w mut [IoBufMut<'_>],
        bytes: Range<usize>,
    ) -> SmallVec<[IoBufMut<'w>; 4]> {
        let spans = Span::parts(Self::spans(buffers), bytes);
        spans.map(|span| IoBufMut { span, frame: PhantomData }).collect()
    }

    /// Fills the first `length_bytes` bytes of consecutive buffers from `file`, with one system
    /// call. The range ends below 2^63.
    pub(super) fn read_from(
        buffers: &mut [IoBufMut<'_>],
        length_bytes: usize,
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        let (number, position) = (file.as_raw_fd(), position_bytes as i64);
        let part = Span::first(Self::spans(buffers), length_bytes);
        let count = if let [only] = &*part {
            // SAFETY: the buffer's bytes are writable; other threads read only through `sys::copy`
            // (IO-1).
            unsafe { libc::pread64(number, only.start().cast(), only.len(), position) }
        } else {
            let (entries, count) = Span::kernel_entries(&part);
            // SAFETY: the entries are those of `buffers`; as above for each.
            unsafe { libc::preadv64(number, entries, count as i32, position) }
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    pub(super) fn spans<'s>(buffers: &'s [IoBufMut<'_>]) -> &'s [Span] {
        // SAFETY: a buffer is a transparent span, and the result borrows the slice.
        unsafe { slice::from_raw_parts(buffers.as_ptr().cast(), buffers.len()) }
    }

    /// Returns the first `length_bytes` bytes as a buffer. Panics if it is shorter.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn prefix(&mut self, length_bytes: usize) -> IoBufMut<'_> {
        IoBufMut { span: self.span.part(0, length_bytes), frame: PhantomData }
    }

    /// Returns the buffer without its first `skipped_bytes` bytes. Panics if it is shorter.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn suffix(&mut self, skipped_bytes: usize) -> IoBufMut<'_> {
        self.span.check_range(skipped_bytes, 0);
        let length_bytes = self.len() - skipped_bytes;
        IoBufMut { span: self.span.part(skipped_bytes, length_bytes), frame: PhantomData }
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

    pub(super) fn part(buffers: &[IoBuf<'a>], bytes: Range<usize>) -> SmallVec<[IoBuf<'a>; 4]> {
        let spans = Span::parts(Self::spans(buffers), bytes);
        spans.map(|span| IoBuf { span, frame: PhantomData }).collect()
    }

    /// Stores the first `length_bytes` bytes of consecutive buffers in `file`, with one system
    /// call. The range ends below 2^63.
    pub(super) fn write_to(
        buffers: &[IoBuf<'_>],
        length_bytes: usize,
        file: BorrowedFd<'_>,
        position_bytes: u64,
    ) -> io::Result<usize> {
        let (number, position) = (file.as_raw_fd(), position_bytes as i64);
        let part = Span::first(Self::spans(buffers), length_bytes);
        let count = if let [only] = &*part {
            // SAFETY: the buffer's bytes are readable, and other threads write only through
            // `sys::copy` (IO-1).
            unsafe { libc::pwrite64(number, only.start().cast(), only.len(), position) }
        } else {
            let (entries, count) = Span::kernel_entries(&part);
            // SAFETY: the entries are those of `buffers`; as above for each.
            unsafe { libc::pwritev64(number, entries, count as i32, position) }
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    pub(super) fn spans<'s>(buffers: &'s [IoBuf<'_>]) -> &'s [Span] {
        // SAFETY: a buffer is a transparent span, and the result borrows the slice.
        unsafe { slice::from_raw_parts(buffers.as_ptr().cast(), buffers.len()) }
    }

    /// Returns the first `length_bytes` bytes as a buffer. Panics if it is shorter.
    #[doc(hidden)]
    pub fn prefix(&self, length_bytes: usize) -> IoBuf<'a> {
        IoBuf { span: self.span.part(0, length_bytes), frame: PhantomData }
    }

    /// Returns the buffer without its first `skipped_bytes` bytes. Panics if it is shorter.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn suffix(&self, skipped_bytes: usize) -> IoBuf<'a> {
        self.span.check_range(skipped_bytes, 0);
        let length_bytes = self.len() - skipped_bytes;
        IoBuf { span: self.span.part(skipped_bytes, length_bytes), frame: PhantomData }
    }
}

/// An address and a length, laid out as the kernel's `iovec`. Never accesses the memory.
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

    pub(super) fn end(&self) -> *mut u8 {
        self.start().wrapping_add(self.len())
    }

    pub(super) fn grow(&mut self, length_bytes: usize) {
        self.0.iov_len += length_bytes;
    }

    #[track_caller]
    pub(super) fn part(&self, offset: usize, length_bytes: usize) -> Self {
        self.check_range(offset, length_bytes);
        let start = self.start().wrapping_add(offset);
        Self(libc::iovec { iov_base: start.cast(), iov_len: length_bytes })
    }

    /// Returns the spans for a system call: at most as many as one call accepts (`IOV_MAX`);
    /// omitting the rest makes a short transfer.
    pub(super) fn kernel_entries(buffers: &[Self]) -> (*const libc::iovec, usize) {
        (buffers.as_ptr().cast(), buffers.len().min(libc::UIO_MAXIOV as usize))
    }

    /// Returns the first `length_bytes` bytes of consecutive spans; makes no list if that is all.
    fn first(spans: &[Self], length_bytes: usize) -> Cow<'_, [Self]> {
        let is_all = spans.iter().map(Self::len).sum::<usize>() == length_bytes;
        if is_all { spans.into() } else { Self::parts(spans, 0..length_bytes).collect() }
    }

    /// Returns `bytes` of consecutive spans.
    fn parts(spans: &[Self], bytes: Range<usize>) -> impl Iterator<Item = Self> {
        let mut end = 0;
        spans.iter().filter_map(move |span| {
            let start = end;
            end += span.len();
            let (from, to) = (start.max(bytes.start), end.min(bytes.end));
            (from < to).then(|| span.part(from - start, to - from))
        })
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
    memory: Reservation,
    length_bytes: usize,
}

impl IoBuffer {
    /// Creates a buffer of `length_bytes` zeros.
    ///
    /// # Panics
    /// If the kernel has no memory for it.
    pub fn new(length_bytes: usize) -> Self {
        Self::try_new(length_bytes).expect("memory for a buffer")
    }

    pub(super) fn try_new(length_bytes: usize) -> io::Result<Self> {
        let memory = Reservation::new(length_bytes, PAGE_BYTES)?;
        Ok(Self { memory, length_bytes })
    }

    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.memory.base).expect("a reservation is not at address 0")
    }

    /// Creates a buffer that holds a copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.target().copy_from_slice(0, bytes);
        buffer
    }

    /// Returns the bytes of the buffer.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the memory is mapped, readable, initialized by the kernel and at least this long;
        // buffers that write it hold `&mut`.
        unsafe { slice::from_raw_parts(self.memory.base, self.length_bytes) }
    }

    /// Returns the whole buffer, to be filled.
    pub fn target(&mut self) -> IoBufMut<'_> {
        // SAFETY: the memory is whole pages and uniquely borrowed while the buffer lives.
        unsafe { IoBufMut::new(self.start(), self.length_bytes) }
    }

    /// Returns the whole buffer, to be stored.
    pub fn source(&self) -> IoBuf<'_> {
        // SAFETY: the memory is whole pages and is not written while the buffer exists.
        unsafe { IoBuf::new(self.start(), self.length_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            assert_eq!(buffer.target().as_mut_ptr().addr() % 4096, 0);
            assert_eq!((buffer.target().len(), buffer.source().len()), (length, length));
        }
    }

    #[test]
    fn a_buffer_made_of_bytes_holds_them() {
        let bytes: Vec<u8> = (0..5000).map(|i| i as u8).collect();
        assert_eq!(IoBuffer::from_bytes(&bytes).as_bytes(), bytes);
    }

    fn request(position_bytes: u64, spans: &[(usize, usize)]) -> IoRequest {
        let span = |(address, length)| {
            Span::new(NonNull::new(std::ptr::without_provenance_mut(address)).unwrap(), length)
        };
        let spans: Vec<_> = spans.iter().copied().map(span).collect();
        IoRequest::new(Operation::Read, position_bytes, &spans)
    }

    fn alignment(position_bytes: u64, spans: &[(usize, usize)]) -> (u64, u64) {
        let found = request(position_bytes, spans).alignment;
        (found.memory_bytes, found.offset_bytes)
    }

    #[test]
    fn a_request_is_as_aligned_as_its_least_aligned_part() {
        assert_eq!(alignment(0, &[(8192, 4096)]), (4096, 4096));
        assert_eq!(alignment(512, &[(4100, 4096)]), (4, 512));
        assert_eq!(alignment(1, &[(1, 1)]), (1, 1));
        assert_eq!(alignment(0, &[(4096, 512), (16384, 4096)]), (4096, 512), "an inner length");
        assert_eq!(alignment(0, &[(4096, 4096), (16384, 100)]), (4096, 4096), "the last length");
        assert_eq!(alignment(1 << 40, &[(4096, 4096), (16386, 4096)]), (2, 4096));
        assert_eq!(request(0, &[(4096, 4096), (16384, 100)]).length_bytes, 4196);
    }

    #[test]
    fn a_request_fits_where_it_is_aligned_at_least_so() {
        let needed = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert!(request(1024, &[(4100, 700)]).fits(needed));
        assert!(!request(1024, &[(4101, 512)]).fits(needed));
        assert!(!request(1025, &[(4100, 512)]).fits(needed));
        assert!(!request(1024, &[(4100, 700), (8192, 512)]).fits(needed));
        assert!(request(1, &[(1, 1)]).fits(Alignment::NONE));
    }

    #[test]
    fn rounding_down_keeps_multiples_and_cuts_the_rest() {
        for granule in [1, 2, 512, 4096] {
            for value in [0, 1, 511, 512, 513, 4095, 4096, 4097, usize::MAX] {
                let rounded = round_down(value, granule);
                assert_eq!(rounded, value / granule as usize * granule as usize);
            }
        }
    }

    #[test]
    fn ranges_end_below_two_to_the_63() {
        let end_of = |position, length| range_end(position, length).unwrap();
        assert_eq!(end_of(0, 0), 0);
        assert_eq!(end_of(POSITION_BYTES_MAX, 0), POSITION_BYTES_MAX);
        assert_eq!(end_of(POSITION_BYTES_MAX - 1, 1), POSITION_BYTES_MAX);
        for (position_bytes, length) in
            [(POSITION_BYTES_MAX, 1), (1 << 63, 0), (u64::MAX, 1), (u64::MAX, usize::MAX)]
        {
            let error = range_end(position_bytes, length).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let text = format!("{length} bytes at position {position_bytes} do not end below 2^63");
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn alignments_are_powers_of_two_that_a_page_can_honour() {
        let valid =
            |memory_bytes, offset_bytes| Alignment { memory_bytes, offset_bytes }.is_valid();
        assert!(Alignment::NONE.is_valid());
        assert!(valid(4, 512) && valid(512, 4096) && valid(4096, 1));
        assert!(!valid(0, 512) && !valid(512, 0) && !valid(3, 512) && !valid(512, 8192));
    }

    #[test]
    fn a_transfer_is_taken_up_again_at_multiples_of_both() {
        let alignment = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert_eq!(alignment.granule_bytes(), 512);
        assert_eq!(Alignment { memory_bytes: 4096, offset_bytes: 512 }.granule_bytes(), 4096);
    }
}
