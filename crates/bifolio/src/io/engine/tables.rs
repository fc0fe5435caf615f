//! What one ring has registered: files by their slots, memory by its chunks.
//!
//! Filled by whoever leases the ring, at first use; emptied by whoever closes a file or gives a
//! chunk back, on any thread, also while transfers of other files and chunks are in flight. Where
//! the kernel refuses, transfers name descriptors and addresses instead, which always works.
//!
//! Invariant IO-6: an entry is of the file that has the slot now, or of pages that are the chunk's
//! now. One that the kernel would not let go of is never used again.
//!
//! # Safety
//! Registers only chunks of the arena that are whole; a transfer that names one also has frames in
//! it (IO-1).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use super::chunks::{ChunkPlace, Chunks};
use crate::io::Submission;
use crate::io::span::Span;
use crate::memory::CHUNK_BYTES;
use crate::sync::Mutex;
use crate::sys::ring::{RingFile, RingMemory, RingTables};

/// How many files can be registered at once.
pub(super) const SLOTS: u32 = 1024;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Tables {
    ring: RingTables,
    state: Mutex<State>,
}

/// Tables without entries are not in use, or were refused.
#[derive(Debug)]
struct State {
    files: Vec<Entry<RawFd>>,
    chunks: Vec<Entry<()>>,
    /// No more memory can be locked.
    is_full: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry<T> {
    Empty,
    Holds(T),
    /// The kernel refused to fill it, or to empty it.
    Stuck,
}

impl Tables {
    /// Empty tables: of files if `files`, and of as many chunks as `chunks` has.
    pub(super) fn new(ring: RingTables, files: bool, chunks: usize) -> Self {
        let slots = if files && ring.make_file_table(SLOTS).is_ok() { SLOTS as usize } else { 0 };
        let made = chunks > 0 && ring.make_buffer_table(chunks as u32).is_ok();
        let chunks = if made { chunks } else { 0 };
        let state = State {
            files: vec![Entry::Empty; slots],
            chunks: vec![Entry::Empty; chunks],
            is_full: false,
        };
        Self { ring, state: Mutex::new(state) }
    }

    /// How a transfer names its file.
    pub(super) fn file(&self, submission: &Submission<'_>) -> RingFile {
        let plain = submission.file.as_raw_fd();
        let mut state = self.state.lock();
        let Some(slot) = submission.slot else { return RingFile::Plain(plain) };
        let Some(entry) = state.files.get_mut(slot as usize) else { return RingFile::Plain(plain) };
        if *entry == Entry::Empty {
            let answer = self.ring.register_file(slot, plain);
            *entry = answer.map_or(Entry::Stuck, |()| Entry::Holds(plain));
        }
        // A file may go by another descriptor meanwhile, through the page cache.
        if *entry == Entry::Holds(plain) { RingFile::Slot(slot) } else { RingFile::Plain(plain) }
    }

    /// How a transfer names one run of its memory.
    pub(super) fn memory(&self, span: &Span, chunks: Option<&Chunks>) -> RingMemory {
        let (start, length_bytes) = (span.start(), span.len());
        let place = chunks.and_then(|chunks| Some((chunks, chunks.place_of(span)?)));
        match place {
            Some((chunks, place)) if self.registers(chunks, &place) => {
                RingMemory::Registered { start, length_bytes, index: place.number as u16 }
            }
            _ => RingMemory::One { start, length_bytes },
        }
    }

    /// Whether the chunk is registered, after an attempt to.
    fn registers(&self, chunks: &Chunks, place: &ChunkPlace) -> bool {
        let mut state = self.state.lock();
        let Some(entry) = state.chunks.get(place.number).copied() else { return false };
        // `is_whole` is looked at under the lock: see `Rings::before_release`.
        if entry != Entry::Empty || state.is_full || !chunks.is_whole(place.number) {
            return entry == Entry::Holds(());
        }
        // SAFETY: a whole chunk is mapped; transfers name frames of it that are theirs (IO-1).
        let answer = unsafe {
            self.ring.register_buffer(place.number as u32, place.start, CHUNK_BYTES as usize)
        };
        match answer {
            Ok(()) => state.chunks[place.number] = Entry::Holds(()),
            Err(ref error) => {
                log::debug!("no more memory is registered in this ring: {error}");
                state.is_full = true;
            }
        }
        answer.is_ok()
    }

    /// How many files and how many chunks are registered.
    #[cfg(test)]
    pub(super) fn registered(&self) -> (usize, usize) {
        let state = self.state.lock();
        let files = state.files.iter().filter(|entry| matches!(entry, Entry::Holds(_))).count();
        let chunks = state.chunks.iter().filter(|entry| matches!(entry, Entry::Holds(()))).count();
        (files, chunks)
    }

    /// Lets the file in `slot` go.
    pub(super) fn forget_file(&self, slot: u32) {
        let mut state = self.state.lock();
        if let Some(entry) = state.files.get_mut(slot as usize) {
            entry.empty(|| self.ring.unregister_file(slot));
        }
    }

    /// Lets the pages of a chunk go.
    pub(super) fn forget_chunk(&self, number: usize) {
        let mut state = self.state.lock();
        if let Some(entry) = state.chunks.get_mut(number) {
            entry.empty(|| self.ring.unregister_buffer(number as u32));
        }
    }
}

impl<T> Entry<T> {
    fn empty(&mut self, unregister: impl FnOnce() -> io::Result<()>) {
        if let Self::Holds(_) = self {
            *self = match unregister() {
                Ok(()) => Self::Empty,
                Err(error) => {
                    log::warn!("io_uring keeps a registered file or chunk: {error}");
                    Self::Stuck
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ring;
    use std::os::fd::AsFd;

    #[test]
    fn a_slot_names_only_the_descriptor_it_was_registered_with() {
        let tables = match ring::open(1) {
            Ok((_, tables)) => Tables::new(tables, true, 0),
            Err(error) => return println!("skipped: {error}"),
        };
        if tables.state.lock().files.is_empty() {
            return println!("skipped: files cannot be registered here");
        }
        let (direct, buffered) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let name = |file: &std::fs::File, slot| {
            tables.file(&Submission { slot, ..Submission::new(file.as_fd(), 1) })
        };
        let plain = |file: &std::fs::File| RingFile::Plain(file.as_raw_fd());
        assert_eq!(name(&direct, Some(3)), RingFile::Slot(3));
        assert_eq!(name(&buffered, Some(3)), plain(&buffered), "it is another file");
        assert_eq!(name(&direct, Some(3)), RingFile::Slot(3));
        assert_eq!(
            (name(&direct, None), name(&direct, Some(SLOTS))),
            (plain(&direct), plain(&direct))
        );
        tables.forget_file(3);
        assert_eq!(name(&buffered, Some(3)), RingFile::Slot(3));
        assert_eq!(tables.registered(), (1, 0));
    }
}
