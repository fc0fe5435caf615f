//! The ablation of batched reads: the same bytes in every mode, and what each takes to find them.
#![cfg(feature = "ablation")]

use bifolio::{Cache, File, OpenOptions, ReadMode};

const PAGE: u64 = 4096;
const LEN: u64 = 1 << 20;
const MODES: [ReadMode; 4] =
    [ReadMode::Batched, ReadMode::BatchedReferences, ReadMode::OneByOne, ReadMode::LockedOneByOne];

fn file_in(mode: ReadMode, folio_bytes: u64) -> (Cache, File) {
    let cache = Cache::builder().memory(16 << 20).read_mode(mode).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
    let file = cache.memory_file_with("file", &options).unwrap();
    (cache, file)
}

/// References and Entries that one read of the whole file takes.
fn lookups(cache: &Cache, file: &File, block: u64) -> (u64, u64) {
    let before = cache.stats();
    for position in (0..LEN).step_by(block as usize) {
        file.read_exact_at(&mut vec![0; block as usize], position).unwrap();
    }
    let after = cache.stats();
    let references = after.references_taken - before.references_taken;
    (references, after.entries_loaded - before.entries_loaded)
}

#[test]
fn every_mode_reads_the_same_bytes() {
    for mode in MODES {
        for folio_bytes in [4 << 10, 64 << 10] {
            let (_cache, file) = file_in(mode, folio_bytes);
            let mut expected = bifolio_testing::fill_bytes(1, LEN as usize);
            file.write_all_at(&expected, 0).unwrap();
            file.punch_hole(100 * PAGE + 5..200 * PAGE).unwrap();
            expected[100 * PAGE as usize + 5..200 * PAGE as usize].fill(0);
            file.set_len(LEN + 100).unwrap();
            expected.resize(LEN as usize + 100, 0);
            for (position, count) in [(0, LEN as usize + 200), (70, 64), (99 * 4096, 9000)] {
                let end = expected.len().min(position + count);
                assert!(
                    crate::support::read(&file, position as u64, count) == expected[position..end]
                );
            }
        }
    }
}

#[test]
fn reads_take_as_many_references_as_their_mode_says() {
    let pages = LEN / PAGE;
    for (mode, folio_bytes, block, references) in [
        (ReadMode::Batched, 4 << 10, PAGE, 0),
        (ReadMode::Batched, 4 << 10, 64 << 10, 0),
        (ReadMode::Batched, 64 << 10, LEN, 0),
        (ReadMode::BatchedReferences, 4 << 10, PAGE, 0),
        (ReadMode::BatchedReferences, 4 << 10, 64 << 10, pages),
        (ReadMode::BatchedReferences, 64 << 10, LEN, pages / 16),
        (ReadMode::OneByOne, 4 << 10, PAGE, pages),
        (ReadMode::OneByOne, 64 << 10, LEN, pages),
        (ReadMode::LockedOneByOne, 64 << 10, LEN, pages),
    ] {
        let (cache, file) = file_in(mode, folio_bytes);
        file.write_all_at(&vec![1; LEN as usize], 0).unwrap();
        let first = lookups(&cache, &file, block);
        let taken = lookups(&cache, &file, block);
        assert_eq!(taken.0, references, "{mode:?}, folios of {folio_bytes}, blocks of {block}");
        assert!(taken.1 >= 2 * pages && taken.1 <= 5 * pages, "{taken:?}, at first {first:?}");
    }
}

#[test]
fn a_hole_costs_no_more_entries_than_it_has_folios() {
    let pages = LEN / PAGE;
    let (cache, file) = file_in(ReadMode::Batched, 4096);
    file.set_len(2 * LEN).unwrap();
    assert_eq!(lookups(&cache, &file, LEN), (0, 0), "nothing was ever charged there");
    file.write_all_at(b"x", LEN).unwrap();
    assert_eq!(lookups(&cache, &file, LEN), (0, pages));
    let (cache, file) = file_in(ReadMode::OneByOne, 4096);
    file.set_len(LEN).unwrap();
    assert_eq!(lookups(&cache, &file, LEN), (0, pages), "a lookup a page");
}
