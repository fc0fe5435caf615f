//! The plots of one report: which rows are drawn together, and how.
//!
//! Rows that differ only in one number (threads, block size ...) are one plot: lines if there are
//! three steps or more, bars otherwise. Percentiles, which are decades apart, have a logarithmic
//! scale. `reclaim` also has its series by batch size and its shootdowns per page. Rows with
//! samples have the longest call in each interval.

use crate::envelope::{Report, Row};
use crate::numbers::bytes;
use crate::plot::{Axis, Bar, Group, Line, Paint, Scale, bars, lines};

/// A drawn plot.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    pub(crate) caption: String,
    pub(crate) svg: String,
}

/// The key of times that are percentiles.
const PERCENTILE: &str = "percentile";
/// Keys that may be a horizontal axis, the first of equally good ones is taken.
const AXES: [&str; 8] = [
    PERCENTILE,
    "threads",
    "workers",
    "requests_per_call",
    "row_bytes",
    "block_bytes",
    "folio_bytes",
    "cache_percent",
];
/// Rows that share a plot only because each of them is alone.
const ROWS_TOGETHER: usize = 5;
/// Fewer intervals of a series are no course of time.
const INTERVALS_MIN: usize = 4;
const BATCH_PREFIX: &str = "flush_per_batch_";

/// Returns the plots of the rates of all rows.
pub(crate) fn of_rates(report: &Report) -> Vec<Chart> {
    let mut charts = Vec::new();
    for rows in report.rows.chunk_by(|left, right| left.unit == right.unit) {
        charts.extend(by_batch(rows));
        for facet in facets(rows) {
            charts.extend(draw_facet(&facet));
        }
    }
    charts
}

/// Returns the plots of the longest calls over time, one for each row that has them.
pub(crate) fn of_time(report: &Report) -> Vec<Chart> {
    report.rows.iter().filter_map(longest_calls).collect()
}

/// Rows of one plot.
struct Facet<'a> {
    rows: Vec<&'a Row>,
    /// The key in which they differ, if it is one number.
    axis: Option<&'static str>,
}

/// Divides rows with the same unit into plots.
fn facets(rows: &[Row]) -> Vec<Facet<'_>> {
    let mut left: Vec<&Row> = rows.iter().collect();
    let mut facets: Vec<Facet<'_>> = Vec::new();
    loop {
        let divide = |axis: &'static str| {
            let mut parts: Vec<(String, Vec<&Row>)> = Vec::new();
            for row in left.iter().filter(|row| row.case.number(axis).is_some()) {
                let rest = describe_without(row, &[axis]);
                match parts.iter_mut().find(|(other, _)| *other == rest) {
                    Some((_, part)) => part.push(row),
                    None => parts.push((rest, vec![row])),
                }
            }
            let parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
            (axis, parts.iter().map(Vec::len).max().unwrap_or(0), parts)
        };
        // Of equal maxima `max_by_key` returns the last.
        let best = AXES.iter().rev().map(|axis| divide(axis)).max_by_key(|(_, most, _)| *most);
        let Some((axis, 2.., parts)) = best else { break };
        for part in parts.into_iter().filter(|part| part.len() > 1) {
            left.retain(|row| !part.iter().any(|other| std::ptr::eq(*row, *other)));
            facets.push(Facet { rows: part, axis: Some(axis) });
        }
    }
    facets.extend(left.chunks(ROWS_TOGETHER).map(|rows| Facet { rows: rows.to_vec(), axis: None }));
    let place = |facet: &Facet<'_>| rows.iter().position(|row| std::ptr::eq(row, facet.rows[0]));
    facets.sort_by_key(place);
    facets
}

fn draw_facet(facet: &Facet<'_>) -> Option<Chart> {
    let names = names_of(&facet.rows);
    let paints = Paint::of_all(&names);
    let unit = &facet.rows[0].unit;
    let Some(axis) = facet.axis else {
        let is_single = facet.rows.len() == 1;
        let heading = |row| if is_single { String::new() } else { describe_without(row, &[]) };
        let groups: Vec<Group> =
            facet.rows.iter().map(|row| group(row, &names, &paints, heading(row))).collect();
        let caption = match facet.rows[..] {
            [row] => format!("{}, {unit}", describe_without(row, &[])),
            _ => unit.to_string(),
        };
        return Some(Chart { svg: bars(&groups, false, &caption), caption });
    };
    let caption = format!("{}, {unit}", describe_without(facet.rows[0], &[axis]));
    let step = |row: &Row| step_text(axis, row.case.number(axis).unwrap_or(0.0));
    if facet.rows.len() < 3 {
        let groups: Vec<Group> =
            facet.rows.iter().map(|row| group(row, &names, &paints, step(row))).collect();
        return Some(Chart { svg: bars(&groups, true, &caption), caption });
    }
    let drawn: Vec<Line> = names
        .iter()
        .zip(&paints)
        .map(|(name, paint)| Line {
            name: (*name).to_owned(),
            points: points(&facet.rows, |row| row.series.get(*name).copied()),
            paint: paint.clone(),
        })
        .collect();
    let caption = format!("{caption}, by {}", axis.replace('_', " "));
    let steps = Axis::Steps(facet.rows.iter().map(|row| step(row)).collect());
    let is_percentile = axis == PERCENTILE && unit.starts_with("ns");
    let scale = if is_percentile { Scale::Nanoseconds } else { Scale::Linear };
    Some(Chart { svg: lines(&drawn, &steps, scale, &caption)?, caption })
}

/// Numbers the rows from zero and drops those without a value.
fn points(rows: &[&Row], value: impl Fn(&Row) -> Option<f64>) -> Vec<(f64, f64)> {
    let numbered = (0..).map(f64::from).zip(rows.iter().map(|row| value(row)));
    numbered.filter_map(|(x, y)| Some((x, y?))).collect()
}

fn group(row: &Row, names: &[&str], paints: &[Paint], heading: String) -> Group {
    let bar = |(name, paint): (&&str, &Paint)| {
        let value = *row.series.get(*name)?;
        let range = row.spread.get(*name).copied().unwrap_or([value; 2]);
        Some(Bar { name: (*name).to_owned(), value, range, paint: paint.clone() })
    };
    Group { heading, bars: names.iter().zip(paints).filter_map(bar).collect() }
}

/// The plots of `reclaim` by number of pages per flush: rates, and shootdowns per evicted page.
fn by_batch(rows: &[Row]) -> Vec<Chart> {
    let size_of = |name: &str| match name {
        "flush_per_folio" => Some(1),
        batch => batch.strip_prefix(BATCH_PREFIX)?.parse::<u32>().ok(),
    };
    let all: Vec<&Row> = rows.iter().collect();
    let mut batches: Vec<(u32, &str)> =
        names_of(&all).into_iter().filter_map(|name| Some((size_of(name)?, name))).collect();
    batches.sort_unstable();
    if batches.len() < 3 {
        return Vec::new();
    }
    let steps = Axis::Steps(batches.iter().map(|(size, _)| size.to_string()).collect());
    let labels: Vec<String> = rows.iter().map(|row| describe_without(row, &[])).collect();
    let names: Vec<&str> = labels.iter().map(String::as_str).collect();
    let of = |value: &dyn Fn(&Row, &str) -> Option<f64>| -> Vec<Line> {
        let line = |((row, name), paint): ((&Row, &&str), Paint)| Line {
            name: (*name).to_owned(),
            points: (0..)
                .map(f64::from)
                .zip(&batches)
                .filter_map(|(x, (_, series))| Some((x, value(row, series)?)))
                .collect(),
            paint,
        };
        rows.iter().zip(&names).zip(Paint::distinct(rows.len())).map(line).collect()
    };
    let rates = of(&|row, series| row.series.get(series).copied());
    let shootdowns = of(&|row, series| shootdowns_per_page(row, series));
    let unit = &rows[0].unit;
    let caption = format!("{unit}, by pages per flush");
    let rates = lines(&rates, &steps, Scale::Linear, &caption).map(|svg| Chart { caption, svg });
    let caption = "TLB shootdowns per evicted page, by pages per flush".to_owned();
    let shootdowns =
        lines(&shootdowns, &steps, Scale::Logarithmic, &caption).map(|svg| Chart { caption, svg });
    let mut charts: Vec<Chart> = rates.into_iter().chain(shootdowns).collect();
    charts.extend(rows.iter().filter_map(shootdowns_of));
    charts
}

fn shootdowns_per_page(row: &Row, series: &str) -> Option<f64> {
    let pages = row.count(series, "pages_evicted").filter(|pages| *pages > 0.0)?;
    Some(row.count(series, "tlb_shootdowns")? / pages)
}

/// Shootdowns per page of all series of a row, the kernel's among them.
fn shootdowns_of(row: &Row) -> Option<Chart> {
    let names: Vec<&str> = row.series.keys().map(AsRef::as_ref).collect();
    let bar = |(name, paint): (&&str, Paint)| {
        let value = shootdowns_per_page(row, name)?;
        Some(Bar { name: (*name).to_owned(), value, range: [value; 2], paint })
    };
    let bars_of: Vec<Bar> = names.iter().zip(Paint::of_all(&names)).filter_map(bar).collect();
    let caption = format!("{}, TLB shootdowns per evicted page", describe_without(row, &[]));
    let has_some = bars_of.iter().any(|bar| bar.value > 0.0);
    let groups = [Group { heading: String::new(), bars: bars_of }];
    has_some.then(|| Chart { svg: bars(&groups, true, &caption), caption })
}

/// The longest call in each interval of time, by series: a stall is a peak.
fn longest_calls(row: &Row) -> Option<Chart> {
    let names: Vec<&str> = row.samples.keys().map(AsRef::as_ref).collect();
    let mut seconds = 0.0_f64;
    let mut drawn = Vec::new();
    for (name, paint) in names.iter().zip(Paint::of_all(&names)) {
        let intervals = &row.samples[*name];
        let ends = (1..).map(|number| f64::from(number) * intervals.seconds);
        let points: Vec<_> = ends.zip(intervals.longest_ns.iter().copied()).collect();
        seconds = points.last().map_or(seconds, |(end, _)| seconds.max(*end));
        if points.len() >= INTERVALS_MIN {
            drawn.push(Line { name: (*name).to_owned(), points, paint });
        }
    }
    let caption = format!("{}, longest call", describe_without(row, &[]));
    let svg = lines(&drawn, &Axis::Seconds(seconds), Scale::Nanoseconds, &caption)?;
    Some(Chart { caption, svg })
}

/// Returns the names of all series of `rows`, in the order of their first use.
fn names_of<'a>(rows: &[&'a Row]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for name in rows.iter().flat_map(|row| row.series.keys()) {
        if !names.contains(&name.as_ref()) {
            names.push(name);
        }
    }
    names
}

/// Returns the case of a row in words, without some of its keys.
pub(crate) fn describe_without(row: &Row, keys: &[&str]) -> String {
    let words =
        row.case.keys().filter(|key| !keys.contains(key)).map(|key| match row.case.number(key) {
            Some(number) => step_text(key, number),
            None => row.case.text(key).replace('_', " "),
        });
    words.collect::<Vec<_>>().join(", ")
}

/// Returns a number of a case with its unit.
fn step_text(key: &str, number: f64) -> String {
    match key {
        "threads" | "workers" => {
            let plural = if number == 1.0 { "" } else { "s" };
            format!("{number} {}{plural}", key.trim_end_matches('s'))
        }
        "depth" => format!("depth {number}"),
        PERCENTILE => format!("p{number}"),
        "cache_percent" => format!("cache of {number} %"),
        "requests_per_call" => format!("{number} per call"),
        "folio_bytes" => format!("folios of {}", bytes(number)),
        size if size.ends_with("_bytes") => bytes(number),
        other => format!("{} {number}", other.replace('_', " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::{Case, Counts};

    fn row(pattern: &str, threads: usize, block_bytes: u64) -> Row {
        let case = Case::new()
            .with("pattern", pattern)
            .with("threads", threads)
            .with("block_bytes", block_bytes);
        let mut row = Row::new(case, "ops/s");
        row.add("optimistic", vec![3.0, 4.0], Counts::new());
        row
    }

    #[test]
    fn rows_that_differ_in_one_number_share_a_plot() {
        let rows = [
            row("hot", 1, 64),
            row("hot", 2, 64),
            row("uniform", 1, 64),
            row("uniform", 1, 4096),
            row("uniform", 1, 65536),
            row("single", 1, 64),
        ];
        let facets = facets(&rows);
        let found: Vec<_> = facets.iter().map(|facet| (facet.rows.len(), facet.axis)).collect();
        assert_eq!(found, [(2, Some("threads")), (3, Some("block_bytes")), (1, None)]);
    }

    #[test]
    fn a_case_is_described_in_words() {
        assert_eq!(describe_without(&row("in_order", 1, 65536), &[]), "in order, 1 thread, 64 KiB");
        assert_eq!(describe_without(&row("hot", 2, 64), &["block_bytes"]), "hot, 2 threads");
    }

    #[test]
    fn stalls_are_drawn_and_rows_without_samples_are_not() {
        let mut row = row("hot", 1, 64);
        assert!(longest_calls(&row).is_none());
        let longest_ns = vec![1e3, 2e9, 0.0, 1e4];
        let samples = crate::envelope::Intervals { seconds: 1.0, rates: vec![1.0; 4], longest_ns };
        row.samples.insert("optimistic".into(), samples);
        let chart = longest_calls(&row).unwrap();
        assert_eq!(chart.svg.matches("<circle").count(), 3, "no call ended in one interval");
    }
}
