//! A file mapped into memory: what the kernel offers for reading without system calls.
//!
//! # Safety
//! The mapping covers the whole pages of the file, is only read, and lives until `Drop`. The
//! benchmark made the file and nobody changes or cuts it meanwhile. Every copy checks that it is
//! inside.

#![allow(unsafe_code)]

use std::fs::File;
use std::path::Path;
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::one_by_one::PageReader;
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::direct::Page;

/// A mapping of a file, advised that the order is random.
#[derive(Debug)]
pub(crate) struct Mapped {
    start: NonNull<u8>,
    len_bytes: usize,
}

impl Mapped {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = || Error::system(format!("map {}", path.display()));
        let file = File::open(path).map_err(failed())?;
        let size_bytes = file.metadata().map_err(failed())?.len();
        let len_bytes = usize::try_from(size_bytes)
            .map_err(|_| Error::Refused("the file is more than can be mapped".into()))?;
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { mmap(ptr::null_mut(), len_bytes, ProtFlags::READ, flags, &file, 0) };
        let start = NonNull::new(start.map_err(|errno| failed()(errno.into()))?.cast())
            .ok_or_else(|| Error::Refused("the kernel mapped the file at zero".into()))?;
        let mapped = Self { start, len_bytes };
        // SAFETY: the range is the mapping, and the advice changes no content.
        let advised = unsafe { madvise(start.as_ptr().cast(), len_bytes, Advice::Random) };
        advised.map_err(|errno| failed()(errno.into()))?;
        Ok(mapped)
    }
}

impl PageReader for Mapped {
    fn read(&mut self, page: &mut Page, pos_bytes: u64) -> Result<usize> {
        let pos_bytes = usize::try_from(pos_bytes).unwrap_or(usize::MAX);
        let left_bytes = self.len_bytes.saturating_sub(pos_bytes);
        if left_bytes < PAGE_BYTES {
            return Ok(0);
        }
        // SAFETY: inside the mapping, by the check.
        let source = unsafe { self.start.as_ptr().add(pos_bytes) };
        // SAFETY: a page is readable there, by the same check; `page` is exclusive memory of the
        // caller, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(source, page.0.as_mut_ptr(), PAGE_BYTES) };
        Ok(PAGE_BYTES)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: exactly what `open` mapped, and `&mut self` proves that no reader is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok());
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
