//! The process and its machine: detection of a fork ([`Origin`]), CPUs and memory.
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
use super::probe;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

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
