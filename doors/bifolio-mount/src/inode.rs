//! Inodes: what the kernel knows by number, and the table of them.
//!
//! An [`Inode`] has an `O_PATH` descriptor of its file, so that it survives renames and removal,
//! and its number in the source directory cannot be given to another file while the kernel uses it.
//! The table counts the kernel's references (`lookup` adds one, `forget` takes some). An inode
//! leaves the table with its last reference, unless its file is still open in the cache; then it
//! leaves when that is closed.
//!
//! Lock order: the data of an inode, then the table.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fuser::INodeNo;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, openat, statat};
use rustix::io::Errno;

use crate::data::Data;
use crate::error::Result;
use crate::finalize::Queue;

/// Identifies a file on this machine: device and inode number.
pub type Key = (u64, u64);

/// Set in the numbers of inodes that cannot have the number of their file: it is that of the root
/// for FUSE, or they are on another device than the source directory.
const NUMBER_OTHER: u64 = 1 << 63;

/// A file, directory or other inode that the kernel or the cache uses.
pub struct Inode {
    /// Number by which the kernel names the inode. Programs see it as `st_ino`.
    pub number: INodeNo,
    pub key: Key,
    pub kind: FileType,
    /// Descriptor with `O_PATH`.
    pub handle: Arc<OwnedFd>,
    /// References of the kernel.
    lookups: AtomicU64,
    /// `true` while the file is open in the cache.
    pub is_cached: AtomicBool,
    /// A directory and the name in it by which the inode was found last.
    place: Mutex<Option<(INodeNo, OsString)>>,
    /// Queue of files that were changed.
    pub pending_times: Arc<Queue>,
    data: Mutex<Data>,
}

impl Inode {
    /// Locks the data of the inode: its open file and its times. May wait for the device: an open
    /// of the file and its last close hold the lock.
    pub fn data(&self) -> MutexGuard<'_, Data> {
        self.data.lock()
    }

    /// Locks the data of the inode, unless another thread holds the lock.
    pub fn try_data(&self) -> Option<MutexGuard<'_, Data>> {
        self.data.try_lock()
    }

    /// Returns the status of the file in the source directory.
    pub fn stat(&self) -> Result<Stat> {
        Ok(statat(&*self.handle, c"", AtFlags::EMPTY_PATH)?)
    }

    /// Returns a path of the inode that follows it through renames and works after removal.
    pub fn path(&self) -> String {
        path_of(&self.handle)
    }

    /// Opens the inode. `O_PATH` descriptors can neither read nor write.
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        Ok(rustix::fs::open(self.path(), flags | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Returns `true` for a file or directory, which can be opened without side effects.
    pub fn can_be_opened(&self) -> bool {
        matches!(self.kind, FileType::RegularFile | FileType::Directory)
    }

    /// Returns the path in the source directory, for messages.
    pub fn name(&self) -> String {
        std::fs::read_link(self.path())
            .map_or_else(|_| format!("inode {}", self.number), |path| path.display().to_string())
    }

    /// Records where the inode was found.
    pub fn set_place(&self, parent: INodeNo, name: &OsStr) {
        *self.place.lock() = Some((parent, name.to_owned()));
    }
}

impl AsFd for Inode {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// Returns the path by which the kernel resolves a descriptor.
pub fn path_of(handle: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", handle.as_raw_fd())
}

/// All inodes that the kernel or the cache uses.
pub struct Table {
    /// Device of the source directory.
    device: u64,
    next_other: AtomicU64,
    pending_times: Arc<Queue>,
    inodes: RwLock<Inodes>,
}

#[derive(Default)]
struct Inodes {
    by_number: HashMap<INodeNo, Arc<Inode>>,
    by_key: HashMap<Key, Arc<Inode>>,
}

impl Table {
    /// Creates a table with the root directory, which the kernel never forgets. The times of a file
    /// that is open reach the storage when it has not been changed for `finalize_delay`.
    pub fn new(root: OwnedFd, finalize_delay: Duration) -> Result<Self> {
        let stat = statat(&root, c"", AtFlags::EMPTY_PATH)?;
        let table = Self {
            device: stat.st_dev,
            next_other: AtomicU64::new(0),
            pending_times: Arc::new(Queue::new(finalize_delay)),
            inodes: RwLock::default(),
        };
        table.insert(INodeNo::ROOT, root, &stat);
        Ok(table)
    }

    fn insert(&self, number: INodeNo, handle: OwnedFd, stat: &Stat) -> Arc<Inode> {
        let mut inodes = self.inodes.write();
        let key = (stat.st_dev, stat.st_ino);
        if let Some(inode) = inodes.by_key.get(&key) {
            // Another thread was faster. Relaxed: see `find`.
            inode.lookups.fetch_add(1, Ordering::Relaxed);
            return Arc::clone(inode);
        }
        let inode = Arc::new(Inode {
            number,
            key,
            kind: FileType::from_raw_mode(stat.st_mode),
            handle: Arc::new(handle),
            lookups: AtomicU64::new(1),
            is_cached: AtomicBool::new(false),
            place: Mutex::default(),
            pending_times: Arc::clone(&self.pending_times),
            data: Mutex::default(),
        });
        inodes.by_number.insert(number, Arc::clone(&inode));
        inodes.by_key.insert(key, Arc::clone(&inode));
        inode
    }

    /// Looks up a name in a directory. The kernel gets a reference of the inode, which it returns
    /// by [`Self::forget`].
    pub fn lookup(&self, parent: &Inode, name: &OsStr) -> Result<Arc<Inode>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle = openat(parent, name, flags, Mode::empty())?;
        let stat = statat(&handle, c"", AtFlags::EMPTY_PATH)?;
        let inode = match self.find((stat.st_dev, stat.st_ino), true) {
            Some(known) => known,
            None => self.insert(self.number_for(&stat), handle, &stat),
        };
        inode.set_place(parent.number, name);
        Ok(inode)
    }

    fn number_for(&self, stat: &Stat) -> INodeNo {
        let is_usable = stat.st_dev == self.device && stat.st_ino > INodeNo::ROOT.0;
        if is_usable && stat.st_ino < NUMBER_OTHER {
            return INodeNo(stat.st_ino);
        }
        // Relaxed: only hands out numbers.
        INodeNo(NUMBER_OTHER | self.next_other.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the inode with this key, with one more reference of the kernel if `is_lookup`.
    fn find(&self, key: Key, is_lookup: bool) -> Option<Arc<Inode>> {
        let inodes = self.inodes.read();
        let inode = inodes.by_key.get(&key)?;
        // Relaxed: the table's lock keeps `forget`, which reads the count, apart.
        inode.lookups.fetch_add(u64::from(is_lookup), Ordering::Relaxed);
        Some(Arc::clone(inode))
    }

    /// Returns the inode of a name, if the kernel or the cache uses it.
    pub fn known(&self, parent: &Inode, name: &OsStr) -> Option<Arc<Inode>> {
        let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        self.find((stat.st_dev, stat.st_ino), false)
    }

    /// Returns the inode with this number.
    pub fn get(&self, number: INodeNo) -> Result<Arc<Inode>> {
        self.inodes.read().by_number.get(&number).cloned().ok_or(Errno::STALE.into())
    }

    /// Takes references of the kernel. Returns the inode if these were the last and it is still
    /// open in the cache.
    pub fn forget(&self, number: INodeNo, lookups: u64) -> Option<Arc<Inode>> {
        let mut inodes = self.inodes.write();
        let inode = Arc::clone(inodes.by_number.get(&number)?);
        let before = inode.lookups.load(Ordering::Relaxed);
        inode.lookups.store(before.saturating_sub(lookups), Ordering::Relaxed);
        if before > lookups || number == INodeNo::ROOT {
            return None;
        }
        inodes.remove_unused(&inode);
        Some(inode).filter(|inode| inode.is_cached.load(Ordering::Relaxed))
    }

    /// Removes the inode if neither the kernel nor the cache uses it.
    pub fn remove_unused(&self, inode: &Inode) {
        self.inodes.write().remove_unused(inode);
    }

    /// Returns the queue of files that were changed.
    pub fn pending_times(&self) -> &Queue {
        &self.pending_times
    }

    /// Returns all inodes.
    pub fn all(&self) -> Vec<Arc<Inode>> {
        self.inodes.read().by_number.values().cloned().collect()
    }

    /// Returns the number of inodes.
    pub fn len(&self) -> usize {
        self.inodes.read().by_number.len()
    }

    /// Returns up to `count` names of inodes that only the kernel uses, which it may forget.
    pub fn forgettable(&self, count: usize) -> Vec<(INodeNo, OsString)> {
        let inodes = self.inodes.read();
        let unused = inodes.by_number.values();
        let unused = unused.filter(|inode| !inode.is_cached.load(Ordering::Relaxed));
        unused.filter_map(|inode| inode.place.lock().clone()).take(count).collect()
    }
}

impl Inodes {
    fn remove_unused(&mut self, inode: &Inode) {
        let is_used =
            inode.lookups.load(Ordering::Relaxed) > 0 || inode.is_cached.load(Ordering::Relaxed);
        if !is_used && inode.number != INodeNo::ROOT {
            self.by_number.remove(&inode.number);
            self.by_key.remove(&inode.key);
        }
    }
}
