//! Interleaved repetitions.
//!
//! All series of all cases run once, then all of them again: a machine that slows down then affects
//! every series, and the ratio of two medians is unaffected. The result of a trial depends on the
//! benchmark; [`interleave`] and [`fill`] are for trials with one rate and counts per operation.

use std::ops::Range;
use std::time::{Duration, Instant};

use indexmap::IndexMap;

use super::failures::Given;
use crate::error::Result;
use crate::progress::Progress;
use bifolio_report::statistics::{median, median_interval};
use bifolio_report::{Counts, Row};

/// The result of one trial of one series.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    /// Value in the unit of the row.
    pub(crate) value: f64,
    /// Number of operations; counts are divided by it.
    pub(crate) operations: u64,
    /// Counts during the trial.
    pub(crate) counts: Vec<(&'static str, u64)>,
}

/// One series of one case: the row of its median, and a function that runs it once.
pub(crate) struct Trial<'a, T> {
    pub(crate) row_index: usize,
    pub(crate) series: &'static str,
    pub(crate) run: Box<dyn Fn() -> Result<T> + 'a>,
}

impl<T> Trial<'_, T> {
    /// Returns its row, as a range.
    pub(crate) fn row(&self) -> Range<usize> {
        self.row_index..self.row_index + 1
    }
}

/// Number of repetitions of all trials.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) at_least: usize,
    pub(crate) at_most: usize,
    /// No round starts that would end later, estimated from the mean of those before.
    pub(crate) time: Duration,
}

impl Rounds {
    /// Exactly `rounds`.
    pub(crate) fn exactly(rounds: usize) -> Self {
        Self { at_least: rounds, at_most: rounds, time: Duration::ZERO }
    }

    /// At least `repetitions`, and up to ten times as many, as long as the time lasts.
    pub(crate) fn within(timed_seconds: f64, repetitions: usize) -> Self {
        let time = Duration::from_secs_f64(timed_seconds);
        Self { at_least: repetitions, at_most: 10 * repetitions, time }
    }

    fn one_more(&self, done: usize, elapsed: Duration) -> bool {
        let next_end = elapsed + elapsed.div_f64(done.max(1) as f64);
        done < self.at_least || (done < self.at_most && next_end <= self.time)
    }
}

/// A row is noisy if the confidence interval of a median is wider than this part of the median.
const SPREAD_MAX: f64 = 0.15;

/// Runs all `trials`, round after round, every second round backwards: neighbours stay neighbours,
/// and a steady drift favours none of them. Trials of noisy rows are then repeated, at most as
/// often again and for half of the time; `values` returns what a trial adds to its row, or rows.
/// A series that fails is not run again in its row. Returns the results of each trial, by round.
///
/// # Errors
/// A trial failed in a way that ends the run.
pub(crate) fn run_trials<T>(
    trials: &[Trial<'_, T>],
    rounds: Rounds,
    values: impl Fn(&Trial<'_, T>, &T) -> Vec<f64>,
    progress: &mut dyn Progress,
) -> Result<Vec<Given<T>>> {
    let mut given: Vec<Given<T>> = trials.iter().map(|_| Given::new()).collect();
    let start = Instant::now();
    let mut done = 0;
    while rounds.one_more(done, start.elapsed()) {
        take_round(trials, done % 2 == 1, |_| true, &mut given, progress)?;
        done += 1;
    }
    let measured = start.elapsed();
    let round = measured.div_f64(done.max(1) as f64);
    let has_time = || start.elapsed() + round <= measured + measured / 2;
    take_more(trials, done, values, has_time, &mut given, progress)?;
    Ok(given)
}

/// Runs once the trials of the rows for which `is_meant` returns `true`.
fn take_round<T>(
    trials: &[Trial<'_, T>],
    backwards: bool,
    is_meant: impl Fn(usize) -> bool,
    given: &mut [Given<T>],
    progress: &mut dyn Progress,
) -> Result<()> {
    for place in 0..trials.len() {
        let index = if backwards { trials.len() - 1 - place } else { place };
        if is_meant(trials[index].row_index) {
            if !given[index].has_failed() {
                given[index].add((trials[index].run)())?;
            }
            progress.advance(1);
        }
    }
    Ok(())
}

/// Runs the trials of rows that are still noisy, `rounds_max` times at most, while there is time.
fn take_more<T>(
    trials: &[Trial<'_, T>],
    rounds_max: usize,
    values: impl Fn(&Trial<'_, T>, &T) -> Vec<f64>,
    has_time: impl Fn() -> bool,
    given: &mut [Given<T>],
    progress: &mut dyn Progress,
) -> Result<()> {
    for round in 0..rounds_max {
        let is_noisy = |(trial, given): (&Trial<'_, T>, &Given<T>)| {
            let results = given.results().iter();
            let rounds: Vec<Vec<f64>> = results.map(|result| values(trial, result)).collect();
            let columns = rounds.first().map_or(0, Vec::len);
            let noisy = |column| is_noisy(&rounds.iter().map(|v| v[column]).collect::<Vec<_>>());
            (0..columns).any(noisy).then_some(trial.row_index)
        };
        let noisy: Vec<usize> = trials.iter().zip(given.iter()).filter_map(is_noisy).collect();
        if noisy.is_empty() || !has_time() {
            break;
        }
        take_round(trials, round % 2 == 1, |row| noisy.contains(&row), given, progress)?;
    }
    Ok(())
}

fn is_noisy(values: &[f64]) -> bool {
    let [low, high] = median_interval(values);
    high - low > SPREAD_MAX * median(values)
}

/// Runs each trial `repetitions` times and fills in `rows`. Returns the number of operations.
pub(crate) fn interleave(
    trials: &[Trial<'_, Sample>],
    repetitions: usize,
    rows: &mut [Row],
    progress: &mut dyn Progress,
) -> Result<u64> {
    let value = |_: &Trial<'_, _>, sample: &Sample| vec![sample.value];
    let given = run_trials(trials, Rounds::exactly(repetitions), value, progress)?;
    let mut operations = 0;
    for (trial, given) in trials.iter().zip(&given) {
        let Some(samples) = given.or_fail(rows, trial.row(), trial.series) else { continue };
        fill(&mut rows[trial.row_index], trial.series, samples, "op");
        operations += samples.iter().map(|sample| sample.operations).sum::<u64>();
    }
    Ok(operations)
}

/// Writes the trials of `series` into `row`; `operation` names the unit that counts are divided by.
pub(crate) fn fill(row: &mut Row, series: &'static str, samples: &[Sample], operation: &str) {
    let values: Vec<f64> = samples.iter().map(|sample| sample.value).collect();
    row.add(series, values, counts_per_operation(samples, operation));
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
    use crate::error::Error;
    use crate::progress::Silent;
    use bifolio_report::Case;

    #[test]
    fn series_alternate_and_medians_land_in_their_rows() {
        let order = RefCell::new(Vec::new());
        let trial = |row_index, series: &'static str| {
            let order = &order;
            let run = move || {
                order.borrow_mut().push((row_index, series));
                // Too steady for more than three rounds.
                let value = 100.0 + order.borrow().len() as f64 / 10.0;
                Ok(Sample { value, operations: 10, counts: vec![("syscalls", 5)] })
            };
            Trial { row_index, series, run: Box::new(run) }
        };
        let trials = [trial(0, "a"), trial(0, "b"), trial(1, "a")];
        let mut rows = [Row::new(Case::new(), "ops/s"), Row::new(Case::new(), "ops/s")];
        let operations = interleave(&trials, 3, &mut rows, &mut Silent).unwrap();

        assert_eq!(operations, 90);
        assert_eq!(order.borrow()[..5], [(0, "a"), (0, "b"), (1, "a"), (1, "a"), (0, "b")]);
        assert_eq!(rows[0].series["a"], 100.6, "of 100.1, 100.6, 100.7");
        assert_eq!(rows[1].spread["a"], [100.3, 100.9]);
        assert_eq!(rows[0].repetitions["a"], [100.1, 100.6, 100.7]);
        assert_eq!(rows[0].counts["a"]["syscalls_per_op"], 0.5);
        assert!(!rows[1].series.contains_key("b"));
    }

    #[test]
    fn a_series_that_fails_is_not_run_again_and_stops_no_other() {
        let runs = RefCell::new(0);
        let dies = || {
            *runs.borrow_mut() += 1;
            if *runs.borrow() == 1 {
                Ok(Sample::default())
            } else {
                Err(Error::Killed { attempts: 2 })
            }
        };
        let lives = || Ok(Sample { value: 1.0, operations: 1, counts: Vec::new() });
        let trials = [
            Trial { row_index: 0, series: "dies", run: Box::new(dies) },
            Trial { row_index: 0, series: "lives", run: Box::new(lives) },
        ];
        let mut rows = [Row::new(Case::new(), "ops/s")];
        assert_eq!(interleave(&trials, 5, &mut rows, &mut Silent).unwrap(), 5);
        assert_eq!(*runs.borrow(), 2);
        assert_eq!(rows[0].word("dies"), "killed");
        assert!(!rows[0].series.contains_key("dies"));
        assert_eq!(rows[0].repetitions["lives"], [1.0; 5]);
    }

    /// Runs trials of rows 0 and 1, the first of which varies during the first `noisy` runs.
    /// Returns the number of further runs of each.
    fn more_trials(noisy: usize, has_time: bool) -> [usize; 3] {
        let runs = RefCell::new(0_usize);
        let trial = |row_index, series, is_steady: bool| {
            let runs = &runs;
            let run = move || {
                *runs.borrow_mut() += 1;
                let run = *runs.borrow();
                let is_outlier = !is_steady && run <= noisy && run % 2 == 1;
                Ok(if is_outlier { 2.0 } else { 1.0 })
            };
            Trial { row_index, series, run: Box::new(run) }
        };
        let trials =
            [trial(0, "noisy", false), trial(0, "beside it", true), trial(1, "other", true)];
        let mut given = [vec![1.0, 2.0, 1.0], vec![1.0; 3], vec![1.0; 3]].map(|results| {
            let mut given = Given::new();
            results.into_iter().for_each(|result| given.add(Ok(result)).unwrap());
            given
        });
        let values = |_: &Trial<'_, f64>, value: &f64| vec![*value];
        take_more(&trials, 20, values, || has_time, &mut given, &mut Silent).unwrap();
        given.map(|given| given.results().len() - 3)
    }

    #[test]
    fn noisy_rows_get_more_trials_until_they_are_steady() {
        // With one outlier the interval of eight values is without it.
        assert_eq!(more_trials(0, true), [5, 5, 0]);
        let [noisy, beside, other] = more_trials(4, true);
        assert!(noisy > 5 && noisy < 20 && beside == noisy && other == 0, "{noisy}");
        assert_eq!(more_trials(usize::MAX, true)[0], 20, "never steady");
        assert_eq!(more_trials(usize::MAX, false), [0; 3]);
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
