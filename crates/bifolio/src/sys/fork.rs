//! Telling a forked child from the process that made a cache.
//!
//! A page that the kernel wipes in children holds a mark: looking at it costs a load. Where the
//! kernel cannot wipe, the process id is asked for instead, which is a system call.
//!
//! # Safety
//! Vouches that its words are valid when zero, as reserved memory is.
#![allow(unsafe_code)]

use crate::sys::array::{ReservedArray, ZeroValid};
use crate::sys::probe::{Feature, Features};
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Debug, Default)]
struct Mark(AtomicU32);

// SAFETY: an atomic word is valid when zero and needs no dropping.
unsafe impl ZeroValid for Mark {}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct ForkGuard {
    mark: ReservedArray<Mark>,
    owner: u32,
    is_wiped: bool,
}

impl ForkGuard {
    /// Remembers the calling process.
    pub(crate) fn new(features: &Features) -> std::io::Result<Self> {
        let mark = ReservedArray::<Mark>::new(1)?;
        mark.get(0).0.store(1, Ordering::Relaxed);
        let is_wiped = features.has(Feature::WipeOnFork);
        Ok(Self { mark, owner: std::process::id(), is_wiped })
    }

    /// Whether the caller is a child of the process that made this.
    pub(crate) fn is_forked(&self) -> bool {
        if self.is_wiped {
            self.mark.get(0).0.load(Ordering::Relaxed) == 0
        } else {
            std::process::id() != self.owner
        }
    }
}
