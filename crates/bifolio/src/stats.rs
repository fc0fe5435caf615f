//! Counters: always on, one block a thread, added up when somebody asks.
//!
//! A leaf open to all layers. A counter is bumped by a load and a store in a block that only the
//! calling thread writes, so a hit costs no locked instruction and no shared line. Blocks of
//! threads that ended keep their counts and serve the next thread. All accesses are relaxed: a
//! counter orders nothing, and a snapshot is exact only when the threads it counts stand still.
//!
//! Where to look for a thread's block is remembered per thread for the cache it used last; a
//! thread that alternates between caches pays a short search at each change.
//!
//! # Safety
//! Follows the remembered address of a block that the calling thread holds.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A snapshot of one device, which files of one
/// [`Backing::device`](crate::Backing::device) share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// The number of its file system, or the backings' own; none for a device of its own.
    pub device: Option<u64>,
    /// The name of the file that was first opened on it.
    pub first_file: String,
    /// Pages of its files that are newer in memory, or on their way there, bytes.
    pub dirty_bytes: u64,
    /// How much that may be now: three quarters of what other devices leave of
    /// [`dirty_bytes_max`](crate::CacheBuilder::dirty_bytes_max), bytes.
    pub dirty_bytes_max: u64,
    /// Whether it took nothing when it was last asked.
    pub is_stuck: bool,
    /// The last refusal, and its cause, with file and position; of the past if it is not stuck.
    pub last_error: Option<String>,
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $(#[cfg($only:meta)])? $variant:ident $field:ident,)+) => {
        /// Everything that is counted.
        #[derive(Clone, Copy, Debug)]
        #[repr(usize)]
        pub(crate) enum Counter { $($(#[cfg($only)])? $variant,)+ }

        const COUNTERS: usize = [$($(#[cfg($only)])? Counter::$variant,)+].len();

        /// One snapshot of a cache: its work since it was built, and its holdings now.
        ///
        /// Counts only grow. Fields that end in `_bytes`, and `*_now`, are levels.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $doc])+ $(#[cfg($only)])? pub $field: u64,)+
            /// The bound on memory, bytes.
            pub bound_bytes: u64,
            /// Charged against the bound: frames, descriptors and tables, bytes.
            pub used_bytes: u64,
            /// Of those, frames: memory that holds or may hold pages, bytes.
            pub frame_bytes: u64,
            /// Of those, frames that hold no page, bytes.
            pub free_bytes: u64,
            /// Of `used_bytes`, what is not frames: descriptors and tables, bytes.
            pub metadata_bytes: u64,
            /// Pages that are newer in memory than on their device, or on their way there, bytes.
            pub dirty_bytes: u64,
            /// Pages of memory files that are nowhere but in memory, or on their way to the
            /// swap, bytes.
            pub unswapped_bytes: u64,
            /// Places in the swap that are in use, bytes.
            pub swap_bytes: u64,
            /// Folios on the inactive list, bytes.
            pub inactive_bytes: u64,
            /// Folios on the active list, bytes.
            pub active_bytes: u64,
            /// Calls of `io_uring_enter`: each submits and collects several transfers.
            pub ring_enters: u64,
            /// Transfers made through io_uring.
            pub ring_transfers: u64,
            /// Transfers made with plain calls: alone, or where there is no io_uring.
            pub plain_transfers: u64,
            /// The longest a write was held because too much was dirty, nanoseconds.
            pub throttle_ns_max: u64,
            /// The fallbacks in use for features the system lacks, one name each.
            pub fallbacks: Vec<String>,
            /// The devices that open files stand on.
            pub devices: Vec<DeviceStats>,
        }

        impl Stats {
            fn from_counts(counts: &[u64; COUNTERS]) -> Self {
                Self {
                    $($(#[cfg($only)])? $field: counts[Counter::$variant as usize],)+
                    ..Self::default()
                }
            }

            /// The counts by name, in the order of the documentation.
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                [$($(#[cfg($only)])? (stringify!($field), self.$field),)+].to_vec()
            }
        }
    };
}

counters! {
    /// Pages read without a reference: copied, and found unchanged afterwards.
    HitOptimistic hits_optimistic,
    /// Pages copied with a reference and without the folio lock: to a descriptor, or out of a file
    /// that can be mapped.
    HitPinned hits_pinned,
    /// Pages that were resident but could only be read or pinned under the folio lock.
    HitSlow hits_slow,
    /// Optimistic reads that found their page changed meanwhile and tried again.
    OptimisticRetry optimistic_retries,
    /// Folios looked for and not found: filled from the device, or with zeros.
    Miss misses,
    /// Misses that needed no I/O: behind the end of what the device has, or overwritten whole.
    MissWithoutRead misses_without_read,
    /// Misses of pages that were evicted before and left a shadow.
    Refault workingset_refault,
    /// Refaults near enough to go to the active list at once.
    RefaultActivate workingset_activate,
    /// Bytes read from devices.
    ReadBytes read_bytes,
    /// Read requests made of devices.
    ReadRequest read_requests,
    /// Bytes written to devices.
    WrittenBytes written_bytes,
    /// Folios written out.
    Writeback writeback,
    /// Write requests made of devices: neighbours leave in one.
    WriteRequest write_requests,
    /// Write-outs that failed; their folios stayed dirty.
    WritebackError writeback_errors,
    /// Writes that waited for a write-out of their folio to end.
    WritebackWait writeback_waits,
    /// Faults served: somebody touched a page of a map that was not there.
    Fault faults,
    /// Pages put in their places in regions.
    MapIn mapped_in_pages,
    /// Pages taken from their places in regions by reclaim.
    Unmap unmapped_pages,
    /// Times the kernel was asked to unmap, each with a flush of the other CPUs' translations.
    UnmapFlush unmap_flushes,
    /// Pages that were stored to while they were being unmapped: found in time, and kept.
    StoredLate stored_late_pages,
    /// Pages of memory files written to the swap.
    SwapOut swapped_out_pages,
    /// Pages of memory files read back from the swap.
    SwapIn swapped_in_pages,
    /// Runs of small folios of memory files that became one large folio.
    Collapse collapses,
    /// Bytes accepted by writes.
    WriteBytes write_bytes,
    /// Syncs of files that came to the flush of their device: by one of their own, or by sharing.
    Sync syncs,
    /// Flushes of devices that were made for syncs.
    DeviceFlush device_flushes,
    /// Syncs that shared the flush of another sync of their file.
    SyncShared syncs_shared,
    /// Folios looked at by reclaim on the inactive list.
    PgScan pgscan,
    /// Folios evicted by reclaim.
    PgSteal pgsteal,
    /// Folios moved from the inactive list to the active one.
    PgActivate pgactivate,
    /// Folios moved from the active list to the inactive one.
    PgDeactivate pgdeactivate,
    /// Folios reclaim found pinned or otherwise referenced.
    PgPinned pgpinned,
    /// Folios an allocation had to write out itself, and wait for.
    PageOut pageout,
    /// Folios evicted because their chunk was wanted for another folio size, or back.
    PgEvacuate pgevacuate,
    /// Folios in use that were moved to frames among others that stay.
    PgRelocate pgrelocate,
    /// Allocations that found no frame and had to reclaim.
    DirectReclaim direct_reclaims,
    /// Times the background thread was woken to reclaim.
    BackgroundReclaim background_reclaims,
    /// Allocations that waited for frames others hold for a moment (I/O, reads in progress).
    AllocationWait allocation_waits,
    /// Times a thread waited 100 us or longer for reclaim: for frames, or for a page that leaves.
    ReclaimStall reclaim_stalls,
    /// Allocations that failed because everything was pinned, or could not be written.
    AllocationFailure allocation_failures,
    /// LRU batches moved to the lists because they were full.
    LruBatch lru_batches,
    /// Times all CPUs' LRU batches were drained to find folios to evict.
    LruDrain lru_drains,
    /// Rounds a lookup waited for a folio that was frozen or just replaced.
    FrozenWait frozen_waits,
    /// Folios evicted on advice.
    AdviseEvict advise_evicted,
    /// Of those, folios that went only after other CPUs' LRU batches had been drained for them.
    AdviseSecondPass advise_second_pass_evicted,
    /// Folios that stayed against advice: they reached beyond the range.
    AdviseStraddling advise_straddling,
    /// Folios that stayed against advice: somebody else was evicting or removing them.
    AdviseGone advise_gone,
    /// Folios that stayed against advice: locked.
    AdviseLocked advise_locked,
    /// Folios that stayed against advice: on their way to the device.
    AdviseWriteback advise_writeback,
    /// Folios that stayed against advice: memory is the only place they have.
    AdvisePrivate advise_private,
    /// Folios that stayed against advice: dirty.
    AdviseDirty advise_dirty,
    /// Folios that stayed against advice: part of a map.
    AdviseMapped advise_mapped,
    /// Folios that stayed against advice: clean and not mapped, but referenced.
    AdviseReferenced advise_referenced,
    /// Times advice asked for a drain of other CPUs' LRU batches.
    AdviseDrain advise_drains,
    /// LRU batches drained for advice.
    AdviseDrainCpu advise_drained_cpus,
    /// Pins taken.
    Pin pins,
    /// Folios read ahead of need.
    Readahead readahead_folios,
    /// Of those, how many were evicted before anybody used them.
    ReadaheadUnused readahead_unused,
    /// Rounds in which the flusher wrote something.
    FlusherRound flusher_rounds,
    /// Folios the flusher wrote.
    FlusherFolio flusher_folios,
    /// Writes that were held because too much was dirty.
    ThrottleWait throttle_waits,
    /// How long they were held, all together, nanoseconds.
    ThrottleNs throttle_ns,
    /// References taken by reads; counted for benchmarks only.
    #[cfg(feature = "ablation")]
    ReferenceTaken references_taken,
    /// Entries of the table loaded by reads of 512 bytes and more; counted for benchmarks only.
    #[cfg(feature = "ablation")]
    EntryLoaded entries_loaded,
}

/// A thread's block: only that thread writes it.
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

/// The counters of one cache.
#[derive(Debug)]
pub(crate) struct Counters {
    id: u64,
    blocks: Arc<Mutex<Blocks>>,
    /// For threads whose own storage is gone already; shared, so added to atomically.
    late: Block,
}

/// The block the calling thread used last, and the id of its counters.
#[derive(Clone, Copy)]
struct Current {
    id: u64,
    block: *const Block,
}

/// The block of the calling thread: asked for first, added to later, so that a hit can judge
/// whether there is one together with everything else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadBlock {
    block: *const Block,
    is_known: bool,
}

impl ThreadBlock {
    /// The calling thread's block of the counters with this id, if it used those last.
    #[inline(always)]
    pub(crate) fn of(id: u64) -> Self {
        let current = CURRENT.get();
        Self { block: current.block, is_known: current.id == id }
    }

    /// Whether the thread has a block; if not, [`Counters::add`] gives it one.
    #[inline(always)]
    pub(crate) fn is_known(self) -> bool {
        self.is_known
    }

    /// Adds to a counter; nothing if there is no block.
    #[inline(always)]
    pub(crate) fn add(self, counter: Counter, count: u64) {
        if !self.is_known {
            return;
        }
        // SAFETY: `block` came from an `Arc` in this thread's `LENT` (it is not `Send`), which
        // drops it only after clearing `CURRENT`, or after its counters are gone and their id with
        // them.
        let block = unsafe { &*self.block };
        let word = &block.counts[counter as usize];
        word.store(word.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }
}

/// A block lent to a thread; goes back when the thread ends.
struct Lent {
    id: u64,
    block: Arc<Block>,
    home: std::sync::Weak<Mutex<Blocks>>,
}

impl Drop for Lent {
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
    static LENT: RefCell<Vec<Lent>> = const { RefCell::new(Vec::new()) };
}

impl Counters {
    /// Counters that stand at zero.
    pub(crate) fn new() -> Self {
        // Ids are never reused, so a remembered block is never taken for another cache's.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self { id, blocks: Arc::default(), late: Block::new() }
    }

    /// Adds `count` to a counter.
    #[inline(always)]
    pub(crate) fn add(&self, counter: Counter, count: u64) {
        let block = ThreadBlock::of(self.id);
        if block.is_known() {
            block.add(counter, count);
        } else {
            self.add_cold(counter, count);
        }
    }

    /// Counts what a read took to find its pages, where benchmarks ask for it; else nothing.
    #[inline(always)]
    pub(crate) fn note_lookups(&self, references: u64, entries: u64) {
        #[cfg(feature = "ablation")]
        {
            self.add(Counter::ReferenceTaken, references);
            self.add(Counter::EntryLoaded, entries);
        }
        #[cfg(not(feature = "ablation"))]
        let _ = (references, entries);
    }

    /// The counters that [`ThreadBlock::of`] takes.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    #[cold]
    #[inline(never)]
    fn add_cold(&self, counter: Counter, count: u64) {
        let block = LENT.try_with(|lent| {
            let mut lent = lent.borrow_mut();
            let known = lent.iter().position(|lent| lent.id == self.id);
            let at = known.unwrap_or_else(|| {
                // A good moment to drop what belongs to caches that are gone.
                lent.retain(|lent| lent.home.strong_count() > 0);
                lent.push(self.lend());
                lent.len() - 1
            });
            Arc::as_ptr(&lent[at].block)
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

    fn lend(&self) -> Lent {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let block = blocks.idle.pop().unwrap_or_else(|| {
            let block = Arc::new(Block::new());
            blocks.all.push(Arc::clone(&block));
            block
        });
        Lent { id: self.id, block, home: Arc::downgrade(&self.blocks) }
    }

    /// Adds up all blocks.
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
    fn counts_of_all_threads_add_up_also_after_they_ended() {
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
                // A scope waits for what they do, and not for them to give their blocks back.
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
        LENT.with(|lent| assert!(lent.borrow().len() <= 2));
    }
}
