//! The hit: an optimistic read of a resident page, in as few instructions as we know.
//!
//! Everything a hit needs stands in the `File` itself: the table, the frames, the length. One
//! bounds check covers the file's end and the table's: the table has an Entry for every page below
//! the length, and one more. Two cache lines of shared memory are read, the Entry and the data;
//! none is written.
//!
//! # Safety
//! Follows raw addresses taken from a `Handle`, which the same `File` keeps alive.
#![allow(unsafe_code)]

use super::handle::Handle;
use crate::mapping::{Entry, PAGE_BYTES, PAGE_SHIFT, read_validated};
use crate::stats::{Counter, Counters};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;

/// Addresses of what a hit reads; valid as long as the handle they were taken from.
#[derive(Clone, Copy, Debug)]
pub(super) struct HitPath {
    entries: *const AtomicU64,
    frames: *const u8,
    len_bytes: *const AtomicU64,
    counters: *const Counters,
}

// SAFETY: the addresses are of shared, synchronised objects that live as long as the `Handle` in
// the same `File`, whatever thread that is on.
unsafe impl Send for HitPath {}
// SAFETY: as above; a hit changes nothing here.
unsafe impl Sync for HitPath {}

impl HitPath {
    pub(super) fn new(handle: &Handle) -> Self {
        // A handle that may not read sees an empty file here, and the error in the cold path.
        static NOTHING: AtomicU64 = AtomicU64::new(0);
        let mapping = &handle.inode.mapping;
        let len_bytes = if handle.readable { mapping.len_word() } else { &NOTHING };
        Self {
            entries: mapping.table().as_ptr(),
            frames: handle.inode.memory.arena.base(),
            len_bytes,
            counters: &handle.inode.memory.counters,
        }
    }

    /// Copies `buffer.len()` bytes at `position` if they lie in one resident page that nobody
    /// changes meanwhile; tells whether it did. A page that was not marked as used yet is not
    /// served: the cold path marks it.
    #[inline(always)]
    pub(super) fn read(&self, buffer: &mut [u8], position: u64) -> bool {
        let in_page = position & (PAGE_BYTES - 1);
        let length = buffer.len() as u64;
        // SAFETY: the length lives in the inode, which the handle keeps, or is static.
        let len_word = unsafe { &*self.len_bytes };
        // Acquire: pairs with the Release in `set_len_bytes`: the bytes below it are there.
        let len_bytes = len_word.load(Ordering::Acquire);
        if in_page + length > PAGE_BYTES || position.saturating_add(length) > len_bytes {
            return false;
        }
        let index = (position >> PAGE_SHIFT) as usize;
        // SAFETY: position <= length of the file <= what the table was made for, and the table has
        // one Entry more than pages: `index` is inside. It lives as long as the inode.
        let word = unsafe { &*self.entries.wrapping_add(index) };
        let copied = read_validated(word, Entry::is_ready_and_referenced, |entry| {
            let offset = entry.frame_offset_bytes() + in_page as usize;
            let source = self.frames.wrapping_add(offset);
            // SAFETY: a READY Entry names a frame of the arena, which stays mapped (FRAMES-2);
            // the range ends inside the frame, checked above; `buffer` is not frame memory.
            unsafe { copy::copy_out(source, buffer) };
        });
        if copied.is_none() {
            return false;
        }
        // SAFETY: the counters live in the memory that the inode keeps.
        let counters = unsafe { &*self.counters };
        counters.add(Counter::HitOptimistic, 1);
        true
    }
}
