//! Footers that stay in memory: 64 files of 4 MiB with a footer of 16 KiB each, in a cache that has
//! memory for an eighth of the files. A scan of everything between two rounds of reads of footers
//! costs them nothing if they are kept.
//!
//! ```text
//! cargo run --manifest-path doors/Cargo.toml -p bifolio-object-store --example kept_footers
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifolio::Cache;
use bifolio_object_store::CachedStore;
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;

const FILES: u64 = 64;
const FILE_BYTES: u64 = 4 << 20;
const FOOTER_BYTES: u64 = 16 << 10;

fn location(number: u64) -> Path {
    Path::from(format!("table/{number}.parquet"))
}

/// Reads the footers, as a query does that plans. Returns the time.
async fn plan(store: &CachedStore) -> Result<Duration, Box<dyn Error>> {
    let started = Instant::now();
    for number in 0..FILES {
        store.get_range(&location(number), FILE_BYTES - FOOTER_BYTES..FILE_BYTES).await?;
    }
    Ok(started.elapsed())
}

async fn scan(store: &CachedStore) -> Result<(), Box<dyn Error>> {
    for number in 0..FILES {
        store.get_range(&location(number), 0..FILE_BYTES - FOOTER_BYTES).await?;
    }
    Ok(store.flush().await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let bucket = Arc::new(InMemory::new());
    for number in 0..FILES {
        bucket.put(&location(number), vec![number as u8; FILE_BYTES as usize].into()).await?;
    }
    for is_kept in [false, true] {
        let directory = tempfile::tempdir()?;
        let cache = Cache::builder().memory(32 << 20).build()?;
        let footers = cache.class("footers")?;
        let bucket = Arc::<InMemory>::clone(&bucket);
        let mut building = CachedStore::builder(bucket, &cache)
            .disk(directory.path(), 512 << 20)
            .part_bytes(256 << 10)
            .head_age(Duration::from_secs(3600));
        if is_kept {
            footers.set_floor(4 << 20)?;
            building = building.keep("footers", 32 << 20, |_, size| size - FOOTER_BYTES..size);
        }
        let store = building.build()?;
        plan(&store).await?;
        scan(&store).await?;
        scan(&store).await?;
        let before = store.metrics();
        let time = plan(&store).await?;
        let counts = store.metrics().since(&before);
        println!(
            "{:<11} {:>3} of {FILES} footers from memory, {:>3} from the disk, {time:?}",
            if is_kept { "kept:" } else { "all alike:" },
            counts.memory_hits,
            counts.disk_hits,
        );
        println!("{:<11} {} KiB in the class", "", footers.stats().resident_bytes >> 10);
    }
    Ok(())
}
