//! Requests between two processes (RING-C1..C7, RING-W1..W7; `share/slot.rs`): each is answered
//! once, with its own words, and no thread sleeps for ever.
//!
//! Processes are threads here, which have the same words, and a futex is a lock and a condition:
//! loom reports a thread that is never woken.

use super::world::{Checked, join_all, model_bounded, spawn};
use crate::share::slot::{Gone, SlotWord, Wait};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Condvar, Mutex, Ordering};
use std::sync::Arc;

/// A word on which threads sleep.
#[derive(Debug)]
struct Futex {
    word: AtomicU32,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn new() -> Self {
        Self { word: AtomicU32::new(0), lock: Mutex::new(()), woken: Condvar::new() }
    }

    fn sleep_while(&self, value: u32) {
        let mut guard = self.lock.lock();
        // The kernel compares under the lock of the word.
        if self.word.load(Ordering::Relaxed) == value {
            self.woken.wait(&mut guard);
        }
    }

    fn wake(&self) {
        let _guard = self.lock.lock();
        self.woken.notify_all();
    }
}

#[derive(Debug)]
struct Slot {
    state: Futex,
    request: AtomicU64,
    answer: AtomicU64,
    /// Data beside the words, which one side has at a time.
    data: Checked,
    taken: AtomicBool,
}

#[derive(Debug)]
struct Ring {
    doorbell: Futex,
    slot: Slot,
    ends: AtomicBool,
    calls: AtomicU64,
}

impl Ring {
    fn new() -> Arc<Self> {
        let slot = Slot {
            state: Futex::new(),
            request: AtomicU64::new(0),
            answer: AtomicU64::new(0),
            data: Checked::default(),
            taken: AtomicBool::new(false),
        };
        let (ends, calls) = (AtomicBool::new(false), AtomicU64::new(0));
        Arc::new(Self { doorbell: Futex::new(), slot, ends, calls })
    }

    fn ring(&self) {
        self.doorbell.word.fetch_add(1, Ordering::Release);
        self.doorbell.wake();
    }

    /// Makes a request and returns its answer.
    fn call(&self, request: u64) -> Result<u64, Gone> {
        let state = SlotWord(&self.slot.state.word);
        self.slot.request.store(request, Ordering::Relaxed);
        self.slot.data.change();
        state.post()?;
        self.ring();
        while let Wait::While(value) = state.wait()? {
            self.slot.state.sleep_while(value);
        }
        self.slot.data.change();
        let answer = self.slot.answer.load(Ordering::Relaxed);
        state.release();
        Ok(answer)
    }

    /// Answers requests until the client ends.
    fn work(&self) {
        loop {
            let bell = self.doorbell.word.load(Ordering::Acquire);
            if self.ends.load(Ordering::Acquire) {
                return;
            }
            if !self.serve() {
                self.doorbell.sleep_while(bell);
            }
        }
    }

    fn serve(&self) -> bool {
        if self.slot.taken.swap(true, Ordering::Acquire) {
            return false;
        }
        let state = SlotWord(&self.slot.state.word);
        let is_posted = state.is_posted();
        if is_posted {
            self.slot.data.change();
            self.calls.fetch_add(1, Ordering::Relaxed);
            let request = self.slot.request.load(Ordering::Relaxed);
            self.slot.answer.store(request + 1, Ordering::Relaxed);
            if state.answer() {
                self.slot.state.wake();
            }
        }
        // A store in `worker.rs`; loom loses one that races with a swap.
        self.slot.taken.swap(false, Ordering::Release);
        is_posted
    }

    fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.ring();
    }
}

/// Two requests in one slot, one after the other. Dies with: Relaxed in `post` or `is_posted`.
#[test]
fn loom_request_each_is_answered_once() {
    model_bounded(3, || {
        let ring = Ring::new();
        let worker = spawn(&ring, Ring::work);
        assert_eq!(ring.call(10), Ok(11));
        assert_eq!(ring.call(20), Ok(21));
        ring.end();
        worker.join().unwrap();
        assert_eq!(ring.calls.load(Ordering::Relaxed), 2);
    });
}

/// Two workers. Dies with: what `..._each_is_answered_once` dies with.
#[test]
fn loom_request_one_worker_answers() {
    model_bounded(1, || {
        let ring = Ring::new();
        let workers = [spawn(&ring, Ring::work), spawn(&ring, Ring::work)];
        assert_eq!(ring.call(10), Ok(11));
        ring.end();
        join_all(workers);
        assert_eq!(ring.calls.load(Ordering::Relaxed), 1);
    });
}

/// The owner ends at any moment of a request: the client is answered, or finds it gone. Dies with:
/// what `..._each_is_answered_once` dies with; an `answer` that overwrites the end.
#[test]
fn loom_request_the_end_of_the_owner_is_seen() {
    model_bounded(3, || {
        let ring = Ring::new();
        let watcher = spawn(&ring, |ring| {
            SlotWord(&ring.slot.state.word).give_up();
            ring.slot.state.wake();
        });
        let worker = spawn(&ring, Ring::serve);
        let answer = ring.call(10);
        assert!(matches!(answer, Ok(11) | Err(Gone)), "{answer:?}");
        watcher.join().unwrap();
        worker.join().unwrap();
        assert_eq!(ring.call(20), Err(Gone));
    });
}
