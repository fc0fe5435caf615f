//! Which rows a gather reads. Pure.

use serde::{Deserialize, Serialize};

use crate::harness::permutation::Permutation;

/// Of 5 rows one is hot; hot rows get 4 of 5 draws.
const HOT_PART: u64 = 5;

/// How rows are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Pattern {
    /// All with the same probability.
    Uniform,
    /// 80 % of the draws from 20 % of the rows, which are scattered over the file.
    EightyTwenty,
}

impl Pattern {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::EightyTwenty => "80/20",
        }
    }
}

/// Draws of row positions.
#[derive(Debug)]
pub(crate) struct Draws {
    pattern: Pattern,
    rows: u64,
    row_bytes: u64,
    order: Permutation,
    random: fastrand::Rng,
}

impl Draws {
    /// Every seed gives its own sequence. The hot rows do not depend on it.
    pub(crate) fn new(pattern: Pattern, size_bytes: u64, row_bytes: u64, seed: u64) -> Self {
        let rows = size_bytes / row_bytes;
        let order = Permutation::new(rows, 1);
        Self { pattern, rows, row_bytes, order, random: fastrand::Rng::with_seed(seed) }
    }

    /// Replaces `positions` with those of the next gather.
    pub(crate) fn fill(&mut self, positions: &mut [u64]) {
        let hot = (self.rows / HOT_PART).max(1);
        for position in positions {
            let is_hot = self.pattern == Pattern::EightyTwenty && self.random.u64(..HOT_PART) > 0;
            let rank = self.random.u64(..if is_hot { hot } else { self.rows });
            *position = self.order.apply(rank) * self.row_bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn draws(pattern: Pattern) -> HashMap<u64, u32> {
        let mut positions = vec![0; 100_000];
        Draws::new(pattern, 1000 << 10, 1 << 10, 7).fill(&mut positions);
        let mut counts = HashMap::new();
        positions.into_iter().for_each(|position| *counts.entry(position >> 10).or_default() += 1);
        counts
    }

    #[test]
    fn hot_rows_get_their_part_and_uniform_rows_are_alike() {
        let counts = draws(Pattern::EightyTwenty);
        assert_eq!(counts.len(), 1000);
        // 0.8 of the draws and 200 / 1000 of the others.
        let hot: u32 = counts.values().filter(|count| **count > 200).sum();
        assert!((83_000..85_000).contains(&hot), "{hot}");
        let uniform = draws(Pattern::Uniform);
        assert!(uniform.values().all(|count| (50..170).contains(count)));
    }
}
