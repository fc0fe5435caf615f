/* Misuse: null pointers, structs of other versions, wrong numbers. Outputs stay as they were. */
#include <pthread.h>
#include <sys/wait.h>

#include "check.h"

static void null_pointers_are_refused(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "misuse", NEW_FILE);
    bifolio_file *unchanged = file;
    size_t count = 42;
    char byte = 'x';
    CHECK_RESULT(bifolio_cache_new(NULL, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_cache_open(NULL, "x", NULL, &unchanged), BIFOLIO_ERROR_NULL);
    CHECK(strcmp(bifolio_last_error(), "cache is a null pointer") == 0);
    CHECK_RESULT(bifolio_cache_open(cache, NULL, NULL, &unchanged), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_cache_open(cache, "x", NULL, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_cache_memory_file(cache, NULL, NULL, &unchanged), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_cache_stats(cache, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_cache_close(NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read(NULL, 0, &byte, 1, &count), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read(file, 0, NULL, 1, &count), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read(file, 0, &byte, 1, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read_many(file, NULL, 1), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_write(file, 0, NULL, 1), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_append(NULL, &byte, 1, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_sync_data(NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_set_len(NULL, 0), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_residency(file, 0, 1, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_pin(file, 0, 1, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_pin_write(file, 0, 1, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_map_new(file, 0, 1, 0, NULL, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_map_populate(NULL, 0, 1), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_features(cache, NULL, 1, NULL), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_close(NULL), BIFOLIO_ERROR_NULL);
    CHECK(bifolio_file_len(NULL) == 0 && bifolio_file_folio_bytes(NULL) == 0);
    CHECK(unchanged == file && count == 42 && byte == 'x');
    bifolio_cache_free(NULL);
    bifolio_file_free(NULL);
    bifolio_map_free(NULL);
    bifolio_map_pin_free(NULL);
    bifolio_pin_release(NULL);
    bifolio_write_pin_release(NULL);
    bifolio_file_free(file);
    bifolio_cache_free(cache);
}

static void structs_of_other_versions_are_understood(void) {
    bifolio_cache *cache = NULL;
    bifolio_cache_options old = {0};
    CHECK_RESULT(bifolio_cache_new(&old, &cache), BIFOLIO_ERROR_ARGUMENT);
    CHECK(cache == NULL && strstr(bifolio_last_error(), "its size is 0") != NULL);
    old.size = (size_t)-1;
    CHECK_RESULT(bifolio_cache_new(&old, &cache), BIFOLIO_ERROR_ARGUMENT);

    struct {
        bifolio_cache_options known;
        uint64_t unknown[3];
    } newer = {0};
    newer.known.size = sizeof newer;
    newer.known.memory_bytes = 1 << 20;
    newer.unknown[1] = 7;
    CHECK_RESULT(bifolio_cache_new(&newer.known, &cache), BIFOLIO_ERROR_ARGUMENT);
    CHECK(strstr(bifolio_last_error(), "does not have") != NULL);
    newer.unknown[1] = 0;
    CHECK_OK(bifolio_cache_new(&newer.known, &cache));

    struct {
        bifolio_stats known;
        uint64_t unknown;
    } stats = {{0}, 99};
    stats.known.size = sizeof stats;
    CHECK_OK(bifolio_cache_stats(cache, &stats.known));
    CHECK(stats.known.size == sizeof stats.known && stats.known.memory_bound_bytes == 1 << 20);
    CHECK(stats.unknown == 99);
    bifolio_cache_free(cache);
}

static void wrong_values_are_refused(void) {
    bifolio_cache *cache = NULL;
    bifolio_cache_options options = {.size = sizeof options};
    options.flags = 0x100;
    CHECK_RESULT(bifolio_cache_new(&options, &cache), BIFOLIO_ERROR_ARGUMENT);
    options.flags = 0;
    options.huge_pages = 3;
    CHECK_RESULT(bifolio_cache_new(&options, &cache), BIFOLIO_ERROR_ARGUMENT);
    options.huge_pages = 0;
    options.memory_bytes = 1;
    CHECK_RESULT(bifolio_cache_new(&options, &cache), BIFOLIO_ERROR_CONFIG);
    CHECK(cache == NULL && bifolio_last_errno() == EINVAL);
    CHECK(strstr(bifolio_last_error(), "memory_bytes: 1 bytes") == bifolio_last_error());
    options.memory_bytes = 1 << 20;
    options.swap_directory = "/no/such/directory";
    CHECK_RESULT(bifolio_cache_new(&options, &cache), BIFOLIO_ERROR_SWAP_FILE);
    CHECK(bifolio_last_errno() == ENOENT);
    options.swap_directory = NULL;
    CHECK_OK(bifolio_cache_new(&options, &cache));

    bifolio_file *file = NULL;
    bifolio_open_options open = {.size = sizeof open};
    open.flags = 1 << 20;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("x"), &open, &file), BIFOLIO_ERROR_ARGUMENT);
    open.flags = BIFOLIO_OPEN_CREATE;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("x"), &open, &file), BIFOLIO_ERROR_CONFIG);
    CHECK(strstr(bifolio_last_error(), "/x: ") != NULL);
    open.flags = 0;
    open.direct = 9;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("x"), &open, &file), BIFOLIO_ERROR_ARGUMENT);
    open.direct = 0;
    CHECK_RESULT(bifolio_cache_open(cache, in_directory("none"), NULL, &file), BIFOLIO_ERROR_OPEN);
    CHECK(bifolio_last_errno() == ENOENT && strstr(bifolio_last_error(), "none") != NULL);
    CHECK_RESULT(bifolio_cache_open(cache, directory, NULL, &file), BIFOLIO_ERROR_NOT_REGULAR);
    CHECK_RESULT(bifolio_cache_open_fd(cache, 12345, NULL, &file), BIFOLIO_ERROR_ARGUMENT);
    CHECK(file == NULL);

    file = open_file(cache, "misuse", READ_WRITE);
    CHECK_RESULT(bifolio_file_set_access(file, 9), BIFOLIO_ERROR_ARGUMENT);
    CHECK_RESULT(bifolio_file_sync_range(file, UINT64_MAX - 1, 5), BIFOLIO_ERROR_OUT_OF_RANGE);
    CHECK_RESULT(bifolio_file_punch_hole(file, 0, 1), BIFOLIO_OK);
    CHECK_RESULT(bifolio_set_log(NULL, NULL, 77), BIFOLIO_ERROR_ARGUMENT);
    bifolio_file_free(file);
    file = open_file(cache, "misuse", BIFOLIO_OPEN_READ);
    CHECK_RESULT(bifolio_file_write(file, 0, "x", 1), BIFOLIO_ERROR_NOT_OPENED_FOR);
    CHECK(bifolio_last_errno() == EBADF);
    bifolio_file_free(file);
    bifolio_cache_free(cache);
}

static void *fails_elsewhere(void *nothing) {
    CHECK(bifolio_last_error()[0] == 0 && bifolio_last_errno() == 0);
    CHECK_RESULT(bifolio_file_close(NULL), BIFOLIO_ERROR_NULL);
    return nothing;
}

static void the_last_error_is_of_the_thread(void) {
    bifolio_cache *cache = NULL;
    CHECK_RESULT(bifolio_cache_close(cache), BIFOLIO_ERROR_NULL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fails_elsewhere, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strcmp(bifolio_last_error(), "cache is a null pointer") == 0);
}

static void closed_handles_and_forked_children_are_told(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "misuse", READ_WRITE);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        size_t count = 0;
        char byte;
        bifolio_result result = bifolio_file_read(file, 0, &byte, 1, &count);
        _exit(result == BIFOLIO_ERROR_FORKED ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(bifolio_cache_close(cache));
    size_t count = 0;
    char byte;
    CHECK_RESULT(bifolio_file_read(file, 0, &byte, 1, &count), BIFOLIO_ERROR_CLOSED);
    bifolio_file_free(file);
}

int main(int count, char **arguments) {
    directory = count > 1 ? arguments[1] : ".";
    null_pointers_are_refused();
    structs_of_other_versions_are_understood();
    wrong_values_are_refused();
    the_last_error_is_of_the_thread();
    closed_handles_and_forked_children_are_told();
    return 0;
}
