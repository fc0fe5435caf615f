//! Slots: creation, sharing and release of one object per key, such as an open file.
//!
//! The lock is held only to inspect or change the slots, never while a thread waits for storage,
//! another slot or another lock. A thread that creates or releases an object takes its slot and
//! releases the lock; threads that need the same object wait for the slot.
//!
//! ```text
//!   none --first open--> making: query the length, create tables --------> open: handles, or kept
//!     ^                                                                     |   ^
//!     |                                              no handle, is durable  |   | not durable
//!     '--- free --- releasing: pages dropped, descriptors closed  <---------'---'
//! ```
//!
//! A file that cannot be made durable is *kept*: nothing is lost, and the next open of it and
//! `Cache::close` try again.
//!
//! PROTOCOL CLOSE, as two columns (model-checked in `loom_slots`):
//!
//! ```text
//!  LAST CLOSE of a file                            OPEN of it, another LAST CLOSE
//!  L1 make it durable; the slot is open            shares the inode: L2 finds its handle, or it
//!                                                    has been closed and L3 finds what it wrote
//!  L2 lock; has it a handle? then stop: the
//!     close of that handle starts at L1.
//!     Take the slot; unlock                        waits for the slot until L5
//!  L3 wait for visitors; look for stores through
//!     maps, drop clean pages, wait for reclaim; not
//!     durable? back into the slot: L1 again,
//!     or, if L1 has failed, kept
//!  L4 wait until no other thread references the
//!     inode (the flusher, a walk over all
//!     files); free it: closes its descriptors
//!     (an inode whose pages may stay is not
//!     freed, and its pages not dropped in L3)
//!  L5 lock; free the slot; unlock; wake            opens the file anew
//! ```

use crate::sync::{Condvar, Mutex};
use std::collections::HashMap;
use std::hash::Hash;

#[derive(Debug)]
pub(crate) struct OpenSlots<K, T> {
    slots: Mutex<HashMap<K, Slot<T>>>,
    /// Signalled when a slot is no longer taken.
    changed: Condvar,
}

/// State of a slot. A key without a slot has no object.
#[derive(Debug)]
enum Slot<T> {
    Making,
    /// Without a handle, the object is being made durable, or kept.
    Open(T),
    Releasing,
}

impl<T> Slot<T> {
    fn open(&mut self) -> Option<&mut T> {
        match self {
            Self::Open(open) => Some(open),
            Self::Making | Self::Releasing => None,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Found<'s, K: Copy + Eq + Hash, T, R> {
    Open(R),
    /// The slot is taken by the caller, which creates the object.
    Vacant(Busy<'s, K, T>),
}

/// Slot taken by its owner; becomes free on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct Busy<'s, K: Copy + Eq + Hash, T> {
    slots: &'s OpenSlots<K, T>,
    pub(crate) key: K,
}

/// Steps of a last close, implemented for the objects in the slots.
pub(crate) trait Retire<T> {
    type Shared;
    type Failure;

    fn share_unused(&self, open: &T) -> Option<Self::Shared>;
    /// L1: makes the object durable.
    fn make_durable(&self, shared: Self::Shared) -> Result<(), Self::Failure>;
    /// L3: drops the clean parts. Returns `true` if the object is durable and can be freed.
    fn may_go(&self, open: &T) -> bool;
    /// L4: frees the object.
    fn free(&self, open: T);
    fn keep(&self, open: &mut T);
}

impl<K, T> Default for OpenSlots<K, T> {
    fn default() -> Self {
        Self { slots: Mutex::default(), changed: Condvar::new() }
    }
}

impl<K: Copy + Eq + Hash, T> OpenSlots<K, T> {
    /// Looks up the object with this key. Waits while another thread creates or releases it, but
    /// not for other objects. Calls `look` with the lock held.
    pub(crate) fn find<R>(&self, key: K, look: impl FnOnce(&mut T) -> R) -> Found<'_, K, T, R> {
        let mut slots = self.slots.lock();
        loop {
            match slots.get_mut(&key) {
                Some(Slot::Open(open)) => return Found::Open(look(open)),
                Some(Slot::Making | Slot::Releasing) => self.changed.wait(&mut slots),
                None => {
                    slots.insert(key, Slot::Making);
                    return Found::Vacant(Busy { slots: self, key });
                }
            }
        }
    }

    pub(crate) fn insert_new(&self, key: K, open: T) {
        let before = self.slots.lock().insert(key, Slot::Open(open));
        debug_assert!(before.is_none(), "the key is not new");
    }

    /// Calls `look` for the object with this key if its slot is open now.
    pub(crate) fn look<R>(&self, key: K, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.slots.lock().get_mut(&key)?.open().map(look)
    }

    /// Calls `look` like [`Self::look`], but waits while the object is being released, because it
    /// may be kept.
    pub(crate) fn look_after_release<R>(
        &self,
        key: K,
        look: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let mut slots = self.slots.lock();
        while let Some(Slot::Releasing) = slots.get(&key) {
            self.changed.wait(&mut slots);
        }
        slots.get_mut(&key)?.open().map(look)
    }

    /// L2, if `is_wanted` returns `true` for the object. Waits while another thread releases the
    /// object: it may be kept, and the reason for keeping it may be gone by now.
    pub(crate) fn take_if(
        &self,
        key: K,
        is_wanted: impl FnOnce(&T) -> bool,
    ) -> Option<(Busy<'_, K, T>, T)> {
        let mut slots = self.slots.lock();
        while let Some(Slot::Releasing) = slots.get(&key) {
            self.changed.wait(&mut slots);
        }
        let is_wanted = |slot: &&mut Slot<T>| matches!(slot, Slot::Open(open) if is_wanted(open));
        let slot = slots.get_mut(&key).filter(is_wanted)?;
        let Slot::Open(open) = std::mem::replace(slot, Slot::Releasing) else { return None };
        Some((Busy { slots: self, key }, open))
    }

    /// Releases the object with this key if it has no handle: steps L1 to L5. An error tells why it
    /// is kept. If L1 `has_failed` just now, that counts as the first round.
    pub(crate) fn retire<E: Retire<T>>(
        &self,
        key: K,
        ends: &E,
        mut has_failed: bool,
    ) -> Result<(), E::Failure> {
        // Another round follows only if a thread has opened, written and closed the object since,
        // or if the kernel answered in L1 and not in L3.
        while let Some(shared) =
            self.look_after_release(key, |open| ends.share_unused(open)).flatten()
        {
            let failure = if has_failed {
                drop(shared);
                None
            } else {
                ends.make_durable(shared).err()
            };
            let is_kept = std::mem::take(&mut has_failed) || failure.is_some();
            let is_unused = |open: &T| ends.share_unused(open).is_some();
            let Some((busy, mut open)) = self.take_if(key, is_unused) else { break };
            if ends.may_go(&open) {
                ends.free(open);
                drop(busy);
                break;
            }
            if is_kept {
                ends.keep(&mut open);
            }
            busy.fill(open);
            if is_kept {
                return failure.map_or(Ok(()), Err);
            }
        }
        Ok(())
    }

    pub(crate) fn keys(&self) -> Vec<K> {
        self.slots.lock().keys().copied().collect()
    }

    #[cfg(not(all(test, loom)))]
    pub(crate) fn forget_all(&mut self) {
        let slots = std::mem::take(self.slots.get_mut());
        slots.into_values().for_each(std::mem::forget);
    }
}

impl<K: Copy + Eq + Hash, T> Busy<'_, K, T> {
    pub(crate) fn fill(self, open: T) {
        self.open_or_free(Some(open));
        std::mem::forget(self);
    }

    fn open_or_free(&self, open: Option<T>) {
        let mut slots = self.slots.slots.lock();
        match open {
            Some(open) => slots.insert(self.key, Slot::Open(open)),
            None => slots.remove(&self.key),
        };
        drop(slots);
        self.slots.changed.notify_all();
    }
}

impl<K: Copy + Eq + Hash, T> Drop for Busy<'_, K, T> {
    fn drop(&mut self) {
        self.open_or_free(None);
    }
}
