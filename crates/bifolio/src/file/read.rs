//! Reads: hits, runs of adjacent pages, misses, and reads that never wait.
//!
//! A loop splits a read into steps. Each step returns at least one more byte, or passes on to the
//! next step:
//!
//! ```text
//!   HitPath::read   hit.rs         one page, resident and marked: copied without a reference
//!   copy_run                   many pages, adjacent frames with one copy, every page validated
//!   fill_zeros      allocation.rs  holes and allocated pages of memory files
//!   read_absent                    not resident: one batch of transfers
//!   read_page_locked               another thread fills or writes it: its folio lock
//! ```
//!
//! A page that is not resident skips the steps between the first and its transfer: the Entry that
//! `Fill::absent_at` loads is the one that the claim starts from.
//!
//! A run of pages is copied through Entries, without references ([`FrameRun`]), and validated once,
//! after the last. Pages of a region are referenced all the same, because they do not stay mapped.
//! The length is loaded again for each run, after the Entries. The loop advances by position: a
//! copy that an old length cut short in the middle of a folio continues in the same folio, not
//! after it.
//!
//! Where the next page is in another frame, its first bytes are prefetched before the current one
//! is copied. For a reader that takes a file page by page, `hit.rs` does so.
//!
//! # Safety
//! Copies from frames whose lock or reference it holds, or that stay mapped even if their pages are
//! evicted.
#![allow(unsafe_code)]

use super::File;
use super::hit::{Hit, continues_read};
use super::readahead::Plan;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{AccessMode, Batch, Delivery, Locked, ReadIo, ReadIoClaim, Wait, copy_filled};
use crate::page::{Entry, FrameRun, Lookup, PAGE_BYTES, PAGE_SHIFT, is_in_one_page};
use crate::stats::Counter;
use crate::sync::{CallScope, Ordering};
use crate::sys::copy;
use std::mem;
use std::ops::Range;

/// Most bytes of one request in flight at a time, enough to overlap copies and transfers.
const REQUEST_BYTES_MAX: u64 = 8 << 20;
/// Bytes of the intermediate buffer for a read into a map.
const BOUNCE_BYTES_MAX: usize = 256 << 10;

impl File {
    /// Reads bytes at `position` into `buffer` and returns their number. It is smaller than the
    /// length of `buffer` only at the end of file, or before a byte that cannot be read: a read of
    /// that byte returns the error.
    ///
    /// A hit copies the page without a lock, a reference or a shared write. Blocks for I/O on a
    /// miss. Atomic with respect to `write_at` within one 4 KiB page. Past the bytes that were
    /// read, and after an error, `buffer` is unchanged or zeroed.
    ///
    /// # Errors
    /// An I/O error of the storage, with file, position and length; a cache full of pinned pages; a
    /// handle that is not open for reading; a range beyond 2^63.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, b"0123456789")?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let mut buffer = [0; 8];
    /// assert_eq!(file.read_at(&mut buffer, 6)?, 4);
    /// assert_eq!(&buffer[..4], b"6789");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        match self.hit_path.read(buffer, position) {
            Hit::Done => Ok(buffer.len()),
            hit => self.read_at_miss(buffer, position, hit),
        }
    }

    /// Reads exactly `buffer.len()` bytes at `position`.
    ///
    /// # Errors
    /// Fails like [`File::read_at`], and with [`ErrorKind::PastEnd`] if the file ends before
    /// `buffer` is full; part of it may have been filled then.
    #[inline]
    pub fn read_exact_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        let mut hit = self.hit_path.read(buffer, position);
        if hit == Hit::Done {
            return Ok(());
        }
        let _call = CallScope::begin();
        let mut done = 0;
        while done < buffer.len() {
            let (at, wanted) = (position + done as u64, buffer.len() - done);
            let count = self.read_at_miss(&mut buffer[done..], at, hit)?;
            hit = Hit::None;
            if count == 0 || count < wanted && is_in_one_page(at, wanted as u64) {
                return Err(self.handle.inode.past_end(position, buffer.len() as u64));
            }
            done += count;
        }
        Ok(())
    }

    /// Reads bytes that are no hit, or those after one that was cut short.
    #[inline(never)]
    fn read_at_miss(&self, buffer: &mut [u8], position: u64, hit: Hit) -> Result<usize> {
        hit.forget(buffer);
        self.handle.check_readable()?;
        self.handle.range_end(position, buffer.len() as u64)?;
        self.read_pages(buffer, position, true)
    }

    /// Reads a range that was checked. Without `ahead`, detects no access pattern and reads nothing
    /// ahead.
    pub(super) fn read_pages(
        &self,
        buffer: &mut [u8],
        position: u64,
        ahead: bool,
    ) -> Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            let is_whole = is_in_one_page(at, left.len() as u64);
            let absent = self.handle.fill().absent_at(at);
            let resident = if absent.is_some() { 0 } else { self.read_resident(left, at) };
            let copied = match resident {
                0 => self.read_absent(left, at, absent, ahead),
                copied => Ok(copied),
            };
            match copied {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(error) if done == 0 => return Err(error),
                // The bytes read so far are valid; the next call returns the error.
                Err(_) => break,
            }
            if ahead {
                self.handle.note_read(at..position + done as u64);
            }
            if is_whole {
                // A short step is the end of file: bytes appended since belong to later writes.
                break;
            }
        }
        Ok(done)
    }

    /// Copies from pages that are not resident, or that another thread fills or writes: at least
    /// from the first one, whose Entry is `absent` if it is not resident. Returns 0 at the end of
    /// file.
    fn read_absent(
        &self,
        buffer: &mut [u8],
        position: u64,
        absent: Option<Entry>,
        ahead: bool,
    ) -> Result<usize> {
        if super::is_mapped(buffer) {
            // The copies are made with folio locks held.
            let mut bounce = vec![0; buffer.len().min(BOUNCE_BYTES_MAX)];
            let copied = self.read_absent(&mut bounce, position, absent, ahead)?;
            buffer[..copied].copy_from_slice(&bounce[..copied]);
            return Ok(copied);
        }
        let inode = &*self.handle.inode;
        let length = inode.mapping.len_bytes().saturating_sub(position);
        let length = length.min(buffer.len() as u64).min(REQUEST_BYTES_MAX);
        if length == 0 {
            return Ok(0);
        }
        let pages = position >> PAGE_SHIFT..(position + length).div_ceil(PAGE_BYTES);
        let claim = |seen| self.handle.fill().claim_run(pages.clone(), seen, Wait::ForFrames);
        let claimed = absent.map_or(Ok(ReadIoClaim::Taken), claim)?;
        let ReadIoClaim::New(run) = claimed else {
            // The run is in flight. The readahead must not wait until it completes.
            if ahead {
                self.handle.follow_marks(pages);
            }
            return self.read_page_locked(buffer, position);
        };
        let plan = if ahead { self.handle.plan_after_miss(pages.clone()) } else { None };
        let (first_page, mut copied, mut failed) = (run.first, 0, None);
        self.read_run(run, pages, plan, &mut |_, delivery| match delivery {
            Delivery::Folio(locked) => {
                let next = position + copied as u64;
                copied += copy_filled(inode, &locked, &mut buffer[copied..], next);
            }
            Delivery::Failed { error, page, folios: 1 } if page == first_page => {
                failed = Some(error);
            }
            // One bad byte fails a whole run; the first folio alone may be readable.
            Delivery::Failed { .. } => {}
        });
        match (copied, failed) {
            (0, Some(error)) => Err(error),
            (0, None) => self.read_page_locked(buffer, position),
            (copied, _) => Ok(copied),
        }
    }

    /// Reads a run, and the other absent pages of `pages`; starts to read the rest of `plan`.
    pub(super) fn read_run<'a>(
        &'a self,
        mut run: ReadIo,
        pages: Range<u64>,
        plan: Option<Plan>,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) {
        let inode = &*self.handle.inode;
        let plan = self.handle.join_plan(&mut run, &pages, plan);
        if plan.is_none() && run.end_page() >= pages.end {
            let (page, folios) = (run.first, run.folios.len());
            if let Err(error) = run.read(inode, |locked| deliver(0, Delivery::Folio(locked))) {
                deliver(0, Delivery::Failed { error, page, folios });
            }
            return;
        }
        let mut batch = Batch::in_order(inode);
        batch.start(run, 0, deliver);
        if plan.is_some() {
            // Submits its own transfer first, which this reader waits for.
            batch.begin();
            self.handle.read_ahead(plan);
        }
        // The next call handles pages that could not be started.
        let _ = batch.add(self.handle.fill(), pages, 0, deliver);
        batch.finish(deliver);
    }

    /// Copies from one page under its folio lock, filling it on a miss. Returns 0 at the end of
    /// file.
    fn read_page_locked(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        let mapping = &self.handle.inode.mapping;
        let in_page = position & (PAGE_BYTES - 1);
        let length = (PAGE_BYTES - in_page).min(buffer.len() as u64);
        let locked = loop {
            if position >= mapping.len_bytes() || length == 0 {
                return Ok(0);
            }
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before the page is looked up");
            let found = self.handle.fill().find_folio(position >> PAGE_SHIFT, AccessMode::Read)?;
            if let Some(locked) = found {
                break locked;
            }
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("after no page was found");
            // A hole, or the file ended before the page: then it may be longer again.
            let zeros = self.fill_zeros(&mut buffer[..length as usize], position);
            if zeros > 0 {
                return Ok(zeros);
            }
        };
        if locked.was_resident {
            self.handle.inode.memory.counters.add(Counter::HitSlow, 1);
            if in_page == 0 || !self.handle.readahead.continues(position) {
                self.note_use(position >> PAGE_SHIFT, true);
            }
        }
        Ok(self.copy_locked(&locked, buffer, position))
    }

    /// Copies from a locked page up to its end, the end of file or that of the buffer.
    fn copy_locked(&self, locked: &Locked<'_>, buffer: &mut [u8], position: u64) -> usize {
        let in_page = PAGE_BYTES - (position & (PAGE_BYTES - 1));
        // The length under the lock of the page.
        let visible = self.handle.inode.mapping.len_bytes().saturating_sub(position);
        let length = in_page.min(visible).min(buffer.len() as u64) as usize;
        let start = self.address_in(&locked.folio, position);
        // SAFETY: inside a frame whose lock and reference we hold; no thread writes it now.
        unsafe { copy::copy_out(start, &mut buffer[..length]) };
        length
    }
}

/// The reason why a read without waiting has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// All bytes were read, or the file ends.
    None,
    /// The next page is not resident.
    Absent,
    /// Another thread fills, writes or moves the next page.
    Busy,
}

impl File {
    /// Reads like [`File::read_at`] if all bytes are in memory: never waits for a device or for
    /// another thread, and starts no read. Like there, fewer bytes than asked for mean the end of
    /// the file. ([`File::try_read_prefix_at`] takes a first part.)
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`], with the first byte that would have to be waited for,
    /// which becomes an [`std::io::Error`] of the kind `WouldBlock`; the contents of `buffer` are
    /// unspecified then. Otherwise fails like [`File::read_at`], without errors of the storage.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, b"0123456789")?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let mut buffer = [0; 4];
    /// let error = file.try_read_at(&mut buffer, 0).unwrap_err();
    /// assert_eq!(error.kind(), bifolio::ErrorKind::WouldBlock);
    /// file.read_at(&mut buffer, 0)?;
    /// assert_eq!(file.try_read_at(&mut buffer, 6)?, 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        match self.try_read(buffer, position)? {
            (done, Obstacle::None) => Ok(done),
            (done, Obstacle::Absent | Obstacle::Busy) => Err(self.would_block(position, done)),
        }
    }

    /// Reads the bytes from `position` on that are in memory, like [`File::try_read_at`], and
    /// returns their number: at least one, but for an empty buffer and at the end of the file.
    ///
    /// # Errors
    /// As [`File::try_read_at`], with [`ErrorKind::WouldBlock`] only if the first byte
    /// would have to be waited for.
    pub fn try_read_prefix_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        match self.try_read(buffer, position)? {
            (0, Obstacle::Absent | Obstacle::Busy) => Err(self.would_block(position, 0)),
            (done, _) => Ok(done),
        }
    }

    fn try_read(&self, buffer: &mut [u8], position: u64) -> Result<(usize, Obstacle)> {
        match self.hit_path.read(buffer, position) {
            Hit::Done => return Ok((buffer.len(), Obstacle::None)),
            hit => hit.forget(buffer),
        }
        self.handle.check_readable()?;
        self.handle.range_end(position, buffer.len() as u64)?;
        Ok(self.read_available(buffer, position))
    }

    #[cold]
    fn would_block(&self, position: u64, done: usize) -> Error {
        let at = position + done as u64;
        let text = format!("the byte at position {at} cannot be read without waiting");
        let error = Error::new(ErrorKind::WouldBlock, text);
        error.in_file(self.handle.inode.name()).at(at..at + 1)
    }

    /// Reads what is in memory of a range that was checked. Returns the number of bytes, and why
    /// the read ended there.
    pub(super) fn read_available(&self, buffer: &mut [u8], position: u64) -> (usize, Obstacle) {
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            if self.handle.fill().absent_at(at).is_some() {
                return (done, Obstacle::Absent);
            }
            let left = &mut buffer[done..];
            let is_whole = is_in_one_page(at, left.len() as u64);
            let copied = match self.read_resident(left, at) {
                0 => self.try_read_locked(left, at),
                copied => copied,
            };
            if copied == 0 {
                let is_end = at >= self.len();
                return (done, if is_end { Obstacle::None } else { Obstacle::Busy });
            }
            done += copied;
            if is_whole {
                // A short step is the end of file: bytes appended since belong to later writes.
                break;
            }
        }
        (done, Obstacle::None)
    }

    /// Copies from one page under its folio lock, if the lock is free. Returns 0 if it is not, and
    /// for a page without bytes of its own.
    fn try_read_locked(&self, buffer: &mut [u8], position: u64) -> usize {
        let inode = &*self.handle.inode;
        // A copy into a map may fault, and then needs folio locks. The table ends at `len_max`.
        if super::is_mapped(buffer) || position >= inode.mapping.len_bytes() {
            return 0;
        }
        let found = inode.mapping.try_get_folio(&inode.memory.folios, position >> PAGE_SHIFT);
        let Some(Lookup::Folio(folio)) = found else { return 0 };
        let Some(lock) = folio.try_lock() else { return 0 };
        let locked = Locked { lock, folio, was_resident: true };
        if locked.lock.owner() != inode.address || !locked.is_uptodate() {
            return 0;
        }
        inode.memory.counters.add(Counter::HitSlow, 1);
        self.note_use(position >> PAGE_SHIFT, true);
        self.copy_locked(&locked, buffer, position)
    }
}

/// Attempts at the first page of a run before its folio lock is taken.
const ATTEMPTS_MAX: u32 = 4;

impl File {
    /// Copies bytes that are resident, or read as zeros, from the first byte on. Stops before a
    /// page that is neither, or that another thread writes, and at the end of file at that moment.
    pub(crate) fn read_resident(&self, buffer: &mut [u8], position: u64) -> usize {
        let inode = &self.handle.inode;
        let continues_read = continues_read(inode.mapping.hot(), position, buffer.len() as u64);
        // Bytes that continue the last read do not count as another use of their page.
        let continues = self.handle.readahead.continues(position);
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            // If an old length cuts it short, the following bytes must not be put after it.
            let is_whole = is_in_one_page(at, left.len() as u64);
            let copied = match self.copy_run(at, left, continues || done > 0, continues_read) {
                0 => self.fill_zeros(left, at),
                copied => copied,
            };
            done += copied;
            if copied == 0 || is_whole {
                break;
            }
        }
        let pages = (done as u64).div_ceil(PAGE_BYTES);
        inode.page_space.count_hits(&inode.memory.counters, pages);
        done
    }

    /// Copies from the page at `position` on, as many pages as a [`FrameRun`] takes. Returns 0 if
    /// that page is not READY, or if writers kept changing it. `in_order`: the bytes continue an
    /// earlier read. `continues_read`: the read continues after them.
    fn copy_run(
        &self,
        position: u64,
        buffer: &mut [u8],
        in_order: bool,
        continues_read: bool,
    ) -> usize {
        // The table has an Entry for every page below the length.
        let len_bytes = self.handle.inode.mapping.len_bytes();
        let visible = len_bytes.saturating_sub(position).min(buffer.len() as u64);
        let first = position >> PAGE_SHIFT;
        if visible == 0 {
            return 0;
        }
        let mut end = (position + visible).div_ceil(PAGE_BYTES);
        let inode = &self.handle.inode;
        let held = inode.page_space.held_together();
        if let Some(held) = held {
            // A copy into a map may fault, and the fault may need memory: hold as few references as
            // possible.
            let is_fault = end - first > 1 && super::is_mapped(buffer);
            end = end.min(first + if is_fault { 1 } else { held });
        }
        for _ in 0..ATTEMPTS_MAX {
            let mut run = FrameRun::gather(inode.mapping.table(), first..end);
            let _held = held.map(|_| run.hold(&inode.memory.folios));
            let Some(copied) = self.copy_once(&run, position, buffer, continues_read) else {
                return 0;
            };
            if copied > 0 {
                let pages = first..(position + copied as u64).div_ceil(PAGE_BYTES);
                // The first one gets no new use if the copy continues in it.
                let goes_on_in_page = in_order && position & (PAGE_BYTES - 1) > 0;
                for (index, seen) in pages.zip(run.entries()).skip(usize::from(goes_on_in_page)) {
                    if !seen.is_referenced() {
                        self.note_use(index, in_order || index > first);
                    }
                }
                return copied;
            }
            self.handle.inode.memory.counters.add(Counter::OptimisticRetry, 1);
            end = first + 1;
        }
        0
    }

    /// Copies a run and returns the number of valid bytes: 0 if its first page changed, `None` if
    /// nothing can be copied.
    fn copy_once(
        &self,
        run: &FrameRun<'_>,
        position: u64,
        buffer: &mut [u8],
        continues_read: bool,
    ) -> Option<usize> {
        let inode = &self.handle.inode;
        let in_page = position & (PAGE_BYTES - 1);
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before a run is copied");
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        let in_run = (run.pages() * PAGE_BYTES).saturating_sub(in_page);
        let length = in_run.min(visible).min(buffer.len() as u64);
        if length == 0 {
            return None;
        }
        // The page that this read, or the next one, continues with.
        let is_last = length == buffer.len() as u64 && !continues_read;
        let after = (!is_last).then(|| self.frame_at(position + length));
        let address_of = |(index, seen): (u64, &Entry)| -> *const u8 {
            inode.page_space.page_address(index, *seen)
        };
        let mut pages = (position >> PAGE_SHIFT..).zip(run.entries()).map(address_of);
        let mut next = pages.next();
        let mut skipped = in_page as usize;
        let mut rest = &mut buffer[..length as usize];
        while let Some(start) = next {
            // Adjacent frames are one copy.
            let mut end = start.wrapping_add(PAGE_BYTES as usize);
            next = pages.next();
            while next == Some(end) {
                end = end.wrapping_add(PAGE_BYTES as usize);
                next = pages.next();
            }
            let piece = (end.addr() - start.addr() - skipped).min(rest.len());
            let (target, others) = mem::take(&mut rest).split_at_mut(piece);
            let ahead = if others.is_empty() { after } else { next };
            // SAFETY: READY Entries name frames of the arena, which stays mapped (FRAMES-2), or
            // pages of a region, which the references of the caller keep there (REGION-4); these
            // are adjacent up to `end`; `target` is the caller's memory.
            unsafe { copy_run_ahead(start.wrapping_add(skipped), target, ahead) };
            (rest, skipped) = (others, 0);
            if rest.is_empty() {
                break;
            }
        }
        let pages = (in_page + length).div_ceil(PAGE_BYTES);
        let good = run.unchanged(pages);
        let good_bytes = bytes_of(good, in_page, length);
        // The rest may be bytes of other pages or files: the caller must not see it.
        buffer[good_bytes as usize..length as usize].fill(0);
        Some(good_bytes as usize)
    }

    /// Returns the address of the byte at `position` (at most the end of file) if it is resident:
    /// for a prefetch only.
    fn frame_at(&self, position: u64) -> *const u8 {
        let (mapping, index) = (&self.handle.inode.mapping, position >> PAGE_SHIFT);
        let entry = mapping.table().load(index, Ordering::Relaxed);
        let page = self.handle.inode.page_space.page_address(index, entry);
        page.wrapping_add((position & (PAGE_BYTES - 1)) as usize)
    }

    /// Records the hit of a page by another process, which cannot do so itself: as a hit of a page
    /// without a mark is recorded here, it starts readahead and marks the page.
    pub(crate) fn note_hit_elsewhere(&self, index: u64) {
        let start = index << PAGE_SHIFT;
        self.handle.note_read(start..start + PAGE_BYTES);
        self.note_use(index, false);
    }

    /// Marks a page as used, for the replacement policy (`page/optimistic.rs`).
    pub(super) fn note_use(&self, index: u64, in_order: bool) {
        let inode = &self.handle.inode;
        let is_reused = || self.handle.readahead.is_reused();
        inode.mapping.note_use(&inode.memory.folios, index, in_order, is_reused);
    }
}

/// Copies adjacent frames, and prefetches the page at `ahead`, if any, before the last part: the
/// hardware prefetches within a run of frames, but not past its last page.
///
/// # Safety
/// As for [`copy::copy_out`].
#[inline(always)]
unsafe fn copy_run_ahead(source: *const u8, target: &mut [u8], ahead: Option<*const u8>) {
    let ahead = ahead.filter(|ahead| *ahead != source.wrapping_add(target.len()));
    let last_bytes = ahead.map_or(0, |_| target.len().min(PAGE_BYTES as usize));
    let (most, last) = target.split_at_mut(target.len() - last_bytes);
    // SAFETY: the caller's contract.
    unsafe { copy::copy_out(source, most) };
    if let Some(ahead) = ahead {
        // SAFETY: as above.
        unsafe { copy::copy_out_ahead(source.wrapping_add(most.len()), last, ahead) };
    }
}

/// Returns how many of `length` bytes lie in `pages` pages, if they start `in_page` bytes into the
/// first.
fn bytes_of(pages: u64, in_page: u64, length: u64) -> u64 {
    (pages * PAGE_BYTES).saturating_sub(in_page).min(length)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::sync::test_hook;

    /// Returns a file with a hole of 100 bytes that gets 100 more bytes when this thread has looked
    /// at it.
    fn hole_that_is_appended_to(cache: &Cache) -> File {
        let file = cache.memory_file("holes").unwrap();
        file.set_len(100).unwrap();
        let other = file.clone();
        test_hook::set("after holes were seen", move || {
            other.write_all_at(&[7; 100], 100).unwrap();
        });
        file
    }

    /// Returns a file with `pages` pages of the byte 7, all in memory.
    fn file_of_sevens(cache: &Cache, pages: u64) -> File {
        let options = OpenOptions::new().write(true);
        let file = cache.open_fd(tempfile::tempfile().unwrap().into(), &options).unwrap();
        file.write_all_at(&vec![7; (pages * PAGE_BYTES) as usize], 0).unwrap();
        file.sync_data().unwrap();
        file.populate(..).unwrap();
        file
    }

    /// Between the look-up of two pages and their copy the second is evicted, and its frame gets
    /// the bytes of another file.
    #[test]
    fn each_page_of_a_copy_is_checked() {
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_directory(directory.path());
        let cache = builder.build().unwrap();
        let (file, other) = (file_of_sevens(&cache, 2), cache.memory_file("other").unwrap());
        let owner = file.clone();
        let frame = |file: &File, index: u64| {
            let entry = file.handle.inode.mapping.table().load(index, Ordering::Relaxed);
            entry.is_folio().then(|| entry.frame())
        };
        assert_eq!(frame(&file, 1), frame(&file, 0).map(|first| first + 1), "one run");
        let _first_stays = file.pin(..PAGE_BYTES).unwrap();
        test_hook::set("before a run is copied", move || {
            let evicted = frame(&owner, 1);
            owner.evict(PAGE_BYTES..).unwrap();
            let takes_the_frame = |index: u64| {
                other.write_all_at(&[5; PAGE_BYTES as usize], index * PAGE_BYTES).unwrap();
                frame(&other, index) == evicted
            };
            // A free frame may lie on the list of another processor for a while.
            assert!((0..16_384).any(takes_the_frame), "the frame was not used again");
        });
        let mut buffer = vec![0; 2 * PAGE_BYTES as usize];
        file.read_exact_at(&mut buffer, 0).unwrap();
        assert!(test_hook::has_run());
        assert!(buffer.iter().all(|byte| *byte == 7), "bytes of the other file");
    }

    /// A page is evicted and filled again, in the same frame: a reader that copied before the
    /// eviction and checks afterwards must see that.
    #[test]
    fn a_page_that_comes_back_has_another_version() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = file_of_sevens(&cache, 1);
        let entry = || file.handle.inode.mapping.table().load(0, Ordering::Relaxed);
        let comes_back_to_its_frame = |_: &u32| {
            let before = entry();
            file.evict(..).unwrap();
            file.read_exact_at(&mut [0], 0).unwrap();
            let after = entry();
            assert!(!after.is_same_version(before), "{before:?} {after:?}");
            after.frame() == before.frame()
        };
        assert!((0..16_384).any(|turn| comes_back_to_its_frame(&turn)), "never in the same frame");
    }

    #[test]
    fn a_run_of_holes_is_read_up_to_where_the_file_ended() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = hole_that_is_appended_to(&cache);
        assert_eq!(file.fill_zeros(&mut [1; 300], 0), 100);
        assert!(test_hook::has_run());
    }

    #[test]
    fn a_hole_that_a_truncation_made_is_not_read_up_to_the_old_or_the_next_end() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("holes").unwrap();
        file.write_all_at(&[7; 300], 0).unwrap();
        let (cutter, writer) = (file.clone(), file.clone());
        test_hook::set("before holes are looked for", move || {
            cutter.set_len(0).unwrap();
            cutter.set_len(100).unwrap();
            test_hook::set("after holes were seen", move || {
                writer.write_all_at(&[7; 300], 0).unwrap();
            });
        });
        assert_eq!(file.fill_zeros(&mut [1; 300], 0), 0);
        assert!(test_hook::has_run());
    }

    #[test]
    fn a_page_behind_an_end_that_has_moved_since_is_no_hole() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().write(true);
        let file = cache.open_fd(tempfile::tempfile().unwrap().into(), &options).unwrap();
        file.write_all_at(&[7; 300], 0).unwrap();
        let (cutter, writer) = (file.clone(), file.clone());
        test_hook::set("before the page is looked up", move || {
            cutter.set_len(0).unwrap();
            test_hook::set("after no page was found", move || {
                writer.write_all_at(&[7; 300], 0).unwrap();
            });
        });
        let mut buffer = [1; 300];
        assert_eq!(file.read_page_locked(&mut buffer, 0).unwrap(), 300);
        assert!(test_hook::has_run() && buffer == [7; 300]);
    }

    #[test]
    fn a_hole_is_read_up_to_where_the_file_ended() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = hole_that_is_appended_to(&cache);
        let mut buffer = [1; 300];
        assert_eq!(file.read_page_locked(&mut buffer, 0).unwrap(), 100);
        assert_eq!(file.read_page_locked(&mut buffer, 0).unwrap(), 200);
        assert_eq!((buffer[99], buffer[100]), (0, 7));
    }

    #[test]
    fn the_valid_part_of_a_copy_ends_with_a_page() {
        assert_eq!(bytes_of(0, 100, 9000), 0);
        assert_eq!(bytes_of(1, 0, 9000), PAGE_BYTES);
        assert_eq!(bytes_of(2, 100, 9000), 2 * PAGE_BYTES - 100);
        assert_eq!(bytes_of(3, 100, 9000), 9000);
    }
}
