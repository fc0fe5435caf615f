//! Reads that are no hit: runs of adjacent pages, then misses, then the folio lock.
//!
//! A loop splits a read into steps. Each step returns at least one more byte, or passes on to the
//! next step:
//!
//! ```text
//!   HitPath::read   hit.rs         one page, resident and marked: copied without a reference
//!   copy_run                   adjacent frames with one copy, every page validated
//!   fill_zeros      allocation.rs  holes and allocated pages of memory files
//!   read_absent                    not resident: one batch of transfers
//!   read_page_locked               another thread fills or writes it: its folio lock
//! ```
//!
//! A page that is not resident skips the steps between the first and its transfer: the Entry that
//! `Fill::absent_at` loads is the one that the claim starts from.
//!
//! A run of adjacent pages is copied through Entries, without references: up to 64 consecutive
//! Entries are loaded, their frames are copied with one copy, and all Entries are loaded again
//! ([`FrameRun`]). Such a reader writes no shared memory. A batch of references, as proposed for
//! reads of tmpfs, costs a locked instruction and a cache line per page, and the second load
//! detects a page that is evicted or written during the copy anyway. Pages of a region are
//! referenced all the same, because they do not stay mapped. The length is loaded again for each
//! copy, after the Entries. The loop advances by position, and moves on to the next page only when
//! the position has passed the current one. So a copy that an old length cut short in the middle of
//! a folio continues in the same folio, not after it.
//!
//! Sequential reads also prefetch the next page before they copy the current one. For a reader that
//! takes a file page by page, `hit.rs` does so.
//!
//! # Safety
//! Copies from frames whose lock or reference it holds, or that stay mapped even if their pages are
//! evicted.
#![allow(unsafe_code)]

use super::File;
use super::hit::{Hit, continues_read};
use crate::error::Result;
use crate::fill::{AccessMode, Batch, Delivery, Locked, ReadIoClaim, Wait, copy_filled};
use crate::maps::faults;
use crate::page::{Entry, FrameRun, PAGE_BYTES, PAGE_SHIFT, is_in_one_page};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::sys::copy;
use std::ops::Range;

impl File {
    /// Reads bytes that are no hit, or those after one that was cut short.
    #[inline(never)]
    pub(super) fn read_at_miss(&self, buffer: &mut [u8], position: u64, hit: Hit) -> Result<usize> {
        hit.forget(buffer);
        self.handle.check_readable()?;
        self.handle.range_end(position, buffer.len() as u64)?;
        self.read_pages(buffer, position, true)
    }

    /// Reads without detecting an access pattern, and without reading ahead.
    pub(super) fn read_plainly(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.read_pages(buffer, position, false)
    }

    fn read_pages(&self, buffer: &mut [u8], position: u64, ahead: bool) -> Result<usize> {
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

    /// Copies bytes that are resident, or read as zeros, from the first byte on. Returns 0 if the
    /// first page is neither, is being written, or lies past the end of file.
    pub(crate) fn read_resident(&self, buffer: &mut [u8], position: u64) -> usize {
        let file = self.handle.inode.mapping.hot();
        let continues_read = continues_read(file, position, buffer.len() as u64);
        // Bytes that continue the last read do not count as another use of their page.
        let continues = self.handle.readahead.continues(position);
        self.copy_resident(buffer, position, continues, continues_read)
    }
}

/// Most bytes of one request in flight at a time. More is not needed to overlap copies and
/// transfers.
const REQUEST_BYTES_MAX: u64 = 8 << 20;
/// Bytes of the intermediate buffer for a read into a map.
const BOUNCE_BYTES_MAX: usize = 256 << 10;

impl File {
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
        // Relaxed: as in `is_mapped`. Without a region in the process, no buffer is in a map.
        let has_regions = faults::REGIONS_COUNT.load(Ordering::Relaxed) > 0;
        if !has_regions || !faults::is_mapped(buffer) {
            return self.read_absent_locked(buffer, position, absent, ahead);
        }
        let mut bounce = vec![0; buffer.len().min(BOUNCE_BYTES_MAX)];
        let copied = self.read_absent_locked(&mut bounce, position, absent, ahead)?;
        buffer[..copied].copy_from_slice(&bounce[..copied]);
        Ok(copied)
    }

    /// Copies from absent pages like [`Self::read_absent`], with folio locks held. `buffer` must
    /// not lie in a map.
    fn read_absent_locked(
        &self,
        buffer: &mut [u8],
        position: u64,
        absent: Option<Entry>,
        ahead: bool,
    ) -> Result<usize> {
        let inode = &*self.handle.inode;
        let length = inode.mapping.len_bytes().saturating_sub(position);
        let length = length.min(buffer.len() as u64).min(REQUEST_BYTES_MAX);
        if length == 0 {
            return Ok(0);
        }
        let pages = position >> PAGE_SHIFT..(position + length).div_ceil(PAGE_BYTES);
        let claim = |seen| self.handle.fill().claim_run(pages.clone(), seen, Wait::ForFrames);
        let claimed = absent.map_or(Ok(ReadIoClaim::Taken), claim)?;
        let ReadIoClaim::New(mut run) = claimed else {
            // The run is in flight. The readahead must not wait until it completes.
            if ahead {
                self.handle.follow_marks(pages);
            }
            return self.read_page_locked(buffer, position);
        };
        let plan = if ahead { self.handle.plan_after_miss(pages.clone()) } else { None };
        let plan = self.handle.join_plan(&mut run, &pages, plan);
        let (mut copied, mut failed) = (0, None);
        let mut copy = |locked: Locked<'_>| {
            let next = position + copied as u64;
            copied += copy_filled(inode, &locked, &mut buffer[copied..], next);
        };
        let (first_page, end_page) = (run.first_page(), run.end_page());
        if plan.is_none() && end_page >= pages.end {
            let is_one = run.folios().len() == 1;
            failed = run.read(inode, copy).err().filter(|_| is_one);
        } else {
            let mut deliver = |_, delivery| match delivery {
                Delivery::Folio(locked) => copy(locked),
                Delivery::Failed { error, page, folios: 1 } if page == first_page => {
                    failed = Some(error);
                }
                // One bad byte fails a whole run; the first folio alone may be readable.
                Delivery::Failed { .. } => {}
            };
            let mut batch = Batch::in_order(inode);
            batch.start(run, 0, &mut deliver);
            if plan.is_some() {
                // Submits its own transfer first, which this reader waits for.
                batch.begin();
                self.handle.read_ahead(plan);
            }
            let rest = batch.add(self.handle.fill(), pages, 0, &mut deliver);
            batch.finish(&mut deliver);
            // The next call handles pages that could not be started.
            let _ = rest;
        }
        match (copied, failed) {
            (0, Some(error)) => Err(error),
            (0, None) => self.read_page_locked(buffer, position),
            (copied, _) => Ok(copied),
        }
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
        // The length under the lock of the page.
        let length = length.min(mapping.len_bytes().saturating_sub(position)) as usize;
        let target = &mut buffer[..length];
        let in_folio = position - locked.lock.index() * PAGE_BYTES;
        let start = self.handle.inode.frame_of(&locked.folio);
        // SAFETY: inside a frame whose lock and reference we hold; no thread writes it now.
        unsafe { copy::copy_out(start.wrapping_add(in_folio as usize), target) };
        Ok(length)
    }
}

/// Pages of a region that are referenced at a time, at most (32 KiB): a larger batch gains nothing,
/// and other threads cannot evict the pages, which matters in a cache of 100 pages.
const HELD_PAGES_MAX: u64 = 8;

/// Attempts at the first page of a run before its folio lock is taken.
const ATTEMPTS_MAX: u32 = 4;

impl File {
    /// Copies bytes that are resident, or read as zeros, from the first byte on. Stops before a
    /// page that is neither, or that another thread writes, and at the end of file at that moment.
    /// `in_order`: the bytes continue an earlier read. `continues_read`: the read continues after
    /// them.
    fn copy_resident(
        &self,
        buffer: &mut [u8],
        position: u64,
        in_order: bool,
        continues_read: bool,
    ) -> usize {
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            let in_order = in_order || done > 0;
            // If an old length cuts it short, the following bytes must not be put after it.
            let is_whole = is_in_one_page(at, left.len() as u64);
            let copied = match self.copy_run(at, left, in_order, continues_read) {
                0 => self.fill_zeros(left, at),
                copied => copied,
            };
            done += copied;
            if copied == 0 || is_whole {
                break;
            }
        }
        let pages = (done as u64).div_ceil(PAGE_BYTES);
        let inode = &self.handle.inode;
        let is_in_place = inode.page_space.is_in_place();
        let hit = if is_in_place { Counter::HitPinned } else { Counter::HitOptimistic };
        inode.memory.counters.add(hit, pages);
        done
    }

    /// Copies from the page at `position` on, as long as frames are adjacent. Returns 0 if that
    /// page is not READY, or if writers kept changing it.
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
        let is_in_place = inode.page_space.is_in_place();
        if is_in_place {
            // A copy into a map may fault, and the fault may need memory: hold as few references as
            // possible.
            let is_fault = end - first > 1 && faults::is_mapped(buffer);
            end = end.min(first + if is_fault { 1 } else { HELD_PAGES_MAX });
        }
        for _ in 0..ATTEMPTS_MAX {
            let mut run = FrameRun::find(inode.mapping.table(), first..end, is_in_place);
            let _held = is_in_place.then(|| run.hold(&inode.memory.folios));
            let Some(copied) = self.copy_once(&run, position, buffer, continues_read) else {
                return 0;
            };
            if copied > 0 {
                let pages = first..(position + copied as u64).div_ceil(PAGE_BYTES);
                let goes_on_in_page = in_order && position & (PAGE_BYTES - 1) > 0;
                self.note_uses(pages, in_order, goes_on_in_page);
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
        let start = inode.page_space.page_address(position >> PAGE_SHIFT, run.start()?);
        // The length is loaded again for each copy, after the Entries.
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        let in_run = run.pages() * PAGE_BYTES - in_page;
        let length = in_run.min(visible).min(buffer.len() as u64);
        if length == 0 {
            return None;
        }
        let is_last = length == buffer.len() as u64;
        let target = &mut buffer[..length as usize];
        let source = start.wrapping_add(in_page as usize);
        let behind = source.wrapping_add(target.len());
        let next =
            if is_last && !continues_read { behind } else { self.frame_at(position + length) };
        // The hardware prefetches within a run of frames, but not past its last page.
        let ahead = if next == behind { 0 } else { target.len().min(PAGE_BYTES as usize) };
        let (most, last) = target.split_at_mut(target.len() - ahead);
        // SAFETY: READY Entries name frames of the arena, which stays mapped (FRAMES-2), or pages
        // of a region, which the references of the caller keep there (REGION-4); these are adjacent
        // for `length` bytes; `target` is the caller's memory.
        unsafe { copy::copy_out(source, most) };
        // SAFETY: as above.
        unsafe { copy::copy_out_ahead(source.wrapping_add(most.len()), last, next) };
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
        let inode = &self.handle.inode;
        let index = position >> PAGE_SHIFT;
        let entry = inode.mapping.table().load(index, Ordering::Relaxed);
        inode
            .page_space
            .page_address(index, entry)
            .wrapping_add((position & (PAGE_BYTES - 1)) as usize)
    }

    /// Marks the pages of a copy as used. The first one gets no new use if the copy continues in
    /// it.
    fn note_uses(&self, pages: Range<u64>, in_order: bool, goes_on_in_page: bool) {
        let first = pages.start;
        for index in pages.skip(usize::from(goes_on_in_page)) {
            self.note_use(index, in_order || index > first);
        }
    }

    /// Marks a page as used, for the replacement policy (`page/optimistic.rs`).
    pub(super) fn note_use(&self, index: u64, in_order: bool) {
        let inode = &self.handle.inode;
        let is_reused = || self.handle.readahead.is_reused();
        inode.mapping.note_use(&inode.memory.folios, index, in_order, is_reused);
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
