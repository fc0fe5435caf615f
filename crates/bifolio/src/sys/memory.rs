//! Memory from the kernel: address space that is reserved at once, populated as needed and freed in
//! pieces; and freeing many ranges of pages at once ([`Unmapper`]).
//!
//! Used by `sys::array` (tables, descriptors), `memory::arena` and regions. A reservation costs
//! only address space (`MAP_NORESERVE`); memory is used when pages are touched. It is unmapped on
//! drop and never before.
//!
//! In a program that locks all future memory (`mlockall(MCL_FUTURE)`) a new mapping would be made
//! resident as a whole. So it is mapped without access, unlocked, and only then made accessible.
//!
//! Core dumps leave reservations out (`MADV_DONTDUMP`): they are address space for the most part,
//! and the rest are bytes of files.
//!
//! A reservation is one mapping of the process, of `vm.max_map_count`. Advice to a part of one
//! divides it; at the limit, the kernel refuses that.
//!
//! Scattered ranges are freed with one call and one TLB flush: the kernel flushes once for a vector
//! of ranges, whereas a call per range interrupts the other processors each time.
//!
//! # Safety
//! The only place that maps, unmaps and advises memory; every address passed to the kernel lies
//! inside a [`Reservation`]. It frees pages whose bytes, as the caller guarantees, are not needed.
#![allow(unsafe_code)]

use super::file::answer_of;
use super::probe::{Feature, Features};
use super::retries::{is_forbidden, persist};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munlock, munmap,
};
use std::io;
use std::mem::offset_of;

pub(crate) const PAGE_BYTES: usize = 4096;
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A private, anonymous, zero-filled range of memory.
#[derive(Debug)]
pub(crate) struct Reservation {
    /// The whole mapping, for `munmap`: longer than requested if the ends that were mapped for the
    /// alignment could not be unmapped.
    mapped: *mut u8,
    mapped_bytes: usize,
    /// Address of the first byte; never changes.
    pub(crate) base: *mut u8,
    length_bytes: usize,
}

// SAFETY: a reservation is an address range; it owns no thread-bound state.
unsafe impl Send for Reservation {}
// SAFETY: shared use only returns raw addresses; the kernel serializes the calls made here.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `length_bytes` bytes (at least one page) whose first byte is aligned to
    /// `align_bytes` (a power of two).
    pub(crate) fn new(length_bytes: usize, align_bytes: usize) -> io::Result<Self> {
        let length_bytes = length_bytes.max(1).checked_next_multiple_of(PAGE_BYTES);
        let length_bytes = length_bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let slack_bytes = if align_bytes > PAGE_BYTES { align_bytes } else { 0 };
        let mapped_bytes = length_bytes.checked_add(slack_bytes);
        let mapped_bytes = mapped_bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let none = ProtFlags::empty();
        // SAFETY: a null hint without MAP_FIXED replaces no existing mapping.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), mapped_bytes, none, flags) }?;
        let mapped = mapped.cast::<u8>();
        let base = mapped.wrapping_add(mapped.align_offset(align_bytes.max(1)));
        let mut reservation = Self { mapped, mapped_bytes, base, length_bytes };
        reservation.trim();
        // SAFETY: the mapping made above; no byte changes.
        if let Err(error) = unsafe { munlock(reservation.mapped.cast(), reservation.mapped_bytes) }
        {
            reservation.check_unlocked(error.into())?;
        }
        // Where this is refused, core dumps are larger.
        let _ = reservation.advise(0, length_bytes, Advice::LinuxDontDump);
        protect(base, length_bytes, MprotectFlags::READ | MprotectFlags::WRITE)?;
        Ok(reservation)
    }

    /// Unmaps what was mapped for the alignment: with other advice it would be mappings of its own.
    fn trim(&mut self) {
        let head_bytes = self.base.addr() - self.mapped.addr();
        // SAFETY: the beginning of the mapping, before the first byte that is used.
        if head_bytes > 0 && unsafe { munmap(self.mapped.cast(), head_bytes) }.is_ok() {
            (self.mapped, self.mapped_bytes) = (self.base, self.mapped_bytes - head_bytes);
        }
        let tail = self.base.wrapping_add(self.length_bytes);
        let tail_bytes = self.mapped.addr() + self.mapped_bytes - tail.addr();
        // SAFETY: the end of the mapping, after the last byte that is used.
        if tail_bytes > 0 && unsafe { munmap(tail.cast(), tail_bytes) }.is_ok() {
            self.mapped_bytes -= tail_bytes;
        }
    }

    /// Checks that the mapping is not locked in memory, after the kernel refused to unlock it.
    fn check_unlocked(&self, refusal: io::Error) -> io::Result<()> {
        let advised = self.advise(0, PAGE_BYTES, Advice::LinuxDontNeed);
        // The error of this advice on locked memory.
        let is_locked = advised.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL));
        if !is_locked && is_forbidden(&refusal) {
            return Ok(());
        }
        let problem = format!("munlock: {refusal}; the process may have locked all of its memory");
        Err(io::Error::new(refusal.kind(), problem))
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub(crate) fn len(&self) -> usize {
        self.length_bytes
    }

    /// Makes a forked child see zeros here. If the kernel refuses, the child keeps a copy.
    pub(crate) fn wipe_on_fork(&self) {
        let _ = self.advise(0, self.length_bytes, Advice::LinuxWipeOnFork);
    }

    /// Removes this memory from forked children: an access there raises SIGSEGV.
    pub(crate) fn skip_on_fork(&self) -> io::Result<()> {
        self.advise(0, self.length_bytes, Advice::LinuxDontFork)
    }

    /// Requests base pages only, whatever the system prefers.
    pub(crate) fn refuse_huge_pages(&self) {
        // A kernel without huge pages refuses, which is as good.
        let _ = self.advise(0, self.length_bytes, Advice::LinuxNoHugepage);
    }

    /// Prevents the kernel from merging pages of this memory with equal ones, as it may in a
    /// process that has enabled it (`PR_SET_MEMORY_MERGE`). Fails if the kernel cannot merge.
    pub(crate) fn refuse_merging(&self) {
        let _ = self.advise(0, self.length_bytes, Advice::LinuxUnmergeable);
    }

    /// Acts as [`Self::refuse_huge_pages`] on a part, in which the kernel then creates no huge
    /// pages on its own either.
    ///
    /// # Errors
    /// Fails if the kernel has no memory to record it. A kernel without huge pages succeeds.
    pub(crate) fn refuse_huge_pages_in(
        &self,
        offset_bytes: usize,
        length_bytes: usize,
    ) -> io::Result<()> {
        match self.advise(offset_bytes, length_bytes, Advice::LinuxNoHugepage) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            other => other,
        }
    }

    /// Allows huge pages in a part. On a refusal it has base pages.
    pub(crate) fn prefer_huge_pages_in(&self, offset_bytes: usize, length_bytes: usize) {
        let _ = self.advise(offset_bytes, length_bytes, Advice::LinuxHugepage);
    }

    /// Makes `length_bytes` from `offset_bytes` on resident, with huge pages if `huge`.
    ///
    /// Touches each page where the kernel has no `MADV_POPULATE_WRITE`.
    pub(crate) fn populate(
        &self,
        offset_bytes: usize,
        length_bytes: usize,
        huge: bool,
        features: &Features,
    ) -> io::Result<()> {
        if huge {
            self.prefer_huge_pages_in(offset_bytes, length_bytes);
        }
        if features.has(Feature::PopulateWrite) {
            match self.advise(offset_bytes, length_bytes, Advice::LinuxPopulateWrite) {
                Err(error) if is_forbidden(&error) => {
                    features.withdraw(Feature::PopulateWrite, "madvise", &error);
                }
                answer => return answer,
            }
        }
        for page in (offset_bytes..offset_bytes + length_bytes).step_by(PAGE_BYTES) {
            let byte = self.at(page, 1);
            // SAFETY: `at` checked that the byte is inside the mapped, writable range, and the
            // caller owns this range: no other thread uses it before it is populated.
            unsafe { byte.write_volatile(0) };
        }
        Ok(())
    }

    /// Returns the pages of the range to the kernel; they read as zeros afterwards.
    pub(crate) fn release(&self, offset_bytes: usize, length_bytes: usize) -> io::Result<()> {
        let start = self.at(offset_bytes, length_bytes);
        // SAFETY: `at` checked that the range is ours; zeroing it is what the caller requests.
        unsafe { free_pages(start, length_bytes) }
    }

    pub(super) fn advise(
        &self,
        offset_bytes: usize,
        length_bytes: usize,
        advice: Advice,
    ) -> io::Result<()> {
        let start = self.at(offset_bytes, length_bytes);
        // SAFETY: `at` checked that the range is ours; none of the advice used in this file unmaps
        // it, and zeroing it is the documented effect of `release`.
        let advise = || Ok(unsafe { madvise(start.cast(), length_bytes, advice) }?);
        persist(advise).map_err(|error| match error.raw_os_error() {
            // The error of this call alone for what others return ENOMEM for.
            Some(libc::EAGAIN) => io::Error::from_raw_os_error(libc::ENOMEM),
            _ => error,
        })
    }

    fn at(&self, offset_bytes: usize, length_bytes: usize) -> *mut u8 {
        let inside = offset_bytes.checked_add(length_bytes).is_some_and(|end| end <= self.len());
        assert!(inside, "range {offset_bytes}+{length_bytes} of {}", self.len());
        self.base.wrapping_add(offset_bytes)
    }
}

/// Frees the pages of a range, including pages that the program has locked in memory: the next
/// access finds zeros, or a missing page. Continues after an interruption.
///
/// # Safety
/// The range must be whole pages of private memory of this crate whose bytes are not needed.
pub(crate) unsafe fn free_pages(start: *mut u8, length_bytes: usize) -> io::Result<()> {
    // The second since Linux 5.18; the first fails on locked pages.
    let mut ways = [libc::MADV_DONTNEED, libc::MADV_DONTNEED_LOCKED].into_iter();
    let mut way = ways.next();
    while let Some(advice) = way {
        // SAFETY: the caller guarantees that the range may be freed.
        let free = || answer_of(unsafe { libc::madvise(start.cast(), length_bytes, advice) });
        match persist(free) {
            Ok(_) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => way = ways.next(),
            Err(error) => return Err(error),
        }
    }
    // SAFETY: as above; no byte changes.
    unsafe { munlock(start.cast(), length_bytes) }?;
    // SAFETY: as above.
    answer_of(unsafe { libc::madvise(start.cast(), length_bytes, libc::MADV_DONTNEED) }).map(drop)
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

/// Makes pages of a reservation inaccessible: an access raises SIGSEGV.
pub(crate) fn refuse_access(start: *mut u8, length_bytes: usize) -> io::Result<()> {
    protect(start, length_bytes, MprotectFlags::empty())
}

pub(crate) fn allow_access(start: *mut u8, length_bytes: usize) -> io::Result<()> {
    protect(start, length_bytes, MprotectFlags::READ | MprotectFlags::WRITE)
}

fn protect(start: *mut u8, length_bytes: usize, access: MprotectFlags) -> io::Result<()> {
    // SAFETY: part of a reservation, which is only accessed through raw pointers: no reference
    // exists to memory that may become inaccessible.
    unsafe { mprotect(start.cast(), length_bytes, access) }.map_err(io::Error::from)
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped; every borrow of the memory borrows `self`.
        if let Err(error) = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) } {
            // At `vm.max_map_count`, if the kernel has joined this mapping with its neighbours:
            // only the addresses stay in use.
            log::warn!("{} bytes of address space stay reserved: {error}", self.mapped_bytes);
            let _ = self.release(0, self.length_bytes);
        }
    }
}

/// Returns the kernel's flags of the mapping that contains `address`: two letters each.
#[cfg(test)]
pub(crate) fn kernel_flags(address: *const u8) -> Vec<String> {
    let has = |line: &str| {
        let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        let ends = ends.and_then(|(start, end)| Some(number(start)?..number(end)?));
        ends.is_some_and(|range| range.contains(&address.addr()))
    };
    let maps = super::file::read_text("/proc/self/smaps").unwrap();
    // The line with the range comes first, then its details, then its flags.
    let mut lines = maps.lines().skip_while(|line| !has(line));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    flags.split_whitespace().map(str::to_owned).collect()
}

/// Pages that [`resident_from`] checks with one call.
const LOOKED_AT_MAX: usize = 256;

/// Ranges per call; the kernel accepts at most 1024.
pub(super) const RANGES_MAX: usize = 512;

/// Names the calling process in place of a pidfd. It refers to the calling thread, because the
/// first thread may have ended.
const PIDFD_SELF: libc::c_int = -10_000;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memory::{PAGE_BYTES, Reservation};
    use bifolio_testing::skip;

    #[test]
    fn a_released_range_reads_as_zeros_but_not_its_neighbours() {
        for disabled in [&[][..], &[Feature::PopulateWrite]] {
            let features = Features::probe(disabled);
            let memory = Reservation::new(3 * PAGE_BYTES, 2 << 20).unwrap();
            assert_eq!(memory.base.addr() % (2 << 20), 0);
            memory.populate(0, 3 * PAGE_BYTES, true, &features).unwrap();
            for page in 0..3 {
                // SAFETY: inside the three pages.
                unsafe { memory.base.wrapping_add(page * PAGE_BYTES).write(7) };
            }
            memory.release(PAGE_BYTES, PAGE_BYTES).unwrap();
            let bytes = [0, 1, 2].map(|page| {
                // SAFETY: inside the three pages.
                unsafe { memory.base.wrapping_add(page * PAGE_BYTES).read() }
            });
            assert_eq!(bytes, [7, 0, 7]);
        }
    }

    #[test]
    fn an_absurd_length_is_an_error_not_a_panic() {
        assert!(Reservation::new(usize::MAX, PAGE_BYTES).is_err());
        assert!(Reservation::new(1 << 62, PAGE_BYTES).is_err());
    }

    #[test]
    fn memory_can_be_excluded_from_forked_children() {
        let memory = Reservation::new(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        memory.skip_on_fork().unwrap();
        let flags = kernel_flags(memory.base);
        assert!(flags.contains(&"dc".to_owned()), "{flags:?}");
    }

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
