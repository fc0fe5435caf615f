//! Progress on standard error: on a terminal one line with the remaining time, elsewhere two
//! lines per benchmark.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use bifolio_bench::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// Interval at which a thread redraws, also while the benchmark measures: long, to disturb it
/// little.
const REDRAW_INTERVAL: Duration = Duration::from_millis(500);

/// Progress on standard error.
#[derive(Debug)]
pub(crate) struct Terminal {
    is_terminal: bool,
    wanted: usize,
    ended: usize,
    name: String,
    since: Instant,
    /// Progress bar of the current phase, on a terminal.
    bar: Option<ProgressBar>,
}

impl Terminal {
    /// Creates the display for a run of `wanted` benchmarks.
    pub(crate) fn new(wanted: usize) -> Self {
        Self {
            is_terminal: std::io::stderr().is_terminal(),
            wanted,
            ended: 0,
            name: String::new(),
            since: Instant::now(),
            bar: None,
        }
    }

    /// Shows the begin of a benchmark.
    pub(crate) fn begin(&mut self, name: &str) {
        name.clone_into(&mut self.name);
    }

    /// Shows the end of a benchmark.
    pub(crate) fn end(&mut self) {
        self.end_phase();
        self.ended += 1;
        if !self.is_terminal && self.ended < self.wanted {
            let done = &self.name;
            crate::output::complain(&format!("{done} is done, {}", self.left()));
        }
    }

    /// Returns the number of the current benchmark and the estimated time for the rest.
    fn place(&self) -> String {
        let place = format!("{}/{} {}", self.ended + 1, self.wanted, self.name);
        if self.ended == 0 || self.ended == self.wanted {
            return place;
        }
        format!("{place}, {}", self.left())
    }

    /// Returns the estimated time for the rest; a benchmark has ended.
    fn left(&self) -> String {
        let left = self.since.elapsed() / self.ended as u32 * (self.wanted - self.ended) as u32;
        format!("about {} s left", left.as_secs().next_multiple_of(5))
    }

    fn end_phase(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Progress for Terminal {
    fn say(&mut self, line: &str) {
        self.end_phase();
        if !self.is_terminal {
            crate::output::complain(line);
        }
    }

    fn start(&mut self, phase: &str, steps: u64) {
        self.end_phase();
        if self.is_terminal {
            let style = ProgressStyle::with_template("{prefix}: {msg} {wide_bar} {percent}%")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(steps).with_style(style).with_message(phase.to_owned());
            bar.set_prefix(self.place());
            bar.enable_steady_tick(REDRAW_INTERVAL);
            self.bar = Some(bar);
        }
    }

    fn advance(&mut self, steps: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(steps);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.end_phase();
    }
}
