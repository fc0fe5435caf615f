//! The folio lock: a futex in the descriptor, four bytes, no allocation.
//!
//! Held by whoever fills, writes, truncates or evicts a folio, for as long as one I/O at the most.
//! Readers of an uptodate folio never take it. Waiters of a fill are waiters of this lock.
//!
//! ```text
//!  UNLOCKED --try/lock--> LOCKED --somebody waits--> CONTENDED
//!     ^--------unlock-------'                            |
//!     ^--------unlock, wake one--------------------------'
//! ```
//!
//! Lock order: folio locks of one file in order of their index; a folio lock before the LRU lock,
//! the dirty lock of its owner and the arena's lock. Reclaim only tries folio locks, so it may come
//! to one holding anything. A holder must have a reference, or the folio could die locked.

use super::descriptor::Folio;
use crate::sync::{AtomicU32, Ordering, futex};

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct FolioLock(AtomicU32);

impl FolioLock {
    fn try_acquire(&self) -> bool {
        // Acquire: pairs with the Release in `release`: we see what the last holder did.
        self.0.compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn acquire(&self) {
        if self.try_acquire() {
            return;
        }
        // Whoever slept takes the lock as CONTENDED: there may be others asleep.
        // Acquire: pairs with the Release in `release`.
        while self.0.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            futex::wait(&self.0, CONTENDED);
        }
    }

    /// As [`Self::acquire`], but looks whether it still `wants` the lock about every millisecond.
    /// Whether it has it.
    fn acquire_while(&self, wants: &dyn Fn() -> bool) -> bool {
        // Acquire: pairs with the Release in `release`. Who leaves has made it CONTENDED: at the
        // worst one wake too many.
        while self.0.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            if !wants() {
                return false;
            }
            futex::wait_for(&self.0, CONTENDED, 1);
        }
        true
    }

    pub(super) fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed) != UNLOCKED
    }

    fn release(&self) {
        // Release: pairs with the Acquire in `try_acquire` and `acquire`.
        if self.0.swap(UNLOCKED, Ordering::Release) == CONTENDED {
            futex::wake(&self.0, 1);
        }
    }
}

/// Proof that the caller holds the lock of a folio; unlocks on drop.
#[derive(Debug)]
pub(crate) struct LockedFolio<'a> {
    folio: &'a Folio,
}

impl<'a> LockedFolio<'a> {
    /// Blocks until the lock is ours. The caller has a reference that outlives the guard.
    pub(super) fn lock(folio: &'a Folio) -> Self {
        folio.lock.acquire();
        Self { folio }
    }

    /// As [`Self::lock`]; nothing if the lock is not wanted any more, which is asked now and then.
    pub(super) fn lock_while(folio: &'a Folio, wants: &dyn Fn() -> bool) -> Option<Self> {
        folio.lock.acquire_while(wants).then(|| Self { folio })
    }

    /// Takes the lock if it is free.
    pub(super) fn try_lock(folio: &'a Folio) -> Option<Self> {
        // Not `then_some`: a guard made in vain would unlock what somebody else has locked.
        folio.lock.try_acquire().then(|| Self { folio })
    }

    /// Takes over a lock that [`Self::leave_locked`] left, on whatever thread.
    pub(super) fn adopt(folio: &'a Folio) -> Self {
        debug_assert!(folio.lock.is_held(), "adopting a lock that nobody left");
        Self { folio }
    }

    /// Leaves the folio locked, for an I/O that ends on another thread.
    pub(crate) fn leave_locked(self) {
        std::mem::forget(self);
    }
}

impl std::ops::Deref for LockedFolio<'_> {
    type Target = Folio;

    fn deref(&self) -> &Folio {
        self.folio
    }
}

impl Drop for LockedFolio<'_> {
    fn drop(&mut self) {
        self.folio.lock.release();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_try_that_fails_leaves_the_lock_with_its_holder() {
        let folio = Folio::default();
        let held = LockedFolio::lock(&folio);
        assert!(LockedFolio::try_lock(&folio).is_none());
        assert!(LockedFolio::try_lock(&folio).is_none(), "the first try unlocked it");
        drop(held);
        assert!(LockedFolio::try_lock(&folio).is_some());
    }
}
