//! Reads of runs: adjacent folios filled by one transfer.
//!
//! `fill.rs` creates a run by claiming its folios. The run is started alone
//! ([`ReadIo::read`]), in a [`Batch`] or by readahead (`readahead`), and ended
//! by [`ReadIo::finish`] on the thread that sees the transfer complete. Until then it owns the lock
//! of each folio and one reference, which reserve the frames for the kernel (IO-1) even if all
//! other users are gone. A run that fails or is dropped removes its folios from the table.
//!
//! A [`Batch`] fills runs at several positions, or of several files, for reads, pins and readahead.
//! The runs are claimed and passed to one engine queue, which keeps as many transfers in flight as
//! its depth and returns them in completion order. While transfers are in flight, the batch never
//! waits for a folio lock or for frames (IO-5): it skips folios that another thread is filling, and
//! when frames run short, it completes its own transfers first. So batches never wait for each
//! other, and a batch of any length works in a cache of any size.
//!
//! # Safety
//! Passes frames to the engine; the run owns them until the engine returns it.
#![allow(unsafe_code)]

use super::fill::{Locked, ReadIoClaim, Room, Wait};
use super::handle::Handle;
use crate::error::{Error, Result};
use crate::inode::{ClearedBefore, Inode};
use crate::io::{Queue, Transfer};
use crate::memory::Staged;
use crate::page::{Entry, Flag, FolioId, Folios, PAGE_BYTES};
use crate::reclaim::Haste;
use crate::stats::Counter;
use crate::sys::copy;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// Folios of a region that are checked, installed with one call, and unlocked together. The reader
/// of the first page of a transfer continues while the others follow: with all 256 pages at once,
/// the slowest read of a sequential scan takes up to 0.63 ms instead of 0.49 ms; with 16, the scan
/// needs a tenth more CPU.
const INSTALLED_TOGETHER: usize = 64;

/// Run of adjacent folios that one transfer fills.
#[derive(Debug)]
pub(super) struct ReadIo {
    inode: Arc<Inode>,
    /// Page index of the first folio.
    first: u64,
    folios: SmallVec<[FolioId; 1]>,
    /// Staging memory, for a file in a region: holds the bytes until whole pages are installed.
    staged: Option<Staged>,
    /// Pages counted as in read (`Inode::begin_read`).
    counted_pages: u64,
    /// Set if raw stores to its pages are expected soon.
    pub(super) will_be_stored: bool,
    /// Bytes that the backing had for the run when it was started. It may have grown since.
    expected_bytes: u64,
    /// Noted when it was started.
    cleared_before: ClearedBefore,
}

impl ReadIo {
    /// Creates a run without folios that starts at page `first` and takes as many as `room` allows.
    pub(super) fn new(inode: &Arc<Inode>, first: u64, room: Room<'_>) -> Self {
        let (counted_pages, staged) = room.into_run();
        let (inode, folios) = (Arc::clone(inode), SmallVec::new());
        let (will_be_stored, expected_bytes) = (false, 0);
        let cleared_before = ClearedBefore::default();
        Self {
            inode,
            first,
            folios,
            staged,
            counted_pages,
            will_be_stored,
            expected_bytes,
            cleared_before,
        }
    }

    /// Returns `true` if the run can take one more folio of `folio_pages` pages.
    pub(super) fn has_room(&self, folio_pages: u64) -> bool {
        let staged_pages = self.staged.as_ref().map_or(u64::MAX, |staged| staged.pages() as u64);
        let most = self.counted_pages.min(staged_pages);
        self.is_empty() || self.pages() + folio_pages <= most
    }

    /// Makes room for up to `pages` more pages, without waiting.
    pub(super) fn make_room(&mut self, pages: u64) {
        let least = 1 << self.inode.mapping.order();
        let more_pages = self.inode.try_begin_read(least, pages).unwrap_or(0);
        self.counted_pages += more_pages;
        if let Some(staged) = &mut self.staged {
            staged.extend(more_pages as usize);
        }
    }

    /// Returns the address that the bytes of a folio are read to.
    fn target(&self, number: usize, id: FolioId) -> *mut u8 {
        match &self.staged {
            Some(staged) => staged.address(number),
            None => self.inode.memory.arena.address(id),
        }
    }

    /// Appends a folio, with its lock and its reference.
    pub(super) fn push(&mut self, locked: Locked<'_>) {
        debug_assert_eq!(locked.lock.index(), self.first + self.pages());
        self.folios.push(locked.detach());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }

    /// Returns `true` if the folio at an Entry `seen` can be read by the same transfer as the
    /// others.
    pub(super) fn can_go_on_with(&self, seen: Entry) -> bool {
        let Some(last) = self.folios.last() else { return true };
        self.inode.store.continues(self.inode.memory.folio(*last), seen)
    }

    /// Returns the file of the run.
    pub(super) fn inode(&self) -> Arc<Inode> {
        Arc::clone(&self.inode)
    }

    /// Returns the page index of the first folio.
    pub(super) fn first_page(&self) -> u64 {
        self.first
    }

    /// Returns the number of pages in all folios.
    pub(super) fn pages(&self) -> u64 {
        (self.folios.len() as u64) << self.inode.mapping.order()
    }

    /// Returns the folios of the run.
    pub(super) fn folios(&self) -> &[FolioId] {
        &self.folios
    }

    /// Returns the transfer that fills the run; `None` if the backing has no bytes of it.
    fn transfer(&mut self) -> Option<Transfer> {
        if let Some(staged) = &mut self.staged {
            staged.shrink(self.folios.len());
        }
        let unused_pages = self.counted_pages.saturating_sub(self.pages());
        self.counted_pages -= unused_pages;
        self.inode.end_read(unused_pages);
        self.cleared_before = self.inode.clearing.cleared_before();
        self.expected_bytes = self.inode.bytes_to_read(&self.folios);
        let counters = &self.inode.memory.counters;
        if self.expected_bytes == 0 {
            counters.add(Counter::MissWithoutRead, self.folios.len() as u64);
            return None;
        }
        if self.staged.is_some() {
            self.inode.memory.region_reads.note_read(self.pages());
        }
        counters.add(Counter::ReadRequest, 1);
        let targets = self.folios.iter().enumerate().map(|(number, id)| self.target(number, *id));
        Some(self.inode.read_transfer(&self.folios, targets))
    }

    /// Queues the run in `queue`, or finishes it at once if the backing has no bytes of it.
    pub(super) fn start<T>(
        mut self,
        queue: &mut Queue<'_, (ReadIo, T)>,
        tag: T,
        finished: impl FnOnce(ReadIo, T),
    ) {
        let Some(transfer) = self.transfer() else { return finished(self, tag) };
        // SAFETY: IO-1: frames of the arena, which stays mapped (FRAMES-2), or staging memory. The
        // run, which the queue keeps until it is complete, holds that memory and the locks and
        // references of the folios, which are not uptodate: no other thread writes them, and
        // readers go through `sys::copy`.
        unsafe { queue.push(transfer, (self, tag)) }
    }

    /// Reads the run on this thread, which has no queue, and passes its folios to `visit` like
    /// [`Self::finish`].
    pub(super) fn read<'a>(
        mut self,
        inode: &'a Inode,
        visit: impl FnMut(Locked<'a>),
    ) -> Result<()> {
        let answer = self.transfer().map_or(Ok(0), |transfer| {
            inode.memory.counters.add(Counter::PlainTransfer, 1);
            // SAFETY: IO-1, as in `start`: the run is here until the transfer is complete.
            unsafe { transfer.run_alone() }
        });
        self.finish(&inode.memory.folios, answer, visit)
    }

    /// Reads the run on this thread and returns its first folio, locked.
    pub(super) fn read_first(self, inode: &Inode) -> Result<Locked<'_>> {
        let mut first = None;
        self.read(inode, |locked| first = first.take().or(Some(locked)))?;
        Ok(first.expect("a run has a folio, and returns it on success"))
    }

    /// Ends the fill. `answer` is the result of the transfer: the number of bytes read from the
    /// start of the run. Each folio whose bytes were read becomes READY and is passed to `visit`,
    /// locked. The first folio that was not read and all after it are removed from the table.
    ///
    /// # Errors
    /// The error of the transfer, or a short read: the backing has shrunk.
    pub(super) fn finish<'a>(
        mut self,
        folios: &'a Folios,
        answer: Result<usize>,
        mut visit: impl FnMut(Locked<'a>),
    ) -> Result<()> {
        let total = self.expected_bytes;
        let inode = Arc::clone(&self.inode);
        let answer =
            answer.map_err(|source| inode.store.read_error(self.first * PAGE_BYTES, source))?;
        let bytes = (answer as u64).min(total);
        inode.memory.counters.add(Counter::ReadBytes, bytes);
        let mut done = 0;
        while done < self.folios.len() {
            // The reader copies each frame while it is in the CPU's cache.
            let group = if self.staged.is_some() { INSTALLED_TOGETHER } else { 1 };
            let group_end = self.folios.len().min(done + group);
            let (good_end, judged) = self.judge(folios, done..group_end, bytes);
            // Pages that raw writers can already see stay, even if the rest fails.
            let (there, installed) = self.install(done..good_end);
            for id in &self.folios[done..done + there] {
                let locked = Locked::adopt(folios, *id);
                inode.mapping.mark_uptodate(&locked.lock);
                visit(locked);
            }
            done += there;
            if let Err(error) = installed.and(judged) {
                self.folios.drain(..done);
                return Err(error);
            }
        }
        self.folios.clear();
        Ok(())
    }

    /// Checks a group of folios, starting at `group.start`, against the `bytes` that the transfer
    /// read. Returns the end of the valid ones, and the error of the next. Zeroes the bytes past
    /// the end of the backing.
    fn judge(&self, folios: &Folios, group: Range<usize>, bytes: u64) -> (usize, Result<()>) {
        let inode = &self.inode;
        let folio_bytes = inode.mapping.folio_bytes();
        // The zeros below are stores of this thread, which may not have inserted the folios.
        inode.mapping.begin_fill();
        for number in group.clone() {
            let offset = number as u64 * folio_bytes;
            let part = |bytes: u64| bytes.saturating_sub(offset).min(folio_bytes);
            let (valid, expected) = (part(bytes), part(self.expected_bytes));
            let position = self.first * PAGE_BYTES + offset;
            // A short read is an error, unless this cache truncated the file concurrently: a
            // truncation sets the length first.
            let visible = inode.mapping.len_bytes().saturating_sub(position);
            if valid < expected.min(visible) {
                let folio = inode.memory.folio(self.folios[number]);
                let error = inode.store.cut_short(folio, position, expected.min(visible), valid);
                return (number, Err(error));
            }
            let locked = Locked::adopt(folios, self.folios[number]);
            let start = self.target(number, self.folios[number]);
            let checked = inode.check_filled(&locked.folio, start);
            let valid =
                if inode.mark_if_cleared(&locked.lock, self.cleared_before) { 0 } else { valid };
            let _still_locked = locked.detach();
            if let Err(error) = checked {
                return (number, Err(error));
            }
            if valid < folio_bytes {
                let behind = start.wrapping_add(valid as usize);
                // SAFETY: inside the folio's frame, or its part of the staging memory, which only
                // the holder of its lock writes: this thread.
                unsafe { copy::zero(behind, (folio_bytes - valid) as usize) };
            }
        }
        (group.end, Ok(()))
    }

    /// Installs staged folios in the region. Returns the end of the installed ones.
    fn install(&self, group: Range<usize>) -> (usize, Result<()>) {
        let Some(staged) = self.staged.as_ref().filter(|_| !group.is_empty()) else {
            return (group.len(), Ok(()));
        };
        let pages = self.first + group.start as u64..self.first + group.end as u64;
        let source = staged.address(group.start);
        let (there, outcome) = self.inode.install(pages, source, self.will_be_stored);
        (there as usize, outcome)
    }
}

impl Drop for ReadIo {
    fn drop(&mut self) {
        let inode = &self.inode;
        for id in self.folios.drain(..) {
            let folios = &inode.memory.folios;
            let Locked { folio, lock, .. } = Locked::adopt(folios, id);
            drop(inode.remove_unfilled(&folio, &lock));
        }
        inode.end_read(self.counted_pages);
    }
}

/// Minimum number of completions of small transfers that is worth a system call.
const COMPLETIONS_WANTED: usize = 16;

/// Result of a run of a batch, delivered with the number that the caller gave to the run.
#[derive(Debug)]
pub(super) enum Delivery<'a> {
    /// Folio that has just become READY.
    Folio(Locked<'a>),
    /// Run of `folios` folios from `page` on that could not be read. Some folios of a longer run
    /// may be readable alone.
    Failed { error: Error, page: u64, folios: usize },
}

/// Set of runs that are claimed and read together by one queue; see the module documentation.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    folios: &'a Folios,
    queue: Queue<'a, (ReadIo, usize)>,
    /// Number of transfers, claimed or complete, that is worth a system call.
    wanted: usize,
    /// Number of transfers in flight or claimed at which `add` waits for completions.
    most: usize,
    is_hasty: bool,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch for files of the cache that `inode` belongs to.
    pub(super) fn new(inode: &'a Inode) -> Self {
        let (folios, queue) = (&inode.memory.folios, inode.engine.queue());
        // While the device works on half of the depth, the other half is claimed, and later
        // delivered. As many again are prepared for the case that the device completes all at once.
        let half = queue.depth() / 2;
        let (wanted, most) = (COMPLETIONS_WANTED.max(half), queue.depth() + half);
        Self { folios, queue, wanted, most, is_hasty: false }
    }

    /// Creates a batch for large runs that a reader consumes in order: each run is delivered as
    /// soon as it completes.
    pub(super) fn in_order(inode: &'a Inode) -> Self {
        let (folios, queue) = (&inode.memory.folios, inode.engine.queue());
        let most = queue.depth();
        Self { folios, queue, wanted: 1, most, is_hasty: false }
    }

    /// From now on, fails if nothing can be evicted, instead of waiting.
    pub(super) fn hurry(&mut self) {
        self.is_hasty = true;
    }

    /// Starts to read the absent folios of `pages` of a file, under `number`. Skips folios that
    /// other threads are filling.
    ///
    /// # Errors
    /// No frames are available, and nothing is in flight whose completion could free some.
    pub(super) fn add(
        &mut self,
        handle: &Handle,
        pages: Range<u64>,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) -> Result<()> {
        let mut left = pages;
        while let Some((absent, seen)) = handle.next_absent(left.clone()) {
            let wait = if self.queue.in_flight() == 0 { Wait::ForFrames } else { Wait::Never };
            let claimed = {
                let _haste = self.is_hasty.then(Haste::begin);
                handle.claim_read_io(absent..left.end, seen, wait)?
            };
            left.start = match claimed {
                ReadIoClaim::New(run) => {
                    let end = run.first_page() + run.pages();
                    self.start(run, number, deliver);
                    end
                }
                ReadIoClaim::Taken => handle.end_of_folio(absent),
                ReadIoClaim::NoFrame => {
                    self.complete(1, deliver);
                    absent
                }
            };
        }
        Ok(())
    }

    /// Starts a run that is already claimed.
    pub(super) fn start(
        &mut self,
        run: ReadIo,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) {
        if self.queue.in_flight() >= self.most {
            self.complete(self.wanted, deliver);
        } else if self.queue.waiting() == self.wanted {
            // Only now the batch is known to be larger than this; a smaller one is submitted in one
            // call.
            self.queue.feed();
        }
        let folios = self.folios;
        run.start(&mut self.queue, number, |run, number| {
            hand_out(folios, run, number, Ok(0), deliver);
        });
    }

    /// Submits the started transfers to the device.
    pub(super) fn begin(&mut self) {
        self.queue.begin();
    }

    /// Waits for everything in flight.
    pub(super) fn finish(mut self, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        loop {
            let in_flight = self.queue.in_flight();
            if in_flight == 0 {
                return;
            }
            let is_last = in_flight <= 2 * self.wanted;
            let wanted = if is_last { in_flight } else { in_flight - self.wanted };
            self.complete(if self.wanted == 1 { 1 } else { wanted }, deliver);
        }
    }

    fn complete(&mut self, wanted: usize, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        let folios = self.folios;
        self.queue.complete_exactly(wanted, |(run, number), answer| {
            hand_out(folios, run, number, answer, deliver);
        });
    }
}

fn hand_out<'a>(
    folios: &'a Folios,
    run: ReadIo,
    number: usize,
    answer: Result<usize>,
    deliver: &mut impl FnMut(usize, Delivery<'a>),
) {
    let (page, count) = (run.first_page(), run.folios().len());
    let ended = run.finish(folios, answer, |locked| deliver(number, Delivery::Folio(locked)));
    if let Err(error) = ended {
        deliver(number, Delivery::Failed { error, page, folios: count });
    }
}

/// Copies the part of a folio that has just been filled to `buffer`, whose first byte has
/// `position`. Returns the number of bytes: 0 if the folio does not hold that byte. A folio further
/// ahead was read early: it is marked as readahead, and copied later.
pub(super) fn copy_filled(
    inode: &Inode,
    locked: &Locked<'_>,
    buffer: &mut [u8],
    position: u64,
) -> usize {
    let folio_start = locked.lock.index() * PAGE_BYTES;
    let folio_end = folio_start + locked.lock.pages() * PAGE_BYTES;
    let folio_end = folio_end.min(inode.mapping.len_bytes());
    if position < folio_start {
        // This discards a use since the folio became READY, which is only a hint.
        locked.lock.flags.set(Flag::Readahead);
        return 0;
    }
    let length = (folio_end.saturating_sub(position) as usize).min(buffer.len());
    let source = inode.frame_of(&locked.folio).wrapping_add((position - folio_start) as usize);
    // SAFETY: inside a frame whose folio `locked` has locked: no thread writes it now; `buffer` is
    // the caller's memory.
    unsafe { copy::copy_out(source, &mut buffer[..length]) };
    length
}
