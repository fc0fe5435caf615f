//! Write hints: what is written once leaves what is hot in memory.

use crate::support::{PAGE, assert_same, cache_of, directory, open, random_file, writable};
use bifolio::{Access, Cache, File, WriteHint};
use bifolio_testing::block_on;

/// Bytes of the cache, of the hot file, and of those that are written.
const MEMORY: u64 = 4 << 20;
const HOT: u64 = 2 << 20;
const WRITTEN: u64 = 16 << 20;

/// Creates a cache with a file whose pages are used again and again.
fn cache_with_hot_file(directory: &tempfile::TempDir) -> (Cache, File) {
    let cache = cache_of(MEMORY);
    let hot = open(&cache, &random_file(directory, "hot", HOT as usize).0);
    hot.set_access(Access::Random);
    (0..4).for_each(|_| use_all(&hot));
    (cache, hot)
}

fn use_all(hot: &File) {
    let mut page = [0; PAGE as usize];
    (0..HOT / PAGE).for_each(|index| hot.read_exact_at(&mut page, index * PAGE).unwrap());
}

/// Part of the hot file that is in memory after `write` has written the other, percent.
fn hot_after(write: impl Fn(&File, u64, Vec<u8>)) -> u64 {
    let directory = directory();
    let (cache, hot) = cache_with_hot_file(&directory);
    let file = cache.open(directory.path().join("written"), &writable().create(true)).unwrap();
    let block = 64 << 10;
    for at in (0..WRITTEN).step_by(block) {
        write(&file, at, vec![(at >> 16) as u8; block]);
    }
    file.sync_data().unwrap();
    let resident = hot.residency(..).unwrap().resident * 100 * PAGE / HOT;
    let written = crate::support::read_all(&file);
    let expected: Vec<u8> = (0..WRITTEN).map(|at| (at >> 16) as u8).collect();
    assert_same(&written, &expected);
    resident
}

#[test]
fn what_is_written_once_leaves_what_is_hot() {
    let normal = hot_after(|file, at, block| file.write_all_at(&block, at).unwrap());
    let of_handle = hot_after(|file, at, block| {
        file.set_write_hint(WriteHint::Once);
        file.write_all_at(&block, at).unwrap();
    });
    let of_appends = hot_after(|file, _, block| {
        file.set_write_hint(WriteHint::Once);
        // Parts of pages, too.
        block.chunks(10_000).for_each(|part| assert!(file.append(part).is_ok()));
    });
    let of_calls = hot_after(|file, at, block| {
        block_on(file.write_async(block, at).write_hint(WriteHint::Once)).unwrap();
    });
    let found = [of_handle, of_appends, of_calls];
    assert!(found.iter().all(|percent| *percent >= 95), "{found:?} percent, {normal} without");
}

#[test]
fn a_page_that_is_written_once_is_read_as_it_was_written() {
    let directory = directory();
    let (path, mut model) = random_file(&directory, "file", 1 << 20);
    let file = open(&cache_of(1 << 20), &path);
    file.set_write_hint(WriteHint::Once);
    for number in 0..500_u64 {
        let at = (number * 7919 % (1 << 20)) as usize;
        let bytes = vec![number as u8; (100 + number as usize * 37 % 9000).min((1 << 20) - at)];
        file.write_all_at(&bytes, at as u64).unwrap();
        model[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    assert_same(&crate::support::read_all(&file), &model);
    file.set_write_hint(WriteHint::Normal);
    file.sync_data().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &model);
}
