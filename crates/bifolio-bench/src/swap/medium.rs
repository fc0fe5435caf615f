//! The kinds of the file: in a cache that swaps out, or on tmpfs that is swapped out. Each in a
//! child process.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bifolio::Cache;
use serde::{Deserialize, Serialize};

use super::work::{Done, Load};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::device_bytes::DeviceBytes;
use crate::harness::memory_group::{Membership, patiently};
use crate::harness::resident;

/// The series.
pub(super) const BIFOLIO: &str = "bifolio_swap";
pub(super) const KERNEL: &str = "kernel_swap";

/// A file that the phases read and write.
pub(super) trait Medium {
    fn series(&self) -> &'static str;
    fn write(&self, bytes: &[u8], pos_bytes: u64) -> Result<()>;
    fn read(&self, bytes: &mut [u8], pos_bytes: u64) -> Result<()>;
    /// Bytes that have gone to the disk and come back so far.
    fn moved(&self) -> Result<DeviceBytes>;
}

/// The task of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) memory_kind: MemoryKind,
    pub(super) load: Load,
}

/// The kind of the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum MemoryKind {
    /// A cache that swaps out into this directory.
    Bifolio { directory: PathBuf },
    /// A file to be made on a tmpfs, by a process in this control group.
    Kernel { group: Membership, file: PathBuf },
}

/// The result of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// By phase.
    pub(super) done: Vec<Done>,
    pub(super) verified_bytes: u64,
    /// Of the process, or of the control group.
    pub(super) peak_bytes: u64,
}

/// Runs the child's side.
pub(super) fn run(task: &Task) -> Result<Answer> {
    match &task.memory_kind {
        MemoryKind::Bifolio { directory } => swap(&task.load, directory),
        MemoryKind::Kernel { group, file } => kernel_swap(&task.load, group, file),
    }
}

fn swap(load: &Load, directory: &Path) -> Result<Answer> {
    let builder = Cache::builder().memory(load.sizes.memory_bytes).swap_directory(directory);
    let swapping = Swapping(Cached::in_memory(builder, PAGE_BYTES as u64)?);
    let (done, verified_bytes) = load.run(&swapping)?;
    let peak_bytes = resident::peak_bytes()?;
    swapping.0.close()?;
    Ok(Answer { done, verified_bytes, peak_bytes })
}

fn kernel_swap(load: &Load, group: &Membership, path: &Path) -> Result<Answer> {
    group.join()?;
    let options = File::options().read(true).write(true).create_new(true).clone();
    let file = options.open(path).map_err(Error::system("make a file on tmpfs"))?;
    // Its name goes now: its memory and its swap go with this process, whatever happens.
    std::fs::remove_file(path).map_err(Error::system("remove a file from tmpfs"))?;
    let (done, verified_bytes) = load.run(&Swapped(file))?;
    Ok(Answer { done, verified_bytes, peak_bytes: group.peak_bytes()? })
}

/// A memory file in a cache with a swap.
struct Swapping(Cached);

impl Medium for Swapping {
    fn series(&self) -> &'static str {
        BIFOLIO
    }

    fn write(&self, bytes: &[u8], pos_bytes: u64) -> Result<()> {
        Ok(self.0.file.write_all_at(bytes, pos_bytes)?)
    }

    fn read(&self, bytes: &mut [u8], pos_bytes: u64) -> Result<()> {
        Ok(self.0.file.read_exact_at(bytes, pos_bytes)?)
    }

    fn moved(&self) -> Result<DeviceBytes> {
        let stats = self.0.stats();
        let bytes = |pages: u64| pages * PAGE_BYTES as u64;
        Ok(DeviceBytes {
            read: bytes(stats.swapped_in_pages),
            written: bytes(stats.swapped_out_pages),
        })
    }
}

/// A file on tmpfs.
struct Swapped(File);

impl Medium for Swapped {
    fn series(&self) -> &'static str {
        KERNEL
    }

    fn write(&self, bytes: &[u8], pos_bytes: u64) -> Result<()> {
        let written = patiently(|| self.0.write_all_at(bytes, pos_bytes));
        written.map_err(Error::system("write a file on tmpfs"))
    }

    fn read(&self, bytes: &mut [u8], pos_bytes: u64) -> Result<()> {
        let read = patiently(|| self.0.read_exact_at(bytes, pos_bytes));
        read.map_err(Error::system("read a file on tmpfs"))
    }

    fn moved(&self) -> Result<DeviceBytes> {
        DeviceBytes::of_swap()
    }
}
