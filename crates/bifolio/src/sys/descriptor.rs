//! Opens descriptors whose numbers are 3 or more.
//!
//! Every descriptor of the library is opened here, by [`above_standard`] or [`pipe`], and is
//! close-on-exec. (`cargo x tidy` finds calls that open one elsewhere.) A program may run with its
//! standard streams closed. The kernel gives the lowest free number to the next open, so a file
//! could become descriptor 2, and the next message of any library would be written into it.
//!
//! While a descriptor is opened, numbers that the program closed are occupied by descriptors of
//! `/` that can be neither read nor written (`O_PATH`): to other threads they look as closed as
//! before. So a file never has a low number, and none must be closed, which would drop the POSIX
//! locks that the program holds on it. If another thread closes a standard stream in between, or
//! ends its own occupation, the descriptor is duplicated and the low one closed.
//!
//! # Safety
//! Queries numbers that may not be open; nothing is read or written through them.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

use arrayvec::ArrayVec;
use rustix::fs::{Mode, OFlags};
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

/// Creates a pipe. Returns its reading and its writing end.
pub(crate) fn pipe(flags: PipeFlags) -> io::Result<(OwnedFd, OwnedFd)> {
    let open = || rustix::pipe::pipe_with(flags | PipeFlags::CLOEXEC);
    let (reader, writer) = with_standard_occupied(open)?;
    Ok((lift(reader)?, lift(writer)?))
}

/// Reads a file of the system, such as one of procfs.
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

/// Moves a descriptor whose number is too low.
fn lift(opened: OwnedFd) -> io::Result<OwnedFd> {
    if opened.as_raw_fd() >= NUMBER_MIN {
        return Ok(opened);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&opened, NUMBER_MIN)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{FdFlags, fcntl_getfd};

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
