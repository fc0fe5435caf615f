//! The envelope: the JSON of one benchmark of one run, as `bifolio bench --json` prints it.
//!
//! Filled in by a benchmark, one per line of a file, read again by everything that draws. Unknown
//! fields are ignored and most have a default, so a file of an older version can be read.
//! `docs/bench.schema.json` describes it for other programs.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::plot::Role;
use crate::statistics::{median, median_interval, spread};

/// The version of the envelope.
pub const SCHEMA: u32 = 1;

/// A name that a benchmark has in its code, or that was read from a file.
pub type Name = Cow<'static, str>;

/// The keys that distinguish a row from the others: `pattern`, `threads`, `block_bytes`,
/// `folio_bytes` ...
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Case(IndexMap<Name, Value>);

impl Case {
    /// A case with no keys.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one key.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.0.insert(key.into(), value.into());
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

    /// Returns the case with its keys in alphabetical order.
    #[must_use]
    pub fn sorted(&self) -> Self {
        let mut sorted = self.clone();
        sorted.0.sort_keys();
        sorted
    }

    /// The keys, in the order in which they were added.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(AsRef::as_ref)
    }

    /// The value of `key`, if it is a number.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.0.get(key)?.as_f64()
    }
}

/// The counts while a series ran, by name.
pub type Counts = IndexMap<String, f64>;

/// One case, measured with every series that could run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The keys that tell this row from the others.
    pub case: Case,
    /// The unit of `series` and `spread`.
    pub unit: Name,
    /// The median of the repetitions, by series.
    pub series: IndexMap<Name, f64>,
    /// The smallest and the largest repetition, by series.
    #[serde(default)]
    pub spread: IndexMap<Name, [f64; 2]>,
    /// The counts, by series.
    #[serde(default)]
    pub counts: IndexMap<Name, Counts>,
    /// Every repetition in its order, by series; repetitions are compared pair by pair.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub repetitions: IndexMap<Name, Vec<f64>>,
    /// How fast it went in each interval of time, by series.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub samples: IndexMap<Name, Intervals>,
    /// The series that were started and have no figure, and why.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub failed: IndexMap<Name, Failure>,
}

/// Reason why a series of a row has no figure although it ran before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Set if the process of the series was killed, as the kernel does when memory runs out.
    pub killed: bool,
    /// The error, with its causes.
    pub reason: String,
}

impl Failure {
    /// Returns what a table shows in place of the figure.
    pub fn word(&self) -> &'static str {
        if self.killed { "killed" } else { "failed" }
    }
}

/// Rates of equal intervals of time, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Intervals {
    /// Length of each interval.
    pub seconds: f64,
    /// The rate in each, in the unit of the row; the repetitions follow each other.
    pub rates: Vec<f64>,
    /// The longest call that ended in each, nanoseconds; empty if calls are not timed one by one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub longest_ns: Vec<f64>,
}

impl Row {
    /// A row with nothing measured yet.
    pub fn new(case: Case, unit: &'static str) -> Self {
        Self {
            case,
            unit: unit.into(),
            series: IndexMap::new(),
            spread: IndexMap::new(),
            counts: IndexMap::new(),
            repetitions: IndexMap::new(),
            samples: IndexMap::new(),
            failed: IndexMap::new(),
        }
    }

    /// Adds a series; its median and its spread are those of the repetitions.
    pub fn add(&mut self, series: &'static str, repetitions: Vec<f64>, counts: Counts) {
        self.series.insert(series.into(), median(&repetitions));
        self.spread.insert(series.into(), spread(&repetitions));
        self.repetitions.insert(series.into(), repetitions);
        self.counts.insert(series.into(), counts);
    }

    /// Returns the ratio of one series to another, if both ran and the other is not zero: the
    /// median of the ratios of neighbouring repetitions where the row has them, else the ratio of
    /// the medians.
    pub fn ratio(&self, ratio: &Ratio) -> Option<f64> {
        if let Some(pairs) = self.pair_ratios(ratio) {
            return Some(median(&pairs));
        }
        let over = *self.series.get(&ratio.over)?;
        let under = *self.series.get(&ratio.under)?;
        (under != 0.0).then(|| over / under)
    }

    /// Returns the confidence interval of a ratio; `None` if there is no ratio.
    pub fn ratio_interval(&self, ratio: &Ratio) -> Option<[f64; 2]> {
        if let Some(pairs) = self.pair_ratios(ratio) {
            return Some(median_interval(&pairs));
        }
        let value = self.ratio(ratio)?;
        let (over, under) = (self.spread.get(&ratio.over), self.spread.get(&ratio.under));
        Some(match (over, under) {
            (Some([over_low, over_high]), Some([under_low, under_high])) if *under_low > 0.0 => {
                [over_low / under_high, over_high / under_low]
            }
            _ => [value; 2],
        })
    }

    /// Returns a ratio as tables show it, formatted by `text`: `~1.0` where it may be 1.
    pub fn ratio_text(&self, ratio: &Ratio, text: impl FnOnce(f64) -> String) -> Option<String> {
        let [low, high] = self.ratio_interval(ratio)?;
        let may_be_one = low < high && low <= 1.0 && 1.0 <= high;
        if may_be_one { Some("~1.0".to_owned()) } else { self.ratio(ratio).map(text) }
    }

    fn pair_ratios(&self, ratio: &Ratio) -> Option<Vec<f64>> {
        let over = self.repetitions.get(&ratio.over)?;
        let under = self.repetitions.get(&ratio.under)?;
        let pairs = over.len() == under.len() && !over.is_empty() && !under.contains(&0.0);
        pairs.then(|| over.iter().zip(under).map(|(over, under)| over / under).collect())
    }

    /// Returns the names of all series, those that failed last.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.series.keys().chain(self.failed.keys()).map(AsRef::as_ref)
    }

    /// Returns what a table shows for `series` if that has no figure.
    pub fn word(&self, series: &str) -> &'static str {
        self.failed.get(series).map_or("-", Failure::word)
    }

    /// The count under `name` while `series` ran.
    pub fn count(&self, series: &str, name: &str) -> Option<f64> {
        self.counts.get(series)?.get(name).copied()
    }
}

/// A series that could not run, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// The series, or `*` for all of a case.
    pub series: String,
    /// The thing that was missing.
    pub reason: String,
}

/// The resident size of a process whose cache is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    pub fn figure(&self) -> Figure {
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ratio {
    /// The numerator.
    pub over: Name,
    /// The denominator.
    pub under: Name,
}

impl Ratio {
    /// The series `over` against the series `under`.
    pub const fn new(over: &'static str, under: &'static str) -> Self {
        Self { over: Cow::Borrowed(over), under: Cow::Borrowed(under) }
    }
}

/// A figure with a target, and its value in this run.
#[derive(Clone, Debug, Serialize, Deserialize)]
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

/// The machine of a run. A fact that the machine does not report is an empty text or a zero.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// The processor's model, in its own words.
    pub cpu: String,
    /// The number of its family; 0 if it gives none.
    pub cpu_family: u32,
    /// The number of its model within the family; 0 if it gives none.
    pub cpu_model: u32,
    /// How the library copies pages here.
    pub copy: Name,
    /// How many CPUs the process may use.
    pub cpus: usize,
    /// The processor family.
    pub arch: Name,
    /// Name and release of the kernel.
    pub kernel: String,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// The file system under the benchmark's files.
    pub file_system: String,
    /// Set if there are signs of a virtual machine.
    pub virtualised: bool,
}

/// A feature of the kernel that the library uses, or its fallback.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureUse {
    /// The feature.
    pub name: String,
    /// Set if the feature is used; otherwise its fallback is.
    pub in_use: bool,
    /// Why the feature is used or not.
    pub reason: String,
    /// The fallback.
    pub fallback: String,
}

/// The findings of one benchmark: the envelope.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The version of this envelope.
    pub schema: u32,
    /// The benchmark.
    pub bench: Name,
    /// Start of the run in UTC, as RFC 3339 has it.
    #[serde(default)]
    pub started: String,
    /// The command line of the run.
    #[serde(default)]
    pub command: String,
    /// The machine.
    pub host: Host,
    /// The features of the kernel that the library found, and the fallbacks in use.
    #[serde(default)]
    pub features: Vec<FeatureUse>,
    /// The parameters of the run.
    pub config: Value,
    /// The measurements.
    pub rows: Vec<Row>,
    /// The series that could not run.
    #[serde(default)]
    pub skipped: Vec<Skipped>,
    /// The resident size, where the benchmark measures it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rss: Option<Rss>,
    /// Number of bytes compared with the content of the file.
    #[serde(default)]
    pub verified_bytes: u64,
    /// Columns of the table.
    #[serde(default)]
    pub ratios: Vec<Ratio>,
    /// Counts that the second table shows.
    #[serde(default)]
    pub shown_counts: Vec<Name>,
    /// Lines below the table.
    #[serde(default)]
    pub figures: Vec<Figure>,
    /// A note that is needed to read the table.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Report {
    /// A report with no rows yet.
    pub fn new(bench: &'static str, host: &Host, config: Value) -> Self {
        Self {
            schema: SCHEMA,
            bench: bench.into(),
            started: String::new(),
            command: String::new(),
            host: host.clone(),
            features: Vec::new(),
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

    /// Lists every one of `series` as skipped for `reason`.
    pub fn skip(&mut self, series: &[&str], reason: &str) {
        for series in series {
            let skipped = Skipped { series: (*series).to_owned(), reason: reason.to_owned() };
            if !self.skipped.contains(&skipped) {
                self.skipped.push(skipped);
            }
        }
    }

    /// Returns a footnote for each series of each row that failed.
    pub fn footnotes(&self) -> impl Iterator<Item = String> {
        self.rows.iter().flat_map(|row| {
            let case: Vec<String> =
                row.case.keys().map(|key| format!("{key} {}", row.case.text(key))).collect();
            row.failed.iter().map(move |(series, failure)| {
                format!("{} {series}, {}: {}", failure.word(), case.join(", "), failure.reason)
            })
        })
    }

    /// Returns `true` if a series that is neither the kernel's nor a limit failed with an error: a
    /// process that is killed says nothing about the library.
    pub fn has_failed(&self) -> bool {
        let is_ours = |series: &str| matches!(Role::of(series), Role::Ours | Role::Before);
        let mut failed = self.rows.iter().flat_map(|row| &row.failed);
        failed.any(|(series, failure)| is_ours(series) && !failure.killed)
    }

    /// Returns the envelopes of a file, one per line.
    ///
    /// # Errors
    /// A line is not an envelope; the number is that of the line, from 1.
    pub fn read_lines(text: &str) -> Result<Vec<Self>, (usize, serde_json::Error)> {
        let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let parse = |(number, line)| serde_json::from_str(line).map_err(|error| (number, error));
        lines.map(parse).collect()
    }
}

/// Returns the message of an error, followed by its causes.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row() -> Row {
        let mut row = Row::new(Case::new().with("pattern", "hot").with("threads", 2), "ops/s");
        row.series.insert("z_first".into(), 30.0);
        row.series.insert("a_second".into(), 12.0);
        row.series.insert("stopped".into(), 0.0);
        row.spread.insert("z_first".into(), [29.0, 31.0]);
        row.counts.entry("z_first".into()).or_default().insert("syscalls_per_op".into(), 1.0);
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
        let ratio = |over, under| row().ratio(&Ratio::new(over, under));
        assert_eq!(ratio("z_first", "a_second"), Some(2.5));
        assert_eq!(ratio("z_first", "stopped"), None);
        assert_eq!(ratio("z_first", "absent"), None);
    }

    #[test]
    fn ratios_of_neighbours_stand_above_the_ratio_of_medians() {
        let mut row = row();
        row.repetitions.insert("z_first".into(), vec![10.0, 30.0, 90.0]);
        row.repetitions.insert("a_second".into(), vec![5.0, 10.0, 90.0]);
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
        row.repetitions.insert("z_first".into(), vec![10.0, 30.0, 30.0, 20.0, 30.0]);
        row.repetitions.insert("a_second".into(), vec![11.0, 10.0, 10.0, 10.0, 10.0]);
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "~1.0", "0.91 to 3");
        row.repetitions["z_first"][0] = 12.0;
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "3.00");
        // Without pairs the spreads decide.
        row.repetitions.clear();
        row.spread.insert("a_second".into(), [10.0, 28.9]);
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "2.50");
        row.spread.insert("a_second".into(), [10.0, 30.0]);
        assert_eq!(text(&row, "z_first", "a_second").unwrap(), "~1.0");
        assert_eq!(text(&row, "z_first", "absent"), None);
    }

    #[test]
    fn a_series_that_failed_has_a_word_and_a_footnote() {
        let mut row = row();
        let reason = "out of memory".to_owned();
        row.failed.insert("rival".into(), Failure { killed: true, reason });
        assert_eq!(row.names().last(), Some("rival"));
        assert_eq!([row.word("rival"), row.word("absent")], ["killed", "-"]);
        let mut report = Report::new("b", &Host::default(), Value::Null);
        report.rows.push(row);
        let footnotes: Vec<String> = report.footnotes().collect();
        assert_eq!(footnotes, ["killed rival, pattern hot, threads 2: out of memory"]);
        let text = serde_json::to_string(&report).unwrap();
        let [read] = &Report::read_lines(&text).unwrap()[..] else { panic!("one line") };
        assert_eq!(read.rows[0].failed, report.rows[0].failed);
        let mut has_failed = |series: &'static str, killed| {
            let failure = Failure { killed, reason: String::new() };
            report.rows[0].failed = [(series.into(), failure)].into_iter().collect();
            report.has_failed()
        };
        assert!(!has_failed("kernel_swap", false) && !has_failed("read_at", true));
        assert!(has_failed("read_at", false));
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
