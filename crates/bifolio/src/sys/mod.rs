//! The kernel and the processor: system calls, start-up probes, and the opaque copy.
//!
//! The only layer with raw descriptors, kernel pointers or processor-specific instructions; policy
//! is in the layers above. A model run has only the opaque copy (`lib.rs`).
//!
//! A call that the kernel interrupted, or could not do at the moment, is repeated a bounded number
//! of times ([`Retries`]). Calls that manage memory are made under locks and repeated a few times
//! only: at `vm.max_map_count` they fail with EAGAIN for good.

pub(crate) mod copy;
pub(crate) mod file;
pub(crate) mod memory;
pub(crate) mod pressure;
pub(crate) mod probe;
pub(crate) mod process;
pub(crate) mod ring;
pub(crate) mod shared;
pub(crate) mod view;
pub(crate) mod watch;

pub(crate) use file::answer_of;

use std::io;
use std::thread;
use std::time::Duration;

/// Bytes of a page of the kernel: caches are refused where it has others (`cache/builder.rs`).
pub(crate) const PAGE_BYTES: usize = 4096;

/// Interruptions of a call without progress before it fails: what always returns EINTR is broken.
pub(crate) const INTERRUPTIONS_MAX: u32 = 1000;
/// Sleep after the first refusal; it doubles with each.
const REFUSAL_SLEEP_MIN: Duration = Duration::from_micros(100);

/// Attempts at a call that are left until it makes progress.
#[derive(Debug)]
pub(crate) struct Retries {
    interruptions_left: u32,
    pub(crate) refusals_left: u32,
    sleep: Duration,
}

impl Retries {
    pub(crate) const FEW: Self =
        Self { interruptions_left: INTERRUPTIONS_MAX, refusals_left: 3, sleep: REFUSAL_SLEEP_MIN };
    /// For 0.1 s.
    pub(crate) const MORE: Self = Self { refusals_left: 10, ..Self::FEW };

    /// Returns `true` if the call should be repeated, after a short sleep if it was refused for the
    /// moment.
    pub(crate) fn after(&mut self, error: &io::Error) -> bool {
        let left = match error.kind() {
            io::ErrorKind::Interrupted => &mut self.interruptions_left,
            io::ErrorKind::WouldBlock => &mut self.refusals_left,
            _ => return false,
        };
        if *left == 0 {
            return false;
        }
        *left -= 1;
        if error.kind() == io::ErrorKind::WouldBlock {
            thread::sleep(self.sleep);
            self.sleep *= 2;
        }
        true
    }
}

/// Calls `call` until it succeeds, fails permanently, or was refused too often.
pub(crate) fn persist<T>(call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    Retries::FEW.persist(call)
}

impl Retries {
    /// Calls `call` until it succeeds, fails permanently, or was refused too often.
    pub(crate) fn persist<T>(mut self, mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        loop {
            match call() {
                Err(error) if self.after(&error) => {}
                answer => return answer,
            }
        }
    }
}

/// Returns `true` if the kernel does not support a call or a filter forbids it. Filters answer with
/// any of these.
pub(crate) fn is_forbidden(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_refusal_is_returned() {
        for (errno, calls_expected) in
            [(libc::EAGAIN, 4), (libc::EINTR, INTERRUPTIONS_MAX + 1), (libc::ENOMEM, 1)]
        {
            let mut calls = 0;
            let answer = persist(|| -> io::Result<()> {
                calls += 1;
                Err(io::Error::from_raw_os_error(errno))
            });
            assert_eq!(answer.unwrap_err().raw_os_error(), Some(errno));
            assert_eq!(calls, calls_expected);
        }
    }
}
