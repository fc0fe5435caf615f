//! Every optional kernel feature can be missing: everything works, and the statistics list the
//! fallback.

use crate::support::{assert_same, cache_of, directory, error_of, random_file, read_all, writable};
use bifolio::{Cache, CacheBuilder, DirectIo, ErrorKind, Feature, HugePages};
use bifolio_testing::{fill_bytes, skip};

/// Reads, writes and syncs more than fits, and checks the disk. Returns the fallbacks.
fn exercise(
    cache: &Cache,
    options: &bifolio::OpenOptions,
    directory: &tempfile::TempDir,
) -> Vec<String> {
    let (path, mut bytes) = random_file(directory, "file", 9_000_001);
    let file = cache.open(&path, options).unwrap();
    assert_same(&read_all(&file), &bytes);
    let new = fill_bytes(1, 1_000_000);
    for start in [0, 4_000_003, 8_500_000] {
        file.write_all_at(&new, start).unwrap();
        let start = start as usize;
        bytes.resize(bytes.len().max(start + new.len()), 0);
        bytes[start..start + new.len()].copy_from_slice(&new);
    }
    assert_same(&read_all(&file), &bytes);
    file.sync_all().unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    cache.set_memory(3 << 20).unwrap();
    assert_same(&read_all(&file), &bytes);
    assert!(cache.stats().evictions.folios + cache.stats().evictions.evacuated_folios > 0);
    cache.stats().fallbacks
}

fn builder() -> CacheBuilder {
    Cache::builder().memory(6 << 20)
}

fn names(fallbacks: &[String], feature: Feature) -> bool {
    fallbacks.iter().any(|line| line.starts_with(&format!("{}: ", feature)))
}

#[test]
fn every_feature_can_be_missing() {
    for feature in Feature::ALL {
        let cache = builder().disable(feature).build().unwrap();
        let fallbacks = exercise(&cache, &writable(), &directory());
        assert!(names(&fallbacks, feature), "{feature}: {fallbacks:?}");
        let report = cache.features().into_iter().find(|report| report.feature == feature);
        let report = report.unwrap();
        assert!(!report.in_use && report.reason.contains("disabled"), "{report:?}");
    }
}

#[test]
fn all_features_can_be_missing_at_once() {
    let cache = Feature::ALL.into_iter().fold(builder(), CacheBuilder::disable).build().unwrap();
    let fallbacks = exercise(&cache, &writable().folio_bytes(64 << 10), &directory());
    for feature in Feature::ALL {
        assert!(names(&fallbacks, feature), "{feature}: {fallbacks:?}");
    }
}

#[test]
fn a_masked_ring_is_never_entered_and_batches_go_by_plain_calls() {
    let is_available =
        |report: &bifolio::FeatureReport| report.feature == Feature::IoUring && report.available;
    for masked in [false, true] {
        let ring = if masked { builder().disable(Feature::IoUring) } else { builder() };
        let cache = ring.build().unwrap();
        exercise(&cache, &writable(), &directory());
        let stats = cache.stats();
        let expects_ring = !masked && bifolio::features().iter().any(is_available);
        assert_eq!(stats.storage.ring_enters > 0, expects_ring, "masked: {masked}");
        assert_eq!(stats.storage.ring_transfers > 0, expects_ring, "masked: {masked}");
        assert!(expects_ring || stats.storage.plain_transfers > 0);
    }
}

#[test]
fn nothing_that_is_in_use_is_called_a_fallback() {
    let cache = builder().build().unwrap();
    let fallbacks = exercise(&cache, &writable(), &directory());
    for report in bifolio::features() {
        assert_eq!(names(&fallbacks, report.feature), !report.in_use, "{report:?}");
    }
}

#[test]
fn a_file_opened_without_direct_io_is_named_with_the_reason() {
    let cache = builder().build().unwrap();
    let options = writable().direct(DirectIo::Never);
    let fallbacks = exercise(&cache, &options, &directory());
    let line = fallbacks.iter().find(|line| line.starts_with("direct-io of ")).unwrap();
    assert!(line.contains("file: buffered: direct I/O was not requested"), "{line}");
}

#[test]
fn a_file_on_tmpfs_works_through_the_page_cache_and_says_so() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return skip("tmpfs", "no directory can be made in /dev/shm");
    };
    let cache = builder().build().unwrap();
    let fallbacks = exercise(&cache, &writable(), &directory);
    let line = fallbacks.iter().find(|line| line.starts_with("direct-io of ")).unwrap();
    assert!(line.contains("tmpfs"), "{line}");
    let (path, _) = random_file(&directory, "other", 10);
    let answer = cache.open(&path, &writable().direct(DirectIo::Require));
    let error = error_of(answer, &["other", "direct I/O was required", "tmpfs"]);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn direct_io_that_is_required_and_masked_is_an_error() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10);
    let cache = builder().disable(Feature::DirectIo).build().unwrap();
    let answer = cache.open(&path, &writable().direct(DirectIo::Require));
    error_of(answer, &["file", "direct I/O was required", "disabled"]);
}

#[test]
fn huge_pages_can_be_refused_and_required() {
    let never = builder().huge_pages(HugePages::Never).build().unwrap();
    exercise(&never, &writable(), &directory());
    let required = || builder().memory(64 << 20).huge_pages(HugePages::Require);
    let masked = required().disable(Feature::TransparentHugePages);
    let error = error_of(masked.build(), &["huge_pages", "2 MiB pages are required"]);
    assert_eq!(error.kind(), ErrorKind::Config);
    let available = bifolio::features()
        .into_iter()
        .any(|report| report.feature == Feature::TransparentHugePages && report.available);
    assert_eq!(required().build().is_ok(), available);
    assert!(cache_of(1 << 20).stats().memory.used_bytes <= 1 << 20);
}
