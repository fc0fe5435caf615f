//! A worker that is lost: a process that runs the queries over a tier until it is killed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::queries::{COUNT, Queries};
use crate::series::{Bucket, Measured, Series, Settings};

/// Answers after which the process is killed, and how long into the next query.
const ANSWERS: usize = COUNT / 2;
const INTO_QUERY: Duration = Duration::from_millis(20);
/// What the process prints after each answer.
const ANSWERED: &str = "answered";

/// Runs the queries over a tier, again and again. Prints a line after each answer.
pub(crate) async fn work(
    series: Series,
    settings: Settings,
    directory: &Path,
    tier: &Path,
) -> Result<()> {
    let bucket = Bucket::open(directory, settings).await?;
    let measured = Measured::open(series, settings, &bucket, tier).await?;
    let mut queries = Queries::new(measured.store())?;
    loop {
        queries.run(|| println!("{ANSWERED}")).await?;
    }
}

/// Starts a process that does [`work`], and kills it in the middle of a query of its first run.
pub(crate) fn work_and_die(
    series: Series,
    settings: Settings,
    directory: &Path,
    tier: &Path,
) -> Result<()> {
    let series = series.to_possible_value().context("a series has a name")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--series", series.get_name(), "--directory"]).arg(directory);
    command.arg("--tier").arg(tier).args(settings.arguments());
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().context("the output is a pipe")?;
    // Open until the process is killed: it would end if it could not print.
    let mut lines = BufReader::new(output).lines();
    let answers = lines.by_ref().take(ANSWERS).count();
    thread::sleep(INTO_QUERY);
    child.kill()?;
    let status = child.wait()?;
    ensure!(answers == ANSWERS && status.code().is_none(), "it ended by itself: {status}");
    Ok(())
}
