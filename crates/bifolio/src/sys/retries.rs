//! Repeats calls that the kernel interrupted or that it could not do at the moment, a bounded
//! number of times.
//!
//! Used by the calls that manage memory, which are made under locks. Such a call fails with EAGAIN
//! where it would need another mapping and the process has `vm.max_map_count`: repeating it without
//! a bound would never end.

use std::io;
use std::thread;
use std::time::Duration;

/// Interruptions of a call without progress before it fails.
const INTERRUPTIONS_MAX: u32 = 1000;
/// Refusals (EAGAIN) of a call without progress before it fails.
const REFUSALS_MAX: u32 = 4;
/// Sleep after the first refusal; it doubles with each.
const REFUSAL_SLEEP_MIN: Duration = Duration::from_micros(50);

/// Failed attempts at a call since its last progress.
#[derive(Debug, Default)]
pub(super) struct Retries {
    interruptions: u32,
    refusals: u32,
}

impl Retries {
    /// Returns `true` if the call should be repeated, after a short sleep if the kernel refused it
    /// for the moment.
    pub(super) fn after(&mut self, error: &io::Error) -> bool {
        match error.raw_os_error() {
            Some(libc::EINTR) => {
                self.interruptions += 1;
                self.interruptions < INTERRUPTIONS_MAX
            }
            Some(libc::EAGAIN) => {
                self.refusals += 1;
                if self.refusals < REFUSALS_MAX {
                    thread::sleep(REFUSAL_SLEEP_MIN * (1 << self.refusals));
                }
                self.refusals < REFUSALS_MAX
            }
            _ => false,
        }
    }
}

/// Calls `call` until it succeeds, fails permanently, or was refused too often.
pub(super) fn persist<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut retries = Retries::default();
    loop {
        match call() {
            Err(error) if retries.after(&error) => {}
            answer => return answer,
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
            [(libc::EAGAIN, REFUSALS_MAX), (libc::EINTR, INTERRUPTIONS_MAX), (libc::ENOMEM, 1)]
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
