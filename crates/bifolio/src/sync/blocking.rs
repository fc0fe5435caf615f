//! The rules about blocking, checked in debug builds: **a thread that has frozen a folio waits for
//! nothing; the owner of transfers waits only for those (IO-5); a service thread never waits for a
//! lock that user code can hold**.
//!
//! A thread that finds a folio frozen waits until it is unfrozen, whatever else it holds; and the
//! owner of a transfer has folios locked, or under write-back, that other threads wait for. If such
//! a thread waited for another thread, the two could deadlock. And a user may hold the lock of a
//! folio, in a `PinMut`, while waiting for frames, for the throttle or for a fault, which the
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
//! runs, in which many threads share one. (Transfers are always counted for another purpose:
//! `inside.rs`.)

use super::inside;

#[cfg(all(debug_assertions, not(all(test, loom))))]
mod counts {
    use std::cell::Cell;

    thread_local! {
        static FROZEN: Cell<usize> = const { Cell::new(0) };
        static TRANSFERS: Cell<usize> = const { Cell::new(0) };
        static SERVES: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn frozen() -> usize {
        FROZEN.get()
    }

    pub(super) fn transfers() -> usize {
        TRANSFERS.get()
    }

    pub(super) fn serves() -> bool {
        SERVES.get()
    }

    pub(super) fn set_serves(serves: bool) -> bool {
        SERVES.replace(serves)
    }

    /// Replaces the counts and returns the previous ones.
    pub(super) fn replace_held(frozen: usize, transfers: usize) -> (usize, usize) {
        (FROZEN.replace(frozen), TRANSFERS.replace(transfers))
    }

    pub(super) fn add_frozen(more: isize) {
        FROZEN.set(
            FROZEN.get().checked_add_signed(more).expect("a folio was unfrozen by another thread"),
        );
    }

    pub(super) fn add_transfers(more: isize) {
        TRANSFERS.set(
            TRANSFERS.get().checked_add_signed(more).expect("a queue was used by two threads"),
        );
    }
}

#[cfg(not(all(debug_assertions, not(all(test, loom)))))]
mod counts {
    #[inline(always)]
    pub(super) fn frozen() -> usize {
        0
    }

    #[inline(always)]
    pub(super) fn transfers() -> usize {
        0
    }

    #[inline(always)]
    pub(super) fn serves() -> bool {
        false
    }

    #[inline(always)]
    pub(super) fn set_serves(_: bool) -> bool {
        false
    }

    #[inline(always)]
    pub(super) fn replace_held(_: usize, _: usize) -> (usize, usize) {
        (0, 0)
    }

    #[inline(always)]
    pub(super) fn add_frozen(_: isize) {}

    #[inline(always)]
    pub(super) fn add_transfers(_: isize) {}
}

/// Notes that this thread has frozen a folio.
#[inline(always)]
pub(crate) fn note_frozen() {
    counts::add_frozen(1);
}

/// Notes that this thread has unfrozen or freed a folio that it had frozen.
#[inline(always)]
pub(crate) fn note_unfrozen() {
    counts::add_frozen(-1);
}

/// Notes that this thread has pushed a transfer to a queue.
#[inline(always)]
pub(crate) fn note_pushed() {
    inside::add(1);
    counts::add_transfers(1);
}

/// Notes that queues have returned or dropped this many transfers.
#[inline(always)]
pub(crate) fn note_handed_out(transfers: usize) {
    inside::add(-(transfers as i32));
    counts::add_transfers(-(transfers as isize));
}

/// Guard that marks its thread as a service thread: other threads wait for it, whatever they hold.
#[derive(Debug)]
pub(crate) struct Serving {
    /// Previous value of the mark.
    before: bool,
}

/// Marks this thread as a service thread.
#[inline(always)]
pub(crate) fn serve() -> Serving {
    Serving { before: counts::set_serves(true) }
}

impl Drop for Serving {
    fn drop(&mut self) {
        counts::set_serves(self.before);
    }
}

/// Runs user code that does not unwind with no counts: what it waits for is not the cache's.
#[inline(always)]
pub(crate) fn apart<R>(call: impl FnOnce() -> R) -> R {
    let serves = counts::set_serves(false);
    let (frozen, transfers) = counts::replace_held(0, 0);
    let held = inside::replace(0);
    let answer = call();
    inside::replace(held);
    counts::set_serves(serves);
    counts::replace_held(frozen, transfers);
    answer
}

/// Acts as [`check`], for something that a user may hold while waiting for a service thread.
#[inline(always)]
#[track_caller]
pub(crate) fn check_user(what: &str) {
    check(what);
    debug_assert!(
        !counts::serves() || std::thread::panicking(),
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
    let frozen = counts::frozen();
    debug_assert!(
        frozen == 0 || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen"
    );
}

/// Acts as [`check`], for a queue that has `own` transfers.
#[inline(always)]
#[track_caller]
pub(crate) fn check_in_queue(what: &str, own: usize) {
    let (frozen, transfers) = (counts::frozen(), counts::transfers());
    debug_assert!(
        frozen == 0 && (transfers == own || cfg!(all(test, loom))) || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen and {transfers} transfers, {own} its own"
    );
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
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
