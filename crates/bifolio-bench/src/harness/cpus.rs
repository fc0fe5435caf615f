//! Which CPUs this process may use, staying on one of them, and the order in which threads are
//! spread over them: one socket is filled before the next, and the cores of a socket before their
//! second hardware threads. So the step from one socket to two, where a shared counter costs most,
//! lies between two rows of a table.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::{Error, Result};

const SYSTEM: &str = "/sys/devices/system/cpu";

/// Returns the CPUs the calling thread may use, in the order in which threads are put on them;
/// none when the kernel does not tell.
pub(crate) fn allowed() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else {
        return Vec::new();
    };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    ordered(Path::new(SYSTEM), &cpus)
}

/// Returns the CPUs of `count` threads, in the order of [`allowed`]; threads that are more than the
/// CPUs share them.
pub(crate) fn of_threads(count: usize) -> Result<Vec<usize>> {
    let cpus = allowed();
    if cpus.is_empty() {
        return Err(Error::Refused("there is no CPU to stay on".into()));
    }
    Ok(cpus.into_iter().cycle().take(count).collect())
}

pub(crate) fn pin_current_thread(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(Error::system(format!("pin a thread to CPU {cpu}")))
}

/// Returns `cpus` in the order in which threads are put on them. A CPU that the folder `system`
/// does not describe counts as a core of its own in the first socket.
fn ordered(system: &Path, cpus: &[usize]) -> Vec<usize> {
    // Hardware threads of each core seen so far.
    let mut cores: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    let mut places: Vec<_> = cpus
        .iter()
        .map(|&cpu| {
            let number = |name: &str| -> Option<u64> {
                let path = system.join(format!("cpu{cpu}/topology/{name}"));
                fs::read_to_string(path).ok()?.trim().parse().ok()
            };
            let socket = number("physical_package_id").unwrap_or(0);
            // Cores that are known by their number come before those that are not.
            let core = number("core_id").unwrap_or((1 << 32) + cpu as u64);
            let sibling = cores.entry((socket, core)).or_default();
            *sibling += 1;
            (socket, *sibling, core, cpu)
        })
        .collect();
    places.sort_unstable();
    places.into_iter().map(|(.., cpu)| cpu).collect()
}

/// Returns the numbers of threads to measure with on `cpus` CPUs: 1, 2, 4 and so on, and all. Two
/// where there is only one CPU, to see what contention costs there.
pub(crate) fn thread_counts(cpus: usize) -> Vec<usize> {
    let all = cpus.max(2);
    let powers = std::iter::successors(Some(1), |count| Some(count * 2));
    powers.take_while(|&count| count < all).chain([all]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_filled_before_the_next_and_its_cores_before_their_second_threads() {
        let system = tempfile::tempdir().unwrap();
        // As Linux numbers them: sockets alternate, second threads come last.
        let cpus = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)];
        for (cpu, (socket, core)) in cpus.into_iter().enumerate() {
            let folder = system.path().join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("physical_package_id"), format!("{socket}\n")).unwrap();
            fs::write(folder.join("core_id"), format!("{core}\n")).unwrap();
        }
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(ordered(system.path(), &all), [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(ordered(system.path(), &[1, 5, 6]), [6, 1, 5], "only those that are allowed");
        assert_eq!(ordered(Path::new("/nowhere"), &[0, 1, 2]), [0, 1, 2]);
    }
}
