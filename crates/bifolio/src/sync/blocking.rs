//! The rules about blocking, checked in debug builds: **nothing is waited for with a folio frozen;
//! by the owner of transfers nothing but those (IO-5); and by who serves others no user**.
//!
//! A thread that meets a frozen folio waits until it is frozen no more, whatever else it holds; and
//! the owner of a transfer has folios locked, or under write-back, that others wait for. If such a
//! thread waited for somebody, the two could wait for each other. And a user may keep a folio's
//! lock, as a `PinMut`, and wait for frames, for less dirt or for a fault, which the threads of the
//! cache see to: so those only try locks of folios, and wait for nothing that is held by somebody
//! who waits for one.
//!
//! So each thread counts the folios it has frozen and the transfers it has handed to a queue and
//! not got back, and knows whether it serves others; and each place where it may sleep until
//! somebody else has done something says so first, whether it will sleep this time or not:
//!
//! | place | call |
//! |---|---|
//! | folio lock, `resizing`, a shared flush, too much dirt | [`check_user`] |
//! | end of a write-out, a folio that others have frozen | [`check`] |
//! | frames and metadata that somebody must free, the reclaim lock | [`check`] |
//! | `cutting`, an epoch of write-outs | [`check`] |
//! | staging memory, reads of the same device | [`check`] |
//! | memory of the kernel for a page that is put back, with a bound | [`check_frozen`] |
//! | a change of a backing's length | [`check`] |
//! | a transfer, a ring to make one | [`check_in_queue`] |
//!
//! A backing that a user wrote may wait for whatever it likes, for another cache's folios perhaps:
//! its calls are [`apart`].
//!
//! A mutex that nobody keeps while he sleeps is none of these. Release builds count nothing of
//! this, and under loom, where many threads are one, neither. (Transfers are counted always for
//! another purpose: `inside.rs`.)

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

    /// Sets what is held, and tells what was.
    pub(super) fn replace_held(frozen: usize, transfers: usize) -> (usize, usize) {
        (FROZEN.replace(frozen), TRANSFERS.replace(transfers))
    }

    pub(super) fn add_frozen(more: isize) {
        FROZEN.set(FROZEN.get().checked_add_signed(more).expect("unfrozen by who froze it"));
    }

    pub(super) fn add_transfers(more: isize) {
        TRANSFERS.set(TRANSFERS.get().checked_add_signed(more).expect("a queue is one thread's"));
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

/// This thread has frozen a folio.
#[inline(always)]
pub(crate) fn note_frozen() {
    counts::add_frozen(1);
}

/// This thread has unfrozen or freed one that it had frozen.
#[inline(always)]
pub(crate) fn note_unfrozen() {
    counts::add_frozen(-1);
}

/// This thread has handed a transfer to a queue.
#[inline(always)]
pub(crate) fn note_pushed() {
    inside::add(1);
    counts::add_transfers(1);
}

/// Queues have handed so many back, or dropped them.
#[inline(always)]
pub(crate) fn note_handed_out(transfers: usize) {
    inside::add(-(transfers as i32));
    counts::add_transfers(-(transfers as isize));
}

/// For as long as this lives, its thread serves others: they wait for it, whatever they hold.
#[derive(Debug)]
pub(crate) struct Serving {
    /// Whether it did before.
    before: bool,
}

/// This thread serves others from now on.
#[inline(always)]
pub(crate) fn serve() -> Serving {
    Serving { before: counts::set_serves(true) }
}

impl Drop for Serving {
    fn drop(&mut self) {
        counts::set_serves(self.before);
    }
}

/// Makes a call of code that is a user's, which does not unwind: what it waits for is another's.
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

/// As [`check`], for what a user may keep while he waits for who serves.
#[inline(always)]
#[track_caller]
pub(crate) fn check_user(what: &str) {
    check(what);
    debug_assert!(
        !counts::serves() || std::thread::panicking(),
        "who serves others waits for {what}, which a user may keep"
    );
}

/// This thread is about to wait for `what`, which somebody else must do.
#[inline(always)]
#[track_caller]
pub(crate) fn check(what: &str) {
    check_in_queue(what, 0);
}

/// As [`check`], for a thread that waits so long at the most, whatever becomes of it, and may own
/// transfers: a page must be had back.
#[inline(always)]
#[track_caller]
pub(crate) fn check_frozen(what: &str) {
    let frozen = counts::frozen();
    debug_assert!(
        frozen == 0 || std::thread::panicking(),
        "waits for {what} with {frozen} folios frozen"
    );
}

/// As [`check`], for a queue that has `own` transfers.
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
    fn who_serves_others_may_not_wait_for_a_user() {
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
