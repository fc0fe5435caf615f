//! The definition of a benchmark of this program: names, parameters, columns, targets, a function.
//!
//! Each benchmark is one static [`Definition`] in a file of its own; the command line and the
//! engines see it as a [`Benchmark`]. `run.rs` has the tools that its function works with.

use bifolio_report::{Figure, Ratio, Report, Row};
use serde::Serialize;
use serde_json::Value;

use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::harness::measured::Standard;
use crate::progress::Progress;
use crate::run::Run;

/// A benchmark with parameters `P`, which the envelope shows as `config`.
pub(crate) struct Definition<P: 'static> {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    /// Derives the parameters from the settings of the user.
    pub(crate) parameters: fn(&Config) -> Result<P>,
    pub(crate) needs: fn(&P) -> Needs,
    /// Columns of the tables beside the series.
    pub(crate) ratios: &'static [(&'static str, &'static str)],
    /// Counts that the second table shows.
    pub(crate) shown_counts: &'static [&'static str],
    /// Counts that every series has.
    pub(crate) standard: &'static [Standard],
    /// Figures that are asked of rows.
    pub(crate) targets: &'static [Target],
    /// Makes the files, measures, and fills in the report.
    pub(crate) run: fn(&mut Run<'_>, &P) -> Result<()>,
    /// Runs a task in a child process, if there are any.
    pub(crate) child: Option<fn(Value) -> Result<Value>>,
}

impl<P: Serialize> Benchmark for Definition<P> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn description(&self) -> &'static str {
        self.description
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        Ok((self.needs)(&(self.parameters)(config)?))
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = (self.parameters)(context.config)?;
        let mut report = Report::new(self.name, &context.host, serde_json::to_value(&parameters)?);
        report.ratios = self.ratios.iter().map(|(over, under)| Ratio::new(over, under)).collect();
        report.shown_counts = self.shown_counts.iter().map(|name| (*name).into()).collect();
        let mut run = Run::new(self.name, self.standard, context, report, progress);
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
    /// The name of the figure; `{key}` stands for the value of that key of the row's case.
    pub(crate) name: &'static str,
    /// Values that the row's case has: `key=value,key=value`; empty for every row.
    pub(crate) case: &'static str,
    pub(crate) value: Asked,
    pub(crate) target: f64,
    pub(crate) at_most: bool,
}

/// The value of a figure.
pub(crate) enum Asked {
    /// The ratio of two series, which the name shows as `{over}` and `{under}`.
    Ratio(&'static str, &'static str),
    /// A count of one series.
    Count(&'static str, &'static str),
    /// The ratio of the same count of two series, `{over}` and `{under}`.
    CountRatio(&'static str, &'static str, &'static str),
    /// Another value of two series, `{over}` and `{under}`.
    Pair(&'static str, &'static str, fn(&Row, &str, &str) -> Option<f64>),
    /// Another value of the row.
    Of(fn(&Row) -> Option<f64>),
}

/// Creates a target: at least `target` for the ratio of two series.
pub(crate) const fn ratio_at_least(
    name: &'static str,
    case: &'static str,
    [over, under]: [&'static str; 2],
    target: f64,
) -> Target {
    Target { name, case, value: Asked::Ratio(over, under), target, at_most: false }
}

/// Creates a target: at most `target` for a value.
pub(crate) const fn at_most(
    name: &'static str,
    case: &'static str,
    value: Asked,
    target: f64,
) -> Target {
    Target { name, case, value, target, at_most: true }
}

/// Returns the figures that `row` has the series for.
fn figures(row: &Row, targets: &[Target]) -> Vec<Figure> {
    let has =
        |pair: &str| pair.split_once('=').is_none_or(|(key, value)| row.case.text(key) == value);
    let is_meant = |target: &&Target| target.case.split(',').all(has);
    targets.iter().filter(is_meant).filter_map(|target| target.figure(row)).collect()
}

impl Target {
    fn figure(&self, row: &Row) -> Option<Figure> {
        let (value, [over, under]) = match self.value {
            Asked::Ratio(over, under) => (row.ratio(&Ratio::new(over, under))?, [over, under]),
            Asked::Count(series, name) => (row.count(series, name)?, [series, ""]),
            Asked::CountRatio(over, under, name) => {
                (row.count(over, name)? / row.count(under, name)?, [over, under])
            }
            Asked::Pair(over, under, value) => (value(row, over, under)?, [over, under]),
            Asked::Of(value) => (value(row)?, ["", ""]),
        };
        let name = self.name.replace("{over}", over).replace("{under}", under);
        let name = row
            .case
            .keys()
            .fold(name, |name, key| name.replace(&format!("{{{key}}}"), &row.case.text(key)));
        let Self { target, at_most, .. } = *self;
        value.is_finite().then_some(Figure { name, value, target, at_most })
    }
}

#[cfg(test)]
mod tests {
    use bifolio_report::{Case, Counts};

    use super::*;

    #[test]
    fn figures_come_from_their_own_rows_and_need_what_they_ask_for() {
        let targets = [
            ratio_at_least("{over} / {under}, {n}", "n=2", ["ours", "rival"], 2.0),
            at_most("waits", "", Asked::Count("ours", "waits"), 1.0),
            at_most("{over}, {n}", "n=2", Asked::CountRatio("ours", "rival", "waits"), 1.0),
        ];
        let mut row = Row::new(Case::new().with("n", 2), "ops/s");
        let counts = |waits| Counts::from([("waits".to_owned(), waits)]);
        row.add("ours", vec![3.0], counts(2.0));
        let names = |row: &Row| -> Vec<String> {
            figures(row, &targets).into_iter().map(|figure| figure.name).collect()
        };
        assert_eq!(names(&row), ["waits"]);
        row.add("rival", vec![2.0], counts(4.0));
        let found = figures(&row, &targets);
        let met: Vec<_> = found.iter().map(|it| (it.name.as_str(), it.value, it.met())).collect();
        assert_eq!(
            met,
            [("ours / rival, 2", 1.5, false), ("waits", 2.0, false), ("ours, 2", 0.5, true)]
        );
        row.case = Case::new().with("n", 1);
        assert_eq!(names(&row), ["waits"]);
    }
}
