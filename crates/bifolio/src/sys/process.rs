//! The process and its machine: telling a forked child from the process that made something
//! ([`Origin`]), threads of the cache's own ([`OwnedThread`]), CPUs and memory.
//!
//! A page of the process that the kernel wipes in children holds a number: looking at it costs a
//! load. In a child it is 0 until that makes something of its own, and then another number. Where
//! the kernel cannot wipe, the process id is asked for instead, which is a system call.

use super::array::ReservedArray;
use super::probe;
use super::signal;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

/// The page; none where the kernel cannot wipe.
static MARK: OnceLock<Option<ReservedArray<AtomicU64>>> = OnceLock::new();
/// The last number that was given to a process, as far as this one knows: its parent's before it
/// had one of its own, so no two of a line have the same.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

/// The process in which something was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The number that stood in the page.
    Marked(u64),
    /// The process id.
    Process(u32),
}

fn mark() -> Option<&'static AtomicU64> {
    let make = || probe::can_wipe_on_fork().then(|| ReservedArray::new(1).ok()).flatten();
    MARK.get_or_init(make).as_ref().map(|mark| mark.get(0))
}

impl Origin {
    /// The calling process.
    pub(crate) fn here() -> Self {
        let Some(mark) = mark() else { return Self::by_process() };
        // Relaxed: only the value counts; of two threads that come first one gives the number.
        let seen = mark.load(Ordering::Relaxed);
        if seen != 0 {
            return Self::Marked(seen);
        }
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        let given = mark.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        Self::Marked(given.map_or_else(|other| other, |_| number))
    }

    /// The calling process, known by its process id only.
    pub(crate) fn by_process() -> Self {
        Self::Process(std::process::id())
    }

    /// Whether the caller is a child of that process.
    pub(crate) fn is_forked(self) -> bool {
        match self {
            Self::Marked(number) => {
                mark().is_none_or(|mark| mark.load(Ordering::Relaxed) != number)
            }
            Self::Process(process) => std::process::id() != process,
        }
    }
}

/// The CPU the calling thread runs on now: a hint, for it may have moved when the answer is used.
///
/// Through `rseq` or the vDSO where the C library has them (glibc 2.35 on): a few nanoseconds, no
/// system call.
pub(crate) fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

/// The kernel's number of the calling thread.
pub(crate) fn current_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// How many CPUs the machine may ever show; at least 1.
pub(crate) fn possible_cpus() -> usize {
    let configured = std::fs::read_to_string("/sys/devices/system/cpu/possible").ok();
    let last = configured.as_deref().and_then(last_cpu);
    last.map(|last| last + 1)
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
}

/// Memory of the machine, bytes.
pub(crate) fn machine_memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// Address space that the process may have, bytes (`RLIMIT_AS`); `u64::MAX` if there is no limit.
pub(crate) fn address_space_bytes_max() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::As).current.unwrap_or(u64::MAX)
}

/// The last number of a kernel CPU list such as `0-3,8-11`.
fn last_cpu(list: &str) -> Option<usize> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

/// Enough for everything of ours that runs on one; touched as needed. `Backing` and `docs/maps.md`
/// name it: a user's backing runs there, too.
const STACK_BYTES: usize = 256 << 10;

/// A running thread, named and with a small stack; dropping it waits for its end. Its owner has
/// told it to end before.
#[derive(Debug)]
pub(crate) struct OwnedThread {
    handle: Option<JoinHandle<()>>,
    /// A forked child inherits this value, but not the thread.
    origin: Origin,
}

impl OwnedThread {
    /// Starts a thread, which gets no signal that another thread can take.
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let builder = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
        // Until the thread has inherited the mask.
        let _blocked = signal::block_asynchronous();
        Ok(Self { handle: Some(builder.spawn(run)?), origin: Origin::here() })
    }

    /// Whether the thread was left behind by a fork: then nothing it shares may be touched.
    pub(crate) fn is_left_behind(&self) -> bool {
        self.origin.is_forked()
    }
}

impl Drop for OwnedThread {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        if self.is_left_behind() {
            // There is nobody to wait for.
            std::mem::forget(handle);
        } else if handle.thread().id() != thread::current().id() {
            // A panic there has been reported by the runtime already.
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
