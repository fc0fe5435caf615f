//! The flags of a folio: one 32-bit word of independent bits, and of one state of two bits.
//!
//! Changed by read-modify-writes, so that a bit guarded by the folio lock and one guarded by the
//! LRU lock can live in the same word. Rules 3 and 5 of `page/mod.rs` say which lock guards which
//! bit. Waiting for write-back to end is a futex wait on the word.
//!
//! How the bytes stand to the device is one [`WriteState`]: each transition is one
//! read-modify-write, each look one load, so nobody ever sees a folio between two states. A
//! transition is named after where it leads, and answers what the caller, with the lock of the
//! dirty list (WRITEBACK-1), must do with that list now:
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

/// One bit of the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Flag {
    /// The bytes are those of the file.
    Uptodate = 1 << 0,
    /// Somebody sleeps until the write-out ends. (Bits 1 and 2 are the [`WriteState`].)
    WritebackWaiters = 1 << 3,
    /// On the inactive or the active list.
    OnLru = 1 << 4,
    /// On, or bound for, the active list.
    Active = 1 << 5,
    /// Was active when it was last evicted, or is now.
    Workingset = 1 << 6,
    /// Read ahead of need, and not used since.
    Readahead = 1 << 7,
    /// Reserved by `allocate` and never written: reads as zeros, whatever its frame holds.
    Allocated = 1 << 8,
    /// On no list of the LRU for as long as it lives: nothing can be done with it.
    Unlisted = 1 << 9,
}

/// The bits of the state, and its halves: on the dirty list, and on the way to the device.
const STATE: u32 = LISTED | IN_FLIGHT;
const LISTED: u32 = 1 << 1;
const IN_FLIGHT: u32 = 1 << 2;

/// How the bytes stand to those on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WriteState {
    /// The same, as far as anybody cares.
    Clean = 0,
    /// Newer: the folio is on the dirty list of its file.
    Dirty = LISTED,
    /// On their way to the device.
    Writing = IN_FLIGHT,
    /// On their way, and newer again: the folio is on the dirty list, too.
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

    /// Whether there are bytes whose write-out has not begun: the folio is on the dirty list.
    pub(crate) fn is_dirty(self) -> bool {
        self as u32 & LISTED != 0
    }

    /// Whether a write-out is in flight.
    pub(crate) fn is_writing(self) -> bool {
        self as u32 & IN_FLIGHT != 0
    }
}

/// The duty of the thread that changed the state: to the dirty list, before its lock is let go.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    /// Put the folio on the list.
    Add,
    /// Take it off.
    Remove,
    /// Leave it where it is, on the list or not.
    Keep,
}

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Flags(AtomicU32);

impl Flags {
    pub(crate) fn get(&self, flag: Flag) -> bool {
        // Acquire: pairs with the Release in `set`: a thread that sees UPTODATE sees the bytes.
        self.0.load(Ordering::Acquire) & flag as u32 != 0
    }

    /// Sets the bit; tells whether it was clear.
    pub(crate) fn set(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_or(flag as u32, Ordering::Release) & flag as u32 == 0
    }

    /// Clears the bit; tells whether it was set.
    pub(crate) fn clear(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_and(!(flag as u32), Ordering::Release) & flag as u32 != 0
    }

    /// A new life begins: no flags, clean. Only the allocator of the folio calls this.
    pub(crate) fn reset(&self) {
        // Release: pairs with the Acquire in `get` and in `Mapping::peek`: whoever sees the flags
        // of this life sees that the folio of the last one has left its table.
        self.0.store(0, Ordering::Release);
    }

    /// How the bytes stand to the device.
    pub(crate) fn write_state(&self) -> WriteState {
        // Acquire: pairs with the Release in `change`: a thread that sees nothing in flight sees
        // the I/O done.
        WriteState::of(self.0.load(Ordering::Acquire))
    }

    /// The bytes are newer than the device's from now on. `Add` or `Keep`.
    pub(crate) fn transition_to_dirty(&self) -> Listing {
        self.change(|state| state | LISTED)
    }

    /// The bytes are as good as the device's, without a write-out: nobody wants them. `Remove` or
    /// `Keep`.
    pub(crate) fn transition_to_clean(&self) -> Listing {
        self.change(|state| state & !LISTED)
    }

    /// A write-out begins, if the bytes are dirty and none is in flight: then `Remove`, otherwise
    /// nothing has changed.
    pub(crate) fn transition_to_writing(&self) -> Listing {
        self.change(|state| if state == LISTED { IN_FLIGHT } else { state })
    }

    /// The write-out has ended well: clean, or dirty if the bytes have changed since. `Keep`.
    pub(crate) fn transition_to_written(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT)
    }

    /// The write-out has failed: the bytes are dirty as before. `Add` or `Keep`.
    pub(crate) fn transition_to_unwritten(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT | LISTED)
    }

    /// Changes the state in one step; if that ends a write-out, wakes the threads that wait for it.
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

    /// Blocks until no write-out is in flight.
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

    /// Each state, and what each transition makes of it and asks for.
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
