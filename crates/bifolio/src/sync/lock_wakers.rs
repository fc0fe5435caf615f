//! Wakers that wait for a lock word, beside the threads that sleep on it as a futex.
//!
//! Used by the folio lock. A waker is registered before the word says that there are waiters; the
//! thread that unlocks such a word calls all its wakers and forgets them. So a waker is called once
//! for each registration that is not forgotten before, perhaps without need, and must not wait or
//! call into the cache.

use crate::sync::AtomicU32;
use std::task::Waker;

#[cfg(not(all(test, loom)))]
#[cfg(test)]
pub(crate) use table::registered;
#[cfg(not(all(test, loom)))]
pub(crate) use table::{forget, register, wake};
#[cfg(not(all(test, loom)))]
mod table {
    use super::{AtomicU32, Waker};
    #[cfg(all(feature = "fork", not(bifolio_chaos)))]
    use crate::sync::locks::Mutex;
    #[cfg(not(all(feature = "fork", not(bifolio_chaos))))]
    use parking_lot::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const BUCKETS: usize = 64;
    /// Size of the objects that contain the words.
    const WORD_DISTANCE: usize = 64;

    type Bucket = Mutex<Vec<(usize, Waker)>>;

    static TABLE: [Bucket; BUCKETS] = [const { Mutex::new(Vec::new()) }; BUCKETS];
    /// Number of wakers in the table: zero lets an unlock skip it.
    static REGISTERED: AtomicUsize = AtomicUsize::new(0);

    fn bucket(word: &AtomicU32) -> (usize, &'static Bucket) {
        let address = std::ptr::from_ref(word).addr();
        (address, &TABLE[address / WORD_DISTANCE % BUCKETS])
    }

    /// Registers a waker for the next [`wake`] of `word`.
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
        let (address, bucket) = bucket(word);
        let is_meant = |entry: &mut (usize, Waker)| entry.0 == address && entry.1.data() == data;
        let forgotten: Vec<_> = bucket.lock().extract_if(.., is_meant).collect();
        // Relaxed: as in `wake`.
        REGISTERED.fetch_sub(forgotten.len(), Ordering::Relaxed);
    }

    /// Returns the number of wakers of `word`.
    #[cfg(test)]
    pub(crate) fn registered(word: &AtomicU32) -> usize {
        let (address, bucket) = bucket(word);
        bucket.lock().iter().filter(|entry| entry.0 == address).count()
    }

    /// Calls the wakers of `word`, and forgets them.
    pub(crate) fn wake(word: &AtomicU32) {
        // Relaxed: the exchange of the word before it orders it.
        if REGISTERED.load(Ordering::Relaxed) == 0 {
            return;
        }
        let (address, bucket) = bucket(word);
        let woken: Vec<_> = bucket.lock().extract_if(.., |entry| entry.0 == address).collect();
        // Relaxed: as above.
        REGISTERED.fetch_sub(woken.len(), Ordering::Relaxed);
        woken.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

/// Model of the table for loom: a step of it is atomic.
#[cfg(all(test, loom))]
pub(crate) use model::{forget, register, wake};
#[cfg(all(test, loom))]
mod model {
    use super::{AtomicU32, Waker};
    use std::cell::RefCell;

    thread_local! {
        // All threads of a model run share one thread of the system, one model after the other.
        static TABLE: RefCell<Vec<(usize, Waker)>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn register(word: &AtomicU32, waker: Waker) {
        let address = std::ptr::from_ref(word).addr();
        TABLE.with_borrow_mut(|table| table.push((address, waker)));
    }

    pub(crate) fn forget(word: &AtomicU32, data: *const ()) {
        let address = std::ptr::from_ref(word).addr();
        TABLE.with_borrow_mut(|table| {
            table.retain(|entry| entry.0 != address || entry.1.data() != data);
        });
    }

    pub(crate) fn wake(word: &AtomicU32) {
        let address = std::ptr::from_ref(word).addr();
        let woken: Vec<_> = TABLE
            .with_borrow_mut(|table| table.extract_if(.., |entry| entry.0 == address).collect());
        woken.into_iter().for_each(|(_, waker)| waker.wake());
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
            wake(own);
            wake(other);
        });
        register(own, Waker::noop().clone());
        wake(own);
        assert!(test_hook::has_run());
        assert!(called.0.load(Ordering::Relaxed));
    }
}
