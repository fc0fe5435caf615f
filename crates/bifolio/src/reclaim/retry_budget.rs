//! How long a call waits for memory: rounds, sweeps, pauses, and the deadline.
//!
//! One public call has one deadline, however many things it waits for one after the other (a page
//! of a table, slots, frames, room among what is dirty), and however often it tries. The clock is
//! kept by thread: it starts with the first sweep that frees nothing, and starts anew when the call
//! has its page ([`CallScope::note_page`]) or is over. [`CallScope`] marks how far a call reaches.
//! A thread that waits outside of any has a deadline for each [`RetryBudget`].

use super::scan::ScanCounts;
use super::{Reclaim, SWEEPS_MAX};
use crate::sync::{MutexGuard, Ordering};
use std::cell::Cell;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

/// Rounds that free something, which is gone when the caller looks, after which it waits.
const ROUNDS_MAX: u32 = 100;
/// The first pause between sweeps without a success: readers hold a batch for less.
pub(super) const SWEEP_PAUSE: Duration = Duration::from_millis(1);
/// The pauses double up to this one, so that all together they take about 0.1 s: a thread that has
/// lost its CPU on a machine with ten times as many at work gets it back in that time.
const SWEEP_PAUSE_MAX: Duration = Duration::from_millis(16);

thread_local! {
    /// Scopes of this thread that have begun and not ended.
    static SCOPES: Cell<usize> = const { Cell::new(0) };
    /// When this thread's call began to wait for memory.
    static WAITING_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// A call that may wait for memory several times, with one deadline. An inner scope belongs to the
/// outer one.
#[derive(Debug)]
#[must_use]
pub(crate) struct CallScope {
    /// It is its thread's.
    _not_send: PhantomData<*const ()>,
}

impl CallScope {
    /// Begins a call, or a part of the one that has begun on this thread.
    pub(crate) fn begin() -> Self {
        SCOPES.set(SCOPES.get() + 1);
        Self { _not_send: PhantomData }
    }

    /// The call has a page that it waited for: its next one has the whole time again.
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
    /// Bytes that it wants, in one piece.
    pub(super) wanted_bytes: u64,
    rounds: u32,
    pub(super) futile_sweeps: u32,
    /// Of those, the last ones, which found nobody at work.
    idle_sweeps: u32,
    wait_max: Duration,
    /// Write-outs that had ended when the last round began.
    pub(super) ended: u64,
    /// Rounds of the swapper that had begun before this one came.
    pub(super) swap_rounds: u64,
    /// Whether it may write to the swap itself.
    pub(super) may_swap: bool,
    /// Once the bound stands until this is over.
    pub(super) standing: Option<MutexGuard<'r, ()>>,
    /// Changes of the bound before it.
    pub(super) rebounds: u64,
    scope: CallScope,
}

impl RetryBudget<'_> {
    /// A wait for `wanted_bytes`, by a caller that has found that there are none. Takes locks that
    /// all threads share.
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

    /// A round for so many pages, which were not to be had when it was over.
    pub(super) fn note_round(&mut self, counts: ScanCounts, pages: u64) -> ScanCounts {
        self.rounds += 1;
        if self.rounds <= ROUNDS_MAX {
            return counts;
        }
        // Others are faster, again and again: we wait for them.
        ScanCounts { reclaimed_pages: 0, busy_pages: counts.busy_pages.max(pages), ..counts }
    }

    /// Something was freed, for this call or for others: sweeps are counted anew. The deadline
    /// stands.
    pub(super) fn note_freed(&mut self) {
        self.futile_sweeps = 0;
        self.idle_sweeps = 0;
    }

    /// The swap has taken pages for a writer that waits for that: the time counts anew.
    pub(super) fn note_swapped(&mut self) {
        self.note_freed();
        self.scope.note_page();
    }

    /// A sweep has found nothing to free; whether there is no hope that the next one does. Where
    /// somebody was at work with what it met (`is_busy`) there is.
    pub(super) fn is_hopeless(&mut self, is_busy: bool) -> bool {
        self.idle_sweeps = if is_busy { 0 } else { self.idle_sweeps + 1 };
        self.idle_sweeps >= SWEEPS_MAX
    }

    /// How long to wait for those who have references for the moment.
    pub(super) fn sweep_pause(&self) -> Duration {
        let doublings = self.futile_sweeps.saturating_sub(1).min(8);
        (SWEEP_PAUSE * (1 << doublings)).min(SWEEP_PAUSE_MAX)
    }

    /// Returns `true` if the call's deadline has passed. The first question starts the clock.
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
        assert!(second.is_over(), "what was freed was not the call's page");
        call.note_page();
        assert!(!second.is_over());
        WAITING_SINCE.set(Instant::now().checked_sub(2 * MINUTE));
        drop((second, call));
        assert!(!budget(MINUTE).is_over(), "the next call has its own time");
        assert!(!budget(MINUTE).is_over());
    }

    #[test]
    fn only_sweeps_in_a_row_that_find_nobody_are_hopeless() {
        let mut budget = budget(Duration::MAX);
        assert!((0..3 * SWEEPS_MAX).all(|_| !budget.is_hopeless(true)));
        assert!((1..SWEEPS_MAX).all(|_| !budget.is_hopeless(false)));
        assert!(!budget.is_hopeless(true), "somebody was at work again");
        assert!((1..SWEEPS_MAX).all(|_| !budget.is_hopeless(false)));
        assert!(budget.is_hopeless(false));
    }
}
