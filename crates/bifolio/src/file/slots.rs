//! Slots: who makes, shares and ends what there is one of for each key, with one short lock.
//!
//! Used by `registry.rs` for files; it knows none, so that a model run can follow the protocol.
//! The lock is held for a look at the slots and never while storage, another slot or another lock
//! is waited for: a thread that makes or releases something takes its slot and lets go of the lock,
//! and whoever wants that very thing waits for the slot.
//!
//! ```text
//!   none --first open--> making: length asked for, tables made ----------> open: handles, or kept
//!     ^                                                                     |   ^
//!     |                                            no handle, made durable  |   | not durable
//!     '--- free --- releasing: pages dropped, descriptors closed  <---------'---'
//! ```
//!
//! The slot stays open, without a handle, while the last close makes the file durable: an open that
//! comes meanwhile shares it. What cannot be made durable is *kept*: nothing is lost, the next open
//! of it and `Cache::close` try again.
//!
//! PROTOCOL, as two columns (model-checked in `loom_slots`):
//!
//! ```text
//!  LAST CLOSE of a file                            OPEN of it, another LAST CLOSE
//!  L1 make it durable; the slot is open            shares the inode: L2 finds its handle, or it
//!                                                    has been closed and L3 finds what it wrote
//!  L2 lock; a handle? then leave it to that.
//!     Take the slot; unlock                        waits for the slot until L5
//!  L3 look for stores through maps, drop clean
//!     pages, wait for reclaim; not
//!     durable? back into the slot: L1 again,
//!     or, if L1 has failed, kept
//!  L4 wait until nobody else has the inode
//!     (the flusher, a look at all files); free
//!     it: its descriptors are closed
//!  L5 lock; free the slot; unlock; wake            opens the file anew
//! ```

use crate::sync::{Condvar, Mutex};
use std::collections::HashMap;
use std::hash::Hash;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Slots<K, T> {
    slots: Mutex<HashMap<K, Slot<T>>>,
    /// Signalled when a slot is not somebody's any more.
    changed: Condvar,
}

#[derive(Debug)]
enum Slot<T> {
    /// Somebody makes it.
    Making,
    /// Somebody releases it, or finds that it must be kept.
    Releasing,
    Open(T),
}

impl<T> Slot<T> {
    fn open(&mut self) -> Option<&mut T> {
        match self {
            Self::Open(open) => Some(open),
            Self::Making | Self::Releasing => None,
        }
    }
}

/// The result of a look at a slot.
#[derive(Debug)]
pub(crate) enum Found<'s, K: Copy + Eq + Hash, T, R> {
    /// It is open.
    Open(R),
    /// The slot is the caller's, who makes what stands there.
    Vacant(Busy<'s, K, T>),
}

/// A slot that is the owner's alone; free when this is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Busy<'s, K: Copy + Eq + Hash, T> {
    slots: &'s Slots<K, T>,
    key: K,
}

/// How something ends that stands in a slot: the steps of a last close.
pub(crate) trait Retire<T> {
    /// The part that is shared while it is made durable.
    type Shared;
    /// Why it is not durable.
    type Failure;

    /// Shares it, if it has no handle.
    fn share_unused(&self, open: &T) -> Option<Self::Shared>;
    /// L1.
    fn make_durable(&self, shared: Self::Shared) -> Result<(), Self::Failure>;
    /// L3: lets go of what it can; whether it is durable, and can go itself.
    fn may_go(&self, open: &T) -> bool;
    /// L4.
    fn free(&self, open: T);
    /// It stays without a handle, because it could not be made durable.
    fn keep(&self, open: &mut T);
}

impl<K, T> Default for Slots<K, T> {
    fn default() -> Self {
        Self { slots: Mutex::default(), changed: Condvar::new() }
    }
}

impl<K: Copy + Eq + Hash, T> Slots<K, T> {
    /// Looks for what has this key, and waits, for it and nothing else, while somebody makes or
    /// releases it. `look` is called with the lock held.
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

    /// Puts something where nobody else can look yet.
    pub(crate) fn insert_new(&self, key: K, open: T) {
        let before = self.slots.lock().insert(key, Slot::Open(open));
        debug_assert!(before.is_none(), "a key that is not new");
    }

    /// Looks at what has this key, if that is open now.
    pub(crate) fn look<R>(&self, key: K, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.slots.lock().get_mut(&key)?.open().map(look)
    }

    /// As [`Self::look`], but waits while it is being released: it may be kept.
    pub(crate) fn settled<R>(&self, key: K, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut slots = self.slots.lock();
        while let Some(Slot::Releasing) = slots.get(&key) {
            self.changed.wait(&mut slots);
        }
        slots.get_mut(&key)?.open().map(look)
    }

    /// L2, if it is as wanted. Waits while somebody releases it: it may be kept, and what it was
    /// kept for be done by now.
    pub(crate) fn take_if(
        &self,
        key: K,
        is_wanted: impl FnOnce(&T) -> bool,
    ) -> Option<(Busy<'_, K, T>, T)> {
        let mut slots = self.slots.lock();
        while let Some(Slot::Releasing) = slots.get(&key) {
            self.changed.wait(&mut slots);
        }
        let slot = slots.get_mut(&key)?;
        if !slot.open().is_some_and(|open| is_wanted(open)) {
            return None;
        }
        let Slot::Open(open) = std::mem::replace(slot, Slot::Releasing) else { return None };
        Some((Busy { slots: self, key }, open))
    }

    /// Ends what has this key, if it has no handle: L1 to L5. An error says why it is kept. If L1
    /// `has_failed` just now, that counts for the first round's.
    pub(crate) fn retire<E: Retire<T>>(
        &self,
        key: K,
        ends: &E,
        mut has_failed: bool,
    ) -> Result<(), E::Failure> {
        // A further round follows only if another thread opened, wrote and closed it meanwhile, or
        // if the kernel answered in L1 and not in L3.
        while let Some(shared) = self.settled(key, |open| ends.share_unused(open)).flatten() {
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

    /// The keys of all slots, as they are now.
    pub(crate) fn keys(&self) -> Vec<K> {
        self.slots.lock().keys().copied().collect()
    }

    /// Leaves everything where it is, for ever.
    #[cfg(not(all(test, loom)))]
    pub(crate) fn forget_all(&mut self) {
        let slots = std::mem::take(self.slots.get_mut());
        slots.into_values().for_each(std::mem::forget);
    }
}

impl<K: Copy + Eq + Hash, T> Busy<'_, K, T> {
    pub(crate) fn key(&self) -> K {
        self.key
    }

    /// Opens the slot.
    pub(crate) fn fill(self, open: T) {
        self.settle(Some(open));
        std::mem::forget(self);
    }

    fn settle(&self, open: Option<T>) {
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
        self.settle(None);
    }
}
