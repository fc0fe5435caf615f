//! Pins of many ranges in a list that the caller keeps, `pin_many_into`.

use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::support::{PAGE, assert_same, cache_of, directory, random_file};
use bifolio::{Access, ErrorKind, OpenOptions, PageRef};

/// Pages of the bound of 1 MiB that one call pins: more than half.
const MANY: u64 = 150;

fn page(index: u64) -> Range<u64> {
    index * PAGE..(index + 1) * PAGE
}

fn kinds<F>(pins: &[bifolio::Result<PageRef<'_, F>>]) -> Vec<Option<ErrorKind>> {
    pins.iter().map(|pin| pin.as_ref().err().map(bifolio::Error::kind)).collect()
}

#[test]
fn a_list_has_the_results_of_the_last_call_in_their_order() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 400_000);
    let file = cache_of(2 << 20).open_immutable(&path, &OpenOptions::new()).unwrap();
    let mut pins = Vec::new();
    let reversed = Range { start: 9, end: 5 };
    let ranges = [
        page(7),
        reversed,
        4095..4097,
        page(3),
        5..5,
        399_999..400_001,
        u64::MAX - 1..u64::MAX,
        Range { start: u64::MAX, end: 0 },
        100..200,
    ];
    let expected = [
        None,
        Some(ErrorKind::Config),
        Some(ErrorKind::PinSpansFolios),
        None,
        Some(ErrorKind::Config),
        Some(ErrorKind::PastEnd),
        Some(ErrorKind::OutOfRange),
        Some(ErrorKind::Config),
        None,
    ];
    // Absent, then resident, then marked as used.
    for _ in 0..3 {
        file.pin_many_into(ranges.iter().cloned(), &mut pins);
        assert_eq!(kinds(&pins), expected);
        for (pin, range) in pins.iter().zip(&ranges) {
            if let Ok(pin) = pin {
                assert_same(pin, &bytes[range.start as usize..range.end as usize]);
            }
        }
    }
    file.pin_many_into([], &mut pins);
    assert!(pins.is_empty());
    // The plain form of the same call.
    assert_eq!(kinds(&file.pin_many(&ranges)), expected);
}

#[test]
fn a_list_keeps_its_memory_and_drops_its_pins_before_the_next_call() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 4 << 20);
    let cache = cache_of(1 << 20);
    let file = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    file.set_access(Access::Random);
    let mut pins = Vec::with_capacity(MANY as usize);
    let start = pins.as_ptr();
    // Two lists of these do not fit into the bound.
    for round in 0..5 {
        let first = round % 2 * MANY;
        file.pin_many_into((first..first + MANY).map(page), &mut pins);
        assert_eq!((pins.as_ptr(), pins.len() as u64), (start, MANY));
        for (pin, index) in pins.iter().zip(first..) {
            let range = page(index);
            assert_same(pin.as_ref().unwrap(), &bytes[range.start as usize..range.end as usize]);
        }
    }
    pins.clear();
    file.evict(0..file.len()).unwrap();
    assert_eq!(cache.files()[0].resident_bytes, 0, "a reference was not put");
}

#[test]
fn what_does_not_fit_is_full_and_the_ranges_are_run_through_twice() {
    let directory = directory();
    let (path, _) = random_file(&directory, "file", 4 << 20);
    let cache = cache_of(512 << 10);
    let file = cache.open(&path, &OpenOptions::new()).unwrap();
    let runs = Cell::new(0);
    let ranges = (0..200).map(|index| {
        runs.set(runs.get() + usize::from(index == 0));
        page(index)
    });
    let mut pins = Vec::new();
    for round in 1..3 {
        file.pin_many_into(ranges.clone(), &mut pins);
        assert_eq!((pins.len(), runs.get()), (200, 2 * round));
        let pinned = pins.iter().filter(|pin| pin.is_ok()).count();
        assert!((50..200).contains(&pinned), "{pinned} are pinned");
        assert!(kinds(&pins).into_iter().flatten().all(|kind| kind == ErrorKind::Full));
    }
    // The list can be used again, with all pins in it.
    file.pin_many_into((300..310).map(page), &mut pins);
    assert_eq!(kinds(&pins), [None; 10]);
}

#[test]
fn the_iterator_may_call_the_cache() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    let cache = cache_of(2 << 20);
    let file = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    let mut pins = Vec::new();
    let mut inner = Vec::new();
    for _ in 0..3 {
        let ranges = (0..40).map(|index| {
            // Pages that this call is about to pin, or has pinned.
            let mut found = [0; 10];
            file.read_exact_at(&mut found, index * PAGE).unwrap();
            assert_eq!(found, bytes[(index * PAGE) as usize..][..10]);
            assert_eq!(file.pin_many(&[page(index / 2), page(index + 5)]).len(), 2);
            page(index)
        });
        file.pin_many_into(ranges, &mut pins);
        assert_eq!(kinds(&pins), [None; 40]);
        file.pin_many_into((0..40).map(page), &mut inner);
        pins.clear();
        inner.clear();
        file.evict(0..file.len()).unwrap();
    }
}

#[test]
fn a_panic_of_the_iterator_empties_the_list_and_puts_all_references() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 1 << 20);
    let cache = cache_of(2 << 20);
    let file = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    // No readahead, which may still be filling pages when they are to be evicted.
    file.set_access(Access::Random);
    let mut pins = Vec::new();
    for last in [0, 3, 16, 17, 100] {
        // Half of the pages are resident.
        file.evict(0..file.len()).unwrap();
        file.pin_many_into((0..50).map(page), &mut pins);
        let ranges = (0..200).map(|index| {
            assert!(index < last, "the end");
            page(index * 2 % 101)
        });
        let call = AssertUnwindSafe(|| file.pin_many_into(ranges, &mut pins));
        catch_unwind(call).unwrap_err();
        assert!(pins.is_empty());
        file.evict(0..file.len()).unwrap();
        assert_eq!(cache.files()[0].resident_bytes, 0, "a reference was not put");
        file.pin_many_into([page(5)], &mut pins);
        assert_same(pins[0].as_ref().unwrap(), &bytes[5 * 4096..6 * 4096]);
    }
}
