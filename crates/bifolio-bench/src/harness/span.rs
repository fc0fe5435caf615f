//! Mapped memory, accessed as words.
//!
//! Created by `mapping` (the kernel's) and `mapped_file` (a cache's); used by loops that must be
//! the same instructions for both. Words are loaded and stored atomically, without any order:
//! threads may share a span, and no access can be optimised away.
//!
//! # Safety
//! The creator of a span guarantees its memory (see [`Span::new`]); every access checks that it is
//! inside.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// Mapped memory, kept by this value.
#[derive(Clone)]
pub(crate) struct Span {
    start: NonNull<u8>,
    len_bytes: usize,
    writable: bool,
    _owner: Arc<dyn Send + Sync>,
}

// SAFETY: the memory is mapped for all threads, its owner may be sent, and words are atomic.
unsafe impl Send for Span {}
// SAFETY: words are accessed atomically, and bytes that are copied are not written, as `new`
// requires.
unsafe impl Sync for Span {}

impl Span {
    /// Creates a span of the memory of `owner`.
    ///
    /// # Safety
    /// While `owner` lives, `len_bytes` from `start`, which is on a page boundary, are mapped, and
    /// writable if `writable` is set. If it is not set, they are never written.
    pub(super) unsafe fn new(
        start: NonNull<u8>,
        len_bytes: usize,
        writable: bool,
        owner: Arc<dyn Send + Sync>,
    ) -> Self {
        Self { start, len_bytes, writable, _owner: owner }
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes as u64
    }

    #[inline(always)]
    pub(crate) fn load(&self, pos_bytes: u64) -> u64 {
        // Relaxed: a number, and nothing that depends on it.
        self.word(pos_bytes).load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn store(&self, pos_bytes: u64, word: u64) {
        assert!(self.writable, "mapped to be read");
        // Relaxed: publishes nothing.
        self.word(pos_bytes).store(word, Ordering::Relaxed);
    }

    #[inline(always)]
    fn word(&self, pos_bytes: u64) -> &AtomicU64 {
        assert!(pos_bytes.is_multiple_of(WORD_BYTES));
        let address = self.address(pos_bytes, WORD_BYTES as usize).cast::<AtomicU64>();
        // SAFETY: inside the mapping and on a boundary of words, by the two checks; `&self` keeps
        // the owner, and with it the mapping, and all accesses are atomic.
        unsafe { address.as_ref() }
    }

    /// Fills `block` from memory that is mapped for reading.
    #[inline(always)]
    pub(crate) fn copy(&self, block: &mut [u8], pos_bytes: u64) {
        assert!(!self.writable, "another thread may write to it");
        let source = self.address(pos_bytes, block.len()).as_ptr();
        // SAFETY: as many bytes as the block has are readable there, by the check; they are not
        // written, as `new` requires; the block is exclusive memory of the caller, so the two
        // cannot overlap.
        unsafe { ptr::copy_nonoverlapping(source, block.as_mut_ptr(), block.len()) };
    }

    /// Returns the bytes from `pos_bytes` on; of memory that is mapped to be read.
    #[inline]
    pub(crate) fn bytes(&self, pos_bytes: u64, len_bytes: usize) -> &[u8] {
        assert!(!self.writable, "its bytes may change");
        let start = self.address(pos_bytes, len_bytes);
        // SAFETY: the bytes are inside the mapping, by the check, and `&self` keeps it; no
        // thread writes to them, as the caller of `new` has promised.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len_bytes) }
    }

    /// Returns the address of `pos_bytes`, after a check that `bytes` from there are inside.
    #[inline(always)]
    fn address(&self, pos_bytes: u64, bytes: usize) -> NonNull<u8> {
        assert!(pos_bytes <= (self.len_bytes as u64).saturating_sub(bytes as u64));
        assert!(bytes <= self.len_bytes);
        // SAFETY: inside the mapping, by the checks.
        unsafe { self.start.add(pos_bytes as usize) }
    }
}
