//! Repetitions that take turns.
//!
//! All series of all cases run once, then all of them again: a machine that slows down or a
//! neighbour that wakes up then touches every series, and a ratio of two medians stays a ratio.
//! The result of a turn is the benchmark's own; [`interleave`] and [`fill`] are for those whose
//! turns give one rate and counts for each operation.

use std::time::{Duration, Instant};

use indexmap::IndexMap;

use crate::error::Result;
use crate::progress::Progress;
use crate::report::{Counts, Row};
use crate::statistics::{median, spread};

/// The result of one turn of one series.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    /// In the unit of the row.
    pub(crate) value: f64,
    /// How many operations it took; counts are divided by them.
    pub(crate) operations: u64,
    /// The counts meanwhile.
    pub(crate) counts: Vec<(&'static str, u64)>,
}

/// One series of one case: where its median goes, and how to run it once.
pub(crate) struct Turn<'a, T> {
    pub(crate) row_index: usize,
    pub(crate) series: &'static str,
    pub(crate) run: Box<dyn Fn() -> Result<T> + 'a>,
}

/// How often all turns are taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) at_least: usize,
    pub(crate) at_most: usize,
    /// No round starts that would end later, judged by the mean of those before.
    pub(crate) time: Duration,
}

impl Rounds {
    /// Exactly so many.
    pub(crate) fn exactly(rounds: usize) -> Self {
        Self { at_least: rounds, at_most: rounds, time: Duration::ZERO }
    }

    /// At least `repetitions`, and as many more, up to ten times that, as fit into the time.
    pub(crate) fn within(timed_seconds: f64, repetitions: usize) -> Self {
        let time = Duration::from_secs_f64(timed_seconds);
        Self { at_least: repetitions, at_most: 10 * repetitions, time }
    }

    fn one_more(&self, done: usize, elapsed: Duration) -> bool {
        let next_end = elapsed + elapsed.div_f64(done.max(1) as f64);
        done < self.at_least || (done < self.at_most && next_end <= self.time)
    }
}

/// Runs all `turns`, round after round, every second round backwards: neighbours stay neighbours,
/// and a steady drift favours none of them. Answers what each turn gave, by round.
pub(crate) fn take_turns<T>(
    turns: &[Turn<'_, T>],
    rounds: Rounds,
    progress: &mut dyn Progress,
) -> Result<Vec<Vec<T>>> {
    let mut given: Vec<Vec<T>> = turns.iter().map(|_| Vec::new()).collect();
    let start = Instant::now();
    let mut done = 0;
    while rounds.one_more(done, start.elapsed()) {
        for place in 0..turns.len() {
            let index = if done % 2 == 0 { place } else { turns.len() - 1 - place };
            given[index].push((turns[index].run)()?);
            progress.advance(1);
        }
        done += 1;
    }
    Ok(given)
}

/// Takes `turns` `repetitions` times and fills in `rows`. Answers all operations.
pub(crate) fn interleave(
    turns: &[Turn<'_, Sample>],
    repetitions: usize,
    rows: &mut [Row],
    progress: &mut dyn Progress,
) -> Result<u64> {
    let samples = take_turns(turns, Rounds::exactly(repetitions), progress)?;
    for (turn, samples) in turns.iter().zip(&samples) {
        fill(&mut rows[turn.row_index], turn.series, samples, "op");
    }
    Ok(samples.iter().flatten().map(|sample| sample.operations).sum())
}

/// Writes the turns of `series` into `row`; `operation` is what counts are divided by, in a word.
/// Answers every value.
pub(crate) fn fill(
    row: &mut Row,
    series: &'static str,
    samples: &[Sample],
    operation: &str,
) -> Vec<f64> {
    let values: Vec<f64> = samples.iter().map(|sample| sample.value).collect();
    row.series.insert(series, median(&values));
    row.spread.insert(series, spread(&values));
    row.counts.insert(series, counts_per_operation(samples, operation));
    values
}

fn counts_per_operation(samples: &[Sample], operation: &str) -> Counts {
    let operations: u64 = samples.iter().map(|sample| sample.operations).sum();
    let mut totals: IndexMap<&str, u64> = IndexMap::new();
    for (name, count) in samples.iter().flat_map(|sample| &sample.counts) {
        *totals.entry(name).or_default() += count;
    }
    let per_operation = |total| total as f64 / operations.max(1) as f64;
    let named = |(name, &total)| (format!("{name}_per_{operation}"), per_operation(total));
    totals.iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::progress::Silent;
    use crate::report::Case;

    #[test]
    fn series_take_turns_and_medians_land_in_their_rows() {
        let order = RefCell::new(Vec::new());
        let turn = |row_index, series: &'static str| {
            let order = &order;
            let run = move || {
                order.borrow_mut().push((row_index, series));
                let value = order.borrow().len() as f64;
                Ok(Sample { value, operations: 10, counts: vec![("syscalls", 5)] })
            };
            Turn { row_index, series, run: Box::new(run) }
        };
        let turns = [turn(0, "a"), turn(0, "b"), turn(1, "a")];
        let mut rows = [Row::new(Case::new(), "ops/s"), Row::new(Case::new(), "ops/s")];
        let operations = interleave(&turns, 3, &mut rows, &mut Silent).unwrap();

        assert_eq!(operations, 90);
        assert_eq!(order.borrow()[..5], [(0, "a"), (0, "b"), (1, "a"), (1, "a"), (0, "b")]);
        assert_eq!(rows[0].series["a"], 6.0, "of 1, 6, 7");
        assert_eq!(rows[1].spread["a"], [3.0, 9.0]);
        assert_eq!(rows[0].counts["a"]["syscalls_per_op"], 0.5);
        assert!(!rows[1].series.contains_key("b"));
    }

    #[test]
    fn rounds_go_on_while_one_more_fits_into_the_time() {
        let seconds = Duration::from_secs;
        let rounds = Rounds { at_least: 2, at_most: 5, time: seconds(10) };
        assert!(rounds.one_more(0, seconds(0)));
        assert!(rounds.one_more(1, seconds(60)), "fewer than at least");
        assert!(!rounds.one_more(2, seconds(7)), "the third would end after 10.5 seconds");
        assert!(rounds.one_more(2, seconds(6)));
        assert!(!rounds.one_more(5, seconds(1)), "enough");
        assert!(!Rounds::exactly(3).one_more(3, seconds(0)));
    }
}
