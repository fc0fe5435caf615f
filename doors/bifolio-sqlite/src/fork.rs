//! Values and locks that a child after a fork does not share with its parent, and the number of
//! forks between this process and the one that loaded the extension.
//!
//! A child inherits the connections of its parent, but neither their locks nor the threads of their
//! caches. Each call of such a connection compares numbers and fails; its close frees nothing. What
//! the process has for all connections is [`PerProcess`]: another thread may have held its lock at
//! the fork. The locks are futexes, as are those of the cache with its feature `fork`.
//!
//! A child also inherits descriptors, and a lock of an open file description lasts as long as any
//! copy of them. So a child closes its copies of those that have locks ([`open_alone`]) before it
//! runs any other code; their owners in the child are never used or dropped.
//!
//! # Safety
//! [`GUARD`] is used only by a thread that holds the lock of [`ALONE`]. The handler that runs in a
//! child adds to an atomic, closes descriptors and unlocks that lock. [`PerProcess`] never frees a
//! value that it has returned.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{self, MutexGuard, Once, PoisonError};

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Descriptors that no child keeps. Locked during a fork, so that a child knows all of them.
static ALONE: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// The guard of [`ALONE`] between two handlers of a fork.
static GUARD: Guard = Guard(UnsafeCell::new(None));

struct Guard(UnsafeCell<Option<MutexGuard<'static, Vec<RawFd>>>>);

// SAFETY: used only by the thread that holds the lock.
unsafe impl Sync for Guard {}

extern "C" fn before_fork() {
    let guard = ALONE.lock();
    // SAFETY: this thread holds the lock.
    unsafe { GUARD.0.get().write(Some(guard)) };
}

extern "C" fn in_parent() {
    // SAFETY: this thread holds the lock, since `before_fork`.
    drop(unsafe { GUARD.0.get().replace(None) });
}

extern "C" fn in_child() {
    // Relaxed: the child has one thread, which created all that follow.
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the thread that held the lock in the parent.
    let guard = unsafe { GUARD.0.get().replace(None) };
    for descriptor in guard.into_iter().flat_map(|mut guard| std::mem::take(&mut *guard)) {
        // SAFETY: the child's copy, whose owner is not used or dropped here.
        unsafe { libc::close(descriptor) };
    }
}

/// Counts the forks from now on.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: handlers of a fork. It fails only without memory.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

/// Opens a file whose descriptor no child of a fork keeps. No fork happens meanwhile.
pub(crate) fn open_alone<T: AsFd, E>(open: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let mut alone = ALONE.lock();
    let opened = open()?;
    alone.push(opened.as_fd().as_raw_fd());
    Ok(opened)
}

/// Closes a file that [`open_alone`] opened.
pub(crate) fn close_alone<T: AsFd>(file: T) {
    let mut alone = ALONE.lock();
    let descriptor = file.as_fd().as_raw_fd();
    alone.retain(|other| *other != descriptor);
    drop(file);
}

/// Returns the number of forks.
pub(crate) fn count() -> u32 {
    // Relaxed: changes only in a child, before it has a second thread.
    FORKS.load(Ordering::Relaxed)
}

/// A value that each process has for itself. A child begins with a new one; that of its parent, of
/// which a lock may be held for ever, is neither used nor dropped.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(u32, T)>);

impl<T: Default> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value of this process.
    pub(crate) fn get(&self) -> &'static T {
        // Acquire: pairs with the Release below.
        let mut seen = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or a value that was leaked below.
            let found = unsafe { seen.as_ref() };
            if let Some((_, value)) = found.filter(|(forks, _)| *forks == count()) {
                return value;
            }
            let new = Box::into_raw(Box::new((count(), T::default())));
            // Release: pairs with the Acquire above and below: the value is complete.
            match self.0.compare_exchange(seen, new, Ordering::Release, Ordering::Acquire) {
                Ok(_) => seen = new,
                Err(faster) => {
                    // SAFETY: from `into_raw`, and seen by no other thread.
                    drop(unsafe { Box::from_raw(new) });
                    seen = faster;
                }
            }
        }
    }
}

/// A mutex without poison, whose whole state is in it.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
