//! A regular file of the kernel as a [`Backing`].
//!
//! Opened by `Cache::open`; its transfers are called from `transfer.rs`; calls `sys::file`.
//!
//! ```text
//!                    aligned part            the rest, less than a block
//!   write_at --+--> direct descriptor        buffered descriptor --> page cache --> device
//!              '--> (O_DIRECT) --> device
//! ```
//!
//! Each file has two descriptors. Whole blocks go through the direct one. A partial block at the
//! end of file goes through the buffered one, byte for byte: nothing is ever padded and truncated
//! afterwards, so the file is never longer than requested, not even for other programs or after a
//! crash. One call makes one transfer: a write that has both parts returns short after the first,
//! and `transfer.rs` continues with the second.
//!
//! # Why mixing the two is coherent
//! Linux keeps direct transfers and its page cache coherent by rule: a direct read or write first
//! writes out what is dirty in its range and waits for it, and a direct write invalidates the range
//! in the page cache, before and after. So a direct read sees an earlier buffered write, a buffered
//! read an earlier direct one, and a tail that grew into a whole block can be written directly over
//! its buffered version. The kernel guarantees no order between *overlapping* transfers that are in
//! flight at the same time. The cache never has two of those for one folio, and a transfer of
//! another folio touches other pages.
//!
//! # Order of a sync
//! Both descriptors name one inode, so one `fdatasync` that begins after the last write returned is
//! enough: it writes out the tail from the page cache, commits the length, and flushes the volatile
//! cache of the device, which received the direct writes. It runs on the buffered descriptor, where
//! a failed write-out of the tail is reported.
//!
//! # Closing
//! Closing any descriptor of a file drops all POSIX locks that the process holds on it. So a
//! descriptor that turned out to be unneeded is kept open, and `Located` identifies the file of a
//! path without opening it.
//!
//! # Invariants
//! - IO-2: whole blocks of aligned memory at aligned positions go directly, everything else goes
//!   through the page cache.
//! - IO-3: a file that was once refused a direct transfer never tries one again.
//! - IO-4: after one failed sync no later one succeeds. The kernel may drop what it could not write
//!   and then report success because nothing is left to write: durability would be an illusion.
//!   Syncs of one file are serialized, because the kernel reports a loss once per descriptor.
//!
//! This file does not retry, does not continue short transfers, and does not cache or read ahead.

use super::backing::range_end;
use super::direct::{Choice, Direct, choose, is_refusal};
use super::{
    Alignment, Backing, DirectIo, DirectStatus, DiskOptions, FileIdentity, IoBuf, IoBufMut,
    IoRequest, OpenDiskError, Operation, Submission,
};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::sys::file::{self, Creation, FileKind, OpenMode, Rights};
use crate::sys::probe::Features;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{io, slice};

/// How often a file may be replaced while it is being opened before the open fails.
const OPEN_ATTEMPTS_MAX: u32 = 5;

/// A regular file on a file system, with direct transfers where available.
#[derive(Debug)]
pub struct DiskFile {
    path: PathBuf,
    identity: FileIdentity,
    buffered: OwnedFd,
    direct: Option<Direct>,
    /// Descriptors that stay open because closing them would drop POSIX locks.
    _unused: Vec<OwnedFd>,
    pub(crate) direct_required: AtomicBool,
    /// Why transfers go through the page cache; unset while they are direct (IO-3).
    buffered_reason: OnceLock<String>,
    /// The errno of the sync that failed (IO-4). Locked during a sync: the kernel reports a lost
    /// write once per descriptor.
    sync_failed: Mutex<Option<Option<i32>>>,
}

impl DiskFile {
    /// Opens the file at `path` with the features that are in use.
    ///
    /// Never blocks, whatever `path` names, and changes nothing unless it names a regular file.
    pub fn open(
        path: impl AsRef<Path>,
        options: &DiskOptions,
        features: &Features,
    ) -> Result<Self, OpenDiskError> {
        Self::open_keeping(path.as_ref(), options, features, &mut Vec::new())
    }

    /// Acts as [`Self::open`]. On an error, unneeded descriptors are added to `unused`, because
    /// closing them would drop locks. On success the file takes these, and what `unused` contained
    /// before.
    pub(crate) fn open_keeping(
        path: &Path,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Self, OpenDiskError> {
        if let Some(problem) = options.contradiction() {
            return Err(OpenDiskError::Options { path: path.to_owned(), problem });
        }
        for _ in 0..OPEN_ATTEMPTS_MAX {
            let (buffered, identity) = open_buffered(path, options, unused)?;
            let name = path.to_owned();
            let opened = Opened { path, name, buffered, identity, is_given: false };
            if let Some(file) = opened.finish(options, features, unused)? {
                return Ok(file);
            }
        }
        Err(OpenDiskError::Replaced { path: path.to_owned() })
    }

    /// Creates the file of a descriptor, which is only reopened for direct transfers. The
    /// descriptor is closed with the file. `unused` is as in [`Self::open_keeping`].
    pub(crate) fn from_fd(
        descriptor: OwnedFd,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Self, OpenDiskError> {
        let name = file::name_of(descriptor.as_fd());
        let path = file::path_of(descriptor.as_fd());
        let system = |source| OpenDiskError::System { path: name.clone(), source };
        let look = || Ok((identity_of(descriptor.as_fd())?, file::rights(descriptor.as_fd())?));
        let (identity, rights) = match look() {
            Ok(seen) => seen,
            Err(error) => {
                unused.push(descriptor);
                return Err(system(error));
            }
        };
        let mut buffered = descriptor;
        if rights.direct {
            // Its transfers need alignment, so it cannot serve as the buffered descriptor.
            let DiskOptions { read, write, .. } = *options;
            let mode = OpenMode { read, write, create: None, direct: false };
            let opened = file::open(&path, mode);
            unused.push(buffered);
            buffered = opened.map_err(system)?;
            file::set_blocking(buffered.as_fd()).map_err(system)?;
        }
        let opened = Opened { path: &path, name: name.clone(), buffered, identity, is_given: true };
        opened.finish(options, features, unused)?.ok_or(OpenDiskError::Replaced { path: name })
    }

    /// Returns the identity of a descriptor, or an error if it cannot be used with `options`.
    pub(crate) fn check_fd(
        descriptor: &OwnedFd,
        options: &DiskOptions,
    ) -> Result<FileIdentity, OpenDiskError> {
        let path = file::name_of(descriptor.as_fd());
        let rights = file::rights(descriptor.as_fd());
        let system = |source| OpenDiskError::System { path: path.clone(), source };
        let (rights, status) =
            (rights.map_err(system)?, file::status(descriptor.as_fd()).map_err(system)?);
        check_descriptor(&path, descriptor.as_fd(), status.kind)?;
        let problem = match rights {
            Rights { read: false, .. } => "it was not opened for reading",
            Rights { write: false, .. } if options.write => "it was not opened for writing",
            Rights { appends: true, .. } if options.write => {
                "it was opened with O_APPEND, so every write would go to the end of the file"
            }
            _ => return Ok(FileIdentity::of(status)),
        };
        Err(OpenDiskError::Descriptor { path, problem })
    }

    /// Makes direct transfers mandatory: no transfer falls back to the page cache from now on,
    /// unless they already do.
    pub(crate) fn require_direct(&self) {
        // Relaxed: a transfer that is refused at this moment may fall back or fail.
        self.direct_required.store(true, Ordering::Relaxed);
    }

    /// Locks the whole file against other programs and caches, without waiting; the lock ends when
    /// the file is closed. The file must be open for writing.
    pub(crate) fn lock_exclusively(&self) -> io::Result<()> {
        file::lock_exclusively(self.buffered.as_fd())
    }

    /// Returns `true` if the descriptors were opened for writing.
    pub(crate) fn is_writable(&self) -> bool {
        file::rights(self.buffered.as_fd()).is_ok_and(|rights| rights.write)
    }

    /// Sets the name used in messages.
    pub(crate) fn called(self, name: PathBuf) -> Self {
        Self { path: name, ..self }
    }

    /// Returns the descriptor for a transfer, and how much of it can be done at once (IO-2, IO-3).
    fn route(&self, request: &IoRequest) -> Submission<'_> {
        let usable = self.buffered_reason.get().is_none();
        match self.direct.as_ref().filter(|direct| usable && direct.takes(request)) {
            Some(direct) => Submission::new(direct.descriptor.as_fd(), direct.part(request)),
            None => Submission::new(self.buffered.as_fd(), request.length_bytes),
        }
    }

    /// Returns `true` if a transfer with this result must be repeated through the page cache, as
    /// must every later one.
    fn falls_back(&self, request: &IoRequest, answer: &io::Result<usize>) -> bool {
        match answer {
            Err(error) if is_refusal(error) && !self.is_direct_required() => {
                let is_direct = self.direct.as_ref().is_some_and(|direct| direct.takes(request));
                if is_direct {
                    self.buffered_reason.get_or_init(|| {
                        let operation = request.operation;
                        format!("the file system refused a direct {operation} ({error})")
                    });
                }
                is_direct
            }
            _ => false,
        }
    }

    fn is_direct_required(&self) -> bool {
        self.direct_required.load(Ordering::Relaxed)
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

    /// Runs one sync, unless one has failed before (IO-4). Serialized: of two concurrent syncs only
    /// one would be told of the failure.
    pub(super) fn sync_once(&self, sync: fn(&OwnedFd) -> io::Result<()>) -> io::Result<()> {
        let mut failed = self.sync_failed.lock();
        if let Some(errno) = *failed {
            return Err(earlier_failure(errno));
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

/// A file that is open through the page cache, but not yet for direct transfers.
struct Opened<'a> {
    /// Path for the second open.
    path: &'a Path,
    name: PathBuf,
    buffered: OwnedFd,
    identity: FileIdentity,
    /// The caller supplied the descriptor, and this process may not be allowed to reopen the file.
    is_given: bool,
}

impl Opened<'_> {
    /// Decides how to transfer; `None` if the path named another file the second time. Unneeded
    /// descriptors are added to `unused`.
    fn finish(
        self,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Option<DiskFile>, OpenDiskError> {
        let (direct, reason) = match self.choose(options, features, unused) {
            Ok(Some(Ok(direct))) => (Some(direct), None),
            Ok(Some(Err(reason))) => (None, Some(reason)),
            other => {
                unused.push(self.buffered);
                return other.map(|_| None);
            }
        };
        Ok(Some(DiskFile {
            path: self.name,
            identity: self.identity,
            buffered: self.buffered,
            direct,
            _unused: std::mem::take(unused),
            direct_required: AtomicBool::new(options.direct == DirectIo::Require),
            buffered_reason: reason.map_or_else(OnceLock::new, OnceLock::from),
            sync_failed: Mutex::new(None),
        }))
    }

    /// Returns a direct descriptor, or why transfers are buffered.
    fn choose(
        &self,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Option<Result<Direct, String>>, OpenDiskError> {
        let system = |source| OpenDiskError::System { path: self.name.clone(), source };
        let choice = match choose(self.path, self.buffered.as_fd(), options, features) {
            Ok(choice) => choice,
            Err(error) if self.is_given => {
                let reason = format!("the file cannot be opened again ({error})");
                Choice::Buffered { reason, unused: None }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(system(error)),
        };
        let chosen = match choice {
            Choice::Direct(direct) => {
                let judged = identity_of(direct.descriptor.as_fd()).and_then(|identity| {
                    file::set_blocking(direct.descriptor.as_fd())?;
                    Ok(identity == self.identity)
                });
                if !matches!(judged, Ok(true)) {
                    unused.push(direct.descriptor);
                    return judged.map(|_| None).map_err(system);
                }
                Ok(direct)
            }
            Choice::Buffered { reason, unused: refused } => {
                unused.extend(refused);
                if options.direct == DirectIo::Require {
                    return Err(OpenDiskError::DirectRefused { path: self.name.clone(), reason });
                }
                Err(reason)
            }
        };
        if options.truncate {
            file::set_len(&self.buffered, 0).map_err(system)?;
        }
        Ok(Some(chosen))
    }
}

impl Backing for DiskFile {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.read_vectored_at(slice::from_mut(target), position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.write_vectored_at(slice::from_ref(source), position_bytes)
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        let request = IoRequest::new(Operation::Read, position_bytes, IoBufMut::spans(targets));
        self.attempt(&request, |file, length| match targets {
            [only] => only.prefix(length).read_from(file, position_bytes),
            _ if length == request.length_bytes => {
                IoBufMut::read_vectored_from(targets, file, position_bytes)
            }
            _ => {
                let mut part = IoBufMut::part(targets, 0..length);
                IoBufMut::read_vectored_from(&mut part, file, position_bytes)
            }
        })
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let request = IoRequest::new(Operation::Write, position_bytes, IoBuf::spans(sources));
        self.attempt(&request, |file, length| match sources {
            [only] => only.prefix(length).write_to(file, position_bytes),
            _ if length == request.length_bytes => {
                IoBuf::write_vectored_to(sources, file, position_bytes)
            }
            _ => {
                let part = IoBuf::part(sources, 0..length);
                IoBuf::write_vectored_to(&part, file, position_bytes)
            }
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

    fn sync_data(&self) -> io::Result<()> {
        self.sync_once(|file| file::sync_data(file))
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync_once(|file| file::sync_all(file))
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(file::status(self.buffered.as_fd())?.length_bytes)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        range_end(length_bytes, 0)?;
        file::set_len(&self.buffered, length_bytes)
    }

    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        // The page cache allocates when it writes out; a tmpfs would use the memory now.
        if self.direct.is_none() {
            return Ok(());
        }
        file::allocate(&self.buffered, bytes)
    }

    fn alignment(&self) -> Alignment {
        self.direct.as_ref().map_or(Alignment::NONE, |direct| direct.alignment)
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
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
}

fn exists() -> io::Error {
    io::Error::from_raw_os_error(libc::EEXIST)
}

/// Opens `path` through the page cache, if it names a regular file.
///
/// The kind is checked before the open, because the open alone has side effects on some devices,
/// and again afterwards, because the file may have been replaced in between.
fn open_buffered(
    path: &Path,
    options: &DiskOptions,
    unused: &mut Vec<OwnedFd>,
) -> Result<(OwnedFd, FileIdentity), OpenDiskError> {
    let system = |source| OpenDiskError::System { path: path.to_owned(), source };
    match file::kind_of(path) {
        Ok(_) if options.create_new => return Err(system(exists())),
        Ok(kind) => check_regular(path, kind)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.creates() => {}
        Err(error) => return Err(system(error)),
    }
    let DiskOptions { read, write, create_new, .. } = *options;
    let permissions = options.mode.unwrap_or(0o666);
    let create = options.creates().then_some(Creation { must_be_new: create_new, permissions });
    let descriptor =
        file::open(path, OpenMode { read, write, create, direct: false }).map_err(system)?;
    let look = || {
        let status = file::status(descriptor.as_fd()).map_err(system)?;
        check_descriptor(path, descriptor.as_fd(), status.kind)?;
        file::set_blocking(descriptor.as_fd()).map_err(system)?;
        Ok(FileIdentity::of(status))
    };
    match look() {
        Ok(identity) => Ok((descriptor, identity)),
        Err(error) => {
            unused.push(descriptor);
            Err(error)
        }
    }
}

/// Calls [`check_regular`] for an open file.
fn check_descriptor(
    path: &Path,
    descriptor: BorrowedFd<'_>,
    kind: FileKind,
) -> Result<(), OpenDiskError> {
    check_regular(path, kind)?;
    let is_generated = file::is_generated(descriptor);
    check_regular(path, if is_generated { FileKind::Generated } else { kind })
}

pub(super) fn check_regular(path: &Path, kind: FileKind) -> Result<(), OpenDiskError> {
    match kind {
        FileKind::Regular => Ok(()),
        _ => Err(OpenDiskError::NotRegular { path: path.to_owned(), kind }),
    }
}

fn identity_of(descriptor: BorrowedFd<'_>) -> io::Result<FileIdentity> {
    Ok(FileIdentity::of(file::status(descriptor)?))
}

fn earlier_failure(errno: Option<i32>) -> io::Error {
    let first =
        errno.map_or_else(|| io::Error::from(io::ErrorKind::Other), io::Error::from_raw_os_error);
    let kind = first.kind();
    let advice =
        "writes since the last successful sync may be lost: write them again to another file";
    io::Error::new(kind, format!("an earlier sync failed ({first}); {advice}"))
}

#[cfg(test)]
impl DiskFile {
    /// Pretends that the file system requires another alignment.
    pub(super) fn assume_alignment(&mut self, alignment: Alignment) {
        self.direct.as_mut().expect("a direct file").alignment = alignment;
    }
    /// Returns `true` if both descriptors belong to one regular file.
    pub(super) fn descriptors_agree(&self) -> bool {
        let same = |descriptor: &OwnedFd| {
            let status = file::status(descriptor.as_fd()).expect("an open file has a status");
            let identity = FileIdentity::of(status);
            status.kind == FileKind::Regular && identity == self.identity
        };
        same(&self.buffered) && self.direct.as_ref().is_none_or(|direct| same(&direct.descriptor))
    }
}

/// A regular file that a path names, found but not opened. Closing its descriptor (`O_PATH`) drops
/// no locks.
#[derive(Debug)]
pub(crate) struct Located {
    path: PathBuf,
    descriptor: OwnedFd,
    pub(crate) identity: FileIdentity,
}

impl Located {
    /// Finds the file that `path` names; `None` if none exists. With `create_new` an existing file
    /// is an error.
    pub(crate) fn find(path: &Path, options: &DiskOptions) -> Result<Option<Self>, OpenDiskError> {
        let system = |source| OpenDiskError::System { path: path.to_owned(), source };
        let descriptor = match file::locate(path) {
            Ok(_) if options.create_new => return Err(system(exists())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            descriptor => descriptor.map_err(system)?,
        };
        let status = file::status(descriptor.as_fd()).map_err(system)?;
        check_regular(path, status.kind)?;
        let (path, identity) = (path.to_owned(), FileIdentity::of(status));
        Ok(Some(Self { path, descriptor, identity }))
    }

    /// Fails as the open would fail for lack of permission. (Where the kernel can only check this
    /// by name, Linux before 5.8 without `/proc`, this checks the file that currently has the
    /// name.)
    pub(crate) fn check_rights(&self, write: bool) -> Result<(), OpenDiskError> {
        let allowed = file::may_open(self.descriptor.as_fd(), &self.path, write);
        allowed.map_err(|source| OpenDiskError::System { path: self.path.clone(), source })
    }
}
