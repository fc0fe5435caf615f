//! Failed write-outs and flushes of a file, as each handle of a program learns of them.
//!
//! As on a file system of the kernel (`errseq_t`): a failure is reported once to each handle that
//! was open when it happened, and to none that was opened later.

use std::collections::HashMap;

/// Failures since the file was opened in the cache.
#[derive(Debug, Default)]
pub struct Failures {
    next_handle: u64,
    count: u64,
    /// Error number of the last.
    number: i32,
    /// Number of the first handle that was opened after the last.
    concerns_before: u64,
    /// Number of failures that handles have reported, for those that have.
    told: HashMap<u64, u64>,
}

impl Failures {
    pub fn new_handle(&mut self) -> u64 {
        self.next_handle += 1;
        self.next_handle
    }

    /// Records a failure for all handles.
    pub fn record(&mut self, number: i32) {
        self.count += 1;
        self.number = number;
        self.concerns_before = self.next_handle + 1;
    }

    pub fn has_any(&self) -> bool {
        self.count > 0
    }

    /// Returns the number of the last error if the handle has not reported it.
    pub fn untold(&self, handle: u64) -> Option<i32> {
        let told = self.told.get(&handle).copied().unwrap_or(0);
        (handle < self.concerns_before && told < self.count).then_some(self.number)
    }

    /// Returns what [`Self::untold`] does, once.
    pub fn tell(&mut self, handle: u64) -> Option<i32> {
        let untold = self.untold(handle)?;
        self.told.insert(handle, self.count);
        Some(untold)
    }

    /// Forgets a handle that is closed.
    pub fn forget(&mut self, handle: u64) {
        self.told.remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_open_handle_reports_a_failure_once_and_a_later_one_none() {
        let mut failures = Failures::default();
        let (one, two) = (failures.new_handle(), failures.new_handle());
        assert_eq!(failures.tell(one), None);
        failures.record(libc::EIO);
        let late = failures.new_handle();
        assert_eq!((failures.untold(one), failures.tell(one)), (Some(libc::EIO), Some(libc::EIO)));
        assert_eq!((failures.tell(one), failures.tell(late)), (None, None));
        failures.record(libc::ENOSPC);
        for handle in [one, two, late] {
            assert_eq!(failures.tell(handle), Some(libc::ENOSPC));
            assert_eq!(failures.tell(handle), None);
        }
        failures.forget(one);
        assert!(failures.has_any());
    }
}
