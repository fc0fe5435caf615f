//! Thin calls on files: open, look, transfer, sync; one system call each, and its error.
//!
//! Called by `io::disk`, which holds all policy: alignment, fallbacks, retries. Positions are the
//! kernel's signed 64-bit ones; whoever calls has checked that a range ends below 2^63.
//!
//! Transfers take raw addresses and never make a slice: while the kernel fills or empties a frame,
//! other threads may read it (optimistic readers) or write it (the page is dirtied again).
//!
//! This file does not retry, not even on EINTR.
//!
//! # Safety
//! The transfer functions hand addresses to the kernel; each states what they must be good for.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use arrayvec::ArrayVec;
use rustix::fs::{Access, AtFlags, FallocateFlags, FileType, Mode, OFlags, StatxFlags};

use super::answer_of;

/// The magic number of tmpfs in `statfs`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// The kind of thing that a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file: the only kind that can be cached.
    Regular,
    /// A directory.
    Directory,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A block device.
    BlockDevice,
    /// A character device.
    CharacterDevice,
    /// A file that the kernel makes up as it is read, in procfs, sysfs, cgroupfs, debugfs, tracefs,
    /// securityfs, configfs, selinuxfs, bpffs, pstore or efivarfs: what it says of the length of
    /// such a file is 0, or a page, and not what there is to read.
    Generated,
    /// Something else.
    Other,
}

impl From<FileType> for FileKind {
    fn from(found: FileType) -> Self {
        match found {
            FileType::RegularFile => Self::Regular,
            FileType::Directory => Self::Directory,
            FileType::Fifo => Self::Fifo,
            FileType::Socket => Self::Socket,
            FileType::BlockDevice => Self::BlockDevice,
            FileType::CharacterDevice => Self::CharacterDevice,
            FileType::Symlink | FileType::Unknown => Self::Other,
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Regular => "a regular file",
            Self::Directory => "a directory",
            Self::Fifo => "a named pipe",
            Self::Socket => "a socket",
            Self::BlockDevice => "a block device",
            Self::CharacterDevice => "a character device",
            Self::Generated => "made up by the kernel as it is read",
            Self::Other => "neither a file nor a directory",
        })
    }
}

/// The facts that `fstat` tells about an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) kind: FileKind,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) length_bytes: u64,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenMode {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Creates the file if it does not exist.
    pub(crate) create: Option<Creation>,
    pub(crate) direct: bool,
}

/// How a file is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creation {
    /// Fails with `EEXIST` if the path exists.
    pub(crate) must_be_new: bool,
    /// Permission bits, before the process's umask.
    pub(crate) permissions: u32,
}

/// The rules that `statx` gives for direct transfers of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirectAlignment {
    /// The kernel or the file system does not answer this question.
    Unknown,
    /// The file system says that this file has no direct transfers.
    Unsupported,
    /// Addresses must be multiples of the first, positions and lengths of the second.
    Known { memory_bytes: u64, offset_bytes: u64 },
}

/// Opens `path`; never waits for the other end of a pipe, never becomes anyone's terminal.
pub(crate) fn open(path: &Path, mode: OpenMode) -> io::Result<OwnedFd> {
    let mut flags = match (mode.read, mode.write) {
        (_, false) => OFlags::RDONLY,
        (false, true) => OFlags::WRONLY,
        (true, true) => OFlags::RDWR,
    };
    flags |= OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags.set(OFlags::CREATE, mode.create.is_some());
    flags.set(OFlags::EXCL, mode.create.is_some_and(|creation| creation.must_be_new));
    flags.set(OFlags::DIRECT, mode.direct);
    let permissions = mode.create.map_or(0, |creation| creation.permissions);
    Ok(rustix::fs::open(path, flags, Mode::from_raw_mode(permissions))?)
}

/// Takes a write lock of the open file description on the whole file (`F_OFD_SETLK`), without
/// waiting. `EAGAIN` or `EACCES` if another description has a lock. The lock ends with the last
/// descriptor of the description.
pub(crate) fn lock_exclusively(file: BorrowedFd<'_>) -> io::Result<()> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: `file` is open, and `lock` is a valid `struct flock` for the length of the call.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Flushes the entries of a directory (`fsync`).
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    Ok(rustix::fs::fsync(directory)?)
}

/// Takes hold of what `path` names without opening it (`O_PATH`): nothing acts, no right is needed,
/// and to close it drops no locks.
pub(crate) fn locate(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Whether this process may open a file it has a descriptor of, which was found at `path`. The
/// question is asked of the descriptor; by the path if the kernel knows no such question.
pub(crate) fn may_open(file: BorrowedFd<'_>, path: &Path, write: bool) -> io::Result<()> {
    let access = if write { Access::READ_OK | Access::WRITE_OK } else { Access::READ_OK };
    let (file, mode) = (file.as_raw_fd(), access.bits());
    let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
    // SAFETY: the name is a string that ends, and the call only looks.
    let answer = unsafe { libc::syscall(libc::SYS_faccessat2, file, c"".as_ptr(), mode, flags) };
    match answer_of(answer) {
        Err(error) if is_unknown(&error) => {
            Ok(rustix::fs::accessat(rustix::fs::CWD, path, access, AtFlags::EACCESS)?)
        }
        answer => answer.map(drop),
    }
}

/// Whether a kernel does not know a call, or a filter refuses it as if it did not.
fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL))
}

/// The accesses that a descriptor was opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Every write goes to the end, whatever its position.
    pub(crate) appends: bool,
    pub(crate) direct: bool,
}

/// Asks what a descriptor was opened for.
pub(crate) fn rights(file: BorrowedFd<'_>) -> io::Result<Rights> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    let (mode, is_path) = (flags & OFlags::RWMODE, flags.contains(OFlags::PATH));
    Ok(Rights {
        read: !is_path && mode != OFlags::WRONLY,
        write: !is_path && mode != OFlags::RDONLY,
        appends: flags.contains(OFlags::APPEND),
        direct: flags.contains(OFlags::DIRECT),
    })
}

/// The name of a descriptor's file when it was opened, as far as that can be told.
pub(crate) fn name_of(file: BorrowedFd<'_>) -> PathBuf {
    std::fs::read_link(path_of(file)).unwrap_or_else(|_| path_of(file))
}

/// Makes a file at `path`, where there must be none, for its owner's eyes only.
pub(crate) fn create_private(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?)
}

/// Makes a file in `directory` that has no name and cannot be given one (`O_TMPFILE`).
pub(crate) fn create_unnamed(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::EXCL | OFlags::CLOEXEC;
    Ok(rustix::fs::open(directory, flags, Mode::from_raw_mode(0o600))?)
}

/// Takes the name `path` away from its file.
pub(crate) fn unlink(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::unlink(path)?)
}

/// The path by which this process can open an open file again, name or not; needs `/proc`.
pub(crate) fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Makes transfers of a file opened by [`open`] wait again, as those of regular files should.
pub(crate) fn set_blocking(file: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags.difference(OFlags::NONBLOCK))?)
}

/// The kind of thing `path` names now, without opening it.
pub(crate) fn kind_of(path: &Path) -> io::Result<FileKind> {
    Ok(FileType::from_raw_mode(rustix::fs::stat(path)?.st_mode).into())
}

/// Looks at an open file.
pub(crate) fn status(file: BorrowedFd<'_>) -> io::Result<Status> {
    let found = rustix::fs::fstat(file)?;
    Ok(Status {
        kind: FileType::from_raw_mode(found.st_mode).into(),
        device: found.st_dev,
        inode: found.st_ino,
        length_bytes: u64::try_from(found.st_size).unwrap_or(0),
    })
}

/// Asks how direct transfers of `file` must be aligned (`STATX_DIOALIGN`).
pub(crate) fn direct_alignment(file: BorrowedFd<'_>) -> DirectAlignment {
    match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(found) if found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            match (found.stx_dio_mem_align, found.stx_dio_offset_align) {
                (0, _) | (_, 0) => DirectAlignment::Unsupported,
                (memory, offset) => DirectAlignment::Known {
                    memory_bytes: memory.into(),
                    offset_bytes: offset.into(),
                },
            }
        }
        _ => DirectAlignment::Unknown,
    }
}

/// The file systems whose files have no length that could be known before they are read.
const GENERATING: [libc::c_long; 12] = [
    libc::PROC_SUPER_MAGIC,
    libc::SYSFS_MAGIC,
    libc::CGROUP_SUPER_MAGIC,
    libc::CGROUP2_SUPER_MAGIC,
    libc::DEBUGFS_MAGIC,
    libc::TRACEFS_MAGIC,
    libc::SECURITYFS_MAGIC,
    libc::SELINUX_MAGIC,
    libc::BPF_FS_MAGIC,
    CONFIGFS_MAGIC,
    PSTOREFS_MAGIC,
    EFIVARFS_MAGIC,
];
const CONFIGFS_MAGIC: libc::c_long = 0x6265_6570;
const PSTOREFS_MAGIC: libc::c_long = 0x6165_676C;
const EFIVARFS_MAGIC: libc::c_long = 0xDE5E_81E4;

/// Whether `file` is one that the kernel makes up as it is read ([`FileKind::Generated`]).
pub(crate) fn is_generated(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|found| GENERATING.contains(&(found.f_type as libc::c_long)))
}

/// Whether `file` lives in memory only, on a tmpfs.
pub(crate) fn is_on_tmpfs(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type as u64 == TMPFS_MAGIC)
}

/// Reads once, up to `length_bytes` bytes at `position_bytes` of `file`, to `target`.
///
/// # Safety
/// `target` must be writable for `length_bytes` bytes for the whole call. Other threads may read
/// them meanwhile, but only through `sys::copy`.
pub(crate) unsafe fn read_at(
    file: BorrowedFd<'_>,
    target: *mut u8,
    length_bytes: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    let position = kernel_position(position_bytes)?;
    // SAFETY: the kernel writes at most `length_bytes` bytes at `target`: the caller's contract.
    answer_of(unsafe { libc::pread64(file.as_raw_fd(), target.cast(), length_bytes, position) })
}

/// Writes once, up to `length_bytes` bytes from `source`, at `position_bytes` of `file`.
///
/// # Safety
/// `source` must be readable for `length_bytes` bytes for the whole call. Other threads may write
/// them meanwhile, but only through `sys::copy`: what the file then holds may be a mixture.
pub(crate) unsafe fn write_at(
    file: BorrowedFd<'_>,
    source: *const u8,
    length_bytes: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    let position = kernel_position(position_bytes)?;
    // SAFETY: the kernel reads at most `length_bytes` bytes at `source`: the caller's contract.
    answer_of(unsafe { libc::pwrite64(file.as_raw_fd(), source.cast(), length_bytes, position) })
}

/// As [`read_at`], to `count` runs of memory, one behind the other.
///
/// # Safety
/// `targets` must point to `count` entries, and each must be as the target of [`read_at`].
pub(crate) unsafe fn read_vectored_at(
    file: BorrowedFd<'_>,
    targets: *const libc::iovec,
    count: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    let position = kernel_position(position_bytes)?;
    let count = libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel reads `count` entries and writes to the memory they name: the caller's
    // contract.
    answer_of(unsafe { libc::preadv64(file.as_raw_fd(), targets, count, position) })
}

/// As [`write_at`], from `count` runs of memory, one behind the other.
///
/// # Safety
/// `sources` must point to `count` entries, and each must be as the source of [`write_at`].
pub(crate) unsafe fn write_vectored_at(
    file: BorrowedFd<'_>,
    sources: *const libc::iovec,
    count: usize,
    position_bytes: u64,
) -> io::Result<usize> {
    let position = kernel_position(position_bytes)?;
    let count = libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel reads `count` entries and the memory they name: the caller's contract.
    answer_of(unsafe { libc::pwritev64(file.as_raw_fd(), sources, count, position) })
}

/// Pieces of memory, one behind the other, as a vectored call takes them.
#[derive(Debug, Default)]
pub(crate) struct Row<const PIECES: usize>(ArrayVec<libc::iovec, PIECES>);

impl<const PIECES: usize> Row<PIECES> {
    /// Adds a piece, joined to the last one if it follows that; `false` if there is no room.
    pub(crate) fn push(&mut self, start: *const u8, length_bytes: usize) -> bool {
        if let Some(last) = self.0.last_mut()
            && last.iov_base.cast_const().cast::<u8>().wrapping_add(last.iov_len) == start
        {
            last.iov_len += length_bytes;
            return true;
        }
        let piece = libc::iovec { iov_base: start.cast_mut().cast(), iov_len: length_bytes };
        self.0.try_push(piece).is_ok()
    }
}

/// Writes a row at the position of `file` itself. Returns how many bytes it took.
///
/// # Safety
/// Each piece must be readable during the call. Others may change it meanwhile.
pub(crate) unsafe fn write_row<const PIECES: usize>(
    file: BorrowedFd<'_>,
    row: &Row<PIECES>,
) -> io::Result<usize> {
    // SAFETY: the kernel reads so many entries and the memory they name: the caller's contract.
    answer_of(unsafe { libc::writev(file.as_raw_fd(), row.0.as_ptr(), row.0.len() as libc::c_int) })
}

/// Makes the bytes of `file` durable, and what is needed to find them again.
pub(crate) fn sync_data(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fdatasync(file)?)
}

/// Makes the bytes of `file` and all that is known about it durable.
pub(crate) fn sync_all(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fsync(file)?)
}

/// Cuts `file`, or lets it grow by zeros.
pub(crate) fn set_len(file: impl AsFd, length_bytes: u64) -> io::Result<()> {
    kernel_position(length_bytes)?;
    Ok(rustix::fs::ftruncate(file, length_bytes)?)
}

/// Has the file system find room for these bytes of `file`, which becomes as long.
pub(crate) fn allocate(file: impl AsFd, bytes: Range<u64>) -> io::Result<()> {
    kernel_position(bytes.end)?;
    let (flags, length_bytes) = (FallocateFlags::empty(), bytes.end - bytes.start);
    Ok(rustix::fs::fallocate(file, flags, bytes.start, length_bytes)?)
}

/// The kernel counts positions with a sign.
fn kernel_position(position_bytes: u64) -> io::Result<i64> {
    i64::try_from(position_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_testing::skip;
    use std::io::Write;

    const READ: OpenMode = OpenMode { read: true, write: false, create: None, direct: false };

    #[test]
    fn a_position_of_two_to_the_63_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let mut byte = [0_u8; 1];
        // SAFETY: one byte of our own.
        let read = unsafe { read_at(file.as_fd(), byte.as_mut_ptr(), 1, 1 << 63) };
        assert_eq!(read.unwrap_err().raw_os_error(), Some(libc::EOVERFLOW));
        // SAFETY: as above.
        let written = unsafe { write_at(file.as_fd(), byte.as_ptr(), 1, u64::MAX) };
        assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EOVERFLOW));
        assert_eq!(set_len(&file, 1 << 63).unwrap_err().raw_os_error(), Some(libc::EOVERFLOW));
    }

    #[test]
    fn an_opened_file_is_close_on_exec_and_blocking_once_set_so() {
        let mut named = tempfile::NamedTempFile::new().unwrap();
        named.write_all(b"abc").unwrap();
        let file = open(named.path(), READ).unwrap();
        assert!(rustix::io::fcntl_getfd(&file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        set_blocking(file.as_fd()).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        let status = status(file.as_fd()).unwrap();
        assert_eq!((status.kind, status.length_bytes), (FileKind::Regular, 3));
    }

    #[test]
    fn a_file_without_a_name_cannot_be_given_one() {
        use rustix::fs::{CWD, linkat};
        use rustix::io::Errno;
        let directory = tempfile::tempdir().unwrap();
        let file = match create_unnamed(directory.path()) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                return skip("tmpfile", error);
            }
            file => file.unwrap(),
        };
        let (from, to) = (path_of(file.as_fd()), directory.path().join("name"));
        let linked = linkat(CWD, from, CWD, &to, AtFlags::SYMLINK_FOLLOW);
        assert_eq!((linked, to.exists()), (Err(Errno::NOENT), false));
    }

    #[test]
    fn a_failed_transfer_returns_the_errno() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let file = open(named.path(), READ).unwrap();
        // SAFETY: one byte of our own; the descriptor is read-only, so nothing is transferred.
        let written = unsafe { write_at(file.as_fd(), [0_u8].as_ptr(), 1, 0) };
        assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
