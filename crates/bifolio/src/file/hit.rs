//! The hit: an optimistic read, or a pin, of a resident page, in as few instructions as we know.
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
use crate::folio::{FolioId, FolioRef, Folios, TryGet};
use crate::lru::Memory;
use crate::mapping::{Entry, Hot, PAGE_BYTES, PAGE_SHIFT, read_validated, recheck};
use crate::stats::{Counter, ThreadBlock};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;
use std::ops::Range;
use std::sync::LazyLock;

/// From this length on a read is a long one.
const LONG_BYTES: u64 = 512;

/// Addresses of what a hit reads; valid as long as the handle they were taken from.
#[derive(Clone, Copy, Debug)]
pub(super) struct HitPath {
    entries: *const AtomicU64,
    frames: *const u8,
    hot: *const Hot,
    folio_bytes: u64,
    counters_id: u64,
    memory: *const Memory,
    #[cfg(feature = "ablation")]
    pub(super) pin_mode: crate::config::PinMode,
}

// SAFETY: the addresses are of shared, synchronised objects that live as long as the `Handle` in
// the same `File`, whatever thread that is on.
unsafe impl Send for HitPath {}
// SAFETY: as above; a hit changes nothing here.
unsafe impl Sync for HitPath {}

impl HitPath {
    pub(super) fn new(handle: &Handle) -> Self {
        // A handle that may not read sees an empty file here, and the error in the cold path.
        static NOTHING: LazyLock<Hot> = LazyLock::new(|| Hot::new(0));
        let mapping = &handle.inode.mapping;
        let hot = if handle.readable { mapping.hot() } else { &NOTHING };
        Self {
            entries: mapping.table().as_ptr(),
            frames: handle.inode.memory.arena.base(),
            hot,
            folio_bytes: mapping.folio_bytes(),
            counters_id: handle.inode.memory.counters.id(),
            memory: &*handle.inode.memory,
            #[cfg(feature = "ablation")]
            pin_mode: handle.pin_mode,
        }
    }

    /// Copies `buffer.len()` bytes at `position` if they lie in one resident page that nobody
    /// changes meanwhile; tells whether it did. A page that was not marked as used yet is not
    /// served: the cold path marks it. Nor is a thread's first read, which registers its counters.
    #[inline(always)]
    pub(super) fn read(&self, buffer: &mut [u8], position: u64) -> bool {
        let in_page = position & (PAGE_BYTES - 1);
        let length = buffer.len() as u64;
        // Both at once, for one branch: see `read_validated`.
        let in_file = position.saturating_add(length) <= self.hot().len_bytes();
        if !((in_page + length <= PAGE_BYTES) & in_file) {
            return false;
        }
        // The end of the range is in the file, so the Entry of its first byte is in the table.
        let word = self.entry_word(position >> PAGE_SHIFT);
        self.touch_predicted(position, length);
        let block = ThreadBlock::of(self.counters_id);
        let is_wanted = |entry: Entry| entry.is_referenced() & block.is_known();
        let copied = read_validated(word, is_wanted, |entry| {
            let offset = entry.frame_offset_bytes() + in_page as usize;
            let source = self.frames.wrapping_add(offset);
            // SAFETY: every Entry leads to a frame of the arena (ENTRY-1), which stays mapped
            // (FRAMES-2); the range ends inside the frame, checked above; `buffer` is not frame
            // memory.
            unsafe { copy::copy_out(source, buffer) };
        });
        if copied.is_some() {
            block.add(Counter::HitOptimistic, 1);
        }
        copied.is_some()
    }

    /// Takes a reference to the folio that `range` lies in, if that is resident and was marked as
    /// used, and gives the address of the range's first byte.
    #[inline(always)]
    pub(super) fn pin<'a>(
        &'a self,
        range: &Range<u64>,
        try_get: impl FnOnce(&'a Folios, FolioId) -> Result<FolioRef<'a>, TryGet>,
    ) -> Option<(FolioRef<'a>, *const u8)> {
        let in_one_folio = (range.start ^ range.end.wrapping_sub(1)) < self.folio_bytes;
        if !in_one_folio || range.start >= range.end || range.end > self.hot().len_bytes() {
            return None;
        }
        let word = self.entry_word(range.start >> PAGE_SHIFT);
        // Acquire: pairs with the Release in `set_ready`: the folio is uptodate.
        let seen = Entry::from_word(word.load(Ordering::Acquire));
        if !seen.is_referenced() {
            return None;
        }
        let folio = try_get(&self.memory().folios, seen.folio_id()).ok()?;
        let folio = recheck(word, folio, seen).ok()?;
        let in_page = (range.start & (PAGE_BYTES - 1)) as usize;
        Some((folio, self.frames.wrapping_add(seen.frame_offset_bytes() + in_page)))
    }

    #[inline(always)]
    fn memory(&self) -> &Memory {
        // SAFETY: the inode keeps the memory, the handle the inode.
        unsafe { &*self.memory }
    }

    /// The length and the prediction; of an empty file for a handle that may not read.
    #[inline(always)]
    fn hot(&self) -> &Hot {
        // SAFETY: lives in the inode, which the handle keeps, or is static.
        unsafe { &*self.hot }
    }

    /// Touches the bytes where they probably are, while the Entry that tells is on its way: the
    /// first line of a short read, the first few of a long one, whose rest the processor foresees.
    #[inline(always)]
    fn touch_predicted(&self, position: u64, length: u64) {
        let distance = self.hot().predicted_distance();
        if distance != 0 {
            let address = self.frames.wrapping_add(distance.wrapping_add(position) as usize);
            let lines = if length >= LONG_BYTES { 4 } else { 1 };
            copy::prefetch_lines(address, lines);
        }
    }

    /// The Entry of a page that is at most the one behind the last.
    #[inline(always)]
    fn entry_word(&self, index: u64) -> &AtomicU64 {
        // SAFETY: the table has an Entry for every page the file may have, and one more, and lives
        // as long as the inode.
        unsafe { &*self.entries.wrapping_add(index as usize) }
    }
}
