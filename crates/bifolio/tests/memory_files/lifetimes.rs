//! How memory files and their caches end, and that nothing remains.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bifolio::{Cache, ErrorKind, File, OpenOptions};

use crate::setup::{Setup, check_resident, resident_bytes};
use crate::support::{PAGE, assert_same, error_of, read, run_alone, wait_for_stats, writable};

fn setup() -> Setup {
    Setup::new(4 << 20, 16 << 10)
}

fn page_of(number: u64) -> Vec<u8> {
    bifolio_testing::fill_bytes(number + 1, PAGE as usize)
}

fn write_pages(file: &File, pages: std::ops::Range<u64>) {
    pages.for_each(|number| file.write_all_at(&page_of(number), number * PAGE).unwrap());
}

#[test]
fn a_hold_is_a_handle_and_keeps_the_bytes() {
    let setup = setup();
    let cache = setup.cache();
    let file = setup.file(&cache);
    write_pages(&file, 0..40);
    let hold = file.pin(5 * PAGE..6 * PAGE).unwrap().into_owned();
    let clone = hold.clone();
    drop(file);
    check_resident(&cache, 40 * PAGE).unwrap();
    // What comes after must not get its frame.
    let other = setup.file(&cache);
    other.write_all_at(&vec![9; 3 << 20], 0).unwrap();
    drop(hold);
    let mut found = vec![0; PAGE as usize];
    clone.copy_to(0, &mut found).unwrap();
    assert_same(&found, &page_of(5));
    drop((other, clone));
    check_resident(&cache, 0).unwrap();
}

#[test]
fn a_hold_keeps_bytes_over_a_punch_and_memory_over_a_cut() {
    let setup = setup();
    let cache = setup.cache();
    let file = setup.file(&cache);
    write_pages(&file, 0..8);
    let holds = [0, 4].map(|page| file.pin(page * PAGE..(page + 1) * PAGE).unwrap().into_owned());
    file.punch_hole(0..4 * PAGE).unwrap();
    file.set_len(4 * PAGE).unwrap();
    assert_eq!(file.seek_data(0).unwrap(), None);
    check_resident(&cache, 8 * PAGE).unwrap();
    // New bytes at the same places are not those that are held.
    file.write_all_at(&[1; 8 * PAGE as usize], 0).unwrap();
    for (hold, page) in holds.iter().zip([0, 4]) {
        let mut found = vec![0; PAGE as usize];
        hold.copy_to(0, &mut found).unwrap();
        assert_same(&found, &page_of(page));
    }
    assert_same(&read(&file, 0, 8 * PAGE as usize), &[1; 8 * PAGE as usize]);
    drop(holds);
    check_resident(&cache, 8 * PAGE).unwrap();
}

#[test]
fn readers_and_writers_with_clones_outlive_the_first_handle() {
    let setup = setup();
    let cache = setup.cache();
    for _ in 0..20 {
        let file = setup.file(&cache);
        write_pages(&file, 0..64);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for start in [0, 32] {
                let (file, stop) = (file.clone(), &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        for number in start..start + 32 {
                            let found = read(&file, number * PAGE, PAGE as usize);
                            assert_same(&found, &page_of(number));
                        }
                        file.write_all_at(&page_of(start), start * PAGE).unwrap();
                        file.punch_hole((start + 100) * PAGE..(start + 200) * PAGE).unwrap();
                    }
                });
            }
            drop(file);
            thread::sleep(std::time::Duration::from_millis(3));
            stop.store(true, Ordering::Relaxed);
        });
        check_resident(&cache, 0).unwrap();
    }
}

#[test]
fn a_closed_cache_refuses_memory_files_and_keeps_holds() {
    let setup = setup();
    let cache = setup.cache();
    let file = setup.file(&cache);
    write_pages(&file, 0..40);
    file.allocate(0..64 * PAGE).unwrap();
    let hold = file.pin(7 * PAGE..8 * PAGE).unwrap().into_owned();
    cache.close().unwrap();
    let mut buffer = [0; 8];
    for error in [
        file.read_at(&mut buffer, 0).unwrap_err(),
        file.write_at(&buffer, 0).unwrap_err(),
        file.allocate(0..1).unwrap_err(),
        file.punch_hole(0..1).unwrap_err(),
        file.seek_data(0).unwrap_err(),
        file.seek_hole(0).unwrap_err(),
        file.set_len(0).unwrap_err(),
        cache.memory_file("late").unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
    let mut found = vec![0; PAGE as usize];
    hold.copy_to(0, &mut found).unwrap();
    assert_same(&found, &page_of(7));
    drop(file);
    drop(hold);
    check_resident(&cache, 0).unwrap();
}

#[test]
fn a_file_outlives_its_cache() {
    let setup = setup();
    let cache = setup.cache();
    let file = setup.file(&cache);
    drop(cache);
    write_pages(&file, 0..40);
    file.punch_hole(0..20 * PAGE).unwrap();
    assert_same(&read(&file, 20 * PAGE, PAGE as usize), &page_of(20));
    assert_same(&read(&file, 19 * PAGE, PAGE as usize), &[0; PAGE as usize]);
}

/// Uses a file briefly: holes, allocated space and data in several table pages.
fn live(setup: &Setup, cache: &Cache, number: u64) {
    let file = setup.file(cache);
    write_pages(&file, number % 7..number % 7 + 5);
    file.allocate(100 * PAGE..120 * PAGE).unwrap();
    file.write_all_at(b"far", (number % 5) << 30).unwrap();
    let hold = file.pin(0..1).unwrap().into_owned();
    if number.is_multiple_of(2) {
        file.punch_hole(PAGE..200 * PAGE).unwrap();
        file.set_len(5 * PAGE).unwrap();
    }
    drop(file);
    drop(hold);
}

#[test]
fn many_small_files_leave_nothing() {
    let setup = setup();
    let cache = setup.cache();
    // Most chunks have their descriptors from then on.
    setup.file(&cache).allocate(0..3 << 20).unwrap();
    (0..10).for_each(|number| live(&setup, &cache, number));
    let used = wait_for_stats(&cache, "all is free", |stats| resident_bytes(stats) == 0);
    for number in 0..500 {
        live(&setup, &cache, number);
        check_resident(&cache, 0).unwrap();
        let stats = cache.stats();
        assert_eq!(stats.memory.metadata_bytes, used.memory.metadata_bytes, "after file {number}");
    }
    // All the memory is there for the next.
    let file = setup.file(&cache);
    file.allocate(0..3 << 20).unwrap();
}

fn resident_bytes_of_process() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * PAGE
}

#[test]
fn a_file_of_a_million_gigabytes_costs_what_is_touched() {
    const ALONE: &str = "BIFOLIO_TEST_SPARSE";
    if std::env::var_os(ALONE).is_none() {
        let name = "lifetimes::a_file_of_a_million_gigabytes_costs_what_is_touched";
        run_alone(name, ALONE, "1");
        return;
    }
    const PLACES: u64 = 500;
    let cache = Cache::builder().memory(64 << 20).build().unwrap();
    let options = OpenOptions::new().write(true).len_max(1 << 50);
    let file = cache.memory_file_with("sparse", &options).unwrap();
    file.set_len(1 << 50).unwrap();
    // Chunks, lists and what the process has anyway.
    file.write_all_at(b"first", 0).unwrap();
    let (used, resident) = (cache.stats().memory.used_bytes, resident_bytes_of_process());
    let place = |number: u64| (number * 2 + 1) * ((1 << 50) / (2 * PLACES)) + number * 17;
    for number in 0..PLACES {
        file.write_all_at(&number.to_le_bytes(), place(number)).unwrap();
    }
    // A page and its page of the table; and the kernel's tables for both, and growth.
    let cost = cache.stats().memory.used_bytes - used;
    assert!(cost <= PLACES * 2 * PAGE + (2 << 20), "{cost} bytes are used");
    assert!(cost >= PLACES * PAGE, "{cost} bytes are too few");
    let grown = resident_bytes_of_process().saturating_sub(resident);
    assert!(grown <= PLACES * 4 * PAGE + (4 << 20), "{grown} bytes are resident");
    for number in 0..PLACES {
        let page = place(number) / PAGE * PAGE;
        let from = if number == 0 { PAGE } else { place(number - 1) / PAGE * PAGE + PAGE };
        assert_eq!(file.seek_data(from).unwrap(), Some(page));
        assert_eq!(file.seek_hole(page).unwrap(), Some(page + PAGE));
        assert_eq!(read(&file, place(number), 8), number.to_le_bytes());
    }
    file.punch_hole(place(1)..1 << 50).unwrap();
    assert_eq!(file.seek_data(place(0) + PAGE).unwrap(), Some(place(1) / PAGE * PAGE), "a part");
    assert_eq!(file.seek_data(place(1) + PAGE).unwrap(), None);
    check_resident(&cache, 3 * PAGE).unwrap();
    file.set_len(0).unwrap();
    check_resident(&cache, 0).unwrap();
    file.allocate((1 << 50) - 10..1 << 50).unwrap();
    assert_eq!(file.len(), 1 << 50);
    check_resident(&cache, PAGE).unwrap();
    error_of(file.write_at(b"xx", (1 << 50) - 1), &["sparse", "1125899906842624"]);
    let options = writable().len_max(1 << 50).folio_bytes(2 << 20);
    let large = cache.memory_file_with("large", &options).unwrap();
    large.write_all_at(b"x", (1 << 50) - 1).unwrap();
    assert_eq!(large.seek_data(0).unwrap(), Some((1 << 50) - (2 << 20)));
}
