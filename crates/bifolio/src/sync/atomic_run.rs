//! A run of numbers in one word, of which any thread takes the first.

use super::{AtomicU64, Ordering};
use std::ops::Range;

/// A run of numbers, its start and its end in one word, of which any thread takes the first.
///
/// A thread that exchanges the word owns the numbers that it no longer names, so it does not matter
/// how often the word changed between a thread's load and its exchange. On a cache line of its own,
/// because a CPU has its own (`memory/arena.rs`, STOCK-Q1..Q4).
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct AtomicRun(AtomicU64);

impl AtomicRun {
    fn run_of(word: u64) -> Range<u32> {
        word as u32..(word >> u32::BITS) as u32
    }

    fn word_of(run: Range<u32>) -> u64 {
        u64::from(run.end) << u32::BITS | u64::from(run.start)
    }

    /// Takes the first number; `None` if there is none, or it does not follow `near`.
    pub(crate) fn take(&self, near: Option<u32>) -> Option<u32> {
        let without_first = |word| {
            let run = Self::run_of(word);
            let is_next = near.is_none_or(|near| near + 1 == run.start);
            (is_next && !run.is_empty()).then(|| Self::word_of(run.start + 1..run.end))
        };
        // Acquire: pairs with the Release in `replace`: what was done before, also with what the
        // number names, comes first.
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, without_first);
        taken.ok().map(|word| Self::run_of(word).start)
    }

    /// Replaces the run. Callers serialize. Returns the numbers that were left.
    pub(crate) fn replace(&self, run: Range<u32>) -> Range<u32> {
        // Release: pairs with the Acquire in `take`. Relaxed for the numbers that come back: no
        // thread has taken them since the previous call.
        Self::run_of(self.0.swap(Self::word_of(run), Ordering::Release))
    }

    pub(crate) fn len(&self) -> u64 {
        Self::run_of(self.0.load(Ordering::Relaxed)).len() as u64
    }
}
