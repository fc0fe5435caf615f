//! Giving pages back, many at once: scattered ranges with one call and one TLB flush.
//!
//! Used by what evicts pages of mapped files. The kernel flushes once for a vector of ranges; with
//! a call for each range it interrupts the other processors for each.
//!
//! # Safety
//! Frees pages; the caller says that nobody needs their bytes.
#![allow(unsafe_code)]

use std::io;
use std::mem::offset_of;

use super::control::{answer_of, is_passing};
use super::memory::free_pages;
use super::probe::{Feature, Features};

/// Ranges of one call; the kernel takes no more than 1024.
pub(super) const RANGES_MAX: usize = 512;

/// "This process", in place of a descriptor of one. It names the calling thread, since the first
/// thread may have ended.
const PIDFD_SELF: libc::c_int = -10_000;

/// Whole pages of memory, as the kernel's vectors name them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageRange {
    pub(crate) start: *mut u8,
    pub(crate) length_bytes: usize,
}

// SAFETY: an address and a length; whose memory it is, who made it answers for.
unsafe impl Send for PageRange {}
// SAFETY: as above.
unsafe impl Sync for PageRange {}

const _: () = assert!(size_of::<PageRange>() == size_of::<libc::iovec>());
const _: () = assert!(offset_of!(PageRange, start) == offset_of!(libc::iovec, iov_base));
const _: () = assert!(offset_of!(PageRange, length_bytes) == offset_of!(libc::iovec, iov_len));

/// What became of an unmapping.
#[derive(Debug)]
#[must_use]
pub(crate) struct Unmapped {
    /// Ranges that are gone, from the first one on. Of the next one, a part may be.
    pub(crate) ranges_done: usize,
    /// Calls that made the kernel flush.
    pub(crate) flushes_asked: u64,
    /// Why it ended before the last range.
    pub(crate) error: Option<io::Error>,
}

/// Unmaps in the way that works here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unmapper {
    vectored: bool,
}

impl Unmapper {
    pub(crate) fn new(features: &Features) -> Self {
        Self { vectored: features.has(Feature::VectoredUnmap) }
    }

    /// Frees the pages of `ranges`, in order: the next touch finds them missing.
    ///
    /// # Safety
    /// The ranges are whole pages of private memory of ours, and nobody relies on their bytes.
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
                Err(error) if is_passing(&error) => {}
                Err(error) => {
                    unmapped.error = Some(error);
                    break;
                }
            }
        }
        unmapped
    }

    /// One call; returns how many ranges it finished, at least one.
    ///
    /// # Safety
    /// As for `unmap`; there is at least one range.
    unsafe fn unmap_some(&self, ranges: &[PageRange]) -> io::Result<usize> {
        if self.vectored {
            let part = &ranges[..ranges.len().min(RANGES_MAX)];
            // SAFETY: a part of the caller's ranges.
            let done_bytes = unsafe { advise_vector(part) }?;
            let ranges_done = whole_ranges(part, done_bytes);
            if ranges_done > 0 {
                return Ok(ranges_done);
            }
            // Longer than one call takes (2 GiB).
        }
        // SAFETY: the first of the caller's ranges.
        unsafe { free_pages(ranges[0].start, ranges[0].length_bytes) }?;
        Ok(1)
    }
}

/// How many of `ranges` are done with `done_bytes`.
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

/// Frees the pages of `ranges` with one call; returns how many bytes it came through.
///
/// # Safety
/// As for [`Unmapper::unmap`].
pub(super) unsafe fn advise_vector(ranges: &[PageRange]) -> io::Result<usize> {
    // SAFETY: a `PageRange` is laid out as an `iovec`; the ranges may be freed, says the caller.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            PIDFD_SELF,
            ranges.as_ptr(),
            ranges.len(),
            // What the program has locked, too.
            libc::MADV_DONTNEED_LOCKED,
            0,
        )
    };
    answer_of(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{PAGE_BYTES, Reservation};

    /// Ways to unmap, and whether each uses vectors.
    fn ways() -> Vec<(Unmapper, bool)> {
        let features = Features::probe(&[]);
        let mut ways = vec![(Unmapper::new(&Features::probe(&[Feature::VectoredUnmap])), false)];
        if features.has(Feature::VectoredUnmap) {
            ways.push((Unmapper::new(&features), true));
        } else {
            println!("skipped in part: {:?}", features.reports());
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
        let start = memory.as_ptr().wrapping_add(page * PAGE_BYTES);
        PageRange { start, length_bytes: pages * PAGE_BYTES }
    }

    fn unmap(unmapper: Unmapper, ranges: &[PageRange]) -> Unmapped {
        // SAFETY: all tests unmap pages of their own memory, which holds plain bytes.
        unsafe { unmapper.unmap(ranges) }
    }

    #[test]
    fn exactly_the_pages_named_are_gone() {
        for (unmapper, vectored) in ways() {
            let memory = filled(10);
            let ranges = [range(&memory, 6, 2), range(&memory, 1, 1), range(&memory, 9, 1)];
            let unmapped = unmap(unmapper, &ranges);
            assert!(unmapped.error.is_none());
            assert_eq!(unmapped.ranges_done, 3);
            assert_eq!(unmapped.flushes_asked, if vectored { 1 } else { 3 });
            let bytes: Vec<_> = (0..10).map(|page| load(&memory, page)).collect();
            assert_eq!(bytes, [1, 0, 1, 1, 1, 1, 0, 0, 1, 0]);
            let nothing = unmap(unmapper, &[]);
            assert_eq!((nothing.ranges_done, nothing.flushes_asked), (0, 0));
        }
    }

    #[test]
    fn more_ranges_than_one_call_takes_need_several() {
        let pages = 2 * (2 * RANGES_MAX + 100);
        for (unmapper, vectored) in ways() {
            let memory = filled(pages);
            let ranges: Vec<_> = (0..pages / 2).map(|i| range(&memory, 2 * i, 1)).collect();
            let unmapped = unmap(unmapper, &ranges);
            assert!(unmapped.error.is_none());
            assert_eq!(unmapped.ranges_done, ranges.len());
            assert_eq!(unmapped.flushes_asked, if vectored { 3 } else { ranges.len() as u64 });
            assert!((0..pages).all(|page| load(&memory, page) == (page % 2) as u8));
        }
    }

    #[test]
    fn a_range_that_cannot_go_ends_it_and_those_before_are_gone() {
        for (unmapper, _) in ways() {
            let memory = filled(8);
            let mut odd = range(&memory, 4, 1);
            // Does not begin where a page does.
            odd.start = odd.start.wrapping_add(1);
            let ranges = [range(&memory, 1, 1), range(&memory, 2, 1), odd, range(&memory, 6, 1)];
            let unmapped = unmap(unmapper, &ranges);
            assert_eq!(unmapped.ranges_done, 2);
            assert_eq!(unmapped.error.unwrap().raw_os_error(), Some(libc::EINVAL));
            let bytes: Vec<_> = (0..8).map(|page| load(&memory, page)).collect();
            assert_eq!(bytes, [1, 0, 0, 1, 1, 1, 1, 1]);
        }
    }

    #[test]
    fn a_range_longer_than_one_call_takes_is_gone_too() {
        // Address space only; a few of the pages are there.
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
            let unmapped = unmap(unmapper, &ranges);
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
}
