//! Models of eviction policies: each decides which of at most `capacity` pages are in memory.
//!
//! A model is the policy without memory, threads or I/O, so it can be read beside its paper. The
//! policy of the library is no model here: it is measured.

mod arc;
mod belady;
mod clock;
mod clock2q_plus;
mod lirs;
mod lru;
mod queues;
mod s3_fifo;
mod sieve;

use std::fmt::Debug;

/// A policy in operation.
pub trait Model: Debug {
    /// Uses a page, which is in memory afterwards. Returns `true` if it was before.
    fn reference(&mut self, page: u32) -> bool;
}

/// The policy that all others are divided by.
pub(crate) const LRU: &str = "lru";
/// The policy that knows the future.
pub(crate) const BELADY: &str = "belady";

/// The policies, by the names of their series.
pub const NAMES: [&str; 8] =
    [LRU, "clock", "sieve", "s3_fifo", "clock2q_plus", "arc", "lirs", BELADY];

/// Creates a model of the policy `name` for a trace of pages below `pages`.
fn create(name: &str, capacity: usize, pages: usize, trace: &[u32]) -> Box<dyn Model> {
    match name {
        LRU => Box::new(lru::Lru::new(capacity, pages)),
        "clock" => Box::new(clock::Clock::new(capacity, pages)),
        "sieve" => Box::new(sieve::Sieve::new(capacity, pages)),
        "s3_fifo" => Box::new(s3_fifo::S3Fifo::new(capacity, pages)),
        "clock2q_plus" => Box::new(clock2q_plus::Clock2QPlus::new(capacity, pages)),
        "arc" => Box::new(arc::Arc::new(capacity, pages)),
        "lirs" => Box::new(lirs::Lirs::new(capacity, pages)),
        BELADY => Box::new(belady::Belady::new(capacity, pages, trace)),
        _ => unreachable!("no model is called {name}"),
    }
}

/// Returns the number of misses of the policy `name` with room for `capacity` pages.
pub fn misses(name: &str, capacity: usize, pages: usize, trace: &[u32]) -> u64 {
    let mut model = create(name, capacity.max(2), pages, trace);
    trace.iter().map(|page| u64::from(!model.reference(*page))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page is in memory at most `capacity` different pages later, whatever the policy keeps.
    #[test]
    fn no_model_has_more_pages_than_its_capacity() {
        let mut random = fastrand::Rng::with_seed(7);
        for name in NAMES {
            for capacity in [2, 3, 10, 64] {
                let skewed = |_| random.u32(0..100).min(random.u32(0..100));
                let trace: Vec<u32> = (0..4000).map(skewed).collect();
                let mut model = create(name, capacity, 100, &trace);
                let mut resident = std::collections::HashSet::new();
                // A model cannot be asked what it has. A hit proves that the page stayed since.
                let hits: Vec<bool> = trace.iter().map(|page| model.reference(*page)).collect();
                for (index, page) in trace.iter().enumerate() {
                    let before = trace[..index].iter().rposition(|other| other == page);
                    assert!(!hits[index] || before.is_some(), "{name}: a hit before the first use");
                }
                // Pages that hit before anything else is filled are in memory at once.
                for start in (0..trace.len()).step_by(97) {
                    resident.clear();
                    for (page, hit) in trace[start..].iter().zip(&hits[start..]) {
                        if !hit {
                            break;
                        }
                        resident.insert(*page);
                    }
                    assert!(resident.len() <= capacity, "{name} has {} pages", resident.len());
                }
            }
        }
    }

    #[test]
    fn lru_and_belady_miss_what_can_be_counted_by_hand() {
        let trace = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3];
        assert_eq!(misses(LRU, 3, 4, &trace), 6);
        assert_eq!(misses(BELADY, 3, 4, &trace), 5);
        let around: Vec<u32> = (0..400).map(|index| index % 40).collect();
        assert_eq!(misses(LRU, 39, 40, &around), 400);
        assert!(misses(BELADY, 39, 40, &around) < 60 && misses("lirs", 39, 40, &around) < 120);
    }

    #[test]
    fn no_policy_has_fewer_misses_than_belady() {
        let mut random = fastrand::Rng::with_seed(1);
        let skewed = |_| random.u32(0..1000).min(random.u32(0..1000)).min(random.u32(0..1000));
        let trace: Vec<u32> = (0..30_000).map(skewed).collect();
        for capacity in [50, 100, 400] {
            let of = |name| misses(name, capacity, 1000, &trace);
            for name in NAMES {
                assert!(of(name) >= of(BELADY), "{name}");
                assert!(of(name) as f64 <= of(LRU) as f64 * 1.05, "{name} with {capacity}");
            }
        }
    }
}
