//! The two protocols of asynchronous reads: who owns a read, and when its server sleeps.
//!
//! PROTOCOL HANDOVER, as two columns:
//!
//! ```text
//!   future                                    server
//!   P1 poll: Ready? take the item             S1 with: change the item, unless it is Over
//!   P2 otherwise store the waker              S2 complete: Reading -> Ready, take the waker
//!   P3 drop: Reading -> Over, take the item   S3 call the waker, outside of the lock
//!
//!   P4 submit: queue the read                 S4 rest: queue empty? note that it sleeps
//!   P5 asleep? note that it is awake, ring    S5 wait for a transfer or a ring
//!   P6 no server? start one                   S6 awake; take the queue
//!                                             S7 nothing outstanding: note that it ended
//! ```
//!
//! Each step is one critical section of a mutex. P2 and S2: the second of them sees the first, so
//! the last waker that was stored is called after the item is ready. P3 and S1: after P3 the server
//! finds no memory to write to. P4 and S4: a read that is queued before S4 keeps the server awake;
//! a later one rings, and a ring before S5 ends S5. P6 and S7 are the same for a server that ended.
//! `loom_async_reads.rs` checks these.

use crate::sync::Mutex;
use std::collections::VecDeque;
use std::task::{Poll, Waker};

/// State of one read, shared by its future and the server.
#[derive(Debug)]
pub(crate) struct Handover<T>(Mutex<Step<T>>);

#[derive(Debug)]
enum Step<T> {
    Reading {
        item: T,
        waker: Waker,
    },
    Ready(T),
    /// The item was taken.
    Over,
}

impl<T> Handover<T> {
    pub(crate) fn new(item: T, waker: Waker) -> Self {
        Self(Mutex::new(Step::Reading { item, waker }))
    }

    /// Takes the item if the read is complete (`None` if it was taken before); otherwise stores the
    /// waker (P1, P2).
    pub(crate) fn poll(&self, new_waker: &Waker) -> Poll<Option<T>> {
        // A waker is user code: it is cloned before the lock is taken, and dropped after that.
        let mut other = new_waker.clone();
        let mut step = self.0.lock();
        if let Step::Reading { waker, .. } = &mut *step {
            std::mem::swap(waker, &mut other);
            return Poll::Pending;
        }
        match std::mem::replace(&mut *step, Step::Over) {
            Step::Ready(item) => Poll::Ready(Some(item)),
            _ => Poll::Ready(None),
        }
    }

    /// Takes the item, complete or not: the read has no future any more (P3).
    pub(crate) fn abandon(&self) -> Option<T> {
        // The lock is released before the waker is dropped.
        let step = std::mem::replace(&mut *self.0.lock(), Step::Over);
        match step {
            Step::Reading { item, .. } | Step::Ready(item) => Some(item),
            Step::Over => None,
        }
    }

    /// Calls `work` with the item of a read that is not complete; `None` if it was abandoned (S1).
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        match &mut *self.0.lock() {
            Step::Reading { item, .. } => Some(work(item)),
            _ => None,
        }
    }

    /// Completes the read, and returns the waker to call (S2).
    pub(crate) fn complete(&self, end: impl FnOnce(&mut T)) -> Option<Waker> {
        let mut step = self.0.lock();
        match std::mem::replace(&mut *step, Step::Over) {
            Step::Reading { mut item, waker } => {
                end(&mut item);
                *step = Step::Ready(item);
                Some(waker)
            }
            other => {
                *step = other;
                None
            }
        }
    }
}

/// Reads that the server has not looked at, and the state of the server.
#[derive(Debug)]
pub(crate) struct Inbox<T>(Mutex<InboxState<T>>);

#[derive(Debug)]
struct InboxState<T> {
    queue: VecDeque<T>,
    outstanding: usize,
    server: Server,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    None,
    Awake,
    Asleep,
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Start,
    Ring,
    Nothing,
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Look at the queue.
    Work,
    /// Wait for a transfer or for the bell.
    Sleep,
    /// End: nothing is outstanding, and the next submission starts another server.
    End,
}

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        let (queue, outstanding, server) = (VecDeque::new(), 0, Server::None);
        Self(Mutex::new(InboxState { queue, outstanding, server }))
    }
}

impl<T> Inbox<T> {
    pub(crate) fn submit(&self, read: T) -> Call {
        let mut state = self.0.lock();
        state.queue.push_back(read);
        state.outstanding += 1;
        match std::mem::replace(&mut state.server, Server::Awake) {
            Server::None => Call::Start,
            Server::Asleep => Call::Ring,
            Server::Awake => Call::Nothing,
        }
    }

    /// Queues a read that was submitted before, unless nothing is outstanding: then it has ended.
    pub(crate) fn submit_again(&self, read: T) -> Call {
        let mut state = self.0.lock();
        if state.server == Server::None {
            return Call::Nothing;
        }
        state.queue.push_back(read);
        let before = std::mem::replace(&mut state.server, Server::Awake);
        if before == Server::Asleep { Call::Ring } else { Call::Nothing }
    }

    /// Takes the queued reads (S6).
    pub(crate) fn take(&self) -> VecDeque<T> {
        let mut state = self.0.lock();
        state.server = Server::Awake;
        std::mem::take(&mut state.queue)
    }

    /// Notes that `ended` reads have ended, and that the server sleeps or ends, unless reads are
    /// queued (S4, S7).
    pub(crate) fn rest(&self, ended: usize) -> Rest {
        let mut state = self.0.lock();
        state.outstanding -= ended;
        if !state.queue.is_empty() {
            return Rest::Work;
        }
        let is_over = state.outstanding == 0;
        state.server = if is_over { Server::None } else { Server::Asleep };
        if is_over { Rest::End } else { Rest::Sleep }
    }

    /// Takes the queued reads of a server that did not start or has died; all others are forgotten.
    pub(crate) fn give_up(&self) -> VecDeque<T> {
        let mut state = self.0.lock();
        (state.outstanding, state.server) = (0, Server::None);
        std::mem::take(&mut state.queue)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::{Arc, Weak};
    use std::task::Wake;

    /// A waker whose drop abandons the read, as that of a task which owns the future does.
    struct Owner(Weak<Handover<u32>>);

    impl Wake for Owner {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            if let Some(handover) = self.0.upgrade() {
                handover.abandon();
            }
        }
    }

    fn owned() -> Arc<Handover<u32>> {
        Arc::new_cyclic(|this| Handover::new(7, Waker::from(Arc::new(Owner(Weak::clone(this))))))
    }

    #[test]
    fn a_waker_that_is_replaced_may_drop_the_future() {
        let handover = owned();
        assert_eq!(handover.poll(Waker::noop()), Poll::Pending);
        assert_eq!(handover.poll(Waker::noop()), Poll::Ready(None));
    }

    #[test]
    fn the_waker_of_an_abandoned_read_may_drop_the_future() {
        assert_eq!(owned().abandon(), Some(7));
    }
}
