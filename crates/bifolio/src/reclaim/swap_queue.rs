//! The queue of the swapper: isolated folios of memory files, and how its rounds go. The steps are
//! at the head of `swapper.rs`.

use crate::page::FolioId;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};
use std::time::{Duration, Instant};

/// Number of pages that are swapped out together, if there are enough: a transfer of 1 MiB.
pub(super) const SWAP_PAGES: u64 = 256;
/// Time that threads with other options wait for a round.
const SLOW: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Swapper {
    pub(super) queue: Mutex<SwapQueue>,
    pub(super) called: Condvar,
    /// Pages in the queue, and those taken from it.
    pub(super) pages: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct SwapQueue {
    /// Isolated folios, each with its reference.
    pub(super) folios: Vec<FolioId>,
    pub(super) pages: u64,
    since: Option<Instant>,
    rounds: u64,
    /// The last round, if the swap refused it.
    trouble: Option<u64>,
    pub(super) is_served: bool,
    pub(super) is_ending: bool,
}

impl Swapper {
    /// Returns the number of pages that will be free soon; 0 while the swap is slow or in trouble.
    pub(super) fn coming_pages(&self) -> u64 {
        let pages = self.pages();
        if pages == 0 || self.queue.lock().is_late() { 0 } else { pages }
    }

    /// Returns `true` if the swap is slow or accepts nothing.
    pub(super) fn is_late(&self) -> bool {
        self.queue.lock().is_late()
    }

    pub(super) fn pages(&self) -> u64 {
        // Relaxed: a hint; freed frames are found under other locks.
        self.pages.load(Ordering::Relaxed)
    }

    pub(super) fn rounds(&self) -> u64 {
        self.queue.lock().rounds
    }

    /// Returns `true` if the last round was refused and came after round number `round`.
    pub(super) fn has_trouble_after(&self, round: u64) -> bool {
        self.queue.lock().trouble.is_some_and(|trouble| trouble > round)
    }

    pub(super) fn is_in_trouble(&self) -> bool {
        self.has_trouble_after(0)
    }

    /// SWAPPER-P3: waits for folios, and for the round in progress; `None` when the thread must
    /// end.
    pub(super) fn next_round(&self) -> Option<Vec<FolioId>> {
        let mut queue = self.queue.lock();
        loop {
            if queue.is_ending {
                return None;
            }
            let chosen = queue.begin_round();
            if chosen.is_some() {
                return chosen;
            }
            self.called.wait(&mut queue);
        }
    }

    /// SWAPPER-P5: ends a round.
    pub(super) fn end_round(&self, pages: u64, has_taken: bool, has_refused: bool) {
        let mut queue = self.queue.lock();
        debug_assert!(queue.since.is_some(), "a round ends that has not begun");
        queue.since = None;
        if has_taken {
            queue.trouble = None;
        } else if has_refused {
            queue.trouble = Some(queue.rounds);
        }
        self.pages.fetch_sub(pages, Ordering::Relaxed);
        let is_called = !queue.folios.is_empty();
        drop(queue);
        if is_called {
            self.called.notify_one();
        }
    }
}

impl SwapQueue {
    fn is_late(&self) -> bool {
        self.trouble.is_some() || self.since.is_some_and(|since| since.elapsed() > SLOW)
    }

    pub(super) fn begin_round(&mut self) -> Option<Vec<FolioId>> {
        if self.folios.is_empty() || self.since.is_some() {
            return None;
        }
        self.rounds += 1;
        self.since = Some(Instant::now());
        self.pages = 0;
        Some(std::mem::take(&mut self.folios))
    }
}
