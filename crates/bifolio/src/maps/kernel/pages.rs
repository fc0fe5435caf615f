//! Pages of memory, in ranges: which are resident, and freeing many of them at once ([`Unmapper`]).
//!
//! Scattered ranges are freed with one call and one TLB flush: the kernel flushes once for a vector
//! of ranges, whereas a call per range interrupts the other processors each time.
//!
//! # Safety
//! Frees pages whose bytes, as the caller guarantees, are not needed.
#![allow(unsafe_code)]

use crate::sys::file::answer_of;
use crate::sys::memory::{PAGE_BYTES, free_pages};
use crate::sys::probe::{Feature, Features};
use crate::sys::retries::persist;
use std::io;
use std::mem::offset_of;

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
    /// Calls that made the kernel flush the TLB.
    pub(crate) flushes_asked: u64,
    /// Error that ended it before the last range.
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

#[cfg(test)]
mod tests {
    use super::*;
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
}
