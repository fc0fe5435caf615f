//! The figures that are asked of `seq-reads`, worked out from its rows. Pure functions.

use super::contiguity;
use bifolio_report::{Figure, Ratio, Row};

const OF_ONE: Ratio = Ratio::new("batched", "one_by_one");
const OF_KERNEL: Ratio = Ratio::new("batched", "kernel_tmpfs");
const OF_LIMIT: Ratio = Ratio::new("batched", "memcpy_limit");
const OF_LOCKED: Ratio = Ratio::new("batched", "locked_one_by_one");

/// The columns beside the series.
pub(super) const RATIOS: [Ratio; 4] = [OF_KERNEL, OF_LOCKED, OF_ONE, OF_LIMIT];

/// The counts that the second table shows.
pub(super) const SHOWN_COUNTS: [&str; 2] = ["refs_per_mib", "entries_per_mib"];

/// After churn the cache does not keep neighbours together: that row has no target.
const CONTIGUITY_AT_LEAST: [(&str, f64); 1] = [(contiguity::FREE, 0.95)];

/// The ratios asked of a row.
fn asked(layout: &str, folio_bytes: u64, block_bytes: u64) -> Vec<(Ratio, f64)> {
    let small_block = block_bytes == 4096;
    match layout {
        "written" => {
            let of_kernel = if small_block { 3.0 } else { 1.5 };
            vec![(OF_ONE, 0.97), (OF_KERNEL, of_kernel), (OF_LIMIT, 0.90)]
        }
        "scattered" => {
            // A large folio is in order within itself: there is no next frame to foresee.
            let of_one = match (folio_bytes, small_block) {
                (4096, true) => 1.15,
                (4096, false) => 1.1,
                _ => 0.99,
            };
            vec![(OF_ONE, of_one), (OF_KERNEL, if small_block { 1.5 } else { 1.0 })]
        }
        _ => Vec::new(),
    }
}

/// Every figure that the rows have the series for.
pub(super) fn figures(rows: &[Row]) -> Vec<Figure> {
    let mut figures: Vec<Figure> = rows.iter().flat_map(ratios).collect();
    figures.extend(rows.iter().filter_map(|row| unwritten(row, rows)));
    figures.extend(CONTIGUITY_AT_LEAST.iter().filter_map(|(state, target)| {
        let row = rows.iter().find(|row| row.case.text("frames") == *state)?;
        let name = format!("neighbouring pages on neighbouring frames, {state}");
        let value = *row.series.get(contiguity::SERIES)?;
        Some(Figure { name, value, target: *target, at_most: false })
    }));
    figures
}

fn ratios(row: &Row) -> Vec<Figure> {
    let number = |key| row.case.text(key).parse().unwrap_or(0);
    let asked = asked(&row.case.text("layout"), number("folio_bytes"), number("block_bytes"));
    let figure = |(ratio, target): (Ratio, f64)| {
        let name = format!("{} / {}, {}", ratio.over, ratio.under, describe(row));
        Some(Figure { name, value: row.ratio(&ratio)?, target, at_most: false })
    };
    asked.into_iter().filter_map(figure).collect()
}

/// Compares unwritten bytes with written ones, in the same blocks of the same folios.
fn unwritten(row: &Row, rows: &[Row]) -> Option<Figure> {
    if !matches!(row.case.text("layout").as_str(), "allocated" | "hole") {
        return None;
    }
    let same = |key| move |other: &&Row| other.case.text(key) == row.case.text(key);
    let written = rows
        .iter()
        .filter(|other| other.case.text("layout") == "written")
        .filter(same("folio_bytes"))
        .find(same("block_bytes"))?;
    let value = row.series.get("batched")? / written.series.get("batched")?;
    let name = format!("batched, against written, {}", describe(row));
    Some(Figure { name, value, target: 1.0, at_most: false })
}

fn describe(row: &Row) -> String {
    let text = |key| row.case.text(key);
    let (layout, folio, block) = (text("layout"), text("folio_bytes"), text("block_bytes"));
    format!("{layout}, folios of {folio}, {block} bytes a call")
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::Case;

    fn row(layout: &str, block_bytes: u64, batched: f64) -> Row {
        let case = Case::new()
            .with("layout", layout)
            .with("folio_bytes", 4096)
            .with("block_bytes", block_bytes);
        let mut row = Row::new(case, "GiB/s");
        row.series.insert("batched".into(), batched);
        row.series.insert("one_by_one".into(), 10.0);
        row
    }

    #[test]
    fn each_row_is_asked_for_its_own() {
        let rows = [
            row("written", 4096, 10.0),
            row("scattered", 4096, 12.0),
            row("scattered", 65536, 10.5),
            row("hole", 65536, 20.0),
            row("hole", 4096, 20.0),
        ];
        let figures = figures(&rows);
        let met: Vec<bool> = figures.iter().map(Figure::met).collect();
        assert_eq!(met, [true, true, false, true], "only the hole in blocks that were written too");
        assert_eq!(figures[3].value, 2.0);
        assert_eq!(asked("scattered", 2 << 20, 1 << 20)[0].1, 0.99);
    }
}
