//! Reads that do not wait: what is resident, and why the next byte cannot be read now.
//!
//! Used by the futures and the server of asynchronous reads, which then claim the page or register
//! for its folio lock, and by [`File::try_read_at`].
//!
//! # Safety
//! Copies from frames whose folio lock and reference it holds.
#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind, Result};
use crate::file::File;
use crate::file::hit::Hit;
use crate::fill::Locked;
use crate::maps::faults;
use crate::page::{Entry, Lookup, PAGE_BYTES, PAGE_SHIFT, is_in_one_page};
use crate::stats::Counter;
use crate::sys::copy;

/// The reason why a read without waiting has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// All bytes were read, or the file ends.
    None,
    /// The next page is not resident; its Entry.
    Absent(Entry),
    /// Another thread fills, writes or moves the next page.
    Busy,
}

impl File {
    /// Reads like [`File::read_at`], but only bytes that are in memory, from the first on: never
    /// waits for a device or for another thread, and starts no read. Returns the number of bytes
    /// before the first that would have to be waited for.
    ///
    /// Costs what a hit costs. Copies under a folio lock if the lock is free and the page is being
    /// changed.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] if the first byte would have to be waited for, which becomes an
    /// [`std::io::Error`] of the kind `WouldBlock`; otherwise fails like [`File::read_at`], without
    /// errors of the storage.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, b"0123456789")?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::{ErrorKind, OpenOptions};
    /// let file = cache.open(&path, &OpenOptions::new())?;
    /// let mut buffer = [0; 4];
    /// let error = file.try_read_at(&mut buffer, 0).unwrap_err();
    /// assert!(error.kind() == ErrorKind::WouldBlock);
    /// file.read_at(&mut buffer, 0)?;
    /// assert_eq!(file.try_read_at(&mut buffer, 6)?, 4);
    /// assert_eq!(&buffer, b"6789");
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        match self.hit_path.read(buffer, position) {
            Hit::Done => return Ok(buffer.len()),
            hit => hit.forget(buffer),
        }
        self.handle.check_readable()?;
        self.handle.range_end(position, buffer.len() as u64)?;
        match self.read_available(buffer, position) {
            (0, Obstacle::Absent(_) | Obstacle::Busy) => {
                let text =
                    format!("the byte at position {position} cannot be read without waiting");
                let error = Error::new(ErrorKind::WouldBlock, text);
                Err(error.in_file(self.handle.inode.name()).at(position..position + 1))
            }
            (done, _) => Ok(done),
        }
    }

    /// Reads what is in memory of a range that was checked. Returns the number of bytes, and why
    /// the read ended there.
    pub(super) fn read_available(&self, buffer: &mut [u8], position: u64) -> (usize, Obstacle) {
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            if let Some(seen) = self.handle.fill().absent_at(at) {
                return (done, Obstacle::Absent(seen));
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
        if faults::is_mapped(buffer) || position >= inode.mapping.len_bytes() {
            return 0;
        }
        let found = inode.mapping.try_get_folio(&inode.memory.folios, position >> PAGE_SHIFT);
        let Some(Lookup::Folio(folio)) = found else { return 0 };
        let Some(lock) = folio.try_lock() else { return 0 };
        let locked = Locked { lock, folio, was_resident: true };
        if locked.lock.owner() != inode.address || !locked.is_uptodate() {
            return 0;
        }
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        let in_page = PAGE_BYTES - (position & (PAGE_BYTES - 1));
        let length = in_page.min(visible).min(buffer.len() as u64) as usize;
        let in_folio = position - locked.lock.index() * PAGE_BYTES;
        let start = inode.frame_of(&locked.folio).wrapping_add(in_folio as usize);
        // SAFETY: inside a frame whose lock and reference we hold; no thread writes it now.
        unsafe { copy::copy_out(start, &mut buffer[..length]) };
        inode.memory.counters.add(Counter::HitSlow, 1);
        self.note_use(position >> PAGE_SHIFT, true);
        length
    }
}
