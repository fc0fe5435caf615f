//! Waiting on a 32-bit word: sleep while it holds a value, wake those who sleep on it.
//!
//! Used by the folio lock and by waiters for write-back. A wait may return early (a signal, a
//! changed word, nothing at all): callers look at the word again.

use crate::sync::AtomicU32;

#[cfg(not(all(test, loom)))]
use crate::sync::word_of;
#[cfg(not(all(test, loom)))]
use rustix::thread::futex;

/// Sleeps while `word` holds `expected`, until woken. May return for no reason.
#[cfg(not(all(test, loom)))]
pub(crate) fn wait(word: &AtomicU32, expected: u32) {
    // Errors mean "look again": the word differed already, or a signal came.
    let _ = futex::wait(word_of(word), futex::Flags::PRIVATE, expected, None);
}

/// As [`wait`], at the most for `milliseconds`.
#[cfg(not(all(test, loom)))]
pub(crate) fn wait_for(word: &AtomicU32, expected: u32, milliseconds: u32) {
    let nanoseconds = i64::from(milliseconds) * 1_000_000;
    let timeout = futex::Timespec {
        tv_sec: nanoseconds / 1_000_000_000,
        tv_nsec: nanoseconds % 1_000_000_000,
    };
    let _ = futex::wait(word_of(word), futex::Flags::PRIVATE, expected, Some(&timeout));
}

/// Wakes at most `count` threads that sleep on `word`.
#[cfg(not(all(test, loom)))]
pub(crate) fn wake(word: &AtomicU32, count: u32) {
    // The only errors are bad addresses; a reference is never one.
    let _ = futex::wake(word_of(word), futex::Flags::PRIVATE, count);
}

/// In a model run too: whoever nobody wakes is a deadlock, which the checker reports.
#[cfg(all(test, loom))]
pub(crate) use model::{wait, wait_for, wake};
#[cfg(all(test, loom))]
mod model {
    use crate::sync::{AtomicU32, Ordering};
    use loom::thread::Thread;
    use std::cell::RefCell;

    thread_local! {
        // All threads of a model run on one thread of the system, one model after the other.
        static SLEEPERS: RefCell<Vec<(usize, Thread)>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn wait(word: &AtomicU32, expected: u32) {
        // Relaxed: a read-modify-write reads the word as it is; the kernel promises no more.
        let same = (Ordering::Relaxed, Ordering::Relaxed);
        if word.compare_exchange(expected, expected, same.0, same.1).is_ok() {
            let sleeper = (std::ptr::from_ref(word).addr(), loom::thread::current());
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.push(sleeper));
            loom::thread::park();
        }
    }

    /// No time passes in a model run: it looks again.
    pub(crate) fn wait_for(_word: &AtomicU32, _expected: u32, _milliseconds: u32) {
        loom::thread::yield_now();
    }

    pub(crate) fn wake(word: &AtomicU32, count: u32) {
        // Relaxed: changes nothing, but lets the checker move others between store and wake.
        word.fetch_add(0, Ordering::Relaxed);
        let address = std::ptr::from_ref(word).addr();
        for _ in 0..count {
            let woken = SLEEPERS.with_borrow_mut(|sleepers| {
                let at = sleepers.iter().position(|sleeper| sleeper.0 == address)?;
                Some(sleepers.remove(at).1)
            });
            let Some(woken) = woken else { break };
            woken.unpark();
        }
    }
}
