//! The trials that detect if what maps need works on this machine: faults served in user space,
//! tracking of stores, freeing many pages at once.
//!
//! # Safety
//! Installs, reads, stores to and frees scratch pages. No other code ever learns their addresses.
#![allow(unsafe_code)]

use super::page_pipe::PagePipe;
use super::pages::{PageRange, Pagemap, advise_vector};
use super::userfault::{Userfault, Wishes};
use crate::sys::file::pipe;
use crate::sys::memory::{PAGE_BYTES, Reservation};
use crate::sys::probe::{Feature, Finding, finding, refused};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use std::io;

pub(crate) fn probe(feature: Feature) -> Finding {
    match feature {
        Feature::UserFaults => user_faults(),
        Feature::KernelFaults => kernel_faults(),
        Feature::WriteProtectAsync => write_protect_async(),
        Feature::FaultPoison => fault_poison(),
        Feature::VectoredUnmap => vectored_unmap(),
        _ => large_pipes(),
    }
}

fn user_faults() -> Finding {
    let trial = || {
        let (faults, page) = registered(Wishes::default())?;
        install(&faults, &page, false)?;
        expect(&page, 7)
    };
    finding(trial(), "a page was installed", "userfaultfd")
}

fn kernel_faults() -> Finding {
    let opened = Userfault::with(Wishes { kernel_faults: true, ..Wishes::default() });
    match opened {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(format!(
            "userfaultfd: {error}: needs CAP_SYS_PTRACE or vm.unprivileged_userfaultfd = 1, and \
             no filter against it"
        )),
        other => finding(other.map(drop), "userfaultfd serves system calls", "userfaultfd"),
    }
}

fn write_protect_async() -> Finding {
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

fn fault_poison() -> Finding {
    let trial = || {
        let (faults, page) = registered(Wishes { poison: true, ..Wishes::default() })?;
        faults.poison(&whole(&page))
    };
    finding(trial(), "a page was poisoned", "UFFDIO_POISON")
}

fn vectored_unmap() -> Finding {
    let trial = || {
        let pages = Reservation::new(3 * PAGE_BYTES, PAGE_BYTES)?;
        store(&pages, 7);
        let range = |page| PageRange {
            start: pages.base.wrapping_add(page * PAGE_BYTES),
            length_bytes: PAGE_BYTES,
        };
        // SAFETY: scratch pages.
        let done_bytes = unsafe { advise_vector(&[range(0), range(2)]) }?;
        if done_bytes != 2 * PAGE_BYTES {
            return Err(io::Error::other(format!("only {done_bytes} bytes were freed")));
        }
        expect(&pages, 0)
    };
    finding(trial(), "scattered pages were freed with one call", "process_madvise(self)")
}

fn large_pipes() -> Finding {
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
}
