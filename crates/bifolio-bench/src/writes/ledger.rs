//! The version that every page of the file must hold, and the check of it.
//!
//! Every trial writes its own version. The ledger records what it wrote; afterwards the file is
//! read back past every cache: pages that were written, and pages that must not have changed.

use std::fs::File;
use std::path::Path;

use rustix::io::pread;

use crate::error::{Error, Result};
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::direct::{self, Page};
use crate::harness::pattern;

/// The versions of all pages.
#[derive(Debug)]
pub(crate) struct Ledger {
    versions: Vec<u32>,
    last_version: u32,
}

impl Ledger {
    /// A new file: everything is version 0.
    pub(crate) fn new(pages: u64) -> Result<Self> {
        let pages = usize::try_from(pages)
            .map_err(|_| Error::Refused("--size is more than this machine can address".into()))?;
        Ok(Self { versions: vec![0; pages], last_version: 0 })
    }

    /// A version that no page has yet.
    pub(crate) fn next_version(&mut self) -> u32 {
        self.last_version += 1;
        self.last_version
    }

    /// Records that the page at `pos_bytes` now holds `version`.
    pub(crate) fn enter(&mut self, pos_bytes: u64, version: u32) {
        self.versions[page_index(pos_bytes)] = version;
    }

    /// Records that all pages up to `end_bytes` now hold `version`.
    pub(crate) fn enter_up_to(&mut self, end_bytes: u64, version: u32) {
        self.versions[..page_index(end_bytes)].fill(version);
    }

    /// Compares `count` pages of `file`, chosen at random, each once. Returns the number of bytes.
    /// The version of the last trial seeds the choice.
    pub(crate) fn verify(&self, file: &Path, series: &str, count: u64) -> Result<u64> {
        let failed = || Error::system(format!("read {} back", file.display()));
        let opened = direct::probe(file).and_then(|()| direct::open(file, false));
        // Where nothing goes past the page cache, through it is what is left.
        let opened = opened.or_else(|_| File::open(file).map_err(failed()))?;
        let size_bytes = (self.versions.len() * PAGE_BYTES) as u64;
        let access = Access::new(Pattern::Uniform, size_bytes, u64::from(self.last_version));
        let mut page = Page::zeroed();
        for draw in 0..count {
            let pos_bytes = access.pos_bytes(draw);
            let read = pread(&opened, &mut page.0, pos_bytes);
            let read = read.map_err(|errno| failed()(errno.into()))?;
            let version = self.versions[page_index(pos_bytes)];
            if read != PAGE_BYTES || !pattern::matches_version(&page.0, pos_bytes, version) {
                return Err(Error::WrongBytes { series: series.to_owned(), pos_bytes });
            }
        }
        Ok(count * PAGE_BYTES as u64)
    }
}

fn page_index(pos_bytes: u64) -> usize {
    // Positions are of a file whose pages were counted with `usize`.
    (pos_bytes / PAGE_BYTES as u64) as usize
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::progress::Silent;

    #[test]
    fn pages_written_too_seldom_or_too_often_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        pattern::make_file(&path, 8 * PAGE_BYTES as u64, &mut Silent).unwrap();
        let mut ledger = Ledger::new(8).unwrap();
        assert_eq!(ledger.verify(&path, "x", 8).unwrap(), 8 * PAGE_BYTES as u64);
        let version = ledger.next_version();
        ledger.enter(8192, version);
        assert!(ledger.verify(&path, "x", 8).is_err());
        let mut page = [0; PAGE_BYTES];
        pattern::fill_version(&mut page, 8192, version);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&page, 8192).unwrap();
        ledger.verify(&path, "x", 8).unwrap();
        ledger.enter_up_to(4096, ledger.last_version);
        assert!(ledger.verify(&path, "x", 8).is_err());
    }
}
