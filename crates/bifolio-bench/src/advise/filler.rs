//! The load of the other CPU: it keeps its LRU batch filled.
//!
//! It allocates new pages of a memory file one after the other, each of which is added to the
//! batch, without disk I/O. The pages are punched again, a few at a time. For a cache it is a file
//! of the same cache, for the kernel a file in memory as well.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;

/// Maximum number of pages, and the number that is punched together: the fewer, the sooner a new
/// page is in the batch.
const RING_PAGES: u64 = 256;
const RUN_PAGES: u64 = 16;

/// A memory file.
pub(super) trait InMemory: Send {
    fn lengthen(&self, len_bytes: u64) -> Result<()>;
    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()>;
    fn punch(&self, range: Range<u64>) -> Result<()>;
}

impl InMemory for bifolio::File {
    fn lengthen(&self, len_bytes: u64) -> Result<()> {
        Ok(self.set_len(len_bytes)?)
    }

    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        Ok(self.write_all_at(page, pos_bytes)?)
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        Ok(self.punch_hole(range)?)
    }
}

impl InMemory for fs::File {
    fn lengthen(&self, len_bytes: u64) -> Result<()> {
        self.set_len(len_bytes).map_err(Error::system("lengthen a file in memory"))
    }

    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        self.write_all_at(page, pos_bytes).map_err(Error::system("write a file in memory"))
    }

    fn punch(&self, range: Range<u64>) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(self, flags, range.start, range.end - range.start)
            .map_err(Error::system("punch a hole into a file in memory"))
    }
}

/// Fills the batch of the CPU it is used on.
#[derive(Debug)]
pub(super) struct Filler<F> {
    file: F,
    page: u64,
}

impl<F: InMemory> Filler<F> {
    /// Creates a filler with pages of `file`, which is empty.
    pub(super) fn new(file: F) -> Result<Self> {
        file.lengthen(RING_PAGES * PAGE_BYTES as u64)?;
        Ok(Self { file, page: 0 })
    }

    /// Allocates a page in a hole.
    pub(super) fn step(&mut self) -> Result<()> {
        let pos_bytes = self.page * PAGE_BYTES as u64;
        if self.page.is_multiple_of(RUN_PAGES) {
            self.file.punch(pos_bytes..pos_bytes + RUN_PAGES * PAGE_BYTES as u64)?;
        }
        self.file.write(&[1; PAGE_BYTES], pos_bytes)?;
        self.page = (self.page + 1) % RING_PAGES;
        Ok(())
    }
}

/// A file in the kernel's memory.
pub(super) fn kernel_file() -> Result<fs::File> {
    let created = memfd_create("bifolio-bench", MemfdFlags::CLOEXEC);
    Ok(fs::File::from(created.map_err(Error::system("make a file in memory"))?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn each_page_is_new_and_there_are_never_more_than_the_ring() {
        let mut filler = Filler::new(kernel_file().unwrap()).unwrap();
        let blocks = |filler: &Filler<fs::File>| filler.file.metadata().unwrap().blocks() / 8;
        (0..RING_PAGES).for_each(|_| filler.step().unwrap());
        assert_eq!(blocks(&filler), RING_PAGES);
        for page in 0..RUN_PAGES {
            filler.step().unwrap();
            assert_eq!(blocks(&filler), RING_PAGES - RUN_PAGES + page + 1);
        }
    }
}
