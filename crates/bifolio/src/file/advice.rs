//! Advice: what the caller knows about the reads to come.

use super::File;
use super::readahead::Mode;
use crate::error::Result;
use crate::mapping::{PAGE_BYTES, PAGE_SHIFT};
use std::ops::Range;

/// What will be done with a file, or with a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// For the handle: watch the reads, and read ahead where they are sequential or strided. How
    /// it is from the beginning.
    Normal,
    /// For the handle: reads are sequential; read ahead from the first one on, and much.
    Sequential,
    /// For the handle: reads have no order; read nothing ahead.
    Random,
    /// For the range: it will be read soon; start to read it now.
    WillNeed,
}

impl File {
    /// Takes advice. [`Advice::WillNeed`] starts to read `range` and returns; as much of it as fits
    /// into a quarter of the cache, and for which frames are free, or can be freed without I/O. The
    /// others are for all reads through this handle and its clones, wherever; `range` is not
    /// looked at. Never waits for the device.
    ///
    /// # Errors
    /// The handle was not opened for reading; a range beyond 2^63.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::{Advice, OpenOptions};
    /// let file = cache.open(&path, &OpenOptions::new())?;
    /// file.advise(0..file.len(), Advice::Random)?;
    /// file.advise(40_000..60_000, Advice::WillNeed)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<()> {
        let handle = &self.handle;
        handle.check_readable()?;
        handle.range_end(range.start, range.end.saturating_sub(range.start))?;
        match advice {
            Advice::Normal => handle.readahead.set_mode(Mode::Normal),
            Advice::Sequential => handle.readahead.set_mode(Mode::Sequential),
            Advice::Random => handle.readahead.set_mode(Mode::Random),
            Advice::WillNeed => {
                let bound_bytes = handle.reclaim.memory.arena.usage().bound_bytes;
                let end = range.end.min(self.len()).min(range.start + bound_bytes / 4);
                let pages = range.start >> PAGE_SHIFT..end.div_ceil(PAGE_BYTES);
                handle.start_reading([pages]);
            }
        }
        Ok(())
    }
}
