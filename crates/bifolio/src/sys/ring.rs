//! One io_uring: its two queues, and its tables of registered files and memory.
//!
//! Used by `io::engine`, which holds all policy; probed in `probe.rs`. A ring has two ends, made
//! together: [`RingQueues`], of which there is one and whose owner submits and reaps, and
//! [`RingTables`], which any thread may use to register and unregister, also while the owner waits.
//!
//! The kernel runs what completes when the submitting thread enters it next (`COOP_TASKRUN`),
//! which spares interruptions; older kernels do without. The mappings are not inherited by a forked
//! child, which must neither use nor drop a ring.
//!
//! This file does not retry, not even on EINTR.
//!
//! # Safety
//! The memory of a call is the kernel's from `push` until its answer has been reaped: the caller's
//! contract. Registered memory is written only through calls.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, squeue, types};

/// The most pieces of memory a ring can have registered.
pub(crate) const BUFFERS_MAX: usize = 1 << 14;

/// The end that submits and reaps. There is one of each ring, and using it takes `&mut`.
pub(crate) struct RingQueues(Arc<IoUring>);

/// The end that registers files and memory, from any thread.
#[derive(Clone)]
pub(crate) struct RingTables(Arc<IoUring>);

/// The file of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingFile {
    /// A descriptor, looked up by the kernel.
    Plain(RawFd),
    /// A slot of the table of files.
    Slot(u32),
}

/// The memory of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingMemory {
    /// One run of bytes.
    One { start: *mut u8, length_bytes: usize },
    /// One run of bytes inside registered memory.
    Registered { start: *mut u8, length_bytes: usize, index: u16 },
    /// Several runs.
    Row { entries: *const libc::iovec, count: usize },
}

/// A transfer, as the kernel wants it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingCall {
    pub(crate) is_write: bool,
    pub(crate) file: RingFile,
    pub(crate) memory: RingMemory,
    pub(crate) position_bytes: u64,
}

/// Makes a ring for `entries` calls in flight.
pub(crate) fn open(entries: u32) -> io::Result<(RingQueues, RingTables)> {
    let build = |builder: &mut io_uring::Builder| builder.dontfork().setup_clamp().build(entries);
    let cooperative = build(IoUring::builder().setup_coop_taskrun());
    let ring = match cooperative {
        // Linux before 5.19 does not know the flag.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => build(&mut IoUring::builder()),
        other => other,
    }?;
    let params = ring.params();
    if !params.is_feature_nodrop() || !params.is_feature_submit_stable() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let ring = Arc::new(ring);
    Ok((RingQueues(Arc::clone(&ring)), RingTables(ring)))
}

impl RingQueues {
    /// Queues a call; `token` comes back with its answer. The next [`Self::enter`] submits it.
    /// `false`: the queue is full.
    ///
    /// # Safety
    /// Until the answer has been reaped: the call's memory is the kernel's, to be filled by a read
    /// and looked at by a write, and its file is open. A row of entries stays until then, too.
    #[must_use]
    pub(crate) unsafe fn push(&mut self, call: &RingCall, token: u64) -> bool {
        let entry = call.entry().user_data(token);
        // SAFETY: there is one `RingQueues` of each ring, and it is borrowed uniquely: so this is
        // the only view of the submission queue.
        let mut queue = unsafe { self.0.submission_shared() };
        // SAFETY: what the entry names is valid for the whole operation: the caller's contract.
        unsafe { queue.push(&entry) }.is_ok()
    }

    /// Calls that were queued and that the kernel has not seen.
    pub(crate) fn unsubmitted(&mut self) -> usize {
        // SAFETY: the only view of the submission queue, as in `push`.
        unsafe { self.0.submission_shared() }.len()
    }

    /// Submits what was queued, and waits until `wanted` answers can be reaped. One system call.
    pub(crate) fn enter(&mut self, wanted: usize) -> io::Result<()> {
        self.0.submit_and_wait(wanted).map(drop)
    }

    /// Takes the next answer.
    pub(crate) fn reap(&mut self) -> Option<(u64, io::Result<usize>)> {
        // SAFETY: there is one `RingQueues` of each ring, and it is borrowed uniquely: so this is
        // the only view of the completion queue.
        let mut queue = unsafe { self.0.completion_shared() };
        let answer = queue.next()?;
        let result = answer.result();
        let count = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Some((answer.user_data(), count))
    }
}

impl RingTables {
    /// Makes an empty table for `slots` files.
    pub(crate) fn make_file_table(&self, slots: u32) -> io::Result<()> {
        self.0.submitter().register_files_sparse(slots)
    }

    /// Registers `file`, which stays open then until it is unregistered.
    pub(crate) fn register_file(&self, slot: u32, file: RawFd) -> io::Result<()> {
        self.0.submitter().register_files_update(slot, &[file]).map(drop)
    }

    /// Takes the file out of `slot`.
    pub(crate) fn unregister_file(&self, slot: u32) -> io::Result<()> {
        self.0.submitter().register_files_update(slot, &[-1]).map(drop)
    }

    /// Makes an empty table for `count` pieces of memory.
    pub(crate) fn make_buffer_table(&self, count: u32) -> io::Result<()> {
        self.0.submitter().register_buffers_sparse(count)
    }

    /// Registers memory: its pages are resident and stay where they are until it is unregistered,
    /// whatever becomes of the mapping.
    ///
    /// # Safety
    /// The memory is mapped, and calls that name it are as [`RingQueues::push`] wants them.
    pub(crate) unsafe fn register_buffer(
        &self,
        index: u32,
        start: *mut u8,
        length_bytes: usize,
    ) -> io::Result<()> {
        let entry = libc::iovec { iov_base: start.cast(), iov_len: length_bytes };
        // SAFETY: the memory is mapped: the caller's contract; what happens to it later is checked
        // by the kernel, which holds on to the pages.
        unsafe { self.0.submitter().register_buffers_update(index, &[entry], None) }
    }

    /// Lets the pages of registered memory go.
    pub(crate) fn unregister_buffer(&self, index: u32) -> io::Result<()> {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an entry of no bytes names no memory.
        unsafe { self.0.submitter().register_buffers_update(index, &[nothing], None) }
    }

    /// Whether the kernel knows all kinds of calls that are made here.
    pub(crate) fn knows_all_calls(&self) -> io::Result<bool> {
        let mut probe = Probe::new();
        self.0.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::ReadFixed::CODE,
            opcode::WriteFixed::CODE,
        ];
        Ok(needed.into_iter().all(|code| probe.is_supported(code)))
    }
}

impl RingCall {
    fn entry(&self) -> squeue::Entry {
        let (file, position) = (self.file, self.position_bytes);
        // More than the kernel moves at once anyway.
        let cut = |length_bytes: usize| u32::try_from(length_bytes).unwrap_or(u32::MAX);
        /// The call of this name on `file`, whichever kind that is.
        macro_rules! call {
            ($name:ident, $($argument:expr),+) => {
                match file {
                    RingFile::Plain(file) => {
                        opcode::$name::new(types::Fd(file), $($argument),+).offset(position).build()
                    }
                    RingFile::Slot(slot) => {
                        opcode::$name::new(types::Fixed(slot), $($argument),+)
                            .offset(position)
                            .build()
                    }
                }
            };
        }
        use RingMemory::{One, Registered, Row};
        match (self.memory, self.is_write) {
            (One { start, length_bytes }, false) => call!(Read, start, cut(length_bytes)),
            (One { start, length_bytes }, true) => call!(Write, start, cut(length_bytes)),
            (Registered { start, length_bytes, index }, false) => {
                call!(ReadFixed, start, cut(length_bytes), index)
            }
            (Registered { start, length_bytes, index }, true) => {
                call!(WriteFixed, start, cut(length_bytes), index)
            }
            (Row { entries, count }, false) => call!(Readv, entries, cut(count)),
            (Row { entries, count }, true) => call!(Writev, entries, cut(count)),
        }
    }
}

impl fmt::Debug for RingQueues {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RingQueues").finish_non_exhaustive()
    }
}

impl fmt::Debug for RingTables {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RingTables").finish_non_exhaustive()
    }
}
