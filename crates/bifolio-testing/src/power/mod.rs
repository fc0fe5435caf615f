//! A disk that loses power: a block device with a volatile cache, below a file system of the
//! kernel.
//!
//! ```text
//!   file system (ext4, XFS) -> loop device -> one file of FUSE -> `device.rs`, in this process
//! ```
//!
//! The loop device passes each flush of the file system on as an `fsync` of the file. At a cut the
//! device keeps a random part of what was written since the last one, in sectors, and from then on
//! fails every write and flush, so that nothing is acknowledged that a later mount cannot show.
//!
//! The mounts are in a namespace of the thread that makes the disk, and of the processes that it
//! starts: they end with them.
//!
//! # Safety
//! System calls with strings and descriptors that live as long as the call.
#![allow(unsafe_code)]

mod device;
mod fuse;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use device::Device;
use tempfile::TempDir;

/// Time in which the processes that use a mount must end.
const UNMOUNT_MAX: Duration = Duration::from_secs(20);

/// File system on a [`PowerDisk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// With its journal, data ordered before metadata.
    Ext4,
    /// With its log on the same device.
    Xfs,
}

impl FileSystem {
    fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// Bytes of the device: XFS refuses less than 300 MiB.
    fn device_bytes(self) -> usize {
        match self {
            Self::Ext4 => 64 << 20,
            Self::Xfs => 320 << 20,
        }
    }

    fn make(self, device: &Path) -> io::Result<()> {
        let mut command = Command::new(format!("mkfs.{}", self.name()));
        match self {
            Self::Ext4 => command.args(["-q", "-E", "nodiscard,lazy_itable_init=0"]),
            Self::Xfs => command.args(["-q", "-f", "-K"]),
        };
        run(command.arg(device)).map(drop)
    }
}

/// A file system on a device that can lose its power; unmounted on drop.
#[derive(Debug)]
pub struct PowerDisk {
    kind: FileSystem,
    device: Arc<Device>,
    /// Has the file of FUSE, `device`, and the root of the file system, `root`.
    directory: TempDir,
    loop_device: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl PowerDisk {
    /// Makes a file system and mounts it.
    ///
    /// # Errors
    /// A step that this process may not do, or a program that is missing: its caller skips the
    /// test.
    pub fn new(kind: FileSystem, seed: u64) -> io::Result<Self> {
        own_mounts()?;
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("device");
        File::create(&file)?;
        std::fs::create_dir(directory.path().join("root"))?;
        let fuse = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = format!("fd={},rootmode=100600,user_id=0,group_id=0", fuse.as_raw_fd());
        mount("bifolio-power", &file, "fuse", &options)?;
        let device = Arc::new(Device::new(kind.device_bytes(), seed));
        let served = Arc::clone(&device);
        let server = Some(thread::spawn(move || fuse::serve(fuse, &served)));
        let loop_device = PathBuf::new();
        let mut disk = Self { kind, device, directory, loop_device, server };
        let shown = run(Command::new("losetup").args(["--find", "--show"]).arg(&file))?;
        disk.loop_device = PathBuf::from(shown.trim());
        kind.make(&disk.loop_device)?;
        disk.mount()?;
        Ok(disk)
    }

    /// Returns the root of the file system.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    /// Cuts the power when the device is about to serve so many more writes and flushes.
    pub fn cut_after(&self, requests: u64) {
        self.device.cut_after(requests);
    }

    /// Cuts the power now, if it was not yet.
    pub fn cut(&self) {
        self.device.cut();
    }

    /// Returns `true` after a cut.
    pub fn is_cut(&self) -> bool {
        self.device.is_cut()
    }

    /// Returns the number of sectors that lost their last bytes at cuts, and that of those that
    /// were not flushed and kept them.
    pub fn lost_and_kept(&self) -> (u64, u64) {
        self.device.lost_and_kept()
    }

    /// Makes the device ignore flushes from now on: what a test must find.
    pub fn forget_flushes(&self) {
        self.device.forget_flushes();
    }

    /// Gives the device its power back, and mounts the file system again, as after a boot. No
    /// process may use it.
    ///
    /// # Errors
    /// A process that does; a file system that cannot be mounted.
    pub fn restart(&self) -> io::Result<()> {
        self.unmount()?;
        self.device.restart();
        self.mount()
    }

    fn mount(&self) -> io::Result<()> {
        mount(&self.loop_device, &self.path(), self.kind.name(), "")
    }

    /// The last transfers of a process that was killed may still hold the file system.
    fn unmount(&self) -> io::Result<()> {
        let (path, begun) = (c_string(&self.path())?, Instant::now());
        loop {
            // SAFETY: a string that ends in zero.
            if unsafe { libc::umount2(path.as_ptr(), 0) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) || begun.elapsed() > UNMOUNT_MAX {
                return Err(told("unmounting", error));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for PowerDisk {
    fn drop(&mut self) {
        self.device.cut();
        let detach = |path: PathBuf| {
            let Ok(path) = c_string(&path) else { return };
            // SAFETY: a string that ends in zero. What still uses the mount keeps it until it ends.
            unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        };
        detach(self.path());
        if !self.loop_device.as_os_str().is_empty() {
            let _ = Command::new("losetup").arg("--detach").arg(&self.loop_device).output();
        }
        detach(self.directory.path().join("device"));
        // It ends when the last user of the mount has.
        drop(self.server.take());
    }
}

/// Gives this thread, and what it starts, mounts of their own.
fn own_mounts() -> io::Result<()> {
    // SAFETY: changes only the mounts that this thread sees.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(told("mounts of our own", io::Error::last_os_error()));
    }
    let (root, flags) = (c"/".as_ptr(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: a string that ends in zero; the other pointers are unused for these flags.
    let answer = unsafe { libc::mount(ptr::null(), root, ptr::null(), flags, ptr::null()) };
    if answer != 0 {
        return Err(told("private mounts", io::Error::last_os_error()));
    }
    Ok(())
}

fn mount(source: impl AsRef<Path>, target: &Path, kind: &str, options: &str) -> io::Result<()> {
    let [source, target] = [source.as_ref(), target].map(c_string);
    let [kind, options] = [kind, options].map(CString::new);
    let (source, target, kind, options) = (source?, target?, kind?, options?);
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    let (from, to) = (source.as_ptr(), target.as_ptr());
    // SAFETY: strings that end in zero.
    let answer = unsafe { libc::mount(from, to, kind.as_ptr(), flags, options.as_ptr().cast()) };
    if answer != 0 {
        let what = format!("mounting {}", kind.to_string_lossy());
        return Err(told(&what, io::Error::last_os_error()));
    }
    Ok(())
}

fn c_string(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_encoded_bytes())?)
}

fn told(what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Runs a command and returns what it printed.
fn run(command: &mut Command) -> io::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| told(&program, error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let problem = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{command:?}: {}", problem.trim())))
}
