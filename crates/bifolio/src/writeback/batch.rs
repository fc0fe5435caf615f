//! Batches of write-outs of one file, with one transfer per run of adjacent pages.
//!
//! Syncs, the flusher and reclaim use batches; there is no other way to the device. A folio that is
//! added to a batch takes adjacent dirty folios with it, up to 1 MiB: writing those costs the
//! device little more. Each is locked briefly, changed from dirty to writing, and unlocked; the
//! batch keeps a reference to each until its transfer is complete.
//!
//! Part of a batch is in flight, and as much is ready in a queue: a disk may complete nothing
//! before its queue is empty, so the next transfers are submitted before the completed ones are
//! processed.
//!
//! ```text
//!   add --> dirty to writing --> ready --> queue: in flight --> complete --> end
//! ```
//!
//! While anything is in flight, the batch never waits for a lock or a write-out (IO-5): it returns
//! a busy folio to the caller. A transfer of several folios that fails is split, and each folio is
//! written alone, so that one bad block keeps only its own folio dirty.
//!
//! # Safety
//! Passes frames to the engine; the references kept with each transfer own them.
#![allow(unsafe_code)]

use super::dirty::{InFlight, NotBegun};
use super::inode::Inode;
use super::lsns::HeldBack;
use super::write_copies::WriteCopies;
use crate::error::{Error, Result, write_error};
use crate::io::{Operation, Pieces, Queue, RUN_PAGES_MAX, Transfer};
use crate::page::{Folio, FolioRef, LockedFolio, PAGE_BYTES, WriteState};
use crate::stats::Counter;
use crate::swap::{SlotRun, Swap};
use crate::sync::{Ordering, RwLockReadGuard, blocking};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes in flight, at most, unless a single transfer has more; and bytes that are ready.
const IN_FLIGHT_BYTES_MAX: u64 = 8 << 20;
/// Bytes that are worth a system call.
const CALL_BYTES: u64 = 256 << 10;

/// All pages of any file.
pub(super) const ALL_PAGES: Range<u64> = 0..u64::MAX;

/// Folio whose write-out has begun.
#[derive(Debug)]
pub(crate) struct WriteVictim<'a> {
    pub(crate) folio: FolioRef<'a>,
    pub(crate) in_flight: InFlight,
    /// Copy of its bytes, if they are not written from its frames.
    pub(crate) copy: Option<CopyAt>,
}

/// Address of a copy of a folio's bytes, which stays valid until the write-out has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyAt(pub(crate) NonNull<u8>);

// SAFETY: an address; its creator guarantees that the bytes stay valid.
unsafe impl Send for CopyAt {}
// SAFETY: as above.
unsafe impl Sync for CopyAt {}

impl WriteVictim<'_> {
    /// Returns the address of its bytes.
    pub(super) fn start(&self, inode: &Inode) -> *mut u8 {
        self.copy.map_or_else(|| inode.frame_of(&self.folio), |copy| copy.0.as_ptr())
    }

    fn folio_bytes(&self) -> u64 {
        self.folio.folio().pages() * PAGE_BYTES
    }
}

/// Adjacent folios written by one transfer, in order.
#[derive(Debug)]
pub(super) struct WriteIo<'a> {
    pub(super) folios: SmallVec<[WriteVictim<'a>; 1]>,
    pub(super) position: u64,
    /// Bytes of it that were in the file when it was started.
    pub(super) length: u64,
    /// Slots that they are swapped out to.
    pub(super) slots: Option<SlotRun>,
    /// Copies of their bytes, if raw writers may store to the folios.
    pub(super) copies: Option<WriteCopies>,
}

impl WriteIo<'_> {
    /// Returns the memory pieces of its bytes.
    pub(super) fn pieces(&self, inode: &Inode) -> Pieces {
        if let Some(copies) = &self.copies {
            return Pieces::of(self.length, std::iter::once((copies.address(0), self.length)));
        }
        let folios = self.folios.iter();
        Pieces::of(self.length, folios.map(|victim| (victim.start(inode), victim.folio_bytes())))
    }
}

/// Result of adding a folio to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// The folio is being written, or needs no write.
    Done,
    /// Another thread holds its lock, or is about to change it after the lookup.
    Busy,
    /// The write gate holds it back.
    HeldBack,
}

/// Batch of write-outs of one file.
#[derive(Debug)]
pub(crate) struct WriteBatch<'a> {
    pub(super) inode: &'a Inode,
    /// Swap, for folios of a memory file.
    pub(super) slots: Option<&'a Swap>,
    within: Range<u64>,
    /// LSN that is known to be durable (O1 of `gate.rs`).
    durable_lsn: u64,
    /// Folios that were passed over because of it.
    held: Option<HeldBack>,
    /// WRITEBACK-4: the length does not change until the bytes are written.
    _no_cut: RwLockReadGuard<'a, ()>,
    /// Transfers that are ready, and their bytes.
    ready: VecDeque<(Transfer, WriteIo<'a>)>,
    ready_bytes: u64,
    queue: Queue<'a, WriteIo<'a>>,
    in_flight_bytes: u64,
    /// Transfers of several folios that failed.
    failed: Vec<WriteIo<'a>>,
    pub(super) begun_folios: u64,
    ended_folios: u64,
    written_folios: u64,
    error: Option<Error>,
}

/// Progress of a write-out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Folios whose write-out has begun, including those that have ended.
    pub(super) begun_folios: u64,
    /// Folios whose write-out is in flight.
    pub(super) in_flight_folios: u64,
    /// Set if the device has refused a write.
    pub(super) has_failed: bool,
}

impl Progress {
    /// Returns the sum of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            begun_folios: self.begun_folios + other.begun_folios,
            in_flight_folios: self.in_flight_folios + other.in_flight_folios,
            has_failed: self.has_failed || other.has_failed,
        }
    }
}

/// Result of one or several batches.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// Folios that reached the device.
    pub(crate) folios: u64,
    /// Last error; it has been recorded for every handle.
    pub(crate) error: Option<Error>,
    /// Folios that the write gate held back.
    pub(super) held: Option<HeldBack>,
    /// Reason why the gate did not let them pass, if its call has failed.
    pub(super) cause: Option<Arc<std::io::Error>>,
}

impl Written {
    pub(super) fn add(&mut self, other: Self) {
        self.folios += other.folios;
        self.held = HeldBack::sum(self.held, other.held);
        self.cause = other.cause.or(self.cause.take());
        self.error = other.error.or(self.error.take());
    }
}

impl<'a> WriteBatch<'a> {
    /// Creates an empty batch. It adds adjacent folios only if they are `within` these pages. Waits
    /// while the file is being truncated.
    pub(super) fn new(inode: &'a Inode, within: Range<u64>) -> Self {
        blocking::check("`cutting`");
        Self::with(inode, within, inode.cutting.read())
    }

    /// Creates a batch of folios that are being evicted. Waits for a truncation in progress, but
    /// not behind one that waits itself: other threads may wait for the folios, which the caller
    /// has locked.
    pub(crate) fn of_victims(inode: &'a Inode) -> Self {
        blocking::check("`cutting`");
        Self::with(inode, ALL_PAGES, inode.cutting.read_recursive())
    }

    fn with(inode: &'a Inode, within: Range<u64>, no_cut: RwLockReadGuard<'a, ()>) -> Self {
        Self {
            inode,
            slots: inode.store.slots().map(|swap| &**swap),
            within,
            durable_lsn: inode.known_durable(),
            held: None,
            _no_cut: no_cut,
            ready: VecDeque::new(),
            ready_bytes: 0,
            queue: inode.engine.queue(),
            in_flight_bytes: 0,
            failed: Vec::new(),
            begun_folios: 0,
            ended_folios: 0,
            written_folios: 0,
            error: None,
        }
    }

    /// Returns the progress so far.
    pub(super) fn progress(&self) -> Progress {
        Progress {
            begun_folios: self.begun_folios,
            in_flight_folios: self.begun_folios - self.ended_folios,
            has_failed: self.error.is_some(),
        }
    }

    /// Starts to write `folios` and adjacent dirty folios, in the order of their positions. Busy
    /// ones, and those that the write gate holds back, are moved to `busy`.
    pub(super) fn add_all(&mut self, mut folios: Vec<FolioRef<'a>>, busy: &mut Vec<FolioRef<'a>>) {
        folios.sort_unstable_by_key(|folio| folio.folio().index());
        if self.slots.is_some() {
            return self.swap_out_all(folios, busy);
        }
        for folio in folios {
            let again = folio.try_clone();
            if self.add(folio) != Added::Done {
                busy.extend(again);
            }
        }
    }

    /// Starts to write `folio` and adjacent dirty folios.
    fn add(&mut self, folio: FolioRef<'a>) -> Added {
        let Some(locked) = folio.try_lock() else { return Added::Busy };
        self.add_locked(folio, locked)
    }

    /// Adds a folio like [`Self::add`]; the caller has locked it.
    pub(super) fn add_locked(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) -> Added {
        if locked.owner() != self.inode.address() {
            return Added::Done;
        }
        match locked.flags.write_state() {
            // In flight, possibly in this very batch.
            WriteState::Clean | WriteState::Writing => return Added::Done,
            WriteState::Redirtied => return Added::Busy,
            WriteState::Dirty => {}
        }
        let (index, pages) = (locked.index(), locked.pages());
        let folios = &self.inode.memory.folios;
        if self.inode.is_being_cleared(&locked) {
            self.inode.dirty.forget(folios, folio.id());
            return Added::Done;
        }
        let in_flight = match self.inode.dirty.begin(folios, folio.id(), self.durable_lsn) {
            Ok(in_flight) => in_flight,
            Err(NotBegun::NotDirty) => return Added::Done,
            Err(NotBegun::HeldBack { lsn }) => {
                self.held = HeldBack::sum(self.held, Some(HeldBack::one(lsn)));
                return Added::HeldBack;
            }
        };
        drop(locked);
        let mut before: SmallVec<[WriteVictim<'a>; 1]> = SmallVec::new();
        let mut run_pages = pages;
        let mut first = index;
        while run_pages + pages <= RUN_PAGES_MAX && first >= pages {
            let Some(neighbour) = self.begin_at(first - pages) else { break };
            before.push(neighbour);
            first -= pages;
            run_pages += pages;
        }
        let mut folios: SmallVec<[WriteVictim<'a>; 1]> = before.into_iter().rev().collect();
        folios.push(WriteVictim { folio, in_flight, copy: None });
        let mut end = index + pages;
        while run_pages + pages <= RUN_PAGES_MAX {
            let Some(neighbour) = self.begin_at(end) else { break };
            folios.push(neighbour);
            end += pages;
            run_pages += pages;
        }
        self.begun_folios += folios.len() as u64;
        self.start(folios);
        Added::Done
    }

    /// Begins the write-out of the folio at page `index`, if it is dirty and not busy.
    fn begin_at(&self, index: u64) -> Option<WriteVictim<'a>> {
        let inode = self.inode;
        if !self.within.contains(&index) || index >= inode.mapping.table().pages() {
            return None;
        }
        // Acquire: pairs with the Release in I1, as in `get_folio`.
        let seen = inode.mapping.table().load(index, Ordering::Acquire);
        let is_dirty = |folio: &Folio| folio.flags.write_state() == WriteState::Dirty;
        if !seen.is_folio() || !is_dirty(inode.memory.folio(seen.folio_id())) {
            return None;
        }
        let folio = inode.mapping.try_get_named(&inode.memory.folios, index, seen).ok()?;
        let locked = folio.try_lock()?;
        if locked.owner() != inode.address() || inode.is_being_cleared(&locked) {
            return None;
        }
        let folios = &inode.memory.folios;
        let in_flight = inode.dirty.begin(folios, folio.id(), self.durable_lsn).ok()?;
        drop(locked);
        Some(WriteVictim { folio, in_flight, copy: None })
    }

    pub(super) fn start(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>) {
        if let Err(error) = self.inode.memory.soundness.check() {
            return self.refuse(folios, error);
        }
        if folios[0].copy.is_none() && self.is_any_discarded(&folios) {
            return self.end_discarded(folios);
        }
        if self.slots.is_some() {
            return self.swap_run(folios);
        }
        match self.needs_copies(&folios) {
            Some(region) => self.start_copied(folios, region),
            None => self.start_from(folios, None),
        }
    }

    /// Returns `true` if the program has discarded the page of any of these folios.
    fn is_any_discarded(&self, folios: &[WriteVictim<'_>]) -> bool {
        let Some(region) = self.inode.page_space.region() else { return false };
        let first = folios[0].folio.folio().index();
        !region.discarded_among(first..first + folios.len() as u64).is_empty()
    }

    /// Ends the write-out of adjacent folios of which some pages are missing, and retries each
    /// alone.
    #[cold]
    fn end_discarded(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>) {
        let index = folios[0].folio.folio().index();
        let (position, is_alone) = (index * PAGE_BYTES, folios.len() == 1);
        let run = WriteIo { folios, position, length: 0, slots: None, copies: None };
        if is_alone {
            let error = self.inode.discarded(index);
            log::error!("{error}");
            return self.end(run, Some(error));
        }
        self.failed.push(run);
    }

    /// Starts the transfer of adjacent folios, from `copies` or from their frames.
    pub(super) fn start_from(
        &mut self,
        folios: SmallVec<[WriteVictim<'a>; 1]>,
        copies: Option<WriteCopies>,
    ) {
        let inode = self.inode;
        let position = folios[0].folio.folio().index() * PAGE_BYTES;
        let run_bytes = folios.len() as u64 * inode.mapping.folio_bytes();
        let length = inode.mapping.len_bytes().saturating_sub(position).min(run_bytes);
        let run = WriteIo { folios, position, length, slots: None, copies };
        if length == 0 {
            return self.end(run, None);
        }
        inode.memory.counters.add(Counter::WriteRequest, 1);
        let pieces = run.pieces(inode);
        let backing = inode.store.writer();
        let transfer =
            Transfer { backing, operation: Operation::Write, position_bytes: position, pieces };
        self.join(transfer, run);
    }

    /// Refuses folios whose bytes are not certain: they are not written and stay dirty.
    #[cold]
    fn refuse(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>, error: Error) {
        let position = folios[0].folio.folio().index() * PAGE_BYTES;
        let length_bytes = folios.len() as u64 * self.inode.mapping.folio_bytes();
        let range = position..position + length_bytes;
        let error = write_error(self.inode.name(), range, std::io::Error::other(error));
        let run = WriteIo { folios, position, length: 0, slots: None, copies: None };
        self.end(run, Some(error));
    }

    /// Queues a transfer. Submits the transfers before it when they are worth a call.
    pub(super) fn join(&mut self, transfer: Transfer, run: WriteIo<'a>) {
        self.ready_bytes += run.length;
        self.ready.push_back((transfer, run));
        let many = self.queue.depth().div_ceil(2);
        if self.ready_bytes >= CALL_BYTES {
            self.complete(0);
        } else if self.ready.len() >= many {
            // Small transfers, while the device is busy, are submitted with the next wait.
            let is_idle = self.in_flight_bytes == 0;
            self.submit_ready();
            if is_idle {
                self.queue.begin();
            }
        }
        if self.ready_bytes >= IN_FLIGHT_BYTES_MAX || self.ready.len() >= many {
            self.complete(self.queue.in_flight().div_ceil(2));
        }
    }

    /// Submits queued transfers, up to the limit.
    pub(super) fn begin(&mut self) {
        self.submit_ready();
        self.queue.begin();
    }

    /// Waits until `wanted` transfers are complete, submits the next ones, and ends the completed
    /// ones.
    fn complete(&mut self, wanted: usize) {
        let mut answered = Vec::new();
        let on_done = |run, answer| answered.push((run, answer));
        if wanted == 0 {
            self.queue.poll(on_done);
        } else {
            self.queue.complete(wanted, on_done);
        }
        self.in_flight_bytes -= answered.iter().map(|(run, _)| run.length).sum::<u64>();
        self.submit_ready();
        if self.queue.in_flight() > 1 {
            self.queue.begin();
        }
        for (run, answer) in answered {
            self.judge(run, answer);
        }
    }

    /// Returns the number of transfers that were started and have not ended.
    pub(super) fn started(&self) -> usize {
        self.ready.len() + self.queue.in_flight()
    }

    /// Waits until some of the started transfers have ended.
    pub(super) fn wait_for_some(&mut self) {
        self.submit_ready();
        self.complete(self.queue.in_flight().div_ceil(2));
    }

    /// Passes queued transfers to the engine, up to the limit.
    fn submit_ready(&mut self) {
        while let Some((_, next)) = self.ready.front() {
            let in_flight_bytes = self.in_flight_bytes + next.length;
            let is_too_much = self.in_flight_bytes > 0 && in_flight_bytes > IN_FLIGHT_BYTES_MAX;
            if is_too_much || self.queue.is_full() {
                break;
            }
            let Some((transfer, run)) = self.ready.pop_front() else { break };
            self.ready_bytes -= run.length;
            self.in_flight_bytes = in_flight_bytes;
            // SAFETY: IO-1: frames of the arena, which stays mapped (FRAMES-2), pages of a region,
            // or copies that stay until the write-out has ended. The run, which the queue keeps
            // until it is complete, has a reference to each folio, so no frame is reused, and no
            // thread changes them before that (WRITEBACK-3), nor the copies, which belong to the
            // run.
            unsafe { self.queue.push(transfer, run) };
        }
    }

    fn judge(&mut self, mut run: WriteIo<'a>, answer: Result<usize>) {
        match answer {
            Ok(_) => self.end(run, None),
            Err(_) if run.folios.len() > 1 => {
                self.assign_slots(&run, false);
                run.copies = None;
                self.failed.push(run);
            }
            Err(error) => self.end(run, Some(error)),
        }
    }

    /// Ends the write-out of every folio of `run`.
    pub(super) fn end(&mut self, run: WriteIo<'a>, error: Option<Error>) {
        let inode = self.inode;
        let count = run.folios.len() as u64;
        self.ended_folios += count;
        inode.memory.counters.add(Counter::Writeback, count);
        self.assign_slots(&run, error.is_none());
        match &error {
            None => {
                inode.memory.counters.add(Counter::WrittenBytes, run.length);
                inode.store.note_written(run.position, run.length);
                self.written_folios += count;
            }
            Some(error) => {
                inode.memory.counters.add(Counter::WritebackError, count);
                self.error = Some(error.clone());
            }
        }
        let (folios, in_flight): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) =
            run.folios.into_iter().map(|victim| (victim.folio, victim.in_flight)).unzip();
        let (ended, all) = (folios.iter().map(FolioRef::id).zip(in_flight), &inode.memory.folios);
        match &error {
            None => inode.dirty.end(all, ended),
            Some(error) => {
                inode.dirty.end_failed(all, ended, || inode.errors.record(error.clone()));
            }
        }
        drop(folios);
        if let Some(device) = &inode.device {
            inode.flusher.note_progress(device, error.as_ref());
        }
        inode.store.note_end(error.as_ref());
    }

    /// Waits for everything in flight.
    pub(super) fn finish(mut self) -> Written {
        self.finish_all();
        let (folios, error) = (self.written_folios, self.error.take());
        Written { folios, error, held: self.held, cause: None }
    }

    pub(crate) fn finish_all(&mut self) {
        while self.queue.in_flight() > 0 || !self.ready.is_empty() || !self.failed.is_empty() {
            self.submit_ready();
            self.complete(self.queue.in_flight());
            for run in std::mem::take(&mut self.failed) {
                for victim in run.folios {
                    self.start(SmallVec::from_buf([victim]));
                }
            }
        }
    }
}

impl Drop for WriteBatch<'_> {
    fn drop(&mut self) {
        self.finish_all();
    }
}
