//! Descriptors above those of the standard streams.
//!
//! The kernel gives the lowest free number to the next open. In a program that has closed a
//! standard stream, a socket would become that stream, and a client would get messages of the
//! program. (The library does the same for its own descriptors.)

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Lowest number of a descriptor that is no standard stream.
const NUMBER_MIN: RawFd = 3;

/// Returns descriptors with the numbers of the standard streams that are closed. What is opened
/// while they exist has another number.
pub(crate) fn occupy() -> io::Result<Vec<File>> {
    let mut occupied = Vec::new();
    loop {
        let file = File::open("/")?;
        if file.as_raw_fd() >= NUMBER_MIN {
            return Ok(occupied);
        }
        occupied.push(file);
    }
}

/// Gives a descriptor another number if it has that of a standard stream.
pub(crate) fn lift(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    if descriptor.as_raw_fd() >= NUMBER_MIN {
        return Ok(descriptor);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&descriptor, NUMBER_MIN)?)
}
