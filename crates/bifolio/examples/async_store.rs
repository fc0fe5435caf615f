//! A store of records for an asynchronous server, without threads of its own: `put` is ready when
//! the record is durable, `get` sends the page from the cache without a copy. Any number of both
//! are in progress on one thread; syncs that wait together are one.
//!
//! `cargo run --release --example async_store`

use bifolio::{Cache, File, OpenOptions, OwnedPageRef};
use std::error::Error;
use std::time::Instant;

const RECORD_BYTES: u64 = 1024;

#[derive(Clone)]
struct Store(File);

impl Store {
    /// Returns the number of the record, once it is durable.
    async fn put(&self, record: Vec<u8>) -> bifolio::Result<u64> {
        let position = self.0.append_async(record).await?;
        self.0.sync_async().await?;
        Ok(position / RECORD_BYTES)
    }

    /// Returns a record, in place.
    async fn get(&self, number: u64) -> bifolio::Result<OwnedPageRef> {
        self.0.pin_async(number * RECORD_BYTES..(number + 1) * RECORD_BYTES).await
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = tempfile::tempdir_in(std::env::current_dir()?)?;
    let cache = Cache::builder().memory(4 << 20).build()?;
    let options = OpenOptions::new().write(true).create(true);
    let store = Store(cache.open(directory.path().join("records"), &options)?);
    let record = |number: u64| vec![number as u8; RECORD_BYTES as usize];
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let begun = Instant::now();
        let put = |number| {
            let store = store.clone();
            tokio::spawn(async move { store.put(record(number)).await })
        };
        let puts: Vec<_> = (0..10_000).map(put).collect();
        for (number, put) in puts.into_iter().enumerate() {
            assert_eq!(put.await??, number as u64, "in the order of the calls");
        }
        println!("10000 records are durable after {:?}", begun.elapsed());
        let begun = Instant::now();
        let get = |number| {
            let store = store.clone();
            tokio::spawn(async move { (number, store.get(number).await) })
        };
        for get in (0..10_000).map(get).collect::<Vec<_>>() {
            let (number, page) = get.await?;
            assert_eq!(page?.u32_le(0), Some(number as u8 as u32 * 0x0101_0101));
        }
        println!("10000 records are read after {:?}", begun.elapsed());
        Ok::<(), Box<dyn Error>>(())
    })?;
    println!("{} flushes", cache.stats().storage.flushes);
    Ok(())
}
