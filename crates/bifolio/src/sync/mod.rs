//! The only source of atomics, locks and spinning: the real ones, those of loom in a model run
//! (`cargo x loom`), or the real ones with a seeded scheduler (`tests/chaos.rs`). And what may wait
//! for what ([`blocking`]).
//!
//! The types switch on `all(test, loom)`: a model run of a crate that merely depends on this one
//! does not switch them. Statistics (`stats`) do not use it: counters are in no protocol.

#[cfg(all(test, not(any(loom, bifolio_chaos))))]
#[path = "../tests/counted.rs"]
pub(crate) mod counted;
#[cfg(all(feature = "fork", not(any(all(test, loom), bifolio_chaos))))]
pub(crate) mod locks;
mod round_wait;
#[cfg(all(test, not(loom)))]
#[path = "../tests/test_hook.rs"]
pub(crate) mod test_hook;
pub(crate) mod waiters;
mod weak_list;
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
pub(crate) use real::*;
pub(crate) use round_wait::{CallScope, RoundWait, WaitBudget, WaitProgress, wait_in_rounds};
pub(crate) use weak_list::WeakList;

use std::ops::Range;
use std::sync::Arc;

#[cfg(all(bifolio_chaos, not(all(test, loom))))]
#[path = "../tests/chaos.rs"]
mod chaos;
#[cfg(all(bifolio_chaos, not(all(test, loom))))]
pub(crate) use chaos::*;

#[cfg(all(test, loom))]
#[path = "../tests/model.rs"]
mod model;
#[cfg(all(test, loom))]
pub(crate) use model::*;

/// The real primitives: `std` atomics and `parking_lot` locks, which do not poison: a panic of a
/// user's callback must not become an error of the cache. With the feature `fork` they are those of
/// `locks.rs`.
#[cfg(not(any(all(test, loom), bifolio_chaos)))]
mod real {
    #[cfg(test)]
    pub(crate) use super::counted::Mutex;
    #[cfg(feature = "fork")]
    pub(crate) use super::locks as plain;
    #[cfg(not(feature = "fork"))]
    pub(crate) use parking_lot as plain;
    #[cfg(not(test))]
    pub(crate) use plain::Mutex;
    pub(crate) use plain::{Condvar, MutexGuard, RwLock, RwLockReadGuard};
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence,
    };
    pub(crate) use std::thread::yield_now;

    pub(crate) fn sleep_briefly() {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }

    /// Stores `value` into a word of which only the caller may change the state now. (In a model
    /// run by a read-modify-write, see `tests/model.rs`.)
    #[inline(always)]
    pub(crate) fn store_owned(word: &AtomicU64, value: u64, ordering: Ordering) {
        word.store(value, ordering);
    }

    pub(crate) fn word_of(word: &AtomicU32) -> &AtomicU32 {
        word
    }
}

/// Orders a store before a load of another word. If two threads each store, call this and load the
/// other's word, at least one sees the other's store.
pub(crate) fn barrier_of_store_and_load() {
    // SeqCst: pairs with the same fence in the other thread.
    fence(Ordering::SeqCst);
}

/// A wait that is a little longer each round, for another thread that needs a few instructions (a
/// frozen folio): the last rounds sleep, so that a waiter never starves the thread it waits for.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    rounds: u32,
}

impl Backoff {
    const SPINS: u32 = 6;
    const YIELDS: u32 = 64;

    pub(crate) fn wait(&mut self) {
        if self.rounds < Self::SPINS {
            for _ in 0..1 << self.rounds {
                spin_loop();
            }
        } else if self.rounds < Self::YIELDS {
            yield_now();
        } else {
            sleep_briefly();
        }
        self.rounds = self.rounds.saturating_add(1);
    }
}

/// A run of numbers, its start and its end in one word, of which any thread takes the first.
///
/// A thread that exchanges the word owns the numbers that it no longer names, so it does not matter
/// how often the word changed between a thread's load and its exchange. On a cache line of its own,
/// because a CPU has its own (`memory/arena.rs`, STOCK-Q1..Q4).
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct AtomicRun(AtomicU64);

impl AtomicRun {
    fn run_of(word: u64) -> Range<u32> {
        word as u32..(word >> u32::BITS) as u32
    }

    fn word_of(run: Range<u32>) -> u64 {
        u64::from(run.end) << u32::BITS | u64::from(run.start)
    }

    /// Takes the first number; `None` if there is none, or it does not follow `near`.
    pub(crate) fn take(&self, near: Option<u32>) -> Option<u32> {
        let without_first = |word| {
            let run = Self::run_of(word);
            let is_next = near.is_none_or(|near| near + 1 == run.start);
            (is_next && !run.is_empty()).then(|| Self::word_of(run.start + 1..run.end))
        };
        // Acquire: pairs with the Release in `replace`: what was done before, also with what the
        // number names, comes first.
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, without_first);
        taken.ok().map(|word| Self::run_of(word).start)
    }

    /// Replaces the run. Callers serialize. Returns the numbers that were left.
    pub(crate) fn replace(&self, run: Range<u32>) -> Range<u32> {
        // Release: pairs with the Acquire in `take`. Relaxed for the numbers that come back: no
        // thread has taken them since the previous call.
        Self::run_of(self.0.swap(Self::word_of(run), Ordering::Release))
    }

    pub(crate) fn len(&self) -> u64 {
        Self::run_of(self.0.load(Ordering::Relaxed)).len() as u64
    }
}

/// The amount of a resource that one device holds, and the amount that all devices hold: a limit on
/// how much of a common resource one device may take.
///
/// A device may stop answering, and keep what its requests hold for that long. So each device may
/// take only a part, such as three quarters, of what the others leave free: the first has 3/4, the
/// second 3/16, and so on, and at least one remains.
///
/// These are only counters: a thread that finds no room waits elsewhere. The total is exact where
/// [`Share::try_add`] counts it; the amount of one device may exceed its part by what several
/// threads add at the same time.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    all: Arc<AtomicU64>,
    own: Arc<AtomicU64>,
}

impl Share {
    pub(crate) fn new(all: &Arc<AtomicU64>) -> Self {
        Self { all: Arc::clone(all), own: Arc::new(AtomicU64::new(0)) }
    }

    pub(crate) fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    pub(crate) fn own(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }

    pub(crate) fn left_of(&self, max: u64) -> u64 {
        max.saturating_sub(self.all().saturating_sub(self.own()))
    }

    /// Adds `count` without a limit. Returns the previous amount of the device.
    pub(crate) fn add(&self, count: u64) -> u64 {
        self.all.fetch_add(count, Ordering::Relaxed);
        self.own.fetch_add(count, Ordering::Relaxed)
    }

    pub(crate) fn sub(&self, count: u64) -> u64 {
        self.all.fetch_sub(count, Ordering::Relaxed);
        self.own.fetch_sub(count, Ordering::Relaxed)
    }

    /// Adds `count` if the total stays within `max` and this device within `1 - 1/rest` of what the
    /// other devices leave free. A device that holds nothing is only limited by `max`. Returns the
    /// previous amount of the device.
    pub(crate) fn try_add(&self, count: u64, max: u64, rest: u64) -> Option<u64> {
        let has_room = |all| self.has_room_beside(all, count, max, rest).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.own.fetch_add(count, Ordering::Relaxed))
    }

    /// Adds `count` if the total stays within `max`, without a limit per device. Returns the
    /// previous amount of the device.
    pub(crate) fn try_add_any(&self, count: u64, max: u64) -> Option<u64> {
        let has_room = |all: u64| (all + count <= max).then_some(all + count);
        self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_room).ok()?;
        Some(self.own.fetch_add(count, Ordering::Relaxed))
    }

    /// Returns how much more this device may take now, with one in `rest` of what the others leave
    /// kept in reserve.
    pub(crate) fn room(&self, max: u64, rest: u64) -> u64 {
        let part = part_of(self.left_of(max), rest);
        part.saturating_sub(self.own()).min(max.saturating_sub(self.all()))
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.own, &other.own)
    }

    pub(crate) fn has_room(&self, count: u64, max: u64, rest: u64) -> bool {
        self.has_room_beside(self.all(), count, max, rest)
    }

    fn has_room_beside(&self, all: u64, count: u64, max: u64, rest: u64) -> bool {
        let own = self.own();
        let part = part_of(max.saturating_sub(all.saturating_sub(own)), rest);
        all + count <= max && (own + count <= part || own == 0)
    }
}

/// Returns the part of `left`, which the other devices leave free, that one device may take: `left`
/// minus one in `rest`, which counts as at least 1; all of it if `left` is 1.
pub(crate) fn part_of(left: u64, rest: u64) -> u64 {
    left - (left / rest).max(1).min(left.saturating_sub(1))
}

pub(crate) mod blocking {
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
        let less =
            |frozen: usize| frozen.checked_sub(1).expect("it was unfrozen by another thread");
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
            let other =
                move || assert!(hold_of(current_thread()).is_none() && hold_of(own).is_some());
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
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_device_leaves_at_least_one_for_the_next() {
        let taken_by = |share: &Share, max, rest| {
            let room = share.room(max, rest);
            share.add(room);
            room
        };
        for (max, rest, expected) in [(16, 8, [14, 1, 1, 0]), (8, 4, [6, 1, 1, 0])] {
            let all = Arc::default();
            let devices: Vec<_> = (0..4).map(|_| Share::new(&all)).collect();
            let taken: Vec<_> = devices.iter().map(|own| taken_by(own, max, rest)).collect();
            assert_eq!(taken, expected);
            let all = Arc::default();
            let devices: Vec<_> = (0..4).map(|_| Share::new(&all)).collect();
            let added: Vec<_> = devices
                .iter()
                .map(|own| (0..).take_while(|_| own.try_add(1, max, rest).is_some()).count() as u64)
                .collect();
            assert_eq!(added, expected);
        }
    }
}
