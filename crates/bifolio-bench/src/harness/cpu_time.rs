//! The CPU time of this process: all its threads, also those that have ended, and the kernel on
//! their behalf. Work of kernel threads (flushing the page cache) is not included.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time used so far.
pub(crate) fn used() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn another_thread_of_the_process_counts() {
        let before = used();
        let spin = || {
            let begin = Instant::now();
            let start = used();
            while used() - start < Duration::from_millis(20)
                && begin.elapsed() < Duration::from_secs(20)
            {
                std::hint::spin_loop();
            }
        };
        std::thread::spawn(spin).join().unwrap();
        assert!(used() - before >= Duration::from_millis(20));
    }
}
