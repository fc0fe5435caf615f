//! Eviction under a map in batches of which only some pages are dirty: the copies of those wait for
//! their write-out while the next batch is unmapped, and none takes the place of another.
//!
//! # Safety
//! Loads and stores words of a map that only this test has.

#![allow(unsafe_code)]

use bifolio::{Cache, FaultMode, OpenOptions};

const PAGE_BYTES: usize = 4096;
const WORD: usize = PAGE_BYTES / size_of::<u64>();
const PAGES: usize = 8192;

#[test]
fn pages_keep_their_bytes_when_some_of_their_batch_are_clean() {
    if !bifolio::features().iter().any(|f| f.name == "user-faults" && f.available) {
        return;
    }
    for batch in [1, 8, 31, 128] {
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(8 << 20).spill_in(directory.path());
        let cache = builder.unmap_batch_folios(batch).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let file = cache.memory_file_with("mixed", &options.faults(FaultMode::Threads)).unwrap();
        let bytes = (PAGES * PAGE_BYTES) as u64;
        file.set_len(bytes).unwrap();
        let mut map = file.map_mut(0..bytes).unwrap();
        let words = map.as_mut_ptr().cast::<u64>();
        // What page `page` holds is its number, and in which pass it was stored to.
        let mut expected: Vec<u64> = (0..PAGES as u64).map(|page| page << 8).collect();
        for pass in 0..4 {
            for (page, expected) in expected.iter_mut().enumerate() {
                let word = words.wrapping_add(page * WORD);
                // SAFETY: inside the map, aligned, and nobody else uses it.
                let found = unsafe { word.read_volatile() };
                assert!(pass == 0 || found == *expected, "batch {batch}, pass {pass}, page {page}");
                if pass == 0 || (page + pass) % 3 == 0 {
                    *expected = (page << 8 | pass) as u64;
                    // SAFETY: as above.
                    unsafe { word.write_volatile(*expected) };
                }
            }
        }
        assert!(cache.stats().unmapped_pages > PAGES as u64);
        drop(map);
        drop(file);
        cache.close().unwrap();
    }
}
