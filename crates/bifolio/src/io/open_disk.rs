//! Opens a disk file: the two descriptors of a [`DiskFile`], and the decision between direct
//! transfers and the page cache.
//!
//! The file is opened through the page cache first. What rules out direct I/O is checked in this
//! order: the caller's options, the features disabled in the cache, tmpfs, the answer of `statx`,
//! the result of a second `open`, and, where `statx` reported nothing, one trial read.
//!
//! Closing any descriptor of a file drops all POSIX locks that the process holds on it. So a
//! descriptor that turned out to be unneeded is kept open, and [`Located`] identifies the file of a
//! path without opening it.

use super::disk::{Direct, DiskFile, is_refusal};
use super::request::ALIGNMENT_BYTES_MAX;
use super::{Alignment, FileIdentity, IoBufMut, IoBuffer};
use crate::error::{Error, ErrorKind};
use crate::sync::{AtomicBool, Mutex};
use crate::sys::Retries;
use crate::sys::file::{self, Creation, OpenMode, Rights};
use crate::sys::probe::{Feature, Features};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// How often a file may be replaced while it is being opened before the open fails.
const OPEN_ATTEMPTS_MAX: u32 = 5;

/// Alignment assumed where none is reported: no device has larger logical blocks than a page.
const ALIGNMENT_GUESSED: Alignment =
    Alignment { memory_bytes: ALIGNMENT_BYTES_MAX, offset_bytes: ALIGNMENT_BYTES_MAX };

/// How transfers of a file reach the device: directly, or through the kernel's page cache.
///
/// # What a buffered file does not guarantee
/// The kernel writes what a write has put in its page cache later, and may fail (no space on a thin
/// volume, a lost network connection, a bad block). Bifolio considers such a page clean, so it may
/// evict the page, and the kernel may drop its own copy. Then a read returns what the device holds,
/// perhaps the bytes from before the write, and only the next sync reports the loss. That sync
/// fails, and so does every later one through any handle, until the loss is accepted
/// ([`File::discard_dirty`](crate::File::discard_dirty)), the last handle is closed, and the file
/// is opened again: everything written since the last successful sync must be considered lost.
///
/// With direct transfers the write-out itself fails, and the page stays dirty and is written again
/// later. A program that must not read old bytes in such a case opens its files with
/// [`DirectIo::Require`], or checks [`Stats::fallbacks`](crate::Stats::fallbacks). A partial last
/// block of a file is always written through the page cache, with the same consequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DirectIo {
    /// Direct where the file system supports it, otherwise through the kernel's page cache, with
    /// the consequences described above.
    #[default]
    Auto,
    /// Always through the kernel's page cache.
    Never,
    /// Direct, or opening fails.
    Require,
}

/// Options for opening a [`DiskFile`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskOptions {
    /// Allows reading.
    pub(crate) read: bool,
    /// Allows writing, truncating and extending.
    pub(crate) write: bool,
    /// Creates the file if it does not exist. Needs `write`.
    pub(crate) create: bool,
    /// Creates the file, and fails if the path exists (`EEXIST`). Needs `write`.
    pub(crate) create_new: bool,
    /// Permission bits of a file that is created, before the process's umask; 0o666 if `None`.
    pub(crate) mode: Option<u32>,
    /// Truncates the file to length 0. Needs `write`.
    pub(crate) truncate: bool,
    /// Direct or buffered transfers.
    pub(crate) direct: DirectIo,
}

impl DiskOptions {
    pub(super) fn creates(&self) -> bool {
        self.create || self.create_new
    }

    /// Returns the reason why the options cannot all hold.
    pub(super) fn contradiction(&self) -> Option<&'static str> {
        match *self {
            DiskOptions { read: false, write: false, .. } => {
                Some("a file must be opened for reading, for writing or for both")
            }
            DiskOptions { write: false, create: true, .. }
            | DiskOptions { write: false, create_new: true, .. } => {
                Some("creating a file needs write access")
            }
            DiskOptions { write: false, truncate: true, .. } => {
                Some("truncating a file needs write access")
            }
            _ => None,
        }
    }
}

impl DiskFile {
    /// Opens the file at `path`. Never blocks, whatever `path` names, and changes nothing unless it
    /// names a regular file.
    pub(crate) fn open_with(
        path: impl AsRef<Path>,
        options: &DiskOptions,
        features: &Features,
    ) -> Result<Self, Error> {
        Self::open_keeping(path.as_ref(), options, features, &mut Vec::new())
    }

    /// Opens the file at `path`, as [`Self::open_with`] does. On an error, adds unneeded
    /// descriptors to `unused`, because closing them would drop locks. On success the file takes
    /// these, and what `unused` contained before.
    pub(crate) fn open_keeping(
        path: &Path,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Self, Error> {
        if let Some(problem) = options.contradiction() {
            return Err(Error::new(ErrorKind::Config, problem).in_file(path.display().to_string()));
        }
        for _ in 0..OPEN_ATTEMPTS_MAX {
            let (buffered, identity) = open_buffered(path, options, unused)?;
            let name = path.to_owned();
            let opened = OpenedDisk { path, name, buffered, identity, is_given: false };
            if let Some(file) = opened.finish(options, features, unused)? {
                return Ok(file);
            }
        }
        Err(replaced(path))
    }

    /// Creates the file of a descriptor, which is only reopened for direct transfers. The
    /// descriptor is closed with the file. `unused` is as in [`Self::open_keeping`].
    pub(crate) fn from_fd(
        descriptor: OwnedFd,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Self, Error> {
        let name = file::name_of(descriptor.as_fd());
        let path = file::path_of(descriptor.as_fd());
        let system = |source| Error::cannot_open(&name, source);
        let look = || {
            let identity = FileIdentity::of_file(&descriptor)?;
            Ok((identity, file::rights(descriptor.as_fd())?))
        };
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
            let opened = open_file(&path, mode);
            unused.push(buffered);
            buffered = opened.map_err(system)?;
            file::set_blocking(buffered.as_fd(), false).map_err(system)?;
        }
        let opened =
            OpenedDisk { path: &path, name: name.clone(), buffered, identity, is_given: true };
        opened.finish(options, features, unused)?.ok_or_else(|| replaced(&name))
    }

    /// Returns the name of the file behind a descriptor, for messages.
    pub(crate) fn name_of(descriptor: &OwnedFd) -> String {
        file::name_of(descriptor.as_fd()).display().to_string()
    }

    /// Returns the identity of a descriptor, or an error if it cannot be used with `options`.
    pub(crate) fn check_fd(
        descriptor: &OwnedFd,
        options: &DiskOptions,
    ) -> Result<FileIdentity, Error> {
        let path = file::name_of(descriptor.as_fd());
        let rights = file::rights(descriptor.as_fd());
        let system = |source| Error::cannot_open(&path, source);
        let (rights, status) =
            (rights.map_err(system)?, file::status(descriptor.as_fd()).map_err(system)?);
        check_descriptor(&path, descriptor.as_fd(), status.other_kind)?;
        let problem = match rights {
            Rights { read: false, .. } => "it was not opened for reading",
            Rights { write: false, .. } if options.write => "it was not opened for writing",
            Rights { appends: true, .. } if options.write => {
                "it was opened with O_APPEND, so every write would go to the end of the file"
            }
            _ => return Ok(FileIdentity::of(status)),
        };
        let text = format!("the descriptor cannot be used: {problem}");
        Err(Error::new(ErrorKind::Open, text).in_file(path.display().to_string()))
    }
}

struct OpenedDisk<'a> {
    path: &'a Path,
    name: PathBuf,
    buffered: OwnedFd,
    identity: FileIdentity,
    /// The caller supplied the descriptor, and this process may not be allowed to reopen the file.
    is_given: bool,
}

impl OpenedDisk<'_> {
    /// Decides how to transfer; `None` if the path named another file the second time. Unneeded
    /// descriptors are added to `unused`.
    fn finish(
        self,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Option<DiskFile>, Error> {
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
            lock: Mutex::new(None),
            is_watchable: !options.write && !self.is_given,
        }))
    }

    /// Decides how to transfer, and truncates; `None` if the path named another file.
    fn choose(
        &self,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Option<Result<Direct, String>>, Error> {
        let system = |source| Error::cannot_open(&self.name, source);
        let chosen = match self.open_direct(options, features, unused) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            chosen => chosen.map_err(system)?,
        };
        let chosen = match chosen {
            Ok(direct) => {
                let judged = FileIdentity::of_file(&direct.descriptor).and_then(|identity| {
                    file::set_blocking(direct.descriptor.as_fd(), true)?;
                    Ok(identity == self.identity)
                });
                if !matches!(judged, Ok(true)) {
                    unused.push(direct.descriptor);
                    return judged.map(|_| None).map_err(system);
                }
                Ok(direct)
            }
            Err(reason) if options.direct == DirectIo::Require => {
                let text = format!("direct I/O was required, but {reason}");
                let error = Error::new(ErrorKind::Unsupported, text);
                return Err(error.in_file(self.name.display().to_string()));
            }
            buffered => buffered,
        };
        if options.truncate {
            file::set_len(&self.buffered, 0).map_err(system)?;
        }
        Ok(Some(chosen))
    }

    /// Opens the file for direct transfers, or returns the reason for the page cache. Fails only if
    /// the second `open` fails for a reason unrelated to direct transfers.
    fn open_direct(
        &self,
        options: &DiskOptions,
        features: &Features,
        unused: &mut Vec<OwnedFd>,
    ) -> io::Result<Result<Direct, String>> {
        let (alignment, certain) = match plan(self.buffered.as_fd(), options.direct, features) {
            Ok(plan) => plan,
            Err(reason) => return Ok(Err(reason)),
        };
        let DiskOptions { read, write, .. } = *options;
        let mode = OpenMode { read, write, create: None, direct: true };
        let descriptor = match open_file(self.path, mode) {
            Ok(descriptor) => descriptor,
            Err(error) if is_refusal(&error) => {
                return Ok(Err(format!("the file system refuses O_DIRECT at open ({error})")));
            }
            Err(error) if self.is_given => {
                return Ok(Err(format!("the file cannot be opened again ({error})")));
            }
            Err(error) => return Err(error),
        };
        if !certain
            && read
            && let Err(error) = try_one_read(descriptor.as_fd(), alignment)
        {
            unused.push(descriptor);
            return Ok(Err(format!("the file system refuses a direct read at open ({error})")));
        }
        Ok(Ok(Direct { descriptor, alignment }))
    }
}

/// Returns the alignment to open with and `true` if it is certain, or the reason not to open for
/// direct transfers.
fn plan(
    buffered: BorrowedFd<'_>,
    wish: DirectIo,
    features: &Features,
) -> Result<(Alignment, bool), String> {
    if wish == DirectIo::Never {
        return Err("direct I/O was not requested".to_owned());
    }
    if !features.has(Feature::DirectIo) {
        return Err("direct I/O is disabled in this cache".to_owned());
    }
    if file::is_on_tmpfs(buffered) {
        return Err("the file is on tmpfs, which is in memory".to_owned());
    }
    let is_asked = features.has(Feature::StatxDirectAlignment);
    judge(if is_asked { file::direct_alignment(buffered) } else { None })
}

/// Judges the answer of [`file::direct_alignment`].
fn judge(answer: Option<(u64, u64)>) -> Result<(Alignment, bool), String> {
    match answer {
        None => Ok((ALIGNMENT_GUESSED, false)),
        Some((0, _) | (_, 0)) => {
            Err("the file system does not support direct I/O on this file".to_owned())
        }
        Some((memory_bytes, offset_bytes)) => {
            let alignment = Alignment { memory_bytes, offset_bytes };
            if alignment.is_valid() {
                return Ok((alignment, true));
            }
            Err(format!(
                "direct I/O needs alignments of {memory_bytes} bytes in memory and \
                 {offset_bytes} in the file; at most {ALIGNMENT_BYTES_MAX} is supported"
            ))
        }
    }
}

/// Opens a file. Another program may have a lease on it for a moment, as `keep` has: then the open,
/// which does not block, is refused.
fn open_file(path: &Path, mode: OpenMode) -> io::Result<OwnedFd> {
    Retries::MORE.persist(|| file::open(path, mode))
}

/// Checks if direct reads work. Only a refusal counts: any other error is left to the next reader,
/// which reports its position.
fn try_one_read(descriptor: BorrowedFd<'_>, alignment: Alignment) -> io::Result<()> {
    let length_bytes = alignment.granule_bytes() as usize;
    let Ok(mut scratch) = IoBuffer::try_new(length_bytes) else { return Ok(()) };
    match IoBufMut::read_from(&mut [scratch.target()], length_bytes, descriptor, 0) {
        Err(error) if is_refusal(&error) => Err(error),
        _ => Ok(()),
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
) -> Result<(OwnedFd, FileIdentity), Error> {
    let system = |source| Error::cannot_open(path, source);
    match file::other_kind_of(path) {
        Ok(_) if options.create_new => return Err(system(exists())),
        Ok(kind) => check_regular(path, kind)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.creates() => {}
        Err(error) => return Err(system(error)),
    }
    let DiskOptions { read, write, create_new, .. } = *options;
    let permissions = options.mode.unwrap_or(0o666);
    let create = options.creates().then_some(Creation { must_be_new: create_new, permissions });
    let descriptor =
        open_file(path, OpenMode { read, write, create, direct: false }).map_err(system)?;
    let look = || {
        let status = file::status(descriptor.as_fd()).map_err(system)?;
        check_descriptor(path, descriptor.as_fd(), status.other_kind)?;
        file::set_blocking(descriptor.as_fd(), false).map_err(system)?;
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

fn check_descriptor(
    path: &Path,
    descriptor: BorrowedFd<'_>,
    other_kind: Option<&'static str>,
) -> Result<(), Error> {
    let generated = "generated by the kernel as it is read";
    let is_generated = || file::is_generated(descriptor).then_some(generated);
    check_regular(path, other_kind.or_else(is_generated))
}

fn check_regular(path: &Path, other_kind: Option<&'static str>) -> Result<(), Error> {
    let Some(kind) = other_kind else { return Ok(()) };
    let text = format!("it is {kind}; only regular files can be cached");
    Err(Error::new(ErrorKind::NotRegular, text).in_file(path.display().to_string()))
}

pub(crate) fn replaced(path: &Path) -> Error {
    let text = "the file kept being replaced while it was opened";
    let error = Error::new(ErrorKind::Open, text).numbered(libc::EBUSY);
    error.in_file(path.display().to_string())
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
    pub(crate) fn find(path: &Path, options: &DiskOptions) -> Result<Option<Self>, Error> {
        let system = |source| Error::cannot_open(path, source);
        let descriptor = match file::locate(path) {
            Ok(_) if options.create_new => return Err(system(exists())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            descriptor => descriptor.map_err(system)?,
        };
        let status = file::status(descriptor.as_fd()).map_err(system)?;
        check_regular(path, status.other_kind)?;
        let (path, identity) = (path.to_owned(), FileIdentity::of(status));
        Ok(Some(Self { path, descriptor, identity }))
    }

    /// Fails as the open would fail for lack of permission. (Where the kernel can only check this
    /// by name, Linux before 5.8 without `/proc`, this checks the file that currently has the
    /// name.)
    pub(crate) fn check_rights(&self, write: bool) -> Result<(), Error> {
        let allowed = file::may_open(self.descriptor.as_fd(), &self.path, write);
        allowed.map_err(|source| Error::cannot_open(&self.path, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_alignment_is_used_and_an_unknown_one_tried() {
        let told = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert_eq!(judge(Some((4, 512))), Ok((told, true)));
        assert_eq!(judge(None), Ok((ALIGNMENT_GUESSED, false)));
        assert!(ALIGNMENT_GUESSED.is_valid());
    }

    #[test]
    fn alignments_beyond_a_frame_are_refused_with_the_numbers() {
        assert!(judge(Some((512, 0))).is_err() && judge(Some((0, 512))).is_err());
        let reason = judge(Some((512, 65536))).unwrap_err();
        assert!(reason.contains("65536"), "{reason}");
        assert!(judge(Some((512, 1000))).is_err());
    }

    #[test]
    fn only_refusals_lead_to_the_page_cache() {
        for errno in [libc::EINVAL, libc::EOPNOTSUPP] {
            assert!(is_refusal(&io::Error::from_raw_os_error(errno)));
        }
        for errno in [libc::EIO, libc::ENOSPC, libc::EACCES, libc::EINTR, libc::EBADF] {
            assert!(!is_refusal(&io::Error::from_raw_os_error(errno)));
        }
    }
}
