//! One io_uring instance: a submission queue and a completion queue.
//!
//! Used by `io::engine`, which holds all policy; probed in `probe.rs`.
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
use std::os::fd::{AsRawFd, RawFd};

use super::descriptor::{NUMBER_MIN, with_standard_occupied};
use io_uring::{IoUring, Probe, opcode, squeue, types};

pub(crate) struct Ring(IoUring);

/// Memory of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingMemory {
    /// One contiguous range.
    One { start: *mut u8, length_bytes: usize },
    /// Several ranges, as a vector of `iovec`s.
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
    /// Creates a ring for `entries` calls in flight.
    pub(crate) fn open(entries: u32) -> io::Result<Self> {
        let build = |builder: &mut io_uring::Builder| {
            with_standard_occupied(|| builder.dontfork().setup_clamp().build(entries))
        };
        let cooperative = build(IoUring::builder().setup_coop_taskrun());
        let ring = match cooperative {
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

    /// Returns the number of queued calls that the kernel has not taken yet.
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

    /// Returns `true` if the kernel supports all operations used here.
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
