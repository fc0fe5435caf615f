//! Support for the tests of the engine: an arena with an engine, frames that are owners, and
//! backings that block, fail or are called.
//!
//! # Safety
//! Frames are used by one transfer at a time, and accessed when none is in flight.
#![allow(unsafe_code)]

use bifolio_testing::skip;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::config::HugePages;
use crate::error::Error;
use crate::io::engine::Engine;
use crate::io::*;
use crate::memory::Arena;
use crate::page::{FolioId, Folios, MemorySource};
use crate::sys::probe::{Feature, Features};

pub(super) const PAGE: usize = 4096;

/// An engine and the memory under it.
pub(super) struct World {
    pub(super) name: &'static str,
    pub(super) engine: Arc<Engine>,
    pub(super) arena: Arc<Arena>,
    pub(super) features: Features,
    folios: Folios,
}

impl World {
    pub(super) fn new(name: &'static str, masked: &[Feature], depth: usize) -> Self {
        Self::with_threads(name, masked, depth, 16)
    }

    pub(super) fn with_threads(
        name: &'static str,
        masked: &[Feature],
        depth: usize,
        threads_max: usize,
    ) -> Self {
        const BOUND: u64 = 64 << 20;
        let features = Features::probe(masked);
        let arena =
            Arena::new(&MemorySource::Private, BOUND, BOUND, HugePages::Auto, features.clone())
                .unwrap();
        let arena = Arc::new(arena);
        let folios = Folios::without_reaper(2 * arena.frames() as usize);
        let engine = Engine::with_threads(&features, depth, threads_max);
        Self { name, engine, arena, features, folios }
    }

    /// Allocates frames for `pages` pages.
    pub(super) fn frames(&self, pages: usize) -> Frames {
        let ids = (0..pages).map(|_| self.allocate(0)).collect();
        Frames { arena: Arc::clone(&self.arena), ids }
    }

    pub(super) fn allocate(&self, order: u8) -> FolioId {
        self.arena.allocate(order, None, &self.folios).unwrap().expect("the arena is large")
    }

    pub(super) fn has_rings(&self) -> bool {
        self.features.has(Feature::IoUring)
    }
}

/// Returns the world with rings if `feature` and rings are available.
pub(super) fn world_with(feature: Feature, depth: usize) -> Option<World> {
    let world = World::new("rings", &[], depth);
    let missing = [Feature::IoUring, feature].into_iter().find(|it| !world.features.has(*it));
    if let Some(missing) = missing {
        skip(missing, "the kernel has none");
    }
    missing.is_none().then_some(world)
}

/// Returns every way a transfer can go. Queues have `depth` transfers in flight.
pub(super) fn worlds(depth: usize) -> Vec<World> {
    use Feature::IoUring;
    if !Features::probe(&[]).has(IoUring) {
        skip(IoUring, "the ways with rings");
    }
    vec![
        World::new("rings", &[], depth),
        World::new("threads", &[IoUring], depth),
        World::with_threads("no threads", &[IoUring], depth, 0),
    ]
}

/// Frames of one transfer: its owner.
#[derive(Debug)]
pub(super) struct Frames {
    arena: Arc<Arena>,
    ids: Vec<FolioId>,
}

impl Frames {
    pub(super) fn len(&self) -> usize {
        self.ids.len() * PAGE
    }

    /// Reorders the frames so that few are adjacent.
    pub(super) fn scattered(mut self) -> Self {
        let half = self.ids.len() / 2;
        self.ids.rotate_left(half);
        self.ids.reverse();
        self
    }

    fn starts(&self) -> impl Iterator<Item = NonNull<u8>> + '_ {
        self.ids.iter().map(|id| NonNull::new(self.arena.address(*id)).unwrap())
    }

    /// Returns the first `length` bytes as the memory of a transfer.
    pub(super) fn pieces(&self, length: usize) -> Pieces {
        let (mut pieces, mut left) = (Pieces::default(), length);
        for start in self.starts().take(length.div_ceil(PAGE)) {
            pieces.push(start, left.min(PAGE));
            left -= left.min(PAGE);
        }
        pieces
    }

    pub(super) fn fill(&mut self, bytes: &[u8]) {
        for (start, part) in self.starts().zip(bytes.chunks(PAGE)) {
            // SAFETY: a frame that no transfer uses; the frames are held uniquely.
            unsafe { IoBufMut::new(start, PAGE) }.copy_from_slice(0, part);
        }
    }

    pub(super) fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        for (start, part) in self.starts().zip(bytes.chunks_mut(PAGE)) {
            // SAFETY: a frame that no transfer uses.
            unsafe { IoBuf::new(start, PAGE) }.copy_to_slice(0, part);
        }
        bytes.truncate(length);
        bytes
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        self.arena.free(self.ids.iter().copied());
    }
}

fn transfer(
    backing: &Arc<dyn DirectBacking>,
    operation: Operation,
    position_bytes: u64,
    pieces: Pieces,
) -> Transfer {
    Transfer { backing: Arc::clone(backing), operation, position_bytes, pieces }
}

/// Pushes a read of `pages` pages at `position` whose owner is its frames and `tag`.
pub(super) fn push_read<T>(
    queue: &mut Queue<'_, (Frames, T)>,
    world: &World,
    backing: &Arc<dyn DirectBacking>,
    position: u64,
    pages: usize,
    tag: T,
) {
    push_read_into(queue, backing, position, world.frames(pages), tag);
}

/// Pushes a read at `position` into all of `frames`.
pub(super) fn push_read_into<T>(
    queue: &mut Queue<'_, (Frames, T)>,
    backing: &Arc<dyn DirectBacking>,
    position: u64,
    frames: Frames,
    tag: T,
) {
    let transfer = transfer(backing, Operation::Read, position, frames.pieces(frames.len()));
    // SAFETY: the frames are the owner, which is held uniquely.
    unsafe { queue.push(transfer, (frames, tag)) }
}

/// Pushes a write of `bytes` at `position`.
pub(super) fn push_write<T>(
    queue: &mut Queue<'_, (Frames, T)>,
    world: &World,
    backing: &Arc<dyn DirectBacking>,
    position: u64,
    bytes: &[u8],
    tag: T,
) {
    let mut frames = world.frames(bytes.len().div_ceil(PAGE));
    frames.fill(bytes);
    let transfer = transfer(backing, Operation::Write, position, frames.pieces(bytes.len()));
    // SAFETY: the frames are the owner, which is held uniquely.
    unsafe { queue.push(transfer, (frames, tag)) }
}

/// Completes everything. Returns the answers with their tags, in order of completion.
pub(super) fn complete_all<T>(
    queue: &mut Queue<'_, (Frames, T)>,
) -> Vec<(T, Frames, Result<usize, Error>)> {
    let mut answers = Vec::new();
    queue.complete(usize::MAX, |(frames, tag), answer| answers.push((tag, frames, answer)));
    assert_eq!(queue.in_flight(), 0);
    answers
}

/// A pipe: a read of it completes when the test writes to it.
#[derive(Debug)]
pub(super) struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
    called: AtomicUsize,
}

impl Pipe {
    pub(super) fn new() -> Self {
        let (reader, writer) = io::pipe().unwrap();
        Self { reader: reader.into(), writer: writer.into(), called: AtomicUsize::new(0) }
    }

    /// Returns how many reads were made by calling this backing.
    pub(super) fn called(&self) -> usize {
        // Relaxed: only the value counts.
        self.called.load(Ordering::Relaxed)
    }

    /// Completes a read of a page.
    pub(super) fn release(&self) {
        rustix::io::write(&self.writer, &[7; PAGE]).unwrap();
    }
}

impl Backing for Pipe {
    fn read_at(&self, target: &mut IoBufMut<'_>, _: u64) -> io::Result<usize> {
        // Relaxed: only the value counts.
        self.called.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the buffer's bytes are writable (IO-1).
        let count = unsafe {
            libc::read(self.reader.as_raw_fd(), target.as_mut_ptr().cast(), target.len())
        };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    fn write_at(&self, _: &IoBuf<'_>, _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        "a pipe".to_owned()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Pipe {
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        Some(Submission { file: self.reader.as_fd(), length_bytes: request.length_bytes })
    }
}

/// The fault of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// None.
    None,
    /// At most this many bytes are transferred.
    Short(usize),
    /// Fails with this errno, without a transfer.
    Errno(i32),
    /// The backing panics.
    Panic,
}

/// A file with faults, for attempts by a ring and by calls.
#[derive(Debug)]
pub(super) struct Faulty {
    pub(super) inner: DiskFile,
    /// Faults for the attempts at each position, in order.
    faults: Mutex<Vec<(u64, VecDeque<Fault>)>>,
    /// `true` if the cache may submit.
    pub(super) is_called: bool,
    pub(super) attempts: AtomicUsize,
}

impl Faulty {
    pub(super) fn new(inner: DiskFile) -> Self {
        Self { inner, faults: Mutex::default(), is_called: false, attempts: AtomicUsize::new(0) }
    }

    pub(super) fn strike(&self, position: u64, faults: &[Fault]) {
        self.faults.lock().unwrap().push((position, faults.iter().copied().collect()));
    }

    fn fault(&self, position: u64) -> Fault {
        // Relaxed: a count of the test.
        self.attempts.fetch_add(1, Ordering::Relaxed);
        let mut faults = self.faults.lock().unwrap();
        let found = faults.iter_mut().find(|(at, faults)| *at == position && !faults.is_empty());
        let fault = found.and_then(|(_, faults)| faults.pop_front()).unwrap_or(Fault::None);
        drop(faults);
        assert!(!matches!(fault, Fault::Panic), "a backing of the test panics");
        fault
    }
}

impl Backing for Faulty {
    fn read_at(&self, target: &mut IoBufMut<'_>, position: u64) -> io::Result<usize> {
        match self.fault(position) {
            Fault::Errno(errno) => Err(io::Error::from_raw_os_error(errno)),
            Fault::Short(count) => {
                let mut target = target.prefix(count.min(target.len()));
                self.inner.read_at(&mut target, position)
            }
            _ => self.inner.read_at(target, position),
        }
    }

    fn write_at(&self, source: &IoBuf<'_>, position: u64) -> io::Result<usize> {
        match self.fault(position) {
            Fault::Errno(errno) => Err(io::Error::from_raw_os_error(errno)),
            Fault::Short(count) => {
                self.inner.write_at(&source.prefix(count.min(source.len())), position)
            }
            _ => self.inner.write_at(source, position),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        self.inner.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.inner.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.inner.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Faulty {
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        self.inner.submission(request).filter(|_| !self.is_called)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let answer = self.inner.completed(request, answer)?;
        match self.fault(request.position_bytes) {
            Fault::Errno(errno) => Err(io::Error::from_raw_os_error(errno)),
            Fault::Short(count) => Ok(answer.min(count)),
            _ => Ok(answer),
        }
    }

    fn sync_all(&self) -> io::Result<()> {
        self.inner.sync_all()
    }

    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }
}
