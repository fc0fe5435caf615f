//! Memory from the kernel: address space that is reserved at once (`MAP_NORESERVE`), populated as
//! needed, freed in pieces and unmapped on drop; and how much memory the process may have
//! ([`MemoryLimit`]).
//!
//! A reservation is of private memory, or of memory that other processes may read ([`shared`]):
//! its [`MemorySource`]. What differs between the two is here: how memory is mapped, given back,
//! kept from forked children and put in huge pages.
//!
//! [`shared`]: super::shared
//!
//! In a program that locks all future memory (`mlockall(MCL_FUTURE)`) a new mapping would be made
//! resident as a whole. So it is mapped without access, unlocked, and only then made accessible.
//! Core dumps leave reservations out (`MADV_DONTDUMP`). A reservation is one mapping of the
//! process, of `vm.max_map_count`; advice to a part of one divides it, which the kernel refuses at
//! the limit.
//!
//! The limits are those of the machine, of the process, queried through the C library (a filter may
//! refuse the calls), and of its control groups, versions 1 and 2. The limit of a group also holds
//! for the groups below it, so all ancestors that the file system shows are examined.
//!
//! # Safety
//! The only place that maps, unmaps and advises memory; every address passed to the kernel lies
//! inside a [`Reservation`]. It frees pages whose bytes, as the caller guarantees, are not needed.
//! Queries of limits pass memory for the answers.
#![allow(unsafe_code)]

use super::file::read_text;
use super::shared::{SharedMemory, WipedRange};
use super::{answer_of, is_forbidden, persist};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munlock,
    munmap,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub(crate) use super::PAGE_BYTES;
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;
/// `MADV_COLLAPSE`.
const COLLAPSE: libc::c_int = 25;

/// Where reservations get their memory.
#[derive(Clone, Debug, Default)]
pub(crate) enum MemorySource {
    /// Anonymous memory of this process.
    #[default]
    Private,
    /// A file in memory that other processes may read.
    Shared(Arc<SharedMemory>),
}

/// Part of the shared memory that a reservation has.
#[derive(Debug)]
struct SharedPart {
    memory: Arc<SharedMemory>,
    offset_bytes: u64,
    /// Set by [`Reservation::wipe_on_fork`].
    wiped: OnceLock<WipedRange>,
}

/// A zero-filled range of memory.
#[derive(Debug)]
pub(crate) struct Reservation {
    /// The whole mapping, for `munmap`: longer than requested if the ends that were mapped for the
    /// alignment could not be unmapped.
    mapped: *mut u8,
    mapped_bytes: usize,
    pub(crate) base: *mut u8,
    length_bytes: usize,
    /// `None` for private memory.
    shared: Option<SharedPart>,
}

// SAFETY: a reservation is an address range; it owns no thread-bound state.
unsafe impl Send for Reservation {}
// SAFETY: shared use only returns raw addresses; the kernel serializes the calls made here.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `length_bytes` bytes (at least one page) of private memory whose first byte is
    /// aligned to `align_bytes` (a power of two).
    pub(crate) fn new(length_bytes: usize, align_bytes: usize) -> io::Result<Self> {
        Self::new_in(&MemorySource::Private, length_bytes, align_bytes)
    }

    /// Reserves memory of `source`, otherwise like [`Self::new`].
    pub(crate) fn new_in(
        source: &MemorySource,
        length_bytes: usize,
        align_bytes: usize,
    ) -> io::Result<Self> {
        let mut reservation = Self::reserve(length_bytes, align_bytes)?;
        if let MemorySource::Shared(memory) = source {
            let (length_bytes, align_bytes) =
                (reservation.length_bytes, align_bytes.max(PAGE_BYTES));
            let offset_bytes = memory.take(length_bytes as u64, align_bytes as u64)?;
            reservation.map_file(memory.file(), offset_bytes)?;
            let memory = Arc::clone(memory);
            reservation.shared = Some(SharedPart { memory, offset_bytes, wiped: OnceLock::new() });
        }
        reservation.allow(MprotectFlags::READ | MprotectFlags::WRITE)?;
        Ok(reservation)
    }

    /// Maps a part of a file in memory. The drop unmaps it and frees nothing of the file.
    pub(super) fn of_file(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        length_bytes: usize,
        align_bytes: usize,
        access: MprotectFlags,
    ) -> io::Result<Self> {
        let mut reservation = Self::reserve(length_bytes, align_bytes)?;
        reservation.map_file(file, offset_bytes)?;
        reservation.allow(access)?;
        Ok(reservation)
    }

    /// Reserves address space without access.
    fn reserve(length_bytes: usize, align_bytes: usize) -> io::Result<Self> {
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
        let mut reservation = Self { mapped, mapped_bytes, base, length_bytes, shared: None };
        reservation.trim();
        Ok(reservation)
    }

    /// Makes the reserved memory accessible, and resident only where it is touched.
    fn allow(&self, access: MprotectFlags) -> io::Result<()> {
        // SAFETY: the mapping of `reserve`; no byte changes.
        if let Err(error) = unsafe { munlock(self.mapped.cast(), self.mapped_bytes) } {
            self.check_unlocked(error.into())?;
        }
        // Where this is refused, core dumps are larger.
        let _ = self.advise(0, self.length_bytes, Advice::LinuxDontDump);
        protect(self.base, self.length_bytes, access)
    }

    /// Maps the part of `file` at `offset_bytes` over the whole reservation, still without access.
    fn map_file(&mut self, file: BorrowedFd<'_>, offset_bytes: u64) -> io::Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        let (start, none) = (self.base.cast(), ProtFlags::empty());
        // SAFETY: replaces the used part of the mapping made by `reserve`, which has no access yet.
        unsafe { mmap(start, self.length_bytes, none, flags, file, offset_bytes) }?;
        Ok(())
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

    pub(crate) fn len(&self) -> usize {
        self.length_bytes
    }

    pub(crate) fn source(&self) -> MemorySource {
        let shared = |part: &SharedPart| MemorySource::Shared(Arc::clone(&part.memory));
        self.shared.as_ref().map_or(MemorySource::Private, shared)
    }

    /// Returns the shared memory, and the offset in it at which this begins; `None` for private
    /// memory.
    pub(crate) fn shared_place(&self) -> Option<(&SharedMemory, u64)> {
        self.shared.as_ref().map(|part| (&*part.memory, part.offset_bytes))
    }

    /// Makes a forked child see zeros here. Returns `false` if the kernel refuses: the child keeps
    /// a copy or, of shared memory, has none.
    pub(crate) fn wipe_on_fork(&self) -> bool {
        let Some(part) = &self.shared else {
            return self.advise(0, self.length_bytes, Advice::LinuxWipeOnFork).is_ok();
        };
        // SAFETY: the whole reservation, whose drop ends the registration before it unmaps.
        let wiped = unsafe { WipedRange::new(self.base, self.length_bytes) };
        let is_registered = wiped.map(|wiped| part.wiped.set(wiped)).is_ok();
        // Also of a child whose handlers do not run: it must not change what its parent has.
        self.skip_on_fork().is_ok() && is_registered
    }

    /// Removes this memory from forked children: an access there raises SIGSEGV.
    pub(crate) fn skip_on_fork(&self) -> io::Result<()> {
        self.advise(0, self.length_bytes, Advice::LinuxDontFork)
    }

    pub(crate) fn refuse_huge_pages(&self) {
        // A kernel without huge pages refuses, which is as good.
        let _ = self.advise(0, self.length_bytes, Advice::LinuxNoHugepage);
    }

    /// Prevents the kernel from merging pages of this memory with equal ones, as it may in a
    /// process that has enabled it (`PR_SET_MEMORY_MERGE`). Fails if the kernel cannot merge.
    pub(crate) fn refuse_merging(&self) {
        let _ = self.advise(0, self.length_bytes, Advice::LinuxUnmergeable);
    }

    /// Requests base pages only in a part.
    ///
    /// # Errors
    /// The kernel has no memory to record it. A kernel without huge pages succeeds.
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

    /// Tries to make a part, which no other thread uses yet, resident in huge pages. Returns `true`
    /// on success. Only of shared memory: there the advice has no effect while the setting
    /// `shmem_enabled` is `never`, the default, but this call has one (Linux 6.1). Private memory
    /// gets huge pages when it is touched.
    pub(crate) fn collapse(&self, offset_bytes: usize, length_bytes: usize) -> bool {
        if self.shared.is_none() {
            return false;
        }
        for start in (offset_bytes..offset_bytes + length_bytes).step_by(HUGE_PAGE_BYTES) {
            // Where no page was ever touched the kernel finds nothing to collapse.
            self.touch(start, PAGE_BYTES);
        }
        let start = self.at(offset_bytes, length_bytes);
        // SAFETY: `at` checked that the range is ours; no byte changes.
        let collapse = || answer_of(unsafe { libc::madvise(start.cast(), length_bytes, COLLAPSE) });
        persist(collapse).is_ok()
    }

    pub(crate) fn populate(&self, offset_bytes: usize, length_bytes: usize) -> io::Result<()> {
        self.advise(offset_bytes, length_bytes, Advice::LinuxPopulateWrite)
    }

    /// Makes a part, which no other thread uses yet, resident by touching each page.
    pub(crate) fn touch(&self, offset_bytes: usize, length_bytes: usize) {
        for page in (offset_bytes..offset_bytes + length_bytes).step_by(PAGE_BYTES) {
            let byte = self.at(page, 1);
            // SAFETY: `at` checked that the byte is inside the mapped, writable range, which the
            // caller owns.
            unsafe { byte.write_volatile(0) };
        }
    }

    /// Returns the pages of the range to the kernel; they read as zeros afterwards.
    pub(crate) fn release(&self, offset_bytes: usize, length_bytes: usize) -> io::Result<()> {
        let start = self.at(offset_bytes, length_bytes);
        if let Some(part) = &self.shared {
            let offset_bytes = part.offset_bytes + offset_bytes as u64;
            return part.memory.release(offset_bytes, length_bytes as u64);
        }
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

/// Frees the pages of a range, also of locked memory: the next access finds zeros, or a missing
/// page.
///
/// # Safety
/// The range must be whole pages of private memory of this crate whose bytes are not needed.
pub(crate) unsafe fn free_pages(start: *mut u8, length_bytes: usize) -> io::Result<()> {
    // The second since Linux 5.18; the first fails on locked pages.
    for advice in [libc::MADV_DONTNEED, libc::MADV_DONTNEED_LOCKED] {
        // SAFETY: the caller guarantees that the range may be freed.
        let free = || answer_of(unsafe { libc::madvise(start.cast(), length_bytes, advice) });
        match persist(free) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            answer => return answer.map(drop),
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
        if let Some(part) = &mut self.shared {
            // The range may soon belong to another mapping.
            part.wiped = OnceLock::new();
            // Pages of shared memory outlive the mapping.
            if let Err(error) = part.memory.release(part.offset_bytes, self.length_bytes as u64) {
                log::warn!("{} bytes of shared memory stay resident: {error}", self.length_bytes);
            }
        }
        // SAFETY: exactly what `new` mapped; every borrow of the memory borrows `self`.
        if let Err(error) = unsafe { munmap(self.mapped.cast(), self.mapped_bytes) } {
            // At `vm.max_map_count`, if the kernel has joined this mapping with its neighbours:
            // only the addresses stay in use.
            log::warn!("{} bytes of address space stay reserved: {error}", self.mapped_bytes);
            let _ = self.release(0, self.length_bytes);
        }
    }
}

/// Returns the memory of the machine in bytes; 0 if the kernel does not tell.
pub(crate) fn machine_memory_bytes() -> u64 {
    let mut info = MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: memory for the answer.
    let _ = unsafe { libc::sysinfo(info.as_mut_ptr()) };
    // SAFETY: zeros, which are valid numbers, or what the kernel wrote.
    let info = unsafe { info.assume_init() };
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// Logs that a cache may use more memory than the machine, or a control group of the process, has.
pub(crate) fn warn_of_bound(bound_bytes: u64) {
    let machine_bytes = machine_memory_bytes();
    if bound_bytes > machine_bytes {
        log::warn!(
            "a cache has a bound of {bound_bytes} bytes, and the machine has {machine_bytes}: the \
             kernel may end the process before the bound is reached"
        );
    } else if let Some(limit) = MemoryLimit::of_process()
        && bound_bytes > limit.limit_bytes
    {
        log::warn!(
            "a cache has a bound of {bound_bytes} bytes, and {} is {}: the kernel may end the \
             process before the bound is reached",
            limit.path.display(),
            limit.limit_bytes
        );
    }
}

/// Returns the address space that the process may use in bytes (`RLIMIT_AS`); `u64::MAX` if
/// unlimited, or if the kernel does not tell.
pub(crate) fn address_space_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: memory for the answer.
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    limit.rlim_cur
}

/// The group of the process that allows the least memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// Path of the file that holds the limit; the path identifies the group.
    pub(crate) path: PathBuf,
    pub(crate) limit_bytes: u64,
    /// Bytes in use that are not pages of files, which the kernel could reclaim.
    pub(crate) used_bytes: u64,
}

impl MemoryLimit {
    /// Returns the limit of the calling process; `None` if no group limits its memory.
    pub(crate) fn of_process() -> Option<Self> {
        Self::all_of_process().into_iter().min_by_key(Self::left_bytes)
    }

    /// Returns the limit of each group of the calling process that the file system shows.
    fn all_of_process() -> Vec<Self> {
        let groups = read_text("/proc/self/cgroup").unwrap_or_default();
        let mounts = read_text("/proc/self/mountinfo").unwrap_or_default();
        places(&groups, &mounts).iter().flat_map(GroupPlace::limits).collect()
    }

    /// Returns the memory in bytes that the machine has and the control groups of the calling
    /// process allow.
    pub(crate) fn allowed_bytes() -> u64 {
        let machine = Some(machine_memory_bytes()).filter(|bytes| *bytes > 0);
        let limits = Self::all_of_process().into_iter().map(|limit| limit.limit_bytes);
        limits.chain(machine).min().unwrap_or(u64::MAX)
    }

    pub(crate) fn left_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }

    pub(crate) fn check(&self, bytes: u64) -> io::Result<()> {
        if bytes <= self.left_bytes() {
            return Ok(());
        }
        let problem = format!(
            "{bytes} bytes are wanted, but {} is {}, of which {} are in use",
            self.path.display(),
            self.limit_bytes,
            self.used_bytes
        );
        Err(io::Error::new(io::ErrorKind::OutOfMemory, problem))
    }
}

/// Returns the directory of the calling process's control group of version 2, if the file system
/// shows it.
pub(crate) fn unified_group() -> Option<PathBuf> {
    let groups = read_text("/proc/self/cgroup").ok()?;
    let mounts = read_text("/proc/self/mountinfo").ok()?;
    let found = places(&groups, &mounts).into_iter().find(|place| *place.names == VERSION_2);
    found.map(|place| place.directory)
}

#[derive(Debug, PartialEq, Eq)]
struct GroupPlace {
    directory: PathBuf,
    top: PathBuf,
    names: &'static Names,
}

/// Names of the files of a group, and of the lines of `memory.stat` for pages of files.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    limit: &'static str,
    used: &'static str,
    file_pages: [&'static str; 2],
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    file_pages: ["total_inactive_file ", "total_active_file "],
};
const VERSION_2: Names = Names {
    limit: "memory.max",
    used: "memory.current",
    file_pages: ["inactive_file ", "active_file "],
};

impl GroupPlace {
    fn limits(&self) -> impl Iterator<Item = MemoryLimit> + '_ {
        let ancestors = self.directory.ancestors();
        let visible = ancestors.take_while(|directory| directory.starts_with(&self.top));
        visible.filter_map(|directory| self.limit_of(directory))
    }

    fn limit_of(&self, directory: &Path) -> Option<MemoryLimit> {
        let Names { limit, used, file_pages } = self.names;
        let number = |name| read_text(directory.join(name)).ok()?.trim().parse::<u64>().ok();
        // Version 2 writes `max`.
        let limit_bytes = number(limit)?;
        let used_bytes = number(used).unwrap_or(0);
        let details = read_text(directory.join("memory.stat")).unwrap_or_default();
        let is_of_file = |line: &&str| file_pages.iter().any(|name| line.starts_with(name));
        let last_number = |line: &str| line.rsplit(' ').next()?.parse::<u64>().ok();
        let file_bytes = details.lines().filter(is_of_file).filter_map(last_number).sum();
        let used_bytes = used_bytes.saturating_sub(file_bytes);
        Some(MemoryLimit { path: directory.join(limit), limit_bytes, used_bytes })
    }
}

fn places(groups: &str, mounts: &str) -> Vec<GroupPlace> {
    let place = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, group) = (parts.next()?, parts.next()?, parts.next()?);
        let is_version_2 = controllers.is_empty();
        if !is_version_2 && !controllers.split(',').any(|name| name == "memory") {
            return None;
        }
        let (root, top) = mounts.lines().find_map(|mount| hierarchy_at(mount, is_version_2))?;
        // The mount may show a part of the hierarchy only.
        let below = Path::new(group).strip_prefix(root).ok()?;
        let names = if is_version_2 { &VERSION_2 } else { &VERSION_1 };
        Some(GroupPlace { directory: top.join(below), top, names })
    };
    groups.lines().filter_map(place).collect()
}

/// Returns the root and the directory of a mount if it is the wanted hierarchy.
fn hierarchy_at(mount: &str, is_version_2: bool) -> Option<(&str, PathBuf)> {
    let (head, tail) = mount.split_once(" - ")?;
    let mut fields = head.split(' ').skip(3);
    let (root, top) = (fields.next()?, fields.next()?);
    let mut kind = tail.split(' ');
    let (file_system, options) = (kind.next()?, kind.nth(1)?);
    let is_wanted = match is_version_2 {
        true => file_system == "cgroup2",
        false => file_system == "cgroup" && options.split(',').any(|option| option == "memory"),
    };
    is_wanted.then(|| (root, PathBuf::from(top)))
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
    let maps = read_text("/proc/self/smaps").unwrap();
    // The line with the range comes first, then its details, then its flags.
    let mut lines = maps.lines().skip_while(|line| !has(line));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    flags.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_released_range_reads_as_zeros_but_not_its_neighbours() {
        let memory = Reservation::new(3 * PAGE_BYTES, 2 << 20).unwrap();
        assert_eq!(memory.base.addr() % (2 << 20), 0);
        memory.touch(0, 3 * PAGE_BYTES);
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

    const MOUNTS: &str = "\
25 1 0:22 / /proc rw,nosuid shared:5 - proc proc rw
33 32 0:30 /docker/abc /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
34 32 0:31 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 32 0:32 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn groups_are_found_below_their_mounts() {
        let groups = "5:cpu,cpuacct:/x\n3:memory:/docker/abc/inner\n0::/user.slice/a\n";
        let found = places(groups, MOUNTS);
        let paths = found.iter().map(|place| (place.directory.to_str().unwrap(), place.names));
        let expected = [
            ("/sys/fs/cgroup/memory/inner", &VERSION_1),
            ("/sys/fs/cgroup/unified/user.slice/a", &VERSION_2),
        ];
        assert_eq!(paths.collect::<Vec<_>>(), expected);
        assert_eq!(places("3:memory:/elsewhere\n", MOUNTS), []);
        assert_eq!(places("nonsense\n", "nonsense\n"), []);
    }

    #[test]
    fn the_ancestor_with_the_least_room_counts() {
        let top = tempfile::tempdir().unwrap();
        let inner = top.path().join("outer/inner");
        fs::create_dir_all(&inner).unwrap();
        let write = |name: &str, text: &str| fs::write(top.path().join(name), text).unwrap();
        write("outer/memory.max", "1000000\n");
        write("outer/memory.current", "700000\n");
        write("outer/memory.stat", "anon 1\nfile 9\ninactive_file 200000\nactive_file 100000\n");
        write("outer/inner/memory.max", "900000\n");
        write("outer/inner/memory.current", "10\n");
        let place = GroupPlace { directory: inner, top: top.path().into(), names: &VERSION_2 };
        let least = place.limits().min_by_key(MemoryLimit::left_bytes).unwrap();
        let path = top.path().join("outer/memory.max");
        assert_eq!((&least.path, least.left_bytes()), (&path, 600_000));
        least.check(600_000).unwrap();
        let line = least.check(600_001).unwrap_err().to_string();
        assert!(line.contains("memory.max is 1000000, of which 400000"), "{line}");
        write("outer/memory.max", "max\n");
        let least = place.limits().min_by_key(MemoryLimit::left_bytes).unwrap();
        assert_eq!(least.limit_bytes, 900_000);
    }
}
