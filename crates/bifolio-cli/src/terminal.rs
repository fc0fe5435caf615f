//! What a person who waits sees: lines always, a bar only on a terminal. All of it on standard
//! error.

use std::io::IsTerminal;
use std::time::Duration;

use bifolio_bench::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// A thread redraws this often, also while the benchmark measures: seldom.
const REDRAW_INTERVAL: Duration = Duration::from_millis(500);

/// Progress on standard error.
#[derive(Debug)]
pub(crate) struct Terminal {
    is_terminal: bool,
    /// The phase that is shown, on a terminal.
    bar: Option<ProgressBar>,
}

impl Terminal {
    pub(crate) fn new() -> Self {
        Self { is_terminal: std::io::stderr().is_terminal(), bar: None }
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
        crate::output::complain(line);
    }

    fn start(&mut self, phase: &str, steps: u64) {
        self.end_phase();
        if self.is_terminal {
            let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}%")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(steps).with_style(style).with_message(phase.to_owned());
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
