//! The number of forks between this process and the one that loaded the extension.
//!
//! A child inherits the connections of its parent, but neither their locks nor the threads of their
//! caches. Each call of such a connection compares numbers and fails; its close frees nothing.
//!
//! # Safety
//! The handler that runs in a child only adds to an atomic.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    // Relaxed: the child has one thread, which created all that follow.
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Counts the forks from now on.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: a handler that may run in a child. It fails only without memory.
        unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    });
}

/// Returns the number of forks.
pub(crate) fn count() -> u32 {
    // Relaxed: changes only in a child, before it has a second thread.
    FORKS.load(Ordering::Relaxed)
}
