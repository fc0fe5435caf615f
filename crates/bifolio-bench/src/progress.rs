//! Messages of a running benchmark to the person who waits.
//!
//! The benchmark speaks through [`Progress`]; the program decides what a terminal, a file or a test
//! sees of it. Results never go this way.

/// Receives what a running benchmark has to say.
pub trait Progress {
    /// A line worth keeping: what is needed, what is skipped.
    fn say(&mut self, line: &str);
    /// A phase begins, with so many steps.
    fn start(&mut self, phase: &str, steps: u64);
    /// Adds `steps` completed steps to the phase.
    fn advance(&mut self, steps: u64);
}

/// Hears nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn say(&mut self, _line: &str) {}
    fn start(&mut self, _phase: &str, _steps: u64) {}
    fn advance(&mut self, _steps: u64) {}
}
