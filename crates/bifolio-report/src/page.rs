//! The page of `bench --report`: one HTML document without scripts and without other files.
//!
//! Called by the program after each benchmark, with all reports so far. Every text of a report is
//! escaped: names of files and processors are not trusted. Rows in which Bifolio is slower look
//! like those in which it is faster.

use std::fmt::Write as _;

use crate::charts::{self, Chart, describe_without};
use crate::envelope::{Figure, Ratio, Report, Row};
use crate::headline::{BESIDE_THE_KERNEL, Line, MECHANISMS, speed};
use crate::numbers::{bytes, short, short_ratio};
use crate::plot::{self, Dot, Paint, Role};

/// Widths of the plot of ratios on a phone and on a wide screen.
const RATIO_WIDTHS: [(&str, u32); 2] = [("narrow", plot::WIDTH), ("wide", 860)];

/// Returns the page of `reports`; `missing` benchmarks of the run were not completed.
pub fn page(reports: &[Report], missing: usize) -> String {
    let (engines, benchmarks): (Vec<&Report>, Vec<&Report>) =
        reports.iter().partition(|report| is_engine(report));
    let mut body = header(reports, missing);
    body.push_str(&mechanisms(reports));
    body.push_str(&engine_cards(&engines));
    body.push_str(&beside_the_kernel(reports));
    benchmarks.iter().chain(&engines).for_each(|report| body.push_str(&section(report)));
    body.push_str(&features(reports));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <title>Bifolio benchmark report</title>\n\
         <style>\n{}{}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        include_str!("page.css"),
        plot::style_sheet(),
    )
}

/// Escapes text for content and for attributes.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Not allowed in XML, and of no use.
            control if control.is_control() && control != '\n' => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Returns `true` for a report of a storage engine: its rows name the size of their data.
fn is_engine(report: &Report) -> bool {
    report.rows.first().is_some_and(|row| !row.case.text("data").is_empty())
}

fn header(reports: &[Report], missing: usize) -> String {
    let mut text = "<header>\n<h1>Bifolio benchmark report</h1>\n".to_owned();
    let Some(first) = reports.first() else {
        text.push_str("<p class=\"early\">No benchmark has been completed.</p>\n</header>\n");
        return text;
    };
    let host = &first.host;
    let kind = if host.virtualised { "virtual machine" } else { "no sign of a hypervisor" };
    let facts = [
        ("Processor", format!("{}, {} CPUs, {kind}", host.cpu, host.cpus)),
        ("Kernel", host.kernel.clone()),
        ("Memory", bytes((host.memory_bytes >> 20 << 20) as f64)),
        ("Files on", host.file_system.clone()),
        ("Pages copied by", host.copy.to_string()),
        ("Started", first.started.replace('T', " ").replace('Z', " UTC")),
        ("Fallbacks", fallbacks(first)),
    ];
    if missing > 0 {
        let _ = writeln!(
            text,
            "<p class=\"early\">{missing} benchmarks are missing: the run was interrupted, or is \
             still going on.</p>"
        );
    }
    text.push_str("<dl>\n");
    for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = writeln!(text, "<div><dt>{name}</dt><dd>{}</dd></div>", escaped(value));
    }
    let _ = writeln!(text, "</dl>\n<pre><code>{}</code></pre>", escaped(&first.command));
    text.push_str(LEGEND);
    text.push_str("<nav>");
    for report in reports {
        let name = escaped(&report.bench);
        let _ = write!(text, "<a href=\"#{name}\">{name}</a> ");
    }
    text.push_str("<a href=\"#features\">features</a></nav>\n</header>\n");
    text
}

const LEGEND: &str = "<p class=\"legend\"><span><i class=\"b00\"></i>Bifolio</span> \
    <span><i class=\"b03\"></i>Bifolio without the mechanism</span> \
    <span><i class=\"b06\"></i>stock kernel</span> \
    <span><i class=\"b09\"></i>device, memory or engine alone</span> \
    <span><i class=\"b0C\"></i>another cache</span></p>\n\
    <p class=\"hint\">Values are medians of interleaved repetitions; whiskers show the smallest \
    and the largest. A ratio above 1 means that the first series is faster; ~1.0 means no \
    difference beyond the noise.</p>\n";

fn fallbacks(report: &Report) -> String {
    let missing = report.features.iter().filter(|feature| !feature.in_use);
    let missing: Vec<&str> = missing.map(|feature| feature.name.as_str()).collect();
    if missing.is_empty() { "none in use".to_owned() } else { missing.join(", ") }
}

/// The cards of the four mechanisms.
fn mechanisms(reports: &[Report]) -> String {
    let mut cards = String::new();
    for (number, mechanism) in (1..).zip(&MECHANISMS) {
        let lines: String =
            mechanism.lines.iter().filter_map(|line| mechanism_line(line, reports)).collect();
        if !lines.is_empty() {
            let _ = writeln!(
                cards,
                "<article><h3>{number}. {}</h3>\n<p>{}</p>\n{lines}</article>",
                escaped(mechanism.title),
                escaped(mechanism.meaning)
            );
        }
    }
    cards_section("Four mechanisms: without, with, and the stock kernel", &cards)
}

fn cards_section(title: &str, cards: &str) -> String {
    if cards.is_empty() {
        return String::new();
    }
    format!("<section>\n<h2>{title}</h2>\n<div class=\"cards\">\n{cards}</div>\n</section>\n")
}

fn mechanism_line(line: &Line, reports: &[Report]) -> Option<String> {
    let row = line.row(reports)?;
    let threads = describe_threads(row);
    let heading = format!("{}{threads}, {}", line.label, row.unit.trim_start_matches("bogo "));
    let bars = [(line.before, "before"), (line.ours, "ours"), (line.kernel, "kernel")];
    let ratios = [(line.before, "before"), (line.kernel, "kernel")];
    let chips = ratios.into_iter().filter_map(|(name, label)| {
        let ratio = row.ratio_text(&line.times_better(row, name), short_ratio)?;
        Some((ratio, label.to_owned()))
    });
    Some(card_lines(&heading, &bars_of(row, &bars), &chips.collect::<Vec<_>>()))
}

fn describe_threads(row: &Row) -> String {
    let count = row.case.text("threads") + &row.case.text("workers");
    match count.as_str() {
        "" => String::new(),
        "1" => ", 1 thread".to_owned(),
        more => format!(", {more} threads"),
    }
}

/// Value and colour of each series that the row has, with the label that is shown.
fn bars_of(row: &Row, series: &[(&str, &str)]) -> Vec<(String, f64, Paint)> {
    let bar = |(name, label): &(&str, &str)| {
        Some(((*label).to_owned(), *row.series.get(*name)?, Paint::of(Role::of(name))))
    };
    series.iter().filter_map(bar).collect()
}

/// Bars as elements of the page, with the ratios below: they take the width that there is.
fn card_lines(heading: &str, bars: &[(String, f64, Paint)], ratios: &[(String, String)]) -> String {
    let top = bars.iter().map(|(_, value, _)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let mut text = format!("<h4>{}</h4>\n<div class=\"bars\">\n", escaped(heading));
    for (label, value, paint) in bars {
        let _ = writeln!(
            text,
            "<span>{}</span><div><i class=\"{}\" style=\"width:{:.2}%\"></i></div><b>{}</b>",
            escaped(label),
            paint.class(),
            value / top * 100.0,
            short(*value)
        );
    }
    text.push_str("</div>\n<p class=\"chips\">");
    for (ratio, label) in ratios {
        let _ = write!(text, "<span><b>{ratio}</b> x {}</span> ", escaped(label));
    }
    text.push_str("</p>\n");
    text
}

/// A card for each engine, of its data that is larger than the memory.
fn engine_cards(engines: &[&Report]) -> String {
    let mut cards = String::new();
    for report in engines {
        let (mut lines, mut factor) = (String::new(), String::new());
        for row in report.rows.iter().filter(|row| row.case.text("data") != "fits") {
            factor = row.case.text("data").trim_end_matches('x').to_owned();
            let names: Vec<(&str, &str)> =
                row.series.keys().map(|name| (name.as_ref(), name.as_ref())).collect();
            let chips = report.ratios.iter().filter_map(|ratio| {
                let text = row.ratio_text(&speed(row, ratio), short_ratio)?;
                Some((text, ratio.under.to_string()))
            });
            let heading = format!("{}, {}", describe_without(row, &["data"]), row.unit);
            lines.push_str(&card_lines(
                &heading,
                &bars_of(row, &names),
                &chips.collect::<Vec<_>>(),
            ));
        }
        if !lines.is_empty() {
            let _ = writeln!(
                cards,
                "<article><h3>{}</h3>\n<p>Data of {} times the memory.</p>\n{lines}</article>",
                escaped(&report.bench),
                escaped(&factor)
            );
        }
    }
    cards_section("Storage engines with more data than memory", &cards)
}

/// The ratios to the kernel of rows that are found in the reports.
pub(crate) fn kernel_dots(reports: &[Report]) -> Vec<Dot> {
    let dot = |line: &Line| {
        let row = line.row(reports)?;
        let ratio = line.times_better(row, line.kernel);
        Some(Dot {
            label: line.label.to_owned(),
            ratio: row.ratio(&ratio)?,
            interval: row.ratio_interval(&ratio)?,
            text: row.ratio_text(&ratio, short_ratio)?,
        })
    };
    let of_mechanisms = MECHANISMS.iter().flat_map(|mechanism| mechanism.lines);
    of_mechanisms.chain(&BESIDE_THE_KERNEL).filter_map(dot).collect()
}

fn beside_the_kernel(reports: &[Report]) -> String {
    let dots = kernel_dots(reports);
    if dots.is_empty() {
        return String::new();
    }
    let mut text = "<section>\n<h2>Beside the stock kernel</h2>\n<p class=\"hint\">Speed relative \
        to the kernel's own way to do the same, with the confidence interval of the median. Left \
        of 1x the kernel is faster.</p>\n"
        .to_owned();
    for (class, width) in RATIO_WIDTHS {
        let svg = plot::ratios(&dots, width, "Speed relative to the kernel");
        let _ = writeln!(text, "<div class=\"{class}\">{svg}</div>");
    }
    text.push_str("</section>\n");
    text
}

/// Everything about one benchmark.
fn section(report: &Report) -> String {
    let name = escaped(&report.bench);
    let mut text = format!("<section id=\"{name}\">\n<h2>{name}</h2>\n");
    text.push_str(&grid(&charts::of_rates(report)));
    for rows in report.rows.chunk_by(|left, right| left.unit == right.unit) {
        text.push_str(&rows_table(rows, &report.ratios));
    }
    let over_time = charts::of_time(report);
    if !over_time.is_empty() {
        let _ = writeln!(
            text,
            "<h3>Longest call over time</h3>\n<p class=\"hint\">The longest call that ended in \
             each interval, all repetitions in a row: a stall is a peak.</p>\n{}",
            grid(&over_time)
        );
    }
    text.push_str(&counts_table(report));
    let mut list = |class: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            let items: String =
                lines.iter().map(|line| format!("<li>{}</li>\n", escaped(line))).collect();
            let _ = writeln!(text, "<ul class=\"{class}\">\n{items}</ul>");
        }
    };
    list("notes", report.notes.clone());
    list("failed", report.footnotes().collect());
    let skipped = report.skipped.iter();
    list("skipped", skipped.map(|it| format!("skipped {}: {}", it.series, it.reason)).collect());
    text.push_str(&targets(report));
    let mut last =
        format!("{} of data were verified.", bytes((report.verified_bytes >> 20 << 20) as f64));
    if let Some(rss) = report.rss {
        let _ = write!(
            last,
            " The process needed {} at its peak, with a bound of {}.",
            bytes((rss.peak_bytes >> 20 << 20) as f64),
            bytes(rss.bound_bytes as f64)
        );
    }
    let _ = writeln!(text, "<p class=\"hint\">{last}</p>\n</section>");
    text
}

/// The results that have a target, folded.
fn targets(report: &Report) -> String {
    let figures = &report.figures;
    if figures.is_empty() {
        return String::new();
    }
    let met = figures.iter().filter(|figure| figure.met()).count();
    let line = |figure: &Figure| {
        let met = if figure.met() { "met" } else { "not met" };
        format!("<li>{}: {met}</li>\n", escaped(&figure.to_string()))
    };
    format!(
        "<details><summary>Targets: {met} of {} met</summary>\n<ul class=\"figures\">\n{}</ul>\n\
         </details>\n",
        figures.len(),
        figures.iter().map(line).collect::<String>()
    )
}

fn grid(charts: &[Chart]) -> String {
    let figure = |chart: &Chart| {
        let caption = escaped(&chart.caption);
        format!("<figure><figcaption>{caption}</figcaption>\n{}</figure>\n", chart.svg)
    };
    format!("<div class=\"plots\">\n{}</div>\n", charts.iter().map(figure).collect::<String>())
}

fn rows_table(rows: &[Row], ratios: &[Ratio]) -> String {
    let cases = names(rows.iter().flat_map(|row| row.case.keys()));
    let series = names(rows.iter().flat_map(Row::names));
    let has_ratio = |ratio: &&Ratio| rows.iter().any(|row| row.ratio(ratio).is_some());
    let ratios: Vec<&Ratio> = ratios.iter().filter(has_ratio).collect();
    let head = cases.iter().chain(&series).map(|name| name.replace('_', " "));
    let ratio_heads =
        ratios.iter().map(|it| format!("{} / {}", it.over, it.under).replace('_', " "));
    let rows = rows.iter().map(|row| {
        let cells = cases.iter().map(|key| row.case.text(key));
        let values = series.iter().map(|name| {
            let Some(value) = row.series.get(*name) else { return row.word(name).to_owned() };
            let spread = row.spread.get(*name).filter(|[low, high]| low < high && *value > 0.0);
            let half = spread.map(|[low, high]| (high - low) / 2.0 / value * 100.0);
            short(*value) + &half.map_or(String::new(), |half| format!(" \u{b1}{half:.0} %"))
        });
        let ratios = ratios.iter().map(|ratio| {
            row.ratio_text(&speed(row, ratio), short_ratio).unwrap_or_else(|| "-".to_owned())
        });
        cells.chain(values).chain(ratios).collect::<Vec<_>>()
    });
    table(&head.chain(ratio_heads).collect::<Vec<_>>(), rows)
}

/// The counts, folded: one line for each series of each row.
fn counts_table(report: &Report) -> String {
    let shown = names(report.shown_counts.iter().map(AsRef::as_ref));
    let has = |name: &&&str| {
        let mut counts = report.rows.iter().flat_map(|row| row.counts.values());
        counts.any(|counts| counts.contains_key(**name))
    };
    let shown: Vec<&str> = shown.iter().filter(has).copied().collect();
    if shown.is_empty() {
        return String::new();
    }
    let mut rows = Vec::new();
    for row in &report.rows {
        for (series, counts) in &row.counts {
            let cell = |name: &&str| counts.get(*name).map_or("-".to_owned(), |it| short(*it));
            let mut cells = vec![describe_without(row, &[]), series.to_string()];
            cells.extend(shown.iter().map(cell));
            rows.push(cells);
        }
    }
    let head = ["case", "series"].into_iter().chain(shown.iter().copied());
    let head: Vec<String> = head.map(|name| name.replace('_', " ")).collect();
    format!("<details><summary>Counts</summary>\n{}</details>\n", table(&head, rows.into_iter()))
}

fn table(head: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect()
    };
    let rows: String = rows.map(|row| format!("<tr>{}</tr>\n", cells("td", &row))).collect();
    format!(
        "<div class=\"table\"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{rows}</tbody>\n\
         </table></div>\n",
        cells("th", head)
    )
}

/// Returns the names in the order of their first use.
pub fn names<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut names = Vec::new();
    for name in all {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn features(reports: &[Report]) -> String {
    let Some(first) = reports.iter().find(|report| !report.features.is_empty()) else {
        return String::new();
    };
    let rows = first.features.iter().map(|feature| {
        let (in_use, why) = if feature.in_use {
            ("yes", feature.reason.clone())
        } else {
            ("no", format!("{}; instead: {}", feature.reason, feature.fallback))
        };
        vec![feature.name.clone(), in_use.to_owned(), why]
    });
    let head = ["feature", "in use", "why, and the fallback"].map(str::to_owned);
    format!(
        "<section id=\"features\">\n<h2>Features of the kernel</h2>\n{}</section>\n",
        table(&head, rows)
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::envelope::{Case, Counts, Host};

    #[test]
    fn texts_of_a_report_are_escaped_wherever_they_are_shown() {
        let bad = "<b>\"&'x";
        let host = Host { cpu: bad.to_owned(), ..Host::default() };
        let mut report = Report::new("a<b", &host, json!({}));
        report.command = bad.to_owned();
        report.notes.push(bad.to_owned());
        let mut row = Row::new(Case::new().with("pattern", bad).with("threads", 1), "ops/s");
        row.add("series<b>", vec![1.0, 2.0], Counts::from_iter([("count".to_owned(), 1.0)]));
        report.rows.push(row);
        report.shown_counts.push("count".into());
        let page = page(&[report], 0);
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        roxmltree::Document::parse_with_options(&page, options).unwrap();
        assert!(page.contains("&lt;b&gt;&quot;&amp;&#39;x"), "{page}");
        for raw in [bad, "a<b<", "series<b>", "\"a<b\""] {
            assert!(!page.contains(raw), "{raw}: {page}");
        }
    }

    #[test]
    fn a_record_of_objects_is_plotted_by_percentiles_processor_time_and_sizes() {
        // Written by `cargo x engine-bench objects --smoke --json FILE`.
        let reports = Report::read_lines(include_str!("../tests/objects.json")).unwrap();
        let page = page(&reports, 0);
        let kinds = ["64 KiB", "8 KiB", "64 KiB, hot", "64 KiB, restarted"];
        for kind in kinds {
            let caption = format!("<figcaption>{kind}, 4x, ns/read, by percentile</figcaption>");
            assert!(page.contains(&caption), "{kind}");
        }
        for caption in ["queries/s", "CPU s", "resident, 4x, MiB"] {
            assert!(page.contains(&format!("<figcaption>{caption}</figcaption>")), "{caption}");
        }
        for phase in ["killed, restarted, 4x", "p99.9, 4x", "64 KiB, restarted, p50, 4x"] {
            assert!(page.contains(phase), "{phase}");
        }
        // The scale is logarithmic: a hit and a request are on it.
        assert!(page.contains("1 us\n") && page.contains("10 ms\n"));
        // A smaller process is the better one.
        let resident = reports[0].rows.iter().find(|row| row.unit == "MiB").unwrap();
        let ratio = speed(resident, &Ratio::new("bifolio", "foyer"));
        assert_eq!(ratio, Ratio::new("foyer", "bifolio"));
    }

    #[test]
    fn a_page_without_reports_says_so() {
        assert!(page(&[], 3).contains("No benchmark has been completed"));
    }

    #[test]
    fn an_engine_has_a_card_for_data_beyond_the_memory() {
        let mut report = Report::new("redb", &Host::default(), json!({}));
        report.ratios.push(Ratio::new("bifolio", "default"));
        for (data, rate) in [("fits", 1234.0), ("8x", 5678.0)] {
            let mut row = Row::new(Case::new().with("work", "point").with("data", data), "ops/s");
            row.add("bifolio", vec![rate], Counts::new());
            row.add("default", vec![rate / 2.0], Counts::new());
            report.rows.push(row);
        }
        let cards = engine_cards(&[&report]);
        assert!(cards.contains("5678") && !cards.contains("1234"), "{cards}");
        assert!(cards.contains("<b>2.00</b> x default"), "{cards}");
        assert!(cards.contains("Data of 8 times the memory"), "{cards}");
    }
}
