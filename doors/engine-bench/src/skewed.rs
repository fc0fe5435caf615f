//! Pages of which some are chosen far more often than others.

use bifolio_bench::Zipf;
use fastrand::Rng;

/// The exponent of the law by which pages are chosen; that of YCSB.
pub(crate) const SKEW: f64 = 0.99;
/// A prime, larger than the number of pages: spreads the pages that are often chosen.
const MULTIPLIER: u64 = 2_654_435_761;

/// Pages below a number, chosen by Zipf's law.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SkewedPages {
    pages: u64,
    zipf: Zipf,
}

impl SkewedPages {
    pub(crate) fn new(pages: u64) -> Self {
        Self { pages, zipf: Zipf::new(pages, SKEW) }
    }

    /// Returns the next page.
    pub(crate) fn draw(&self, random: &mut Rng) -> u64 {
        self.zipf.draw(random).wrapping_mul(MULTIPLIER) % self.pages
    }
}
