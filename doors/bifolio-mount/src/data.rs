//! The contents of files: one open file of the cache for each inode, kept after the last close.
//!
//! ```text
//!              open, create                release of the last          more than `kept_max`,
//!   closed ------------------> open (n) ------------------------> kept ------------------> closed
//!                                 ^            write-out begins    |      pages written,
//!                                 '--------------------------------'      times set
//! ```
//!
//! The cache's own syncs only write pages: [`Disk`] ignores its flushes. `fsync` flushes the device
//! itself, after the pages are written. So closing a file costs no flush, as with the kernel.
//!
//! While an inode has unwritten data, its size and times are ours: the file in the source directory
//! gets the length and new times only when pages are written. `finalize.rs` sets the modification
//! time to the one that programs have seen.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use bifolio::backing::{Backing, DirectBacking, DiskFile, DiskOptions};
use bifolio::{Cache, DirectIo, File, OpenOptions};
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};

use crate::attributes::system_time_of;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::failures::Failures;
use crate::finalize::{Change, Reason};
use crate::handle::path_of;
use crate::inode::{Inode, Table};
use crate::room::Space;

/// Bytes of a block of most file systems.
const BLOCK_BYTES: u64 = 4 << 10;

/// State of an inode's contents, under its lock.
#[derive(Default)]
pub struct Data {
    opened: Option<Opened>,
    /// Opens by the kernel, and operations that need the file for a moment.
    users: u64,
    /// Those of the kernel for writing, and those for reading and writing, which allow maps.
    writers: u64,
    mappers: u64,
    /// The kernel may have pages that the storage has lost.
    is_lost: bool,
    /// `true` while the inode is in the list of kept files.
    is_kept: bool,
    /// `true` if the file was used since it was last considered for closing.
    is_used: bool,
    /// Written to since write-out was last asked for.
    pub is_dirty: bool,
    /// Changes of the contents, counted from 1 on: what was there at the open may need a flush.
    changes: u64,
    /// Changes that a completed flush of the device covers.
    flushed_changes: u64,
    /// Known to have neither a set-user-id nor a set-group-id bit that a write must clear.
    pub has_no_set_id: bool,
    /// Known to have no capabilities that a write must clear.
    pub has_no_capability: bool,
    /// Modification time that programs have seen, if the source directory's may be another.
    pub modified: Option<SystemTime>,
    /// Lower bound of the change time that programs have seen.
    pub changed: Option<SystemTime>,
    failures: Failures,
    /// The last change of the contents.
    changed_at: Option<Instant>,
    /// A reference for each change that is being made.
    changing: Arc<()>,
    /// Upper bound of the bytes for which the storage may have no blocks yet.
    pub unwritten_bytes: u64,
    /// The parts of the queue of changed files that have this one.
    is_queued_as_changed: bool,
    is_queued_as_closed: bool,
}

/// What a program may do with a file that it opens.
#[derive(Clone, Copy, PartialEq)]
pub enum Access {
    Read,
    /// Without maps, which need the right to read.
    Write,
    ReadWrite,
}

impl Access {
    /// Converts the flags of `open`.
    pub fn of(flags: i32) -> Self {
        match flags & libc::O_ACCMODE {
            libc::O_RDONLY => Self::Read,
            libc::O_WRONLY => Self::Write,
            _ => Self::ReadWrite,
        }
    }
}

/// A file as a program has opened it.
#[derive(Clone, Copy)]
pub struct Opening {
    pub handle: u64,
    /// This or another program has the file open for writing.
    pub has_writers: bool,
    /// The kernel drops the pages that it has. No other program has the file open.
    pub begins_anew: bool,
}

/// A file in the cache.
#[derive(Clone)]
pub struct Opened {
    pub file: File,
    pub disk: Arc<Disk>,
    /// Free space of its file system.
    pub space: Arc<Space>,
    is_writable: bool,
}

impl Data {
    /// Returns the length if the file is open in the cache.
    pub fn len_bytes(&self) -> Option<u64> {
        self.opened.as_ref().map(|opened| opened.file.len())
    }

    /// Returns `true` if a program may have the file in a map for writing.
    pub fn may_be_mapped(&self) -> bool {
        self.mappers > 0
    }

    /// Records a change of the metadata. The source directory has the time of it, unless written
    /// pages change that.
    pub fn touch(&mut self) {
        if self.modified.is_some() {
            self.changed = Some(self.now());
        }
    }

    /// Returns the time, by the clock that file systems use: a finer one would be ahead of theirs.
    /// It is not before a time that programs have seen.
    fn now(&self) -> SystemTime {
        let now = system_time_of(clock_gettime(ClockId::RealtimeCoarse));
        self.changed.map_or(now, |seen| seen.max(now))
    }

    /// Records a change of the contents.
    fn touch_contents(&mut self) {
        let now = self.now();
        self.modified = Some(now);
        self.changed = Some(now);
        self.changed_at = Some(Instant::now());
        self.is_dirty = true;
        self.changes += 1;
    }

    /// Returns the number of changes of the contents.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns `true` while a change is being made, or if a program has the file open and has
    /// changed it within `delay`.
    pub fn is_being_changed(&self, delay: Duration) -> bool {
        let is_young = self.changed_at.is_some_and(|change| change.elapsed() < delay);
        Arc::strong_count(&self.changing) > 1 || self.users > 0 && is_young
    }

    /// Leaves the times to the storage, which has them.
    pub fn finalize(&mut self) {
        self.modified = None;
        self.unwritten_bytes = 0;
    }

    /// Records that the file is in a part of the queue. Returns `false` if it was before.
    pub fn enter_queue(&mut self, reason: Reason) -> bool {
        !std::mem::replace(self.queued(reason), true)
    }

    /// Records that the file is not in a part of the queue any more.
    pub fn leave_queue(&mut self, reason: Reason) {
        *self.queued(reason) = false;
    }

    fn queued(&mut self, reason: Reason) -> &mut bool {
        match reason {
            Reason::Changed => &mut self.is_queued_as_changed,
            Reason::Closed => &mut self.is_queued_as_closed,
        }
    }
}

impl Inode {
    /// Returns the file, which a program has open, for reading.
    pub fn file(&self) -> Result<File> {
        let data = self.data();
        let opened = data.opened.as_ref().ok_or(rustix::io::Errno::BADF)?;
        Ok(opened.file.clone())
    }

    /// Acts as [`Self::file`], but never waits for a device: returns `None` if the file is not open
    /// or its data are locked.
    pub fn try_file(&self) -> Option<File> {
        Some(self.try_data()?.opened.as_ref()?.file.clone())
    }

    /// Returns the file, which a program has open, for a change of its contents.
    pub fn opened_for_change(&self) -> Result<Change> {
        let mut data = self.data();
        let opened = data.opened.as_ref().filter(|opened| opened.is_writable);
        let opened = opened.ok_or(rustix::io::Errno::BADF)?.clone();
        let before = (data.modified, data.changed);
        data.touch_contents();
        self.enter_queue(&mut data, Reason::Changed);
        let counted = Arc::clone(&data.changing);
        Ok(Change { opened, number: data.changes, before, _counted: counted })
    }

    /// Records that bytes were written, for which the storage may need blocks.
    pub fn note_written(&self, bytes: u64) {
        let mut data = self.data();
        if data.modified.is_some() {
            let more = bytes.next_multiple_of(BLOCK_BYTES);
            data.unwritten_bytes = data.unwritten_bytes.saturating_add(more);
        }
    }

    /// Starts to write the dirty pages when a program closes the file. Waits for them if their
    /// device is short of space.
    ///
    /// # Errors
    /// Pages cannot be written, or could not since the handle was opened, and no sync through it
    /// has said so.
    pub fn write_out(&self, handle: u64) -> Result<()> {
        let (opened, is_dirty) = {
            let mut data = self.data();
            let Some(opened) = data.opened.clone() else { return Ok(()) };
            (opened, std::mem::take(&mut data.is_dirty))
        };
        // Without the lock, which reads of resident pages take: this may wait for the device.
        let everything = 0..u64::MAX >> 1;
        let written = match is_dirty {
            _ if !opened.is_writable => Ok(()),
            true if opened.space.is_short() => opened.file.sync_data(),
            true => opened.file.write_out(everything),
            // Asks for errors.
            false => opened.file.write_out(0..0),
        };
        self.note_failure(written.map_err(Error::from))?;
        // A sync through the handle, or a copy of it, says it again.
        self.data().failures.untold(handle).map_or(Ok(()), |number| Err(self.failed_before(number)))
    }

    /// Writes the dirty pages, without a flush of the device.
    pub fn write_pages(&self) -> Result<()> {
        let opened = self.data().opened.clone();
        let written = opened.map_or(Ok(()), |opened| Ok(opened.file.sync_data()?));
        self.note_failure(written)
    }

    /// Writes the dirty pages of some bytes, without a flush of the device.
    pub fn write_bytes(&self, opened: &Opened, bytes: Range<u64>) -> Result<()> {
        self.note_failure(opened.file.sync_range(bytes).map_err(Error::from))
    }

    /// Records a failure for every handle that is open now: each reports it once.
    fn note_failure(&self, result: Result<()>) -> Result<()> {
        result.inspect_err(|error| self.data().failures.record(error.number()))
    }

    fn failed_before(&self, number: i32) -> Error {
        Error::Before { file: self.name(), number }
    }

    /// Makes the contents durable, and, if `with_metadata`, also owner, mode and times.
    ///
    /// # Errors
    /// As on a file system of the kernel, an error of an earlier write-back or flush is reported
    /// once to each handle that was open then. Pages that could not be written are written again.
    pub fn sync(&self, handle: u64, with_metadata: bool) -> Result<()> {
        let synced = self.sync_now(with_metadata);
        let untold = self.data().failures.tell(handle);
        synced.and_then(|()| untold.map_or(Ok(()), |number| Err(self.failed_before(number))))
    }

    fn sync_now(&self, with_metadata: bool) -> Result<()> {
        let (opened, changes, is_flushed) = {
            let mut data = self.data();
            let Some(opened) = data.opened.clone() else { return Ok(()) };
            data.changes = data.changes.max(1);
            // A flush that is still in progress does not count: it may fail.
            let is_flushed = data.flushed_changes >= data.changes;
            // The pages of a change that is being made may be written later.
            let is_changing = data.is_being_changed(Duration::ZERO);
            (opened, (data.changes, is_changing), is_flushed)
        };
        let (changes, is_changing) = changes;
        self.note_failure(opened.file.sync_data().map_err(Error::from))?;
        if !is_changing {
            self.finish_finalizing(changes)?;
        }
        if is_flushed && !with_metadata {
            return Ok(());
        }
        let disk = opened.disk.file();
        let flushed = if with_metadata { disk.sync_all() } else { disk.sync_data() };
        let describe = |source| Error::Flush { file: opened.disk.describe(), source };
        if let Err(error) = self.note_failure(flushed.map_err(describe)) {
            // Recorded before: a sync that waits for this one, and now succeeds, reports it.
            disk.forget_failed_sync();
            return Err(error);
        }
        let mut data = self.data();
        data.flushed_changes = data.flushed_changes.max(changes);
        Ok(())
    }

    /// Returns `true` if data may not be on the device, or another thread waits for the device.
    pub fn is_unwritten(&self) -> bool {
        self.try_data().is_none_or(|data| data.modified.is_some())
    }
}

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
            spaces: Mutex::default(),
            lost: Mutex::default(),
        }
    }

    /// Opens the file for a program or an operation; [`Self::release`] ends that, with the same
    /// access.
    pub fn open(&self, inode: &Inode, access: Access) -> Result<Opening> {
        let for_writing = access != Access::Read;
        let _allowed = (access == Access::ReadWrite).then(|| inode.allow_maps());
        let mut data = inode.data();
        let is_open = |opened: &Opened| opened.is_writable || !for_writing;
        if !data.opened.as_ref().is_some_and(is_open) {
            let opened = match self.open_disk(inode, for_writing) {
                Err(error) if error.is_out_of_descriptors() => {
                    drop(data);
                    self.table.handles().close_most();
                    let device = inode.key.0;
                    self.close_kept(device, self.kept_of(device).div_ceil(4));
                    data = inode.data();
                    self.open_disk(inode, for_writing)?
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
        let begins_anew = data.users == 1 && std::mem::take(&mut data.is_lost);
        data.writers += u64::from(for_writing);
        data.mappers += u64::from(access == Access::ReadWrite);
        let (handle, has_writers) = (data.failures.new_handle(), data.writers > 0);
        Ok(Opening { handle, has_writers, begins_anew })
    }

    fn open_disk(&self, inode: &Inode, for_writing: bool) -> Result<Opened> {
        // Direct transfers take a second descriptor.
        let has_direct = Arc::strong_count(&self.direct_files) <= self.direct_files_max;
        let counted = has_direct.then(|| Arc::clone(&self.direct_files));
        let direct = if has_direct { DirectIo::Auto } else { DirectIo::Never };
        let options =
            DiskOptions { read: true, write: for_writing, direct, ..DiskOptions::default() };
        let handle = inode.handle()?;
        let disk = DiskFile::open(path_of(&handle), &options);
        let disk = disk.map_err(|source| Error::Open { file: inode.name(), source })?;
        let disk = Arc::new(Disk::new(disk, counted));
        let options = OpenOptions::new().read(true).write(for_writing);
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
        data.writers -= u64::from(access != Access::Read);
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

    /// Runs an operation on a file that no program need have open, for a change of its contents.
    /// Closes kept files of the device if there are too many.
    pub fn change(
        &self,
        inode: &Arc<Inode>,
        operation: impl FnOnce(&File) -> bifolio::Result<()>,
    ) -> Result<()> {
        let opening = self.open(inode, Access::Write)?;
        scopeguard::defer! {
            if self.release(inode, opening.handle, Access::Write) {
                self.close_released(inode);
            }
        }
        let change = inode.opened_for_change()?;
        let changed = operation(&change.file);
        if changed.is_err() {
            change.undo(inode);
        }
        Ok(changed?)
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
