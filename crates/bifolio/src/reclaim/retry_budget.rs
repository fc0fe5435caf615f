//! How long an allocation tries: rounds, sweeps and pauses, and when it is over.

use super::scan::ScanCounts;
use super::{Reclaim, SWEEPS_MAX};
use crate::sync::{MutexGuard, Ordering};
use std::time::{Duration, Instant};

/// Rounds that free something, which is gone when the caller looks, after which it waits.
const ROUNDS_MAX: u32 = 100;
/// The first pause between sweeps without a success: readers hold a batch for less.
pub(super) const SWEEP_PAUSE: Duration = Duration::from_millis(1);
/// The pauses double up to this one, so that all together they take about 0.1 s: a thread that has
/// lost its CPU on a machine with ten times as many at work gets it back in that time.
const SWEEP_PAUSE_MAX: Duration = Duration::from_millis(16);

/// How long an allocation has tried in vain.
#[derive(Debug)]
pub(super) struct RetryBudget<'r> {
    /// Bytes that it wants, in one piece.
    pub(super) wanted_bytes: u64,
    rounds: u32,
    pub(super) futile_sweeps: u32,
    /// Of those, the last ones, which found nobody at work.
    idle_sweeps: u32,
    wait_max: Duration,
    since: Option<Instant>,
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
}

impl RetryBudget<'_> {
    pub(super) fn new(reclaim: &Reclaim, wanted_bytes: u64) -> Self {
        let (wait_max, ended) = (reclaim.wait_max, reclaim.flusher.ended());
        let swap_rounds = reclaim.swapper.rounds();
        Self {
            wanted_bytes,
            rounds: 0,
            futile_sweeps: 0,
            idle_sweeps: 0,
            wait_max,
            since: None,
            ended,
            swap_rounds,
            may_swap: false,
            standing: None,
            // Acquire: pairs with the Release in `Reclaim::set_bound`.
            rebounds: reclaim.rebounds.load(Ordering::Acquire),
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

    pub(super) fn note_progress(&mut self) {
        self.futile_sweeps = 0;
        self.idle_sweeps = 0;
        self.since = None;
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

    /// The clock starts with the first futile sweep since there was progress.
    pub(super) fn is_over(&mut self) -> bool {
        self.since.get_or_insert_with(Instant::now).elapsed() > self.wait_max
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
            since: None,
            ended: 0,
            swap_rounds: 0,
            may_swap: false,
            standing: None,
            rebounds: 0,
        }
    }

    #[test]
    fn the_time_without_progress_is_what_counts() {
        const MINUTE: Duration = Duration::from_secs(60);
        let mut budget = budget(MINUTE);
        assert!(!budget.is_over());
        budget.since = budget.since.and_then(|since| since.checked_sub(2 * MINUTE));
        assert!(budget.is_over());
        budget.note_progress();
        assert!(!budget.is_over());
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
