//! How much of the swap file has storage.
//!
//! A write behind the end of a file, or into a hole, has the file system look for room, and on ext4
//! nobody reads the file while such a write is on its way: it has the inode's lock for itself. Of
//! the misses of a cache of 256 MiB, in random order, one in 250 waited 300 us for that. So the
//! file gets its storage a stretch at a time, before anybody writes there.
//!
//! Asked for at the beginning of a round of reclaim, when its thread has nothing in flight: the
//! file system waits until all transfers of the file have ended, and there are kernels (6.6 and
//! later) in which one of io_uring's ends only when the thread that made it takes notice.

use super::Swap;
use crate::io::{self, Backing};
use crate::sync::{AtomicU32, Ordering};

/// Slots that get their storage together: 64 MiB.
const STRETCH_SLOTS: u32 = 16_384;
/// So many slots ahead of the next one to be handed out have storage: as many as leave in a
/// round, at the most.
const AHEAD_SLOTS: u32 = 8192;

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Stretches {
    /// Slots below this one have storage, or were refused it.
    end: AtomicU32,
}

impl Stretches {
    /// Sees to it that the slots from `next()` on have storage; there are none from `limit` on.
    /// `next` is asked if there is any left to set aside. One caller at a time. A refusal is not
    /// told: whoever writes there will learn of it.
    pub(super) fn reach(&self, backing: &dyn Backing, next: impl FnOnce() -> u32, limit: u32) {
        // Relaxed: the callers take turns; where nothing was set aside a write is slower, no more.
        let end = self.end.load(Ordering::Relaxed);
        if limit <= end {
            return;
        }
        let next = next();
        if next.saturating_add(AHEAD_SLOTS) <= end {
            return;
        }
        let new_end = next.max(end).saturating_add(STRETCH_SLOTS).min(limit);
        let bytes = Swap::position_bytes(end)..Swap::position_bytes(new_end);
        if let Err(error) = io::allocate(backing, bytes) {
            log::info!("{}: no storage is set aside: {error}", backing.describe());
        }
        self.end.store(new_end, Ordering::Relaxed);
    }

    /// The file was cut to length 0.
    pub(super) fn forget(&self) {
        self.end.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{IoBuf, IoBufMut};
    use std::io::{Error, ErrorKind, Result};
    use std::ops::Range;

    /// Notes what is set aside, and refuses it.
    #[derive(Debug, Default)]
    struct Refusing(std::sync::Mutex<Vec<Range<u64>>>);

    impl Backing for Refusing {
        fn read_at(&self, _: &mut IoBufMut<'_>, _: u64) -> Result<usize> {
            unreachable!()
        }

        fn write_at(&self, _: &IoBuf<'_>, _: u64) -> Result<usize> {
            unreachable!()
        }

        fn sync_data(&self) -> Result<()> {
            unreachable!()
        }

        fn sync_all(&self) -> Result<()> {
            unreachable!()
        }

        fn len_bytes(&self) -> Result<u64> {
            unreachable!()
        }

        fn set_len(&self, _: u64) -> Result<()> {
            unreachable!()
        }

        fn allocate(&self, bytes: Range<u64>) -> Result<()> {
            self.0.lock().unwrap().push(bytes);
            Err(Error::from(ErrorKind::StorageFull))
        }

        fn describe(&self) -> String {
            "refusing".into()
        }
    }

    #[test]
    fn stretches_are_asked_for_once_and_within_the_capacity() {
        let (backing, stretches) = (Refusing::default(), Stretches::default());
        let (few, all) = (600, 3 * STRETCH_SLOTS - 5);
        let still_ahead = few + STRETCH_SLOTS - AHEAD_SLOTS;
        stretches.reach(&backing, || 1, few);
        for next in [1, 9, still_ahead, still_ahead + 1, 2 * STRETCH_SLOTS, all, 1] {
            stretches.reach(&backing, || next, all);
        }
        stretches.reach(&backing, || unreachable!("nothing is left"), all);
        stretches.forget();
        stretches.reach(&backing, || 3, few);
        let (one, two) = (few + STRETCH_SLOTS, few + 2 * STRETCH_SLOTS);
        let slots = [0..few, few..one, one..two, two..all, 0..few];
        let bytes =
            |slots: Range<u32>| Swap::position_bytes(slots.start)..Swap::position_bytes(slots.end);
        assert_eq!(*backing.0.lock().unwrap(), slots.map(bytes));
    }
}
