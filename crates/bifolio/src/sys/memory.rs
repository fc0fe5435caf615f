//! Memory from the kernel: address space that is reserved at once, populated as needed and freed in
//! pieces.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
