//! A file mapped into memory: reads by the kernel without system calls.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use super::one_by_one::PageReader;
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::direct::Page;
use crate::harness::mapping::{Hint, Mapping};
use crate::harness::span::Span;

/// A mapping of a file, advised that the order is random.
#[derive(Debug)]
pub(crate) struct Mapped(Span);

impl Mapped {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
        let mapping = Arc::new(Mapping::of_file(&file, false)?);
        mapping.advise(Hint::Random)?;
        Ok(Self(mapping.span()))
    }
}

impl PageReader for Mapped {
    fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize> {
        let left_bytes = self.0.len_bytes().saturating_sub(pos_bytes);
        if left_bytes < PAGE_BYTES as u64 {
            return Ok(0);
        }
        self.0.copy(&mut page.0, pos_bytes);
        Ok(PAGE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;
    use crate::progress::Silent;

    #[test]
    fn reads_every_page_and_nothing_behind_the_last() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        pattern::make_file(&path, 2 * PAGE_BYTES as u64, &mut Silent).unwrap();
        let mut mapped = Mapped::open(&path).unwrap();
        let mut page = Page::zeroed();
        for pos_bytes in [4096, 0] {
            assert_eq!(mapped.read(&mut page, pos_bytes).unwrap(), PAGE_BYTES);
            assert!(pattern::matches(&page.0, pos_bytes));
        }
        assert_eq!(mapped.read(&mut page, 8192).unwrap(), 0);
    }
}
