//! The stock of a CPU: free frames that its threads take without the arena's lock.
//!
//! Filled by `arena.rs`, in runs of at most an extent, and emptied by it before a chunk is
//! evacuated or memory is called full. The whole state is one word, the start and the end of the
//! run. A thread that exchanges the word owns the frames that it no longer names, so it does not
//! matter how often the word changed between a thread's load and its exchange.
//!
//! PROTOCOL STOCK, as two columns:
//!
//! ```text
//!      fill or empty, under the arena's lock     take, any thread
//! Q1   swap the word for the empty run
//! Q2   return the frames of the old word         load the word [start, end)
//! Q3   allocate a new run
//! Q4   swap the word for the new run             exchange it for [start + 1, end): owns `start`
//! ```
//!
//! Covered by `loom_stock`. (Linux does the same with its per-CPU page lists, `pcp` in
//! `mm/page_alloc.c`, which are protected by a lock for each CPU.)

use crate::page::FolioId;
use crate::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// A run of free frames; see the [module documentation](self). On a cache line of its own, because
/// other CPUs have others.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct FrameStock(AtomicU64);

impl FrameStock {
    fn word_of(run: Range<u32>) -> u64 {
        u64::from(run.end) << u32::BITS | u64::from(run.start)
    }

    fn run_of(word: u64) -> Range<u32> {
        word as u32..(word >> u32::BITS) as u32
    }

    /// Takes the first frame; `None` if there is none, or it does not follow `near`.
    pub(crate) fn take(&self, near: Option<FolioId>) -> Option<FolioId> {
        let without_first = |word| {
            let run = Self::run_of(word);
            let is_next = near.is_none_or(|near| near.0 + 1 == run.start);
            (is_next && !run.is_empty()).then(|| Self::word_of(run.start + 1..run.end))
        };
        // Acquire: pairs with the Release in `replace`: the previous use of the frame, which ended
        // under the arena's lock, comes first (FRAMES-3).
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, without_first);
        taken.ok().map(|word| FolioId(Self::run_of(word).start))
    }

    /// Replaces the run; only under the arena's lock. Returns the frames that were left.
    pub(crate) fn replace(&self, run: Range<u32>) -> Range<u32> {
        // Release: pairs with the Acquire in `take`. Relaxed for the frames that come back: no
        // thread has used them since they were put here, under the lock.
        Self::run_of(self.0.swap(Self::word_of(run), Ordering::Release))
    }

    pub(super) fn pages(&self) -> u64 {
        Self::run_of(self.0.load(Ordering::Relaxed)).len() as u64
    }
}
