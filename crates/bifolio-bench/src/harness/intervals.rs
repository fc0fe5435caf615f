//! Operations completed in each second of a trial, and the longest of them, so that a stall is
//! visible.
//!
//! Every thread counts from the common start; the counts are added up afterwards. Trials of less
//! than two seconds are divided into tenths of a second.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Operations by interval of time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OperationsByInterval {
    length: Duration,
    operations: Vec<u64>,
    /// The longest call that ended in each interval, nanoseconds.
    longest_ns: Vec<u64>,
}

impl OperationsByInterval {
    /// Creates intervals of a second, or of a tenth of a second for a trial shorter than two.
    pub(crate) fn new(trial: Duration) -> Self {
        let milliseconds = if trial >= Duration::from_secs(2) { 1000 } else { 100 };
        Self {
            length: Duration::from_millis(milliseconds),
            operations: Vec::new(),
            longest_ns: Vec::new(),
        }
    }

    /// Counts operations that ended `since_start`.
    pub(crate) fn add(&mut self, since_start: Duration, operations: u64) {
        let index = self.index(since_start);
        self.operations[index] += operations;
    }

    /// Counts one operation of `latency` that ended `since_start`.
    pub(crate) fn add_timed(&mut self, since_start: Duration, latency: Duration) {
        self.add(since_start, 1);
        self.add_latency(since_start, latency);
    }

    /// Notes the latency of a call that ended `since_start`, without counting operations.
    pub(crate) fn add_latency(&mut self, since_start: Duration, latency: Duration) {
        let index = self.index(since_start);
        self.longest_ns.resize(self.operations.len(), 0);
        let longest = &mut self.longest_ns[index];
        *longest = (*longest).max(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Returns the index of the interval, which exists after the call.
    fn index(&mut self, since_start: Duration) -> usize {
        let index = (since_start.as_nanos() / self.length.as_nanos()) as usize;
        if index >= self.operations.len() {
            self.operations.resize(index + 1, 0);
        }
        index
    }

    /// Adds what another thread counted over the same intervals.
    pub(crate) fn merge(&mut self, other: &Self) {
        let length = self.operations.len().max(other.operations.len());
        self.operations.resize(length, 0);
        for (sum, operations) in self.operations.iter_mut().zip(&other.operations) {
            *sum += operations;
        }
        let length = self.longest_ns.len().max(other.longest_ns.len());
        self.longest_ns.resize(length, 0);
        for (longest, other) in self.longest_ns.iter_mut().zip(&other.longest_ns) {
            *longest = (*longest).max(*other);
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.length.as_secs_f64()
    }

    /// The name of the smallest share of the mean.
    pub(crate) fn least_name(&self) -> &'static str {
        if self.length < Duration::from_secs(1) {
            "min_100ms_over_mean"
        } else {
            "min_second_over_mean"
        }
    }

    /// Returns the operations per second in each interval that `elapsed` covers completely; an
    /// interval in which nothing ended counts as zero.
    pub(crate) fn rates(&self, elapsed: Duration) -> Vec<f64> {
        let whole = (elapsed.as_nanos() / self.length.as_nanos()) as usize;
        let padded = self.operations.iter().copied().chain(std::iter::repeat(0));
        padded.take(whole).map(|operations| operations as f64 / self.seconds()).collect()
    }

    /// Returns the longest call of each interval that `elapsed` covers completely, nanoseconds; 0
    /// if none ended in it. Empty if no call was timed.
    pub(crate) fn longest_ns(&self, elapsed: Duration) -> Vec<f64> {
        if self.longest_ns.is_empty() {
            return Vec::new();
        }
        let whole = (elapsed.as_nanos() / self.length.as_nanos()) as usize;
        let padded = self.longest_ns.iter().copied().chain(std::iter::repeat(0));
        padded.take(whole).map(|nanoseconds| nanoseconds as f64).collect()
    }

    /// Returns the smallest of the rates as a share of their mean; `None` for fewer than two
    /// intervals.
    pub(crate) fn least_over_mean(&self, elapsed: Duration) -> Option<f64> {
        let rates = self.rates(elapsed);
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let least = rates.iter().copied().min_by(f64::total_cmp)?;
        (rates.len() > 1 && mean > 0.0).then(|| least / mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_shows_also_when_no_operation_ended_in_it() {
        let milliseconds = Duration::from_millis;
        let mut intervals = OperationsByInterval::new(milliseconds(500));
        let mut other = intervals.clone();
        intervals.add(milliseconds(50), 30);
        intervals.add(milliseconds(150), 20);
        other.add(milliseconds(199), 10);
        other.add(milliseconds(310), 99);
        intervals.merge(&other);
        assert_eq!(intervals.rates(milliseconds(310)), [300.0, 300.0, 0.0]);
        assert_eq!(intervals.rates(milliseconds(550)), [300.0, 300.0, 0.0, 990.0, 0.0]);
        assert_eq!(intervals.least_over_mean(milliseconds(310)), Some(0.0));
        assert_eq!(intervals.least_over_mean(milliseconds(299)), Some(1.0));
        assert_eq!(intervals.least_over_mean(milliseconds(150)), None);
    }

    #[test]
    fn the_longest_call_of_each_interval_is_kept_for_all_threads() {
        let milliseconds = Duration::from_millis;
        let mut intervals = OperationsByInterval::new(milliseconds(500));
        let mut other = intervals.clone();
        assert_eq!(intervals.longest_ns(milliseconds(500)), [0.0; 0], "nothing was timed");
        intervals.add_timed(milliseconds(50), milliseconds(2));
        intervals.add_timed(milliseconds(60), milliseconds(1));
        other.add_latency(milliseconds(250), milliseconds(3));
        intervals.merge(&other);
        assert_eq!(intervals.longest_ns(milliseconds(399)), [2e6, 0.0, 3e6]);
        assert_eq!(intervals.rates(milliseconds(399)), [20.0, 0.0, 0.0]);
    }

    #[test]
    fn long_trials_are_cut_into_seconds_and_named_so() {
        assert_eq!(
            OperationsByInterval::new(Duration::from_secs(2)).least_name(),
            "min_second_over_mean"
        );
        assert_eq!(OperationsByInterval::new(Duration::from_secs(1)).seconds(), 0.1);
    }
}
