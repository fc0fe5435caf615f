//! Each reason for which a folio stays, and that it is evicted when the reason is gone.

use std::thread;
use std::time::Duration;

use bifolio::{Cache, Evicted, Feature, File};
use bifolio_testing::{Call, Fault, Gate};

use crate::support::{
    FOLIO_SIZES, Faulty, MEMORY_FOR_ALL, PAGE, Way, assert_same, cache_of, directory,
    files_can_be_mapped, open, random_file, read, read_all, report_of, wait_for_stats, writable,
};
use crate::{assert_counted, evict, evict_all, on_one, quiet_cache, resident_pages};

/// Pages of the files, unless a test states otherwise.
const PAGES: u64 = 16;
const LENGTH: usize = (PAGES * PAGE) as usize;

/// Returns the outcome of `count` folios that all remain for one reason.
fn kept(reason: &str, count: u64) -> Vec<(&str, u64)> {
    vec![(reason, count)]
}

/// Returns the reasons of an outcome that are not 0.
fn reasons(outcome: &Evicted) -> Vec<(&'static str, u64)> {
    let kept = &outcome.kept;
    let all = [
        ("straddling", kept.straddling),
        ("gone", kept.gone),
        ("locked", kept.locked),
        ("writeback", kept.writeback),
        ("private", kept.private),
        ("dirty", kept.dirty),
        ("mapped", kept.mapped),
        ("referenced", kept.referenced),
    ];
    all.into_iter().filter(|(_, count)| *count > 0).collect()
}

/// Reads the whole file and compares it.
fn check(file: &File, bytes: &[u8]) {
    assert_same(&read_all(file), bytes);
}

/// Runs `test` over storage that can be made to fail, on disk and in memory.
fn for_disk_and_memory(test: impl Fn(&Faulty)) {
    for way in [Way::Threads, Way::Memory] {
        test(&Faulty::new(way, LENGTH, 1));
    }
}

#[test]
fn clean_pages_go_and_come_back_as_they_were() {
    on_one(|| {
        let directory = directory();
        for folio_bytes in FOLIO_SIZES {
            // The last folio ends beyond the end of the file.
            let folios = 3;
            let length = (folios * folio_bytes - 100) as usize;
            let (path, bytes) = random_file(&directory, "file", length);
            let cache = quiet_cache(MEMORY_FOR_ALL);
            let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
            check(&file, &bytes);
            let outcome = evict(&file);
            assert_eq!((outcome.folios, reasons(&outcome)), (folios, vec![]), "{outcome:?}");
            assert_eq!(outcome.drains_requested, 0);
            assert_eq!(resident_pages(&file), 0);
            assert_counted(&cache, &outcome);
            assert_eq!(cache.stats().evictions.folios, 0, "advice is not reclaim");
            check(&file, &bytes);
            assert_eq!(evict(&file).folios, folios);
            assert_eq!(evict(&file), Evicted::default());
        }
    });
}

#[test]
fn folios_that_reach_beyond_the_range_stay() {
    let directory = directory();
    for folio_bytes in FOLIO_SIZES {
        let length = (4 * folio_bytes) as usize;
        let (path, bytes) = random_file(&directory, "file", length);
        let cache = quiet_cache(MEMORY_FOR_ALL);
        let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
        check(&file, &bytes);
        let range = 1..3 * folio_bytes + 1;
        let outcome = file.evict(range.clone()).unwrap();
        assert_eq!((outcome.folios, reasons(&outcome)), (2, kept("straddling", 2)));
        let pages_a_folio = folio_bytes / PAGE;
        for (number, stays) in (0..).zip([true, false, false, true]) {
            let folio = number * folio_bytes..(number + 1) * folio_bytes;
            let expected = if stays { pages_a_folio } else { 0 };
            assert_eq!(file.residency(folio).unwrap().resident, expected);
        }
        check(&file, &bytes);
        // A range of nothing is for nothing.
        let within = folio_bytes + 1..folio_bytes + 1;
        assert_eq!(file.evict(within).unwrap(), Evicted::default());
    }
}

#[test]
fn dirty_folios_are_written_in_the_background_and_then_they_go() {
    for_disk_and_memory(|faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        let mut bytes = faulty.bytes.clone();
        check(&file, &bytes);
        for page in [2, 3, 9] {
            let at = page * PAGE as usize + 100;
            file.write_all_at(b"new", at as u64).unwrap();
            bytes[at..at + 3].copy_from_slice(b"new");
        }
        let first = evict(&file);
        assert_eq!((first.folios, reasons(&first)), (PAGES - 3, kept("dirty", 3)));
        let stats = wait_for_stats(&cache, "clean", |stats| stats.memory.dirty_bytes == 0);
        assert_eq!(stats.writes.syncs, 0);
        assert_same(&faulty.stored(), &bytes);
        let mut sum = first;
        sum += evict_all(&file, 3);
        assert_counted(&cache, &sum);
        check(&file, &bytes);
    });
}

#[test]
fn dirt_outside_the_range_is_nobodys_business() {
    for_disk_and_memory(|faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        for page in [4, 10] {
            file.write_all_at(b"new", page * PAGE).unwrap();
        }
        let outcome = file.evict(0..5 * PAGE).unwrap();
        assert_eq!(reasons(&outcome), kept("dirty", 1));
        wait_for_stats(&cache, "one is clean", |stats| stats.memory.dirty_bytes == PAGE);
        assert_eq!(cache.stats().storage.written_folios, 1);
        assert_eq!(file.residency(10 * PAGE..11 * PAGE).unwrap().dirty, 1);
    });
}

#[test]
fn ranges_that_wait_for_the_device_stay_apart() {
    for_disk_and_memory(|faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        for page in [0, 2, 3, 5, 8] {
            file.write_all_at(b"new", page * PAGE).unwrap();
        }
        let gate = Gate::new();
        faulty.backing.inject(Fault::on(Call::Write).held(&gate));
        for range in [0..1, 2..3, 3..4, 8..9] {
            let bytes = range.start * PAGE..range.end * PAGE;
            let outcome = file.evict(bytes).unwrap();
            assert_eq!(reasons(&outcome), kept("dirty", 1));
            // The others come while this one is on its way.
            gate.wait_for_arrivals(1);
        }
        gate.open();
        wait_for_stats(&cache, "one is dirty", |stats| stats.memory.dirty_bytes == PAGE);
        assert_eq!(file.residency(5 * PAGE..6 * PAGE).unwrap().dirty, 1);
    });
}

#[test]
fn a_device_that_refuses_keeps_the_folio_dirty_and_here() {
    for_disk_and_memory(|faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        file.write_all_at(b"new", 0).unwrap();
        faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::EIO));
        assert_eq!(reasons(&evict(&file)), kept("dirty", 1));
        wait_for_stats(&cache, "refused", |stats| stats.storage.write_errors > 0);
        assert_eq!(evict(&file).folios, 0);
        assert_eq!(read(&file, 0, 3), b"new");
        assert!(file.sync_data().is_err(), "who writes is told");
        faulty.backing.heal();
        // The flusher may have tried once more before that, which the next sync reports.
        file.sync_data().or_else(|_| file.sync_data()).unwrap();
        evict_all(&file, 1);
        assert_eq!(read(&file, 0, 3), b"new");
    });
}

#[test]
fn folios_on_their_way_out_stay_until_they_have_arrived() {
    for_disk_and_memory(|faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        file.write_all_at(&[7; 2 * PAGE as usize], 4 * PAGE).unwrap();
        let gate = Gate::new();
        faulty.backing.inject(Fault::on(Call::Write).held(&gate));
        assert_eq!(reasons(&evict(&file)), kept("dirty", 2));
        gate.wait_for_arrivals(1);
        assert_eq!(reasons(&evict(&file)), kept("writeback", 2));
        assert_eq!(file.residency(0..file.len()).unwrap().writeback, 2);
        gate.open();
        wait_for_stats(&cache, "clean", |stats| stats.memory.dirty_bytes == 0);
        evict_all(&file, 2);
        assert_eq!(read(&file, 4 * PAGE, 2 * PAGE as usize), [7; 2 * PAGE as usize]);
    });
}

#[test]
fn folios_that_are_being_read_stay() {
    for_disk_and_memory(|faulty| {
        let cache = faulty.builder(4 << 20).build().unwrap();
        let file = faulty.open(&cache);
        let gate = Gate::new();
        faulty.backing.inject(Fault::on(Call::Read).held(&gate));
        thread::scope(|scope| {
            let reader = scope.spawn(|| read(&file, 3 * PAGE, 4 * PAGE as usize));
            gate.wait_for_arrivals(1);
            assert_eq!(reasons(&evict(&file)), kept("locked", 4));
            gate.open();
            let range = 3 * PAGE as usize..7 * PAGE as usize;
            assert_same(&reader.join().unwrap(), &faulty.bytes[range]);
        });
        assert_eq!(evict(&file).folios, 4);
    });
}

#[test]
fn pinned_folios_stay_and_no_cpu_is_asked_to_drain() {
    on_one(|| {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "file", LENGTH);
        let cache = cache_of(4 << 20);
        let file = open(&cache, &path);
        check(&file, &bytes);
        let pin = file.pin(5 * PAGE..6 * PAGE).unwrap();
        let hold = file.pin(7 * PAGE..8 * PAGE).unwrap().into_owned();
        let outcome = evict(&file);
        assert_eq!((outcome.folios, reasons(&outcome)), (PAGES - 2, kept("referenced", 2)));
        assert_eq!(outcome.drains_requested, 0, "this CPU's batch is drained anyway");
        let mut seen = vec![0; PAGE as usize];
        pin.copy_to(0, &mut seen).unwrap();
        assert_same(&seen, &bytes[5 * PAGE as usize..6 * PAGE as usize]);
        drop(pin);
        assert_eq!(evict(&file).folios, 1);
        drop(hold);
        assert_eq!(evict(&file).folios, 1);
        check(&file, &bytes);
    });
}

#[test]
fn mapped_folios_stay_as_long_as_they_are_mapped() {
    if !files_can_be_mapped() {
        return;
    }
    on_one(|| {
        let cache = cache_of(4 << 20);
        let directory = directory();
        let (path, bytes) = random_file(&directory, "file", LENGTH);
        let file = cache.open(&path, &writable().mappable(true)).unwrap();
        check(&file, &bytes);
        let map = file.map(4 * PAGE..12 * PAGE).unwrap();
        let other = file.map(10 * PAGE + 5..14 * PAGE + 5).unwrap();
        let before = cache.stats().maps.unmap_flushes;
        let outcome = evict(&file);
        // The second map has bytes of page 14.
        assert_eq!((outcome.folios, reasons(&outcome)), (5, kept("mapped", 11)));
        assert_eq!(outcome.drains_requested, 0);
        // Pages 0 to 3, and page 15.
        let runs = if report_of(Feature::VectoredUnmap).available { 1 } else { 2 };
        assert_eq!(cache.stats().maps.unmap_flushes - before, runs, "one flush for all five");
        drop(map);
        let outcome = evict(&file);
        assert_eq!((outcome.folios, reasons(&outcome)), (6, kept("mapped", 5)));
        drop(other);
        assert_eq!(evict(&file).folios, 5);
        check(&file, &bytes);
        assert_eq!(evict(&file).folios, PAGES);
    });
}

#[test]
fn of_several_reasons_the_first_one_counts() {
    if !files_can_be_mapped() {
        return;
    }
    let faulty = Faulty::new(Way::Threads, LENGTH, 1);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let options = writable().mappable(true);
    let file = cache.open_backing(faulty.backing.clone(), &options).unwrap();
    let map = file.map(0..LENGTH as u64).unwrap();
    map.populate(0..LENGTH as u64).unwrap();
    file.write_all_at(b"new", 5 * PAGE).unwrap();
    let writes = Gate::new();
    faulty.backing.inject(Fault::on(Call::Write).held(&writes));
    let outcome = file.evict(1..LENGTH as u64).unwrap();
    assert_eq!(reasons(&outcome), [("straddling", 1), ("dirty", 1), ("mapped", PAGES - 2)]);
    writes.wait_for_arrivals(1);
    assert_eq!(reasons(&evict(&file)), [("writeback", 1), ("mapped", PAGES - 1)]);
    writes.open();
    wait_for_stats(&cache, "clean", |stats| stats.memory.dirty_bytes == 0);
    drop(map);
    evict_all(&file, PAGES);
    let _map = file.map(0..LENGTH as u64).unwrap();
    let reads = Gate::new();
    faulty.backing.inject(Fault::on(Call::Read).held(&reads));
    thread::scope(|scope| {
        let reader = scope.spawn(|| read(&file, 5 * PAGE, 3));
        reads.wait_for_arrivals(1);
        assert_eq!(reasons(&evict(&file)), kept("locked", 1));
        reads.open();
        assert_eq!(reader.join().unwrap(), b"new");
    });
}

#[test]
fn stores_through_a_map_are_written_in_the_background() {
    if !files_can_be_mapped() {
        return;
    }
    let builder = Cache::builder().memory(4 << 20).dirty_age_max(Duration::from_millis(3_600_000));
    let cache = builder.build().unwrap();
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "file", LENGTH);
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    let mut map = file.map_mut(0..LENGTH as u64).unwrap();
    map.populate(0..LENGTH as u64).unwrap();
    for page in [3, 9] {
        let at = page * PAGE + 7;
        crate::store(&mut map, at, !bytes[at as usize]);
    }
    bytes[3 * PAGE as usize + 7] ^= 0xFF;
    let outcome = file.evict(0..8 * PAGE).unwrap();
    assert_eq!(reasons(&outcome), kept("mapped", 8), "stores were not searched for yet");
    wait_for_stats(&cache, "what is in the range is written", |stats| {
        stats.storage.written_folios == 1
    });
    // And nothing else.
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
}

#[test]
fn a_pinned_page_of_a_file_with_maps_stays_for_its_pin() {
    if !files_can_be_mapped() {
        return;
    }
    let cache = cache_of(4 << 20);
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", LENGTH);
    let file = cache.open(&path, &writable().mappable(true)).unwrap();
    check(&file, &bytes);
    let pin = file.pin(0..PAGE).unwrap();
    let outcome = evict(&file);
    assert_eq!((outcome.folios, reasons(&outcome)), (PAGES - 1, kept("referenced", 1)));
    drop(pin);
    assert_eq!(evict(&file).folios, 1);
}

#[test]
fn pages_of_memory_files_without_a_swap_have_no_other_place() {
    let cache = cache_of(4 << 20);
    let file = cache.memory_file("scratch").unwrap();
    file.write_all_at(&[7; LENGTH], 0).unwrap();
    let outcome = evict(&file);
    assert_eq!((outcome.folios, reasons(&outcome)), (0, kept("private", PAGES)));
    check(&file, &[7; LENGTH]);
}

#[test]
fn pages_of_memory_files_go_once_they_are_swapped() {
    let builder = Cache::builder().memory(2 << 20).swap_directory(env!("CARGO_TARGET_TMPDIR"));
    let cache = builder.build().unwrap();
    let file = cache.memory_file("scratch").unwrap();
    file.write_all_at(&[7; LENGTH], 0).unwrap();
    assert_eq!(reasons(&evict(&file)), kept("dirty", PAGES));
    // What comes behind it drives it out; read back, it is clean, and has its place.
    file.write_all_at(&vec![9; 4 << 20], 1 << 20).unwrap();
    check_start(&file);
    assert_eq!(cache.stats().storage.swapped_in_pages, PAGES);
    let start = 0..LENGTH as u64;
    let outcome = file.evict(start.clone()).unwrap();
    assert_eq!((outcome.folios, reasons(&outcome)), (PAGES, vec![]));
    assert_eq!(file.residency(start).unwrap().resident, 0);
    check_start(&file);
}

fn check_start(file: &File) {
    assert_same(&read(file, 0, LENGTH), &[7; LENGTH]);
}

#[test]
fn advised_pages_that_stay_go_first_under_pressure() {
    on_one(|| {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "file", 8 << 20);
        let cache = Cache::builder().memory(2 << 20).readahead_max(0).build().unwrap();
        let file = open(&cache, &path);
        // The first ones would go first.
        let length = 320 * PAGE as usize;
        assert_same(&read(&file, 0, length), &bytes[..length]);
        let stays = 310;
        let pin = file.pin(stays * PAGE..(stays + 1) * PAGE).unwrap();
        let outcome = file.evict(stays * PAGE..(stays + 1) * PAGE).unwrap();
        assert_eq!(reasons(&outcome), kept("referenced", 1));
        drop(pin);
        let is_here =
            |page: u64| file.residency(page * PAGE..(page + 1) * PAGE).unwrap().resident == 1;
        let mut next = 320;
        while is_here(stays) {
            assert_eq!(read(&file, next * PAGE, 1), &bytes[(next * PAGE) as usize..][..1]);
            next += 1;
            assert!(next < 2048, "nothing is ever evicted");
        }
        let others = (0..320).filter(|page| *page != stays);
        let gone = others.filter(|page| !is_here(*page)).count();
        assert!(gone < 160, "{gone} of the others went with it, or before");
    });
}
