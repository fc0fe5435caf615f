//! `cargo x benchmarks`: prints figures and plots of the documentation from `docs/report.json`.
//!
//! That file has one report of `bifolio bench --json` per line; with a file as argument, its
//! reports are copied there first. Printed are the tables of `docs/benchmarks.md`, the pictures in
//! `docs/plots`, and the line below the picture in README, which names machine and date. Nothing
//! else in these files changes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use bifolio_report::{Ratio, Report, Row, names, short, short_ratio, speed};

use crate::cargo::workspace_root;

const DATA: &str = "docs/report.json";
const PAGE: &str = "docs/benchmarks.md";
const README: &str = "README.md";
/// Everything after this line of the page is printed.
const BEGIN: &str = "<!-- printed by `cargo x benchmarks` -->\n";
/// The end of the line of README after which the machine is named.
const PICTURE: &str = "](docs/plots/speed-up.svg)\n";

/// Options of `cargo x benchmarks`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Reports to record, written by `bifolio bench --json FILE`.
    file: Option<PathBuf>,
}

/// Records the reports of a file, if there is one, and prints the documentation.
pub fn run(arguments: &Arguments) -> Result<()> {
    let root = workspace_root();
    if let Some(file) = &arguments.file {
        read(file)?;
        fs::copy(file, root.join(DATA)).context(DATA)?;
    }
    fs::create_dir_all(root.join("docs/plots")).context("docs/plots")?;
    for (path, text) in printed(&root)? {
        fs::write(root.join(&path), text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Returns the text of every file that is printed.
fn printed(root: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let reports = read(&root.join(DATA))?;
    let measured_on = reports.first().map(machine).unwrap_or_default();
    let page = fs::read_to_string(root.join(PAGE)).context(PAGE)?;
    let (head, _) = page.split_once(BEGIN).with_context(|| format!("{PAGE} has no {BEGIN}"))?;
    let mut page = format!("{head}{BEGIN}\nMeasured on {measured_on}.\n");
    page.push_str("\n![Speed relative to the kernel](plots/speed-up.svg)\n");
    reports.iter().for_each(|report| page.push_str(&section(report)));
    let readme = fs::read_to_string(root.join(README)).context(README)?;
    let (head, rest) =
        readme.split_once(PICTURE).with_context(|| format!("{README} has no {PICTURE}"))?;
    let rest = rest.split_once('\n').map_or("", |(_, rest)| rest);
    let caption = format!("*One run of `bench` on {measured_on}. [More](#how-fast).*");
    let pictures = bifolio_report::pictures(&reports).into_iter();
    let pictures = pictures.map(|(name, text)| (format!("docs/plots/{name}.svg").into(), text));
    let readme = format!("{head}{PICTURE}{caption}\n{rest}");
    Ok(pictures.chain([(PAGE.into(), page), (README.into(), readme)]).collect())
}

fn read(path: &Path) -> Result<Vec<Report>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Report::read_lines(&text)
        .map_err(|(line, error)| anyhow!("{}, line {line}: {error}", path.display()))
}

fn machine(report: &Report) -> String {
    let host = &report.host;
    let date = report.started.split('T').next().unwrap_or_default();
    let kind = if host.virtualised { "a virtual machine, " } else { "" };
    format!("{}, {} CPUs, {kind}{}, {}, {date}", host.cpu, host.cpus, host.kernel, host.file_system)
}

/// Returns the heading, the picture and one table for each run of rows with the same unit.
fn section(report: &Report) -> String {
    let bench = &report.bench;
    let mut text = format!("\n## {bench}\n\n![Plots of {bench}](plots/{bench}.svg)\n");
    for rows in report.rows.chunk_by(|left, right| left.unit == right.unit) {
        let _ = write!(text, "\n{}:\n\n{}", rows[0].unit, table(rows, &report.ratios));
    }
    if let Some(rss) = report.rss {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let (peak, bound) = (mebibytes(rss.peak_bytes), mebibytes(rss.bound_bytes));
        let _ =
            writeln!(text, "\nPeak resident size of the process {peak:.1} MiB, bound {bound} MiB.");
    }
    text
}

fn table(rows: &[Row], ratios: &[Ratio]) -> String {
    let cases = names(rows.iter().flat_map(|row| row.case.keys()));
    let series = names(rows.iter().flat_map(|row| row.series.keys().map(AsRef::as_ref)));
    let is_shown = |ratio: &&Ratio| rows.iter().any(|row| row.ratio(ratio).is_some());
    let ratios: Vec<&Ratio> = ratios.iter().filter(is_shown).collect();
    let mut head: Vec<String> = cases.iter().chain(&series).map(|it| (*it).to_owned()).collect();
    head.extend(ratios.iter().map(|ratio| format!("{} / {}", ratio.over, ratio.under)));
    let mut text = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    let or_dash = |cell: Option<String>| {
        cell.filter(|cell| !cell.is_empty()).unwrap_or_else(|| "-".to_owned())
    };
    for row in rows {
        let cells = cases.iter().map(|key| Some(row.case.text(key)));
        let values = series.iter().map(|name| row.series.get(*name).map(|value| short(*value)));
        let ratios = ratios.iter().map(|ratio| {
            let ratio = speed(row, ratio);
            let is_slower = row.ratio_interval(&ratio)?[1] < 1.0;
            let text = row.ratio_text(&ratio, short_ratio)?;
            Some(if is_slower { format!("**{text}**") } else { text })
        });
        let cells: Vec<String> = cells.chain(values).chain(ratios).map(or_dash).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_the_figures_of_the_recorded_report() {
        let root = workspace_root();
        for (path, text) in printed(&root).unwrap() {
            let found = fs::read_to_string(root.join(&path)).unwrap_or_default();
            assert!(found == text, "{} differs: run `cargo x benchmarks`", path.display());
        }
    }
}
