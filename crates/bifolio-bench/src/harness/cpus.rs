//! Which CPUs this process may use, and staying on one of them.

use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::topology;
use crate::error::{Error, Result};

/// Returns the CPUs the calling thread may use, in the order in which threads are put on them;
/// none when the kernel does not tell.
pub(crate) fn allowed() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else {
        return Vec::new();
    };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    topology::ordered(Path::new(topology::SYSTEM), &cpus)
}

/// Keeps the calling thread on `cpu`.
pub(crate) fn pin_current_thread(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(Error::system(format!("pin a thread to CPU {cpu}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_may_use_one_cpu_only() {
        let cpus = allowed();
        let last = *cpus.last().expect("at least one CPU");
        let seen = std::thread::spawn(move || {
            pin_current_thread(last).unwrap();
            allowed()
        });
        assert_eq!(seen.join().unwrap(), [last]);
        assert_eq!(allowed(), cpus, "the thread that spawned it is not pinned");
    }
}
