//! The trials by which `probe.rs` detects what works on this machine.
//!
//! The features for file maps are tried on scratch pages: faults served in user space, tracking of
//! stores, freeing many pages at once. For io_uring a ring is created, and a byte is read through
//! it: containers refuse rings in several ways (a filter returns EPERM or ENOSYS for one of the
//! three calls, `kernel.io_uring_disabled` affects the first).
//!
//! # Safety
//! Installs, reads, stores to and frees scratch pages; lends a byte to a ring, and waits for it. No
//! other code ever learns their addresses.
#![allow(unsafe_code)]

use super::file::{above_standard, pipe, read_text};
use super::memory::{self, PAGE_BYTES, PageRange, Reservation};
use super::probe::{Finding, refused};
use super::ring::{Ring, RingCall, RingMemory};
use crate::maps::kernel::page_pipe::PagePipe;
use crate::maps::kernel::pagemap::Pagemap;
use crate::maps::kernel::userfault::{Userfault, Wishes};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use std::os::fd::{AsRawFd, OwnedFd};
use std::{fs::File, io};

pub(super) fn user_faults() -> Finding {
    let trial = || {
        let (faults, page) = registered(Wishes::default())?;
        install(&faults, &page, false)?;
        expect(&page, 7)
    };
    finding(trial(), "a page was installed", "userfaultfd")
}

pub(super) fn kernel_faults() -> Finding {
    let opened = Userfault::with(Wishes { kernel_faults: true, ..Wishes::default() });
    match opened {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(format!(
            "userfaultfd: {error}: needs CAP_SYS_PTRACE or vm.unprivileged_userfaultfd = 1, and \
             no filter against it"
        )),
        other => finding(other.map(drop), "userfaultfd serves system calls", "userfaultfd"),
    }
}

pub(super) fn write_protect_async() -> Finding {
    let trial = || {
        let (faults, page) = registered(Wishes { protect_async: true, ..Wishes::default() })?;
        let pagemap = open_pagemap()?;
        install(&faults, &page, true)?;
        expect_written(&pagemap, &page, false)?;
        store(&page, 8);
        expect_written(&pagemap, &page, true)?;
        pagemap.protect(&whole(&page))?;
        expect_written(&pagemap, &page, false)?;
        keep_and_take(&page)
    };
    finding(trial(), "a store was tracked and its page kept", "asynchronous write protection")
}

pub(super) fn fault_poison() -> Finding {
    let trial = || {
        let (faults, page) = registered(Wishes { poison: true, ..Wishes::default() })?;
        faults.poison(&whole(&page))
    };
    finding(trial(), "a page was poisoned", "UFFDIO_POISON")
}

pub(super) fn vectored_unmap() -> Finding {
    let trial = || {
        let pages = Reservation::new(3 * PAGE_BYTES, PAGE_BYTES)?;
        store(&pages, 7);
        let range = |page| PageRange {
            start: pages.base.wrapping_add(page * PAGE_BYTES),
            length_bytes: PAGE_BYTES,
        };
        // SAFETY: scratch pages.
        let done_bytes = unsafe { memory::advise_vector(&[range(0), range(2)]) }?;
        if done_bytes != 2 * PAGE_BYTES {
            return Err(io::Error::other(format!("only {done_bytes} bytes were freed")));
        }
        expect(&pages, 0)
    };
    finding(trial(), "scattered pages were freed with one call", "process_madvise(self)")
}

pub(super) fn large_pipes() -> Finding {
    let trial = || {
        let (_reader, writer) = pipe(PipeFlags::empty())?;
        rustix::pipe::fcntl_setpipe_size(&writer, 1 << 20).map_err(|error| match error {
            Errno::PERM => {
                io::Error::other("other pipes of this user use up fs.pipe-user-pages-soft")
            }
            other => other.into(),
        })
    };
    finding(trial().map(drop), "a pipe holds 256 pages", "pipes of 1 MiB")
}

fn finding(trial: io::Result<()>, works: &str, name: &str) -> Finding {
    match trial {
        Ok(()) => Ok(works.to_owned()),
        Err(error) => Err(refused(name, &error)),
    }
}

/// Calls [`Pagemap::open`]; the error names the file.
fn open_pagemap() -> io::Result<Pagemap> {
    Pagemap::open().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => io::Error::other(format!(
            "/proc/self/pagemap: {error}; a process that has changed its user may read it once it \
             is dumpable again: prctl(PR_SET_DUMPABLE, 1)"
        )),
        kind => io::Error::new(kind, format!("/proc/self/pagemap: {error}")),
    })
}

/// Returns a page that is not present yet, and the descriptor that serves its faults.
fn registered(wishes: Wishes) -> io::Result<(Userfault, Reservation)> {
    let faults = Userfault::with(wishes)?;
    let page = Reservation::new(PAGE_BYTES, PAGE_BYTES)?;
    faults.register(page.base, PAGE_BYTES)?;
    Ok((faults, page))
}

/// Installs the page, filled with sevens.
fn install(faults: &Userfault, page: &Reservation, protect: bool) -> io::Result<()> {
    let source = [7_u8; PAGE_BYTES];
    // SAFETY: a page of the stack, and the scratch page.
    unsafe { faults.copy(page.base, source.as_ptr(), PAGE_BYTES, protect) }.1
}

fn whole(page: &Reservation) -> PageRange {
    PageRange { start: page.base, length_bytes: PAGE_BYTES }
}

fn store(page: &Reservation, byte: u8) {
    // SAFETY: the scratch page, which is present or plain memory.
    unsafe { page.base.write_volatile(byte) };
}

fn expect(page: &Reservation, byte: u8) -> io::Result<()> {
    // SAFETY: the scratch page, which is present or plain memory.
    match unsafe { page.base.read_volatile() } {
        found if found == byte => Ok(()),
        found => Err(io::Error::other(format!("the page holds {found} instead of {byte}"))),
    }
}

fn expect_written(pagemap: &Pagemap, page: &Reservation, expected: bool) -> io::Result<()> {
    let mut found = false;
    pagemap.written(&whole(page), |_| found = true)?;
    if found == expected {
        return Ok(());
    }
    Err(io::Error::other(format!("the page is reported as written: {found}, expected {expected}")))
}

/// Keeps the page in a pipe, frees it, and checks the bytes that were kept.
fn keep_and_take(page: &Reservation) -> io::Result<()> {
    let mut page_pipe = PagePipe::new(1, true)?;
    store(page, 9);
    // SAFETY: the scratch page, which is present.
    let kept = unsafe { page_pipe.keep(&[whole(page)]) };
    kept.map_err(|error| io::Error::other(refused("vmsplice", &error)))?;
    page.release(0, PAGE_BYTES)?;
    let mut taken = [0_u8; PAGE_BYTES];
    // SAFETY: a page of the stack.
    unsafe { page_pipe.take(taken.as_mut_ptr(), PAGE_BYTES) }?;
    match taken[0] {
        9 => Ok(()),
        found => Err(io::Error::other(format!("the kept page holds {found} instead of 9"))),
    }
}

const DISABLED_SETTING: &str = "/proc/sys/kernel/io_uring_disabled";
/// Interruptions of a trial before it counts as failed.
const INTERRUPTIONS_MAX: u32 = 1000;

pub(super) fn io_uring() -> Finding {
    let trial = || {
        let mut ring = Ring::open(1)?;
        if !ring.knows_all_calls()? {
            return Err(io::Error::other("the kernel is older than 5.6"));
        }
        read_one_byte(&mut ring, &source()?)
    };
    match trial() {
        Ok(()) => Ok("io_uring works".to_owned()),
        Err(error) => {
            let setting = read_text(DISABLED_SETTING);
            Err(refusal("io_uring", &error, setting.ok().as_deref()))
        }
    }
}

/// Returns why `call` is unavailable; `setting` is `kernel.io_uring_disabled`, if readable.
fn refusal(call: &str, error: &io::Error, setting: Option<&str>) -> String {
    match (error.raw_os_error(), setting.map(str::trim)) {
        (Some(libc::EPERM), Some(setting @ ("1" | "2"))) => {
            format!("{call}: kernel.io_uring_disabled is {setting}")
        }
        (Some(libc::ENOMEM), _) => format!("{call}: {error}; RLIMIT_MEMLOCK may be too low"),
        _ => refused(call, error),
    }
}

/// Opens a file with at least one byte, which exists everywhere.
fn source() -> io::Result<OwnedFd> {
    let own = above_standard(|| File::open("/proc/self/exe"));
    Ok(own.or_else(|_| above_standard(|| File::open("/dev/zero")))?.into())
}

/// Reads one byte of `file` through the ring.
fn read_one_byte(ring: &mut Ring, file: &OwnedFd) -> io::Result<()> {
    // On the heap, so that it can be leaked to the kernel if the trial is abandoned.
    let byte = Box::into_raw(Box::new(0_u8));
    let memory = RingMemory::One { start: byte, length_bytes: 1 };
    let call = RingCall { is_write: false, file: file.as_raw_fd(), memory, position_bytes: 0 };
    // SAFETY: the byte is our own and stays allocated until the call has completed, or forever.
    if !unsafe { ring.push(&call, 0) } {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    for _ in 0..INTERRUPTIONS_MAX {
        let entered = ring.enter(1);
        if let Some((_, answer)) = ring.reap() {
            // SAFETY: the box allocated above; the call has completed.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_need_user_faults_are_found_only_with_them() {
        let findings = [
            user_faults(),
            kernel_faults(),
            write_protect_async(),
            fault_poison(),
            vectored_unmap(),
        ];
        println!("{findings:?}");
        if user_faults().is_err() {
            assert!(write_protect_async().is_err() && fault_poison().is_err());
        }
    }

    #[test]
    fn a_wrong_byte_or_mark_fails_the_trial() {
        let page = Reservation::new(PAGE_BYTES, PAGE_BYTES).unwrap();
        store(&page, 7);
        assert!(expect(&page, 7).is_ok());
        assert_eq!(expect(&page, 8).unwrap_err().to_string(), "the page holds 7 instead of 8");
        let failed = finding(expect(&page, 8), "works", "the call");
        assert_eq!(failed, Err("the call: the page holds 7 instead of 8".to_owned()));
        assert_eq!(finding(Ok(()), "works", "the call"), Ok("works".to_owned()));
    }

    #[test]
    fn a_refusal_names_the_setting_or_suspects_a_filter() {
        let say =
            |errno, setting| refusal("io_uring", &io::Error::from_raw_os_error(errno), setting);
        assert!(say(libc::EPERM, Some("2\n")).contains("kernel.io_uring_disabled is 2"));
        assert!(say(libc::EPERM, Some("0\n")).contains("seccomp"));
        assert!(say(libc::ENOSYS, None).contains("no kernel support"));
        assert!(say(libc::ENOMEM, None).contains("RLIMIT_MEMLOCK"));
    }
}
