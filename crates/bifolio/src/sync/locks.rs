//! Locks whose whole state is in the lock: for programs that use the library in a forked child.
//!
//! Compiled with the feature `fork`, in place of `parking_lot`, whose waiting threads are in a
//! table of the process, which a child inherits with entries of threads that it does not have.
//! These are the futexes of the standard library with the interface of `parking_lot`: without
//! poison, and with a guard that a condition variable borrows.
//!
//! A reader-writer lock is a mutex over its state. Readers wait for writers that wait, except those
//! that may read already (`read_recursive`).
//!
//! # Safety
//! [`RwLock`] hands out references to its value: shared ones while `readers` counts them and no
//! writer is in, a single exclusive one while `has_writer` is set (invariant RW-1). Both change
//! only under the mutex, which also orders the accesses of one holder before those of the next.
#![allow(unsafe_code)]

use parking_lot::lock_api;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{self, PoisonError, WaitTimeoutResult};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

/// The guard of a [`Mutex`]; empty only while a condition variable or [`MutexGuard::unlocked`] has
/// released the lock.
#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a sync::Mutex<T>,
    guard: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        MutexGuard { mutex: &self.0, guard: Some(guard) }
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = match self.0.try_lock() {
            Ok(guard) => guard,
            Err(sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(sync::TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard { mutex: &self.0, guard: Some(guard) })
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> MutexGuard<'_, T> {
    pub(crate) fn unlocked<U>(guard: &mut Self, work: impl FnOnce() -> U) -> U {
        guard.guard = None;
        let result = work();
        guard.guard = Some(guard.mutex.lock().unwrap_or_else(PoisonError::into_inner));
        result
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("a guard outside of a wait")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("a guard outside of a wait")
    }
}

/// A condition variable that calls the kernel only if a thread waits, as that of `parking_lot`.
///
/// As there, a notification wakes the threads that wait when it is made. So what they wait for
/// changes under their mutex, or is looked at again after a time.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    changed: sync::Condvar,
    /// Threads between the release of their mutex and its return.
    waiting: AtomicUsize,
}

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self { changed: sync::Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    /// Calls `wait`, which releases the mutex that the caller holds. Counted before that: a thread
    /// that locks the mutex afterwards, and then notifies, sees the count.
    fn counted<R>(&self, wait: impl FnOnce(&sync::Condvar) -> R) -> R {
        // Relaxed, here and below: ordered by the mutex.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let result = wait(&self.changed);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        result
    }

    fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(inner) = guard.guard.take() {
            let waited = self.counted(|changed| changed.wait(inner));
            guard.guard = Some(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(crate) fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        time: Duration,
    ) -> WaitTimeoutResult {
        let inner = guard.guard.take().expect("a guard outside of a wait");
        let waited = self.counted(|changed| changed.wait_timeout(inner, time));
        let (inner, result) = waited.unwrap_or_else(PoisonError::into_inner);
        guard.guard = Some(inner);
        result
    }

    pub(crate) fn wait_until<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        deadline: Instant,
    ) -> WaitTimeoutResult {
        self.wait_for(guard, deadline.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn notify_one(&self) {
        if self.has_waiting() {
            self.changed.notify_one();
        }
    }

    pub(crate) fn notify_all(&self) {
        if self.has_waiting() {
            self.changed.notify_all();
        }
    }
}

#[derive(Debug, Default)]
struct Holders {
    readers: usize,
    has_writer: bool,
    writers_waiting: usize,
    /// Threads that wait for a change: readers and writers.
    waiting: usize,
}

pub(crate) type RwLock<T> = lock_api::RwLock<RawLock, T>;
pub(crate) type RwLockReadGuard<'a, T> = lock_api::RwLockReadGuard<'a, RawLock, T>;

#[derive(Debug)]
pub(crate) struct RawLock {
    holders: sync::Mutex<Holders>,
    changed: sync::Condvar,
}

impl RawLock {
    fn holders(&self) -> sync::MutexGuard<'_, Holders> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, is_busy: impl Fn(&Holders) -> bool) -> sync::MutexGuard<'_, Holders> {
        let mut holders = self.holders();
        while is_busy(&holders) {
            holders.waiting += 1;
            holders = self.changed.wait(holders).unwrap_or_else(PoisonError::into_inner);
            holders.waiting -= 1;
        }
        holders
    }

    /// Wakes all that wait. A lock that nobody waits for costs no call of the kernel.
    fn notify(&self, holders: &Holders) {
        if holders.waiting > 0 {
            self.changed.notify_all();
        }
    }
}

// SAFETY: readers are counted only while no writer is in, and a writer is in alone (RW-1).
unsafe impl lock_api::RawRwLock for RawLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "the value of a new lock")]
    const INIT: Self = Self {
        holders: sync::Mutex::new(Holders {
            readers: 0,
            has_writer: false,
            writers_waiting: 0,
            waiting: 0,
        }),
        changed: sync::Condvar::new(),
    };
    type GuardMarker = lock_api::GuardNoSend;

    fn lock_shared(&self) {
        self.wait_while(|holders| holders.has_writer || holders.writers_waiting > 0).readers += 1;
    }

    fn try_lock_shared(&self) -> bool {
        let mut holders = self.holders();
        let is_free = !holders.has_writer && holders.writers_waiting == 0;
        holders.readers += usize::from(is_free);
        is_free
    }

    unsafe fn unlock_shared(&self) {
        let mut holders = self.holders();
        holders.readers -= 1;
        if holders.readers == 0 {
            self.notify(&holders);
        }
    }

    fn lock_exclusive(&self) {
        self.holders().writers_waiting += 1;
        let mut holders = self.wait_while(|holders| holders.has_writer || holders.readers > 0);
        holders.writers_waiting -= 1;
        holders.has_writer = true;
    }

    fn try_lock_exclusive(&self) -> bool {
        let mut holders = self.holders();
        let is_free = !holders.has_writer && holders.readers == 0;
        holders.has_writer |= is_free;
        is_free
    }

    unsafe fn unlock_exclusive(&self) {
        let mut holders = self.holders();
        holders.has_writer = false;
        self.notify(&holders);
    }
}

// SAFETY: as above.
unsafe impl lock_api::RawRwLockRecursive for RawLock {
    fn lock_shared_recursive(&self) {
        self.wait_while(|holders| holders.has_writer).readers += 1;
    }

    fn try_lock_shared_recursive(&self) -> bool {
        let mut holders = self.holders();
        let is_free = !holders.has_writer;
        holders.readers += usize::from(is_free);
        is_free
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn readers_and_writers_exclude_each_other() {
        let lock = RwLock::new((0_u64, 0_u64));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let lock = &lock;
                scope.spawn(move || {
                    for round in 0..5000 {
                        if (round + thread) % 3 == 0 {
                            let mut pair = lock.write();
                            pair.0 += 1;
                            pair.1 += 1;
                        } else {
                            let (first, again) = (lock.read_recursive(), lock.read_recursive());
                            assert_eq!(first.0, again.1);
                        }
                    }
                });
            }
        });
        assert_eq!(lock.read().0, 6667);
    }

    #[test]
    fn a_reader_reads_again_while_a_writer_waits() {
        let (lock, is_done) = (RwLock::new(1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let first = lock.read_recursive();
            scope.spawn(|| {
                *lock.write() = 2;
                is_done.store(true, Ordering::Relaxed);
            });
            while lock.try_read().is_some() {
                std::thread::yield_now();
            }
            assert_eq!((*first, *lock.read_recursive()), (1, 1));
            assert!(!is_done.load(Ordering::Relaxed));
        });
        assert_eq!(*lock.read(), 2);
    }

    #[test]
    fn a_wait_releases_the_lock_and_ends() {
        let (mutex, changed) = (Mutex::new(0), Condvar::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                *mutex.lock() = 1;
                changed.notify_all();
            });
            let mut value = mutex.lock();
            while *value == 0 {
                changed.wait(&mut value);
            }
            assert!(mutex.try_lock().is_none());
            MutexGuard::unlocked(&mut value, || *mutex.lock() = 2);
            assert_eq!(*value, 2);
            assert!(changed.wait_until(&mut value, Instant::now()).timed_out());
        });
        assert!(mutex.try_lock().is_some());
    }
}
