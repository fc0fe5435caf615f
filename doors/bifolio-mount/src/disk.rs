//! The storage of a file under the cache.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FallocateMode, FileIdentity, IoBuf,
    IoBufMut, IoRequest, Operation, Submission,
};

use crate::handle::path_of;

/// A file of the source directory under the cache: a [`DiskFile`] without flushes, named by the
/// path that it has now.
#[derive(Debug)]
pub struct Disk {
    disk: DiskFile,
    /// Counts this among the files with direct transfers.
    _counted: Option<Arc<()>>,
    /// The last write was refused, and the log says so.
    is_refused: AtomicBool,
}

impl Disk {
    pub fn new(disk: DiskFile, counted: Option<Arc<()>>) -> Self {
        Self { disk, _counted: counted, is_refused: AtomicBool::new(false) }
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

impl AsFd for Disk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.disk.as_fd()
    }
}

impl Backing for Disk {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.disk.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let answer = self.disk.write_at(source, position_bytes);
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
        self.disk.read_vectored_at(targets, position_bytes)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let answer = self.disk.write_vectored_at(sources, position_bytes);
        self.note_write(&answer, position_bytes, sources.iter().map(|source| source.len()).sum());
        answer
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        self.disk.submission(request)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let answer = self.disk.completed(request, answer);
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
        self.disk.direct()
    }
}
