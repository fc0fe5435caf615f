//! Readahead for the runs that a sorter merges.
//!
//! The sorter of a `CREATE INDEX` writes sorted runs to one temporary file, and merges up to 16 of
//! them at a time, each by reads of 4 KiB. A handle of the cache follows four
//! sequential readers ([`bifolio::Access`]), so that nearly each such read would wait for a request
//! of 4 KiB. Here as many are followed as the sorter has, by where each read has ended.
//!
//! Called by `temporary`, which has what it answers read in the background.

use std::ops::Range;

/// Runs that are followed: those of four merges, each of which reads its own 16.
const RUNS_MAX: usize = 64;
/// First and largest window, bytes. With 128 KiB, a merge in 54 MiB no longer waits for the device.
const WINDOW_BYTES_MIN: u64 = 16 << 10;
const WINDOW_BYTES_MAX: u64 = 128 << 10;
/// Part of the bound of the cache that all windows of a file may have: what is read ahead must not
/// be evicted before the merge comes to it.
const BOUND_DIVISOR: u64 = 4;

/// The sequential reads of a file.
#[derive(Debug)]
pub(crate) struct Runs {
    ahead_bytes_max: u64,
    /// The one that was read last is the last.
    runs: Vec<Run>,
}

#[derive(Debug)]
struct Run {
    /// Where its last read ended.
    next: u64,
    /// End of what is being read ahead.
    ahead: u64,
    window_bytes: u64,
}

impl Runs {
    /// Follows the reads of a file in a cache with this bound.
    pub(crate) fn new(bound_bytes: u64) -> Self {
        Self { ahead_bytes_max: bound_bytes / BOUND_DIVISOR, runs: Vec::new() }
    }

    /// Notes a read. Returns the bytes to read ahead, if it continues a run that has less than half
    /// of a window ahead.
    pub(crate) fn note(&mut self, bytes: Range<u64>) -> Option<Range<u64>> {
        let Some(found) = self.runs.iter().rposition(|run| run.next == bytes.start) else {
            if self.runs.len() == RUNS_MAX {
                self.runs.remove(0);
            }
            self.runs.push(Run { next: bytes.end, ahead: bytes.end, window_bytes: 0 });
            return None;
        };
        // A run has up to one and a half windows ahead.
        let share_bytes = self.ahead_bytes_max / self.runs.len() as u64 * 2 / 3;
        let most_bytes = share_bytes.min(WINDOW_BYTES_MAX);
        let mut run = self.runs.remove(found);
        run.next = bytes.end;
        run.ahead = run.ahead.max(run.next);
        let is_short = run.ahead - run.next <= run.window_bytes / 2;
        let window = (is_short && most_bytes >= WINDOW_BYTES_MIN).then(|| {
            run.window_bytes = (2 * run.window_bytes).clamp(WINDOW_BYTES_MIN, most_bytes);
            let start = run.ahead;
            run.ahead += run.window_bytes;
            start..run.ahead
        });
        self.runs.push(run);
        window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn each_of_many_runs_has_windows_of_its_own() {
        let mut runs = Runs::new(64 << 20);
        let length = 1 << 20;
        let mut windows = vec![Vec::new(); 40];
        for page in 0..length / PAGE {
            for (number, windows) in windows.iter_mut().enumerate() {
                let start = number as u64 * length + page * PAGE;
                windows.extend(runs.note(start..start + PAGE));
            }
        }
        for (number, windows) in windows.iter().enumerate() {
            let start = number as u64 * length;
            // The first read shows no run.
            assert_eq!(windows[0], start + 2 * PAGE..start + 6 * PAGE);
            assert_eq!(windows[1], start + 6 * PAGE..start + 14 * PAGE);
            assert!(windows.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(windows.last().unwrap().end >= start + length);
        }
    }

    #[test]
    fn reads_at_random_read_nothing_ahead_and_are_forgotten() {
        let mut runs = Runs::new(64 << 20);
        for number in 0..10_000 {
            let start = number * 7919 % 10_007 * PAGE;
            assert_eq!(runs.note(start..start + PAGE / 2), None);
        }
        assert_eq!(runs.runs.len(), RUNS_MAX);
    }

    #[test]
    fn all_windows_have_a_part_of_the_bound() {
        for (bound_bytes, count) in [(4 << 20, 20), (1 << 20, 3), (1 << 20, 40)] {
            let mut runs = Runs::new(bound_bytes);
            let mut ahead = vec![0; count];
            for page in 0..100 {
                for (number, ahead) in ahead.iter_mut().enumerate() {
                    let start = ((number as u64) << 20) + page * PAGE;
                    if let Some(window) = runs.note(start..start + PAGE) {
                        *ahead = window.end - start;
                    }
                }
                // While the first runs come, their windows are those of few.
                let sum: u64 = ahead.iter().sum();
                assert!(page < 50 || sum <= bound_bytes / 2, "{count} runs: {sum}");
            }
            assert_eq!(ahead.iter().all(|ahead| *ahead > 0), count < 40);
        }
    }
}
