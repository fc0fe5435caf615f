//! Calls of `pin_many` that together need more memory than there is.

use crate::support::{Faulty, PAGE, Way};
use bifolio::File;
use bifolio_testing::{Call, Fault};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MEMORY_BYTES: u64 = 2 << 20;
/// Pages of one call: three fifths of the bound.
const PAGES: u64 = MEMORY_BYTES / PAGE / 5 * 3;

/// Pins every second page from `first` on. Returns the errors.
fn pin_all(file: &File, first: u64) -> Vec<String> {
    let ranges: Vec<_> = (0..PAGES).map(|page| (first + 2 * page) * PAGE).collect();
    let ranges: Vec<_> = ranges.into_iter().map(|start| start..start + PAGE).collect();
    let pins = file.pin_many(&ranges);
    pins.iter().filter_map(|pin| pin.as_ref().err()).map(ToString::to_string).collect()
}

#[test]
fn calls_whose_pins_exceed_the_bound_together_wait_for_each_other() {
    const ROUNDS: u64 = 8;
    const THREADS: u64 = 3;
    let pinned = Faulty::new(Way::Memory, (8 * PAGES * PAGE) as usize, 1);
    // So that all calls have some of their pins when the memory is used up.
    pinned.backing.inject(Fault::on(Call::Read).forever().delayed(Duration::from_micros(100)));
    let others = Faulty::new(Way::Memory, 4 * MEMORY_BYTES as usize, 2);
    let cache = pinned.builder(MEMORY_BYTES).build().unwrap();
    let (file, other) = (pinned.open(&cache), others.open(&cache));
    let (start, is_over) = (Barrier::new(THREADS as usize), AtomicBool::new(false));
    let failures: Vec<String> = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut page = 0;
            let mut failures = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                page = (page + 7) % (4 * MEMORY_BYTES / PAGE);
                let read = other.read_exact_at(&mut [0; 8], page * PAGE);
                failures.extend(read.err().map(|error| format!("a read: {error}")));
            }
            failures
        });
        let pin = |thread: u64| {
            let (file, start) = (&file, &start);
            let rounds = move || {
                let round = |round: u64| {
                    start.wait();
                    pin_all(file, (thread + round) % 4 * 2 * PAGES)
                };
                (0..ROUNDS).flat_map(round).collect::<Vec<_>>()
            };
            scope.spawn(rounds)
        };
        let threads: Vec<_> = (0..THREADS).map(pin).collect();
        let mut failures: Vec<_> =
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        is_over.store(true, Ordering::Relaxed);
        failures.extend(reader.join().unwrap());
        failures
    });
    assert!(failures.is_empty(), "{} failures, such as {}", failures.len(), failures[0]);
}

#[test]
fn ranges_that_do_not_fit_fail_soon_and_the_others_are_pinned() {
    let faulty = Faulty::new(Way::Memory, (8 * PAGES * PAGE) as usize, 3);
    let cache = faulty.builder(MEMORY_BYTES).build().unwrap();
    let file = faulty.open(&cache);
    let ranges: Vec<_> = (0..5 * PAGES / 2).map(|page| page * PAGE..(page + 1) * PAGE).collect();
    let begun = std::time::Instant::now();
    let pins = file.pin_many(&ranges);
    let pinned = pins.iter().filter(|pin| pin.is_ok()).count() as u64;
    assert!((PAGES..MEMORY_BYTES / PAGE).contains(&pinned), "{pinned} pages are pinned");
    for error in pins.iter().filter_map(|pin| pin.as_ref().err()) {
        assert_eq!(error.kind(), bifolio::ErrorKind::Full, "{error}");
    }
    // Two waits for each of the 300 ranges that do not fit would take a minute.
    let seconds = begun.elapsed().as_secs();
    assert!(seconds < 30, "{seconds} s");
    drop(pins);
    assert_eq!(pin_all(&file, 0), Vec::<String>::new());
}
