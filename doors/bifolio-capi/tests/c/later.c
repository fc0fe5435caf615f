/* Calls that complete later, and files with a write gate. */
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

/* What `done` was called with, and an event that it writes. */
struct answer {
    int event;
    atomic_int calls;
    bifolio_result result;
    uint64_t value;
};

static void note(bifolio_result result, uint64_t value, void *context) {
    struct answer *answer = context;
    answer->result = result;
    answer->value = value;
    uint64_t one = 1;
    atomic_fetch_add(&answer->calls, 1);
    if (write(answer->event, &one, sizeof one) != sizeof one)
        abort();
}

static struct answer new_answer(void) {
    struct answer answer = {.event = eventfd(0, EFD_CLOEXEC)};
    CHECK(answer.event >= 0);
    return answer;
}

/* Waits for the event, as an event loop does. */
static uint64_t value_of(struct answer *answer) {
    uint64_t count = 0;
    CHECK(read(answer->event, &count, sizeof count) == sizeof count);
    CHECK(count == 1 && answer->calls == 1);
    CHECK(answer->result == BIFOLIO_OK);
    answer->calls = 0;
    return answer->value;
}

static void calls_complete_later(void) {
    enum { READS = 200, PAGE = 4096 };
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "later", NEW_FILE);
    struct answer answer = new_answer();
    for (int nth = 0; nth < READS; nth++) {
        char page[PAGE];
        memset(page, nth, sizeof page);
        CHECK_OK(bifolio_file_append_async(file, page, sizeof page, note, &answer));
        memset(page, 'x', sizeof page); /* It was copied. */
        CHECK(value_of(&answer) == (uint64_t)nth * PAGE);
    }
    CHECK_OK(bifolio_file_write_async(file, 5 * PAGE + 10, "later", 5, note, &answer));
    CHECK(value_of(&answer) == 0);
    CHECK_OK(bifolio_file_sync_async(file, note, &answer));
    CHECK(value_of(&answer) == 0);
    bifolio_evicted evicted;
    CHECK_OK(bifolio_file_evict(file, 0, BIFOLIO_TO_END, &evicted));

    static struct answer answers[READS];
    static char pages[READS][PAGE];
    for (int nth = 0; nth < READS; nth++) {
        answers[nth] = new_answer();
        uint64_t offset = (uint64_t)nth * PAGE;
        CHECK_OK(bifolio_file_read_async(file, offset, pages[nth], PAGE, note, &answers[nth]));
    }
    for (int nth = 0; nth < READS; nth++) {
        CHECK(value_of(&answers[nth]) == PAGE);
        CHECK(pages[nth][0] == (char)nth && pages[nth][PAGE - 1] == (char)nth);
        close(answers[nth].event);
    }
    CHECK(memcmp(pages[5] + 10, "later", 5) == 0);
    /* What is in memory is there when the call returns. The answer to the read of a page that was
       absent may come just before others find the page, so it is read again first. */
    size_t found = 0;
    CHECK_OK(bifolio_file_read(file, 9 * PAGE, pages[0], PAGE, &found));
    CHECK(found == PAGE);
    memset(pages[0], 0, PAGE);
    CHECK_OK(bifolio_file_read_async(file, 9 * PAGE, pages[0], PAGE, note, &answer));
    CHECK(answer.calls == 1 && pages[0][PAGE - 1] == 9 && value_of(&answer) == PAGE);
    CHECK_OK(bifolio_file_read_async(file, READS * PAGE - 6, pages[0], 100, note, &answer));
    CHECK(value_of(&answer) == 6);

    CHECK_RESULT(bifolio_file_read_async(file, 0, pages[0], 1, NULL, &answer), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_read_async(NULL, 0, pages[0], 1, note, &answer), BIFOLIO_ERROR_NULL);
    CHECK_RESULT(bifolio_file_write_async(file, 0, NULL, 1, note, &answer), BIFOLIO_ERROR_NULL);
    /* An error of the call itself is an answer. */
    CHECK_OK(bifolio_file_read_async(file, UINT64_MAX - 8, pages[0], 8, note, &answer));
    uint64_t count = 0;
    CHECK(read(answer.event, &count, sizeof count) == sizeof count);
    CHECK(answer.result == BIFOLIO_ERROR_OUT_OF_RANGE && answer.calls == 1);
    close(answer.event);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

/* A log that is durable up to an LSN. */
struct log {
    _Atomic uint64_t durable;
    atomic_int asked;
    atomic_int refuses;
};

static uint64_t durable_lsn(void *context) {
    return ((struct log *)context)->durable;
}

static int make_durable(uint64_t lsn, void *context) {
    struct log *log = context;
    atomic_fetch_add(&log->asked, 1);
    if (log->refuses)
        return EIO;
    if (log->durable < lsn)
        log->durable = lsn;
    return 0;
}

static void a_page_waits_for_its_log(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    static struct log log;
    bifolio_gate gate = {durable_lsn, make_durable, &log};
    bifolio_open_options options = {.size = sizeof options, .flags = NEW_FILE};
    bifolio_file *file = NULL;
    CHECK_RESULT(bifolio_cache_open_gated(cache, in_directory("gated"), &options, NULL, &file),
                 BIFOLIO_ERROR_NULL);
    CHECK_OK(bifolio_cache_open_gated(cache, in_directory("gated"), &options, &gate, &file));
    CHECK_OK(bifolio_file_write_logged(file, 0, "first", 5, 10));
    uint64_t offset = 0;
    CHECK_OK(bifolio_file_append_logged(file, "second", 6, 11, &offset));
    CHECK(offset == 5 && bifolio_file_len(file) == 11);
    CHECK(bifolio_file_oldest_dirty_lsn(file) == 10);
    char found[11];
    size_t read = 0;
    CHECK_OK(bifolio_file_read(file, 0, found, sizeof found, &read));
    CHECK(read == 11 && memcmp(found, "firstsecond", 11) == 0);

    log.refuses = 1;
    CHECK_RESULT(bifolio_file_sync_data(file), BIFOLIO_ERROR_GATED);
    CHECK(log.asked > 0 && log.durable == 0);
    log.refuses = 0;
    bifolio_checkpoint *checkpoint = NULL;
    CHECK_OK(bifolio_file_checkpoint(file, &checkpoint));
    CHECK_OK(bifolio_file_write_logged(file, 50000, "third", 5, 12));
    CHECK_OK(bifolio_checkpoint_sync(checkpoint));
    CHECK(log.durable >= 11);
    bifolio_checkpoint_free(checkpoint);
    bifolio_checkpoint_free(NULL);
    CHECK_OK(bifolio_file_write_out(file, 0, BIFOLIO_TO_END));
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK(log.durable >= 12 && bifolio_file_oldest_dirty_lsn(file) == 0);

    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

/* Every change without an LSN is refused, but through the handle for those. */
static void a_file_with_a_gate_is_changed_with_lsns(void) {
    bifolio_cache *cache = new_cache(1 << 20);
    static struct log log;
    bifolio_gate gate = {durable_lsn, make_durable, &log};
    bifolio_open_options options = {.size = sizeof options, .flags = NEW_FILE};
    bifolio_file *file = NULL;
    CHECK_OK(bifolio_cache_open_gated(cache, in_directory("logged"), &options, &gate, &file));
    struct answer answer = new_answer();
    bifolio_write_pin pin = {0};
    CHECK_RESULT(bifolio_file_write(file, 0, "x", 1), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK(bifolio_last_errno() == EOPNOTSUPP);
    CHECK_RESULT(bifolio_file_append(file, "x", 1, NULL), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_set_len(file, 9), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_punch_hole(file, 0, 9), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_allocate(file, 0, 9), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_write_async(file, 0, "x", 1, note, &answer),
                 BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_append_async(file, "x", 1, note, &answer),
                 BIFOLIO_ERROR_GATE_MISUSE);
    CHECK(answer.calls == 0 && bifolio_file_len(file) == 0);

    /* A handle without the gate cannot change the file either. */
    bifolio_file *other = open_file(cache, "logged", READ_WRITE);
    CHECK_RESULT(bifolio_file_write(other, 0, "x", 1), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_write_logged(other, 0, "x", 1, 5), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_RESULT(bifolio_file_assign_lsn(other, 0, 1, 5), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK(bifolio_file_oldest_dirty_lsn(other) == 0 && bifolio_file_oldest_dirty_lsn(NULL) == 0);
    CHECK_RESULT(bifolio_file_unlogged(other, &other), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_OK(bifolio_file_close(other));

    bifolio_file *unlogged = NULL;
    CHECK_OK(bifolio_file_unlogged(file, &unlogged));
    CHECK_OK(bifolio_file_set_len(unlogged, 8192));
    CHECK_OK(bifolio_file_write(unlogged, 4096, "zeros", 5));
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK(log.asked == 0);
    CHECK_OK(bifolio_file_close(unlogged));

    /* Pins: changes in place, whose LSN comes with the pin or after it. */
    CHECK_RESULT(bifolio_write_pin_assign_lsn(&pin, 20), BIFOLIO_ERROR_ARGUMENT);
    CHECK_RESULT(bifolio_write_pin_assign_lsn(NULL, 20), BIFOLIO_ERROR_NULL);
    CHECK_OK(bifolio_file_pin_write(file, 0, 5, &pin));
    memcpy(pin.data, "first", 5);
    CHECK_OK(bifolio_write_pin_assign_lsn(&pin, 20));
    bifolio_write_pin_release(&pin);
    CHECK(bifolio_file_oldest_dirty_lsn(file) == 20);
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK(log.durable == 20);
    CHECK_OK(bifolio_file_pin_write(file, 4096, 5, &pin));
    CHECK_RESULT(bifolio_file_close(file), BIFOLIO_ERROR_IN_USE);
    memcpy(pin.data, "later", 5);
    bifolio_write_pin_release(&pin);
    CHECK_RESULT(bifolio_file_sync_data(file), BIFOLIO_ERROR_GATED);
    CHECK_OK(bifolio_file_assign_lsn(file, 4096, 5, 21));
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK(log.durable == 21);

    bifolio_pin pinned = {0};
    CHECK_OK(bifolio_file_pin(file, 0, 5, &pinned));
    CHECK(memcmp(pinned.data, "first", 5) == 0);
    bifolio_pin_release(&pinned);
    bifolio_file *plain = open_file(cache, "plain", NEW_FILE);
    CHECK_OK(bifolio_file_write(plain, 0, "plain", 5));
    CHECK_OK(bifolio_file_pin_write(plain, 0, 5, &pin));
    CHECK_RESULT(bifolio_write_pin_assign_lsn(&pin, 22), BIFOLIO_ERROR_GATE_MISUSE);
    bifolio_write_pin_release(&pin);
    CHECK_OK(bifolio_file_close(plain));
    close(answer.event);
    CHECK_OK(bifolio_file_close(file));
    CHECK_OK(bifolio_cache_close(cache));
}

/* Pins that complete later: no copy, released by any thread, kept past the handle. */
static void *release(void *pin) {
    bifolio_pin_release(pin);
    return NULL;
}

static void pins_complete_later(void) {
    enum { PINS = 20, PAGE = 4096 };
    bifolio_cache *cache = new_cache(1 << 20);
    bifolio_file *file = open_file(cache, "pinned", NEW_FILE);
    for (int nth = 0; nth < PINS; nth++) {
        char page[PAGE];
        memset(page, nth, sizeof page);
        CHECK_OK(bifolio_file_append(file, page, sizeof page, NULL));
    }
    CHECK_OK(bifolio_file_sync_data(file));
    CHECK_OK(bifolio_file_evict(file, 0, BIFOLIO_TO_END, NULL));
    static bifolio_pin pins[PINS];
    static struct answer answers[PINS];
    for (int nth = 0; nth < PINS; nth++) {
        answers[nth] = new_answer();
        uint64_t offset = (uint64_t)nth * PAGE;
        CHECK_OK(bifolio_file_pin_async(file, offset, PAGE, &pins[nth], note, &answers[nth]));
    }
    for (int nth = 0; nth < PINS; nth++) {
        CHECK(value_of(&answers[nth]) == 0);
        const char *bytes = pins[nth].data;
        CHECK(pins[nth].length == PAGE && bytes[0] == (char)nth && bytes[PAGE - 1] == (char)nth);
    }
    struct answer *answer = &answers[0];
    CHECK_RESULT(bifolio_file_pin_async(file, 0, PAGE, &pins[0], note, answer),
                 BIFOLIO_ERROR_ARGUMENT);
    CHECK_RESULT(bifolio_file_pin_async(file, 0, PAGE, NULL, note, answer), BIFOLIO_ERROR_NULL);
    bifolio_pin past = {0};
    CHECK_RESULT(bifolio_file_pin_async(file, 0, PAGE, &past, NULL, answer), BIFOLIO_ERROR_NULL);
    CHECK_OK(bifolio_file_pin_async(file, PINS * PAGE, 1, &past, note, answer));
    uint64_t count = 0;
    CHECK(read(answer->event, &count, sizeof count) == sizeof count);
    CHECK(answer->result == BIFOLIO_ERROR_PAST_END && past.data == NULL);
    answer->calls = 0;

    /* The handle ends, and the bytes stay. */
    CHECK_OK(bifolio_file_close(file));
    for (int nth = 0; nth < PINS; nth++) {
        CHECK(((const char *)pins[nth].data)[PAGE / 2] == (char)nth);
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, release, &pins[nth]) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(pins[nth].data == NULL);
        close(answers[nth].event);
    }
    CHECK_OK(bifolio_cache_close(cache));
}

/* The thread that serves the calls of the parent is not in the child. */
static void calls_of_a_child_complete_too(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        calls_complete_later();
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    directory = arguments[1];
    calls_complete_later();
    calls_of_a_child_complete_too();
    pins_complete_later();
    a_page_waits_for_its_log();
    a_file_with_a_gate_is_changed_with_lsns();
    return 0;
}
