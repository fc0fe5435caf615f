//! `bifolio bench`: picks benchmarks, runs them, prints tables or envelopes.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use bifolio_bench::Error::WrongBytes;
use bifolio_bench::{Benchmark, Config, Report, all, clean_on_signals, find, render, summarise};
use parking_lot::Mutex;

use crate::cli::BenchOptions;
use crate::output;
use crate::terminal::Terminal;

/// The hidden subcommand that measures in a separate process.
const CHILD_SUBCOMMAND: &str = "bench-child";

/// The path that stands for standard output.
const TO_OUTPUT: &str = "-";

/// A figure missed its target.
#[derive(Debug, thiserror::Error)]
#[error("{0} of the figures that are asked for were missed")]
pub(crate) struct Missed(usize);

/// Benchmarks that could not be run, or in which a series of the library failed.
#[derive(Debug, thiserror::Error)]
#[error("{0} of the benchmarks failed")]
pub(crate) struct Failed(usize);

/// Runs the chosen benchmarks. One that cannot run does not stop the others, unless it finds wrong
/// bytes.
pub(crate) fn run(options: &BenchOptions) -> anyhow::Result<()> {
    if options.list {
        return list();
    }
    let benchmarks = chosen(options.name.as_deref())?;
    let config = config(options)?;
    // What no benchmark could use is refused at once, not once for each.
    for benchmark in &benchmarks {
        benchmark.needs(&config)?;
    }
    if let Some(directory) = &config.dir {
        fs::read_dir(directory).with_context(|| format!("use {}", directory.display()))?;
    }
    let wanted = benchmarks.len();
    let mut sink = Sink::open(options, wanted)?;
    let finished = Arc::clone(&sink.finished);
    let has_summary = sink.shown == Shown::Summary;
    clean_on_signals(move || {
        if has_summary {
            let _ = output::print(&summarise(&finished.lock(), wanted));
        }
    })?;
    let mut terminal = Terminal::new(wanted);
    for benchmark in benchmarks {
        terminal.begin(benchmark.name());
        let result = bifolio_bench::run(benchmark, &config, &mut terminal);
        terminal.end();
        match result {
            Ok(report) => sink.take(report)?,
            Err(error) if wanted > 1 && !matches!(error, WrongBytes { .. }) => {
                sink.failed += 1;
                let reason = anyhow::Error::from(error);
                output::complain(&format!("{}: {reason:#}", benchmark.name()));
            }
            Err(error) => {
                drop(terminal);
                sink.end(wanted)?;
                return Err(error.into());
            }
        }
    }
    sink.end(wanted)
}

/// Runs the child's side of a measurement.
pub(crate) fn run_child(request: &str) -> anyhow::Result<()> {
    output::print(&bifolio_bench::run_child(request)?)
}

fn list() -> anyhow::Result<()> {
    let width = all().iter().map(|benchmark| benchmark.name().len()).max().unwrap_or(0);
    let lines = all()
        .iter()
        .map(|benchmark| format!("{:width$}  {}\n", benchmark.name(), benchmark.description()));
    output::print(&lines.collect::<String>())
}

fn chosen(name: Option<&str>) -> anyhow::Result<Vec<&'static dyn Benchmark>> {
    let Some(name) = name else {
        return Ok(all().to_vec());
    };
    let Some(benchmark) = find(name) else {
        bail!("no benchmark is called `{name}`: see bifolio bench --list");
    };
    Ok(vec![benchmark])
}

fn config(options: &BenchOptions) -> anyhow::Result<Config> {
    let program = std::env::current_exe().context("find this program's own file")?;
    let program = program.to_str().context("this program's path is not UTF-8")?.to_owned();
    let mut config = Config::new(options.set.into(), vec![program, CHILD_SUBCOMMAND.to_owned()]);
    config.timed = options.seconds;
    config.threads.clone_from(&options.threads);
    config.memory_bytes = options.memory;
    config.size_bytes = options.size;
    config.target = options.target.into();
    config.summary_only = Shown::chosen(options) == Shown::Summary;
    config.trace.clone_from(&options.trace);
    config.dir.clone_from(&options.dir);
    Ok(config)
}

/// The part of the reports that goes to standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Summary,
    Tables,
    Envelopes,
}

impl Shown {
    fn chosen(options: &BenchOptions) -> Self {
        match &options.json {
            Some(path) if path == Path::new(TO_OUTPUT) => Self::Envelopes,
            _ if options.tables || options.name.is_some() => Self::Tables,
            _ => Self::Summary,
        }
    }
}

/// The page of `--report`, written again after each benchmark: it is there whatever ends the run.
struct Page {
    path: PathBuf,
    wanted: usize,
    /// Reports of other programs that are shown on it.
    others: Vec<Report>,
}

impl Page {
    fn open(options: &BenchOptions, wanted: usize) -> anyhow::Result<Option<Self>> {
        let Some(path) = options.report.clone() else { return Ok(None) };
        let mut others = Vec::new();
        for other in &options.with {
            let shown = other.display();
            let text = fs::read_to_string(other).with_context(|| format!("read {shown}"))?;
            others.extend(Report::read_lines(&text).map_err(|(line, error)| {
                anyhow!("{shown}, line {line}: not a report of bench: {error}")
            })?);
        }
        let page = Self { path, wanted, others };
        page.write(&[])?;
        Ok(Some(page))
    }

    /// Replaces the file by a page of what was measured so far.
    fn write(&self, finished: &[Report]) -> anyhow::Result<()> {
        let missing = self.wanted - finished.len();
        let reports: Vec<Report> = finished.iter().chain(&self.others).cloned().collect();
        // A signal may end the program at any time: the page is never half a page.
        let mut partial = self.path.clone().into_os_string();
        partial.push(".partial");
        fs::write(&partial, bifolio_report::page(&reports, missing))
            .and_then(|()| fs::rename(&partial, &self.path))
            .with_context(|| format!("write {}", self.path.display()))
    }
}

/// Destination of the reports.
struct Sink {
    shown: Shown,
    file: Option<File>,
    page: Option<Page>,
    /// Set if figures are compared with their targets, and the number of those that miss it.
    check: bool,
    missed: usize,
    failed: usize,
    finished: Arc<Mutex<Vec<Report>>>,
}

impl Sink {
    /// Opens the file at once: minutes of measuring must not end in "permission denied".
    fn open(options: &BenchOptions, wanted: usize) -> anyhow::Result<Self> {
        let create =
            |path: &Path| File::create(path).with_context(|| format!("create {}", path.display()));
        let path = options.json.as_deref().filter(|path| *path != Path::new(TO_OUTPUT));
        Ok(Self {
            shown: Shown::chosen(options),
            file: path.map(create).transpose()?,
            page: Page::open(options, wanted)?,
            check: options.check,
            missed: 0,
            failed: 0,
            finished: Arc::default(),
        })
    }

    fn take(&mut self, report: Report) -> anyhow::Result<()> {
        let envelope = format!("{}\n", serde_json::to_string(&report)?);
        if let Some(file) = &mut self.file {
            file.write_all(envelope.as_bytes()).context("write the JSON file")?;
        }
        match self.shown {
            Shown::Summary => {}
            Shown::Tables => output::print(&render(&report))?,
            Shown::Envelopes => output::print(&envelope)?,
        }
        if self.check {
            for figure in report.figures.iter().filter(|figure| !figure.met()) {
                self.missed += 1;
                output::complain(&format!("{}: missed: {figure}", report.bench));
            }
        }
        if report.has_failed() {
            self.failed += 1;
            for footnote in report.footnotes() {
                output::complain(&format!("{}: {footnote}", report.bench));
            }
        }
        let mut finished = self.finished.lock();
        finished.push(report);
        self.page.as_ref().map_or(Ok(()), |page| page.write(&finished))
    }

    fn end(self, wanted: usize) -> anyhow::Result<()> {
        if self.shown == Shown::Summary {
            output::print(&summarise(&self.finished.lock(), wanted))?;
        }
        if self.failed > 0 {
            return Err(Failed(self.failed).into());
        }
        if self.missed == 0 { Ok(()) } else { Err(Missed(self.missed).into()) }
    }
}
