//! Descriptors of inodes that can be closed and opened again.
//!
//! The kernel names inodes for as long as it likes, so a name must not keep a descriptor. An inode
//! is reached through the first of these that it has:
//!
//! 1. its `O_PATH` descriptor;
//! 2. the storage of its file, while that is open in the cache;
//! 3. one of its places: the directory and the name by which it was found last, or of a file one of
//!    its other names that are known, opened again. What stands there must have the device, number
//!    and kind of the inode; otherwise the answer is `ESTALE`, never another file.
//!
//! A bounded number of `O_PATH` descriptors stays open (second chance, as in CLOCK). Those of the
//! root, of an inode that is being renamed and of one that has lost its names are pinned: no place
//! leads to them, and they are not among the bounded. A rename of a directory changes the place of
//! that directory alone; inodes in it are reached through it.
//!
//! Lock order: the map of open descriptors is never locked together with a slot.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, openat, statat};
use rustix::io::Errno;

use crate::disk::Disk;
use crate::error::Result;
use crate::inode::Inode;

/// Depth of directories beyond which an inode is not reached by its place.
const DEPTH_MAX: usize = 2048;

/// Maximum number of other names of a file that are remembered.
const OTHER_PLACES_MAX: usize = 15;

/// A directory and a name in it.
pub type Place = (Arc<Inode>, OsString);

/// A descriptor of an inode: with `O_PATH`, or that of its open file.
pub type Handle = Arc<dyn AsFd + Send + Sync>;

/// Flags of a descriptor that only names an inode.
const NAME: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Descriptors of an inode, and the way to get another.
#[derive(Default)]
pub struct Slot {
    path: Option<Arc<OwnedFd>>,
    /// Storage of the file, while it is open in the cache.
    disk: Weak<Disk>,
    /// Directory and name by which the inode was found last. None for the root.
    place: Option<Place>,
    /// Other names of a file, the last found last.
    others: Vec<Place>,
    /// References of [`Pinned`], and one while no place is left.
    pins: usize,
    /// Set while all names by which the inode was found are removed.
    is_removed: bool,
    /// Set when the descriptor was used since it was last considered for closing.
    is_used: bool,
    /// Key in [`Handles`], for a descriptor that may be closed.
    key: Option<u64>,
}

/// The open `O_PATH` descriptors that may be closed, of which a bounded number stays.
pub struct Handles {
    max: usize,
    next_key: AtomicU64,
    /// The least recently used first.
    open: Mutex<BTreeMap<u64, Weak<Inode>>>,
}

impl Handles {
    /// Creates an empty map that keeps up to `max` descriptors open.
    pub fn new(max: usize) -> Self {
        Self { max, next_key: AtomicU64::new(0), open: Mutex::default() }
    }

    /// Adds the descriptor of an inode, unless it is pinned, closed or there, and closes others
    /// beyond the maximum.
    pub fn add(&self, inode: &Inode) {
        self.close(self.insert(inode));
    }

    /// Acts as [`Self::add`], but returns how many are beyond the maximum.
    fn insert(&self, inode: &Inode) -> usize {
        let key = {
            let mut slot = inode.slot();
            if slot.path.is_none() || slot.pins > 0 || slot.key.is_some() {
                return 0;
            }
            // Relaxed: only hands out numbers.
            *slot.key.insert(self.next_key.fetch_add(1, Ordering::Relaxed))
        };
        let mut open = self.open.lock();
        open.insert(key, Weak::clone(&inode.this));
        open.len().saturating_sub(self.max)
    }

    /// Removes a descriptor.
    fn remove(&self, key: Option<u64>) {
        if let Some(key) = key {
            self.open.lock().remove(&key);
        }
    }

    /// Closes descriptors because the process has no more.
    pub fn close_most(&self) {
        let count = self.open.lock().len();
        self.close(count - count / 4);
    }

    /// Closes up to `count` descriptors, the least recently used first. Each is considered at most
    /// twice.
    fn close(&self, count: usize) {
        let mut closed = 0;
        let mut left = 2 * self.open.lock().len();
        while closed < count && left > 0 {
            left -= 1;
            let Some((key, inode)) = self.open.lock().pop_first() else { return };
            let Some(inode) = inode.upgrade() else { continue };
            if inode.close_handle(key) {
                closed += 1;
            } else {
                // Among the last, if it may still be closed.
                self.insert(&inode);
            }
        }
    }
}

impl Slot {
    /// Creates the slot of an inode that was just opened.
    pub fn new(handle: OwnedFd, is_root: bool) -> Self {
        Self { path: Some(Arc::new(handle)), pins: usize::from(is_root), ..Self::default() }
    }

    fn handle(&mut self) -> Option<Handle> {
        self.is_used = true;
        if let Some(path) = &self.path {
            return Some(Arc::clone(path) as Handle);
        }
        self.disk.upgrade().map(|disk| disk as Handle)
    }
}

impl Inode {
    /// Returns a descriptor of the inode. It stays open while the result exists.
    ///
    /// # Errors
    /// `ESTALE` if it was closed and the inode is not found where it was last.
    pub fn handle(&self) -> Result<Handle> {
        if let Some(handle) = self.slot().handle() {
            return Ok(handle);
        }
        Ok(self.reopen()? as Handle)
    }

    /// Opens the `O_PATH` descriptor again, and those of directories above that are closed.
    fn reopen(&self) -> Result<Arc<OwnedFd>> {
        let (place, others) = {
            let slot = self.slot();
            (slot.place.clone().ok_or(Errno::STALE)?, slot.others.clone())
        };
        let mut opened = self.reopen_at(place);
        for other in others.into_iter().rev() {
            if opened.is_ok() {
                break;
            }
            opened = self.reopen_at(other);
        }
        opened
    }

    /// Opens the descriptor again at one of the places of the inode.
    fn reopen_at(&self, place: Place) -> Result<Arc<OwnedFd>> {
        let mut names = vec![place];
        let mut handle = loop {
            let above = &names.last().expect("never empty").0;
            if let Some(handle) = above.slot().handle() {
                break handle;
            }
            let place = above.slot().place.clone().ok_or(Errno::STALE)?;
            names.push(place);
            if names.len() > DEPTH_MAX {
                return Err(Errno::STALE.into());
            }
        };
        while let Some((_, name)) = names.pop() {
            let inode = names.last().map_or(self, |(inode, _)| &**inode);
            let opened = inode.reopen_in(&handle, &name)?;
            if names.is_empty() {
                return Ok(opened);
            }
            handle = opened;
        }
        unreachable!("the first name is that of this inode")
    }

    /// Opens the descriptor by a name in a directory.
    fn reopen_in(&self, directory: &Handle, name: &OsStr) -> Result<Arc<OwnedFd>> {
        let opened = self.handles.retry(|| open_name(directory, name));
        let (opened, stat) = opened.map_err(|error| match error {
            Errno::NOENT | Errno::NOTDIR => Errno::STALE,
            other => other,
        })?;
        let is_same = (stat.st_dev, stat.st_ino) == self.key
            && FileType::from_raw_mode(stat.st_mode) == self.kind;
        if !is_same {
            return Err(Errno::STALE.into());
        }
        Ok(self.keep(opened))
    }

    /// Keeps an `O_PATH` descriptor open for later calls, unless another thread was faster.
    fn keep(&self, opened: OwnedFd) -> Arc<OwnedFd> {
        let mut slot = self.slot();
        if let Some(path) = &slot.path {
            return Arc::clone(path);
        }
        let opened = Arc::new(opened);
        slot.path = Some(Arc::clone(&opened));
        slot.is_used = true;
        drop(slot);
        self.handles.add(self);
        opened
    }

    /// Closes the `O_PATH` descriptor, which had this key. Returns `false` if it was used lately,
    /// is pinned, or has another key.
    fn close_handle(&self, key: u64) -> bool {
        let mut slot = self.slot();
        if slot.key != Some(key) {
            return false;
        }
        slot.key = None;
        let is_used = std::mem::take(&mut slot.is_used);
        if is_used || slot.pins > 0 {
            return false;
        }
        let closed = slot.path.take();
        drop(slot);
        drop(closed);
        true
    }

    /// Has the storage of the open file stand in for the `O_PATH` descriptor, which is closed.
    pub fn lend(&self, disk: &Arc<Disk>) {
        let mut slot = self.slot();
        slot.disk = Arc::downgrade(disk);
        if slot.pins > 0 {
            return;
        }
        let (key, closed) = (slot.key.take(), slot.path.take());
        drop(slot);
        self.handles.remove(key);
        drop(closed);
    }

    /// Ends the stay of the descriptor among those that may be closed, before the inode is gone.
    pub fn remove_handle(&mut self) {
        let key = self.slot_mut().key.take();
        self.handles.remove(key);
    }

    /// Opens the `O_PATH` descriptor, if it is closed, and keeps it open until it is unpinned.
    fn pin(&self) -> Result<()> {
        let mut opened = None;
        loop {
            let mut slot = self.slot();
            if let Some(path) = opened.take() {
                slot.path.get_or_insert(path);
            }
            if slot.path.is_some() {
                slot.pins += 1;
                let key = slot.key.take();
                drop(slot);
                self.handles.remove(key);
                return Ok(());
            }
            let disk = slot.disk.upgrade();
            drop(slot);
            opened = Some(match disk {
                None => self.reopen()?,
                Some(disk) => {
                    let (path, flags) = (path_of(&disk), OFlags::PATH | OFlags::CLOEXEC);
                    let open = || rustix::fs::open(&*path, flags, Mode::empty());
                    self.keep(self.handles.retry(open)?)
                }
            });
        }
    }

    /// Takes back one reference of [`Slot::pins`].
    fn unpin(&self) {
        self.slot().pins -= 1;
        self.handles.add(self);
    }

    /// Records where the inode was found. A file that was found elsewhere before has both names.
    pub fn set_place(&self, parent: &Arc<Self>, name: &OsStr) {
        let mut slot = self.slot();
        let is_there = slot.place.as_ref().is_some_and(|place| is_at(place, parent, name));
        if is_there && !slot.is_removed {
            return;
        }
        let mut before = slot.place.replace((Arc::clone(parent), name.to_owned()));
        let known = slot.others.iter().position(|other| is_at(other, parent, name));
        let mut dropped = known.map(|index| slot.others.remove(index));
        if self.kind != FileType::Directory && !slot.is_removed {
            if slot.others.len() == OTHER_PLACES_MAX {
                dropped = Some(slot.others.remove(0));
            }
            slot.others.extend(before.take());
        }
        let was_removed = std::mem::take(&mut slot.is_removed);
        drop(slot);
        // The last reference of a directory ends without a lock.
        drop((before, dropped));
        if was_removed {
            self.unpin();
        }
    }

    /// Returns where the inode was found.
    pub fn places(&self) -> Vec<Place> {
        let slot = self.slot();
        slot.place.iter().chain(&slot.others).cloned().collect()
    }

    /// Records that the inode, which is pinned, is not at a place any more. Without another place
    /// the descriptor stays open until the inode is found again. Returns `true` then.
    pub fn remove_place(&self, parent: &Arc<Self>, name: &OsStr) -> bool {
        let mut slot = self.slot();
        let mut removed = None;
        if let Some(index) = slot.others.iter().position(|other| is_at(other, parent, name)) {
            removed = Some(slot.others.remove(index));
        } else if slot.place.as_ref().is_none_or(|place| is_at(place, parent, name)) {
            if let Some(other) = slot.others.pop() {
                removed = slot.place.replace(other);
            } else if !std::mem::replace(&mut slot.is_removed, true) {
                slot.pins += 1;
            }
        }
        let is_removed = slot.is_removed;
        drop(slot);
        drop(removed);
        is_removed
    }

    /// Runs a call on a path of the inode that needs no search of directories.
    pub fn with_path<R>(&self, call: impl FnOnce(&str) -> rustix::io::Result<R>) -> Result<R> {
        let handle = self.handle()?;
        Ok(call(&path_of(&handle.as_fd()))?)
    }
}

impl Handles {
    /// Makes a call that opens a descriptor, and again after others were closed if there are no
    /// more.
    pub fn retry<R>(
        &self,
        mut call: impl FnMut() -> rustix::io::Result<R>,
    ) -> rustix::io::Result<R> {
        match call() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.close_most();
                call()
            }
            answer => answer,
        }
    }
}

fn is_at((directory, called): &Place, parent: &Arc<Inode>, name: &OsStr) -> bool {
    Arc::ptr_eq(directory, parent) && called == name
}

/// Opens what a name in a directory stands for, and returns its status.
pub fn open_name(directory: &Handle, name: &OsStr) -> rustix::io::Result<(OwnedFd, Stat)> {
    let opened = openat(directory, name, NAME, Mode::empty())?;
    let stat = statat(&opened, c"", AtFlags::EMPTY_PATH)?;
    Ok((opened, stat))
}

/// Returns the path by which the kernel resolves a descriptor.
pub fn path_of(handle: &impl AsFd) -> String {
    format!("/proc/self/fd/{}", handle.as_fd().as_raw_fd())
}

/// Keeps the `O_PATH` descriptor of an inode open while a call takes its name away.
pub struct Pinned<'i>(Option<&'i Inode>);

impl<'i> Pinned<'i> {
    /// Pins the descriptor of an inode that the kernel knows.
    pub fn new(inode: Option<&'i Arc<Inode>>) -> Self {
        // Without a descriptor the call goes on: it is the one that makes room. The inode is then
        // not found any more, unless it is open.
        Self(inode.map(|inode| &**inode).filter(|inode| inode.pin().is_ok()))
    }

    /// Records that the inode is not at a place any more. Returns `true` if it has no other.
    pub fn remove_place(&self, parent: &Arc<Inode>, name: &OsStr) -> bool {
        self.0.is_some_and(|inode| inode.remove_place(parent, name))
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if let Some(inode) = self.0 {
            inode.unpin();
        }
    }
}
