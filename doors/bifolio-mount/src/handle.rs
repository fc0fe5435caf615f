//! Descriptors of inodes that can be closed and opened again.
//!
//! The kernel names inodes for as long as it likes, so a name must not keep a descriptor. An inode
//! is reached through the first of these that it has:
//!
//! 1. its `O_PATH` descriptor;
//! 2. the storage of its file, while that is open in the cache;
//! 3. its place: the directory and the name by which it was found last, opened again. What stands
//!    there must have the device, number and kind of the inode; otherwise the answer is `ESTALE`,
//!    never another file.
//!
//! A bounded number of `O_PATH` descriptors stays open (second chance, as in CLOCK). Those of the
//! root, of an inode that is being renamed and of one that has lost its name are pinned: no place
//! leads to them. A rename of a directory changes the place of that directory alone; inodes in it
//! are reached through it.
//!
//! Lock order: the list of open descriptors is never locked together with a slot.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, openat, statat};
use rustix::io::Errno;

use crate::disk::Disk;
use crate::error::Result;
use crate::inode::Inode;

/// Depth of directories beyond which an inode is not reached by its place.
const DEPTH_MAX: usize = 2048;

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
    place: Option<(Arc<Inode>, OsString)>,
    /// References of [`Pinned`], and one while the place is known to be wrong.
    pins: usize,
    /// Set while the name by which the inode was found is removed.
    is_removed: bool,
    /// Set when the descriptor was used since it was last considered for closing.
    is_used: bool,
}

/// The open `O_PATH` descriptors, of which a bounded number stays.
pub struct Handles {
    max: usize,
    open: Mutex<VecDeque<Weak<Inode>>>,
}

impl Handles {
    /// Creates an empty list that keeps up to `max` descriptors open.
    pub fn new(max: usize) -> Self {
        Self { max, open: Mutex::default() }
    }

    /// Records an inode whose descriptor was opened, and closes others beyond the maximum.
    pub fn note_opened(&self, inode: &Inode) {
        let excess = {
            let mut open = self.open.lock();
            open.push_back(Weak::clone(&inode.this));
            open.len().saturating_sub(self.max)
        };
        self.close(excess);
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
            let Some(entry) = self.open.lock().pop_front() else { return };
            let is_open = entry.upgrade().is_some_and(|inode| !inode.close_handle());
            if is_open {
                self.open.lock().push_back(entry);
            } else {
                closed += 1;
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
        let place = |inode: &Self| inode.slot().place.clone().ok_or(Errno::STALE);
        let mut names = vec![place(self)?];
        let mut handle = loop {
            let above = &names.last().expect("never empty").0;
            if let Some(handle) = above.slot().handle() {
                break handle;
            }
            let place = place(above)?;
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
        self.handles.note_opened(self);
        opened
    }

    /// Closes the `O_PATH` descriptor. Returns `false` if it was used lately or is pinned.
    fn close_handle(&self) -> bool {
        let mut slot = self.slot();
        if slot.path.is_none() {
            return true;
        }
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
        if slot.pins == 0 {
            slot.path = None;
        }
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

    /// Records where the inode was found.
    pub fn set_place(&self, parent: &Arc<Self>, name: &OsStr) {
        let mut slot = self.slot();
        let before = slot.place.replace((Arc::clone(parent), name.to_owned()));
        if std::mem::take(&mut slot.is_removed) {
            slot.pins -= 1;
        }
        drop(slot);
        // The last reference of a directory ends without a lock.
        drop(before);
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

    /// Records that the name is gone: the descriptor stays open until the inode is found again.
    pub fn note_removed(&self) {
        if let Some(inode) = self.0 {
            let mut slot = inode.slot();
            if !std::mem::replace(&mut slot.is_removed, true) {
                slot.pins += 1;
            }
        }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if let Some(inode) = self.0 {
            inode.slot().pins -= 1;
        }
    }
}
