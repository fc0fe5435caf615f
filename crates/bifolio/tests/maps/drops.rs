//! Maps that are dropped, and files that are pinned, while faults wait for each other.
//!
//! # Safety
//! Only bytes of the file are touched.
#![allow(unsafe_code)]

use std::thread;
use std::time::Duration;

use bifolio_testing::{Call, Fault, Gate};

use crate::setup::{Address, Way, run_child, touch};
use crate::support::{self, Faulty, PAGE};

const VARIABLE: &str = "BIFOLIO_TEST_DROPS";

/// More threads than serve faults at a time.
const TOUCHERS: u64 = 6;

/// Pages are pinned for writing while other threads wait for them; the owner of the pins then
/// touches one more page, drops a map, and only then the pins.
fn touch_with_pins(way: Way) {
    let storage = Faulty::new(support::Way::Memory, 64 * PAGE as usize, 5);
    let cache = way.mask(storage.builder(1 << 20)).build().unwrap();
    let file = cache.open_backing(storage.backing.clone(), &way.options()).unwrap();
    let map = file.map(0..file.len()).unwrap();
    let start = Address(map.as_ptr().cast_mut());
    let mut pins = Vec::new();
    thread::scope(|scope| {
        for page in (0..2 * TOUCHERS).step_by(2) {
            let gate = Gate::new();
            storage.backing.inject(Fault::on(Call::Read).times(1).held(&gate));
            let opener = scope.spawn({
                let gate = gate.clone();
                move || {
                    // The pin has begun to read the page.
                    gate.wait_for_arrivals(1);
                    let toucher = thread::spawn(move || touch_at(start, page));
                    thread::sleep(Duration::from_millis(50));
                    gate.open();
                    toucher
                }
            });
            pins.push(file.pin_mut(page * PAGE..page * PAGE + 1).unwrap());
            assert_eq!(
                opener.join().unwrap().join().unwrap(),
                storage.bytes[(page * PAGE) as usize]
            );
        }
        assert_eq!(touch(start.0, 40 * PAGE), storage.bytes[40 * PAGE as usize]);
        drop(map);
    });
    drop(pins);
    cache.close().unwrap();
    println!("it has ended well");
}

fn touch_at(start: Address, page: u64) -> u8 {
    touch(start.0, page * PAGE)
}

#[test]
fn faults_at_pinned_pages_delay_no_other_thread() {
    const NAME: &str = "drops::faults_at_pinned_pages_delay_no_other_thread";
    let ways = Way::whole();
    if let Ok(number) = std::env::var(VARIABLE) {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        return touch_with_pins(ways[number.parse::<usize>().unwrap()]);
    }
    for (number, way) in ways.iter().enumerate() {
        let output = run_child(NAME, VARIABLE, &number.to_string());
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("it has ended well"), "{way:?}: {}: {errors}", output.status);
    }
}
