//! Caches of others in the benchmark `hit-ratio`: each holds page numbers, all of the same weight,
//! and has as much room as Bifolio has pages in memory.

use bifolio_bench::{HitRatio, Rival};
use foyer_memory::{Cache, CacheBuilder, CacheProperties, EvictionConfig, LfuConfig, S3FifoConfig};

pub(crate) const HIT_RATIO: HitRatio = HitRatio {
    rivals: &[
        Rival { name: "foyer_lfu", misses: |room, trace| foyer(room, trace, LfuConfig::default()) },
        Rival {
            name: "foyer_s3_fifo",
            misses: |room, trace| foyer(room, trace, S3FifoConfig::default()),
        },
        Rival { name: "quick_cache", misses: quick_cache },
    ],
};

fn foyer(room: usize, references: &[u32], policy: impl Into<EvictionConfig>) -> u64 {
    let builder = CacheBuilder::new(room).with_shards(1).with_eviction_config(policy);
    let cache: Cache<u32, (), _, CacheProperties> = builder.build();
    let mut misses = 0;
    for page in references {
        if cache.get(page).is_none() {
            misses += 1;
            cache.insert(*page, ());
        }
    }
    misses
}

fn quick_cache(room: usize, references: &[u32]) -> u64 {
    let mut cache = quick_cache::unsync::Cache::new(room);
    let mut misses = 0;
    for page in references {
        if cache.get(page).is_none() {
            misses += 1;
            cache.insert(*page, ());
        }
    }
    misses
}
