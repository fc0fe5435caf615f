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
//! rounds say little about a row alone. Rows that are counted, not measured, repeat exactly: they
//! have no noise, and do not count in that of their benchmark. A series of several rows is judged
//! as a whole, too: the median of its ratios shows a change that no row shows beyond its noise.
//! [`crate::compare()`] judges runs that are not paired, and needs more of them.

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
/// Rows of a series that are judged as a whole, too.
const SERIES_ROWS_MIN: usize = 4;
/// Cases that are named of a series that exists in both trees, but not in the same cases.
const CASES_MAX: usize = 3;

/// Reports of the two programs in one round.
pub type Round = [Vec<Report>; 2];

/// Names a row: benchmark, series, case, unit.
type Key = (String, String, String, String);

/// A row that both programs have, or a series of rows.
struct Pair {
    key: Key,
    /// None of a series: the rates of its rows have no common median.
    medians: Option<[f64; 2]>,
    /// Logarithms of the ratios of the second to the first, of each round.
    logarithms: Vec<f64>,
    /// Whether each program had the same rate in all rounds: it was counted, not measured.
    is_exact: bool,
    /// Deviation from round to round.
    noise: f64,
}

impl Pair {
    /// Logarithm of the ratio.
    fn change(&self) -> f64 {
        median(&self.logarithms)
    }

    fn has_changed(&self, change_min: f64) -> bool {
        let change = self.change();
        let agree = self.logarithms.iter().all(|round| *round * change > 0.0);
        agree && change.abs() >= change_min.ln_1p() && change.abs() > self.hidden()
    }

    /// Returns the largest change, a logarithm, that the noise hides.
    fn hidden(&self) -> f64 {
        ERRORS_MIN * self.noise / (self.logarithms.len() as f64).sqrt()
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
    let mut pairs: Vec<Pair> =
        keys[0].intersection(&keys[1]).filter_map(|key| pair(key, &rates)).collect();
    judge_noise(&mut pairs);
    let common = median(&pairs.iter().map(Pair::change).collect::<Vec<_>>()).exp();
    let seen = smallest_seen(&pairs);
    let (compared, exact) = (pairs.len(), pairs.iter().filter(|pair| pair.is_exact).count());
    let mut series = whole_series(&pairs);
    pairs.retain(|pair| pair.has_changed(change_min));
    series.retain(|series| series.has_changed(change_min));

    let mut text = head(rounds);
    text += &failures(names, rounds);
    let (rows_changed, series_changed) = (pairs.len(), series.len());
    pairs.append(&mut series);
    if pairs.is_empty() {
        text += "no row changed beyond noise\n";
    } else {
        let _ = writeln!(text, "{}", table(&pairs, names));
    }
    let _ = writeln!(
        text,
        "{rows_changed} of {compared} rows and {series_changed} whole series changed by {:.0} % or \
         more and beyond noise; median ratio of all rows {common:.2}, {} rounds",
        change_min * 100.0,
        rounds.len(),
    );
    let _ = writeln!(
        text,
        "{exact} rows were counted and repeat exactly; of half of the others a smaller change is \
         not seen: {seen}"
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
fn pair(key: &Key, rates: &[[BTreeMap<Key, f64>; 2]]) -> Option<Pair> {
    let both =
        |[first, second]: &[BTreeMap<Key, f64>; 2]| Some([*first.get(key)?, *second.get(key)?]);
    let both: Vec<[f64; 2]> = rates.iter().filter_map(both).collect();
    let logarithms: Vec<f64> = both.iter().map(|[first, second]| (second / first).ln()).collect();
    let of = |program: usize| both.iter().map(|rates| rates[program]).collect::<Vec<_>>();
    let medians = [0, 1].map(|program| median(&of(program)));
    let repeats = |program: usize| of(program).windows(2).all(|two| two[0] == two[1]);
    let is_exact = both.len() > 1 && repeats(0) && repeats(1);
    (!both.is_empty()).then(|| Pair {
        key: key.clone(),
        medians: Some(medians),
        logarithms,
        is_exact,
        noise: 0.0,
    })
}

/// Sets the noise of each row that was measured.
fn judge_noise(pairs: &mut [Pair]) {
    let mut benches: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for pair in pairs.iter_mut().filter(|pair| !pair.is_exact) {
        pair.noise = deviation(&pair.logarithms);
        benches.entry(pair.key.0.clone()).or_default().push(pair.noise);
    }
    let of_all = median(&benches.values().flatten().copied().collect::<Vec<_>>());
    for pair in pairs.iter_mut().filter(|pair| !pair.is_exact) {
        let rows = &benches[&pair.key.0];
        pair.noise = pair.noise.max(if rows.len() < ROWS_MIN { of_all } else { median(rows) });
    }
}

/// Returns the series of several measured rows, each with the median ratio of its rows in each
/// round.
fn whole_series(pairs: &[Pair]) -> Vec<Pair> {
    let mut series: BTreeMap<(&str, &str, &str), Vec<&Pair>> = BTreeMap::new();
    for pair in pairs.iter().filter(|pair| !pair.is_exact) {
        let (bench, name, _, unit) = &pair.key;
        series.entry((bench, name, unit)).or_default().push(pair);
    }
    series.retain(|_, rows| rows.len() >= SERIES_ROWS_MIN);
    let whole = |((bench, name, unit), rows): ((&str, &str, &str), Vec<&Pair>)| {
        let rounds = rows.iter().map(|row| row.logarithms.len()).max().unwrap_or(0);
        let of_round = |round: usize| {
            let ratios = rows.iter().filter_map(|row| row.logarithms.get(round).copied());
            median(&ratios.collect::<Vec<_>>())
        };
        let key = (bench.into(), name.into(), format!("all {} rows", rows.len()), unit.into());
        let logarithms = (0..rounds).map(of_round).collect();
        Pair { key, medians: None, logarithms, is_exact: false, noise: 0.0 }
    };
    let mut all: Vec<Pair> = series.into_iter().map(whole).collect();
    let deviations: Vec<f64> = all.iter().map(|series| deviation(&series.logarithms)).collect();
    for (series, own) in all.iter_mut().zip(&deviations) {
        series.noise = own.max(median(&deviations));
    }
    all
}

/// Returns, for each benchmark that has measured rows, the change that the noise hides of half of
/// them.
fn smallest_seen(pairs: &[Pair]) -> String {
    let mut benches: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for pair in pairs.iter().filter(|pair| !pair.is_exact) {
        benches.entry(&pair.key.0).or_default().push(pair.hidden());
    }
    let text = |(bench, hidden): (&str, Vec<f64>)| {
        format!("{bench} {:.0} %", (median(&hidden).exp_m1()) * 100.0)
    };
    benches.into_iter().map(text).collect::<Vec<_>>().join(", ")
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

fn table(pairs: &[Pair], names: [&str; 2]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let columns =
        ["benchmark", "case", "series", "unit", names[0], names[1], "ratio", "rounds", ""];
    table.set_header(columns);
    for pair in pairs {
        let (bench, series, case, unit) = &pair.key;
        let number = |program: usize| {
            pair.medians.map_or_else(String::new, |medians| format!("{:.4e}", medians[program]))
        };
        let [low, high] = spread(&pair.logarithms).map(f64::exp);
        table.add_row([
            bench.clone(),
            case.clone(),
            series.clone(),
            unit.clone(),
            number(0),
            number(1),
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
            assert!(
                found.text.contains("no row changed beyond noise\n0 of 40 rows and 0"),
                "{}",
                found.text
            );
        }
    }

    #[test]
    fn rows_that_changed_are_better_or_worse_by_their_unit() {
        for (unit, expected) in [("ops/s", (1, 2)), ("ns/read", (2, 1))] {
            let found = compared(&rounds(1, unit, &[0.8, 1.3, 0.88]));
            assert_eq!((found.better, found.worse), expected, "{}", found.text);
            assert!(
                found.text.contains("3 of 40 rows and 0 whole series changed by 5 %"),
                "{}",
                found.text
            );
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
            "0 of 1 rows and",
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
        assert!(text.contains("1 of 1 rows and") && !text.contains("only"), "{text}");
        let text = compared(&[[old, report(&row(first, "ns/read", 3.0))]]).text;
        assert!(text.contains("only old: b: 1 rows of pin: (a=1 x ops/s)\n"), "{text}");
    }

    #[test]
    fn counted_rows_have_no_noise_and_hide_none() {
        let counted = |ratio: f64| {
            let rates: Vec<(u64, f64)> =
                (0..100).map(|row| (row, if row == 0 { ratio } else { 0.9 })).collect();
            report(BENCH, "hits", "ratio", &rates)
        };
        let mut rounds = rounds(1, "ops/s", &[]);
        for [old, new] in &mut rounds {
            old.push(counted(0.5));
            new.push(counted(0.4));
        }
        let found = compared(&rounds);
        assert_eq!((found.better, found.worse), (0, 1), "{}", found.text);
        let noise = found.text.split("not seen: small-reads ").nth(1).unwrap();
        let percent: f64 = noise.split(' ').next().unwrap().parse().unwrap();
        assert!(found.text.contains("100 rows were counted") && percent >= 2.0, "{}", found.text);
    }

    #[test]
    fn a_series_that_changed_is_seen_although_each_row_is_noisy() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut program = |factor: f64| {
            let mut rates = |factor: f64| -> Vec<(u64, f64)> {
                (0..40).map(|row| (row, 1000.0 * factor * (0.6 + 0.8 * random.f64()))).collect()
            };
            let pins = report(BENCH, "pin", "ops/s", &rates(factor));
            vec![pins, report(BENCH, "copy", "ops/s", &rates(1.0))]
        };
        let rounds: Vec<Round> = (0..9).map(|_| [program(1.0), program(0.7)]).collect();
        let found = compared(&rounds);
        assert!(found.worse >= 1 && found.better == 0, "{}", found.text);
        assert!(
            found.text.contains("all 40 rows") && !found.text.contains("copy"),
            "{}",
            found.text
        );
    }

    #[test]
    fn a_single_turn_is_taken_for_noisy() {
        let one = |factor: f64| compared(&rounds(1, "ops/s", &[factor])[..1]).worse;
        assert_eq!((one(0.85), one(0.7)), (0, 1));
    }
}
