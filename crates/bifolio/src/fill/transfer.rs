//! Runs: adjacent folios that one transfer fills, and their publication: the second and the third
//! step of a fill (FILL-T1..P4).
//!
//! A run that fails or is dropped removes its folios from the table.
//!
//! # Safety
//! Passes frames to the engine; the run owns them until the engine returns it. Zeroes and copies
//! parts of frames, and of staging memory, whose folios it has locked.
#![allow(unsafe_code)]

use super::locked::{HeldFolios, Locked};
use crate::error::{Error, Result};
use crate::inode::{ClearedBefore, Inode};
use crate::io::{Operation, Pieces, Queue, Transfer};
use crate::memory::FillTarget;
use crate::page::{Flag, FolioId, Folios, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::barrier_of_store_and_load;
use crate::sys::copy;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct ReadIo {
    pub(crate) inode: Arc<Inode>,
    /// First page.
    pub(crate) first: u64,
    pub(crate) folios: HeldFolios,
    pub(crate) target: FillTarget,
    /// Pages counted as in read (`Load::begin_read`).
    counted_pages: u64,
    /// Bytes that the backing had for the run when it was started. It may have grown since.
    pub(super) expected_bytes: u64,
    /// CLEAR-F2.
    pub(super) before_read: Option<ClearedBefore>,
}

/// Resources of a fill other than frames: a share of the pages that its device may have in reads,
/// and the memory of the page space that is no frame. They are taken in this order, before frames
/// and folio locks, so that a thread that waits for them holds nothing that other threads wait for.
#[derive(Debug)]
pub(crate) struct Room<'h> {
    pub(super) inode: &'h Inode,
    /// Pages counted as in read; 0 for a folio that is not expected to be read.
    pub(super) pages: u64,
    pub(super) target: FillTarget,
}

impl Room<'_> {
    /// Counts `pages` as in read if none are counted yet: they are read after all.
    pub(super) fn of_at_least(mut self, pages: u64) -> Self {
        if self.pages < pages {
            self.inode.load.reading.add(pages - self.pages);
            self.pages = pages;
        }
        self
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.inode.load.end_read(self.pages);
    }
}

impl ReadIo {
    /// Creates a run without folios that starts at page `first` and takes as many as `room` allows.
    pub(crate) fn new(inode: &Arc<Inode>, first: u64, mut room: Room<'_>) -> Self {
        let counted_pages = std::mem::take(&mut room.pages);
        let target = std::mem::take(&mut room.target);
        Self {
            inode: Arc::clone(inode),
            first,
            folios: HeldFolios::default(),
            target,
            counted_pages,
            expected_bytes: 0,
            before_read: None,
        }
    }

    /// Returns `true` if the run can take one more folio of `folio_pages` pages.
    pub(super) fn has_room(&self, folio_pages: u64) -> bool {
        let most = self.counted_pages.min(self.target.pages_max());
        self.folios.len() == 0 || self.pages() + folio_pages <= most
    }

    /// Makes room for up to `pages` more pages, without waiting.
    pub(crate) fn make_room(&mut self, pages: u64) {
        let least = 1 << self.inode.mapping.order();
        let more_pages = self.inode.load.try_begin_read(least, pages).unwrap_or(0);
        self.counted_pages += more_pages;
        self.target.extend(more_pages as usize);
    }

    pub(crate) fn push(&mut self, locked: Locked<'_>) {
        debug_assert_eq!(locked.lock.index(), self.end_page());
        self.folios.push(locked);
    }

    /// Returns the first page after the last folio.
    pub(crate) fn end_page(&self) -> u64 {
        self.first + self.pages()
    }

    pub(crate) fn pages(&self) -> u64 {
        (self.folios.len() as u64) << self.inode.mapping.order()
    }

    /// Returns the address that the bytes of a folio are read to.
    pub(super) fn target_of(&self, number: usize, id: FolioId) -> *mut u8 {
        self.target.address(number).unwrap_or_else(|| self.inode.memory.arena.address(id))
    }

    /// FILL-T1: returns the transfer that fills the run; `None` if the storage has no bytes of it.
    fn transfer(&mut self) -> Option<Transfer> {
        // Room for folios that were not claimed.
        self.target.shrink(self.folios.len());
        let unused_pages = self.counted_pages.saturating_sub(self.pages());
        self.counted_pages -= unused_pages;
        self.inode.load.end_read(unused_pages);
        let (inode, counters) = (&*self.inode, &self.inode.memory.counters);
        self.before_read = inode.clearing.get().and_then(|it| it.cleared_before());
        let (first, folio_bytes) =
            (inode.memory.folio(self.folios.ids()[0]), inode.mapping.folio_bytes());
        let length_bytes = self.folios.len() as u64 * folio_bytes;
        let Some(source) = inode.store.source(first, length_bytes) else {
            counters.add(Counter::MissWithoutRead, self.folios.len() as u64);
            return None;
        };
        self.expected_bytes = source.length_bytes;
        self.target.note_read(&inode.memory.region_reads, self.pages());
        counters.add(Counter::ReadRequest, 1);
        let targets =
            self.folios.ids().iter().enumerate().map(|(number, id)| self.target_of(number, *id));
        Some(Transfer {
            backing: source.backing,
            operation: Operation::Read,
            position_bytes: source.position_bytes,
            // Whole folios: the end of the storage may move until they are read.
            pieces: Pieces::of(length_bytes, targets.map(|start| (start, folio_bytes))),
        })
    }

    /// Queues the run (FILL-T2). Returns it at once if the storage has no bytes of it.
    pub(super) fn start<T>(
        mut self,
        queue: &mut Queue<'_, (Self, T)>,
        tag: T,
    ) -> Option<(Self, T)> {
        let Some(transfer) = self.transfer() else { return Some((self, tag)) };
        // SAFETY: IO-1: frames of the arena, which stays mapped (FRAMES-2), or staging memory. The
        // run, which the queue keeps until it is complete, holds that memory and the locks and
        // references of the folios, which are not uptodate: no other thread writes them, and
        // readers go through `sys::copy`.
        unsafe { queue.push(transfer, (self, tag)) };
        None
    }

    /// Reads the run on this thread, which has no queue, and passes its folios to `visit` like
    /// [`Self::finish`].
    pub(crate) fn read<'a>(
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
    pub(crate) fn read_first(self, inode: &Inode) -> Result<Locked<'_>> {
        let mut first = None;
        self.read(inode, |locked| first = first.take().or(Some(locked)))?;
        Ok(first.expect("a run has a folio, and returns it on success"))
    }
}

impl Drop for ReadIo {
    fn drop(&mut self) {
        let inode = &self.inode;
        while let Some(locked) = self.folios.take_next(&inode.memory.folios) {
            let Locked { folio, lock, .. } = locked;
            drop(inode.remove_unfilled(&folio, &lock));
        }
        inode.load.end_read(self.counted_pages);
    }
}

impl ReadIo {
    /// Ends the fill. `answer` is the result of the transfer: the number of bytes read from the
    /// start of the run. Each folio whose bytes were read becomes READY and is passed to `visit`,
    /// locked. The first folio that was not read and all after it are removed from the table.
    ///
    /// # Errors
    /// The error of the transfer, or a short read: the backing has shrunk.
    pub(crate) fn finish<'a>(
        mut self,
        folios: &'a Folios,
        answer: Result<usize>,
        mut visit: impl FnMut(Locked<'a>),
    ) -> Result<()> {
        let inode = Arc::clone(&self.inode);
        let answer =
            answer.map_err(|source| inode.store.read_error(self.first * PAGE_BYTES, source))?;
        let bytes = (answer as u64).min(self.expected_bytes);
        inode.memory.counters.add(Counter::ReadBytes, bytes);
        // The zeros past the end are stores of this thread, which may not have inserted the folios.
        inode.mapping.begin_fill();
        let mut done = 0;
        while done < self.folios.len() {
            // The reader copies each frame while it is in the CPU's cache.
            let group_end = self.folios.len().min(done + self.target.published_together());
            let (valid_end, checked) = self.check(folios, done..group_end, bytes);
            // FILL-P2. Pages that raw writers can already see stay, even if the rest fails.
            let order = inode.mapping.order();
            let page = |number: usize| self.first + ((number as u64) << order);
            let (pages, counters) = (page(done)..page(valid_end), &inode.memory.counters);
            let (there, published) = inode.page_space.publish(&self.target, done, pages, counters);
            let published = published.map_err(|source| Error::memory("a page of a map", source));
            let there = (there >> order) as usize;
            for _ in 0..there {
                let Some(locked) = self.folios.take_next(folios) else { break };
                inode.mapping.mark_uptodate(&locked.lock);
                visit(locked);
            }
            done += there;
            // The drop of the rest removes it (FILL-P4).
            published.and(checked)?;
        }
        Ok(())
    }

    /// FILL-P1: checks a group of folios, starting at `group.start`, against the `bytes` that the
    /// transfer read. Returns the end of the valid ones, and the error of the next. Zeroes the
    /// bytes past the end of the storage.
    fn check(&self, folios: &Folios, group: Range<usize>, bytes: u64) -> (usize, Result<()>) {
        for number in group.clone() {
            let check = |locked: &Locked<'_>| self.check_one(number, locked, bytes);
            if let Err(error) = self.folios.look(folios, number, check) {
                return (number, Err(error));
            }
        }
        (group.end, Ok(()))
    }

    fn check_one(&self, number: usize, locked: &Locked<'_>, bytes: u64) -> Result<()> {
        let (inode, folio_bytes) = (&*self.inode, self.inode.mapping.folio_bytes());
        let offset = number as u64 * folio_bytes;
        let part = |bytes: u64| bytes.saturating_sub(offset).min(folio_bytes);
        let (read, expected) = (part(bytes), part(self.expected_bytes));
        let position = self.first * PAGE_BYTES + offset;
        // A short read is an error, unless this cache truncated the file concurrently: a
        // truncation sets the length first.
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        if read < expected.min(visible) {
            let folio = locked.folio.folio();
            return Err(inode.store.cut_short(folio, position, expected.min(visible), read));
        }
        let start = self.target_of(number, locked.folio.id());
        let checked = inode.store.check_filled(&locked.folio, start, &inode.memory.counters);
        let is_old = mark_cleared(inode, &locked.lock, self.before_read);
        checked?;
        let valid = if is_old { 0 } else { read };
        if valid > 0
            && let Some(codec) = inode.codec.get()
        {
            codec.check(|| inode.name(), position, start, valid as usize)?;
        }
        if valid < folio_bytes {
            let behind = start.wrapping_add(valid as usize);
            // SAFETY: inside the folio's frame, or its part of the staging memory, which only the
            // holder of its lock writes: this thread.
            unsafe { copy::zero(behind, (folio_bytes - valid) as usize) };
        }
        Ok(())
    }
}

/// CLEAR-F3, for a folio, locked and in the table, before it is uptodate. Returns `true` if its
/// bytes must be zeros.
pub(super) fn mark_cleared(
    inode: &Inode,
    lock: &LockedFolio<'_>,
    before: Option<ClearedBefore>,
) -> bool {
    // Before the file is asked for its clears: the first one may have begun just now.
    barrier_of_store_and_load();
    inode.clearing.get().is_some_and(|it| it.mark(lock, before))
}

/// Copies the part of a folio that has just been filled to `buffer`, whose first byte has
/// `position`. Returns the number of bytes: 0 if the folio does not hold that byte. A folio further
/// ahead was read early: it is marked as readahead, and copied later.
pub(crate) fn copy_filled(
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
