//! The flags of a folio, with its write state: the relation of its bytes to those on the device.

use crate::sync::{AtomicU32, Ordering, blocking, waiters};
use std::task::Waker;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Flag {
    /// The bytes are those of the file.
    Uptodate = 1 << 0,
    /// A thread sleeps until the write-out ends. Bits 1 and 2 are the [`WriteState`].
    WritebackWaiters = 1 << 3,
    OnLru = 1 << 4,
    /// The folio is on ACTIVE, isolated from it, or about to be added to it.
    Active = 1 << 5,
    /// The folio is on FRESH, or isolated from it.
    Fresh = 1 << 6,
    /// The folio was read ahead and not used since.
    Readahead = 1 << 7,
    /// Reserved by `allocate` and never written: reads return zeros, whatever its frame holds.
    Allocated = 1 << 8,
    /// Never on an LRU list: the folio cannot be reclaimed.
    Unlisted = 1 << 9,
    /// The folio was filled while its pages were being cleared: zeros, and later writes.
    Punched = 1 << 10,
}

/// The class of a folio stands in the four bits above the flags.
const CLASS_SHIFT: u32 = 12;
const CLASS_MASK: u32 = (CLASSES_MAX as u32 - 1) << CLASS_SHIFT;
/// Maximum number of classes, with class 0.
pub(crate) const CLASSES_MAX: usize = 16;

/// Number of a class of files (`memory/classes.rs`); 0 is that of files without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClassId(u8);

impl ClassId {
    pub(crate) const DEFAULT: Self = Self(0);

    pub(crate) fn new(number: usize) -> Self {
        debug_assert!(number < CLASSES_MAX, "class {number}");
        Self(number as u8)
    }

    pub(crate) fn number(self) -> usize {
        self.0.into()
    }

    pub(crate) fn is_default(self) -> bool {
        self == Self::DEFAULT
    }
}

/// Mask of the write state: on the dirty list, and on the way to the device.
const STATE: u32 = LISTED | IN_FLIGHT;
const LISTED: u32 = 1 << 1;
const IN_FLIGHT: u32 = 1 << 2;

/// Relation between the bytes of a folio and those on the device.
///
/// A transition is one read-modify-write, named after the resulting state. It returns how the
/// caller, which holds the lock of the dirty list (WRITEBACK-1), must update that list:
///
/// ```text
///              to_dirty: Add             to_writing: Remove
///   Clean -----------------------> Dirty --------------------> Writing -- to_written --> Clean
///     ^------ to_clean: Remove ------'^                         |   |
///                                     |---- to_unwritten: Add --'   | to_dirty: Add
///                                     |                             v
///                                     '-- to_written, to_unwritten: Keep -- Redirtied
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WriteState {
    /// The device needs no write: it has the bytes, or they were discarded.
    Clean = 0,
    /// The folio is newer than the device, and on the dirty list of its file.
    Dirty = LISTED,
    Writing = IN_FLIGHT,
    /// The folio was changed during its write-out, and is on the dirty list again.
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

    pub(crate) fn is_dirty(self) -> bool {
        self as u32 & LISTED != 0
    }

    pub(crate) fn is_writing(self) -> bool {
        self as u32 & IN_FLIGHT != 0
    }
}

/// The change that the caller must make to the dirty list before it unlocks the list.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    Add,
    Remove,
    Keep,
}

/// The flags of a folio, independent bits, and the [`WriteState`]. All changes are
/// read-modify-writes, so bits guarded by different locks (rules 3 and 5 of `page/mod.rs`) can
/// share the word. A thread that waits for write-back to end sleeps on it, or leaves a waker.
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

    pub(crate) fn clear(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_and(!(flag as u32), Ordering::Release) & flag as u32 != 0
    }

    /// Sets or clears the bit; writes nothing if it has that value. No other thread changes it.
    pub(crate) fn assign(&self, flag: Flag, value: bool) {
        if self.get(flag) != value {
            let _ = if value { self.set(flag) } else { self.clear(flag) };
        }
    }

    /// Returns the class of the folio. It is set before the folio is in a table or on a list, and
    /// changes only while the folio is frozen.
    pub(crate) fn class(&self) -> ClassId {
        // Relaxed: whatever leads to the folio, a lock of the lists or its table, orders it.
        ClassId(((self.0.load(Ordering::Relaxed) & CLASS_MASK) >> CLASS_SHIFT) as u8)
    }

    /// Sets the class of a folio that has none: a new one, or one that replaces another.
    pub(crate) fn set_class(&self, class: ClassId) {
        debug_assert!(self.class().is_default(), "the class is set once");
        if !class.is_default() {
            self.0.fetch_or(u32::from(class.0) << CLASS_SHIFT, Ordering::Relaxed);
        }
    }

    /// Takes the class from a folio, which is frozen.
    pub(crate) fn take_class(&self) -> ClassId {
        let class = self.class();
        if !class.is_default() {
            self.0.fetch_and(!CLASS_MASK, Ordering::Relaxed);
        }
        class
    }

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

    pub(crate) fn transition_to_dirty(&self) -> Listing {
        self.change(|state| state | LISTED)
    }

    /// Discards the difference to the device without a write-out.
    pub(crate) fn transition_to_clean(&self) -> Listing {
        self.change(|state| state & !LISTED)
    }

    /// Begins a write-out if the folio is dirty and no write-out is in flight; otherwise changes
    /// nothing.
    pub(crate) fn transition_to_writing(&self) -> Listing {
        self.change(|state| if state == LISTED { IN_FLIGHT } else { state })
    }

    pub(crate) fn transition_to_written(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT)
    }

    pub(crate) fn transition_to_unwritten(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT | LISTED)
    }

    /// Changes the state in one step. If that ends a write-out, wakes the threads that wait for it.
    fn change(&self, next: impl Fn(u32) -> u32) -> Listing {
        let after_of = |before: u32| {
            let after = before & !STATE | next(before & STATE);
            let is_over = after & IN_FLIGHT == 0;
            if is_over { after & !(Flag::WritebackWaiters as u32) } else { after }
        };
        // AcqRel: its Release pairs with the Acquire in `write_state` and in `wait_for_writeback`:
        // the I/O is done, or the folio set up. Its Acquire pairs with the Release in
        // `is_written_or_wake`: this thread finds the waker. On failure, Relaxed: only the value
        // counts.
        let exchange = (Ordering::AcqRel, Ordering::Relaxed);
        let changed = |before| Some(after_of(before));
        let (Ok(before) | Err(before)) = self.0.fetch_update(exchange.0, exchange.1, changed);
        let after = after_of(before);
        if before & !after & Flag::WritebackWaiters as u32 != 0 {
            waiters::wake_sleepers(&self.0, u32::MAX >> 1);
            waiters::call_wakers(&self.0);
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
            let relaxed = (Ordering::Relaxed, Ordering::Relaxed);
            if self.0.compare_exchange(now, waiting, relaxed.0, relaxed.1).is_ok() {
                waiters::sleep(&self.0, waiting);
            }
        }
    }

    /// Returns `true` if no write-out is in flight. Otherwise `waker` is called when the one in
    /// flight has ended, or before.
    pub(crate) fn is_written_or_wake(&self, waker: Waker) -> bool {
        let data = waker.data();
        waiters::register(&self.0, waker);
        let add_waiter =
            |now: u32| (now & IN_FLIGHT != 0).then_some(now | Flag::WritebackWaiters as u32);
        // Release: pairs with the Acquire in `change`, which then finds the waker. On failure,
        // Acquire: pairs with the Release in `change`, as in `wait_for_writeback`.
        let exchange = (Ordering::Release, Ordering::Acquire);
        let is_written = self.0.fetch_update(exchange.0, exchange.1, add_waiter).is_err();
        if is_written {
            self.forget_waker(data);
        }
        is_written
    }

    /// Forgets the wakers with data at `data` that wait for the end of a write-out.
    pub(crate) fn forget_waker(&self, data: *const ()) {
        waiters::forget(&self.0, data);
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
