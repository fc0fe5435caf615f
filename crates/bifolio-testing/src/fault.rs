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
}

/// How many kinds there are.
pub(crate) const CALLS: usize = 6;

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
    /// Whether it makes the call come to its end after others.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Self::Delay(_) | Self::Hold(_))
    }
}

impl Fault {
    /// Strikes the next call of this kind, once, with EIO, unless told otherwise.
    pub fn on(call: Call) -> Self {
        let effect = Effect::Fail(libc::EIO);
        Self { call, bytes: 0..u64::MAX, skipped: 0, times: 1, effect }
    }

    /// Only transfers that touch `bytes` count. Calls without bytes touch none.
    pub fn at(self, bytes: Range<u64>) -> Self {
        Self { bytes, ..self }
    }

    /// Begins with the `n`-th call that counts, 1 being the next.
    pub fn nth(self, n: u64) -> Self {
        assert!(n > 0, "the first call is number 1");
        Self { skipped: n - 1, ..self }
    }

    /// Strikes so many calls in a row.
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Strikes every call from then on.
    pub fn forever(self) -> Self {
        self.times(u64::MAX)
    }

    /// The call answers `errno` and does nothing; but a transfer that the cache has submitted
    /// itself was made, and only its answer is lost: after an error, storage may hold anything.
    pub fn fails(self, errno: i32) -> Self {
        Self { effect: Effect::Fail(errno), ..self }
    }

    /// The transfer is `bytes` bytes shorter than asked, but moves at least one byte; a write that
    /// is to be whole blocks for the storage below moves whole blocks, at least one.
    ///
    /// One that the cache has submitted itself moves everything and claims to be shorter.
    pub fn short_by(self, bytes: usize) -> Self {
        Self { effect: Effect::Short(bytes), ..self }
    }

    /// The transfer succeeds with 0 bytes: for a read that means the end of the file.
    pub fn moves_nothing(self) -> Self {
        self.short_by(usize::MAX)
    }

    /// The call takes so much longer. A transfer that is to be late is not the cache's to submit
    /// itself: it is made by a thread, while the kernel makes those behind it.
    pub fn delayed(self, delay: Duration) -> Self {
        Self { effect: Effect::Delay(delay), ..self }
    }

    /// The call waits at `gate` before it does anything; made by a thread, as a late one.
    pub fn held(self, gate: &Gate) -> Self {
        Self { effect: Effect::Hold(gate.clone()), ..self }
    }

    /// Whether it has struck as often as it was to.
    pub(crate) fn is_spent(&self) -> bool {
        self.times == 0
    }

    /// Counts a call; whether the fault strikes it.
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
