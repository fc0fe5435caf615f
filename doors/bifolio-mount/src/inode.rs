//! Inodes: what the kernel knows by number, and the table of them.
//!
//! `handle.rs` says how an [`Inode`] is reached in the source directory. The table counts the
//! kernel's references (`lookup` adds one, `forget` takes some). An inode leaves the table with its
//! last reference, unless its file is still open in the cache; then it leaves when that is closed.
//!
//! Lock order: the data of an inode, then the table, then the slot of an inode.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use fuser::INodeNo;
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, statat, utimensat,
};
use rustix::io::Errno;

use crate::attributes::timespec;
use crate::data::Data;
use crate::error::Result;
use crate::finalize::Queue;
use crate::handle::{Handles, Slot, open_name, path_of};

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
    pub this: Weak<Inode>,
    slot: Mutex<Slot>,
    pub handles: Arc<Handles>,
    /// References of the kernel.
    lookups: AtomicU64,
    /// Number of the last lookup, of those of the table.
    looked_up: AtomicU64,
    /// `true` while the file is open in the cache.
    pub is_cached: AtomicBool,
    /// Queue of files that were changed.
    pub pending_times: Arc<Queue>,
    data: Mutex<Data>,
    /// Locked while a program opens the file for writing, and shared while none may.
    writing: RwLock<()>,
    /// Bytes that the kernel may have in its page cache, if no program has the file open for
    /// writing.
    pub kernel_bytes: AtomicU64,
    /// `true` while a program has the file open for writing.
    pub is_written: AtomicBool,
}

impl Inode {
    /// Keeps programs from opening the file for writing until the result is dropped. Returns `None`
    /// if one has it open for reading and writing, and may map it.
    pub fn hold_unmapped(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let held = self.writing.read();
        (!self.data().may_be_mapped()).then_some(held)
    }

    /// Keeps programs from opening the file for writing until the result is dropped. Returns `None`
    /// if one has it open so, or is about to.
    pub fn hold_unwritten(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let held = self.writing.try_read()?;
        (!self.data().has_writers()).then_some(held)
    }

    /// Waits until nothing relies on the file not being written, and keeps it so.
    pub fn allow_writing(&self) -> RwLockWriteGuard<'_, ()> {
        self.writing.write()
    }

    /// Locks the data of the inode: its open file and its times. May wait for the device: an open
    /// of the file and its last close hold the lock.
    pub fn data(&self) -> MutexGuard<'_, Data> {
        self.data.lock()
    }

    /// Locks the data of the inode, unless another thread holds the lock.
    pub fn try_data(&self) -> Option<MutexGuard<'_, Data>> {
        self.data.try_lock()
    }

    /// Returns the descriptors of the inode.
    pub fn slot_mut(&mut self) -> &mut Slot {
        self.slot.get_mut()
    }

    /// Locks the descriptors of the inode, for a moment.
    pub fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock()
    }

    /// Returns the status of the file in the source directory.
    pub fn stat(&self) -> Result<Stat> {
        Ok(statat(self.handle()?, c"", AtFlags::EMPTY_PATH)?)
    }

    /// Opens the inode. `O_PATH` descriptors can neither read nor write.
    pub fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        let open = |path: &str| {
            let open = || rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
            self.handles.retry(open)
        };
        self.with_path(open)
    }

    /// Returns `true` for a file or directory, which can be opened without side effects.
    pub fn can_be_opened(&self) -> bool {
        matches!(self.kind, FileType::RegularFile | FileType::Directory)
    }

    /// Returns `true` if the kernel or the cache uses the inode.
    pub fn is_used(&self) -> bool {
        // Relaxed: the lock of the table keeps changes apart from those who must see them.
        self.lookups.load(Ordering::Relaxed) > 0 || self.is_cached.load(Ordering::Relaxed)
    }

    /// Returns `true` if the inode has no name any more.
    pub fn is_removed(&self) -> bool {
        self.stat().is_ok_and(|stat| stat.st_nlink == 0)
    }

    /// Sets the modification time of the file in the source directory.
    pub fn set_modified(&self, modified: SystemTime) -> Result<()> {
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: timespec(modified),
        };
        self.with_path(|path| utimensat(CWD, path, &times, AtFlags::empty()))
    }

    /// Returns the path in the source directory, for messages.
    pub fn name(&self) -> String {
        let handle = self.handle();
        let path = handle.ok().and_then(|handle| std::fs::read_link(path_of(&handle)).ok());
        path.map_or_else(|| format!("inode {}", self.number), |path| path.display().to_string())
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        self.remove_handle();
    }
}

/// All inodes that the kernel or the cache uses.
pub struct Table {
    /// Device of the source directory.
    device: u64,
    next_other: AtomicU64,
    next_lookup: AtomicU64,
    pending_times: Arc<Queue>,
    handles: Arc<Handles>,
    inodes: RwLock<Inodes>,
}

#[derive(Default)]
struct Inodes {
    by_number: HashMap<INodeNo, Arc<Inode>>,
    by_key: HashMap<Key, Arc<Inode>>,
}

impl Table {
    /// Creates a table with the root directory, which the kernel never forgets. The times of a file
    /// that is open reach the storage when it has not been changed for `finalize_delay`. Up to
    /// `handles_max` inodes have a descriptor beside those of open files.
    pub fn new(root: OwnedFd, finalize_delay: Duration, handles_max: usize) -> Result<Self> {
        let stat = statat(&root, c"", AtFlags::EMPTY_PATH)?;
        let table = Self {
            device: stat.st_dev,
            next_other: AtomicU64::new(0),
            next_lookup: AtomicU64::new(0),
            pending_times: Arc::new(Queue::new(finalize_delay)),
            handles: Arc::new(Handles::new(handles_max)),
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
        let inode = Arc::new_cyclic(|this| Inode {
            number,
            key,
            kind: FileType::from_raw_mode(stat.st_mode),
            this: Weak::clone(this),
            slot: Mutex::new(Slot::new(handle, number == INodeNo::ROOT)),
            handles: Arc::clone(&self.handles),
            lookups: AtomicU64::new(1),
            looked_up: AtomicU64::new(0),
            is_cached: AtomicBool::new(false),
            pending_times: Arc::clone(&self.pending_times),
            data: Mutex::default(),
            writing: RwLock::default(),
            kernel_bytes: AtomicU64::new(0),
            is_written: AtomicBool::new(false),
        });
        inodes.by_number.insert(number, Arc::clone(&inode));
        inodes.by_key.insert(key, Arc::clone(&inode));
        inode
    }

    /// Looks up a name in a directory. The kernel gets a reference of the inode, which it returns
    /// by [`Self::forget`].
    pub fn lookup(&self, parent: &Arc<Inode>, name: &OsStr) -> Result<Arc<Inode>> {
        let directory = parent.handle()?;
        let (handle, stat) = self.handles.retry(|| open_name(&directory, name))?;
        Ok(self.found(parent, name, handle, &stat))
    }

    /// Returns the inode of a name, which `handle` is a descriptor of, as [`Self::lookup`] does.
    pub fn found(
        &self,
        parent: &Arc<Inode>,
        name: &OsStr,
        handle: OwnedFd,
        stat: &Stat,
    ) -> Arc<Inode> {
        let inode = match self.find((stat.st_dev, stat.st_ino), true) {
            Some(known) => {
                known.set_place(parent, name);
                known
            }
            None => {
                let inode = self.insert(self.number_for(stat), handle, stat);
                inode.set_place(parent, name);
                self.handles.add(&inode);
                inode
            }
        };
        // Relaxed: only orders names, roughly.
        let number = self.next_lookup.fetch_add(1, Ordering::Relaxed);
        inode.looked_up.store(number, Ordering::Relaxed);
        inode
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
        let directory = parent.handle().ok()?;
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        self.find((stat.st_dev, stat.st_ino), false)
    }

    /// Returns the inode with this number.
    pub fn get(&self, number: INodeNo) -> Result<Arc<Inode>> {
        self.inodes.read().by_number.get(&number).cloned().ok_or(Errno::STALE.into())
    }

    /// Takes references of the kernel. Returns the inode if these were the last.
    pub fn forget(&self, number: INodeNo, lookups: u64) -> Option<Arc<Inode>> {
        let mut inodes = self.inodes.write();
        let inode = Arc::clone(inodes.by_number.get(&number)?);
        let before = inode.lookups.load(Ordering::Relaxed);
        inode.lookups.store(before.saturating_sub(lookups), Ordering::Relaxed);
        if before > lookups || number == INodeNo::ROOT {
            return None;
        }
        inodes.remove_unused(&inode);
        Some(inode)
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

    /// Returns the descriptors of inodes.
    pub fn handles(&self) -> &Handles {
        &self.handles
    }

    /// Returns the inodes with names that the kernel has looked up least recently.
    pub fn least_recently_looked_up(&self, count: usize) -> Vec<Arc<Inode>> {
        // Relaxed: as in `lookup`.
        let order = |inode: &Arc<Inode>| inode.looked_up.load(Ordering::Relaxed);
        let inodes = self.inodes.read();
        let of_kernel = |inode: &&Arc<Inode>| inode.lookups.load(Ordering::Relaxed) > 0;
        let numbered = inodes.by_number.values().filter(of_kernel);
        let mut numbered: Vec<_> = numbered.map(|inode| (order(inode), inode)).collect();
        let count = count.min(numbered.len());
        if count > 0 {
            numbered.select_nth_unstable_by_key(count - 1, |(order, _)| *order);
        }
        numbered[..count].iter().map(|(_, inode)| Arc::clone(inode)).collect()
    }

    /// Returns the number of inodes.
    pub fn len(&self) -> usize {
        self.inodes.read().by_number.len()
    }
}

impl Inodes {
    fn remove_unused(&mut self, inode: &Inode) {
        if !inode.is_used() && inode.number != INodeNo::ROOT {
            self.by_number.remove(&inode.number);
            self.by_key.remove(&inode.key);
        }
    }
}
