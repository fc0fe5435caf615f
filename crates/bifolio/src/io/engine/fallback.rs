//! Transfers of a queue that no ring makes: the queue's thread and helpers make them with plain
//! calls.
//!
//! Used by `queue.rs`, which keeps the owners, and by the jobs that it offers to the workers.
//!
//! # Safety
//! Makes transfers for which `Queue::push` required IO-1.
#![allow(unsafe_code)]

use crate::io::transfer::{Answer, Transfer};
use crate::sync::{Condvar, Mutex};
use crate::sys::bell::Bell;
use std::collections::VecDeque;
use std::sync::Arc;

/// Transfers of one queue that threads make with plain calls: without a ring, and for backings that
/// must be called.
///
/// The queue's thread submits transfers; workers come as helpers, one per *ticket*, and take what
/// is left; while the queue's thread would otherwise wait, it takes them itself. So workers only
/// speed things up: a queue waits only for threads that work on one of its transfers, and makes
/// progress even if every worker is busy, or is the queue's own thread.
#[derive(Debug, Default)]
pub(super) struct FallbackQueue {
    state: Mutex<FallbackState>,
    finished: Condvar,
}

/// State of the helpers of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Helpers {
    /// At least one has taken a transfer.
    Working,
    /// Some were called, and none has arrived.
    Called,
    None,
}

#[derive(Debug, Default)]
struct FallbackState {
    submitted: VecDeque<(usize, Transfer)>,
    done: Vec<(usize, Answer)>,
    /// Helpers that were called and have not arrived yet.
    tickets: usize,
    /// Bell that helpers ring when they are done.
    bell: Option<Arc<Bell>>,
}

impl FallbackQueue {
    /// Submits a transfer; `token` is returned with its answer.
    pub(super) fn submit(&self, token: usize, transfer: Transfer) {
        self.state.lock().submitted.push_back((token, transfer));
    }

    /// Returns how many more helpers to call if the queue's thread takes `own` transfers itself.
    /// They count as called.
    pub(super) fn call_helpers(&self, own: usize) -> usize {
        let mut state = self.state.lock();
        let missing = state.submitted.len().saturating_sub(state.tickets + own);
        state.tickets += missing;
        missing
    }

    /// Does the work of a helper: at most one transfer.
    pub(super) fn help(&self) {
        let taken = {
            let mut state = self.state.lock();
            state.tickets -= 1;
            state.submitted.pop_front()
        };
        let Some((token, transfer)) = taken else { return };
        // SAFETY: `Queue::push` required IO-1; the queue waits for every transfer that was taken,
        // and keeps its owner until then.
        let answer = unsafe { transfer.run() };
        let bell = {
            let mut state = self.state.lock();
            state.done.push((token, answer));
            state.bell.clone()
        };
        self.finished.notify_one();
        if let Some(bell) = bell {
            bell.ring();
        }
    }

    /// Notes that a called helper will not arrive.
    pub(super) fn forget_helper(&self) {
        self.state.lock().tickets -= 1;
    }

    /// Lets helpers ring `bell` when they are done from now on.
    pub(super) fn ring_when_done(&self, bell: &Arc<Bell>) {
        self.state.lock().bell.get_or_insert_with(|| Arc::clone(bell));
    }

    /// Returns what helpers do for the `count` transfers that are submitted and not complete.
    pub(super) fn helpers_for(&self, count: usize) -> Helpers {
        let state = self.state.lock();
        if state.submitted.len() < count {
            Helpers::Working
        } else if state.tickets > 0 {
            Helpers::Called
        } else {
            Helpers::None
        }
    }

    /// Takes a submitted transfer.
    pub(super) fn take(&self) -> Option<(usize, Transfer)> {
        self.state.lock().submitted.pop_front()
    }

    /// Takes the answers of helpers.
    pub(super) fn take_done(&self) -> Vec<(usize, Answer)> {
        std::mem::take(&mut self.state.lock().done)
    }

    /// Waits until an answer exists. A helper must be at work.
    pub(super) fn wait_for_done(&self) {
        let mut state = self.state.lock();
        while state.done.is_empty() {
            self.finished.wait(&mut state);
        }
    }
}
