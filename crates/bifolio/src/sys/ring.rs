//! One io_uring: its two queues.
//!
//! Used by `io::engine`, which holds all policy; probed in `probe.rs`.
//!
//! The kernel runs what completes when the submitting thread enters it next (`COOP_TASKRUN`),
//! which spares interruptions; older kernels do without. The mappings are not inherited by a forked
//! child, which must neither use nor drop a ring.
//!
//! This file does not retry, not even on EINTR.
//!
//! # Safety
//! The memory of a call is the kernel's from `push` until its answer has been reaped: the caller's
//! contract.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::RawFd;

use io_uring::{IoUring, Probe, opcode, squeue, types};

/// See the head of the file.
pub(crate) struct Ring(IoUring);

/// The memory of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingMemory {
    /// One run of bytes.
    One { start: *mut u8, length_bytes: usize },
    /// Several runs.
    Row { entries: *const libc::iovec, count: usize },
}

/// A transfer, as the kernel wants it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingCall {
    pub(crate) is_write: bool,
    pub(crate) file: RawFd,
    pub(crate) memory: RingMemory,
    pub(crate) position_bytes: u64,
}

impl Ring {
    /// Makes a ring for `entries` calls in flight.
    pub(crate) fn open(entries: u32) -> io::Result<Self> {
        let build =
            |builder: &mut io_uring::Builder| builder.dontfork().setup_clamp().build(entries);
        let cooperative = build(IoUring::builder().setup_coop_taskrun());
        let ring = match cooperative {
            // Linux before 5.19 does not know the flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                build(&mut IoUring::builder())
            }
            other => other,
        }?;
        let params = ring.params();
        if !params.is_feature_nodrop() || !params.is_feature_submit_stable() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Self(ring))
    }

    /// Queues a call; `token` comes back with its answer. The next [`Self::enter`] submits it.
    /// `false`: the queue is full.
    ///
    /// # Safety
    /// Until the answer has been reaped: the call's memory is the kernel's, to be filled by a read
    /// and looked at by a write, and its file is open. A row of entries stays until then, too.
    #[must_use]
    pub(crate) unsafe fn push(&mut self, call: &RingCall, token: u64) -> bool {
        let entry = call.entry().user_data(token);
        // SAFETY: what the entry names is valid for the whole operation: the caller's contract.
        unsafe { self.0.submission().push(&entry) }.is_ok()
    }

    /// Calls that were queued and that the kernel has not seen.
    pub(crate) fn unsubmitted(&mut self) -> usize {
        self.0.submission().len()
    }

    /// Submits what was queued, and waits until `wanted` answers can be reaped. One system call.
    pub(crate) fn enter(&mut self, wanted: usize) -> io::Result<()> {
        self.0.submit_and_wait(wanted).map(drop)
    }

    /// Takes the next answer.
    pub(crate) fn reap(&mut self) -> Option<(u64, io::Result<usize>)> {
        let answer = self.0.completion().next()?;
        let result = answer.result();
        let count = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Some((answer.user_data(), count))
    }

    /// Whether the kernel knows all kinds of calls that are made here.
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
        // More than the kernel moves at once anyway.
        let cut = |length_bytes: usize| u32::try_from(length_bytes).unwrap_or(u32::MAX);
        use RingMemory::{One, Row};
        match (self.memory, self.is_write) {
            (One { start, length_bytes }, false) => {
                opcode::Read::new(file, start, cut(length_bytes)).offset(position).build()
            }
            (One { start, length_bytes }, true) => {
                opcode::Write::new(file, start, cut(length_bytes)).offset(position).build()
            }
            (Row { entries, count }, false) => {
                opcode::Readv::new(file, entries, cut(count)).offset(position).build()
            }
            (Row { entries, count }, true) => {
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
