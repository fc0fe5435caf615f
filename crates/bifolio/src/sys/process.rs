//! The process and its machine: detection of a fork ([`Origin`]), threads of the cache
//! ([`OwnedThread`]), CPUs and memory.
//!
//! A page of the process that the kernel wipes in children holds a number: checking it costs one
//! load. In a child it is 0 until the child creates something of its own, and then another number.
//! Where the kernel cannot wipe, the process id is compared instead, which is a system call.
//!
//! The limits of the process are queried through the C library: a filter may refuse the calls.
//!
//! # Safety
//! Passes memory for the answers of such queries.
#![allow(unsafe_code)]

use super::array::ReservedArray;
use super::descriptor;
use super::memory::{PAGE_BYTES, Reservation, refuse_access};
use super::probe;
use super::signal;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

/// The page; `None` where the kernel cannot wipe.
static MARK: OnceLock<Option<ReservedArray<AtomicU64>>> = OnceLock::new();
/// Last number assigned to a process, as far as this process knows. A child starts from its
/// parent's value, so no two processes in one line of descent have the same number.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

/// Identifies the process in which an object was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Number in the page.
    Marked(u64),
    /// Process id.
    Process(u32),
}

fn mark() -> Option<&'static AtomicU64> {
    let make = || probe::can_wipe_on_fork().then(|| ReservedArray::new(1).ok()).flatten();
    MARK.get_or_init(make).as_ref().map(|mark| mark.get(0))
}

impl Origin {
    /// Returns the origin of the calling process.
    pub(crate) fn here() -> Self {
        let Some(mark) = mark() else { return Self::by_process() };
        // Relaxed: only the value counts; of two threads that find 0, one assigns the number.
        let seen = mark.load(Ordering::Relaxed);
        if seen != 0 {
            return Self::Marked(seen);
        }
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        let given = mark.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        Self::Marked(given.map_or_else(|other| other, |_| number))
    }

    /// Returns the origin of the calling process by its process id only.
    pub(crate) fn by_process() -> Self {
        Self::Process(std::process::id())
    }

    /// Returns `true` if the caller is in a child of that process.
    pub(crate) fn is_forked(self) -> bool {
        match self {
            Self::Marked(number) => {
                mark().is_none_or(|mark| mark.load(Ordering::Relaxed) != number)
            }
            Self::Process(process) => std::process::id() != process,
        }
    }
}

/// Returns the CPU that runs the calling thread: a hint, because the thread may have moved by the
/// time the caller uses it.
///
/// Uses `rseq` or the vDSO where the C library does (since glibc 2.35): a few nanoseconds, no
/// system call.
pub(crate) fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

/// Returns the kernel thread id of the calling thread.
pub(crate) fn current_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// Returns the number of CPUs that the machine may ever have; at least 1.
pub(crate) fn possible_cpus() -> usize {
    let configured = descriptor::read_text("/sys/devices/system/cpu/possible").ok();
    let last = configured.as_deref().and_then(last_cpu);
    last.map(|last| last + 1)
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
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

/// Returns the address space that the process may use in bytes (`RLIMIT_AS`); `u64::MAX` if
/// unlimited, or if the kernel does not tell.
pub(crate) fn address_space_bytes_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: memory for the answer.
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    limit.rlim_cur
}

/// Returns the last number of a kernel CPU list such as `0-3,8-11`.
fn last_cpu(list: &str) -> Option<usize> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

/// Stack size of the cache's threads; touched as needed. `Backing` and `docs/maps.md` document it,
/// because a user's backing runs on these stacks, too.
const STACK_BYTES: usize = 256 << 10;

/// Bytes of the stack on which the standard library handles signals of a thread, rounded up.
const SIGNAL_STACK_BYTES: usize = 64 << 10;

/// Checks that the process may have the mappings of another thread. Where it may not, the standard
/// library panics at the start of the thread, which ends the process.
fn check_room_for_thread() -> io::Result<()> {
    let room = Reservation::new(STACK_BYTES + SIGNAL_STACK_BYTES, PAGE_BYTES)?;
    // Two stacks, each with a guard page, and some for other threads that do the same now.
    for page in [1, 3, 5] {
        refuse_access(room.base.wrapping_add(page * PAGE_BYTES), PAGE_BYTES)?;
    }
    Ok(())
}

/// A running thread with a name and a small stack. The drop joins it; its owner has requested its
/// end before.
#[derive(Debug)]
pub(crate) struct OwnedThread {
    handle: Option<JoinHandle<()>>,
    /// Detects a fork: a child inherits this value, but not the thread.
    origin: Origin,
}

impl OwnedThread {
    /// Starts a thread that blocks every signal which another thread can take.
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let builder = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
        check_room_for_thread()?;
        // Held until the thread has inherited the mask.
        let _blocked = signal::block_asynchronous();
        Ok(Self { handle: Some(builder.spawn(run)?), origin: Origin::here() })
    }

    /// Lets the thread run without an owner, until it ends by itself.
    pub(crate) fn detach(mut self) {
        drop(self.handle.take());
    }

    /// Returns `true` in a forked child: the thread does not exist, and nothing it shares may be
    /// touched.
    pub(crate) fn is_of_parent(&self) -> bool {
        self.origin.is_forked()
    }
}

impl Drop for OwnedThread {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        if self.is_of_parent() {
            // The thread does not exist here.
            std::mem::forget(handle);
        } else if handle.thread().id() != thread::current().id() {
            // The runtime has already reported a panic of the thread.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_number() {
        let origins = [Origin::here(), Origin::here(), Origin::by_process()];
        assert_eq!(origins[0], origins[1]);
        assert!(origins.iter().all(|origin| !origin.is_forked()));
        let others = [Origin::Marked(0), Origin::Marked(u64::MAX), Origin::Process(0)];
        assert!(others.iter().all(|origin| origin.is_forked()));
    }

    #[test]
    fn reads_kernel_cpu_lists() {
        assert_eq!(last_cpu("0\n"), Some(0));
        assert_eq!(last_cpu("0-3\n"), Some(3));
        assert_eq!(last_cpu("0-3,8-11\n"), Some(11));
        assert_eq!(last_cpu("\n"), None);
        assert!(current_cpu() < possible_cpus());
    }
}
