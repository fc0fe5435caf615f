//! The page that each draw selects: a pure function from the number of a draw to a page.
//!
//! Called by the loops of the benchmarks that read or write pages at random.

use serde::{Deserialize, Serialize};

use super::permutation::Permutation;
use super::zipf::Zipf;

/// The unit of random reads and writes, and the smallest folio.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The skew of the benchmarks that serve "zipfian" keys.
const ZIPF_EXPONENT: f64 = 0.99;

/// How pages are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pattern {
    /// All pages with the same probability, each again only after all others: in a cache smaller
    /// than the file each draw is a miss.
    Uniform,
    /// Zipf's law with exponent 0.99; the ranks are scattered over the file.
    Zipf,
}

impl Pattern {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

/// A pattern over the pages of one file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pages: u64,
    order: Permutation,
    zipf: Option<Zipf>,
}

impl Access {
    /// Creates `pattern` over the whole pages of `size_bytes`; every seed scatters them
    /// differently.
    pub(crate) fn new(pattern: Pattern, size_bytes: u64, seed: u64) -> Self {
        let pages = size_bytes / PAGE_BYTES as u64;
        let zipf = (pattern == Pattern::Zipf).then(|| Zipf::new(pages, ZIPF_EXPONENT));
        Self { pages, order: Permutation::new(pages, seed), zipf }
    }

    /// Returns the position of the page of draw number `draw`.
    pub(crate) fn pos_bytes(&self, draw: u64) -> u64 {
        let index = match &self.zipf {
            None => draw % self.pages,
            Some(zipf) => zipf.draw(&mut fastrand::Rng::with_seed(draw)) - 1,
        };
        self.order.apply(index) * PAGE_BYTES as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const SIZE_BYTES: u64 = 1000 * PAGE_BYTES as u64;

    #[test]
    fn consecutive_draws_of_zipf_follow_the_law() {
        let access = Access::new(Pattern::Zipf, SIZE_BYTES, 1);
        let mut seen: HashMap<u64, u32> = HashMap::new();
        for draw in 0..100_000 {
            *seen.entry(access.pos_bytes(draw)).or_default() += 1;
        }
        let mut counts: Vec<u32> = seen.into_values().collect();
        counts.sort_unstable_by(|left, right| right.cmp(left));
        // The sum of k^-0.99 up to 1000 is 7.73: 12,900 and 6,500 draws.
        assert!((12_300..13_600).contains(&counts[0]), "{}", counts[0]);
        assert!((6_100..6_900).contains(&counts[1]), "{}", counts[1]);
    }
}
