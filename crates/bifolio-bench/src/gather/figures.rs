//! The figures that are asked of `gather`, from its rows. Pure functions.

use bifolio_report::{Figure, Ratio, Report, Row};

const OURS: [&str; 2] = ["read_many", "pin_many"];

/// The columns beside the series.
pub(crate) const RATIOS: [Ratio; 6] = [
    Ratio::new("read_many", "kernel_mmap"),
    Ratio::new("pin_many", "kernel_mmap"),
    Ratio::new("read_many", "kernel_willneed"),
    Ratio::new("pin_many", "kernel_willneed"),
    Ratio::new("read_many", "raw_direct"),
    Ratio::new("pin_many", "raw_direct"),
];

/// The counts that the second table shows.
pub(crate) const SHOWN_COUNTS: [&str; 5] =
    ["p50_ns", "p99_ns", "gathers", "cpu_ns_per_row", "resident_peak_mib"];

const OF_MMAP_AT_LEAST: f64 = 5.0;
const OF_WILLNEED_AT_LEAST: f64 = 1.0;
/// At most 1.1 times as long.
const OF_RAW_AT_LEAST: f64 = 1.0 / 1.1;
/// At most 1.2 times as long.
const OF_MMAP_WARM_AT_LEAST: f64 = 1.0 / 1.2;

/// Every figure that this report has the rows for.
pub(crate) fn figures(report: &Report) -> Vec<Figure> {
    report.rows.iter().flat_map(of_row).collect()
}

fn of_row(row: &Row) -> Vec<Figure> {
    let keys: Vec<String> = row.case.keys().map(|key| row.case.text(key)).collect();
    let targets: &[(&'static str, f64)] = match row.case.text("state").as_str() {
        "cold" => &[
            ("kernel_mmap", OF_MMAP_AT_LEAST),
            ("kernel_willneed", OF_WILLNEED_AT_LEAST),
            ("raw_direct", OF_RAW_AT_LEAST),
        ],
        "warm" => &[("kernel_mmap", OF_MMAP_WARM_AT_LEAST)],
        _ => &[],
    };
    let mut figures = Vec::new();
    for ours in OURS {
        for &(under, target) in targets {
            let Some(value) = row.ratio(&Ratio::new(ours, under)) else { continue };
            let name = format!("rows/s, {ours} / {under}, {}", keys.join(", "));
            figures.push(Figure { name, value, target, at_most: false });
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::Case;

    #[test]
    fn each_state_has_the_figures_of_its_rivals() {
        let figures = |state| {
            let mut row = Row::new(Case::new().with("state", state), "rows/s");
            for name in ["read_many", "kernel_mmap", "raw_direct"] {
                row.series.insert(name.into(), 1.0);
            }
            of_row(&row).iter().map(Figure::met).collect::<Vec<_>>()
        };
        assert_eq!(figures("cold"), [false, true]);
        assert_eq!(figures("warm"), [true]);
        assert!(figures("steady").is_empty());
    }
}
