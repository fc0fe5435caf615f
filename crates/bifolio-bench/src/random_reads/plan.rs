//! The rows of a pattern, and the series of each. Pure functions.
//!
//! Series that are compared are adjacent: they run one after the other.

use super::batched::Shape;
use super::kernel::Way;
use super::parameters::{DEPTH, Parameters};
use crate::harness::access::{PAGE_BYTES, Pattern};
use bifolio_report::{Case, Row};

/// Requests per call of `read_many`, and the corresponding shape of the raw ring.
const CALLS: [(u16, Shape); 2] = [(DEPTH, Shape::Barrier), (1024, Shape::Rolling)];

/// One series of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    RawPread { threads: usize },
    ReadAt { threads: usize },
    Kernel { way: Way, threads: usize },
    RawRing { shape: Shape },
    ReadMany { requests_per_call: usize },
}

impl Step {
    /// Returns the duration of a trial, relative to one at depth 1.
    pub(crate) fn weight(self) -> u32 {
        match self {
            Self::RawRing { .. } | Self::ReadMany { .. } => DEEP_WEIGHT,
            Self::RawPread { .. } | Self::ReadAt { .. } | Self::Kernel { .. } => 1,
        }
    }

    pub(crate) fn series(self) -> &'static str {
        match self {
            Self::RawPread { .. } | Self::RawRing { .. } => "raw_direct",
            Self::ReadAt { .. } => "read_at",
            Self::Kernel { way, .. } => way.series(),
            Self::ReadMany { .. } => "read_many",
        }
    }
}

/// Deep series make many more reads a second: longer trials cost little, and show stalls.
const DEEP_WEIGHT: u32 = 3;

/// The series that this machine can run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Possible {
    pub(crate) raw: bool,
    pub(crate) kernel: bool,
}

/// Returns the rows of `pattern`, and the steps of each.
pub(crate) fn plan(
    parameters: &Parameters,
    pattern: Pattern,
    possible: Possible,
) -> Vec<(Row, Vec<Step>)> {
    let case = || Case::new().with("pattern", pattern.name()).with("block_bytes", PAGE_BYTES);
    let row = |case| Row::new(case, "reads/s");
    let mut rows = Vec::new();
    for &threads in &parameters.threads {
        let steps = [
            (possible.raw, Step::RawPread { threads }),
            (true, Step::ReadAt { threads }),
            (possible.kernel, Step::Kernel { way: Way::Pread, threads }),
            (possible.kernel, Step::Kernel { way: Way::Mmap, threads }),
        ];
        rows.push((row(case().with("depth", 1).with("threads", threads)), only_possible(&steps)));
    }
    for (requests_per_call, shape) in CALLS {
        let case = case().with("depth", DEPTH).with("threads", 1);
        let case = case.with("requests_per_call", requests_per_call);
        let requests_per_call = usize::from(requests_per_call);
        let steps =
            [(possible.raw, Step::RawRing { shape }), (true, Step::ReadMany { requests_per_call })];
        rows.push((row(case), only_possible(&steps)));
    }
    rows
}

fn only_possible(steps: &[(bool, Step)]) -> Vec<Step> {
    steps.iter().filter(|(possible, _)| *possible).map(|(_, step)| *step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ParameterSet};

    #[test]
    fn what_is_not_possible_is_left_out_and_the_rest_stays() {
        let config = Config::new(ParameterSet::Smoke, Vec::new());
        let parameters = Parameters::from_config(&config).unwrap();
        let count = |raw, kernel| {
            let rows = plan(&parameters, Pattern::Zipf, Possible { raw, kernel });
            assert_eq!(rows.len(), 4);
            rows.iter().map(|(_, steps)| steps.len()).sum::<usize>()
        };
        assert_eq!(count(true, true), 12);
        assert_eq!(count(false, true), 8);
        assert_eq!(count(false, false), 4);
    }
}
