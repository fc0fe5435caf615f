//! Thin wrappers of file calls: open, stat, length, sync; one system call each, and its error.
//!
//! Transfers are in `io::request`. This file does not retry, not even on EINTR.
//!
//! Every descriptor of the library is opened here, by [`above_standard`] or [`pipe`], has a number
//! of 3 or more, and is close-on-exec. (`cargo x tidy` finds calls that open one elsewhere.) In a
//! program that has closed its standard streams, a file could become descriptor 2, and the next
//! message of any library would be written into it.
//!
//! So while a descriptor is opened, numbers that the program closed are occupied by descriptors of
//! `/` that can be neither read nor written (`O_PATH`). If another thread closes a standard stream
//! in between, the descriptor is duplicated and the low one closed. (Closing a file drops the POSIX
//! locks that the program holds on it.)
//!
//! # Safety
//! Queries numbers that may not be open; nothing is read or written through them.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use super::is_forbidden;
use arrayvec::ArrayVec;
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, StatxFlags};
pub(crate) use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::pipe::PipeFlags;

/// Lowest number of a descriptor of the library: those below are the standard streams.
pub(crate) const NUMBER_MIN: RawFd = 3;

/// Calls `open`, which opens one descriptor, so that its number is [`NUMBER_MIN`] or more.
pub(crate) fn above_standard<D, E>(open: impl FnOnce() -> Result<D, E>) -> io::Result<D>
where
    D: Into<OwnedFd> + From<OwnedFd>,
    io::Error: From<E>,
{
    let opened = with_standard_occupied(open)?;
    Ok(D::from(lift(opened.into())?))
}

pub(crate) fn pipe(flags: PipeFlags) -> io::Result<(OwnedFd, OwnedFd)> {
    let open = || rustix::pipe::pipe_with(flags | PipeFlags::CLOEXEC);
    let (reader, writer) = with_standard_occupied(open)?;
    Ok((lift(reader)?, lift(writer)?))
}

pub(crate) fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::new();
    above_standard(|| File::open(&path))?.read_to_string(&mut text)?;
    Ok(text)
}

/// Calls `open`, which may open several descriptors. Each has a number of [`NUMBER_MIN`] or more
/// unless another thread closes a standard stream meanwhile.
pub(crate) fn with_standard_occupied<T>(open: impl FnOnce() -> T) -> T {
    let mut occupied = ArrayVec::<OwnedFd, { NUMBER_MIN as usize }>::new();
    while !occupied.is_full() && (0..NUMBER_MIN).any(is_free) {
        // Without this descriptor, `lift` moves the one that `open` opens.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::open("/", flags, Mode::empty()) else { break };
        occupied.push(root);
    }
    open()
}

fn is_free(number: RawFd) -> bool {
    // SAFETY: the call returns the flags of the descriptor, or that it is not open.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    flags == -1
}

fn lift(opened: OwnedFd) -> io::Result<OwnedFd> {
    if opened.as_raw_fd() >= NUMBER_MIN {
        return Ok(opened);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&opened, NUMBER_MIN)?)
}

const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Returns what a file is, for messages, if it is not a regular one; only those can be cached.
fn other_kind(mode: u32) -> Option<&'static str> {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => None,
        FileType::Directory => Some("a directory"),
        FileType::Fifo => Some("a named pipe"),
        FileType::Socket => Some("a socket"),
        FileType::BlockDevice => Some("a block device"),
        FileType::CharacterDevice => Some("a character device"),
        FileType::Symlink | FileType::Unknown => Some("neither a file nor a directory"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    /// Kind of a file that is not a regular one, for messages.
    pub(crate) other_kind: Option<&'static str>,
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) length_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenMode {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Parameters for creating a file that does not exist; `None` to fail.
    pub(crate) create: Option<Creation>,
    pub(crate) direct: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Creation {
    /// Fails with `EEXIST` if the path exists.
    pub(crate) must_be_new: bool,
    pub(crate) permissions: u32,
}

/// Opens `path`. Never waits for the other end of a pipe, never acquires a controlling terminal.
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
    open_above(path, flags, permissions)
}

fn open_above(path: &Path, flags: OFlags, permissions: u32) -> io::Result<OwnedFd> {
    above_standard(|| rustix::fs::open(path, flags, Mode::from_raw_mode(permissions)))
}

/// Takes a write lock of the open file description on the whole file (`F_OFD_SETLK`) without
/// waiting. Fails with `EAGAIN` or `EACCES` if another description holds a lock. The lock ends with
/// the last descriptor of the description, or [`unlock`].
pub(crate) fn lock_exclusively(file: BorrowedFd<'_>) -> io::Result<()> {
    set_lock(file, libc::F_WRLCK)
}

pub(crate) fn unlock(file: BorrowedFd<'_>) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK)
}

fn set_lock(file: BorrowedFd<'_>, kind: i32) -> io::Result<()> {
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    let lock = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: `file` is open, and `lock` is a valid `struct flock` for the length of the call.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::fsync(open_above(path, flags, 0)?)?)
}

/// Opens `path` without access to its contents (`O_PATH`): has no side effects, needs no permission
/// on the file, and closing it drops no locks.
pub(crate) fn locate(path: &Path) -> io::Result<OwnedFd> {
    open_above(path, OFlags::PATH | OFlags::CLOEXEC, 0)
}

/// Succeeds if this process may open the file of a descriptor, found at `path`. Checks the
/// descriptor or, if that is not supported or forbidden, the path. The second check is for the real
/// user, so that a process with another effective user fails.
pub(crate) fn may_open(file: BorrowedFd<'_>, path: &Path, write: bool) -> io::Result<()> {
    let access = if write { Access::READ_OK | Access::WRITE_OK } else { Access::READ_OK };
    let (file, mode) = (file.as_raw_fd(), access.bits());
    let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
    // SAFETY: the name is a NUL-terminated string, and the call only checks.
    let answer = unsafe { libc::syscall(libc::SYS_faccessat2, file, c"".as_ptr(), mode, flags) };
    match answer_of(answer) {
        // EINVAL: Linux 5.8 to 6.5 may not know the flags.
        Err(error) if is_forbidden(&error) || error.raw_os_error() == Some(libc::EINVAL) => {
            let is_own = rustix::process::getuid() == rustix::process::geteuid()
                && rustix::process::getgid() == rustix::process::getegid();
            if !is_own {
                return Err(error);
            }
            // Without flags this is the older call, `faccessat`.
            Ok(rustix::fs::accessat(rustix::fs::CWD, path, access, AtFlags::empty())?)
        }
        answer => answer.map(drop),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Every write appends to the file, whatever its position.
    pub(crate) appends: bool,
    pub(crate) direct: bool,
}

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

/// Returns the path of a descriptor's file when it was opened, as far as it is known.
pub(crate) fn name_of(file: BorrowedFd<'_>) -> PathBuf {
    std::fs::read_link(path_of(file)).unwrap_or_else(|_| path_of(file))
}

/// Creates a file at `path`, which must not exist, with access for its owner only.
pub(crate) fn create_private(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    open_above(path, flags, 0o600)
}

/// Creates a file in `directory` that has no name and cannot be given one (`O_TMPFILE`).
pub(crate) fn create_unnamed(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::EXCL | OFlags::CLOEXEC;
    open_above(directory, flags, 0o600)
}

/// Returns the path by which this process can reopen an open file, with or without a name; needs
/// `/proc`.
pub(crate) fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Makes transfers of a file that [`open`] opened, with this `direct`, block again, as a regular
/// file should.
pub(crate) fn set_blocking(file: BorrowedFd<'_>, direct: bool) -> io::Result<()> {
    // All flags that can be set: it has no other one.
    let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
    Ok(rustix::fs::fcntl_setfl(file, flags)?)
}

/// Returns what the file at `path` is, if it is not a regular one, without opening it.
pub(crate) fn other_kind_of(path: &Path) -> io::Result<Option<&'static str>> {
    Ok(other_kind(rustix::fs::stat(path)?.st_mode))
}

pub(crate) fn status(file: BorrowedFd<'_>) -> io::Result<Status> {
    let found = rustix::fs::fstat(file)?;
    Ok(Status {
        other_kind: other_kind(found.st_mode),
        device: found.st_dev,
        inode: found.st_ino,
        length_bytes: u64::try_from(found.st_size).unwrap_or(0),
    })
}

/// State of a file. A change of its bytes, other than through a map that was stored to before,
/// gives it another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) length_bytes: u64,
    /// Times of the last change of the bytes, and of the status, nanoseconds.
    modified_ns: i128,
    changed_ns: i128,
}

const NS_PER_SECOND: i128 = 1_000_000_000;
/// Upper bound on the time between two ticks of the clock that the kernel takes file times from,
/// twice.
const TICK_NS_MAX: i128 = 20_000_000;

pub(crate) fn stamp(file: BorrowedFd<'_>) -> io::Result<Stamp> {
    let found = rustix::fs::fstat(file)?;
    let ns_of = |seconds: i128, ns: i128| seconds * NS_PER_SECOND + ns;
    Ok(Stamp {
        device: found.st_dev,
        inode: found.st_ino,
        length_bytes: u64::try_from(found.st_size).unwrap_or(0),
        modified_ns: ns_of(found.st_mtime.into(), found.st_mtime_nsec.into()),
        changed_ns: ns_of(found.st_ctime.into(), found.st_ctime_nsec.into()),
    })
}

impl Stamp {
    /// Returns `true` if a change from now on gets a later time: the last one was in an earlier
    /// tick of the kernel's clock.
    pub(crate) fn is_past(&self) -> bool {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        let now_ns = i128::from(now.tv_sec) * NS_PER_SECOND + i128::from(now.tv_nsec);
        // Without a fraction, the file system may keep whole seconds.
        let is_whole = self.changed_ns % NS_PER_SECOND == 0;
        let tick_ns = if is_whole { 2 * NS_PER_SECOND } else { TICK_NS_MAX };
        self.changed_ns + tick_ns <= now_ns
    }
}

/// File systems on which each write gets a time of this machine's clock, as does the first store
/// through a shared map, and on which a lease sees all writers.
///
/// Not overlayfs: there a map has the file below open, so a lease does not see it. Not tmpfs: a
/// store through a map may leave the times as they are. Not NFS, SMB, FUSE and the like: other
/// machines, or the server, change files unseen.
const LOCAL: [u64; 4] = [
    0xEF53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683E, // Btrfs
    0xF2F5_2010, // F2FS
];

/// Returns the number of the file system's type if it is not one of [`LOCAL`].
pub(crate) fn foreign_type(file: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let found = rustix::fs::fstatfs(file)?.f_type as u64;
    Ok((!LOCAL.contains(&found)).then_some(found))
}

/// Returns the time at which a file was created, nanoseconds; `None` if the file system does not
/// know it.
pub(crate) fn born_ns(file: BorrowedFd<'_>) -> Option<u64> {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok()?;
    let (seconds, ns) = (found.stx_btime.tv_sec, found.stx_btime.tv_nsec);
    let is_known = found.stx_mask & StatxFlags::BTIME.bits() != 0;
    let all_ns = i128::from(seconds) * NS_PER_SECOND + i128::from(ns);
    u64::try_from(all_ns).ok().filter(|_| is_known)
}

/// Returns the bytes of which addresses, and positions and lengths, of direct transfers must be
/// multiples (`STATX_DIOALIGN`): 0 if none are supported; `None` if the kernel does not tell.
pub(crate) fn direct_alignment(file: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let is_told = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    is_told.then(|| (found.stx_dio_mem_align.into(), found.stx_dio_offset_align.into()))
}

/// File systems whose files have no known length before they are read.
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

pub(crate) fn is_generated(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file)
        .is_ok_and(|found| GENERATING.contains(&(found.f_type as libc::c_long)))
}

/// Returns `true` if `file` is in memory only, on a tmpfs.
pub(crate) fn is_on_tmpfs(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type as u64 == TMPFS_MAGIC)
}

/// Makes the bytes of `file` durable, with the metadata needed to read them back.
pub(crate) fn sync_data(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fdatasync(file)?)
}

pub(crate) fn sync_all(file: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fsync(file)?)
}

pub(crate) fn set_len(file: impl AsFd, length_bytes: u64) -> io::Result<()> {
    kernel_position(length_bytes)?;
    Ok(rustix::fs::ftruncate(file, length_bytes)?)
}

pub(crate) fn fallocate(
    file: impl AsFd,
    flags: FallocateFlags,
    bytes: Range<u64>,
) -> io::Result<()> {
    kernel_position(bytes.end)?;
    Ok(rustix::fs::fallocate(file, flags, bytes.start, bytes.end - bytes.start)?)
}

/// Returns the position of the first data or hole from the given position on; `None` past the last
/// one. Does not change the position of the descriptor, which other programs may share, except
/// during the call.
pub(crate) fn seek(file: impl AsFd, target: SeekFrom) -> io::Result<Option<u64>> {
    let before = rustix::fs::tell(&file)?;
    let found = rustix::fs::seek(&file, target);
    rustix::fs::seek(&file, SeekFrom::Start(before))?;
    match found {
        Ok(position) => Ok(Some(position)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Converts the return value of a C library call: the amount or, if negative, the error of this
/// thread.
pub(crate) fn answer_of(answer: impl TryInto<usize>) -> io::Result<usize> {
    answer.try_into().map_err(|_| io::Error::last_os_error())
}

fn kernel_position(position_bytes: u64) -> io::Result<i64> {
    i64::try_from(position_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_testing::skip;
    use rustix::io::{FdFlags, fcntl_getfd};
    use std::io::Write;

    const READ: OpenMode = OpenMode { read: true, write: false, create: None, direct: false };

    #[test]
    fn an_opened_file_is_close_on_exec_and_blocking_once_set_so() {
        let mut named = tempfile::NamedTempFile::new().unwrap();
        named.write_all(b"abc").unwrap();
        let file = open(named.path(), READ).unwrap();
        assert!(fcntl_getfd(&file).unwrap().contains(FdFlags::CLOEXEC));
        set_blocking(file.as_fd(), false).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        let status = status(file.as_fd()).unwrap();
        assert_eq!((status.other_kind, status.length_bytes), (None, 3));
    }

    #[test]
    fn an_unnamed_file_cannot_be_linked() {
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
    fn a_low_descriptor_is_moved_and_stays_close_on_exec() {
        // Numbers below 3 belong to the test runner.
        let opened = above_standard(|| File::open("/")).unwrap();
        assert!(opened.as_raw_fd() >= NUMBER_MIN);
        assert!(fcntl_getfd(&opened).unwrap().contains(FdFlags::CLOEXEC));
        let (reader, writer) = pipe(PipeFlags::empty()).unwrap();
        for end in [&reader, &writer] {
            assert!(end.as_raw_fd() >= NUMBER_MIN);
            assert!(fcntl_getfd(end).unwrap().contains(FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn the_error_of_an_open_is_returned() {
        let refused = above_standard(|| File::open("/no/such/file"));
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(read_text("/no/such/file").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!read_text("/proc/self/stat").unwrap().is_empty());
    }
}
