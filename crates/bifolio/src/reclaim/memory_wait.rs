//! A wait for memory or for the swap: what counts as progress, when more rounds are hopeless, and
//! its error. The loop, and the clock of the call, are in `sync/round_wait.rs`; the rounds are in
//! `wait.rs` and `swapper.rs`.

use super::outcome::ScanCounts;
use super::{IS_HASTY, Reclaim, SWEEP_PAUSE, SWEEPS_MAX};
use crate::error::Error;
use crate::inode::Inode;
use crate::stats::Counter;
use crate::sync::{MutexGuard, Ordering, RoundWait, WaitBudget, WaitProgress, blocking};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Number of rounds whose freed frames were taken by other threads, after which the caller waits.
const ROUNDS_MAX: u32 = 100;
/// Number of refused rounds of the swapper before a call gets an error: the next round may write
/// other folios.
const SWAP_ROUNDS_MAX: u64 = SWEEPS_MAX as u64;
/// Upper bound on the pauses, which double each time and add up to about 0.1 s. A thread that has
/// lost its CPU on a machine with ten times as many runnable threads runs again within that time.
const SWEEP_PAUSE_MAX: Duration = Duration::from_millis(16);

/// The end of a wait, and so what counts as progress.
#[derive(Clone, Debug)]
pub(super) enum Goal<'r> {
    /// Memory: a round has freed some, for this thread or others.
    Memory,
    /// Room for one more dirty folio of a memory file, of which `bytes` are to be written: the swap
    /// has taken pages since it had taken this number. Refused if the swap takes nothing.
    Swapped { inode: &'r Inode, bytes: Range<u64>, taken: u64 },
}

/// A wait of one thread for memory or for the swap. The thread holds no folio lock.
///
/// It fails with an error if the swap accepts nothing, or nothing in time; or if all folios that
/// might be evicted are pinned, or busy for too long.
#[derive(Debug)]
pub(super) struct MemoryWait<'r> {
    reclaim: &'r Reclaim,
    wanted_bytes: u64,
    pub(super) goal: Goal<'r>,
    rounds: u32,
    pub(super) sweeps: FutileSweeps,
    pub(super) budget: WaitBudget,
    /// Write-outs that had ended when the thread last looked.
    ended: u64,
    swap_rounds: u64,
    /// Set if the thread may run a round of the swapper itself.
    pub(super) may_swap: bool,
    /// Set if the last round found that the swap refuses pages.
    is_refused: bool,
    /// Keeps the bound from changing until the wait is over, once it is held.
    pub(super) standing: Option<MutexGuard<'r, ()>>,
    rebounds: u64,
}

impl<'r> MemoryWait<'r> {
    /// Begins a wait after an allocation has failed. Takes locks that all threads share.
    pub(super) fn new(reclaim: &'r Reclaim, wanted_bytes: u64) -> Self {
        debug_assert!(wanted_bytes > 0, "a wait for nothing");
        Self {
            reclaim,
            wanted_bytes,
            goal: Goal::Memory,
            rounds: 0,
            sweeps: FutileSweeps::default(),
            budget: WaitBudget::of_call(reclaim.wait_max),
            ended: reclaim.flusher.ended(),
            swap_rounds: reclaim.swapper.rounds(),
            may_swap: false,
            is_refused: false,
            standing: None,
            // Acquire: pairs with the Release in `Reclaim::change_bound`.
            rebounds: reclaim.rebounds.load(Ordering::Acquire),
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

    fn is_for_memory(&self) -> bool {
        matches!(self.goal, Goal::Memory)
    }

    /// Counts sweeps from zero, because memory was freed, for this call or others.
    fn note_freed(&mut self) {
        self.sweeps = FutileSweeps::default();
        self.ended = self.reclaim.flusher.ended();
    }

    /// Returns `true` if the swap, which the thread waits for, has taken pages: other threads may
    /// have used the room already.
    fn has_swapped(&mut self) -> bool {
        let Goal::Swapped { taken, .. } = &mut self.goal else { return false };
        let before = *taken;
        *taken = self.reclaim.swap.as_ref().map_or(before, |swap| swap.answers().taken);
        *taken != before
    }

    /// Returns `true` if the bound was changed during an allocation that found no memory, since
    /// that change may have failed. Waits for a change of the bound in progress, for as long as a
    /// call may wait. On `true`, sweeps and time are counted from zero and the bound cannot change
    /// until the caller's wait is over.
    #[cold]
    fn was_rebound(&mut self) -> bool {
        if self.standing.is_some() {
            return false;
        }
        blocking::check("a change of the bound");
        let begun = Instant::now();
        let reclaim = self.reclaim;
        let standing = loop {
            if let Some(standing) = reclaim.rebounding.try_lock() {
                break standing;
            }
            if begun.elapsed() > reclaim.wait_max {
                return false;
            }
            std::thread::sleep(SWEEP_PAUSE);
        };
        let anew = Self::new(reclaim, self.wanted_bytes);
        if anew.rebounds == self.rebounds {
            return false;
        }
        let (goal, may_swap) = (self.goal.clone(), self.may_swap);
        *self = Self { goal, may_swap, standing: Some(standing), ..anew };
        self.budget.restart();
        true
    }
}

impl RoundWait for MemoryWait<'_> {
    type Found = ScanCounts;
    type Error = Error;

    fn budget(&mut self) -> &mut WaitBudget {
        &mut self.budget
    }

    /// For memory, freed pages are progress, even those that other threads have taken; the deadline
    /// stays. For the swap, only what it has taken. Otherwise the thread helps the swapper.
    fn progress(&mut self, counts: &ScanCounts) -> WaitProgress {
        if self.is_for_memory() && counts.reclaimed_pages > 0 {
            self.note_freed();
            return WaitProgress::ForAnyThread;
        }
        self.sweeps.futile += 1;
        if self.may_swap {
            self.reclaim.help_swapper();
        }
        if !self.has_swapped() {
            return WaitProgress::None;
        }
        self.note_freed();
        self.swap_rounds = self.reclaim.swapper.rounds();
        WaitProgress::Own
    }

    fn is_hopeless(&mut self, counts: &mut ScanCounts) -> bool {
        let swapper = &self.reclaim.swapper;
        // Pages to be swapped out are busy, unless the swap accepts nothing.
        let swappable_pages = counts.unswapped_pages + counts.swapping_pages + swapper.pages();
        self.is_refused = swapper.has_trouble_after(self.swap_rounds + SWAP_ROUNDS_MAX);
        if self.is_refused {
            counts.unwritten_pages += swappable_pages;
        } else {
            counts.busy_pages += swappable_pages;
        }
        let is_hopeless = self.sweeps.are_hopeless(counts.busy_pages > 0);
        is_hopeless || self.is_refused && !self.is_for_memory()
    }

    fn fail(&mut self, counts: ScanCounts) -> Result<(), Error> {
        let reclaim = self.reclaim;
        if let Goal::Swapped { inode, bytes, .. } = &self.goal
            && (self.is_refused || self.budget.is_over())
        {
            let refusal = || reclaim.swap.as_ref()?.answers().last_refusal;
            let cause = reclaim.swapper.is_in_trouble().then(refusal).flatten();
            return Err(inode.unwritable(bytes.clone(), cause));
        }
        if self.was_rebound() { Ok(()) } else { Err(reclaim.full(counts, self.wanted_bytes)) }
    }

    fn pause(&mut self, counts: &ScanCounts) {
        let Reclaim { memory, flusher, .. } = self.reclaim;
        memory.counters.add(Counter::AllocationWait, u64::from(self.is_for_memory()));
        if counts.busy_pages > 0 {
            // Folios that the flusher cleans may be clean earlier; the wait is not for one device.
            flusher.wait_for_progress(self.ended, SWEEP_PAUSE);
        } else {
            // For threads that hold references briefly.
            let doublings = self.sweeps.futile.saturating_sub(1).min(8);
            std::thread::sleep((SWEEP_PAUSE * (1 << doublings)).min(SWEEP_PAUSE_MAX));
        }
        self.ended = flusher.ended();
    }
}

/// Sweeps that have freed nothing.
#[derive(Debug, Default)]
pub(super) struct FutileSweeps {
    /// Since memory was freed.
    pub(super) futile: u32,
    /// Consecutive latest ones that found no folio busy.
    idle: u32,
}

impl FutileSweeps {
    /// Counts a sweep that freed nothing. Returns `true` if the next ones are hopeless, too. A
    /// sweep that found busy folios (`is_busy`) is not, unless the call is hasty and has swept
    /// often.
    fn are_hopeless(&mut self, is_busy: bool) -> bool {
        self.idle = if is_busy { 0 } else { self.idle + 1 };
        if IS_HASTY.get() {
            return self.idle > 0 || self.futile >= SWEEPS_MAX;
        }
        self.idle >= SWEEPS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_consecutive_idle_sweeps_are_hopeless() {
        let mut sweeps = FutileSweeps::default();
        assert!((0..3 * SWEEPS_MAX).all(|_| !sweeps.are_hopeless(true)));
        assert!((1..SWEEPS_MAX).all(|_| !sweeps.are_hopeless(false)));
        assert!(!sweeps.are_hopeless(true), "a folio was busy again");
        assert!((1..SWEEPS_MAX).all(|_| !sweeps.are_hopeless(false)));
        assert!(sweeps.are_hopeless(false));
    }
}
