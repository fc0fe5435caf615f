//! The files whose ranges are given up: in a cache, with one of its policies, or in the kernel.

use std::fs;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bifolio::{DrainPolicy, Evicted, File};
use rustix::fs::{Advice as KernelAdvice, fadvise};

use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::mapping::Mapping;

/// Drains all CPUs where any folio stays: the kernel.
pub(super) const ON_ANY_FAILURE: &str = "drain_on_any_failure";
/// Drains all CPUs where a clean, unmapped folio is referenced: proposed for the kernel.
pub(super) const WHEN_IT_CAN_HELP: &str = "drain_when_it_can_help";
/// Drains the CPUs whose batches hold a folio of the range: the default.
pub(super) const TARGETED: &str = "targeted";
/// `posix_fadvise`.
pub(super) const KERNEL: &str = "kernel";

/// The series of caches, in the order of the tables.
pub(super) const POLICIES: [(&str, DrainPolicy); 3] = [
    (ON_ANY_FAILURE, DrainPolicy::OnAnyFailure),
    (WHEN_IT_CAN_HELP, DrainPolicy::WhenItCanHelp),
    (TARGETED, DrainPolicy::Targeted),
];

/// A file whose ranges can be given up.
pub(super) trait Advised: Sync {
    /// The result of the advice.
    type Answer;

    fn dont_need(&self, range: Range<u64>) -> Result<Self::Answer>;
    /// Returns the outcome, if the result contains it.
    fn outcome(answer: Self::Answer) -> Option<Evicted>;
    fn write_page(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()>;
    fn sync(&self) -> Result<()>;
    /// Returns the number of pages of the file in memory.
    fn resident_pages(&self) -> Result<u64>;
}

impl Advised for File {
    type Answer = Evicted;

    fn dont_need(&self, range: Range<u64>) -> Result<Evicted> {
        Ok(self.evict(range)?)
    }

    fn outcome(answer: Evicted) -> Option<Evicted> {
        Some(answer)
    }

    fn write_page(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        Ok(self.write_all_at(page, pos_bytes)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.sync_data()?)
    }

    fn resident_pages(&self) -> Result<u64> {
        Ok(self.residency(0..self.len())?.resident)
    }
}

/// A file in the kernel's page cache, mapped so that its resident pages can be queried.
#[derive(Debug)]
pub(super) struct KernelFile {
    pub(super) file: fs::File,
    pub(super) mapping: Arc<Mapping>,
}

impl KernelFile {
    /// Opens `path` for reading and writing, without touching it.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = fs::File::options().read(true).write(true).open(path);
        let file = file.map_err(Error::system(format!("open {}", path.display())))?;
        let mapping = Arc::new(Mapping::of_file(&file, false)?);
        Ok(Self { file, mapping })
    }
}

impl Advised for KernelFile {
    type Answer = ();

    fn dont_need(&self, range: Range<u64>) -> Result<()> {
        let len_bytes = NonZeroU64::new(range.end.saturating_sub(range.start));
        let advised = fadvise(&self.file, range.start, len_bytes, KernelAdvice::DontNeed);
        advised.map_err(Error::system("advise the kernel that a range is not needed"))
    }

    fn outcome((): ()) -> Option<Evicted> {
        None
    }

    fn write_page(&self, page: &[u8; PAGE_BYTES], pos_bytes: u64) -> Result<()> {
        self.file.write_all_at(page, pos_bytes).map_err(Error::system("write a page"))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(Error::system("sync a file"))
    }

    fn resident_pages(&self) -> Result<u64> {
        self.mapping.resident_pages()
    }
}
