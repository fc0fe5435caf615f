//! The cost of one trial: time, CPU time, system calls; and the summary of all trials of a series.
//!
//! A trial starts a [`Meter`] when it is ready and stops it when the last operation is done. The
//! benchmark creates a [`Measured`] from it, possibly in a child process, and [`fill`] writes the
//! trials of one series into its row.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::cpu_time;
use super::intervals::OperationsByInterval;
use super::latency::Latencies;
use super::syscalls::SyscallCount;
use crate::error::Result;
use bifolio_report::{Counts, Intervals, Row};

/// Runs while a trial is timed.
#[derive(Debug)]
pub(crate) struct Meter {
    syscalls: Option<SyscallCount>,
    cpu: Duration,
    started: Instant,
}

/// The cost of a trial.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) elapsed: Duration,
    /// CPU time of all threads of the process.
    pub(crate) cpu: Duration,
    /// Counted by the kernel, if possible.
    pub(crate) syscalls: Option<u64>,
}

impl Meter {
    /// Starts; system calls are counted at `tracepoint`.
    pub(crate) fn start(tracepoint: Option<u64>) -> Result<Self> {
        let syscalls = tracepoint.map(SyscallCount::start).transpose()?;
        Ok(Self { syscalls, cpu: cpu_time::used(), started: Instant::now() })
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    pub(crate) fn stop(self) -> Result<Cost> {
        let elapsed = self.started.elapsed();
        let cpu = cpu_time::used().saturating_sub(self.cpu);
        let syscalls = self.syscalls.map(SyscallCount::stop).transpose()?;
        Ok(Cost { elapsed, cpu, syscalls })
    }
}

/// One trial of one series.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Reads or writes of one block.
    pub(crate) operations: u64,
    /// Bytes moved by these.
    pub(crate) bytes: u64,
    /// Operations that needed the device.
    pub(crate) misses: u64,
    /// System calls that the series itself knows of, used if the kernel does not count.
    pub(crate) syscalls_known: u64,
    pub(crate) cost: Cost,
    /// Latencies of calls, each of which may do several operations.
    pub(crate) latencies: Latencies,
    pub(crate) intervals: OperationsByInterval,
    pub(crate) verified_bytes: u64,
}

impl Measured {
    /// Returns the operations per second.
    pub(crate) fn operations_rate(&self) -> f64 {
        self.operations as f64 / self.cost.elapsed.as_secs_f64()
    }

    /// Returns the bytes per second.
    pub(crate) fn bytes_rate(&self) -> f64 {
        self.bytes as f64 / self.cost.elapsed.as_secs_f64()
    }

    /// Returns the GiB per second.
    pub(crate) fn gibibytes_rate(&self) -> f64 {
        gibibytes(self.bytes) / self.cost.elapsed.as_secs_f64()
    }

    fn syscalls(&self) -> u64 {
        self.cost.syscalls.unwrap_or(self.syscalls_known)
    }
}

fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

/// Writes the trials of `series` into `row`; `value` returns the speed of one, in the row's unit.
pub(crate) fn fill(
    row: &mut Row,
    series: &'static str,
    trials: &[Measured],
    value: fn(&Measured) -> f64,
) {
    row.add(series, trials.iter().map(value).collect(), counts(trials));
    if let Some(first) = trials.first() {
        let rates = |trial: &Measured| {
            let per_operation = value(trial) / trial.operations_rate();
            let rates = trial.intervals.rates(trial.cost.elapsed);
            rates.into_iter().map(move |rate| rate * per_operation)
        };
        let longest = |trial: &Measured| trial.intervals.longest_ns(trial.cost.elapsed);
        let intervals = Intervals {
            seconds: first.intervals.seconds(),
            rates: trials.iter().flat_map(rates).collect(),
            longest_ns: trials.iter().flat_map(longest).collect(),
        };
        row.samples.insert(series.into(), intervals);
    }
}

fn counts(trials: &[Measured]) -> Counts {
    let sum = |field: fn(&Measured) -> u64| trials.iter().map(field).sum::<u64>() as f64;
    let operations = sum(|trial| trial.operations).max(1.0);
    let misses = sum(|trial| trial.misses);
    let syscalls = sum(Measured::syscalls);
    let cpu_seconds: f64 = trials.iter().map(|trial| trial.cost.cpu.as_secs_f64()).sum();
    let mut latencies = Latencies::default();
    trials.iter().for_each(|trial| latencies.merge(&trial.latencies));

    let mut counts = Counts::new();
    let mut count = |name: &str, value: f64| {
        // Nothing divided by nothing is no count.
        if value.is_finite() {
            counts.insert(name.to_owned(), value);
        }
    };
    count("p50_ns", latencies.quantile_ns(0.5));
    count("p99_ns", latencies.quantile_ns(0.99));
    count("p999_ns", latencies.quantile_ns(0.999));
    count("max_ns", latencies.max_ns());
    count("calls", latencies.calls() as f64);
    count("operations", operations);
    count("cpu_s_per_gib", cpu_seconds / gibibytes(sum(|trial| trial.bytes) as u64));
    count("cpu_ns_per_op", cpu_seconds * 1e9 / operations);
    count("syscalls_per_op", syscalls / operations);
    if misses > 0.0 {
        count("misses_per_op", misses / operations);
        count("syscalls_per_miss", syscalls / misses);
        count("cpu_ns_per_miss", cpu_seconds * 1e9 / misses);
    }
    let least = |trial: &Measured| {
        Some((trial.intervals.least_name(), trial.intervals.least_over_mean(trial.cost.elapsed)?))
    };
    if let Some((name, least)) = trials.iter().filter_map(least).min_by(|l, r| l.1.total_cmp(&r.1))
    {
        count(name, least);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::Case;

    fn trial(operations: u64, misses: u64, seconds: u64) -> Measured {
        let elapsed = Duration::from_secs(seconds);
        let mut intervals = OperationsByInterval::new(elapsed);
        (0..seconds).for_each(|second| {
            intervals.add(Duration::from_millis(second * 1000 + 500), operations * (second + 1));
        });
        let mut latencies = Latencies::default();
        latencies.add(Duration::from_micros(operations));
        Measured {
            operations,
            bytes: operations << 30,
            misses,
            syscalls_known: operations * 2,
            cost: Cost { elapsed, cpu: Duration::from_secs(1), syscalls: None },
            latencies,
            intervals,
            verified_bytes: 0,
        }
    }

    #[test]
    fn trials_become_a_row() {
        let mut row = Row::new(Case::new(), "reads/s");
        let trials = [trial(10, 5, 2), trial(30, 15, 2), trial(20, 5, 2)];
        fill(&mut row, "x", &trials, Measured::operations_rate);
        assert_eq!(row.series["x"], 10.0);
        assert_eq!(row.spread["x"], [5.0, 15.0]);
        assert_eq!(row.repetitions["x"], [5.0, 15.0, 10.0]);
        assert_eq!(row.count("x", "misses_per_op"), Some(25.0 / 60.0));
        assert_eq!(row.count("x", "syscalls_per_miss"), Some(120.0 / 25.0));
        assert_eq!(row.count("x", "cpu_s_per_gib"), Some(3.0 / 60.0));
        assert!((row.count("x", "max_ns").unwrap() / 30_000.0 - 1.0).abs() < 0.001);
        // 1 and 2 shares of 3 in two seconds.
        assert_eq!(row.count("x", "min_second_over_mean"), Some(1.0 / 1.5));
        assert_eq!(row.samples["x"].rates.len(), 6);
    }

    #[test]
    fn the_count_of_the_kernel_stands_above_what_a_series_knows() {
        let mut measured = trial(10, 10, 1);
        assert_eq!(measured.syscalls(), 20);
        measured.cost.syscalls = Some(21);
        assert_eq!(measured.syscalls(), 21);
    }

    #[test]
    fn a_meter_sees_time_pass() {
        let meter = Meter::start(None).unwrap();
        let begin = meter.started();
        while begin.elapsed() < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
        let cost = meter.stop().unwrap();
        assert!(cost.elapsed >= Duration::from_millis(2) && cost.syscalls.is_none());
    }
}
