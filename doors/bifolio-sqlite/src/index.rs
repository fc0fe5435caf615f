//! The index of a log: memory that the connections of this process share, and the locks of its
//! slots. There is no `-shm` file, since the lock that a log needs keeps other processes out.
//!
//! # Safety
//! The regions are memory that SQLite's connections access as they agreed by the slot locks. They
//! are freed after the last connection has let go.
#![allow(unsafe_code)]

use crate::locks::SlotLocks;
use std::ffi::c_void;
use std::ptr::{self, NonNull};

/// The index of the log, in memory of this process.
#[derive(Default)]
pub(crate) struct Index {
    /// Connections that have mapped it.
    pub(crate) users: usize,
    regions: Vec<NonNull<[u64]>>,
    pub(crate) slots: SlotLocks,
}

// SAFETY: the regions are plain memory, which belongs to this.
unsafe impl Send for Index {}

impl Index {
    pub(crate) fn clear(&mut self) {
        for region in self.regions.drain(..) {
            // SAFETY: made from a box in `region`; no connection has it mapped any more.
            drop(unsafe { Box::from_raw(region.as_ptr()) });
        }
    }

    /// Returns the region with a number, or null if it does not exist and is not to be made.
    pub(crate) fn region(&mut self, number: usize, bytes: usize, extend: bool) -> *mut c_void {
        while extend && self.regions.len() <= number {
            let region: Box<[u64]> = vec![0; bytes / size_of::<u64>()].into_boxed_slice();
            self.regions.push(NonNull::from(Box::leak(region)));
        }
        self.regions.get(number).map_or(ptr::null_mut(), |region| region.as_ptr().cast())
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        self.clear();
    }
}
