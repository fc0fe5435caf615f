//! Mapped memory, accessed as words and bytes: mapped by the kernel, plain, or a map of a cache
//! (`cached`).
//!
//! Loops over several of them are the same instructions for each. Words are loaded and stored
//! atomically, without any order: threads may share a span, and no access can be optimised away.
//!
//! # Safety
//! The creator of a span guarantees its memory (see [`Span::new`]); every access checks that it is
//! inside. A file that the kernel maps was created by the benchmark; it is not truncated while it
//! is mapped, and not written while it is mapped for reading.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};

use super::access::PAGE_BYTES;
use crate::error::{Error, Result};

const WORD_BYTES: usize = size_of::<u64>();
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Mapped memory, kept by this value.
#[derive(Clone)]
pub(crate) struct Span {
    start: NonNull<u8>,
    len_bytes: usize,
    writable: bool,
    _owner: Arc<dyn Send + Sync>,
}

// SAFETY: the memory is mapped for all threads, its owner may be sent, and words are atomic.
unsafe impl Send for Span {}
// SAFETY: words are accessed atomically, and bytes that are copied are not written, as `new`
// requires.
unsafe impl Sync for Span {}

impl Span {
    /// Creates a span of the memory of `owner`.
    ///
    /// # Safety
    /// While `owner` lives, `len_bytes` from `start`, which is on a page boundary, are mapped, and
    /// writable if `writable` is set. If it is not set, they are never written.
    pub(super) unsafe fn new(
        start: NonNull<u8>,
        len_bytes: usize,
        writable: bool,
        owner: Arc<dyn Send + Sync>,
    ) -> Self {
        Self { start, len_bytes, writable, _owner: owner }
    }

    /// Creates plain memory that is filled by `fill` and then only read: the upper limit of the
    /// speed of a cache, with the page policy of its arena.
    pub(crate) fn plain(len_bytes: u64, fill: impl FnOnce(&mut [u8])) -> Result<Self> {
        let mut memory = HugeMemory::new(len_bytes as usize)?;
        fill(memory.bytes_mut());
        let start = NonNull::from(memory.bytes_mut()).cast();
        // SAFETY: the bytes of the memory, which begins a huge page, and has no user but this span.
        Ok(unsafe { Self::new(start, len_bytes as usize, false, Arc::new(memory)) })
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes as u64
    }

    #[inline(always)]
    pub(crate) fn load(&self, pos_bytes: u64) -> u64 {
        // Relaxed: a number, and nothing that depends on it.
        self.word(pos_bytes).load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn store(&self, pos_bytes: u64, word: u64) {
        assert!(self.writable, "mapped to be read");
        // Relaxed: publishes nothing.
        self.word(pos_bytes).store(word, Ordering::Relaxed);
    }

    #[inline(always)]
    fn word(&self, pos_bytes: u64) -> &AtomicU64 {
        assert!(pos_bytes.is_multiple_of(WORD_BYTES as u64));
        let address = self.address(pos_bytes, WORD_BYTES).cast::<AtomicU64>();
        // SAFETY: inside the mapping and on a boundary of words, by the two checks; `&self` keeps
        // the owner, and with it the mapping, and all accesses are atomic.
        unsafe { address.as_ref() }
    }

    /// Fills `block` from memory that is mapped for reading.
    #[inline(always)]
    pub(crate) fn copy(&self, block: &mut [u8], pos_bytes: u64) {
        assert!(!self.writable, "another thread may write to it");
        let source = self.address(pos_bytes, block.len()).as_ptr();
        // SAFETY: as many bytes as the block has are readable there, by the check; they are not
        // written, as `new` requires; the block is exclusive memory of the caller, so the two
        // cannot overlap.
        unsafe { ptr::copy_nonoverlapping(source, block.as_mut_ptr(), block.len()) };
    }

    /// Returns the bytes from `pos_bytes` on; of memory that is mapped to be read.
    #[inline]
    pub(crate) fn bytes(&self, pos_bytes: u64, len_bytes: usize) -> &[u8] {
        assert!(!self.writable, "its bytes may change");
        let start = self.address(pos_bytes, len_bytes);
        // SAFETY: the bytes are inside the mapping, by the check, and `&self` keeps it; no thread
        // writes to them, as the caller of `new` has promised.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len_bytes) }
    }

    /// Returns the address of `pos_bytes`, after a check that `bytes` from there are inside.
    #[inline(always)]
    fn address(&self, pos_bytes: u64, bytes: usize) -> NonNull<u8> {
        assert!(pos_bytes <= (self.len_bytes as u64).saturating_sub(bytes as u64));
        assert!(bytes <= self.len_bytes);
        // SAFETY: inside the mapping, by the checks.
        unsafe { self.start.add(pos_bytes as usize) }
    }
}

/// Zeros that begin at a huge page, and are advised to be huge pages.
pub(super) struct HugeMemory {
    mapping: MmapMut,
    /// Bytes in front of the first aligned one.
    lead_bytes: usize,
    len_bytes: usize,
}

impl HugeMemory {
    pub(super) fn new(len_bytes: usize) -> Result<Self> {
        let mapping_bytes = len_bytes.next_multiple_of(HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
        let mapping =
            MmapMut::map_anon(mapping_bytes).map_err(Error::system("map anonymous memory"))?;
        // Advice only: a kernel without huge pages gives small ones, to the arena as well.
        let _ = mapping.advise(Advice::HugePage);
        let lead_bytes = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        Ok(Self { mapping, lead_bytes, len_bytes })
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.mapping[self.lead_bytes..][..self.len_bytes]
    }
}

/// A mapping by the kernel.
#[derive(Clone)]
pub(crate) struct Mapping {
    memory: Arc<MmapRaw>,
    pub(crate) span: Span,
}

impl Mapping {
    /// Maps private zeros for reading and writing.
    pub(crate) fn anonymous(len_bytes: u64) -> Result<Self> {
        let memory = MmapMut::map_anon(len_bytes as usize);
        Ok(Self::of(memory.map_err(Error::system("map anonymous memory"))?.into(), true))
    }

    /// Maps all of `file`, shared.
    pub(crate) fn of_file(file: &File, writable: bool) -> Result<Self> {
        let options = MmapOptions::new();
        let memory = if writable { options.map_raw(file) } else { options.map_raw_read_only(file) };
        Ok(Self::of(memory.map_err(Error::system("map the file"))?, writable))
    }

    fn of(memory: MmapRaw, writable: bool) -> Self {
        let memory = Arc::new(memory);
        let start = NonNull::new(memory.as_mut_ptr()).expect("a mapping is not at zero");
        // SAFETY: the mapping is from `start` on, which is the kernel's and so on a page boundary,
        // as long and as writable as it was asked for, and goes when its owner does. No process
        // writes to a file that is mapped to be read: see the head.
        let span = unsafe { Span::new(start, memory.len(), writable, Arc::clone(&memory) as _) };
        Self { memory, span }
    }

    pub(crate) fn advise(&self, hint: Advice) -> Result<()> {
        let advised = self.memory.advise(hint);
        advised.map_err(Error::system(format!("advise {hint:?} about a mapping")))
    }

    /// Lets the kernel read the pages of these bytes, without waiting for them.
    pub(crate) fn will_need(&self, pos_bytes: u64, len_bytes: usize) -> Result<()> {
        self.memory
            .advise_range(Advice::WillNeed, pos_bytes as usize, len_bytes)
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
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn ranges_outside_or_read_only_are_refused() {
        let words = Mapping::anonymous(PAGE_BYTES as u64).unwrap().span;
        assert_eq!((words.load(4088), words.len_bytes()), (0, 4096));
        let refused = |access: &dyn Fn()| catch_unwind(AssertUnwindSafe(access)).is_err();
        for pos_bytes in [4096, 4089, 4, u64::MAX - 7] {
            assert!(refused(&|| assert_eq!(words.load(pos_bytes), 0)), "{pos_bytes}");
        }
        let reader = Span::plain(PAGE_BYTES as u64, |bytes| bytes.fill(7)).unwrap();
        assert!(refused(&|| reader.store(0, 1)));
        assert!(refused(&|| reader.copy(&mut [0; 8192], 0)));
        assert!(refused(&|| reader.copy(&mut [0; 16], 4088)));
        assert!(refused(&|| assert_eq!(reader.bytes(4088, 16).len(), 16)));
        assert_eq!(reader.bytes(4080, 16), [7; 16]);
        assert!(refused(&|| words.copy(&mut [0; 8], 0)));
    }
}
