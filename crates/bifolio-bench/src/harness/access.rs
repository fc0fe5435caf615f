//! The page that each draw selects: a pure function from the number of a draw to a page.
//!
//! Called by the loops of the benchmarks that read or write pages at random, and by the generators
//! of traces.

use serde::{Deserialize, Serialize};

/// The unit of random reads and writes, and the smallest folio.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The skew of the benchmarks that serve "zipfian" keys.
const ZIPF_EXPONENT: f64 = 0.99;

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

const ROUND_KEYS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];

/// A permutation of the numbers below `count`, with no table: a small Feistel network.
///
/// The network permutes the next power of four; a number outside the range is permuted again until
/// it is inside, which keeps it a permutation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    count: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    /// Creates the permutation of a seed, the same on every run.
    pub(crate) fn new(count: u64, seed: u64) -> Self {
        assert!(count > 0 && count <= 1 << 62, "{count} numbers");
        let bits = u64::BITS - (count - 1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1), seed }
    }

    /// Returns the image of `index`, which is below the count.
    pub(crate) fn apply(&self, index: u64) -> u64 {
        debug_assert!(index < self.count);
        let mut number = self.shuffle(index);
        while number >= self.count {
            number = self.shuffle(number);
        }
        number
    }

    fn shuffle(&self, number: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in ROUND_KEYS {
            let mixed = (right ^ self.seed).wrapping_add(key).wrapping_mul(ROUND_KEYS[0]);
            let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(key);
            (left, right) = (right, left ^ (mixed >> 32 & mask));
        }
        left << self.half_bits | right
    }
}

/// Draws ranks from 1 on by Zipf's law: rank `k` comes in proportion to `1 / k^exponent`.
///
/// Rejection-inversion after Hoermann and Derflinger (1996): constant time and memory for any
/// number of ranks, exact up to the rounding of floating-point numbers. A rank is inverted from the
/// integral of the law over steps of width one; the excess of the steps is rejected, a few draws in
/// a hundred.
#[derive(Clone, Copy, Debug)]
pub struct Zipf {
    ranks: u64,
    exponent: f64,
    integral_first: f64,
    integral_last: f64,
    always_taken_width: f64,
}

impl Zipf {
    /// Creates a law of `ranks` ranks; the exponent must not be 1, where the integral has another
    /// form.
    pub fn new(ranks: u64, exponent: f64) -> Self {
        assert!(ranks > 0 && exponent > 0.0 && exponent != 1.0);
        let mut zipf = Self {
            ranks,
            exponent,
            integral_first: 0.0,
            integral_last: 0.0,
            always_taken_width: 0.0,
        };
        zipf.integral_first = zipf.integral(1.5) - 1.0;
        zipf.integral_last = zipf.integral(ranks as f64 + 0.5);
        zipf.always_taken_width = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// The next rank, from 1 to the number of ranks.
    pub fn draw(&self, random: &mut fastrand::Rng) -> u64 {
        loop {
            let area =
                self.integral_last + random.f64() * (self.integral_first - self.integral_last);
            let point = self.inverse(area);
            let rank = (point + 0.5).clamp(1.0, self.ranks as f64).floor();
            let taken = rank - point <= self.always_taken_width
                || area >= self.integral(rank + 0.5) - self.density(rank);
            if taken {
                return rank as u64;
            }
        }
    }

    fn density(&self, point: f64) -> f64 {
        point.powf(-self.exponent)
    }

    fn integral(&self, point: f64) -> f64 {
        let power = 1.0 - self.exponent;
        (point.powf(power) - 1.0) / power
    }

    fn inverse(&self, area: f64) -> f64 {
        let power = 1.0 - self.exponent;
        (area * power + 1.0).powf(power.recip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_met_once() {
        for count in [1, 2, 3, 16, 17, 1000, 4096, 5000] {
            let permutation = Permutation::new(count, 7);
            let mut seen: Vec<u64> = (0..count).map(|index| permutation.apply(index)).collect();
            seen.sort_unstable();
            assert!(seen.iter().copied().eq(0..count), "{count}");
        }
    }

    #[test]
    fn draws_of_zipf_follow_the_law() {
        const DRAWS: u32 = 400_000;
        for exponent in [0.5, 0.99, 1.3] {
            let zipf = Zipf::new(1000, exponent);
            let mut seen = vec![0_u32; 1001];
            for draw in 0..u64::from(DRAWS) {
                seen[zipf.draw(&mut fastrand::Rng::with_seed(draw)) as usize] += 1;
            }
            let law = |rank: u32| f64::from(rank).powf(-exponent);
            let total: f64 = (1..=1000).map(law).sum();
            for rank in [1, 2, 3, 10, 100] {
                let expected = law(rank) / total * f64::from(DRAWS);
                let deviation = f64::from(seen[rank as usize]) - expected;
                assert!(deviation.abs() < 5.0 * expected.sqrt(), "{exponent} {rank} {deviation}");
            }
        }
    }
}
