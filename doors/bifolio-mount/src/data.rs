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

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bifolio::File;
use bifolio::backing::{Backing, DirectBacking};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::attributes::system_time_of;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::failures::Failures;
use crate::finalize::{Change, Reason};
use crate::inode::Inode;
use crate::room::Space;

mod files;

pub use files::Files;

/// Maximum length of a file: that of the cache, 4 PiB.
const LENGTH_MAX: u64 = 1 << 52;
/// Length for which a file that grows gets addresses.
const LENGTH_USUAL: u64 = 1 << 40;
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
    /// A program has closed the file since it was last opened or changed.
    is_closed: bool,
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

/// Access of a program to a file that it opens.
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

    /// Returns `true` if a program has the file open.
    pub fn is_open(&self) -> bool {
        self.users > 0
    }

    /// Returns `true` if no program seems to have the file open: a close is on its way.
    pub fn seems_closed(&self) -> bool {
        self.users == 0 || self.is_closed
    }

    /// Returns `true` if a program has the file open for writing.
    pub fn has_writers(&self) -> bool {
        self.writers > 0
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
        self.is_closed = false;
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

impl Opened {
    /// Lets the file get this length: the cache reserves addresses for the usual ones.
    ///
    /// # Errors
    /// `EFBIG` beyond what the cache or the storage allows.
    pub fn allow_length(&self, length: u64) -> Result<()> {
        if length <= self.file.len_max() {
            return Ok(());
        }
        // The storage would refuse it at the write-out.
        let is_possible = seek(self.disk.file(), SeekFrom::Start(length)).is_ok();
        if length > LENGTH_MAX || !is_possible {
            return Err(Errno::FBIG.into());
        }
        // At once, because each further part of the table makes it slower.
        let usual = self.file.raise_len_max(length.next_power_of_two().max(LENGTH_USUAL));
        Ok(usual.or_else(|_| self.file.raise_len_max(length.next_power_of_two()))?)
    }
}

impl Inode {
    /// Returns the file, which a program has open, for reading.
    pub fn file(&self) -> Result<File> {
        let data = self.data();
        let opened = data.opened.as_ref().ok_or(Errno::BADF)?;
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
        let opened = opened.ok_or(Errno::BADF)?.clone();
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
            data.is_closed = true;
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
