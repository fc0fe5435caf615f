//! The counters and levels of a cache.
//!
//! # Safety
//! States that a struct has the layout that `Versioned` demands.
#![allow(unsafe_code)]

use crate::boundary::Versioned;
use bifolio::Cache;

/// Counters of a cache since it was built, and its memory now, in the groups of the library:
/// `reads_`, `writes_`, `storage_`, `memory_`, `evictions_`, `maps_`. Counts only grow; fields of
/// `memory_` that end in `_bytes`, and `writes_throttle_ns_max`, are current values. Later versions
/// append fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_stats {
    /// `sizeof(bifolio_stats)` before the call; after it, how many bytes of the struct are set.
    pub size: usize,
    /// Pages read without a reference: copied, then validated.
    pub reads_hits_optimistic: u64,
    /// Pages copied from a mappable file: with a reference, without the folio lock.
    pub reads_hits_pinned: u64,
    /// Resident pages that could only be read or pinned under the folio lock.
    pub reads_hits_slow: u64,
    /// Optimistic reads whose page changed during the copy, and that were repeated.
    pub reads_optimistic_retries: u64,
    /// Lookups that found no folio: filled from the device, or with zeros.
    pub reads_misses: u64,
    /// Misses that needed no I/O: past the end of the storage, or completely overwritten.
    pub reads_misses_without_read: u64,
    /// Pins taken so far, including those that were released.
    pub reads_pins: u64,
    /// Folios read ahead.
    pub reads_readahead_folios: u64,
    /// Folios read ahead that were evicted before their first use.
    pub reads_readahead_unused: u64,
    /// Bytes accepted by writes; beside them, `storage_written_bytes` reached the devices.
    pub writes_bytes: u64,
    /// Syncs that reached the device flush, their own or a shared one.
    pub writes_syncs: u64,
    /// Syncs that shared the flush of another sync of the same file.
    pub writes_syncs_shared: u64,
    /// Writes that waited for a write-out of their folio.
    pub writes_writeback_waits: u64,
    /// Calls of write gates to make their log durable, by syncs and in the background.
    pub writes_gate_asks: u64,
    /// Writes that were throttled because too much was dirty.
    pub writes_throttle_waits: u64,
    /// Total time that writes were throttled, nanoseconds.
    pub writes_throttle_ns: u64,
    /// Longest time that a write was throttled, nanoseconds.
    pub writes_throttle_ns_max: u64,
    /// Bytes read from devices.
    pub storage_read_bytes: u64,
    /// Read requests sent to devices.
    pub storage_read_requests: u64,
    /// Bytes written to devices.
    pub storage_written_bytes: u64,
    /// Write requests sent to devices; adjacent folios share one.
    pub storage_write_requests: u64,
    /// Folios written out.
    pub storage_written_folios: u64,
    /// Of these, folios written by the flusher.
    pub storage_flusher_folios: u64,
    /// Failed write-outs; their folios stayed dirty.
    pub storage_write_errors: u64,
    /// Device flushes made for syncs.
    pub storage_flushes: u64,
    /// Pages of memory files written to the swap.
    pub storage_swapped_out_pages: u64,
    /// Pages of memory files read back from the swap.
    pub storage_swapped_in_pages: u64,
    /// Transfers made with plain system calls: single ones, or all without io_uring.
    pub storage_plain_transfers: u64,
    /// Calls of `io_uring_enter`; each submits and completes several transfers.
    pub storage_ring_enters: u64,
    /// Transfers made through io_uring.
    pub storage_ring_transfers: u64,
    /// Allocations that waited for frames that other calls used briefly.
    pub memory_allocation_waits: u64,
    /// Waits of 100 us or longer for reclaim: for frames, or for a page that is being
    /// evicted.
    pub memory_reclaim_stalls: u64,
    /// Allocations that failed because everything was pinned or could not be written.
    pub memory_allocation_failures: u64,
    /// The bound on memory, bytes.
    pub memory_bound_bytes: u64,
    /// Memory charged against the bound: frames, descriptors and tables, bytes.
    pub memory_used_bytes: u64,
    /// Part of `used_bytes` in frames: memory for pages, bytes.
    pub memory_frame_bytes: u64,
    /// Part of `frame_bytes` that holds no page, bytes.
    pub memory_free_bytes: u64,
    /// Part of `used_bytes` in descriptors and tables, bytes.
    pub memory_metadata_bytes: u64,
    /// Dirty pages, including those being written out, bytes.
    pub memory_dirty_bytes: u64,
    /// Pages of memory files that are only in memory, including those being written to the
    /// swap, bytes.
    pub memory_unswapped_bytes: u64,
    /// Swap slots in use, bytes.
    pub memory_swap_bytes: u64,
    /// Folios on probation: on the fresh and the old list, bytes.
    pub memory_inactive_bytes: u64,
    /// Folios on the active list, bytes.
    pub memory_active_bytes: u64,
    /// Folios evicted by reclaim.
    pub evictions_folios: u64,
    /// Folios evicted on request (`bifolio_file_evict`).
    pub evictions_requested_folios: u64,
    /// Folios evicted because their chunk was needed or had to be released.
    pub evictions_evacuated_folios: u64,
    /// Folios in use that were moved to frames among others that stay.
    pub evictions_relocated_folios: u64,
    /// Folios scanned by reclaim, at the tails of the old and the active list.
    pub evictions_scanned_folios: u64,
    /// Folios moved from the old list to the active one, because they were used there.
    pub evictions_activated_folios: u64,
    /// Misses of pages that had been evicted and left a shadow.
    pub evictions_refaults: u64,
    /// Refaults of pages that were evicted from the old list too early; they become active
    /// at once.
    pub evictions_refaults_early: u64,
    /// Times the background thread was woken to reclaim.
    pub evictions_background_reclaims: u64,
    /// Faults served: accesses to pages of maps that were not resident.
    pub maps_faults: u64,
    /// Pages installed in regions.
    pub maps_installed_pages: u64,
    /// Pages unmapped from regions by reclaim.
    pub maps_unmapped_pages: u64,
    /// Calls to the kernel to unmap pages, each with a TLB flush of the other CPUs.
    pub maps_unmap_flushes: u64,
    /// Pages that were stored to while they were being unmapped, and were kept.
    pub maps_stored_late_pages: u64,
    /// Part of `used_bytes` that the program has reserved for itself
    /// (`bifolio_cache_reserve`), bytes.
    pub memory_reserved_bytes: u64,
}

// SAFETY: `repr(C)`, begins with its size, integers only.
unsafe impl Versioned for bifolio_stats {
    const SIZE_MIN: usize = 464;
}

/// Returns the counters and levels of a cache.
pub(crate) fn stats_of(cache: &Cache) -> bifolio_stats {
    let stats = cache.stats();
    bifolio_stats {
        size: 0,
        reads_hits_optimistic: stats.reads.hits_optimistic,
        reads_hits_pinned: stats.reads.hits_pinned,
        reads_hits_slow: stats.reads.hits_slow,
        reads_optimistic_retries: stats.reads.optimistic_retries,
        reads_misses: stats.reads.misses,
        reads_misses_without_read: stats.reads.misses_without_read,
        reads_pins: stats.reads.pins,
        reads_readahead_folios: stats.reads.readahead_folios,
        reads_readahead_unused: stats.reads.readahead_unused,
        writes_bytes: stats.writes.bytes,
        writes_syncs: stats.writes.syncs,
        writes_syncs_shared: stats.writes.syncs_shared,
        writes_writeback_waits: stats.writes.writeback_waits,
        writes_gate_asks: stats.writes.gate_asks,
        writes_throttle_waits: stats.writes.throttle_waits,
        writes_throttle_ns: stats.writes.throttle_ns,
        writes_throttle_ns_max: stats.writes.throttle_ns_max,
        storage_read_bytes: stats.storage.read_bytes,
        storage_read_requests: stats.storage.read_requests,
        storage_written_bytes: stats.storage.written_bytes,
        storage_write_requests: stats.storage.write_requests,
        storage_written_folios: stats.storage.written_folios,
        storage_flusher_folios: stats.storage.flusher_folios,
        storage_write_errors: stats.storage.write_errors,
        storage_flushes: stats.storage.flushes,
        storage_swapped_out_pages: stats.storage.swapped_out_pages,
        storage_swapped_in_pages: stats.storage.swapped_in_pages,
        storage_plain_transfers: stats.storage.plain_transfers,
        storage_ring_enters: stats.storage.ring_enters,
        storage_ring_transfers: stats.storage.ring_transfers,
        memory_allocation_waits: stats.memory.allocation_waits,
        memory_reclaim_stalls: stats.memory.reclaim_stalls,
        memory_allocation_failures: stats.memory.allocation_failures,
        memory_bound_bytes: stats.memory.bound_bytes,
        memory_used_bytes: stats.memory.used_bytes,
        memory_frame_bytes: stats.memory.frame_bytes,
        memory_free_bytes: stats.memory.free_bytes,
        memory_metadata_bytes: stats.memory.metadata_bytes,
        memory_dirty_bytes: stats.memory.dirty_bytes,
        memory_unswapped_bytes: stats.memory.unswapped_bytes,
        memory_swap_bytes: stats.memory.swap_bytes,
        memory_inactive_bytes: stats.memory.inactive_bytes,
        memory_active_bytes: stats.memory.active_bytes,
        evictions_folios: stats.evictions.folios,
        evictions_requested_folios: stats.evictions.requested_folios,
        evictions_evacuated_folios: stats.evictions.evacuated_folios,
        evictions_relocated_folios: stats.evictions.relocated_folios,
        evictions_scanned_folios: stats.evictions.scanned_folios,
        evictions_activated_folios: stats.evictions.activated_folios,
        evictions_refaults: stats.evictions.refaults,
        evictions_refaults_early: stats.evictions.refaults_early,
        evictions_background_reclaims: stats.evictions.background_reclaims,
        maps_faults: stats.maps.faults,
        maps_installed_pages: stats.maps.installed_pages,
        maps_unmapped_pages: stats.maps.unmapped_pages,
        maps_unmap_flushes: stats.maps.unmap_flushes,
        maps_stored_late_pages: stats.maps.stored_late_pages,
        memory_reserved_bytes: stats.memory.reserved_bytes,
    }
}
