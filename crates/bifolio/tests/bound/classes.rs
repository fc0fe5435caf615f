//! Classes of files, and memory that the program reserves within the bound.

use std::thread;

use bifolio::{Cache, Class, ErrorKind, File, OpenOptions};

use crate::support::{
    PAGE, assert_same, cache_of, directory, error_of, file_of, files_can_be_mapped, mappable,
    random_file, read_all, writable,
};

const MIB: u64 = 1 << 20;

fn in_class(name: &str) -> OpenOptions {
    OpenOptions::new().class(name)
}

/// Reads every page of a file once, in order, one by one.
fn scan(file: &File) {
    for position in (0..file.len()).step_by(PAGE as usize) {
        file.read_exact_at(&mut [0; 8], position).unwrap();
    }
}

/// Returns the misses of a scan.
fn misses(cache: &Cache, file: &File) -> u64 {
    let before = cache.stats().reads.misses;
    scan(file);
    cache.stats().reads.misses - before
}

fn resident(class: &Class) -> u64 {
    class.stats().resident_bytes
}

#[test]
fn pages_up_to_the_floor_stay_whatever_others_read() {
    let directory = directory();
    let (index, _) = random_file(&directory, "index", 4 << 20);
    let table = file_of(&directory, "table", &vec![1; 64 << 20]);
    let cache = Cache::builder().memory(16 * MIB).readahead_max(0).build().unwrap();
    let class = cache.class("index").unwrap();
    class.set_floor(4 * MIB).unwrap();
    let index = cache.open(&index, &in_class("index")).unwrap();
    let table = cache.open(&table, &OpenOptions::new()).unwrap();
    scan(&index);
    assert_eq!(resident(&class), 4 * MIB);
    for _ in 0..3 {
        // Twice: what is read once does not push out much in any case.
        scan(&table);
        scan(&table);
    }
    assert_eq!((misses(&cache, &index), resident(&class)), (0, 4 * MIB));
    let stats = class.stats();
    assert_eq!((stats.misses, stats.refaults, stats.evicted_bytes), (1024, 0, 0));
    // What a class does not use is used by others, and so is all of it without a floor.
    class.set_floor(0).unwrap();
    scan(&table);
    assert!(resident(&class) < 3 * MIB, "{:?}", class.stats());
    assert!(class.stats().evicted_bytes > MIB);
}

#[test]
fn a_class_at_its_ceiling_evicts_its_own_pages() {
    let directory = directory();
    let (hot, _) = random_file(&directory, "hot", 8 << 20);
    let (log, bytes) = random_file(&directory, "log", 32 << 20);
    let cache = cache_of(16 * MIB);
    let class = cache.class("log").unwrap();
    class.set_ceiling(Some(MIB)).unwrap();
    let hot = cache.open(&hot, &OpenOptions::new()).unwrap();
    scan(&hot);
    let log = cache.open(&log, &in_class("log")).unwrap();
    let mut read = vec![0; 32 << 20];
    for (number, part) in read.chunks_mut(100_000).enumerate() {
        log.read_exact_at(part, number as u64 * 100_000).unwrap();
        assert!(resident(&class) <= MIB, "{:?}", class.stats());
    }
    assert_same(&read, &bytes);
    // A long read, and readahead, too.
    assert_same(&read_all(&log), &bytes);
    assert!(resident(&class) <= MIB, "{:?}", class.stats());
    assert!(resident(&class) >= MIB / 2, "{:?}", class.stats());
    assert_eq!(misses(&cache, &hot), 0);
    // Lower and higher ceilings.
    class.set_ceiling(Some(128 << 10)).unwrap();
    assert!(resident(&class) <= 128 << 10, "{:?}", class.stats());
    class.set_ceiling(None).unwrap();
    scan(&log);
    assert!(resident(&class) > 4 * MIB, "{:?}", class.stats());
}

#[test]
fn a_class_full_of_pins_is_full_and_others_are_not() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    let cache = cache_of(16 * MIB);
    let class = cache.class("pinned").unwrap();
    class.set_ceiling(Some(64 << 10)).unwrap();
    let file = cache.open(&path, &in_class("pinned")).unwrap();
    let other = cache.memory_file("other").unwrap();
    let pins: Vec<_> = (0..16).map(|page| file.pin(page * PAGE..page * PAGE + 1)).collect();
    assert!(pins.iter().all(Result::is_ok), "{pins:?}");
    let needles = ["class `pinned`", "65536", "65536 are pinned"];
    let error = error_of(file.read_at(&mut [0], 20 * PAGE), &needles);
    assert_eq!(error.kind(), ErrorKind::Full);
    other.write_all_at(&[1; 1 << 20], 0).unwrap();
    drop(pins);
    assert_same(&read_all(&file), &bytes);
}

#[test]
fn the_class_of_the_lowest_order_gives_first() {
    let directory = directory();
    let paths = ["first", "last", "more"].map(|name| random_file(&directory, name, 6 << 20).0);
    let cache = Cache::builder().memory(16 * MIB).readahead_max(0).build().unwrap();
    let [first, last] = ["first", "last"].map(|name| cache.class(name).unwrap());
    first.set_order(0);
    last.set_order(255);
    let files = [Some("first"), Some("last"), None];
    let [first_file, last_file, more] = [0, 1, 2].map(|number: usize| {
        let options = files[number].map_or_else(OpenOptions::new, in_class);
        cache.open(&paths[number], &options).unwrap()
    });
    [&first_file, &last_file, &more].into_iter().for_each(scan);
    assert_eq!(resident(&last), 6 * MIB);
    assert!(resident(&first) < 5 * MIB, "{:?}", first.stats());
    assert_eq!(misses(&cache, &more), 0, "of the order between");
}

#[test]
fn dirty_pages_of_a_class_at_its_ceiling_are_written_to_make_room() {
    let directory = directory();
    let path = file_of(&directory, "file", &vec![0; 8 << 20]);
    let cache = cache_of(16 * MIB);
    let class = cache.class("writes").unwrap();
    class.set_ceiling(Some(MIB)).unwrap();
    let file = cache.open(&path, &writable().class("writes")).unwrap();
    thread::scope(|scope| {
        for thread in 0..4 {
            let (file, class) = (&file, &class);
            scope.spawn(move || {
                for page in (thread..2048).step_by(4) {
                    file.write_all_at(&[page as u8 | 1; 4096], page * PAGE).unwrap();
                    assert!(resident(class) <= MIB);
                }
            });
        }
    });
    file.sync_data().unwrap();
    let bytes: Vec<u8> = (0..2048).flat_map(|page: u64| [page as u8 | 1; 4096]).collect();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    assert_same(&read_all(&file), &bytes);
}

#[test]
fn memory_files_count_for_their_class_if_they_can_be_swapped() {
    let directory = directory();
    for has_swap in [false, true] {
        let builder = Cache::builder().memory(16 * MIB);
        let builder = if has_swap { builder.swap_directory(directory.path()) } else { builder };
        let cache = builder.build().unwrap();
        let class = cache.class("sorts").unwrap();
        class.set_ceiling(Some(MIB)).unwrap();
        let file = cache.memory_file_with("runs", &writable().class("sorts")).unwrap();
        let bytes = bifolio_testing::fill_bytes(1, 4 << 20);
        for (number, part) in bytes.chunks(70_000).enumerate() {
            file.write_all_at(part, number as u64 * 70_000).unwrap();
        }
        assert_same(&read_all(&file), &bytes);
        let resident = resident(&class);
        assert!(if has_swap { resident > 0 && resident <= MIB } else { resident == 0 });
    }
}

#[test]
fn mapped_pages_count_for_their_class() {
    if !files_can_be_mapped() {
        return;
    }
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 4 << 20);
    let cache = cache_of(16 * MIB);
    let class = cache.class("maps").unwrap();
    class.set_ceiling(Some(MIB)).unwrap();
    let file = cache.open_immutable(&path, &mappable(in_class("maps"))).unwrap();
    #[cfg(feature = "maps")]
    for (position, byte) in file.map(..).unwrap().as_bytes().iter().enumerate().step_by(999) {
        assert_eq!(*byte, bytes[position]);
        assert!(resident(&class) <= MIB, "{:?}", class.stats());
    }
    assert_same(&read_all(&file), &bytes);
    assert!(resident(&class) <= MIB, "{:?}", class.stats());
}

#[test]
fn limits_that_contradict_each_other_are_refused() {
    let directory = directory();
    let path = file_of(&directory, "file", &[1; 8192]);
    let cache = cache_of(16 * MIB);
    let class = cache.class("one").unwrap();
    let config = |result: bifolio::Result<()>, needles: &[&str]| {
        assert_eq!(error_of(result, needles).kind(), ErrorKind::Config);
    };
    config(class.set_floor(15 * MIB), &["15728640", "14680064", "seven eighths"]);
    class.set_floor(8 * MIB).unwrap();
    config(cache.class("two").unwrap().set_floor(7 * MIB), &["7340032", "6291456"]);
    config(class.set_ceiling(Some(4 * MIB)), &["4194304", "floor"]);
    class.set_ceiling(Some(8 * MIB)).unwrap();
    config(class.set_floor(9 * MIB), &["9437184", "ceiling of 8388608"]);
    config(cache.class("two").unwrap().set_ceiling(Some(0)), &["64 KiB"]);
    config(cache.class("").map(drop), &["a name has 1 to 255"]);
    config(cache.class(&"n".repeat(256)).map(drop), &["not 256"]);
    error_of(cache.open(&path, &in_class("three")), &["no class `three`", "file"]);
    let file = cache.open(&path, &in_class("one")).unwrap();
    cache.open(&path, &OpenOptions::new()).unwrap();
    cache.open(&path, &in_class("one")).unwrap();
    let error = error_of(cache.open(&path, &in_class("two")), &["in class `two`", "class `one`"]);
    assert_eq!(error.kind(), ErrorKind::OptionConflict);
    error_of(cache.open(&path, &in_class("three")), &["no class `three`"]);
    drop(file);
    cache.open(&path, &in_class("two")).unwrap();
    for number in 3..=15 {
        cache.class(&number.to_string()).unwrap();
    }
    config(cache.class("16").map(drop), &["`16`", "15 classes"]);
    assert_eq!(cache.class("two").unwrap().stats().name, "two");
    let names: Vec<_> = cache.classes().into_iter().map(|class| class.name).collect();
    assert_eq!((names.len(), names[0].as_str(), names[14].as_str()), (15, "one", "15"));
    cache.close().unwrap();
    assert_eq!(error_of(cache.class("one"), &[]).kind(), ErrorKind::Closed);
}

#[test]
fn reserved_memory_is_within_the_bound() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 16 << 20);
    let cache = cache_of(16 * MIB);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    assert_same(&read_all(&file), &bytes);
    let mut reserved = cache.reserve(10 * MIB).unwrap();
    let memory = cache.stats().memory;
    assert_eq!((memory.reserved_bytes, reserved.bytes()), (10 * MIB, 10 * MIB));
    assert!(memory.frame_bytes <= 6 * MIB && memory.used_bytes <= 16 * MIB, "{memory:?}");
    assert!(memory.metadata_bytes < MIB, "{memory:?}");
    let error = error_of(cache.reserve(5 * MIB), &["5242880", "10485760", "14680064"]);
    assert_eq!(error.kind(), ErrorKind::Full);
    error_of(cache.reserve(u64::MAX), &["cannot be reserved"]);
    assert_same(&read_all(&file), &bytes);
    error_of(cache.set_memory(8 * MIB), &["cannot fall to 8388608", "reserved 10485760"]);
    cache.set_memory(12 * MIB).unwrap();
    reserved.resize(MIB).unwrap();
    reserved.resize(9 * MIB).unwrap();
    error_of(reserved.resize(12 * MIB), &["3145728"]);
    assert_eq!(cache.stats().memory.reserved_bytes, 9 * MIB);
    drop(reserved);
    assert_eq!(cache.stats().memory.reserved_bytes, 0);
    assert_same(&read_all(&file), &bytes);
    assert!(cache.stats().memory.frame_bytes > 8 * MIB);
}

#[test]
fn a_reservation_that_pins_leave_no_room_for_changes_nothing() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    let wait = std::time::Duration::from_millis(300);
    let cache = Cache::builder().memory(4 * MIB).reclaim_wait_max(wait).build().unwrap();
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    let pins: Vec<_> = (0..640).map(|page| file.pin(page * PAGE..page * PAGE + 1)).collect();
    assert!(pins.iter().all(Result::is_ok));
    let used = cache.stats().memory.used_bytes;
    assert_eq!(error_of(cache.reserve(3 * MIB), &["pinned"]).kind(), ErrorKind::Full);
    let memory = cache.stats().memory;
    assert!(memory.used_bytes <= used && memory.reserved_bytes == 0, "{memory:?}");
    drop(pins);
    drop(cache.reserve(3 * MIB).unwrap());
}
