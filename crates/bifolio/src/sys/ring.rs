//! One io_uring instance, and the [`Bell`] that wakes a thread which waits in it, or alone.
//!
//! The kernel runs completion work when the submitting thread next enters it (`COOP_TASKRUN`),
//! which saves interrupts; older kernels work without. The mappings are not inherited by a forked
//! child, which must neither use nor drop a ring.
//!
//! This file does not retry, not even on EINTR.
//!
//! # Safety
//! The memory of a call belongs to the kernel from `push` until its completion has been reaped; the
//! caller guarantees it.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::Duration;

use super::file::{NUMBER_MIN, above_standard, with_standard_occupied};
use super::persist;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

pub(crate) struct Ring(IoUring);

#[derive(Clone, Copy, Debug)]
pub(crate) enum RingMemory {
    One { start: *mut u8, length_bytes: usize },
    Vector { entries: *const libc::iovec, count: usize },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RingCall {
    pub(crate) is_write: bool,
    pub(crate) file: RawFd,
    pub(crate) memory: RingMemory,
    pub(crate) position_bytes: u64,
}

impl Ring {
    /// Opens a ring of up to `entries` calls, above the standard streams. Fails with `Unsupported`
    /// if the kernel may drop completions.
    pub(crate) fn open(entries: u32) -> io::Result<Self> {
        let build = |builder: &mut io_uring::Builder| {
            with_standard_occupied(|| builder.dontfork().setup_clamp().build(entries))
        };
        let ring = match build(IoUring::builder().setup_coop_taskrun()) {
            // Linux before 5.19 rejects the flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                build(&mut IoUring::builder())
            }
            other => other,
        }?;
        let params = ring.params();
        if !params.is_feature_nodrop() || !params.is_feature_submit_stable() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if ring.as_raw_fd() < NUMBER_MIN {
            // Another thread closed a standard stream meanwhile.
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(Self(ring))
    }

    /// Queues a call; `token` is returned with its completion. The next [`Self::enter`] submits it.
    /// Returns `false` if the queue is full.
    ///
    /// # Safety
    /// Until the completion has been reaped, the kernel may write the call's memory (a read) or
    /// read it (a write), its file must stay open, and a vector of ranges must stay valid.
    #[must_use]
    pub(crate) unsafe fn push(&mut self, call: &RingCall, token: u64) -> bool {
        let entry = call.entry().user_data(token);
        // SAFETY: everything the entry names is valid for the whole operation: the caller's
        // contract.
        unsafe { self.0.submission().push(&entry) }.is_ok()
    }

    pub(crate) fn unsubmitted(&mut self) -> usize {
        self.0.submission().len()
    }

    /// Submits the queued calls, and waits until `wanted` completions can be reaped. One system
    /// call.
    pub(crate) fn enter(&mut self, wanted: usize) -> io::Result<()> {
        self.0.submit_and_wait(wanted).map(drop)
    }

    pub(crate) fn reap(&mut self) -> Option<(u64, io::Result<usize>)> {
        let answer = self.0.completion().next()?;
        let result = answer.result();
        let count = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Some((answer.user_data(), count))
    }

    pub(crate) fn knows_all_calls(&self) -> io::Result<bool> {
        let mut probe = Probe::new();
        self.0.submitter().register_probe(&mut probe)?;
        let needed =
            [opcode::Read::CODE, opcode::Write::CODE, opcode::Readv::CODE, opcode::Writev::CODE];
        Ok(needed.into_iter().all(|code| probe.is_supported(code)))
    }
}

impl RingCall {
    fn entry(&self) -> squeue::Entry {
        let (file, position) = (types::Fd(self.file), self.position_bytes);
        // The kernel never moves more at once.
        let cut = |length_bytes: usize| u32::try_from(length_bytes).unwrap_or(u32::MAX);
        use RingMemory::{One, Vector};
        match (self.memory, self.is_write) {
            (One { start, length_bytes }, false) => {
                opcode::Read::new(file, start, cut(length_bytes)).offset(position).build()
            }
            (One { start, length_bytes }, true) => {
                opcode::Write::new(file, start, cut(length_bytes)).offset(position).build()
            }
            (Vector { entries, count }, false) => {
                opcode::Readv::new(file, entries, cut(count)).offset(position).build()
            }
            (Vector { entries, count }, true) => {
                opcode::Writev::new(file, entries, cut(count)).offset(position).build()
            }
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Ring").finish_non_exhaustive()
    }
}

/// An event descriptor (`eventfd`) that one thread waits for and other threads ring, with the word
/// that a ring reads its counter into. A ring between two waits ends the next one at once.
#[derive(Debug)]
pub(crate) struct Bell {
    event: OwnedFd,
    counter: AtomicU64,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let event = above_standard(|| eventfd(0, EventfdFlags::CLOEXEC))?;
        Ok(Self { event, counter: AtomicU64::new(0) })
    }

    pub(crate) fn ring(&self) {
        // Fails only if the counter is at its limit, where a wait returns anyway.
        let _ = persist(|| Ok(rustix::io::write(&self.event, &1_u64.to_ne_bytes())?));
    }

    /// Waits until the bell is rung. May return early.
    pub(crate) fn wait(&self) {
        // A caller checks again what it waits for, also after an interruption.
        let rung = rustix::io::read(&self.event, &mut [0; size_of::<u64>()]);
        rung.map_or_else(pause, drop);
    }

    /// Waits until the bell is rung, for at most `time`. Returns `true` if it was rung.
    pub(crate) fn wait_for(&self, time: Duration) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let mut events = [PollFd::new(&self.event, PollFlags::IN)];
        let is_rung = poll(&mut events, timeout.as_ref()).unwrap_or_else(|error| {
            pause(error);
            0
        }) > 0;
        if is_rung {
            self.wait();
        }
        is_rung
    }

    /// Returns the call by which a ring waits for the bell. The bell must live until the call is
    /// complete.
    pub(crate) fn call(&self) -> RingCall {
        let start = self.counter.as_ptr().cast();
        let memory = RingMemory::One { start, length_bytes: size_of::<u64>() };
        RingCall { is_write: false, file: self.event.as_raw_fd(), memory, position_bytes: 0 }
    }
}

/// Keeps a caller from spinning where a filter refuses the call that waits.
fn pause(refusal: Errno) {
    if refusal != Errno::INTR {
        thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_ring_before_the_wait_ends_the_wait() {
        let bell = Arc::new(Bell::new().unwrap());
        bell.ring();
        bell.ring();
        bell.wait();
        assert!(!bell.wait_for(Duration::ZERO));
        bell.ring();
        assert!(bell.wait_for(Duration::from_secs(60)));
        let rung = Arc::clone(&bell);
        let ringer = std::thread::spawn(move || rung.ring());
        bell.wait();
        ringer.join().unwrap();
    }
}
