//! Repetitions that take turns.
//!
//! All series of all cases run once, then all of them again: a machine that slows down or a
//! neighbour that wakes up then touches every series, and a ratio of two medians stays a ratio.

use indexmap::IndexMap;

use crate::error::Result;
use crate::progress::Progress;
use crate::report::{Counts, Row};
use crate::statistics::{median, spread};

/// What one turn of one series gave.
#[derive(Debug, Default)]
pub(crate) struct Sample {
    /// In the unit of the row.
    pub(crate) value: f64,
    /// How many operations it took; counts are divided by them.
    pub(crate) operations: u64,
    /// What was counted meanwhile.
    pub(crate) counts: Vec<(&'static str, u64)>,
}

/// One series of one case: where its median goes, and how to run it once.
pub(crate) struct Turn<'a> {
    pub(crate) row_index: usize,
    pub(crate) series: &'static str,
    pub(crate) run: Box<dyn Fn() -> Result<Sample> + 'a>,
}

/// Runs all `turns` `repetitions` times, round-robin, and fills in `rows`. Answers all operations.
pub(crate) fn interleave(
    turns: &[Turn<'_>],
    repetitions: usize,
    rows: &mut [Row],
    progress: &mut dyn Progress,
) -> Result<u64> {
    let mut samples: Vec<Vec<Sample>> = turns.iter().map(|_| Vec::new()).collect();
    for _ in 0..repetitions {
        for (turn, samples) in turns.iter().zip(&mut samples) {
            samples.push((turn.run)()?);
            progress.advance(1);
        }
    }
    for (turn, samples) in turns.iter().zip(&samples) {
        let values: Vec<f64> = samples.iter().map(|sample| sample.value).collect();
        let row = &mut rows[turn.row_index];
        row.series.insert(turn.series, median(&values));
        row.spread.insert(turn.series, spread(&values));
        row.counts.insert(turn.series, counts_per_operation(samples));
    }
    Ok(samples.iter().flatten().map(|sample| sample.operations).sum())
}

fn counts_per_operation(samples: &[Sample]) -> Counts {
    let operations: u64 = samples.iter().map(|sample| sample.operations).sum();
    let mut totals: IndexMap<&str, u64> = IndexMap::new();
    for (name, count) in samples.iter().flat_map(|sample| &sample.counts) {
        *totals.entry(name).or_default() += count;
    }
    let per_operation = |total| total as f64 / operations.max(1) as f64;
    totals.iter().map(|(name, &total)| (format!("{name}_per_op"), per_operation(total))).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::progress::Silent;
    use crate::report::Case;

    #[test]
    fn series_take_turns_and_medians_land_in_their_rows() {
        let order = RefCell::new(Vec::new());
        let turn = |row_index, series: &'static str| {
            let order = &order;
            let run = move || {
                order.borrow_mut().push((row_index, series));
                let value = order.borrow().len() as f64;
                Ok(Sample { value, operations: 10, counts: vec![("syscalls", 5)] })
            };
            Turn { row_index, series, run: Box::new(run) }
        };
        let turns = [turn(0, "a"), turn(0, "b"), turn(1, "a")];
        let mut rows = [Row::new(Case::new(), "ops/s"), Row::new(Case::new(), "ops/s")];
        let operations = interleave(&turns, 3, &mut rows, &mut Silent).unwrap();

        assert_eq!(operations, 90);
        assert_eq!(order.borrow()[..4], [(0, "a"), (0, "b"), (1, "a"), (0, "a")]);
        assert_eq!(rows[0].series["b"], 5.0, "of 2, 5, 8");
        assert_eq!(rows[1].spread["a"], [3.0, 9.0]);
        assert_eq!(rows[0].counts["a"]["syscalls_per_op"], 0.5);
        assert!(!rows[1].series.contains_key("b"));
    }
}
