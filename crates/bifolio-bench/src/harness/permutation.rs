//! A shuffled order of the numbers below `count`, with no table: a small Feistel network.
//!
//! Called by `access.rs`, for walks that visit every page once and for ranks that must not be
//! neighbours. The network permutes the next power of four; a number outside the range is permuted
//! again until it is inside, which keeps it a permutation.

const ROUND_KEYS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];

/// A permutation of the numbers below `count`.
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
    fn neighbours_are_scattered_and_seeds_differ() {
        let count = 1 << 20;
        let permutation = Permutation::new(count, 1);
        let near = |index| permutation.apply(index).abs_diff(permutation.apply(index + 1)) < 64;
        let neighbours = (0..10_000).filter(|&index| near(index)).count();
        assert!(neighbours < 10, "{neighbours} of 10000, 1.2 expected");
        let other = Permutation::new(count, 2);
        let same = (0..10_000).filter(|&i| permutation.apply(i) == other.apply(i)).count();
        assert!(same < 10, "{same}");
    }
}
