//! Series that alternate: a child for each, and the figures of their rounds.
//!
//! Called by the benchmark of each engine. The children keep their databases open, so all are as
//! warm as they get.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Context;
use bifolio_bench::{
    Case, Config, Counts, Error, Given, Membership, MemoryGroup, ParameterSet, Report, Result, Row,
    Sizes, Skipped,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::children::MeasuringChild;

/// Total memory of a series, unless given.
pub(crate) const MEMORY_BYTES: u64 = 64 << 20;
pub(crate) const MEMORY_BYTES_SMOKE: u64 = 16 << 20;
/// Duration of a round, unless given.
const SECONDS: f64 = 0.4;
const SECONDS_SMOKE: f64 = 0.02;
/// How many times as long the round takes that warms up.
const WARM_UP_FACTOR: f64 = 4.0;

/// Returns the total memory of a series.
pub(crate) fn memory_bytes(config: &Config) -> u64 {
    let is_smoke = config.set == ParameterSet::Smoke;
    config.memory_bytes.unwrap_or(if is_smoke { MEMORY_BYTES_SMOKE } else { MEMORY_BYTES })
}

/// Returns how long a round measures; round 0 warms up.
pub(crate) fn seconds_of(config: &Config, round: usize) -> f64 {
    let is_smoke = config.set == ParameterSet::Smoke;
    let seconds = config.timed.map_or(SECONDS, |timed| timed.as_secs_f64());
    let seconds = if is_smoke { SECONDS_SMOKE } else { seconds };
    if round == 0 { seconds * WARM_UP_FACTOR } else { seconds }
}

/// The cost of a round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RoundCost {
    pub(crate) operations: u64,
    pub(crate) seconds: f64,
    pub(crate) verified_bytes: u64,
    /// Bytes that the process had the device read and write.
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    /// The most memory that the control group ever used; 0 without one.
    pub(crate) group_peak_bytes: u64,
    /// The largest resident size that the process ever had.
    pub(crate) resident_peak_bytes: u64,
    /// Duration of each operation, ns; empty if they are not timed one by one.
    pub(crate) latencies: Vec<u64>,
}

/// A series and its child.
pub(crate) struct Series {
    name: &'static str,
    child: MeasuringChild,
    /// Command and task of the child.
    command: Vec<String>,
    opening: Value,
    /// Dropped after the child has ended.
    _group: Option<MemoryGroup>,
}

impl Series {
    /// Starts the child of a series, in a control group of its own. Without a control group only
    /// the series `bifolio` runs: `None`, and the report says so.
    pub(crate) fn start<O: Serialize>(
        name: &'static str,
        command: &[String],
        sizes: Sizes,
        report: &mut Report,
        opening: impl FnOnce(Option<Membership>) -> O,
    ) -> Result<Option<Self>> {
        let group = match MemoryGroup::create(sizes) {
            Ok(group) => Some(group),
            Err(_) if name == "bifolio" => None,
            Err(error) => {
                let reason = format!("its memory cannot be bounded: {error}");
                let skipped = Skipped { series: name.into(), reason };
                if !report.skipped.contains(&skipped) {
                    report.skipped.push(skipped);
                }
                return Ok(None);
            }
        };
        let opening = opening(group.as_ref().map(MemoryGroup::membership));
        let opening = serde_json::to_value(opening)?;
        let child = MeasuringChild::start(command, &opening)?;
        Ok(Some(Self { name, child, command: command.to_vec(), opening, _group: group }))
    }

    /// Runs a round, once more in a new child if the child was killed.
    fn run_round(&mut self, task: &impl Serialize) -> Result<RoundCost> {
        let killed = match self.child.run_round(task) {
            Err(Error::Killed { attempts }) => attempts,
            answer => return answer,
        };
        self.child = MeasuringChild::start(&self.command, &self.opening)?;
        self.child.run_round(task).map_err(|error| match error {
            Error::Killed { attempts } => Error::Killed { attempts: killed + attempts },
            other => other,
        })
    }
}

/// Runs a round that warms up and `rounds` that count, and adds a row to the report. Which series
/// is first alternates. A series that fails has no figure in the row, and stops no other.
pub(crate) fn measure<R: Serialize>(
    series: &mut [Series],
    rounds: usize,
    case: Case,
    task: impl Fn(usize) -> R,
    report: &mut Report,
) -> Result<()> {
    let mut given: Vec<Given<RoundCost>> = series.iter().map(|_| Given::new()).collect();
    for round in 0..=rounds {
        let task = task(round);
        for place in 0..series.len() {
            let place = if round % 2 == 0 { place } else { series.len() - 1 - place };
            if given[place].has_failed() {
                continue;
            }
            let cost = series[place].run_round(&task);
            if round > 0 || cost.is_err() {
                given[place].add(cost)?;
            }
        }
    }
    let mut row = Row::new(case, "ops/s");
    for (series, given) in series.iter().zip(&given) {
        let rows = std::slice::from_mut(&mut row);
        let Some(costs) = given.or_fail(rows, 0..1, series.name) else { continue };
        fill(&mut row, series.name, costs);
        report.verified_bytes += costs.iter().map(|cost| cost.verified_bytes).sum::<u64>();
    }
    report.rows.push(row);
    Ok(())
}

fn fill(row: &mut Row, series: &'static str, costs: &[RoundCost]) {
    let sum = |of: fn(&RoundCost) -> u64| costs.iter().map(of).sum::<u64>() as f64;
    let operations = sum(|cost| cost.operations);
    let mebibytes = |of: fn(&RoundCost) -> u64| {
        costs.iter().map(of).max().unwrap_or(0) as f64 / f64::from(1 << 20)
    };
    let mut counts = Counts::from_iter([
        ("read_bytes_per_op".to_owned(), sum(|cost| cost.read_bytes) / operations),
        ("written_bytes_per_op".to_owned(), sum(|cost| cost.written_bytes) / operations),
        ("group_peak_mib".to_owned(), mebibytes(|cost| cost.group_peak_bytes)),
        ("resident_peak_mib".to_owned(), mebibytes(|cost| cost.resident_peak_bytes)),
    ]);
    let mut latencies: Vec<u64> =
        costs.iter().flat_map(|cost| cost.latencies.iter().copied()).collect();
    latencies.sort_unstable();
    if let Some(last) = latencies.len().checked_sub(1) {
        let shares = [("p50_ns", 0.5), ("p99_ns", 0.99), ("p999_ns", 0.999), ("max_ns", 1.0)];
        let quantile = |share: f64| latencies[(last as f64 * share).round() as usize] as f64;
        counts.extend(shares.map(|(name, share)| (name.to_owned(), quantile(share))));
    }
    let rates = costs.iter().map(|cost| cost.operations as f64 / cost.seconds).collect();
    row.add(series, rates, counts);
}

/// An error of a database, as one of the benchmark.
pub(crate) fn failed(error: anyhow::Error) -> Error {
    Error::Child(format!("{error:#}"))
}

/// The child's side: measures `work`, which gets the time to stop at, and returns how many
/// operations it did and how many bytes it verified.
pub(crate) fn cost_of(
    seconds: f64,
    group: Option<&Membership>,
    work: impl FnOnce(Instant) -> anyhow::Result<(u64, u64)>,
) -> anyhow::Result<RoundCost> {
    let before = device_bytes()?;
    let started = Instant::now();
    let (operations, verified_bytes) = work(started + Duration::try_from_secs_f64(seconds)?)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = device_bytes()?;
    Ok(RoundCost {
        operations,
        seconds,
        verified_bytes,
        read_bytes: after[0] - before[0],
        written_bytes: after[1] - before[1],
        group_peak_bytes: group.map_or(Ok(0), Membership::peak_bytes)?,
        resident_peak_bytes: field_of("/proc/self/status", "VmHWM")? << 10,
        latencies: Vec::new(),
    })
}

/// Bytes that this process has had devices read and write.
fn device_bytes() -> anyhow::Result<[u64; 2]> {
    Ok([field_of("/proc/self/io", "read_bytes")?, field_of("/proc/self/io", "write_bytes")?])
}

/// The number in the line `name` of a file of the kernel; 0 if there is none.
fn field_of(path: &str, name: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    Ok(number.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A series whose child runs `script` for each task.
    fn series(name: &'static str, script: &str) -> Series {
        let script = format!("while read -r task; do {script}; done");
        let command = ["sh", "-c", &script].map(str::to_owned).to_vec();
        let child = MeasuringChild::start(&command, &Value::Null).unwrap();
        Series { name, child, command, opening: Value::Null, _group: None }
    }

    #[test]
    fn a_child_that_is_killed_costs_its_series_and_is_started_once_more() {
        let answer = r#"'{"operations":2,"seconds":1.0,"verified_bytes":8,"read_bytes":0,
            "written_bytes":0,"group_peak_bytes":0,"resident_peak_bytes":0,"latencies":[]}'"#;
        let lives = format!("echo {answer}").replace('\n', " ");
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join("mark").display().to_string();
        let dies_once = format!("[ -e {mark} ] && {lives} || {{ touch {mark}; kill -KILL $$; }}");
        let mut all = [
            series("bifolio", &lives),
            series("default", "kill -KILL $$"),
            series("default_mmap", &dies_once),
            series("other", "exit 3"),
        ];
        let mut report = Report::new("b", &bifolio_bench::Host::default(), Value::Null);
        measure(&mut all, 2, Case::new(), |round| round, &mut report).unwrap();
        let row = &report.rows[0];
        let failed: Vec<_> = row.failed.iter().map(|(name, how)| (&**name, how.killed)).collect();
        assert_eq!(failed, [("default", true), ("other", false)]);
        assert!(row.failed["other"].reason.contains('3'), "{:?}", row.failed);
        assert_eq!(row.repetitions["bifolio"], [2.0; 2]);
        assert_eq!(row.repetitions["default_mmap"], [2.0; 2]);
    }
}
