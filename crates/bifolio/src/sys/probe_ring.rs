//! What of io_uring works here: the ring itself, its table of files, its table of memory.
//!
//! Called by `probe.rs`. Each answer is a trial: a ring is made, a byte is read through it, from a
//! registered file or to registered memory. Containers refuse rings in many ways (a filter answers
//! EPERM or ENOSYS to one of the three calls, `kernel.io_uring_disabled` to the first), and a limit
//! on locked memory shows only when memory is registered.
//!
//! # Safety
//! A byte and a page of this file's own are lent to a ring, and waited for.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};

use super::probe::{Finding, refused};
use super::ring::{self, RingCall, RingFile, RingMemory, RingQueues, RingTables};

const DISABLED_SETTING: &str = "/proc/sys/kernel/io_uring_disabled";
/// Interruptions of a trial before it counts as failed.
const INTERRUPTIONS_MAX: u32 = 1000;
const PAGE_BYTES: usize = 4096;

pub(super) fn io_uring() -> Finding {
    let trial = || {
        let (mut queues, tables) = ring::open(1)?;
        if !tables.knows_all_calls()? {
            return Err(io::Error::other("the kernel is older than 5.6"));
        }
        let file = source()?;
        read_one_byte(&mut queues, RingFile::Plain(file.as_raw_fd()))
    };
    match trial() {
        Ok(()) => Ok("io_uring works".to_owned()),
        Err(error) => {
            let setting = fs::read_to_string(DISABLED_SETTING);
            Err(refusal("io_uring", &error, setting.ok().as_deref()))
        }
    }
}

/// Says why there is no `call`; `setting` is `kernel.io_uring_disabled`, if it can be read.
fn refusal(call: &str, error: &io::Error, setting: Option<&str>) -> String {
    match (error.raw_os_error(), setting.map(str::trim)) {
        (Some(libc::EPERM), Some(setting @ ("1" | "2"))) => {
            format!("{call}: kernel.io_uring_disabled is {setting}")
        }
        (Some(libc::ENOMEM), _) => format!("{call}: {error}; RLIMIT_MEMLOCK may be too low"),
        _ => refused(call, error),
    }
}

pub(super) fn registered_files() -> Finding {
    let trial = || {
        let (mut queues, tables) = ring::open(1)?;
        tables.make_file_table(2)?;
        let file = source()?;
        tables.register_file(1, file.as_raw_fd())?;
        // The table holds the file; the descriptor is not needed any more.
        drop(file);
        read_one_byte(&mut queues, RingFile::Slot(1))?;
        tables.unregister_file(1)
    };
    match trial() {
        Ok(()) => Ok("a file was registered and read".to_owned()),
        Err(error) => Err(refusal("io_uring, registering a file", &error, None)),
    }
}

pub(super) fn registered_buffers() -> Finding {
    let trial = || {
        let (_queues, tables) = ring::open(1)?;
        tables.make_buffer_table(2)?;
        with_scratch_page(|page| register_page(&tables, page))
    };
    match trial() {
        Ok(()) => Ok("a page was registered".to_owned()),
        Err(error) => Err(refusal("io_uring, registering memory", &error, None)),
    }
}

/// A file that has a byte, wherever we are.
fn source() -> io::Result<OwnedFd> {
    Ok(fs::File::open("/proc/self/exe").or_else(|_| fs::File::open("/dev/zero"))?.into())
}

/// Reads a byte of `file` through the ring.
fn read_one_byte(queues: &mut RingQueues, file: RingFile) -> io::Result<()> {
    // On the heap, so that it can be left to the kernel if the trial has to be given up.
    let byte = Box::into_raw(Box::new(0_u8));
    let memory = RingMemory::One { start: byte, length_bytes: 1 };
    let call = RingCall { is_write: false, file, memory, position_bytes: 0 };
    // SAFETY: the byte is our own and stays until the answer has come, or for ever.
    if !unsafe { queues.push(&call, 0) } {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    for _ in 0..INTERRUPTIONS_MAX {
        let entered = queues.enter(1);
        if let Some((_, answer)) = queues.reap() {
            // SAFETY: the box made above; the kernel is done with it.
            drop(unsafe { Box::from_raw(byte) });
            return answer.map(drop);
        }
        match entered {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
    }
    Err(io::ErrorKind::Interrupted.into())
}

fn register_page(tables: &RingTables, page: *mut u8) -> io::Result<()> {
    // SAFETY: a mapped page, which no call names.
    unsafe { tables.register_buffer(1, page, PAGE_BYTES) }?;
    tables.unregister_buffer(1)
}

fn with_scratch_page(trial: impl FnOnce(*mut u8) -> io::Result<()>) -> io::Result<()> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let null = std::ptr::null_mut();
    // SAFETY: a new private mapping at an address of the kernel's choice replaces nothing.
    let page =
        unsafe { rustix::mm::mmap_anonymous(null, PAGE_BYTES, protection, MapFlags::PRIVATE) }?;
    let answer = trial(page.cast());
    // SAFETY: exactly the mapping made above, which nobody else knows.
    unsafe { rustix::mm::munmap(page, PAGE_BYTES) }?;
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_setting_or_suspects_a_filter() {
        let say =
            |errno, setting| refusal("io_uring", &io::Error::from_raw_os_error(errno), setting);
        assert!(say(libc::EPERM, Some("2\n")).contains("kernel.io_uring_disabled is 2"));
        assert!(say(libc::EPERM, Some("0\n")).contains("seccomp"));
        assert!(say(libc::ENOSYS, None).contains("no kernel support"));
        assert!(say(libc::ENOMEM, None).contains("RLIMIT_MEMLOCK"));
    }

    #[test]
    fn a_plain_file_can_be_read_where_a_registered_one_can() {
        if registered_files().is_ok() || registered_buffers().is_ok() {
            assert!(io_uring().is_ok());
        }
        println!("{:?} {:?} {:?}", io_uring(), registered_files(), registered_buffers());
    }
}
