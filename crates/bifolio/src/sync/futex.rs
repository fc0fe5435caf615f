//! Waits on a 32-bit word: sleeps while it holds a value, and wakes the sleepers.
//!
//! Used by the folio lock and by waiters for write-back. A wait may return early (a signal, a
//! changed word, spuriously): callers load the word again.

use crate::sync::AtomicU32;

#[cfg(not(all(test, loom)))]
use crate::sync::word_of;
#[cfg(not(all(test, loom)))]
use rustix::thread::futex;

/// Sleeps while `word` holds `expected`, until woken. May return spuriously.
#[cfg(not(all(test, loom)))]
pub(crate) fn wait(word: &AtomicU32, expected: u32) {
    // On any error the caller rechecks: the word already differed, or a signal arrived.
    let _ = futex::wait(word_of(word), futex::Flags::PRIVATE, expected, None);
}

/// Acts as [`wait`], for at most `milliseconds`.
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
    // The only possible error is a bad address, which a reference never is.
    let _ = futex::wake(word_of(word), futex::Flags::PRIVATE, count);
}

/// Model of the futex for loom: a thread that is never woken is a deadlock, which the checker
/// reports.
#[cfg(all(test, loom))]
pub(crate) use model::{wait, wait_for, wake};
#[cfg(all(test, loom))]
mod model {
    use crate::sync::{AtomicU32, Ordering};
    use loom::thread::Thread;
    use std::cell::RefCell;

    thread_local! {
        // All threads of a model run share one thread of the system, one model after the other.
        static SLEEPERS: RefCell<Vec<(usize, Thread)>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn wait(word: &AtomicU32, expected: u32) {
        // Relaxed: a read-modify-write reads the current word; the kernel guarantees no more.
        let same = (Ordering::Relaxed, Ordering::Relaxed);
        if word.compare_exchange(expected, expected, same.0, same.1).is_ok() {
            let sleeper = (std::ptr::from_ref(word).addr(), loom::thread::current());
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.push(sleeper));
            loom::thread::park();
        }
    }

    /// Returns at once: no time passes in a model run, so the caller rechecks.
    pub(crate) fn wait_for(_word: &AtomicU32, _expected: u32, _milliseconds: u32) {
        loom::thread::yield_now();
    }

    pub(crate) fn wake(word: &AtomicU32, count: u32) {
        // Relaxed: changes nothing, but lets the checker schedule other threads between store and
        // wake.
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
