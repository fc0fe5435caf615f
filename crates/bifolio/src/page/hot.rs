//! The words of a file that every hit reads, beside its Entries: its length, and a hint.
//!
//! # Safety
//! Reserved memory is read as words, which are valid when zero. A pointer names them in reserved
//! memory with the same owner, which does not move, or in a box that its owner frees.
#![allow(unsafe_code)]

use super::table::{MemorySource, ReservedArray, ZeroValid};
use crate::sync::{AtomicU64, Ordering};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64 as HintWord;

/// Words that every hit reads and few calls change, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Hot {
    pub(super) len_bytes: AtomicU64,
    /// Published distance of [`Prediction`](super::mapping::Prediction); 0 if there is none.
    pub(super) predicted_distance: HintWord,
}

// SAFETY: words that are valid when zero and need no dropping.
unsafe impl ZeroValid for Hot {}

/// A [`Hot`] and its memory.
#[derive(Debug)]
pub(super) struct HotPlace {
    /// In `memory`, or a box: a hit follows one pointer, wherever the words are.
    at: NonNull<Hot>,
    memory: HotMemory,
}

#[derive(Debug)]
enum HotMemory {
    /// A box, to keep the mapping small: its alignment would double the size of a file.
    Private,
    /// A page of its own in memory that other processes read. Like all shared memory it is never
    /// used for another file: no process reads the length of a wrong one.
    Shared(ReservedArray<Hot>),
}

// SAFETY: `at` points to words of its own that any thread may have and read.
unsafe impl Send for HotPlace {}
// SAFETY: as above.
unsafe impl Sync for HotPlace {}

impl HotPlace {
    pub(super) fn new(source: &MemorySource, len_bytes: u64) -> std::io::Result<Self> {
        let place = if matches!(source, MemorySource::Private) {
            let at = NonNull::from(Box::leak(Box::<Hot>::default()));
            Self { at, memory: HotMemory::Private }
        } else {
            let words = ReservedArray::<Hot>::new_in(source, 1)?;
            Self { at: NonNull::from(words.get(0)), memory: HotMemory::Shared(words) }
        };
        // Relaxed: no other thread has the file yet.
        place.get().len_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(place)
    }

    /// Returns the offset of the words in the shared memory; `None` in private memory.
    #[cfg(not(all(test, loom)))]
    pub(super) fn shared_offset(&self) -> Option<u64> {
        match &self.memory {
            HotMemory::Private => None,
            HotMemory::Shared(place) => place.shared_offset(),
        }
    }

    #[inline(always)]
    pub(super) fn get(&self) -> &Hot {
        // SAFETY: lives as long as `self`, and there are only shared references.
        unsafe { self.at.as_ref() }
    }
}

impl Drop for HotPlace {
    fn drop(&mut self) {
        if matches!(self.memory, HotMemory::Private) {
            // SAFETY: from `Box::leak`, and no reference outlives `self`.
            drop(unsafe { Box::from_raw(self.at.as_ptr()) });
        }
    }
}

impl Hot {
    pub(crate) fn new(len_bytes: u64) -> Self {
        Self { len_bytes: AtomicU64::new(len_bytes), predicted_distance: HintWord::new(0) }
    }

    #[inline(always)]
    pub(crate) fn len_bytes(&self) -> u64 {
        // Acquire: pairs with the Release in `set_len_bytes`: a thread that sees the file longer
        // sees the bytes that extended it.
        self.len_bytes.load(Ordering::Acquire)
    }

    /// Returns what to add to a position and the base address of the frames to get the predicted
    /// address of a byte, one byte off; 0 if there is no prediction.
    #[inline(always)]
    pub(crate) fn predicted_distance(&self) -> u64 {
        self.predicted_distance.load(Ordering::Relaxed)
    }
}
