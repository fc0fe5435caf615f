//! A process whose writes and syncs of a file fail on demand.
//!
//! The process lets the kernel report its system calls ([`submit`]), and this one answers each: it
//! goes on, or fails with EIO before it has an effect (seccomp_unotify(2)). The calls of threads
//! that start later are reported, too. io_uring is refused, because its transfers are no calls.
//!
//! # Safety
//! Calls the kernel with the structs that its documentation gives.
#![allow(unsafe_code)]

use std::io::Error;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread::{self, JoinHandle};

use bifolio_testing::filter::{
    self, ABOVE, EQUAL, LOAD, NUMBER_AT, RETURN, allow, argument_at, fail, step,
};

/// Kind of the calls that fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    Writes,
    Syncs,
}

impl Calls {
    fn of(number: i64) -> Option<Self> {
        match number {
            libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_pwritev2 => {
                Some(Self::Writes)
            }
            libc::SYS_fsync | libc::SYS_fdatasync => Some(Self::Syncs),
            _ => None,
        }
    }
}

const REPORTED: [i64; 6] = [
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
];

/// Lets the calls of this thread, and of threads that it starts, be reported. Returns the number
/// of the descriptor for the supervisor.
pub(crate) fn submit() -> i32 {
    let mut steps = vec![
        step(LOAD, 0, 0, NUMBER_AT),
        step(EQUAL, 0, 1, libc::SYS_io_uring_setup as u32),
        fail(libc::ENOSYS),
    ];
    for (index, number) in REPORTED.iter().enumerate() {
        // To the comparison of the descriptor, which follows one step after the last of these.
        let ahead = (REPORTED.len() - index) as u8;
        steps.push(step(EQUAL, ahead, 0, *number as u32));
    }
    steps.extend([
        allow(),
        step(LOAD, 0, 0, argument_at(0)),
        // The standard streams are not reported.
        step(ABOVE, 1, 0, 2),
        allow(),
        step(RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
    ]);
    filter::install(steps, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER).unwrap()
}

/// A fault: of the calls of one kind on a file, the `nth` fails (from 1 on), and with `is_lasting`
/// those after it.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) calls: Calls,
    pub(crate) path: PathBuf,
    pub(crate) nth: u64,
    pub(crate) is_lasting: bool,
}

impl Fault {
    fn fails(&self, count: u64) -> bool {
        count == self.nth || self.is_lasting && count > self.nth
    }
}

const RECEIVE: libc::Ioctl = 0xC050_2100_u32 as libc::Ioctl;
const SEND: libc::Ioctl = 0xC018_2101_u32 as libc::Ioctl;
const _: () = assert!(size_of::<libc::seccomp_notif>() == 0x50);
const _: () = assert!(size_of::<libc::seccomp_notif_resp>() == 0x18);

/// Answers the reports of a process until it ends. The thread returns how many calls failed.
pub(crate) fn supervise(child: &Child, number: i32, fault: Option<Fault>) -> JoinHandle<u64> {
    // SAFETY: a process that is not waited for yet.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) } as i32;
    assert!(process >= 0, "pidfd_open: {}", Error::last_os_error());
    // SAFETY: returned by the kernel just now.
    let process = unsafe { OwnedFd::from_raw_fd(process) };
    // SAFETY: a descriptor of that process.
    let listener =
        unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) } as i32;
    assert!(listener >= 0, "pidfd_getfd: {}", Error::last_os_error());
    // SAFETY: returned by the kernel just now.
    let listener = unsafe { OwnedFd::from_raw_fd(listener) };
    thread::spawn(move || answer_all(&listener, fault.as_ref()))
}

fn answer_all(listener: &OwnedFd, fault: Option<&Fault>) -> u64 {
    let (mut count, mut failed) = (0, 0);
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one struct.
        let ready = unsafe { libc::poll(&raw mut poll, 1, -1) };
        if ready < 0 {
            continue;
        }
        if poll.revents & libc::POLLIN == 0 {
            return failed;
        }
        // SAFETY: all zeros is a valid value, and what the kernel asks for.
        let mut report: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the struct of this call.
        if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut report) } != 0 {
            // The thread was killed meanwhile.
            continue;
        }
        let fails = fault.is_some_and(|fault| {
            let is_counted = Calls::of(report.data.nr.into()) == Some(fault.calls)
                && is_of(&fault.path, report.pid, report.data.args[0]);
            count += u64::from(is_counted);
            is_counted && fault.fails(count)
        });
        failed += u64::from(fails);
        let (error, flags) = match fails {
            true => (-libc::EIO, 0),
            false => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        };
        let mut answer = libc::seccomp_notif_resp { id: report.id, val: 0, error, flags };
        // SAFETY: the struct of this call. It fails if the thread was killed meanwhile.
        unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw mut answer) };
    }
}

/// Returns `true` if a descriptor of a thread is of the file.
fn is_of(path: &Path, thread: u32, descriptor: u64) -> bool {
    let link = format!("/proc/{thread}/fd/{}", descriptor as u32);
    std::fs::read_link(link).is_ok_and(|found| found == path)
}
