/* Numbers and layouts that programs were compiled with: none may change. */
#include <stddef.h>

#include "check.h"

#define IS(name, value) _Static_assert((name) == (value), #name)

IS(BIFOLIO_OK, 0);
IS(BIFOLIO_ERROR_PANIC, 1);
IS(BIFOLIO_ERROR_NULL, 2);
IS(BIFOLIO_ERROR_ARGUMENT, 3);
IS(BIFOLIO_ERROR_IN_USE, 4);
IS(BIFOLIO_ERROR_OTHER, 5);
IS(BIFOLIO_ERROR_CONFIG, 10);
IS(BIFOLIO_ERROR_OPEN, 11);
IS(BIFOLIO_ERROR_NOT_REGULAR, 12);
IS(BIFOLIO_ERROR_IO, 13);
IS(BIFOLIO_ERROR_SWAP_FILE, 14);
IS(BIFOLIO_ERROR_SWAP_READ, 15);
IS(BIFOLIO_ERROR_SWAP_CORRUPT, 16);
IS(BIFOLIO_ERROR_WRITEBACK, 17);
IS(BIFOLIO_ERROR_CUT_SHORT, 18);
IS(BIFOLIO_ERROR_OUT_OF_RANGE, 19);
IS(BIFOLIO_ERROR_PAST_END, 20);
IS(BIFOLIO_ERROR_TOO_LONG, 21);
IS(BIFOLIO_ERROR_PIN_SPANS_FOLIOS, 22);
IS(BIFOLIO_ERROR_NOT_OPENED_FOR, 23);
IS(BIFOLIO_ERROR_UNSUPPORTED, 24);
IS(BIFOLIO_ERROR_CANNOT_MAP, 25);
IS(BIFOLIO_ERROR_FAULT, 26);
IS(BIFOLIO_ERROR_MAPS_ALIVE, 27);
IS(BIFOLIO_ERROR_LOCKED, 29);
IS(BIFOLIO_ERROR_OPTION_CONFLICT, 30);
IS(BIFOLIO_ERROR_PINNED_BY_CALLER, 31);
IS(BIFOLIO_ERROR_UNWRITABLE, 32);
IS(BIFOLIO_ERROR_FULL, 33);
IS(BIFOLIO_ERROR_BOUND_IN_USE, 34);
IS(BIFOLIO_ERROR_TOO_MANY_PINS, 35);
IS(BIFOLIO_ERROR_MEMORY, 36);
IS(BIFOLIO_ERROR_THREAD, 37);
IS(BIFOLIO_ERROR_CLOSE, 38);
IS(BIFOLIO_ERROR_POISONED, 39);
IS(BIFOLIO_ERROR_CLOSED, 40);
IS(BIFOLIO_ERROR_FORKED, 41);
IS(BIFOLIO_ERROR_GATED, 42);
IS(BIFOLIO_ERROR_GATE_MISUSE, 43);

IS(BIFOLIO_ACCESS_NORMAL, 0);
IS(BIFOLIO_ACCESS_SEQUENTIAL, 1);
IS(BIFOLIO_ACCESS_RANDOM, 2);
IS(BIFOLIO_ACCESS_NO_REUSE, 3);

IS(BIFOLIO_HUGE_PAGES_AUTO, 0);
IS(BIFOLIO_HUGE_PAGES_NEVER, 1);
IS(BIFOLIO_HUGE_PAGES_REQUIRE, 2);
IS(BIFOLIO_DIRECT_AUTO, 0);
IS(BIFOLIO_DIRECT_NEVER, 1);
IS(BIFOLIO_DIRECT_REQUIRE, 2);
IS(BIFOLIO_FAULTS_THREADS, 0);
IS(BIFOLIO_FAULTS_IN_THREAD, 1);
IS(BIFOLIO_LOG_OFF, 0);
IS(BIFOLIO_LOG_ERROR, 1);
IS(BIFOLIO_LOG_WARN, 2);
IS(BIFOLIO_LOG_INFO, 3);

IS(BIFOLIO_OPEN_READ, 1);
IS(BIFOLIO_OPEN_WRITE, 2);
IS(BIFOLIO_OPEN_CREATE, 4);
IS(BIFOLIO_OPEN_TRUNCATE, 8);
IS(BIFOLIO_OPEN_IMMUTABLE, 16);
IS(BIFOLIO_OPEN_MAPPABLE, 32);
IS(BIFOLIO_OPEN_CREATE_NEW, 64);
IS(BIFOLIO_OPEN_EXCLUSIVE, 128);
IS(BIFOLIO_CACHE_PREFAULT, 1);
IS(BIFOLIO_MAP_WRITE, 1);
IS(BIFOLIO_MAP_PIN_DEVICE_WRITES, 1);
IS(BIFOLIO_READAHEAD_NONE, UINT64_MAX);
IS(BIFOLIO_CEILING_NONE, UINT64_MAX);
IS(BIFOLIO_TO_END, UINT64_MAX);

/* Structs with a size may only grow at their end; the others not at all. */
IS(offsetof(bifolio_cache_options, swap_directory), 72);
IS(offsetof(bifolio_cache_options, flags), 88);
IS(offsetof(bifolio_cache_options, kept_files), 92);
IS(offsetof(bifolio_cache_options, memory_bytes_under_pressure), 96);
IS(offsetof(bifolio_open_options, mode), 32);
IS(offsetof(bifolio_open_options, faults), 36);
IS(offsetof(bifolio_open_options, class_name), 40);
IS(offsetof(bifolio_class_limits, order), 24);
IS(sizeof(bifolio_class_limits), 32);
IS(offsetof(bifolio_class_stats, evicted_bytes), 32);
IS(offsetof(bifolio_stats, reads_hits_optimistic), 8);
IS(offsetof(bifolio_stats, memory_bound_bytes), 272);
IS(offsetof(bifolio_stats, maps_stored_late_pages), 456);
IS(offsetof(bifolio_stats, memory_reserved_bytes), 464);
IS(sizeof(bifolio_evicted), 32);
IS(sizeof(bifolio_residency), 32);
IS(sizeof(bifolio_restored), 64);
IS(offsetof(bifolio_restored, is_over), 56);
IS(sizeof(bifolio_read), 40);
IS(sizeof(bifolio_pin), 64);
IS(sizeof(bifolio_write_pin), 32);
IS(sizeof(bifolio_result), 4);

int main(void) {
    CHECK(strcmp(bifolio_result_name(BIFOLIO_ERROR_FULL), "BIFOLIO_ERROR_FULL") == 0);
    CHECK(strcmp(bifolio_result_name(9), "unknown result") == 0);
    CHECK(strlen(bifolio_version()) >= 5);
    return 0;
}
