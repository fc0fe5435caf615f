//! Medians and spreads. Pure functions.

/// The median; of an even number of samples the mean of the middle two. Zero of none.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// The smallest and the largest sample. Zeros of none.
pub(crate) fn spread(samples: &[f64]) -> [f64; 2] {
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
    fn spread_is_the_extremes() {
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [1.0, 3.0]);
        assert_eq!(spread(&[]), [0.0, 0.0]);
    }
}
