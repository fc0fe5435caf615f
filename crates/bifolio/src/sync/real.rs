//! The real primitives: `std` atomics and `parking_lot` locks.
//!
//! `parking_lot`, because its locks are one word, do not poison (a panic of a user's callback must
//! not turn into an error of ours) and its condition variable can wait with a deadline.

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};
pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
};
pub(crate) use std::thread::yield_now;

/// Sleeps long enough for a descheduled thread to run.
pub(crate) fn sleep_briefly() {
    std::thread::sleep(std::time::Duration::from_micros(50));
}

/// Stores `value` into a word that only the caller may change to a new state now.
///
/// A plain store. The model run uses a read-modify-write instead (see its twin).
#[inline(always)]
pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
    word.store(value, ordering);
}

/// The word itself, for the kernel.
pub(crate) fn word_of(word: &AtomicU32) -> &AtomicU32 {
    word
}
