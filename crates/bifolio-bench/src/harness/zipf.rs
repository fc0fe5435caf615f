//! Ranks by Zipf's law: rank `k` comes in proportion to `1 / k^exponent`.
//!
//! Called by `access.rs`. Rejection-inversion after Hoermann and Derflinger (1996): constant time
//! and memory for any number of ranks, exact up to the rounding of floating-point numbers. A rank
//! is inverted from the integral of the law over steps of width one; the excess of the steps is
//! rejected, a few draws in a hundred.

/// Draws ranks from 1 on.
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
    fn ranks_come_as_often_as_the_law_says() {
        const DRAWS: u32 = 400_000;
        for exponent in [0.5, 0.99, 1.3] {
            let zipf = Zipf::new(1000, exponent);
            let mut random = fastrand::Rng::with_seed(3);
            let mut seen = vec![0u32; 1001];
            for _ in 0..DRAWS {
                seen[zipf.draw(&mut random) as usize] += 1;
            }
            let law = |rank: u32| f64::from(rank).powf(-exponent);
            let total: f64 = (1..=1000).map(law).sum();
            for rank in [1, 2, 3, 10, 100] {
                let expected = law(rank) / total * f64::from(DRAWS);
                let deviation = f64::from(seen[rank as usize]) - expected;
                assert!(deviation.abs() < 5.0 * expected.sqrt(), "{exponent} {rank} {deviation}");
            }
            let tail: u32 = seen[501..].iter().sum();
            let expected = (501..=1000).map(law).sum::<f64>() / total * f64::from(DRAWS);
            assert!((f64::from(tail) - expected).abs() < 5.0 * expected.sqrt());
        }
    }
}
