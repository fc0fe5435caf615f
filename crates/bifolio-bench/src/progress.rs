//! Messages of a running benchmark to the user.
//!
//! The benchmark reports through [`Progress`]; the program decides what a terminal, a file or a
//! test shows. Results are not sent this way.

/// Receives messages of a running benchmark.
pub trait Progress {
    /// Prints a line worth keeping: what is needed, what is skipped.
    fn say(&mut self, line: &str);
    /// Begins a phase of `steps` steps.
    fn start(&mut self, phase: &str, steps: u64);
    /// Adds `steps` completed steps to the phase.
    fn advance(&mut self, steps: u64);
}

/// Ignores all messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn say(&mut self, _line: &str) {}
    fn start(&mut self, _phase: &str, _steps: u64) {}
    fn advance(&mut self, _steps: u64) {}
}
