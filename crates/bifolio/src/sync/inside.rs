//! Tracks the threads that hold something a fault may wait for: folio locks, and transfers in a
//! queue. While a thread holds these, library code never touches a page that is not resident, nor
//! user memory that may be part of a map. A fault of such a thread comes from a signal handler, or
//! from a page that the program took from the cache without its knowledge: waiting for it would
//! hang both threads, so `file/faults` refuses it.
//!
//! Each thread counts in a slot of its own, found by its kernel thread id, which the message about
//! a fault carries. Threads that find no free slot are not tracked: their faults wait. A hit takes
//! no folio lock, and counts nothing.

#[cfg(not(all(test, loom)))]
use crate::sys::process::current_thread;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// A model run has one kernel thread.
#[cfg(all(test, loom))]
fn current_thread() -> u32 {
    1
}

/// Maximum number of threads tracked at a time.
const SLOTS_MAX: usize = 1024;
/// Slots probed per thread.
const PROBES_MAX: usize = 8;

/// The count of one thread, on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct ThreadSlot {
    /// Kernel thread id; 0 if the slot is free.
    thread: AtomicU32,
    held: AtomicI32,
}

static SLOTS: [ThreadSlot; SLOTS_MAX] =
    [const { ThreadSlot { thread: AtomicU32::new(0), held: AtomicI32::new(0) } }; SLOTS_MAX];

/// The slot of the calling thread, if it found one; freed when the thread ends.
struct Own(Option<&'static ThreadSlot>);

thread_local! {
    static OWN: Own = Own::claim();
}

fn slots_of(thread: u32) -> impl Iterator<Item = &'static ThreadSlot> {
    (0..PROBES_MAX).map(move |probe| &SLOTS[(thread as usize).wrapping_add(probe) % SLOTS_MAX])
}

impl Own {
    fn claim() -> Self {
        let thread = current_thread();
        let is_claimed = |slot: &&ThreadSlot| {
            // Relaxed: only the value counts; the thread that owns it is the only one to change it.
            let claimed =
                slot.thread.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed);
            // A forked child inherits slots, perhaps one of a thread that had the same number.
            claimed.is_ok() || claimed == Err(thread)
        };
        let own = slots_of(thread).find(is_claimed);
        own.inspect(|slot| slot.held.store(0, Ordering::Relaxed));
        Self(own)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.inspect(|slot| slot.thread.store(0, Ordering::Relaxed));
    }
}

/// Adds `more`, which may be negative, to the count of the calling thread.
#[inline]
pub(crate) fn add(more: i32) {
    // A thread that is ending is not tracked.
    let _ = OWN.try_with(|own| {
        let Some(slot) = own.0 else { return };
        // Relaxed: no other thread changes it; a signal handler that interrupts restores it.
        slot.held.store(slot.held.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    });
}

/// Sets the count of the calling thread. Returns the previous count.
pub(crate) fn replace(held: i32) -> i32 {
    let own = OWN.try_with(|own| own.0.map(|slot| slot.held.swap(held, Ordering::Relaxed)));
    own.ok().flatten().unwrap_or(0)
}

/// Returns `true` if the calling thread holds anything.
pub(crate) fn is_this_thread() -> bool {
    // Found by id: a signal handler must not initialize the thread-local variable.
    is_thread(current_thread())
}

/// Returns `true` if a thread, which is stopped in a fault, holds anything.
pub(crate) fn is_thread(thread: u32) -> bool {
    // Relaxed: the kernel's locks order the message about the fault after the counts.
    let is_its = |slot: &&ThreadSlot| slot.thread.load(Ordering::Relaxed) == thread;
    let own = slots_of(thread).find(is_its);
    thread != 0 && own.is_some_and(|slot| slot.held.load(Ordering::Relaxed) > 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_tracked_while_it_holds_something() {
        assert!(!is_this_thread() && !is_thread(current_thread()) && !is_thread(0));
        add(2);
        assert!(is_this_thread() && is_thread(current_thread()));
        let own = current_thread();
        std::thread::spawn(move || assert!(!is_this_thread() && is_thread(own))).join().unwrap();
        let held = replace(0);
        assert!(held == 2 && !is_thread(own));
        replace(held);
        add(-2);
        assert!(!is_this_thread() && !is_thread(own));
    }

    #[test]
    fn a_slot_is_free_again_when_its_thread_has_ended() {
        let end = || {
            add(1);
            current_thread()
        };
        for _ in 0..2 * SLOTS_MAX {
            let ended = std::thread::spawn(end).join().unwrap();
            assert!(!is_thread(ended));
        }
        assert!(std::thread::spawn(|| (add(1), is_this_thread()).1).join().unwrap());
    }
}
