//! Write hints: what is written once, and not read soon, makes room before other pages.
//!
//! Reclaim passes over dirty pages, so a stream of writes would push out what is hot, however it is
//! listed. A stream with this hint has a *window* instead (`write_window.rs`): its pages are
//! advised away ([`File::evict`](crate::File::evict)) in runs, which starts to write them back;
//! once more than the window is on its way, the writer waits for the oldest run and evicts it. So
//! the stream writes into frames that it has freed itself. An asynchronous write that would wait is
//! made by a thread.

use crate::sync::{AtomicU8, Mutex, Ordering};
use std::collections::VecDeque;
use std::ops::Range;

/// Future use of the bytes of writes, given to
/// [`File::set_write_hint`](crate::File::set_write_hint) or
/// [`FileFuture::write_hint`](crate::FileFuture::write_hint).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WriteHint {
    /// They may be read soon. The default.
    #[default]
    Normal,
    /// They are written once, and neither read nor written again soon: the output of a compaction,
    /// a backup. They are written back at once, and use a small part of the memory: a stream of
    /// such writes through one handle waits for its oldest bytes once a 32nd of the bound is on its
    /// way to the storage, at least 128 KiB and at most 8 MiB.
    Once,
}

/// Hint of a handle, and its latest writes with [`WriteHint::Once`].
#[derive(Debug, Default)]
pub(super) struct WriteHints {
    pub(super) is_once: AtomicU8,
    pub(super) stream: Mutex<Stream>,
}

/// Writes that continue one another.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// Bytes that are not advised away yet.
    run: Range<u64>,
    /// Runs that are being written back, the oldest first, and their bytes.
    sent: VecDeque<Range<u64>>,
    pub(super) sent_bytes: u64,
}

impl Stream {
    /// Adds a write of `bytes`. Returns runs to advise away: whole folios, or the end of a stream
    /// that this write does not continue.
    pub(super) fn add(
        &mut self,
        bytes: &Range<u64>,
        folio_bytes: u64,
        run_bytes: u64,
    ) -> [Range<u64>; 2] {
        let mut before = 0..0;
        if self.run.end != bytes.start {
            let start = bytes.start / folio_bytes * folio_bytes;
            before = std::mem::replace(&mut self.run, start..bytes.start);
        }
        self.run.end = bytes.end;
        let mut whole = 0..0;
        if self.run.end - self.run.start >= run_bytes.max(folio_bytes) {
            let end = self.run.end / folio_bytes * folio_bytes;
            whole = self.run.start..end;
            self.run.start = end;
        }
        let runs = [before, whole];
        for run in runs.iter().filter(|run| !run.is_empty()) {
            self.sent_bytes += run.end - run.start;
            self.sent.push_back(run.clone());
        }
        runs
    }

    /// Takes the oldest run if more than the window is on its way.
    pub(super) fn take_excess(&mut self, window_bytes: u64) -> Option<Range<u64>> {
        if self.sent_bytes <= window_bytes {
            return None;
        }
        let oldest = self.sent.pop_front()?;
        self.sent_bytes -= oldest.end - oldest.start;
        Some(oldest)
    }
}

impl WriteHints {
    pub(super) fn is_once(&self) -> bool {
        // Relaxed: a hint.
        self.is_once.load(Ordering::Relaxed) != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const RUN: u64 = 64 << 10;

    #[test]
    fn writes_that_continue_one_another_are_advised_away_together() {
        let mut stream = Stream::default();
        let mut add = |bytes: Range<u64>| stream.add(&bytes, 4096, RUN);
        let nothing = [0..0, 0..0];
        assert_eq!(add(0..1000), nothing);
        assert_eq!(add(1000..60_000), nothing);
        assert_eq!(add(60_000..70_000), [0..0, 0..69_632]);
        assert_eq!(add(70_000..71_000), nothing);
        // Elsewhere: what is left of the run before goes, with its last page.
        assert_eq!(add(500_000..504_096), [69_632..71_000, 0..0]);
        assert_eq!(add(0..200_000), [499_712..504_096, 0..196_608]);
    }

    #[test]
    fn the_oldest_runs_are_waited_for_once_the_window_is_full() {
        let mut stream = Stream::default();
        for number in 0..4 {
            stream.add(&(number * RUN..(number + 1) * RUN), 4096, RUN);
        }
        assert_eq!(stream.take_excess(3 * RUN), Some(0..RUN));
        assert_eq!(stream.take_excess(3 * RUN), None);
        assert_eq!(stream.sent_bytes, 3 * RUN);
    }
}
