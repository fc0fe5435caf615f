//! Medians and spreads. Pure functions, called by benchmarks and by `envelope.rs`.

/// Returns the median; of an even number of samples the mean of the middle two; zero without
/// samples.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// Minimum probability that [`median_interval`] holds the true median; fewer than five samples do
/// not reach it.
const COVERAGE_MIN: f64 = 0.9;

/// Returns the narrowest interval between two samples that holds the true median with a probability
/// of 0.9, whatever the distribution; the extremes of few samples. Zeros of none.
pub fn median_interval(samples: &[f64]) -> [f64; 2] {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    let Some(last) = count.checked_sub(1) else { return [0.0, 0.0] };
    // The median lies outside samples k and n - 1 - k if at most k of n fell on one side of it.
    let (mut cut, mut binomial, mut tail) = (0, 1.0, 1.0);
    loop {
        binomial *= (count - cut) as f64 / (cut + 1) as f64;
        tail += binomial;
        let coverage = 1.0 - 2.0 * tail / 2f64.powi(count as i32);
        if coverage < COVERAGE_MIN || 2 * (cut + 1) > last {
            return [sorted[cut], sorted[last - cut]];
        }
        cut += 1;
    }
}

/// Returns the smallest and the largest sample. Zeros of none.
pub fn spread(samples: &[f64]) -> [f64; 2] {
    let low = samples.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0);
    let high = samples.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0);
    [low, high]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_whatever_the_order() {
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 100.0]), 3.5);
        assert_eq!(median(&[7.0]), 7.0);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn the_interval_of_a_median_narrows_with_more_samples() {
        let samples = |count: u32| (1..=count).map(f64::from).collect::<Vec<_>>();
        assert_eq!(median_interval(&samples(5)), [1.0, 5.0]);
        assert_eq!(median_interval(&samples(7)), [1.0, 7.0]);
        // Of 8 coins at most one falls on one side with a probability of 9 / 256.
        assert_eq!(median_interval(&samples(8)), [2.0, 7.0]);
        assert_eq!(median_interval(&samples(14)), [4.0, 11.0]);
        assert_eq!(median_interval(&[3.0]), [3.0, 3.0]);
        assert_eq!(median_interval(&[]), [0.0, 0.0]);
    }

    #[test]
    fn spread_is_the_extremes() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [1.0, 3.0]);
        assert_eq!(spread(&[]), [0.0, 0.0]);
    }
}
