//! `bifolio bench`: picks benchmarks, runs them, prints tables or envelopes.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use bifolio_bench::{Benchmark, Config, Report, all, clean_on_signals, find, render};

use crate::cli::BenchOptions;
use crate::output;
use crate::terminal::Terminal;

/// The hidden subcommand that measures in a process of its own.
const CHILD_SUBCOMMAND: &str = "bench-child";

/// Runs what was asked for.
pub(crate) fn run(options: &BenchOptions) -> anyhow::Result<()> {
    if options.list {
        return list();
    }
    let benchmarks = chosen(options.name.as_deref())?;
    let config = config(options)?;
    let mut sink = Sink::open(options.json.as_deref())?;
    clean_on_signals()?;
    for benchmark in benchmarks {
        let report = {
            let mut terminal = Terminal::new();
            bifolio_bench::run(benchmark, &config, &mut terminal)?
        };
        sink.take(&report)?;
    }
    Ok(())
}

/// The child's side of a measurement.
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
    config.dir.clone_from(&options.dir);
    Ok(config)
}

/// Where reports go.
enum Sink {
    Tables,
    TablesAndFile(File),
    Envelopes,
}

impl Sink {
    /// Opens the file now: minutes of measuring must not end in "permission denied".
    fn open(json: Option<&Path>) -> anyhow::Result<Self> {
        Ok(match json {
            None => Self::Tables,
            Some(path) if path == Path::new("-") => Self::Envelopes,
            Some(path) => Self::TablesAndFile(
                File::create(path).with_context(|| format!("create {}", path.display()))?,
            ),
        })
    }

    fn take(&mut self, report: &Report) -> anyhow::Result<()> {
        let envelope = format!("{}\n", serde_json::to_string(report)?);
        match self {
            Self::Tables => output::print(&render(report)),
            Self::Envelopes => output::print(&envelope),
            Self::TablesAndFile(file) => {
                file.write_all(envelope.as_bytes()).context("write the JSON file")?;
                output::print(&render(report))
            }
        }
    }
}
