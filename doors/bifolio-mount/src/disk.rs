//! The storage of a file under the cache.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FallocateMode, FileIdentity, IoBuf,
    IoBufMut, IoRequest, Operation, Submission,
};
use bifolio::{DirectIo, OpenOptions};

use crate::handle::path_of;

/// Length from which a file has direct transfers. A shorter one costs more in calls than the page
/// cache below saves.
const DIRECT_BYTES: u64 = 128 << 10;

/// A file of the source directory under the cache: a [`DiskFile`] without flushes, named by the
/// path that it has now. A short file is opened for direct transfers when it has grown.
#[derive(Debug)]
pub struct Disk {
    disk: DiskFile,
    /// File with direct transfers, if they are not those of `disk`. `None` if they cannot be had.
    grown: OnceLock<Option<DiskFile>>,
    is_writable: bool,
    /// Counts this among the files with direct transfers.
    counted: Option<Arc<()>>,
    /// The last write was refused, and the log says so.
    is_refused: AtomicBool,
}

impl Disk {
    /// Opens a file of `length` bytes. It has direct transfers only with `counted`.
    pub fn open(
        path: &str,
        length: u64,
        is_writable: bool,
        counted: Option<Arc<()>>,
    ) -> bifolio::Result<Self> {
        let is_direct = counted.is_some() && length >= DIRECT_BYTES;
        let disk = DiskFile::open(path, &options(is_writable, is_direct))?;
        let grown = OnceLock::new();
        if is_direct {
            let _is_first = grown.set(None);
        }
        Ok(Self { disk, grown, is_writable, counted, is_refused: AtomicBool::new(false) })
    }

    /// Returns the file for a transfer up to `end`.
    fn up_to(&self, end: u64) -> &DiskFile {
        let grown = match self.grown.get() {
            None if end < DIRECT_BYTES || self.counted.is_none() => return &self.disk,
            None => self.grown.get_or_init(|| {
                let options = options(self.is_writable, true);
                DiskFile::open(path_of(&self.disk), &options).ok()
            }),
            Some(grown) => grown,
        };
        grown.as_ref().unwrap_or(&self.disk)
    }

    /// Returns the file below, for calls that the cache does not make.
    pub fn file(&self) -> &DiskFile {
        &self.disk
    }

    /// Logs a write that was refused, unless the one before was, too: it is tried again.
    fn note_write(&self, answer: &io::Result<usize>, position_bytes: u64, length_bytes: usize) {
        let refusal = match answer {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            answer => answer.as_ref().err(),
        };
        // Relaxed: a line more or less does no harm.
        if self.is_refused.load(Ordering::Relaxed) == refusal.is_some() {
            return;
        }
        self.is_refused.store(refusal.is_some(), Ordering::Relaxed);
        if let Some(error) = refusal {
            let file = self.describe();
            log::error!("{file}: cannot write {length_bytes} bytes at {position_bytes}: {error}");
        }
    }
}

fn options(is_writable: bool, is_direct: bool) -> OpenOptions {
    let direct = if is_direct { DirectIo::Auto } else { DirectIo::Never };
    OpenOptions::new().write(is_writable).direct(direct)
}

fn end_of(position_bytes: u64, length_bytes: usize) -> u64 {
    position_bytes.saturating_add(length_bytes as u64)
}

impl AsFd for Disk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.disk.as_fd()
    }
}

impl Backing for Disk {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.up_to(end_of(position_bytes, target.len())).read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let file = self.up_to(end_of(position_bytes, source.len()));
        let answer = file.write_at(source, position_bytes);
        self.note_write(&answer, position_bytes, source.len());
        answer
    }

    /// Does nothing: [`Inode::sync`](crate::inode::Inode::sync) and the unmount flush the device.
    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.disk.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.disk.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        let path = std::fs::read_link(path_of(&self.disk));
        path.map_or_else(|_| self.disk.describe(), |path| path.display().to_string())
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Disk {
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        let length = targets.iter().map(|target| target.len()).sum();
        self.up_to(end_of(position_bytes, length)).read_vectored_at(targets, position_bytes)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let length = sources.iter().map(|source| source.len()).sum();
        let file = self.up_to(end_of(position_bytes, length));
        let answer = file.write_vectored_at(sources, position_bytes);
        self.note_write(&answer, position_bytes, length);
        answer
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        self.up_to(end_of(request.position_bytes, request.length_bytes)).submission(request)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let file = self.up_to(end_of(request.position_bytes, request.length_bytes));
        let answer = file.completed(request, answer);
        if request.operation == Operation::Write {
            self.note_write(&answer, request.position_bytes, request.length_bytes);
        }
        answer
    }

    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        self.disk.fallocate(mode, bytes)
    }

    fn seek_data(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.disk.seek_data(position_bytes)
    }

    fn seek_hole(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.disk.seek_hole(position_bytes)
    }

    fn alignment(&self) -> Alignment {
        self.disk.alignment()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.disk.identity()
    }

    fn direct(&self) -> DirectStatus {
        match self.grown.get() {
            // Whether they can be had is not known before it has grown.
            None if self.counted.is_some() => DirectStatus::Direct,
            Some(Some(grown)) => grown.direct(),
            _ => self.disk.direct(),
        }
    }
}
