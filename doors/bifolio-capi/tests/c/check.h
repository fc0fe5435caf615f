/* Checks of the C tests: a failed one says where it stands, and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bifolio.h"

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: %s is not so; the last error is: %s\n", __FILE__,   \
                    __LINE__, #condition, bifolio_last_error());                        \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

#define CHECK_OK(call) CHECK_RESULT(call, BIFOLIO_OK)

#define CHECK_RESULT(call, expected)                                                    \
    do {                                                                                \
        bifolio_result result_ = (call);                                                \
        if (result_ != (expected)) {                                                    \
            fprintf(stderr, "%s:%d: %s: %s instead of %s: %s\n", __FILE__, __LINE__,    \
                    #call, bifolio_result_name(result_),                                \
                    bifolio_result_name(expected), bifolio_last_error());               \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

/* The path of `name` in the directory that the test was given as its argument. */
static const char *directory;
static inline const char *in_directory(const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static inline bifolio_cache *new_cache(uint64_t memory_bytes) {
    bifolio_cache_options options = {.size = sizeof options};
    options.memory_bytes = memory_bytes;
    options.memory_bytes_max = memory_bytes;
    bifolio_cache *cache = NULL;
    CHECK_OK(bifolio_cache_new(&options, &cache));
    return cache;
}

static inline bifolio_file *open_file(bifolio_cache *cache, const char *name, uint32_t flags) {
    bifolio_open_options options = {.size = sizeof options};
    options.flags = flags;
    bifolio_file *file = NULL;
    CHECK_OK(bifolio_cache_open(cache, in_directory(name), &options, &file));
    return file;
}

#define READ_WRITE (BIFOLIO_OPEN_READ | BIFOLIO_OPEN_WRITE)
#define NEW_FILE (READ_WRITE | BIFOLIO_OPEN_CREATE | BIFOLIO_OPEN_TRUNCATE)

#endif
