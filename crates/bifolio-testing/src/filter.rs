//! Filters on system calls (seccomp), assembled from single steps.
//!
//! # Safety
//! Gives the kernel a program that lives through the call. A filter only takes rights away.
#![allow(unsafe_code)]

use crate::skip;
use std::io;

/// Loads the word at an offset in the description of the call.
pub const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
/// Masks the loaded word.
pub const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
/// Skips steps, by whether the loaded word equals a number.
pub const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
/// Skips steps, by whether the loaded word is above a number.
pub const ABOVE: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;
/// Ends the filter with an answer.
pub const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Offset of the number of the call.
pub const NUMBER_AT: u32 = 0;

/// Returns the offset of the lower half of an argument.
pub const fn argument_at(number: u32) -> u32 {
    16 + 8 * number + if cfg!(target_endian = "little") { 0 } else { 4 }
}

/// Returns a step; `jt` and `jf` are the steps skipped if a comparison holds or does not.
pub fn step(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Returns the answer that fails a call with `errno`.
pub fn fail(errno: i32) -> libc::sock_filter {
    step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32)
}

/// Returns the answer that lets a call through.
pub fn allow() -> libc::sock_filter {
    step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW)
}

/// Installs a filter for good, in this thread and those that it starts, or where `flags` say.
/// Returns what the kernel answers: the number of a descriptor if a flag asks for one.
///
/// # Errors
/// The kernel's refusal.
pub fn install(mut steps: Vec<libc::sock_filter>, flags: libc::c_ulong) -> io::Result<i32> {
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: plain numbers; programs that this process starts get no further rights.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: a program of that length, which the kernel copies.
    let answer = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer as i32) }
}

/// Makes a system call fail with `errno`, or return 0 without effect if that is 0, in this thread
/// and those that it starts. Returns `false`, after a [`skip()`], if filters are not allowed.
///
/// # Panics
/// Like [`skip()`], if the feature is required.
#[track_caller]
pub fn refuse(call: libc::c_long, errno: i32) -> bool {
    let steps =
        vec![step(LOAD, 0, 0, NUMBER_AT), step(EQUAL, 0, 1, call as u32), fail(errno), allow()];
    match install(steps, 0) {
        Ok(_) => true,
        Err(error) => {
            skip("seccomp", error);
            false
        }
    }
}
