//! The flags of a folio: one 32-bit word of independent bits.
//!
//! Set and cleared by read-modify-writes, so that a bit guarded by the folio lock and one guarded
//! by the LRU lock can live in the same word. Who may change which is rules 3 and 5 of
//! `folio/mod.rs`. Waiting for write-back to end is a futex wait on the word.

use crate::sync::{AtomicU32, Ordering, futex};

/// One bit of the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Flag {
    /// The bytes are those of the file.
    Uptodate = 1 << 0,
    /// The bytes are newer than those on the device.
    Dirty = 1 << 1,
    /// The bytes are on their way to the device.
    Writeback = 1 << 2,
    /// Somebody sleeps until WRITEBACK is clear.
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
}

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct Flags(AtomicU32);

impl Flags {
    pub(crate) fn get(&self, flag: Flag) -> bool {
        // Acquire: pairs with the Release in `set`: who sees UPTODATE sees the bytes.
        self.0.load(Ordering::Acquire) & flag as u32 != 0
    }

    /// Sets the bit; tells whether it was clear.
    pub(crate) fn set(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_or(flag as u32, Ordering::Release) & flag as u32 == 0
    }

    /// Clears the bit; tells whether it was set.
    pub(crate) fn clear(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`: who sees WRITEBACK clear sees the I/O done.
        self.0.fetch_and(!(flag as u32), Ordering::Release) & flag as u32 != 0
    }

    /// A new life begins: no flags. Only the allocator of the folio calls this.
    pub(crate) fn reset(&self) {
        // Release: pairs with the Acquire in `get` and in `Mapping::peek`: whoever sees the flags
        // of this life sees that the folio of the last one has left its table.
        self.0.store(0, Ordering::Release);
    }

    /// Clears WRITEBACK and wakes who waits for it.
    pub(crate) fn end_writeback(&self) {
        let ended = Flag::Writeback as u32 | Flag::WritebackWaiters as u32;
        // Release: pairs with the Acquire in `get` and in `wait_for_writeback`.
        let before = self.0.fetch_and(!ended, Ordering::Release);
        if before & Flag::WritebackWaiters as u32 != 0 {
            futex::wake(&self.0, u32::MAX >> 1);
        }
    }

    /// Blocks until WRITEBACK is clear.
    pub(crate) fn wait_for_writeback(&self) {
        loop {
            // Acquire: pairs with the Release in `end_writeback`.
            let now = self.0.load(Ordering::Acquire);
            if now & Flag::Writeback as u32 == 0 {
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
