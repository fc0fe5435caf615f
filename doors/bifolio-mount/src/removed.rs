//! Files that have lost their last name, whose space is not free yet.
//!
//! A program that removes a file and at once needs its space expects to have it. The kernel tells
//! of the last close and of the end of the inode later, in requests that nothing waits for. So a
//! write that finds no space waits for those of files that no program seems to have open, before it
//! is refused.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::inode::Inode;

/// Maximum time for which writes wait for a file. On a machine with work the kernel's requests take
/// milliseconds.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Time after which a file that was not closed before is looked at again.
const LOOK_AFTER: Duration = Duration::from_millis(10);
/// Time in which the storage frees the space of a file that is gone: other threads may still use
/// its descriptors for a moment.
const FREED_AFTER: Duration = Duration::from_millis(100);

/// Removed files.
#[derive(Default)]
pub struct Removed {
    devices: Mutex<HashMap<u64, Device>>,
    changed: Condvar,
}

#[derive(Default)]
struct Device {
    files: Vec<File>,
    /// When the last of them was seen to be gone.
    gone: Option<Instant>,
}

struct File {
    inode: Weak<Inode>,
    /// Since when a write waits.
    awaited: Option<Instant>,
}

impl File {
    fn is_gone(&self) -> bool {
        self.inode.upgrade().is_none_or(|inode| !inode.is_used())
    }

    /// Returns `true` if no program seems to have it open.
    fn is_leaving(&self) -> bool {
        let is_closed = |inode: Arc<Inode>| inode.try_data().is_none_or(|data| data.seems_closed());
        self.inode.upgrade().is_some_and(is_closed)
    }
}

impl Device {
    /// Forgets files that are gone.
    fn look(&mut self) {
        let before = self.files.len();
        self.files.retain(|file| !file.is_gone());
        if self.files.len() < before {
            self.gone = Some(Instant::now());
        }
    }

    /// Returns `true` if a file is expected to go soon. Files that were awaited for too long are
    /// never awaited again.
    fn is_awaited(&mut self) -> bool {
        let now = Instant::now();
        let mut is_awaited = self.gone.is_some_and(|gone| now - gone < FREED_AFTER);
        self.files.retain_mut(|file| {
            let is_leaving = file.is_leaving();
            let waits = !is_leaving || now - *file.awaited.get_or_insert(now) < WAIT_MAX;
            is_awaited |= is_leaving && waits;
            waits
        });
        is_awaited
    }
}

impl Removed {
    /// Adds a file that has lost its last name.
    pub fn add(&self, inode: &Inode) {
        let mut devices = self.devices.lock();
        let file = File { inode: Weak::clone(&inode.this), awaited: None };
        devices.entry(inode.key.0).or_default().files.push(file);
    }

    /// Looks for files of a device that are gone.
    pub fn note_gone(&self, device: u64) {
        let mut devices = self.devices.lock();
        if let Some(device) = devices.get_mut(&device).filter(|device| !device.files.is_empty()) {
            device.look();
            self.changed.notify_all();
        }
    }

    /// Waits until a file of the device is gone, or a moment if one has just gone. Returns `false`
    /// if there is none to wait for: there is not going to be more space.
    pub fn wait(&self, device: u64) -> bool {
        let mut devices = self.devices.lock();
        let Some(of_device) = devices.get_mut(&device) else { return false };
        of_device.look();
        let is_awaited = of_device.is_awaited();
        if is_awaited {
            self.changed.wait_for(&mut devices, LOOK_AFTER);
        }
        is_awaited
    }
}
