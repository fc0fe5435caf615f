//! The rules about blocking, checked in debug builds: **a thread that has frozen a folio waits
//! for nothing; the owner of transfers waits only for those (IO-5); a service thread never
//! waits for a lock that user code can hold**.
//!
//! A user may hold a folio lock, in a `PageRefMut`, while waiting for what service threads do.
//!
//! Each thread counts the folios it has frozen and the transfers it has in queues, and knows if
//! it is a service thread. Each place that may sleep until another thread acts calls one of
//! these functions first, even if it will not sleep this time:
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
//! A backing written by a user may wait for anything, even folios of another cache: its calls
//! run in [`apart`].
//!
//! A mutex whose holders never sleep is exempt. Release builds do not count, and neither do
//! model runs, in which many threads share one.
//!
//! TRACKED THREADS hold something that a fault may wait for: folio locks, and transfers in a
//! queue. Library code then touches no page that is not resident, and no user memory that may
//! be part of a map. So a fault of such a thread comes from a signal handler, or from a page
//! that the program took from the cache: waiting for it would hang both threads, and
//! `maps/faults` refuses it. Each thread counts, in every build, in a slot that is found by the
//! kernel thread id, which the message about a fault carries. A thread that finds no free slot
//! is not tracked: its faults wait.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The counts of the calling thread; always the default where nothing counts.
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

#[inline(always)]
pub(crate) fn note_handed_out(transfers: usize) {
    track(-(transfers as i32));
    let less = |pushed: usize| pushed.checked_sub(transfers).expect("a queue has two threads");
    change(|counts| counts.transfers = less(counts.transfers));
}

/// Guard that marks its thread as a service thread: other threads wait for it, whatever they
/// hold.
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

/// Checks a wait for what a user may hold while the user waits for a service thread.
#[inline(always)]
#[track_caller]
pub(crate) fn check_user(what: &str) {
    check(what);
    debug_assert!(
        !counts().serves || std::thread::panicking(),
        "a service thread waits for {what}, which a user may hold"
    );
}

/// Panics in debug builds if this thread must not wait for what another thread must provide.
#[inline(always)]
#[track_caller]
pub(crate) fn check(what: &str) {
    check_in_queue(what, 0);
}

/// Checks a wait with a deadline, for a page that must be restored: the thread may own
/// transfers.
#[inline(always)]
#[track_caller]
pub(crate) fn check_frozen(what: &str) {
    let frozen = counts().frozen;
    debug_assert!(
        frozen == 0 || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen"
    );
}

/// Checks a wait of a queue that has `own` transfers.
#[inline(always)]
#[track_caller]
pub(crate) fn check_in_queue(what: &str, own: usize) {
    let Counts { frozen, transfers, .. } = counts();
    debug_assert!(
        frozen == 0 && (transfers == own || cfg!(all(test, loom))) || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen and {transfers} transfers, {own} its own"
    );
}

pub(crate) fn current_thread() -> u32 {
    #[cfg(not(all(test, loom)))]
    return rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
    // A model run has one.
    #[cfg(all(test, loom))]
    1
}

const SLOTS_MAX: usize = 1024;
const PROBES_MAX: usize = 8;

/// The count of one thread, on a cache line of its own.
#[repr(align(64))]
struct ThreadSlot {
    /// Kernel thread id; 0 if the slot is free.
    thread: AtomicU32,
    /// The number of things held, in the lower half; above it the number of the last hold, from
    /// the first thing held to the last, which goes on when another thread claims the slot. One
    /// word: a thread that is not stopped may change both.
    state: AtomicU64,
}

static SLOTS: [ThreadSlot; SLOTS_MAX] =
    [const { ThreadSlot { thread: AtomicU32::new(0), state: AtomicU64::new(0) } }; SLOTS_MAX];

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
            // Relaxed: only the value counts; the thread that owns it is the only one to change
            // it.
            let claimed =
                slot.thread.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed);
            // A forked child inherits slots, perhaps one of a thread that had the same number.
            claimed.is_ok() || claimed == Err(thread)
        };
        let own = slots_of(thread).find(is_claimed);
        own.inspect(|slot| _ = slot.set_held(0));
        Self(own)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.inspect(|slot| slot.thread.store(0, Ordering::Relaxed));
    }
}

impl ThreadSlot {
    /// Returns the number of things held, and that of the last hold.
    #[inline]
    fn state(&self) -> (i32, u32) {
        // Relaxed: no other thread changes it, and it orders nothing.
        let state = self.state.load(Ordering::Relaxed);
        ((state as u32).cast_signed(), (state >> 32) as u32)
    }

    /// Sets the count of the calling thread, whose slot it is. Returns the previous count.
    #[inline]
    fn set_held(&self, held: i32) -> i32 {
        let (before, hold) = self.state();
        let hold = hold.wrapping_add(u32::from(before == 0 && held != 0));
        // Relaxed: as in `state`; a signal handler that interrupts restores the count.
        self.state
            .store(u64::from(hold) << 32 | u64::from(held.cast_unsigned()), Ordering::Relaxed);
        before
    }
}

/// Adds `more`, which may be negative, to the count of the calling thread.
#[inline]
pub(crate) fn track(more: i32) {
    // A thread that is ending is not tracked.
    let add = |slot: &ThreadSlot| slot.set_held(slot.state().0 + more);
    let _ = OWN.try_with(|own| own.0.map(add));
}

pub(crate) fn replace_tracked(held: i32) -> i32 {
    OWN.try_with(|own| own.0.map(|slot| slot.set_held(held))).ok().flatten().unwrap_or(0)
}

/// Returns the number of a thread's hold, if it holds anything. Exact for a thread that is
/// stopped in a fault whose message the caller has read; any other may have gone on.
pub(crate) fn hold_of(thread: u32) -> Option<u32> {
    // Relaxed: the kernel's locks order the message about the fault after the state.
    let is_its = |slot: &&ThreadSlot| slot.thread.load(Ordering::Relaxed) == thread;
    let (held, hold) = slots_of(thread).find(|slot| thread != 0 && is_its(slot))?.state();
    (held > 0).then_some(hold)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_tracked_while_it_holds_something() {
        let own = current_thread();
        assert_eq!((hold_of(own), hold_of(0)), (None, None));
        track(2);
        let first = hold_of(own).unwrap();
        let other = move || assert!(hold_of(current_thread()).is_none() && hold_of(own).is_some());
        std::thread::spawn(other).join().unwrap();
        track(1);
        assert_eq!(hold_of(own), Some(first), "the same hold, of more");
        let held = replace_tracked(0);
        assert_eq!((held, hold_of(own)), (3, None));
        replace_tracked(held);
        assert_eq!(hold_of(own), Some(first + 1), "another hold, after a call of user code");
        track(-3);
        assert_eq!(hold_of(own), None);
    }

    #[test]
    fn a_slot_is_free_again_when_its_thread_has_ended() {
        let end = || {
            track(1);
            current_thread()
        };
        for _ in 0..2 * SLOTS_MAX {
            let ended = std::thread::spawn(end).join().unwrap();
            assert_eq!(hold_of(ended), None);
        }
        let hold = std::thread::spawn(|| (track(1), hold_of(current_thread())).1);
        assert!(hold.join().unwrap().is_some());
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
