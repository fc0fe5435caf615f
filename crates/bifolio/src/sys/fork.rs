//! Telling a forked child from the process that made something.
//!
//! A page of the process that the kernel wipes in children holds a number: looking at it costs a
//! load. In a child it is 0 until that makes something of its own, and then another number. Where
//! the kernel cannot wipe, the process id is asked for instead, which is a system call.

use crate::sys::array::ReservedArray;
use crate::sys::probe;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The page; none where the kernel cannot wipe.
static MARK: OnceLock<Option<ReservedArray<AtomicU64>>> = OnceLock::new();
/// The last number that was given to a process, as far as this one knows: its parent's before it
/// had one of its own, so no two of a line have the same.
static LAST_NUMBER: AtomicU64 = AtomicU64::new(0);

/// The process in which something was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The number that stood in the page.
    Marked(u64),
    /// The process id.
    Process(u32),
}

fn mark() -> Option<&'static AtomicU64> {
    let make = || probe::can_wipe_on_fork().then(|| ReservedArray::new(1).ok()).flatten();
    MARK.get_or_init(make).as_ref().map(|mark| mark.get(0))
}

impl Origin {
    /// The calling process.
    pub(crate) fn here() -> Self {
        let Some(mark) = mark() else { return Self::by_process() };
        // Relaxed: only the value counts; of two threads that come first one gives the number.
        let seen = mark.load(Ordering::Relaxed);
        if seen != 0 {
            return Self::Marked(seen);
        }
        let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed) + 1;
        let given = mark.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        Self::Marked(given.map_or_else(|other| other, |_| number))
    }

    /// The same, known by its process id only.
    pub(crate) fn by_process() -> Self {
        Self::Process(std::process::id())
    }

    /// Whether the caller is a child of that process.
    pub(crate) fn is_forked(self) -> bool {
        match self {
            Self::Marked(number) => {
                mark().is_none_or(|mark| mark.load(Ordering::Relaxed) != number)
            }
            Self::Process(process) => std::process::id() != process,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_number() {
        let origins = [Origin::here(), Origin::here(), Origin::by_process()];
        assert_eq!(origins[0], origins[1]);
        assert!(origins.iter().all(|origin| !origin.is_forked()));
        let others = [Origin::Marked(0), Origin::Marked(u64::MAX), Origin::Process(0)];
        assert!(others.iter().all(|origin| origin.is_forked()));
    }
}
