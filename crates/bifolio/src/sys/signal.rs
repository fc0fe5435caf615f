//! Signal mask of the cache's own threads.
//!
//! # Safety
//! Passes sets of signals that live on the stack to the C library.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

/// Signals that an instruction of the thread raises. If blocked, such a signal kills the process.
const SYNCHRONOUS: [libc::c_int; 6] =
    [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Restores the signal mask of the calling thread on drop.
#[derive(Debug)]
pub(crate) struct Blocked {
    before: libc::sigset_t,
}

/// Blocks all signals but the synchronous ones in the calling thread, and in the threads that it
/// starts meanwhile: process-directed signals are delivered to the threads of the program. (The C
/// library excludes the two signals that it uses itself.)
pub(crate) fn block_asynchronous() -> Blocked {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: a pointer to memory for a set.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    for signal in SYNCHRONOUS {
        // SAFETY: the set filled above.
        unsafe { libc::sigdelset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: two sets; it cannot fail, because the operation is valid.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: zeroed, which is an empty set, and then written by the C library.
    Blocked { before: unsafe { before.assume_init() } }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the previous set of this thread; the old one is not requested.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}
