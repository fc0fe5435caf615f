/* Pins and maps: bytes in place, and what keeps files from being closed under them. */
#include "check.h"

static void pins_hold_bytes_in_place(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "pins", NEW_FILE);
    CHECK_OK(bifolio_file_set_len(file, 64 << 10));
    CHECK_OK(bifolio_file_write(file, 5000, "in place", 8));

    bifolio_pin pin = {0}, other = {0};
    CHECK_OK(bifolio_file_pin(file, 5000, 8, &pin));
    CHECK(pin.length == 8 && memcmp(pin.data, "in place", 8) == 0);
    CHECK_RESULT(bifolio_file_pin(file, 0, 8, &pin), BIFOLIO_ERROR_ARGUMENT);
    CHECK_RESULT(bifolio_file_pin(file, 4090, 8, &other), BIFOLIO_ERROR_PIN_SPANS_FOLIOS);
    CHECK_RESULT(bifolio_file_pin(file, 64 << 10, 8, &other), BIFOLIO_ERROR_PAST_END);
    CHECK_RESULT(bifolio_file_pin(file, 5, SIZE_MAX, &other), BIFOLIO_ERROR_OUT_OF_RANGE);
    CHECK(other.data == NULL && other.length == 0);
    CHECK_RESULT(bifolio_file_close(file), BIFOLIO_ERROR_IN_USE);
    CHECK(strstr(bifolio_last_error(), "1 pins") != NULL);
    bifolio_file_free(file); /* Has no effect: the pin is still there. */
    CHECK(memcmp(pin.data, "in place", 8) == 0);
    bifolio_pin_release(&pin);
    CHECK(pin.data == NULL);
    bifolio_pin_release(&pin);

    bifolio_write_pin writing = {0};
    CHECK_OK(bifolio_file_pin_write(file, 8192, 4096, &writing));
    memset(writing.data, 'w', 4096);
    CHECK_RESULT(bifolio_file_pin_write(file, 0, 1, &writing), BIFOLIO_ERROR_ARGUMENT);
    CHECK_RESULT(bifolio_file_close(file), BIFOLIO_ERROR_IN_USE);
    bifolio_write_pin_release(&writing);
    bifolio_write_pin_release(&writing);
    char byte = 0;
    size_t count = 0;
    CHECK_OK(bifolio_file_read(file, 12287, &byte, 1, &count));
    CHECK(byte == 'w');

    enum { PINS = 200 };
    static bifolio_pin pins[PINS];
    memset(pins, 0, sizeof pins);
    for (int nth = 0; nth < PINS; nth++)
        CHECK_OK(bifolio_file_pin(file, (uint64_t)nth * 300 % 60000 / 4096 * 4096, 10, &pins[nth]));
    for (int nth = 0; nth < PINS; nth++)
        bifolio_pin_release(&pins[nth]);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

struct sum {
    unsigned calls;
    size_t length;
    unsigned long bytes;
};

static void add_bytes(const void *bytes, size_t length, void *context) {
    const volatile unsigned char *byte = bytes;
    struct sum *sum = context;
    sum->bytes = 0;
    for (size_t at = 0; at < length; at++)
        sum->bytes += byte[at];
    sum->length = length;
    sum->calls++;
}

static void functions_read_bytes_in_place(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "in-place", NEW_FILE);
    CHECK_OK(bifolio_file_set_len(file, 64 << 10));
    CHECK_OK(bifolio_file_write(file, 5000, "\1\2\3", 3));
    for (unsigned call = 1; call <= 3; call++) {
        struct sum sum = {0};
        CHECK_OK(bifolio_file_read_with(file, 4096, 4096, add_bytes, &sum));
        CHECK(sum.calls == 1 && sum.length == 4096 && sum.bytes == 6);
    }
    struct sum sum = {0};
    CHECK_RESULT(bifolio_file_read_with(NULL, 0, 1, add_bytes, &sum), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read_with(file, 0, 1, NULL, &sum), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read_with(file, 4090, 8, add_bytes, &sum),
                 BIFOLIO_ERROR_PIN_SPANS_FOLIOS);
    CHECK_RESULT(bifolio_file_read_with(file, 64 << 10, 8, add_bytes, &sum),
                 BIFOLIO_ERROR_PAST_END);
    CHECK_RESULT(bifolio_file_read_with(file, 5, SIZE_MAX, add_bytes, &sum),
                 BIFOLIO_ERROR_OUT_OF_RANGE);
    CHECK(sum.calls == 0);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void too_many_pins_are_an_error(void) {
    bifolio_cache_options options = {.size = sizeof options};
    options.memory_bytes = 256 << 10;
    options.reclaim_wait_ms_max = 1;
    bifolio_cache *cache = NULL;
    CHECK_OK(bifolio_cache_new(&options, &cache));
    bifolio_file *file = open_file(cache, "pins", READ_WRITE);
    CHECK_OK(bifolio_file_set_len(file, 1 << 20));
    static bifolio_pin pins[256];
    bifolio_result result = BIFOLIO_OK;
    int taken = 0;
    while (taken < 256 && result == BIFOLIO_OK) {
        result = bifolio_file_pin(file, (uint64_t)taken * 4096, 1, &pins[taken]);
        taken += result == BIFOLIO_OK;
    }
    CHECK(result == BIFOLIO_ERROR_FULL && taken > 8 && taken < 64);
    while (taken > 0)
        bifolio_pin_release(&pins[--taken]);
    CHECK_OK(bifolio_file_pin(file, 255 * 4096, 1, &pins[0]));
    bifolio_pin_release(&pins[0]);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static void maps_are_memory(void) {
    bifolio_cache *cache = new_cache(8 << 20);
    bifolio_file *file = open_file(cache, "maps", NEW_FILE | BIFOLIO_OPEN_MAPPABLE);
    CHECK_OK(bifolio_file_set_len(file, 1 << 20));
    CHECK_OK(bifolio_file_write(file, 70000, "mapped", 6));
    bifolio_map *map = NULL;
    void *address = NULL;
    CHECK_RESULT(bifolio_map_new(file, 0, 1, 8, &map, &address), BIFOLIO_ERROR_ARGUMENT);
    CHECK(map == NULL && address == NULL);
    bifolio_result made = bifolio_map_new(file, 0, BIFOLIO_TO_END, BIFOLIO_MAP_WRITE, &map, &address);
    if (made == BIFOLIO_ERROR_CANNOT_MAP) {
        printf("maps are not tested: %s\n", bifolio_last_error());
    } else {
        CHECK_OK(made);
        char *bytes = address;
        CHECK(memcmp(bytes + 70000, "mapped", 6) == 0);
        bytes[5] = 's';
        CHECK_OK(bifolio_map_populate(map, 0, BIFOLIO_TO_END));
        CHECK_OK(bifolio_map_sync(map, 0, 4096));
        CHECK_OK(bifolio_map_take_error(map));
        bifolio_map_pin *pin = NULL;
        CHECK_OK(bifolio_map_pin_new(map, 0, 8192, BIFOLIO_MAP_PIN_DEVICE_WRITES, &pin));
        bifolio_map_pin_free(pin);
        CHECK_OK(bifolio_map_pin_new(map, 0, 8192, 0, &pin));
        bifolio_map_pin_free(pin);
        bifolio_map *read_only = NULL;
        CHECK_OK(bifolio_map_new(file, 0, 8192, 0, &read_only, &address));
        CHECK(((char *)address)[5] == 's');
        CHECK_RESULT(bifolio_map_sync(read_only, 0, 1), BIFOLIO_ERROR_ARGUMENT);
        CHECK_RESULT(bifolio_cache_close(cache), BIFOLIO_ERROR_MAPS_ALIVE);
        bifolio_map_free(read_only);
        bifolio_map_free(map);
    }
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

static bifolio_result result_of_open(bifolio_cache *cache, bifolio_file **file) {
    bifolio_open_options options = {.size = sizeof options};
    options.flags = NEW_FILE | BIFOLIO_OPEN_MAPPABLE;
    return bifolio_cache_open(cache, in_directory("maps"), &options, file);
}

int main(int count, char **arguments) {
    directory = count > 1 ? arguments[1] : ".";
    pins_hold_bytes_in_place();
    functions_read_bytes_in_place();
    too_many_pins_are_an_error();
    bifolio_cache *cache = new_cache(8 << 20);
    bifolio_file *file = NULL;
    bifolio_result opened = result_of_open(cache, &file);
    bifolio_file_free(file);
    bifolio_cache_free(cache);
    if (opened == BIFOLIO_OK)
        maps_are_memory();
    else
        printf("maps are not tested: %s\n", bifolio_last_error());
    return 0;
}
