//! The storage under a disk tier: a file that loses what it cannot write.
//!
//! A page cache keeps a page that cannot be written, so that nothing is lost. Of a tier that would
//! be wrong: its bytes can be fetched again, and kept pages would take memory until the disk is
//! mended. So a write that fails counts as made. The page stays readable until it is evicted; what
//! is read afterwards has another checksum than the part, and the part is fetched again. So each read
//! of the disk ends what was verified of its blocks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FileIdentity, IoBuf, IoBufMut,
    IoRequest, Operation, Submission,
};

use super::metrics::{Counters, add};
use super::states::SlotStates;

/// A file whose failed writes count as made.
#[derive(Debug)]
pub(crate) struct LossyDisk {
    pub(crate) file: DiskFile,
    /// End of the view, if the file is one of several of the cache over the same file on disk. The
    /// cache would share the pages of files with one identity.
    pub(crate) view_bytes: Option<u64>,
    pub(crate) counters: Arc<Counters>,
    /// Number of reads, writes and flushes that the disk has answered.
    pub(crate) answers: Arc<AtomicU64>,
    pub(crate) states: Arc<SlotStates>,
}

impl LossyDisk {
    /// Counts an answer of the disk.
    fn answered<T>(&self, answer: T) -> T {
        // Relaxed: only the value counts.
        self.answers.fetch_add(1, Ordering::Relaxed);
        answer
    }

    /// Returns the result of a read of `length` bytes, which become readable after this; those past
    /// a short read as zeros.
    fn read(&self, answer: io::Result<usize>, start: u64, length: usize) -> io::Result<usize> {
        self.states.filled(start..start + length as u64);
        self.answered(answer)
    }

    /// Returns the result of a write of `length` bytes for the cache.
    fn written(&self, answer: io::Result<usize>, length: usize) -> io::Result<usize> {
        match answer {
            Ok(0) if length > 0 => {}
            Ok(bytes) => return Ok(bytes),
            // The cache makes these writes again.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            Err(_) => {}
        }
        add(&self.counters.disk_write_failures, 1);
        Ok(length)
    }
}

impl Backing for LossyDisk {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        let length = target.len();
        self.read(self.file.read_at(target, position_bytes), position_bytes, length)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let answer = self.answered(self.file.write_at(source, position_bytes));
        self.written(answer, source.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.answered(self.file.sync_data())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.view_bytes.map_or_else(|| self.file.len_bytes(), Ok)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.file.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.file.describe()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for LossyDisk {
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        let length = targets.iter().map(|target| target.len()).sum();
        let answer = self.file.read_vectored_at(targets, position_bytes);
        self.read(answer, position_bytes, length)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let length = sources.iter().map(IoBuf::len).sum();
        let answer = self.answered(self.file.write_vectored_at(sources, position_bytes));
        self.written(answer, length)
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        self.file.submission(request)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let answer = self.file.completed(request, answer);
        match request.operation {
            Operation::Write => self.written(self.answered(answer), request.length_bytes),
            Operation::Read => self.read(answer, request.position_bytes, request.length_bytes),
        }
    }

    fn sync_all(&self) -> io::Result<()> {
        self.answered(self.file.sync_all())
    }

    fn alignment(&self) -> Alignment {
        self.file.alignment()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.file.identity().filter(|_| self.view_bytes.is_none())
    }

    fn direct(&self) -> DirectStatus {
        self.file.direct()
    }
}
