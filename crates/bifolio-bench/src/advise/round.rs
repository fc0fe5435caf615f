//! The result of a round of calls, and how rounds become a series of a row.

use std::ops::Range;
use std::time::Instant;

use bifolio::Evicted;

use super::advised::Advised;
use crate::error::Result;
use crate::harness::latency::Latencies;
use bifolio_report::{Counts, Row};

/// Number of drains that a round should make, depending on the folios in batches of other CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Drains {
    pub(super) requests: u64,
    pub(super) cpus: u64,
}

impl Drains {
    pub(super) const ONE_OF_ONE_CPU: Self = Self { requests: 1, cpus: 1 };

    fn of(outcome: &Evicted) -> Self {
        Self { requests: outcome.drains_requested, cpus: outcome.cpus_drained }
    }
}

/// One round of one series.
#[derive(Debug, Default)]
pub(super) struct Round {
    latencies: Latencies,
    /// Sum over all calls; `None` for the kernel, which reports nothing.
    outcome: Option<Evicted>,
    /// Pages of the file in memory at the end.
    pub(super) resident_pages: u64,
    /// Number of times a call slept; counted where calls are many.
    pub(super) waits: Option<u64>,
    /// Set if exactly the CPUs that hold folios of the range were drained, and every folio that
    /// stayed had the expected reason.
    pub(super) exact: bool,
    pub(super) verified_bytes: u64,
}

impl Round {
    /// Gives up `range` of `file`, and measures the time.
    pub(super) fn advise<A: Advised>(&mut self, file: &A, range: Range<u64>) -> Result<()> {
        let begin = Instant::now();
        let answer = file.dont_need(range)?;
        self.latencies.add(begin.elapsed());
        if let Some(outcome) = A::outcome(answer) {
            *self.outcome.get_or_insert_default() += outcome;
        }
        Ok(())
    }

    pub(super) fn outcome(&self) -> Option<&Evicted> {
        self.outcome.as_ref()
    }

    /// Returns `true` if the drains were these.
    pub(super) fn drained(&self, drains: Drains) -> bool {
        self.outcome.is_some_and(|outcome| Drains::of(&outcome) == drains)
    }

    pub(super) fn median_ns(&self) -> f64 {
        self.latencies.quantile_ns(0.5)
    }
}

/// Writes the rounds of `series` into `row`; each call is about one of `chunks` parts.
pub(super) fn fill(row: &mut Row, series: &'static str, rounds: &[Round], chunks: u64) {
    let medians: Vec<f64> = rounds.iter().map(Round::median_ns).collect();
    row.add(series, medians, counts(rounds, chunks));
}

fn counts(rounds: &[Round], chunks: u64) -> Counts {
    let mut latencies = Latencies::default();
    rounds.iter().for_each(|round| latencies.merge(&round.latencies));
    let (round_count, calls) = (rounds.len() as f64, latencies.calls() as f64);
    let evicted = rounds.iter().filter(|round| round.resident_pages == 0).count();
    let resident: u64 = rounds.iter().map(|round| round.resident_pages).sum();
    let mut counts: Counts = [
        ("p50_ns", latencies.quantile_ns(0.5)),
        ("p99_ns", latencies.quantile_ns(0.99)),
        ("max_ns", latencies.max_ns()),
        ("calls", calls),
        ("rounds", round_count),
        ("rounds_evicted", evicted as f64),
        ("remaining", resident as f64 / round_count / chunks as f64),
    ]
    .map(|(name, count)| (name.to_owned(), count))
    .into();
    if let Some(waits) = rounds.iter().map(|round| round.waits).sum::<Option<u64>>() {
        counts.insert("waits_per_round".into(), waits as f64 / round_count);
    }
    if let Some(outcome) = sum(rounds) {
        let drains = Drains::of(&outcome);
        counts.insert("drains_per_round".into(), drains.requests as f64 / round_count);
        counts.insert("cpus_drained_per_round".into(), drains.cpus as f64 / round_count);
        let exact = rounds.iter().filter(|round| round.exact).count();
        counts.insert("rounds_exact".into(), exact as f64);
        for (reason, folios) in outcome.kept.by_reason() {
            counts.insert(format!("remaining_{reason}"), folios as f64 / calls);
        }
    }
    counts
}

fn sum(rounds: &[Round]) -> Option<Evicted> {
    let outcomes = rounds.iter().map(|round| round.outcome);
    outcomes.reduce(|sum, outcome| {
        let mut sum = sum?;
        sum += outcome?;
        Some(sum)
    })?
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use bifolio_report::Case;

    fn round(microseconds: u64, resident_pages: u64, knows: bool) -> Round {
        let mut round = Round { resident_pages, exact: true, ..Round::default() };
        (0..3).for_each(|call| round.latencies.add(Duration::from_micros(microseconds + call)));
        if knows {
            let mut outcome = Evicted::default();
            (outcome.drains_requested, outcome.cpus_drained) = (1, 2);
            outcome.kept.mapped = 6;
            round.outcome = Some(outcome);
        }
        round
    }

    #[test]
    fn rounds_become_medians_and_counts_of_rounds_and_of_calls() {
        let mut row = Row::new(Case::new(), "ns/call");
        let rounds = [round(10, 8, true), round(30, 0, true)];
        fill(&mut row, "x", &rounds, 4);
        assert!((row.series["x"] / 21_000.0 - 1.0).abs() < 0.001);
        assert_eq!(row.repetitions["x"].len(), 2);
        let count = |name| row.count("x", name);
        assert_eq!((count("calls"), count("rounds")), (Some(6.0), Some(2.0)));
        assert_eq!((count("rounds_evicted"), count("remaining")), (Some(1.0), Some(1.0)));
        assert_eq!(
            (count("drains_per_round"), count("cpus_drained_per_round")),
            (Some(1.0), Some(2.0))
        );
        assert_eq!((count("remaining_mapped"), count("remaining_dirty")), (Some(2.0), Some(0.0)));
        assert_eq!((count("rounds_exact"), count("waits_per_round")), (Some(2.0), None));
        assert!(!rounds[0].drained(Drains::ONE_OF_ONE_CPU));
    }

    #[test]
    fn the_kernel_has_no_counts_of_its_own() {
        let mut row = Row::new(Case::new(), "ns/call");
        let waiting = Round { waits: Some(7), ..round(1, 1, false) };
        fill(&mut row, "x", &[waiting], 1);
        assert_eq!(row.count("x", "drains_per_round"), None);
        assert_eq!(row.count("x", "waits_per_round"), Some(7.0));
        assert_eq!(row.count("x", "remaining"), Some(1.0));
    }
}
