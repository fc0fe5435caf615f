//! Faults of scratch regions, raised and served by the tests.
//!
//! # Safety
//! Accesses pages of regions that the tests have created.
#![allow(unsafe_code)]

use super::*;
use crate::sys::memory::{PAGE_BYTES, Reservation};
use bifolio_testing::skip;
use std::os::fd::AsRawFd;
use std::thread;

/// A scratch region whose faults the test serves.
pub(crate) struct Scratch {
    pub(crate) faults: Userfault,
    pub(crate) memory: Reservation,
}

impl Scratch {
    /// Creates a region of `pages` pages; `None` where the kernel lacks one of `needed`.
    pub(crate) fn new(pages: usize, needed: &[Feature]) -> Option<Self> {
        Self::with(pages, false, needed)
    }

    /// Creates a region whose faults raise signals, or send messages.
    pub(crate) fn with(pages: usize, signals: bool, needed: &[Feature]) -> Option<Self> {
        let features = Features::probe(&[]);
        let needed = [&[Feature::UserFaults], needed].concat();
        if let Some(missing) = needed.iter().find(|feature| !features.has(**feature)) {
            skip(missing, format!("{:?}", features.reports()));
            return None;
        }
        let faults = Userfault::open(&features, signals).unwrap();
        let memory = Reservation::new(pages * PAGE_BYTES, PAGE_BYTES).unwrap();
        memory.refuse_huge_pages();
        memory.skip_on_fork().unwrap();
        faults.register(memory.base, memory.len()).unwrap();
        Some(Self { faults, memory })
    }

    pub(crate) fn at(&self, page: usize) -> *mut u8 {
        self.memory.base.wrapping_add(page * PAGE_BYTES)
    }

    pub(crate) fn range(&self, page: usize, pages: usize) -> PageRange {
        PageRange { start: self.at(page), length_bytes: pages * PAGE_BYTES }
    }

    /// Installs pages from `page` on, each filled with one of `bytes`. Returns how many, and the
    /// result.
    pub(crate) fn install(
        &self,
        page: usize,
        bytes: &[u8],
        protect: bool,
    ) -> (usize, io::Result<()>) {
        let source: Vec<u8> = bytes.iter().flat_map(|byte| [*byte; PAGE_BYTES]).collect();
        // SAFETY: a vector, and the scratch region.
        let (done_bytes, outcome) =
            unsafe { self.faults.copy(self.at(page), source.as_ptr(), source.len(), protect) };
        (done_bytes / PAGE_BYTES, outcome)
    }

    /// Loads the byte at `offset_bytes`.
    pub(crate) fn load(&self, offset_bytes: usize) -> u8 {
        // SAFETY: a byte of the scratch region.
        unsafe { self.memory.base.wrapping_add(offset_bytes).read_volatile() }
    }

    /// Stores to the byte at `offset_bytes`.
    pub(crate) fn store(&self, offset_bytes: usize, byte: u8) {
        // SAFETY: a byte of the scratch region.
        unsafe { self.memory.base.wrapping_add(offset_bytes).write_volatile(byte) };
    }
}

/// Blocks until there is a message.
fn next_fault(faults: &Userfault) -> Fault {
    let (never, _open) = rustix::pipe::pipe().unwrap();
    let (waiter, mut found) = (faults.waiter(never).unwrap(), Vec::new());
    while found.is_empty() {
        assert!(waiter.wait().unwrap());
        faults.read_faults(&mut found).unwrap();
    }
    assert_eq!(found.len(), 1);
    found[0]
}

#[test]
fn a_reader_waits_until_its_page_is_installed() {
    let Some(scratch) = Scratch::new(4, &[]) else { return };
    let place = 2 * PAGE_BYTES + 77;
    let address = scratch.at(0).addr() + place;
    thread::scope(|scope| {
        let reader = scope.spawn(|| scratch.load(place));
        let fault = next_fault(&scratch.faults);
        assert_eq!((fault.address, fault.is_write), (address, false));
        assert!(fault.thread != 0 && fault.thread != crate::sync::blocking::current_thread());
        assert!(!reader.is_finished());
        // Woken without a page, the reader faults again.
        scratch.faults.wake(&scratch.range(2, 1)).unwrap();
        assert_eq!(next_fault(&scratch.faults), fault);
        scratch.install(2, &[9], false).1.unwrap();
        assert_eq!(reader.join().unwrap(), 9);
    });
    let mut none = Vec::new();
    scratch.faults.read_faults(&mut none).unwrap();
    assert_eq!(none, []);
}

#[test]
fn all_waiting_threads_are_reported_over_several_reads() {
    let Some(scratch) = Scratch::new(70, &[]) else { return };
    thread::scope(|scope| {
        let scratch = &scratch;
        for page in 0..70 {
            scope.spawn(move || scratch.store(page * PAGE_BYTES, page as u8));
        }
        let (mut found, mut reads) = (Vec::new(), 0);
        while found.len() < 70 {
            let before = found.len();
            scratch.faults.read_faults(&mut found).unwrap();
            assert!(found.len() - before <= MESSAGES_MAX);
            reads += usize::from(found.len() > before);
        }
        assert!(reads >= 2);
        assert!(found.iter().all(|fault| fault.is_write));
        found.sort_by_key(|fault| fault.address);
        for (page, fault) in found.iter().enumerate() {
            assert_eq!(fault.address, scratch.at(page).addr());
        }
        scratch.install(0, &[0; 70], false).1.unwrap();
    });
    assert!((0..70).all(|page| scratch.load(page * PAGE_BYTES) == page as u8));
}

#[test]
fn a_copy_stops_before_a_present_page_and_reports_where() {
    let Some(scratch) = Scratch::new(4, &[]) else { return };
    scratch.install(2, &[1], false).1.unwrap();
    let (done, outcome) = scratch.install(0, &[3, 4, 5, 6], false);
    assert_eq!((done, outcome.unwrap_err().raw_os_error()), (2, Some(libc::EEXIST)));
    scratch.install(3, &[6], false).1.unwrap();
    assert_eq!([0, 1, 2, 3].map(|page| scratch.load(page * PAGE_BYTES)), [3, 4, 1, 6]);
    // What follows the region may belong to another test, and be registered.
    let unregistered = Reservation::new(PAGE_BYTES, PAGE_BYTES).unwrap();
    let source = [1; PAGE_BYTES];
    // SAFETY: an array, and memory of this test.
    let (done_bytes, outcome) =
        unsafe { scratch.faults.copy(unregistered.base, source.as_ptr(), PAGE_BYTES, false) };
    assert_eq!((done_bytes, outcome.unwrap_err().raw_os_error()), (0, Some(libc::ENOENT)));
}

/// Makes the kernel write a byte to `place`.
fn read_zero(place: *mut u8) -> io::Result<()> {
    let zero = std::fs::File::open("/dev/zero").unwrap();
    // SAFETY: a byte of a scratch region.
    let answer = unsafe { libc::read(zero.as_raw_fd(), place.cast(), 1) };
    if answer == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[test]
fn a_poisoned_page_is_an_error_until_it_is_unmapped() {
    let Some(scratch) = Scratch::new(3, &[Feature::FaultPoison]) else { return };
    scratch.faults.poison(&scratch.range(0, 2)).unwrap();
    for page in 0..2 {
        let error = read_zero(scratch.at(page)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{page}");
    }
    scratch.memory.release(0, 2 * PAGE_BYTES).unwrap();
    scratch.install(0, &[1, 2], false).1.unwrap();
    assert_eq!(scratch.load(PAGE_BYTES), 2);
    let error = scratch.faults.poison(&scratch.range(1, 2)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn a_partial_call_is_followed_by_one_for_the_rest() {
    let fail = |number| Err(io::Error::from_raw_os_error(number));
    let mut answers = vec![
        (Ok(0), 8192),
        (fail(libc::EINTR), (-i64::from(libc::EINTR)).cast_unsigned()),
        (fail(libc::EAGAIN), 8192),
        (fail(libc::EAGAIN), (-i64::from(libc::EAGAIN)).cast_unsigned()),
    ];
    let mut calls = Vec::new();
    let done = go_on(16_384, |done_bytes| {
        let (target, source) = (std::ptr::without_provenance_mut(1 << 20), 1 << 21);
        let source = std::ptr::without_provenance(source);
        let call = copy_call(target, source, 16_384, false, done_bytes);
        calls.push((call[0] - (1 << 20), call[1] - (1 << 21), call[2]));
        answers.pop().unwrap()
    });
    assert!(matches!(done, (16_384, Ok(()))));
    let rest = (8192, 8192, 8192);
    assert_eq!(calls, [(0, 0, 16_384), (0, 0, 16_384), rest, rest]);
}
