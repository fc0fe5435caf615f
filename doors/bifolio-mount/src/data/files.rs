//! The files that are open in the cache: opens, closes, and the files that are kept in between.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use bifolio::backing::Backing;
use bifolio::{Cache, OpenOptions};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::Stat;

use super::{Access, Data, Opened, Opening};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::failures::Failures;
use crate::finalize::Reason;
use crate::handle::path_of;
use crate::inode::{Inode, Table};
use crate::kernel_pages::KernelPages;
use crate::removed::Removed;
use crate::room::Space;

/// The files that are open in the cache.
pub struct Files {
    pub cache: Cache,
    table: Arc<Table>,
    /// Files that no program has open, by device: one that hangs must not hinder the closing of
    /// files of others.
    kept: Mutex<HashMap<u64, Kept>>,
    /// Maximum number of kept files of all devices.
    kept_max: usize,
    /// Maximum number of open files with direct transfers, which take two descriptors.
    direct_files_max: usize,
    /// A reference for each of them.
    direct_files: Arc<()>,
    /// Files without a name whose space is not free yet.
    pub removed: Removed,
    pub kernel_pages: KernelPages,
    /// Free space of each device.
    spaces: Mutex<HashMap<u64, Arc<Space>>>,
    /// Stores to maps that could not be written, for the end of the mount.
    lost: Mutex<Vec<String>>,
}

/// The files of a device that no program has open.
#[derive(Default)]
struct Kept {
    /// The least recently closed first.
    files: VecDeque<Weak<Inode>>,
    /// Threads that close some of them now.
    closers: usize,
}

/// Length up to which a file gets a table for [`SHORT_LEN_MAX`] bytes, which costs less to open:
/// few of them grow. A longer one gets what is usual.
const SHORT_BYTES_MAX: u64 = SHORT_LEN_MAX / 4;
const SHORT_LEN_MAX: u64 = 64 << 20;
/// Maximum number of lines about lost stores at the end of a mount.
const LOST_MAX: usize = 100;
/// Maximum number of threads that close kept files of a device.
const CLOSERS_MAX: usize = 4;

impl Files {
    pub fn new(cache: Cache, table: Arc<Table>, kept_max: usize, direct_files_max: usize) -> Self {
        Self {
            cache,
            table,
            kept: Mutex::default(),
            kept_max,
            direct_files_max,
            direct_files: Arc::default(),
            removed: Removed::default(),
            kernel_pages: KernelPages::new(u64::MAX),
            spaces: Mutex::default(),
            lost: Mutex::default(),
        }
    }

    /// Opens the file for a program or an operation; [`Self::release`] ends that, with the same
    /// access.
    pub fn open(&self, inode: &Inode, access: Access) -> Result<Opening> {
        self.open_with(inode, access, None)
    }

    /// Acts as [`Self::open`], for a file that was just created and has this status.
    pub fn open_with(
        &self,
        inode: &Inode,
        access: Access,
        status: Option<Stat>,
    ) -> Result<Opening> {
        let for_writing = access != Access::Read;
        let _allowed = for_writing.then(|| inode.allow_writing());
        let mut data = inode.data();
        let is_open = |opened: &Opened| opened.is_writable || !for_writing;
        if !data.opened.as_ref().is_some_and(is_open) {
            let opened = match self.open_disk(inode, for_writing, status) {
                Err(error) if error.is_out_of_descriptors() => {
                    drop(data);
                    self.table.handles().close_most();
                    let device = inode.key.0;
                    self.close_kept(device, self.kept_of(device).div_ceil(4));
                    data = inode.data();
                    self.open_disk(inode, for_writing, status)?
                }
                opened => opened?,
            };
            // Relaxed: read under the table's lock, and the kernel has a reference meanwhile.
            inode.is_cached.store(true, Ordering::Relaxed);
            data.is_used = data.opened.replace(opened).is_some();
        } else {
            data.is_used = true;
        }
        data.users += 1;
        data.is_closed = false;
        let begins_anew = data.users == 1 && std::mem::take(&mut data.is_lost);
        data.writers += u64::from(for_writing);
        data.mappers += u64::from(access == Access::ReadWrite);
        if for_writing {
            self.kernel_pages.begin_writing(inode);
        }
        Ok(Opening { handle: data.failures.new_handle(), begins_anew })
    }

    fn open_disk(&self, inode: &Inode, for_writing: bool, status: Option<Stat>) -> Result<Opened> {
        // Direct transfers take a second descriptor.
        let has_direct = Arc::strong_count(&self.direct_files) <= self.direct_files_max;
        let counted = has_direct.then(|| Arc::clone(&self.direct_files));
        let handle = inode.handle()?;
        let status = status.map_or_else(|| inode.stat(), Ok)?;
        let path = path_of(&handle);
        let length = status.st_size as u64;
        let open = || Disk::open(&path, length, for_writing, counted);
        let disk = inode.with_rights(&status, open)?;
        let disk = disk.map_err(|source| Error::Open { file: inode.name(), source })?;
        let disk = Arc::new(disk);
        let mut options = OpenOptions::new().read(true).write(for_writing);
        if length <= SHORT_BYTES_MAX {
            options = options.len_max(SHORT_LEN_MAX);
        }
        let file = self.cache.open_backing(Arc::clone(&disk) as Arc<dyn Backing>, &options)?;
        inode.lend(&disk);
        let space = Arc::clone(self.spaces.lock().entry(inode.key.0).or_default());
        Ok(Opened { file, disk, space, is_writable: for_writing })
    }

    /// Ends an open. The file stays in the cache. Returns `true` if too many do, or this one should
    /// not, so that [`Self::close_released`] should be called where waiting is allowed.
    pub fn release(&self, inode: &Arc<Inode>, handle: u64, access: Access) -> bool {
        let mut data = inode.data();
        data.users -= 1;
        let was_writer = access != Access::Read;
        data.writers -= u64::from(was_writer);
        if was_writer && data.writers == 0 {
            self.kernel_pages.end_writing(inode, data.len_bytes().unwrap_or(0));
        }
        data.mappers -= u64::from(access == Access::ReadWrite);
        data.failures.forget(handle);
        if data.users == 0 {
            inode.enter_queue(&mut data, Reason::Closed);
        }
        if data.users > 0 {
            return false;
        }
        let has_failed = data.failures.has_any();
        if std::mem::replace(&mut data.is_kept, true) {
            return has_failed;
        }
        drop(data);
        let device = inode.key.0;
        self.kept.lock().entry(device).or_default().files.push_back(Arc::downgrade(inode));
        has_failed || self.excess(device, 1) > 0
    }

    /// Closes a released file after a failure: the next open begins anew, with what the storage
    /// has. Pages that still cannot be written stay. Also closes kept files beyond their maximum.
    pub fn close_released(&self, inode: &Inode) {
        let mut data = inode.data();
        let must_close = data.users == 0 && data.failures.has_any();
        data.is_used &= !must_close;
        drop(data);
        if must_close {
            let _is_closed = self.close(inode);
        }
        if self.excess(inode.key.0, 1) > 0 {
            self.close_excess(inode.key.0);
        }
    }

    /// Writes all files of a device. Failures are recorded with each file.
    pub fn write_device(&self, device: u64) {
        // Relaxed: what is promised is written to files that are open.
        let is_open = |inode: &Arc<Inode>| inode.is_cached.load(Ordering::Relaxed);
        let inodes = self.table.all().into_iter().filter(is_open);
        for inode in inodes.filter(|inode| inode.key.0 == device) {
            if let Err(error) = inode.write_pages() {
                let _logged = error.answer();
            }
        }
    }

    /// Records bytes that a program has stored to a map and the storage refuses. The kernel has
    /// told programs that sync the map or close the file from now on; none may.
    pub fn note_lost(&self, inode: &Inode, bytes: Range<u64>, error: &Error) {
        let (length, position) = (bytes.end - bytes.start, bytes.start);
        let text =
            format!("{}: {length} bytes at {position}, stored to a map: {error}", inode.name());
        log::error!("{text}");
        let mut lost = self.lost.lock();
        if lost.len() < LOST_MAX {
            lost.push(text);
        }
    }

    /// Returns the number of kept files of a device.
    fn kept_of(&self, device: u64) -> usize {
        self.kept.lock().get(&device).map_or(0, |kept| kept.files.len())
    }

    /// Returns the number of kept files of a device beyond `times` its share of the maximum.
    fn excess(&self, device: u64, times: usize) -> usize {
        let share = self.kept_max / self.kept.lock().len().max(1);
        self.kept_of(device).saturating_sub(times * share)
    }

    /// Closes kept files of a device beyond its share of the maximum, unless enough threads do so
    /// already.
    pub fn close_excess(&self, device: u64) {
        let mut kept = self.kept.lock();
        let closers = &mut kept.entry(device).or_default().closers;
        if *closers == CLOSERS_MAX {
            return;
        }
        *closers += 1;
        drop(kept);
        scopeguard::defer! { self.kept.lock().entry(device).or_default().closers -= 1; }
        self.close_kept(device, self.excess(device, 1));
    }

    /// Closes one kept file of a device if there are twice as many as allowed: programs open files
    /// faster than the closers close them.
    pub fn throttle(&self, device: u64) {
        if self.excess(device, 2) > 0 {
            self.close_kept(device, 1);
        }
    }

    /// Closes about `count` kept files of a device: the least recently used, but those used since
    /// they were kept get a second chance.
    fn close_kept(&self, device: u64, count: usize) {
        for _ in 0..count {
            let kept = self.kept.lock().get_mut(&device).and_then(|kept| kept.files.pop_front());
            let Some(kept) = kept else { return };
            // A file that was removed may be gone.
            if kept.upgrade().is_some_and(|inode| !self.close(&inode)) {
                self.kept.lock().entry(device).or_default().files.push_back(kept);
            }
        }
    }

    /// Writes and closes a file that no program has open. Returns `false` if it stays kept.
    fn close(&self, inode: &Inode) -> bool {
        let mut data = inode.data();
        if data.users > 0 {
            // The next release keeps it again.
            data.is_kept = false;
            return true;
        }
        if std::mem::take(&mut data.is_used) && data.opened.is_some() {
            return false;
        }
        if inode.is_removed() {
            self.forget_removed(inode, data);
            return true;
        }
        if let Some(opened) = &data.opened {
            let written = opened.file.sync_data().map_err(Error::from);
            let written = written.and_then(|()| match data.modified {
                Some(modified) => inode.set_modified(modified),
                None => Ok(()),
            });
            if let Err(error) = written {
                let _logged = error.answer();
                return false;
            }
        }
        self.forget_file(inode, data);
        true
    }

    fn forget_file(&self, inode: &Inode, mut data: MutexGuard<'_, Data>) {
        data.is_kept = false;
        data.opened = None;
        data.is_lost |= data.failures.has_any();
        data.failures = Failures::default();
        data.finalize();
        data.is_dirty = false;
        inode.is_cached.store(false, Ordering::Relaxed);
        drop(data);
        self.table.remove_unused(inode);
    }

    /// Drops the contents of a file that has no name and no user any more, without writing them.
    pub fn drop_removed(&self, inode: &Inode) {
        let data = inode.data();
        if data.users == 0 && inode.is_removed() {
            self.forget_removed(inode, data);
        }
    }

    fn forget_removed(&self, inode: &Inode, data: MutexGuard<'_, Data>) {
        if let Some(opened) = data.opened.as_ref().filter(|opened| opened.is_writable)
            && let Err(error) = opened.file.discard_dirty()
        {
            log::warn!("cannot discard the contents of a removed file: {error}");
        }
        self.forget_file(inode, data);
    }

    /// Sets the length of a file that no program need have open. Closes kept files of the device if
    /// there are too many.
    pub fn set_len(&self, inode: &Arc<Inode>, length: u64) -> Result<()> {
        self.change(inode, |opened| {
            opened.allow_length(length)?;
            Ok(opened.file.set_len(length)?)
        })
    }

    /// Runs an operation on a file that no program need have open, for a change of its contents.
    fn change(
        &self,
        inode: &Arc<Inode>,
        operation: impl FnOnce(&Opened) -> Result<()>,
    ) -> Result<()> {
        let opening = self.open(inode, Access::Write)?;
        scopeguard::defer! {
            if self.release(inode, opening.handle, Access::Write) {
                self.close_released(inode);
            }
        }
        let change = inode.opened_for_change()?;
        let changed = operation(&change);
        if changed.is_err() {
            change.undo(inode);
        }
        changed
    }

    /// Writes all files and sets their times. Returns the failures, which name the files.
    pub fn write_all(&self) -> Vec<String> {
        let mut failures = std::mem::take(&mut *self.lost.lock());
        failures.extend(self.cache.close().err().map(|error| error.to_string()));
        for inode in self.table.all() {
            let modified = inode.data().modified;
            if let Some(Err(error)) = modified.map(|modified| inode.set_modified(modified)) {
                log::warn!("cannot set the modification time of a file: {error}");
            }
        }
        failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::time::Duration;

    #[test]
    fn a_change_that_panics_leaves_no_user_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "contents").unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let table = Arc::new(Table::new(root.into(), Duration::from_secs(1), 1).unwrap());
        let root = table.get(fuser::INodeNo::ROOT).unwrap();
        let inode = table.lookup(&root, OsStr::new("file")).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let files = Files::new(cache, table, 1, 1);
        let change = || files.change(&inode, |_| resume_unwind(Box::new(())));
        assert!(catch_unwind(AssertUnwindSafe(change)).is_err());
        assert_eq!(inode.data().users, 0);
    }
}
