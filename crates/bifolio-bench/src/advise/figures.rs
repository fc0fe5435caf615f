//! The figures that are asked of `advise`, worked out from its rows. Pure functions.

use super::advised::{KERNEL, ON_ANY_FAILURE, TARGETED, WHEN_IT_CAN_HELP};
use super::{FALLBACK, MAPPED_STREAM, MIXED, MIXED_HERE};
use bifolio_report::{Figure, Ratio, Report, Row};

/// The columns beside the series.
pub(super) const RATIOS: [Ratio; 4] = [
    Ratio::new(WHEN_IT_CAN_HELP, ON_ANY_FAILURE),
    Ratio::new(TARGETED, ON_ANY_FAILURE),
    Ratio::new(WHEN_IT_CAN_HELP, KERNEL),
    Ratio::new(TARGETED, KERNEL),
];

/// Maximum time of a call of a mapped stream, relative to the series that drains on any failure.
const OF_ANY_FAILURE_AT_MOST: f64 = 0.75;
const OF_KERNEL_AT_MOST: f64 = 0.2;

/// Minimum of drained CPUs, where the other CPU keeps its batch filled.
const CPUS_DRAINED_AT_LEAST: f64 = 0.5;

/// Every figure that this report has the rows for.
pub(super) fn figures(report: &Report) -> Vec<Figure> {
    report.rows.iter().flat_map(of_row).collect()
}

fn of_row(row: &Row) -> Vec<Figure> {
    match row.case.text("workload").as_str() {
        MAPPED_STREAM => stream(row),
        FALLBACK => {
            let series = [ON_ANY_FAILURE, WHEN_IT_CAN_HELP, TARGETED, KERNEL];
            let evicted = series.into_iter().filter_map(|series| {
                rounds(row, series, "rounds_evicted", "rounds that evict everything")
            });
            evicted.chain(exact(row, "one CPU")).collect()
        }
        MIXED => exact(row, "one CPU").into_iter().collect(),
        MIXED_HERE => exact(row, "no CPU").into_iter().collect(),
        _ => Vec::new(),
    }
}

fn stream(row: &Row) -> Vec<Figure> {
    let mut figures: Vec<Figure> = other_batch_is_filled(row).into_iter().collect();
    for series in [WHEN_IT_CAN_HELP, TARGETED] {
        figures.extend(row.count(series, "drains_per_round").map(|value| Figure {
            name: format!("{MAPPED_STREAM}, {series}: drains per round"),
            value,
            target: 0.0,
            at_most: true,
        }));
    }
    figures.extend(RATIOS.iter().filter_map(|ratio| {
        let of_kernel = ratio.under == KERNEL;
        Some(Figure {
            name: format!("{MAPPED_STREAM}, ns per call: {} / {}", ratio.over, ratio.under),
            value: row.ratio(ratio)?,
            target: if of_kernel { OF_KERNEL_AT_MOST } else { OF_ANY_FAILURE_AT_MOST },
            at_most: true,
        })
    }));
    figures
}

/// Checks the workload itself: a drain finds folios.
fn other_batch_is_filled(row: &Row) -> Option<Figure> {
    let count = |name| row.count(ON_ANY_FAILURE, name);
    Some(Figure {
        name: format!("{MAPPED_STREAM}, {ON_ANY_FAILURE}: CPUs drained with each drain"),
        value: count("cpus_drained_per_round")? / count("drains_per_round")?,
        target: CPUS_DRAINED_AT_LEAST,
        at_most: false,
    })
}

/// Checks the default policy only.
fn exact(row: &Row, drained: &str) -> Option<Figure> {
    rounds(row, TARGETED, "rounds_exact", &format!("rounds that drain {drained}, as they should"))
}

/// Checks all rounds of a series.
fn rounds(row: &Row, series: &str, count: &str, what: &str) -> Option<Figure> {
    Some(Figure {
        name: format!("{}, {series}: {what}", row.case.text("workload")),
        value: row.count(series, count)?,
        target: row.count(series, "rounds")?,
        at_most: false,
    })
}

#[cfg(test)]
mod tests {
    use super::super::row;
    use super::*;

    fn with(workload: &str, counts: &[(&str, f64)]) -> Row {
        let mut row = row(workload);
        for (series, value) in [(ON_ANY_FAILURE, 100.0), (TARGETED, 80.0), (KERNEL, 400.0)] {
            row.series.insert(series.into(), value);
            let counts = counts.iter().map(|(name, count)| ((*name).to_owned(), *count));
            row.counts.insert(series.into(), counts.collect());
        }
        row
    }

    fn verdicts(row: &Row) -> Vec<(f64, bool)> {
        of_row(row).iter().map(|figure| (figure.value, figure.met())).collect()
    }

    #[test]
    fn a_stream_is_asked_for_no_drain_and_two_ratios() {
        let counts = [("drains_per_round", 4.0), ("cpus_drained_per_round", 1.0)];
        let row = with(MAPPED_STREAM, &counts);
        let all = [(0.25, false), (4.0, false), (0.8, false), (0.2, true)];
        assert_eq!(verdicts(&row), all);
    }

    #[test]
    fn all_rounds_have_to_evict_and_ours_to_drain_exactly() {
        let counts = [("rounds", 10.0), ("rounds_evicted", 10.0), ("rounds_exact", 9.0)];
        let row = with(FALLBACK, &counts);
        let all = [(10.0, true), (10.0, true), (10.0, true), (9.0, false)];
        assert_eq!(verdicts(&row), all);
        for workload in [MIXED, MIXED_HERE] {
            assert_eq!(verdicts(&with(workload, &counts)), [(9.0, false)]);
        }
    }
}
