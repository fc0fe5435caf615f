//! The rules about blocking, checked in debug builds: **a thread that has frozen a folio waits for
//! nothing; the owner of transfers waits only for those (IO-5); a service thread never waits for a
//! lock that user code can hold**.
//!
//! A thread that finds a folio frozen waits until it is unfrozen, whatever else it holds; and the
//! owner of a transfer has folios locked, or under write-back, that other threads wait for. If such
//! a thread waited for another thread, the two could deadlock. And a user may hold the lock of a
//! folio, in a `PageRefMut`, while waiting for frames, for the throttle or for a fault, which the
//! threads of the cache handle: so those threads only try folio locks, and never wait for something
//! whose holder waits for a folio lock.
//!
//! So each thread counts the folios it has frozen and the transfers it has in queues, and knows if
//! it is a service thread. Each place that may sleep until another thread acts calls one of these
//! functions first, even if it will not sleep this time:
//!
//! | place | call |
//! |---|---|
//! | folio lock, `resizing`, a shared flush, the throttle of dirty pages | [`check_user`] |
//! | end of a write-out, a folio frozen by another thread | [`check`] |
//! | frames and metadata that another thread must free, the reclaim lock | [`check`] |
//! | `cutting`, an epoch of write-outs | [`check`] |
//! | staging memory, reads of the same device | [`check`] |
//! | kernel memory for a page that is restored, with a deadline | [`check_frozen`] |
//! | a change of a backing's length | [`check`] |
//! | a transfer, a ring to make one | [`check_in_queue`] |
//!
//! A backing written by a user may wait for anything, even folios of another cache: its calls run
//! in [`apart`].
//!
//! A mutex whose holders never sleep is exempt. Release builds do not count, and neither do model
//! runs, in which many threads share one.
//!
//! TRACKED THREADS hold something that a fault may wait for: folio locks, and transfers in a queue.
//! While a thread holds these, library code never touches a page that is not resident, nor user
//! memory that may be part of a map. A fault of such a thread comes from a signal handler, or from
//! a page that the program took from the cache without its knowledge: waiting for it would hang
//! both threads, so `maps/faults` refuses it. Each thread counts, in every build, in a slot of its
//! own, found by its kernel thread id, which the message about a fault carries. Threads that find
//! no free slot are not tracked: their faults wait. A hit takes no folio lock, and counts nothing.

#[cfg(not(all(test, loom)))]
use crate::sys::process::current_thread;
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Folios that the calling thread has frozen, transfers that it has pushed, and if it is a service
/// thread. Always the default where nothing counts.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    frozen: usize,
    transfers: usize,
    serves: bool,
}

const IS_COUNTED: bool = cfg!(all(debug_assertions, not(all(test, loom))));

thread_local! {
    static COUNTS: Cell<Counts> =
        const { Cell::new(Counts { frozen: 0, transfers: 0, serves: false }) };
}

#[inline(always)]
fn counts() -> Counts {
    if IS_COUNTED { COUNTS.get() } else { Counts::default() }
}

/// Changes the counts. Returns the previous ones.
#[inline(always)]
fn change(change: impl FnOnce(&mut Counts)) -> Counts {
    let before = counts();
    if IS_COUNTED {
        let mut counts = before;
        change(&mut counts);
        COUNTS.set(counts);
    }
    before
}

#[inline(always)]
pub(crate) fn note_frozen() {
    change(|counts| counts.frozen += 1);
}

/// Notes that this thread has unfrozen or freed a folio that it had frozen.
#[inline(always)]
pub(crate) fn note_unfrozen() {
    let less = |frozen: usize| frozen.checked_sub(1).expect("it was unfrozen by another thread");
    change(|counts| counts.frozen = less(counts.frozen));
}

#[inline(always)]
pub(crate) fn note_pushed() {
    track(1);
    change(|counts| counts.transfers += 1);
}

/// Notes that queues have returned or dropped this many transfers.
#[inline(always)]
pub(crate) fn note_handed_out(transfers: usize) {
    track(-(transfers as i32));
    let less = |pushed: usize| pushed.checked_sub(transfers).expect("a queue has two threads");
    change(|counts| counts.transfers = less(counts.transfers));
}

/// Guard that marks its thread as a service thread: other threads wait for it, whatever they hold.
#[derive(Debug)]
pub(crate) struct Serving {
    before: bool,
}

#[inline(always)]
pub(crate) fn serve() -> Serving {
    Serving { before: change(|counts| counts.serves = true).serves }
}

impl Drop for Serving {
    fn drop(&mut self) {
        change(|counts| counts.serves = self.before);
    }
}

/// Runs user code that does not unwind with no counts: what it waits for is not the cache's.
#[inline(always)]
pub(crate) fn apart<R>(call: impl FnOnce() -> R) -> R {
    let before = change(|counts| *counts = Counts::default());
    let held = replace_tracked(0);
    let answer = call();
    replace_tracked(held);
    change(|counts| *counts = before);
    answer
}

/// Acts as [`check`], for something that a user may hold while waiting for a service thread.
#[inline(always)]
#[track_caller]
pub(crate) fn check_user(what: &str) {
    check(what);
    debug_assert!(
        !counts().serves || std::thread::panicking(),
        "a service thread waits for {what}, which a user may hold"
    );
}

/// Panics in debug builds if this thread must not wait for `what`, which another thread must
/// provide.
#[inline(always)]
#[track_caller]
pub(crate) fn check(what: &str) {
    check_in_queue(what, 0);
}

/// Acts as [`check`], for a wait with a deadline in a thread that may own transfers: a page must be
/// restored.
#[inline(always)]
#[track_caller]
pub(crate) fn check_frozen(what: &str) {
    let frozen = counts().frozen;
    debug_assert!(
        frozen == 0 || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen"
    );
}

/// Acts as [`check`], for a queue that has `own` transfers.
#[inline(always)]
#[track_caller]
pub(crate) fn check_in_queue(what: &str, own: usize) {
    let Counts { frozen, transfers, .. } = counts();
    debug_assert!(
        frozen == 0 && (transfers == own || cfg!(all(test, loom))) || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen and {transfers} transfers, {own} its own"
    );
}

/// A model run has one kernel thread.
#[cfg(all(test, loom))]
fn current_thread() -> u32 {
    1
}

/// Maximum number of threads tracked at a time.
const SLOTS_MAX: usize = 1024;
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
pub(crate) fn track(more: i32) {
    // A thread that is ending is not tracked.
    let _ = OWN.try_with(|own| {
        let Some(slot) = own.0 else { return };
        // Relaxed: no other thread changes it; a signal handler that interrupts restores it.
        slot.held.store(slot.held.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    });
}

/// Sets the count of the calling thread. Returns the previous count.
pub(crate) fn replace_tracked(held: i32) -> i32 {
    let own = OWN.try_with(|own| own.0.map(|slot| slot.held.swap(held, Ordering::Relaxed)));
    own.ok().flatten().unwrap_or(0)
}

/// Returns `true` if a thread, which is stopped in a fault, holds anything.
pub(crate) fn is_tracked(thread: u32) -> bool {
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
        assert!(!is_tracked(current_thread()) && !is_tracked(0));
        track(2);
        assert!(is_tracked(current_thread()));
        let own = current_thread();
        std::thread::spawn(move || assert!(!is_tracked(current_thread()) && is_tracked(own)))
            .join()
            .unwrap();
        let held = replace_tracked(0);
        assert!(held == 2 && !is_tracked(own));
        replace_tracked(held);
        track(-2);
        assert!(!is_tracked(own));
    }

    #[test]
    fn a_slot_is_free_again_when_its_thread_has_ended() {
        let end = || {
            track(1);
            current_thread()
        };
        for _ in 0..2 * SLOTS_MAX {
            let ended = std::thread::spawn(end).join().unwrap();
            assert!(!is_tracked(ended));
        }
        assert!(std::thread::spawn(|| (track(1), is_tracked(current_thread())).1).join().unwrap());
    }
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod count_tests {
    use super::*;
    use std::panic::catch_unwind;

    #[test]
    fn an_owner_of_transfers_may_not_wait_for_others() {
        check("nothing");
        note_frozen();
        assert!(catch_unwind(|| check("a lock")).is_err());
        assert!(catch_unwind(|| check_in_queue("a transfer", 0)).is_err());
        std::thread::spawn(|| check("a lock")).join().unwrap();
        note_unfrozen();
        check("a lock");
        note_pushed();
        note_pushed();
        check_in_queue("a transfer", 2);
        assert!(catch_unwind(|| check_in_queue("a transfer of another queue", 1)).is_err());
        assert!(catch_unwind(|| check("a lock")).is_err());
        note_handed_out(2);
        check("a lock");
    }

    #[test]
    fn a_service_thread_may_not_wait_for_a_user() {
        check_user("a lock");
        let serving = serve();
        drop(serve());
        check("frames");
        assert!(catch_unwind(|| check_user("a lock")).is_err());
        note_frozen();
        apart(|| check_user("a lock of another cache"));
        assert!(catch_unwind(|| check("frames")).is_err());
        note_unfrozen();
        drop(serving);
        check_user("a lock");
    }
}
