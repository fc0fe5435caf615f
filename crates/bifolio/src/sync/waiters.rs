//! Waits for a 32-bit word: threads that sleep while it holds a value, and wakers that are called.
//!
//! Used by the folio lock and by waiters for write-back. A sleep may end early: callers load the
//! word again. A waker is registered before the word says that there are waiters; the thread that
//! unlocks such a word calls all its wakers and forgets them. A waker may be called without need,
//! and must not wait or call into the cache.

use crate::sync::AtomicU32;
use std::task::Waker;

#[cfg(all(test, loom))]
pub(crate) use model::*;
#[cfg(not(all(test, loom)))]
pub(crate) use real::*;
#[cfg(not(all(test, loom)))]
mod real {
    use super::{AtomicU32, Waker};
    #[cfg(all(feature = "fork", not(bifolio_chaos)))]
    use crate::sync::locks::Mutex;
    use crate::sync::word_of;
    #[cfg(not(all(feature = "fork", not(bifolio_chaos))))]
    use parking_lot::Mutex;
    use rustix::thread::futex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const BUCKETS: usize = 64;
    /// Size of the objects that contain the words.
    const WORD_DISTANCE: usize = 64;

    type Bucket = Mutex<Vec<(usize, Waker)>>;

    static TABLE: [Bucket; BUCKETS] = [const { Mutex::new(Vec::new()) }; BUCKETS];
    /// Number of wakers in the table: zero lets an unlock skip it.
    static REGISTERED: AtomicUsize = AtomicUsize::new(0);

    /// Sleeps while `word` holds `expected`, until woken. May return spuriously.
    pub(crate) fn sleep(word: &AtomicU32, expected: u32) {
        // On any error the caller rechecks: the word already differed, or a signal arrived.
        let _ = futex::wait(word_of(word), futex::Flags::PRIVATE, expected, None);
    }

    /// Acts as [`sleep`], for at most a millisecond.
    pub(crate) fn sleep_briefly(word: &AtomicU32, expected: u32) {
        let timeout = futex::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let _ = futex::wait(word_of(word), futex::Flags::PRIVATE, expected, Some(&timeout));
    }

    /// Wakes at most `count` threads that sleep on `word`.
    pub(crate) fn wake_sleepers(word: &AtomicU32, count: u32) {
        // The only possible error is a bad address, which a reference never is.
        let _ = futex::wake(word_of(word), futex::Flags::PRIVATE, count);
    }

    fn bucket(word: &AtomicU32) -> (usize, &'static Bucket) {
        let address = std::ptr::from_ref(word).addr();
        (address, &TABLE[address / WORD_DISTANCE % BUCKETS])
    }

    /// Registers a waker for the next [`call_wakers`] of `word`.
    pub(crate) fn register(word: &AtomicU32, waker: Waker) {
        let (address, bucket) = bucket(word);
        // Before the waker can be taken out: the number is never below that of the wakers in the
        // table. Relaxed: the exchange of the word that follows orders it.
        REGISTERED.fetch_add(1, Ordering::Relaxed);
        #[cfg(test)]
        crate::sync::test_hook::reach("between the steps of a registration");
        bucket.lock().push((address, waker));
    }

    /// Forgets the wakers of `word` whose data is at `data`. Takes time proportional to the wakers
    /// of a 64th of all words.
    pub(crate) fn forget(word: &AtomicU32, data: *const ()) {
        drop(take(word, |waker| waker.data() == data));
    }

    /// Calls the wakers of `word`, and forgets them.
    pub(crate) fn call_wakers(word: &AtomicU32) {
        // Relaxed: the exchange of the word before it orders it.
        if REGISTERED.load(Ordering::Relaxed) > 0 {
            take(word, |_| true).into_iter().for_each(|(_, waker)| waker.wake());
        }
    }

    fn take(word: &AtomicU32, is_meant: impl Fn(&Waker) -> bool) -> Vec<(usize, Waker)> {
        let (address, bucket) = bucket(word);
        let is_meant = |entry: &mut (usize, Waker)| entry.0 == address && is_meant(&entry.1);
        let taken: Vec<_> = bucket.lock().extract_if(.., is_meant).collect();
        // Relaxed: as in `register`.
        REGISTERED.fetch_sub(taken.len(), Ordering::Relaxed);
        taken
    }

    #[cfg(test)]
    pub(crate) fn registered(word: &AtomicU32) -> usize {
        let (address, bucket) = bucket(word);
        bucket.lock().iter().filter(|entry| entry.0 == address).count()
    }
}

/// Model for loom: a step of the table is atomic, and orders nothing. A thread that is never woken
/// is a deadlock, which the checker reports.
#[cfg(all(test, loom))]
mod model {
    use super::{AtomicU32, Waker};
    use crate::sync::Ordering;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread::Thread;
    use std::cell::RefCell;

    thread_local! {
        // All threads of a model run share one thread of the system, one model after the other.
        static SLEEPERS: RefCell<Vec<(usize, Thread)>> = const { RefCell::new(Vec::new()) };
        static TABLE: RefCell<Vec<(usize, Waker)>> = const { RefCell::new(Vec::new()) };
    }

    loom::lazy_static! {
        /// As in `real`: a thread that the exchange of a word does not order may find a number from
        /// before.
        static ref REGISTERED: AtomicUsize = AtomicUsize::new(0);
    }

    fn address_of(word: &AtomicU32) -> usize {
        std::ptr::from_ref(word).addr()
    }

    pub(crate) fn sleep(word: &AtomicU32, expected: u32) {
        // Relaxed: a read-modify-write reads the current word; the kernel guarantees no more.
        let same = (Ordering::Relaxed, Ordering::Relaxed);
        if word.compare_exchange(expected, expected, same.0, same.1).is_ok() {
            let sleeper = (address_of(word), loom::thread::current());
            SLEEPERS.with_borrow_mut(|sleepers| sleepers.push(sleeper));
            loom::thread::park();
        }
    }

    /// Returns at once: no time passes in a model run, so the caller rechecks.
    pub(crate) fn sleep_briefly(_word: &AtomicU32, _expected: u32) {
        loom::thread::yield_now();
    }

    pub(crate) fn wake_sleepers(word: &AtomicU32, count: u32) {
        // Relaxed: changes nothing, but lets the checker schedule other threads between store and
        // wake.
        word.fetch_add(0, Ordering::Relaxed);
        for _ in 0..count {
            let woken = SLEEPERS.with_borrow_mut(|sleepers| {
                let at = sleepers.iter().position(|sleeper| sleeper.0 == address_of(word))?;
                Some(sleepers.remove(at).1)
            });
            let Some(woken) = woken else { break };
            woken.unpark();
        }
    }

    pub(crate) fn register(word: &AtomicU32, waker: Waker) {
        // Relaxed: as in `real`.
        REGISTERED.fetch_add(1, Ordering::Relaxed);
        TABLE.with_borrow_mut(|table| table.push((address_of(word), waker)));
    }

    pub(crate) fn forget(word: &AtomicU32, data: *const ()) {
        drop(take(word, |waker| waker.data() == data));
    }

    pub(crate) fn call_wakers(word: &AtomicU32) {
        // Relaxed: as in `real`.
        if REGISTERED.load(Ordering::Relaxed) > 0 {
            take(word, |_| true).into_iter().for_each(|(_, waker)| waker.wake());
        }
    }

    fn take(word: &AtomicU32, is_meant: impl Fn(&Waker) -> bool) -> Vec<(usize, Waker)> {
        let is_its = |entry: &mut (usize, Waker)| entry.0 == address_of(word) && is_meant(&entry.1);
        let taken: Vec<_> = TABLE.with_borrow_mut(|table| table.extract_if(.., is_its).collect());
        // Relaxed: as in `real`.
        REGISTERED.fetch_sub(taken.len(), Ordering::Relaxed);
        taken
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::test_hook;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Called(AtomicBool);

    impl Wake for Called {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_registration_in_progress_hides_no_other() {
        let words: &'static [AtomicU32; 64] =
            Box::leak(Box::new(std::array::from_fn(|_| AtomicU32::new(0))));
        // Of different buckets.
        let (own, other) = (&words[0], &words[32]);
        let called = Arc::new(Called::default());
        register(other, Arc::clone(&called).into());
        test_hook::set("between the steps of a registration", move || {
            call_wakers(own);
            call_wakers(other);
        });
        register(own, Waker::noop().clone());
        call_wakers(own);
        assert!(test_hook::has_run());
        assert!(called.0.load(Ordering::Relaxed));
    }
}
