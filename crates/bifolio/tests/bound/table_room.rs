//! Memory for the tables of large files in a full cache: it is freed a chunk at a time, and kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bifolio::{Cache, OpenOptions, ReadRequest};
use bifolio_testing::{Call, Fault, FaultyBacking, Gate, MemoryBacking};

const PAGE: u64 = 4096;
const LENGTH: u64 = 8 << 30;
const MEMORY: u64 = 64 << 20;

#[test]
fn tables_of_a_large_file_cost_only_the_room_they_take() {
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
        let mut requests: Vec<_> = requests.map(|page| ReadRequest::new(page, place())).collect();
        file.read_many(&mut requests).unwrap();
    }
    // A table page for each 2 MiB of the file: 16 MiB in all, of which those stay that are in use,
    // or cost less than an eighth of the memory. A chunk cannot be emptied while the thread in the
    // background frees a batch of its pages: then another one is.
    let stats = cache.stats();
    assert!(stats.memory.metadata_bytes > MEMORY / 8, "{} bytes", stats.memory.metadata_bytes);
    let room_pages = LENGTH / 512 / PAGE + 512;
    assert!(
        stats.evictions.evacuated_folios <= room_pages,
        "{} of {room_pages}",
        stats.evictions.evacuated_folios
    );
    assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
}

#[test]
fn the_least_memory_for_a_folio_is_enough_for_a_long_file() {
    for folio_bytes in [64 << 10, 128 << 10, 2 << 20] {
        let sparse = tempfile::NamedTempFile::new().unwrap();
        sparse.as_file().set_len(64 << 20).unwrap();
        let least = if folio_bytes > 64 << 10 { 32 * folio_bytes } else { 256 << 10 };
        let cache = Cache::builder().memory(least).build().unwrap();
        let file = cache.open(sparse.path(), &OpenOptions::new().folio_bytes(folio_bytes)).unwrap();
        for position in (0..64 << 20).step_by(1 << 20) {
            file.read_exact_at(&mut [0; 8], position).unwrap();
        }
        assert!(cache.stats().memory.used_bytes <= cache.stats().memory.bound_bytes);
    }
}

/// A page of a table that was charged for a read must not be freed repeatedly to make room for the
/// frame of that read, if a write-out will make room.
#[test]
fn a_read_waits_for_room_and_does_not_take_its_own_table() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![1; PAGE as usize])));
    let cache =
        Cache::builder().memory(256 << 10).dirty_age_max(Duration::from_millis(1)).build().unwrap();
    let options = OpenOptions::new().read(true).write(true);
    let file = cache.open_backing(backing.clone(), &options).unwrap();
    let gate = Gate::new();
    backing.inject(Fault::on(Call::Write).held(&gate));
    file.write_at(b"written", 0).unwrap();
    gate.wait_for_arrivals(1);
    let sparse = tempfile::NamedTempFile::new().unwrap();
    sparse.as_file().set_len(LENGTH).unwrap();
    let sparse = cache.open(sparse.path(), &OpenOptions::new()).unwrap();
    let is_open = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            is_open.store(true, Ordering::Relaxed);
            gate.open();
        });
        let mut holds = Vec::new();
        // Each needs a frame, and a page of the table.
        let error = loop {
            let start = holds.len() as u64 * (2 << 20);
            match sparse.pin(start..start + PAGE) {
                Ok(pin) => holds.push(pin.into_owned()),
                Err(error) => break error,
            }
        };
        assert!(is_open.load(Ordering::Relaxed), "{} holds, then {error:?}", holds.len());
    });
}
