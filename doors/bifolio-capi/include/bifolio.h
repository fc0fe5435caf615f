/*
 * bifolio.h: the C interface of Bifolio, a user-space page cache.
 *
 * Made from the sources of the crate bifolio-capi by `cargo x header`; do not edit.
 *
 * Results. A function that can fail returns a bifolio_result: BIFOLIO_OK, or the kind of error.
 * bifolio_last_error() has the text, of the calling thread. Outputs, the last parameters, are
 * written on success only. No panic and no exception leaves the library; it raises no signal but
 * SIGBUS for a page of a map that cannot be read.
 *
 * Handles. What a `*_new` or `*_open` gives is ended by the `*_close` or `*_free` of its type, once.
 * A close that fails leaves the handle as it was. A null handle is BIFOLIO_ERROR_NULL. A handle that
 * was ended must not be used again; a file may outlive the handle of its cache.
 *
 * Structs that begin with `size` grow in later versions: set `size` to the size of the struct, and
 * what you do not need to zero, which stands for the default. Buffers may be null if their length
 * is 0. Text and paths end with a zero byte; paths are bytes, in no particular encoding.
 *
 * Threads. Each function says which threads may call it, and what it blocks for. A child of fork()
 * must not use a cache of its parent: calls answer BIFOLIO_ERROR_FORKED.
 */


#ifndef BIFOLIO_H
#define BIFOLIO_H

#include <stddef.h>
#include <stdint.h>

/**
 * The length that reaches to the end of the file.
 */
#define BIFOLIO_TO_END UINT64_MAX

/**
 * For `bifolio_cache_options.flags`: makes the memory resident when the cache is built.
 */
#define BIFOLIO_CACHE_PREFAULT 1

/**
 * For `bifolio_cache_options.readahead_bytes_max`: nothing is read ahead.
 */
#define BIFOLIO_READAHEAD_NONE UINT64_MAX

/**
 * For `bifolio_open_options.flags`: reading and pinning. This is also the meaning of no flag.
 */
#define BIFOLIO_OPEN_READ 1

/**
 * For `bifolio_open_options.flags`: writing and changing the length.
 */
#define BIFOLIO_OPEN_WRITE 2

/**
 * For `bifolio_open_options.flags`: creates the file if it does not exist. Requires writing.
 */
#define BIFOLIO_OPEN_CREATE 4

/**
 * For `bifolio_open_options.flags`: truncates the file to length 0. Requires writing.
 */
#define BIFOLIO_OPEN_TRUNCATE 8

/**
 * For `bifolio_open_options.flags`: a promise that the bytes do not change while the file is open.
 * Excludes writing, by any handle of this cache.
 */
#define BIFOLIO_OPEN_IMMUTABLE 16

/**
 * For `bifolio_open_options.flags`: the file can be mapped (`bifolio_map_new`).
 */
#define BIFOLIO_OPEN_MAPPABLE 32

/**
 * For `bifolio_open_options.flags`: creates the file, and fails if the path exists. Requires
 * writing.
 */
#define BIFOLIO_OPEN_CREATE_NEW 64

/**
 * For `bifolio_open_options.flags`: locks the file against other programs and other caches while
 * it is open (`F_OFD_SETLK`). The lock is advisory: programs that take none are not kept out.
 * Requires writing.
 */
#define BIFOLIO_OPEN_EXCLUSIVE 128

/**
 * For `bifolio_map_new`: the bytes can be stored to.
 */
#define BIFOLIO_MAP_WRITE 1

/**
 * For `bifolio_map_pin_new`: the kernel or a device may write the bytes while they are pinned (a
 * read with `O_DIRECT`, io_uring, RDMA). Without such a pin, bytes written in this way may be
 * lost.
 */
#define BIFOLIO_MAP_PIN_DEVICE_WRITES 1

/**
 * For `bifolio_class_limits.ceiling_bytes`: no ceiling.
 */
#define BIFOLIO_CEILING_NONE UINT64_MAX

/**
 * Result of a call. Numbers are never reused.
 */
enum bifolio_result
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Success.
     */
    BIFOLIO_OK = 0,
    /**
     * A bug in the library: it panicked. The state of the handle is unspecified.
     */
    BIFOLIO_ERROR_PANIC = 1,
    /**
     * A pointer that must not be null is null.
     */
    BIFOLIO_ERROR_NULL = 2,
    /**
     * An argument has an invalid value.
     */
    BIFOLIO_ERROR_ARGUMENT = 3,
    /**
     * The handle is in use: pins of it were not released, or maps not freed.
     */
    BIFOLIO_ERROR_IN_USE = 4,
    /**
     * An error that has no number in this version.
     */
    BIFOLIO_ERROR_OTHER = 5,
    /**
     * A setting of the cache or an option of a file is invalid.
     */
    BIFOLIO_ERROR_CONFIG = 10,
    /**
     * The file cannot be opened.
     */
    BIFOLIO_ERROR_OPEN = 11,
    /**
     * The file is not regular, or the kernel does not know its length.
     */
    BIFOLIO_ERROR_NOT_REGULAR = 12,
    /**
     * The storage failed. Nothing that was in the cache is lost.
     */
    BIFOLIO_ERROR_IO = 13,
    /**
     * The swap file cannot be used.
     */
    BIFOLIO_ERROR_SWAP_FILE = 14,
    /**
     * A page of a memory file could not be read back from the swap.
     */
    BIFOLIO_ERROR_SWAP_READ = 15,
    /**
     * The bytes read back from the swap differ from those written there.
     */
    BIFOLIO_ERROR_SWAP_CORRUPT = 16,
    /**
     * A write-out failed, in the call or before it; its pages are still dirty.
     */
    BIFOLIO_ERROR_WRITEBACK = 17,
    /**
     * The storage has shrunk: another program truncated the file.
     */
    BIFOLIO_ERROR_CUT_SHORT = 18,
    /**
     * A range ends past the maximum length of a file, 2^63 - 1 bytes.
     */
    BIFOLIO_ERROR_OUT_OF_RANGE = 19,
    /**
     * A range ends past the end of the file, which this call does not allow.
     */
    BIFOLIO_ERROR_PAST_END = 20,
    /**
     * The file would grow past `len_max_bytes` of its open options, or past what
     * `bifolio_file_raise_len_max` has made of it.
     */
    BIFOLIO_ERROR_TOO_LONG = 21,
    /**
     * A pin must lie in one folio.
     */
    BIFOLIO_ERROR_PIN_SPANS_FOLIOS = 22,
    /**
     * The file was not opened for reading, or for writing.
     */
    BIFOLIO_ERROR_NOT_OPENED_FOR = 23,
    /**
     * The file, or its file system, does not support the call: it works only or not for mappable
     * files, or needs direct I/O.
     */
    BIFOLIO_ERROR_UNSUPPORTED = 24,
    /**
     * Files cannot be mapped on this system, or only for reading.
     */
    BIFOLIO_ERROR_CANNOT_MAP = 25,
    /**
     * A page of a map could not be read when it was touched.
     */
    BIFOLIO_ERROR_FAULT = 26,
    /**
     * Maps of files of the cache are in use.
     */
    BIFOLIO_ERROR_MAPS_ALIVE = 27,
    /**
     * Another program, or another cache, has locked the file.
     */
    BIFOLIO_ERROR_LOCKED = 29,
    /**
     * The file is open, and an option of that open excludes one of this one.
     */
    BIFOLIO_ERROR_OPTION_CONFLICT = 30,
    /**
     * The call needs a folio that its own thread has pinned for writing: release the pin first.
     */
    BIFOLIO_ERROR_PINNED_BY_CALLER = 31,
    /**
     * The device of the file refuses writes, and its share of dirty pages is full.
     */
    BIFOLIO_ERROR_UNWRITABLE = 32,
    /**
     * The bound is reached, and nothing can be evicted.
     */
    BIFOLIO_ERROR_FULL = 33,
    /**
     * The bound cannot fall: what is dirty exceeds its share of the new one, and is not written.
     */
    BIFOLIO_ERROR_BOUND_IN_USE = 34,
    /**
     * A folio has the maximum number of references.
     */
    BIFOLIO_ERROR_TOO_MANY_PINS = 35,
    /**
     * The system refused memory or address space.
     */
    BIFOLIO_ERROR_MEMORY = 36,
    /**
     * The system refused a thread.
     */
    BIFOLIO_ERROR_THREAD = 37,
    /**
     * Files could not be made durable: the cache is still open, and nothing is lost.
     */
    BIFOLIO_ERROR_CLOSE = 38,
    /**
     * The kernel refused a call that could be neither undone nor replaced: build another cache.
     */
    BIFOLIO_ERROR_POISONED = 39,
    /**
     * The cache was closed.
     */
    BIFOLIO_ERROR_CLOSED = 40,
    /**
     * A forked child cannot use the cache of its parent.
     */
    BIFOLIO_ERROR_FORKED = 41,
    /**
     * The write gate of the file holds dirty pages back: its function has failed. They stay dirty.
     */
    BIFOLIO_ERROR_GATED = 42,
    /**
     * The file cannot have a write gate, or a handle without one would change it.
     */
    BIFOLIO_ERROR_GATE_MISUSE = 43,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_result bifolio_result;
#else
typedef uint32_t bifolio_result;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Order of the reads through a handle, for `bifolio_file_set_access`.
 */
enum bifolio_access
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Sequential reads are detected and read ahead. The default.
     */
    BIFOLIO_ACCESS_NORMAL = 0,
    /**
     * Reads are sequential.
     */
    BIFOLIO_ACCESS_SEQUENTIAL = 1,
    /**
     * Reads are random; nothing is read ahead.
     */
    BIFOLIO_ACCESS_RANDOM = 2,
    /**
     * Data is read only once; its pages are evicted before others.
     */
    BIFOLIO_ACCESS_NO_REUSE = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_access bifolio_access;
#else
typedef uint32_t bifolio_access;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Values of `bifolio_cache_options.huge_pages`.
 */
enum bifolio_huge_pages
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * 2 MiB pages where the system allows them.
     */
    BIFOLIO_HUGE_PAGES_AUTO = 0,
    /**
     * Base pages only.
     */
    BIFOLIO_HUGE_PAGES_NEVER = 1,
    /**
     * Building the cache fails where the system does not allow them.
     */
    BIFOLIO_HUGE_PAGES_REQUIRE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_huge_pages bifolio_huge_pages;
#else
typedef uint32_t bifolio_huge_pages;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Values of `bifolio_open_options.direct`.
 */
enum bifolio_direct
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Bypasses the kernel's page cache where the file system allows it.
     */
    BIFOLIO_DIRECT_AUTO = 0,
    /**
     * Always through the kernel's page cache.
     */
    BIFOLIO_DIRECT_NEVER = 1,
    /**
     * Bypasses the kernel's page cache, or the open fails.
     */
    BIFOLIO_DIRECT_REQUIRE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_direct bifolio_direct;
#else
typedef uint32_t bifolio_direct;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Values of `bifolio_open_options.faults`.
 */
enum bifolio_faults
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * A thread that touches a page of a map that is not resident waits for a thread of the cache,
     * which reads it.
     */
    BIFOLIO_FAULTS_THREADS = 0,
    /**
     * It reads the page itself, in a handler of SIGBUS, which is quicker. The program then touches
     * no map inside an allocator, from a small stack, or in a thread that blocks SIGBUS; a handler
     * of SIGBUS that is installed later passes on signals that are not its own; and a system call
     * on a page that is not resident fails with `EFAULT`.
     */
    BIFOLIO_FAULTS_IN_THREAD = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_faults bifolio_faults;
#else
typedef uint32_t bifolio_faults;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Levels of the log.
 */
enum bifolio_log_level
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Nothing is logged.
     */
    BIFOLIO_LOG_OFF = 0,
    /**
     * Lost bytes: write-outs that failed after the last handle was closed.
     */
    BIFOLIO_LOG_ERROR = 1,
    /**
     * Degraded operation.
     */
    BIFOLIO_LOG_WARN = 2,
    /**
     * Events that happen once per cache.
     */
    BIFOLIO_LOG_INFO = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_log_level bifolio_log_level;
#else
typedef uint32_t bifolio_log_level;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * A page cache with a hard bound on memory.
 */
typedef struct bifolio_cache bifolio_cache;

/**
 * The dirty pages of a file at one moment, from `bifolio_file_checkpoint`.
 */
typedef struct bifolio_checkpoint bifolio_checkpoint;

/**
 * A file that is open in a cache.
 */
typedef struct bifolio_file bifolio_file;

/**
 * The bytes of a file as memory. It keeps the file open in the cache.
 */
typedef struct bifolio_map bifolio_map;

/**
 * Bytes of a map that stay resident.
 */
typedef struct bifolio_map_pin bifolio_map_pin;

/**
 * Memory of the program that counts within the bound of a cache.
 */
typedef struct bifolio_reserved bifolio_reserved;

/**
 * A restore of hot pages, in the background. It does not keep the cache.
 */
typedef struct bifolio_restore bifolio_restore;

/**
 * Settings of a cache. Set `size` to `sizeof(bifolio_cache_options)` and everything else to zero,
 * which selects the defaults; then change what you need: `bifolio_cache_options options = { .size
 * = sizeof options };`
 */
typedef struct {
    /**
     * `sizeof(bifolio_cache_options)`.
     */
    size_t size;
    /**
     * Bound on memory, bytes: frames, descriptors and tables together. Default 256 MiB, minimum
     * 256 KiB.
     */
    uint64_t memory_bytes;
    /**
     * Upper bound for `bifolio_cache_set_memory`, bytes. Default: all of the machine's memory.
     */
    uint64_t memory_bytes_max;
    /**
     * Dirty bytes at which writers wait for the device. Default 2/3 of the bound, which is also
     * the maximum.
     */
    uint64_t dirty_bytes_max;
    /**
     * Dirty bytes at which the flusher starts to write. Default a quarter of the bound.
     */
    uint64_t dirty_bytes_background;
    /**
     * Age at which a dirty page is written out, however little is dirty, milliseconds. Default
     * 5,000.
     */
    uint64_t dirty_age_ms_max;
    /**
     * Maximum wait of a call for memory that other calls hold briefly, milliseconds. Default
     * 10,000.
     */
    uint64_t reclaim_wait_ms_max;
    /**
     * Largest readahead window, bytes. Default 8 MiB; `BIFOLIO_READAHEAD_NONE` for none.
     */
    uint64_t readahead_bytes_max;
    /**
     * Upper bound on the swap, bytes. Default 1 TiB.
     */
    uint64_t swap_bytes_max;
    /**
     * Directory of a temporary file to which pages of memory files are swapped when memory is
     * short; null for no swap.
     */
    const char *swap_directory;
    /**
     * Maximum transfers in flight per call, 1 to 1024. Default 64.
     */
    uint32_t io_depth;
    /**
     * One of `bifolio_huge_pages`.
     */
    uint32_t huge_pages;
    /**
     * `BIFOLIO_CACHE_PREFAULT`, or 0.
     */
    uint32_t flags;
    /**
     * Number of closed files whose clean pages stay, for the next open to find if nothing has
     * changed the file. Default 0: the pages of a file are freed with its last handle. Each takes
     * an inotify watch; an open holds a read lease for a moment.
     */
    uint32_t kept_files;
    /**
     * Bytes down to which the bound falls while tasks wait for memory; it rises again afterwards.
     * Default 0: the bound is only the program's. At least 256 KiB and four chunks, and at most
     * the bound.
     */
    uint64_t memory_bytes_under_pressure;
} bifolio_cache_options;

/**
 * Options of an open. Set `size` to `sizeof(bifolio_open_options)` and everything else to zero,
 * which selects the defaults; then change what you need.
 */
typedef struct {
    /**
     * `sizeof(bifolio_open_options)`.
     */
    size_t size;
    /**
     * `BIFOLIO_OPEN_*`, or-ed together; 0 is `BIFOLIO_OPEN_READ`.
     */
    uint32_t flags;
    /**
     * One of `bifolio_direct`.
     */
    uint32_t direct;
    /**
     * Bytes of a folio, the unit of residency and of pins: a power of two from 4 KiB, the default,
     * to 2 MiB; below a bound of 32 MiB at most a 32nd of the bound that the cache was made with,
     * or 64 KiB. All handles of a file must agree.
     */
    uint64_t folio_bytes;
    /**
     * Maximum length of the file while it is open, bytes; `bifolio_file_raise_len_max` raises it.
     * Default 1 TiB, or 64 GiB for a mappable
     * file, or four times its length.
     */
    uint64_t len_max_bytes;
    /**
     * Permission bits of a file that this open creates, before the umask; 0 for 0666.
     */
    uint32_t mode;
    /**
     * One of `bifolio_faults`, for a mappable file.
     */
    uint32_t faults;
    /**
     * Name of the class of the file (`bifolio_class_set`); null for none, or for that of the other
     * handles of the file.
     */
    const char *class_name;
} bifolio_open_options;

/**
 * Counters of a cache since it was built, and its memory now, in the groups of the library:
 * `reads_`, `writes_`, `storage_`, `memory_`, `evictions_`, `maps_`. Counts only grow; fields of
 * `memory_` that end in `_bytes`, and `writes_throttle_ns_max`, are current values. Later versions
 * append fields.
 */
typedef struct {
    /**
     * `sizeof(bifolio_stats)` before the call; after it, how many bytes of the struct are set.
     */
    size_t size;
    /**
     * Pages read without a reference: copied, then validated.
     */
    uint64_t reads_hits_optimistic;
    /**
     * Pages copied from a mappable file: with a reference, without the folio lock.
     */
    uint64_t reads_hits_pinned;
    /**
     * Resident pages that could only be read or pinned under the folio lock.
     */
    uint64_t reads_hits_slow;
    /**
     * Optimistic reads whose page changed during the copy, and that were repeated.
     */
    uint64_t reads_optimistic_retries;
    /**
     * Lookups that found no folio: filled from the device, or with zeros.
     */
    uint64_t reads_misses;
    /**
     * Misses that needed no I/O: past the end of the storage, or completely overwritten.
     */
    uint64_t reads_misses_without_read;
    /**
     * Pins taken so far, including those that were released.
     */
    uint64_t reads_pins;
    /**
     * Folios read ahead.
     */
    uint64_t reads_readahead_folios;
    /**
     * Folios read ahead that were evicted before their first use.
     */
    uint64_t reads_readahead_unused;
    /**
     * Bytes accepted by writes; beside them, `storage_written_bytes` reached the devices.
     */
    uint64_t writes_bytes;
    /**
     * Syncs that reached the device flush, their own or a shared one.
     */
    uint64_t writes_syncs;
    /**
     * Syncs that shared the flush of another sync of the same file.
     */
    uint64_t writes_syncs_shared;
    /**
     * Writes that waited for a write-out of their folio.
     */
    uint64_t writes_writeback_waits;
    /**
     * Calls of write gates to make their log durable, by syncs and in the background.
     */
    uint64_t writes_gate_asks;
    /**
     * Writes that were throttled because too much was dirty.
     */
    uint64_t writes_throttle_waits;
    /**
     * Total time that writes were throttled, nanoseconds.
     */
    uint64_t writes_throttle_ns;
    /**
     * Longest time that a write was throttled, nanoseconds.
     */
    uint64_t writes_throttle_ns_max;
    /**
     * Bytes read from devices.
     */
    uint64_t storage_read_bytes;
    /**
     * Read requests sent to devices.
     */
    uint64_t storage_read_requests;
    /**
     * Bytes written to devices.
     */
    uint64_t storage_written_bytes;
    /**
     * Write requests sent to devices; adjacent folios share one.
     */
    uint64_t storage_write_requests;
    /**
     * Folios written out.
     */
    uint64_t storage_written_folios;
    /**
     * Of these, folios written by the flusher.
     */
    uint64_t storage_flusher_folios;
    /**
     * Failed write-outs; their folios stayed dirty.
     */
    uint64_t storage_write_errors;
    /**
     * Device flushes made for syncs.
     */
    uint64_t storage_flushes;
    /**
     * Pages of memory files written to the swap.
     */
    uint64_t storage_swapped_out_pages;
    /**
     * Pages of memory files read back from the swap.
     */
    uint64_t storage_swapped_in_pages;
    /**
     * Transfers made with plain system calls: single ones, or all without io_uring.
     */
    uint64_t storage_plain_transfers;
    /**
     * Calls of `io_uring_enter`; each submits and completes several transfers.
     */
    uint64_t storage_ring_enters;
    /**
     * Transfers made through io_uring.
     */
    uint64_t storage_ring_transfers;
    /**
     * Allocations that waited for frames that other calls used briefly.
     */
    uint64_t memory_allocation_waits;
    /**
     * Waits of 100 us or longer for reclaim: for frames, or for a page that is being
     * evicted.
     */
    uint64_t memory_reclaim_stalls;
    /**
     * Allocations that failed because everything was pinned or could not be written.
     */
    uint64_t memory_allocation_failures;
    /**
     * The bound on memory, bytes.
     */
    uint64_t memory_bound_bytes;
    /**
     * Memory charged against the bound: frames, descriptors and tables, bytes.
     */
    uint64_t memory_used_bytes;
    /**
     * Part of `used_bytes` in frames: memory for pages, bytes.
     */
    uint64_t memory_frame_bytes;
    /**
     * Part of `frame_bytes` that holds no page, bytes.
     */
    uint64_t memory_free_bytes;
    /**
     * Part of `used_bytes` in descriptors and tables, bytes.
     */
    uint64_t memory_metadata_bytes;
    /**
     * Dirty pages, including those being written out, bytes.
     */
    uint64_t memory_dirty_bytes;
    /**
     * Pages of memory files that are only in memory, including those being written to the
     * swap, bytes.
     */
    uint64_t memory_unswapped_bytes;
    /**
     * Swap slots in use, bytes.
     */
    uint64_t memory_swap_bytes;
    /**
     * Folios on probation: on the fresh and the old list, bytes.
     */
    uint64_t memory_inactive_bytes;
    /**
     * Folios on the active list, bytes.
     */
    uint64_t memory_active_bytes;
    /**
     * Folios evicted by reclaim.
     */
    uint64_t evictions_folios;
    /**
     * Folios evicted on request (`bifolio_file_evict`).
     */
    uint64_t evictions_requested_folios;
    /**
     * Folios evicted because their chunk was needed or had to be released.
     */
    uint64_t evictions_evacuated_folios;
    /**
     * Folios in use that were moved to frames among others that stay.
     */
    uint64_t evictions_relocated_folios;
    /**
     * Folios scanned by reclaim, at the tails of the old and the active list.
     */
    uint64_t evictions_scanned_folios;
    /**
     * Folios moved from the old list to the active one, because they were used there.
     */
    uint64_t evictions_activated_folios;
    /**
     * Misses of pages that had been evicted and left a shadow.
     */
    uint64_t evictions_refaults;
    /**
     * Refaults of pages that were evicted from the old list too early; they become active
     * at once.
     */
    uint64_t evictions_refaults_early;
    /**
     * Times the background thread was woken to reclaim.
     */
    uint64_t evictions_background_reclaims;
    /**
     * Faults served: accesses to pages of maps that were not resident.
     */
    uint64_t maps_faults;
    /**
     * Pages installed in regions.
     */
    uint64_t maps_installed_pages;
    /**
     * Pages unmapped from regions by reclaim.
     */
    uint64_t maps_unmapped_pages;
    /**
     * Calls to the kernel to unmap pages, each with a TLB flush of the other CPUs.
     */
    uint64_t maps_unmap_flushes;
    /**
     * Pages that were stored to while they were being unmapped, and were kept.
     */
    uint64_t maps_stored_late_pages;
    /**
     * Part of `used_bytes` that the program has reserved for itself
     * (`bifolio_cache_reserve`), bytes.
     */
    uint64_t memory_reserved_bytes;
} bifolio_stats;

/**
 * Result of an eviction, in folios.
 */
typedef struct {
    /**
     * Folios that were evicted.
     */
    uint64_t folios;
    /**
     * Folios that stay: dirty, pinned, mapped, or in use by another call.
     */
    uint64_t kept;
    /**
     * Dirty folios among them; their write-out was started.
     */
    uint64_t kept_dirty;
    /**
     * Folios among them that pins or other calls refer to.
     */
    uint64_t kept_referenced;
} bifolio_evicted;

/**
 * A function that reads `length` bytes of a file in place. Other threads may change them
 * meanwhile: access them through a pointer to volatile, check each offset that comes from them,
 * and keep only results in `context`. The bytes are valid during the call. One read may take
 * several calls, and the last one counts. The function must not throw (declare it `noexcept`), and
 * must not close the file.
 */
typedef void (*bifolio_read_function)(const void *bytes, size_t length, void *context);

/**
 * One read of `bifolio_file_read_many`.
 */
typedef struct {
    /**
     * Position to read from, bytes.
     */
    uint64_t offset;
    /**
     * Memory for the bytes. Buffers of one call must not overlap.
     */
    void *buffer;
    /**
     * Number of bytes to read.
     */
    size_t length;
    /**
     * Set by the call, if `result` is `BIFOLIO_OK`: the number of bytes read; fewer than `length`
     * only at the end of the file.
     */
    size_t read;
    /**
     * Set by the call: the result of this read.
     */
    bifolio_result result;
    /**
     * Set by the call: the `errno` behind `result`, or 0.
     */
    int error_number;
} bifolio_read;

/**
 * How much of a range is in memory, in pages of 4 KiB.
 */
typedef struct {
    /**
     * Pages of the range within the file.
     */
    uint64_t pages;
    /**
     * Pages that are in memory.
     */
    uint64_t resident;
    /**
     * Dirty pages.
     */
    uint64_t dirty;
    /**
     * Pages that were evicted.
     */
    uint64_t evicted;
} bifolio_residency;

/**
 * Bytes of a folio that stay in memory, at `data`, until the pin is released. They are not frozen:
 * other calls may write them meanwhile, unless the file is immutable. Set the struct to zero
 * before its first use; do not copy or move it.
 */
typedef struct {
    /**
     * Address of the first byte; null if nothing is pinned.
     */
    const void *data;
    /**
     * Number of pinned bytes.
     */
    size_t length;
    /**
     * Private to the library.
     */
    size_t reserved[6];
} bifolio_pin;

/**
 * Bytes of a folio, at `data`, to be changed in place: until the pin is released, no other call
 * reads or writes the folio. Set the struct to zero before its first use; do not copy it.
 */
typedef struct {
    /**
     * Address of the first byte; null if nothing is pinned.
     */
    void *data;
    /**
     * Number of pinned bytes.
     */
    size_t length;
    /**
     * Private to the library.
     */
    size_t reserved[2];
} bifolio_write_pin;

/**
 * A function that is called when a call is complete, once, whatever has happened. `value` depends
 * on the call. If `result` is not `BIFOLIO_OK`, `bifolio_last_error` has the text, during the
 * function. The call uses neither its file nor its buffer any more.
 *
 * It runs in the call itself if nothing had to be waited for, and otherwise on a thread of the
 * library, which serves all calls of the process: it must not wait for one. To wake an event loop,
 * it writes to an `eventfd`. It must not throw (declare it `noexcept`).
 */
typedef void (*bifolio_done_function)(bifolio_result result, uint64_t value, void *context);

/**
 * The log of a file with a write gate: functions that the cache calls on any thread, several at
 * once, until the file is closed by its last handle and everything of it is durable. They must not
 * use the gated file, nor throw (declare them `noexcept`).
 */
typedef struct {
    /**
     * Returns the LSN up to which the log is durable: records with that LSN or a lower one. Must
     * not block.
     */
    uint64_t (*durable_lsn)(void *context);
    /**
     * Makes the log durable up to `lsn`, and returns 0, or an `errno`. May block.
     */
    int (*make_durable)(uint64_t lsn, void *context);
    /**
     * Passed to both.
     */
    void *context;
} bifolio_gate;

/**
 * How far a restore of hot pages is. Set `size` to `sizeof(bifolio_restored)` before the call.
 */
typedef struct {
    /**
     * `sizeof(bifolio_restored)` before the call; after it, how many bytes of the struct are set.
     */
    size_t size;
    /**
     * Files of the list.
     */
    uint64_t files;
    /**
     * Of these, files that were open, or were opened since.
     */
    uint64_t files_found;
    /**
     * Pages of the list, bytes.
     */
    uint64_t listed_bytes;
    /**
     * Pages read so far, bytes.
     */
    uint64_t read_bytes;
    /**
     * Pages that were in memory already, bytes.
     */
    uint64_t resident_bytes;
    /**
     * 1 if a part of the list was left out: it is damaged, or longer than this cache can hold.
     */
    uint32_t is_cut;
    /**
     * 1 if the restore has ended because no memory was free.
     */
    uint32_t is_full;
    /**
     * 1 if the restore has ended.
     */
    uint32_t is_over;
    /**
     * 0.
     */
    uint32_t reserved;
} bifolio_restored;

/**
 * A function that receives a line of the log: its level, and text that is valid during the call
 * only. It is called by any thread, one line at a time, and must not call the library. It must not
 * throw: an exception that leaves it ends the process. Declare it `noexcept` in C++.
 */
typedef void (*bifolio_log_function)(void *context, uint32_t level, const char *message);

/**
 * Limits of a class of files. Set `size` to `sizeof(bifolio_class_limits)` and everything else to
 * zero, which selects the defaults; then change what you need.
 */
typedef struct {
    /**
     * `sizeof(bifolio_class_limits)`.
     */
    size_t size;
    /**
     * Memory that others cannot take from the class, bytes. While it has less, others use it.
     * Default 0. The floors of all classes are seven eighths of the bound at most.
     */
    uint64_t floor_bytes;
    /**
     * The most memory that pages of the class may have, bytes: 64 KiB or more, and the floor or
     * more. Default, and `BIFOLIO_CEILING_NONE`: as much as the bound allows.
     */
    uint64_t ceiling_bytes;
    /**
     * Classes above their floors give pages in this order, 1 to 255, the lowest first. Default
     * 128, as for files without a class.
     */
    uint32_t order;
    /**
     * 0.
     */
    uint32_t reserved;
} bifolio_class_limits;

/**
 * Memory of a class of files, and what has happened to its pages. Later versions append fields.
 */
typedef struct {
    /**
     * `sizeof(bifolio_class_stats)` before the call; after it, how many bytes of the struct are
     * set.
     */
    size_t size;
    /**
     * Pages of the files of the class in memory, bytes.
     */
    uint64_t resident_bytes;
    /**
     * Lookups that found no page, since the class was made.
     */
    uint64_t misses;
    /**
     * Of these, misses of pages that had been evicted and left a shadow.
     */
    uint64_t refaults;
    /**
     * Bytes of pages that were evicted, by reclaim or on request.
     */
    uint64_t evicted_bytes;
} bifolio_class_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the text of the last call of this thread that failed: what failed, on which file and
 * position, why, and what to do. Empty if none has failed. Valid until the next call of this
 * thread that fails. A successful call does not change it.
 *
 * Threads: any. Blocks: never.
 */
const char *bifolio_last_error(void);

/**
 * Returns the `errno` of that error: the system's where the system caused it, such as `ENOSPC`,
 * otherwise the one that fits best, such as `ENOMEM` for a full cache. 0 if none has failed, and
 * for a misuse that the library did not see (`BIFOLIO_ERROR_NULL`, `ARGUMENT`, `IN_USE`, `PANIC`).
 *
 * Threads: any. Blocks: never.
 */
int bifolio_last_errno(void);

/**
 * Returns the name of a result, such as "BIFOLIO_ERROR_FULL"; "unknown result" for other numbers.
 * Valid forever.
 *
 * Threads: any. Blocks: never.
 */
const char *bifolio_result_name(uint32_t result);

/**
 * Builds a cache. `options` may be null for the defaults. The cache starts a few threads and takes
 * memory as it needs it.
 *
 * Threads: any. Blocks: for the system, and for all of the memory with `BIFOLIO_CACHE_PREFAULT`.
 */
bifolio_result bifolio_cache_new(const bifolio_cache_options *options, bifolio_cache **cache);

/**
 * Opens the regular file at `path`. `options` may be null: for reading. A file that is already
 * open in this cache is shared: one length, one copy of its pages. Close it with
 * `bifolio_file_close`.
 *
 * Threads: any, at the same time. Blocks: for the file system.
 */
bifolio_result bifolio_cache_open(const bifolio_cache *cache,
                                  const char *path,
                                  const bifolio_open_options *options,
                                  bifolio_file **file);

/**
 * Opens the regular file of `descriptor`. The descriptor then belongs to the cache: it is closed
 * with the file. If the call fails it is closed before the call returns, or with the file if that
 * is open in this cache already. (If a pointer is null or an option invalid, it still belongs to
 * the caller.)
 *
 * Threads: any, at the same time. Blocks: for the file system.
 */
bifolio_result bifolio_cache_open_fd(const bifolio_cache *cache,
                                     int descriptor,
                                     const bifolio_open_options *options,
                                     bifolio_file **file);

/**
 * Creates an empty memory file, for scratch space: its bytes are freed with its last handle.
 * `name` is used in messages only. `options` may be null: for reading and writing. Without a swap
 * its bytes stay in memory, within the bound.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_cache_memory_file(const bifolio_cache *cache,
                                         const char *name,
                                         const bifolio_open_options *options,
                                         bifolio_file **file);

/**
 * Writes the counters and the memory use of the cache to `stats`, whose `size` states its size.
 *
 * Threads: any, at the same time. Blocks: briefly, for locks; it visits each open file.
 */
bifolio_result bifolio_cache_stats(const bifolio_cache *cache, bifolio_stats *stats);

/**
 * Changes the bound on memory. Shrinking evicts pages, writes dirty ones out, and returns memory
 * to the system before it returns. On an error the bound is unchanged.
 *
 * The bound is at least 256 KiB, and an eighth of the one that the cache was made with, or 8 MiB
 * if that is less: memory is taken in chunks, whose size stays.
 *
 * Threads: any, at the same time. Blocks: for the devices.
 */
bifolio_result bifolio_cache_set_memory(const bifolio_cache *cache, uint64_t memory_bytes);

/**
 * Evicts the clean, unused folios of all open files, and starts the write-out of dirty ones.
 * `evicted` may be null.
 *
 * Threads: any, at the same time. Blocks: for no device.
 */
bifolio_result bifolio_cache_evict_all(const bifolio_cache *cache, bifolio_evicted *evicted);

/**
 * Makes everything written to the cache's files durable, and closes the cache. On success the
 * handle is freed; calls on files that are still open return `BIFOLIO_ERROR_CLOSED`, and their
 * handles must be freed. On an error nothing is changed or lost: fix the cause and close again, or
 * give up with `bifolio_cache_free`.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the devices.
 */
bifolio_result bifolio_cache_close(bifolio_cache *cache);

/**
 * Frees a handle without a result: the cache itself ends with its last file, which makes durable
 * what it can; other bytes are lost, which is only logged. Null is allowed.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the devices.
 */
void bifolio_cache_free(bifolio_cache *cache);

/**
 * Reads `length` bytes at `offset` into `buffer`. `read` gets the number of bytes read: fewer only
 * at the end of the file. Resident pages are copied without a lock; a read within one page never
 * sees half of a write.
 *
 * Threads: any, at the same time. Blocks: for the device, for what is not in memory.
 */
bifolio_result bifolio_file_read(const bifolio_file *file,
                                 uint64_t offset,
                                 void *buffer,
                                 size_t length,
                                 size_t *read);

/**
 * Calls `function` with `length` bytes at `offset`, in place, until a call saw bytes that did not
 * change meanwhile. They must lie in one folio (`bifolio_file_folio_bytes`) and in the file. Bytes
 * of one resident page are read without a copy, a lock, a reference or a shared write: the way to
 * descend a tree that other threads change. If they change at each of a few attempts, `function`
 * gets a copy.
 *
 * Threads: any, at the same time. Blocks: for the device, for what is not in memory.
 */
bifolio_result bifolio_file_read_with(const bifolio_file *file,
                                      uint64_t offset,
                                      size_t length,
                                      bifolio_read_function function,
                                      void *context);

/**
 * Makes `count` reads: resident pages at once, the rest with transfers that are submitted
 * together. Each read has its own `result`, even if others fail. Returns the result of the first
 * read that failed; if the call could not begin (`file`, `reads` or the buffer of one of the reads
 * null, unless its length is 0; the file not opened for reading), nothing is read and `reads` is
 * not changed.
 *
 * Threads: any, at the same time. Blocks: for the device, until all are answered.
 */
bifolio_result bifolio_file_read_many(const bifolio_file *file, bifolio_read *reads, size_t count);

/**
 * Writes all `length` bytes of `buffer` at `offset`; the file grows if necessary. The bytes are
 * then in memory, and durable after a sync. On an error a part of them may have been written.
 *
 * Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
 * memory, and while too much is dirty.
 */
bifolio_result bifolio_file_write(const bifolio_file *file,
                                  uint64_t offset,
                                  const void *buffer,
                                  size_t length);

/**
 * Writes all `length` bytes of `buffer` at the end of the file. `offset`, which may be null, gets
 * their position. Appends never overlap, and no other write makes a gap between them. On an error
 * the file has its old length, unless the storage refuses to truncate it.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_file_write`, and for other changes of the
 * length.
 */
bifolio_result bifolio_file_append(const bifolio_file *file,
                                   const void *buffer,
                                   size_t length,
                                   uint64_t *offset);

/**
 * Returns the length of the file, bytes, including unsynced writes; 0 for null.
 *
 * Threads: any, at the same time. Blocks: never.
 */
uint64_t bifolio_file_len(const bifolio_file *file);

/**
 * Returns the folio size of the file, bytes: a pin lies within one folio; 0 for null.
 *
 * Threads: any, at the same time. Blocks: never.
 */
uint64_t bifolio_file_folio_bytes(const bifolio_file *file);

/**
 * Sets the length of the file to `len_bytes`: truncates it, or extends it with zeros.
 *
 * Threads: any, at the same time. Blocks: for the device, and for write-outs of the file.
 */
bifolio_result bifolio_file_set_len(const bifolio_file *file, uint64_t len_bytes);

/**
 * Returns the length that the file may grow to, bytes; 0 for null.
 *
 * Threads: any, at the same time. Blocks: never.
 */
uint64_t bifolio_file_len_max(const bifolio_file *file);

/**
 * Raises the length that the file may grow to, `len_max_bytes` of its open options, for all of its
 * handles until the last one is closed. Other threads may use the file meanwhile, and pins stay
 * valid. Takes address space only. No effect if the file may already grow to `bytes`; on an error
 * nothing changes. Not for mappable files.
 *
 * Threads: any, at the same time. Blocks: for other changes of the length.
 */
bifolio_result bifolio_file_raise_len_max(const bifolio_file *file, uint64_t bytes);

/**
 * Makes every write that returned before durable: writes dirty pages out and flushes the device.
 * Concurrent syncs share a flush. A failure, now or since the last sync of this handle, is
 * reported once; the pages stay dirty, and no sync succeeds until they are on the device.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_sync_data(const bifolio_file *file);

/**
 * Like `bifolio_file_sync_data`, and also syncs the file's metadata.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_sync_all(const bifolio_file *file);

/**
 * Like `bifolio_file_sync_data`, for `length` bytes at `offset` only (`BIFOLIO_TO_END`: to the
 * end).
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_sync_range(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Punches a hole of `length` bytes at `offset`: they read as zeros, and the memory and storage of
 * whole folios among them is freed. The length stays.
 *
 * Threads: any, at the same time. Blocks: for the file system, and for reading the first and the
 * last folio where only a part of them is in the hole.
 */
bifolio_result bifolio_file_punch_hole(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Allocates storage for `length` bytes at `offset` of a file, which grows if necessary; in a
 * memory file, memory: later writes there need no more.
 *
 * Threads: any, at the same time. Blocks: for the file system, or for memory.
 */
bifolio_result bifolio_file_allocate(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Discards bytes that were written and are not on storage: the file then has the content of the
 * storage. For storage that refuses writes permanently, where closing would always fail. `bytes`,
 * which may be null, gets their number.
 *
 * Threads: any, at the same time. Blocks: for write-outs that are in flight.
 */
bifolio_result bifolio_file_discard_dirty(const bifolio_file *file, uint64_t *bytes);

/**
 * Makes everything written to the file durable, and frees the handle. On an error the handle is
 * unchanged and nothing is lost: fix the cause and close again, or give up with
 * `bifolio_file_free`. Pins must have been released (`BIFOLIO_ERROR_IN_USE`); maps may still
 * exist.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the device.
 */
bifolio_result bifolio_file_close(bifolio_file *file);

/**
 * Frees a handle without a result. The last handle of a file makes durable what it can; the rest
 * stays in the cache until `bifolio_cache_close`, which reports it. Null is allowed. If pins were
 * not released, the handle stays and is never freed.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the device.
 */
void bifolio_file_free(bifolio_file *file);

/**
 * Announces the order of later reads through the handle: one of `bifolio_access`.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_set_access(const bifolio_file *file, uint32_t access);

/**
 * Starts to write the dirty pages of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) to
 * the storage, and returns. Pages that a write gate holds back follow when it lets them pass.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_write_out(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Starts to read `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end), and returns.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_prefetch(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Reads `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) into the cache. An error is that
 * of the first page that cannot be read.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_populate(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Evicts the clean, unused folios of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end),
 * and starts the write-out of dirty ones. `evicted` may be null.
 *
 * Threads: any, at the same time. Blocks: for no device.
 */
bifolio_result bifolio_file_evict(const bifolio_file *file,
                                  uint64_t offset,
                                  uint64_t length,
                                  bifolio_evicted *evicted);

/**
 * Reports how much of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) is in memory.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_residency(const bifolio_file *file,
                                      uint64_t offset,
                                      uint64_t length,
                                      bifolio_residency *residency);

/**
 * Pins `length` bytes at `offset`, which must lie in one folio (`bifolio_file_folio_bytes`) and in
 * the file. A pin of resident bytes takes no lock. Release it on the same thread, before the file
 * is closed; pinned memory counts against the bound.
 *
 * Threads: any, at the same time, each with a struct of its own. Blocks: for the device, if the
 * bytes are not in memory.
 */
bifolio_result bifolio_file_pin(const bifolio_file *file,
                                uint64_t offset,
                                size_t length,
                                bifolio_pin *pin);

/**
 * Releases a pin, and sets the struct to zero. Does nothing if the struct is zero or the pointer
 * null.
 *
 * Threads: the one that took the pin; any, for a pin of `bifolio_file_pin_async`. Blocks: never,
 * unless such a pin is the last that keeps its file open: then for the device.
 */
void bifolio_pin_release(bifolio_pin *pin);

/**
 * Like `bifolio_file_pin`, for changing the bytes in place: the folio then is dirty, even if it
 * was not changed. Holds the folio's lock: calls of other threads that need the folio wait, and
 * one of the same thread, such as a sync, fails with `BIFOLIO_ERROR_PINNED_BY_CALLER`. If the file
 * has a write gate, the changes have the LSN of `bifolio_write_pin_assign_lsn`.
 *
 * Threads: any, at the same time, each with a struct of its own. Blocks: for the device, for the
 * folio's lock, and while too much is dirty.
 */
bifolio_result bifolio_file_pin_write(const bifolio_file *file,
                                      uint64_t offset,
                                      size_t length,
                                      bifolio_write_pin *pin);

/**
 * Releases a pin for writing, and sets the struct to zero. Does nothing if the struct is zero or
 * the pointer null.
 *
 * Threads: the one that took the pin. Blocks: never.
 */
void bifolio_write_pin_release(bifolio_write_pin *pin);

/**
 * Begins a read of `length` bytes at `offset` into `buffer`, which the call may write to until
 * `done` is called. The value is the number of bytes read: fewer only at the end of the file. If
 * the result is not `BIFOLIO_OK` when the function returns, the call has not begun, and `done` is
 * not called.
 *
 * Bytes in memory are copied to `buffer` at once. Others are read into memory of the library, and
 * copied when the call is complete. (`bifolio_file_pin_async` copies nothing.)
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_read_async(const bifolio_file *file,
                                       uint64_t offset,
                                       void *buffer,
                                       size_t length,
                                       bifolio_done_function done,
                                       void *context);

/**
 * Begins to pin `length` bytes at `offset`, which must lie in one folio and in the file. `pin` is
 * a struct that is zero; it holds the pin when `done` is called with `BIFOLIO_OK`, and must stay
 * where it is until then. No byte is copied. The value is 0. `done` as for
 * `bifolio_file_read_async`.
 *
 * The pin may be released by any thread (`bifolio_pin_release`). It does not keep the handle from
 * being closed, but its bytes stay, and the file stays open in the cache.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_pin_async(const bifolio_file *file,
                                      uint64_t offset,
                                      size_t length,
                                      bifolio_pin *pin,
                                      bifolio_done_function done,
                                      void *context);

/**
 * Begins a write of all `length` bytes of `buffer` at `offset`. The bytes are copied: the buffer
 * can be used again when the function returns. The call is complete when the bytes are in memory
 * and no more is dirty than may be; the value is 0. `done` as for `bifolio_file_read_async`.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_write_async(const bifolio_file *file,
                                        uint64_t offset,
                                        const void *buffer,
                                        size_t length,
                                        bifolio_done_function done,
                                        void *context);

/**
 * Begins to append all `length` bytes of `buffer`, as `bifolio_file_write_async` begins a write.
 * The value is the position of the first byte. Appends of one thread to a file are made in the
 * order of their calls.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_append_async(const bifolio_file *file,
                                         const void *buffer,
                                         size_t length,
                                         bifolio_done_function done,
                                         void *context);

/**
 * Begins to make everything durable that was written before the call. Syncs of a file that wait at
 * the same time share one. The value is 0. `done` as for `bifolio_file_read_async`.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_sync_async(const bifolio_file *file,
                                       bifolio_done_function done,
                                       void *context);

/**
 * Opens the regular file at `path` with a write gate: each change has an LSN, and its page stays
 * in memory until the log is durable up to that. All calls that read work as for other files, and
 * syncs and closes make the log durable first. Changes without an LSN (`bifolio_file_write`, ...)
 * fail with `BIFOLIO_ERROR_GATE_MISUSE`, also through other handles of the file.
 *
 * Threads: any, at the same time. Blocks: for the file system.
 */
bifolio_result bifolio_cache_open_gated(const bifolio_cache *cache,
                                        const char *path,
                                        const bifolio_open_options *options,
                                        const bifolio_gate *gate,
                                        bifolio_file **file);

/**
 * Writes all `length` bytes of `buffer` at `offset` of a file with a write gate, like
 * `bifolio_file_write`: a change whose log record has `lsn`. The record may be written later, but
 * its LSN is known.
 *
 * Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
 * memory, and while too much is dirty.
 */
bifolio_result bifolio_file_write_logged(const bifolio_file *file,
                                         uint64_t offset,
                                         const void *buffer,
                                         size_t length,
                                         uint64_t lsn);

/**
 * Appends all `length` bytes of `buffer` to a file with a write gate, like `bifolio_file_append`:
 * a change whose log record has `lsn`. `offset` gets the position of the first byte; it may be
 * null.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_file_write_logged`.
 */
bifolio_result bifolio_file_append_logged(const bifolio_file *file,
                                          const void *buffer,
                                          size_t length,
                                          uint64_t lsn,
                                          uint64_t *offset);

/**
 * Says that the changes through a pin have a log record with `lsn`; 0 if they need none. To be
 * called before the release of each pin for writing of a file with a write gate: the page of one
 * that is released without an LSN counts as not committed, and stays in memory until
 * `bifolio_file_assign_lsn`.
 *
 * Threads: the one that took the pin. Blocks: never.
 */
bifolio_result bifolio_write_pin_assign_lsn(bifolio_write_pin *pin, uint64_t lsn);

/**
 * Gives changes that have no LSN yet, of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end)
 * of a file with a write gate, the one of their log record.
 *
 * Threads: any, at the same time. Blocks: for folio locks.
 */
bifolio_result bifolio_file_assign_lsn(const bifolio_file *file,
                                       uint64_t offset,
                                       uint64_t length,
                                       uint64_t lsn);

/**
 * Returns the lowest LSN of a change that is not on the storage: the log before it is not needed
 * any more. 0 if there is none, and for a file without a write gate.
 *
 * Threads: any, at the same time. Blocks: never.
 */
uint64_t bifolio_file_oldest_dirty_lsn(const bifolio_file *file);

/**
 * Opens another handle of a file with a write gate, for changes without a log record
 * (`bifolio_file_write`, `bifolio_file_set_len`, ...). They may reach the storage before any log
 * record.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_unlogged(const bifolio_file *file, bifolio_file **unlogged);

/**
 * Remembers what is dirty now, for `bifolio_checkpoint_sync`.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_checkpoint(const bifolio_file *file, bifolio_checkpoint **checkpoint);

/**
 * Makes everything durable that was dirty at the checkpoint.
 *
 * Threads: any, at the same time. Blocks: for the log and the device.
 */
bifolio_result bifolio_checkpoint_sync(const bifolio_checkpoint *checkpoint);

/**
 * Frees a checkpoint, which keeps its file open. Null is allowed.
 *
 * Threads: any, while no other call uses it. Blocks: never.
 */
void bifolio_checkpoint_free(bifolio_checkpoint *checkpoint);

/**
 * Forgets the clean pages of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end), so that
 * later reads return what the storage has: for a file that another program has changed. Bytes that
 * were not written out stay in the cache.
 *
 * Threads: any, at the same time. Blocks: for reads and write-outs of these pages in flight.
 */
bifolio_result bifolio_file_invalidate(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Takes `length` bytes that the storage has at `offset` by now, written past the cache: pages in
 * memory have them at once, and stay clean. For a program whose own writes reach the storage
 * another way; no other program writes these bytes meanwhile. Bytes past the length of the file
 * are left out (`bifolio_file_refresh_len`).
 *
 * Threads: any, at the same time. Blocks: as `bifolio_file_invalidate`.
 */
bifolio_result bifolio_file_update(const bifolio_file *file,
                                   uint64_t offset,
                                   const void *buffer,
                                   size_t length);

/**
 * Takes the length that the file has on the storage, after another program has appended to it or
 * cut it; `bifolio_file_len` then returns it.
 *
 * Threads: any, at the same time. Blocks: for the file system, and as `bifolio_file_invalidate`.
 */
bifolio_result bifolio_file_refresh_len(const bifolio_file *file);

/**
 * Maps `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) of a file that was opened with
 * `BIFOLIO_OPEN_MAPPABLE`, for reading, or with `BIFOLIO_MAP_WRITE` also for storing. `address`
 * gets the address of the first byte. A page that is not in memory is read when it is touched; one
 * that cannot be read raises SIGBUS, as with `mmap`, unless `bifolio_map_populate` reported it
 * first.
 *
 * Threads: any, at the same time. Blocks: for write-outs of the file, with `BIFOLIO_MAP_WRITE`.
 */
bifolio_result bifolio_map_new(const bifolio_file *file,
                               uint64_t offset,
                               uint64_t length,
                               uint32_t flags,
                               bifolio_map **map,
                               void **address);

/**
 * Reads `length` bytes at `offset` of the map, so that touching them raises no fault until they
 * are evicted. An error is that of the first page that cannot be read.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_map_populate(const bifolio_map *map, uint64_t offset, uint64_t length);

/**
 * Makes bytes stored to `length` bytes at `offset` of the map before the call durable.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_map_sync(const bifolio_map *map, uint64_t offset, uint64_t length);

/**
 * Returns the last error of a page of the file that could not be read when it was touched, since
 * the map was created or this was last called; `BIFOLIO_OK` if there is none.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_map_take_error(const bifolio_map *map);

/**
 * Keeps `length` bytes at `offset` of the map resident until the pin is freed. `flags` is 0, or
 * `BIFOLIO_MAP_PIN_DEVICE_WRITES` for a map for writing. Pinned memory counts against the bound.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_map_pin_new(const bifolio_map *map,
                                   uint64_t offset,
                                   uint64_t length,
                                   uint32_t flags,
                                   bifolio_map_pin **pin);

/**
 * Frees a pin of a map. Null is allowed.
 *
 * Threads: any. Blocks: for a write pin of one of its pages.
 */
void bifolio_map_pin_free(bifolio_map_pin *pin);

/**
 * Frees a map: its addresses must not be touched any more. Stored bytes are kept, as dirty pages.
 * Null is allowed.
 *
 * Threads: any, while no other call uses the handle. Blocks: if it is the last that keeps the file
 * open, for the device.
 */
void bifolio_map_free(bifolio_map *map);

/**
 * Writes a list of the pages in memory to the file at `path`, the hottest first, for
 * `bifolio_cache_restore_hot` of a later cache: their positions, not their bytes. The list
 * replaces the file at once, and is durable then. `page_bytes` may be null; it gets the bytes of
 * the listed pages. Call this before the files are closed.
 *
 * Threads: any, at the same time. Blocks: for the file system of `path`.
 */
bifolio_result bifolio_cache_save_hot(const bifolio_cache *cache,
                                      const char *path,
                                      uint64_t *page_bytes);

/**
 * Starts to read the pages of a list in the background, the hottest first, of files that are open
 * and of files that are opened later, into free memory only: nothing is evicted. A list that is
 * damaged is used as far as it is sound. `restore` may be null; it gets a handle that says how far
 * the restore is, to be freed with `bifolio_restore_free`.
 *
 * Threads: any, at the same time. Blocks: for the read of the list.
 */
bifolio_result bifolio_cache_restore_hot(const bifolio_cache *cache,
                                         const char *path,
                                         bifolio_restore **restore);

/**
 * Writes how far a restore is to `progress`, whose `size` states its size.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_restore_progress(const bifolio_restore *restore, bifolio_restored *progress);

/**
 * Waits until nothing of the list is left to read for the files that are open now, and writes how
 * far the restore is to `progress`, whose `size` states its size.
 *
 * Threads: any, at the same time. Blocks: for the devices of these files.
 */
bifolio_result bifolio_restore_wait(const bifolio_restore *restore, bifolio_restored *progress);

/**
 * Ends a restore: no further page is read.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_restore_cancel(const bifolio_restore *restore);

/**
 * Frees a handle. The restore goes on, unless it was cancelled. Null is allowed.
 *
 * Threads: any, while no other call uses the handle. Blocks: never.
 */
void bifolio_restore_free(bifolio_restore *restore);

/**
 * Returns the version of the library, such as "0.1.0". Valid forever.
 *
 * Threads: any. Blocks: never.
 */
const char *bifolio_version(void);

/**
 * Writes to `buffer` which features of the kernel were found on this machine, one per line, and
 * the fallbacks of missing ones. With a null `cache` it probes again; otherwise it reports what
 * that cache uses. At most `capacity` bytes are written, the last of them zero; `length`, which
 * may be null, gets the length of the text without the zero byte, so a `capacity` of 0 asks for
 * it.
 *
 * Threads: any, at the same time. Blocks: for the kernel, if `cache` is null.
 */
bifolio_result bifolio_features(const bifolio_cache *cache,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/**
 * Writes to `buffer` all counters of the cache, as "name value" lines, then its devices and the
 * fallbacks in use. For people: names may change from version to version. `buffer`, `capacity` and
 * `length` are as for `bifolio_features`.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_cache_stats`.
 */
bifolio_result bifolio_cache_stats_text(const bifolio_cache *cache,
                                        char *buffer,
                                        size_t capacity,
                                        size_t *length);

/**
 * Sends the library's log, for the whole process, to `function`, up to `level`, with `context` as
 * its first argument. A null function ends that. Without it nothing is logged; a program that
 * drops files and caches without closing them learns of lost bytes only here.
 *
 * Threads: any. Blocks: while a line is being logged.
 */
bifolio_result bifolio_set_log(bifolio_log_function function, void *context, uint32_t level);

/**
 * Makes a class of files, or changes the limits of the one with this name: a part of the memory of
 * the cache, for the files that are opened in it (`class_name` of `bifolio_open_options`).
 * `limits` may be null for the defaults. When memory is short, classes give pages in proportion to
 * what they have above their floors; a class at its ceiling evicts its own pages for new ones. On
 * an error the limits are unchanged, or only some of them are changed. A cache has room for 15
 * classes.
 *
 * Threads: any, at the same time. Blocks: for another thread that evicts pages.
 */
bifolio_result bifolio_class_set(const bifolio_cache *cache,
                                 const char *name,
                                 const bifolio_class_limits *limits);

/**
 * Writes the memory of a class and its counters to `stats`, whose `size` states its size. A class
 * that does not exist is made.
 *
 * Threads: any, at the same time. Blocks: never for storage.
 */
bifolio_result bifolio_class_get_stats(const bifolio_cache *cache,
                                       const char *name,
                                       bifolio_class_stats *stats);

/**
 * Counts `length` bytes of the program's own memory within the bound, until
 * `bifolio_reserved_free`: the cache has that much less for pages. Allocates nothing. Evicts pages
 * to make room.
 *
 * Threads: any, at the same time. Blocks: for write-outs of dirty pages.
 */
bifolio_result bifolio_cache_reserve(const bifolio_cache *cache,
                                     uint64_t length,
                                     bifolio_reserved **reserved);

/**
 * Changes how many bytes count. On an error nothing changes.
 *
 * Threads: one at a time for each `reserved`. Blocks: as `bifolio_cache_reserve`.
 */
bifolio_result bifolio_reserved_resize(bifolio_reserved *reserved, uint64_t length);

/**
 * Ends a reservation. Null is allowed.
 *
 * Threads: any. Blocks: never.
 */
void bifolio_reserved_free(bifolio_reserved *reserved);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BIFOLIO_H */
