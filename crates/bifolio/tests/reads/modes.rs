//! The ablation of batched reads: the same bytes in every way, and the cost of each lookup.
#![cfg(feature = "ablation")]

use bifolio::{Cache, File, OpenOptions};

const PAGE: u64 = 4096;
const LEN: u64 = 1 << 20;

/// A way to read: into a buffer, from a position.
type Way = fn(&File, &mut [u8], u64) -> bifolio::Result<usize>;

const WAYS: [(&str, Way); 3] = [
    ("batched", |file, buffer, position| file.read_at(buffer, position)),
    ("one by one", |file, buffer, position| file.read_one_by_one(buffer, position, false)),
    ("locked", |file, buffer, position| file.read_one_by_one(buffer, position, true)),
];

fn file_of(folio_bytes: u64) -> (Cache, File) {
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
    let file = cache.memory_file_with("file", &options).unwrap();
    (cache, file)
}

/// Returns the references and Entries that one read of the whole file takes.
fn lookups(cache: &Cache, file: &File, way: Way, block: u64) -> (u64, u64) {
    let before = cache.stats();
    for position in (0..LEN).step_by(block as usize) {
        assert_eq!(way(file, &mut vec![0; block as usize], position).unwrap(), block as usize);
    }
    let after = cache.stats();
    let references = after.references_taken - before.references_taken;
    (references, after.entries_loaded - before.entries_loaded)
}

#[test]
fn every_way_reads_the_same_bytes() {
    for (name, way) in WAYS {
        for folio_bytes in [4 << 10, 64 << 10] {
            let (_cache, file) = file_of(folio_bytes);
            let mut expected = bifolio_testing::fill_bytes(1, LEN as usize);
            file.write_all_at(&expected, 0).unwrap();
            file.punch_hole(100 * PAGE + 5..200 * PAGE).unwrap();
            expected[100 * PAGE as usize + 5..200 * PAGE as usize].fill(0);
            file.set_len(LEN + 100).unwrap();
            expected.resize(LEN as usize + 100, 0);
            for (position, count) in [(0, LEN as usize + 200), (70, 64), (99 * 4096, 9000)] {
                let mut read = vec![0xff; count];
                let length = way(&file, &mut read, position as u64).unwrap();
                let end = expected.len().min(position + count);
                assert!(read[..length] == expected[position..end], "{name}, {position}");
            }
        }
    }
}

#[test]
fn one_by_one_reads_what_is_not_resident_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let expected = bifolio_testing::fill_bytes(1, 3 * PAGE as usize);
    std::fs::write(&path, &expected).unwrap();
    let cache = Cache::builder().memory(1 << 20).build().unwrap();
    let file = cache.open(&path, &OpenOptions::new().read(true)).unwrap();
    let mut read = vec![0; 4 * PAGE as usize];
    assert_eq!(file.read_one_by_one(&mut read, 1, true).unwrap(), expected.len() - 1);
    assert!(read[..expected.len() - 1] == expected[1..]);
}

#[test]
fn a_read_takes_as_many_references_as_its_way_says() {
    let pages = LEN / PAGE;
    let [batched, one_by_one, locked] = WAYS;
    for ((name, way), folio_bytes, block, references) in [
        (batched, 4 << 10, PAGE, 0),
        (batched, 4 << 10, 64 << 10, 0),
        (batched, 64 << 10, LEN, 0),
        (one_by_one, 4 << 10, PAGE, pages),
        (one_by_one, 64 << 10, LEN, pages),
        (locked, 64 << 10, LEN, pages),
    ] {
        let (cache, file) = file_of(folio_bytes);
        file.write_all_at(&vec![1; LEN as usize], 0).unwrap();
        let first = lookups(&cache, &file, way, block);
        let taken = lookups(&cache, &file, way, block);
        assert_eq!(taken.0, references, "{name}, folios of {folio_bytes}, blocks of {block}");
        assert!(taken.1 >= 2 * pages && taken.1 <= 5 * pages, "{taken:?}, at first {first:?}");
    }
}

#[test]
fn a_hole_costs_no_more_entries_than_it_has_folios() {
    let pages = LEN / PAGE;
    let [(_, batched), (_, one_by_one), _] = WAYS;
    let (cache, file) = file_of(4096);
    file.set_len(2 * LEN).unwrap();
    assert_eq!(lookups(&cache, &file, batched, LEN), (0, 0), "nothing was ever charged there");
    file.write_all_at(b"x", LEN).unwrap();
    assert_eq!(lookups(&cache, &file, batched, LEN), (0, pages));
    let (cache, file) = file_of(4096);
    file.set_len(LEN).unwrap();
    assert_eq!(lookups(&cache, &file, one_by_one, LEN), (0, pages), "a lookup a page");
}
