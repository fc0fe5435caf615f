//! A bell: an event descriptor (`eventfd`) that one thread waits for, in `io_uring_enter` or alone,
//! and that other threads ring.
//!
//! Used by `io::engine`. A ring between two waits is not lost: the next wait returns at once.

use super::descriptor::above_standard;
use super::retries::persist;
use super::ring::{RingCall, RingMemory};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::Duration;

/// An event descriptor, with the word that a ring reads its counter into.
#[derive(Debug)]
pub(crate) struct Bell {
    event: OwnedFd,
    counter: AtomicU64,
}

impl Bell {
    /// Creates a bell that was not rung.
    pub(crate) fn new() -> io::Result<Self> {
        let event = above_standard(|| eventfd(0, EventfdFlags::CLOEXEC))?;
        Ok(Self { event, counter: AtomicU64::new(0) })
    }

    /// Ends the current or the next wait.
    pub(crate) fn ring(&self) {
        // Fails only if the counter is at its limit, where a wait returns anyway.
        let _ = persist(|| Ok(rustix::io::write(&self.event, &1_u64.to_ne_bytes())?));
    }

    /// Waits until the bell is rung. May return early.
    pub(crate) fn wait(&self) {
        // A caller checks again what it waits for, also after an interruption.
        let rung = rustix::io::read(&self.event, &mut [0; size_of::<u64>()]);
        rung.map_or_else(pause, drop);
    }

    /// Waits until the bell is rung, for at most `time`. Returns `true` if it was rung.
    pub(crate) fn wait_for(&self, time: Duration) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let mut events = [PollFd::new(&self.event, PollFlags::IN)];
        let is_rung = poll(&mut events, timeout.as_ref()).unwrap_or_else(|error| {
            pause(error);
            0
        }) > 0;
        if is_rung {
            self.wait();
        }
        is_rung
    }

    /// Returns the call by which a ring waits for the bell. The bell must live until the call is
    /// complete.
    pub(crate) fn call(&self) -> RingCall {
        let start = self.counter.as_ptr().cast();
        let memory = RingMemory::One { start, length_bytes: size_of::<u64>() };
        RingCall { is_write: false, file: self.event.as_raw_fd(), memory, position_bytes: 0 }
    }
}

/// Keeps a caller from spinning where a filter refuses the call that waits.
fn pause(refusal: Errno) {
    if refusal != Errno::INTR {
        thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_ring_before_the_wait_ends_the_wait() {
        let bell = Arc::new(Bell::new().unwrap());
        bell.ring();
        bell.ring();
        bell.wait();
        assert!(!bell.wait_for(Duration::ZERO));
        bell.ring();
        assert!(bell.wait_for(Duration::from_secs(60)));
        let rung = Arc::clone(&bell);
        let ringer = std::thread::spawn(move || rung.ring());
        bell.wait();
        ringer.join().unwrap();
    }
}
