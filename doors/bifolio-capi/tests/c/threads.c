/* Threads that use one file in every way, in a cache that is a quarter of it. */
#include <pthread.h>

#include "check.h"

enum { THREADS = 4, PAGES = 1024, ROUNDS = 4000 };
static bifolio_file *file;
static int lines_told;

/* Every page holds its number, four bytes long, in each of its words. */
static void fill(uint32_t page, uint32_t *words) {
    for (int at = 0; at < 1024; at++)
        words[at] = page * 2654435761u + (uint32_t)at;
}

static void *work(void *argument) {
    uint64_t random = 88172645463325252u + (uint64_t)(size_t)argument;
    uint32_t expected[1024], found[1024];
    bifolio_pin pin = {0};
    bifolio_write_pin writing = {0};
    for (int round = 0; round < ROUNDS; round++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        uint32_t page = (uint32_t)(random % PAGES);
        size_t count = 0;
        fill(page, expected);
        switch (random >> 32 & 7) {
        case 0:
            CHECK_OK(bifolio_file_write(file, (uint64_t)page * 4096, expected, 4096));
            break;
        case 1:
            CHECK_OK(bifolio_file_pin_write(file, (uint64_t)page * 4096, 4096, &writing));
            CHECK(memcmp(writing.data, expected, 4096) == 0);
            memcpy(writing.data, expected, 4096);
            bifolio_write_pin_release(&writing);
            break;
        case 2: case 3: case 4:
            CHECK_OK(bifolio_file_pin(file, (uint64_t)page * 4096, 4096, &pin));
            CHECK(memcmp(pin.data, expected, 4096) == 0);
            bifolio_pin_release(&pin);
            break;
        default:
            CHECK_OK(bifolio_file_read(file, (uint64_t)page * 4096, found, 4096, &count));
            CHECK(count == 4096 && memcmp(found, expected, 4096) == 0);
        }
        if (round % 1000 == 999)
            CHECK_OK(bifolio_file_sync_data(file));
    }
    return NULL;
}

static void line(void *context, uint32_t level, const char *message) {
    (void)level;
    *(int *)context += strlen(message) > 0;
}

int main(int count, char **arguments) {
    directory = count > 1 ? arguments[1] : ".";
    CHECK_OK(bifolio_set_log(line, &lines_told, BIFOLIO_LOG_INFO));
    bifolio_cache *cache = new_cache(1 << 20);
    file = open_file(cache, "threads", NEW_FILE);
    uint32_t words[1024];
    for (uint32_t page = 0; page < PAGES; page++) {
        fill(page, words);
        CHECK_OK(bifolio_file_write(file, (uint64_t)page * 4096, words, 4096));
    }
    pthread_t threads[THREADS];
    for (size_t nth = 0; nth < THREADS; nth++)
        CHECK(pthread_create(&threads[nth], NULL, work, (void *)nth) == 0);
    for (size_t nth = 0; nth < THREADS; nth++)
        CHECK(pthread_join(threads[nth], NULL) == 0);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
    CHECK_OK(bifolio_set_log(NULL, NULL, BIFOLIO_LOG_OFF));
    return 0;
}
