//! Counts how often the calling thread slept to wait, from the kernel's statistics.

use super::device_bytes::{field, text};
use crate::error::Result;

const FIELD: &str = "voluntary_ctxt_switches:";

/// Returns the number of voluntary context switches of the calling thread.
pub(crate) fn count() -> Result<u64> {
    field(&text("/proc/thread-self/status")?, FIELD)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_what_this_thread_asked_for_counts() {
        let text = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(field(text, FIELD).unwrap(), 17);
        // A sleep may end before it has begun, in a thread that was held up: not each one counts.
        const SLEEPS: u64 = 50;
        let sleeps = || (0..SLEEPS).for_each(|_| thread::sleep(Duration::from_millis(1)));
        let changes_of = |work: &dyn Fn()| {
            let before = count().unwrap();
            work();
            count().unwrap() - before
        };
        let of_others = changes_of(&|| thread::scope(|scope| drop(scope.spawn(sleeps))));
        let own = changes_of(&sleeps);
        assert!(of_others < SLEEPS / 2 && own > SLEEPS / 2, "{of_others}, {own}");
    }
}
