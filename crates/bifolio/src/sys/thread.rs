//! Threads of the cache's own: named, with a small stack, ended and joined by their owner.
//!
//! Used by `io::engine`, `writeback::flusher` and `reclaim::background`. What a thread does, and
//! how it is told to end, is theirs: they say so before they drop the thread.

use crate::sys::fork::Origin;
use std::io;
use std::thread::{self, JoinHandle};

/// Enough for everything that runs on one; touched as needed.
const STACK_BYTES: usize = 256 << 10;

/// A running thread; dropping it waits for its end.
#[derive(Debug)]
pub(crate) struct OwnedThread {
    handle: Option<JoinHandle<()>>,
    /// A forked child inherits this value, but not the thread.
    origin: Origin,
}

impl OwnedThread {
    /// Starts a thread.
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let builder = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
        Ok(Self { handle: Some(builder.spawn(run)?), origin: Origin::here() })
    }

    /// Whether the thread was left behind by a fork: then nothing it shares may be touched.
    pub(crate) fn is_left_behind(&self) -> bool {
        self.origin.is_forked()
    }
}

impl Drop for OwnedThread {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        if self.is_left_behind() {
            // There is nobody to wait for.
            std::mem::forget(handle);
        } else if handle.thread().id() != thread::current().id() {
            // A panic there has been reported by the runtime already.
            let _ = handle.join();
        }
    }
}
