//! Faults of scratch regions, raised and served.
//!
//! # Safety
//! Touches pages of regions that the tests have made.
#![allow(unsafe_code)]

use super::*;
use crate::sys::memory::{PAGE_BYTES, Reservation};
use std::cell::RefCell;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// How many pages of a copy there is memory for, and what happens then.
type Limit = (usize, Box<dyn FnOnce(*mut u8)>);

thread_local! {
    /// Of the next copy that is longer.
    static MEMORY: RefCell<Option<Limit>> = const { RefCell::new(None) };
}

/// The kernel has no memory for more than so many pages of the next copy of this thread that is
/// longer; `then` is told where the first of them is.
pub(crate) fn limit_memory(pages: usize, then: impl FnOnce(*mut u8) + 'static) {
    MEMORY.set(Some((pages, Box::new(then))));
}

/// How many bytes there is memory for, and how the copy ends.
pub(super) fn memory_for(
    length_bytes: usize,
) -> (usize, impl FnOnce(*mut u8) -> Result<(), CopyError>) {
    let is_short = |limit: &mut Limit| limit.0 * PAGE_BYTES < length_bytes;
    let limit = MEMORY.with_borrow_mut(|memory| memory.take_if(is_short));
    let done_bytes = limit.as_ref().map_or(length_bytes, |limit| limit.0 * PAGE_BYTES);
    let end = move |target| {
        let Some((_, then)) = limit else { return Ok(()) };
        then(target);
        Err(CopyError { done_bytes, source: io::Error::from_raw_os_error(libc::ENOMEM) })
    };
    (done_bytes, end)
}

fn region(pages: usize, masked: &[Feature]) -> Option<(Userfault, Reservation)> {
    let features = Features::probe(masked);
    if !features.has(Feature::UserFaults) {
        println!("skipped: {:?}", features.reports());
        return None;
    }
    let faults = Userfault::open(FaultMode::Threads, &features).unwrap();
    let memory = Reservation::new(pages * PAGE_BYTES, PAGE_BYTES).unwrap();
    memory.refuse_huge_pages();
    memory.skip_on_fork().unwrap();
    faults.register(memory.as_ptr(), memory.len()).unwrap();
    Some((faults, memory))
}

fn at(memory: &Reservation, page: usize) -> *mut u8 {
    memory.as_ptr().wrapping_add(page * PAGE_BYTES)
}

fn pages_of(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [*byte; PAGE_BYTES]).collect()
}

fn copy(
    faults: &Userfault,
    target: *mut u8,
    source: &[u8],
    protect: bool,
) -> Result<(), CopyError> {
    // SAFETY: a slice, and a scratch region.
    unsafe { faults.copy(target, source.as_ptr(), source.len(), protect) }
}

fn load(place: *mut u8) -> u8 {
    // SAFETY: all tests load from their scratch region.
    unsafe { place.read_volatile() }
}

fn store(place: *mut u8, byte: u8) {
    // SAFETY: all tests store to their scratch region.
    unsafe { place.write_volatile(byte) };
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
    let Some((faults, memory)) = region(4, &[]) else { return };
    let place = at(&memory, 2).wrapping_add(77);
    let address = place.addr();
    thread::scope(|scope| {
        let memory = &memory;
        let reader = scope.spawn(move || load(at(memory, 2).wrapping_add(77)));
        let fault = next_fault(&faults);
        assert_eq!(fault, Fault { address, is_write: false });
        assert!(!reader.is_finished());
        // Woken with nothing there, it asks again.
        faults.wake(at(memory, 2), PAGE_BYTES).unwrap();
        assert_eq!(next_fault(&faults), fault);
        copy(&faults, at(memory, 2), &pages_of(&[9]), false).unwrap();
        assert_eq!(reader.join().unwrap(), 9);
    });
    let mut none = Vec::new();
    faults.read_faults(&mut none).unwrap();
    assert_eq!(none, []);
}

#[test]
fn all_who_wait_are_reported_over_several_reads() {
    let Some((faults, memory)) = region(70, &[]) else { return };
    thread::scope(|scope| {
        let memory = &memory;
        for page in 0..70 {
            scope.spawn(move || store(at(memory, page), page as u8));
        }
        let (mut found, mut reads) = (Vec::new(), 0);
        while found.len() < 70 {
            let before = found.len();
            faults.read_faults(&mut found).unwrap();
            assert!(found.len() - before <= MESSAGES_MAX);
            reads += usize::from(found.len() > before);
        }
        assert!(reads >= 2);
        assert!(found.iter().all(|fault| fault.is_write));
        found.sort_by_key(|fault| fault.address);
        for (page, fault) in found.iter().enumerate() {
            assert_eq!(fault.address, at(memory, page).addr());
        }
        copy(&faults, memory.as_ptr(), &pages_of(&[0; 70]), false).unwrap();
    });
    assert!((0..70).all(|page| load(at(&memory, page)) == page as u8));
}

#[test]
fn a_copy_stops_before_a_page_that_is_there_and_says_where() {
    let Some((faults, memory)) = region(4, &[]) else { return };
    copy(&faults, at(&memory, 2), &pages_of(&[1]), false).unwrap();
    let error = copy(&faults, memory.as_ptr(), &pages_of(&[3, 4, 5, 6]), false).unwrap_err();
    assert_eq!(error.done_bytes, 2 * PAGE_BYTES);
    assert_eq!(error.source.raw_os_error(), Some(libc::EEXIST));
    copy(&faults, at(&memory, 3), &pages_of(&[6]), false).unwrap();
    assert_eq!([0, 1, 2, 3].map(|page| load(at(&memory, page))), [3, 4, 1, 6]);
    let outside = Reservation::new(PAGE_BYTES, PAGE_BYTES).unwrap();
    let error = copy(&faults, outside.as_ptr(), &pages_of(&[1]), false).unwrap_err();
    assert_eq!(error.done_bytes, 0);
    assert_eq!(error.source.raw_os_error(), Some(libc::ENOENT));
}

#[test]
fn asynchronous_protection_stops_nobody() {
    let Some((faults, memory)) = region(1, &[]) else { return };
    if !Features::probe(&[]).has(Feature::WriteProtectAsync) {
        return println!("skipped: no asynchronous protection");
    }
    copy(&faults, memory.as_ptr(), &pages_of(&[1]), true).unwrap();
    store(memory.as_ptr(), 2);
    assert_eq!(load(memory.as_ptr()), 2);
    let mut found = Vec::new();
    faults.read_faults(&mut found).unwrap();
    assert_eq!(found, []);
}

/// Has the kernel write a byte to `place`.
fn read_zero(place: *mut u8) -> io::Result<()> {
    let zero = std::fs::File::open("/dev/zero").unwrap();
    // SAFETY: a byte of a scratch region.
    let answer = unsafe { libc::read(zero.as_raw_fd(), place.cast(), 1) };
    if answer == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[test]
fn a_system_call_waits_for_a_page_or_is_refused() {
    let Some((faults, memory)) = region(1, &[Feature::KernelFaults]) else { return };
    let error = read_zero(memory.as_ptr()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    if !Features::probe(&[]).has(Feature::KernelFaults) {
        return println!("skipped: no faults of system calls");
    }
    drop((faults, memory));
    let (faults, memory) = region(1, &[]).unwrap();
    thread::scope(|scope| {
        let memory = &memory;
        let caller = scope.spawn(move || read_zero(memory.as_ptr()));
        assert!(next_fault(&faults).is_write);
        copy(&faults, memory.as_ptr(), &pages_of(&[5]), false).unwrap();
        caller.join().unwrap().unwrap();
    });
    assert_eq!(load(memory.as_ptr()), 0);
}

#[test]
fn a_poisoned_page_is_an_error_until_it_is_unmapped() {
    let Some((faults, memory)) = region(3, &[]) else { return };
    if !Features::probe(&[]).has(Feature::FaultPoison) {
        return println!("skipped: no poison");
    }
    faults.poison(memory.as_ptr(), 2 * PAGE_BYTES).unwrap();
    for page in 0..2 {
        let error = read_zero(at(&memory, page)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{page}");
    }
    memory.release(0, 2 * PAGE_BYTES).unwrap();
    copy(&faults, memory.as_ptr(), &pages_of(&[1, 2]), false).unwrap();
    assert_eq!(load(at(&memory, 1)), 2);
    let error = faults.poison(at(&memory, 1), 2 * PAGE_BYTES).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn waiting_ends_when_it_is_told_to_stop() {
    let Some((faults, memory)) = region(1, &[]) else { return };
    let (stop, teller) = rustix::pipe::pipe().unwrap();
    let waiter = faults.waiter(stop).unwrap();
    let told = AtomicBool::new(false);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let goes_on = waiter.wait().unwrap();
            (goes_on, told.load(Ordering::Relaxed))
        });
        thread::sleep(std::time::Duration::from_millis(20));
        told.store(true, Ordering::Relaxed);
        rustix::io::write(&teller, &[1]).unwrap();
        assert_eq!(waiter.join().unwrap(), (false, true));
    });
    drop(memory);
}

#[test]
fn a_call_that_did_a_part_is_followed_by_one_for_the_rest() {
    let fail = |number| Err(io::Error::from_raw_os_error(number));
    let mut answers = vec![
        (Ok(0), 8192),
        (fail(libc::EINTR), -i64::from(libc::EINTR)),
        (fail(libc::EAGAIN), 8192),
        (fail(libc::EAGAIN), -i64::from(libc::EAGAIN)),
    ];
    let mut calls = Vec::new();
    let done = go_on(16_384, |done_bytes| {
        let (target, source) = (std::ptr::without_provenance_mut(1 << 20), 1 << 21);
        let source = std::ptr::without_provenance(source);
        let call = copy_call(target, source, 16_384, false, done_bytes);
        calls.push((call.target - (1 << 20), call.source - (1 << 21), call.length_bytes));
        answers.pop().unwrap()
    });
    assert!(done.is_ok());
    let rest = (8192, 8192, 8192);
    assert_eq!(calls, [(0, 0, 16_384), (0, 0, 16_384), rest, rest]);
}

#[test]
fn messages_are_read_as_the_kernel_writes_them() {
    let mut message = [0_u8; MESSAGE_BYTES];
    message[0] = EVENT_FAULT;
    message[8..16].copy_from_slice(&3_u64.to_ne_bytes());
    message[16..24].copy_from_slice(&0x1234_5678_9000_u64.to_ne_bytes());
    let fault = Fault { address: 0x1234_5678_9000, is_write: true };
    assert_eq!(fault_of(&message), Some(fault));
    message[0] = 0x13;
    assert_eq!(fault_of(&message), None);
}
