//! The figures that are asked of `random-reads`, worked out from its rows. Pure functions.

use bifolio_report::{Figure, Ratio, Report, Row, Rss};

const MANY_OF_RAW: Ratio = Ratio::new("read_many", "raw_direct");
const ONE_OF_RAW: Ratio = Ratio::new("read_at", "raw_direct");
const ONE_OF_PREAD: Ratio = Ratio::new("read_at", "kernel_pread");
const ONE_OF_MMAP: Ratio = Ratio::new("read_at", "kernel_mmap");

/// The columns beside the series.
pub(crate) const RATIOS: [Ratio; 4] = [MANY_OF_RAW, ONE_OF_RAW, ONE_OF_PREAD, ONE_OF_MMAP];

/// The counts that the second table shows.
pub(crate) const SHOWN_COUNTS: [&str; 9] = [
    "p50_ns",
    "p99_ns",
    "p999_ns",
    "cpu_ns_per_miss",
    "cpu_s_per_gib",
    "syscalls_per_miss",
    "misses_per_op",
    "min_second_over_mean",
    "min_100ms_over_mean",
];

const OF_RAW_AT_LEAST: f64 = 0.95;
/// At depth 1 the device dominates: level with the kernel, within noise.
const OF_KERNEL_AT_LEAST: f64 = 0.95;
/// Maximum CPU time relative to the raw loop: 7 us to 5.
const CPU_OF_RAW_AT_MOST: f64 = 7.0 / 5.0;
const P999_OF_RAW_AT_MOST: f64 = 1.2;
/// Maximum system calls per miss: one for 16.
const SYSCALLS_PER_MISS_AT_MOST: f64 = 1.0 / 16.0;
const LEAST_INTERVAL_AT_LEAST: f64 = 0.5;

/// Every figure that this report has the rows for.
pub(crate) fn figures(report: &Report) -> Vec<Figure> {
    let mut figures = Vec::new();
    for row in &report.rows {
        let misses_only = row.case.text("pattern") == "uniform";
        if row.series.contains_key("read_many") && misses_only {
            figures.extend(many(row));
        } else if row.series.contains_key("read_at") {
            figures.extend(one_by_one(row, misses_only));
        }
    }
    figures.extend(report.rss.as_ref().map(Rss::figure));
    figures
}

fn many(row: &Row) -> Vec<Figure> {
    let case = format!("{} requests a call", row.case.text("requests_per_call"));
    let of_raw = |name| Some(row.count("read_many", name)? / row.count("raw_direct", name)?);
    let of_series = |name| row.count("read_many", name);
    let interval = of_series("min_second_over_mean").or_else(|| of_series("min_100ms_over_mean"));
    let all = [
        ("misses/s, read_many / raw_direct", row.ratio(&MANY_OF_RAW), OF_RAW_AT_LEAST, false),
        ("CPU a miss, read_many / raw_direct", of_raw("cpu_ns_per_miss"), CPU_OF_RAW_AT_MOST, true),
        (
            "system calls a miss, read_many",
            of_series("syscalls_per_miss"),
            SYSCALLS_PER_MISS_AT_MOST,
            true,
        ),
        ("slowest interval / mean, read_many", interval, LEAST_INTERVAL_AT_LEAST, false),
    ];
    present(&case, &all)
}

fn one_by_one(row: &Row, misses_only: bool) -> Vec<Figure> {
    let case = format!("{}, threads {}", row.case.text("pattern"), row.case.text("threads"));
    let p999 = || Some(row.count("read_at", "p999_ns")? / row.count("raw_direct", "p999_ns")?);
    let to_raw = [
        ("reads/s, read_at / raw_direct", row.ratio(&ONE_OF_RAW), OF_RAW_AT_LEAST, false),
        ("p99.9, read_at / raw_direct", p999(), P999_OF_RAW_AT_MOST, true),
    ];
    let to_kernel = [
        ("reads/s, read_at / kernel_pread", row.ratio(&ONE_OF_PREAD), OF_KERNEL_AT_LEAST, false),
        ("reads/s, read_at / kernel_mmap", row.ratio(&ONE_OF_MMAP), OF_KERNEL_AT_LEAST, false),
    ];
    let mut figures = if misses_only { present(&case, &to_raw) } else { Vec::new() };
    figures.extend(present(&case, &to_kernel));
    figures
}

fn present(case: &str, all: &[(&str, Option<f64>, f64, bool)]) -> Vec<Figure> {
    let figure = |&(name, value, target, at_most): &(&str, Option<f64>, f64, bool)| {
        Some(Figure { name: format!("{name}, {case}"), value: value?, target, at_most })
    };
    all.iter().filter_map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::{Case, Counts};

    fn row(pattern: &str, series: [&'static str; 2]) -> Row {
        let mut row = Row::new(Case::new().with("pattern", pattern).with("threads", 1), "reads/s");
        for (index, name) in series.into_iter().enumerate() {
            row.series.insert(name.into(), 9.0 + index as f64);
            let p999 = Counts::from([("p999_ns".to_owned(), 100.0 * (index + 1) as f64)]);
            row.counts.insert(name.into(), p999);
        }
        row
    }

    #[test]
    fn what_is_compared_with_the_device_is_all_misses() {
        let figures = one_by_one(&row("uniform", ["read_at", "raw_direct"]), true);
        assert_eq!(figures.len(), 2);
        assert!(!figures[0].met() && figures[0].value == 0.9);
        assert!(figures[1].met() && figures[1].value == 0.5);
        assert_eq!(one_by_one(&row("zipf", ["read_at", "raw_direct"]), false).len(), 0);
        assert_eq!(one_by_one(&row("zipf", ["read_at", "kernel_mmap"]), false).len(), 1);
    }

    #[test]
    fn the_deep_rows_ask_for_what_they_have() {
        let figures = many(&row("uniform", ["read_many", "raw_direct"]));
        assert_eq!(figures.len(), 1, "no CPU time, system calls or intervals were counted");
        assert!(figures[0].name.starts_with("misses/s"));
    }
}
