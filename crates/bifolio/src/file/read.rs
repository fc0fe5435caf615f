//! Reads: the hit first, then batches of references, then the folio lock.
//!
//! After the batched read of the thread S (`kernel-notes`: SGP_GET): up to 31 uptodate folios are
//! referenced at once, no folio lock is taken, the length is read again before each copy, and the
//! next folio is touched before this one is copied. A batch is walked by position and a folio
//! leaves it only when the position has moved past it, so a copy that an old length cut short in
//! the middle of a folio goes on in the same folio, not behind it.
//!
//! # Safety
//! Copies out of frames that a reference, or the frame's permanence, keeps readable.
#![allow(unsafe_code)]

use super::access::Access;
use super::batch::{Batch, Delivery};
use super::fill::{RunClaim, Wait};
use super::{File, ReadRequest};
use crate::error::Result;
use crate::folio::{BATCH_SLOTS, Flag, FolioRef};
use crate::mapping::{Entry, PAGE_BYTES, PAGE_SHIFT, read_validated};
use crate::stats::Counter;
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;
use arrayvec::ArrayVec;

/// Optimistic attempts at a page before a reference, or the lock, decides.
const ATTEMPTS_MAX: u32 = 4;
/// The most of one request that is on its way at a time: copies and transfers overlap anyway.
const REQUEST_BYTES_MAX: u64 = 8 << 20;
/// Lines of the next folio that are touched ahead: more gain nothing.
const LINES_AHEAD: usize = 8;

/// References to folios in a row. What lies between them, and behind the last one, reads as zeros.
#[derive(Debug, Default)]
pub(super) struct ReadBatch<'a> {
    pub(super) folios: ArrayVec<FolioRef<'a>, BATCH_SLOTS>,
    /// One page behind the last one it has.
    pub(super) end: u64,
}

impl File {
    /// Reads bytes at `position` into `buffer`. Returns how many: fewer than asked only at the end
    /// of the file, or before a byte that cannot be read (the next call there says why).
    ///
    /// A resident page is copied without a lock, a reference or a shared write. Blocks for I/O on
    /// a miss. Atomic with respect to `write_at` inside one 4 KiB page.
    ///
    /// # Errors
    /// The storage's, with file, position and length; the cache full of pinned pages; a handle not
    /// opened for reading; a range beyond 2^63.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, b"0123456789")?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let mut buffer = [0; 8];
    /// assert_eq!(file.read_at(&mut buffer, 6)?, 4);
    /// assert_eq!(&buffer[..4], b"6789");
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        if self.hit_path.read(buffer, position) {
            return Ok(buffer.len());
        }
        self.read_at_miss(buffer, position)
    }

    /// Reads exactly `buffer.len()` bytes at `position`.
    ///
    /// # Errors
    /// As [`File::read_at`], and [`ErrorKind::PastEnd`] if the file has fewer bytes; `buffer` may
    /// have been filled in part then.
    #[inline]
    pub fn read_exact_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        if self.hit_path.read(buffer, position) {
            return Ok(());
        }
        let mut done = 0;
        while done < buffer.len() {
            let count = self.read_at_miss(&mut buffer[done..], position + done as u64)?;
            if count == 0 {
                return Err(self.handle.past_end(position, buffer.len() as u64));
            }
            done += count;
        }
        Ok(())
    }

    #[inline(never)]
    fn read_at_miss(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.handle.check_readable()?;
        self.handle.range_end(position, buffer.len() as u64)?;
        self.read_pages(buffer, position, true)
    }

    /// Reads without looking for a pattern, and without acting on one.
    pub(super) fn read_plainly(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.read_pages(buffer, position, false)
    }

    fn read_pages(&self, buffer: &mut [u8], position: u64, ahead: bool) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            let copied = match self.read_resident(left, at) {
                0 => self.read_absent(left, at, ahead),
                copied => Ok(copied),
            };
            match copied {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(error) if done == 0 => return Err(error),
                // What was read is good; the caller finds the error where it stands.
                Err(_) => break,
            }
            if ahead {
                self.handle.note_read(at..position + done as u64);
            }
        }
        Ok(done)
    }

    /// Copies from pages that are not resident, or that somebody is filling or writing: at least
    /// the first of them. Returns 0 at the end of the file.
    fn read_absent(&self, buffer: &mut [u8], position: u64, ahead: bool) -> Result<usize> {
        let inode = &*self.handle.inode;
        let length = inode.mapping.len_bytes().saturating_sub(position);
        let length = length.min(buffer.len() as u64).min(REQUEST_BYTES_MAX);
        if length == 0 {
            return Ok(0);
        }
        let pages = position >> PAGE_SHIFT..(position + length).div_ceil(PAGE_BYTES);
        let RunClaim::New(run) = self.handle.claim_run(pages.clone(), Wait::ForFrames)? else {
            // On its way. What comes behind it must not wait until it is here.
            if ahead {
                self.handle.follow_marks(pages);
            }
            return self.read_page_locked(buffer, position);
        };
        if ahead {
            self.handle.read_ahead_of_miss(pages.clone());
        }
        let mut request = ReadRequest::new(position, buffer);
        let mut failed = None;
        let first_page = run.first_page();
        let mut deliver = |_, delivery| match delivery {
            Delivery::Folio(locked) => request.take(inode, &locked),
            Delivery::Failed { error, page, folios: 1 } if page == first_page => {
                failed = Some(error);
            }
            // One bad byte fails a whole run: by itself the first folio may be good.
            Delivery::Failed { .. } => {}
        };
        let mut batch = Batch::in_order(inode);
        batch.start(run, 0, &mut deliver);
        let rest = batch.add(&self.handle, pages, 0, &mut deliver);
        batch.finish(&mut deliver);
        // What could not be begun is the next call's.
        let _ = rest;
        match (request.done(), failed) {
            (0, Some(error)) => Err(error),
            (0, None) => self.read_page_locked(buffer, position),
            (copied, _) => Ok(copied),
        }
    }

    /// Copies from resident folios, a batch of references at a time. Returns 0 when the first page
    /// is not resident and READY, or lies behind the end.
    pub(super) fn read_resident(&self, buffer: &mut [u8], position: u64) -> usize {
        // Bytes that follow the last ones read do not make their page one that was used again.
        let continues = self.handle.readahead.continues(position);
        let mut done = 0;
        while done < buffer.len() {
            let wanted = (buffer.len() - done) as u64;
            let batch = self.gather(position + done as u64, wanted);
            let in_order = continues || done > 0;
            let left = &mut buffer[done..];
            let copied = self.copy_batch(&batch, left, position + done as u64, in_order);
            if copied == 0 {
                break;
            }
            done += copied;
        }
        done
    }

    /// References up to 31 READY folios in a row, from the one at `position` on.
    pub(super) fn gather(&self, position: u64, length: u64) -> ReadBatch<'_> {
        let mapping = &self.handle.inode.mapping;
        let folios = &self.handle.inode.memory.folios;
        let visible = mapping.len_bytes().saturating_sub(position).min(length);
        let mut batch = ReadBatch { folios: ArrayVec::new(), end: position >> PAGE_SHIFT };
        if visible == 0 {
            return batch;
        }
        let last = (position + visible - 1) >> PAGE_SHIFT;
        while batch.end <= last && !batch.folios.is_full() {
            // Acquire: pairs with the Release in `set_ready`: the folio is uptodate.
            let seen = mapping.table().load(batch.end, Ordering::Acquire);
            if seen.is_ready() {
                let Ok(folio) = mapping.try_get_named(folios, batch.end, seen) else { break };
                batch.folios.push(folio);
                batch.end = ((batch.end >> seen.order()) + 1) << seen.order();
            } else if self.reads_as_zeros(batch.end) {
                batch.end = self.handle.end_of_folio(batch.end);
            } else {
                break;
            }
        }
        batch
    }

    /// Copies what the batch covers, page by page, each one validated. Stops before a page that
    /// somebody is writing, and at the end of the file as it is at that moment.
    fn copy_batch(
        &self,
        batch: &ReadBatch<'_>,
        buffer: &mut [u8],
        position: u64,
        in_order: bool,
    ) -> usize {
        let mapping = &self.handle.inode.mapping;
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let index = at >> PAGE_SHIFT;
            // The length is read again for each copy, with the folio in hand.
            let visible = mapping.len_bytes().saturating_sub(at);
            if index >= batch.end || visible == 0 {
                break;
            }
            let in_page = at & (PAGE_BYTES - 1);
            let length = (PAGE_BYTES - in_page).min(visible).min((buffer.len() - done) as u64);
            self.touch_ahead(index + 1, batch.end);
            let target = &mut buffer[done..done + length as usize];
            if !self.copy_page(index, in_page as usize, target) {
                if !self.reads_as_zeros(index) {
                    break;
                }
                target.fill(0);
            }
            let goes_on_in_page = in_order && in_page > 0;
            if !goes_on_in_page {
                self.note_use(index, in_order || done > 0);
            }
            done += length as usize;
        }
        let pages = (done as u64).div_ceil(PAGE_BYTES);
        self.handle.inode.memory.counters.add(Counter::HitPinned, pages);
        done
    }

    /// Whether the page is a hole of a memory file, or allocated and never written.
    fn reads_as_zeros(&self, index: u64) -> bool {
        let inode = &self.handle.inode;
        if !inode.is_memory_file() {
            return false;
        }
        let head = inode.mapping.head_index(index);
        // Acquire: pairs with the Release in I1: we see the flags of the life this Entry names.
        let seen = inode.mapping.table().load(head, Ordering::Acquire);
        if !seen.is_folio() || seen.is_ready() {
            return inode.is_hole(seen);
        }
        let is_allocated = inode.memory.folio(seen.folio_id()).flags.get(Flag::Allocated);
        // The Acquire of `get` orders this after it: the flag was of that life.
        is_allocated && inode.mapping.table().load(head, Ordering::Relaxed) == seen
    }

    /// Touches the first lines of the page after this one, if the batch holds it.
    fn touch_ahead(&self, index: u64, end: u64) {
        if index < end {
            let entry = self.handle.inode.mapping.table().load(index, Ordering::Relaxed);
            let start = self.frame(entry);
            copy::prefetch_lines(start, LINES_AHEAD);
        }
    }

    /// Copies part of a page that a reference keeps resident; `false` if a writer is inside.
    fn copy_page(&self, index: u64, in_page: usize, target: &mut [u8]) -> bool {
        let mapping = &self.handle.inode.mapping;
        for _ in 0..ATTEMPTS_MAX {
            let word = mapping.table().word(index);
            if self.copy_validated(word, in_page, target) {
                return true;
            }
            self.handle.inode.memory.counters.add(Counter::OptimisticRetry, 1);
        }
        false
    }

    /// Marks a page as used, for the replacement policy. The first use of a folio that was read
    /// ahead is what it was read for, and counts as its fill does: it ends with the last page, or
    /// where the reader leaves the order.
    pub(super) fn note_use(&self, index: u64, in_order: bool) {
        let mapping = &self.handle.inode.mapping;
        let seen = mapping.table().load(index, Ordering::Relaxed);
        if !seen.is_folio() {
            return;
        }
        let flags = &self.handle.inode.memory.folio(seen.folio_id()).flags;
        if !flags.get(Flag::Readahead) {
            mapping.table().mark_referenced(index, seen);
        } else if !in_order || index + 1 == self.handle.end_of_folio(index) {
            flags.clear(Flag::Readahead);
        }
    }

    fn copy_validated(&self, word: &AtomicU64, in_page: usize, target: &mut [u8]) -> bool {
        read_validated(word, Entry::is_ready, |entry| {
            let source = self.frame(entry).wrapping_add(in_page);
            // SAFETY: a READY Entry names a frame of the arena, which stays mapped (FRAMES-2), and
            // in_page + target.len() stays inside it; `target` is the caller's memory.
            unsafe { copy::copy_out(source, target) };
        })
        .is_some()
    }

    fn frame(&self, entry: Entry) -> *const u8 {
        self.handle.inode.memory.arena.base().wrapping_add(entry.frame_offset_bytes())
    }

    /// Copies from one page under its folio's lock, filling it if it is not resident. Returns 0 at
    /// the end of the file.
    fn read_page_locked(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        let mapping = &self.handle.inode.mapping;
        if position >= mapping.len_bytes() {
            return Ok(0);
        }
        let found = self.handle.find_folio(position >> PAGE_SHIFT, Access::Read)?;
        if found.as_ref().is_some_and(|locked| locked.was_resident) {
            self.handle.inode.memory.counters.add(Counter::HitSlow, 1);
            let goes_on_in_page =
                self.handle.readahead.continues(position) && position & (PAGE_BYTES - 1) > 0;
            if !goes_on_in_page {
                self.note_use(position >> PAGE_SHIFT, true);
            }
        }
        let in_page = position & (PAGE_BYTES - 1);
        let visible = mapping.len_bytes().saturating_sub(position);
        let length = (PAGE_BYTES - in_page).min(visible).min(buffer.len() as u64) as usize;
        let target = &mut buffer[..length];
        let Some(locked) = found else {
            target.fill(0);
            return Ok(length);
        };
        let in_folio = position - locked.lock.index() * PAGE_BYTES;
        let start = self.handle.inode.memory.arena.address(locked.folio.id());
        // SAFETY: inside a frame whose lock and reference we hold; nobody writes it now.
        unsafe { copy::copy_out(start.wrapping_add(in_folio as usize), target) };
        Ok(length)
    }
}
