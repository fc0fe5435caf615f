//! Loom's primitives, with the names and shapes of `real.rs`.
//!
//! Only what the protocols under test use is here; the code that makes system calls is not
//! compiled in a model run.

pub(crate) use loom::sync::MutexGuard;
pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
pub(crate) use loom::thread::yield_now;

/// Loom must be told that a spinning thread waits for another one.
pub(crate) fn spin_loop() {
    loom::thread::yield_now();
}

/// In a model time does not pass: let another thread run.
pub(crate) fn sleep_briefly() {
    loom::thread::yield_now();
}

/// A lock without poisoning, as `parking_lot` has it.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

/// Stores `value` into a word that only the caller may change to a new state now.
///
/// A swap: loom 0.7 lets a plain store that races with read-modify-writes produce values that no
/// machine can (a lost store that later reads still order after), so the model uses the stronger
/// operation. It continues release sequences, which a plain store does not: what a test proves with
/// it must not rest on an earlier Release to the same word.
pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
    word.swap(value, ordering);
}
