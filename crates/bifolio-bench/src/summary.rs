//! The one-page summary: each mechanism compared with its predecessor and the kernel, the cache
//! compared with the kernel, and the memory bound. At most 50 lines of 80 columns.
//!
//! Called by the program with the finished reports, also when a signal ends the run. It measures
//! nothing: each line is a row of a report, found by its case.

use std::fmt::Write as _;

use bifolio_report::{BESIDE_THE_KERNEL, Line, MECHANISMS, MISSES, Report, short, short_ratio};

use crate::format_bytes;

/// Returns the summary of all reports, with a line feed at its end; empty if there are none.
pub fn summarise(reports: &[Report], wanted: usize) -> String {
    let Some(first) = reports.first() else { return String::new() };
    let host = &first.host;
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{}, {} CPUs\n{}, {} of memory, {}, pages copied by {}",
        host.cpu,
        host.cpus,
        host.kernel,
        format_bytes(host.memory_bytes),
        host.file_system,
        host.copy,
    );
    let features = first.features.iter().filter(|feature| !feature.in_use);
    let missing: Vec<_> = features.map(|feature| feature.name.as_str()).collect();
    if !missing.is_empty() {
        let _ = writeln!(text, "The kernel lacks: {} (bifolio features)", missing.join(", "));
    }
    for (number, mechanism) in (1..).zip(&MECHANISMS) {
        let lines: Vec<_> = mechanism.lines.iter().filter_map(|line| draw(line, reports)).collect();
        if lines.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\n{number}. {}\n   {}", mechanism.title, mechanism.meaning);
        let _ = writeln!(
            text,
            "{}\n{}",
            heading(["before", "kernel"], ["x bef.", "x kern"]).trim_end(),
            lines.concat().trim_end()
        );
    }
    let lines: Vec<_> = BESIDE_THE_KERNEL.iter().filter_map(|line| draw(line, reports)).collect();
    if !lines.is_empty() {
        let heading = heading(["", "kernel"], ["", "x kern"]);
        let _ = writeln!(text, "\n{}\n{}", heading.trim_end(), lines.concat().trim_end());
    }
    if let Some(misses) = draw(&MISSES, reports) {
        let heading = heading(["LRU", "best"], ["x LRU", "x best"]);
        let _ = writeln!(text, "\n{}\n{}", heading.trim_end(), misses.trim_end());
    }
    for report in reports {
        let mut words: Vec<String> = Vec::new();
        for (series, failure) in report.rows.iter().flat_map(|row| &row.failed) {
            let word = format!("{} {series}", failure.word());
            if !words.contains(&word) {
                words.push(word);
            }
        }
        if !words.is_empty() {
            let words = words.join(", ");
            let _ = writeln!(text, "\n{}: {words}; --tables has the reason.", report.bench);
        }
    }
    let sizes = reports.iter().filter_map(|report| Some((report.rss?, &report.bench)));
    if let Some((size, bench)) = sizes.max_by_key(|(size, _)| size.bound_bytes) {
        let _ = writeln!(
            text,
            "\nMemory: a cache of {} in a program of {} at the most ({bench}).",
            format_bytes(size.bound_bytes),
            format_bytes(size.peak_bytes),
        );
    }
    if reports.len() < wanted {
        let _ = writeln!(text, "Incomplete: {} of {wanted} benchmarks were run.", reports.len());
    }
    text.push_str("`x`: how many times better ours is; ~1.0: no difference beyond the noise.\n");
    text.push_str("Everything: --tables, or --report FILE.html; one: bench NAME.\n");
    text
}

/// Formats one line of 80 columns.
fn columns(cells: [&str; 8]) -> String {
    let [label, threads, unit, before, ours, kernel, to_before, to_kernel] = cells;
    let line = format!(
        " {label:23} {threads:>3} {unit:>8} {before:>7} {ours:>12} {kernel:>7} {to_before:>6} \
         {to_kernel:>6}"
    );
    format!("{}\n", line.trim_end())
}

fn heading([before, kernel]: [&str; 2], [to_before, to_kernel]: [&str; 2]) -> String {
    columns(["", "thr", "unit", before, "ours", kernel, to_before, to_kernel])
}

/// Formats a line; `None` if no report has its row.
fn draw(line: &Line, reports: &[Report]) -> Option<String> {
    let row = line.row(reports)?;
    let ours = *row.series.get(line.ours)?;
    let amount = |name: &str| {
        let failed = || row.failed.get(name).map(|failure| failure.word().to_owned());
        row.series.get(name).map(|value| short(*value)).or_else(failed)
    };
    let times_better = |name| row.ratio_text(&line.times_better(row, name), short_ratio);
    let shown = |cell: Option<String>, name: &str| {
        cell.unwrap_or_else(|| if name.is_empty() { "" } else { "-" }.to_owned())
    };
    let spread = row.spread.get(line.ours).map_or(0.0, |[low, high]| (high - low) / 2.0 / ours);
    Some(columns([
        line.label,
        &(row.case.text("threads") + &row.case.text("workers")),
        row.unit.trim_start_matches("bogo "),
        &shown(amount(line.before), line.before),
        &(short(ours)
            + &if spread > 0.0 { format!(" +-{:.0}%", spread * 100.0) } else { String::new() }),
        &shown(amount(line.kernel), line.kernel),
        &shown(times_better(line.before), line.before),
        &shown(times_better(line.kernel), line.kernel),
    ]))
}

#[cfg(test)]
mod tests {
    use bifolio_report::{Case, Host, Row};

    use super::*;

    fn report(
        bench: &'static str,
        case: Case,
        unit: &'static str,
        series: &[(&'static str, f64)],
    ) -> Report {
        let mut row = Row::new(case, unit);
        row.series.extend(series.iter().map(|(name, value)| ((*name).into(), *value)));
        Report { rows: vec![row], ..Report::new(bench, &Host::default(), serde_json::Value::Null) }
    }

    #[test]
    fn less_time_is_better_and_more_work_is_better() {
        let case = Case::new().with("workload", "mapped_stream");
        let series = [("drain_on_any_failure", 300.0), ("targeted", 100.0), ("kernel", 50.0)];
        let text = summarise(&[report("advise", case, "ns/call", &series)], 1);
        let line = text.lines().find(|line| line.contains("advice")).unwrap();
        assert!(line.ends_with("3.00   0.50"), "a losing row looks like a winning one: {line}");
        let case = Case::new().with("pattern", "random");
        let series = [("write_at", 100.0), ("kernel_write", 50.0)];
        let text = summarise(&[report("writes", case, "writes/s", &series)], 9);
        assert!(text.contains("  2.00\n") && text.contains("1 of 9 benchmarks"), "{text}");
    }
}
