//! What the machine has: CPUs, memory; and which CPU the caller runs on, as a hint: it may have
//! moved by the time the answer is used.

/// The CPU the calling thread runs on now.
///
/// Through `rseq` or the vDSO where the C library has them (glibc 2.35 on): a few nanoseconds, no
/// system call.
pub(crate) fn current() -> usize {
    rustix::thread::sched_getcpu()
}

/// How many CPUs the machine may ever show; at least 1.
pub(crate) fn possible() -> usize {
    let configured = std::fs::read_to_string("/sys/devices/system/cpu/possible").ok();
    let last = configured.as_deref().and_then(last_cpu);
    last.map(|last| last + 1)
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
}

/// Memory of the machine, bytes.
pub(crate) fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// The last number of a kernel CPU list such as `0-3,8-11`.
fn last_cpu(list: &str) -> Option<usize> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_kernel_cpu_lists() {
        assert_eq!(last_cpu("0\n"), Some(0));
        assert_eq!(last_cpu("0-3\n"), Some(3));
        assert_eq!(last_cpu("0-3,8-11\n"), Some(11));
        assert_eq!(last_cpu("\n"), None);
        assert!(current() < possible());
    }
}
