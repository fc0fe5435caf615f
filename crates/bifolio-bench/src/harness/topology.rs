//! The order in which threads are spread over CPUs: one socket is filled before the next, and the
//! cores of a socket before their second hardware threads. So the step from one socket to two,
//! where a shared counter costs most, lies between two rows of a table.
//!
//! Read from `/sys/devices/system/cpu`; [`super::cpus`] calls it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Folder of the CPUs.
pub(crate) const SYSTEM: &str = "/sys/devices/system/cpu";

/// Returns `cpus` in the order in which threads are put on them. A CPU that the folder `system`
/// does not describe counts as a core of its own in the first socket.
pub(crate) fn ordered(system: &Path, cpus: &[usize]) -> Vec<usize> {
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

    /// Makes a tree like that of `/sys`, of CPUs with a socket and a core each.
    fn machine(cpus: &[(usize, u64, u64)]) -> tempfile::TempDir {
        let system = tempfile::tempdir().unwrap();
        for (cpu, socket, core) in cpus {
            let folder = system.path().join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("physical_package_id"), format!("{socket}\n")).unwrap();
            fs::write(folder.join("core_id"), format!("{core}\n")).unwrap();
        }
        system
    }

    #[test]
    fn a_socket_is_filled_before_the_next_and_its_cores_before_their_second_threads() {
        // As Linux numbers them: sockets alternate, second threads come last.
        let cpus = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)];
        let seconds = [(4, 0, 0), (5, 1, 0), (6, 0, 1), (7, 1, 1)];
        let system = machine(&[cpus, seconds].concat());
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(ordered(system.path(), &all), [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(ordered(system.path(), &[1, 5, 6]), [6, 1, 5], "only those that are allowed");
    }

    #[test]
    fn cpus_that_are_not_described_keep_their_order() {
        let system = machine(&[(3, 0, 0)]);
        assert_eq!(ordered(system.path(), &[0, 1, 3]), [3, 0, 1]);
        assert_eq!(ordered(Path::new("/nowhere"), &[0, 1, 2]), [0, 1, 2]);
    }

    #[test]
    fn thread_counts_double_up_to_all_cpus() {
        assert_eq!(thread_counts(1), [1, 2]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
        assert_eq!(thread_counts(64), [1, 2, 4, 8, 16, 32, 64]);
    }
}
