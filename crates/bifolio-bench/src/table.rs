//! The tables of a report: series side by side, ratios, and figures with targets.
//!
//! Called by the program with a finished report. Numbers here are rounded; the JSON has all digits.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};

use crate::format_bytes;
use bifolio_report::{Counts, Line, MECHANISMS, Name, Ratio, Report, Row, names, short};

/// Returns the whole report as text, with a line feed at its end.
pub fn render(report: &Report) -> String {
    let mut text = String::new();
    let host = &report.host;
    let kind = if host.virtualised { "virtual machine" } else { "no sign of a hypervisor" };
    let _ = writeln!(
        text,
        "{}: {}, {} CPUs, {}, {} of memory, {}, {kind}, pages copied by {}",
        report.bench,
        host.cpu,
        host.cpus,
        host.kernel,
        format_bytes(host.memory_bytes),
        host.file_system,
        host.copy,
    );
    for rows in report.rows.chunk_by(|left, right| left.unit == right.unit) {
        let (divisor, prefix) = scale_of(rows);
        let unit = &rows[0].unit;
        let _ = writeln!(text, "{prefix}{unit}, medians, +- half the spread");
        let _ = writeln!(text, "{}", rows_table(rows, &report.ratios, divisor));
    }
    for (mechanism, line) in
        MECHANISMS.iter().flat_map(|it| it.lines.iter().map(move |line| (it, line)))
    {
        if let Some(table) = threads_table(line, report) {
            let _ = writeln!(text, "{}: {}, by threads\n{table}", mechanism.title, line.label);
        }
    }
    if let Some(table) = counts_table(&report.rows, &report.shown_counts) {
        let _ = writeln!(text, "{table}");
    }
    for footnote in report.footnotes() {
        let _ = writeln!(text, "  {footnote}");
    }
    for note in &report.notes {
        let _ = writeln!(text, "  note: {note}");
    }
    for figure in &report.figures {
        let _ = writeln!(text, "  {figure}: {}", if figure.met() { "met" } else { "NOT MET" });
    }
    if let Some(rss) = report.rss {
        let _ = writeln!(
            text,
            "  resident size at its peak {}, bound {}, allowed {}",
            format_bytes(rss.peak_bytes),
            format_bytes(rss.bound_bytes),
            format_bytes(rss.allowed_bytes()),
        );
    }
    for skipped in &report.skipped {
        let _ = writeln!(text, "  skipped {}: {}", skipped.series, skipped.reason);
    }
    let _ = writeln!(text, "  verified {} bytes", report.verified_bytes);
    text
}

fn rows_table(rows: &[Row], ratios: &[Ratio], divisor: f64) -> Table {
    let series = names(rows.iter().flat_map(Row::names));
    let keys = names(rows.iter().flat_map(|row| row.case.keys()));
    let possible = |ratio: &&Ratio| rows.iter().any(|row| row.ratio(ratio).is_some());
    let ratios: Vec<&Ratio> = ratios.iter().filter(possible).collect();

    let mut header: Vec<String> = keys.iter().map(|key| stacked(key)).collect();
    header.extend(series.iter().map(|name| stacked(name)));
    header.extend(ratios.iter().map(|ratio| stacked(&format!("{}_/ {}", ratio.over, ratio.under))));
    let mut table = empty(header);
    for row in rows {
        let mut cells: Vec<String> = keys.iter().map(|key| row.case.text(key)).collect();
        cells.extend(series.iter().map(|name| series_cell(row, name, divisor)));
        let text = |ratio| row.ratio_text(ratio, |ratio| format!("{ratio:.2}"));
        cells.extend(ratios.iter().map(|ratio| text(ratio).unwrap_or_else(|| "-".to_owned())));
        table.add_row(cells);
    }
    table
}

/// Returns a table without rows; its numbers are below each other.
fn empty(header: Vec<String>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_BORDERS_ONLY).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Returns the table of the kernel's mailing list that the line answers: a mechanism's gain by
/// threads. `None` for fewer than three numbers of threads.
fn threads_table(line: &Line, report: &Report) -> Option<Table> {
    let rows: Vec<&Row> = line.rows(report).collect();
    let [first, _, _, ..] = rows[..] else { return None };
    let unit = first.unit.trim_start_matches("bogo ");
    let names = [("before", line.before), ("ours", line.ours), ("kernel", line.kernel)];
    let mut header = vec!["threads".to_owned()];
    header.extend(names.map(|(part, name)| format!("{part}, {unit}\n{name}")));
    header.push("gain".to_owned());
    let mut table = empty(header);
    for row in rows {
        let amount = |(_, name)| {
            let value = row.series.get(name).map(|value| short(*value));
            value.unwrap_or_else(|| row.word(name).to_owned())
        };
        let mut cells = vec![row.case.text("threads") + &row.case.text("workers")];
        cells.extend(names.map(amount));
        let gain = row.ratio(&line.times_better(row, line.before));
        let gain = gain.map(|gain| format!("{:+.1} %", (gain - 1.0) * 100.0));
        cells.push(gain.unwrap_or_else(|| "-".to_owned()));
        table.add_row(cells);
    }
    Some(table)
}

/// Returns the counts, one line for each series of each row that has any of them; `None` if no row
/// has any.
fn counts_table(rows: &[Row], names: &[Name]) -> Option<Table> {
    let keys = bifolio_report::names(rows.iter().flat_map(|row| row.case.keys()));
    let present = |name: &&Name| {
        rows.iter().any(|row| row.counts.values().any(|counts| counts.contains_key(name.as_ref())))
    };
    let names: Vec<&Name> = names.iter().filter(present).collect();
    names.first()?;
    let mut header: Vec<String> = keys.iter().map(|key| stacked(key)).collect();
    header.push("series".to_owned());
    header.extend(names.iter().map(|name| stacked(name)));
    let mut table = empty(header);
    for row in rows {
        let counted = |counts: &Counts| names.iter().any(|name| counts.contains_key(name.as_ref()));
        for (series, counts) in row.counts.iter().filter(|(_, counts)| counted(counts)) {
            let mut cells: Vec<String> = keys.iter().map(|key| row.case.text(key)).collect();
            cells.push(series.to_string());
            cells.extend(names.iter().map(|name| count_cell(counts.get(name.as_ref()).copied())));
            table.add_row(cells);
        }
    }
    Some(table)
}

/// Formats a count: whole and large ones without decimals, small ones with the significant digits.
fn count_cell(count: Option<f64>) -> String {
    match count {
        None => "-".to_owned(),
        Some(large) if large >= 100.0 || large.fract() == 0.0 => format!("{large:.0}"),
        Some(small) => format!("{small:.3}"),
    }
}

/// Splits a name into several short lines, so that many columns fit.
fn stacked(name: &str) -> String {
    name.replace('_', "\n")
}

/// Returns the divisor of a whole table, so that its numbers are comparable, and its name.
fn scale_of(rows: &[Row]) -> (f64, &'static str) {
    let largest = rows.iter().flat_map(|row| row.series.values()).copied().fold(0.0, f64::max);
    match largest {
        large if large >= 1e6 => (1e6, "million "),
        medium if medium >= 1e3 => (1e3, "thousand "),
        _ => (1.0, ""),
    }
}

fn series_cell(row: &Row, name: &str, divisor: f64) -> String {
    let Some(&value) = row.series.get(name) else {
        return row.word(name).to_owned();
    };
    let spread = row.spread.get(name).filter(|[low, high]| low < high && value > 0.0);
    let Some([low, high]) = spread else {
        return format!("{:.2}", value / divisor);
    };
    let half_width_percent = (high - low) / 2.0 / value * 100.0;
    format!("{:.2}\n+-{half_width_percent:.0}%", value / divisor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::{Case, Failure, Host};

    #[test]
    fn three_numbers_of_threads_answer_the_table_of_the_kernel() {
        let mut report = Report::new("small-reads", &Host::default(), serde_json::Value::Null);
        for threads in [1_u32, 2, 4] {
            let case = Case::new().with("pattern", "hot").with("threads", threads);
            let mut row = Row::new(case, "ops/s");
            row.add("pin_cas", vec![2e6], Counts::new());
            row.add("pin_frozen_bit", vec![2e6 + 5e5 * f64::from(threads)], Counts::new());
            let text = render(&report);
            assert!(!text.contains("pins of one page"), "too few: {text}");
            report.rows.push(row);
        }
        let text = render(&report);
        let start = text.find("pins of one page, by threads").expect(&text);
        let last = text[start..].lines().find(|line| line.contains(" 4 ")).unwrap();
        let cells: Vec<&str> = last.trim_matches(['\u{2502}', ' ']).split_whitespace().collect();
        assert_eq!(cells, ["4", "2.00", "M", "4.00", "M", "-", "+100.0", "%"], "{text}");
    }

    #[test]
    fn counts_have_columns_and_a_killed_series_is_a_word_with_a_footnote() {
        let mut row = Row::new(Case::new().with("threads", 1), "ops/s");
        let counts = [("p50_ns", 12345.4), ("misses", 0.5)];
        let counts = counts.map(|(name, value)| (name.to_owned(), value));
        row.add("ours", vec![3e6, 4e6, 5e6], Counts::from(counts));
        let failure = Failure { killed: true, reason: "out of memory".into() };
        row.failed.insert("rival".into(), failure);
        let mut report = Report::new("b", &Host::default(), serde_json::Value::Null);
        report.rows.push(row);
        report.ratios = vec![Ratio::new("ours", "rival")];
        report.shown_counts = ["p50_ns", "absent", "misses"].map(Into::into).to_vec();
        let text = render(&report);
        assert!(text.contains("million ops/s") && text.contains(" 4.00 "), "{text}");
        assert!(text.contains(" 12345 ") && text.contains(" 0.500 "), "{text}");
        assert!(!text.contains("absent") && text.contains("+-"), "{text}");
        assert!(text.contains(" killed "), "{text}");
        assert!(text.contains("  killed rival, threads 1: out of memory\n"), "{text}");
    }
}
