//! Two programs that ran in rounds, benchmark after benchmark: which rows changed by more than
//! noise, and which rows only one program has.
//!
//! A *row* is one series of one case of one benchmark. The two runs of a round follow each other,
//! so that a machine that changes its speed changes it for both, and the ratio of a row is the
//! median of the ratios of its rounds.
//!
//! The verdict: a row changed if every round says so in the same direction and the ratio is beyond
//! both what the caller asks and the noise. The noise of a row is the deviation of its ratios from
//! round to round, or the median deviation of the rows of its benchmark, whichever is larger: three
//! rounds say little about a row alone. [`crate::compare()`] judges runs that are not paired, and
//! needs more of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};

use crate::compare::{Comparison, case_text};
use crate::statistics::{median, spread};
use crate::{Host, Report, is_cost};

/// Standard errors of a median beyond which a change is no noise.
const ERRORS_MIN: f64 = 4.5;
/// The deviation that is assumed from round to round if there is one round only: 5 %.
const DEVIATION_UNKNOWN: f64 = 0.05;
/// Rows of a benchmark that are enough to know its noise.
const ROWS_MIN: usize = 5;
/// Cases that are named of a series that exists in both trees, but not in the same cases.
const CASES_MAX: usize = 3;

/// Reports of the two programs in one round.
pub type Round = [Vec<Report>; 2];

/// Names a row: benchmark, series, case, unit.
type Key = (String, String, String, String);

/// A row that both programs have.
struct Pair<'k> {
    key: &'k Key,
    medians: [f64; 2],
    /// Logarithms of the ratios of the second to the first, of each round.
    logarithms: Vec<f64>,
    /// Deviation from round to round.
    noise: f64,
}

impl Pair<'_> {
    /// Logarithm of the ratio.
    fn change(&self) -> f64 {
        median(&self.logarithms)
    }

    fn has_changed(&self, change_min: f64) -> bool {
        let change = self.change();
        let error = self.noise / (self.logarithms.len() as f64).sqrt();
        let agree = self.logarithms.iter().all(|round| *round * change > 0.0);
        agree && change.abs() >= change_min.ln_1p() && change.abs() > ERRORS_MIN * error
    }

    fn is_better(&self) -> bool {
        (self.change() > 0.0) != is_cost(&self.key.3)
    }
}

/// Compares two programs, whose names are given, over all rounds. A change of less than
/// `change_min` (0.05 is 5 %) is none. Rows that cannot be matched are listed with the program that
/// has them.
pub fn compare_rounds(names: [&str; 2], rounds: &[Round], change_min: f64) -> Comparison {
    let rates: Vec<[BTreeMap<Key, f64>; 2]> =
        rounds.iter().map(|round| round.each_ref().map(|reports| rates(reports))).collect();
    let keys = [0, 1].map(|program| {
        let keys = rates.iter().flat_map(|round| round[program].keys());
        keys.cloned().collect::<BTreeSet<Key>>()
    });
    let mut pairs: Vec<Pair<'_>> =
        keys[0].intersection(&keys[1]).filter_map(|key| pair(key, &rates)).collect();
    judge_noise(&mut pairs);
    let common = median(&pairs.iter().map(Pair::change).collect::<Vec<_>>()).exp();
    let noise = median(&pairs.iter().map(|pair| pair.noise).collect::<Vec<_>>());
    let compared = pairs.len();
    pairs.retain(|pair| pair.has_changed(change_min));

    let mut text = head(rounds);
    text += &failures(names, rounds);
    if pairs.is_empty() {
        text += "no row changed beyond noise\n";
    } else {
        let _ = writeln!(text, "{}", table(&pairs, names));
    }
    let _ = writeln!(
        text,
        "{} of {compared} rows changed by {:.0} % or more and beyond noise ({:.1} % from round to \
         round, {} rounds); median ratio of all rows {common:.2}",
        pairs.len(),
        change_min * 100.0,
        noise * 100.0,
        rounds.len(),
    );
    for (program, other) in [(0, 1), (1, 0)] {
        text += &only_in(names[program], &keys[program], &keys[other]);
    }
    let better = pairs.iter().filter(|pair| pair.is_better()).count();
    Comparison { text, better, worse: pairs.len() - better }
}

/// Returns the median of each row.
fn rates(reports: &[Report]) -> BTreeMap<Key, f64> {
    let rows = reports.iter().flat_map(|report| report.rows.iter().map(move |row| (report, row)));
    let rates = rows.flat_map(|(report, row)| {
        row.series.iter().filter(|(_, rate)| **rate > 0.0).map(move |(series, rate)| {
            let (bench, unit) = (report.bench.to_string(), row.unit.to_string());
            // An older tree may write the keys of a case in another order.
            ((bench, series.to_string(), case_text(&row.case.sorted()), unit), *rate)
        })
    });
    rates.collect()
}

/// Returns a row of the rounds in which both programs have it, if there is any.
fn pair<'k>(key: &'k Key, rates: &[[BTreeMap<Key, f64>; 2]]) -> Option<Pair<'k>> {
    let both =
        |[first, second]: &[BTreeMap<Key, f64>; 2]| Some([*first.get(key)?, *second.get(key)?]);
    let both: Vec<[f64; 2]> = rates.iter().filter_map(both).collect();
    let logarithms: Vec<f64> = both.iter().map(|[first, second]| (second / first).ln()).collect();
    let medians =
        [0, 1].map(|program| median(&both.iter().map(|rates| rates[program]).collect::<Vec<_>>()));
    (!both.is_empty()).then_some(Pair { key, medians, logarithms, noise: 0.0 })
}

/// Sets the noise of each row.
fn judge_noise(pairs: &mut [Pair<'_>]) {
    for pair in pairs.iter_mut() {
        pair.noise = deviation(&pair.logarithms);
    }
    let median_noise =
        |pairs: &[&Pair<'_>]| median(&pairs.iter().map(|pair| pair.noise).collect::<Vec<_>>());
    let mut benches: BTreeMap<String, Vec<&Pair<'_>>> = BTreeMap::new();
    for pair in pairs.iter() {
        benches.entry(pair.key.0.clone()).or_default().push(pair);
    }
    let of_all = median_noise(&pairs.iter().collect::<Vec<_>>());
    let noise: BTreeMap<String, f64> = benches
        .into_iter()
        .map(|(bench, pairs)| {
            let noise = if pairs.len() < ROWS_MIN { of_all } else { median_noise(&pairs) };
            (bench, noise)
        })
        .collect();
    for pair in pairs.iter_mut() {
        pair.noise = pair.noise.max(noise[&pair.key.0]);
    }
}

/// Returns the standard deviation of samples; an assumed one of a single sample.
fn deviation(samples: &[f64]) -> f64 {
    let count = samples.len() as f64;
    if samples.len() < 2 {
        return DEVIATION_UNKNOWN;
    }
    let mean = samples.iter().sum::<f64>() / count;
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    (squares / (count - 1.0)).sqrt()
}

/// Returns a line for each machine of the reports: there should be one.
fn head(rounds: &[Round]) -> String {
    let hosts = rounds.iter().flatten().flatten().map(|report| {
        let Host { cpu, cpu_family, cpu_model, cpus, kernel, .. } = &report.host;
        // Newer reports have the numbers in the name, too.
        let numbers = format!("family {cpu_family}, model {cpu_model}");
        let cpu = cpu.replace(&format!(" ({numbers})"), "");
        format!("{cpu}, {numbers}, {cpus} CPUs, {kernel}\n")
    });
    hosts.collect::<BTreeSet<String>>().into_iter().collect()
}

/// Returns a line for each series that failed, with the program.
fn failures(names: [&str; 2], rounds: &[Round]) -> String {
    let lines = rounds.iter().flatten().zip(names.iter().cycle()).flat_map(|(reports, name)| {
        reports.iter().flat_map(move |report| {
            report.footnotes().map(move |note| format!("{name}: {} {note}\n", report.bench))
        })
    });
    lines.collect::<BTreeSet<String>>().into_iter().collect()
}

/// Returns a line for each benchmark and each series that has rows in `keys` and not in `others`.
fn only_in(name: &str, keys: &BTreeSet<Key>, others: &BTreeSet<Key>) -> String {
    let mut series: BTreeMap<(&str, &str), Vec<&Key>> = BTreeMap::new();
    for key in keys.difference(others) {
        series.entry((&key.0, &key.1)).or_default().push(key);
    }
    let mut text = String::new();
    let mut known = BTreeSet::new();
    for ((bench, series), rows) in series {
        if !others.iter().any(|key| key.0 == bench) {
            if known.insert(bench) {
                let _ = writeln!(text, "only {name}: benchmark {bench}");
            }
        } else if !others.iter().any(|key| key.0 == bench && key.1 == series) {
            let _ = writeln!(text, "only {name}: {bench}: series {series}, {} rows", rows.len());
        } else {
            let cases = rows.iter().take(CASES_MAX).map(|key| format!("({} {})", key.2, key.3));
            let cases = cases.collect::<Vec<_>>().join(", ");
            let more = if rows.len() > CASES_MAX { ", ..." } else { "" };
            let count = rows.len();
            let _ = writeln!(text, "only {name}: {bench}: {count} rows of {series}: {cases}{more}");
        }
    }
    text
}

fn table(pairs: &[Pair<'_>], names: [&str; 2]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let columns =
        ["benchmark", "case", "series", "unit", names[0], names[1], "ratio", "rounds", ""];
    table.set_header(columns);
    for pair in pairs {
        let (bench, series, case, unit) = pair.key;
        let number = |value: f64| format!("{value:.4e}");
        let [low, high] = spread(&pair.logarithms).map(f64::exp);
        table.add_row([
            bench.clone(),
            case.clone(),
            series.clone(),
            unit.clone(),
            number(pair.medians[0]),
            number(pair.medians[1]),
            format!("{:.2}", pair.change().exp()),
            format!("{low:.2}-{high:.2}"),
            if pair.is_better() { "better" } else { "worse" }.to_owned(),
        ]);
    }
    for column in 4..=7 {
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

    const NAMES: [&str; 2] = ["old", "new"];
    const BENCH: &str = "small-reads";

    /// A report of rows of one series: rates, each for a number of threads.
    fn report(bench: &str, series: &str, unit: &str, rates: &[(u64, f64)]) -> Report {
        let rows = rates.iter().map(|(threads, rate)| {
            json!({
                "case": {"pattern": "hot", "threads": threads},
                "unit": unit,
                "series": {series: rate},
            })
        });
        let host = json!({"cpu": "one", "cpu_family": 6, "cpu_model": 85, "cpus": 2});
        let rows: Vec<Value> = rows.collect();
        let report = json!({"schema": 1, "bench": bench, "host": host, "config": {}, "rows": rows});
        serde_json::from_value(report).unwrap()
    }

    /// Three rounds of 40 rows with noise of up to 2 %, in a machine that slows down by a tenth a
    /// round; the rates of the second program are multiplied by `factors`, the rest by one.
    fn rounds(seed: u64, unit: &str, factors: &[f64]) -> Vec<Round> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut program = |slow: f64, factors: &[f64]| {
            let rates: Vec<(u64, f64)> = (0..40)
                .map(|row| {
                    let factor = factors.get(row as usize).copied().unwrap_or(1.0);
                    (row, 1000.0 * slow * factor * (0.98 + 0.04 * random.f64()))
                })
                .collect();
            vec![report(BENCH, "pin", unit, &rates)]
        };
        let rounds = [1.0, 0.9, 0.8].map(|slow| [program(slow, &[]), program(slow, factors)]);
        rounds.into()
    }

    fn compared(rounds: &[Round]) -> Comparison {
        compare_rounds(NAMES, rounds, 0.05)
    }

    #[test]
    fn noise_is_no_change_although_the_machine_slows_down() {
        for seed in 0..50 {
            let found = compared(&rounds(seed, "ops/s", &[]));
            assert_eq!((found.better, found.worse), (0, 0), "{}", found.text);
            assert!(found.text.contains("no row changed beyond noise\n0 of 40"), "{}", found.text);
        }
    }

    #[test]
    fn rows_that_changed_are_better_or_worse_by_their_unit() {
        for (unit, expected) in [("ops/s", (1, 2)), ("ns/read", (2, 1))] {
            let found = compared(&rounds(1, unit, &[0.8, 1.3, 0.88]));
            assert_eq!((found.better, found.worse), expected, "{}", found.text);
            assert!(found.text.contains("3 of 40 rows changed by 5 %"), "{}", found.text);
            assert!(found.text.contains("hot threads=1"), "{}", found.text);
        }
        assert_eq!(compared(&rounds(1, "ops/s", &[0.97])).worse, 0, "less than the caller asks");
    }

    #[test]
    fn a_round_that_disagrees_makes_it_noise() {
        let mut rounds = rounds(1, "ops/s", &[0.8]);
        rounds[1].swap(0, 1);
        assert_eq!(compared(&rounds).worse, 0);
    }

    #[test]
    fn the_machine_is_named_and_so_are_both_if_there_are_two() {
        let mut rounds = rounds(1, "ops/s", &[]);
        let one = "one, family 6, model 85, 2 CPUs, \n";
        assert!(compared(&rounds).text.starts_with(one), "{}", compared(&rounds).text);
        rounds[0][1][0].host.cpu = "one (family 6, model 85)".to_owned();
        assert_eq!(compared(&rounds).text.matches("family 6").count(), 1, "another schema");
        rounds[2][1][0].host.cpu = "another".to_owned();
        let text = compared(&rounds).text;
        assert!(text.starts_with("another, ") && text.contains(one), "{text}");
    }

    #[test]
    fn rows_of_one_program_only_are_named_with_it() {
        let old = vec![
            report(BENCH, "pin", "ops/s", &[(1, 9.0), (2, 9.0)]),
            report(BENCH, "gone", "ops/s", &[(1, 9.0), (2, 9.0)]),
            report("swap", "pin", "ops/s", &[(1, 9.0)]),
        ];
        let new = vec![
            report(BENCH, "pin", "ops/s", &[(1, 9.0), (3, 9.0)]),
            report("hit-ratio", "misses", "misses", &[(1, 9.0)]),
        ];
        let text = compared(&[[old, new]]).text;
        for line in [
            "0 of 1 rows changed",
            "only old: small-reads: series gone, 2 rows\n",
            "only old: benchmark swap\n",
            "only old: small-reads: 1 rows of pin: (hot threads=2 ops/s)\n",
            "only new: small-reads: 1 rows of pin: (hot threads=3 ops/s)\n",
            "only new: benchmark hit-ratio\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn a_row_with_another_unit_or_order_of_keys_is_another_or_the_same() {
        let report = |text: &str| vec![serde_json::from_str::<Report>(text).unwrap()];
        let row = |case: &str, unit: &str, rate: f64| {
            let row = format!(r#"{{"case":{case},"unit":"{unit}","series":{{"pin":{rate}}}}}"#);
            format!(r#"{{"schema":1,"bench":"b","host":{{}},"config":null,"rows":[{row}]}}"#)
        };
        let (first, other) = (r#"{"a":1,"b":"x"}"#, r#"{"b":"x","a":1}"#);
        let old = report(&row(first, "ops/s", 9.0));
        let text = compared(&[[old.clone(), report(&row(other, "ops/s", 3.0))]]).text;
        assert!(text.contains("1 of 1 rows changed") && !text.contains("only"), "{text}");
        let text = compared(&[[old, report(&row(first, "ns/read", 3.0))]]).text;
        assert!(text.contains("only old: b: 1 rows of pin: (a=1 x ops/s)\n"), "{text}");
    }

    #[test]
    fn a_single_turn_is_taken_for_noisy() {
        let one = |factor: f64| compared(&rounds(1, "ops/s", &[factor])[..1]).worse;
        assert_eq!((one(0.85), one(0.7)), (0, 1));
    }
}
