//! The names that the kernel remembers: a bounded number.
//!
//! The kernel keeps a name that it has looked up until it needs the memory, and for it the table
//! has an inode. So when there are more than [`Names::max`], the kernel is told to drop those that
//! were looked up least recently and that no program uses. It then gives its references of the
//! inodes back. Nothing else changes for programs: a name that is used again is looked up again.
//!
//! Linux 6.18 has a request for that (`FUSE_NOTIFY_PRUNE`). An older one is told that names are
//! invalid, of files that are not open. That would also take away what is mounted on the file, so
//! nothing is dropped where this process sees a mount below the target.
//!
//! Names in use, with the directories above them, stay, as many as programs use.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::inode::Inode;
use crate::volume::Volume;

/// Bytes of an inode with its name and its entries in the table, as the allocator counts them.
pub const NAME_BYTES: u64 = 768;
/// Time between two rounds: the references come back later.
const PAUSE: Duration = Duration::from_millis(20);
/// Part of the names that are dropped beyond those that are too many.
const DIVISOR_OF_ROUND: usize = 8;
/// Maximum number of inodes in a notification.
const INODES_MAX: usize = 256;

/// Codes of notifications: `FUSE_NOTIFY_INVAL_ENTRY`, `FUSE_NOTIFY_PRUNE`.
const INVALIDATE_ENTRY: i32 = 3;
const PRUNE: i32 = 9;

/// The bound on names.
pub struct Names {
    max: usize,
    is_full: Mutex<bool>,
    filled: Condvar,
}

impl Names {
    pub fn new(max: usize) -> Self {
        Self { max, is_full: Mutex::new(false), filled: Condvar::new() }
    }

    /// Records that the kernel gets a name, of so many.
    pub fn note(&self, count: usize) {
        if count > self.max && !std::mem::replace(&mut *self.is_full.lock(), true) {
            self.filled.notify_one();
        }
    }
}

/// Has the kernel drop names for as long as the program runs. `kernel` is a descriptor of the
/// connection.
pub fn serve(volume: &Volume, kernel: &OwnedFd, target: &Path) {
    let names = &volume.names;
    let mut can_prune = true;
    loop {
        let mut is_full = names.is_full.lock();
        while !std::mem::take(&mut *is_full) {
            names.filled.wait(&mut is_full);
        }
        drop(is_full);
        let excess = volume.table.len().saturating_sub(names.max);
        let count = excess + names.max / DIVISOR_OF_ROUND + 1;
        let inodes = volume.table.least_recently_looked_up(count);
        for some in inodes.chunks(INODES_MAX) {
            // Another error is the end of the connection.
            can_prune = can_prune && prune(kernel, some) != Err(Errno::INVAL);
        }
        if !can_prune && !has_mounts_below(target) {
            inodes.iter().for_each(|inode| invalidate(kernel, inode));
        }
        drop(inodes);
        thread::sleep(PAUSE);
    }
}

/// Sends a notification: the header (`fuse_out_header`) and its parts.
fn notify(kernel: &OwnedFd, code: i32, parts: [&[u8]; 3]) -> rustix::io::Result<()> {
    let mut header = [0; 16];
    let length = header.len() + parts.iter().map(|part| part.len()).sum::<usize>();
    header[..4].copy_from_slice(&(length as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&code.to_ne_bytes());
    let [first, second, third] = parts.map(IoSlice::new);
    rustix::io::writev(kernel, &[IoSlice::new(&header), first, second, third]).map(drop)
}

/// Has the kernel drop all names of inodes that no program uses.
fn prune(kernel: &OwnedFd, inodes: &[Arc<Inode>]) -> rustix::io::Result<()> {
    // fuse_notify_prune_out, then the numbers.
    let mut head = [0; 16];
    head[..4].copy_from_slice(&(inodes.len() as u32).to_ne_bytes());
    let numbers: Vec<u8> = inodes.iter().flat_map(|inode| inode.number.0.to_ne_bytes()).collect();
    notify(kernel, PRUNE, [&head, &numbers, &[]])
}

/// Has the kernel drop the names of a file that no program has open.
fn invalidate(kernel: &OwnedFd, inode: &Inode) {
    let is_open = inode.try_data().is_none_or(|data| data.is_open());
    if inode.kind == FileType::Directory || is_open {
        return;
    }
    for (parent, name) in inode.places() {
        // fuse_notify_inval_entry_out, then the name.
        let mut head = [0; 16];
        head[..8].copy_from_slice(&parent.number.0.to_ne_bytes());
        head[8..12].copy_from_slice(&(name.len() as u32).to_ne_bytes());
        // It may be gone.
        let _ = notify(kernel, INVALIDATE_ENTRY, [&head, name.as_bytes(), b"\0"]);
    }
}

/// Returns `true` if another file system is mounted below a directory, or that is not known.
fn has_mounts_below(directory: &Path) -> bool {
    // Blanks and the like are written in octal: what is before the first must be the same.
    let name = directory.as_os_str().as_bytes();
    let plain = name.iter().take_while(|byte| byte.is_ascii_graphic() && **byte != b'\\');
    let prefix: Vec<u8> = plain.copied().collect();
    let mounts = std::fs::read("/proc/self/mounts");
    mounts.map_or(true, |mounts| {
        let mut places = mounts
            .split(|byte| *byte == b'\n')
            .filter_map(|line| line.split(|byte| *byte == b' ').nth(1));
        places.any(|place| place.starts_with(&prefix) && place.len() > name.len())
    })
}
