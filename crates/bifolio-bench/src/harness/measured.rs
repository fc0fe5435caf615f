//! The result of a trial: operations, their latencies and rates, CPU time, system calls, counts.
//!
//! Each thread fills in [`Calls`], a [`Meter`] runs while the trial is timed, and a child process
//! sends its [`Measured`] as JSON. [`fill`] writes the trials of a series into its row.

use std::time::{Duration, Instant};

use bifolio_report::{Counts, Intervals, Name, Row};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::counters::cpu_time;

const DIGITS: u8 = 3;
const NANOSECONDS_MAX: u64 = 100_000_000_000;

/// Durations of calls: a histogram with logarithmic buckets, exact to three digits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub(crate) struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, NANOSECONDS_MAX, DIGITS);
        Self(histogram.expect("the bounds are constants that the histogram takes"))
    }
}

impl Latencies {
    /// Adds one call; a call of more than 100 seconds counts as 100.
    pub(crate) fn add(&mut self, duration: Duration) {
        self.0.saturating_record(nanoseconds(duration));
    }

    /// Returns the maximum duration of a share of the calls, nanoseconds; zero without calls.
    fn quantile_ns(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64
    }

    pub(crate) fn calls(&self) -> u64 {
        self.0.len()
    }
}

impl From<Vec<(u64, u64)>> for Latencies {
    fn from(pairs: Vec<(u64, u64)>) -> Self {
        let mut latencies = Self::default();
        for (value, count) in pairs {
            latencies.0.saturating_record_n(value, count);
        }
        latencies
    }
}

impl From<Latencies> for Vec<(u64, u64)> {
    fn from(latencies: Latencies) -> Self {
        let values = latencies.0.iter_recorded();
        values.map(|value| (value.value_iterated_to(), value.count_at_value())).collect()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Calls of one thread, or of all threads of a trial: their latencies, and what they did in each
/// interval of time, so that a stall is visible.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Calls {
    /// Reads or writes of one block; a call may make several.
    pub(crate) operations: u64,
    pub(crate) latencies: Latencies,
    /// Length of an interval; zero if operations are not counted by interval.
    interval: Duration,
    /// Operations that ended in each interval, and the longest timed call, nanoseconds.
    intervals: Vec<(u64, u64)>,
}

impl Calls {
    /// Creates it with intervals of a second, or of a tenth of a second for a trial shorter than
    /// two.
    pub(crate) fn during(trial: Duration) -> Self {
        let milliseconds = if trial >= Duration::from_secs(2) { 1000 } else { 100 };
        Self { interval: Duration::from_millis(milliseconds), ..Self::default() }
    }

    /// Adds one operation of `latency` that ended `since_start`.
    pub(crate) fn add(&mut self, since_start: Duration, latency: Duration) {
        self.time(since_start, latency);
        self.count(since_start, 1);
    }

    /// Adds operations that ended `since_start`, without a latency.
    pub(crate) fn count(&mut self, since_start: Duration, operations: u64) {
        self.operations += operations;
        self.interval_at(since_start).0 += operations;
    }

    /// Adds the latency of a call that ended `since_start`, without counting operations.
    pub(crate) fn time(&mut self, since_start: Duration, latency: Duration) {
        self.latencies.add(latency);
        let (_, longest_ns) = self.interval_at(since_start);
        *longest_ns = nanoseconds(latency).max(*longest_ns);
    }

    fn interval_at(&mut self, since_start: Duration) -> &mut (u64, u64) {
        let index = (since_start.as_nanos() / self.interval.as_nanos()) as usize;
        let count = self.intervals.len().max(index + 1);
        self.intervals.resize(count, (0, 0));
        &mut self.intervals[index]
    }

    /// Adds the calls of another thread, or of another trial.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.operations += other.operations;
        self.latencies.0.add(&other.latencies.0).expect("all histograms have the same bounds");
        let count = self.intervals.len().max(other.intervals.len());
        self.intervals.resize(count, (0, 0));
        for (sum, more) in self.intervals.iter_mut().zip(&other.intervals) {
            *sum = (sum.0 + more.0, sum.1.max(more.1));
        }
    }

    /// Returns the operations per second and the longest call of each interval that `elapsed`
    /// covers completely; an interval in which nothing ended counts.
    fn whole(&self, elapsed: Duration) -> impl Iterator<Item = (f64, f64)> {
        let whole = elapsed.as_nanos().checked_div(self.interval.as_nanos()).unwrap_or(0) as usize;
        let seconds = self.interval.as_secs_f64();
        let padded = self.intervals.iter().copied().chain(std::iter::repeat((0, 0)));
        padded.take(whole).map(move |(operations, ns)| (operations as f64 / seconds, ns as f64))
    }

    /// Returns the smallest of the rates as a share of their mean; `None` for fewer than two
    /// intervals.
    fn least_over_mean(&self, elapsed: Duration) -> Option<f64> {
        let rates: Vec<f64> = self.whole(elapsed).map(|(rate, _)| rate).collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let least = rates.iter().copied().min_by(f64::total_cmp)?;
        (rates.len() > 1 && mean > 0.0).then(|| least / mean)
    }
}

/// Runs while a trial is timed.
#[derive(Debug)]
pub(crate) struct Meter {
    cpu: Duration,
    pub(crate) started: Instant,
}

/// The cost of a trial.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) elapsed: Duration,
    /// CPU time of all threads of the process.
    pub(crate) cpu: Duration,
}

impl Meter {
    pub(crate) fn start() -> Self {
        Self { cpu: cpu_time(), started: Instant::now() }
    }

    pub(crate) fn stop(self) -> Cost {
        let elapsed = self.started.elapsed();
        Cost { elapsed, cpu: cpu_time().saturating_sub(self.cpu) }
    }
}

/// How a count of several trials becomes one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Per {
    /// The sum, divided by the operations.
    Operation,
    /// The mean of the trials.
    Trial,
    /// The sum.
    Run,
    /// The largest.
    Peak,
}

/// One trial of one series, or its part of a row.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) calls: Calls,
    /// Bytes moved by the operations.
    pub(crate) bytes: u64,
    /// Operations that needed the device.
    pub(crate) misses: u64,
    /// System calls that made the transfers, if the series knows them.
    pub(crate) syscalls: Option<u64>,
    pub(crate) cost: Cost,
    pub(crate) verified_bytes: u64,
    /// Other counts, by the names that reports show.
    pub(crate) counts: Vec<(Name, f64, Per)>,
}

/// The unit of a row, and the value of a trial in it.
pub(crate) type Unit = (&'static str, fn(&Measured) -> f64);

impl Measured {
    /// Creates the result of timed calls, each of which is a system call as far as the series
    /// knows.
    pub(crate) fn new(calls: Calls, bytes: u64, cost: Cost) -> Self {
        let syscalls = Some(calls.latencies.calls());
        Self { calls, bytes, cost, syscalls, ..Self::default() }
    }

    /// Creates the result of threads that each measured their own time: `rate` is the sum of their
    /// operations per second.
    pub(crate) fn of_rate(operations: u64, rate: f64) -> Self {
        let mut measured = Self::default();
        measured.calls.operations = operations;
        measured.cost.elapsed = Duration::from_secs_f64(operations as f64 / rate);
        measured
    }

    pub(crate) fn add(&mut self, name: impl Into<Name>, value: f64, per: Per) {
        self.counts.push((name.into(), value, per));
    }

    /// Adds the differences of counters that only grow, which are the same ones in the same order.
    pub(crate) fn add_since(&mut self, before: &[(&str, u64)], after: &[(&str, u64)], per: Per) {
        for ((name, after), (_, before)) in after.iter().zip(before) {
            self.add((*name).to_owned(), after.saturating_sub(*before) as f64, per);
        }
    }

    /// Operations per second.
    pub(crate) fn rate(&self) -> f64 {
        self.calls.operations as f64 / self.cost.elapsed.as_secs_f64()
    }

    /// GiB per second.
    pub(crate) fn gibibytes_rate(&self) -> f64 {
        self.bytes as f64 / GIBIBYTE / self.cost.elapsed.as_secs_f64()
    }

    /// Median duration of a call, nanoseconds.
    pub(crate) fn median_ns(&self) -> f64 {
        self.calls.latencies.quantile_ns(0.5)
    }
}

const GIBIBYTE: f64 = (1_u64 << 30) as f64;

/// Writes the trials of `series` into `row`, in `unit`, with all their counts.
pub(crate) fn fill(row: &mut Row, series: &'static str, trials: &[&Measured], (_, value): Unit) {
    let mut all = Calls::default();
    trials.iter().for_each(|trial| all.merge(&trial.calls));
    let mut counts = standard_counts(trials, &all);
    // Every trial of a series has the same counts.
    for (index, (name, _, per)) in trials[0].counts.iter().enumerate() {
        let values = trials.iter().filter_map(|trial| Some(trial.counts.get(index)?.1));
        let count = match per {
            Per::Operation => values.sum::<f64>() / all.operations.max(1) as f64,
            Per::Trial => values.sum::<f64>() / trials.len() as f64,
            Per::Run => values.sum(),
            Per::Peak => values.fold(0.0, f64::max),
        };
        counts.insert(name.clone().into_owned(), count);
    }
    row.add(series, trials.iter().map(|trial| value(trial)).collect(), counts);
    let Some(first) = trials.first().filter(|first| !first.calls.interval.is_zero()) else {
        return;
    };
    let mut intervals =
        Intervals { seconds: first.calls.interval.as_secs_f64(), ..Intervals::default() };
    for trial in trials {
        let per_operation = value(trial) / trial.rate();
        for (rate, longest_ns) in trial.calls.whole(trial.cost.elapsed) {
            intervals.rates.push(rate * per_operation);
            intervals.longest_ns.push(longest_ns);
        }
    }
    if all.latencies.calls() == 0 {
        intervals.longest_ns.clear();
    }
    row.samples.insert(series.into(), intervals);
}

/// Returns the counts that follow from what was measured in every trial.
fn standard_counts(trials: &[&Measured], all: &Calls) -> Counts {
    let sum = |field: fn(&Measured) -> f64| trials.iter().map(|trial| field(trial)).sum::<f64>();
    let calls = all.latencies.calls() as f64;
    let operations = all.operations as f64;
    let misses = sum(|trial| trial.misses as f64);
    let syscalls = trials.iter().map(|trial| trial.syscalls);
    let syscalls = syscalls.sum::<Option<u64>>().map_or(f64::NAN, |calls| calls as f64);
    let cpu_seconds = sum(|trial| trial.cost.cpu.as_secs_f64());
    // A process that took no time was not observed.
    let cpu_seconds = if cpu_seconds > 0.0 { cpu_seconds } else { f64::NAN };
    let gibibytes = sum(|trial| trial.bytes as f64) / GIBIBYTE;
    let least = |milliseconds| {
        let is_meant = |trial: &&&Measured| trial.calls.interval.as_millis() == milliseconds;
        let shares = trials.iter().filter(is_meant);
        let shares = shares.filter_map(|trial| trial.calls.least_over_mean(trial.cost.elapsed));
        shares.min_by(f64::total_cmp).unwrap_or(f64::NAN)
    };
    // Nothing is divided by zero: there is no such count.
    let of = |value: f64, number: f64| if number > 0.0 { value / number } else { f64::NAN };
    let if_timed = |value: f64| if calls > 0.0 { value } else { f64::NAN };
    let quantile = |share| if_timed(all.latencies.quantile_ns(share));
    let counts = [
        ("p50_ns", quantile(0.5)),
        ("p99_ns", quantile(0.99)),
        ("p999_ns", quantile(0.999)),
        ("max_ns", quantile(1.0)),
        ("calls", if_timed(calls)),
        ("operations", if_timed(operations)),
        ("cpu_s_per_gib", of(cpu_seconds, gibibytes)),
        ("cpu_ns_per_op", of(cpu_seconds * 1e9, operations)),
        ("syscalls_per_op", of(syscalls, operations)),
        ("misses_per_op", if misses > 0.0 { misses / operations } else { f64::NAN }),
        ("syscalls_per_miss", of(syscalls, misses)),
        ("cpu_ns_per_miss", of(cpu_seconds * 1e9, misses)),
        ("min_second_over_mean", least(1000)),
        ("min_100ms_over_mean", least(100)),
    ];
    let counts = counts.into_iter().filter(|(_, value)| value.is_finite());
    counts.map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use bifolio_report::Case;

    use super::*;

    fn trial(operations: u64, misses: u64, seconds: u64) -> Measured {
        let elapsed = Duration::from_secs(seconds);
        let mut calls = Calls::during(elapsed);
        (0..seconds).for_each(|second| {
            calls.count(Duration::from_millis(second * 1000 + 500), operations * (second + 1));
        });
        calls.operations = operations;
        calls.latencies.add(Duration::from_micros(operations));
        let cost = Cost { elapsed, cpu: Duration::from_secs(1) };
        let measured = Measured::new(calls, operations << 30, cost);
        let counts = vec![("peak_bytes".into(), operations as f64, Per::Peak)];
        Measured { misses, syscalls: Some(operations * 2), counts, ..measured }
    }

    #[test]
    fn trials_become_a_row() {
        let mut row = Row::new(Case::new(), "reads/s");
        let trials = [trial(10, 5, 2), trial(30, 15, 2), trial(20, 5, 2)];
        let text = serde_json::to_string(&trials).unwrap();
        let arrived: Vec<Measured> = serde_json::from_str(&text).unwrap();
        let trials: Vec<&Measured> = arrived.iter().collect();
        fill(&mut row, "x", &trials, ("reads/s", Measured::rate));
        assert_eq!(row.repetitions["x"], [5.0, 15.0, 10.0]);
        assert_eq!(row.count("x", "misses_per_op"), Some(25.0 / 60.0));
        assert_eq!(row.count("x", "syscalls_per_miss"), Some(120.0 / 25.0));
        assert_eq!(row.count("x", "cpu_s_per_gib"), Some(3.0 / 60.0));
        assert!((row.count("x", "max_ns").unwrap() / 30_000.0 - 1.0).abs() < 0.002);
        assert_eq!(row.count("x", "peak_bytes"), Some(30.0));
        // 1 and 2 shares of 3 in two seconds.
        assert_eq!(row.count("x", "min_second_over_mean"), Some(1.0 / 1.5));
        assert_eq!(row.count("x", "min_100ms_over_mean"), None);
        assert_eq!(row.samples["x"].rates.len(), 6);
        fill(&mut row, "none", &[&Measured::of_rate(10, 5.0)], ("reads/s", Measured::rate));
        assert!(row.counts["none"].is_empty() && !row.samples.contains_key("none"));
    }

    #[test]
    fn a_stall_shows_also_when_no_operation_ended_in_it() {
        let milliseconds = Duration::from_millis;
        let mut calls = Calls::during(milliseconds(500));
        let mut other = calls.clone();
        calls.count(milliseconds(50), 30);
        calls.count(milliseconds(150), 20);
        other.count(milliseconds(199), 10);
        other.add(milliseconds(310), milliseconds(3));
        calls.merge(&other);
        let (rates, longest_ns): (Vec<f64>, Vec<f64>) = calls.whole(milliseconds(550)).unzip();
        assert_eq!(rates, [300.0, 300.0, 0.0, 10.0, 0.0]);
        assert_eq!(longest_ns, [0.0, 0.0, 0.0, 3e6, 0.0]);
        assert_eq!(calls.whole(milliseconds(399)).count(), 3);
        assert_eq!(calls.least_over_mean(milliseconds(310)), Some(0.0));
        assert_eq!(calls.least_over_mean(milliseconds(150)), None);
    }
}
