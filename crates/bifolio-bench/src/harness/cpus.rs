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

/// Returns the CPUs of as many threads as the largest of `counts`, in the order of [`allowed`];
/// threads that are more than the CPUs share them.
pub(crate) fn of_threads(counts: &[usize]) -> Result<Vec<usize>> {
    let cpus = allowed();
    if cpus.is_empty() {
        return Err(Error::Refused("there is no CPU to stay on".into()));
    }
    let most = counts.iter().copied().max().unwrap_or(0);
    Ok(cpus.into_iter().cycle().take(most).collect())
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
    fn more_threads_than_cpus_share_them() {
        let cpus = allowed();
        let all = cpus.len();
        let shared = of_threads(&[1, 2 * all + 1, 2]).unwrap();
        assert_eq!(shared.len(), 2 * all + 1);
        assert!(shared.iter().zip(cpus.iter().cycle()).all(|(shared, cpu)| shared == cpu));
    }

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
