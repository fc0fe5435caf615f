//! Batches of pages of a mapped file that are evicted together, clean and dirty ones mixed.
//!
//! # Safety
//! Loads and stores through a map that no other code uses.
#![allow(unsafe_code)]

use bifolio::{Cache, OpenOptions};
use std::time::Duration;

const PAGES: u64 = 4096;
const PAGE_BYTES: u64 = 4096;

/// Several batches share the bounce buffer and one transfer: a copy that is still to be written
/// must not be overwritten by a copy of the next batch.
#[test]
fn pages_of_mixed_batches_keep_their_bytes() {
    if !crate::support::files_can_be_mapped() {
        return;
    }
    // The last one is more than a scan finds.
    for batch in [1, 31, 128, 512] {
        stores_and_loads(batch);
    }
}

fn stores_and_loads(batch: usize) {
    let directory = tempfile::tempdir().unwrap();
    let builder = Cache::builder().memory(8 << 20).swap_directory(directory.path());
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

/// Checks that every referenced page is on a list, or in an LRU batch: none was taken off to be
/// unmapped and forgotten.
fn assert_listed(cache: &Cache) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let on_their_way = 31 * PAGE_BYTES * cpus;
    let missing = || {
        let stats = cache.stats();
        let held = stats.memory.frame_bytes - stats.memory.free_bytes;
        held.saturating_sub(stats.memory.inactive_bytes + stats.memory.active_bytes)
    };
    // Reclaim may be at work for a while on a busy machine.
    let is_so = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        missing() <= on_their_way
    });
    assert!(is_so, "{} bytes are on no list", missing());
}

/// While pages are read in order, they are evicted in long transfers; for random readers, which
/// would wait behind those, in short ones.
#[test]
fn random_reads_keep_eviction_transfers_short() {
    if !crate::support::files_can_be_mapped() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Below the bound from which a chunk is 2 MiB, more than this test lets be free.
    let cache = Cache::builder().memory(31 << 20).swap_directory(directory.path()).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).mappable(true);
    let file = cache.memory_file_with("pages", &options).unwrap();
    let pages = 128 << 20 >> 12;
    file.set_len(pages * PAGE_BYTES).unwrap();
    let mut map = file.map_mut(0..pages * PAGE_BYTES).unwrap();
    let start = map.as_mut_ptr();
    let store = |page: u64| {
        let at = start.wrapping_add((page * PAGE_BYTES) as usize).cast::<u64>();
        // SAFETY: inside of the map.
        unsafe { at.write_volatile(page) };
    };
    (0..pages).for_each(store);
    let pages_by_transfer = |touch: &mut dyn FnMut()| {
        let before = cache.stats();
        touch();
        let after = cache.stats();
        (after.storage.swapped_out_pages - before.storage.swapped_out_pages)
            / (after.storage.write_requests - before.storage.write_requests)
    };
    let in_order = pages_by_transfer(&mut || (0..pages / 2).for_each(store));
    assert!(in_order > 64, "{in_order} pages");
    let mut random = fastrand::Rng::with_seed(7);
    let mut in_no_order = |count| (0..count).for_each(|_| store(random.u64(..pages)));
    // Until the stream is forgotten: some pages at which it would continue are resident, which
    // shortens it each time.
    in_no_order(16_000);
    let at_random = pages_by_transfer(&mut || in_no_order(4000));
    // Two that are neighbours by chance look like a stream, for a while.
    assert!((1..48).contains(&at_random), "{at_random} pages, {in_order} in order");
    // No more memory is kept free than a random reader needs, once a batch that was evicted at a
    // busy moment is used up.
    let is_used = (0..20).any(|_| {
        in_no_order(1000);
        let stats = cache.stats();
        stats.memory.bound_bytes - stats.memory.used_bytes < 1 << 20
    });
    assert!(is_used, "{:?}", cache.stats());
}
