//! The hit path: an optimistic read, or a pin, of a resident page.
//!
//! All data that a hit needs is in the `File` itself, as a [`HitPath`]: addresses of the table, the
//! frames and the length. One bounds check covers the page and the table; the length is checked
//! after the Entry is loaded. Pages of a file that can be mapped need a reference, because eviction
//! unmaps them. If the maximum length was raised since the open, pages above the old maximum have
//! their Entries elsewhere ([`HitPath::later_word`]). A long read checks the Entry before it
//! copies, so that a miss costs no copy. Records behind a header that is no page lie in two pages:
//! both Entries are loaded before the copy and compared after it ([`HitPath::read_two`]).
//!
//! A reader that takes a file page by page cannot prefetch the next page within its call. So each
//! long read records in a thread-local where it ended; the next read, if it starts there,
//! prefetches the page after its own first ([`continues_read`]). This is a hint: two files may look
//! alike.
//!
//! # Safety
//! Dereferences raw addresses taken from an inode, which the handle in the same `File` keeps alive.
#![allow(unsafe_code)]

use crate::config::Ablation;
use crate::inode::Inode;
use crate::memory::Memory;
use crate::page::{
    Entry, FolioId, FolioRef, Folios, Hot, PAGE_BYTES, PAGE_SHIFT, Table, TryGet, is_in_one_page,
    read_validated, recheck_ready,
};
use crate::stats::{Counter, ThreadBlock};
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;
use std::cell::Cell;
use std::ops::Range;
use std::ptr;
use std::sync::LazyLock;

/// Minimum length of a long read, in bytes: beside its copy, a check of the Entry costs nothing.
const LONG_BYTES: u64 = 512;
/// Requests whose Entries, then pages, are prefetched together, because they are in no order:
/// enough for their cache misses to overlap, few enough that nothing is evicted before its use.
pub(super) const GROUP: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hit {
    /// All bytes are in the buffer.
    Done,
    /// The buffer is unchanged.
    None,
    /// The buffer holds bytes of another page, possibly of another file.
    Discarded,
}

impl Hit {
    /// Zeroes the buffer if it holds bytes of another page.
    pub(super) fn forget(self, buffer: &mut [u8]) {
        if self == Self::Discarded {
            buffer.fill(0);
        }
    }
}

/// Addresses that a hit reads from; valid as long as the inode they were taken from.
#[derive(Clone, Copy, Debug)]
pub(super) struct HitPath {
    entries: *const AtomicU64,
    frames: *const u8,
    hot: *const Hot,
    /// End of the positions that have an Entry at `entries`, in bytes; 0 turns their hits off.
    entries_end: u64,
    /// End of the positions of a file in a region, in bytes; 0 for other files. Frames of such a
    /// file follow from the positions, not from the Entries, and `entries_end` is 0.
    in_place_end: u64,
    /// End of the positions that have an Entry at `entries`, of any file, in bytes.
    pins_end: u64,
    table: *const Table,
    folio_bytes: u64,
    counters_id: u64,
    memory: *const Memory,
    pub(super) ablation: Ablation,
}

// SAFETY: the addresses are of shared, synchronised objects that live as long as the `Handle` in
// the same `File`, on any thread.
unsafe impl Send for HitPath {}
// SAFETY: as above; a hit changes none of them.
unsafe impl Sync for HitPath {}

impl HitPath {
    pub(super) fn new(inode: &Inode, is_readable: bool, ablation: Ablation) -> Self {
        // A handle without read access sees an empty file here, and the cold path returns the
        // error.
        static NOTHING: LazyLock<Hot> = LazyLock::new(|| Hot::new(0));
        let mapping = &inode.mapping;
        let hot = if is_readable { mapping.hot() } else { &NOTHING };
        let end = if is_readable { mapping.table().first_end_bytes() } else { 0 };
        let entries_end = inode.page_space.bytes_without_references(end);
        Self {
            entries: mapping.table().as_ptr(),
            frames: inode.page_space.base(),
            hot,
            entries_end,
            in_place_end: end - entries_end,
            pins_end: end,
            table: mapping.table(),
            folio_bytes: mapping.folio_bytes(),
            counters_id: inode.memory.counters.id,
            memory: &*inode.memory,
            ablation,
        }
    }

    /// Copies `buffer.len()` bytes at `position` if they lie in one resident page that no thread
    /// changes during the copy. Fails for a page that is not marked as used yet, which the cold
    /// path marks, and for the first read of a thread, which registers its counters.
    #[inline(always)]
    pub(super) fn read(&self, buffer: &mut [u8], position: u64) -> Hit {
        if buffer.len() as u64 >= LONG_BYTES {
            return self.read_long(buffer, position);
        }
        if !self.may_read(position, buffer.len() as u64) {
            return self.read_elsewhere(buffer, position);
        }
        self.touch_predicted(position, 1);
        self.read_known(self.entry_word(position >> PAGE_SHIFT), buffer, position)
    }

    /// Reads many bytes, with the Entry checked first and a prefetch if reads are sequential.
    #[inline(never)]
    fn read_long(&self, buffer: &mut [u8], position: u64) -> Hit {
        let length = buffer.len() as u64;
        if !self.may_read(position, length) {
            return self.read_elsewhere(buffer, position);
        }
        self.touch_predicted(position, 4);
        let word = self.entry_word(position >> PAGE_SHIFT);
        let continues_read = continues_read(self.hot, position, length);
        if !Entry(word.load(Ordering::Relaxed)).is_referenced() {
            return Hit::None;
        }
        if !continues_read {
            return self.read_known(word, buffer, position);
        }
        let ahead = self.frame_at(position + length);
        // SAFETY: the contract of `copy_known`.
        self.copy_known(word, buffer, position, |source, target| unsafe {
            copy::copy_out_ahead(source, target, ahead);
        })
    }

    /// Reads a page whose Entry is not at `entries`, or of a file in a region. A separate function:
    /// one more condition on the path of the arena halves the rate of hits.
    #[inline(never)]
    fn read_elsewhere(&self, buffer: &mut [u8], position: u64) -> Hit {
        let length = buffer.len() as u64;
        if !is_in_one_page(position, length) {
            return self.read_two(buffer, position);
        }
        if position < self.in_place_end {
            return self.read_referenced(buffer, position);
        }
        // Not even a read of nothing is a hit of a handle without read access, whose file is empty.
        if position.saturating_add(length.max(1)) > self.hot().len_bytes() {
            return Hit::None;
        }
        self.read_known(self.later_word(position >> PAGE_SHIFT), buffer, position)
    }

    /// Reads bytes that lie in two adjacent pages whose Entries are at `entries`. Longer runs are
    /// for the cold path.
    #[inline(never)]
    fn read_two(&self, buffer: &mut [u8], position: u64) -> Hit {
        let length = buffer.len() as u64;
        let in_page = position & (PAGE_BYTES - 1);
        let lie_in_two = in_page + length <= 2 * PAGE_BYTES;
        if !lie_in_two || position.saturating_add(length) > self.entries_end {
            return Hit::None;
        }
        let index = position >> PAGE_SHIFT;
        let (first, second) = (self.entry_word(index), self.entry_word(index + 1));
        let is_marked = |word: &AtomicU64| Entry(word.load(Ordering::Relaxed)).is_referenced();
        if !(is_marked(first) & is_marked(second)) {
            return Hit::None;
        }
        if length >= LONG_BYTES {
            // Only recorded: what follows is in the second page.
            continues_read(self.hot, position, length);
        }
        let block = ThreadBlock::of(self.counters_id);
        let copies = Cell::new(false);
        let is_wanted = |entry: Entry| entry.is_referenced() & block.is_known & copies.get();
        let copied = read_validated(first, is_wanted, |first| {
            read_validated(second, is_wanted, |second| {
                // Checked after both Entries: see `copy_known`.
                if position + length <= self.hot().len_bytes() {
                    copies.set(true);
                    // SAFETY: every Entry leads to a frame, which stays mapped (ENTRY-1, FRAMES-2),
                    // and the bytes end inside the second page; `buffer` is the caller's memory.
                    unsafe { self.copy_two(first, second, buffer, in_page as usize) };
                }
            })
        });
        if copied.flatten().is_some() {
            // As the cold path counts: the pages that the bytes would fill.
            block.add(Counter::HitOptimistic, length.div_ceil(PAGE_BYTES));
            return Hit::Done;
        }
        if copies.get() { Hit::Discarded } else { Hit::None }
    }

    /// Copies the bytes from `in_page` on in the frame of `first` to their end in that of `second`.
    ///
    /// # Safety
    /// Both Entries lead to frames, which stay mapped; the bytes end inside of the second.
    #[inline(always)]
    unsafe fn copy_two(&self, first: Entry, second: Entry, buffer: &mut [u8], in_page: usize) {
        let source = self.frames.wrapping_add(first.frame_offset_bytes() + in_page);
        let in_first = PAGE_BYTES as usize - in_page;
        let rest = self.frames.wrapping_add(second.frame_offset_bytes());
        if source.wrapping_add(in_first) == rest {
            // SAFETY: adjacent frames, and the contract of the caller.
            unsafe { copy::copy_out(source, buffer) };
            return;
        }
        let (head, tail) = buffer.split_at_mut(in_first);
        // SAFETY: the contract of the caller.
        unsafe { copy::copy_out_ahead(source, head, rest) };
        // SAFETY: as above.
        unsafe { copy::copy_out(rest, tail) };
    }

    /// Reads from a file in a region, where a page can be unmapped at any moment, with a reference
    /// that keeps it (REGION-4). The bytes lie in one page below `in_place_end`.
    fn read_referenced(&self, buffer: &mut [u8], position: u64) -> Hit {
        let length = buffer.len() as u64;
        let word = self.entry_word(position >> PAGE_SHIFT);
        let block = ThreadBlock::of(self.counters_id);
        // Acquire: pairs with the Release in `set_ready`: the descriptor is set up.
        let seen = Entry(word.load(Ordering::Acquire));
        if !seen.is_referenced() | !block.is_known {
            return Hit::None;
        }
        let Ok(_held) = self.memory().folios.try_get(seen.folio_id()) else { return Hit::None };
        let mut is_there = false;
        let copied = read_validated(word, Entry::is_ready, |entry| {
            // Checked after the Entry: a truncation sets the length before it changes the bytes
            // past it.
            let is_inside = position + length <= self.hot().len_bytes();
            // READY with the reference held, as in `recheck_ready`.
            is_there = entry.names_same_ready_folio(seen) & is_inside;
            if is_there {
                let source = self.frames.wrapping_add(position as usize);
                // SAFETY: in a page of the region that stays while the reference is held
                // (REGION-4); the bytes do not reach past it; `buffer` is the caller's memory.
                unsafe { copy::copy_out(source, buffer) };
            }
        });
        if !is_there {
            return Hit::None;
        }
        if copied.is_none() {
            return Hit::Discarded;
        }
        block.add(Counter::HitPinned, 1);
        Hit::Done
    }

    /// Returns `true` if the bytes lie in one page that has an Entry in the table.
    #[inline(always)]
    fn may_read(&self, position: u64, length: u64) -> bool {
        // Both conditions in one branch: see `read_validated`.
        is_in_one_page(position, length) & (position < self.entries_end)
    }

    /// Reads from a page of the arena whose Entry is `word`.
    #[inline(always)]
    fn read_known(&self, word: &AtomicU64, buffer: &mut [u8], position: u64) -> Hit {
        // SAFETY: the contract of `copy_known`.
        self.copy_known(word, buffer, position, |source, target| unsafe {
            copy::copy_out(source, target);
        })
    }

    /// Reads from a page of the arena whose Entry is `word`. `copy` gets an address in a frame,
    /// which stays mapped (FRAMES-2), with as many bytes as the buffer has, which is not frame
    /// memory. Each copy is a type of its own, or it is not inlined and a hit takes twice as long.
    #[inline(always)]
    fn copy_known(
        &self,
        word: &AtomicU64,
        buffer: &mut [u8],
        position: u64,
        copy: impl FnOnce(*const u8, &mut [u8]),
    ) -> Hit {
        let block = ThreadBlock::of(self.counters_id);
        let copies = Cell::new(false);
        let is_wanted = |entry: Entry| entry.is_referenced() & block.is_known & copies.get();
        let copied = read_validated(word, is_wanted, |entry| {
            // Checked after the Entry: a truncation sets the length before it changes the bytes
            // past it.
            if position + buffer.len() as u64 <= self.hot().len_bytes() {
                copies.set(true);
                let in_page = (position & (PAGE_BYTES - 1)) as usize;
                // Every Entry leads to a frame (ENTRY-1), and the range ends inside the page.
                copy(self.frames.wrapping_add(entry.frame_offset_bytes() + in_page), buffer);
            }
        });
        if copied.is_some() {
            block.add(Counter::HitOptimistic, 1);
            return Hit::Done;
        }
        if copies.get() { Hit::Discarded } else { Hit::None }
    }

    /// Calls `read` with the address of the bytes of `range` if they lie in one resident page of
    /// the arena that is marked as used. Returns `None` if not, or if the page changed meanwhile.
    #[inline(always)]
    pub(super) fn look<T>(
        &self,
        range: &Range<u64>,
        read: impl FnOnce(*const u8) -> T,
    ) -> Option<T> {
        let length = range.end.wrapping_sub(range.start);
        // An empty range, or one that ends before it starts, is for the cold path.
        if length.wrapping_sub(1) >= PAGE_BYTES || !self.may_read(range.start, length) {
            return None;
        }
        let block = ThreadBlock::of(self.counters_id);
        let word = self.entry_word(range.start >> PAGE_SHIFT);
        let is_wanted = |_| true;
        let found = read_validated(word, is_wanted, |entry| {
            // The length is loaded after the Entry: see `copy_known`.
            let is_inside = range.end <= self.hot().len_bytes();
            // Not called with the bytes of a page that is not there.
            if !(entry.is_referenced() & block.is_known & is_inside) {
                return None;
            }
            let in_page = (range.start & (PAGE_BYTES - 1)) as usize;
            Some(read(self.frames.wrapping_add(entry.frame_offset_bytes() + in_page)))
        });
        let result = found.flatten()?;
        block.add(Counter::HitOptimistic, 1);
        Some(result)
    }

    /// Takes a reference to the folio of `range`, if it is resident and marked as used, and returns
    /// the address of the first byte of the range.
    #[inline(always)]
    pub(super) fn pin<'a>(
        &'a self,
        range: &Range<u64>,
        try_get: impl FnOnce(&'a Folios, FolioId) -> std::result::Result<FolioRef<'a>, TryGet>,
    ) -> Option<(FolioRef<'a>, *const u8)> {
        // A folio lies in one array. The others are for `pin_elsewhere`: a call from here would
        // make each pin slower.
        if !self.may_pin(range) || range.end > self.pins_end {
            return None;
        }
        self.pin_known(self.entry_word(range.start >> PAGE_SHIFT), range, try_get)
    }

    /// Takes a reference like [`Self::pin`] to a folio whose Entry is not at `entries`.
    pub(super) fn pin_elsewhere<'a>(
        &'a self,
        range: &Range<u64>,
        try_get: impl FnOnce(&'a Folios, FolioId) -> std::result::Result<FolioRef<'a>, TryGet>,
    ) -> Option<(FolioRef<'a>, *const u8)> {
        if !self.may_pin(range) || range.end <= self.pins_end {
            return None;
        }
        self.pin_known(self.later_word(range.start >> PAGE_SHIFT), range, try_get)
    }

    /// Prefetches the Entries of a group of positions, then the first bytes of the pages: the cache
    /// misses of all overlap. Positions may be invalid.
    #[inline(always)]
    pub(super) fn touch_pages(&self, group: impl Iterator<Item = u64> + Clone) {
        self.touch_entries(group.clone());
        for position in group {
            self.touch_bytes(position, 1);
        }
    }

    /// Prefetches what pins of a group read and change, and the first bytes of the pages if
    /// `with_bytes`. Ranges may be invalid.
    #[inline(always)]
    pub(super) fn touch_folios(&self, group: &[Range<u64>], with_bytes: bool) {
        self.touch_entries(group.iter().map(|range| range.start));
        for range in group {
            if let Some(entry) = self.ready_entry(range.start) {
                let folio = ptr::from_ref(self.memory().folios.get(entry.folio_id()));
                copy::prefetch_lines_to_write(folio.cast(), 1);
                if with_bytes {
                    copy::prefetch_lines(self.address_of(range.start, entry), 1);
                }
            }
        }
    }

    /// Prefetches the Entries of a group of positions, which may be invalid.
    #[inline(always)]
    pub(super) fn touch_entries(&self, group: impl Iterator<Item = u64>) {
        for position in group {
            if position < self.pins_end {
                let word = self.entry_word(position >> PAGE_SHIFT);
                copy::prefetch_lines(ptr::from_ref(word).cast(), 1);
            }
        }
    }

    /// Returns the Entry of a resident page, for a prefetch only.
    #[inline(always)]
    fn ready_entry(&self, position: u64) -> Option<Entry> {
        if position >= self.pins_end {
            return None;
        }
        let entry = Entry(self.entry_word(position >> PAGE_SHIFT).load(Ordering::Relaxed));
        entry.is_ready().then_some(entry)
    }

    /// Prefetches bytes at `position`, which may be invalid, if their page is resident.
    #[inline(always)]
    pub(super) fn touch_bytes(&self, position: u64, lines: usize) {
        if let Some(entry) = self.ready_entry(position) {
            copy::prefetch_lines(self.address_of(position, entry), lines);
        }
    }

    /// Returns `true` if the range lies in one folio and in the file.
    #[inline(always)]
    fn may_pin(&self, range: &Range<u64>) -> bool {
        let in_one_folio = (range.start ^ range.end.wrapping_sub(1)) < self.folio_bytes;
        in_one_folio && range.start < range.end && range.end <= self.hot().len_bytes()
    }

    #[inline(always)]
    fn pin_known<'a>(
        &'a self,
        word: &AtomicU64,
        range: &Range<u64>,
        try_get: impl FnOnce(&'a Folios, FolioId) -> std::result::Result<FolioRef<'a>, TryGet>,
    ) -> Option<(FolioRef<'a>, *const u8)> {
        // Acquire: pairs with the Release in `set_ready`: the descriptor is set up.
        let seen = Entry(word.load(Ordering::Acquire));
        if !seen.is_referenced() {
            return None;
        }
        let folio = try_get(&self.memory().folios, seen.folio_id()).ok()?;
        // READY with the reference held: the bytes are those of the page and, in a region, are
        // present. (A page may be about to be unmapped while its folio is not frozen: UNMAP-B9 of
        // `maps/unmap.rs`.)
        let folio = recheck_ready(word, folio, seen).ok()?;
        Some((folio, self.address_of(range.start, seen)))
    }

    /// Returns the address of the byte at `position`, in the page that `entry` names.
    #[inline(always)]
    fn address_of(&self, position: u64, entry: Entry) -> *const u8 {
        if self.in_place_end > 0 {
            return self.frames.wrapping_add(position as usize);
        }
        let in_page = (position & (PAGE_BYTES - 1)) as usize;
        self.frames.wrapping_add(entry.frame_offset_bytes() + in_page)
    }

    /// Returns the Entry of a page below the length whose Entry is not at `entries`.
    #[cold]
    #[inline(never)]
    fn later_word(&self, index: u64) -> &AtomicU64 {
        // SAFETY: the handle keeps the inode, and the inode its table.
        unsafe { &*self.table }.word(index)
    }

    #[inline(always)]
    fn memory(&self) -> &Memory {
        // SAFETY: the inode keeps the memory allocated, and the handle the inode.
        unsafe { &*self.memory }
    }

    /// Returns the length and the prediction of the file; an empty one without read access.
    #[inline(always)]
    fn hot(&self) -> &Hot {
        // SAFETY: part of the inode, which the handle keeps, or static.
        unsafe { &*self.hot }
    }

    /// Prefetches the first bytes at their predicted address while the Entry is being loaded.
    #[inline(always)]
    fn touch_predicted(&self, position: u64, lines: usize) {
        let distance = self.hot().predicted_distance();
        if distance != 0 {
            let address = self.frames.wrapping_add(distance.wrapping_add(position) as usize);
            copy::prefetch_lines(address, lines);
        }
    }

    /// Returns the address of the byte at `position` if it is resident: for a prefetch only.
    #[inline(always)]
    fn frame_at(&self, position: u64) -> *const u8 {
        let word = self.entry_word(position.min(self.entries_end - 1) >> PAGE_SHIFT);
        let entry = Entry(word.load(Ordering::Relaxed));
        let in_page = (position & (PAGE_BYTES - 1)) as usize;
        self.frames.wrapping_add(entry.frame_offset_bytes() + in_page)
    }

    /// Returns the Entry of page `index`, which is at most one past the last page.
    #[inline(always)]
    fn entry_word(&self, index: u64) -> &AtomicU64 {
        // SAFETY: the callers have checked that the page lies below `entries_end`, `in_place_end`
        // or `pins_end`: the array has an Entry for it, and lives as long as the inode.
        unsafe { &*self.entries.wrapping_add(index as usize) }
    }
}

thread_local! {
    /// File and position at which the thread's last long read ended.
    static LAST_END: Cell<u64> = const { Cell::new(0) };
}

/// Returns `true` if a read of `length` bytes of `file` at `position` continues where the last one
/// of the thread ended. Records where this one ends.
#[inline(always)]
pub(super) fn continues_read(file: *const Hot, position: u64, length: u64) -> bool {
    // Rotates the address into bits that positions seldom use.
    let key = (file.addr() as u64).rotate_left(20).wrapping_add(position);
    LAST_END.replace(key.wrapping_add(length)) == key
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::io::{Backing, DirectBacking, IoBuf, IoBufMut};
    use std::io;
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Arc, Barrier};
    use std::thread;

    /// Backing whose bytes are all 7; its second read waits at the barrier when it arrives, and
    /// again before it returns.
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

        fn len_bytes(&self) -> io::Result<u64> {
            Ok(PAGE_BYTES)
        }

        fn set_len(&self, _: u64) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn describe(&self) -> String {
            "sevens".to_owned()
        }

        fn as_direct(&self) -> Option<&dyn DirectBacking> {
            Some(self)
        }
    }

    impl DirectBacking for SlowAtSecond {}

    #[test]
    fn a_pin_is_never_of_a_page_whose_fill_still_runs() {
        let backing =
            Arc::new(SlowAtSecond { reads: AtomicUsize::new(0), barrier: Barrier::new(2) });
        let cache = Cache::builder().memory(1 << 20).readahead_max(0).build().unwrap();
        let file = cache.open_backing(backing.clone(), &OpenOptions::new()).unwrap();
        // The second read marks the page as used.
        for _ in 0..2 {
            file.read_at(&mut [0; 8], 0).unwrap();
        }
        let page = 0..PAGE_BYTES;
        let reader = std::cell::Cell::new(None);
        let pinned = file.hit_path.pin(&page, |folios, id| {
            // Between the load of the Entry and the reference.
            assert_eq!(file.evict(page.clone()).unwrap().folios, 1);
            let other = file.clone();
            reader.set(Some(thread::spawn(move || other.read_at(&mut [0; 8], 0))));
            backing.barrier.wait();
            let folio = folios.try_get(id);
            assert!(folio.is_ok(), "the page did not get its old frame again");
            folio
        });
        assert!(pinned.is_none(), "pinned before it is filled");
        backing.barrier.wait();
        reader.take().unwrap().join().unwrap().unwrap();
        let mut found = [0; PAGE_BYTES as usize];
        file.pin(page).unwrap().copy_to(0, &mut found).unwrap();
        assert_eq!(found, [7; PAGE_BYTES as usize]);
    }

    /// Returns a file of 16 pages of random bytes, and the bytes. All pages are marked as used, and
    /// some of their frames are adjacent.
    fn used_file() -> (tempfile::TempDir, crate::file::File, Vec<u8>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut state = 1_u64;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(16 * PAGE_BYTES as usize)
        .collect();
        std::fs::write(&path, &bytes).unwrap();
        let cache = Cache::builder().memory(1 << 20).readahead_max(0).build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().write(true)).unwrap();
        // The first half page by page and in no order, the rest as one run.
        for page in [3, 1, 6, 0, 7, 2, 5, 4] {
            file.read_exact_at(&mut [0; 8], page * PAGE_BYTES).unwrap();
        }
        for _ in 0..3 {
            file.read_exact_at(&mut vec![0; bytes.len()], 0).unwrap();
            for page in 0..16 {
                file.read_exact_at(&mut [0; 8], page * PAGE_BYTES).unwrap();
            }
        }
        (directory, file, bytes)
    }

    #[test]
    fn a_hit_may_lie_in_two_pages() {
        let (_directory, file, bytes) = used_file();
        let page = PAGE_BYTES as usize;
        for start in [128, page - 1, page - 100, 2 * page + 4000, 9 * page + 7, 14 * page + 1] {
            for length in [2, 100, 500, 600, 4096, 8191] {
                let last_page = (start + length - 1) / page;
                if last_page > start / page + 1 || last_page == start / page || last_page > 15 {
                    continue;
                }
                let hits = || file.handle.inode.memory.counters.snapshot().reads.hits_optimistic;
                let before = hits();
                let mut found = vec![0; length];
                assert_eq!(file.hit_path.read(&mut found, start as u64), Hit::Done);
                assert!(found == bytes[start..start + length], "{length} bytes at {start}");
                assert_eq!(hits() - before, length.div_ceil(page) as u64);
            }
        }
    }

    #[test]
    fn a_hit_in_two_pages_needs_both() {
        let (_directory, file, bytes) = used_file();
        let read =
            |position: u64, length: usize| file.hit_path.read(&mut vec![0; length], position);
        assert_eq!(read(5 * PAGE_BYTES - 10, 20), Hit::Done);
        // Three pages, or past the end of the file, which lies in a page.
        assert_eq!(read(PAGE_BYTES - 1, PAGE_BYTES as usize + 2), Hit::None);
        assert_eq!(read(16 * PAGE_BYTES - 10, 20), Hit::None);
        file.set_len(9 * PAGE_BYTES + 5).unwrap();
        file.read_exact_at(&mut [0; 5], 9 * PAGE_BYTES).unwrap();
        assert_eq!(read(9 * PAGE_BYTES - 10, 16), Hit::None);
        // One of them is not resident.
        for absent in [4, 5] {
            assert_eq!(
                file.evict(absent * PAGE_BYTES..(absent + 1) * PAGE_BYTES).unwrap().folios,
                1
            );
            assert_eq!(read(5 * PAGE_BYTES - 10, 20), Hit::None);
            let mut found = [0; 20];
            file.read_exact_at(&mut found, 5 * PAGE_BYTES - 10).unwrap();
            let start = 5 * PAGE_BYTES as usize - 10;
            assert_eq!(found, bytes[start..start + 20]);
            for _ in 0..3 {
                file.read_exact_at(&mut [0; 8], absent * PAGE_BYTES).unwrap();
            }
        }
        assert_eq!(read(5 * PAGE_BYTES - 10, 20), Hit::Done);
    }

    #[test]
    fn a_read_goes_on_behind_the_last_one_of_its_thread_and_file() {
        let (file, other) = (Hot::new(0), Hot::new(0));
        assert!(!continues_read(&file, 4096, 4096));
        assert!(continues_read(&file, 8192, 512));
        assert!(!continues_read(&file, 8192, 512), "again, not on");
        assert!(!continues_read(&other, 8704, 512), "another file");
        assert!(!continues_read(&file, 8704, 512), "the other file came between");
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!continues_read(&file, 9216, 512), "another thread"));
        });
        assert!(continues_read(&file, 9216, 512));
    }
}
