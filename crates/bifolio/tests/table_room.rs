//! Room for the tables of large files in a full cache: it is found a chunk at a time, and kept.

use bifolio::{Cache, OpenOptions, ReadRequest};

const PAGE: u64 = 4096;
const LENGTH: u64 = 8 << 30;
const MEMORY: u64 = 64 << 20;

#[test]
fn the_tables_of_a_large_file_cost_no_more_evictions_than_they_take_room() {
    let sparse = tempfile::NamedTempFile::new().unwrap();
    sparse.as_file().set_len(LENGTH).unwrap();
    let cache = Cache::builder().memory(MEMORY).build().unwrap();
    let file = cache.open(sparse.path(), &OpenOptions::new()).unwrap();
    let mut pages = vec![0; 512 * PAGE as usize];
    for position in (0..MEMORY).step_by(pages.len()) {
        file.read_exact_at(&mut pages, position).unwrap();
    }
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..40 {
        let mut place = || random.u64(0..LENGTH / PAGE) * PAGE;
        let requests = pages.chunks_mut(PAGE as usize);
        let mut requests: Vec<_> = requests.map(|page| ReadRequest::new(place(), page)).collect();
        file.read_many(&mut requests).unwrap();
    }
    // A table page for each 2 MiB of the file: 16 MiB in all.
    let stats = cache.stats();
    assert!(stats.metadata_bytes > LENGTH / 512, "{} bytes", stats.metadata_bytes);
    let room_pages = LENGTH / 512 / PAGE;
    assert!(stats.pgevacuate <= room_pages, "{} of {room_pages}", stats.pgevacuate);
    assert!(stats.used_bytes <= stats.bound_bytes);
}
