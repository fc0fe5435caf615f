//! Pages of memory, in ranges: which are resident, which were stored to ([`Pagemap`]), and freeing
//! many of them at once ([`Unmapper`]).
//!
//! A page counts as *written* if it is present, in memory or swapped out, and a store hit it since
//! it was installed with protection or last protected here; `userfault` tracks the stores. A
//! poisoned page looks like one that was swapped out and written; its poisoner keeps track of it.
//!
//! # Safety
//! Frees pages whose bytes, as the caller guarantees, are not needed.
#![allow(unsafe_code)]

use super::control;
use crate::sys::file::above_standard;
use crate::sys::memory::{PAGE_BYTES, free_pages};
use crate::sys::probe::{Feature, Features};
use crate::sys::{Retries, answer_of, persist};
use rustix::ioctl::{Opcode, opcode};
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;

/// Ranges per call; the kernel accepts at most 1024.
const RANGES_MAX: usize = 512;

/// Names the calling process in place of a pidfd. It refers to the calling thread, because the
/// first thread may have ended.
const PIDFD_SELF: libc::c_int = -10_000;

/// Pages that [`resident_from`] checks with one call.
const LOOKED_AT_MAX: usize = 256;

/// Whole pages of memory, laid out as an `iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageRange {
    pub(crate) start: *mut u8,
    pub(crate) length_bytes: usize,
}

// SAFETY: an address and a length; its creator is responsible for the memory.
unsafe impl Send for PageRange {}
// SAFETY: as above.
unsafe impl Sync for PageRange {}

const _: () = assert!(size_of::<PageRange>() == size_of::<libc::iovec>());
const _: () = assert!(offset_of!(PageRange, start) == offset_of!(libc::iovec, iov_base));
const _: () = assert!(offset_of!(PageRange, length_bytes) == offset_of!(libc::iovec, iov_len));

#[derive(Debug)]
#[must_use]
pub(crate) struct Unmapped {
    /// Ranges that were freed, counted from the first. The next one may be freed in part.
    pub(crate) ranges_done: usize,
    pub(crate) flushes_asked: u64,
    pub(crate) error: Option<io::Error>,
}

#[derive(Clone, Debug)]
pub(crate) struct Unmapper {
    features: Features,
}

impl Unmapper {
    pub(crate) fn new(features: &Features) -> Self {
        Self { features: features.clone() }
    }

    /// Frees the pages of `ranges`, in order: the next access finds them missing.
    ///
    /// # Safety
    /// The ranges must be whole pages of private memory of this crate whose bytes are not needed.
    pub(crate) unsafe fn unmap(&self, ranges: &[PageRange]) -> Unmapped {
        let mut unmapped = Unmapped { ranges_done: 0, flushes_asked: 0, error: None };
        while unmapped.ranges_done < ranges.len() {
            let rest = &ranges[unmapped.ranges_done..];
            // SAFETY: a part of the caller's ranges.
            match unsafe { self.unmap_some(rest) } {
                Ok(ranges_done) => {
                    unmapped.flushes_asked += 1;
                    unmapped.ranges_done += ranges_done;
                }
                Err(error) => {
                    unmapped.error = Some(error);
                    break;
                }
            }
        }
        unmapped
    }

    /// Makes one call. Returns how many ranges it finished, at least one.
    ///
    /// # Safety
    /// As for `unmap`; there is at least one range.
    unsafe fn unmap_some(&self, ranges: &[PageRange]) -> io::Result<usize> {
        #[cfg(feature = "refusals")]
        super::refusals::check(super::refusals::Refusable::Unmap)?;
        let mut refusal = None;
        if self.features.has(Feature::VectoredUnmap) {
            let part = &ranges[..ranges.len().min(RANGES_MAX)];
            // SAFETY: a part of the caller's ranges.
            match persist(|| unsafe { advise_vector(part) }) {
                Err(error) => refusal = Some(error),
                Ok(done_bytes) => match whole_ranges(part, done_bytes) {
                    // Longer than what one call accepts (2 GiB).
                    0 => {}
                    ranges_done => return Ok(ranges_done),
                },
            }
        }
        // SAFETY: the first of the caller's ranges.
        unsafe { free_pages(ranges[0].start, ranges[0].length_bytes) }?;
        if let Some(error) = refusal {
            // The plain call succeeded where the vectored one failed: a filter forbids the latter.
            self.features.withdraw(Feature::VectoredUnmap, "process_madvise", &error);
        }
        Ok(1)
    }
}

/// Returns how many of `ranges` the first `done_bytes` bytes cover in full.
fn whole_ranges(ranges: &[PageRange], done_bytes: usize) -> usize {
    let mut left_bytes = done_bytes;
    let is_done = |range: &&PageRange| match left_bytes.checked_sub(range.length_bytes) {
        Some(left) => {
            left_bytes = left;
            true
        }
        None => false,
    };
    ranges.iter().take_while(is_done).count()
}

/// Frees the pages of `ranges` with one call. Returns how many bytes it processed.
///
/// # Safety
/// As for [`Unmapper::unmap`].
pub(super) unsafe fn advise_vector(ranges: &[PageRange]) -> io::Result<usize> {
    // SAFETY: a `PageRange` is laid out as an `iovec`; the caller guarantees that the ranges may be
    // freed.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            PIDFD_SELF,
            ranges.as_ptr(),
            ranges.len(),
            // Frees pages that the program has locked, too.
            libc::MADV_DONTNEED_LOCKED,
            0,
        )
    };
    answer_of(answer)
}

/// Returns `true` if the page at `address`, which is mapped anonymously, is resident.
pub(crate) fn is_resident(address: *const u8) -> bool {
    resident_from(address.map_addr(|address| address / PAGE_BYTES * PAGE_BYTES), 1) == 1
}

/// Returns how many pages from `start`, a page address, are resident, up to the first that is not,
/// of `pages`. Only the first [`LOOKED_AT_MAX`] are checked.
pub(crate) fn resident_from(start: *const u8, pages: usize) -> usize {
    let mut answers = [0_u8; LOOKED_AT_MAX];
    let pages = pages.min(LOOKED_AT_MAX);
    // SAFETY: the call only queries, and stores a byte per page, for which there is room.
    let done =
        unsafe { libc::mincore(start.cast_mut().cast(), pages * PAGE_BYTES, answers.as_mut_ptr()) };
    if done != 0 {
        return 0;
    }
    answers[..pages].iter().take_while(|answer| **answer & 1 == 1).count()
}

const IS_WRITTEN: u64 = 1 << 1;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;

/// Protect the reported pages in the same step.
const PROTECT_MATCHING: u64 = 1 << 0;
/// Fail where a store to a protected page would wait for a handler.
const CHECK_ASYNC: u64 = 1 << 1;

const SCANNED_RANGES_MAX: usize = 64;

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

    /// Asks the kernel for the pages of a range that are in all the states of `all_of`, and calls
    /// `visit` for each run of them. Repeats the call until the whole range was walked.
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
        let mut ranges = [ScanRange::default(); SCANNED_RANGES_MAX];
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
                ranges_max: SCANNED_RANGES_MAX as u64,
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
    use crate::sys::memory::Reservation;
    use bifolio_testing::skip;

    /// Returns unmappers, and for each if it uses vectors.
    fn ways() -> Vec<(Unmapper, bool)> {
        let features = Features::probe(&[]);
        let mut ways = vec![(Unmapper::new(&Features::probe(&[Feature::VectoredUnmap])), false)];
        if features.has(Feature::VectoredUnmap) {
            ways.push((Unmapper::new(&features), true));
        } else {
            skip(Feature::VectoredUnmap, format!("{:?}", features.reports()));
        }
        ways
    }

    fn filled(pages: usize) -> Reservation {
        let memory = Reservation::new(pages * PAGE_BYTES, PAGE_BYTES).unwrap();
        memory.refuse_huge_pages();
        (0..pages).for_each(|page| store(&memory, page, 1));
        memory
    }

    fn store(memory: &Reservation, page: usize, byte: u8) {
        // SAFETY: a page of the test's own memory.
        unsafe { range(memory, page, 1).start.write_volatile(byte) };
    }

    fn load(memory: &Reservation, page: usize) -> u8 {
        // SAFETY: a page of the test's own memory.
        unsafe { range(memory, page, 1).start.read_volatile() }
    }

    fn range(memory: &Reservation, page: usize, pages: usize) -> PageRange {
        assert!((page + pages) * PAGE_BYTES <= memory.len());
        let start = memory.base.wrapping_add(page * PAGE_BYTES);
        PageRange { start, length_bytes: pages * PAGE_BYTES }
    }

    fn unmap(unmapper: &Unmapper, ranges: &[PageRange]) -> Unmapped {
        // SAFETY: all tests unmap pages of their own memory, which holds plain bytes.
        unsafe { unmapper.unmap(ranges) }
    }

    #[test]
    fn exactly_the_named_pages_are_freed() {
        for (unmapper, vectored) in ways() {
            let memory = filled(10);
            let ranges = [range(&memory, 6, 2), range(&memory, 1, 1), range(&memory, 9, 1)];
            let unmapped = unmap(&unmapper, &ranges);
            assert!(unmapped.error.is_none());
            assert_eq!(unmapped.ranges_done, 3);
            assert_eq!(unmapped.flushes_asked, if vectored { 1 } else { 3 });
            let bytes: Vec<_> = (0..10).map(|page| load(&memory, page)).collect();
            assert_eq!(bytes, [1, 0, 1, 1, 1, 1, 0, 0, 1, 0]);
            let nothing = unmap(&unmapper, &[]);
            assert_eq!((nothing.ranges_done, nothing.flushes_asked), (0, 0));
        }
    }

    #[test]
    fn more_ranges_than_one_call_accepts_need_several() {
        let pages = 2 * (2 * RANGES_MAX + 100);
        for (unmapper, vectored) in ways() {
            let memory = filled(pages);
            let ranges: Vec<_> = (0..pages / 2).map(|i| range(&memory, 2 * i, 1)).collect();
            let unmapped = unmap(&unmapper, &ranges);
            assert!(unmapped.error.is_none());
            assert_eq!(unmapped.ranges_done, ranges.len());
            assert_eq!(unmapped.flushes_asked, if vectored { 3 } else { ranges.len() as u64 });
            assert!((0..pages).all(|page| load(&memory, page) == (page % 2) as u8));
        }
    }

    #[test]
    fn an_invalid_range_ends_it_after_those_before_are_freed() {
        for (unmapper, _) in ways() {
            let memory = filled(8);
            let mut odd = range(&memory, 4, 1);
            // Does not begin at a page boundary.
            odd.start = odd.start.wrapping_add(1);
            let ranges = [range(&memory, 1, 1), range(&memory, 2, 1), odd, range(&memory, 6, 1)];
            let unmapped = unmap(&unmapper, &ranges);
            assert_eq!(unmapped.ranges_done, 2);
            assert_eq!(unmapped.error.unwrap().raw_os_error(), Some(libc::EINVAL));
            let bytes: Vec<_> = (0..8).map(|page| load(&memory, page)).collect();
            assert_eq!(bytes, [1, 0, 0, 1, 1, 1, 1, 1]);
        }
    }

    #[test]
    fn a_range_longer_than_one_call_accepts_is_freed() {
        // Address space only; few of the pages are resident.
        let memory = Reservation::new(5 << 30, PAGE_BYTES).unwrap();
        memory.refuse_huge_pages();
        let gibibyte = (1 << 30) / PAGE_BYTES;
        for (unmapper, _) in ways() {
            let pages = [0, gibibyte, 2 * gibibyte, 4 * gibibyte, 5 * gibibyte - 1];
            pages.iter().for_each(|page| store(&memory, *page, 1));
            let ranges = [
                range(&memory, gibibyte, gibibyte),
                range(&memory, 2 * gibibyte, 3 * gibibyte - 1),
                range(&memory, 0, 1),
            ];
            let unmapped = unmap(&unmapper, &ranges);
            assert!(unmapped.error.is_none());
            assert_eq!(unmapped.ranges_done, 3);
            assert_eq!(pages.map(|page| load(&memory, page)), [0, 0, 0, 0, 1]);
        }
    }

    #[test]
    fn only_whole_ranges_count_as_done() {
        let lengths_bytes = [4096, 8192, 4096];
        let ranges = lengths_bytes
            .map(|length_bytes| PageRange { start: std::ptr::null_mut(), length_bytes });
        for (done_bytes, expected) in [(0, 0), (4096, 1), (8192, 1), (12_288, 2), (16_384, 3)] {
            assert_eq!(whole_ranges(&ranges, done_bytes), expected, "{done_bytes}");
        }
    }

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
        let pages = 4 * SCANNED_RANGES_MAX;
        let Some(world) = World::new(pages) else { return };
        let stored = |page: usize| page % 3 == 1;
        (0..pages).for_each(|page| world.install(page, true));
        (0..pages).filter(|page| stored(*page)).for_each(|page| world.store(page));
        let expected: Vec<_> = (0..pages).filter(|page| stored(*page)).map(|it| (it, 1)).collect();
        assert!(expected.len() > SCANNED_RANGES_MAX);
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
