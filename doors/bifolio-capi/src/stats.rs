//! The counters and levels of a cache.
//!
//! # Safety
//! States that a struct has the layout that `Versioned` demands.
#![allow(unsafe_code)]

use crate::boundary::Versioned;
use bifolio::Cache;

/// Counters of a cache since it was built, and its memory now. Counts only grow; fields that end in
/// `_bytes` are current values, except the counts of traffic. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_stats {
    /// `sizeof(bifolio_stats)` before the call; after it, how many bytes of the struct are set.
    pub size: usize,
    /// The bound on memory.
    pub bound_bytes: u64,
    /// Memory charged against the bound: frames, descriptors and tables.
    pub used_bytes: u64,
    /// Part of `used_bytes` in frames: memory for pages.
    pub frame_bytes: u64,
    /// Part of `frame_bytes` that holds no page.
    pub free_bytes: u64,
    /// Part of `used_bytes` in descriptors and tables.
    pub metadata_bytes: u64,
    /// Dirty pages, including those being written out.
    pub dirty_bytes: u64,
    /// Pages of memory files that are only in memory.
    pub unswapped_bytes: u64,
    /// Swap slots in use.
    pub swap_bytes: u64,
    /// Folios on probation: on the fresh and the old list.
    pub inactive_bytes: u64,
    /// Folios on the active list.
    pub active_bytes: u64,
    /// Pages read without a lock or a reference.
    pub hits_optimistic: u64,
    /// Pages copied with a reference.
    pub hits_pinned: u64,
    /// Resident pages that could only be read or pinned under a lock.
    pub hits_slow: u64,
    /// Lookups that found no folio.
    pub misses: u64,
    /// Misses that needed no transfer.
    pub misses_without_read: u64,
    /// Misses of pages that were evicted before.
    pub workingset_refault: u64,
    /// Refaults of pages that were evicted from the old list too early; they become active at once.
    pub workingset_activate: u64,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Read requests sent to devices.
    pub read_requests: u64,
    /// Bytes written to devices.
    pub written_bytes: u64,
    /// Write requests sent to devices.
    pub write_requests: u64,
    /// Write-outs that failed; their pages stayed dirty.
    pub writeback_errors: u64,
    /// Bytes accepted by writes.
    pub write_bytes: u64,
    /// Syncs of files.
    pub syncs: u64,
    /// Syncs that shared the flush of another sync.
    pub syncs_shared: u64,
    /// Flushes of devices made for syncs.
    pub device_flushes: u64,
    /// Faults of maps served.
    pub faults: u64,
    /// Pins taken so far, including those that were released.
    pub pins: u64,
    /// Folios read ahead.
    pub readahead_folios: u64,
    /// Folios read ahead that were evicted before their first use.
    pub readahead_unused: u64,
    /// Pages of memory files written to the swap.
    pub swapped_out_pages: u64,
    /// Pages of memory files read back from the swap.
    pub swapped_in_pages: u64,
    /// Folios scanned by reclaim, at the tails of the old and the active list.
    pub pgscan: u64,
    /// Folios evicted by reclaim.
    pub pgsteal: u64,
    /// Allocations that found no frame and had to reclaim.
    pub direct_reclaims: u64,
    /// Times a thread waited 100 us or longer for reclaim.
    pub reclaim_stalls: u64,
    /// Allocations that failed because everything was pinned or could not be written.
    pub allocation_failures: u64,
    /// Writes that were throttled because too much was dirty.
    pub throttle_waits: u64,
    /// Total time that writes were throttled, nanoseconds.
    pub throttle_ns: u64,
    /// Longest time that a write was throttled, nanoseconds.
    pub throttle_ns_max: u64,
    /// Optimistic reads whose page changed during the copy, and that were repeated.
    pub optimistic_retries: u64,
    /// Folios written out.
    pub writeback: u64,
    /// Writes that waited for a write-out of their folio.
    pub writeback_waits: u64,
    /// Pages installed in regions.
    pub mapped_in_pages: u64,
    /// Pages unmapped from regions by reclaim.
    pub unmapped_pages: u64,
    /// Calls to the kernel to unmap pages, each with a TLB flush of the other CPUs.
    pub unmap_flushes: u64,
    /// Pages that were stored to while they were being unmapped, and were kept.
    pub stored_late_pages: u64,
    /// Folios moved from the old list to the active one, because they were used there.
    pub pgactivate: u64,
    /// Folios moved from the active list to the old one, because nothing else could be evicted.
    pub pgdeactivate: u64,
    /// Folios that reclaim found pinned or otherwise referenced.
    pub pgpinned: u64,
    /// Folios of memory files that were written to the swap in order to evict them.
    pub pageout: u64,
    /// Folios evicted because their chunk was needed for another folio size or had to be released.
    pub pgevacuate: u64,
    /// Folios in use that were moved to frames among others that stay.
    pub pgrelocate: u64,
    /// Times the background thread was woken to reclaim.
    pub background_reclaims: u64,
    /// Allocations that waited for frames that other calls used briefly (I/O, reads in progress).
    pub allocation_waits: u64,
    /// LRU batches moved to the lists because they were full.
    pub lru_batches: u64,
    /// Times all CPUs' LRU batches were drained to find folios to evict.
    pub lru_drains: u64,
    /// Rounds that a lookup waited for a folio that was frozen or just replaced.
    pub frozen_waits: u64,
    /// Folios evicted on advice.
    pub evict_folios: u64,
    /// Folios evicted on advice only after other CPUs' LRU batches had been drained.
    pub evict_second_pass_folios: u64,
    /// Folios kept despite advice: they extend beyond the range.
    pub evict_straddling: u64,
    /// Folios kept despite advice: another thread was evicting or removing them.
    pub evict_gone: u64,
    /// Folios kept despite advice: locked.
    pub evict_locked: u64,
    /// Folios kept despite advice: being written out.
    pub evict_writeback: u64,
    /// Folios kept despite advice: they exist only in memory.
    pub evict_private: u64,
    /// Folios kept despite advice: dirty.
    pub evict_dirty: u64,
    /// Folios kept despite advice: part of a map.
    pub evict_mapped: u64,
    /// Folios kept despite advice: clean and not mapped, but referenced.
    pub evict_referenced: u64,
    /// Drains of other CPUs' LRU batches requested by advice.
    pub evict_drains: u64,
    /// LRU batches drained for advice.
    pub evict_drained_cpus: u64,
    /// Flusher rounds that wrote something.
    pub flusher_rounds: u64,
    /// Folios written by the flusher.
    pub flusher_folios: u64,
    /// Calls of write gates to make their log durable, by syncs and in the background. Without
    /// syncs, many of them mean that reclaim and the flusher wait for the log.
    pub gate_asks: u64,
    /// Transfers made with plain system calls.
    pub plain_transfers: u64,
}

// SAFETY: `repr(C)`, begins with its size, integers only.
unsafe impl Versioned for bifolio_stats {
    const SIZE_MIN: usize = 328;
}

/// Returns the counters and levels of a cache.
pub(crate) fn stats_of(cache: &Cache) -> bifolio_stats {
    let stats = cache.stats();
    macro_rules! take {
        ($($field:ident)+) => {
            bifolio_stats { size: 0, $($field: stats.$field,)+ }
        };
    }
    take! {
        bound_bytes used_bytes frame_bytes free_bytes metadata_bytes dirty_bytes unswapped_bytes
        swap_bytes inactive_bytes active_bytes hits_optimistic hits_pinned hits_slow misses
        misses_without_read workingset_refault workingset_activate read_bytes read_requests
        written_bytes write_requests writeback_errors write_bytes syncs syncs_shared device_flushes
        faults pins readahead_folios readahead_unused swapped_out_pages swapped_in_pages pgscan
        pgsteal direct_reclaims reclaim_stalls allocation_failures throttle_waits throttle_ns
        throttle_ns_max optimistic_retries writeback writeback_waits mapped_in_pages
        unmapped_pages unmap_flushes stored_late_pages pgactivate pgdeactivate pgpinned
        pageout pgevacuate pgrelocate background_reclaims allocation_waits lru_batches lru_drains
        frozen_waits evict_folios evict_second_pass_folios evict_straddling evict_gone
        evict_locked evict_writeback evict_private evict_dirty evict_mapped evict_referenced
        evict_drains evict_drained_cpus flusher_rounds flusher_folios gate_asks plain_transfers
    }
}
