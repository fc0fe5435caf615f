//! The files of `advise`: one whose ranges are given up, and one that fills the batch of the other
//! CPU; of a cache, or of the kernel.

use std::fs;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bifolio::Evicted;
use rustix::fs::{Advice, FallocateFlags, MemfdFlags, fadvise, fallocate, memfd_create};

use super::PAGE;
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::mapping::Mapping;
use crate::harness::pattern;

/// A file whose ranges are given up: in a cache, or in the kernel's page cache, mapped so that its
/// resident pages can be queried.
#[derive(Debug)]
pub(super) enum Advised {
    Cache(bifolio::File),
    Kernel { file: fs::File, mapping: Mapping },
}

impl Advised {
    /// Opens `path` in the kernel for reading and writing, without touching it.
    pub(super) fn in_kernel(path: &Path) -> Result<Self> {
        let file = fs::File::options().read(true).write(true).open(path);
        let file = file.map_err(Error::system(format!("open {}", path.display())))?;
        let mapping = Mapping::of_file(&file, false)?;
        Ok(Self::Kernel { file, mapping })
    }

    pub(super) fn dont_need(&self, range: Range<u64>) -> Result<Option<Evicted>> {
        match self {
            Self::Cache(file) => Ok(Some(file.evict(range)?)),
            Self::Kernel { file, .. } => {
                let len_bytes = NonZeroU64::new(range.end.saturating_sub(range.start));
                let advised = fadvise(file, range.start, len_bytes, Advice::DontNeed);
                advised.map_err(Error::system("advise the kernel that a range is not needed"))?;
                Ok(None)
            }
        }
    }

    /// Writes a version of a range page by page: for larger writes the kernel would create large
    /// folios, which never wait in a batch.
    pub(super) fn write(&self, range: Range<u64>, version: u32) -> Result<()> {
        let mut page = [0; PAGE_BYTES];
        for pos_bytes in range.step_by(PAGE_BYTES) {
            pattern::fill_version(&mut page, pos_bytes, version);
            match self {
                Self::Cache(file) => file.write_all_at(&page, pos_bytes)?,
                Self::Kernel { file, .. } => {
                    file.write_all_at(&page, pos_bytes).map_err(Error::system("write a page"))?
                }
            }
        }
        Ok(())
    }

    pub(super) fn sync(&self) -> Result<()> {
        match self {
            Self::Cache(file) => Ok(file.sync_data()?),
            Self::Kernel { file, .. } => file.sync_data().map_err(Error::system("sync a file")),
        }
    }

    /// Returns the number of pages of the file in memory.
    pub(super) fn resident_pages(&self) -> Result<u64> {
        match self {
            Self::Cache(file) => Ok(file.residency(0..file.len())?.resident),
            Self::Kernel { mapping, .. } => mapping.resident_pages(),
        }
    }
}

/// The load of the other CPU: it keeps its LRU batch filled. It allocates new pages of a memory
/// file one after the other, each of which is added to the batch, without disk I/O. The pages are
/// punched again, a few at a time. For a cache it is a file of the same cache, for the kernel a
/// file in memory as well.
#[derive(Debug)]
pub(super) struct Filler {
    pub(super) file: InMemory,
    page: u64,
}

#[derive(Debug)]
pub(super) enum InMemory {
    Cache(bifolio::File),
    Kernel(fs::File),
}

impl Filler {
    /// Maximum number of pages, and the number that is punched together: the fewer, the sooner a
    /// new page is in the batch.
    pub(super) const RING_PAGES: u64 = 256;
    pub(super) const RUN_PAGES: u64 = 16;

    pub(super) fn in_cache(file: bifolio::File) -> Result<Self> {
        file.set_len(Self::RING_PAGES * PAGE)?;
        Ok(Self { file: InMemory::Cache(file), page: 0 })
    }

    pub(super) fn in_kernel() -> Result<Self> {
        let failed = || Error::system("make a file in memory");
        let created = memfd_create("bifolio-bench", MemfdFlags::CLOEXEC);
        let file = fs::File::from(created.map_err(|errno| failed()(errno.into()))?);
        file.set_len(Self::RING_PAGES * PAGE).map_err(failed())?;
        Ok(Self { file: InMemory::Kernel(file), page: 0 })
    }

    /// Allocates a page in a hole.
    pub(super) fn step(&mut self) -> Result<()> {
        let pos_bytes = self.page * PAGE;
        let run = (self.page.is_multiple_of(Self::RUN_PAGES))
            .then(|| pos_bytes..pos_bytes + Self::RUN_PAGES * PAGE);
        match &self.file {
            InMemory::Cache(file) => {
                run.map_or(Ok(()), |run| file.punch_hole(run))?;
                file.write_all_at(&[1; PAGE_BYTES], pos_bytes)?;
            }
            InMemory::Kernel(file) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let punch =
                    |run: Range<u64>| fallocate(file, flags, run.start, run.end - run.start);
                run.map_or(Ok(()), punch).map_err(Error::system("punch a hole into memory"))?;
                let written = file.write_all_at(&[1; PAGE_BYTES], pos_bytes);
                written.map_err(Error::system("write a file in memory"))?;
            }
        }
        self.page = (self.page + 1) % Self::RING_PAGES;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn each_page_is_new_and_there_are_never_more_than_the_ring() {
        let mut filler = Filler::in_kernel().unwrap();
        let blocks = |filler: &Filler| match &filler.file {
            InMemory::Kernel(file) => file.metadata().unwrap().blocks() / 8,
            InMemory::Cache(_) => unreachable!("it is in the kernel"),
        };
        (0..Filler::RING_PAGES).for_each(|_| filler.step().unwrap());
        assert_eq!(blocks(&filler), Filler::RING_PAGES);
        for page in 0..Filler::RUN_PAGES {
            filler.step().unwrap();
            assert_eq!(blocks(&filler), Filler::RING_PAGES - Filler::RUN_PAGES + page + 1);
        }
    }
}
