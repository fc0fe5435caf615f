//! Finds pages that were stored to (`PAGEMAP_SCAN`), in memory whose stores `userfault` tracks.
//!
//! Used by file maps. A page counts as *written* if it is present, in memory or swapped out, and a
//! store hit it since it was installed with protection or last protected here.
//!
//! A poisoned page looks like one that was swapped out and written; its poisoner keeps track of it.
//!
//! # Safety
//! Queries address ranges; reads no memory and changes no byte.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{Opcode, opcode};

use super::pages::PageRange;
use super::userfault::control;
use crate::sys::file::above_standard;
use crate::sys::retries::Retries;

const IS_WRITTEN: u64 = 1 << 1;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;

/// Protect the reported pages in the same step.
const PROTECT_MATCHING: u64 = 1 << 0;
/// Fail where a store to a protected page would wait for a handler.
const CHECK_ASYNC: u64 = 1 << 1;

/// Maximum number of ranges that one call can report.
const RANGES_MAX: usize = 64;

#[repr(C)]
struct ScanCall {
    size_bytes: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    ranges: u64,
    ranges_max: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    reported: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanRange {
    start: u64,
    end: u64,
    categories: u64,
}

const DO_SCAN: Opcode = opcode::read_write::<ScanCall>(b'f', 16);

/// The page table of this process, as the kernel exposes it.
///
/// It is the table of the process that opened it: a forked child must not use its parent's.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
}

impl Pagemap {
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self { file: above_standard(|| File::open("/proc/self/pagemap"))? })
    }

    /// Returns the runs of written pages in the range, in order. They stay written. Adjacent pages
    /// may be reported in several runs.
    pub(crate) fn written(
        &self,
        range: &PageRange,
        visit: impl FnMut(PageRange),
    ) -> io::Result<()> {
        self.scan(range, 0, IS_WRITTEN, visit)
    }

    /// Returns `true` if all pages of the range are present, in memory or swapped out.
    pub(crate) fn has_all(&self, range: &PageRange) -> io::Result<bool> {
        let mut found_bytes = 0;
        self.scan(range, 0, 0, |found| found_bytes += found.length_bytes)?;
        Ok(found_bytes == range.length_bytes)
    }

    /// Protects the written pages of the range: none counts as written until the next store.
    /// Flushes the TLB once per 2 MiB that contain any.
    ///
    /// Fails with EPERM where stores to protected pages are not asynchronous.
    pub(crate) fn protect(&self, range: &PageRange) -> io::Result<()> {
        self.scan(range, PROTECT_MATCHING | CHECK_ASYNC, IS_WRITTEN, |_| {})
    }

    fn scan(
        &self,
        range: &PageRange,
        flags: u64,
        all_of: u64,
        mut visit: impl FnMut(PageRange),
    ) -> io::Result<()> {
        #[cfg(feature = "refusals")]
        {
            use super::refusals::{Refusable, check};
            check(if flags == 0 { Refusable::Scan } else { Refusable::Protect })?;
        }
        let start = range.start;
        let mut ranges = [ScanRange::default(); RANGES_MAX];
        let end = start.addr() + range.length_bytes;
        let mut position = start.addr();
        let mut retries = Retries::FEW;
        while position < end {
            let mut call = ScanCall {
                size_bytes: size_of::<ScanCall>() as u64,
                flags,
                start: position as u64,
                end: end as u64,
                walk_end: 0,
                // Without output ranges the kernel would mark missing pages as well.
                ranges: ranges.as_mut_ptr().addr() as u64,
                ranges_max: RANGES_MAX as u64,
                pages_max: 0,
                inverted: 0,
                all_of,
                any_of: IS_PRESENT | IS_SWAPPED,
                reported: IS_WRITTEN,
            };
            // SAFETY: the argument structure of this call; its only address is that of `ranges`,
            // which is exclusively ours and has the stated length.
            let found = match unsafe { control(self.file.as_fd(), DO_SCAN, &mut call) } {
                Err(error) if retries.after(&error) => continue,
                other => other?,
            };
            for range in &ranges[..found] {
                let start = start.with_addr(range.start as usize);
                visit(PageRange { start, length_bytes: (range.end - range.start) as usize });
            }
            if call.walk_end as usize <= position {
                return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
            }
            position = call.walk_end as usize;
            retries = Retries::FEW;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::kernel::userfault::tests::Scratch;
    use crate::sys::memory::PAGE_BYTES;
    use crate::sys::probe::Feature;
    use bifolio_testing::skip;

    struct World {
        scratch: Scratch,
        pagemap: Pagemap,
    }

    impl World {
        fn new(pages: usize) -> Option<Self> {
            let scratch = Scratch::new(pages, &[Feature::WriteProtectAsync])?;
            Some(Self { scratch, pagemap: Pagemap::open().unwrap() })
        }

        fn install(&self, page: usize, protect: bool) {
            self.scratch.install(page, &[1], protect).1.unwrap();
        }

        fn store(&self, page: usize) {
            self.scratch.store(page * PAGE_BYTES, 2);
        }

        fn load(&self, page: usize) -> u8 {
            self.scratch.load(page * PAGE_BYTES)
        }

        /// Returns the written pages as runs of first page and count.
        fn written(&self) -> Vec<(usize, usize)> {
            let mut runs = Vec::new();
            let memory = &self.scratch.memory;
            let visit = |found: PageRange| {
                let first = (found.start.addr() - memory.base.addr()) / PAGE_BYTES;
                runs.push((first, found.length_bytes / PAGE_BYTES));
            };
            self.pagemap.written(&self.scratch.range(0, memory.len() / PAGE_BYTES), visit).unwrap();
            runs
        }

        fn protect(&self, page: usize, pages: usize) {
            self.pagemap.protect(&self.scratch.range(page, pages)).unwrap();
        }
    }

    #[test]
    fn pages_never_stored_to_are_not_written() {
        let Some(world) = World::new(6) else { return };
        assert_eq!(world.written(), []);
        world.install(1, true);
        world.install(3, true);
        assert_eq!(world.load(1), 1);
        assert_eq!(world.written(), []);
        world.protect(0, 6);
        // A missing page stays missing: the protection leaves no marker.
        world.install(0, false);
        world.install(2, true);
        assert_eq!(world.written(), [(0, 1)]);
    }

    #[test]
    fn a_store_is_reported_until_it_is_protected_again() {
        let Some(world) = World::new(8) else { return };
        for page in [1, 2, 3, 5] {
            world.install(page, true);
        }
        for _ in 0..3 {
            for page in [2, 3, 5] {
                world.store(page);
                world.store(page);
            }
            assert_eq!(world.written(), [(2, 2), (5, 1)]);
            assert_eq!(world.written(), [(2, 2), (5, 1)], "a scan changes nothing");
            world.protect(3, 1);
            assert_eq!(world.written(), [(2, 1), (5, 1)], "other pages stay written");
            world.protect(0, 8);
            assert_eq!(world.written(), []);
            assert_eq!([1, 2, 3, 5].map(|page| world.load(page)), [1, 2, 2, 2]);
        }
        world.store(2);
        world.scratch.memory.release(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(world.written(), [], "an unmapped page is gone");
        world.install(2, true);
        assert_eq!(world.written(), []);
    }

    #[test]
    fn more_runs_than_one_call_reports_are_all_found_and_protected() {
        let pages = 4 * RANGES_MAX;
        let Some(world) = World::new(pages) else { return };
        let stored = |page: usize| page % 3 == 1;
        (0..pages).for_each(|page| world.install(page, true));
        (0..pages).filter(|page| stored(*page)).for_each(|page| world.store(page));
        let expected: Vec<_> = (0..pages).filter(|page| stored(*page)).map(|it| (it, 1)).collect();
        assert!(expected.len() > RANGES_MAX);
        assert_eq!(world.written(), expected);
        world.protect(0, pages);
        assert_eq!(world.written(), []);
    }

    #[test]
    fn a_run_that_ends_with_the_range_is_cut_there() {
        let Some(world) = World::new(4) else { return };
        (0..4).for_each(|page| world.install(page, false));
        let mut found = Vec::new();
        let visit = |run: PageRange| found.push((run.start.addr(), run.length_bytes));
        world.pagemap.written(&world.scratch.range(1, 2), visit).unwrap();
        assert_eq!(found, [(world.scratch.at(1).addr(), 2 * PAGE_BYTES)]);
        world.protect(1, 2);
        assert_eq!(world.written(), [(0, 1), (3, 1)]);
    }

    #[test]
    fn a_page_that_was_swapped_out_is_still_written() {
        let Some(world) = World::new(8) else { return };
        (0..8).for_each(|page| world.install(page, true));
        (0..4).for_each(|page| world.store(page));
        // SAFETY: a region of this test; the kernel may only swap out its pages.
        let answer = unsafe {
            libc::madvise(
                world.scratch.at(0).cast(),
                world.scratch.memory.len(),
                libc::MADV_PAGEOUT,
            )
        };
        assert_eq!(answer, 0);
        let mut is_resident = [1_u8; 8];
        // SAFETY: a region of this test, and a byte for each page.
        let answer = unsafe {
            libc::mincore(
                world.scratch.at(0).cast(),
                world.scratch.memory.len(),
                is_resident.as_mut_ptr(),
            )
        };
        assert_eq!(answer, 0);
        assert_eq!(world.written(), [(0, 4)], "resident: {is_resident:?}");
        world.protect(0, 8);
        assert_eq!(world.written(), []);
        world.store(5);
        assert_eq!(world.written(), [(5, 1)]);
        assert_eq!([0, 5, 6].map(|page| world.load(page)), [2, 2, 1]);
        if is_resident == [1; 8] {
            skip("swap", "the kernel swapped no page out");
        }
    }

    #[test]
    fn a_poisoned_page_looks_written() {
        let Some(world) = World::new(2) else { return };
        world.scratch.faults.poison(&world.scratch.range(1, 1)).unwrap();
        assert_eq!(world.written(), [(1, 1)]);
    }
}
