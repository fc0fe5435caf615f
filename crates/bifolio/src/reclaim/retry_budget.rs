//! Bounds the time that a call waits for memory: rounds, sweeps, pauses, and the deadline.
//!
//! One public call has one deadline, however many things it waits for in sequence (a table page,
//! slots, frames, the dirty limit), and however often it retries. The clock is kept per thread. It
//! starts with the first sweep that frees nothing, and restarts when the call has got its page
//! ([`CallScope::note_page`]) or has ended. [`CallScope`] marks the extent of a call. A thread that
//! waits outside of any scope has a deadline for each [`RetryBudget`].

use super::scan::ScanCounts;
use super::{Reclaim, SWEEPS_MAX};
use crate::sync::{MutexGuard, Ordering};
use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// Number of rounds whose freed frames were taken by other threads, after which the caller waits.
const ROUNDS_MAX: u32 = 100;
/// First pause between sweeps without success: readers hold a batch for less time.
pub(super) const SWEEP_PAUSE: Duration = Duration::from_millis(1);
/// Upper bound on the pauses, which double each time and add up to about 0.1 s. A thread that has
/// lost its CPU on a machine with ten times as many runnable threads runs again within that time.
const SWEEP_PAUSE_MAX: Duration = Duration::from_millis(16);

thread_local! {
    /// Number of scopes of this thread that have begun and not ended.
    static SCOPES: Cell<usize> = const { Cell::new(0) };
    /// Time at which this thread's call began to wait for memory.
    static WAITING_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// A call that may wait for memory several times, with one deadline. An inner scope is part of the
/// outer one.
#[derive(Debug)]
#[must_use]
pub(crate) struct CallScope {
    /// The scope belongs to its thread.
    _not_send: PhantomData<*const ()>,
}

impl CallScope {
    /// Begins a call, or a part of the call that has begun on this thread.
    pub(crate) fn begin() -> Self {
        SCOPES.set(SCOPES.get() + 1);
        Self { _not_send: PhantomData }
    }

    /// Restarts the clock: the call has got a page that it waited for.
    pub(crate) fn note_page(&self) {
        WAITING_SINCE.set(None);
    }
}

impl Drop for CallScope {
    fn drop(&mut self) {
        let outer_scopes = SCOPES.get() - 1;
        SCOPES.set(outer_scopes);
        if outer_scopes == 0 {
            WAITING_SINCE.set(None);
        }
    }
}

/// The state of a wait for memory.
#[derive(Debug)]
pub(super) struct RetryBudget<'r> {
    /// Bytes wanted, in one piece.
    pub(super) wanted_bytes: u64,
    rounds: u32,
    pub(super) futile_sweeps: u32,
    /// Consecutive latest sweeps that found no folio busy.
    idle_sweeps: u32,
    wait_max: Duration,
    /// Number of write-backs that had ended when the last round began.
    pub(super) ended: u64,
    /// Number of rounds of the swapper that had begun before this wait.
    pub(super) swap_rounds: u64,
    /// `true` if this thread may write to the swap itself.
    pub(super) may_swap: bool,
    /// Keeps the bound from changing until the wait is over, once it is held.
    pub(super) standing: Option<MutexGuard<'r, ()>>,
    /// Number of changes of the bound before this wait.
    pub(super) rebounds: u64,
    scope: CallScope,
}

impl RetryBudget<'_> {
    /// Begins a wait for `wanted_bytes`, after an allocation has failed. Takes locks that all
    /// threads share.
    pub(super) fn new(reclaim: &Reclaim, wanted_bytes: u64) -> Self {
        Self {
            wanted_bytes,
            rounds: 0,
            futile_sweeps: 0,
            idle_sweeps: 0,
            wait_max: reclaim.wait_max,
            ended: reclaim.flusher.ended(),
            swap_rounds: reclaim.swapper.rounds(),
            may_swap: false,
            standing: None,
            // Acquire: pairs with the Release in `Reclaim::set_bound`.
            rebounds: reclaim.rebounds.load(Ordering::Acquire),
            scope: CallScope::begin(),
        }
    }

    /// Counts a round for `pages` pages that were not available when it was over.
    pub(super) fn note_round(&mut self, counts: ScanCounts, pages: u64) -> ScanCounts {
        self.rounds += 1;
        if self.rounds <= ROUNDS_MAX {
            return counts;
        }
        // Other threads have taken the frames too often: wait for them.
        ScanCounts { reclaimed_pages: 0, busy_pages: counts.busy_pages.max(pages), ..counts }
    }

    /// Resets the count of sweeps, because memory was freed, for this call or others. The deadline
    /// stays.
    pub(super) fn note_freed(&mut self) {
        self.futile_sweeps = 0;
        self.idle_sweeps = 0;
    }

    /// Restarts the clock of a writer that waits for the swap, because the swap has accepted pages.
    pub(super) fn note_swapped(&mut self) {
        self.note_freed();
        self.scope.note_page();
    }

    /// Counts a sweep that freed nothing. Returns `true` if the next ones are hopeless, too. A
    /// sweep that found busy folios (`is_busy`) is not.
    pub(super) fn is_hopeless(&mut self, is_busy: bool) -> bool {
        self.idle_sweeps = if is_busy { 0 } else { self.idle_sweeps + 1 };
        self.idle_sweeps >= SWEEPS_MAX
    }

    /// Returns the next pause, for threads that hold references briefly.
    pub(super) fn sweep_pause(&self) -> Duration {
        let doublings = self.futile_sweeps.saturating_sub(1).min(8);
        (SWEEP_PAUSE * (1 << doublings)).min(SWEEP_PAUSE_MAX)
    }

    /// Returns `true` if the call's deadline has passed. The first call starts the clock.
    pub(super) fn is_over(&self) -> bool {
        let since = WAITING_SINCE.get().unwrap_or_else(Instant::now);
        WAITING_SINCE.set(Some(since));
        since.elapsed() > self.wait_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(wait_max: Duration) -> RetryBudget<'static> {
        RetryBudget {
            wanted_bytes: 4096,
            rounds: 0,
            futile_sweeps: 0,
            idle_sweeps: 0,
            wait_max,
            ended: 0,
            swap_rounds: 0,
            may_swap: false,
            standing: None,
            rebounds: 0,
            scope: CallScope::begin(),
        }
    }

    #[test]
    fn all_waits_of_a_call_share_one_deadline() {
        const MINUTE: Duration = Duration::from_secs(60);
        let call = CallScope::begin();
        assert!(!budget(MINUTE).is_over());
        WAITING_SINCE.set(Instant::now().checked_sub(2 * MINUTE));
        let mut second = budget(MINUTE);
        assert!(second.is_over(), "a second wait has the deadline of the first");
        second.note_freed();
        assert!(second.is_over(), "the freed memory was not the call's page");
        call.note_page();
        assert!(!second.is_over());
        WAITING_SINCE.set(Instant::now().checked_sub(2 * MINUTE));
        drop((second, call));
        assert!(!budget(MINUTE).is_over(), "the next call has its own time");
        assert!(!budget(MINUTE).is_over());
    }

    #[test]
    fn only_consecutive_idle_sweeps_are_hopeless() {
        let mut budget = budget(Duration::MAX);
        assert!((0..3 * SWEEPS_MAX).all(|_| !budget.is_hopeless(true)));
        assert!((1..SWEEPS_MAX).all(|_| !budget.is_hopeless(false)));
        assert!(!budget.is_hopeless(true), "a folio was busy again");
        assert!((1..SWEEPS_MAX).all(|_| !budget.is_hopeless(false)));
        assert!(budget.is_hopeless(false));
    }
}
