//! Loom's primitives, with the names and shapes of `sync::real`.
//!
//! Contains only what the protocols under test use; code that makes system calls is not compiled in
//! a model run.

use crate::page::ZeroValid;
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
};
pub(crate) use loom::thread::yield_now;
use std::time::Instant;

/// Tells loom that a spinning thread waits for another one.
pub(crate) fn spin_loop() {
    loom::thread::yield_now();
}

/// Yields to another thread: no time passes in a model run.
pub(crate) fn sleep_briefly() {
    loom::thread::yield_now();
}

/// A lock without poisoning, like that of `parking_lot`.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap()))
    }
}

/// A guard that a condition variable can take and return; it is empty only during a wait.
#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

impl<T> std::ops::Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

impl<T> std::ops::DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

/// A condition variable whose deadlines never expire: a lost wake-up is a deadlock.
#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

/// Result of a wait with a deadline.
#[derive(Debug)]
pub(crate) struct Woken;

impl Woken {
    pub(crate) fn timed_out(&self) -> bool {
        false
    }
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(loom::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.0.take().unwrap();
        guard.0 = Some(self.0.wait(inner).unwrap());
    }

    pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _: Instant) -> Woken {
        self.wait(guard);
        Woken
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Stores `value` into a word of which only the caller may change the state now.
///
/// A swap: loom 0.7 lets a plain store that races with read-modify-writes produce values that no
/// machine can (a lost store that later reads still order after), so the model uses the stronger
/// operation. It continues release sequences, which a plain store does not: a test that relies on
/// it must not depend on an earlier Release to the same word.
pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
    word.swap(value, ordering);
}

/// All memory of a model is private.
#[derive(Debug)]
pub(crate) enum MemorySource {
    Private,
}

/// A vector in place of reserved memory.
#[derive(Debug)]
pub(crate) struct ReservedArray<T>(Box<[T]>);

impl<T: ZeroValid> ReservedArray<T> {
    pub(crate) fn new_in(_: &MemorySource, length: usize) -> std::io::Result<Self> {
        Self::new(length)
    }

    pub(crate) fn source(&self) -> MemorySource {
        MemorySource::Private
    }

    pub(crate) fn new(length: usize) -> std::io::Result<Self> {
        Ok(Self((0..length).map(|_| T::default()).collect()))
    }

    pub(crate) fn release(&self, elements: std::ops::Range<usize>, reset: impl Fn(&T)) -> bool {
        self.0[elements].iter().for_each(reset);
        true
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn get(&self, index: usize) -> &T {
        &self.0[index]
    }

    pub(crate) fn as_ptr(&self) -> *const T {
        self.0.as_ptr()
    }
}
