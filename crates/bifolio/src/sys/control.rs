//! What calls of the C library answer, and one `ioctl` that passes a structure.
//!
//! Used by those files here that call the kernel without `rustix`; `userfault` and `pagemap` know
//! the structures.
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
    answer_of(answer)
}

/// What a call answered: how much, or, if that is negative, the error of this thread.
pub(super) fn answer_of(answer: impl TryInto<usize>) -> io::Result<usize> {
    answer.try_into().map_err(|_| io::Error::last_os_error())
}

/// Whether a call that failed so is to be made again.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}
