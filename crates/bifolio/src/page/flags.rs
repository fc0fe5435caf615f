//! The flags of a folio: one 32-bit word that holds independent bits and one state of two bits.
//!
//! All changes are read-modify-writes, so a bit guarded by the folio lock and one guarded by the
//! LRU lock can share the word. Rules 3 and 5 of `page/mod.rs` say which lock guards which bit. A
//! thread that waits for write-back to end waits on the word as a futex.
//!
//! [`WriteState`] relates the bytes of the folio to those on the device. A transition is one
//! read-modify-write and a query is one load, so no thread sees a folio between two states. A
//! transition is named after the resulting state. It returns how the caller, which holds the lock
//! of the dirty list (WRITEBACK-1), must update that list:
//!
//! ```text
//!              to_dirty: Add             to_writing: Remove
//!   Clean -----------------------> Dirty --------------------> Writing -- to_written --> Clean
//!     ^------ to_clean: Remove ------'^                         |   |
//!                                     |---- to_unwritten: Add --'   | to_dirty: Add
//!                                     |                             v
//!                                     '-- to_written, to_unwritten: Keep -- Redirtied
//! ```

use crate::sync::{AtomicU32, Ordering, blocking, futex};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Flag {
    /// The bytes are those of the file.
    Uptodate = 1 << 0,
    /// A thread sleeps until the write-out ends. (Bits 1 and 2 are the [`WriteState`].)
    WritebackWaiters = 1 << 3,
    /// On an LRU list.
    OnLru = 1 << 4,
    /// On, isolated from, or bound for, the active list.
    Active = 1 << 5,
    /// On, or isolated from, the list of folios filled a short time ago.
    Fresh = 1 << 6,
    /// Read ahead and not used since.
    Readahead = 1 << 7,
    /// Reserved by `allocate` and never written: reads return zeros, whatever its frame holds.
    Allocated = 1 << 8,
    /// Never on an LRU list: the folio cannot be reclaimed.
    Unlisted = 1 << 9,
    /// Filled while its pages were being cleared: has zeros, and what was written since.
    Punched = 1 << 10,
}

/// Mask of the write state. Its two bits: on the dirty list, and on the way to the device.
const STATE: u32 = LISTED | IN_FLIGHT;
const LISTED: u32 = 1 << 1;
const IN_FLIGHT: u32 = 1 << 2;

/// Relation between the bytes of a folio and those on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WriteState {
    /// The device needs no write: it has the bytes, or they were discarded.
    Clean = 0,
    /// Newer than the device; the folio is on the dirty list of its file.
    Dirty = LISTED,
    /// A write-out is in flight.
    Writing = IN_FLIGHT,
    /// A write-out is in flight and the bytes are newer again; the folio is also on the dirty list.
    Redirtied = LISTED | IN_FLIGHT,
}

impl WriteState {
    fn of(word: u32) -> Self {
        match word & STATE {
            LISTED => Self::Dirty,
            IN_FLIGHT => Self::Writing,
            STATE => Self::Redirtied,
            _ => Self::Clean,
        }
    }

    /// Returns `true` if there are bytes whose write-out has not begun: the folio is on the dirty
    /// list.
    pub(crate) fn is_dirty(self) -> bool {
        self as u32 & LISTED != 0
    }

    /// Returns `true` if a write-out is in flight.
    pub(crate) fn is_writing(self) -> bool {
        self as u32 & IN_FLIGHT != 0
    }
}

/// The change that the caller must make to the dirty list before it unlocks the list.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    /// Add the folio to the list.
    Add,
    Remove,
    /// Do not change the list.
    Keep,
}

#[derive(Debug, Default)]
pub(crate) struct Flags(AtomicU32);

impl Flags {
    pub(crate) fn get(&self, flag: Flag) -> bool {
        // Acquire: pairs with the Release in `set`: a thread that sees UPTODATE sees the bytes.
        self.0.load(Ordering::Acquire) & flag as u32 != 0
    }

    /// Sets the bit. Returns `true` if it was clear.
    pub(crate) fn set(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_or(flag as u32, Ordering::Release) & flag as u32 == 0
    }

    /// Clears the bit. Returns `true` if it was set.
    pub(crate) fn clear(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_and(!(flag as u32), Ordering::Release) & flag as u32 != 0
    }

    /// Sets or clears the bit; writes nothing if it has that value. No other thread changes it.
    pub(crate) fn assign(&self, flag: Flag, value: bool) {
        match value {
            _ if self.get(flag) == value => false,
            true => self.set(flag),
            false => self.clear(flag),
        };
    }

    /// Clears all flags and the write state for a new generation. Only the allocator of the folio
    /// calls this.
    pub(crate) fn reset(&self) {
        // Release: pairs with the Acquire in `get` and in `Mapping::peek`: a thread that sees the
        // flags of this generation sees that the previous folio was removed from its table.
        self.0.store(0, Ordering::Release);
    }

    pub(crate) fn write_state(&self) -> WriteState {
        // Acquire: pairs with the Release in `change`: a thread that sees no write-out in flight
        // sees the I/O done.
        WriteState::of(self.0.load(Ordering::Acquire))
    }

    /// Notes that the bytes are newer than the device's. Returns `Add` or `Keep`.
    pub(crate) fn transition_to_dirty(&self) -> Listing {
        self.change(|state| state | LISTED)
    }

    /// Discards the difference to the device without a write-out. Returns `Remove` or `Keep`.
    pub(crate) fn transition_to_clean(&self) -> Listing {
        self.change(|state| state & !LISTED)
    }

    /// Begins a write-out if the folio is dirty and no write-out is in flight, and returns
    /// `Remove`; otherwise changes nothing.
    pub(crate) fn transition_to_writing(&self) -> Listing {
        self.change(|state| if state == LISTED { IN_FLIGHT } else { state })
    }

    /// Ends a write-out that succeeded: clean, or dirty if the bytes have changed since. Returns
    /// `Keep`.
    pub(crate) fn transition_to_written(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT)
    }

    /// Ends a write-out that failed: dirty again. Returns `Add` or `Keep`.
    pub(crate) fn transition_to_unwritten(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT | LISTED)
    }

    /// Changes the state in one step. If that ends a write-out, wakes the threads that wait for it.
    fn change(&self, next: impl Fn(u32) -> u32) -> Listing {
        let mut before = self.0.load(Ordering::Relaxed);
        let after = loop {
            let mut after = before & !STATE | next(before & STATE);
            if after & IN_FLIGHT == 0 {
                after &= !(Flag::WritebackWaiters as u32);
            }
            // Release: pairs with the Acquire in `write_state` and in `wait_for_writeback`: the I/O
            // is done, or the folio set up. On failure, Relaxed: only the value counts.
            match self.0.compare_exchange(before, after, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break after,
                Err(now) => before = now,
            }
        };
        if before & !after & Flag::WritebackWaiters as u32 != 0 {
            futex::wake(&self.0, u32::MAX >> 1);
        }
        match (before & LISTED, after & LISTED) {
            (0, LISTED) => Listing::Add,
            (LISTED, 0) => Listing::Remove,
            _ => Listing::Keep,
        }
    }

    pub(crate) fn wait_for_writeback(&self) {
        blocking::check("the end of a write-out");
        loop {
            // Acquire: pairs with the Release in `change`.
            let now = self.0.load(Ordering::Acquire);
            if now & IN_FLIGHT == 0 {
                return;
            }
            let waiting = now | Flag::WritebackWaiters as u32;
            // Relaxed: the waiters bit publishes nothing.
            let announced = now == waiting
                || self
                    .0
                    .compare_exchange(now, waiting, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if announced {
                futex::wait(&self.0, waiting);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Lists for each state the result of each transition.
    #[test]
    fn every_transition_leads_where_its_name_says() {
        use Listing::{Add, Keep, Remove};
        use WriteState::{Clean, Dirty, Redirtied, Writing};
        type Transition = fn(&Flags) -> Listing;
        let table: [(Transition, [(WriteState, Listing); 4]); 5] = [
            (
                Flags::transition_to_dirty,
                [(Dirty, Add), (Dirty, Keep), (Redirtied, Add), (Redirtied, Keep)],
            ),
            (
                Flags::transition_to_clean,
                [(Clean, Keep), (Clean, Remove), (Writing, Keep), (Writing, Remove)],
            ),
            (
                Flags::transition_to_writing,
                [(Clean, Keep), (Writing, Remove), (Writing, Keep), (Redirtied, Keep)],
            ),
            (
                Flags::transition_to_written,
                [(Clean, Keep), (Dirty, Keep), (Clean, Keep), (Dirty, Keep)],
            ),
            (
                Flags::transition_to_unwritten,
                [(Dirty, Add), (Dirty, Keep), (Dirty, Add), (Dirty, Keep)],
            ),
        ];
        for (transition, outcomes) in table {
            for (from, (to, listing)) in
                [Clean, Dirty, Writing, Redirtied].into_iter().zip(outcomes)
            {
                let others = Flag::Uptodate as u32 | Flag::OnLru as u32;
                let flags = Flags(AtomicU32::new(others | from as u32));
                assert_eq!((transition(&flags), flags.write_state()), (listing, to), "{from:?}");
                assert!(flags.get(Flag::Uptodate) && flags.get(Flag::OnLru));
            }
        }
    }
}
