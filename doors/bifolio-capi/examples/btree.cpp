// A B-tree whose lookups read its pages in place, in a Bifolio cache.
//
//   btree FILE [KEYS]      builds a tree of KEYS keys in FILE, and looks each of them up
//
// A lookup calls bifolio_file_read_with for each page on its way: the page is read without a copy,
// a lock or a reference, and read again if a writer changed it meanwhile. So each node is seen as
// it was at one moment. A tree that moves keys between nodes while it is read latches them besides,
// or links each node to its right neighbour (Lehman and Yao, 1981).

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bifolio.h"

namespace {

void check(bifolio_result result) {
    if (result != BIFOLIO_OK)
        throw std::runtime_error(std::string(bifolio_result_name(result)) + ": " +
                                 bifolio_last_error());
}

// Handles that end themselves. A close can fail, so it is a call and no destructor.
class Cache {
public:
    explicit Cache(uint64_t memory_bytes) {
        bifolio_cache_options options{};
        options.size = sizeof options;
        options.memory_bytes = memory_bytes;
        check(bifolio_cache_new(&options, &cache_));
    }
    Cache(const Cache &) = delete;
    Cache &operator=(const Cache &) = delete;
    ~Cache() { bifolio_cache_free(cache_); }

    void close() {
        check(bifolio_cache_close(cache_));
        cache_ = nullptr;
    }

    bifolio_stats stats() const {
        bifolio_stats stats{};
        stats.size = sizeof stats;
        check(bifolio_cache_stats(cache_, &stats));
        return stats;
    }

    bifolio_cache *get() const { return cache_; }

private:
    bifolio_cache *cache_ = nullptr;
};

class File {
public:
    File(const Cache &cache, const char *path, uint32_t flags) {
        bifolio_open_options options{};
        options.size = sizeof options;
        options.flags = flags;
        check(bifolio_cache_open(cache.get(), path, &options, &file_));
    }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File() { bifolio_file_free(file_); }

    void close() {
        check(bifolio_file_close(file_));
        file_ = nullptr;
    }

    bifolio_file *get() const { return file_; }

private:
    bifolio_file *file_ = nullptr;
};

constexpr uint64_t page_bytes = 4096;

// One page. In an inner page, `values` are the numbers of the pages below.
struct Node {
    static constexpr uint32_t capacity = (page_bytes - 8) / 16;
    uint32_t count;
    uint32_t is_leaf;
    uint64_t keys[capacity];
    uint64_t values[capacity];
};
static_assert(sizeof(Node) <= page_bytes, "a node is a page");

// A search in one node: the key, and what was found.
struct Search {
    uint64_t key;
    bool is_leaf;
    bool is_found;
    uint64_t value;  // in an inner node, the page below
};

// Searches a node whose bytes other threads may change meanwhile, so each is read as volatile, and
// the count is checked; what a changed node leads to is thrown away.
void search_node(const void *bytes, size_t, void *context) noexcept {
    auto node = static_cast<const volatile Node *>(bytes);
    auto search = static_cast<Search *>(context);
    const uint32_t count = node->count;
    uint32_t low = 0, high = std::min<uint32_t>(count, Node::capacity);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (node->keys[middle] <= search->key)
            low = middle + 1;
        else
            high = middle;
    }
    search->is_leaf = node->is_leaf != 0;
    search->is_found = low > 0 && (!search->is_leaf || node->keys[low - 1] == search->key);
    search->value = low > 0 ? node->values[low - 1] : 0;
}

uint64_t key_of(uint64_t nth) { return nth * 3 + 1; }
uint64_t value_of(uint64_t key) { return key * 2654435761u; }

// Writes the tree from its leaves up, and returns the page of its root.
uint64_t build(const File &file, uint64_t keys) {
    uint64_t next_page = 0;
    std::vector<std::pair<uint64_t, uint64_t>> level;
    for (uint64_t nth = 0; nth < keys; nth++)
        level.emplace_back(key_of(nth), value_of(key_of(nth)));
    for (bool is_leaf = true;; is_leaf = false) {
        std::vector<std::pair<uint64_t, uint64_t>> above;
        for (size_t first = 0; first < level.size(); first += Node::capacity) {
            Node node{};
            node.is_leaf = is_leaf;
            node.count = static_cast<uint32_t>(
                std::min<size_t>(Node::capacity, level.size() - first));
            for (uint32_t at = 0; at < node.count; at++)
                std::tie(node.keys[at], node.values[at]) = level[first + at];
            check(bifolio_file_write(file.get(), next_page * page_bytes, &node, sizeof node));
            above.emplace_back(node.keys[0], next_page++);
        }
        if (above.size() <= 1)
            break;
        level = std::move(above);
    }
    // The last page is written whole: a range that is read in place must lie in the file.
    check(bifolio_file_set_len(file.get(), next_page * page_bytes));
    check(bifolio_file_sync_data(file.get()));
    return next_page - 1;
}

// The value of a key; false if there is no such key.
bool find(const File &file, uint64_t root, uint64_t key, uint64_t *value) {
    Search search{key, false, false, root};
    do {
        check(bifolio_file_read_with(file.get(), search.value * page_bytes, sizeof(Node),
                                     search_node, &search));
    } while (!search.is_leaf && search.is_found);
    *value = search.value;
    return search.is_found;
}

void run(const char *path, uint64_t keys) {
    Cache cache(64 << 20);
    uint64_t root;
    {
        File file(cache, path,
                  BIFOLIO_OPEN_READ | BIFOLIO_OPEN_WRITE | BIFOLIO_OPEN_CREATE |
                      BIFOLIO_OPEN_TRUNCATE);
        root = build(file, keys);
        file.close();
    }
    File file(cache, path, BIFOLIO_OPEN_READ);
    uint64_t value = 0, random = 1;
    if (find(file, root, 0, &value) || find(file, root, key_of(keys), &value))
        throw std::runtime_error("a key was found that is not in the tree");
    for (uint64_t nth = 0; nth < keys; nth++)
        if (!find(file, root, key_of(nth), &value) || value != value_of(key_of(nth)))
            throw std::runtime_error("a key was not found");
    auto start = std::chrono::steady_clock::now();
    for (uint64_t nth = 0; nth < keys; nth++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        find(file, root, key_of((random >> 33) % keys), &value);
    }
    std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    bifolio_stats stats = cache.stats();
    std::printf("%" PRIu64 " keys in %" PRIu64 " pages: %.0f ns a lookup, %" PRIu64
                " hits, %" PRIu64 " misses\n",
                keys, root + 1, taken.count() / static_cast<double>(keys), stats.reads_hits_optimistic,
                stats.reads_misses);
    file.close();
    cache.close();
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 2) {
        std::fprintf(stderr, "usage: btree FILE [KEYS]\n");
        return 2;
    }
    try {
        uint64_t keys = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1000000;
        run(arguments[1], std::max<uint64_t>(keys, 1));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "btree: %s\n", error.what());
        return 1;
    }
}
