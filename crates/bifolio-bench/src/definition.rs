//! The definition of a benchmark of this program: names, sizes, times, columns, targets, a
//! function.
//!
//! Each benchmark is one static [`Definition`] in a file of its own; the command line and the
//! engines see it as a [`Benchmark`]. `run.rs` has the tools that its function works with.

use bifolio_report::{Figure, Ratio, Report, Row};
use serde::Serialize;
use serde_json::Value;

use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::{Config, ParameterSet};
use crate::error::{Error, Result};
use crate::harness::sizes::{SizeRule, Sizes};
use crate::progress::Progress;
use crate::run::{Rounds, Run};

pub(crate) struct Definition {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    pub(crate) sizes: SizeRule,
    /// Seconds in timed loops and repetitions, of smoke, quick and full.
    pub(crate) times: [(f64, usize); 3],
    pub(crate) needs: fn(&Parameters) -> Needs,
    /// Columns of the tables beside the series.
    pub(crate) ratios: &'static [(&'static str, &'static str)],
    /// Counts that the second table shows.
    pub(crate) shown_counts: &'static [&'static str],
    /// Figures that are asked of rows.
    pub(crate) targets: &'static [Target],
    /// Makes the files, measures, and fills in the report.
    pub(crate) run: fn(&mut Run<'_>, &Parameters) -> Result<()>,
    /// Runs a task in a child process, if there are any.
    pub(crate) child: Option<fn(Value) -> Result<Value>>,
}

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Parameters {
    #[serde(flatten)]
    pub(crate) sizes: Sizes,
    /// Time in all trials together.
    pub(crate) timed_seconds: f64,
    /// Repetitions of each trial, at least.
    pub(crate) repetitions: usize,
    pub(crate) threads: Vec<usize>,
    #[serde(skip)]
    pub(crate) set: ParameterSet,
}

impl Parameters {
    /// Returns rounds that go on while the time lasts.
    pub(crate) fn rounds(&self) -> Rounds {
        Rounds::within(self.timed_seconds, self.repetitions)
    }

    /// Returns rounds of `trials` that share the time.
    pub(crate) fn shared(&self, trials: usize) -> Rounds {
        let trials = (trials.max(1) * self.repetitions) as f64;
        let trial = std::time::Duration::from_secs_f64(self.timed_seconds / trials);
        Rounds::exactly(self.repetitions, trial)
    }

    pub(crate) fn threads_max(&self) -> usize {
        self.threads.iter().copied().max().unwrap_or(1)
    }
}

impl Definition {
    fn parameters(&self, config: &Config) -> Result<Parameters> {
        let (seconds, repetitions) = config.set.of(self.times);
        Ok(Parameters {
            sizes: self.sizes.choose(config)?,
            timed_seconds: config.timed.map_or(seconds, |timed| timed.as_secs_f64()),
            repetitions,
            threads: config.threads_or_default()?,
            set: config.set,
        })
    }
}

impl Benchmark for Definition {
    fn name(&self) -> &'static str {
        self.name
    }

    fn description(&self) -> &'static str {
        self.description
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok((self.needs)(&self.parameters(config)?))
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = self.parameters(context.config)?;
        let mut report = Report::new(self.name, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = self.ratios.iter().map(|(over, under)| Ratio::new(over, under)).collect();
        report.shown_counts = self.shown_counts.iter().map(|name| (*name).into()).collect();
        let mut run = Run::new(self.name, context, report, progress);
        (self.run)(&mut run, &parameters)?;
        let mut report = run.report;
        let of_rows = report.rows.iter().flat_map(|row| figures(row, self.targets));
        let mut figures: Vec<Figure> = of_rows.collect();
        figures.append(&mut report.figures);
        figures.extend(report.rss.as_ref().map(bifolio_report::Rss::figure));
        report.figures = figures;
        Ok(report)
    }

    fn run_in_child(&self, task: Value) -> Result<Value> {
        let no_child = || Error::Child(format!("{} has no children", self.name));
        (self.child.ok_or_else(no_child)?)(task)
    }
}

/// A figure that is asked of every row of a case.
pub(crate) struct Target {
    /// Values that the row's case has: `key=value,key=value`; empty for every row.
    case: &'static str,
    value: Asked,
    target: f64,
    at_most: bool,
}

/// The value of a figure.
pub(crate) enum Asked {
    /// The ratio of two series.
    Ratio(&'static str, &'static str),
    /// Another value of the row, with its name.
    Of(&'static str, fn(&Row) -> Option<f64>),
}

pub(crate) const fn at_least(case: &'static str, value: Asked, target: f64) -> Target {
    Target { case, value, target, at_most: false }
}

pub(crate) const fn at_most(case: &'static str, value: Asked, target: f64) -> Target {
    Target { case, value, target, at_most: true }
}

/// Returns the figures that `row` has the series for; their names end with the row's case.
fn figures(row: &Row, targets: &[Target]) -> Vec<Figure> {
    let has =
        |pair: &str| pair.split_once('=').is_none_or(|(key, value)| row.case.text(key) == value);
    let case: String =
        row.case.keys().map(|key| format!(", {key} {}", row.case.text(key))).collect();
    let figure = |target: &Target| {
        let (name, value) = match target.value {
            Asked::Ratio(over, under) => {
                (format!("{over} / {under}"), row.ratio(&Ratio::new(over, under))?)
            }
            Asked::Of(name, value) => (name.to_owned(), value(row)?),
        };
        let Target { target, at_most, .. } = *target;
        value.is_finite().then_some(Figure { name: name + &case, value, target, at_most })
    };
    let is_meant = |target: &&Target| target.case.split(',').all(has);
    targets.iter().filter(is_meant).filter_map(figure).collect()
}

#[cfg(test)]
mod tests {
    use bifolio_report::{Case, Counts};

    use super::*;

    #[test]
    fn figures_come_from_their_own_rows_and_need_what_they_ask_for() {
        let targets = [
            at_least("n=2", Asked::Ratio("ours", "rival"), 2.0),
            at_most("", Asked::Of("waits", |row| row.count("ours", "waits")), 1.0),
            at_most("", Asked::Of("of nothing", |_| Some(f64::NAN)), 1.0),
        ];
        let mut row = Row::new(Case::new().with("n", 2), "ops/s");
        row.add("ours", vec![3.0], Counts::from([("waits".to_owned(), 0.5)]));
        let found = |row: &Row| -> Vec<(String, f64, bool)> {
            let figures = figures(row, &targets).into_iter();
            figures.map(|figure| (figure.name.clone(), figure.value, figure.met())).collect()
        };
        let waits = |n| (format!("waits, n {n}"), 0.5, true);
        assert_eq!(found(&row), [waits(2)]);
        row.add("rival", vec![2.0], Counts::new());
        assert_eq!(found(&row), [("ours / rival, n 2".to_owned(), 1.5, false), waits(2)]);
        row.case = Case::new().with("n", 1);
        assert_eq!(found(&row), [waits(1)]);
    }
}
