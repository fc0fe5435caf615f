//! Reads: the hit first, then stretches of pages, then the folio lock.
//!
//! The public calls, and the loop that takes a read apart. Its steps, each of which answers at
//! least the first byte that is left, or leaves it to the next:
//!
//! ```text
//!   HitPath::read     hit.rs          one page, resident and marked: copied without a reference
//!   copy_stretch      copy_stretch.rs neighbouring frames at once, every page validated
//!   fill_zeros        gather.rs       holes and allocated pages of memory files
//!   read_absent       read_absent.rs  not resident: one batch of transfers; or somebody is
//!                                     filling or writing it: its folio lock
//! ```

use super::hit::Hit;
use super::{File, sequence};
use crate::error::Result;
use crate::page::is_in_one_page;

impl File {
    /// Reads bytes at `position` into `buffer`. Returns how many: fewer than asked only at the end
    /// of the file, or before a byte that cannot be read (the next call there says why).
    ///
    /// A resident page is copied without a lock, a reference or a shared write. Blocks for I/O on
    /// a miss. Atomic with respect to `write_at` inside one 4 KiB page. Behind the bytes that were
    /// read, and after an error, `buffer` holds what it held before, or zeros: never bytes of other
    /// files.
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
        match self.hit_path.read(buffer, position) {
            Hit::Done => Ok(buffer.len()),
            hit => self.read_at_miss(buffer, position, hit),
        }
    }

    /// Reads exactly `buffer.len()` bytes at `position`.
    ///
    /// # Errors
    /// As [`File::read_at`], and [`ErrorKind::PastEnd`](crate::ErrorKind::PastEnd) if the file has
    /// fewer bytes; `buffer` may have been filled in part then.
    #[inline]
    pub fn read_exact_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        let mut hit = self.hit_path.read(buffer, position);
        if hit == Hit::Done {
            return Ok(());
        }
        let mut done = 0;
        while done < buffer.len() {
            let (at, wanted) = (position + done as u64, buffer.len() - done);
            let count = self.read_at_miss(&mut buffer[done..], at, hit)?;
            hit = Hit::None;
            if count == 0 || count < wanted && is_in_one_page(at, wanted as u64) {
                return Err(self.handle.past_end(position, buffer.len() as u64));
            }
            done += count;
        }
        Ok(())
    }

    #[inline(never)]
    fn read_at_miss(&self, buffer: &mut [u8], position: u64, hit: Hit) -> Result<usize> {
        hit.forget(buffer);
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
            let left_bytes = left.len() as u64;
            let copied = match self.read_resident(left, at) {
                0 => self.read_absent(left, at, ahead),
                copied => Ok(copied),
            };
            let is_whole = is_in_one_page(at, left_bytes);
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
            if is_whole {
                // The end of the file, if it is short: bytes that came since are of later writes.
                break;
            }
        }
        Ok(done)
    }

    /// Copies what is resident, or reads as zeros, from the first byte on. Returns 0 when the first
    /// page is neither, or is being written, or lies behind the end.
    pub(crate) fn read_resident(&self, buffer: &mut [u8], position: u64) -> usize {
        if let Some(done) = self.read_by_mode(buffer, position) {
            return done;
        }
        let file = self.handle.inode.mapping.hot();
        let goes_on = sequence::goes_on(file, position, buffer.len() as u64);
        // Bytes that follow the last ones read do not make their page one that was used again.
        let continues = self.handle.readahead.continues(position);
        self.copy_resident(buffer, position, u64::MAX, continues, goes_on)
    }
}
