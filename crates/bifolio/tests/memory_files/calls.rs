//! Memory files: holes, allocation, punches, seeks.

use bifolio::{Cache, ErrorKind, File, OpenOptions};
use std::ops::RangeInclusive;

const PAGE: u64 = 4096;

fn cache(memory_bytes: u64) -> Cache {
    Cache::builder().memory(memory_bytes).build().unwrap()
}

fn with_folios(cache: &Cache, folio_bytes: u64) -> File {
    let options = OpenOptions::new().write(true).folio_bytes(folio_bytes);
    cache.memory_file_with("test", &options).unwrap()
}

fn read(file: &File, position: u64, length: usize) -> Vec<u8> {
    let mut buffer = vec![0xEE; length];
    file.read_exact_at(&mut buffer, position).unwrap();
    buffer
}

/// Waits until `pages` pages are resident, or will be: a chunk that is being made resident in the
/// background counts.
#[track_caller]
fn assert_resident(cache: &Cache, pages: RangeInclusive<u64>) {
    crate::support::wait_for_stats(cache, "pages are held", |stats| {
        pages.contains(&((stats.memory.frame_bytes - stats.memory.free_bytes) / PAGE))
    });
}

#[test]
fn written_pages_are_there_and_others_are_zeros() {
    for folio_bytes in [4096, 65536, 2 << 20] {
        let cache = cache(64 << 20);
        let file = with_folios(&cache, folio_bytes);
        file.write_all_at(b"leaf", 3_000_000).unwrap();
        assert_eq!(file.len(), 3_000_004);
        assert_eq!(read(&file, 2_999_998, 6), b"\0\0leaf");
        assert_eq!(read(&file, 0, 100_000), vec![0; 100_000]);
        file.set_len(4_000_000).unwrap();
        assert_eq!(read(&file, 3_000_002, 10), b"af\0\0\0\0\0\0\0\0");
        file.sync_data().unwrap();
        assert_eq!(cache.stats().memory.dirty_bytes, 0, "nothing that a device waits for");
    }
}

#[test]
fn a_sparse_file_costs_what_is_touched() {
    let cache = cache(16 << 20);
    let options = OpenOptions::new().write(true).len_max(1 << 50);
    let file = cache.memory_file_with("sparse", &options).unwrap();
    file.set_len(1 << 50).unwrap();
    let before = cache.stats().memory.used_bytes;
    assert_eq!(read(&file, (1 << 49) + 5, 8192), vec![0; 8192]);
    assert_eq!(cache.stats().memory.used_bytes, before, "a hole was read and cost memory");
    file.write_all_at(b"x", (1 << 50) - 1).unwrap();
    assert_resident(&cache, 1..=1);
    assert_eq!(file.seek_data(0).unwrap(), Some((1 << 50) - PAGE));
    assert_eq!(file.seek_hole((1 << 50) - 1).unwrap(), Some(1 << 50));
    file.set_len(0).unwrap();
    assert_resident(&cache, 0..=0);
}

#[test]
fn an_allocation_is_room_that_reads_as_zeros() {
    let cache = cache(4 << 20);
    let file = with_folios(&cache, 4096);
    file.allocate(0..1 << 20).unwrap();
    assert_eq!(file.len(), 1 << 20);
    assert_resident(&cache, 256..=256);
    assert_eq!(file.seek_data(0).unwrap(), None, "allocated is not written");
    assert_eq!(read(&file, 0, 1 << 20), vec![0; 1 << 20]);
    file.write_all_at(b"x", 5 * PAGE + 7).unwrap();
    assert_eq!(read(&file, 5 * PAGE, 9), b"\0\0\0\0\0\0\0x\0");
    assert_eq!(file.seek_data(0).unwrap(), Some(5 * PAGE));
    assert_eq!(file.seek_hole(5 * PAGE).unwrap(), Some(6 * PAGE));
    // All the rest of the cache goes to others; what was promised is still there.
    let others = with_folios(&cache, 4096);
    let error = others.allocate(0..8 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert_eq!(others.len(), 0);
    // A failed one leaves nothing.
    assert_resident(&cache, 256..=256);
    let mut filled = 0;
    while others.write_all_at(&[1; 4096], filled).is_ok() {
        filled += PAGE;
    }
    assert!(filled > 2 << 20, "{filled}");
    file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    assert_eq!(read(&file, 0, 1 << 20), vec![7; 1 << 20]);
}

#[test]
fn a_punched_hole_is_zeros_and_gives_its_memory_back() {
    for folio_bytes in [4096, 65536] {
        let cache = cache(8 << 20);
        let file = with_folios(&cache, folio_bytes);
        file.write_all_at(&vec![9; 1 << 20], 0).unwrap();
        file.punch_hole(100..500_000).unwrap();
        let mut expected = vec![9; 1 << 20];
        expected[100..500_000].fill(0);
        assert_eq!(read(&file, 0, 1 << 20), expected);
        let whole = 500_000 / folio_bytes - 1;
        let left = 256 - whole * folio_bytes / PAGE;
        assert_resident(&cache, left..=left);
        assert_eq!(file.len(), 1 << 20);
        assert_eq!(file.seek_hole(0).unwrap(), Some(folio_bytes));
        assert_eq!(file.seek_data(folio_bytes).unwrap(), Some((whole + 1) * folio_bytes));
    }
}

#[test]
fn a_cut_tail_does_not_come_back() {
    let cache = cache(8 << 20);
    let file = with_folios(&cache, 65536);
    file.write_all_at(&vec![5; 200_000], 0).unwrap();
    file.set_len(70_000).unwrap();
    file.set_len(200_000).unwrap();
    let mut expected = vec![0; 200_000];
    expected[..70_000].fill(5);
    assert_eq!(read(&file, 0, 200_000), expected);
}

#[test]
fn a_pin_of_a_hole_is_memory_to_write_to() {
    let cache = cache(8 << 20);
    let file = with_folios(&cache, 4096);
    file.set_len(1 << 20).unwrap();
    let pin = file.pin(8192..8200).unwrap();
    let mut pin_mut = file.pin_mut(8192..8200).unwrap();
    pin_mut.copy_from(0, b"through!").unwrap();
    drop(pin_mut);
    let mut seen = [0; 8];
    pin.copy_to(0, &mut seen).unwrap();
    assert_eq!(&seen, b"through!");
    assert_eq!(read(&file, 8190, 12), b"\0\0through!\0\0");
}

/// Returns a page whose bytes encode its index and its write.
fn page(index: u64, round: u64) -> Vec<u8> {
    let word = index.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ round;
    word.to_le_bytes().repeat(512)
}

#[test]
fn four_times_the_memory_goes_to_the_swap_and_comes_back() {
    for folio_bytes in [4096, 16384, 65536] {
        let directory = tempfile::tempdir().unwrap();
        let cache =
            Cache::builder().memory(4 << 20).swap_directory(directory.path()).build().unwrap();
        let file = with_folios(&cache, folio_bytes);
        let pages = 4096;
        for index in 0..pages {
            file.write_all_at(&page(index, 1), index * PAGE).unwrap();
        }
        let stats = cache.stats();
        assert!(stats.memory.swap_bytes >= 10 << 20, "{}", stats.memory.swap_bytes);
        assert!(stats.memory.used_bytes <= stats.memory.bound_bytes);
        for index in (0..pages).rev() {
            assert_eq!(read(&file, index * PAGE, 4096), page(index, 1), "page {index}");
        }
        for index in (0..pages).step_by(7) {
            file.write_all_at(&page(index, 2)[..100], index * PAGE + 200).unwrap();
        }
        for index in 0..pages {
            let mut expected = page(index, 1);
            if index % 7 == 0 {
                expected[200..300].copy_from_slice(&page(index, 2)[..100]);
            }
            assert_eq!(read(&file, index * PAGE, 4096), expected, "page {index}");
        }
        file.punch_hole(PAGE..pages * PAGE - 10).unwrap();
        assert_eq!(file.seek_data(PAGE * 16).unwrap(), Some(pages * PAGE - folio_bytes));
        drop(file);
        let stats = cache.stats();
        assert_eq!((stats.memory.swap_bytes, stats.memory.unswapped_bytes), (0, 0));
        // What is still in the batches of a few CPUs is freed with the next that comes there.
        assert_resident(&cache, 0..=4 * 31 * folio_bytes / PAGE);
    }
}

#[test]
fn unchanged_pages_are_not_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::builder().memory(4 << 20).swap_directory(directory.path()).build().unwrap();
    let file = with_folios(&cache, 4096);
    for index in 0..4096 {
        file.write_all_at(&page(index, 1), index * PAGE).unwrap();
    }
    for round in 0..3 {
        let before = cache.stats();
        for index in 0..4096 {
            assert_eq!(read(&file, index * PAGE, 4096), page(index, 1), "page {index}");
        }
        let after = cache.stats();
        let written = after.storage.swapped_out_pages - before.storage.swapped_out_pages;
        assert!(round == 0 || written < 100, "{written} pages were written in round {round}");
        assert!(after.storage.swapped_in_pages - before.storage.swapped_in_pages > 2500);
        let requests = after.storage.read_requests - before.storage.read_requests;
        assert!(requests < 600, "neighbours come back together: {requests} requests");
    }
}

#[test]
fn a_memory_file_without_a_swap_leaves_room_to_others() {
    for memory_bytes in [256 << 10, 1 << 20, 8 << 20] {
        let directory = crate::support::directory();
        let cache = cache(memory_bytes);
        let file = with_folios(&cache, 4096);
        let mut pages = 0;
        let refused = loop {
            match file.write_all_at(&[7; PAGE as usize], pages * PAGE) {
                Ok(()) => pages += 1,
                Err(error) => break error,
            }
        };
        // Chunks of 64 KiB, and the bound may end in the middle of one.
        assert!(pages * PAGE + (64 << 10) > memory_bytes / 4 * 3, "{pages} of {memory_bytes}");
        crate::support::error_of(
            Err::<(), _>(refused),
            &["memory files without a swap", "swap_directory", "set_memory"],
        );
        assert_eq!(cache.stats().memory.allocation_waits, 0, "nothing can come of a wait");
        let (path, bytes) = crate::support::random_file(&directory, "disk", 4 << 20);
        let disk = crate::support::open(&cache, &path);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (disk, bytes) = (&disk, &bytes);
                scope.spawn(move || {
                    for index in (thread..1024).step_by(7) {
                        let range = index * PAGE as usize..(index + 1) * PAGE as usize;
                        let found = read(disk, range.start as u64, range.len());
                        assert_eq!(found, bytes[range], "page {index}");
                    }
                });
            }
        });
        disk.write_all_at(&vec![9; 1 << 20], 0).unwrap();
        disk.sync_data().unwrap();
        assert_eq!(read(&file, 0, (pages * PAGE) as usize), vec![7; (pages * PAGE) as usize]);
        // What is given up can be used again, but for what the other file's metadata has taken.
        file.punch_hole(0..8 * PAGE).unwrap();
        file.write_all_at(&[7; PAGE as usize], 0).unwrap();
    }
}
