//! How long tasks have waited for memory: the kernel's pressure stall information (PSI).
//!
//! A control group of version 2 has a count of its own, of the tasks in it and below, whatever they
//! wait for: the limit of the group or the memory of the machine. A process that is in none has the
//! machine's count, which also grows while a group elsewhere is at its limit. That is told apart by
//! the memory that the machine has available ([`PressureSource::is_of_others`]).
//!
//! The counts are only read: a trigger, for which the kernel would wake a waiting thread, must be
//! written, and containers mount the files of their group without that right.

use super::file::read_text;
use super::memory::unified_group;
use std::io;
use std::path::{Path, PathBuf};

/// The count of the machine.
pub(super) const OF_MACHINE: &str = "/proc/pressure/memory";
/// The machine is not short of memory while this part of it is available.
const AVAILABLE_DIVISOR: u64 = 8;

/// A file of the kernel that counts waits for memory.
#[derive(Clone, Debug)]
pub(crate) struct PressureSource {
    path: PathBuf,
    is_of_machine: bool,
}

impl PressureSource {
    /// Returns the count of the calling process's control group, or else of the machine, and what
    /// it is now. Fails if the kernel shows neither.
    pub(crate) fn of_process() -> io::Result<Self> {
        // The root of the hierarchy has no such file of events; its count is the machine's.
        let group = unified_group().filter(|group| group.join("cgroup.events").exists());
        if let Some(group) = group {
            let own = Self { path: group.join("memory.pressure"), is_of_machine: false };
            if own.waited_us().is_ok() {
                return Ok(own);
            }
        }
        let machine = Self { path: OF_MACHINE.into(), is_of_machine: true };
        machine.waited_us().map(|_| machine)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the time that at least one task has waited, since the group or the machine began,
    /// us.
    pub(crate) fn waited_us(&self) -> io::Result<u64> {
        let text = read_text(&self.path)?;
        total_us(&text).ok_or_else(|| io::Error::other("no total of waits in it"))
    }

    /// Returns `true` if the waits cannot be this process's: they are counted for the whole
    /// machine, which has memory left.
    pub(crate) fn is_of_others(&self) -> bool {
        self.is_of_machine && has_memory_left(&read_text("/proc/meminfo").unwrap_or_default())
    }

    #[cfg(test)]
    pub(crate) fn at(path: PathBuf) -> Self {
        Self { path, is_of_machine: false }
    }
}

/// Returns the total of the line for at least one waiting task.
fn total_us(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("some "))?;
    line.rsplit_once("total=")?.1.trim().parse().ok()
}

fn has_memory_left(text: &str) -> bool {
    let field = |name| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let (total, available) = (field("MemTotal:"), field("MemAvailable:"));
    total.zip(available).is_some_and(|(total, available)| available > total / AVAILABLE_DIVISOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_some_task_is_found() {
        let text = "some avg10=0.00 avg60=1.50 avg300=0.00 total=111591996\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=91116477\n";
        assert_eq!(total_us(text), Some(111_591_996));
        for other in ["", "full avg10=0.00 total=7\n", "some avg10=0.00\n", "some total=x\n"] {
            assert_eq!(total_us(other), None, "{other}");
        }
    }

    #[test]
    fn a_machine_with_an_eighth_available_has_memory_left() {
        let machine = |available: u64| {
            format!("MemTotal:  8000 kB\nMemFree:  10 kB\nMemAvailable:  {available} kB\n")
        };
        assert!(has_memory_left(&machine(1001)));
        assert!(!has_memory_left(&machine(1000)));
        assert!(!has_memory_left(""));
    }
}
