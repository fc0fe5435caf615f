//! Writes: folio by folio, with the folio lock and a write section.
//!
//! A write ends in memory; it is durable after a sync. It never reads a page that it replaces
//! whole. A write that makes the file longer holds a [`Growth`] from there to its end.
//!
//! # Safety
//! Writes into frames whose lock it holds, through `sys::copy`.
#![allow(unsafe_code)]

use super::File;
use super::resize::Growth;
use crate::error::{Error, Result};
use crate::fill::{AccessMode, Locked};
use crate::maps::faults;
use crate::page::{PAGE_BYTES, PAGE_SHIFT};
use crate::reclaim::CallScope;
use crate::stats::Counter;
use crate::sys::copy;
use crate::writeback::NoRoom;
use std::io;
use std::os::unix::fs::FileExt;

/// Cache lines per page.
const PAGE_LINES: usize = PAGE_BYTES as usize / copy::LINE_BYTES;

/// Reason why a write of one folio has changed nothing.
#[derive(Debug)]
enum Unwritten {
    /// The file was truncated: it must grow first.
    MustResize,
    /// The folio cannot become dirty yet.
    NoRoom(NoRoom),
    Failed(Error),
}

impl From<NoRoom> for Unwritten {
    fn from(no_room: NoRoom) -> Self {
        Self::NoRoom(no_room)
    }
}

impl From<Error> for Unwritten {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

type Copied = std::result::Result<(), Unwritten>;

/// Part of a write that lies in one folio.
#[derive(Debug)]
struct Piece<'b> {
    bytes: &'b [u8],
    position: u64,
    /// The write continues after these bytes.
    follows: bool,
    /// LSN of the write, for a file with a write gate.
    lsn: Option<u64>,
}

impl Piece<'_> {
    fn end(&self) -> u64 {
        self.position + self.bytes.len() as u64
    }
}

impl File {
    /// Writes `buffer` at `position` and returns the number of bytes written. A write past the end
    /// of file grows the file; a gap reads as zeros. The number is smaller than the length of
    /// `buffer` only if an error occurred on the way: a write of the rest returns it.
    ///
    /// Blocks for I/O if it replaces part of a folio that is not resident, while the folio is being
    /// written back, and, for a page that is not dirty yet, while too much is dirty
    /// ([`dirty_max`](crate::CacheBuilder::dirty_max)). Atomic with respect to
    /// `read_at` within one 4 KiB page.
    ///
    /// # Errors
    /// An I/O error of the storage, with file, position and length; a cache full of pinned pages; a
    /// handle that is not open for writing; a length beyond the maximum that the file was opened
    /// with; [`ErrorKind::Unwritable`](crate::ErrorKind::Unwritable), with the error of the storage
    /// as its source, if the storage accepts no writes and the limit of dirty bytes is reached.
    /// Writes succeed again once the storage accepts some.
    pub fn write_at(&self, buffer: &[u8], position: u64) -> Result<usize> {
        self.write_with(buffer, position, None)
    }

    /// Writes like [`File::write_at`], with an LSN for a file with a write gate.
    pub(super) fn write_with(
        &self,
        buffer: &[u8],
        position: u64,
        lsn: Option<u64>,
    ) -> Result<usize> {
        let handle = &self.handle;
        handle.check_writable()?;
        let end = handle.range_end(position, buffer.len() as u64)?;
        if buffer.is_empty() {
            return Ok(0);
        }
        handle.check_len(end)?;
        match self.write_folios(buffer, position, lsn, &mut None) {
            (0, Some(error)) => Err(error),
            // The next call, which starts at the first byte not written, returns the error.
            (done, _) => Ok(done),
        }
    }

    /// Writes `buffer` folio by folio. Returns the number of bytes written, and the error that
    /// ended the write early.
    fn write_folios<'a>(
        &'a self,
        buffer: &[u8],
        position: u64,
        lsn: Option<u64>,
        growth: &mut Option<Growth<'a>>,
    ) -> (usize, Option<Error>) {
        let end = position + buffer.len() as u64;
        let is_mapped = faults::is_mapped(buffer);
        let call = CallScope::begin();
        let (mut done, mut failure) = (0, None);
        while done < buffer.len() && failure.is_none() {
            let at = position + done as u64;
            let in_folio = at & (self.folio_bytes() - 1);
            let length = (self.folio_bytes() - in_folio).min((buffer.len() - done) as u64);
            let bytes = &buffer[done..done + length as usize];
            let copied = is_mapped.then(|| bytes.to_vec());
            let bytes = copied.as_deref().unwrap_or(bytes);
            let follows = buffer.len() - done > bytes.len();
            let piece = Piece { bytes, position: at, follows, lsn };
            // Must follow the copy from the caller's buffer: a buffer in a map, past the end of its
            // file, is refused.
            match self.write_or_grow(&piece, end, growth) {
                Ok(()) => {
                    call.note_page();
                    done += bytes.len();
                }
                Err(error) => failure = Some(error),
            }
        }
        self.handle.inode.memory.counters.add(Counter::WriteBytes, done as u64);
        (done, failure)
    }

    /// Appends `buffer` to the file and returns the position of its first byte. Concurrent appends
    /// are serialized: each gets its own range, without gaps between them. Other writes that grow
    /// the file wait, too.
    ///
    /// Blocks like [`File::write_at`], and while another thread changes the length of the file.
    /// Durable after the next sync. The bytes become visible folio by folio.
    ///
    /// # Errors
    /// Fails like [`File::write_at`]. The file then has its old length, unless the storage refuses
    /// to truncate it: then part of `buffer` stays in the file.
    ///
    /// ```
    /// # fn main() -> bifolio::Result<()> {
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let log = cache.memory_file("log")?;
    /// assert_eq!(log.append(b"first")?, 0);
    /// assert_eq!(log.append(b"second")?, 5);
    /// # Ok(())
    /// # }
    /// ```
    pub fn append(&self, buffer: &[u8]) -> Result<u64> {
        self.append_with(buffer, None)
    }

    /// Appends like [`File::append`], with an LSN for a file with a write gate.
    pub(super) fn append_with(&self, buffer: &[u8], lsn: Option<u64>) -> Result<u64> {
        self.handle.check_writable()?;
        let (position, growth) = self.begin_append(buffer.len() as u64)?;
        let mut growth = Some(growth);
        let (_, failure) = self.write_folios(buffer, position, lsn, &mut growth);
        let Some(error) = failure else { return Ok(position) };
        if let Some(growth) = growth
            && let Err(kept) = self.undo_append(&growth, position)
        {
            log::warn!("{kept}; part of a failed append stays in the file at position {position}");
        }
        Err(error)
    }

    /// Writes all of `buffer` at `position`.
    ///
    /// # Errors
    /// Fails like [`File::write_at`]; part of `buffer` may have been written then.
    pub fn write_all_at(&self, buffer: &[u8], position: u64) -> Result<()> {
        let _call = CallScope::begin();
        let mut done = 0;
        while done < buffer.len() {
            done += self.write_at(&buffer[done..], position + done as u64)?;
        }
        Ok(())
    }

    /// Writes a piece of a write that ends at `end`. If the file is shorter, it starts to grow.
    fn write_or_grow<'a>(
        &'a self,
        piece: &Piece<'_>,
        end: u64,
        growth: &mut Option<Growth<'a>>,
    ) -> Result<()> {
        loop {
            if growth.is_none() && end > self.len() {
                *growth = Some(self.begin_growth(end)?);
            }
            match self.write_folio(piece, growth.as_mut()) {
                Ok(()) => return Ok(()),
                Err(Unwritten::MustResize) => {}
                Err(Unwritten::NoRoom(no_room)) => {
                    self.handle.make_room(no_room, piece.position, piece.bytes.len() as u64)?;
                }
                Err(Unwritten::Failed(error)) => return Err(error),
            }
        }
    }

    /// Writes a piece, if the file is long enough or `growth` is held.
    fn write_folio(&self, piece: &Piece<'_>, growth: Option<&mut Growth<'_>>) -> Copied {
        let inode = &self.handle.inode;
        let end = piece.end();
        let access = AccessMode::Write { start: piece.position, end };
        let locked = self.handle.fill().lock_folio(piece.position >> PAGE_SHIFT, access)?;
        // Checked under the folio lock: a truncation takes the lock of the folio, or removes the
        // folio from the table.
        if end > inode.mapping.len_bytes() && growth.is_none() {
            self.undo_write(locked);
            return Err(Unwritten::MustResize);
        }
        if let Err(unwritten) = self.copy_into(&locked, piece) {
            self.undo_write(locked);
            return Err(unwritten);
        }
        if let Some(growth) = growth {
            growth.reach(end);
        }
        Ok(())
    }

    fn copy_into(&self, locked: &Locked<'_>, piece: &Piece<'_>) -> Copied {
        let inode = &self.handle.inode;
        let Piece { bytes, position, follows, lsn } = *piece;
        let Locked { folio, lock, .. } = locked;
        if !locked.is_uptodate() && inode.write_page::<Unwritten>(folio, lock, bytes)? {
            return Ok(());
        }
        let in_folio = position - locked.lock.index() * PAGE_BYTES;
        let start = inode.frame_of(&locked.folio);
        let target = start.wrapping_add(in_folio as usize);
        inode.try_mark_dirty(&locked.folio, &locked.lock, lsn)?;
        if locked.is_uptodate() {
            let pages = position >> PAGE_SHIFT..((piece.end() - 1) >> PAGE_SHIFT) + 1;
            let _section = inode.mapping.begin_write_section(&locked.lock, pages);
            // SAFETY: inside a frame whose lock and write section we hold; `bytes` is not in it.
            unsafe { copy::copy_in(target, bytes) };
        } else {
            if follows {
                // Adjacent pages have adjacent frames. Releasing the folio lock waits for the
                // stores to this page, which delays the stores to the next one unless its lines are
                // prefetched (13 of 55 us per MiB).
                copy::prefetch_lines_to_write(target.wrapping_add(bytes.len()), PAGE_LINES);
            }
            // SAFETY: inside a frame whose lock we hold and which no reader can use yet.
            unsafe { copy::copy_in(target, bytes) };
            let end_in_folio = in_folio + bytes.len() as u64;
            inode.zero_folio(&locked.folio, &locked.lock, end_in_folio..u64::MAX);
            inode.mapping.mark_uptodate(&locked.lock);
        }
        Ok(())
    }

    /// Cleans up a folio whose write failed. If it was made for this write, no reader may see the
    /// old bytes of its frame, and it must not stay past the end of file (MAPPING-4).
    fn undo_write(&self, locked: Locked<'_>) {
        let inode = &self.handle.inode;
        let (is_uptodate, was_resident) = (locked.is_uptodate(), locked.was_resident);
        let Locked { folio, lock, .. } = locked;
        if was_resident {
            // Another thread has it, or a truncation in progress removes it.
        } else if !is_uptodate {
            drop(inode.remove_unfilled(&folio, &lock));
        } else if inode.mapping.was_cut(&lock) {
            inode.remove_unwanted(folio, lock);
        }
    }
}

/// The calls of a `std::fs::File`, for code that is generic over them. Where the type is known, the
/// methods of [`File`] itself are called, which return [`Error`].
impl FileExt for File {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        Ok(Self::read_at(self, buffer, position)?)
    }

    fn write_at(&self, buffer: &[u8], position: u64) -> io::Result<usize> {
        Ok(Self::write_at(self, buffer, position)?)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::{Lookup, WriteState};
    use crate::sync::Ordering::Relaxed;
    use crate::{Cache, Feature, OpenOptions};
    use bifolio_testing::skip;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    use std::time::{Duration, Instant};

    /// The copy of a page in the swap is its content until the replacing bytes are in place.
    #[test]
    fn a_page_that_cannot_be_installed_keeps_what_was_swapped() {
        const PAGES: u64 = 600;
        if !crate::Features::probe(&[]).has(Feature::UserFaults) {
            return skip(Feature::UserFaults, "files cannot be mapped");
        }
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_directory(directory.path());
        let cache = builder.build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let file = cache.memory_file_with("swapped", &options).unwrap();
        let page = [7; PAGE_BYTES as usize];
        (0..PAGES).for_each(|index| file.write_all_at(&page, index * PAGE_BYTES).unwrap());
        let inode = &file.handle.inode;
        let entry = |index| inode.mapping.table().load(index, Relaxed);
        let index = (0..PAGES).find(|index| inode.store.is_absent(entry(*index))).unwrap();
        let address = inode.page_space.region().unwrap().addresses.address(index).cast();
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // An address that the kernel does not serve faults for refuses all pages.
        // SAFETY: a page of the region that is not present, and that no thread accesses below.
        unsafe { mmap_anonymous(address, page.len(), ProtFlags::empty(), flags) }.unwrap();
        let error = file.write_at(&[8; PAGE_BYTES as usize], index * PAGE_BYTES).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Memory, "{error:?}");
        assert!(inode.store.is_absent(entry(index)), "the page is a hole: {:?}", entry(index));
        assert_eq!(cache.stats().dirty_bytes, 0);
    }

    #[test]
    fn a_dirty_file_is_listed_during_every_round_of_the_flusher() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; PAGE_BYTES as usize]).unwrap();
        let builder =
            Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(3_600_000));
        let cache = builder.build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
        file.write_all_at(&[2; 8], 0).unwrap();
        assert!(file.handle.inode.stays_listed_for(2_000));
    }

    /// A page that a sync waits to write is frozen. The sync waits until it is not, after the
    /// writes that it has started are complete.
    #[test]
    fn a_sync_that_waits_for_a_frozen_page_keeps_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; 4 * PAGE_BYTES as usize]).unwrap();
        let builder =
            Cache::builder().memory(1 << 20).dirty_age_max(Duration::from_millis(3_600_000));
        let cache = builder.build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
        for index in [0, 3] {
            file.write_all_at(b"dirty", index * PAGE_BYTES).unwrap();
        }
        let inode = &file.handle.inode;
        let (mapping, folios) = (&inode.mapping, &inode.memory.folios);
        inode.memory.lru.drain_all(folios);
        let [first, last] = [0, 3].map(|index| {
            let found = mapping.get_folio(folios, index);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            folio
        });
        let lock = last.lock();
        let frozen = mapping.begin_eviction(last, &lock).unwrap();
        std::thread::scope(|scope| {
            let syncing = scope.spawn(|| file.sync_data());
            let is_over = || {
                let lock = first.try_lock();
                lock.is_some_and(|lock| lock.flags.write_state() == WriteState::Clean)
            };
            let begun = Instant::now();
            while !is_over() && begun.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (was_over, is_waiting) = (is_over(), !syncing.is_finished());
            drop(mapping.cancel_eviction(frozen, &lock));
            drop(lock);
            syncing.join().unwrap().unwrap();
            assert!(was_over && is_waiting, "{was_over} {is_waiting}");
        });
    }
}
