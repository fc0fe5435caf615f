//! Waits in rounds: the one loop of all waits for memory, for the swap and for write-outs
//! ([`wait_in_rounds`]), and their budget of time ([`WaitBudget`]).
//!
//! Called by `reclaim` ([`RoundWait`] is implemented by its `MemoryWait`) and `writeback`
//! (`WriteOutWait`). A round does something for the goal, or waits a moment for the threads that
//! do. One that does not reach the goal has one of four outcomes, in this order:
//!
//! 1. Progress: the next round begins at once.
//! 2. More rounds are hopeless: what is waited for refuses, or there is nothing to wait for.
//! 3. Without progress for too long.
//! 4. Neither: a pause, then the next round.
//!
//! A wait that fails, by 2 or 3, may find that the rules which it was judged by have changed
//! meanwhile (a bound): then it goes on.
//!
//! CLOCKS. A public call has one deadline for memory, whatever it waits for in sequence: its clock
//! is kept per thread, starts with the first round that achieves nothing, and restarts when the
//! call has got its page ([`CallScope::note_page`]) or has ended. A thread that waits outside of
//! any scope has a deadline for each wait. A wait for write-outs has a clock of its own, because
//! the device that it waits for is asked only now.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

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
    _not_send: PhantomData<*const ()>,
}

impl CallScope {
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

/// The time that a wait may last without progress.
#[derive(Debug)]
pub(crate) struct WaitBudget {
    stall_max: Duration,
    clock: WaitClock,
    /// Least amount that was left to do after a round.
    least_left: u64,
}

#[derive(Debug)]
enum WaitClock {
    OfCall(CallScope),
    OfWait { since: Instant },
}

impl WaitBudget {
    /// Returns a budget of `stall_max` since the calling thread's call last got a page.
    pub(crate) fn of_call(stall_max: Duration) -> Self {
        let clock = WaitClock::OfCall(CallScope::begin());
        Self { stall_max, clock, least_left: u64::MAX }
    }

    /// Returns a budget of `stall_max` since now, or since the last progress of this wait.
    pub(crate) fn of_wait(stall_max: Duration) -> Self {
        let clock = WaitClock::OfWait { since: Instant::now() };
        Self { stall_max, clock, least_left: u64::MAX }
    }

    /// Restarts the clock: the wait has come closer to its goal.
    pub(crate) fn restart(&mut self) {
        match &mut self.clock {
            WaitClock::OfCall(scope) => scope.note_page(),
            WaitClock::OfWait { since } => *since = Instant::now(),
        }
    }

    /// Notes the amount that is left to do, in any unit. Less than ever before is progress.
    pub(crate) fn note_left(&mut self, left: u64) {
        if left < self.least_left {
            self.least_left = left;
            self.restart();
        }
    }

    /// Restarts the clock for another goal, of which any amount may be left.
    pub(crate) fn begin_anew(&mut self) {
        self.least_left = u64::MAX;
        self.restart();
    }

    /// Returns `true` if there was no progress for too long. The first call starts the clock of a
    /// call.
    pub(crate) fn is_over(&self) -> bool {
        let since = match self.clock {
            WaitClock::OfWait { since } => since,
            WaitClock::OfCall(_) => {
                let since = WAITING_SINCE.get().unwrap_or_else(Instant::now);
                WAITING_SINCE.set(Some(since));
                since
            }
        };
        since.elapsed() > self.stall_max
    }
}

/// The effect of a round that did not reach the goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitProgress {
    None,
    /// Something was achieved, which other threads may have taken: the clock goes on.
    ForAnyThread,
    /// The goal is closer: the clock restarts.
    Own,
}

/// A wait in rounds: what counts as progress, what makes it hopeless, and its error.
pub(crate) trait RoundWait {
    /// Findings of a round that did not reach the goal.
    type Found;
    type Error;

    fn budget(&mut self) -> &mut WaitBudget;

    /// Returns the effect of the last round. Called once after each. May work for the goal.
    fn progress(&mut self, found: &Self::Found) -> WaitProgress;

    /// Returns `true` if more rounds are pointless. Called after a round without effect, once; may
    /// add the cause to what the round found.
    fn is_hopeless(&mut self, found: &mut Self::Found) -> bool;

    /// Ends the wait, which is hopeless or has lasted for too long. Returns `Ok` if it was judged
    /// by rules that have changed since: then it goes on. May block for such a change.
    fn fail(&mut self, found: Self::Found) -> Result<(), Self::Error>;

    /// Blocks for a moment, or until another thread may have changed something. A wait whose rounds
    /// do that needs no pause.
    fn pause(&mut self, _found: &Self::Found) {}
}

/// Runs rounds until one breaks with the result, or the wait fails. Blocks; the caller holds no
/// lock that a thread which is waited for needs.
///
/// # Errors
/// That of a round; that of [`RoundWait::fail`].
pub(crate) fn wait_in_rounds<W: RoundWait, T>(
    wait: &mut W,
    mut round: impl FnMut(&mut W) -> Result<ControlFlow<T, W::Found>, W::Error>,
) -> Result<T, W::Error> {
    loop {
        let mut found = match round(wait)? {
            ControlFlow::Break(done) => return Ok(done),
            ControlFlow::Continue(found) => found,
        };
        match wait.progress(&found) {
            WaitProgress::Own => wait.budget().restart(),
            WaitProgress::ForAnyThread => {}
            WaitProgress::None => {
                if wait.is_hopeless(&mut found) || wait.budget().is_over() {
                    wait.fail(found)?;
                } else {
                    wait.pause(&found);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn set_minutes_ago(minutes: u32) {
        WAITING_SINCE.set(Instant::now().checked_sub(minutes * MINUTE));
    }

    #[test]
    fn all_waits_of_a_call_share_one_deadline() {
        let call = CallScope::begin();
        assert!(!WaitBudget::of_call(MINUTE).is_over());
        set_minutes_ago(2);
        let second = WaitBudget::of_call(MINUTE);
        assert!(second.is_over(), "a second wait has the deadline of the first");
        assert!(!WaitBudget::of_wait(MINUTE).is_over(), "a wait with a clock of its own");
        call.note_page();
        assert!(!second.is_over());
        set_minutes_ago(2);
        drop((second, call));
        assert!(!WaitBudget::of_call(MINUTE).is_over(), "the next call has its own time");
        assert!(!WaitBudget::of_call(MINUTE).is_over());
    }

    #[test]
    fn only_less_than_ever_restarts_the_clock() {
        let call = CallScope::begin();
        let mut budget = WaitBudget::of_call(MINUTE);
        let mut is_over_after = |left| {
            set_minutes_ago(2);
            budget.note_left(left);
            budget.is_over()
        };
        assert!(!is_over_after(9) && is_over_after(9) && is_over_after(10) && !is_over_after(8));
        set_minutes_ago(2);
        budget.begin_anew();
        assert!(!budget.is_over());
        set_minutes_ago(2);
        budget.note_left(9);
        assert!(!budget.is_over(), "more than before, for another goal");
        drop(call);
    }

    /// A wait that says what it is told, and writes down what it is asked.
    struct Told {
        budget: WaitBudget,
        asked: Vec<&'static str>,
        is_hopeless: bool,
        changes: u32,
    }

    impl RoundWait for Told {
        type Found = WaitProgress;
        type Error = &'static str;

        fn budget(&mut self) -> &mut WaitBudget {
            &mut self.budget
        }

        fn progress(&mut self, found: &WaitProgress) -> WaitProgress {
            *found
        }

        fn is_hopeless(&mut self, _found: &mut WaitProgress) -> bool {
            self.asked.push("hopeless?");
            self.is_hopeless
        }

        fn fail(&mut self, _found: WaitProgress) -> Result<(), &'static str> {
            self.asked.push("fail");
            let is_changed = self.changes > 0;
            self.changes -= u32::from(is_changed);
            if is_changed { Ok(()) } else { Err("failed") }
        }

        fn pause(&mut self, _found: &WaitProgress) {
            self.asked.push("pause");
        }
    }

    fn told() -> Told {
        let budget = WaitBudget::of_wait(MINUTE);
        Told { budget, asked: Vec::new(), is_hopeless: false, changes: 0 }
    }

    fn told_long_ago() -> Told {
        let since = Instant::now().checked_sub(2 * MINUTE).unwrap();
        let budget = WaitBudget { clock: WaitClock::OfWait { since }, ..told().budget };
        Told { budget, ..told() }
    }

    /// Runs the rounds, of which the last breaks.
    fn run(wait: &mut Told, rounds: &[WaitProgress]) -> Result<usize, &'static str> {
        let mut run = 0;
        wait_in_rounds(wait, |_| {
            run += 1;
            Ok(rounds.get(run - 1).map_or(ControlFlow::Break(run), |it| ControlFlow::Continue(*it)))
        })
    }

    #[test]
    fn a_wait_pauses_only_without_progress_and_hope() {
        use WaitProgress::{ForAnyThread, None, Own};
        let mut wait = told();
        assert_eq!(run(&mut wait, &[]), Ok(1));
        assert_eq!(run(&mut wait, &[Own, ForAnyThread, Own]), Ok(4));
        assert!(wait.asked.is_empty(), "{:?}", wait.asked);
        assert_eq!(run(&mut wait, &[None, Own, None]), Ok(4));
        assert_eq!(wait.asked, ["hopeless?", "pause", "hopeless?", "pause"]);
        wait.asked.clear();
        wait.is_hopeless = true;
        assert_eq!(run(&mut wait, &[Own, None]), Err("failed"));
        assert_eq!(wait.asked, ["hopeless?", "fail"]);
    }

    #[test]
    fn a_wait_ends_late_but_for_rules_that_have_changed() {
        let mut wait = told_long_ago();
        wait.changes = 2;
        assert_eq!(run(&mut wait, &[WaitProgress::None; 2]), Ok(3));
        assert_eq!(run(&mut wait, &[WaitProgress::None; 2]), Err("failed"));
        assert_eq!(wait.asked, ["hopeless?", "fail"].repeat(3));
        // Progress of others does not help; progress of its own does.
        let mut wait = told_long_ago();
        let rounds = [WaitProgress::ForAnyThread, WaitProgress::None];
        assert_eq!(run(&mut wait, &rounds), Err("failed"));
        assert_eq!(run(&mut wait, &[WaitProgress::Own, WaitProgress::None]), Ok(3));
    }
}
