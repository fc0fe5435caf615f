//! Locks whose whole state is in the lock: for programs that use the library in a forked child.
//!
//! Compiled with the feature `fork`, in place of `parking_lot`, whose waiting threads are in a
//! table of the process. The child inherits that table with entries of threads that it does not
//! have. The C library gives their memory to new threads of the child, and the first thread that
//! waits for a lock reads it as an entry. These locks are those of the standard library, which are
//! futexes, with the interface of `parking_lot`: without poison, and with a guard that a condition
//! variable borrows.
//!
//! A reader-writer lock is a mutex over its state: two short critical sections for each use.
//! Readers wait for writers that wait, except [`RwLock::read_recursive`].
//!
//! # Safety
//! [`RwLock`] hands out references to its value: shared ones while `readers` counts them and no
//! writer is in, a single exclusive one while `has_writer` is set (invariant RW-1). Both change
//! only under the mutex, which also orders the accesses of one holder before those of the next.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
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
    /// Calls `work` without the lock, and takes it again.
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

#[derive(Debug, Default)]
pub(crate) struct Condvar(sync::Condvar);

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(inner) = guard.guard.take() {
            guard.guard = Some(self.0.wait(inner).unwrap_or_else(PoisonError::into_inner));
        }
    }

    pub(crate) fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        time: Duration,
    ) -> WaitTimeoutResult {
        let inner = guard.guard.take().expect("a guard outside of a wait");
        let (inner, result) =
            self.0.wait_timeout(inner, time).unwrap_or_else(PoisonError::into_inner);
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
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[derive(Debug, Default)]
struct Holders {
    readers: usize,
    has_writer: bool,
    writers_waiting: usize,
}

#[derive(Debug)]
pub(crate) struct RwLock<T> {
    holders: sync::Mutex<Holders>,
    changed: sync::Condvar,
    value: UnsafeCell<T>,
}

// SAFETY: the lock lends its value to one thread at a time exclusively, or to several shared
// (RW-1); the bounds are those of `std::sync::RwLock`.
unsafe impl<T: Send + Sync> Sync for RwLock<T> {}

#[derive(Debug)]
pub(crate) struct RwLockReadGuard<'a, T> {
    lock: &'a RwLock<T>,
}

#[derive(Debug)]
pub(crate) struct RwLockWriteGuard<'a, T> {
    lock: &'a RwLock<T>,
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        let holders = Holders { readers: 0, has_writer: false, writers_waiting: 0 };
        Self {
            holders: sync::Mutex::new(holders),
            changed: sync::Condvar::new(),
            value: UnsafeCell::new(value),
        }
    }

    fn holders(&self) -> sync::MutexGuard<'_, Holders> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, is_busy: impl Fn(&Holders) -> bool) -> sync::MutexGuard<'_, Holders> {
        let waited = self.changed.wait_while(self.holders(), |holders| is_busy(holders));
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.wait_while(|holders| holders.has_writer || holders.writers_waiting > 0).readers += 1;
        RwLockReadGuard { lock: self }
    }

    /// Reads like [`RwLock::read`], also by a thread that reads already.
    pub(crate) fn read_recursive(&self) -> RwLockReadGuard<'_, T> {
        self.wait_while(|holders| holders.has_writer).readers += 1;
        RwLockReadGuard { lock: self }
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.holders().writers_waiting += 1;
        let mut holders = self.wait_while(|holders| holders.has_writer || holders.readers > 0);
        holders.writers_waiting -= 1;
        holders.has_writer = true;
        RwLockWriteGuard { lock: self }
    }
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard is counted in `readers`, so no writer is in (RW-1).
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `has_writer` stands for this guard, so no other one exists (RW-1).
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `self` is borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for RwLockReadGuard<'_, T> {
    fn drop(&mut self) {
        let mut holders = self.lock.holders();
        holders.readers -= 1;
        if holders.readers == 0 {
            self.lock.changed.notify_all();
        }
    }
}

impl<T> Drop for RwLockWriteGuard<'_, T> {
    fn drop(&mut self) {
        self.lock.holders().has_writer = false;
        self.lock.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

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
            while lock.holders().writers_waiting == 0 {
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
