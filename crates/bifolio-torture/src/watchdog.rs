//! One watchdog for all scenes, from the first step of a scene to the drop of its cache.
//!
//! Calls, steps at rest and cases count as progress ([`progress`]). If none is made for too long,
//! [`hung`] names the scene and its phase, prints the stacks of all threads (`stacks.rs`) and ends
//! the program. Waits that have a limit of their own, such as those for a child, count as progress
//! while they last.

use crate::{deaths, stacks};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Upper bound on the time between two looks at the progress.
const LOOK: Duration = Duration::from_millis(100);

/// Number of steps so far, of any thread.
static PROGRESS: AtomicU64 = AtomicU64::new(0);
/// Current part of the scene.
static PHASE: Mutex<String> = Mutex::new(String::new());
/// The phase in which the next scene is to hang: a test of this file.
static STALL: Mutex<Option<String>> = Mutex::new(None);

/// Counts a step.
pub fn progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// Counts a step, and names the part of the scene that begins.
pub fn enter(phase: &str) {
    progress();
    phase.clone_into(&mut PHASE.lock().expect("no panic"));
    let is_stalled = STALL.lock().expect("no panic").as_deref() == Some(phase);
    if is_stalled {
        loop {
            thread::park();
        }
    }
}

/// Starts the watchdog. A scene hangs in the phase `stall`, if one is given.
pub fn start(patience: Duration, stall: Option<String>) {
    *STALL.lock().expect("no panic") = stall;
    thread::spawn(move || {
        let mut seen = Seen::new(PROGRESS.load(Ordering::Relaxed), Instant::now());
        loop {
            thread::sleep(LOOK.min(patience / 4));
            if seen.look(PROGRESS.load(Ordering::Relaxed), Instant::now()) > patience {
                hung(&format!("no progress for {patience:?}"));
            }
        }
    });
}

/// Ends the program: the scene hangs, which `what` describes.
pub fn hung(what: &str) -> ! {
    stacks::die_within(Duration::from_secs(30));
    let (class, seed) = deaths::scene();
    let phase = PHASE.lock().map_or_else(|_| "?".to_owned(), |phase| phase.clone());
    println!("torture: class {class}, seed {seed}: hangs in {phase}: {what}");
    stacks::print();
    std::process::abort();
}

/// The last progress, and its time.
pub struct Seen {
    progress: u64,
    since: Instant,
}

impl Seen {
    /// Notes the state at the beginning.
    pub fn new(progress: u64, now: Instant) -> Self {
        Self { progress, since: now }
    }

    /// Returns how long there has been no progress.
    pub fn look(&mut self, progress: u64, now: Instant) -> Duration {
        if progress != self.progress {
            *self = Self::new(progress, now);
        }
        now - self.since
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_without_progress_counts() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut seen = Seen::new(0, begun);
        assert_eq!(seen.look(0, at(5)), Duration::from_secs(5));
        assert_eq!(seen.look(1, at(6)), Duration::ZERO);
        assert_eq!(seen.look(1, at(9)), Duration::from_secs(3));
    }
}
