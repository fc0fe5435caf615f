//! The figures that are asked of `small-reads`, worked out from its rows. Pure functions.

use bifolio_report::{Figure, Ratio, Report, Row, Rss};

const PIN_GAIN: Ratio = Ratio::new("pin_frozen_bit", "pin_cas");
const KERNEL_GAIN: Ratio = Ratio::new("optimistic", "kernel_pread_tmpfs");
/// The series of a file that can be mapped.
pub(crate) const MAPPABLE: &str = "mappable";
/// The cost of a reference for each read.
const MAPPABLE_SHARE: Ratio = Ratio::new(MAPPABLE, "optimistic");
const LIMIT_SHARE: Ratio = Ratio::new("optimistic", "memcpy_limit");

/// The series of searches in place.
pub(crate) const READ_WITH: &str = "read_with";
const IN_PLACE_GAIN: Ratio = Ratio::new(READ_WITH, "pin_frozen_bit");
const IN_PLACE_SHARE: Ratio = Ratio::new(READ_WITH, "memcpy_limit");

/// The columns beside the series.
pub(crate) const RATIOS: [Ratio; 6] =
    [KERNEL_GAIN, PIN_GAIN, LIMIT_SHARE, MAPPABLE_SHARE, IN_PLACE_GAIN, IN_PLACE_SHARE];

/// A ratio asked of one row.
struct Asked {
    ratio: Ratio,
    pattern: &'static str,
    block_bytes: u64,
    threads: u64,
    at_least: f64,
}

const fn asked(ratio: Ratio, case: (&'static str, u64, u64), at_least: f64) -> Asked {
    let (pattern, block_bytes, threads) = case;
    Asked { ratio, pattern, block_bytes, threads, at_least }
}

const ASKED: [Asked; 10] = [
    asked(KERNEL_GAIN, ("hot", 64, 2), 60.0),
    asked(PIN_GAIN, ("hot", 64, 2), 1.10),
    asked(PIN_GAIN, ("hot", 64, 1), 0.98),
    asked(LIMIT_SHARE, ("hot", 64, 2), 0.35),
    asked(LIMIT_SHARE, ("uniform", 64, 2), 0.40),
    asked(LIMIT_SHARE, ("uniform", 4096, 2), 0.85),
    asked(MAPPABLE_SHARE, ("hot", 64, 1), 0.4),
    asked(MAPPABLE_SHARE, ("uniform", 4096, 1), 0.4),
    asked(IN_PLACE_SHARE, ("search_hot", 4096, 1), 0.6),
    asked(IN_PLACE_GAIN, ("search_hot", 4096, 2), 10.0),
];

/// The series of what the cache keeps for itself.
pub(crate) const METADATA: &str = "metadata_per_resident_page";
const METADATA_AT_MOST: f64 = 72.0;

/// Two threads against one, on one hot page.
const SCALING_AT_LEAST: f64 = 1.9;

/// Every figure that this report has the rows for.
pub(crate) fn figures(report: &Report) -> Vec<Figure> {
    let rows = &report.rows;
    let mut figures: Vec<Figure> = ASKED.iter().filter_map(|asked| asked.figure(rows)).collect();
    figures.extend(scaling(rows, "optimistic", ("hot", 64)));
    figures.extend(scaling(rows, READ_WITH, ("search_hot", 4096)));
    figures.extend(rows.iter().find_map(|row| row.series.get(METADATA)).map(|&value| Figure {
        name: "metadata for a resident 4 KiB page, bytes beyond 8 for each page of the file".into(),
        value,
        target: METADATA_AT_MOST,
        at_most: true,
    }));
    figures.extend(report.rss.as_ref().map(Rss::figure));
    figures
}

impl Asked {
    fn figure(&self, rows: &[Row]) -> Option<Figure> {
        let row = find(rows, self.pattern, self.block_bytes, self.threads)?;
        let Ratio { over, under } = &self.ratio;
        let (pattern, block_bytes, threads) = (self.pattern, self.block_bytes, self.threads);
        Some(Figure {
            name: format!("{over} / {under}, {pattern}, {block_bytes} bytes, threads {threads}"),
            value: row.ratio(&self.ratio)?,
            target: self.at_least,
            at_most: false,
        })
    }
}

fn scaling(rows: &[Row], series: &str, (pattern, block_bytes): (&str, u64)) -> Option<Figure> {
    let rate = |threads| find(rows, pattern, block_bytes, threads)?.series.get(series).copied();
    Some(Figure {
        name: format!("{series}, {pattern}, threads 2 / threads 1"),
        value: rate(2)? / rate(1)?,
        target: SCALING_AT_LEAST,
        at_most: false,
    })
}

fn find<'a>(rows: &'a [Row], pattern: &str, block_bytes: u64, threads: u64) -> Option<&'a Row> {
    rows.iter().find(|row| {
        row.case.text("pattern") == pattern
            && row.case.text("fill") == super::IN_ORDER
            && row.case.text("block_bytes") == block_bytes.to_string()
            && row.case.text("threads") == threads.to_string()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::Case;

    fn row(threads: u64, optimistic: f64) -> Row {
        let case = Case::new()
            .with("pattern", "hot")
            .with("block_bytes", 64)
            .with("threads", threads)
            .with("fill", "in_order");
        let mut row = Row::new(case, "ops/s");
        row.series.insert("optimistic".into(), optimistic);
        row.series.insert("memcpy_limit".into(), 10.0);
        row
    }

    #[test]
    fn figures_come_from_their_own_rows_and_need_both_series() {
        let mut shuffled = row(2, 1.0);
        shuffled.case = shuffled.case.with("fill", "shuffled");
        let rows = [shuffled, row(1, 2.0), row(2, 3.0)];
        let shares: Vec<_> = ASKED.iter().filter_map(|asked| asked.figure(&rows)).collect();
        assert_eq!(shares.len(), 1, "only the share of the limit has both series and its row");
        assert_eq!(shares[0].value, 0.3);
        assert!(!shares[0].met());
        let scaling = |rows| scaling(rows, "optimistic", ("hot", 64));
        assert_eq!(scaling(&rows[..]).unwrap().value, 1.5);
        assert!(scaling(&rows[2..]).is_none());
    }
}
