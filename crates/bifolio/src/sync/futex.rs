//! Waiting on a 32-bit word: sleep while it holds a value, wake those who sleep on it.
//!
//! Used by the folio lock and by waiters for write-back. A wait may return early (a signal, a
//! changed word, nothing at all): callers look at the word again. In a model run waiting is
//! yielding, so that the checker sees every wake-up that is needed.

use crate::sync::AtomicU32;

#[cfg(not(all(test, loom)))]
use rustix::thread::futex;

/// Sleeps while `word` holds `expected`, until woken. May return for no reason.
#[cfg(not(all(test, loom)))]
pub(crate) fn wait(word: &AtomicU32, expected: u32) {
    // Errors mean "look again": the word differed already, or a signal came.
    let _ = futex::wait(word, futex::Flags::PRIVATE, expected, None);
}

/// Wakes at most `count` threads that sleep on `word`.
#[cfg(not(all(test, loom)))]
pub(crate) fn wake(word: &AtomicU32, count: u32) {
    // The only errors are bad addresses; a reference is never one.
    let _ = futex::wake(word, futex::Flags::PRIVATE, count);
}

/// In a model run: let others move.
#[cfg(all(test, loom))]
pub(crate) fn wait(_word: &AtomicU32, _expected: u32) {
    loom::thread::yield_now();
}

/// In a model run nobody sleeps.
#[cfg(all(test, loom))]
pub(crate) fn wake(_word: &AtomicU32, _count: u32) {}
