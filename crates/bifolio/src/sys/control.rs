//! One `ioctl` that passes a structure, and its error.
//!
//! Used by `userfault` and `pagemap`, which know the calls and their structures.
//!
//! # Safety
//! Hands the address of a structure to the kernel; the caller says that it is the right one.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::ioctl::Opcode;

/// Asks `descriptor` for `operation`; returns what the call returns. Does not retry.
///
/// # Safety
/// `operation` reads and writes at most a `T`, and what the addresses in it lead to must be good
/// for what the operation does with them.
pub(super) unsafe fn control<T>(
    descriptor: BorrowedFd<'_>,
    operation: Opcode,
    argument: &mut T,
) -> io::Result<usize> {
    // SAFETY: the structure is ours alone during the call; the rest is the caller's promise.
    let answer = unsafe {
        libc::ioctl(descriptor.as_raw_fd(), operation as _, std::ptr::from_mut(argument))
    };
    usize::try_from(answer).map_err(|_| io::Error::last_os_error())
}

/// Whether a call that failed so is to be made again.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}
