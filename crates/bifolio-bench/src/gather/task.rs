//! The child: one round of one series.
//!
//! The process has nothing else in it, so its largest resident size is that of the series.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::GatherCase;
use super::cached::{PinMany, ReadMany};
use super::kernel::Mapped;
use super::parameters::Parameters;
use super::raw::Raw;
use super::rows::{Draws, Pattern};
use super::sums::RowSums;
use crate::error::Result;
use crate::harness::latency::Latencies;
use crate::harness::memory_group::Membership;
use crate::harness::meter::Meter;
use crate::harness::resident;
use crate::harness::sizes::Sizes;

/// The rows that are read before a round of `Steady`, in times the memory.
const STEADY_BOUNDS: u64 = 2;

/// State of memory when a gather begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum State {
    /// Nothing of the file.
    Cold,
    /// All rows of the gather.
    Warm,
    /// Rows of earlier gathers.
    Steady,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
            Self::Steady => "steady",
        }
    }
}

/// The way of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    ReadMany,
    PinMany,
    KernelMmap,
    KernelWillNeed,
    RawDirect,
}

impl Way {
    pub(crate) fn series(self) -> &'static str {
        match self {
            Self::ReadMany => "read_many",
            Self::PinMany => "pin_many",
            Self::KernelMmap => "kernel_mmap",
            Self::KernelWillNeed => "kernel_willneed",
            Self::RawDirect => "raw_direct",
        }
    }

    /// The device alone has no memory that could be warm.
    pub(crate) fn is_measured_in(self, state: State) -> bool {
        self != Self::RawDirect || state == State::Cold
    }
}

/// A round of one series.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) way: Way,
    pub(crate) pattern: Pattern,
    pub(crate) row_bytes: usize,
    pub(crate) state: State,
    pub(crate) file: PathBuf,
    pub(crate) sizes: Sizes,
    pub(crate) rows: usize,
    duration: Duration,
    group: Option<Membership>,
}

impl Task {
    pub(crate) fn new(file: &Path, parameters: &Parameters, group: Option<Membership>) -> Self {
        Self {
            way: Way::ReadMany,
            pattern: Pattern::Uniform,
            row_bytes: 0,
            state: State::Cold,
            file: file.to_owned(),
            sizes: parameters.sizes,
            rows: parameters.rows,
            duration: parameters.round(),
            group,
        }
    }

    /// Returns the task of a series in a row of the report.
    pub(crate) fn of(&self, way: Way, case: GatherCase) -> Self {
        let GatherCase { pattern, row_bytes, state } = case;
        Self { way, pattern, row_bytes, state, ..self.clone() }
    }

    /// Returns the same task with one gather.
    pub(crate) fn once(self) -> Self {
        Self { duration: Duration::ZERO, ..self }
    }
}

/// The result of a round.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) rows: u64,
    pub(crate) elapsed: Duration,
    /// CPU time of all threads of the process.
    pub(crate) cpu: Duration,
    /// Of gathers.
    pub(crate) latencies: Latencies,
    pub(crate) resident_peak_bytes: u64,
    pub(crate) verified_bytes: u64,
}

impl Answer {
    pub(crate) fn rows_rate(&self) -> f64 {
        self.rows as f64 / self.elapsed.as_secs_f64()
    }
}

/// One way to read rows.
pub(crate) trait Gatherer {
    /// Evicts all pages of the file.
    fn forget(&mut self) -> Result<()>;

    /// Makes rows resident by the quickest way. Not timed.
    fn warm(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.gather(positions, sums)
    }

    /// Reads the rows at `positions` and sums them.
    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()>;
}

/// Runs a round.
pub(crate) fn run(task: &Task) -> Result<Answer> {
    match task.way {
        Way::ReadMany => gather(task, ReadMany::open(task)?),
        Way::PinMany => gather(task, PinMany::open(task)?),
        Way::KernelMmap | Way::KernelWillNeed => {
            task.group.as_ref().map_or(Ok(()), Membership::join)?;
            gather(task, Mapped::open(task)?)
        }
        Way::RawDirect => gather(task, Raw::open(task)?),
    }
}

fn gather(task: &Task, mut gatherer: impl Gatherer) -> Result<Answer> {
    let row_bytes = task.row_bytes as u64;
    let mut draws = Draws::new(task.pattern, task.sizes.size_bytes, row_bytes, 1);
    let mut positions = vec![0; task.rows];
    let mut sums = RowSums::default();
    gatherer.forget()?;
    draws.fill(&mut positions);
    match task.state {
        State::Cold => {}
        State::Warm => gatherer.warm(&positions, &mut sums)?,
        State::Steady => {
            let reads = STEADY_BOUNDS * task.sizes.memory_pages();
            for _ in 0..reads.div_ceil(task.rows as u64) {
                gatherer.warm(&positions, &mut sums)?;
                draws.fill(&mut positions);
            }
        }
    }
    let mut latencies = Latencies::default();
    let (mut elapsed, mut cpu) = (Duration::ZERO, Duration::ZERO);
    loop {
        let meter = Meter::start(None)?;
        gatherer.gather(&positions, &mut sums)?;
        let cost = meter.stop()?;
        latencies.add(cost.elapsed);
        elapsed += cost.elapsed;
        cpu += cost.cpu;
        if elapsed >= task.duration {
            break;
        }
        if task.state == State::Cold {
            gatherer.forget()?;
        }
        if task.state != State::Warm {
            draws.fill(&mut positions);
        }
    }
    Ok(Answer {
        rows: latencies.calls() * task.rows as u64,
        elapsed,
        cpu,
        latencies,
        resident_peak_bytes: resident::peak_bytes()?,
        verified_bytes: sums.finish(task.way.series(), task.row_bytes)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ParameterSet};
    use crate::harness::pattern;
    use crate::progress::Silent;

    #[test]
    fn every_way_reads_the_rows_in_every_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let config = Config::new(ParameterSet::Smoke, Vec::new());
        let parameters = Parameters::from_config(&config).unwrap();
        pattern::make_file(&path, parameters.sizes.size_bytes, &mut Silent).unwrap();
        let base = Task::new(&path, &parameters, None);
        for way in [Way::ReadMany, Way::PinMany, Way::KernelMmap, Way::KernelWillNeed] {
            for case in parameters.cases() {
                let answer = run(&base.of(way, case).once()).unwrap();
                assert_eq!(answer.rows, parameters.rows as u64);
                assert!(answer.verified_bytes >= answer.rows * case.row_bytes as u64);
            }
        }
    }
}
