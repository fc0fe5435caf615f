//! Pages on their way in: the transfer that reads a folio, and how many pages one device may have
//! under reads.
//!
//! Called by `file/read_io.rs` and `file/fill.rs`, which hold the locks of the folios.
//!
//! A device may leave reads without an answer for as long as it likes. Until then nothing else can
//! have the frames that are to be filled, the staging memory of those in regions, or the thread
//! that serves a fault. So a device has a share of each (`sync/share.rs`), as it has of what may be
//! dirty (`throttle.rs`):
//!
//! | what | all devices | one alone | a caller that finds no room |
//! |---|---|---|---|
//! | pages under reads | half of the bound | 3/8 of the bound | waits here, or reads less ahead |
//! | staging memory (`memory/region/staging.rs`) | all of it | 7/8 | waits, or reads less ahead |
//! | threads for faults (`file/faults/threads.rs`) | 80 | 4 | waits in a queue of the device |
//!
//! With the half of the bound that a device alone may have dirty, an eighth is left to others. One
//! that has nothing under reads may begin one, however much others have. Memory files read from the
//! swap, which counts as a device of its own.
//!
//! A thread that waits here waits for reads of its own device, which end when that answers. It
//! holds no transfer, no frame and no staging memory (IO-5). The thread that ends a read wakes
//! those that wait, if it sees any; a waiter that was not seen wakes up by itself ([`SLEEP_MAX`]).
//!
//! # Safety
//! Makes windows on frames whose folios the caller has locked.
#![allow(unsafe_code)]

use super::Inode;
use crate::error::{ErrorKind, Result};
use crate::io::{Operation, Pieces, Transfer};
use crate::page::{Flag, FolioId, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, Share, blocking};
use crate::sys::copy;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A page of zeros.
static ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// The part of the bound that may be under reads.
const PART_OF_BOUND: u64 = 2;
/// Of what others leave, one part of so many stays when a device has all it may have.
const PARTS: u64 = 4;
/// Upper bound on a sleep whose wake-up was missed.
const SLEEP_MAX: Duration = Duration::from_millis(5);

/// A device's shares.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// Pages under reads, or about to be.
    reading: Share,
    /// Pages of staging memory.
    pub(crate) staging: Share,
    /// Threads that serve faults.
    pub(crate) faults: Share,
}

/// Pages that all devices of a cache have together, and the threads that wait.
#[derive(Debug, Default)]
pub(in crate::writeback) struct Loads {
    reading: Arc<AtomicU64>,
    staging: Arc<AtomicU64>,
    faults: Arc<AtomicU64>,
    /// Follows the bound.
    reading_pages_max: AtomicU64,
    waiting: AtomicU64,
    gate: Mutex<()>,
    ended: Condvar,
}

impl Loads {
    /// Of one more device.
    pub(in crate::writeback) fn new_load(&self) -> Load {
        let [reading, staging, faults] =
            [&self.reading, &self.staging, &self.faults].map(Share::new);
        Load { reading, staging, faults }
    }

    /// Fits what may be under reads to the bound.
    pub(in crate::writeback) fn set_bound(&self, bound_pages: u64) {
        self.reading_pages_max.store(bound_pages / PART_OF_BOUND, Ordering::Relaxed);
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
    /// Counts up to `wanted` pages that are about to be read, and answers how many: not fewer than
    /// `least`, unless it is none, because its device has enough. To be given back with
    /// [`Self::end_read`].
    pub(crate) fn try_begin_read(&self, least: u64, wanted: u64) -> Option<u64> {
        let (reading, max) = (&self.load.reading, &self.flusher.loads.reading_pages_max);
        let max = max.load(Ordering::Relaxed);
        let pages = wanted.min(reading.room(max, PARTS)) / least * least;
        if pages > 0 && reading.try_add(pages, max, PARTS).is_some() {
            return Some(pages);
        }
        (reading.own() == 0).then(|| {
            reading.add(least);
            least
        })
    }

    /// As [`Self::try_begin_read`]; waits until it is some.
    pub(crate) fn begin_read(&self, least: u64, wanted: u64) -> u64 {
        loop {
            if let Some(pages) = self.try_begin_read(least, wanted) {
                return pages;
            }
            blocking::check("reads of the same device");
            self.flusher.loads.wait();
        }
    }

    /// Counts pages that are about to be read all the same: the caller could not know before.
    pub(crate) fn begin_read_at_once(&self, pages: u64) {
        self.load.reading.add(pages);
    }

    /// So many pages are not under a read any more.
    pub(crate) fn end_read(&self, pages: u64) {
        if pages > 0 {
            self.load.reading.sub(pages);
            self.flusher.loads.wake();
        }
    }
}

/// Bytes on their way in.
impl Inode {
    /// The transfer of consecutive whole folios, to where `targets` says that each is to be read.
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
            backing: Arc::clone(self.store.reader()),
            operation: Operation::Read,
            position_bytes,
            pieces,
        }
    }

    /// How many bytes of consecutive whole folios are to be read.
    pub(crate) fn bytes_to_read(&self, folios: &[FolioId]) -> u64 {
        let length_bytes = folios.len() as u64 * self.mapping.folio_bytes();
        self.store.bytes_to_read(self.memory.folio(folios[0]), length_bytes)
    }

    /// Judges the bytes a locked folio was just filled with, which are at `start`.
    pub(crate) fn check_filled(&self, folio: &FolioRef<'_>, start: *const u8) -> Result<()> {
        if self.store.check_filled(folio, start)? {
            self.memory.counters.add(Counter::SwapIn, folio.folio().pages());
        }
        Ok(())
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
    pub(in crate::writeback) fn zero_folio(
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

    /// Makes a locked folio of zeros uptodate.
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

    /// Puts the bytes of locked folios that are not uptodate, whole pages in a row, where readers
    /// of a map see them; in the arena they are there already. Answers how many are there, from the
    /// first on: all, unless there is an error.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(crate) fn install(
        &self,
        pages: Range<u64>,
        source: *const u8,
        will_be_stored: bool,
    ) -> (u64, Result<()>) {
        // SAFETY: the callers give as many pages of memory of their own, in no region.
        let (there, installed) = unsafe { self.page_space.install(pages, source, will_be_stored) };
        if self.page_space.is_in_place() {
            self.memory.counters.add(Counter::MapIn, there);
        }
        let refused = |source| ErrorKind::Memory { purpose: "a page of a map", source }.into();
        (there, installed.map_err(refused))
    }

    /// Puts the page at `source` in the place of a locked folio of a region that is not uptodate,
    /// and makes it uptodate. It stops being one that reads as zeros before it is there: raw
    /// writers go on then, and what they store is to be seen at once.
    ///
    /// # Errors
    /// The kernel has no memory for it: the folio is as it was.
    pub(crate) fn install_page(
        &self,
        locked: &LockedFolio<'_>,
        source: *const u8,
        will_be_stored: bool,
    ) -> Result<()> {
        let pages = locked.index()..locked.index() + 1;
        let was_allocated = locked.flags.get(Flag::Allocated);
        // Readers that see the page as it was have begun before it is there: `copy` is a system
        // call, and who waited for it comes after that.
        locked.flags.clear(Flag::Allocated);
        let (_, installed) = self.install(pages, source, will_be_stored);
        #[cfg(all(test, not(loom)))]
        crate::sync::meanwhile::here("before the page is uptodate");
        if installed.is_ok() {
            self.mapping.mark_uptodate(locked);
        } else if was_allocated {
            locked.flags.set(Flag::Allocated);
        }
        installed
    }

    /// Takes a folio out of the table that never got its bytes: what it took over stands there
    /// again. The table's reference is returned.
    pub(crate) fn remove_unfilled<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folios = &self.memory.folios;
        self.store.note_out_of_table(locked);
        let leave = |page| self.store.left_by_unfilled(locked, page);
        self.mapping.remove(folio, locked, folios, leave)
    }
}

/// The bytes of a folio, page by page, which are at `start`. Nobody may change them: the folio is
/// locked and not yet uptodate, or a write-out of it is in flight.
pub(in crate::writeback) fn pages_of_still<'a>(
    folio: &'a FolioRef<'_>,
    start: *const u8,
) -> impl Iterator<Item = &'a [u8; PAGE_BYTES as usize]> {
    let descriptor = folio.folio();
    let is_writing = descriptor.flags.write_state().is_writing();
    debug_assert!(is_writing || !descriptor.flags.get(Flag::Uptodate));
    let pages = descriptor.pages() as usize;
    // SAFETY: so many pages of a frame whose reference the caller holds, or of where the folio is
    // on its way in or out, which nobody changes: a writer needs the lock and waits for the
    // write-out (WRITEBACK-3).
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), pages) };
    bytes.iter()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::page::PAGE_BYTES;
    use crate::sync::meanwhile;

    /// Once `install` has put an allocated page there, which raw writers may have stored to then,
    /// nobody takes it for zeros.
    fn check_while_not_uptodate(install: impl FnOnce(&File)) {
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("stores", &options) else { return };
        file.set_len(PAGE_BYTES).unwrap();
        file.allocate(0..PAGE_BYTES).unwrap();
        assert_eq!(file.read_resident(&mut [1; 8], 0), 8, "allocated and never written");
        assert_eq!(file.seek_data(0).unwrap(), None);
        let other = file.clone();
        meanwhile::at("before the page is uptodate", move || {
            assert_eq!(other.read_resident(&mut [1; 8], 0), 0, "readers wait for the lock");
            assert_eq!(other.seek_data(0).unwrap(), Some(0));
        });
        install(&file);
        assert!(meanwhile::was_there(), "the page was put there by this thread");
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
