//! A run: consecutive folios on their way in, read by one transfer.
//!
//! Made by `fill.rs`, which claims the folios; started alone ([`ReadIo::read_first`]), in a batch
//! (`read_many.rs`) or ahead of need (`readahead`); ended by [`ReadIo::finish`], on whatever thread
//! sees the transfer complete. Until then the run owns each folio's lock and one reference: that is
//! what keeps the frames the kernel's (IO-1), whoever goes away meanwhile. A run that is dropped
//! takes its folios out of the table again, as does one that failed.
//!
//! # Safety
//! Hands frames to the engine; the run is their owner until the engine gives it back.
#![allow(unsafe_code)]

use super::fill::{Locked, Room};
use crate::error::Result;
use crate::io::{IoError, Queue};
use crate::memory::Staged;
use crate::page::{Entry, FolioId, Folios, PAGE_BYTES};
use crate::stats::Counter;
use crate::sys::copy;
use crate::writeback::Inode;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// Folios of a region that are checked, put in their places with one call, and unlocked. Who waits
/// for the first of a transfer goes on while the others follow: the slowest of a thousand pages
/// read in order waits 0.42 to 0.49 ms; with all 256 at once, 0.48 to 0.63. (With 16 there are more
/// waits, and a tenth more CPU.)
const INSTALLED_TOGETHER: usize = 64;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct ReadIo {
    inode: Arc<Inode>,
    /// Page index of the first folio.
    first: u64,
    folios: SmallVec<[FolioId; 1]>,
    /// Where the bytes are until all of a page is there, if it goes to a region.
    staged: Option<Staged>,
    /// Pages that count as read (`Inode::begin_read`).
    counted_pages: u64,
    /// Whether raw stores to its pages are to come at once.
    pub(super) will_be_stored: bool,
    /// Bytes the backing had for the run when it was started: it may have grown since.
    expected_bytes: u64,
}

impl ReadIo {
    /// No folios yet, the first of which will be at page `first`; as many as there is `room` for.
    pub(super) fn new(inode: &Arc<Inode>, first: u64, room: Room<'_>) -> Self {
        let (counted_pages, staged) = room.leave();
        let (inode, folios) = (Arc::clone(inode), SmallVec::new());
        let (will_be_stored, expected_bytes) = (false, 0);
        Self { inode, first, folios, staged, counted_pages, will_be_stored, expected_bytes }
    }

    /// Whether there is room for one more folio of a file whose unit has `folio_pages` pages.
    pub(super) fn has_room(&self, folio_pages: u64) -> bool {
        let staged_pages = self.staged.as_ref().map_or(u64::MAX, |staged| staged.pages() as u64);
        let most = self.counted_pages.min(staged_pages);
        self.is_empty() || self.pages() + folio_pages <= most
    }

    /// Where the bytes of a folio of the run are read to.
    fn target(&self, number: usize, id: FolioId) -> *mut u8 {
        match &self.staged {
            Some(staged) => staged.address(number),
            None => self.inode.memory.arena.address(id),
        }
    }

    /// Takes the next folio over, with its lock and its reference.
    pub(super) fn push(&mut self, locked: Locked<'_>) {
        debug_assert_eq!(locked.lock.index(), self.first + self.pages());
        self.folios.push(locked.leave());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.folios.is_empty()
    }

    /// Whether a folio that finds `seen` at its place can be the next one: the transfer that reads
    /// the others reads it, too.
    pub(super) fn can_go_on_with(&self, seen: Entry) -> bool {
        let Some(last) = self.folios.last() else { return true };
        self.inode.store.continues(self.inode.memory.folio(*last), seen)
    }

    /// Page index of the first folio.
    pub(super) fn first_page(&self) -> u64 {
        self.first
    }

    /// Pages of all folios.
    pub(super) fn pages(&self) -> u64 {
        (self.folios.len() as u64) << self.inode.mapping.order()
    }

    /// The folios.
    pub(super) fn folios(&self) -> &[FolioId] {
        &self.folios
    }

    /// Gives the run to `queue`; or finishes it at once, if the backing has nothing of it.
    pub(super) fn start<T>(
        mut self,
        queue: &mut Queue<'_, (ReadIo, T)>,
        tag: T,
        finished: impl FnOnce(ReadIo, T),
    ) {
        if let Some(staged) = &mut self.staged {
            staged.shrink(self.folios.len());
        }
        let unused_pages = self.counted_pages.saturating_sub(self.pages());
        self.counted_pages -= unused_pages;
        self.inode.end_read(unused_pages);
        self.expected_bytes = self.inode.bytes_to_read(&self.folios);
        if self.expected_bytes == 0 {
            self.inode.memory.counters.add(Counter::MissWithoutRead, self.folios.len() as u64);
            return finished(self, tag);
        }
        if self.staged.is_some() {
            self.inode.memory.region_reads.note_read(self.pages());
        }
        self.inode.memory.counters.add(Counter::ReadRequest, 1);
        let targets = self.folios.iter().enumerate().map(|(number, id)| self.target(number, *id));
        let transfer = self.inode.read_transfer(&self.folios, targets);
        // SAFETY: IO-1: frames of the arena, which stays mapped (FRAMES-2), or staging memory; the
        // run, which the queue keeps until it is complete, holds that, and the folios' locks and
        // references, and they are not uptodate: nobody else writes them, readers go through
        // `sys::copy`.
        unsafe { queue.push(transfer, (self, tag)) }
    }

    /// Reads the run on this thread and gives its first folio, locked.
    pub(super) fn read_first<'a>(self, inode: &'a Inode) -> Result<Locked<'a>> {
        let folios = &inode.memory.folios;
        let mut first = None;
        let mut outcome = Ok(());
        let mut finish = |run: ReadIo, answer| {
            outcome = run.finish(folios, answer, |locked| first = first.take().or(Some(locked)));
        };
        let mut queue = inode.engine.queue();
        self.start(&mut queue, (), |run, ()| finish(run, Ok(0)));
        queue.complete(1, |(run, ()), answer| finish(run, answer));
        drop(queue);
        outcome.map(|()| first.expect("a run has a folio, and a good one gives it"))
    }

    /// Ends the fill: `answer` is what the transfer came to, bytes from the first on. Each folio
    /// whose bytes are there becomes READY and goes to `visit`, locked. From the first one on that
    /// is not there they leave the table again.
    ///
    /// # Errors
    /// The transfer's, or the backing has fewer bytes than it had.
    pub(super) fn finish<'a>(
        mut self,
        folios: &'a Folios,
        answer: std::result::Result<usize, IoError>,
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
            // A frame is better copied by the reader while it is warm.
            let group = if self.staged.is_some() { INSTALLED_TOGETHER } else { 1 };
            let group_end = self.folios.len().min(done + group);
            let (good_end, judged) = self.judge(folios, done..group_end, bytes);
            // Pages that raw writers see already stay, whatever becomes of the rest.
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

    /// How many folios of the group, which begins with `group.start`, have their bytes, of `bytes`
    /// that the transfer brought: the number behind the last one, and what is the matter with that.
    /// The bytes behind the end of the backing are zeros then.
    fn judge(&self, folios: &Folios, group: Range<usize>, bytes: u64) -> (usize, Result<()>) {
        let inode = &self.inode;
        let folio_bytes = inode.mapping.folio_bytes();
        // The zeros below are this thread's, whoever inserted the folios.
        inode.mapping.begin_fill();
        for number in group.clone() {
            let offset = number as u64 * folio_bytes;
            let part = |bytes: u64| bytes.saturating_sub(offset).min(folio_bytes);
            let (valid, expected) = (part(bytes), part(self.expected_bytes));
            let position = self.first * PAGE_BYTES + offset;
            // Fewer bytes than there were are an error, unless we cut the file ourselves just now:
            // a cut sets the length first.
            let visible = inode.mapping.len_bytes().saturating_sub(position);
            if valid < expected.min(visible) {
                let folio = inode.memory.folio(self.folios[number]);
                let error = inode.store.cut_short(folio, position, expected.min(visible), valid);
                return (number, Err(error));
            }
            let locked = Locked::adopt(folios, self.folios[number]);
            let start = self.target(number, self.folios[number]);
            let checked = inode.check_filled(&locked.folio, start);
            let _still_locked = locked.leave();
            if let Err(error) = checked {
                return (number, Err(error));
            }
            let behind = start.wrapping_add(valid as usize);
            // SAFETY: inside the folio's frame, or its part of the staging memory, which only the
            // holder of its lock writes: we.
            unsafe { copy::zero(behind, (folio_bytes - valid) as usize) };
        }
        (group.end, Ok(()))
    }

    /// Puts staged folios in their places; how many are there then.
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
