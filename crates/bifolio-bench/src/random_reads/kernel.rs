//! The kernel's page cache, limited to the memory of the cache: reads in a child process.
//!
//! Memory is limited per process, so each trial is a child that joins the control group, reads, and
//! returns its measurements. Its pages in the page cache stay for the next one.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::mapped::Mapped;
use super::one_by_one::{Buffered, Load, read_pages};
use crate::error::Result;
use crate::harness::access::{Access, Draws, PAGE_BYTES, Pattern};
use crate::harness::device_bytes::DeviceBytes;
use crate::harness::memory_group::Membership;
use crate::harness::meter::Measured;

/// How the child reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    Pread,
    Mmap,
}

impl Way {
    pub(crate) fn series(self) -> &'static str {
        match self {
            Self::Pread => "kernel_pread",
            Self::Mmap => "kernel_mmap",
        }
    }
}

/// The task of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) way: Way,
    /// The control group to join.
    pub(crate) group: Membership,
    pub(crate) file: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) pattern: Pattern,
    pub(crate) seed: u64,
    pub(crate) threads: usize,
    pub(crate) draw_start: u64,
    pub(crate) draw_end: u64,
    pub(crate) duration: Duration,
    pub(crate) tracepoint: Option<u64>,
}

/// Runs the child's side of a trial.
pub(crate) fn read(task: &Task) -> Result<Measured> {
    task.group.join()?;
    let access = Access::new(task.pattern, task.size_bytes, task.seed);
    let load = Load {
        series: task.way.series(),
        access: &access,
        draws: &Draws::starting_at(task.draw_start),
        threads: task.threads,
        duration: task.duration,
        draw_end: task.draw_end,
        tracepoint: task.tracepoint,
    };
    let before = DeviceBytes::of_this_process()?;
    let mut measured = match task.way {
        Way::Pread => read_pages(&load, || Buffered::open(&task.file))?,
        Way::Mmap => read_pages(&load, || Mapped::open(&task.file))?,
    };
    measured.misses = (DeviceBytes::of_this_process()?.read - before.read) / PAGE_BYTES as u64;
    if task.way == Way::Mmap {
        measured.syscalls_known = 0;
    }
    Ok(measured)
}
