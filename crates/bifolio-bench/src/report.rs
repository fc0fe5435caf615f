//! The JSON that `bifolio bench NAME --json -` prints, the same for every benchmark.
//!
//! Filled in by a benchmark, serialised by the program, drawn by `table.rs`. Fields that serde
//! skips ([`Ratio`], [`Figure`]) follow from the rows; they exist for the tables.

use std::fmt;

use indexmap::IndexMap;
use serde::Serialize;
use serde_json::Value;

use crate::benchmark::Context;
use crate::error::Result;
use crate::host::Host;
use crate::statistics::{median, median_interval};

/// The version of the envelope.
const SCHEMA: u32 = 1;

/// The keys that distinguish a row from the others: `pattern`, `threads`, `block_bytes`,
/// `folio_bytes` ...
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Case(IndexMap<&'static str, Value>);

impl Case {
    /// A case with no keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one key.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.0.insert(key, value.into());
        self
    }

    /// The value of `key`, as text.
    pub fn text(&self, key: &str) -> String {
        match self.0.get(key) {
            None => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }

    /// The keys, in the order in which they were added.
    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
    }
}

/// The counts while a series ran, by name.
pub type Counts = IndexMap<String, f64>;

/// One case, measured with every series that could run.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The keys that tell this row from the others.
    pub case: Case,
    /// The unit of `series` and `spread`.
    pub unit: &'static str,
    /// The median of the repetitions, by series.
    pub series: IndexMap<&'static str, f64>,
    /// The smallest and the largest repetition, by series.
    pub spread: IndexMap<&'static str, [f64; 2]>,
    /// The counts, by series.
    pub counts: IndexMap<&'static str, Counts>,
    /// Every repetition in its order, by series; repetitions are compared pair by pair.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub repetitions: IndexMap<&'static str, Vec<f64>>,
    /// How fast it went in each interval of time, by series.
    #[serde(skip_serializing_if = "IndexMap::is_empty")]
    pub samples: IndexMap<&'static str, Intervals>,
}

/// Rates of equal intervals of time, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Intervals {
    /// Length of each interval.
    pub seconds: f64,
    /// The rate in each, in the unit of the row; the repetitions follow each other.
    pub rates: Vec<f64>,
}

impl Row {
    /// A row with nothing measured yet.
    pub fn new(case: Case, unit: &'static str) -> Self {
        Self {
            case,
            unit,
            series: IndexMap::new(),
            spread: IndexMap::new(),
            counts: IndexMap::new(),
            repetitions: IndexMap::new(),
            samples: IndexMap::new(),
        }
    }

    /// Returns the ratio of one series to another, if both ran and the other is not zero: the
    /// median of the ratios of neighbouring repetitions where the row has them, else the ratio of
    /// the medians.
    pub fn ratio(&self, ratio: &Ratio) -> Option<f64> {
        if let Some(pairs) = self.pair_ratios(ratio) {
            return Some(median(&pairs));
        }
        let over = *self.series.get(ratio.over)?;
        let under = *self.series.get(ratio.under)?;
        (under != 0.0).then(|| over / under)
    }

    /// Returns the confidence interval of a ratio; `None` if there is no ratio.
    pub fn ratio_interval(&self, ratio: &Ratio) -> Option<[f64; 2]> {
        if let Some(pairs) = self.pair_ratios(ratio) {
            return Some(median_interval(&pairs));
        }
        let value = self.ratio(ratio)?;
        let (over, under) = (self.spread.get(ratio.over), self.spread.get(ratio.under));
        Some(match (over, under) {
            (Some([over_low, over_high]), Some([under_low, under_high])) if *under_low > 0.0 => {
                [over_low / under_high, over_high / under_low]
            }
            _ => [value; 2],
        })
    }

    /// Returns a ratio as tables show it, formatted by `text`: `~1.0` where it may be 1.
    pub(crate) fn ratio_text(
        &self,
        ratio: &Ratio,
        text: impl FnOnce(f64) -> String,
    ) -> Option<String> {
        let [low, high] = self.ratio_interval(ratio)?;
        let may_be_one = low < high && low <= 1.0 && 1.0 <= high;
        if may_be_one { Some("~1.0".to_owned()) } else { self.ratio(ratio).map(text) }
    }

    fn pair_ratios(&self, ratio: &Ratio) -> Option<Vec<f64>> {
        let over = self.repetitions.get(ratio.over)?;
        let under = self.repetitions.get(ratio.under)?;
        let pairs = over.len() == under.len() && !over.is_empty() && !under.contains(&0.0);
        pairs.then(|| over.iter().zip(under).map(|(over, under)| over / under).collect())
    }

    /// The count under `name` while `series` ran.
    pub fn count(&self, series: &str, name: &str) -> Option<f64> {
        self.counts.get(series)?.get(name).copied()
    }
}

/// A series that could not run, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// The series, or `*` for all of a case.
    pub series: String,
    /// The thing that was missing.
    pub reason: String,
}

/// The resident size of a process whose cache is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Rss {
    /// The bound of the cache.
    pub bound_bytes: u64,
    /// The largest resident size the kernel reports for the whole process.
    pub peak_bytes: u64,
}

impl Rss {
    /// Returns the allowed size of the process: the bound, 2 % of it, and 8 MiB.
    pub fn allowed_bytes(&self) -> u64 {
        self.bound_bytes + self.bound_bytes / 50 + (8 << 20)
    }

    /// Returns the figure of every benchmark that measures it.
    pub(crate) fn figure(&self) -> Figure {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        Figure {
            name: "peak resident size, in MiB".to_owned(),
            value: mebibytes(self.peak_bytes),
            target: mebibytes(self.allowed_bytes()),
            at_most: true,
        }
    }
}

/// A column of the table: one series against another.
#[derive(Clone, Copy, Debug)]
pub struct Ratio {
    /// The numerator.
    pub over: &'static str,
    /// The denominator.
    pub under: &'static str,
}

impl Ratio {
    /// The series `over` against the series `under`.
    pub(crate) const fn new(over: &'static str, under: &'static str) -> Self {
        Self { over, under }
    }
}

/// A figure with a target, and its value in this run.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Its text.
    pub name: String,
    /// The value of this run.
    pub value: f64,
    /// The target.
    pub target: f64,
    /// Set if `target` is a maximum instead of a minimum.
    pub at_most: bool,
}

impl fmt::Display for Figure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = if self.at_most { "at most" } else { "at least" };
        write!(formatter, "{}: {:.2} ({bound} {:.2})", self.name, self.value, self.target)
    }
}

impl Figure {
    /// Returns `true` if this run reached the target.
    pub fn met(&self) -> bool {
        if self.at_most { self.value <= self.target } else { self.value >= self.target }
    }
}

/// The findings of one benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The version of this envelope.
    pub schema: u32,
    /// The benchmark.
    pub bench: &'static str,
    /// The machine.
    pub host: Host,
    /// The parameters of the run.
    pub config: Value,
    /// The measurements.
    pub rows: Vec<Row>,
    /// The series that could not run.
    pub skipped: Vec<Skipped>,
    /// The resident size, where the benchmark measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss: Option<Rss>,
    /// Number of bytes compared with the content of the file.
    pub verified_bytes: u64,
    /// Columns of the table.
    #[serde(skip)]
    pub ratios: Vec<Ratio>,
    /// Counts that the second table shows.
    #[serde(skip)]
    pub shown_counts: Vec<&'static str>,
    /// Lines below the table.
    #[serde(skip)]
    pub figures: Vec<Figure>,
    /// A note that is needed to read the table.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl Report {
    /// A report with no rows yet.
    pub fn new(bench: &'static str, context: &Context<'_>, config: Value) -> Self {
        Self {
            schema: SCHEMA,
            bench,
            host: context.host.clone(),
            config,
            rows: Vec::new(),
            skipped: Vec::new(),
            rss: None,
            verified_bytes: 0,
            ratios: Vec::new(),
            shown_counts: Vec::new(),
            figures: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Returns the result of `attempt`; after an error, every one of `series` is skipped for its
    /// reason.
    pub(crate) fn skip_on_error<T>(&mut self, series: &[&str], attempt: Result<T>) -> Option<T> {
        let reason = match attempt {
            Ok(given) => return Some(given),
            Err(error) => error.with_causes(),
        };
        for series in series {
            let skipped = Skipped { series: (*series).to_owned(), reason: reason.clone() };
            if !self.skipped.contains(&skipped) {
                self.skipped.push(skipped);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row() -> Row {
        let mut row = Row::new(Case::new().with("pattern", "hot").with("threads", 2), "ops/s");
        row.series.insert("z_first", 30.0);
        row.series.insert("a_second", 12.0);
        row.series.insert("stopped", 0.0);
        row.spread.insert("z_first", [29.0, 31.0]);
        row.counts.entry("z_first").or_default().insert("syscalls_per_op".into(), 1.0);
        row
    }

    #[test]
    fn a_row_has_the_envelopes_shape_and_order_of_series() {
        let value = serde_json::to_value(row()).unwrap();
        assert_eq!(value["case"], json!({"pattern": "hot", "threads": 2}));
        assert_eq!(value["unit"], "ops/s");
        assert_eq!(value["spread"], json!({"z_first": [29.0, 31.0]}));
        assert_eq!(value["counts"]["z_first"]["syscalls_per_op"], 1.0);
        let text = serde_json::to_string(&row()).unwrap();
        assert!(text.find("z_first").unwrap() < text.find("a_second").unwrap());
    }

    #[test]
    fn ratio_needs_both_series_and_a_denominator() {
        let ratio = |over, under| row().ratio(&Ratio { over, under });
        assert_eq!(ratio("z_first", "a_second"), Some(2.5));
        assert_eq!(ratio("z_first", "stopped"), None);
        assert_eq!(ratio("z_first", "absent"), None);
    }

    #[test]
    fn ratios_of_neighbours_stand_above_the_ratio_of_medians() {
        let mut row = row();
        row.repetitions.insert("z_first", vec![10.0, 30.0, 90.0]);
        row.repetitions.insert("a_second", vec![5.0, 10.0, 90.0]);
        let ratio = Ratio::new("z_first", "a_second");
        assert_eq!(row.ratio(&ratio), Some(2.0), "of 2, 3, 1");
        row.repetitions["a_second"].pop();
        assert_eq!(row.ratio(&ratio), Some(2.5), "no pairs");
    }

    #[test]
    fn a_ratio_that_may_be_one_is_shown_as_such() {
        let text = |row: &Row, over, under| {
            row.ratio_text(&Ratio::new(over, under), |ratio| format!("{ratio:.2}"))
        };
        let mut row = row();
        row.repetitions.insert("z_first", vec![10.0, 30.0, 30.0, 20.0, 30.0]);
        row.repetitions.insert("a_second", vec![11.0, 10.0, 10.0, 10.0, 10.0]);
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "~1.0", "0.91 to 3");
        row.repetitions["z_first"][0] = 12.0;
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "3.00");
        // Without pairs the spreads decide.
        row.repetitions.clear();
        row.spread.insert("a_second", [10.0, 28.9]);
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "2.50");
        row.spread.insert("a_second", [10.0, 30.0]);
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "~1.0");
        assert_eq!(text(&row, "z_first", "absent"), None);
    }

    #[test]
    fn rss_allows_two_percent_and_eight_mebibytes() {
        let rss = Rss { bound_bytes: 100 << 20, peak_bytes: 0 };
        assert_eq!(rss.allowed_bytes(), 110 << 20);
        let figure = Rss { peak_bytes: 111 << 20, ..rss }.figure();
        assert_eq!((figure.value, figure.target, figure.met()), (111.0, 110.0, false));
    }

    #[test]
    fn a_figure_knows_its_direction() {
        let figure = |value, at_most| Figure { name: String::new(), value, target: 1.0, at_most };
        assert!(figure(1.0, false).met() && figure(1.0, true).met());
        assert!(!figure(0.9, false).met() && !figure(1.1, true).met());
    }
}
