/* Files: what is written is read, by every way there is, and is on the disk after a close. */
#include <fcntl.h>
#include <sys/resource.h>
#include <signal.h>

#include "check.h"

enum { LENGTH = 3 << 20 };
static unsigned char written[LENGTH], found[LENGTH];

static void reads_give_what_was_written(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "data", NEW_FILE);
    for (size_t at = 0; at < LENGTH; at++)
        written[at] = (unsigned char)(at * 7 + (at >> 12));
    CHECK_OK(bifolio_file_write(file, 0, written, LENGTH));
    CHECK(bifolio_file_len(file) == LENGTH);
    CHECK(bifolio_file_folio_bytes(file) == 4096);

    size_t count = 0;
    CHECK_OK(bifolio_file_read(file, 1000, found, LENGTH, &count));
    CHECK(count == LENGTH - 1000);
    CHECK(memcmp(found, written + 1000, count) == 0);
    CHECK_OK(bifolio_file_read(file, LENGTH, found, 10, &count));
    CHECK(count == 0);
    CHECK_OK(bifolio_file_read(file, 0, NULL, 0, &count));

    bifolio_read reads[64] = {{0}};
    for (size_t nth = 0; nth < 64; nth++) {
        reads[nth].offset = (nth * 37 % 64) * (LENGTH / 64) + 11;
        reads[nth].buffer = found + nth * 1000;
        reads[nth].length = 1000;
    }
    reads[5].offset = UINT64_MAX - 5;
    CHECK_RESULT(bifolio_file_read_many(file, reads, 64), BIFOLIO_ERROR_OUT_OF_RANGE);
    CHECK(reads[5].result == BIFOLIO_ERROR_OUT_OF_RANGE && reads[5].read == 0);
    for (size_t nth = 0; nth < 64; nth++) {
        if (nth == 5)
            continue;
        CHECK(reads[nth].result == BIFOLIO_OK && reads[nth].read == 1000);
        CHECK(memcmp(found + nth * 1000, written + reads[nth].offset, 1000) == 0);
    }
    CHECK_OK(bifolio_file_sync_range(file, 4096, BIFOLIO_TO_END));
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK_OK(bifolio_file_sync_all(file));

    uint64_t offset = 0;
    CHECK_OK(bifolio_file_append(file, "tail", 4, &offset));
    CHECK(offset == LENGTH);
    CHECK_OK(bifolio_file_append(file, "!", 1, NULL));
    CHECK(bifolio_file_len(file) == LENGTH + 5);
    CHECK_OK(bifolio_file_set_len(file, LENGTH + 4));

    CHECK(bifolio_file_len_max(file) == 1ull << 40 && bifolio_file_len_max(NULL) == 0);
    CHECK_OK(bifolio_file_raise_len_max(file, 1ull << 30));
    CHECK(bifolio_file_len_max(file) == 1ull << 40);
    CHECK_OK(bifolio_file_raise_len_max(file, 1ull << 41));
    CHECK(bifolio_file_len_max(file) == 1ull << 41);
    CHECK_RESULT(bifolio_file_raise_len_max(file, UINT64_MAX), BIFOLIO_ERROR_CONFIG);
    CHECK_RESULT(bifolio_file_raise_len_max(NULL, 1), BIFOLIO_ERROR_NULL);

    bifolio_stats stats = {.size = sizeof stats};
    CHECK_OK(bifolio_cache_stats(cache, &stats));
    CHECK(stats.size == sizeof stats && stats.memory_bound_bytes == 1 << 20);
    CHECK(stats.memory_used_bytes <= 1 << 20 && stats.writes_bytes >= LENGTH && stats.reads_misses > 0);

    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));

    int descriptor = open(in_directory("data"), O_RDONLY);
    CHECK(descriptor >= 0 && read(descriptor, found, LENGTH) == LENGTH);
    CHECK(memcmp(found, written, LENGTH) == 0);
    CHECK(read(descriptor, found, 10) == 4 && memcmp(found, "tail", 4) == 0);
    close(descriptor);
}

static void residency_follows_populate_and_evict(void) {
    bifolio_cache *cache = new_cache(8 << 20);
    bifolio_file *file = open_file(cache, "data", BIFOLIO_OPEN_READ);
    CHECK_OK(bifolio_file_set_access(file, BIFOLIO_ACCESS_RANDOM));
    CHECK_OK(bifolio_file_populate(file, 0, 40960));
    bifolio_residency residency;
    CHECK_OK(bifolio_file_residency(file, 0, 40960, &residency));
    CHECK(residency.pages == 10 && residency.resident == 10 && residency.dirty == 0);
    bifolio_evicted evicted;
    CHECK_OK(bifolio_file_evict(file, 0, BIFOLIO_TO_END, &evicted));
    CHECK(evicted.folios == 10 && evicted.kept == 0);
    CHECK_OK(bifolio_cache_evict_all(cache, &evicted));
    CHECK(evicted.folios == 0);
    CHECK_OK(bifolio_file_prefetch(file, 0, BIFOLIO_TO_END));
    CHECK_OK(bifolio_cache_set_memory(cache, 4 << 20));
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void a_class_has_its_floor_and_its_ceiling(void) {
    bifolio_cache *cache = new_cache(8 << 20);
    bifolio_class_limits limits = {.size = sizeof limits, .floor_bytes = 64 << 10, .ceiling_bytes = 128 << 10};
    CHECK_OK(bifolio_class_set(cache, "index", &limits));
    bifolio_open_options options = {.size = sizeof options, .class_name = "index"};
    bifolio_file *file;
    CHECK_OK(bifolio_cache_open(cache, in_directory("data"), &options, &file));
    options.class_name = "rows";
    bifolio_file *none = NULL;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("data"), &options, &none), BIFOLIO_ERROR_CONFIG);
    CHECK(none == NULL && strstr(bifolio_last_error(), "bifolio_class_set"));
    char bytes[4096];
    size_t count;
    for (uint64_t offset = 0; offset < bifolio_file_len(file); offset += sizeof bytes) {
        CHECK_OK(bifolio_file_read(file, offset, bytes, sizeof bytes, &count));
    }
    bifolio_class_stats stats = {.size = sizeof stats};
    CHECK_OK(bifolio_class_get_stats(cache, "index", &stats));
    CHECK(stats.size == sizeof stats && stats.misses > 0);
    CHECK(stats.resident_bytes > 0 && stats.resident_bytes <= 128 << 10);
    limits.floor_bytes = 1 << 20;
    CHECK_RESULT(bifolio_class_set(cache, "index", &limits), BIFOLIO_ERROR_CONFIG);
    limits.floor_bytes = 0;
    limits.order = 256;
    CHECK_RESULT(bifolio_class_set(cache, "index", &limits), BIFOLIO_ERROR_ARGUMENT);
    CHECK_OK(bifolio_class_set(cache, "index", NULL));

    bifolio_reserved *reserved = NULL;
    CHECK_OK(bifolio_cache_reserve(cache, 4 << 20, &reserved));
    bifolio_stats counts = {.size = sizeof counts};
    CHECK_OK(bifolio_cache_stats(cache, &counts));
    CHECK(counts.memory_reserved_bytes == 4 << 20);
    CHECK_RESULT(bifolio_reserved_resize(reserved, 8 << 20), BIFOLIO_ERROR_FULL);
    CHECK_OK(bifolio_reserved_resize(reserved, 1 << 20));
    CHECK_OK(bifolio_cache_stats(cache, &counts));
    CHECK(counts.memory_reserved_bytes == 1 << 20);
    bifolio_reserved_free(reserved);
    bifolio_reserved_free(NULL);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void changes_past_the_cache_are_taken_on_request(void) {
    bifolio_cache *cache = new_cache(8 << 20);
    int descriptor = open(in_directory("outside"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(descriptor >= 0 && pwrite(descriptor, "old", 3, 0) == 3);
    bifolio_file *file = open_file(cache, "outside", BIFOLIO_OPEN_READ);
    char bytes[8] = {0};
    size_t count = 0;
    CHECK_OK(bifolio_file_read(file, 0, bytes, sizeof bytes, &count));
    CHECK(count == 3 && memcmp(bytes, "old", 3) == 0);
    CHECK(pwrite(descriptor, "newer", 5, 0) == 5);
    CHECK_OK(bifolio_file_read(file, 0, bytes, sizeof bytes, &count));
    CHECK(count == 3 && memcmp(bytes, "old", 3) == 0);
    CHECK_OK(bifolio_file_invalidate(file, 0, BIFOLIO_TO_END));
    CHECK_OK(bifolio_file_read(file, 0, bytes, sizeof bytes, &count));
    CHECK(count == 3 && memcmp(bytes, "new", 3) == 0);
    CHECK_OK(bifolio_file_refresh_len(file));
    CHECK(bifolio_file_len(file) == 5);
    CHECK_OK(bifolio_file_read(file, 0, bytes, sizeof bytes, &count));
    CHECK(count == 5 && memcmp(bytes, "newer", 5) == 0);
    CHECK(pwrite(descriptor, "s", 1, 4) == 1);
    CHECK_OK(bifolio_file_update(file, 4, "s", 1));
    CHECK_OK(bifolio_file_read(file, 0, bytes, sizeof bytes, &count));
    CHECK(count == 5 && memcmp(bytes, "newes", 5) == 0);
    bifolio_residency residency;
    CHECK_OK(bifolio_file_residency(file, 0, BIFOLIO_TO_END, &residency));
    CHECK(residency.resident == 1 && residency.dirty == 0);
    CHECK_RESULT(bifolio_file_update(NULL, 0, "s", 1), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_update(file, 0, NULL, 1), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_invalidate(NULL, 0, 1), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_refresh_len(NULL), BIFOLIO_ERROR_NULL);
    close(descriptor);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void hot_pages_are_read_again(void) {
    bifolio_cache *cache = new_cache(8 << 20);
    bifolio_file *file = open_file(cache, "data", BIFOLIO_OPEN_READ);
    CHECK_OK(bifolio_file_set_access(file, BIFOLIO_ACCESS_RANDOM));
    CHECK_OK(bifolio_file_populate(file, 0, 40960));
    uint64_t bytes = 0;
    CHECK_OK(bifolio_cache_save_hot(cache, in_directory("hot"), &bytes));
    CHECK(bytes == 40960);
    CHECK_OK(bifolio_cache_save_hot(cache, in_directory("hot"), NULL));
    CHECK_RESULT(bifolio_cache_save_hot(cache, NULL, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_cache_save_hot(cache, in_directory("data"), NULL), BIFOLIO_ERROR_CONFIG);
    CHECK_RESULT(bifolio_cache_save_hot(NULL, in_directory("hot"), NULL), BIFOLIO_ERROR_NULL);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));

    cache = new_cache(8 << 20);
    bifolio_restore *restore = NULL;
    CHECK_OK(bifolio_cache_restore_hot(cache, in_directory("hot"), &restore));
    file = open_file(cache, "data", BIFOLIO_OPEN_READ);
    bifolio_restored restored = {.size = sizeof restored};
    CHECK_OK(bifolio_restore_wait(restore, &restored));
    CHECK(restored.size == sizeof restored && restored.files == 1 && restored.files_found == 1);
    CHECK(restored.listed_bytes == 40960 && restored.read_bytes == 40960);
    CHECK(restored.resident_bytes == 0 && !restored.is_cut && !restored.is_full);
    CHECK_OK(bifolio_restore_progress(restore, &restored));
    CHECK_OK(bifolio_restore_cancel(restore));
    restored.size = 3;
    CHECK_RESULT(bifolio_restore_progress(restore, &restored), BIFOLIO_ERROR_ARGUMENT);
    CHECK_RESULT(bifolio_restore_wait(restore, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_restore_cancel(NULL), BIFOLIO_ERROR_NULL);
    bifolio_restore_free(restore);
    bifolio_restore_free(NULL);
    bifolio_residency residency;
    CHECK_OK(bifolio_file_residency(file, 0, 40960, &residency));
    CHECK(residency.resident == 10);
    CHECK_OK(bifolio_cache_restore_hot(cache, in_directory("hot"), NULL));
    CHECK_RESULT(bifolio_cache_restore_hot(cache, in_directory("data"), NULL), BIFOLIO_ERROR_CONFIG);
    CHECK_RESULT(bifolio_cache_restore_hot(cache, in_directory("absent"), &restore), BIFOLIO_ERROR_OPEN);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void memory_files_have_holes_and_go_to_the_swap(void) {
    bifolio_cache_options options = {.size = sizeof options};
    options.memory_bytes = 1 << 20;
    options.swap_directory = directory;
    bifolio_cache *cache = NULL;
    CHECK_OK(bifolio_cache_new(&options, &cache));
    bifolio_file *file = NULL;
    CHECK_OK(bifolio_cache_memory_file(cache, "scratch", NULL, &file));
    CHECK_OK(bifolio_file_write(file, 0, written, LENGTH));
    size_t count = 0;
    CHECK_OK(bifolio_file_read(file, 0, found, LENGTH, &count));
    CHECK(count == LENGTH && memcmp(found, written, LENGTH) == 0);
    CHECK_OK(bifolio_file_punch_hole(file, 4096, 8192));
    CHECK_OK(bifolio_file_read(file, 4096, found, 8192, &count));
    CHECK(found[0] == 0 && found[8191] == 0);
    CHECK_OK(bifolio_file_allocate(file, LENGTH, 4096));
    CHECK(bifolio_file_len(file) == LENGTH + 4096);
    bifolio_stats stats = {.size = sizeof stats};
    CHECK_OK(bifolio_cache_stats(cache, &stats));
    CHECK(stats.storage_swapped_out_pages > 0);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void a_descriptor_is_taken_over(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    int descriptor = open(in_directory("unnamed"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(descriptor >= 0 && unlink(in_directory("unnamed")) == 0);
    bifolio_open_options options = {.size = sizeof options};
    options.flags = READ_WRITE;
    bifolio_file *file = NULL;
    CHECK_OK(bifolio_cache_open_fd(cache, descriptor, &options, &file));
    CHECK_OK(bifolio_file_write(file, 0, "x", 1));
    CHECK_OK(bifolio_file_close(file));
    CHECK(fcntl(descriptor, F_GETFD) == -1);
    CHECK_OK(bifolio_cache_close(cache));
}

static void a_failed_close_loses_nothing(void) {
    signal(SIGXFSZ, SIG_IGN);
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "limited", NEW_FILE);
    CHECK_OK(bifolio_file_write(file, 0, written, 100000));
    struct rlimit limit, small;
    CHECK(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    small = limit;
    small.rlim_cur = 8192;
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    CHECK(bifolio_file_sync_data(file) != BIFOLIO_OK);
    CHECK(bifolio_last_errno() == EFBIG);
    CHECK(strstr(bifolio_last_error(), "limited") != NULL);
    CHECK(bifolio_file_close(file) != BIFOLIO_OK);
    CHECK(bifolio_last_errno() == EFBIG);
    CHECK_RESULT(bifolio_cache_close(cache), BIFOLIO_ERROR_CLOSE);
    CHECK(bifolio_last_errno() == EFBIG);
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    size_t count = 0;
    CHECK_OK(bifolio_file_read(file, 0, found, 100000, &count));
    CHECK(count == 100000 && memcmp(found, written, count) == 0);
    uint64_t discarded = 0;
    /* The handle is told of the failures of the two closes; then all is written. */
    CHECK_RESULT(bifolio_file_sync_data(file), BIFOLIO_ERROR_WRITEBACK);
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK_OK(bifolio_file_write(file, 0, "given up", 8));
    CHECK_OK(bifolio_file_discard_dirty(file, &discarded));
    CHECK(discarded <= 4096);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void texts_are_cut_to_fit(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    size_t length = 0, again = 0;
    CHECK_OK(bifolio_features(NULL, NULL, 0, &length));
    CHECK(length > 100);
    CHECK_OK(bifolio_features(cache, NULL, 0, &length));
    char *text = malloc(length + 1);
    CHECK_OK(bifolio_features(cache, text, length + 1, &again));
    CHECK(again == length && strlen(text) == length && strstr(text, "io-uring: ") != NULL);
    CHECK_OK(bifolio_features(cache, text, 9, NULL));
    CHECK(strlen(text) == 8);
    free(text);
    CHECK_OK(bifolio_cache_stats_text(cache, NULL, 0, &length));
    text = malloc(length + 1000);
    CHECK_OK(bifolio_cache_stats_text(cache, text, length + 1000, NULL));
    CHECK(strstr(text, "\nmemory_bound_bytes 1048576\n") != NULL);
    free(text);
    CHECK_OK(bifolio_cache_close(cache));
}

static void len_max_is_raised_and_decided_by_the_first_open(void) {
    bifolio_cache_options options = {.size = sizeof options, .memory_bytes = 1 << 20};
    bifolio_cache *cache = NULL;
    CHECK_OK(bifolio_cache_new(&options, &cache));
    bifolio_open_options open = {.size = sizeof open, .mode = 0600, .len_max_bytes = 100};
    open.flags = READ_WRITE | BIFOLIO_OPEN_CREATE_NEW | BIFOLIO_OPEN_EXCLUSIVE;
    bifolio_file *file = NULL;
    CHECK_OK(bifolio_cache_open(cache, in_directory("new"), &open, &file));
    CHECK_RESULT(bifolio_file_write(file, 0, written, 101), BIFOLIO_ERROR_TOO_LONG);
    CHECK_OK(bifolio_file_raise_len_max(file, 101));
    CHECK_OK(bifolio_file_write(file, 0, written, 101));
    bifolio_file *other = NULL;
    open.flags = READ_WRITE;
    open.len_max_bytes = 1 << 20;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("new"), &open, &other),
                 BIFOLIO_ERROR_OPTION_CONFLICT);
    CHECK_OK(bifolio_file_close(file));
    open.flags = READ_WRITE | BIFOLIO_OPEN_CREATE_NEW;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("new"), &open, &file),
                 BIFOLIO_ERROR_OPEN);
    CHECK(bifolio_last_errno() == EEXIST);
    file = open_file(cache, "new", BIFOLIO_OPEN_READ);
    size_t read_bytes = 0;
    CHECK_OK(bifolio_file_read(file, 0, found, 200, &read_bytes));
    CHECK(read_bytes == 101 && memcmp(found, written, 101) == 0);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

int main(int count, char **arguments) {
    directory = count > 1 ? arguments[1] : ".";
    reads_give_what_was_written();
    residency_follows_populate_and_evict();
    changes_past_the_cache_are_taken_on_request();
    a_class_has_its_floor_and_its_ceiling();
    hot_pages_are_read_again();
    memory_files_have_holes_and_go_to_the_swap();
    a_descriptor_is_taken_over();
    a_failed_close_loses_nothing();
    texts_are_cut_to_fit();
    len_max_is_raised_and_decided_by_the_first_open();
    return 0;
}
