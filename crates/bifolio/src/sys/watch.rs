//! Watches and leases: how a process learns that another one may have changed a file.
//!
//! Thin wrappers of `inotify` and `F_SETLEASE`; `keep` has the argument for what they show.
//!
//! A lease is held for two system calls. A program that opens the file for writing meanwhile waits
//! for them (or fails with `EWOULDBLOCK` if it asked for `O_NONBLOCK`), and the kernel sends the
//! holder a signal, by default one that kills it. So the signal is set to `SIGURG` before, which is
//! ignored unless the program handles it.
//!
//! # Safety
//! Calls `fcntl` with numbers.
#![allow(unsafe_code)]

use super::file::{OpenMode, above_standard, path_of};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Bytes of a read of events: about 60, which have no name.
const EVENTS_BYTES: usize = 1024;

/// Selects the signal of an open file description; the same on all architectures.
const F_SETSIG: libc::c_int = 10;

/// Watches of files. Each ends with its first event.
#[derive(Debug)]
pub(crate) struct Watches {
    descriptor: OwnedFd,
}

/// Result of [`Watches::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The file of the watch with this number has, or may have, changed.
    Of(i32),
    /// Events are lost: any file may have changed.
    Lost,
}

impl Watches {
    pub(crate) fn open() -> io::Result<Self> {
        let flags = CreateFlags::CLOEXEC | CreateFlags::NONBLOCK;
        Ok(Self { descriptor: above_standard(|| inotify::init(flags))? })
    }

    /// Starts to watch a file that no other watch is for. Returns the number of the watch. Needs
    /// `/proc`. Changes of its bytes, attributes and names are events; with `closes`, so is the end
    /// of any open file description that could write.
    pub(crate) fn add(&self, file: BorrowedFd<'_>, closes: bool) -> io::Result<i32> {
        let mut wanted = WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::MOVE_SELF
            | WatchFlags::DELETE_SELF
            | WatchFlags::ONESHOT;
        wanted.set(WatchFlags::CLOSE_WRITE, closes);
        Ok(inotify::add_watch(&self.descriptor, path_of(file), wanted)?)
    }

    /// Ends a watch, unless its event or the end of the file has.
    pub(crate) fn remove(&self, number: i32) {
        let _ = inotify::remove_watch(&self.descriptor, number);
    }

    /// Calls `each` for all events since the last call. Never waits. An error means that events are
    /// lost.
    pub(crate) fn read(&self, mut each: impl FnMut(Event)) -> io::Result<()> {
        let mut buffer = [MaybeUninit::uninit(); EVENTS_BYTES];
        let mut reader = inotify::Reader::new(&self.descriptor, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    each(Event::Lost);
                }
                Ok(event) => each(Event::Of(event.wd())),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns `true` if no program has the file open for writing at some moment of the call: no open
/// file description can write, not even one that only a map or a transfer in flight still has.
/// `file` can only be read, and its open file description is not shared with other code, whose
/// lease and signal would be changed.
///
/// # Errors
/// The file system has no leases; the process neither owns the file nor has `CAP_LEASE`.
pub(crate) fn has_no_writer(file: BorrowedFd<'_>) -> io::Result<bool> {
    set(file, F_SETSIG, libc::SIGURG)?;
    match set(file, libc::F_SETLEASE, libc::F_RDLCK) {
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => return Ok(false),
        taken => taken?,
    }
    // Fails if the process slept for so long that the kernel has ended the lease.
    set(file, libc::F_SETLEASE, libc::F_UNLCK)?;
    Ok(true)
}

fn set(file: BorrowedFd<'_>, command: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: `file` is open, and the commands take a number.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, value) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Tries a watch and a lease on a file of this process in memory.
pub(crate) fn trial() -> io::Result<()> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = above_standard(|| rustix::fs::memfd_create("bifolio", flags))?;
    let open = |write| {
        let mode = OpenMode { read: true, write, create: None, direct: false };
        super::file::open(&path_of(memory.as_fd()), mode)
    };
    // The kernel does not count the descriptor of the creation as a writer.
    let (written, file) = (open(true)?, open(false)?);
    let watches = Watches::open()?;
    let number = watches.add(file.as_fd(), true)?;
    if has_no_writer(file.as_fd())? {
        return Err(io::Error::other("a lease does not see a writer"));
    }
    drop(written);
    if !has_no_writer(file.as_fd())? {
        return Err(io::Error::other("a lease sees a writer that is gone"));
    }
    let mut found = false;
    watches.read(|event| found |= event == Event::Of(number))?;
    if found { Ok(()) } else { Err(io::Error::other("a watch does not see a close")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_ends_with_its_first_event() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let watches = Watches::open().unwrap();
        let number = watches.add(named.as_file().as_fd(), false).unwrap();
        let events = || {
            let mut found = Vec::new();
            watches.read(|event| found.push(event)).unwrap();
            found
        };
        assert_eq!(events(), []);
        std::fs::write(named.path(), "changed").unwrap();
        // The second says that the watch has ended.
        assert_eq!(events(), [Event::Of(number); 2]);
        std::fs::write(named.path(), "again").unwrap();
        assert_eq!(events(), []);
        watches.remove(number);
    }

    #[test]
    fn a_lease_sees_writers_and_leaves_nothing() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let reader = std::fs::File::open(named.path()).unwrap();
        assert!(!has_no_writer(reader.as_fd()).unwrap());
        let path = named.into_temp_path();
        assert!(has_no_writer(reader.as_fd()).unwrap());
        // Would wait for the end of a lease.
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NONBLOCK;
        let writer = rustix::fs::open(&*path, flags, rustix::fs::Mode::empty()).unwrap();
        assert!(!has_no_writer(reader.as_fd()).unwrap());
        drop(writer);
        assert!(has_no_writer(reader.as_fd()).unwrap());
    }
}
