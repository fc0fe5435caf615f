//! What is registered with the rings: files by their slots ([`RegisteredFile`]), memory by its
//! chunks ([`Chunks`]), and the [`Tables`] of each ring, which say what it has.
//!
//! Tables are filled by the queue that leases the ring, at first use; entries are emptied when a
//! file is closed or a chunk given back, on any thread, also while transfers of other files and
//! chunks are in flight. Where the kernel refuses, transfers name descriptors and addresses
//! instead, which always works.
//!
//! Invariant IO-6: an entry is of the file that has the slot now, or of pages that are the chunk's
//! now. One that the kernel would not let go of is never used again.
//!
//! # Safety
//! Registers only chunks of the arena that are whole; a transfer that names one also has frames in
//! it (IO-1).
#![allow(unsafe_code)]

use super::rings::Rings;
use crate::io::buf::Span;
use crate::io::{
    Alignment, Backing, DeviceIdentity, DirectStatus, FileIdentity, IoBuf, IoBufMut, IoRequest,
    Submission,
};
use crate::memory::{Arena, CHUNK_BYTES};
use crate::sync::{AtomicBool, Mutex, Ordering};
use crate::sys::ring::{BUFFERS_MAX, RingFile, RingMemory, RingTables};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

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

/// Which chunks of the arena may be registered, and where they are.
///
/// The arena tells when a chunk is whole and before it is not (`Rings` is its watcher); a ring
/// asks before it registers one. A chunk that lacks pages is never registered: the kernel would
/// make them resident, beyond the bound.
#[derive(Debug)]
pub(super) struct Chunks {
    /// Address of the first chunk.
    base: usize,
    whole: Box<[AtomicBool]>,
}

/// The chunk a run of bytes lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkPlace {
    pub(super) number: usize,
    /// Its first byte.
    pub(super) start: *mut u8,
}

impl Chunks {
    /// The chunks of `arena`, as many as a ring can number.
    pub(super) fn of(arena: &Arena) -> Self {
        let count = arena.chunks().min(BUFFERS_MAX);
        let whole = (0..count).map(|_| AtomicBool::new(false)).collect();
        Self { base: arena.base().addr(), whole }
    }

    pub(super) fn len(&self) -> usize {
        self.whole.len()
    }

    /// Where `span` lies, if that is in one of the chunks.
    pub(super) fn place_of(&self, span: &Span) -> Option<ChunkPlace> {
        let chunk_bytes = CHUNK_BYTES as usize;
        let distance = span.start().addr().checked_sub(self.base)?;
        let (number, offset) = (distance / chunk_bytes, distance % chunk_bytes);
        let is_inside = number < self.len() && offset + span.len() <= chunk_bytes;
        is_inside.then(|| ChunkPlace { number, start: span.start().wrapping_sub(offset) })
    }

    /// Whether every page of the chunk is resident and charged.
    pub(super) fn is_whole(&self, number: usize) -> bool {
        // Relaxed: the lock of a ring's tables orders this with `set_whole`; see
        // `Rings::before_release`.
        self.whole[number].load(Ordering::Relaxed)
    }

    /// Notes whether the chunk is whole. Those without a number are nobody's concern.
    pub(super) fn set_whole(&self, number: usize, is_whole: bool) {
        if let Some(whole) = self.whole.get(number) {
            // Relaxed: as in `is_whole`.
            whole.store(is_whole, Ordering::Relaxed);
        }
    }
}

/// A backing that has a slot among the registered files.
///
/// Made by [`Engine::register`](super::Engine::register) around a backing that is opened;
/// everything but the slot is the backing's. The slot is the same in every ring; a ring registers
/// the descriptor it is first given. When the backing goes, every ring lets its file go first:
/// otherwise a closed file would stay open, and the next file with this slot might be taken for it.
#[derive(Debug)]
pub(super) struct RegisteredFile {
    backing: Arc<dyn Backing>,
    slot: u32,
    rings: Arc<Rings>,
}

impl RegisteredFile {
    pub(super) fn new(backing: Arc<dyn Backing>, slot: u32, rings: Arc<Rings>) -> Self {
        Self { backing, slot, rings }
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        self.rings.free_slot(self.slot);
    }
}

impl Backing for RegisteredFile {
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let submission = self.backing.submission(request)?;
        Some(Submission { slot: Some(self.slot), ..submission })
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        self.backing.completed(request, answer)
    }

    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.backing.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.backing.write_at(source, position_bytes)
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        self.backing.read_vectored_at(targets, position_bytes)
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        self.backing.write_vectored_at(sources, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.backing.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.backing.sync_all()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.backing.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.backing.set_len(length_bytes)
    }

    fn allocate(&self, bytes: Range<u64>) -> io::Result<()> {
        self.backing.allocate(bytes)
    }

    fn alignment(&self) -> Alignment {
        self.backing.alignment()
    }

    fn describe(&self) -> String {
        self.backing.describe()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.backing.identity()
    }

    fn device(&self) -> Option<DeviceIdentity> {
        self.backing.device()
    }

    fn direct(&self) -> DirectStatus {
        self.backing.direct()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HugePages;
    use crate::sys::probe::Features;
    use crate::sys::ring;
    use std::os::fd::AsFd;
    use std::ptr::NonNull;

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

    #[test]
    fn a_run_has_a_place_if_it_lies_in_one_chunk() {
        let features = Features::probe(&[]);
        let arena = Arena::new(4 << 20, 4 << 20, HugePages::Auto, features).unwrap();
        let chunks = Chunks::of(&arena);
        let place = |offset: usize, length| {
            let start = NonNull::new(arena.base().wrapping_add(offset)).unwrap();
            let place = chunks.place_of(&Span::new(start, length))?;
            assert_eq!(place.start, arena.base().wrapping_add(place.number << 21));
            Some(place.number)
        };
        let chunk = CHUNK_BYTES as usize;
        assert_eq!((place(0, 4096), place(0, chunk)), (Some(0), Some(0)));
        assert_eq!((place(chunk - 4096, 4096), place(chunk - 4096, 4097)), (Some(0), None));
        assert_eq!((place(chunk, 1), place(2 * chunk - 1, 1)), (Some(1), Some(1)));
        let end = arena.chunks() * chunk;
        assert_eq!((place(end, 1), place(4096_usize.wrapping_neg(), 1)), (None, None));
    }

    #[test]
    fn chunks_without_a_number_are_never_whole() {
        let features = Features::probe(&[]);
        let arena = Arena::new(4 << 20, 4 << 20, HugePages::Auto, features).unwrap();
        let chunks = Chunks::of(&arena);
        chunks.set_whole(1, true);
        let count = arena.chunks();
        chunks.set_whole(count, true);
        assert_eq!((chunks.len(), chunks.is_whole(0), chunks.is_whole(1)), (count, false, true));
    }
}
