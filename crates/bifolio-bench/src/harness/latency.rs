//! Durations of calls: a histogram with logarithmic buckets, exact to three digits.
//!
//! Each thread fills its own; they are merged later, and sent by a child process as pairs of value
//! and count.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

const DIGITS: u8 = 3;
const NANOSECONDS_MAX: u64 = 100_000_000_000;

/// Durations of calls.
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
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.0.saturating_record(nanoseconds);
    }

    /// Adds the calls of another thread or trial.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("all histograms have the same bounds");
    }

    /// Returns the maximum duration of a share of the calls, nanoseconds; zero without calls.
    pub(crate) fn quantile_ns(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64
    }

    /// Returns the longest call, nanoseconds.
    pub(crate) fn max_ns(&self) -> f64 {
        self.0.max() as f64
    }

    /// Returns the number of calls.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_merged_threads_and_after_a_journey() {
        let mut all = Latencies::default();
        for thousand in 0..2 {
            let mut one = Latencies::default();
            for microseconds in 1..=500 {
                one.add(Duration::from_micros(thousand * 500 + microseconds));
            }
            all.merge(&one);
        }
        let text = serde_json::to_string(&all).unwrap();
        let arrived: Latencies = serde_json::from_str(&text).unwrap();
        for latencies in [&all, &arrived] {
            assert_eq!(latencies.calls(), 1000);
            assert!((latencies.quantile_ns(0.5) / 500_000.0 - 1.0).abs() < 0.002);
            assert!((latencies.quantile_ns(0.99) / 990_000.0 - 1.0).abs() < 0.002);
            assert!((latencies.max_ns() / 1_000_000.0 - 1.0).abs() < 0.002);
        }
    }
}
