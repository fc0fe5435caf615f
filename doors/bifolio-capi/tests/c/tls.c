/* A program with more static thread-local storage than the stack of a thread of the library. The C
 * library takes such storage from the stack of each thread. */
#include "check.h"

enum { PAGES = 1024 };
static _Thread_local volatile char storage[300 << 10] = {1};

int main(int count, char **arguments) {
    directory = count > 1 ? arguments[1] : ".";
    storage[sizeof storage - 1] = 1;
    /* A quarter of the file: most pages are written out and evicted by threads of the library. */
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "tls", NEW_FILE);
    uint32_t words[1024] = {0}, found[1024];
    for (uint32_t page = 0; page < PAGES; page++) {
        words[0] = page;
        CHECK_OK(bifolio_file_write(file, (uint64_t)page * 4096, words, 4096));
    }
    CHECK_OK(bifolio_file_sync_data(file));
    for (uint32_t page = 0; page < PAGES; page++) {
        size_t length = 0;
        CHECK_OK(bifolio_file_read(file, (uint64_t)page * 4096, found, 4096, &length));
        CHECK(length == 4096 && found[0] == page);
    }
    CHECK(storage[0] == 1);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
    return 0;
}
