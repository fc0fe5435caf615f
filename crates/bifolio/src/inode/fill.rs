//! Reads of folios: the transfer that fills them, and the limit of pages in read per device.
//!
//! `file/read_io.rs` and `file/fill.rs` call this with the folios locked.
//!
//! A device may not complete reads for any time. Until then the frames to be filled, the staging
//! memory of files in regions, and the threads that serve faults are unavailable to other devices.
//! So a device has a share of each ([`Share`]), as it has of the dirty limit
//! (`writeback/throttle.rs`):
//!
//! | resource | all devices | a single device | a caller at the limit |
//! |---|---|---|---|
//! | pages in read | half of the bound | 3/8 of the bound | waits here, or reads less ahead |
//! | staging memory (`memory/region/staging.rs`) | all of it | 7/8 | waits, or reads less ahead |
//! | threads for faults (`file/faults/threads.rs`) | 80 | 4 | waits in a queue of the device |
//!
//! A single device may also have half of the bound dirty, so 1/8 of the bound is left to others. A
//! device without pages in read may start one read, even if others have the whole limit. Memory
//! files read from the swap, which counts as a device of its own.
//!
//! A thread that waits here waits for reads of its own device. It holds no transfer, no frame and
//! no staging memory (IO-5). The thread that ends a read wakes the waiters that it sees; a waiter
//! that was not seen wakes up by itself ([`SLEEP_MAX`]).
//!
//! # Safety
//! Creates slices of frames whose folios the caller has locked.
#![allow(unsafe_code)]

use super::{Cleaner, ClearedBefore, Inode};
use crate::error::{Error, Result};
use crate::io::{Operation, Pieces, Transfer};
use crate::page::{Entry, Flag, FolioId, FolioRef, HasTable, LockedFolio, PAGE_BYTES, Table};
use crate::stats::Counter;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, Share, blocking};
use crate::sys::copy;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Page of zeros.
static ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// Divisor of the bound for pages in read.
const BOUND_DIVISOR: u64 = 2;
/// A device gets no further page that would leave less than 1/SHARE_DIVISOR of the pages that other
/// devices do not use.
const SHARE_DIVISOR: u64 = 4;
/// Upper bound on a sleep whose wake-up was missed.
const SLEEP_MAX: Duration = Duration::from_millis(5);

/// Shares of a device.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Pages in read, or about to be.
    reading: Share,
    /// Pages of staging memory.
    pub(crate) staging: Share,
    /// Threads that serve faults.
    pub(crate) faults: Share,
}

/// Pages in read of all devices of a cache, and the threads that wait.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    reading: Arc<AtomicU64>,
    staging: Arc<AtomicU64>,
    faults: Arc<AtomicU64>,
    /// Limit of pages in read, which follows the bound.
    reading_pages_max: AtomicU64,
    waiting: AtomicU64,
    gate: Mutex<()>,
    ended: Condvar,
}

impl Loads {
    /// Creates the shares of another device.
    pub(crate) fn new_load(&self) -> Load {
        let [reading, staging, faults] =
            [&self.reading, &self.staging, &self.faults].map(Share::new);
        Load { reading, staging, faults }
    }

    /// Sets the limit of pages in read from the bound.
    pub(crate) fn set_bound(&self, bound_pages: u64) {
        self.reading_pages_max.store(bound_pages / BOUND_DIVISOR, Ordering::Relaxed);
    }

    fn wait(&self) {
        let mut gate = self.gate.lock();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.ended.wait_for(&mut gate, SLEEP_MAX);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    fn wake(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            drop(self.gate.lock());
            self.ended.notify_all();
        }
    }
}

impl Inode {
    /// Counts up to `wanted` pages that are about to be read, and returns their number: at least
    /// `least`. Returns `None` if the device has reached its share. Undone by [`Self::end_read`].
    pub(crate) fn try_begin_read(&self, least: u64, wanted: u64) -> Option<u64> {
        let (reading, max) = (&self.load.reading, &self.flusher.loads.reading_pages_max);
        let max = max.load(Ordering::Relaxed);
        let pages = wanted.min(reading.room(max, SHARE_DIVISOR)) / least * least;
        if pages > 0 && reading.try_add(pages, max, SHARE_DIVISOR).is_some() {
            return Some(pages);
        }
        (reading.own() == 0).then(|| {
            reading.add(least);
            least
        })
    }

    /// Counts pages like [`Self::try_begin_read`], and waits until it succeeds.
    pub(crate) fn begin_read(&self, least: u64, wanted: u64) -> u64 {
        loop {
            if let Some(pages) = self.try_begin_read(least, wanted) {
                return pages;
            }
            blocking::check("reads of the same device");
            self.flusher.loads.wait();
        }
    }

    /// Counts pages beyond the limit, for a caller that could not know before that it reads them.
    pub(crate) fn begin_read_at_once(&self, pages: u64) {
        self.load.reading.add(pages);
    }

    /// Subtracts pages that are no longer in read.
    pub(crate) fn end_read(&self, pages: u64) {
        if pages > 0 {
            self.load.reading.sub(pages);
            self.flusher.loads.wake();
        }
    }
}

/// Pages without a folio, and the folios that they get.
impl Inode {
    /// Returns `true` if the page has bytes, and no folio.
    pub(crate) fn is_absent(&self, seen: Entry) -> bool {
        !seen.is_folio() && !self.store.is_hole(seen)
    }

    /// Returns `true` if reclaim can evict or write folios of this file.
    pub(crate) fn is_evictable(&self) -> bool {
        self.store.cleaner() != Cleaner::None
    }

    /// Returns `true` if a folio inserted at the Entry `seen` is another one that may have to be
    /// swapped out.
    pub(crate) fn needs_slots(&self, seen: Entry) -> bool {
        self.store.cleaner() == Cleaner::Swapper && self.store.is_hole(seen)
    }

    /// Returns the address that `owner` finds in a folio of this file.
    pub(crate) fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// Returns the address of a folio's first byte.
    pub(crate) fn frame_of(&self, folio: &FolioRef<'_>) -> *mut u8 {
        self.page_space.address(folio.id(), folio.folio().index())
    }
}

impl HasTable for Inode {
    fn table(&self) -> &Table {
        self.mapping.table()
    }

    fn keeps_values(&self) -> bool {
        self.store.keeps_values()
    }

    fn keeps_pages(&self) -> bool {
        // A store to a map must not fail because there is no memory for a page of the table.
        self.store.keeps_values() && self.page_space.is_in_place()
    }
}

/// Filling folios.
impl Inode {
    /// Returns the transfer of consecutive whole folios, each to the address that `targets` returns
    /// for it.
    pub(crate) fn read_transfer(
        &self,
        folios: &[FolioId],
        targets: impl Iterator<Item = *mut u8>,
    ) -> Transfer {
        let length = folios.len() as u64 * self.mapping.folio_bytes();
        let position_bytes = self.store.position_bytes(self.memory.folio(folios[0]));
        let folio_bytes = self.mapping.folio_bytes();
        let pieces = Pieces::of(length, targets.map(|start| (start, folio_bytes)));
        Transfer {
            backing: self.store.reader(),
            operation: Operation::Read,
            position_bytes,
            pieces,
        }
    }

    /// Returns how many bytes of consecutive whole folios can be read.
    pub(crate) fn bytes_to_read(&self, folios: &[FolioId]) -> u64 {
        let length_bytes = folios.len() as u64 * self.mapping.folio_bytes();
        self.store.bytes_to_read(self.memory.folio(folios[0]), length_bytes)
    }

    /// Checks the bytes at `start` that a locked folio was just filled with.
    pub(crate) fn check_filled(&self, folio: &FolioRef<'_>, start: *const u8) -> Result<()> {
        if self.store.check_filled(folio, start)? {
            self.memory.counters.add(Counter::SwapIn, folio.folio().pages());
        }
        Ok(())
    }

    /// CLEAR-F3, for a folio, locked and in the table, before it is uptodate: marks it if its pages
    /// are being cleared. Returns `true` if its bytes must then be zeros: they were read before the
    /// storage was cleared.
    pub(crate) fn mark_if_cleared(&self, locked: &LockedFolio<'_>, before: ClearedBefore) -> bool {
        let Some(clear) = self.clearing.of_page(locked.index()) else { return false };
        locked.flags.set(Flag::Punched);
        clear != before
    }

    /// Zeroes a locked folio's bytes from `offset` on, in memory.
    pub(crate) fn zero_folio_from(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        offset: u64,
    ) {
        self.zero_folio(folio, locked, offset..locked.pages() * PAGE_BYTES);
    }

    /// Zeroes some of a locked folio's bytes, counted from its first, in memory.
    pub(crate) fn zero_folio(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: Range<u64>,
    ) {
        let end = bytes.end.min(locked.pages() * PAGE_BYTES);
        let length = end.saturating_sub(bytes.start) as usize;
        let target = self.frame_of(folio).wrapping_add(bytes.start as usize);
        // SAFETY: part of a frame whose lock the caller holds, so it is its only writer.
        unsafe { copy::zero(target, length) };
    }

    /// Zeroes a locked folio and makes it uptodate.
    ///
    /// # Errors
    /// The kernel has no memory for a page of a region.
    pub(crate) fn fill_with_zeros(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Result<()> {
        if self.page_space.is_in_place() {
            return self.install_page(locked, ZEROS.as_ptr(), false);
        }
        self.zero_folio_from(folio, locked, 0);
        self.mapping.mark_uptodate(locked);
        Ok(())
    }

    /// Installs the bytes of locked folios that are not uptodate, as adjacent whole pages, where
    /// readers of a map see them. Does nothing for folios in the arena. Returns how many are
    /// installed, from the first on: all, unless there is an error.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn install(
        &self,
        pages: Range<u64>,
        source: *const u8,
        will_be_stored: bool,
    ) -> (u64, Result<()>) {
        // SAFETY: the callers pass that many pages of memory of their own, in no region.
        let (there, installed) = unsafe { self.page_space.install(pages, source, will_be_stored) };
        if self.page_space.is_in_place() {
            self.memory.counters.add(Counter::MapIn, there);
        }
        let refused = |source| Error::memory("a page of a map", source);
        (there, installed.map_err(refused))
    }

    /// Installs the page at `source` for a locked folio of a region that is not uptodate, and makes
    /// it uptodate. Before that it ceases to read as zeros: raw writers continue once it is
    /// installed, and their stores must be visible at once.
    ///
    /// # Errors
    /// The kernel has no memory for it; the folio is unchanged.
    pub(crate) fn install_page(
        &self,
        locked: &LockedFolio<'_>,
        source: *const u8,
        will_be_stored: bool,
    ) -> Result<()> {
        let pages = locked.index()..locked.index() + 1;
        let was_allocated = locked.flags.get(Flag::Allocated);
        // Readers that see the old state of the page have begun before it is installed: `copy` is a
        // system call, and a thread that waited for it continues after that.
        locked.flags.clear(Flag::Allocated);
        let (_, installed) = self.install(pages, source, will_be_stored);
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before the page is uptodate");
        if installed.is_ok() {
            self.mapping.mark_uptodate(locked);
        } else if was_allocated {
            locked.flags.set(Flag::Allocated);
        }
        installed
    }

    /// Removes a folio from the table that was never filled: restores the Entry that it took over.
    /// Returns the table's reference.
    pub(crate) fn remove_unfilled<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folios = &self.memory.folios;
        self.store.note_out_of_table(locked);
        let entry_after = |page| self.store.unfilled_entry(locked, page);
        self.mapping.remove(folio, locked, folios, entry_after)
    }
}

/// Returns the bytes of a folio at `start`, page by page. No thread may change them: the folio is
/// locked and not yet uptodate, or a write-out of it is in flight.
pub(crate) fn pages_of_still<'a>(
    folio: &'a FolioRef<'_>,
    start: *const u8,
) -> impl Iterator<Item = &'a [u8; PAGE_BYTES as usize]> {
    let descriptor = folio.folio();
    let is_writing = descriptor.flags.write_state().is_writing();
    debug_assert!(is_writing || !descriptor.flags.get(Flag::Uptodate));
    let pages = descriptor.pages() as usize;
    // SAFETY: the pages of a frame whose reference the caller holds, or of the buffer that the
    // folio is filled or written from. No thread changes them: a writer needs the lock and waits
    // for the write-out (WRITEBACK-3).
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), pages) };
    bytes.iter()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::page::PAGE_BYTES;
    use crate::sync::test_hook;

    /// Once `install` has installed an allocated page, which raw writers may then store to, no
    /// reader takes it for zeros.
    fn check_while_not_uptodate(install: impl FnOnce(&File)) {
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("stores", &options) else { return };
        file.set_len(PAGE_BYTES).unwrap();
        file.allocate(0..PAGE_BYTES).unwrap();
        assert_eq!(file.read_resident(&mut [1; 8], 0), 8, "allocated and never written");
        assert_eq!(file.seek_data(0).unwrap(), None);
        let other = file.clone();
        test_hook::set("before the page is uptodate", move || {
            assert_eq!(other.read_resident(&mut [1; 8], 0), 0, "readers wait for the lock");
            assert_eq!(other.seek_data(0).unwrap(), Some(0));
        });
        install(&file);
        assert!(test_hook::has_run(), "this thread installed the page");
    }

    #[test]
    fn an_allocated_page_that_a_map_may_store_to_is_no_hole() {
        check_while_not_uptodate(|file| drop(file.pin(0..8).unwrap()));
    }

    #[test]
    fn an_allocated_page_that_is_being_replaced_is_no_hole() {
        check_while_not_uptodate(|file| {
            file.write_all_at(&[9; PAGE_BYTES as usize], 0).unwrap();
        });
    }
}
