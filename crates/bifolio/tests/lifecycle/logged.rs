//! The log of this program, and lines that the library writes for what hangs or cannot be right.

use std::sync::{Mutex, Once};
use std::thread;

use bifolio::Cache;

use crate::support::{PAGE, cache_of, directory, file_of, open, wait_until};

/// Collects what the library logs.
struct Lines(Mutex<Vec<String>>);

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().unwrap().push(record.args().to_string());
    }

    fn flush(&self) {}
}

static LINES: Lines = Lines(Mutex::new(Vec::new()));

/// Begins to collect the warnings and errors of this program.
pub fn collect_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::set_logger(&LINES).unwrap());
    log::set_max_level(log::LevelFilter::Warn);
}

/// Takes the collected lines that contain `needle`.
pub fn logged(needle: &str) -> Vec<String> {
    let mut lines = LINES.0.lock().unwrap();
    let (taken, kept) = lines.drain(..).partition(|line| line.contains(needle));
    *lines = kept;
    taken
}

/// Returns `true` if a line was collected that contains `needle`.
fn is_logged(needle: &str) -> bool {
    LINES.0.lock().unwrap().iter().any(|line| line.contains(needle))
}

#[test]
fn a_call_that_waits_long_for_a_write_pin_logs_its_bytes() {
    collect_log();
    let directory = directory();
    let path = file_of(&directory, "forgotten pin", &[1; 3 * PAGE as usize]);
    let file = open(&cache_of(1 << 20), &path);
    file.write_all_at(&[2; 8], PAGE).unwrap();
    let pin = file.pin_mut(PAGE..PAGE + 8).unwrap();
    thread::scope(|scope| {
        let syncing = scope.spawn(|| file.sync_data());
        let reading = scope.spawn(|| file.read_exact_at(&mut [0; 8], PAGE));
        wait_until("the sync logs its wait", || is_logged("forgotten pin"));
        drop(pin);
        syncing.join().unwrap().unwrap();
        reading.join().unwrap().unwrap();
    });
    let lines = logged("forgotten pin");
    assert!(lines[0].contains("4096 bytes at position 4096"), "{lines:?}");
    assert!(lines[0].contains("PageRefMut"), "{lines:?}");
}

#[test]
fn a_bound_beyond_the_memory_of_the_machine_is_logged() {
    collect_log();
    let bound = 1 << 41;
    // A system may refuse the address space.
    let Ok(cache) = Cache::builder().memory(bound).build() else { return };
    let needle = format!("bound of {bound} bytes");
    assert_eq!(logged(&needle).len(), 1);
    cache.set_memory(64 << 20).unwrap();
    cache.set_memory(bound - 1).unwrap();
    assert_eq!(logged(&format!("bound of {} bytes", bound - 1)).len(), 1);
    assert!(!is_logged(&format!("bound of {} bytes", 64 << 20)));
}
