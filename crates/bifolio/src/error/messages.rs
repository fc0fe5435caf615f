//! Parts of the messages of errors that depend on their fields.

use super::CloseFailure;
use crate::io::{IoError, limit_of};
use std::sync::Arc;

/// Returns the part of the message of `Full` about memory that is free but not usable.
pub(super) fn fragmentation(free_bytes: u64, wanted_bytes: u64) -> String {
    if free_bytes < wanted_bytes {
        return String::new();
    }
    format!(
        "; {free_bytes} are free, but fragmented, in no piece of the {wanted_bytes} that are \
         wanted, or kept for tables and for reads of what is swapped out"
    )
}

/// Returns the reason why a write gate holds pages back.
pub(super) fn held_because(lsn: u64, cause: Option<&std::io::Error>) -> String {
    match (lsn, cause) {
        (_, Some(cause)) => format!("it cannot make LSN {lsn} durable: {cause}"),
        (u64::MAX, None) => {
            "they are not committed (LSN u64::MAX, GatedFile::assign_lsn)".to_owned()
        }
        (_, None) => format!("LSN {lsn} is not durable yet"),
    }
}

/// Number of failures listed in a message.
const FAILURES_LISTED_MAX: usize = 4;

/// Returns a hint at the limit to raise when the system refuses a resource.
pub(super) fn remedy(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "; RLIMIT_NPROC (ulimit -u), a control group's pids.max or, for the stack, RLIMIT_AS \
             or vm.max_map_count is too low"
        }
        Some(libc::ENOMEM) => {
            "; RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory = 2 or vm.max_map_count may forbid it"
        }
        _ => limit_of(error),
    }
}

pub(super) fn list(failures: &[CloseFailure]) -> String {
    let listed = failures.iter().take(FAILURES_LISTED_MAX).map(ToString::to_string);
    let mut text = listed.collect::<Vec<_>>().join("; ");
    if let more @ 1.. = failures.len().saturating_sub(FAILURES_LISTED_MAX) {
        text += &format!("; and {more} more files");
    }
    text
}

/// Returns the end of a message with the cause, if there is one.
pub(super) fn because(cause: &Option<Arc<IoError>>) -> String {
    cause.as_ref().map_or_else(String::new, |cause| format!("; what cannot be written: {cause}"))
}
