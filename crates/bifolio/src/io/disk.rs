//! A regular file of the kernel as a [`Backing`].
//!
//! ```text
//!                    aligned part            the rest, less than a block
//!   write_at --+--> direct descriptor        buffered descriptor --> page cache --> device
//!              '--> (O_DIRECT) --> device
//! ```
//!
//! A partial block at the end of file is written byte for byte: nothing is padded and truncated
//! afterwards, so the file is never longer than requested, not even after a crash. One call makes
//! one transfer: a write that has both parts returns short after the first.
//!
//! # Why mixing the two is coherent
//! A direct read or write first writes out what the page cache has dirty in its range, and a direct
//! write invalidates the range there, before and after. So a tail that grew into a whole block can
//! be written directly over its buffered version. The kernel guarantees no order between
//! *overlapping* transfers in flight: the cache never has two for one folio.
//!
//! # Order of a sync
//! Both descriptors name one inode, so one `fdatasync` that begins after the last write returned is
//! enough. It runs on the buffered descriptor, where a failed write-out of the tail is reported.
//!
//! # Invariants
//! - IO-2: whole blocks of aligned memory at aligned positions go directly, everything else goes
//!   through the page cache.
//! - IO-3: a file that was once refused a direct transfer never tries one again.
//! - IO-4: after one failed sync no later one succeeds, unless the owner of the file says that it
//!   has reported the loss ([`DiskFile::forget_failed_sync`]). The kernel may drop what it could
//!   not write and then report success because nothing is left to write.
//!   Syncs of one file are serialized, because the kernel reports a loss once per descriptor.

use super::request::{range_end, round_down};
use super::{
    Alignment, Backing, DirectBacking, DirectStatus, FallocateMode, FileIdentity, IoBuf, IoBufMut,
    IoRequest, Operation, Submission,
};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::sys::file::{self, FallocateFlags, SeekFrom};
use crate::sys::process::Origin;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{io, slice};

/// A descriptor opened with `O_DIRECT`, and the required alignment of its transfers.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) descriptor: OwnedFd,
    pub(super) alignment: Alignment,
}

impl Direct {
    /// Returns `true` if the transfer, or at least whole blocks at its start, can be direct.
    pub(super) fn takes(&self, request: &IoRequest) -> bool {
        request.fits(self.alignment) && self.part(request) > 0
    }

    pub(super) fn part(&self, request: &IoRequest) -> usize {
        round_down(request.length_bytes, self.alignment.offset_bytes)
    }
}

/// Returns `true` if the error means that the file system does not support direct transfers, or not
/// with these parameters.
pub(super) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// A regular file on a file system, with direct transfers where available.
#[derive(Debug)]
pub struct DiskFile {
    pub(super) path: PathBuf,
    pub(super) identity: FileIdentity,
    pub(super) direct: Option<Direct>,
    /// Descriptors that stay open because closing them would drop POSIX locks.
    pub(super) _unused: Vec<OwnedFd>,
    /// Closed last: a lock of its open file description, which an owner may have taken through
    /// [`AsFd`], protects the file while the others are closed.
    pub(super) buffered: OwnedFd,
    pub(crate) direct_required: AtomicBool,
    /// Why transfers go through the page cache; unset while they are direct (IO-3).
    pub(super) buffered_reason: OnceLock<String>,
    /// The errno of the sync that failed (IO-4). Locked during a sync: the kernel reports a lost
    /// write once per descriptor.
    pub(super) sync_failed: Mutex<Option<Option<i32>>>,
    pub(super) lock: Mutex<Option<ExclusiveLock>>,
    /// Set if `buffered` cannot write, and was opened here.
    pub(super) is_watchable: bool,
}

#[derive(Debug)]
pub(super) struct ExclusiveLock {
    file: OwnedFd,
    process: Origin,
}

impl Drop for ExclusiveLock {
    /// Unlocks the file. Closing it would leave it locked while another thread starts a program,
    /// which has copies of all descriptors for a moment. The lock of a parent process stays.
    fn drop(&mut self) {
        if !self.process.is_forked() {
            let _ = file::unlock(self.file.as_fd());
        }
    }
}

impl AsFd for DiskFile {
    /// Returns the descriptor for transfers through the kernel's page cache. A caller that reads or
    /// writes with it bypasses the cache; it is meant for calls on attributes and names.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffered.as_fd()
    }
}

impl DiskFile {
    /// Makes direct transfers mandatory from now on, unless they already fall back.
    pub(crate) fn require_direct(&self) {
        // Relaxed: a transfer that is refused at this moment may fall back or fail.
        self.direct_required.store(true, Ordering::Relaxed);
    }

    /// Locks the whole file against other programs and caches, without waiting; the lock ends when
    /// the file is closed. The file must be open for writing.
    pub(crate) fn lock_exclusively(&self) -> io::Result<()> {
        let mut lock = self.lock.lock();
        if lock.is_none() {
            file::lock_exclusively(self.buffered.as_fd())?;
            // Copied afterwards: closing a copy would drop the POSIX locks of the process.
            let file = self.buffered.try_clone();
            let file = file.inspect_err(|_| drop(file::unlock(self.buffered.as_fd())))?;
            *lock = Some(ExclusiveLock { file, process: Origin::here() });
        }
        Ok(())
    }

    /// Returns the time at which the file was created, nanoseconds; `None` if it is not known.
    pub(crate) fn born_ns(&self) -> Option<u64> {
        file::born_ns(self.buffered.as_fd())
    }

    pub(crate) fn is_writable(&self) -> bool {
        file::rights(self.buffered.as_fd()).is_ok_and(|rights| rights.write)
    }

    /// Lets later syncs succeed again after a failed one: they cover what is written from now on.
    /// What was written between the last successful sync and the failed one may be lost, and no
    /// sync will report it any more, so the caller has told every user of the file. A file of a
    /// [`Cache`](crate::Cache) is better closed and opened again.
    pub fn forget_failed_sync(&self) {
        *self.sync_failed.lock() = None;
    }

    pub(crate) fn called(self, name: PathBuf) -> Self {
        Self { path: name, ..self }
    }

    /// Returns the descriptor for a transfer, and how much of it can be done at once (IO-2, IO-3).
    fn route(&self, request: &IoRequest) -> Submission<'_> {
        let usable = self.buffered_reason.get().is_none();
        match self.direct.as_ref().filter(|direct| usable && direct.takes(request)) {
            Some(direct) => {
                Submission { file: direct.descriptor.as_fd(), length_bytes: direct.part(request) }
            }
            None => Submission { file: self.buffered.as_fd(), length_bytes: request.length_bytes },
        }
    }

    /// Returns `true` if a transfer with this result must be repeated through the page cache, as
    /// must every later one.
    fn falls_back(&self, request: &IoRequest, answer: &io::Result<usize>) -> bool {
        match answer {
            Err(error) if is_refusal(error) && !self.direct_required.load(Ordering::Relaxed) => {
                let is_direct = self.direct.as_ref().is_some_and(|direct| direct.takes(request));
                if is_direct {
                    self.buffered_reason.get_or_init(|| {
                        let name = request.operation.name();
                        format!("the file system refused a direct {name} ({error})")
                    });
                }
                is_direct
            }
            _ => false,
        }
    }

    /// Returns a descriptor whose position no other program uses, if there is one.
    fn own_descriptor(&self) -> &OwnedFd {
        self.direct.as_ref().map_or(&self.buffered, |direct| &direct.descriptor)
    }

    /// Makes one attempt at a transfer: `transfer` moves the first bytes, as many as it is told.
    fn attempt(
        &self,
        request: &IoRequest,
        mut transfer: impl FnMut(BorrowedFd<'_>, usize) -> io::Result<usize>,
    ) -> io::Result<usize> {
        range_end(request.position_bytes, request.length_bytes)?;
        let route = self.route(request);
        let answer = transfer(route.file, route.length_bytes);
        if self.falls_back(request, &answer) {
            return transfer(self.buffered.as_fd(), request.length_bytes);
        }
        answer
    }

    /// Syncs the file, once. After a failure all later syncs fail (IO-4), because the kernel may
    /// have dropped the pages; an interrupted sync may be repeated.
    pub(super) fn sync_once(&self, sync: fn(&OwnedFd) -> io::Result<()>) -> io::Result<()> {
        let mut failed = self.sync_failed.lock();
        if let Some(errno) = *failed {
            // IO-4.
            let first = errno.map_or(io::ErrorKind::Other.into(), io::Error::from_raw_os_error);
            let problem = format!(
                "an earlier sync failed ({first}); writes since the last successful sync may be \
                 lost: write them again to another file"
            );
            return Err(io::Error::new(first.kind(), problem));
        }
        let answer = sync(&self.buffered);
        match &answer {
            // An interrupted sync has lost nothing; it is incomplete.
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                *failed = Some(error.raw_os_error());
            }
            _ => {}
        }
        answer
    }
}

impl Backing for DiskFile {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.read_vectored_at(slice::from_mut(target), position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.write_vectored_at(slice::from_ref(source), position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.sync_once(|file| file::sync_data(file))
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(file::status(self.buffered.as_fd())?.length_bytes)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        range_end(length_bytes, 0)?;
        file::set_len(&self.buffered, length_bytes)
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for DiskFile {
    fn sync_all(&self) -> io::Result<()> {
        self.sync_once(|file| file::sync_all(file))
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        let request = IoRequest::new(Operation::Read, position_bytes, IoBufMut::spans(targets));
        self.attempt(&request, |file, length| {
            IoBufMut::read_from(targets, length, file, position_bytes)
        })
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let request = IoRequest::new(Operation::Write, position_bytes, IoBuf::spans(sources));
        self.attempt(&request, |file, length| {
            IoBuf::write_to(sources, length, file, position_bytes)
        })
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        Some(self.route(request))
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        if self.falls_back(request, &answer) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        answer
    }

    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        let call = |flags| file::fallocate(&self.buffered, flags, bytes.clone());
        let (keep_len, punch) = (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE);
        match mode {
            FallocateMode::Allocate => call(FallocateFlags::empty()),
            FallocateMode::AllocateKeepLen => call(keep_len),
            FallocateMode::PunchHole => call(keep_len | punch),
            FallocateMode::ZeroRange => match call(keep_len | FallocateFlags::ZERO_RANGE) {
                // As on tmpfs.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    call(keep_len | punch)?;
                    call(keep_len)
                }
                answer => answer,
            },
        }
    }

    fn seek_data(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        file::seek(self.own_descriptor(), SeekFrom::Data(position_bytes))
    }

    fn seek_hole(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        file::seek(self.own_descriptor(), SeekFrom::Hole(position_bytes))
    }

    fn alignment(&self) -> Alignment {
        self.direct.as_ref().map_or(Alignment::NONE, |direct| direct.alignment)
    }

    fn identity(&self) -> Option<FileIdentity> {
        Some(self.identity)
    }

    fn direct(&self) -> DirectStatus {
        match self.buffered_reason.get() {
            Some(reason) => DirectStatus::Buffered { reason: reason.clone() },
            None => DirectStatus::Direct,
        }
    }

    fn watchable(&self) -> Option<BorrowedFd<'_>> {
        self.is_watchable.then(|| self.buffered.as_fd())
    }
}

#[cfg(test)]
impl DiskFile {
    pub(super) fn assume_alignment(&mut self, alignment: Alignment) {
        self.direct.as_mut().expect("a direct file").alignment = alignment;
    }
    /// Returns `true` if both descriptors belong to one regular file.
    pub(super) fn descriptors_agree(&self) -> bool {
        let same = |descriptor: &OwnedFd| {
            let status = file::status(descriptor.as_fd()).expect("an open file has a status");
            let identity = FileIdentity::of(status);
            status.other_kind.is_none() && identity == self.identity
        };
        same(&self.buffered) && self.direct.as_ref().is_none_or(|direct| same(&direct.descriptor))
    }
}
