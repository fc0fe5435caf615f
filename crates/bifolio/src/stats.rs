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

/// Bytes of the smallest folio.
const FOLIO_BYTES_MIN: u64 = 4096;

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

/// A snapshot of a file ([`Cache::files`](crate::Cache::files)). The counts are those since its
/// first open, or since it was read anew.
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
    /// Lookups that found no folio, also of readahead, as in
    /// [`ReadStats::misses`](crate::ReadStats).
    pub misses: u64,
    /// Misses of pages that had been evicted, and left a shadow.
    pub refaults: u64,
    /// Folios evicted by reclaim or on request.
    pub evicted_folios: u64,
    /// Folios read ahead.
    pub readahead_folios: u64,
    /// Folios read ahead that were evicted before their first use.
    pub readahead_unused: u64,
    /// `true` for a closed file whose pages stay in memory
    /// ([`CacheBuilder::kept_files`](crate::CacheBuilder::kept_files)).
    pub is_kept: bool,
}

/// Counts of one file, which all threads share: of misses and evictions, so that a hit knows none.
#[derive(Debug, Default)]
pub(crate) struct FileCounts {
    pub(crate) misses: AtomicU64,
    pub(crate) refaults: AtomicU64,
    pub(crate) evicted_folios: AtomicU64,
    pub(crate) readahead_folios: AtomicU64,
    pub(crate) readahead_unused: AtomicU64,
}

impl FileCounts {
    /// Adds to a count; a load and no store if there is nothing to add.
    pub(crate) fn add(count: &AtomicU64, more: u64) {
        if more > 0 {
            // Relaxed: as in `Block`.
            count.fetch_add(more, Ordering::Relaxed);
        }
    }

    pub(crate) fn fill(&self, stats: &mut FileStats) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        stats.misses = load(&self.misses);
        stats.refaults = load(&self.refaults);
        stats.evicted_folios = load(&self.evicted_folios);
        stats.readahead_folios = load(&self.readahead_folios);
        stats.readahead_unused = load(&self.readahead_unused);
    }
}

macro_rules! counters {
    ($(
        $(#[doc = $group_doc:literal])+
        $group:ident: $type:ident {
            counts { $($(#[doc = $doc:literal])+ $variant:ident $field:ident,)* }
            transfers { $($(#[doc = $transfer_doc:literal])+ $transfer:ident,)* }
            levels { $($(#[doc = $level_doc:literal])+ $level:ident,)* }
        }
    )+) => {
        #[derive(Clone, Copy, Debug)]
        #[repr(usize)]
        pub(crate) enum Counter { $($($variant,)*)+ }

        const COUNTERS: usize = [$($(Counter::$variant,)*)+].len();

        $(
            $(#[doc = $group_doc])+
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[non_exhaustive]
            pub struct $type {
                $($(#[doc = $doc])+ pub $field: u64,)*
                $($(#[doc = $transfer_doc])+ pub $transfer: u64,)*
                $($(#[doc = $level_doc])+ pub $level: u64,)*
            }
        )+

        /// A snapshot of a cache: counts since it was built, and current levels, in groups.
        ///
        /// Counts only grow; [`Stats::since`] has those of an interval. Levels are the fields of
        /// [`MemoryStats`] that end in `_bytes`, and `throttle_ns_max`.
        ///
        /// ```
        /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
        /// # std::fs::write(&path, vec![7; 8192])?;
        /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
        /// # let file = cache.open(&path, &bifolio::OpenOptions::new())?;
        /// file.read_exact_at(&mut [0; 8], 0)?;
        /// let before = cache.stats();
        /// file.read_exact_at(&mut [0; 8], 8)?;
        /// let interval = cache.stats().since(&before);
        /// assert_eq!((interval.reads.misses, interval.hit_ratio()), (0, Some(1.0)));
        /// assert_eq!(interval.memory.bound_bytes, 4 << 20);
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[doc = $group_doc])+ pub $group: $type,)+
            /// Fallbacks in use for missing kernel features, one text each.
            pub fallbacks: Vec<String>,
            /// Devices of the open files.
            pub devices: Vec<DeviceStats>,
        }

        impl Stats {
            fn from_counts(counts: &[u64; COUNTERS]) -> Self {
                Self {
                    $($group: $type {
                        $($field: counts[Counter::$variant as usize],)*
                        ..$type::default()
                    },)+
                    ..Self::default()
                }
            }

            /// Returns the counts since `earlier`, an older snapshot of the same cache, beside the
            /// levels, fallbacks and devices of this one.
            pub fn since(&self, earlier: &Self) -> Self {
                let mut interval = self.clone();
                $(
                    $(interval.$group.$field =
                        self.$group.$field.saturating_sub(earlier.$group.$field);)*
                    $(interval.$group.$transfer =
                        self.$group.$transfer.saturating_sub(earlier.$group.$transfer);)*
                )+
                interval
            }

            /// Returns the levels by name, `group_field`, in the order of the fields.
            pub fn levels(&self) -> Vec<(&'static str, u64)> {
                [$($((
                    concat!(stringify!($group), "_", stringify!($level)),
                    self.$group.$level,
                ),)*)+].to_vec()
            }

            /// Returns the counts by name, `group_field`, in the order of the fields.
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                [$(
                    $((
                        concat!(stringify!($group), "_", stringify!($field)),
                        self.$group.$field,
                    ),)*
                    $((
                        concat!(stringify!($group), "_", stringify!($transfer)),
                        self.$group.$transfer,
                    ),)*
                )+].to_vec()
            }
        }
    };
}

counters! {
    /// Reads, pins and readahead.
    reads: ReadStats {
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
            /// Pins taken so far, including those that were released.
            Pin pins,
            /// Folios read ahead.
            Readahead readahead_folios,
            /// Folios read ahead that were evicted before their first use.
            ReadaheadUnused readahead_unused,
        }
        transfers {}
        levels {}
    }
    /// Writes and syncs, as callers made them.
    writes: WriteStats {
        counts {
            /// Bytes accepted by writes; beside them, `storage.written_bytes` reached the devices.
            WriteBytes bytes,
            /// Syncs that reached the device flush, their own or a shared one.
            Sync syncs,
            /// Syncs that shared the flush of another sync of the same file.
            SyncShared syncs_shared,
            /// Writes that waited for a write-out of their folio.
            WritebackWait writeback_waits,
            /// Calls of [`WriteGate::make_durable`](crate::WriteGate::make_durable), by syncs and
            /// in the background.
            GateAsk gate_asks,
            /// Writes that were throttled because too much was dirty.
            ThrottleWait throttle_waits,
            /// Total time that writes were throttled, nanoseconds.
            ThrottleNs throttle_ns,
        }
        transfers {}
        levels {
            /// Longest time that a write was throttled, nanoseconds.
            throttle_ns_max,
        }
    }
    /// Transfers to and from the devices and the swap.
    storage: StorageStats {
        counts {
            /// Bytes read from devices.
            ReadBytes read_bytes,
            /// Read requests sent to devices.
            ReadRequest read_requests,
            /// Bytes written to devices.
            WrittenBytes written_bytes,
            /// Write requests sent to devices; adjacent folios share one.
            WriteRequest write_requests,
            /// Folios written out.
            Writeback written_folios,
            /// Of these, folios written by the flusher.
            FlusherFolio flusher_folios,
            /// Failed write-outs; their folios stayed dirty.
            WritebackError write_errors,
            /// Device flushes made for syncs.
            DeviceFlush flushes,
            /// Pages of memory files written to the swap.
            SwapOut swapped_out_pages,
            /// Pages of memory files read back from the swap.
            SwapIn swapped_in_pages,
            /// Transfers made with plain system calls: single ones, or all without io_uring.
            PlainTransfer plain_transfers,
        }
        transfers {
            /// Calls of `io_uring_enter`; each submits and completes several transfers.
            ring_enters,
            /// Transfers made through io_uring.
            ring_transfers,
        }
        levels {}
    }
    /// The bound, what it is used for, and waits for memory.
    memory: MemoryStats {
        counts {
            /// Allocations that waited for frames that other calls used briefly.
            AllocationWait allocation_waits,
            /// Waits of 100 us or longer for reclaim: for frames, or for a page that is being
            /// evicted.
            ReclaimStall reclaim_stalls,
            /// Allocations that failed because everything was pinned or could not be written.
            AllocationFailure allocation_failures,
        }
        transfers {}
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
            /// Part of `used_bytes` that the program has reserved for itself
            /// ([`Cache::reserve`](crate::Cache::reserve)), bytes.
            reserved_bytes,
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
        }
    }
    /// Evictions, and what they cost later.
    evictions: EvictionStats {
        counts {
            /// Folios evicted by reclaim.
            PgSteal folios,
            /// Folios evicted on request ([`File::evict`](crate::File::evict)).
            EvictFolio requested_folios,
            /// Folios evicted because their chunk was needed or had to be released.
            PgEvacuate evacuated_folios,
            /// Folios in use that were moved to frames among others that stay.
            PgRelocate relocated_folios,
            /// Folios scanned by reclaim, at the tails of the old and the active list.
            PgScan scanned_folios,
            /// Folios moved from the old list to the active one, because they were used there.
            PgActivate activated_folios,
            /// Misses of pages that had been evicted and left a shadow.
            Refault refaults,
            /// Refaults of pages that were evicted from the old list too early; they become active
            /// at once.
            RefaultActivate refaults_early,
            /// Times the background thread was woken to reclaim.
            BackgroundReclaim background_reclaims,
        }
        transfers {}
        levels {}
    }
    /// Pages of mapped files.
    maps: MapStats {
        counts {
            /// Faults served: accesses to pages of maps that were not resident.
            Fault faults,
            /// Pages installed in regions.
            MapIn installed_pages,
            /// Pages unmapped from regions by reclaim.
            Unmap unmapped_pages,
            /// Calls to the kernel to unmap pages, each with a TLB flush of the other CPUs.
            UnmapFlush unmap_flushes,
            /// Pages that were stored to while they were being unmapped, and were kept.
            StoredLate stored_late_pages,
        }
        transfers {}
        levels {}
    }
}

impl Stats {
    /// Returns the share of pages that were found in memory, from 0 to 1, of all that were read or
    /// pinned; `None` if there were none. Loads through maps that hit are not counted.
    pub fn hit_ratio(&self) -> Option<f64> {
        let ReadStats { hits_optimistic, hits_pinned, hits_slow, misses, .. } = self.reads;
        let hits = hits_optimistic + hits_pinned + hits_slow;
        (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64)
    }

    /// Returns the time that a page spends in memory if it is not used again, in an interval of
    /// `elapsed` whose counts these are ([`Stats::since`]): a page whose uses are further apart is
    /// read each time, so the answer says if more memory would help. `None` if nothing was evicted.
    ///
    /// Pages wait for their eviction in the order in which they came. So it is the number of those
    /// that wait, divided by the rate at which they are evicted or found to be used again.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let before = cache.stats();
    /// // .. a minute later:
    /// let interval = cache.stats().since(&before);
    /// assert_eq!(interval.eviction_age(Duration::from_secs(60)), None); // nothing was evicted
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn eviction_age(&self, elapsed: std::time::Duration) -> Option<std::time::Duration> {
        let EvictionStats { folios, activated_folios, .. } = self.evictions;
        if folios == 0 {
            return None;
        }
        // The size of a folio, as far as the reads of the interval tell it.
        let ReadStats { misses, misses_without_read, .. } = self.reads;
        let filled_folios = misses.saturating_sub(misses_without_read).max(1);
        let folio_bytes = (self.storage.read_bytes / filled_folios).max(FOLIO_BYTES_MIN);
        let waiting_folios = self.memory.inactive_bytes as f64 / folio_bytes as f64;
        Some(elapsed.mul_f64(waiting_folios / (folios + activated_folios) as f64))
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

    /// Finds or assigns the block of the calling thread for this cache, and counts there; in the
    /// common block if the thread is ending.
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
        assert_eq!((stats.reads.misses, stats.storage.read_bytes), (12_000, 12_000 * 4096));
        assert_eq!(other.snapshot().reads.misses, 24_000);
        assert!(counters.blocks.lock().unwrap().all.len() <= 4, "blocks are used again");
    }

    #[test]
    fn a_thread_outlives_the_counters_it_used() {
        for _ in 0..100 {
            let counters = Counters::new();
            counters.add(Counter::Pin, 1);
            assert_eq!(counters.snapshot().reads.pins, 1);
        }
        ASSIGNED.with(|assigned| assert!(assigned.borrow().len() <= 2));
    }
}
