//! The other kinds of advice.

use bifolio::{Advice, ErrorKind, File, OpenOptions, Outcome};

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, files_can_be_mapped, open, random_file, read,
    read_all, wait_for_stats, writable,
};
use crate::{evict, on_one, quiet_cache, read_pages, resident_pages};

fn bytes_of(pages: std::ops::Range<u64>) -> std::ops::Range<u64> {
    pages.start * PAGE..pages.end * PAGE
}

fn resident_of(file: &File, pages: std::ops::Range<u64>) -> u64 {
    file.residency(bytes_of(pages)).unwrap().resident
}

/// Reads pages after `first` until one of the first 64 pages is evicted.
fn press(file: &File, first: u64) {
    let mut next = first;
    while resident_of(file, 0..64) == 64 {
        read_pages(file, next..next + 1);
        next += 1;
        assert!(next < 2048, "nothing is ever evicted");
    }
}

#[test]
fn cold_pages_go_before_those_that_came_earlier() {
    on_one(|| {
        let directory = directory();
        let (path, _) = random_file(&directory, "file", 8 << 20);
        let cache = quiet_cache(2 << 20);
        let file = open(&cache, &path);
        // All of it used again and again.
        (0..3).for_each(|_| read_pages(&file, 0..64));
        let outcome = file.advise(bytes_of(48..64), Advice::Cold).unwrap();
        assert_eq!((outcome, resident_of(&file, 0..64)), (Outcome::default(), 64), "it stays");
        press(&file, 64);
        assert_eq!(resident_of(&file, 0..48), 48);
        assert!(resident_of(&file, 48..64) < 16);
    });
}

#[test]
fn pages_of_no_reuse_go_before_others() {
    on_one(|| {
        let directory = directory();
        let (path, _) = random_file(&directory, "file", 8 << 20);
        let cache = quiet_cache(2 << 20);
        let (file, once) = (open(&cache, &path), open(&cache, &path));
        once.advise(0..0, Advice::NoReuse).unwrap();
        (0..3).for_each(|_| read_pages(&file, 0..32));
        // Later, and as often.
        (0..3).for_each(|_| read_pages(&once, 32..64));
        press(&file, 64);
        assert_eq!(resident_of(&file, 0..32), 32, "in use");
        assert!(resident_of(&file, 32..64) < 32);
        // Until it is taken back.
        once.advise(0..0, Advice::Normal).unwrap();
        evict(&file);
        (0..3).for_each(|_| read_pages(&file, 0..32));
        (0..3).for_each(|_| read_pages(&once, 32..64));
        read_pages(&file, 1024..2048);
        assert_eq!(resident_of(&file, 0..64), 64, "all of it in use");
    });
}

#[test]
fn populated_for_reading_is_resident_when_the_call_returns() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", (100 * PAGE + 5) as usize);
    let cache = quiet_cache(4 << 20);
    let file = open(&cache, &path);
    let outcome = file.advise(10 * PAGE + 1..u64::MAX >> 1, Advice::PopulateRead).unwrap();
    assert_eq!(outcome, Outcome::default());
    assert_eq!(resident_of(&file, 10..101), 91);
    let misses = cache.stats().misses;
    assert_same(&read(&file, 10 * PAGE, bytes.len()), &bytes[10 * PAGE as usize..]);
    assert_eq!(cache.stats().misses, misses);
    // An empty range and bytes past the end count as resident.
    file.advise(5..5, Advice::PopulateRead).unwrap();
    file.advise(200 * PAGE..300 * PAGE, Advice::PopulateRead).unwrap();
    assert_eq!(cache.stats().misses, misses);
}

#[test]
fn will_need_is_on_its_way_when_the_call_returns() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", (100 * PAGE) as usize);
    let cache = quiet_cache(4 << 20);
    let file = open(&cache, &path);
    file.advise(bytes_of(20..30), Advice::WillNeed).unwrap();
    wait_for_stats(&cache, "ten pages", |_| resident_pages(&file) == 10);
}

#[test]
fn populated_for_writing_has_no_holes_and_grows_no_file() {
    let cache = quiet_cache(4 << 20);
    let file = cache.memory_file("scratch").unwrap();
    file.set_len(20 * PAGE).unwrap();
    file.advise(bytes_of(5..40), Advice::PopulateWrite).unwrap();
    assert_eq!(file.len(), 20 * PAGE);
    assert_eq!(resident_of(&file, 0..20), 15);
    assert_same(&read_all(&file), &[0; 20 * PAGE as usize]);
}

#[test]
fn a_map_populated_for_writing_is_stored_to_and_written_out() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", (16 * PAGE) as usize);
    let cache = quiet_cache(4 << 20);
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    let mut map = file.map_mut(0..16 * PAGE).unwrap();
    map.advise(bytes_of(4..8), Advice::PopulateWrite).unwrap();
    // A range of nothing is for nothing, also where a page is.
    map.advise(bytes_of(9..10), Advice::PopulateRead).unwrap();
    map.advise(9 * PAGE + 5..9 * PAGE + 5, Advice::PopulateWrite).unwrap();
    let faults = cache.stats().faults;
    // Not to the last one.
    for page in 4..7 {
        crate::store(&mut map, page * PAGE, 0xAB);
    }
    assert_eq!(cache.stats().faults, faults);
    map.sync(0..16 * PAGE).unwrap();
    let mut expected = bytes;
    (4..7).for_each(|page| expected[page * PAGE as usize] = 0xAB);
    assert_same(&std::fs::read(&path).unwrap(), &expected);
    assert_eq!(cache.stats().writeback, 4, "they count as changed, and no others do");
}

#[test]
fn advice_for_all_files_reaches_each() {
    let directory = directory();
    let cache = cache_of(4 << 20);
    let files = [0, 1, 2].map(|number| {
        let (path, _) = random_file(&directory, &format!("file-{number}"), 8 * PAGE as usize);
        let file = open(&cache, &path);
        assert_eq!(read_all(&file).len(), 8 * PAGE as usize);
        file
    });
    files[1].write_all_at(b"dirty", 0).unwrap();
    let pin = files[2].pin(0..PAGE).unwrap();
    let outcome = cache.advise_all(Advice::DontNeed).unwrap();
    assert_eq!((outcome.evicted, outcome.remaining.total()), (22, 2), "{outcome}");
    assert_eq!((outcome.remaining.dirty, outcome.remaining.referenced), (1, 1));
    drop(pin);
    assert_eq!(cache.advise_all(Advice::Cold).unwrap(), Outcome::default());
    wait_for_stats(&cache, "clean", |stats| stats.dirty_bytes == 0);
    // Refused while the write-out that has cleaned one of them still holds its reference.
    let mut evicted = 0;
    while evicted < 2 {
        evicted += cache.advise_all(Advice::DontNeed).unwrap().evicted;
    }
    assert_eq!(cache.advise_all(Advice::DontNeed).unwrap(), Outcome::default());
}

#[test]
fn advice_that_cannot_be_taken_is_refused() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 8 * PAGE as usize);
    let cache = cache_of(4 << 20);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    let refused = file.advise(0..PAGE, Advice::PopulateWrite).map(drop);
    assert!(matches!(error_of(refused, &["writing"]).kind(), ErrorKind::NotOpenedFor { .. }));
    let blind = cache.open(&path, &OpenOptions::new().read(false).write(true)).unwrap();
    let refused = blind.advise(0..PAGE, Advice::DontNeed).map(drop);
    assert!(matches!(error_of(refused, &["reading"]).kind(), ErrorKind::NotOpenedFor { .. }));
    let too_far = file.advise(5..u64::MAX, Advice::DontNeed).map(drop);
    assert!(matches!(error_of(too_far, &["file"]).kind(), ErrorKind::OutOfRange { .. }));
    for advice in [Advice::Random, Advice::WillNeed, Advice::PopulateRead] {
        let refused = cache.advise_all(advice).map(drop);
        assert!(matches!(error_of(refused, &["advice"]).kind(), ErrorKind::Config { .. }));
    }
    cache.close().unwrap();
    for refused in [file.advise(0..PAGE, Advice::DontNeed), cache.advise_all(Advice::DontNeed)] {
        assert!(matches!(error_of(refused, &[]).kind(), ErrorKind::Closed));
    }
}
