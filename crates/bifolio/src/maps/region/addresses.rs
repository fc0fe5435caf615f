//! The addresses of a region: a reservation that is registered with a userfaultfd, and the
//! unmapping of pages whose bytes are not needed.
//!
//! # Safety
//! Passes addresses inside its own reservation to the kernel.
#![allow(unsafe_code)]

use super::regions::Regions;
use crate::maps::kernel::pages::PageRange;
use crate::maps::kernel::userfault::Userfault;
use crate::page::PAGE_BYTES;
use crate::sys::memory::{HUGE_PAGE_BYTES, Reservation};
use std::io;
use std::ops::Range;
use std::sync::Arc;

const UNMAP_TRIES_MAX: u32 = 3;

#[derive(Debug)]
pub(crate) struct Addresses {
    memory: Reservation,
    pages: u64,
    pub(crate) userfault: Arc<Userfault>,
    pub(crate) regions: Arc<Regions>,
}

impl Addresses {
    /// Reserves `pages` pages, none of them resident, and registers them with `userfault`.
    pub(super) fn new(
        pages: u64,
        userfault: &Arc<Userfault>,
        regions: &Arc<Regions>,
    ) -> io::Result<Self> {
        let bytes = pages.checked_mul(PAGE_BYTES).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Reservation::new(bytes, HUGE_PAGE_BYTES)?;
        memory.refuse_huge_pages();
        memory.refuse_merging();
        memory.skip_on_fork()?;
        userfault.register(memory.base, memory.len())?;
        Ok(Self { memory, pages, userfault: Arc::clone(userfault), regions: Arc::clone(regions) })
    }

    #[inline(always)]
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base
    }

    pub(crate) fn len_bytes(&self) -> usize {
        (self.pages * PAGE_BYTES) as usize
    }

    #[inline(always)]
    pub(crate) fn address(&self, index: u64) -> *mut u8 {
        self.base().wrapping_add((index * PAGE_BYTES) as usize)
    }

    /// Returns the address range of pages, for system calls.
    pub(crate) fn range_of(&self, pages: &Range<u64>) -> PageRange {
        let length_bytes = ((pages.end - pages.start) * PAGE_BYTES) as usize;
        assert!(pages.end <= self.pages, "pages {pages:?} of a region of {}", self.pages);
        PageRange { start: self.address(pages.start), length_bytes }
    }

    pub(crate) fn range_at(&self, index: u64) -> PageRange {
        self.range_of(&(index..index + 1))
    }

    /// Unmaps pages and returns the number of TLB flushes requested. Retries a few times: a page
    /// that stays mapped after the table has dropped it would show old bytes and use memory that is
    /// not charged. If the kernel keeps refusing, the cache is poisoned.
    ///
    /// # Safety
    /// `ranges` are pages of this region whose bytes are not needed.
    pub(crate) unsafe fn unmap_unwanted(&self, ranges: &[PageRange]) -> io::Result<u64> {
        let (mut left, mut flushes, mut tries) = (ranges, 0, 0);
        loop {
            // SAFETY: a part of the caller's ranges.
            let unmapped = unsafe { self.regions.unmapper.unmap(left) };
            flushes += unmapped.flushes_asked;
            let Some(error) = unmapped.error else { return Ok(flushes) };
            left = &left[unmapped.ranges_done..];
            tries += 1;
            if tries == UNMAP_TRIES_MAX {
                self.regions.soundness.lose("pages of a map cannot be unmapped", &error);
                return Err(error);
            }
        }
    }
}
