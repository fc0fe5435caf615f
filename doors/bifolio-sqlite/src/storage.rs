//! The storage of a database under the cache: a file of the kernel, whose writes go through the
//! kernel's page cache while no sync is to follow them.
//!
//! With `synchronous=OFF` a commit survives the process, not the machine: it is enough that the
//! kernel has the bytes, and a direct write would wait for the device.
//!
//! # Safety
//! Writes the buffers of a transfer, whose memory the cache keeps until the transfer is complete.
#![allow(unsafe_code)]

use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FallocateMode, FileIdentity, IoBuf,
    IoBufMut, IoRequest, Operation, Submission,
};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Buffers that the kernel takes in one call.
const VECTORS_MAX: usize = libc::UIO_MAXIOV as usize;

/// A database file, with direct transfers where available.
#[derive(Debug)]
pub(crate) struct Storage {
    disk: DiskFile,
    /// Calls of [`Storage::without_wait`] that have not returned.
    hasty: AtomicUsize,
}

impl Storage {
    pub(crate) fn new(disk: DiskFile) -> Self {
        Self { disk, hasty: AtomicUsize::new(0) }
    }

    /// Calls `write`, whose writes need only reach the kernel.
    pub(crate) fn without_wait<T>(&self, write: impl FnOnce() -> T) -> T {
        // Relaxed: a transfer may take either way.
        self.hasty.fetch_add(1, Ordering::Relaxed);
        let answer = write();
        self.hasty.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    /// Lets syncs succeed again after one that failed: a later connection begins anew.
    pub(crate) fn forget_failed_sync(&self) {
        self.disk.forget_failed_sync();
    }

    fn is_hasty(&self) -> bool {
        // Relaxed: as above.
        self.hasty.load(Ordering::Relaxed) > 0
    }

    /// Writes buffers into the kernel's page cache, with one call.
    fn write_to_kernel(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let position = i64::try_from(position_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let vector = |source: &IoBuf<'_>| libc::iovec {
            iov_base: source.as_ptr().cast_mut().cast(),
            iov_len: source.len(),
        };
        let vectors: Vec<_> = sources.iter().take(VECTORS_MAX).map(vector).collect();
        let (descriptor, count) = (self.as_fd().as_raw_fd(), vectors.len() as i32);
        // SAFETY: an open file, and memory that can be read while the buffers live.
        let written = unsafe { libc::pwritev64(descriptor, vectors.as_ptr(), count, position) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }
}

impl AsFd for Storage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.disk.as_fd()
    }
}

impl Backing for Storage {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.disk.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        if self.is_hasty() {
            return self.write_to_kernel(std::slice::from_ref(source), position_bytes);
        }
        self.disk.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.disk.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.disk.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.disk.describe()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Storage {
    fn alignment(&self) -> Alignment {
        self.disk.alignment()
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        self.disk.read_vectored_at(targets, position_bytes)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        if self.is_hasty() {
            return self.write_to_kernel(sources, position_bytes);
        }
        self.disk.write_vectored_at(sources, position_bytes)
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        // A ring would hand a write into the page cache to a thread of the kernel.
        if self.is_hasty() && request.operation == Operation::Write {
            return None;
        }
        self.disk.submission(request)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        self.disk.completed(request, answer)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.disk.sync_all()
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

    fn identity(&self) -> Option<FileIdentity> {
        self.disk.identity()
    }

    fn direct(&self) -> DirectStatus {
        self.disk.direct()
    }
}
