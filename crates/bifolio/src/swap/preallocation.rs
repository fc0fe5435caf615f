//! Allocates storage for the swap file ahead of writes.
//!
//! A write past the end of a file, or into a hole, makes the file system allocate blocks. On ext4
//! such a write holds the inode's lock exclusively, so no thread can read the file meanwhile: a
//! random miss may wait 300 us for it. So storage is allocated for 64 MiB at a time, before the
//! slots are written.
//!
//! Storage is allocated at the beginning of a reclaim round, when the swapper thread has no
//! transfer in flight. The file system waits until all transfers of the file have ended, and on
//! some kernels (6.6 and later) an io_uring transfer ends only when the thread that submitted it
//! enters the kernel.

use super::Swap;
use crate::io::{self, DirectBacking, DirectStatus, FallocateMode};
use crate::sync::{AtomicU32, Ordering};

/// Slots whose storage is allocated together: 64 MiB.
const STEP_SLOTS: u32 = 16_384;
/// Slots after the next one to be allocated that must have storage: as many as one round evicts at
/// most.
const AHEAD_SLOTS: u32 = 8192;

/// The storage allocated so far.
#[derive(Debug, Default)]
pub(super) struct Preallocation {
    /// Slots below this one have storage, or its allocation was refused.
    end: AtomicU32,
}

impl Preallocation {
    /// Allocates storage for the slots from `next()` on, up to `limit`. `next` is called only if
    /// slots without storage remain. One caller at a time. A refusal is only logged: a later write
    /// to these slots returns the error.
    pub(super) fn reach(
        &self,
        backing: &dyn DirectBacking,
        next: impl FnOnce() -> u32,
        limit: u32,
    ) {
        // Relaxed: callers serialize; without allocated storage a write is only slower.
        let end = self.end.load(Ordering::Relaxed);
        if limit <= end {
            return;
        }
        let next = next();
        if next.saturating_add(AHEAD_SLOTS) <= end {
            return;
        }
        let new_end = next.max(end).saturating_add(STEP_SLOTS).min(limit);
        let bytes = Swap::position_bytes(end)..Swap::position_bytes(new_end);
        // The page cache allocates when it writes out; a tmpfs would use the memory now.
        let is_buffered = matches!(backing.direct(), DirectStatus::Buffered { .. });
        if !is_buffered && let Err(error) = io::fallocate(backing, FallocateMode::Allocate, bytes) {
            log::info!("{error}; the swap is written without it");
        }
        self.end.store(new_end, Ordering::Relaxed);
    }

    /// Forgets all storage: the file was truncated to length 0.
    pub(super) fn forget(&self) {
        self.end.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Backing;
    use crate::io::{IoBuf, IoBufMut};
    use std::io::{Error, ErrorKind, Result};
    use std::ops::Range;

    /// A backing that records each allocation and refuses it.
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

        fn len_bytes(&self) -> Result<u64> {
            unreachable!()
        }

        fn set_len(&self, _: u64) -> Result<()> {
            unreachable!()
        }

        fn describe(&self) -> String {
            "refusing".into()
        }

        fn as_direct(&self) -> Option<&dyn DirectBacking> {
            Some(self)
        }
    }

    impl DirectBacking for Refusing {
        fn fallocate(&self, _: FallocateMode, bytes: Range<u64>) -> Result<()> {
            self.0.lock().unwrap().push(bytes);
            Err(Error::from(ErrorKind::StorageFull))
        }
    }

    #[test]
    fn storage_is_allocated_once_and_within_the_capacity() {
        let (backing, preallocation) = (Refusing::default(), Preallocation::default());
        let (few, all) = (600, 3 * STEP_SLOTS - 5);
        let still_ahead = few + STEP_SLOTS - AHEAD_SLOTS;
        preallocation.reach(&backing, || 1, few);
        for next in [1, 9, still_ahead, still_ahead + 1, 2 * STEP_SLOTS, all, 1] {
            preallocation.reach(&backing, || next, all);
        }
        preallocation.reach(&backing, || unreachable!("all slots have storage"), all);
        preallocation.forget();
        preallocation.reach(&backing, || 3, few);
        let (one, two) = (few + STEP_SLOTS, few + 2 * STEP_SLOTS);
        let slots = [0..few, few..one, one..two, two..all, 0..few];
        let bytes =
            |slots: Range<u32>| Swap::position_bytes(slots.start)..Swap::position_bytes(slots.end);
        assert_eq!(*backing.0.lock().unwrap(), slots.map(bytes));
    }
}
