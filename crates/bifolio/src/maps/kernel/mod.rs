//! The parts of the kernel that only maps need.
//!
//! # Safety
//! Passes the arguments of its callers to `ioctl`.
#![allow(unsafe_code)]

pub(crate) mod page_pipe;
pub(crate) mod pages;
#[cfg(feature = "refusals")]
pub(crate) mod refusals;
pub(crate) mod signal;
pub(crate) mod trials;
pub(crate) mod userfault;

use crate::sys::answer_of;
use rustix::ioctl::Opcode;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Calls `ioctl` with `operation`. Returns its result. Does not retry.
///
/// # Safety
/// `operation` must read and write at most a `T`, and the addresses in it must be valid for the
/// operation.
unsafe fn control<T>(
    descriptor: BorrowedFd<'_>,
    operation: Opcode,
    argument: &mut T,
) -> io::Result<usize> {
    // SAFETY: the structure is exclusively ours during the call; the rest is the caller's contract.
    let answer = unsafe {
        libc::ioctl(descriptor.as_raw_fd(), operation as _, std::ptr::from_mut(argument))
    };
    answer_of(answer)
}
