//! Counters: always on, one block per thread, summed when a snapshot is taken.
//!
//! A leaf open to all layers. A counter is incremented by a load and a store in a block that only
//! the calling thread writes, so a hit costs no locked instruction and no shared cache line. Blocks
//! of threads that ended keep their counts and are reused. All accesses are relaxed: a counter
//! orders nothing, and a snapshot is exact only while the threads are idle.
//!
//! # Safety
//! Dereferences the remembered address of a block that the calling thread holds.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A snapshot of one device: the files whose [identities](crate::backing::FileIdentity) have it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Number of the file system, or the number that a backing returned. `None` for a backing that
    /// is a device by itself.
    pub device: Option<u64>,
    /// Name of the file that was opened first on this device.
    pub first_file: String,
    /// Dirty pages of its files, including those being written out, bytes.
    pub dirty_bytes: u64,
    /// Current upper bound on `dirty_bytes`: three quarters of what other devices leave of
    /// [`dirty_max`](crate::CacheBuilder::dirty_max), bytes.
    pub dirty_bytes_max: u64,
    /// `true` if the device refused all writes of the last round.
    pub is_stuck: bool,
    /// Last failed write with its cause, file and position. It may be old if `is_stuck` is `false`.
    pub last_error: Option<String>,
}

/// A snapshot of an open file ([`Cache::files`](crate::Cache::files)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileStats {
    /// Path of the file, or the name of a memory file or a backing.
    pub file: String,
    /// Length, bytes.
    pub len_bytes: u64,
    /// Pages of the file in memory, bytes.
    pub resident_bytes: u64,
    /// Dirty pages of the file, without those being written out and without stores through maps
    /// that were not found yet, bytes.
    pub dirty_bytes: u64,
}

macro_rules! counters {
    (
        counts { $($(#[doc = $doc:literal])+ $variant:ident $field:ident,)+ }
        levels { $($(#[doc = $level_doc:literal])+ $level:ident,)+ }
    ) => {
        #[derive(Clone, Copy, Debug)]
        #[repr(usize)]
        pub(crate) enum Counter { $($variant,)+ }

        const COUNTERS: usize = [$(Counter::$variant,)+].len();

        /// A snapshot of a cache: counts since it was built, and current levels.
        ///
        /// Counts only grow. Fields that end in `_bytes` are levels, except `read_bytes`,
        /// `written_bytes` and `write_bytes`.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $field: u64,)+
            $($(#[doc = $level_doc])+ pub $level: u64,)+
            /// Calls of `io_uring_enter`; each submits and completes several transfers.
            pub ring_enters: u64,
            /// Transfers made through io_uring.
            pub ring_transfers: u64,
            /// Fallbacks in use for missing kernel features, one text each.
            pub fallbacks: Vec<String>,
            /// Devices of the open files.
            pub devices: Vec<DeviceStats>,
        }

        impl Stats {
            fn from_counts(counts: &[u64; COUNTERS]) -> Self {
                Self {
                    $($field: counts[Counter::$variant as usize],)+
                    ..Self::default()
                }
            }

            /// Returns the levels by name, in the order of the fields.
            pub fn levels(&self) -> Vec<(&'static str, u64)> {
                [$((stringify!($level), self.$level),)+].to_vec()
            }

            /// Returns the counts by name, in the order of the fields.
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                [$((stringify!($field), self.$field),)+].to_vec()
            }
        }
    };
}

counters! {
    counts {
        /// Pages read without a reference: copied, then validated.
        HitOptimistic hits_optimistic,
        /// Pages copied from a mappable file: with a reference, without the folio lock.
        HitPinned hits_pinned,
        /// Resident pages that could only be read or pinned under the folio lock.
        HitSlow hits_slow,
        /// Optimistic reads whose page changed during the copy, and that were repeated.
        OptimisticRetry optimistic_retries,
        /// Lookups that found no folio: filled from the device, or with zeros.
        Miss misses,
        /// Misses that needed no I/O: past the end of the storage, or completely overwritten.
        MissWithoutRead misses_without_read,
        /// Misses of pages that had been evicted and left a shadow.
        Refault workingset_refault,
        /// Refaults of pages that were evicted from the old list too early; they become active at
        /// once.
        RefaultActivate workingset_activate,
        /// Bytes read from devices.
        ReadBytes read_bytes,
        /// Read requests sent to devices.
        ReadRequest read_requests,
        /// Transfers made with plain system calls: single ones, or all without io_uring.
        PlainTransfer plain_transfers,
        /// Bytes written to devices.
        WrittenBytes written_bytes,
        /// Folios written out.
        Writeback writeback,
        /// Write requests sent to devices; adjacent folios share one.
        WriteRequest write_requests,
        /// Failed write-outs; their folios stayed dirty.
        WritebackError writeback_errors,
        /// Writes that waited for a write-out of their folio.
        WritebackWait writeback_waits,
        /// Faults served: accesses to pages of maps that were not resident.
        Fault faults,
        /// Pages installed in regions.
        MapIn mapped_in_pages,
        /// Pages unmapped from regions by reclaim.
        Unmap unmapped_pages,
        /// Calls to the kernel to unmap pages, each with a TLB flush of the other CPUs.
        UnmapFlush unmap_flushes,
        /// Pages that were stored to while they were being unmapped, and were kept.
        StoredLate stored_late_pages,
        /// Pages of memory files written to the swap.
        SwapOut swapped_out_pages,
        /// Pages of memory files read back from the swap.
        SwapIn swapped_in_pages,
        /// Bytes accepted by writes.
        WriteBytes write_bytes,
        /// Syncs that reached the device flush, their own or a shared one.
        Sync syncs,
        /// Device flushes made for syncs.
        DeviceFlush device_flushes,
        /// Syncs that shared the flush of another sync of the same file.
        SyncShared syncs_shared,
        /// Folios scanned by reclaim, at the tails of the old and the active list.
        PgScan pgscan,
        /// Folios evicted by reclaim.
        PgSteal pgsteal,
        /// Folios moved from the old list to the active one, because they were used there.
        PgActivate pgactivate,
        /// Folios moved from the active list to the old one, because nothing else could be evicted.
        PgDeactivate pgdeactivate,
        /// Folios that reclaim found pinned or otherwise referenced.
        PgPinned pgpinned,
        /// Folios of memory files that were written to the swap in order to evict them.
        PageOut pageout,
        /// Folios evicted because their chunk was needed or had to be released.
        PgEvacuate pgevacuate,
        /// Folios in use that were moved to frames among others that stay.
        PgRelocate pgrelocate,
        /// Allocations that found no frame and had to reclaim.
        DirectReclaim direct_reclaims,
        /// Times the background thread was woken to reclaim.
        BackgroundReclaim background_reclaims,
        /// Allocations that waited for frames that other calls used briefly.
        AllocationWait allocation_waits,
        /// Waits of 100 us or longer for reclaim: for frames, or for a page that is being evicted.
        ReclaimStall reclaim_stalls,
        /// Allocations that failed because everything was pinned or could not be written.
        AllocationFailure allocation_failures,
        /// LRU batches moved to the lists because they were full.
        LruBatch lru_batches,
        /// Times all CPUs' LRU batches were drained to find folios to evict.
        LruDrain lru_drains,
        /// Rounds that a lookup waited for a folio that was frozen or just replaced.
        FrozenWait frozen_waits,
        /// Folios evicted on advice.
        EvictFolio evict_folios,
        /// Folios evicted on advice only after other CPUs' LRU batches had been drained.
        EvictSecondPass evict_second_pass_folios,
        /// Folios kept despite advice: they extend beyond the range.
        EvictStraddling evict_straddling,
        /// Folios kept despite advice: another thread was evicting or removing them.
        EvictGone evict_gone,
        /// Folios kept despite advice: locked.
        EvictLocked evict_locked,
        /// Folios kept despite advice: being written out.
        EvictWriteback evict_writeback,
        /// Folios kept despite advice: they exist only in memory.
        EvictPrivate evict_private,
        /// Folios kept despite advice: dirty.
        EvictDirty evict_dirty,
        /// Folios kept despite advice: part of a map.
        EvictMapped evict_mapped,
        /// Folios kept despite advice: clean and not mapped, but referenced.
        EvictReferenced evict_referenced,
        /// Drains of other CPUs' LRU batches requested by advice.
        EvictDrain evict_drains,
        /// LRU batches drained for advice.
        EvictDrainCpu evict_drained_cpus,
        /// Pins taken so far, including those that were released.
        Pin pins,
        /// Folios read ahead.
        Readahead readahead_folios,
        /// Folios read ahead that were evicted before their first use.
        ReadaheadUnused readahead_unused,
        /// Flusher rounds that wrote something.
        FlusherRound flusher_rounds,
        /// Folios written by the flusher.
        FlusherFolio flusher_folios,
        /// Calls of [`WriteGate::make_durable`](crate::WriteGate::make_durable), by syncs and in
        /// the background.
        GateAsk gate_asks,
        /// Writes that were throttled because too much was dirty.
        ThrottleWait throttle_waits,
        /// Total time that writes were throttled, nanoseconds.
        ThrottleNs throttle_ns,
    }
    levels {
        /// The bound on memory, bytes.
        bound_bytes,
        /// Memory charged against the bound: frames, descriptors and tables, bytes.
        used_bytes,
        /// Part of `used_bytes` in frames: memory for pages, bytes.
        frame_bytes,
        /// Part of `frame_bytes` that holds no page, bytes.
        free_bytes,
        /// Part of `used_bytes` in descriptors and tables, bytes.
        metadata_bytes,
        /// Dirty pages, including those being written out, bytes.
        dirty_bytes,
        /// Pages of memory files that are only in memory, including those being written to the
        /// swap, bytes.
        unswapped_bytes,
        /// Swap slots in use, bytes.
        swap_bytes,
        /// Folios on probation: on the fresh and the old list, bytes.
        inactive_bytes,
        /// Folios on the active list, bytes.
        active_bytes,
        /// Longest time that a write was throttled, nanoseconds.
        throttle_ns_max,
    }
}

/// The counters of one thread, written only by that thread.
#[derive(Debug)]
#[repr(align(128))]
struct Block {
    counts: [AtomicU64; COUNTERS],
}

impl Block {
    fn new() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

#[derive(Debug, Default)]
struct Blocks {
    all: Vec<Arc<Block>>,
    /// Blocks whose thread has ended.
    idle: Vec<Arc<Block>>,
}

#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) id: u64,
    blocks: Arc<Mutex<Blocks>>,
    /// Block of threads whose thread-local storage is already destroyed; shared, so it is updated
    /// atomically.
    late: Block,
}

/// The block that the calling thread used last, and the id of its counters.
#[derive(Clone, Copy)]
struct Current {
    id: u64,
    block: *const Block,
}

/// The block of the calling thread, which a hit checks for together with its other conditions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadBlock {
    block: *const Block,
    /// Set if the thread has a block; otherwise [`Counters::add`] assigns one.
    pub(crate) is_known: bool,
}

impl ThreadBlock {
    /// Returns the calling thread's block of the counters with this id, if it used those last.
    #[inline(always)]
    pub(crate) fn of(id: u64) -> Self {
        let current = CURRENT.get();
        Self { block: current.block, is_known: current.id == id }
    }

    #[inline(always)]
    pub(crate) fn add(self, counter: Counter, count: u64) {
        if !self.is_known {
            return;
        }
        // SAFETY: `block` came from an `Arc` in this thread's `ASSIGNED` (it is not `Send`), which
        // drops it only after clearing `CURRENT`, or after its counters are gone and their id with
        // them.
        let block = unsafe { &*self.block };
        let word = &block.counts[counter as usize];
        word.store(word.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }
}

/// A block assigned to a thread; returned when the thread ends.
struct AssignedBlock {
    id: u64,
    block: Arc<Block>,
    home: std::sync::Weak<Mutex<Blocks>>,
}

impl Drop for AssignedBlock {
    fn drop(&mut self) {
        let _ = CURRENT.try_with(|current| current.set(Current::NONE));
        if let Some(home) = self.home.upgrade() {
            let mut blocks = home.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.idle.push(Arc::clone(&self.block));
        }
    }
}

impl Current {
    const NONE: Self = Self { id: 0, block: std::ptr::null() };
}

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(Current::NONE) };
    static ASSIGNED: RefCell<Vec<AssignedBlock>> = const { RefCell::new(Vec::new()) };
}

impl Counters {
    pub(crate) fn new() -> Self {
        // Ids are never reused, so a remembered block is never taken for another cache's.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { id, blocks: Arc::default(), late: Block::new() }
    }

    #[inline(always)]
    pub(crate) fn add(&self, counter: Counter, count: u64) {
        let block = ThreadBlock::of(self.id);
        if block.is_known {
            block.add(counter, count);
        } else {
            self.add_cold(counter, count);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_cold(&self, counter: Counter, count: u64) {
        let block = ASSIGNED.try_with(|assigned| {
            let mut assigned = assigned.borrow_mut();
            let known = assigned.iter().position(|assigned| assigned.id == self.id);
            let at = known.unwrap_or_else(|| {
                // Drop the blocks of caches that no longer exist.
                assigned.retain(|assigned| assigned.home.strong_count() > 0);
                assigned.push(self.assign_block());
                assigned.len() - 1
            });
            Arc::as_ptr(&assigned[at].block)
        });
        match block {
            Ok(block) => {
                let _ = CURRENT.try_with(|current| current.set(Current { id: self.id, block }));
                ThreadBlock { block, is_known: true }.add(counter, count);
            }
            Err(_) => {
                self.late.counts[counter as usize].fetch_add(count, Ordering::Relaxed);
            }
        }
    }

    fn assign_block(&self) -> AssignedBlock {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let block = blocks.idle.pop().unwrap_or_else(|| {
            let block = Arc::new(Block::new());
            blocks.all.push(Arc::clone(&block));
            block
        });
        AssignedBlock { id: self.id, block, home: Arc::downgrade(&self.blocks) }
    }

    pub(crate) fn snapshot(&self) -> Stats {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counts = [0_u64; COUNTERS];
        for block in blocks.all.iter().map(Arc::as_ref).chain([&self.late]) {
            for (sum, count) in counts.iter_mut().zip(&block.counts) {
                *sum += count.load(Ordering::Relaxed);
            }
        }
        Stats::from_counts(&counts)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_of_ended_threads_are_kept() {
        let counters = Counters::new();
        let other = Counters::new();
        for _ in 0..3 {
            std::thread::scope(|scope| {
                let count = || {
                    for _ in 0..1000 {
                        counters.add(Counter::Miss, 1);
                        other.add(Counter::Miss, 2);
                        counters.add(Counter::ReadBytes, 4096);
                    }
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(count)).collect();
                // A scope waits for the closures, not for the threads to return their blocks.
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
        }
        let stats = counters.snapshot();
        assert_eq!((stats.misses, stats.read_bytes), (12_000, 12_000 * 4096));
        assert_eq!(other.snapshot().misses, 24_000);
        assert!(counters.blocks.lock().unwrap().all.len() <= 4, "blocks are used again");
    }

    #[test]
    fn a_thread_outlives_the_counters_it_used() {
        for _ in 0..100 {
            let counters = Counters::new();
            counters.add(Counter::Pin, 1);
            assert_eq!(counters.snapshot().pins, 1);
        }
        ASSIGNED.with(|assigned| assert!(assigned.borrow().len() <= 2));
    }
}
