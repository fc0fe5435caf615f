//! A request that cannot work returns an error of the right kind, in one line with the file and the
//! error number.
//!
//! Longer than 600 lines because it goes through the kinds of errors one by one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{
    Faulty, PAGE, Way, assert_same, cache_of, directory, error_of, file_of, open, random_file,
    read, read_all, without_root, writable,
};
use bifolio::backing::Alignment;
use bifolio::{Access, Cache, Error, ErrorKind, File, HugePages, OpenOptions, Residency};
use bifolio_testing::{Call, Fault, FaultyBacking, MemoryBacking};
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// Maximum position of the kernel.
const POSITION_MAX: u64 = i64::MAX as u64;

fn is_config(error: &Error, name: &str) -> bool {
    let text = error.to_string();
    let file = error.file().map(|file| format!("{file}: ")).unwrap_or_default();
    let text = text.strip_prefix(&file).expect("the file is named first");
    error.kind() == ErrorKind::Config && text.starts_with(&format!("{name}: "))
}

/// Pins folio after folio until the cache is full: the first folio beyond the bound is an error,
/// and no other. Returns how many fit.
fn pin_everything(memory_bytes: u64, folio_bytes: u64) -> u64 {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "pinned", 2 * memory_bytes as usize);
    let cache = cache_of(memory_bytes);
    let file = cache.open(&path, &writable().folio_bytes(folio_bytes)).unwrap();
    let mut pins = Vec::new();
    let full = loop {
        let start = pins.len() as u64 * folio_bytes;
        let began = Instant::now();
        match file.pin(start..start + folio_bytes) {
            Ok(pin) => pins.push(pin),
            Err(error) => {
                assert!(began.elapsed() < Duration::from_secs(5), "it swept for too long");
                break Err::<(), _>(error);
            }
        }
        assert!(cache.stats().memory.used_bytes <= memory_bytes);
    };
    let count = pins.len() as u64;
    let pinned = count * folio_bytes;
    let needles = [
        format!("pinned: no memory for {folio_bytes} bytes at position {pinned}"),
        format!("of {memory_bytes} bytes, {pinned} are pinned"),
    ];
    let error = error_of(full, &needles.each_ref().map(String::as_str));
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(!error.to_string().contains(" 0 are"), "{error}");
    assert_eq!((error.file(), error.range()), (path.to_str(), Some(pinned..pinned + folio_bytes)));
    assert!(cache.stats().memory.allocation_failures > 0);

    // What is pinned can be used all the same, by every call.
    let middle = (count / 2 * folio_bytes) as usize;
    assert_same(&read(&file, middle as u64, 100), &bytes[middle..middle + 100]);
    file.write_at(b"here", middle as u64).unwrap();
    file.sync_data().unwrap();
    // A write or a read of anything else cannot.
    let beyond = count * folio_bytes;
    assert!(error_of(file.write_at(b"x", beyond), &[]).kind() == ErrorKind::Full);
    let answer = file.read_at(&mut [0; 8], beyond);
    assert!(error_of(answer, &[]).kind() == ErrorKind::Full);

    // One less is enough for one more.
    drop(pins.remove(0));
    let last = file.pin(beyond..beyond + folio_bytes).unwrap();
    let mut found = vec![0; folio_bytes as usize];
    last.copy_to(0, &mut found).unwrap();
    assert_same(&found, &bytes[beyond as usize..][..folio_bytes as usize]);
    drop((last, pins));
    let mut expected = bytes;
    expected[middle..middle + 4].copy_from_slice(b"here");
    assert_same(&read_all(&file), &expected);
    count
}

#[test]
fn one_pin_too_many_is_an_error_that_names_the_pinned_bytes() {
    let count = pin_everything(256 << 10, PAGE);
    assert_eq!(count, 48, "three chunks of 64 KiB, with their descriptors, fit in 256 KiB");
    let count = pin_everything(1 << 20, PAGE);
    assert!((220..256).contains(&count), "{count} pages fit in 1 MiB");
}

#[test]
fn one_large_pin_beyond_the_bound_is_an_error_too() {
    let count = pin_everything(1 << 20, 64 << 10);
    assert!((12..16).contains(&count), "{count} folios of 64 KiB fit in 1 MiB");
    let count = pin_everything(8 << 20, 256 << 10);
    assert_eq!(count, 31, "folios of 256 KiB in 8 MiB, with their descriptors");
}

#[test]
fn folios_of_each_size_fill_bounds_with_and_without_huge_pages() {
    const MIB: u64 = 1 << 20;
    for (memory_mib, largest_folio) in
        [(2, 64 << 10), (4, 128 << 10), (31, 512 << 10), (32, 2 * MIB), (58, 2 * MIB)]
    {
        let sizes = [PAGE, 64 << 10, largest_folio];
        for folio_bytes in sizes.into_iter().skip(usize::from(memory_mib > 32)) {
            let pinned_bytes = pin_everything(memory_mib * MIB, folio_bytes) * folio_bytes;
            let least_bytes = memory_mib * MIB / 8 * 7;
            assert!(pinned_bytes >= least_bytes, "{memory_mib} MiB, {folio_bytes}: {pinned_bytes}");
        }
    }
}

#[test]
fn holds_fill_a_cache_as_pins_do() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "held", 4 << 20);
    let cache = cache_of(4 << 20);
    let file = open(&cache, &path);
    let held = (0..512).map(|page| file.pin(page * PAGE..(page + 1) * PAGE).unwrap().into_owned());
    let held: Vec<_> = held.collect();
    let error = error_of(cache.set_memory(1 << 20), &["1048576"]);
    assert_eq!(error.kind(), ErrorKind::Full, "{error:?}");
    assert_eq!(cache.stats().memory.bound_bytes, 4 << 20, "the old bound stands");
    drop(held);
    cache.set_memory(1 << 20).unwrap();
    assert!(cache.stats().memory.used_bytes <= 1 << 20);
    assert_same(&read_all(&file), &bytes);
}

#[test]
fn a_few_pins_do_not_make_a_cache_full() {
    let directory = directory();
    let path = file_of(&directory, "large", b"");
    std::fs::File::options().write(true).open(&path).unwrap().set_len(256 << 20).unwrap();
    let cache = cache_of(4 << 20);
    let file = open(&cache, &path);
    // Every 64th page of what the cache holds stays pinned, so no 2 MiB of it can be given back.
    let mut pins = Vec::new();
    for page in 0..900 {
        let pin = file.pin(page * PAGE..(page + 1) * PAGE).unwrap();
        if page % 64 == 0 {
            pins.push(pin);
        }
    }
    // And yet there is room for one page after the other, all over the file.
    for page in (0..65536).step_by(128) {
        assert_eq!(read(&file, page * PAGE, 1), [0], "page {page}");
        assert!(cache.stats().memory.used_bytes <= 4 << 20);
    }
}

#[test]
fn a_file_truncated_by_another_program_names_the_position() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "cut", 40_000);
    let cache = cache_of(4 << 20);
    let file = open(&cache, &path);
    // What was read ahead would be served, and rightly so.
    file.set_access(Access::Random);
    assert_same(&read(&file, 0, 100), &bytes[..100]);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
    let name = path.display().to_string();
    let needles = [&name, "4096 bytes expected at position 28672, 0 found"];
    let error = error_of(file.read_at(&mut [0; 10], 30_000), &needles);
    assert_eq!((error.kind(), error.range()), (ErrorKind::CutShort, Some(28672..32768)));
    assert_eq!(error.file(), Some(name.as_str()));
    let error = error_of(file.pin(8192..8193), &[&name, "8192, 1808 found"]);
    assert_eq!((error.kind(), error.range()), (ErrorKind::CutShort, Some(8192..12288)));
    // What is left is served, up to the page that is not whole any more.
    assert_same(&read(&file, 0, 40_000), &bytes[..8192]);
    // Back again: nothing wrong was remembered.
    std::fs::write(&path, &bytes).unwrap();
    assert_same(&read_all(&file), &bytes);
}

#[test]
fn a_file_that_cannot_be_read_says_where_and_why() {
    let directory = directory();
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![1; 40_000])));
    backing.inject(Fault::on(Call::Read).forever().fails(libc::EIO));
    let cache = cache_of(4 << 20);
    let file = cache.open_backing(backing.clone(), &writable()).unwrap();
    let needles = ["faulty memory", "position 8192", "os error 5"];
    for error in [
        error_of(file.read_at(&mut [0; 10], 9000), &needles),
        error_of(file.pin(9000..9001), &needles),
        error_of(file.pin_mut(9000..9001), &needles),
        error_of(file.write_at(b"part of a page", 9000), &needles),
    ] {
        assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Io, Some(libc::EIO)));
    }

    let path = file_of(&directory, "secret", b"secret");
    let no_access = std::os::unix::fs::PermissionsExt::from_mode(0o000);
    std::fs::set_permissions(&path, no_access).unwrap();
    let name = path.display().to_string();
    let answer = without_root(|| cache.open(&path, &OpenOptions::new()));
    let error = error_of(answer, &[&name, "ermission"]);
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Open, Some(libc::EACCES)));
}

#[test]
fn only_regular_files_that_exist_can_be_opened() {
    let directory = directory();
    let cache = cache_of(1 << 20);
    let fifo = directory.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (path, kind) in [(directory.path(), "a directory"), (&fifo, "a named pipe")] {
        for options in [OpenOptions::new(), writable().create(true)] {
            let error = error_of(cache.open(path, &options), &[path.to_str().unwrap(), kind]);
            assert_eq!((error.kind(), error.file()), (ErrorKind::NotRegular, path.to_str()));
        }
    }
    let missing = directory.path().join("missing");
    let error = error_of(cache.open(&missing, &writable()), &[missing.to_str().unwrap()]);
    assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::Open, Some(libc::ENOENT)));
    assert!(!missing.exists(), "it must not be made");
    cache.open(&missing, &writable().create(true)).unwrap();
    assert!(missing.exists());
}

#[test]
fn a_file_of_no_bytes_reads_as_nothing_and_cannot_be_pinned() {
    let directory = directory();
    let path = file_of(&directory, "empty", b"");
    let name = path.display().to_string();
    let cache = cache_of(1 << 20);
    let file = open(&cache, &path);
    assert_eq!(file.len(), 0);
    assert_eq!(file.read_at(&mut [0; 100], 0).unwrap(), 0);
    assert_eq!(file.read_at(&mut [], 0).unwrap(), 0);
    assert_eq!(file.write_at(&[], 1 << 30).unwrap(), 0, "no bytes make no file longer");
    assert_eq!(file.len(), 0);
    let error = error_of(file.pin(0..1), &[&name, "has 0 bytes"]);
    assert_eq!((error.kind(), error.range()), (ErrorKind::PastEnd, Some(0..1)), "{error:?}");
    assert!(error_of(file.pin_mut(0..1), &[]).kind() == ErrorKind::PastEnd);
    let error = error_of(file.read_exact_at(&mut [0; 1], 0), &[&name]);
    assert_eq!(error.kind(), ErrorKind::PastEnd);
    file.sync_all().unwrap();
}

#[test]
fn positions_near_the_largest_number_are_errors() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let name = path.display().to_string();
    let cache = cache_of(1 << 20);
    let file = open(&cache, &path);
    // The last byte the kernel could have is merely behind our end.
    assert_eq!(file.read_at(&mut [0; 1], POSITION_MAX - 1).unwrap(), 0);
    for position in [POSITION_MAX, POSITION_MAX + 1, u64::MAX - 1, u64::MAX] {
        let number = position.to_string();
        let needles = [name.as_str(), number.as_str()];
        for error in [
            error_of(file.read_at(&mut [0; 1], position), &needles),
            error_of(file.read_at(&mut [0; 8192], position), &needles),
            error_of(file.read_exact_at(&mut [0; 1], position), &needles),
            error_of(file.write_at(b"x", position), &needles),
            error_of(file.pin(position..u64::MAX), &needles[..1]),
            error_of(file.pin_mut(POSITION_MAX - 1..u64::MAX), &[&name]),
        ] {
            // A range from u64::MAX to itself is first of all empty.
            let is_empty = position == u64::MAX && error.kind() == ErrorKind::Config;
            assert!(is_empty || error.kind() == ErrorKind::OutOfRange, "{error:?}");
        }
    }
    for length in [POSITION_MAX + 1, u64::MAX] {
        let error = error_of(file.set_len(length), &[&name, &length.to_string()]);
        assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error:?}");
    }
    let error = error_of(file.pin(POSITION_MAX - 4..POSITION_MAX), &[&name]);
    assert_eq!(error.kind(), ErrorKind::PastEnd, "{error:?}");
    assert_same(&read_all(&file), b"0123456789");
}

#[test]
fn a_file_grows_to_len_max_and_no_further() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let name = path.display().to_string();
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &writable().len_max(5000)).unwrap();
    for result in [
        file.write_at(&[1; 2], 4999).map(drop),
        file.write_at(&[1; 1], 1 << 60).map(drop),
        file.set_len(5001),
        file.set_len(POSITION_MAX),
    ] {
        let error = error_of(result, &[&name, "only to 5000", "len_max"]);
        assert_eq!(error.kind(), ErrorKind::TooLong);
    }
    assert_eq!(file.len(), 10);
    file.write_at(&[1; 1], 4999).unwrap();
    assert_eq!(file.len(), 5000);
    drop(file);
    let error = error_of(cache.open(&path, &writable().len_max(4999)), &["len_max", "4999"]);
    assert!(is_config(&error, "len_max"), "{error}");
    let huge = writable().len_max(u64::MAX);
    error_of(cache.open(&path, &huge), &["len_max", &u64::MAX.to_string()]);
}

#[test]
fn a_reader_does_not_keep_a_writer_from_growing_the_file() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let cache = cache_of(1 << 20);
    let reader = cache.open(&path, &OpenOptions::new()).unwrap();
    let writer = open(&cache, &path);
    writer.write_all_at(b"more", 100_000).unwrap();
    assert_eq!(reader.len(), 100_004);
    assert_same(&read(&reader, 99_999, 100), b"\0more");
}

#[test]
fn folio_sizes_and_bounds_that_cannot_be_are_named() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let cache = cache_of(4 << 20);
    for folio_bytes in [0, 1, 1000, 2048, 4095, 4097, 12288, 4 << 20, 1 << 40, u64::MAX] {
        let answer = cache.open(&path, &writable().folio_bytes(folio_bytes));
        let error = error_of(answer, &["folio_bytes", &folio_bytes.to_string(), "power of two"]);
        assert!(is_config(&error, "folio_bytes"), "{error}");
    }
    for memory_bytes in [0, 1, 4096, (256 << 10) - 1, u64::MAX] {
        let builder = Cache::builder().memory(memory_bytes);
        let needles = ["memory", &memory_bytes.to_string()];
        let error = error_of(builder.validate(), &needles);
        assert!(is_config(&error, "memory"), "{error}");
        error_of(builder.build(), &needles);
        error_of(cache.set_memory(memory_bytes), &needles);
    }
    let small = Cache::builder().memory(1 << 20).memory_max(2 << 20).build().unwrap();
    error_of(small.set_memory(3 << 20), &["memory", "3145728", "2097152"]);
}

#[test]
fn a_folio_larger_than_a_chunk_is_refused_with_the_bound_that_would_do() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    for (memory_bytes, chunk_bytes, needed_bytes) in [
        (256 << 10, 64 << 10, 4_u64 << 20),
        ((4 << 20) - 1, 64 << 10, 4 << 20),
        ((32 << 20) - 1, 512 << 10, 32 << 20),
    ] {
        let cache = cache_of(memory_bytes);
        let of = |folio_bytes| cache.open(&path, &writable().folio_bytes(folio_bytes));
        assert_eq!(read(&of(chunk_bytes).unwrap(), 5, 9), b"56789");
        let needles = [
            "folio_bytes",
            &(2 * chunk_bytes).to_string(),
            &chunk_bytes.to_string(),
            &needed_bytes.to_string(),
        ];
        let error = error_of(of(2 * chunk_bytes), &needles);
        assert!(is_config(&error, "folio_bytes"), "{error}");
    }
    assert_eq!(
        cache_of(32 << 20).open(&path, &writable().folio_bytes(2 << 20)).unwrap().folio_bytes(),
        2 << 20
    );
}

#[test]
fn bounds_that_are_too_small_for_the_chunks_are_named() {
    let cache = cache_of(64 << 20);
    let error = error_of(cache.set_memory((8 << 20) - 1), &["memory", "8388607", "8388608"]);
    assert!(is_config(&error, "memory"), "{error}");
    cache.set_memory(8 << 20).unwrap();
    let builder = Cache::builder().memory((32 << 20) - 1).huge_pages(HugePages::Require);
    let error = error_of(builder.build(), &["huge_pages", "33554431", "33554432"]);
    assert!(is_config(&error, "huge_pages"), "{error}");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let cache = cache_of(1 << 20);
    for (options, problem) in [
        (OpenOptions::new().read(false), "neither read nor write"),
        (OpenOptions::new().create(true), "create needs write"),
        (OpenOptions::new().truncate(true), "truncate needs write"),
    ] {
        let error = error_of(cache.open(&path, &options), &[problem]);
        assert_eq!(error.kind(), ErrorKind::Config);
    }
    for (options, problem) in [
        (writable(), "an immutable file cannot be written"),
        (OpenOptions::new().read(false), "an immutable file is opened for reading"),
    ] {
        let error = error_of(cache.open_immutable(&path, &options), &[problem]);
        assert_eq!(error.kind(), ErrorKind::Config);
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"0123456789");
}

#[test]
fn immutable_and_writable_handles_exclude_each_other() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let link = directory.path().join("link");
    std::fs::hard_link(&path, &link).unwrap();
    let cache = cache_of(1 << 20);
    let first = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    let reader = cache.open(&path, &OpenOptions::new()).unwrap();
    let error = error_of(
        cache.open(&link, &writable().truncate(true)),
        &["writable: it is open immutable"],
    );
    assert_eq!(error.kind(), ErrorKind::OptionConflict);
    assert_eq!(std::fs::read(&path).unwrap(), b"0123456789", "it was cut all the same");
    // An owned reference keeps the immutable handle open.
    let page = first.pin(2..5).unwrap().into_owned();
    drop(first);
    error_of(cache.open(&path, &writable()), &["writable", "immutable"]);
    assert_eq!(&page[..], b"234");
    drop(page);

    let writer = open(&cache, &path);
    let refused = cache.open_immutable(&link, &OpenOptions::new());
    let error = error_of(refused, &["immutable: it is open writable"]);
    assert_eq!(error.kind(), ErrorKind::OptionConflict);
    writer.write_at(b"X", 0).unwrap();
    drop((writer, reader));
    let again = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    assert_eq!(again.pin(0..3).unwrap()[..], *b"X12");
}

#[test]
fn handles_of_one_file_agree_on_the_folio_size() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let cache = cache_of(1 << 20);
    let first = open(&cache, &path);
    let other = writable().folio_bytes(16 << 10);
    let name = path.display().to_string();
    let error = error_of(cache.open(&path, &other), &[&name, "16384 bytes: it has 4096"]);
    assert_eq!((error.kind(), error.errno()), (ErrorKind::OptionConflict, libc::EINVAL));
    drop(first);
    assert_eq!(cache.open(&path, &other).unwrap().folio_bytes(), 16 << 10);
}

#[test]
fn a_handle_does_only_what_it_was_opened_for() {
    let directory = directory();
    let path = file_of(&directory, "file", b"0123456789");
    let name = path.display().to_string();
    let cache = cache_of(1 << 20);
    let reader = cache.open(&path, &OpenOptions::new()).unwrap();
    let writer = cache.open(&path, &OpenOptions::new().read(false).write(true)).unwrap();
    // Resident, so that the shortest path has its chance to be wrong.
    for _ in 0..3 {
        assert_same(&read(&reader, 0, 10), b"0123456789");
        let error = error_of(writer.read_at(&mut [0; 4], 0), &[&name, "reading"]);
        assert_eq!(error.kind(), ErrorKind::NotOpenedFor);
        error_of(writer.pin(0..4), &[&name, "reading"]);
    }
    for result in [
        reader.write_at(b"x", 0).map(drop),
        reader.write_at(b"", 0).map(drop),
        reader.pin_mut(0..1).map(drop),
        reader.set_len(0),
    ] {
        let error = error_of(result, &[&name, "writing"]);
        assert_eq!(error.kind(), ErrorKind::NotOpenedFor);
    }
    writer.write_at(b"A", 0).unwrap();
    assert_same(&read(&reader, 0, 2), b"A1");
}

#[test]
fn a_pin_lies_in_one_folio_and_has_bytes() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 100_000);
    let name = path.display().to_string();
    let cache = cache_of(1 << 20);
    let file = cache.open(&path, &writable().folio_bytes(16 << 10)).unwrap();
    let resident = file.pin(0..16384).unwrap();
    for _ in 0..2 {
        let error = error_of(file.pin(16383..16385), &[&name, "16383", "16384"]);
        assert_eq!((error.kind(), error.range()), (ErrorKind::PinSpansFolios, Some(16383..16385)));
        error_of(file.pin_mut(0..16385), &[&name, "16385"]);
        let reversed = std::ops::Range { start: 10, end: 5 };
        for range in [5..5, reversed, 16384..16384] {
            let error = error_of(file.pin(range.clone()), &["range"]);
            assert!(is_config(&error, "range"), "{error}");
            error_of(file.pin_mut(range), &["range"]);
        }
        advise_nothing(&file);
        error_of(file.pin(99_999..100_001), &[&name, "has 100000 bytes"]);
    }
    drop(resident);
    let pin = file.pin(98_304..100_000).unwrap();
    let mut found = vec![0; 1696];
    pin.copy_to(0, &mut found).unwrap();
    assert_same(&found, &bytes[98_304..]);
}

/// A range whose end is before its start is empty, and so is one past the end of file.
#[allow(clippy::reversed_empty_ranges)]
fn advise_nothing(file: &File) {
    let behind = file.len() + 50_000;
    for range in [behind..behind + 10_000, behind..10, 50_000..10] {
        file.prefetch(range.clone()).unwrap();
        file.populate(range.clone()).unwrap();
        let outcome = file.evict(range.clone()).unwrap();
        assert_eq!((outcome.folios, outcome.kept.total()), (0, 0), "{range:?}: {outcome:?}");
        file.sync_range(range.clone()).unwrap();
        assert_eq!(file.residency(range).unwrap(), Residency::default());
    }
}

#[test]
fn a_closed_cache_answers_that_it_is_closed() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 10_000);
    let cache = cache_of(1 << 20);
    let file = open(&cache, &path);
    file.write_at(b"written", 0).unwrap();
    let hold = file.pin(4096..5000).unwrap().into_owned();
    cache.close().unwrap();
    assert_eq!(&std::fs::read(&path).unwrap()[..7], b"written");
    let results = [
        file.read_at(&mut [0; 10], 0).map(drop),
        file.read_at(&mut [0; 10], 4096).map(drop),
        file.write_at(b"x", 0).map(drop),
        file.pin(4096..4097).map(drop),
        file.pin_mut(0..1).map(drop),
        file.set_len(0),
        file.sync_data(),
        file.sync_all(),
        file.clone().close(),
        cache.open(&path, &writable()).map(drop),
        cache.set_memory(2 << 20),
        cache.close(),
    ];
    for (number, result) in results.into_iter().enumerate() {
        let Err(error) = result else { panic!("call {number} works in a closed cache") };
        assert_eq!(error.kind(), ErrorKind::Closed, "call {number}: {error:?}");
    }
    let mut found = vec![0; 904];
    hold.copy_to(0, &mut found).unwrap();
    assert_same(&found, &bytes[4096..5000]);
    let _ = cache.stats();
}

#[test]
fn truncate_cuts_the_file_for_all_its_handles() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 10_000);
    let cache = cache_of(1 << 20);
    let reader = cache.open(&path, &OpenOptions::new()).unwrap();
    assert_eq!(read(&reader, 0, 20_000).len(), 10_000);
    let writer = cache.open(&path, &writable().truncate(true)).unwrap();
    assert_eq!((reader.len(), writer.len()), (0, 0));
    assert_eq!(read(&reader, 0, 20_000), []);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    writer.write_at(b"new", 5000).unwrap();
    assert_eq!(read(&reader, 4999, 20), b"\0new");
}

/// Storage whose length cannot be read.
#[test]
fn a_file_whose_length_cannot_be_had_is_not_opened() {
    let backing = Arc::new(FaultyBacking::new(MemoryBacking::new(vec![1; 100])));
    backing.inject(Fault::on(Call::Len).fails(libc::EIO));
    let cache = cache_of(1 << 20);
    let answer = cache.open_backing(backing.clone(), &writable());
    error_of(answer, &["faulty memory", "length", "os error 5"]);
    let file = cache.open_backing(backing, &writable()).unwrap();
    assert_eq!(read_all(&file), [1; 100]);
}

#[test]
fn an_alignment_that_no_frame_has_is_refused() {
    for bytes in [0, 3, 8192] {
        let alignment = Alignment { memory_bytes: 1, offset_bytes: bytes };
        let backing = || Arc::new(MemoryBacking::strict(vec![0; 8192], alignment));
        let needles = ["memory", "alignment", &bytes.to_string()];
        error_of(cache_of(1 << 20).open_backing(backing(), &OpenOptions::new()), &needles);
        error_of(Cache::builder().swap_backing(backing()).build(), &needles);
    }
}

#[test]
fn set_len_works_after_a_truncation_by_another_program() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "cut", 40_000);
    let cache = cache_of(4 << 20);
    let file = cache.open(&path, &writable()).unwrap();
    file.set_access(Access::Random);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
    error_of(file.read_at(&mut [0; 10], 30_000), &["cut", "File::set_len"]);
    file.set_len(10_000).unwrap();
    assert_same(&read_all(&file), &bytes[..10_000]);
}

/// Runs `test` on a thread, and fails if it is stuck.
fn ends(test: impl FnOnce() + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let running = std::thread::spawn(move || {
        test();
        drop(done);
    });
    let answer = is_done.recv_timeout(Duration::from_secs(30));
    assert_ne!(answer, Err(std::sync::mpsc::RecvTimeoutError::Timeout), "stuck");
    running.join().unwrap();
}

#[test]
fn a_call_for_the_folio_of_an_own_pin_mut_is_refused() {
    ends(|| {
        let directory = directory();
        let (path, bytes) = random_file(&directory, "pinned", 40_000);
        let cache = cache_of(4 << 20);
        let file = cache.open(&path, &writable()).unwrap();
        let pin = file.pin_mut(PAGE..PAGE + 100).unwrap();
        let needles = [path.to_str().unwrap(), "4096", "PageRefMut"];
        error_of(file.read_at(&mut [0; 10], PAGE), &needles);
        error_of(file.write_at(&[0; 10], PAGE), &needles);
        error_of(file.pin(PAGE..PAGE + 1), &needles);
        error_of(file.pin_mut(PAGE..PAGE + 1), &needles);
        error_of(file.sync_data(), &needles);
        error_of(file.sync_all(), &needles);
        error_of(file.sync_range(0..PAGE + 1), &needles);
        error_of(file.set_len(PAGE + 1), &needles);
        error_of(file.discard_dirty(), &needles);
        error_of(file.clone().close(), &needles);
        error_of(cache.close(), &needles);
        let mut buffer = [0; 10];
        let mut requests = [bifolio::ReadRequest::new(&mut buffer, PAGE)];
        file.read_many(&mut requests).unwrap();
        let [request] = requests;
        error_of(request.result, &needles);
        // Other folios, and other threads once it is gone, have nothing to do with it.
        assert_same(&read(&file, 0, 10), &bytes[..10]);
        file.write_at(&[7; 10], 2 * PAGE).unwrap();
        file.sync_range(2 * PAGE..3 * PAGE).unwrap();
        file.set_len(2 * PAGE).unwrap();
        file.set_len(50_000).unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(&file, PAGE, 10));
            drop(pin);
            assert_same(&reader.join().unwrap(), &bytes[4096..4106]);
        });
        file.close().unwrap();
        cache.close().unwrap();
    });
}

#[test]
fn an_option_that_is_wrong_names_the_file() {
    let directory = directory();
    let path = file_of(&directory, "options", b"0123456789");
    let (name, cache) = (path.display().to_string(), cache_of(1 << 20));
    for options in [
        OpenOptions::new().folio_bytes(5000),
        OpenOptions::new().folio_bytes(2 << 20),
        OpenOptions::new().create(true),
        OpenOptions::new().len_max(u64::MAX),
        OpenOptions::new().len_max(3),
    ] {
        let error = error_of(cache.open(&path, &options), &[&name]);
        assert_eq!((error.kind(), error.file()), (ErrorKind::Config, Some(&*name)));
        let descriptor = std::fs::File::open(&path).unwrap();
        error_of(cache.open_fd(descriptor.into(), &options), &[&name]);
        let backing = Arc::new(MemoryBacking::new(vec![1; 10]));
        let opened = cache.open_backing(backing, &options);
        assert!(error_of(opened, &[]).file().is_some());
    }
    let options = OpenOptions::new().len_max(u64::MAX);
    error_of(cache.memory_file_with("scratch", &options), &["scratch: len_max"]);
}

#[test]
fn a_reversed_range_is_called_so() {
    let directory = directory();
    let path = file_of(&directory, "reversed", &[1; 8192]);
    let file = open(&cache_of(1 << 20), &path);
    let (start, end) = (5000, 4000);
    for result in [file.pin(start..end).map(drop), file.pin_mut(start..end).map(drop)] {
        let error = error_of(result, &["reversed: range", "5000..4000 is reversed"]);
        assert_eq!(error.kind(), ErrorKind::Config);
    }
    error_of(file.pin(7..7), &["reversed: range", "no bytes"]);
}

/// The failure of a sync is not an earlier one, and has the first position that failed.
#[test]
fn a_failed_sync_says_whether_the_write_back_is_its_own() {
    let faulty = Faulty::new(Way::Threads, 1 << 20, 5);
    let cache = faulty.builder(4 << 20).build().unwrap();
    let (file, other) = (faulty.open(&cache), faulty.open(&cache));
    faulty.backing.inject(Fault::on(Call::Write).forever().fails(libc::ENOSPC));
    [8, 0, 16].iter().for_each(|part| file.write_all_at(&[1; 8], part * 16384).unwrap());
    let error = error_of(file.sync_data(), &["the write-back failed", "at position 0"]);
    assert_eq!(error.kind(), ErrorKind::Writeback);
    faulty.backing.heal();
    error_of(other.sync_data(), &["an earlier write-back failed", "at position 0"]);
    other.sync_data().unwrap();
    file.sync_data().unwrap();
}
