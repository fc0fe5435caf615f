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
    bifolio_gated_file *file = NULL;
    CHECK_RESULT(bifolio_cache_open_gated(cache, in_directory("gated"), &options, NULL, &file),
                 BIFOLIO_ERROR_NULL);
    CHECK_OK(bifolio_cache_open_gated(cache, in_directory("gated"), &options, &gate, &file));
    CHECK_OK(bifolio_gated_file_write(file, 0, "first", 5, 10));
    uint64_t offset = 0;
    CHECK_OK(bifolio_gated_file_append(file, "second", 6, 11, &offset));
    CHECK(offset == 5 && bifolio_gated_file_len(file) == 11);
    CHECK(bifolio_gated_file_oldest_dirty_lsn(file) == 10);
    char found[11];
    size_t read = 0;
    CHECK_OK(bifolio_gated_file_read(file, 0, found, sizeof found, &read));
    CHECK(read == 11 && memcmp(found, "firstsecond", 11) == 0);

    log.refuses = 1;
    CHECK_RESULT(bifolio_gated_file_sync_data(file), BIFOLIO_ERROR_GATED);
    CHECK(log.asked > 0 && log.durable == 0);
    log.refuses = 0;
    bifolio_checkpoint *checkpoint = NULL;
    CHECK_OK(bifolio_gated_file_checkpoint(file, &checkpoint));
    CHECK_OK(bifolio_gated_file_write(file, 50000, "third", 5, 12));
    CHECK_OK(bifolio_checkpoint_sync(checkpoint));
    CHECK(log.durable >= 11);
    bifolio_checkpoint_free(checkpoint);
    bifolio_checkpoint_free(NULL);
    CHECK_OK(bifolio_gated_file_write_out(file, 0, BIFOLIO_TO_END));
    CHECK_OK(bifolio_gated_file_sync_data(file));
    CHECK(log.durable >= 12 && bifolio_gated_file_oldest_dirty_lsn(file) == 0);

    /* A handle without the gate cannot change the file. */
    bifolio_file *other = open_file(cache, "gated", READ_WRITE);
    CHECK_RESULT(bifolio_file_write(other, 0, "x", 1), BIFOLIO_ERROR_GATE_MISUSE);
    CHECK_OK(bifolio_file_close(other));
    CHECK_OK(bifolio_gated_file_close(file));
    bifolio_gated_file_free(NULL);
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
    a_page_waits_for_its_log();
    return 0;
}
