//! Memory mapped by the kernel: anonymous, or a file.
//!
//! Unmapped when the last [`Span`] of it is dropped.
//!
//! # Safety
//! A mapped file was created by the benchmark; it is not truncated while it is mapped, and not
//! written while it is mapped for reading.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};

use super::access::PAGE_BYTES;
use super::span::Span;
use crate::error::{Error, Result};

/// A mapping of this process.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    memory: Arc<MmapRaw>,
    writable: bool,
}

impl Mapping {
    /// Maps private zeros for reading and writing.
    pub(crate) fn anonymous(len_bytes: u64) -> Result<Self> {
        let len_bytes = usize::try_from(len_bytes)
            .map_err(|_| Error::Refused("--size is more than this machine can address".into()))?;
        let memory = MmapMut::map_anon(len_bytes).map_err(Error::system("map anonymous memory"))?;
        Ok(Self { memory: Arc::new(memory.into()), writable: true })
    }

    /// Maps all of `file`, shared.
    pub(crate) fn of_file(file: &File, writable: bool) -> Result<Self> {
        let options = MmapOptions::new();
        let memory = if writable { options.map_raw(file) } else { options.map_raw_read_only(file) };
        Ok(Self { memory: Arc::new(memory.map_err(Error::system("map the file"))?), writable })
    }

    /// Gives a hint about all of it.
    pub(crate) fn advise(&self, hint: Advice) -> Result<()> {
        let advised = self.memory.advise(hint);
        advised.map_err(Error::system(format!("advise {hint:?} about a mapping")))
    }

    /// Lets the kernel read the pages of these bytes, without waiting for them.
    pub(crate) fn will_need(&self, pos_bytes: u64, len_bytes: u64) -> Result<()> {
        let range = (pos_bytes as usize, len_bytes as usize);
        self.memory
            .advise_range(Advice::WillNeed, range.0, range.1)
            .map_err(Error::system("advise that bytes of a mapping will be needed"))
    }

    /// Returns the number of its pages that are in memory, by any process.
    pub(crate) fn resident_pages(&self) -> Result<u64> {
        let mut pages = vec![0_u8; self.memory.len().div_ceil(PAGE_BYTES)];
        let start = self.memory.as_mut_ptr().cast();
        // SAFETY: the range is the mapping, and there is a byte for each of its pages.
        let answer = unsafe { libc::mincore(start, self.memory.len(), pages.as_mut_ptr()) };
        if answer != 0 {
            let failed = Error::system("ask which pages of a mapping are in memory");
            return Err(failed(io::Error::last_os_error()));
        }
        Ok(pages.iter().map(|page| u64::from(page & 1)).sum())
    }

    /// Returns its words.
    pub(crate) fn span(&self) -> Span {
        let owner = Arc::clone(&self.memory);
        let start = NonNull::new(self.memory.as_mut_ptr()).expect("a mapping is not at zero");
        // SAFETY: the mapping is from `start` on, which is the kernel's and so on a page boundary,
        // as long and as writable as it was asked for, and goes when its owner does. No process
        // writes to a file that is mapped to be read: see the head.
        unsafe { Span::new(start, self.memory.len(), self.writable, owner) }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn ranges_outside_or_read_only_are_refused() {
        let words = Mapping::anonymous(PAGE_BYTES as u64).unwrap().span();
        assert_eq!((words.load(4088), words.len_bytes()), (0, 4096));
        let refused = |access: &dyn Fn()| catch_unwind(AssertUnwindSafe(access)).is_err();
        for pos_bytes in [4096, 4089, 4, u64::MAX - 7] {
            assert!(refused(&|| assert_eq!(words.load(pos_bytes), 0)), "{pos_bytes}");
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_BYTES as u64).unwrap();
        let reader = Mapping::of_file(&file, false).unwrap().span();
        assert!(refused(&|| reader.store(0, 1)));
        assert!(refused(&|| reader.copy(&mut [0; 8192], 0)));
        assert!(refused(&|| reader.copy(&mut [0; 16], 4088)));
        reader.copy(&mut [0; 16], 4080);
        assert!(refused(&|| words.copy(&mut [0; 8], 0)));
    }
}
