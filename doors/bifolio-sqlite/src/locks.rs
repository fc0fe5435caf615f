//! Locks among the connections of this process: the five states of a database, and the eight slots
//! of the index of its log.
//!
//! The rules are those of SQLite's own VFS. [`Shared`](crate::shared::Shared) calls this under its
//! lock, and the index of a database that [`share`](crate::share) has calls [`SlotLocks`]; nothing
//! here blocks. A connection that is refused gets `SQLITE_BUSY`, and SQLite calls the
//! busy handler of the application.

use crate::sqlite::{LOCK_EXCLUSIVE, LOCK_NONE, LOCK_PENDING, LOCK_RESERVED, LOCK_SHARED};
use std::ffi::c_int;

/// Slots of the index of a log.
const SLOTS: usize = 8;

/// Refusal of a lock that another connection holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Busy;

/// Locks of a database.
///
/// Any number of connections hold `SHARED`; one of them may hold `RESERVED`, beside which others
/// come in, or `PENDING`, beside which none does; one alone holds `EXCLUSIVE`.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    /// Connections that hold at least `SHARED`.
    holders: usize,
    /// Highest level that a connection holds.
    highest: c_int,
}

impl Locks {
    /// Raises the level `own` of a connection to `wanted`. A connection that is refused `EXCLUSIVE`
    /// for the sake of readers keeps `PENDING`.
    pub(crate) fn lock(&mut self, own: &mut c_int, wanted: c_int) -> Result<(), Busy> {
        if *own >= wanted {
            return Ok(());
        }
        let is_highest_elsewhere = *own != self.highest;
        if is_highest_elsewhere && (self.highest >= LOCK_PENDING || wanted > LOCK_SHARED) {
            return Err(Busy);
        }
        if *own == LOCK_NONE {
            self.holders += 1;
        }
        let has_readers = wanted == LOCK_EXCLUSIVE && self.holders > 1;
        *own = if has_readers { LOCK_PENDING } else { wanted };
        self.highest = self.highest.max(*own);
        if has_readers { Err(Busy) } else { Ok(()) }
    }

    /// Lowers the level `own` of a connection to `wanted`: `SHARED` or `NONE`.
    pub(crate) fn unlock(&mut self, own: &mut c_int, wanted: c_int) {
        if *own <= wanted {
            return;
        }
        if *own > LOCK_SHARED {
            self.highest = LOCK_SHARED;
        }
        if wanted == LOCK_NONE {
            self.holders -= 1;
            if self.holders == 0 {
                self.highest = LOCK_NONE;
            }
        }
        *own = wanted;
    }

    /// Returns `true` if a connection holds a lock.
    pub(crate) fn is_held(&self) -> bool {
        self.holders > 0
    }

    /// Returns `true` if a connection holds `RESERVED` or more.
    pub(crate) fn is_reserved(&self) -> bool {
        self.highest >= LOCK_RESERVED
    }
}

/// Slots that a connection holds, as bits.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldSlots {
    shared: u8,
    exclusive: u8,
}

/// Locks of the index of a log.
#[derive(Debug, Default)]
pub(crate) struct SlotLocks {
    /// Shared holders of each slot; -1 if one connection holds it exclusively.
    holders: [i32; SLOTS],
}

impl SlotLocks {
    /// Locks one slot shared.
    pub(crate) fn lock_shared(&mut self, own: &mut HeldSlots, slot: usize) -> Result<(), Busy> {
        if own.shared & 1 << slot != 0 {
            return Ok(());
        }
        if self.holders[slot] < 0 {
            return Err(Busy);
        }
        self.holders[slot] += 1;
        own.shared |= 1 << slot;
        Ok(())
    }

    /// Locks `count` slots exclusively, or none.
    pub(crate) fn lock_exclusive(
        &mut self,
        own: &mut HeldSlots,
        first: usize,
        count: usize,
    ) -> Result<(), Busy> {
        let slots = first..first + count;
        let is_taken = |slot: usize| own.exclusive & 1 << slot == 0 && self.holders[slot] != 0;
        if slots.clone().any(is_taken) {
            return Err(Busy);
        }
        for slot in slots {
            self.holders[slot] = -1;
            own.exclusive |= 1 << slot;
        }
        Ok(())
    }

    /// Releases what the connection holds of `count` slots.
    pub(crate) fn unlock(&mut self, own: &mut HeldSlots, first: usize, count: usize) {
        for slot in first..first + count {
            if own.exclusive & 1 << slot != 0 {
                self.holders[slot] = 0;
            } else if own.shared & 1 << slot != 0 {
                self.holders[slot] -= 1;
            }
            own.exclusive &= !(1 << slot);
            own.shared &= !(1 << slot);
        }
    }

    /// Returns `true` if no connection holds a slot.
    pub(crate) fn is_free(&self, slot: usize) -> bool {
        self.holders[slot] == 0
    }

    /// Releases everything that the connection holds.
    pub(crate) fn unlock_all(&mut self, own: &mut HeldSlots) {
        self.unlock(own, 0, SLOTS);
    }

    /// Returns `true` if `first..first + count` are slots.
    pub(crate) fn has(first: usize, count: usize) -> bool {
        count > 0 && first.checked_add(count).is_some_and(|end| end <= SLOTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [c_int; 4] = [LOCK_NONE, LOCK_SHARED, LOCK_RESERVED, LOCK_EXCLUSIVE];

    /// Three connections take every sequence of six steps: the states stay those of SQLite.
    #[test]
    fn no_sequence_of_locks_lets_a_writer_in_beside_a_reader() {
        let steps: Vec<(usize, c_int)> =
            (0..3).flat_map(|who| NAMES.map(|level| (who, level))).collect();
        for number in 0..steps.len().pow(5) {
            let (mut locks, mut own, mut rest) = (Locks::default(), [LOCK_NONE; 3], number);
            for _ in 0..5 {
                let (who, level) = steps[rest % steps.len()];
                rest /= steps.len();
                if level > own[who] {
                    // SQLite takes SHARED first.
                    let first = if own[who] == LOCK_NONE { LOCK_SHARED } else { level };
                    let before = own[who];
                    let result = locks.lock(&mut own[who], first);
                    assert!(result.is_ok() == (own[who] == first), "{own:?}");
                    assert!(own[who] >= before);
                } else if level <= LOCK_SHARED {
                    locks.unlock(&mut own[who], level);
                }
                check(&locks, own);
            }
        }
    }

    fn check(locks: &Locks, own: [c_int; 3]) {
        let count = |level| own.iter().filter(|own| **own >= level).count();
        assert!(count(LOCK_RESERVED) <= 1, "{own:?}");
        assert!(count(LOCK_EXCLUSIVE) == 0 || count(LOCK_SHARED) == 1, "{own:?}");
        assert_eq!(locks.holders, count(LOCK_SHARED), "{own:?}");
        assert_eq!(locks.highest, *own.iter().max().unwrap(), "{own:?}");
    }

    #[test]
    fn a_writer_that_waits_keeps_new_readers_out() {
        let (mut locks, mut reader, mut writer, mut late) = (Locks::default(), 0, 0, 0);
        locks.lock(&mut reader, LOCK_SHARED).unwrap();
        locks.lock(&mut writer, LOCK_SHARED).unwrap();
        locks.lock(&mut writer, LOCK_RESERVED).unwrap();
        locks.lock(&mut late, LOCK_SHARED).unwrap();
        locks.unlock(&mut late, LOCK_NONE);
        assert_eq!(locks.lock(&mut writer, LOCK_EXCLUSIVE), Err(Busy));
        assert_eq!(writer, LOCK_PENDING);
        assert_eq!(locks.lock(&mut late, LOCK_SHARED), Err(Busy));
        locks.unlock(&mut reader, LOCK_NONE);
        assert_eq!(locks.lock(&mut writer, LOCK_EXCLUSIVE), Ok(()));
        assert_eq!(locks.lock(&mut late, LOCK_SHARED), Err(Busy));
        locks.unlock(&mut writer, LOCK_SHARED);
        assert_eq!(locks.lock(&mut late, LOCK_SHARED), Ok(()));
    }

    #[test]
    fn slots_are_shared_or_exclusive() {
        let mut locks = SlotLocks::default();
        let (mut a, mut b) = (HeldSlots::default(), HeldSlots::default());
        locks.lock_shared(&mut a, 3).unwrap();
        locks.lock_shared(&mut a, 3).unwrap();
        locks.lock_shared(&mut b, 3).unwrap();
        assert_eq!(locks.lock_exclusive(&mut b, 3, 1), Err(Busy));
        locks.unlock(&mut a, 3, 1);
        locks.unlock(&mut a, 3, 1);
        assert_eq!(locks.lock_exclusive(&mut a, 2, 6), Err(Busy));
        assert_eq!(locks.lock_shared(&mut a, 4), Ok(()), "a refused range locks nothing");
        locks.unlock_all(&mut a);
        locks.unlock_all(&mut b);
        assert_eq!(locks.lock_exclusive(&mut a, 3, 5), Ok(()));
        assert_eq!(locks.lock_shared(&mut b, 7), Err(Busy));
        locks.unlock(&mut b, 0, 8);
        assert_eq!(locks.lock_shared(&mut b, 7), Err(Busy), "only the holder unlocks");
        locks.unlock_all(&mut a);
        assert_eq!(locks.lock_exclusive(&mut b, 0, 8), Ok(()));
        assert_eq!(locks.holders, [-1; 8]);
        assert!(SlotLocks::has(7, 1) && !SlotLocks::has(7, 2) && !SlotLocks::has(1, usize::MAX));
    }
}
