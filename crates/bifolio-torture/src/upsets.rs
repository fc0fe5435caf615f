//! Cases of one thread and one file whose storage fails at the n-th call (`UpsetCase`), from random
//! bytes.
//!
//! The fuzz target of `fuzz/` searches for such bytes by coverage; here they are random, many per
//! second, without another toolchain. A failed case is reduced to fewer steps.

use crate::history::Violation;
use crate::watchdog;
use bifolio_testing::{UpsetCase, UpsetStep, UpsetTally, shrink};
use fastrand::Rng;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Maximum bytes of a case.
const BYTES_MAX: usize = 2400;
/// Time limit for the reduction of a failed case.
const SHRINK_TIME: Duration = Duration::from_secs(5);
const SHRINK_ATTEMPTS_MAX: usize = 1000;

/// The operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub cases: u64,
    pub steps: u64,
    /// Calls that were affected by faults.
    pub struck: u64,
    /// Operations that were refused.
    pub refused: u64,
}

impl Tally {
    /// Adds the work of another scene.
    pub fn add(&mut self, other: Self) {
        self.cases += other.cases;
        self.steps += other.steps;
        self.struck += other.struck;
        self.refused += other.refused;
    }
}

/// Runs cases until the time is over.
pub fn play(seed: u64, duration: Duration) -> Result<Tally, Violation> {
    let mut random = Rng::with_seed(seed);
    let (begun, mut tally) = (Instant::now(), Tally::default());
    while begun.elapsed() < duration {
        let mut bytes = vec![0; random.usize(..BYTES_MAX)];
        random.fill(&mut bytes);
        let case = UpsetCase::from_bytes(&bytes);
        let UpsetTally { steps, struck, refused } =
            check(&case).map_err(|problem| tell(&case, &problem))?;
        tally.add(Tally { cases: 1, steps, struck, refused });
        watchdog::progress();
    }
    Ok(tally)
}

fn check(case: &UpsetCase) -> Result<UpsetTally, String> {
    catch_unwind(AssertUnwindSafe(|| case.check())).unwrap_or_else(|_| Err("a panic".to_owned()))
}

/// Returns the failure, with as few steps as possible.
fn tell(case: &UpsetCase, problem: &str) -> Violation {
    let begun = Instant::now();
    let fails = |steps: &[UpsetStep]| {
        watchdog::progress();
        let is_over = begun.elapsed() > SHRINK_TIME;
        (!is_over).then(|| check(&case.with_steps(steps)).err()).flatten()
    };
    let shorter = shrink(case.steps(), SHRINK_ATTEMPTS_MAX, fails);
    let (steps, again) = match shorter {
        Some((steps, again)) => (steps, again),
        None => (case.steps().to_vec(), "not again".to_owned()),
    };
    let mut told = format!("{problem}\nwith fewer steps: {again}\n");
    let _ = writeln!(told, "{:?}", case.with_steps(&[]));
    for (number, step) in steps.iter().enumerate() {
        let _ = writeln!(told, "  {number}: {step:?}");
    }
    Violation(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_that_fails_is_told_with_few_steps() {
        let mut bytes = vec![0; 404];
        Rng::with_seed(3).fill(&mut bytes);
        let case = UpsetCase::from_bytes(&bytes);
        // No call can write there.
        let wrong = bifolio_testing::Op::Write { position_bytes: 1 << 62, length: 1, fill: 0 };
        let mut steps = case.steps().to_vec();
        steps.insert(steps.len() / 2, UpsetStep::Op(wrong));
        let case = case.with_steps(&steps);
        let problem = check(&case).unwrap_err();
        let Violation(told) = tell(&case, &problem);
        assert!(
            told.contains("  0: Op(Write { position_bytes: 4611") && !told.contains("  1: "),
            "{told}"
        );
    }
}
