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
#define BIFOLIO_CACHE_POPULATE 1

/**
 * For `bifolio_cache_options.readahead_bytes_max`: nothing is read ahead.
 */
#define BIFOLIO_READAHEAD_NONE UINT64_MAX

/**
 * For `bifolio_open_options.flags`: reading and pinning. It is also the meaning of no flag.
 */
#define BIFOLIO_OPEN_READ 1

/**
 * For `bifolio_open_options.flags`: writing and changing the length.
 */
#define BIFOLIO_OPEN_WRITE 2

/**
 * For `bifolio_open_options.flags`: makes the file if there is none. Needs writing.
 */
#define BIFOLIO_OPEN_CREATE 4

/**
 * For `bifolio_open_options.flags`: cuts the file to nothing. Needs writing.
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
 * For `bifolio_map_new`: the bytes can be stored to.
 */
#define BIFOLIO_MAP_WRITE 1

/**
 * For `bifolio_map_pin_new`: the kernel or a device may write the bytes while they are pinned (a
 * read with `O_DIRECT`, io_uring, RDMA). What it writes without such a pin may be lost.
 */
#define BIFOLIO_MAP_PIN_DEVICE_WRITES 1

/**
 * The answer of a call. A number is never used for another meaning.
 */
enum bifolio_result
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The call did what it says.
     */
    BIFOLIO_OK = 0,
    /**
     * A defect of the library: it panicked. Nothing can be said of the state of the handle.
     */
    BIFOLIO_ERROR_PANIC = 1,
    /**
     * A pointer that must not be null is.
     */
    BIFOLIO_ERROR_NULL = 2,
    /**
     * An argument has a value that it cannot have.
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
     * A setting of the cache or an option of a file cannot be.
     */
    BIFOLIO_ERROR_CONFIG = 10,
    /**
     * The file cannot be opened.
     */
    BIFOLIO_ERROR_OPEN = 11,
    /**
     * The storage failed. Nothing that was in the cache is lost.
     */
    BIFOLIO_ERROR_IO = 12,
    /**
     * The swap file cannot be used.
     */
    BIFOLIO_ERROR_SWAP_FILE = 13,
    /**
     * A page of a memory file could not be read back from the swap.
     */
    BIFOLIO_ERROR_SWAP_READ = 14,
    /**
     * The bytes read back from the swap are not those that were written there.
     */
    BIFOLIO_ERROR_SWAP_CORRUPT = 15,
    /**
     * An earlier write-out failed; its pages are dirty as before.
     */
    BIFOLIO_ERROR_WRITEBACK = 16,
    /**
     * The storage is shorter than it was: another program cut the file.
     */
    BIFOLIO_ERROR_CUT_SHORT = 17,
    /**
     * A range ends beyond what a file can have: 2^63 - 1 bytes.
     */
    BIFOLIO_ERROR_OUT_OF_RANGE = 18,
    /**
     * A range ends behind the end of the file, where it must not.
     */
    BIFOLIO_ERROR_PAST_END = 19,
    /**
     * The file would grow beyond `len_max_bytes` of its open options.
     */
    BIFOLIO_ERROR_TOO_LONG = 20,
    /**
     * A pin must lie in one folio.
     */
    BIFOLIO_ERROR_PIN_SPANS_FOLIOS = 21,
    /**
     * The file was not opened for this: for reading, or for writing.
     */
    BIFOLIO_ERROR_NOT_OPENED_FOR = 22,
    /**
     * Only a memory file can do this.
     */
    BIFOLIO_ERROR_NOT_A_MEMORY_FILE = 23,
    /**
     * A file that was opened to be mapped cannot do this.
     */
    BIFOLIO_ERROR_IS_MAPPABLE = 24,
    /**
     * Files cannot be mapped on this system.
     */
    BIFOLIO_ERROR_CANNOT_MAP = 25,
    /**
     * Files can be mapped for reading only on this system.
     */
    BIFOLIO_ERROR_CANNOT_MAP_MUT = 26,
    /**
     * A page of a map could not be read when it was touched.
     */
    BIFOLIO_ERROR_FAULT = 27,
    /**
     * The file was not opened to be mapped.
     */
    BIFOLIO_ERROR_NOT_MAPPABLE = 28,
    /**
     * Maps of files of the cache are in use.
     */
    BIFOLIO_ERROR_MAPS_ALIVE = 29,
    /**
     * A range of a memory file cannot become one folio.
     */
    BIFOLIO_ERROR_CANNOT_COLLAPSE = 30,
    /**
     * A descriptor did not take what was to be copied to it.
     */
    BIFOLIO_ERROR_COPY_TO_FD = 31,
    /**
     * An immutable and a writable handle of one file exclude each other.
     */
    BIFOLIO_ERROR_IMMUTABLE_CONFLICT = 32,
    /**
     * The file is open with another way of transfers.
     */
    BIFOLIO_ERROR_DIRECT_CONFLICT = 33,
    /**
     * The file is open with another folio size.
     */
    BIFOLIO_ERROR_FOLIO_SIZE_CONFLICT = 34,
    /**
     * The device of the file takes nothing, and as much is dirty there as may be.
     */
    BIFOLIO_ERROR_UNWRITABLE = 35,
    /**
     * The bound is reached, and nothing can be evicted.
     */
    BIFOLIO_ERROR_FULL = 36,
    /**
     * A folio has as many references as one can have.
     */
    BIFOLIO_ERROR_TOO_MANY_PINS = 37,
    /**
     * The system refused memory or address space.
     */
    BIFOLIO_ERROR_MEMORY = 38,
    /**
     * The system refused a thread.
     */
    BIFOLIO_ERROR_THREAD = 39,
    /**
     * Files could not be made durable: the cache is still open, and nothing is lost.
     */
    BIFOLIO_ERROR_CLOSE = 40,
    /**
     * The kernel refused something that could neither be undone nor done without: build another
     * cache.
     */
    BIFOLIO_ERROR_POISONED = 41,
    /**
     * The cache was closed.
     */
    BIFOLIO_ERROR_CLOSED = 42,
    /**
     * A forked child cannot use the cache of its parent.
     */
    BIFOLIO_ERROR_FORKED = 43,
    /**
     * Another program, or another cache, has locked the file.
     */
    BIFOLIO_ERROR_LOCKED = 44,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_result bifolio_result;
#else
typedef uint32_t bifolio_result;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The use that a file, or a range of it, is about to have.
 */
enum bifolio_advice
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * For the handle: reads are watched, and sequential or strided ones read ahead. The default.
     */
    BIFOLIO_ADVICE_NORMAL = 0,
    /**
     * For the handle: reads are sequential.
     */
    BIFOLIO_ADVICE_SEQUENTIAL = 1,
    /**
     * For the handle: reads have no order; nothing is read ahead.
     */
    BIFOLIO_ADVICE_RANDOM = 2,
    /**
     * For the handle: what is read will not be read again.
     */
    BIFOLIO_ADVICE_NO_REUSE = 3,
    /**
     * For the range: it will be read soon; reading it starts now.
     */
    BIFOLIO_ADVICE_WILL_NEED = 4,
    /**
     * For the range: it will not be needed soon, and goes first when memory is wanted.
     */
    BIFOLIO_ADVICE_COLD = 5,
    /**
     * For the range: it will not be needed; what is clean is evicted now.
     */
    BIFOLIO_ADVICE_DONT_NEED = 6,
    /**
     * For the range: it is read now, before the call returns.
     */
    BIFOLIO_ADVICE_POPULATE_READ = 7,
    /**
     * As `BIFOLIO_ADVICE_POPULATE_READ`; in a file with a map for writing, stores raise no fault
     * then.
     */
    BIFOLIO_ADVICE_POPULATE_WRITE = 8,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum bifolio_advice bifolio_advice;
#else
typedef uint32_t bifolio_advice;
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
     * Past the kernel's page cache where the file system offers it.
     */
    BIFOLIO_DIRECT_AUTO = 0,
    /**
     * Always through the kernel's page cache.
     */
    BIFOLIO_DIRECT_NEVER = 1,
    /**
     * Past the kernel's page cache, or opening fails.
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
     * Threads of the cache serve faults of maps.
     */
    BIFOLIO_FAULTS_THREADS = 0,
    /**
     * The thread that touches a page serves its fault, in a handler of SIGBUS. The program must
     * not block that signal, and a handler that is installed later must pass on what is not its
     * own.
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
     * Nothing is told.
     */
    BIFOLIO_LOG_OFF = 0,
    /**
     * Bytes that were lost, or will be: write-outs that failed after the last handle was closed.
     */
    BIFOLIO_LOG_ERROR = 1,
    /**
     * Things that work less well than they could.
     */
    BIFOLIO_LOG_WARN = 2,
    /**
     * Events that happen once for a cache.
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
 * A file that is open in a cache.
 */
typedef struct bifolio_file bifolio_file;

/**
 * A file's bytes as memory. It keeps the file open in the cache.
 */
typedef struct bifolio_map bifolio_map;

/**
 * Bytes of a map that stay resident.
 */
typedef struct bifolio_map_pin bifolio_map_pin;

/**
 * Settings of a cache. Set `size` to `sizeof(bifolio_cache_options)` and everything else to zero,
 * which stands for the default; then set what is to be otherwise:
 * `bifolio_cache_options options = { .size = sizeof options };`
 */
typedef struct {
    /**
     * `sizeof(bifolio_cache_options)`.
     */
    size_t size;
    /**
     * The bound on memory, bytes: frames, descriptors and tables together. 256 MiB by default,
     * 256 KiB at the least.
     */
    uint64_t memory_bytes;
    /**
     * The most that `bifolio_cache_set_memory` may ever be given, bytes. By default all of the
     * machine's memory.
     */
    uint64_t memory_bytes_max;
    /**
     * How much may be dirty before writers wait for the device, bytes: two thirds of the bound by
     * default; at the most half of it can be set.
     */
    uint64_t dirty_bytes_max;
    /**
     * How much may be dirty before it is written out in the background, bytes; a quarter of the
     * bound by default.
     */
    uint64_t dirty_bytes_background;
    /**
     * After how many milliseconds a dirty page is written out, however little is dirty; 5,000 by
     * default.
     */
    uint64_t dirty_age_ms_max;
    /**
     * How long a call waits for memory that other calls hold only for the moment, milliseconds;
     * 10,000 by default.
     */
    uint64_t reclaim_wait_ms_max;
    /**
     * The largest window of readahead, bytes; 8 MiB by default. `BIFOLIO_READAHEAD_NONE` for
     * none.
     */
    uint64_t readahead_bytes_max;
    /**
     * The most the swap may have, bytes; 1 TiB by default.
     */
    uint64_t swap_bytes_max;
    /**
     * A directory for a temporary file that the pages of memory files go to when memory is short;
     * null for no swap.
     */
    const char *swap_directory;
    /**
     * The most transfers that one call has in flight, 1 to 1024; 64 by default.
     */
    uint32_t io_depth;
    /**
     * How many pages of maps are evicted with one flush of address translations, 1 to 512; 31 by
     * default.
     */
    uint32_t unmap_batch_folios;
    /**
     * One of `bifolio_huge_pages`.
     */
    uint32_t huge_pages;
    /**
     * `BIFOLIO_CACHE_POPULATE`, or 0.
     */
    uint32_t flags;
} bifolio_cache_options;

/**
 * Options of an open. Set `size` to `sizeof(bifolio_open_options)` and everything else to zero,
 * which stands for the default; then set what is to be otherwise.
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
     * to 2 MiB. All handles of a file agree on it.
     */
    uint64_t folio_bytes;
    /**
     * The most the file may grow to while it is open, bytes: by default 1 TiB, or 64 GiB if it can
     * be mapped, or four times its length.
     */
    uint64_t len_max_bytes;
    /**
     * One of `bifolio_faults`.
     */
    uint32_t faults;
    /**
     * Must be 0.
     */
    uint32_t reserved;
} bifolio_open_options;

/**
 * Counters of a cache since it was built, and its memory now. Counts only grow; fields that
 * end in `_bytes` and are not counts of traffic are levels. Later versions append fields.
 */
typedef struct {
    /**
     * `sizeof(bifolio_stats)` before the call; after it, how many bytes of the struct are set.
     */
    size_t size;
    /**
     * The bound on memory.
     */
    uint64_t bound_bytes;
    /**
     * Charged against the bound: frames, descriptors and tables.
     */
    uint64_t used_bytes;
    /**
     * Of those, frames: memory that holds or may hold pages.
     */
    uint64_t frame_bytes;
    /**
     * Of those, frames that hold no page.
     */
    uint64_t free_bytes;
    /**
     * Of `used_bytes`, descriptors and tables.
     */
    uint64_t metadata_bytes;
    /**
     * Pages that are newer in memory than on their device.
     */
    uint64_t dirty_bytes;
    /**
     * Pages of memory files that are nowhere but in memory.
     */
    uint64_t unswapped_bytes;
    /**
     * Places in the swap that are in use.
     */
    uint64_t swap_bytes;
    /**
     * Folios on the inactive list.
     */
    uint64_t inactive_bytes;
    /**
     * Folios on the active list.
     */
    uint64_t active_bytes;
    /**
     * Pages read without a lock or a reference.
     */
    uint64_t hits_optimistic;
    /**
     * Pages copied under a reference.
     */
    uint64_t hits_pinned;
    /**
     * Pages that were resident and could be read or pinned under a lock only.
     */
    uint64_t hits_slow;
    /**
     * Folios that were looked up and not found.
     */
    uint64_t misses;
    /**
     * Misses that needed no transfer.
     */
    uint64_t misses_without_read;
    /**
     * Misses of pages that were evicted before.
     */
    uint64_t workingset_refault;
    /**
     * Refaults near enough to go to the active list at once.
     */
    uint64_t workingset_activate;
    /**
     * Bytes read from devices.
     */
    uint64_t read_bytes;
    /**
     * Read requests made of devices.
     */
    uint64_t read_requests;
    /**
     * Bytes written to devices.
     */
    uint64_t written_bytes;
    /**
     * Write requests made of devices.
     */
    uint64_t write_requests;
    /**
     * Write-outs that failed; their pages stayed dirty.
     */
    uint64_t writeback_errors;
    /**
     * Bytes accepted by writes.
     */
    uint64_t write_bytes;
    /**
     * Syncs of files.
     */
    uint64_t syncs;
    /**
     * Syncs that shared the flush of another.
     */
    uint64_t syncs_shared;
    /**
     * Flushes of devices made for syncs.
     */
    uint64_t device_flushes;
    /**
     * Faults of maps that were served.
     */
    uint64_t faults;
    /**
     * Pins taken.
     */
    uint64_t pins;
    /**
     * Folios read ahead of need.
     */
    uint64_t readahead_folios;
    /**
     * Of those, folios that were evicted before anything used them.
     */
    uint64_t readahead_unused;
    /**
     * Pages of memory files written to the swap.
     */
    uint64_t swapped_out_pages;
    /**
     * Pages of memory files read back from the swap.
     */
    uint64_t swapped_in_pages;
    /**
     * Folios that reclaim looked at on the inactive list.
     */
    uint64_t pgscan;
    /**
     * Folios that reclaim evicted.
     */
    uint64_t pgsteal;
    /**
     * Allocations that found no frame and had to reclaim.
     */
    uint64_t direct_reclaims;
    /**
     * Times a thread waited 100 us or longer for reclaim.
     */
    uint64_t reclaim_stalls;
    /**
     * Allocations that failed because everything was pinned or could not be written.
     */
    uint64_t allocation_failures;
    /**
     * Writes that waited because too much was dirty.
     */
    uint64_t throttle_waits;
    /**
     * How long they waited together, nanoseconds.
     */
    uint64_t throttle_ns;
    /**
     * The longest of these waits, nanoseconds.
     */
    uint64_t throttle_ns_max;
} bifolio_stats;

/**
 * The effect of advice to evict, in folios; all zero for other advice.
 */
typedef struct {
    /**
     * Folios that were evicted.
     */
    uint64_t evicted;
    /**
     * Folios that stay: dirty, pinned, mapped, or in use by another call.
     */
    uint64_t remaining;
    /**
     * Of those, the dirty ones; their write-out was started.
     */
    uint64_t remaining_dirty;
    /**
     * Of those, folios that pins or other calls refer to.
     */
    uint64_t remaining_referenced;
} bifolio_outcome;

/**
 * One read of `bifolio_file_read_many`.
 */
typedef struct {
    /**
     * Where to read, bytes.
     */
    uint64_t offset;
    /**
     * Where to put the bytes. Buffers of one call must not overlap.
     */
    void *buffer;
    /**
     * How many bytes to read.
     */
    size_t length;
    /**
     * Set by the call, if `result` is `BIFOLIO_OK`: how many bytes were read; fewer than `length`
     * only at the end of the file.
     */
    size_t read;
    /**
     * Set by the call: the answer to this read.
     */
    bifolio_result result;
    /**
     * Set by the call: the system's number behind `result`, or 0.
     */
    int error_number;
} bifolio_read;

/**
 * How much of a range is in memory, in pages of 4 KiB.
 */
typedef struct {
    /**
     * Pages of the range that are in the file.
     */
    uint64_t pages;
    /**
     * Pages that are in memory.
     */
    uint64_t resident;
    /**
     * Pages that are newer in memory than on their device.
     */
    uint64_t dirty;
    /**
     * Pages that are not in memory, but were.
     */
    uint64_t evicted;
} bifolio_residency;

/**
 * Bytes of a folio that stay in memory, at `data`, until the pin is released. They are not frozen:
 * other calls may write them meanwhile, unless the file is immutable. Set it to zero before its
 * first use; do not copy it.
 */
typedef struct {
    /**
     * The first byte; null when nothing is pinned.
     */
    const void *data;
    /**
     * How many bytes are pinned.
     */
    size_t length;
    /**
     * The library's own.
     */
    size_t reserved[6];
} bifolio_pin;

/**
 * Bytes of a folio, at `data`, to be changed in place: until it is released no other call reads or
 * writes the folio. Set it to zero before its first use; do not copy it.
 */
typedef struct {
    /**
     * The first byte; null when nothing is pinned.
     */
    void *data;
    /**
     * How many bytes are pinned.
     */
    size_t length;
    /**
     * The library's own.
     */
    size_t reserved[2];
} bifolio_write_pin;

/**
 * A function that gets a line of the log: its level, and text that is valid during the call only.
 * It is called by any thread, one line at a time, and must not call the library.
 */
typedef void (*bifolio_log_function)(void *context, uint32_t level, const char *message);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The text of the last call of this thread that failed: what, on which file and position, why, and
 * what can be done. Empty if none has failed. Valid until the next call of this thread that fails.
 * A call that succeeds does not change it.
 *
 * Threads: any. Blocks: never.
 */
const char *bifolio_last_error(void);

/**
 * The system's number (`errno`) behind that error, such as `ENOSPC`; 0 if the system did not
 * refuse anything.
 *
 * Threads: any. Blocks: never.
 */
int bifolio_last_errno(void);

/**
 * The name of a result, such as "BIFOLIO_ERROR_FULL"; "unknown result" for a number that is none.
 * Valid for ever.
 *
 * Threads: any. Blocks: never.
 */
const char *bifolio_result_name(uint32_t result);

/**
 * Builds a cache. `options` may be null for the defaults. The cache has a few threads of its own,
 * and takes its memory as it is needed.
 *
 * Threads: any. Blocks: for the system, and for all of the memory with `BIFOLIO_CACHE_POPULATE`.
 */
bifolio_result bifolio_cache_new(const bifolio_cache_options *options, bifolio_cache **cache);

/**
 * Opens the regular file at `path`. `options` may be null: for reading. A file that is open in
 * this cache already is shared: one length, one copy of its pages. End it with
 * `bifolio_file_close`.
 *
 * Threads: any, at the same time. Blocks: for the file system.
 */
bifolio_result bifolio_cache_open(const bifolio_cache *cache,
                                  const char *path,
                                  const bifolio_open_options *options,
                                  bifolio_file **file);

/**
 * Opens the regular file that `descriptor` is of. From then on the descriptor belongs to the
 * cache: it is closed with the file, or at once if the call fails. (If a pointer is null or an
 * option wrong, it still belongs to the caller.)
 *
 * Threads: any, at the same time. Blocks: for the file system.
 */
bifolio_result bifolio_cache_open_fd(const bifolio_cache *cache,
                                     int descriptor,
                                     const bifolio_open_options *options,
                                     bifolio_file **file);

/**
 * Makes an empty file that has no file behind it, for scratch space: its bytes are gone with its
 * last handle. `name` is for messages only. `options` may be null: for reading and writing.
 * Without a swap its bytes stay in memory, within the bound.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_cache_memory_file(const bifolio_cache *cache,
                                         const char *name,
                                         const bifolio_open_options *options,
                                         bifolio_file **file);

/**
 * Writes what the cache has done and holds to `stats`, whose `size` says how much room there is.
 *
 * Threads: any, at the same time. Blocks: for locks that are held for a moment only; it looks at
 * each open file.
 */
bifolio_result bifolio_cache_stats(const bifolio_cache *cache, bifolio_stats *stats);

/**
 * Changes the bound on memory. Shrinking evicts, writes out what is dirty, and gives memory back
 * to the system before it returns. On an error the old bound stands.
 *
 * Threads: any, at the same time. Blocks: for the devices.
 */
bifolio_result bifolio_cache_set_memory(const bifolio_cache *cache, uint64_t memory_bytes);

/**
 * Advice for all open files: `BIFOLIO_ADVICE_DONT_NEED` or `BIFOLIO_ADVICE_COLD`. `outcome` may be
 * null.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_file_advise`.
 */
bifolio_result bifolio_cache_advise(const bifolio_cache *cache,
                                    uint32_t advice,
                                    bifolio_outcome *outcome);

/**
 * Makes durable all that was written to the cache's files, and closes the cache. On success the
 * handle is gone; what is still open of its files answers `BIFOLIO_ERROR_CLOSED`, and is to be
 * freed. On an error everything is as before and nothing is lost: mend the cause and close again,
 * or give up with `bifolio_cache_free`.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the devices.
 */
bifolio_result bifolio_cache_close(bifolio_cache *cache);

/**
 * Ends a handle without an answer: the cache itself ends with its last file, which makes durable
 * what it can; what it cannot is lost, and only logged. Null is allowed.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the devices.
 */
void bifolio_cache_free(bifolio_cache *cache);

/**
 * Reads `length` bytes at `offset` into `buffer`. `read` says how many there were: fewer only at
 * the end of the file. What is in memory is copied without a lock; a read of one page never sees
 * half of a write.
 *
 * Threads: any, at the same time. Blocks: for the device, for what is not in memory.
 */
bifolio_result bifolio_file_read(const bifolio_file *file,
                                 uint64_t offset,
                                 void *buffer,
                                 size_t length,
                                 size_t *read);

/**
 * Answers `count` reads: what is in memory at once, the rest by transfers that leave together.
 * Each read has its own `result`, also if others fail. The answer is that of the first read that
 * failed; if the call could not begin (`file` or `reads` null, the file not opened for reading),
 * nothing in `reads` is changed.
 *
 * Threads: any, at the same time. Blocks: for the device, until all are answered.
 */
bifolio_result bifolio_file_read_many(const bifolio_file *file, bifolio_read *reads, size_t count);

/**
 * Writes all `length` bytes of `buffer` at `offset`; the file grows if need be. The bytes are in
 * memory then: durable after a sync. On an error a part of them may have been written.
 *
 * Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
 * memory, and while too much is dirty.
 */
bifolio_result bifolio_file_write(const bifolio_file *file,
                                  uint64_t offset,
                                  const void *buffer,
                                  size_t length);

/**
 * Writes all `length` bytes of `buffer` at the end of the file. `offset`, which may be null, says
 * where they are. Appends through one handle never overlap; those through several handles of a
 * file, and writes behind its end, may. On an error the file may have grown by a part of them.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_file_write`, and for other appends.
 */
bifolio_result bifolio_file_append(const bifolio_file *file,
                                   const void *buffer,
                                   size_t length,
                                   uint64_t *offset);

/**
 * The length of the file, bytes, with everything that was written, synced or not; 0 for null.
 *
 * Threads: any, at the same time. Blocks: never.
 */
uint64_t bifolio_file_len(const bifolio_file *file);

/**
 * Bytes of a folio of the file: a pin lies in one; 0 for null.
 *
 * Threads: any, at the same time. Blocks: never.
 */
uint64_t bifolio_file_folio_bytes(const bifolio_file *file);

/**
 * Makes the file `len_bytes` long: cuts what is behind, or grows it by zeros.
 *
 * Threads: any, at the same time. Blocks: for the device, and for write-outs of the file.
 */
bifolio_result bifolio_file_set_len(const bifolio_file *file, uint64_t len_bytes);

/**
 * Makes durable every write that returned before: writes dirty pages out and flushes the device.
 * Syncs that come together share a flush. A failure, of now or since the last sync of this handle,
 * is told once; the pages stay dirty, and no sync succeeds until they are on the device.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_sync_data(const bifolio_file *file);

/**
 * As `bifolio_file_sync_data`, and the file's metadata too.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_sync_all(const bifolio_file *file);

/**
 * As `bifolio_file_sync_data`, for `length` bytes at `offset` only (`BIFOLIO_TO_END`: to the end).
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_file_sync_range(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Takes advice, one of `bifolio_advice`, for `length` bytes at `offset` (`BIFOLIO_TO_END`: to the
 * end), or for the handle. `outcome` may be null.
 *
 * Threads: any, at the same time. Blocks: for the device with `BIFOLIO_ADVICE_POPULATE_*`.
 */
bifolio_result bifolio_file_advise(const bifolio_file *file,
                                   uint64_t offset,
                                   uint64_t length,
                                   uint32_t advice,
                                   bifolio_outcome *outcome);

/**
 * Tells how much of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) is in memory.
 *
 * Threads: any, at the same time. Blocks: never.
 */
bifolio_result bifolio_file_residency(const bifolio_file *file,
                                      uint64_t offset,
                                      uint64_t length,
                                      bifolio_residency *residency);

/**
 * Makes a hole of `length` bytes at `offset` of a memory file: they read as zeros, and whole
 * folios among them give their memory back. The length stays.
 *
 * Threads: any, at the same time. Blocks: for the swap, where a part of a page was swapped out.
 */
bifolio_result bifolio_file_punch_hole(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Reserves memory for `length` bytes at `offset` of a memory file, which grows if need be: later
 * writes there need no more memory.
 *
 * Threads: any, at the same time. Blocks: for memory.
 */
bifolio_result bifolio_file_allocate(const bifolio_file *file, uint64_t offset, uint64_t length);

/**
 * Gives up what was written and is not on the storage: the file holds then what the storage holds.
 * For storage that will not take it, where closing would fail for ever. `bytes`, which may be
 * null, says how much it was.
 *
 * Threads: any, at the same time. Blocks: for write-outs that are in flight.
 */
bifolio_result bifolio_file_discard_dirty(const bifolio_file *file, uint64_t *bytes);

/**
 * Makes durable what was written to the file, and ends the handle. On an error the handle is as
 * before and nothing is lost: mend the cause and close again, or give up with `bifolio_file_free`.
 * Pins must have been released (`BIFOLIO_ERROR_IN_USE`); maps may live on.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the device.
 */
bifolio_result bifolio_file_close(bifolio_file *file);

/**
 * Ends a handle without an answer. The last handle of a file makes durable what it can; what it
 * cannot stays in the cache until `bifolio_cache_close`, which tells of it. Null is allowed. With
 * pins that were not released the handle stays, and is never freed.
 *
 * Threads: any, while no other call uses the handle. Blocks: for the device.
 */
void bifolio_file_free(bifolio_file *file);

/**
 * Pins `length` bytes at `offset`, which must lie in one folio (`bifolio_file_folio_bytes`) and in
 * the file. A pin of what is in memory takes no lock. Release it on the same thread, before the
 * file is closed; pinned memory counts against the bound.
 *
 * Threads: any, at the same time, each with a struct of its own. Blocks: for the device, if the
 * bytes are not in memory.
 */
bifolio_result bifolio_file_pin(const bifolio_file *file,
                                uint64_t offset,
                                size_t length,
                                bifolio_pin *pin);

/**
 * Ends a pin, and sets the struct to zero. One that is zero, or null, is let be.
 *
 * Threads: the one that took the pin. Blocks: never.
 */
void bifolio_pin_release(bifolio_pin *pin);

/**
 * As `bifolio_file_pin`, for changing the bytes in place: the folio is dirty then, whether it was
 * changed or not. Holds the folio's lock: a call of the same thread that needs the folio, a sync
 * among them, would wait for itself.
 *
 * Threads: any, at the same time, each with a struct of its own. Blocks: for the device, for the
 * folio's lock, and while too much is dirty.
 */
bifolio_result bifolio_file_pin_write(const bifolio_file *file,
                                      uint64_t offset,
                                      size_t length,
                                      bifolio_write_pin *pin);

/**
 * Ends a pin for writing, and sets the struct to zero. One that is zero, or null, is let be.
 *
 * Threads: the one that took the pin. Blocks: never.
 */
void bifolio_write_pin_release(bifolio_write_pin *pin);

/**
 * Maps `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) of a file that was opened with
 * `BIFOLIO_OPEN_MAPPABLE`, for reading, or with `BIFOLIO_MAP_WRITE` for storing too. `address` is
 * the first byte. A page that is not in memory is read when it is touched; one that cannot be read
 * raises SIGBUS, as with `mmap`, unless `bifolio_map_prefetch` found it first.
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
bifolio_result bifolio_map_prefetch(const bifolio_map *map, uint64_t offset, uint64_t length);

/**
 * As `bifolio_file_advise`, for bytes of the map.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_file_advise`.
 */
bifolio_result bifolio_map_advise(const bifolio_map *map,
                                  uint64_t offset,
                                  uint64_t length,
                                  uint32_t advice,
                                  bifolio_outcome *outcome);

/**
 * Makes durable what was stored to `length` bytes at `offset` of the map before the call.
 *
 * Threads: any, at the same time. Blocks: for the device.
 */
bifolio_result bifolio_map_sync(const bifolio_map *map, uint64_t offset, uint64_t length);

/**
 * The last error of a page of the file that could not be read when it was touched, since the map
 * was made or this was last called; `BIFOLIO_OK` if there is none.
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
 * Ends a pin of a map. Null is allowed.
 *
 * Threads: any. Blocks: for a write pin of one of its pages.
 */
void bifolio_map_pin_free(bifolio_map_pin *pin);

/**
 * Ends a map: its addresses must not be touched any more. What was stored is kept, as dirty pages.
 * Null is allowed.
 *
 * Threads: any, while no other call uses the handle. Blocks: if it is the last that keeps the file
 * open, for the device.
 */
void bifolio_map_free(bifolio_map *map);

/**
 * The version of the library, such as "0.1.0". Valid for ever.
 *
 * Threads: any. Blocks: never.
 */
const char *bifolio_version(void);

/**
 * Writes to `buffer` what the library found on this machine, one feature of the kernel a line, and
 * what stands in for those that are missing. `cache` may be null: for a probe of its own; else it
 * is what that cache uses. At most `capacity` bytes are written, the last of them zero; `length`,
 * which may be null, is how long the text is without that, so a `capacity` of 0 asks for it.
 *
 * Threads: any, at the same time. Blocks: for the kernel, if `cache` is null.
 */
bifolio_result bifolio_features(const bifolio_cache *cache,
                                char *buffer,
                                size_t capacity,
                                size_t *length);

/**
 * Writes to `buffer` all counters of the cache, as "name value" lines, then its devices and what
 * stands in for missing features. For people: names may change from version to version. `buffer`,
 * `capacity` and `length` are as for `bifolio_features`.
 *
 * Threads: any, at the same time. Blocks: as `bifolio_cache_stats`.
 */
bifolio_result bifolio_cache_stats_text(const bifolio_cache *cache,
                                        char *buffer,
                                        size_t capacity,
                                        size_t *length);

/**
 * Sends the library's log, for the whole process, to `function`, up to `level`, with `context` as
 * its first argument. A null function ends that. Without it nothing is told; a program that drops
 * files and caches without closing them learns of lost bytes only here.
 *
 * Threads: any. Blocks: for a line that is being told.
 */
bifolio_result bifolio_set_log(bifolio_log_function function, void *context, uint32_t level);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BIFOLIO_H */
