//! Page-aligned memory of one owner, to drive a [`Backing`](super::Backing) by hand.
//!
//! The cache itself transfers to and from frames. This buffer is for everything beside it: the
//! trial read of `direct.rs`, backings that wrap others, and tests of a backing of your own. It is
//! aligned for direct transfers and a whole number of words long, as `sys::copy` needs.
//!
//! # Safety
//! The buffer owns its allocation; buffers on it borrow it, so it cannot be read or freed under
//! them.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::slice;

use super::align::ALIGNMENT_BYTES_MAX;
use super::{IoBuf, IoBufMut};

/// A buffer for transfers, aligned to 4096 bytes and zeroed when made.
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

    /// What the buffer holds.
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
    use super::*;

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
