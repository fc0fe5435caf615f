//! Memory mapped by the kernel: anonymous, or a file.
//!
//! Unmapped when the last [`Span`] of it is dropped.
//!
//! # Safety
//! A mapping is created at an address that the kernel chooses, and lives until `Drop`. A mapped
//! file was created by the benchmark; it is not truncated while it is mapped, and not written while
//! it is mapped for reading.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::access::PAGE_BYTES;
use super::span::{Mapped, Span};
use crate::error::{Error, Result};

/// Advice to the kernel about a mapping; none of it changes the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hint {
    /// The order of accesses is random: nothing is read ahead.
    Random,
    /// The order of accesses is unknown.
    AnyOrder,
    /// No huge pages.
    SmallPages,
    /// Huge pages.
    HugePages,
}

/// A mapping of this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len_bytes: usize,
    writable: bool,
}

// SAFETY: the mapping belongs to this value alone, and no thread is special to a mapping.
unsafe impl Send for Mapping {}
// SAFETY: `&self` gives the address, and no access to the memory.
unsafe impl Sync for Mapping {}

impl Mapped for Mapping {}

impl Mapping {
    /// Maps private zeros for reading and writing.
    pub(crate) fn anonymous(len_bytes: u64) -> Result<Self> {
        let len_bytes = usize::try_from(len_bytes)
            .map_err(|_| Error::Refused("--size is more than this machine can address".into()))?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len_bytes, protection, flags) };
        let start = start.map_err(Error::system("map anonymous memory"))?;
        Self::at(start.cast(), len_bytes, true)
    }

    /// Maps all of `file`, shared.
    pub(crate) fn of_file(file: &File, writable: bool) -> Result<Self> {
        let failed = || Error::system("map the file");
        let size_bytes = file.metadata().map_err(failed())?.len();
        let len_bytes = usize::try_from(size_bytes)
            .map_err(|_| Error::Refused("the file is more than can be mapped".into()))?;
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (protection, flags) = (ProtFlags::READ | write, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory in use.
        let start = unsafe { mmap(ptr::null_mut(), len_bytes, protection, flags, file, 0) };
        Self::at(start.map_err(|errno| failed()(errno.into()))?.cast(), len_bytes, writable)
    }

    fn at(start: *mut u8, len_bytes: usize, writable: bool) -> Result<Self> {
        let start = NonNull::new(start)
            .ok_or_else(|| Error::Refused("the kernel mapped memory at zero".into()))?;
        Ok(Self { start, len_bytes, writable })
    }

    /// Gives a hint about all of it.
    pub(crate) fn advise(&self, hint: Hint) -> Result<()> {
        let advice = match hint {
            Hint::Random => Advice::Random,
            Hint::AnyOrder => Advice::Normal,
            Hint::SmallPages => Advice::LinuxNoHugepage,
            Hint::HugePages => Advice::LinuxHugepage,
        };
        // SAFETY: the range is the mapping, and none of the hints changes the bytes.
        let advised = unsafe { madvise(self.start.as_ptr().cast(), self.len_bytes, advice) };
        advised.map_err(Error::system(format!("advise {hint:?} about a mapping")))
    }

    /// Lets the kernel read the pages of these bytes, without waiting for them.
    pub(crate) fn will_need(&self, pos_bytes: u64, len_bytes: u64) -> Result<()> {
        let start_bytes = pos_bytes / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        let end_bytes = pos_bytes.saturating_add(len_bytes);
        assert!(end_bytes <= self.len_bytes as u64);
        // SAFETY: inside the mapping, by the check.
        let start = unsafe { self.start.add(start_bytes as usize) };
        let advised_bytes = (end_bytes - start_bytes) as usize;
        // SAFETY: the range is inside the mapping, and the advice does not change the bytes.
        unsafe { madvise(start.as_ptr().cast(), advised_bytes, Advice::WillNeed) }
            .map_err(Error::system("advise that bytes of a mapping will be needed"))
    }

    /// Returns the number of its pages that are in memory, by any process.
    pub(crate) fn resident_pages(&self) -> Result<u64> {
        let mut pages = vec![0_u8; self.len_bytes.div_ceil(PAGE_BYTES)];
        let start = self.start.as_ptr().cast();
        // SAFETY: the range is the mapping, and there is a byte for each of its pages.
        let answer = unsafe { libc::mincore(start, self.len_bytes, pages.as_mut_ptr()) };
        if answer != 0 {
            let failed = Error::system("ask which pages of a mapping are in memory");
            return Err(failed(io::Error::last_os_error()));
        }
        Ok(pages.iter().map(|page| u64::from(page & 1)).sum())
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns its words.
    pub(crate) fn span(self: &Arc<Self>) -> Span {
        let owner = Arc::clone(self) as Arc<dyn Mapped>;
        // SAFETY: the mapping is from `start` on, which is the kernel's and so on a page boundary,
        // as long and as writable as it was asked for, and goes when its owner does. No process
        // writes to a file that is mapped to be read: see the head.
        unsafe { Span::new(self.start, self.len_bytes, self.writable, owner) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped; `&mut self` proves that no span of it exists.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn words_that_are_stored_in_a_file_are_in_it() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE_BYTES as u64).unwrap();
        let words = Arc::new(Mapping::of_file(&file, true).unwrap()).span();
        words.store(4104, 0x1234);
        let reader = Arc::new(Mapping::of_file(&file, false).unwrap());
        reader.advise(Hint::Random).unwrap();
        let reader = reader.span();
        assert_eq!((reader.load(4104), reader.load(4096)), (0x1234, 0));
        let mut block = [1; 16];
        reader.copy(&mut block, 4096);
        assert_eq!(block[8..], 0x1234u64.to_ne_bytes());
    }

    #[test]
    fn ranges_outside_or_read_only_are_refused() {
        let words = Arc::new(Mapping::anonymous(PAGE_BYTES as u64).unwrap()).span();
        assert_eq!((words.load(4088), words.len_bytes()), (0, 4096));
        let refused = |access: &dyn Fn()| catch_unwind(AssertUnwindSafe(access)).is_err();
        for pos_bytes in [4096, 4089, 4, u64::MAX - 7] {
            assert!(refused(&|| assert_eq!(words.load(pos_bytes), 0)), "{pos_bytes}");
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_BYTES as u64).unwrap();
        let reader = Arc::new(Mapping::of_file(&file, false).unwrap()).span();
        assert!(refused(&|| reader.store(0, 1)));
        assert!(refused(&|| reader.copy(&mut [0; 8192], 0)));
        assert!(refused(&|| reader.copy(&mut [0; 16], 4088)));
        reader.copy(&mut [0; 16], 4080);
        assert!(refused(&|| words.copy(&mut [0; 8], 0)));
    }

    #[test]
    fn written_pages_are_resident_and_holes_are_not() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * PAGE_BYTES as u64).unwrap();
        let mapping = Mapping::of_file(&file, false).unwrap();
        assert_eq!(mapping.resident_pages().unwrap(), 0);
        file.write_all_at(&[1; 2 * PAGE_BYTES], 4 * PAGE_BYTES as u64).unwrap();
        assert_eq!(mapping.resident_pages().unwrap(), 2);
    }
}
