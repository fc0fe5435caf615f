//! `cargo x benchmarks`: prints `docs/benchmarks.md` from `docs/benchmarks.json`.
//!
//! Both files have one report of `bifolio bench --json` per benchmark. With a file as argument, its
//! reports are copied to `docs/benchmarks.json` first, without what the page does not show. The
//! page contains no other figures than these.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::cargo::workspace_root;

const DATA: &str = "docs/benchmarks.json";
const PAGE: &str = "docs/benchmarks.md";
/// Everything after this line of the page is printed.
const BEGIN: &str = "<!-- printed by `cargo x benchmarks` -->\n";

/// Ratios of each benchmark: more than 1 if Bifolio, or the series named first, is faster.
const RATIOS: [&str; 9] = [
    "small-reads optimistic/kernel_pread_tmpfs optimistic/memcpy_limit pin_frozen_bit/pin_cas",
    "random-reads read_at/raw_direct read_many/raw_direct read_at/kernel_pread read_at/kernel_mmap",
    "scan read_at/raw_direct read_at/kernel_pread",
    "writes write_at/raw_direct write_at/kernel_write",
    "seq-reads batched/kernel_tmpfs batched/one_by_one batched/memcpy_limit",
    "swap bifolio_swap/kernel_swap",
    "reclaim flush_per_batch_31/kernel_swap flush_per_batch_31/kernel_mmap \
     flush_per_batch_31/flush_per_folio",
    "map-reads map/kernel_small map/kernel_mapping",
    "advise targeted/kernel targeted/drain_on_any_failure",
];

/// Options of `cargo x benchmarks`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Reports to record, written by `bifolio bench --json FILE`.
    file: Option<PathBuf>,
}

/// Records the reports of a file, if there is one, and prints the page.
pub fn run(arguments: &Arguments) -> Result<()> {
    let root = workspace_root();
    if let Some(file) = &arguments.file {
        let mut reports = read(file)?;
        reports.iter_mut().for_each(keep_shown);
        let lines: Vec<String> = reports.iter().map(Value::to_string).collect();
        fs::write(root.join(DATA), lines.join("\n") + "\n").context(DATA)?;
    }
    let page = fs::read_to_string(root.join(PAGE)).context(PAGE)?;
    let (head, _) = page.split_once(BEGIN).with_context(|| format!("{PAGE} has no {BEGIN}"))?;
    let mut page = format!("{head}{BEGIN}");
    let reports = read(&root.join(DATA))?;
    page.push_str(&reports.first().map(machine).unwrap_or_default());
    reports.iter().for_each(|report| page.push_str(&section(report)));
    fs::write(root.join(PAGE), page).context(PAGE)
}

fn read(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    text.lines().map(|line| serde_json::from_str(line).context("a report")).collect()
}

fn keep_shown(report: &mut Value) {
    let rows = report["rows"].as_array().into_iter().flatten();
    let keep =
        |row: &Value| json!({"case": row["case"], "unit": row["unit"], "series": row["series"]});
    let rows: Vec<Value> = rows.map(keep).collect();
    *report = json!({
        "bench": report["bench"], "host": report["host"], "config": report["config"],
        "rss": report["rss"], "rows": rows,
    });
}

fn machine(report: &Value) -> String {
    let host = &report["host"];
    let [cpu, cpus, kernel, storage] =
        ["cpu", "cpus", "kernel", "file_system"].map(|key| plain(&host[key]));
    format!("\nMeasured on: {cpu}, {cpus} CPUs, {kernel}, {storage}.\n")
}

/// Returns the heading and one table for each run of rows with the same unit.
fn section(report: &Value) -> String {
    let bench = report["bench"].as_str().unwrap_or_default();
    let words = RATIOS.map(|line| line.split(' ').collect::<Vec<_>>());
    let words = words.into_iter().find(|words| words[0] == bench).unwrap_or_default();
    let ratios: Vec<_> = words.iter().filter_map(|word| word.split_once('/')).collect();
    let mut text = format!("\n## {bench}\n");
    let rows = report["rows"].as_array().map_or(&[][..], Vec::as_slice);
    for rows in rows.chunk_by(|left, right| left["unit"] == right["unit"]) {
        let _ = write!(
            text,
            "\n{}:\n\n{}",
            rows[0]["unit"].as_str().unwrap_or(""),
            table(rows, &ratios)
        );
    }
    if let (Some(peak), Some(bound)) =
        (report["rss"]["peak_bytes"].as_f64(), report["rss"]["bound_bytes"].as_f64())
    {
        let mebibytes = |bytes| bytes / f64::from(1 << 20);
        let (peak, bound) = (mebibytes(peak), mebibytes(bound));
        let _ =
            writeln!(text, "\nPeak resident size of the process {peak:.1} MiB, bound {bound} MiB.");
    }
    text
}

fn table(rows: &[Value], ratios: &[(&str, &str)]) -> String {
    let (cases, series) = (names(rows, "case"), names(rows, "series"));
    let is_shown = |(over, under): &&(&str, &str)| {
        [over, under].iter().all(|it| series.iter().any(|name| name == *it))
    };
    let ratios: Vec<&(&str, &str)> = ratios.iter().filter(is_shown).collect();
    let mut head: Vec<String> = cases.iter().chain(&series).cloned().collect();
    head.extend(ratios.iter().map(|(over, under)| format!("{over} / {under}")));
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    // Times per call: the smaller one is the faster.
    let is_time = rows[0]["unit"].as_str().is_some_and(|unit| unit.starts_with("ns"));
    for row in rows {
        let mut cells: Vec<String> = cases.iter().map(|name| plain(&row["case"][name])).collect();
        cells.extend(
            series.iter().map(|name| row["series"][name].as_f64().map_or("-".into(), rounded)),
        );
        cells.extend(ratios.iter().map(|(over, under)| {
            let values = (row["series"][*over].as_f64(), row["series"][*under].as_f64());
            let (Some(over), Some(under)) = values else { return "-".into() };
            let ratio = if is_time { under / over } else { over / under };
            if ratio < 1.0 { format!("**{}**", rounded(ratio)) } else { rounded(ratio) }
        }));
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Returns the keys of the objects `field` of all rows, in the order of their first use.
fn names(rows: &[Value], field: &str) -> Vec<String> {
    let mut names = Vec::new();
    for name in rows.iter().filter_map(|row| row[field].as_object()).flat_map(Map::keys) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| if value.is_null() { "-".into() } else { value.to_string() }, str::to_owned)
}

/// Returns three significant digits, with a unit prefix.
fn rounded(value: f64) -> String {
    let (value, prefix) = match value {
        large if large >= 1e6 => (large / 1e6, " M"),
        medium if medium >= 1e3 => (medium / 1e3, " k"),
        small => (small, ""),
    };
    let digits = (2.0 - value.abs().max(0.01).log10().floor()).clamp(0.0, 2.0) as usize;
    format!("{value:.digits$}{prefix}")
}
