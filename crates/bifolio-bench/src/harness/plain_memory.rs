//! Plain anonymous memory with the page policy of the cache's arena: the upper limit of the speed
//! of a cache.
//!
//! Filled once with the pattern, then only read, by any number of threads. Aligned to 2 MiB and
//! advised to be huge pages, as the arena is.
//!
//! # Safety
//! The mapping is private to this process, lives as long as the value, and is not written after
//! `filled`. Every copy checks its start with one comparison; the mapping continues for at least 2
//! MiB past the end, so no block reaches beyond it.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use super::mapping::{Hint, Mapping};
use crate::error::{Error, Result};

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Read-only memory that holds the pattern.
#[derive(Debug)]
pub(crate) struct PlainMemory {
    start: NonNull<u8>,
    len_bytes: usize,
    _mapping: Mapping,
}

// SAFETY: the memory belongs to this value alone, and no thread is special to a mapping.
unsafe impl Send for PlainMemory {}
// SAFETY: through `&self` the memory is only read, and it is not written after `filled`.
unsafe impl Sync for PlainMemory {}

impl PlainMemory {
    /// Maps `len_bytes` and fills them with `fill`.
    pub(crate) fn filled(len_bytes: u64, fill: impl FnOnce(&mut [u8])) -> Result<Self> {
        let len_bytes = usize::try_from(len_bytes)
            .map_err(|_| Error::Refused("--size is more than this machine can address".into()))?;
        // Up to 2 MiB in front to align it, 2 MiB behind for blocks that begin at its end.
        let mapping_bytes = len_bytes.next_multiple_of(HUGE_PAGE_BYTES) + 2 * HUGE_PAGE_BYTES;
        let mapping = Mapping::anonymous(mapping_bytes as u64)?;
        // Advice only: a kernel without huge pages gives small ones, to the arena as well.
        let _ = mapping.advise(Hint::HugePages);
        let lead_bytes = mapping.start().as_ptr().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: less than 2 MiB into a mapping that is larger by 4 MiB than what is asked for.
        let start = unsafe { mapping.start().add(lead_bytes) };
        // SAFETY: `len_bytes` from `start` are inside the mapping, zeroed by the kernel, and not
        // shared yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len_bytes) };
        fill(bytes);
        Ok(Self { start, len_bytes, _mapping: mapping })
    }

    /// Returns all bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len_bytes` from `start` are inside the mapping, which `&self` keeps alive, and
        // are not written after `filled`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }

    /// Fills `block` from `pos_bytes`.
    #[inline(always)]
    pub(crate) fn copy(&self, block: &mut [u8], pos_bytes: usize) {
        assert!(block.len() <= HUGE_PAGE_BYTES && pos_bytes < self.len_bytes);
        // SAFETY: `pos_bytes` is inside the mapping, by the check.
        let source = unsafe { self.start.as_ptr().add(pos_bytes) };
        // SAFETY: as many bytes as the block has are readable there, by the same check and because
        // the mapping goes on for 2 MiB; the block is exclusive memory of the caller, so the two
        // cannot overlap.
        unsafe { ptr::copy_nonoverlapping(source, block.as_mut_ptr(), block.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::pattern;

    #[test]
    fn holds_the_pattern_from_end_to_end() {
        let len_bytes = (2 << 20) + 4096;
        let memory =
            PlainMemory::filled(len_bytes as u64, |bytes| pattern::fill(bytes, 0)).unwrap();
        assert_eq!(memory.start.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
        let mut block = [0; 4096];
        for pos_bytes in (0..len_bytes).step_by(4096) {
            memory.copy(&mut block, pos_bytes);
            assert!(pattern::matches(&block, pos_bytes as u64));
        }
        assert_eq!(memory.bytes().len(), len_bytes);
        assert!(pattern::matches(memory.bytes(), 0));
    }
}
