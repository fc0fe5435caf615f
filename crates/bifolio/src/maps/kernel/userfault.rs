//! Serves page faults in user space (`userfaultfd`): in a registered region, a thread that touches
//! a missing page waits, or gets a signal, until the page is installed.
//! A thread never touches a region that it serves itself: it would wait for itself.
//!
//! Calls continue after partial progress (EAGAIN) and after an interruption; other errors are
//! returned. No non-cooperative events are requested, so EAGAIN without progress is transient, and
//! such a call is repeated a few times.
//!
//! # Safety
//! Fills, protects and poisons ranges of a registered region. Filling reads from an address of the
//! caller; the other calls make pages missing or slower, and change no byte.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};
use rustix::mm::UserfaultfdFlags;

use super::control;
use super::pages::PageRange;
use crate::sys::file::above_standard;
use crate::sys::probe::{Feature, Features};
use crate::sys::{Retries, persist};

const API: u64 = 0xAA;
/// Serves faults of user code only: faults inside system calls fail. Needs no privilege.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);

const FEATURE_FLAG_PROTECTION: u64 = 1 << 0;
const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_THREAD_ID: u64 = 1 << 8;
const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
const FEATURE_PROTECT_UNPOPULATED: u64 = 1 << 13;
const FEATURE_POISON: u64 = 1 << 14;
const FEATURE_PROTECT_ASYNC: u64 = 1 << 15;

const REGISTER_MISSING: u64 = 1 << 0;
const REGISTER_PROTECT: u64 = 1 << 1;
const COPY_PROTECT: u64 = 1 << 1;

const MESSAGE_BYTES: usize = 32;
const MESSAGES_MAX: usize = 64;
const EVENT_FAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1 << 0;

// The arguments of the calls: words in this order. Bytes done is an output: a count, or a negative
// error number.
/// Version, features, supported calls.
const DO_API: Opcode = opcode::read_write::<[u64; 3]>(0xAA, 0x3F);
/// Start, length, mode, supported calls.
const DO_REGISTER: Opcode = opcode::read_write::<[u64; 4]>(0xAA, 0x00);
/// Start, length.
const DO_WAKE: Opcode = opcode::read::<[u64; 2]>(0xAA, 0x02);
/// Target, source, length, mode, bytes done.
const DO_COPY: Opcode = opcode::read_write::<[u64; 5]>(0xAA, 0x03);
/// Start, length, mode, bytes done.
const DO_POISON: Opcode = opcode::read_write::<[u64; 4]>(0xAA, 0x08);

/// Features requested when a [`Userfault`] is opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wishes {
    /// Serves faults inside system calls, too.
    pub(crate) kernel_faults: bool,
    /// Records stores to protected pages instead of stopping them.
    pub(crate) protect_async: bool,
    pub(crate) poison: bool,
    /// A fault raises SIGBUS in its thread, and no message is sent.
    pub(crate) signals: bool,
}

/// A message: a thread waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) address: usize,
    pub(crate) is_write: bool,
    pub(crate) thread: u32,
}

#[derive(Debug)]
pub(crate) struct Userfault {
    descriptor: OwnedFd,
    /// `true` if a fault raises SIGBUS in its thread instead of a message.
    pub(crate) signals: bool,
}

impl Userfault {
    /// Opens a descriptor with the features that are in use. Reads of it never block.
    pub(crate) fn open(features: &Features, signals: bool) -> io::Result<Self> {
        Self::with(Wishes {
            signals,
            kernel_faults: features.has(Feature::KernelFaults),
            protect_async: features.has(Feature::WriteProtectAsync),
            poison: features.has(Feature::FaultPoison),
        })
    }

    /// Opens a descriptor with the features wished for. Fails if the kernel lacks one, or a filter
    /// forbids to read messages.
    pub(crate) fn with(wishes: Wishes) -> io::Result<Self> {
        let mut flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        if !wishes.kernel_faults {
            flags |= USER_MODE_ONLY;
        }
        // SAFETY: opens a descriptor; memory is unaffected until a range is registered.
        let descriptor = above_standard(|| unsafe { rustix::mm::userfaultfd(flags) })?;
        let mut features = FEATURE_FLAG_PROTECTION | FEATURE_EXACT_ADDRESS | FEATURE_THREAD_ID;
        if wishes.protect_async {
            features |= FEATURE_PROTECT_ASYNC | FEATURE_PROTECT_UNPOPULATED;
        }
        if wishes.poison {
            features |= FEATURE_POISON;
        }
        if wishes.signals {
            features |= FEATURE_SIGBUS;
        }
        let mut call = [API, features, 0];
        // SAFETY: the argument words of the call, without addresses.
        unsafe { control(descriptor.as_fd(), DO_API, &mut call) }?;
        let opened = Self { descriptor, signals: wishes.signals };
        if !wishes.signals {
            // Finds a filter that refuses to read messages. There is none yet.
            opened.read_faults(&mut Vec::new())?;
        }
        Ok(opened)
    }

    /// Registers a range until it is unmapped or `self` is dropped: faults on missing pages are
    /// reported here and, if requested, stores to protected pages are tracked.
    pub(crate) fn register(&self, start: *mut u8, length_bytes: usize) -> io::Result<()> {
        let mode = REGISTER_MISSING | REGISTER_PROTECT;
        let mut call = [start.addr() as u64, length_bytes as u64, mode, 0];
        // SAFETY: the argument words of the call; threads that touch the range may wait, no byte
        // changes.
        unsafe { control(self.descriptor.as_fd(), DO_REGISTER, &mut call) }.map(drop)
    }

    /// Installs pages with a copy of `length_bytes` from `source`, each page atomically, and wakes
    /// the threads that wait for them. With `protect`, the first store to each page is tracked.
    /// Returns the number of bytes installed.
    ///
    /// Stops at the first page that cannot be installed, with EEXIST if it is present. Threads that
    /// wait for that page are not woken.
    ///
    /// # Safety
    /// `source` must be readable for `length_bytes` by the kernel, outside of regions that this
    /// thread serves. `target` must be in a registered region whose contents the caller controls.
    pub(crate) unsafe fn copy(
        &self,
        target: *mut u8,
        source: *const u8,
        length_bytes: usize,
        protect: bool,
    ) -> (usize, io::Result<()>) {
        go_on(length_bytes, |done_bytes| {
            let mut call = copy_call(target, source, length_bytes, protect, done_bytes);
            // SAFETY: the rest of both ranges, which the caller guarantees.
            let answer = unsafe { control(self.descriptor.as_fd(), DO_COPY, &mut call) };
            (answer, call[4])
        })
    }

    /// Wakes the threads that wait for pages of the range; they retry.
    pub(crate) fn wake(&self, range: &PageRange) -> io::Result<()> {
        let mut call = words(range);
        // SAFETY: the argument words of the call; no memory is accessed.
        persist(|| unsafe { control(self.descriptor.as_fd(), DO_WAKE, &mut call) }).map(drop)
    }

    /// Makes an access to the missing pages of the range raise SIGBUS (BUS_MCEERR_AR), and wakes
    /// waiting threads. Fails with EEXIST at a page that is present. Unmapping the page ends it.
    pub(crate) fn poison(&self, range: &PageRange) -> io::Result<()> {
        let [start, length_bytes] = words(range);
        let poisoned = go_on(range.length_bytes, |done_bytes| {
            let done = done_bytes as u64;
            let mut call = [start + done, length_bytes - done, 0, 0];
            // SAFETY: the argument words of the call; only missing pages are marked.
            let answer = unsafe { control(self.descriptor.as_fd(), DO_POISON, &mut call) };
            (answer, call[3])
        });
        poisoned.1
    }

    /// Adds the messages of one read to `faults`, at most 64; none if no fault is pending.
    pub(crate) fn read_faults(&self, faults: &mut Vec<Fault>) -> io::Result<()> {
        let mut bytes = [0_u8; MESSAGES_MAX * MESSAGE_BYTES];
        let read_bytes = loop {
            match rustix::io::read(&self.descriptor, &mut bytes) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                other => break other?,
            }
        };
        faults.extend(bytes[..read_bytes].chunks_exact(MESSAGE_BYTES).filter_map(fault_of));
        Ok(())
    }

    /// Returns a waiter for messages, which ends when `stop` becomes readable.
    pub(crate) fn waiter(&self, stop: OwnedFd) -> io::Result<FaultWaiter> {
        let watch = above_standard(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
        for (number, watched) in [self.descriptor.as_fd(), stop.as_fd()].into_iter().enumerate() {
            let data = epoll::EventData::new_u64(number as u64);
            epoll::add(&watch, watched, data, epoll::EventFlags::IN)?;
        }
        // A filter that refuses this call is found here: later, threads that touch a missing page
        // would wait for ever.
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut found: Vec<epoll::Event> = Vec::with_capacity(2);
        epoll::wait(&watch, spare_capacity(&mut found), Some(&at_once))?;
        Ok(FaultWaiter { watch, _stop: stop })
    }
}

/// Waits for the messages of a [`Userfault`]. Opens no descriptor: works even if the process has
/// given up the right to open more (`RLIMIT_NOFILE` 0), in which case `poll` fails.
#[derive(Debug)]
pub(crate) struct FaultWaiter {
    watch: OwnedFd,
    _stop: OwnedFd,
}

impl FaultWaiter {
    /// Blocks until there may be messages. Returns `false` once `stop` is readable.
    pub(crate) fn wait(&self) -> io::Result<bool> {
        let mut found: Vec<epoll::Event> = Vec::with_capacity(2);
        while found.is_empty() {
            match epoll::wait(&self.watch, spare_capacity(&mut found), None) {
                Err(Errno::INTR) => {}
                other => drop(other?),
            }
        }
        let numbers = found.iter().map(|event| event.data);
        if numbers.into_iter().any(|number| number.u64() == 1) {
            return Ok(false);
        }
        let answers = found[0].flags;
        if answers.contains(epoll::EventFlags::IN) {
            return Ok(true);
        }
        Err(io::Error::other(format!("userfaultfd, epoll: {answers:?}")))
    }
}

fn words(range: &PageRange) -> [u64; 2] {
    [range.start.addr() as u64, range.length_bytes as u64]
}

/// Returns the call that copies what remains after `done_bytes`.
fn copy_call(
    target: *mut u8,
    source: *const u8,
    length_bytes: usize,
    protect: bool,
    done_bytes: usize,
) -> [u64; 5] {
    let (target, source) = (target.addr() + done_bytes, source.addr() + done_bytes);
    let mode = if protect { COPY_PROTECT } else { 0 };
    [target as u64, source as u64, (length_bytes - done_bytes) as u64, mode, 0]
}

/// Repeats `part`, which gets the number of bytes done so far and returns how many more it did,
/// until all are done or it fails permanently. Returns the number of bytes done.
fn go_on(
    length_bytes: usize,
    mut part: impl FnMut(usize) -> (io::Result<usize>, u64),
) -> (usize, io::Result<()>) {
    let mut done_bytes = 0;
    let mut retries = Retries::FEW;
    while done_bytes < length_bytes {
        let (answer, more_bytes) = part(done_bytes);
        // Negative: an error number, which `answer` also contains.
        let more_bytes = usize::try_from(more_bytes.cast_signed()).unwrap_or(0);
        done_bytes += more_bytes;
        if more_bytes > 0 {
            // EAGAIN: the rest remains to be done.
            retries = Retries::FEW;
        }
        let Err(error) = answer else { continue };
        let is_again = error.raw_os_error() == Some(libc::EAGAIN);
        if !(if more_bytes > 0 { is_again } else { retries.after(&error) }) {
            return (done_bytes, Err(error));
        }
    }
    (done_bytes, Ok(()))
}

/// Parses a message: its kind at byte 0, flags at 8, address at 16, thread at 24.
fn fault_of(message: &[u8]) -> Option<Fault> {
    let word = |at: usize| {
        let bytes = message.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_ne_bytes(bytes))
    };
    let (flags, address) = (word(8)?, word(16)? as usize);
    let thread = u32::from_ne_bytes(message.get(24..28)?.try_into().ok()?);
    let fault = Fault { address, is_write: flags & FLAG_WRITE != 0, thread };
    (message[0] == EVENT_FAULT).then_some(fault)
}

#[cfg(test)]
pub(crate) mod tests;
