//! Batches of write-outs of one file, with one transfer per run of adjacent pages.
//!
//! There is no other way to the storage. A folio that is added to a batch takes adjacent dirty
//! folios with it, up to 1 MiB. Part of a batch is in flight, and as much is ready in a queue: a
//! disk may complete nothing before its queue is empty, so the next transfers are submitted before
//! the completed ones are processed.
//!
//! While anything is in flight, the batch never waits for a lock or a write-out (IO-5): it returns
//! a busy folio to the caller. A transfer of several folios that fails is split, and each folio is
//! written alone, so that one bad block keeps only its own folio dirty.
//!
//! # Safety
//! Passes frames to the engine; the references kept with each transfer own them.
#![allow(unsafe_code)]

use super::ALL_PAGES;
use crate::dirt::{HeldBack, InFlight, NotBegun, Refusal};
use crate::error::{Error, Result, write_error};
use crate::inode::{Inode, MappedPages, SealedPages, WriteSource};
use crate::io::{Operation, Pieces, Queue, RUN_PAGES_MAX, Transfer};
use crate::memory::StagedPages;
use crate::page::{Flag, Folio, FolioRef, LockedFolio, PAGE_BYTES, WriteState};
use crate::stats::Counter;
use crate::store::Place;
use crate::sync::{Ordering, RwLockReadGuard, blocking};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes in flight, at most, unless a single transfer has more; and bytes that are ready.
const IN_FLIGHT_BYTES_MAX: u64 = 8 << 20;
/// Bytes that are worth a system call.
const CALL_BYTES: u64 = 256 << 10;

#[derive(Debug)]
pub(crate) struct WriteVictim<'a> {
    pub(crate) folio: FolioRef<'a>,
    pub(crate) in_flight: InFlight,
    /// Copy of the folio's bytes, if they are not written from its frames.
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
    /// Starts to write adjacent folios whose write-out has begun: sealed, from copies if the
    /// program may store to them meanwhile, or from their frames. A run that is refused or fails is
    /// judged folio by folio.
    pub(crate) fn start(&self, inode: &Inode) -> *mut u8 {
        self.copy.map_or_else(|| inode.frame_of(&self.folio), |copy| copy.0.as_ptr())
    }
}

/// Folios written by one transfer, in order.
#[derive(Debug)]
pub(super) struct WriteIo<'a> {
    pub(super) folios: SmallVec<[WriteVictim<'a>; 1]>,
    pub(super) place: Place,
    /// Copies of the folios' bytes, if raw writers may store to the folios.
    pub(super) copies: Option<Box<dyn StagedPages>>,
    /// Sealed copies, if the file has a codec.
    pub(super) sealed: Option<SealedPages>,
}

impl<'a> WriteIo<'a> {
    /// Creates a run of folios that are not written.
    pub(super) fn unwritten(folios: SmallVec<[WriteVictim<'a>; 1]>) -> Self {
        Self { folios, place: Place::default(), copies: None, sealed: None }
    }

    /// Returns what one transfer of the run writes: its copies or sealed pages, or else the frames.
    fn pieces(&self, inode: &Inode) -> Pieces {
        let length = self.place.length_bytes;
        if let Some(copies) = &self.copies {
            return Pieces::of(length, std::iter::once((copies.address(0), length)));
        }
        if let Some(sealed) = &self.sealed {
            return Pieces::of(length, std::iter::once((sealed.address(), length)));
        }
        let piece = |it: &WriteVictim<'_>| (it.start(inode), it.folio.folio().pages() * PAGE_BYTES);
        Pieces::of(length, self.folios.iter().map(piece))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// The folio is being written, or needs no write.
    Done,
    /// Another thread holds the folio lock, or is about to change the folio after the lookup.
    Busy,
    /// The write gate holds the folio back.
    HeldBack,
}

#[derive(Debug)]
pub(crate) struct WriteBatch<'a> {
    pub(crate) inode: &'a Inode,
    within: Range<u64>,
    /// LSN that is known to be durable (GATE-O1).
    durable_lsn: u64,
    /// Folios passed over because the log is not known to be durable up to their LSN.
    held: Option<HeldBack>,
    /// WRITEBACK-4: the length does not change until the bytes are written.
    _no_cut: RwLockReadGuard<'a, ()>,
    /// Folios of a store that chooses their place, begun and not started, and their pages.
    gathered: SmallVec<[WriteVictim<'a>; 1]>,
    gathered_pages: u64,
    ready: VecDeque<(Transfer, WriteIo<'a>)>,
    ready_bytes: u64,
    queue: Queue<'a, WriteIo<'a>>,
    in_flight_bytes: u64,
    pub(super) failed: Vec<WriteIo<'a>>,
    begun_folios: u64,
    ended_folios: u64,
    written_folios: u64,
    error: Option<Error>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    /// Folios whose write-out has begun, including those that have ended.
    pub(super) begun_folios: u64,
    pub(super) in_flight_folios: u64,
    pub(super) has_failed: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Written {
    pub(crate) folios: u64,
    /// Last error; it has been recorded for every handle.
    pub(crate) error: Option<Error>,
    /// Folios that the write gate held back, and, for a patient write-out, its refusal.
    pub(super) held: Option<HeldBack>,
    pub(super) refusal: Option<Refusal>,
}

impl Written {
    pub(super) fn add(&mut self, other: Self) {
        self.folios += other.folios;
        if other.held.is_some() {
            self.held = HeldBack::sum(self.held, other.held);
        }
        self.refusal = other.refusal.or(self.refusal.take());
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
            within,
            durable_lsn: inode.known_durable(),
            held: None,
            _no_cut: no_cut,
            gathered: SmallVec::new(),
            gathered_pages: 0,
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
        for folio in folios {
            let again = folio.try_clone();
            let added = match folio.try_lock() {
                Some(locked) => self.add_locked(folio, locked),
                None => Added::Busy,
            };
            if added != Added::Done {
                busy.extend(again);
            }
        }
    }

    /// Begins the write-out of a locked folio, if it is dirty, still of the file, and may be
    /// written now, together with adjacent dirty folios that can be locked at once. Releases the
    /// lock.
    pub(super) fn add_locked(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) -> Added {
        if locked.owner() != self.inode.address {
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
        if self.inode.device.is_none() {
            self.gather(folio, locked, in_flight);
            return Added::Done;
        }
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

    /// Adds a folio, whose write-out has begun, to those written in one transfer.
    fn gather(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>, in_flight: InFlight) {
        let inode = self.inode;
        let pages = locked.pages();
        // Until now it had its number in the list there (rule 4 of `page`).
        locked.set_slot(0);
        if locked.flags.get(Flag::Allocated) {
            let filled = inode.fill_with_zeros(&folio, &locked);
            debug_assert!(filled.is_ok(), "a folio of the arena takes no memory to fill");
        }
        drop(locked);
        if self.gathered_pages + pages > RUN_PAGES_MAX {
            self.start_gathered();
        }
        self.begun_folios += 1;
        self.gathered_pages += pages;
        self.gathered.push(WriteVictim { folio, in_flight, copy: None });
    }

    fn start_gathered(&mut self) {
        self.gathered_pages = 0;
        let folios = std::mem::take(&mut self.gathered);
        if !folios.is_empty() {
            self.start(folios);
        }
    }

    /// Begins the write-out of the folio at page `index`, if it is dirty and nothing is to be
    /// waited for: it joins the run of its neighbour.
    fn begin_at(&self, index: u64) -> Option<WriteVictim<'a>> {
        let inode = self.inode;
        if !self.within.contains(&index) || index >= inode.mapping.table().pages() {
            return None;
        }
        // Acquire: pairs with the Release in READ-I1, as in `get_folio`.
        let seen = inode.mapping.table().load(index, Ordering::Acquire);
        let is_dirty = |folio: &Folio| folio.flags.write_state() == WriteState::Dirty;
        if !seen.is_folio() || !is_dirty(inode.memory.folio(seen.folio_id())) {
            return None;
        }
        let folio = inode.mapping.try_get_named(&inode.memory.folios, index, seen).ok()?;
        let locked = folio.try_lock()?;
        if locked.owner() != inode.address || inode.is_being_cleared(&locked) {
            return None;
        }
        let folios = &inode.memory.folios;
        let in_flight = inode.dirty.begin(folios, folio.id(), self.durable_lsn).ok()?;
        drop(locked);
        Some(WriteVictim { folio, in_flight, copy: None })
    }

    pub(super) fn start(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>) {
        debug_assert!(!folios.is_empty(), "a transfer of no folios");
        if let Err(error) = self.inode.memory.soundness.check() {
            return self.refuse(folios, error);
        }
        if let Some(codec) = self.inode.codec.get() {
            return self.start_sealed(folios, codec);
        }
        // Victims have copies already.
        match self.inode.mapped.as_deref().filter(|_| folios[0].copy.is_none()) {
            Some(mapped) => self.start_mapped(folios, mapped),
            None => self.start_from(folios, None),
        }
    }

    /// Starts to write adjacent pages in place: from copies, as many in one transfer as there is
    /// memory for, if the program may store to them meanwhile.
    fn start_mapped(
        &mut self,
        mut folios: SmallVec<[WriteVictim<'a>; 1]>,
        mapped: &dyn MappedPages,
    ) {
        debug_assert_eq!(self.inode.mapping.order(), 0, "a folio in place is a page");
        let pages_of = |folios: &[WriteVictim<'_>]| {
            let first = folios[0].folio.folio().index();
            first..first + folios.len() as u64
        };
        match mapped.write_source(self.inode, pages_of(&folios)) {
            WriteSource::Pages => return self.start_from(folios, None),
            WriteSource::Discarded(error) => return self.end_discarded(folios, error),
            WriteSource::Copies => {}
        }
        while !folios.is_empty() {
            let (pages, is_alone) = (pages_of(&folios), self.started() == 0);
            let Some(copies) = mapped.copy_for_write(self.inode, pages, is_alone) else {
                self.wait_for_some();
                continue;
            };
            let rest = folios.drain(copies.pages()..).collect();
            self.start_from(folios, Some(copies));
            folios = rest;
        }
    }

    /// Ends the write-out of adjacent folios of which some pages are missing, and retries each
    /// alone.
    #[cold]
    fn end_discarded(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>, error: Error) {
        let is_alone = folios.len() == 1;
        let run = WriteIo::unwritten(folios);
        if is_alone {
            log::error!("{error}");
            return self.end(run, Some(error));
        }
        self.failed.push(run);
    }

    /// Starts to write out victims, in portions of `portion_folios`, one transfer each, and waits
    /// for all but the last one. The caller keeps their locks and copies until they have ended;
    /// folios that failed are dirty again then.
    pub(crate) fn start_victims(&mut self, victims: Vec<WriteVictim<'a>>, portion_folios: usize) {
        debug_assert!(self.inode.device.is_none(), "the flusher writes dirty pages of devices");
        let mut left = victims.into_iter();
        while left.len() > 0 {
            self.finish_all();
            self.start(left.by_ref().take(portion_folios).collect());
            self.begin();
        }
    }

    /// Starts the transfer of folios, from `copies` or from their frames, or several transfers if
    /// the store has no place for all of them together.
    fn start_from(
        &mut self,
        mut folios: SmallVec<[WriteVictim<'a>; 1]>,
        mut copies: Option<Box<dyn StagedPages>>,
    ) {
        let inode = self.inode;
        while !folios.is_empty() {
            let all = folios.iter().map(|victim| victim.folio.folio());
            let place = inode.store.place(all, inode.mapping.len_bytes(), &inode.memory.arena);
            let count = place.as_ref().map_or(1, |(_, count)| *count);
            let rest = folios.drain(count..).collect();
            let folios = std::mem::replace(&mut folios, rest);
            match place {
                Ok((place, _)) => {
                    let copies = copies.take();
                    self.start_at(WriteIo { folios, place, copies, sealed: None });
                }
                Err(error) => self.end(WriteIo::unwritten(folios), Some(error)),
            }
        }
    }

    /// Starts the transfer of a run that has its place; a run without bytes (past the end) has
    /// ended.
    pub(super) fn start_at(&mut self, run: WriteIo<'a>) {
        let inode = self.inode;
        if run.place.length_bytes == 0 {
            return self.end(run, None);
        }
        inode.memory.counters.add(Counter::WriteRequest, 1);
        let starts = run.folios.iter().map(|victim| (&victim.folio, victim.start(inode)));
        inode.store.note_start(&run.place, starts);
        let (backing, position_bytes) = (inode.store.writer(), run.place.position_bytes);
        let pieces = run.pieces(inode);
        let transfer = Transfer { backing, operation: Operation::Write, position_bytes, pieces };
        self.join(transfer, run);
    }

    /// Refuses folios whose bytes are not certain: they are not written and stay dirty.
    #[cold]
    fn refuse(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>, error: Error) {
        let position = folios[0].folio.folio().index() * PAGE_BYTES;
        let length_bytes = folios.len() as u64 * self.inode.mapping.folio_bytes();
        let range = position..position + length_bytes;
        let error = write_error(self.inode.name(), range, std::io::Error::other(error));
        self.end(WriteIo::unwritten(folios), Some(error));
    }

    /// Queues a transfer. Submits the transfers before it when they are worth a call.
    fn join(&mut self, transfer: Transfer, run: WriteIo<'a>) {
        self.ready_bytes += run.place.length_bytes;
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
        self.in_flight_bytes -= answered.iter().map(|(run, _)| run.place.length_bytes).sum::<u64>();
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

    pub(super) fn wait_for_some(&mut self) {
        self.submit_ready();
        self.complete(self.queue.in_flight().div_ceil(2));
    }

    /// Hands as many prepared transfers to the queue as the bytes in flight and its depth allow.
    fn submit_ready(&mut self) {
        while let Some((_, next)) = self.ready.front() {
            let in_flight_bytes = self.in_flight_bytes + next.place.length_bytes;
            let is_too_much = self.in_flight_bytes > 0 && in_flight_bytes > IN_FLIGHT_BYTES_MAX;
            if is_too_much || self.queue.is_full() {
                break;
            }
            let Some((transfer, run)) = self.ready.pop_front() else { break };
            self.ready_bytes -= run.place.length_bytes;
            self.in_flight_bytes = in_flight_bytes;
            // SAFETY: IO-1: frames of the arena, which stays mapped (FRAMES-2), pages of a region,
            // or copies that stay until the write-out has ended. The run, which the queue keeps
            // until it is complete, has a reference to each folio, so no frame is reused, and no
            // thread changes them before that (WRITEBACK-3), nor the copies, which belong to the
            // run.
            unsafe { self.queue.push(transfer, run) };
        }
    }

    /// Ends a run by the answer of the device. A run of several folios that failed is retried folio
    /// by folio, so that the error names those that cannot be written.
    fn judge(&mut self, mut run: WriteIo<'a>, answer: Result<usize>) {
        match answer {
            Ok(_) => self.end(run, None),
            Err(_) if run.folios.len() > 1 => {
                self.inode.store.release(std::mem::take(&mut run.place));
                (run.copies, run.sealed) = (None, None);
                self.failed.push(run);
            }
            Err(error) => self.end(run, Some(error)),
        }
    }

    /// Ends the write-out of a run: its folios are clean, or dirty again with the error recorded
    /// for every handle. Wakes the threads that wait for write-outs.
    pub(super) fn end(&mut self, run: WriteIo<'a>, error: Option<Error>) {
        let inode = self.inode;
        let count = run.folios.len() as u64;
        debug_assert!(count > 0, "the end of no write-out");
        self.ended_folios += count;
        inode.memory.counters.add(Counter::Writeback, count);
        let length_bytes = run.place.length_bytes;
        let written = run.folios.iter().map(|victim| victim.folio.folio());
        inode.store.note_end(run.place, written, error.as_ref(), &inode.memory.counters);
        match &error {
            None => {
                inode.memory.counters.add(Counter::WrittenBytes, length_bytes);
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
            device.note_end(error.as_ref());
            inode.flusher.note_freed();
        }
    }

    pub(super) fn finish(mut self) -> Written {
        self.finish_all();
        let (folios, error) = (self.written_folios, self.error.take());
        Written { folios, error, held: self.held, refusal: None }
    }

    /// Waits until every write-out of the batch has ended, those that are retried alone, too.
    /// Blocks for the device.
    pub(crate) fn finish_all(&mut self) {
        self.start_gathered();
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
