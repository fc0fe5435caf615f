//! Faults of a call of a backing.
//!
//! Described by tests, carried out by `faulty.rs`.

use std::ops::Range;
use std::time::Duration;

use crate::Gate;

/// A call of a backing that can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// A read: `read_at`, `read_vectored_at`, or one that the cache submitted itself.
    Read,
    /// A write, likewise.
    Write,
    /// `sync_data`.
    SyncData,
    /// `sync_all`.
    SyncAll,
    /// `len_bytes`.
    Len,
    /// `set_len`.
    SetLen,
    /// `fallocate`.
    Fallocate,
    /// `seek_data` or `seek_hole`.
    Seek,
}

/// Number of kinds.
pub(crate) const CALLS: usize = 8;

/// A fault: which, when, and how often.
///
/// ```
/// use bifolio_testing::{Call, Fault};
/// let third_write_is_too_much = Fault::on(Call::Write).nth(3).fails(libc::ENOSPC);
/// let bad_sector = Fault::on(Call::Read).at(8192..8704).forever().fails(libc::EIO);
/// let interrupted_twice = Fault::on(Call::Read).times(2).fails(libc::EINTR);
/// # drop((third_write_is_too_much, bad_sector, interrupted_twice));
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Fault {
    call: Call,
    bytes: Range<u64>,
    skipped: u64,
    times: u64,
    pub(crate) effect: Effect,
}

/// The effect of a fault on a call.
#[derive(Clone, Debug)]
pub(crate) enum Effect {
    Fail(i32),
    Short(usize),
    Delay(Duration),
    Hold(Gate),
}

impl Effect {
    /// Returns `true` if the call completes after others.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Delay(_) | Self::Hold(_))
    }
}

impl Fault {
    /// Creates a fault of the next call of this kind: once, with EIO, unless changed.
    pub fn on(call: Call) -> Self {
        let effect = Effect::Fail(libc::EIO);
        Self { call, bytes: 0..u64::MAX, skipped: 0, times: 1, effect }
    }

    /// Restricts it to transfers that touch `bytes`. Calls without bytes touch none.
    pub fn at(self, bytes: Range<u64>) -> Self {
        Self { bytes, ..self }
    }

    /// Starts with the `n`-th matching call; 1 is the next.
    pub fn nth(self, n: u64) -> Self {
        assert!(n > 0, "the first call is number 1");
        Self { skipped: n - 1, ..self }
    }

    /// Affects `times` consecutive calls.
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Affects every call from then on.
    pub fn forever(self) -> Self {
        self.times(u64::MAX)
    }

    /// The call returns `errno` and does nothing; but a transfer that the cache has submitted
    /// itself was made, and only its result is lost: after an error, storage may hold anything.
    pub fn fails(self, errno: i32) -> Self {
        Self { effect: Effect::Fail(errno), ..self }
    }

    /// The transfer is `bytes` bytes shorter than requested, but moves at least one byte; a write
    /// that must consist of whole blocks for the storage below moves whole blocks, at least one.
    ///
    /// A transfer that the cache has submitted itself moves everything and reports a shorter
    /// length.
    pub fn short_by(self, bytes: usize) -> Self {
        Self { effect: Effect::Short(bytes), ..self }
    }

    /// The transfer succeeds with 0 bytes: for a read that means the end of the file.
    pub fn moves_nothing(self) -> Self {
        self.short_by(usize::MAX)
    }

    /// The call takes `delay` longer. The cache cannot submit a delayed transfer itself: a thread
    /// makes it, while the kernel makes later ones.
    pub fn delayed(self, delay: Duration) -> Self {
        Self { effect: Effect::Delay(delay), ..self }
    }

    /// The call waits at `gate` before it does anything; a thread makes it, as for a delayed one.
    pub fn held(self, gate: &Gate) -> Self {
        Self { effect: Effect::Hold(gate.clone()), ..self }
    }

    /// Returns `true` if it has affected all the calls that it should.
    pub(crate) fn is_spent(&self) -> bool {
        self.times == 0
    }

    /// Counts a call. Returns `true` if the fault affects it.
    pub(crate) fn strikes(&mut self, call: Call, bytes: &Range<u64>) -> bool {
        let everywhere = self.bytes == (0..u64::MAX);
        let touches = bytes.start < self.bytes.end && self.bytes.start < bytes.end;
        if call != self.call || !(everywhere || touches) || self.times == 0 {
            return false;
        }
        if self.skipped > 0 {
            self.skipped -= 1;
            return false;
        }
        if self.times != u64::MAX {
            self.times -= 1;
        }
        true
    }
}
