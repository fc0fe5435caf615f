//! How often the calling thread went to sleep to wait for somebody, as the kernel counts it.

use super::device_bytes::{field, text};
use crate::error::Result;

const FIELD: &str = "voluntary_ctxt_switches:";

/// Changes of threads so far that the calling thread asked for.
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
        let before = count().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| (0..50).for_each(|_| thread::sleep(Duration::from_micros(1))));
        });
        let of_others = count().unwrap() - before;
        (0..50).for_each(|_| thread::sleep(Duration::from_micros(1)));
        assert!(count().unwrap() - before >= of_others + 50 && of_others < 40);
    }
}
