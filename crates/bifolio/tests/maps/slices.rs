//! Ranges of immutable files as one slice.

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, files_can_be_mapped, mappable, random_file,
};
use bifolio::{ErrorKind, OpenOptions};
use fastrand::Rng;

#[test]
fn a_range_of_any_length_is_one_slice() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let (path, bytes) = random_file(&directory, "blocks", 12 << 20);
    let cache = cache_of(32 << 20);
    let file = cache.open_immutable(&path, &mappable(OpenOptions::new())).unwrap();
    let mut random = Rng::with_seed(2);
    for length in [1, 4096, 64 << 10, 1 << 20, 8 << 20] {
        let start = random.usize(..bytes.len() - length);
        let slice = file.bytes(start as u64..(start + length) as u64).unwrap();
        assert_same(&slice, &bytes[start..start + length]);
        let again = slice.clone();
        drop(slice);
        file.evict(..).unwrap();
        let read = std::thread::spawn(move || again.to_vec()).join().unwrap();
        assert_same(&read, &bytes[start..start + length]);
    }
    assert_eq!(file.evict(..).unwrap().kept.referenced, 0);
    let slice = file.bytes(5000..).unwrap();
    assert!(cache.close().is_err(), "a slice is in use");
    drop((slice, file));
    cache.close().unwrap();
}

#[test]
fn a_slice_that_cannot_be_is_an_error() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 6 << 20);
    let cache = cache_of(4 << 20);
    let file = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    assert_same(&file.bytes(PAGE..2 * PAGE).unwrap(), &bytes[4096..8192]);
    let error = error_of(file.bytes(100..5000), &["file"]);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    error_of(file.bytes(5..5), &["file"]);
    drop(file);
    if !files_can_be_mapped() {
        return;
    }
    let file = cache.open_immutable(&path, &mappable(OpenOptions::new())).unwrap();
    assert_eq!(error_of(file.bytes(..), &[]).kind(), ErrorKind::Full, "more than the bound");
    error_of(file.bytes(..(7 << 20)), &["past the end"]);
    assert_same(&file.bytes(1000..1 << 20).unwrap(), &bytes[1000..1 << 20]);
}
