//! What the other CPU does meanwhile: it keeps its LRU batch filled.
//!
//! New pages of a memory file, one after the other, so that each is handed to the batch, and no
//! disk has a part in it. They go again before they are many. In a cache it is a file of the same
//! cache; in the kernel one that lives in memory as well.

use std::fs;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;

const PAGES: u64 = 256;

/// A memory file that pages are added to.
pub(super) trait Growing: Send {
    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()>;
    fn empty(&self) -> Result<()>;
}

impl Growing for bifolio::File {
    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        Ok(self.write_all_at(page, pos_bytes)?)
    }

    fn empty(&self) -> Result<()> {
        Ok(self.set_len(0)?)
    }
}

impl Growing for fs::File {
    fn write(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        self.write_all_at(page, pos_bytes).map_err(Error::system("write a file in memory"))
    }

    fn empty(&self) -> Result<()> {
        self.set_len(0).map_err(Error::system("cut a file in memory"))
    }
}

/// Fills the batch of the CPU it is used on.
#[derive(Debug)]
pub(super) struct Filler<F> {
    file: F,
    pages: u64,
}

impl<F: Growing> Filler<F> {
    /// With pages of `file`, which is empty.
    pub(super) fn new(file: F) -> Self {
        Self { file, pages: 0 }
    }

    /// Adds a page.
    pub(super) fn step(&mut self) -> Result<()> {
        if self.pages == PAGES {
            self.file.empty()?;
            self.pages = 0;
        }
        self.file.write(&[1; PAGE_BYTES], self.pages * PAGE_BYTES as u64)?;
        self.pages += 1;
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
    use super::*;

    #[test]
    fn it_never_keeps_more_than_its_pages() {
        let mut filler = Filler::new(kernel_file().unwrap());
        (0..PAGES + 3).for_each(|_| filler.step().unwrap());
        assert_eq!(filler.file.metadata().unwrap().len(), 3 * PAGE_BYTES as u64);
    }
}
