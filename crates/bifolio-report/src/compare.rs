//! Two sets of runs beside each other: which rows changed by more than noise.
//!
//! [`compare`] gets the text of two JSON files of the program, each with the envelopes of one or
//! more runs. A *row* here is one series of one case of one benchmark. The samples of a row are the
//! medians of its runs; a row that only one run has keeps its repetitions as samples.
//!
//! The test: Welch's *t* test of the logarithms, two-sided, at 5 % for all rows together by Holm's
//! method. The variance has one part more than the samples show, the variance from run to run, for
//! a machine is not as fast in one minute as in the next: it is estimated from all rows, as the
//! median of the distances of their logarithms from the common one. A change must also be at least
//! as large as the caller asks.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::statistics::median;
use crate::{Case, Name, Report, is_cost};

/// How often a comparison without any change may name one.
const FALSE_ALARMS: f64 = 0.05;
/// The standard deviation of normal samples, in medians of their absolute values.
const DEVIATIONS_PER_MEDIAN: f64 = 1.4826;
/// Rows that are enough to estimate the variance from run to run.
const ROWS_MIN: usize = 5;
/// The deviation that is assumed of runs that have fewer rows: 5 %.
const DEVIATION_OF_RUNS: f64 = 0.05;

/// The result of [`compare`].
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Text for a person: machines that differ, the rows that changed, one line for the others.
    pub text: String,
    /// Rows of which the second set is better.
    pub better: usize,
    /// Rows of which the second set is worse.
    pub worse: usize,
}

/// Names a row: benchmark, case, series.
type Key = (String, String, String);

/// The unit of a row, and its samples, one list for each run.
type Runs = (Name, Vec<Vec<f64>>);

/// Returns the logarithms of the samples.
fn logarithms((_, runs): &Runs) -> Vec<f64> {
    let samples = match &runs[..] {
        [only] => only.clone(),
        several => several.iter().map(|run| median(run)).collect(),
    };
    samples.iter().map(|sample| sample.ln()).collect()
}

/// A row that both sets have.
struct Change {
    key: Key,
    unit: Name,
    medians: [f64; 2],
    /// The second over the first.
    ratio: f64,
    /// Logarithm of the ratio, of the means of the logarithms.
    difference: f64,
    /// Variance of `difference` by the samples alone.
    variance: f64,
    freedom: f64,
    probability: f64,
}

impl Change {
    fn is_better(&self) -> bool {
        (self.ratio > 1.0) != is_cost(&self.unit)
    }
}

/// Compares the envelopes of `second` with those of `first`, each with its name and the text of its
/// file: one envelope per line, as `bifolio bench --json` writes them; several runs may stand one
/// after the other. A change of less than `change_min` (0.05 is 5 %) is none.
///
/// # Errors
/// A message: a line is not an envelope, with the file and the line, or the sets have no row in
/// common.
pub fn compare(
    first: (&str, &str),
    second: (&str, &str),
    change_min: f64,
) -> Result<Comparison, String> {
    let reports = [parse(first)?, parse(second)?];
    let [before, after] = reports.each_ref().map(|set| collect(set));
    let mut changes: Vec<Change> =
        before.iter().filter_map(|(key, runs)| change(key, runs, after.get(key)?)).collect();
    if changes.is_empty() {
        return Err(format!("{} and {} have no row in common", first.0, second.0));
    }
    let deviation = judge(&mut changes);
    let (compared, common) = (changes.len(), median_of(&changes, |change| change.ratio));
    let single = before.len() + after.len() - 2 * compared;
    let is_large = |change: &Change| change.ratio.ln().abs() >= change_min.ln_1p();
    changes.retain(|change| change.probability < FALSE_ALARMS && is_large(change));

    let mut text = differences(&reports);
    for (reports, name) in reports.iter().zip([first.0, second.0]) {
        for report in reports {
            for footnote in report.footnotes() {
                let _ = writeln!(text, "{name}: {} {footnote}", report.bench);
            }
        }
    }
    if changes.is_empty() {
        let _ = writeln!(text, "no change");
    } else {
        let _ = writeln!(text, "{}", table(&changes, [first.0, second.0]));
    }
    let _ = writeln!(
        text,
        "{} of {compared} rows changed by {:.0} % or more and beyond noise (Welch's t test of\n\
         logarithms, Holm, 5 % in all; {:.1} % from run to run); median ratio {common:.2}",
        changes.len(),
        change_min * 100.0,
        deviation * 100.0,
    );
    if single > 0 {
        let _ = writeln!(text, "{single} rows are in one of the files only");
    }
    let better = changes.iter().filter(|change| change.is_better()).count();
    Ok(Comparison { text, better, worse: changes.len() - better })
}

fn parse((name, text): (&str, &str)) -> Result<Vec<Report>, String> {
    Report::read_lines(text)
        .map_err(|(line, error)| format!("{name}, line {line}: not an envelope of bench: {error}"))
}

fn collect(reports: &[Report]) -> BTreeMap<Key, Runs> {
    let mut rows: BTreeMap<Key, Runs> = BTreeMap::new();
    let all = reports.iter().flat_map(|it| it.rows.iter().map(move |row| (&it.bench, row)));
    for (bench, row) in all {
        for (series, median) in &row.series {
            let samples = row.repetitions.get(series).cloned().unwrap_or(vec![*median]);
            let samples: Vec<f64> = samples.into_iter().filter(|rate| *rate > 0.0).collect();
            if !samples.is_empty() {
                let key = (bench.to_string(), case_text(&row.case), series.to_string());
                rows.entry(key).or_insert((row.unit.clone(), Vec::new())).1.push(samples);
            }
        }
    }
    rows
}

/// Returns the keys and values of a case, as a person reads them.
pub(crate) fn case_text(case: &Case) -> String {
    let text = |key| match case.number(key) {
        Some(_) => format!("{key}={}", case.text(key)),
        None => case.text(key),
    };
    case.keys().map(text).collect::<Vec<_>>().join(" ")
}

fn change(key: &Key, before: &Runs, after: &Runs) -> Option<Change> {
    if before.0 != after.0 {
        return None;
    }
    let logarithms = [logarithms(before), logarithms(after)];
    let medians = logarithms.each_ref().map(|samples| median(samples).exp());
    let [(mean, variance, freedom), (mean_after, variance_after, freedom_after)] =
        logarithms.each_ref().map(|samples| moments(samples));
    Some(Change {
        key: key.clone(),
        unit: before.0.clone(),
        medians,
        ratio: medians[1] / medians[0],
        difference: mean_after - mean,
        variance: variance + variance_after,
        freedom: freedom.min(freedom_after),
        probability: 1.0,
    })
}

/// Mean, variance of the mean, and degrees of freedom. One sample has no variance of its own.
fn moments(samples: &[f64]) -> (f64, f64, f64) {
    let count = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / count;
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    let freedom = (count - 1.0).max(1.0);
    (mean, squares / freedom / count, freedom)
}

/// Gives every change its probability, corrected for their number, and returns the standard
/// deviation from run to run that it has used.
fn judge(changes: &mut [Change]) -> f64 {
    let common = median_of(changes, |change| change.difference);
    // A machine that is as fast as before may have been slower for a minute; one that is not is
    // another machine, and all of its rows have changed.
    let is_same_speed = common.abs() <= 2.0 * DEVIATION_OF_RUNS;
    let center = if is_same_speed { 0.0 } else { common };
    let distance = median_of(changes, |change| (change.difference - center).abs());
    let is_enough = changes.len() >= ROWS_MIN;
    let deviation = if is_enough { DEVIATIONS_PER_MEDIAN * distance } else { DEVIATION_OF_RUNS };
    for change in changes.iter_mut() {
        let error = (change.variance + deviation * deviation).sqrt();
        change.probability = probability(change.difference, error, change.freedom);
    }
    changes.sort_by(|left, right| left.probability.total_cmp(&right.probability));
    // Holm: the smallest of n by n, the next by n - 1 ..., and none below one before it.
    let (mut left, mut least) = (changes.len() as f64, 0.0_f64);
    for change in changes.iter_mut() {
        least = least.max((change.probability * left).min(1.0));
        change.probability = least;
        left -= 1.0;
    }
    deviation
}

/// The probability of a difference that is at least this far from zero, if there is no change.
fn probability(difference: f64, error: f64, freedom: f64) -> f64 {
    if difference == 0.0 {
        return 1.0;
    }
    if error == 0.0 {
        return 0.0;
    }
    let student = StudentsT::new(0.0, 1.0, freedom).expect("at least one degree of freedom");
    2.0 * student.cdf(-(difference / error).abs())
}

fn median_of(changes: &[Change], value: impl Fn(&Change) -> f64) -> f64 {
    median(&changes.iter().map(value).collect::<Vec<_>>())
}

/// Differences between the machines and the parameters, a line each.
fn differences([first, second]: &[Vec<Report>; 2]) -> String {
    let mut text = String::new();
    let facts = |reports: &[Report]| {
        let host = reports.first().map(|report| &report.host);
        serde_json::to_value(host).unwrap_or_default()
    };
    let (facts, others) = (facts(first), facts(second));
    for (name, value) in facts.as_object().into_iter().flatten() {
        if *value != others[name] {
            let _ = writeln!(text, "host.{name} differs: {value} and {}", others[name]);
        }
    }
    for report in first {
        let line = format!("the parameters of {} differ\n", report.bench);
        let other = second.iter().find(|other| other.bench == report.bench);
        if other.is_some_and(|other| other.config != report.config) && !text.contains(&line) {
            text.push_str(&line);
        }
    }
    text
}

fn table(changes: &[Change], names: [&str; 2]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["benchmark", "case", "series", "unit", names[0], names[1], "ratio", ""]);
    for change in changes {
        let (bench, case, series) = &change.key;
        let number = |value: f64| format!("{value:.4e}");
        table.add_row([
            bench.clone(),
            case.clone(),
            series.clone(),
            change.unit.to_string(),
            number(change.medians[0]),
            number(change.medians[1]),
            format!("{:.2}", change.ratio),
            if change.is_better() { "better" } else { "worse" }.to_owned(),
        ]);
    }
    for column in 4..=6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A run of 12 rows whose repetitions are off by up to 1 %; `rates` are those of two rows.
    fn run(seed: u64, rates: [f64; 2], unit: &str) -> String {
        let mut random = fastrand::Rng::with_seed(seed);
        let rows: Vec<Value> = (0..12)
            .map(|threads| {
                let rate = rates.get(threads).copied().unwrap_or(1000.0);
                let samples: Vec<f64> =
                    (0..5).map(|_| rate * (0.99 + 0.02 * random.f64())).collect();
                json!({
                    "case": {"pattern": "hot", "threads": threads},
                    "unit": unit,
                    "series": {"pin": median(&samples)},
                    "repetitions": {"pin": samples},
                })
            })
            .collect();
        let host = json!({"cpu": "one"});
        json!({"schema": 1, "bench": "small-reads", "host": host, "config": {}, "rows": rows})
            .to_string()
    }

    fn compared(first: &str, second: &str) -> Comparison {
        compare(("a.json", first), ("b.json", second), 0.05).unwrap()
    }

    #[test]
    fn noise_is_no_change_and_a_slower_row_is_one() {
        let first = run(1, [1000.0, 2000.0], "ops/s");
        let found = compared(&first, &first);
        assert!(found.text.starts_with("no change\n"), "{}", found.text);
        for seed in 2..30 {
            let found = compared(&first, &run(seed, [1000.0, 2000.0], "ops/s"));
            assert_eq!((found.better, found.worse), (0, 0), "{}", found.text);
        }
        let found = compared(&first, &run(2, [800.0, 3000.0], "ops/s"));
        assert_eq!((found.better, found.worse), (1, 1), "{}", found.text);
        assert!(found.text.contains("hot threads=0"), "{}", found.text);
        let times = [[1000.0, 2000.0], [800.0, 2000.0]].map(|rates| run(1, rates, "ns/read"));
        let found = compared(&times[0], &times[1]);
        assert_eq!((found.better, found.worse), (1, 0), "{}", found.text);
    }

    #[test]
    fn what_is_no_envelope_is_refused_with_its_line() {
        let error = compare(("a.json", "\n{}"), ("b.json", ""), 0.05).unwrap_err();
        assert!(error.contains("a.json, line 2"), "{error}");
        let first = run(1, [1000.0, 2000.0], "ops/s");
        let error = compare(("a.json", &first), ("b.json", ""), 0.05).unwrap_err();
        assert!(error.contains("no row in common"), "{error}");
    }
}
