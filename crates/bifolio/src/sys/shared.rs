//! Memory that other processes may read: one file in memory (`memfd_create`) for each cache, whose
//! parts are mapped by [`Reservation`](super::memory::Reservation)s.
//!
//! - No part of the file is used twice. A process that still maps the table of a closed file reads
//!   zeros there, never Entries of another file.
//! - Memory is given back by a hole in the file (`FALLOC_FL_PUNCH_HOLE`): advice such as
//!   `MADV_DONTNEED` only unmaps pages that stay in the file. The seal `F_SEAL_FUTURE_WRITE` would
//!   forbid the hole, so others get a descriptor that was opened for reading, of a file that only
//!   its owner may read ([`SharedMemory::reader`]). The length is sealed: no process can cut it
//!   below another, which would get SIGBUS.
//! - A read of a hole allocates a page, unlike a read of private memory that was never written.
//!   `SharedMemory::resident_bytes`, in tests, counts it.
//!
//! The kernel cannot wipe shared memory in a forked child. It is left out there
//! (`MADV_DONTFORK`), and a handler of `fork` maps zeros in its place before the child runs
//! ([`WipedRange`]). A child that was made without the C library gets SIGSEGV instead.
//!
//! # Safety
//! Maps zeros over ranges that are registered by their owner, which unmaps them only afterwards.
//! The query of a limit passes memory for the answer.
#![allow(unsafe_code)]

use super::file::{above_standard, path_of};
use super::{PAGE_BYTES, persist};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Length of the file, bytes, where no limit is lower (`RLIMIT_FSIZE`): as parts are used once, it
/// is what all tables of a cache may have during its life.
const FILE_BYTES_MAX: u64 = 1 << 62;

/// The file that holds the shared memory of one cache.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    file: OwnedFd,
    length_bytes: u64,
    /// End of the parts that are in use or were.
    used_bytes: AtomicU64,
    /// The process that may free parts: a child has only zeros in their place.
    process: u32,
}

impl SharedMemory {
    pub(crate) fn new() -> io::Result<Self> {
        // A longer file would end the process with SIGXFSZ.
        let length_bytes = file_bytes_max().min(FILE_BYTES_MAX) & !(PAGE_BYTES as u64 - 1);
        let file = sealed_file(length_bytes)?;
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        Ok(Self { file, length_bytes, used_bytes: AtomicU64::new(0), process: std::process::id() })
    }

    /// Takes a part of `length_bytes` whole pages that no earlier part had. Returns its offset, a
    /// multiple of `align_bytes` (a power of two, and at least a page).
    pub(super) fn take(&self, length_bytes: u64, align_bytes: u64) -> io::Result<u64> {
        let place = |used: u64| {
            let start = used.checked_next_multiple_of(align_bytes)?;
            let end = start.checked_add(length_bytes)?;
            (end <= self.length_bytes).then_some((start, end))
        };
        let end_after = |used| place(used).map(|(_, end)| end);
        // Relaxed: only the value counts; each part is used by the thread that took it.
        let relaxed = (Ordering::Relaxed, Ordering::Relaxed);
        let used = self.used_bytes.fetch_update(relaxed.0, relaxed.1, end_after);
        used.ok().and_then(place).map(|(start, _)| start).ok_or_else(|| {
            let problem = format!(
                "{length_bytes} bytes do not fit in the shared memory, a file of {} bytes \
                 (RLIMIT_FSIZE)",
                self.length_bytes
            );
            io::Error::new(io::ErrorKind::OutOfMemory, problem)
        })
    }

    /// Frees the memory of whole pages, in all processes: they read as zeros afterwards. In a
    /// forked child nothing happens, because its memory is not this one.
    pub(super) fn release(&self, offset_bytes: u64, length_bytes: u64) -> io::Result<()> {
        if std::process::id() != self.process {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        persist(|| Ok(rustix::fs::fallocate(&self.file, flags, offset_bytes, length_bytes)?))
    }

    /// Returns a descriptor by which another process can map the memory for reading only.
    pub(crate) fn reader(&self) -> io::Result<OwnedFd> {
        let path = path_of(self.file.as_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        above_standard(|| rustix::fs::open(&path, flags, Mode::empty()))
    }

    /// Returns the bytes that the file has in memory or in the swap of the machine.
    #[cfg(test)]
    pub(crate) fn resident_bytes(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.file)?.st_blocks as u64 * 512)
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the length that a file of this process may have (`RLIMIT_FSIZE`); `u64::MAX` if it is
/// unlimited, or if the kernel does not tell.
fn file_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: memory for the answer. (A filter may refuse the call, on which rustix would panic.)
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur
}

/// Makes a file in memory of a length that cannot change.
pub(super) fn sealed_file(length_bytes: u64) -> io::Result<OwnedFd> {
    let create = |more: MemfdFlags| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | more;
        above_standard(|| rustix::fs::memfd_create("bifolio", flags))
    };
    // Where `vm.memfd_noexec` is 2 the flag is required; before Linux 6.3 it is unknown.
    let file = create(MemfdFlags::NOEXEC_SEAL).or_else(|_| create(MemfdFlags::empty()))?;
    rustix::fs::ftruncate(&file, length_bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// A range of this process that a forked child has as zeros; until the drop.
#[derive(Debug)]
pub(super) struct WipedRange {
    node: &'static Node,
}

/// An entry of the list of wiped ranges. It is never freed, because a child walks the list without
/// a lock, and used again after its range has ended.
#[derive(Debug)]
struct Node {
    start: AtomicPtr<u8>,
    /// 0 while the entry has no range.
    length_bytes: AtomicUsize,
    next: AtomicPtr<Node>,
}

static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
/// Entries without a range. The lock is only tried: a child may have it locked for ever, and then
/// uses new entries.
static UNUSED: Mutex<Vec<&'static Node>> = Mutex::new(Vec::new());

impl WipedRange {
    /// Registers a mapping of this process, in whole pages.
    ///
    /// # Errors
    /// The C library has no memory for the handler of `fork`.
    ///
    /// # Safety
    /// The range stays reserved for the caller until the drop.
    pub(super) unsafe fn new(start: *mut u8, length_bytes: usize) -> io::Result<Self> {
        static HANDLER: OnceLock<i32> = OnceLock::new();
        // SAFETY: the handler makes only system calls, as in a child of several threads it must.
        let register = || unsafe { libc::pthread_atfork(None, None, Some(wipe_all)) };
        match *HANDLER.get_or_init(register) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        let node = Self::claim_node();
        node.start.store(start, Ordering::Relaxed);
        // Release: pairs with the Acquire in `wipe_all`, for a fork in another thread: the start is
        // that of this range.
        node.length_bytes.store(length_bytes, Ordering::Release);
        Ok(Self { node })
    }

    fn claim_node() -> &'static Node {
        let free = UNUSED.try_lock().ok().and_then(|mut unused| unused.pop());
        free.unwrap_or_else(|| {
            let node = Box::leak(Box::new(Node {
                start: AtomicPtr::default(),
                length_bytes: AtomicUsize::new(0),
                next: AtomicPtr::default(),
            }));
            let push = |first| {
                node.next.store(first, Ordering::Relaxed);
                Some(ptr::from_mut(node))
            };
            // Release: pairs with the Acquire in `nodes`: `next` is set. On failure, Relaxed: the
            // node is not read.
            let _ = NODES.fetch_update(Ordering::Release, Ordering::Relaxed, push);
            node
        })
    }
}

impl Drop for WipedRange {
    fn drop(&mut self) {
        // Relaxed: a fork in this thread sees it, and no other thread uses the range any more.
        self.node.length_bytes.store(0, Ordering::Relaxed);
        if let Ok(mut unused) = UNUSED.try_lock() {
            unused.push(self.node);
        }
    }
}

fn nodes() -> impl Iterator<Item = &'static Node> {
    // SAFETY: nodes are leaked, and complete when they are published.
    let node_at = |node: *mut Node| unsafe { node.cast_const().as_ref() };
    // Acquire: pairs with the Release in `claim_node`: the node is complete.
    let first = node_at(NODES.load(Ordering::Acquire));
    // Relaxed: `next` does not change once the node is published.
    std::iter::successors(first, move |node| node_at(node.next.load(Ordering::Relaxed)))
}

/// Runs in each child of `fork`, before any other code of it: maps zeros for the ranges that the
/// child does not have. Where the kernel refuses, an access raises SIGSEGV.
extern "C" fn wipe_all() {
    for node in nodes() {
        // Acquire: pairs with the Release in `new`.
        let length_bytes = node.length_bytes.load(Ordering::Acquire);
        if length_bytes == 0 {
            continue;
        }
        let start = node.start.load(Ordering::Relaxed).cast();
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range is that of a reservation which existed at the fork, and whose memory
        // the child does not have (`WipedRange::new`).
        let _ = unsafe { rustix::mm::mmap_anonymous(start, length_bytes, access, flags) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{MemorySource, Reservation};
    use super::*;
    use std::sync::Arc;

    fn shared() -> (Arc<SharedMemory>, MemorySource) {
        let memory = Arc::new(SharedMemory::new().unwrap());
        (Arc::clone(&memory), MemorySource::Shared(memory))
    }

    /// Returns a byte of a reservation.
    fn byte(memory: &Reservation, offset_bytes: usize) -> u8 {
        assert!(offset_bytes < memory.len());
        // SAFETY: inside the mapped range.
        unsafe { memory.base.wrapping_add(offset_bytes).read_volatile() }
    }

    fn set_byte(memory: &Reservation, offset_bytes: usize, value: u8) {
        assert!(offset_bytes < memory.len());
        // SAFETY: inside the mapped range, which only this test uses.
        unsafe { memory.base.wrapping_add(offset_bytes).write_volatile(value) };
    }

    #[test]
    fn released_pages_leave_the_file_and_read_as_zeros() {
        let (file, source) = shared();
        let memory = Reservation::new_in(&source, 4 * PAGE_BYTES, PAGE_BYTES).unwrap();
        (0..3).for_each(|page| set_byte(&memory, page * PAGE_BYTES, 7));
        assert_eq!(file.resident_bytes().unwrap(), 3 * PAGE_BYTES as u64);
        memory.release(PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(file.resident_bytes().unwrap(), 2 * PAGE_BYTES as u64);
        assert_eq!([0, 1, 2].map(|page| byte(&memory, page * PAGE_BYTES)), [7, 0, 7]);
        drop(memory);
        assert_eq!(file.resident_bytes().unwrap(), 0, "the drop frees all");
    }

    #[test]
    fn a_part_of_the_file_is_never_used_twice() {
        let (file, source) = shared();
        let mut parts = Vec::new();
        for align_bytes in [PAGE_BYTES, 2 << 20, PAGE_BYTES] {
            let memory = Reservation::new_in(&source, 3 * PAGE_BYTES, align_bytes).unwrap();
            let (_, offset_bytes) = memory.shared_place().unwrap();
            assert_eq!(memory.base.addr() % align_bytes, 0);
            assert_eq!(offset_bytes % align_bytes as u64, 0, "or a huge page could not be mapped");
            parts.push(offset_bytes);
        }
        assert!(parts.is_sorted_by(|part, next| part + 3 * PAGE_BYTES as u64 <= *next));
        let error = file.take(FILE_BYTES_MAX, PAGE_BYTES as u64).unwrap_err();
        assert!(error.to_string().contains("shared memory"), "{error}");
    }

    #[test]
    fn another_process_can_only_read() {
        let (file, source) = shared();
        let memory = Reservation::new_in(&source, PAGE_BYTES, PAGE_BYTES).unwrap();
        let reader = file.reader().unwrap();
        let (_, offset_bytes) = memory.shared_place().unwrap();
        let map = |access| {
            let null = ptr::null_mut();
            // SAFETY: a null hint without MAP_FIXED replaces no existing mapping.
            unsafe {
                rustix::mm::mmap(null, PAGE_BYTES, access, MapFlags::SHARED, &reader, offset_bytes)
            }
        };
        assert!(map(ProtFlags::READ | ProtFlags::WRITE).is_err());
        let seen = map(ProtFlags::READ).unwrap().cast::<u8>();
        set_byte(&memory, 5, 9);
        // SAFETY: inside the page mapped above, which stays mapped.
        assert_eq!(unsafe { seen.wrapping_add(5).read_volatile() }, 9);
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&reader, hole, offset_bytes, PAGE_BYTES as u64).is_err());
        assert!(rustix::fs::ftruncate(&reader, 0).is_err());
        assert!(rustix::fs::ftruncate(&file.file, 0).is_err(), "the length is sealed");
    }

    #[test]
    fn a_forked_child_has_zeros_and_cannot_free_what_its_parent_has() {
        let (file, source) = shared();
        let memory = Reservation::new_in(&source, 2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert!(memory.wipe_on_fork());
        set_byte(&memory, 0, 7);
        // SAFETY: the child makes system calls and touches memory only, then ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let was_zero = byte(&memory, 0) == 0;
            set_byte(&memory, 0, 1);
            let is_released = memory.release(0, PAGE_BYTES).is_ok();
            // SAFETY: ends the child at once, without handlers of the parent.
            unsafe { libc::_exit(i32::from(!(was_zero && is_released))) };
        }
        let mut status = -1;
        // SAFETY: memory for the answer, and a child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child found zeros");
        assert_eq!(byte(&memory, 0), 7);
        assert_eq!(file.resident_bytes().unwrap(), PAGE_BYTES as u64);
    }

    #[test]
    fn nodes_of_the_list_are_used_again() {
        let (_, source) = shared();
        let wiped = || {
            let memory = Reservation::new_in(&source, PAGE_BYTES, PAGE_BYTES).unwrap();
            assert!(memory.wipe_on_fork());
            memory
        };
        // Other tests of this process have ranges, too, and a try may fail.
        (0..1000).for_each(|_| drop(wiped()));
        assert!(nodes().count() < 500, "{}", nodes().count());
    }
}
