//! The hit: an optimistic read, or a pin, of a resident page, in as few instructions as we know.
//!
//! Everything a hit needs stands in the `File` itself: the table, the frames, the length. One
//! bounds check covers the page and the table; the length is judged with the Entry in hand. Two
//! cache lines of shared memory are read, the Entry and the data; none is written. (Of a file that
//! can be mapped, pages may leave for good: there a reference is taken, and put.) A long read
//! looks at the Entry before it copies, so that a hole does not cost a copy, and touches the next
//! page if the thread reads on (`read.rs`).
//!
//! # Safety
//! Follows raw addresses taken from a `Handle`, which the same `File` keeps alive.
#![allow(unsafe_code)]

use super::handle::Handle;
use super::read::goes_on;
use crate::ablation::Ablation;
use crate::memory::Memory;
use crate::page::{
    Entry, FolioId, FolioRef, Folios, Hot, PAGE_BYTES, PAGE_SHIFT, TryGet, is_in_one_page,
    read_validated, recheck_ready,
};
use crate::stats::{Counter, ThreadBlock};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;
use std::cell::Cell;
use std::ops::Range;
use std::sync::LazyLock;

/// From this length on a read is a long one: then looking first and copying afterwards costs
/// nothing that one would notice.
const LONG_BYTES: u64 = 512;

/// The result of an attempt at a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hit {
    /// The bytes are in the buffer.
    Done,
    /// The buffer is as it was.
    None,
    /// The buffer holds bytes of another page, perhaps of another file.
    InVain,
}

impl Hit {
    /// Zeroes a buffer that holds what it should not.
    pub(super) fn forget(self, buffer: &mut [u8]) {
        if self == Self::InVain {
            buffer.fill(0);
        }
    }
}

/// Addresses of what a hit reads; valid as long as the handle they were taken from.
#[derive(Clone, Copy, Debug)]
pub(super) struct HitPath {
    entries: *const AtomicU64,
    frames: *const u8,
    hot: *const Hot,
    /// Positions from here on have no Entry, and are none of a hit's business; 0 turns hits off.
    entries_end: u64,
    /// The same for a file in a region, where `entries_end` is 0: its frames follow from the
    /// positions, not from the Entries. 0 for others.
    in_place_end: u64,
    folio_bytes: u64,
    counters_id: u64,
    memory: *const Memory,
    pub(super) ablation: Ablation,
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
        let is_in_place = handle.inode.page_space.is_in_place();
        let end = if handle.readable { mapping.table().end_bytes() } else { 0 };
        Self {
            entries: mapping.table().as_ptr(),
            frames: handle.inode.page_space.base(),
            hot,
            entries_end: if is_in_place { 0 } else { end },
            in_place_end: if is_in_place { end } else { 0 },
            folio_bytes: mapping.folio_bytes(),
            counters_id: handle.inode.memory.counters.id(),
            memory: &*handle.inode.memory,
            ablation: handle.ablation,
        }
    }

    /// Copies `buffer.len()` bytes at `position` if they lie in one resident page that nobody
    /// changes meanwhile; tells whether it did. A page that was not marked as used yet is not
    /// served: the cold path marks it. Nor is a thread's first read, which registers its counters.
    #[inline(always)]
    pub(super) fn read(&self, buffer: &mut [u8], position: u64) -> Hit {
        if buffer.len() as u64 >= LONG_BYTES {
            return self.read_long(buffer, position);
        }
        if !self.may_read(position, buffer.len() as u64) {
            return self.read_referenced(buffer, position);
        }
        self.touch_predicted(position, 1);
        // SAFETY: as for any copy out of a frame: the caller of the closure answers.
        self.read_known(buffer, position, |source, target| unsafe {
            copy::copy_out(source, target);
        })
    }

    /// A read of which the copy is what takes the time: it is not begun in vain, and if reads
    /// follow each other, what comes next is touched before it.
    #[inline(never)]
    fn read_long(&self, buffer: &mut [u8], position: u64) -> Hit {
        let length = buffer.len() as u64;
        if !self.may_read(position, length) {
            return self.read_referenced(buffer, position);
        }
        self.touch_predicted(position, 4);
        let word = self.entry_word(position >> PAGE_SHIFT);
        let goes_on = goes_on(self.hot, position, length);
        if !Entry::from_word(word.load(Ordering::Relaxed)).is_referenced() {
            return Hit::None;
        }
        self.memory().counters.note_lookups(0, 3 + u64::from(goes_on));
        if !goes_on {
            // SAFETY: as for any copy out of a frame: the caller of the closure answers.
            return self.read_known(buffer, position, |source, target| unsafe {
                copy::copy_out(source, target);
            });
        }
        let ahead = self.frame_at(position + length);
        // SAFETY: as above.
        self.read_known(buffer, position, |source, target| unsafe {
            copy::copy_out_ahead(source, target, ahead);
        })
    }

    /// The same for a file in a region, whose page may leave at any moment: with a reference, which
    /// keeps it there (REGION-4). `false` for other files. On a path of its own: one more condition
    /// on that of the arena halves the rate of hot reads, measured.
    #[inline(never)]
    fn read_referenced(&self, buffer: &mut [u8], position: u64) -> Hit {
        let length = buffer.len() as u64;
        if !is_in_one_page(position, length) || position >= self.in_place_end {
            return Hit::None;
        }
        let word = self.entry_word(position >> PAGE_SHIFT);
        let block = ThreadBlock::of(self.counters_id);
        // Acquire: pairs with the Release in `set_ready`: the descriptor is set up.
        let seen = Entry::from_word(word.load(Ordering::Acquire));
        if !seen.is_referenced() | !block.is_known() {
            return Hit::None;
        }
        let Ok(_held) = self.memory().folios.try_get(seen.folio_id()) else { return Hit::None };
        let mut is_there = false;
        let copied = read_validated(word, Entry::is_ready, |entry| {
            // With the Entry in hand: a cut sets the length before it changes the bytes behind it.
            let is_inside = position + length <= self.hot().len_bytes();
            // READY with the reference in hand, as `recheck_ready` has it.
            is_there = entry.names_same_ready_folio(seen) & is_inside;
            if is_there {
                let source = self.frames.wrapping_add(position as usize);
                // SAFETY: in a page of the region that is there while the reference lives
                // (REGION-4), which the bytes do not leave; `buffer` is the caller's memory.
                unsafe { copy::copy_out(source, buffer) };
            }
        });
        if !is_there {
            return Hit::None;
        }
        if copied.is_none() {
            return Hit::InVain;
        }
        block.add(Counter::HitPinned, 1);
        Hit::Done
    }

    /// Whether the bytes lie in one page that the table has an Entry for.
    #[inline(always)]
    fn may_read(&self, position: u64, length: u64) -> bool {
        // Both at once, for one branch: see `read_validated`.
        is_in_one_page(position, length) & (position < self.entries_end)
    }

    /// Copies from a page of the arena that the table has an Entry for. `copy` gets an address that
    /// is readable for as many bytes as the buffer has.
    #[inline(always)]
    fn read_known(
        &self,
        buffer: &mut [u8],
        position: u64,
        copy: impl FnOnce(*const u8, &mut [u8]),
    ) -> Hit {
        let word = self.entry_word(position >> PAGE_SHIFT);
        let block = ThreadBlock::of(self.counters_id);
        let copies = Cell::new(false);
        let is_wanted = |entry: Entry| entry.is_referenced() & block.is_known() & copies.get();
        let copied = read_validated(word, is_wanted, |entry| {
            // With the Entry in hand: a cut sets the length before it changes the bytes behind it.
            if position + buffer.len() as u64 <= self.hot().len_bytes() {
                copies.set(true);
                let in_page = (position & (PAGE_BYTES - 1)) as usize;
                // Every Entry leads to a frame of the arena (ENTRY-1), which stays mapped
                // (FRAMES-2); the range ends inside the page; `buffer` is not frame memory.
                copy(self.frames.wrapping_add(entry.frame_offset_bytes() + in_page), buffer);
            }
        });
        if copied.is_some() {
            block.add(Counter::HitOptimistic, 1);
            return Hit::Done;
        }
        if copies.get() { Hit::InVain } else { Hit::None }
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
        // Acquire: pairs with the Release in `set_ready`: the descriptor is set up.
        let seen = Entry::from_word(word.load(Ordering::Acquire));
        if !seen.is_referenced() {
            return None;
        }
        let folio = try_get(&self.memory().folios, seen.folio_id()).ok()?;
        // READY with the reference in hand: the bytes are the page's, and, in a region, they are
        // there (its page may be on its way out while its folio is not frozen: B9 of
        // `reclaim/unmap.rs`).
        let folio = recheck_ready(word, folio, seen).ok()?;
        if self.in_place_end > 0 {
            return Some((folio, self.frames.wrapping_add(range.start as usize)));
        }
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
    fn touch_predicted(&self, position: u64, lines: usize) {
        let distance = self.hot().predicted_distance();
        if distance != 0 {
            let address = self.frames.wrapping_add(distance.wrapping_add(position) as usize);
            copy::prefetch_lines(address, lines);
        }
    }

    /// Where the byte at `position` is, if it is resident: to be touched, not to be read.
    #[inline(always)]
    fn frame_at(&self, position: u64) -> *const u8 {
        let word = self.entry_word(position.min(self.entries_end - 1) >> PAGE_SHIFT);
        let entry = Entry::from_word(word.load(Ordering::Relaxed));
        let in_page = (position & (PAGE_BYTES - 1)) as usize;
        self.frames.wrapping_add(entry.frame_offset_bytes() + in_page)
    }

    /// The Entry of a page that is at most the one behind the last.
    #[inline(always)]
    fn entry_word(&self, index: u64) -> &AtomicU64 {
        // SAFETY: the table has an Entry for every page the file may have, and one more, and lives
        // as long as the inode.
        unsafe { &*self.entries.wrapping_add(index as usize) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::{Advice, OpenOptions};
    use crate::io::{Backing, IoBuf, IoBufMut};
    use std::io;
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Arc, Barrier};
    use std::thread;

    /// Sevens, the second read of which arrives at the barrier, and again before it goes on.
    #[derive(Debug)]
    struct SlowAtSecond {
        reads: AtomicUsize,
        barrier: Barrier,
    }

    impl Backing for SlowAtSecond {
        fn read_at(&self, target: &mut IoBufMut<'_>, _: u64) -> io::Result<usize> {
            if self.reads.fetch_add(1, Ordering::Relaxed) == 1 {
                self.barrier.wait();
                self.barrier.wait();
            }
            target.copy_from_slice(0, &vec![7; target.len()]);
            Ok(target.len())
        }

        fn write_at(&self, _: &IoBuf<'_>, _: u64) -> io::Result<usize> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn sync_data(&self) -> io::Result<()> {
            Ok(())
        }

        fn sync_all(&self) -> io::Result<()> {
            Ok(())
        }

        fn len_bytes(&self) -> io::Result<u64> {
            Ok(PAGE_BYTES)
        }

        fn set_len(&self, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn describe(&self) -> String {
            "sevens".to_owned()
        }
    }

    #[test]
    fn a_pin_is_never_of_a_page_whose_fill_still_runs() {
        let backing =
            Arc::new(SlowAtSecond { reads: AtomicUsize::new(0), barrier: Barrier::new(2) });
        let cache = Cache::builder().memory(1 << 20).readahead_bytes_max(0).build().unwrap();
        let file =
            cache.open_backing(backing.clone(), &OpenOptions::new().immutable(true)).unwrap();
        // Twice: then it is marked as used.
        for _ in 0..2 {
            file.read_at(&mut [0; 8], 0).unwrap();
        }
        let page = 0..PAGE_BYTES;
        let reader = std::cell::Cell::new(None);
        let pinned = file.hit_path.pin(&page, |folios, id| {
            // Between the look at the Entry and the reference.
            assert_eq!(file.advise(page.clone(), Advice::DontNeed).unwrap().evicted, 1);
            let other = file.clone();
            reader.set(Some(thread::spawn(move || other.read_at(&mut [0; 8], 0))));
            backing.barrier.wait();
            let folio = folios.try_get(id);
            assert!(folio.is_ok(), "the page did not come to the frame that it had");
            folio
        });
        assert!(pinned.is_none(), "pinned before its bytes are there");
        backing.barrier.wait();
        reader.take().unwrap().join().unwrap().unwrap();
        assert_eq!(file.pin(page).unwrap().as_bytes(), Some(&[7; PAGE_BYTES as usize][..]));
    }
}
