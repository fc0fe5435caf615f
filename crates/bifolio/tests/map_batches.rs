//! Batches of pages of a mapped file that leave together, clean and dirty ones mixed.
//!
//! # Safety
//! Loads and stores through a map that nobody else uses.
#![allow(unsafe_code)]

mod support;

use bifolio::{Cache, OpenOptions};
use std::time::Duration;

const PAGES: u64 = 4096;
const PAGE_BYTES: u64 = 4096;

/// Several batches share the memory their pages leave through, and one transfer: no copy that is
/// still to be written out may give way to one of the next batch.
#[test]
fn pages_of_mixed_batches_keep_their_bytes() {
    if !support::files_can_be_mapped() {
        return;
    }
    // The last one is more than a scan finds.
    for batch in [1, 31, 128, 512] {
        stores_and_loads(batch);
    }
}

fn stores_and_loads(batch: usize) {
    let directory = tempfile::tempdir().unwrap();
    let builder = Cache::builder().memory(8 << 20).spill_in(directory.path());
    let cache = builder.unmap_batch_folios(batch).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).mappable(true);
    let file = cache.memory_file_with("pages", &options).unwrap();
    file.set_len(PAGES * PAGE_BYTES).unwrap();
    let mut map = file.map_mut(0..PAGES * PAGE_BYTES).unwrap();
    let start = map.as_mut_ptr();
    let mut stored = vec![0; PAGES as usize];
    for round in 1..5 {
        for page in 0..PAGES {
            let at = start.wrapping_add((page * PAGE_BYTES) as usize).cast::<u64>();
            // SAFETY: inside of the map.
            let loaded = unsafe { at.read_volatile() };
            assert_eq!(
                loaded, stored[page as usize],
                "page {page} in round {round}, batch {batch}"
            );
            if round == 1 || (page * 7 + round) % 5 < 2 {
                stored[page as usize] = page * 8 + round;
                // SAFETY: as above.
                unsafe { at.write_volatile(page * 8 + round) };
            }
        }
    }
    assert_listed(&cache);
}

/// Every page that is held is on a list, or in the batch of a CPU on its way there: none was taken
/// off to be unmapped and forgotten.
fn assert_listed(cache: &Cache) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let on_their_way = 31 * PAGE_BYTES * cpus;
    let missing = || {
        let stats = cache.stats();
        let held = stats.frame_bytes - stats.free_bytes;
        held.saturating_sub(stats.inactive_bytes + stats.active_bytes)
    };
    // Reclaim may be at work for a moment.
    let is_so = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        missing() <= on_their_way
    });
    assert!(is_so, "{} bytes are on no list", missing());
}
