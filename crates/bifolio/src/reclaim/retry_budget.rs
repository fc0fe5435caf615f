//! The budget of a wait for memory or the swap: what counts as progress, the sweeps without any,
//! and the deadline.
//!
//! A public call has one deadline, whatever it waits for in sequence. The clock is kept per thread:
//! it starts with the first sweep that frees nothing, and restarts when the call has got its page
//! ([`CallScope::note_page`]) or has ended. A thread that waits outside of any scope has a deadline
//! for each [`RetryBudget`].

use super::outcome::ScanCounts;
use super::{CallScope, IS_HASTY, Reclaim, SWEEPS_MAX, WAITING_SINCE};
use crate::inode::Inode;
use crate::sync::{MutexGuard, Ordering};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of rounds whose freed frames were taken by other threads, after which the caller waits.
const ROUNDS_MAX: u32 = 100;

/// The end of a wait, and so what counts as progress.
#[derive(Clone, Debug)]
pub(super) enum Goal<'r> {
    /// Memory: a round has freed some, for this thread or others.
    Memory,
    /// Room for one more dirty folio of a memory file, of which `bytes` are to be written: the swap
    /// has taken pages since it had taken this number. Refused if the swap takes nothing.
    Swapped { inode: &'r Inode, bytes: Range<u64>, taken: u64 },
}

#[derive(Debug)]
pub(super) struct RetryBudget<'r> {
    pub(super) wanted_bytes: u64,
    pub(super) goal: Goal<'r>,
    rounds: u32,
    pub(super) futile_sweeps: u32,
    /// Consecutive latest sweeps that found no folio busy.
    idle_sweeps: u32,
    pub(super) wait_max: Duration,
    pub(super) ended: u64,
    pub(super) swap_rounds: u64,
    pub(super) may_swap: bool,
    /// Keeps the bound from changing until the wait is over, once it is held.
    pub(super) standing: Option<MutexGuard<'r, ()>>,
    pub(super) rebounds: u64,
    pub(super) scope: CallScope,
}

impl RetryBudget<'_> {
    /// Begins a wait after an allocation has failed. Takes locks that all threads share.
    pub(super) fn new(reclaim: &Reclaim, wanted_bytes: u64) -> Self {
        Self {
            wanted_bytes,
            goal: Goal::Memory,
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

    /// Resets the counts of sweeps: memory was freed, for this call or others. The deadline stays.
    pub(super) fn note_freed(&mut self) {
        self.futile_sweeps = 0;
        self.idle_sweeps = 0;
    }

    /// Counts a sweep that freed nothing. Returns `true` if the next ones are hopeless, too. A
    /// sweep that found busy folios (`is_busy`) is not, unless the call is hasty and has swept
    /// often.
    pub(super) fn is_hopeless(&mut self, is_busy: bool) -> bool {
        self.idle_sweeps = if is_busy { 0 } else { self.idle_sweeps + 1 };
        if IS_HASTY.get() {
            return self.idle_sweeps > 0 || self.futile_sweeps >= SWEEPS_MAX;
        }
        self.idle_sweeps >= SWEEPS_MAX
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
            goal: Goal::Memory,
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
