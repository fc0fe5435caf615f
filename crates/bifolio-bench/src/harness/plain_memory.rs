//! Plain anonymous memory with the page policy of the cache's arena: the upper limit of the speed
//! of a cache.
//!
//! Filled once with the pattern, then only read, by any number of threads. Aligned to 2 MiB and
//! advised to be huge pages, as the arena is.
//!
//! # Safety
//! Every copy checks its start with one comparison; the mapping continues for at least 2 MiB past
//! the end, so no block reaches beyond it.

#![allow(unsafe_code)]

use std::ptr;

use memmap2::{Advice, MmapMut};

use crate::error::{Error, Result};

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Read-only memory that holds the pattern.
#[derive(Debug)]
pub(crate) struct PlainMemory {
    mapping: MmapMut,
    /// Bytes in front of the first aligned one.
    lead_bytes: usize,
    len_bytes: usize,
}

impl PlainMemory {
    /// Maps `len_bytes` and fills them with `fill`.
    pub(crate) fn filled(len_bytes: u64, fill: impl FnOnce(&mut [u8])) -> Result<Self> {
        let len_bytes = usize::try_from(len_bytes)
            .map_err(|_| Error::Refused("--size is more than this machine can address".into()))?;
        // Up to 2 MiB in front to align it, 2 MiB behind for blocks that begin at its end.
        let mapping_bytes = len_bytes.next_multiple_of(HUGE_PAGE_BYTES) + 2 * HUGE_PAGE_BYTES;
        let mut mapping =
            MmapMut::map_anon(mapping_bytes).map_err(Error::system("map anonymous memory"))?;
        // Advice only: a kernel without huge pages gives small ones, to the arena as well.
        let _ = mapping.advise(Advice::HugePage);
        let lead_bytes = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        fill(&mut mapping[lead_bytes..][..len_bytes]);
        Ok(Self { mapping, lead_bytes, len_bytes })
    }

    /// Returns all bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.mapping[self.lead_bytes..][..self.len_bytes]
    }

    /// Fills `block` from `pos_bytes`.
    #[inline(always)]
    pub(crate) fn copy(&self, block: &mut [u8], pos_bytes: usize) {
        assert!(block.len() <= HUGE_PAGE_BYTES && pos_bytes < self.len_bytes);
        // SAFETY: less than 2 MiB and `pos_bytes`, which is inside by the check, into a mapping
        // that is larger by 4 MiB than what is asked for.
        let source = unsafe { self.mapping.as_ptr().add(self.lead_bytes + pos_bytes) };
        // SAFETY: as many bytes as the block has are readable there, by the same check and because
        // the mapping goes on for 2 MiB; the block is exclusive memory of the caller, so the two
        // cannot overlap.
        unsafe { ptr::copy_nonoverlapping(source, block.as_mut_ptr(), block.len()) };
    }
}
