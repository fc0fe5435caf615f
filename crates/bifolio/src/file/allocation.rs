//! Allocation and holes: `allocate`, `punch_hole`, `zero_range`, and the seeks for data and holes.
//!
//! | call | a file with a backing | a memory file |
//! |---|---|---|
//! | `allocate` | the backing allocates storage | holes get folios of zeros |
//! | `punch_hole` | the backing frees storage | folios and slots are removed |
//! | `zero_range` | the backing zeroes storage | a hole is punched and allocated |
//! | seeks | the backing's data, and dirty folios | folios that were written, and slots |
//!
//! Whole folios are cleared together with the backing in `inode/clearing.rs`. The parts of folios
//! at the edges of a range are zeroed in memory; in a file with a backing that is a write.
//!
//! A hole is a page of a memory file that has neither a folio nor a swap slot, or was allocated and
//! never written: it reads as zeros, which reads check before they look up a folio.

use super::{File, Handle};
use crate::error::Result;
use crate::fill::{AccessMode, Locked, own_pins};
use crate::inode::{Inode, removal, seek};
use crate::io::FallocateMode;
use crate::page::{Flag, LockedFolio, PAGE_BYTES, PAGE_SHIFT, pages_of};
use crate::sync::Ordering;
use std::ops::{Range, RangeBounds};

/// A range that is about to be cleared, split into whole units and the parts beside them.
#[derive(Debug)]
struct RangeParts {
    before: Range<u64>,
    whole: Range<u64>,
    after: Range<u64>,
}

impl RangeParts {
    /// Splits a range. The bytes past the end of file are zeros, so the unit that contains the end
    /// is whole if the range reaches the end.
    fn of(range: &Range<u64>, unit: u64, len_bytes: u64) -> Self {
        let reaches_end = range.end >= len_bytes;
        let end = if reaches_end { len_bytes.next_multiple_of(unit) } else { range.end };
        let whole = range.start.next_multiple_of(unit)..end / unit * unit;
        if whole.start > whole.end {
            let before = range.start..end.max(range.start);
            return Self { before, whole: end..end, after: end..end };
        }
        Self { before: range.start..whole.start, after: whole.end..end, whole }
    }
}

impl File {
    /// Allocates storage for `range`, so that a later write there cannot fail for lack of space.
    /// The file is then at least `range.end` bytes long, as after `posix_fallocate`; new bytes are
    /// zeros, and what was written stays. Durable after the next sync.
    ///
    /// Blocks for the file system, and for write-outs of the file that are in flight. In a memory
    /// file, holes get folios, which may be swapped out like written ones; blocks for memory then.
    ///
    /// # Errors
    /// The error of the storage: no space, or [`Unsupported`](std::io::ErrorKind::Unsupported) by
    /// the file system or the [`Backing`](crate::backing::Backing); the length is then unchanged,
    /// and part of the range may be allocated. In a memory file, not enough memory within the
    /// bound, after which the file is unchanged. A handle that is not open for writing; a length
    /// beyond the maximum of the file.
    pub fn allocate(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.check_changeable()?;
        let end = self.handle.check_range(&range)?;
        self.handle.check_len(end)?;
        if range.is_empty() {
            return Ok(());
        }
        let mut growth = self.begin_growth(end)?;
        if !growth.resizing.fallocate(FallocateMode::Allocate, range.clone())? {
            self.allocate_folios(&range)?;
        }
        growth.reach(end);
        Ok(())
    }

    /// Allocates storage like [`File::allocate`], but leaves the length unchanged. Storage past
    /// the end of file is used when the file grows. In a memory file, only the part of `range`
    /// before the end of file gets folios. Fails like [`File::allocate`].
    pub fn allocate_keep_len(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.check_changeable()?;
        self.handle.check_range(&range)?;
        if range.is_empty() {
            return Ok(());
        }
        let resizing = self.handle.inode.lock_resizing();
        if resizing.fallocate(FallocateMode::AllocateKeepLen, range.clone())? {
            return Ok(());
        }
        self.allocate_folios(&(range.start..range.end.min(self.len())))
    }

    /// Allocates the holes of a range of a memory file; none if that fails.
    fn allocate_folios(&self, range: &Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let mut allocated: Vec<Range<u64>> = Vec::new();
        let Range { start: mut index, end } = pages_of(range);
        while index < end {
            let unit_end = self.handle.inode.mapping.end_of_unit(index);
            match self.allocate_unit(index) {
                Ok(false) => {}
                Ok(true) => match allocated.last_mut() {
                    Some(last) if last.end == index => last.end = unit_end,
                    _ => allocated.push(index..unit_end),
                },
                Err(error) => {
                    allocated.into_iter().for_each(|pages| self.take_back(pages));
                    return Err(error);
                }
            }
            index = unit_end;
        }
        Ok(())
    }

    /// Allocates the unit that holds page `index`. Returns `true` if it was a hole.
    fn allocate_unit(&self, index: u64) -> Result<bool> {
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(index);
        let seen = inode.mapping.table().load(head, Ordering::Relaxed);
        if inode.store.is_absent(seen) {
            // It is in the swap, and has its memory reserved there.
            return Ok(false);
        }
        let locked = self.handle.fill().lock_folio(index, AccessMode::Falloc)?;
        if !locked.lock.flags.write_state().is_dirty() && locked.lock.slot() == 0 {
            // A pinned page of zeros: a clean page that exists nowhere else could be evicted.
            inode.mark_dirty(&locked.folio, &locked.lock);
        }
        Ok(!locked.was_resident && locked.lock.flags.get(Flag::Allocated))
    }

    /// Turns allocated pages into holes again, unless they were used or allocated by another call
    /// since.
    fn take_back(&self, pages: Range<u64>) {
        let inode = &self.handle.inode;
        for index in pages.step_by(1 << inode.mapping.order()) {
            if let Some(Locked { folio, lock, .. }) = self.handle.fill().find_resident(index)
                && lock.flags.get(Flag::Allocated)
            {
                removal::remove_unwanted(inode, folio, lock);
            }
        }
    }

    /// Punches a hole: the bytes of `range` read as zeros, and whole folios in it release their
    /// memory and their storage. The length does not change. Durable after the next sync.
    ///
    /// Atomic with respect to reads and writes within one folio. On a file with a write gate, the
    /// call has no LSN: neither the zeros wait for the log, nor the length, which the storage gets
    /// if the range reaches the end of file. A page of a map that is pinned is written as zeros and
    /// keeps its storage. Pinned bytes stay readable through the pin, with any content.
    ///
    /// Blocks for I/O if the first or the last folio is only partly in the range and not in memory.
    /// In a file with a backing, also for the file system, for write-outs of the file that are in
    /// flight, and for the folio lock of each [`PageRefMut`](crate::PageRefMut) in the range.
    ///
    /// # Errors
    /// A handle that is not open for writing; a range beyond 2^63; an error of the storage:
    /// [`Unsupported`](std::io::ErrorKind::Unsupported), after which nothing is changed, or another
    /// one, after which each folio of the range has its old bytes or zeros. In a memory file, an
    /// error of the swap for the first or the last folio; nothing is changed then, except when the
    /// last folio becomes unreadable after the first one was zeroed.
    pub fn punch_hole(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.clear(range, FallocateMode::PunchHole)
    }

    /// Zeroes `range` like [`File::punch_hole`], but the storage of whole folios stays allocated,
    /// or is allocated. The length does not change. In a memory file, the folios before the end of
    /// file are allocated again. Fails like [`File::punch_hole`] and [`File::allocate`].
    pub fn zero_range(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.clear(range, FallocateMode::ZeroRange)
    }

    /// Clears whole folios of the range on the storage, or in memory for a memory file, and writes
    /// zeros to the parts of folios at its ends.
    fn clear(&self, range: Range<u64>, mode: FallocateMode) -> Result<()> {
        self.check_changeable()?;
        self.handle.check_range(&range)?;
        let inode = &self.handle.inode;
        if self.is_memory_file() {
            let mut len_bytes = self.len();
            // Bytes past the end of file are zeros for as long as the file does not grow. A range
            // that ended before it is cleared as such: after a cut, another call may write behind.
            let resizing = (range.end >= len_bytes).then(|| {
                let resizing = inode.lock_resizing();
                len_bytes = self.len();
                resizing
            });
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before a range is split");
            self.clear_in_memory(&RangeParts::of(&range, self.folio_bytes(), len_bytes))?;
            drop(resizing);
            let is_punched = mode == FallocateMode::PunchHole;
            return if is_punched { Ok(()) } else { self.allocate_keep_len(range) };
        }
        if range.is_empty() {
            return Ok(());
        }
        let resizing = inode.lock_resizing();
        let pieces = RangeParts::of(&range, self.folio_bytes(), self.len());
        own_pins::check(inode, &pages_of(&(range.start..pieces.after.end.max(range.end))))?;
        if !pieces.whole.is_empty() {
            resizing.clear(mode, pieces.whole)?;
        }
        self.write_zeros(pieces.before)?;
        self.write_zeros(pieces.after)
    }

    /// Writes zeros to the bytes of one unit that lie in the file. The caller holds `resizing`.
    fn write_zeros(&self, bytes: Range<u64>) -> Result<()> {
        let end = bytes.end.min(self.len());
        let zeros = vec![0; end.saturating_sub(bytes.start) as usize];
        self.write_all_at(&zeros, bytes.start)
    }

    /// Clears a range of a memory file. What can fail comes first: then nothing has changed.
    fn clear_in_memory(&self, pieces: &RangeParts) -> Result<()> {
        let RangeParts { before, whole, after } = pieces;
        let inode = &self.handle.inode;
        own_pins::check(inode, &pages_of(&(before.start..after.end)))?;
        // Does everything that can fail first: reads the last folio before anything is changed. It
        // is not kept referenced, because there may be memory for one folio only.
        if !after.is_empty() {
            drop(self.handle.fill().find_folio(after.start >> PAGE_SHIFT, AccessMode::Read)?);
        }
        for part in [before, after].into_iter().filter(|part| !part.is_empty()) {
            self.handle.zero_in_memory(part.start >> PAGE_SHIFT, |_| part.clone())?;
        }
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before a range is punched");
        removal::punch(inode, whole.start >> PAGE_SHIFT..whole.end >> PAGE_SHIFT);
        Ok(())
    }

    /// Returns the position of the first data at or after `position`, like `SEEK_DATA`. Returns
    /// `None` if there is no more data, or `position` is past the end of file.
    ///
    /// In a file with a backing, data is what the storage reports as data, and every dirty folio. A
    /// [`Backing`](crate::backing::Backing) that does not know its holes reports none. In a memory
    /// file, data are the folios that were written; allocated ones are holes until then.
    ///
    /// Costs a visit of each resident folio up to the data that is found, and calls of the
    /// storage, which may block.
    ///
    /// # Errors
    /// The cache is closed; an error of the storage; a [`PageRefMut`](crate::PageRefMut) of the
    /// calling thread on a mappable file.
    pub fn seek_data(&self, position: u64) -> Result<Option<u64>> {
        self.seek(position, seek::first_data)
    }

    /// Returns the position of the first hole at or after `position`, like `SEEK_HOLE`; the end of
    /// file counts as a hole. Returns `None` if `position` is past the end of file. What is data,
    /// and the errors, are those of [`File::seek_data`].
    pub fn seek_hole(&self, position: u64) -> Result<Option<u64>> {
        self.seek(position, |inode, at, end| seek::first_hole(inode, at, end).map(Some))
    }

    fn seek(
        &self,
        position: u64,
        find: impl FnOnce(&Inode, u64, u64) -> Result<Option<u64>>,
    ) -> Result<Option<u64>> {
        self.handle.check_usable()?;
        let (inode, len_bytes) = (&self.handle.inode, self.len());
        if position >= len_bytes {
            return Ok(None);
        }
        // It looks for stores through maps, under the folio locks.
        if inode.device.is_some() && inode.page_space.is_in_place() {
            own_pins::check(inode, &own_pins::ALL_PAGES)?;
        }
        find(inode, position, len_bytes)
    }

    /// Fills `buffer` with zeros as far as the file reads as zeros from `position` on, in one step.
    /// Returns the number of bytes: 0 if the first page has data.
    pub(super) fn fill_zeros(&self, buffer: &mut [u8], position: u64) -> usize {
        let inode = &self.handle.inode;
        if !inode.store.has_holes() {
            return 0;
        }
        let mut length_max = buffer.len() as u64;
        loop {
            let cuts = inode.mapping.cuts();
            let len_bytes = inode.mapping.len_bytes();
            let wanted = len_bytes.saturating_sub(position).min(length_max);
            if wanted == 0 {
                return 0;
            }
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before holes are looked for");
            let first = position >> PAGE_SHIFT;
            let zeros_end = self.zeros_end(first, (position + wanted).div_ceil(PAGE_BYTES));
            if zeros_end == first {
                return 0;
            }
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("after holes were seen");
            // An append fills holes before it sets the length, so the length from before counts. A
            // truncation sets the length before it makes holes: if there was one, again, for a page
            // only, which takes less time than the next truncation.
            if inode.mapping.cuts() == cuts {
                let length = (zeros_end * PAGE_BYTES - position).min(wanted);
                let target = &mut buffer[..length as usize];
                target.fill(0);
                return target.len();
            }
            length_max = length_max.min(PAGE_BYTES - (position & (PAGE_BYTES - 1)));
        }
    }

    /// Returns the end of the pages from `first` on that read as zeros, at most `end`; `first` if
    /// that page does not.
    fn zeros_end(&self, first: u64, end: u64) -> u64 {
        let mapping = &self.handle.inode.mapping;
        let mut index = first;
        while index < end {
            let holes_end = mapping.table().end_of_uncharged(index);
            if holes_end > index {
                index = holes_end;
            } else if self.reads_as_zeros(index) {
                index = mapping.end_of_unit(index);
            } else {
                break;
            }
        }
        index.min(end)
    }

    /// Returns `true` for a hole, or a page that was allocated and never written.
    fn reads_as_zeros(&self, index: u64) -> bool {
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(index);
        // Acquire: pairs with the Release in READ-I1: we see the flags of the folio that this Entry
        // names.
        let seen = inode.mapping.table().load(head, Ordering::Acquire);
        if !seen.is_folio() || seen.is_ready() {
            return inode.store.is_hole(seen);
        }
        let is_allocated = inode.memory.folio(seen.folio_id()).flags.get(Flag::Allocated);
        // The Acquire of `get` orders this after it: the flag belonged to that folio.
        let is_that_folio = || inode.mapping.table().load(head, Ordering::Relaxed) == seen;
        is_allocated && is_that_folio()
    }
}

impl Handle {
    /// Zeroes the bytes that `range` returns, in the folio of a memory file that holds page
    /// `index`. A hole stays one. Blocks like a write for room among the pages that are not in the
    /// swap.
    pub(super) fn zero_in_memory(
        &self,
        index: u64,
        range: impl Fn(&LockedFolio<'_>) -> Range<u64>,
    ) -> Result<()> {
        let inode = &self.inode;
        while let Some(found) = self.fill().find_folio(index, AccessMode::Read)? {
            let range = range(&found.lock);
            // One that is allocated and was never written has zeros already.
            let marked = match found.is_uptodate() {
                true => inode.try_mark_dirty(&found.folio, &found.lock, None),
                false => Ok(()),
            };
            let Err(no_room) = marked else {
                inode.zero_in_place(&found.folio, &found.lock, range);
                break;
            };
            drop(found);
            self.make_room(no_room, range.start, range.end - range.start)?;
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::Cache;
    use crate::sync::test_hook;

    /// A range that ended before the end of file is not one that reaches it, whatever happens to
    /// the length meanwhile.
    #[test]
    fn bytes_written_behind_a_range_after_a_cut_stay() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("scratch").unwrap();
        file.write_all_at(&[1; 12288], 0).unwrap();
        let (cut, written) = (file.clone(), file.clone());
        test_hook::set("before a range is split", move || {
            cut.set_len(4500).unwrap();
            test_hook::set("before a range is punched", move || {
                written.write_all_at(&[2; 8], 6000).unwrap();
            });
        });
        file.punch_hole(4096..5000).unwrap();
        assert!(test_hook::has_run());
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 6000).unwrap();
        assert_eq!(bytes, [2; 8]);
    }
}
