//! The one runner of all benchmarks: rows with their series, interleaved repetitions, the report.
//!
//! A benchmark lists its [`Rows`], each with the series that are measured in it; [`Run::measure`]
//! runs all series of all rows once, then all of them again. A machine that slows down then affects
//! every series, and the ratio of two medians is unaffected. Every second round runs backwards:
//! neighbours stay neighbours, and a steady drift favours none of them.
//!
//! A failure costs one series, never the run:
//!
//! | what fails | what it costs |
//! |---|---|
//! | a trial returns an error, or its process ends with one | the series of that row: `failed` |
//! | the process of a trial is killed, twice | the series of that row: `killed` |
//! | a series cannot be prepared, or its first attempt fails | the series: `skipped` |
//! | bytes are wrong, in this process or in a child | the run ends: no figure is valid |
//!
//! A series that failed has no figures in its row, not even of the trials before: those that
//! survive are the fast ones. A slow device is waited for.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bifolio_report::statistics::{median, median_interval};
use bifolio_report::{Case, Failure, Report, Row, with_causes};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::benchmark::Context;
use crate::config::{Config, Target};
use crate::error::{Error, Result};
use crate::harness::measured::{Measured, Unit, fill};
use crate::harness::reads::Way;
use crate::harness::workspace::Workspace;
use crate::harness::{child, pattern};
use crate::progress::Progress;

pub(crate) struct Run<'a> {
    pub(crate) config: &'a Config,
    pub(crate) workspace: &'a Workspace,
    pub(crate) children: Children<'a>,
    pub(crate) report: Report,
    progress: &'a mut (dyn Progress + 'a),
}

/// Starts child processes of one benchmark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Children<'a> {
    bench: &'static str,
    command: &'a [String],
}

impl Children<'_> {
    pub(crate) fn ask<A: DeserializeOwned>(&self, task: &impl Serialize) -> Result<A> {
        child::ask(self.command, self.bench, task)
    }
}

impl<'a> Run<'a> {
    pub(crate) fn new(
        bench: &'static str,
        context: &Context<'a>,
        report: Report,
        progress: &'a mut (dyn Progress + 'a),
    ) -> Self {
        let Context { config, workspace, .. } = *context;
        let children = Children { bench, command: &config.child_command };
        Self { config, workspace, children, report, progress }
    }

    pub(crate) fn start(&mut self, phase: &str, steps: u64) {
        self.progress.start(phase, steps);
    }

    pub(crate) fn step(&mut self) {
        self.progress.advance(1);
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.report.notes.push(note.into());
    }

    /// Creates the file `name` of the benchmark, filled with the pattern.
    pub(crate) fn make_file(&mut self, name: &str, size_bytes: u64) -> Result<PathBuf> {
        let path = self.workspace.path().join(name);
        self.progress.start(&format!("make {name}"), size_bytes);
        pattern::make_file(&path, size_bytes, &mut *self.progress)?;
        Ok(path)
    }

    /// Compares every byte of a file by every way that is to be measured, and removes the others.
    pub(crate) fn verify(&mut self, ways: &mut Vec<Way>, size_bytes: u64) -> Result<()> {
        ways.retain(|way| self.config.target.measures(way.series));
        self.start("compare every byte by every way", ways.len() as u64);
        for way in ways {
            self.report.verified_bytes += (way.verify)(size_bytes)?;
            self.step();
        }
        Ok(())
    }

    /// Returns the result of `attempt`; after an error, every one of `series` is skipped with the
    /// error as the reason.
    ///
    /// # Errors
    /// The error ends the run.
    pub(crate) fn attempt<T>(&mut self, series: &[&str], attempt: Result<T>) -> Result<Option<T>> {
        match attempt {
            Ok(given) => Ok(Some(given)),
            Err(error) => {
                self.report.skip(series, &failure(error)?.reason);
                Ok(None)
            }
        }
    }

    /// Returns those of `series` that are to be measured and whose first, short attempt succeeds:
    /// whether a child can run is known before anything is timed.
    pub(crate) fn try_every<T>(
        &mut self,
        series: impl Iterator<Item = &'static str>,
        attempt: impl Fn(&'static str) -> Result<T>,
    ) -> Result<Vec<&'static str>> {
        let target = self.config.target;
        let series: Vec<_> = series.filter(|series| target.measures(series)).collect();
        self.start("try every series", series.len() as u64);
        let mut can_run = Vec::new();
        for series in series {
            can_run.extend(self.attempt(&[series], attempt(series))?.map(|_| series));
            self.step();
        }
        Ok(can_run)
    }

    /// Returns a table without rows.
    pub(crate) fn rows<'b>(&self) -> Rows<'b> {
        let target = self.config.target;
        Rows { target, rows: Vec::new(), units: Vec::new(), trials: Vec::new() }
    }

    /// Measures all series of `rows`, whose trials get their parts of the time, and adds the rows
    /// to the report.
    pub(crate) fn measure(&mut self, phase: &str, rows: Rows<'_>, rounds: Rounds) -> Result<()> {
        let Rows { mut rows, units, trials, .. } = rows;
        self.progress.start(phase, (trials.len() * rounds.at_least) as u64);
        let given = run_trials(&trials, &units, rounds, &mut *self.progress)?;
        for (trial, given) in trials.iter().zip(&given) {
            let of = trial.rows.clone();
            let Some(results) = given.or_fail(&mut rows, of, trial.series) else { continue };
            for (part, row) in trial.rows.clone().enumerate() {
                let parts: Vec<&Measured> = results.iter().map(|parts| &parts[part]).collect();
                self.report.verified_bytes += parts.iter().map(|it| it.verified_bytes).sum::<u64>();
                fill(&mut rows[row], trial.series, &parts, units[row]);
            }
        }
        self.report.rows.extend(rows);
        Ok(())
    }
}

/// The table of a benchmark: rows, each with its series.
pub(crate) struct Rows<'b> {
    target: Target,
    rows: Vec<Row>,
    units: Vec<Unit>,
    trials: Vec<Trial<'b>>,
}

/// One series of one row, or of several that it fills at once.
struct Trial<'b> {
    rows: Range<usize>,
    series: &'static str,
    run: Box<dyn Fn(Duration) -> Result<Vec<Measured>> + 'b>,
}

impl<'b> Rows<'b> {
    /// Adds a row; the series that are added next are measured in it.
    pub(crate) fn row(&mut self, case: Case, unit: Unit) {
        self.rows.push(Row::new(case, unit.0));
        self.units.push(unit);
    }

    /// Adds a series to the last row, unless it is not to be measured.
    pub(crate) fn series(
        &mut self,
        series: &'static str,
        run: impl Fn(Duration) -> Result<Measured> + 'b,
    ) {
        self.series_of_rows(series, 1, move |duration| Ok(vec![run(duration)?]));
    }

    /// Adds a series to the last `count` rows, which each of its trials fills.
    pub(crate) fn series_of_rows(
        &mut self,
        series: &'static str,
        count: usize,
        run: impl Fn(Duration) -> Result<Vec<Measured>> + 'b,
    ) {
        let rows = self.rows.len() - count..self.rows.len();
        if self.target.measures(series) {
            self.trials.push(Trial { rows, series, run: Box::new(run) });
        }
    }

    pub(crate) fn trials(&self) -> usize {
        self.trials.len()
    }
}

/// Number of repetitions of all trials.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounds {
    pub(crate) at_least: usize,
    pub(crate) at_most: usize,
    /// No round starts that would end later, estimated from the mean of those before.
    pub(crate) time: Duration,
    /// Duration of a trial, for trials that end with their time.
    pub(crate) trial: Duration,
}

impl Rounds {
    /// Exactly `rounds`, with trials of that duration.
    pub(crate) fn exactly(rounds: usize, trial: Duration) -> Self {
        Self { at_least: rounds, at_most: rounds, time: Duration::ZERO, trial }
    }

    /// At least `repetitions`, and up to ten times as many, as long as the time lasts.
    pub(crate) fn within(timed_seconds: f64, repetitions: usize) -> Self {
        let time = Duration::from_secs_f64(timed_seconds);
        Self { at_least: repetitions, at_most: 10 * repetitions, time, trial: Duration::ZERO }
    }

    fn one_more(&self, done: usize, elapsed: Duration) -> bool {
        let next_end = elapsed + elapsed.div_f64(done.max(1) as f64);
        done < self.at_least || (done < self.at_most && next_end <= self.time)
    }
}

/// A row is noisy if the confidence interval of a median is wider than this part of the median.
const SPREAD_MAX: f64 = 0.15;

/// Runs all `trials`, round after round. Trials of noisy rows are then repeated, at most as often
/// again and for half of the time. A series that fails is not run again in its row. Returns the
/// results of each trial, by round.
///
/// # Errors
/// A trial failed in a way that ends the run.
fn run_trials(
    trials: &[Trial<'_>],
    units: &[Unit],
    rounds: Rounds,
    progress: &mut dyn Progress,
) -> Result<Vec<Given<Vec<Measured>>>> {
    let mut given: Vec<Given<Vec<Measured>>> = trials.iter().map(|_| Given::new()).collect();
    let mut take_round = |backwards: bool, meant: &[usize], given: &mut [Given<_>]| -> Result<()> {
        let all: Vec<usize> =
            if backwards { (0..trials.len()).rev().collect() } else { (0..trials.len()).collect() };
        for index in all {
            let trial = &trials[index];
            if meant.contains(&trial.rows.start) {
                if !given[index].has_failed() {
                    given[index].add((trial.run)(rounds.trial))?;
                }
                progress.advance(1);
            }
        }
        Ok(())
    };
    let (all, start) = ((0..units.len()).collect::<Vec<_>>(), Instant::now());
    let mut done = 0;
    while rounds.one_more(done, start.elapsed()) {
        take_round(done % 2 == 1, &all, &mut given)?;
        done += 1;
    }
    let measured = start.elapsed();
    let round = measured.div_f64(done.max(1) as f64);
    for more in 0..done {
        let noisy = noisy_rows(trials, units, &given);
        if noisy.is_empty() || start.elapsed() + round > measured + measured / 2 {
            break;
        }
        take_round(more % 2 == 1, &noisy, &mut given)?;
    }
    Ok(given)
}

/// Returns the first rows of the trials that are noisy in one of their rows.
fn noisy_rows(trials: &[Trial<'_>], units: &[Unit], given: &[Given<Vec<Measured>>]) -> Vec<usize> {
    let is_noisy = |(trial, given): &(&Trial<'_>, &Given<Vec<Measured>>)| {
        trial.rows.clone().enumerate().any(|(part, row)| {
            let results = given.results().iter();
            let values: Vec<f64> = results.map(|parts| (units[row].1)(&parts[part])).collect();
            let [low, high] = median_interval(&values);
            high - low > SPREAD_MAX * median(&values)
        })
    };
    trials.iter().zip(given).filter(is_noisy).map(|(trial, _)| trial.rows.start).collect()
}

/// Returns what is reported of `error`.
///
/// # Errors
/// The error ends the run.
fn failure(error: Error) -> Result<Failure> {
    match error {
        Error::WrongBytes { .. } => Err(error),
        error => Ok(Failure {
            killed: matches!(error, Error::Killed { .. }),
            reason: with_causes(&error),
        }),
    }
}

/// The results of the trials of one series in one row, or in several.
#[derive(Debug)]
pub struct Given<T> {
    results: Vec<T>,
    failure: Option<Failure>,
}

impl<T> Default for Given<T> {
    fn default() -> Self {
        Self { results: Vec::new(), failure: None }
    }
}

impl<T> Given<T> {
    /// Returns no results yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` if a trial failed: there are no results, and no trial is to follow.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Adds the result of a trial; after an error the series has failed.
    ///
    /// # Errors
    /// The error ends the run.
    pub fn add(&mut self, result: Result<T>) -> Result<()> {
        match result {
            Ok(result) => self.results.push(result),
            Err(error) => {
                self.failure = Some(failure(error)?);
                self.results.clear();
            }
        }
        Ok(())
    }

    /// Returns the results so far, in their order.
    pub fn results(&self) -> &[T] {
        &self.results
    }

    /// Returns the results for the rows `of` `series`; `None` if it failed, which the rows then
    /// show.
    pub fn or_fail(
        &self,
        rows: &mut [Row],
        of: Range<usize>,
        series: &'static str,
    ) -> Option<&[T]> {
        let Some(failure) = &self.failure else { return Some(&self.results) };
        for row in &mut rows[of] {
            row.failed.insert(series.into(), failure.clone());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use bifolio_report::Host;

    use super::*;
    use crate::config::ParameterSet;
    use crate::harness::measured::Per;
    use crate::progress::Silent;

    const UNIT: Unit = ("ops/s", Measured::rate);

    /// Measures rows to which `add` adds the series.
    fn measured<'b>(rounds: usize, add: impl FnOnce(&mut Rows<'b>)) -> Result<Report> {
        let config = Config::new(ParameterSet::Smoke, Vec::new());
        let workspace = Workspace::create(None, 0)?;
        let host = Host::default();
        let context = Context { config: &config, workspace: &workspace, host: host.clone() };
        let (report, mut silent) = (Report::new("b", &host, serde_json::Value::Null), Silent);
        let mut run = Run::new("b", &context, report, &mut silent);
        let mut rows = run.rows();
        add(&mut rows);
        run.measure("x", rows, Rounds::exactly(rounds, Duration::ZERO))?;
        Ok(run.report)
    }

    #[test]
    fn series_alternate_and_medians_land_in_their_rows() {
        let order = RefCell::new(Vec::new());
        let run = |row, series| {
            let order = &order;
            move |_| {
                order.borrow_mut().push((row, series));
                // Too steady for more than three rounds.
                let value = 100.0 + order.borrow().len() as f64 / 10.0;
                let mut measured = Measured::of_rate(10, value);
                measured.add("syscalls_per_op", 5.0, Per::Operation);
                Ok(measured)
            }
        };
        let report = measured(3, |rows| {
            rows.row(Case::new().with("n", 0), UNIT);
            rows.series("a", run(0, "a"));
            rows.series("b", run(0, "b"));
            rows.row(Case::new().with("n", 1), UNIT);
            rows.series("a", run(1, "a"));
        });
        let rows = report.unwrap().rows;
        assert_eq!(order.borrow()[..5], [(0, "a"), (0, "b"), (1, "a"), (1, "a"), (0, "b")]);
        assert!((rows[0].series["a"] - 100.6).abs() < 1e-6, "of 100.1, 100.6, 100.7");
        assert_eq!(rows[0].repetitions["a"].len(), 3);
        assert_eq!(rows[0].counts["a"]["syscalls_per_op"], 0.5);
        assert!(!rows[1].series.contains_key("b"));
    }

    #[test]
    fn a_series_that_fails_costs_its_rows_and_stops_no_other() {
        let runs = RefCell::new(0);
        let part = || Measured::of_rate(1, 1.0);
        let report = measured(5, |rows| {
            (0..2).for_each(|n| rows.row(Case::new().with("n", n), UNIT));
            rows.series_of_rows("dies", 2, |_| {
                *runs.borrow_mut() += 1;
                if *runs.borrow() == 1 {
                    return Ok(vec![part(), part()]);
                }
                Err(Error::Killed { attempts: 2 })
            });
            rows.series_of_rows("lives", 2, |_| Ok(vec![part(), part()]));
            rows.series("fails", |_| Err(Error::Child("no room".into())));
        });
        let rows = report.unwrap().rows;
        assert_eq!(*runs.borrow(), 2);
        let words =
            [0, 1].map(|row: usize| ["dies", "lives", "fails"].map(|it| rows[row].word(it)));
        assert_eq!(words, [["killed", "-", "-"], ["killed", "-", "failed"]]);
        assert!(!rows[0].series.contains_key("dies") && rows[0].repetitions["lives"].len() == 5);
        assert!(rows[1].failed["fails"].reason.contains("no room"));
        let wrong = || Error::WrongBytes { series: "x".into(), pos_bytes: 8 };
        let ended = measured(1, |rows| {
            rows.row(Case::new(), UNIT);
            rows.series("x", move |_| Err(wrong()));
        });
        assert!(matches!(ended, Err(Error::WrongBytes { .. })));
    }
}
