//! Runs: adjacent folios that one transfer fills, the second step of a fill (FILL-T1, FILL-T2).
//!
//! `claim.rs` creates a run by claiming its folios. It is read on its thread ([`ReadIo::read`]) or
//! through a [`FillQueue`](super::FillQueue), and ended by [`ReadIo::finish`] on the thread that
//! sees the transfer complete. Until then it owns the lock of each folio and one reference, which
//! reserve the frames for the kernel (IO-1) even if all other users are gone. A run that fails or
//! is dropped removes its folios from the table.
//!
//! # Safety
//! Passes frames to the engine; the run owns them until the engine returns it.
#![allow(unsafe_code)]

use crate::error::Result;
use crate::inode::{ClearedBefore, Inode};
use crate::io::{Operation, Pieces, Queue, Transfer};
use crate::maps::region::Staged;
use crate::page::{Entry, Flag, FolioId, FolioRef, Folios, LockedFolio};
use crate::stats::Counter;
use smallvec::SmallVec;
use std::sync::Arc;

/// Locked folio, with a reference. The lock is released before the reference: a pattern that takes
/// it apart names `folio` first, because the last name of a pattern is dropped first.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    pub(crate) lock: LockedFolio<'a>,
    pub(crate) folio: FolioRef<'a>,
    /// Set if the folio was resident before the lookup.
    pub(crate) was_resident: bool,
}

impl<'a> Locked<'a> {
    pub(crate) fn is_uptodate(&self) -> bool {
        self.lock.flags.get(Flag::Uptodate)
    }

    /// Keeps the folio locked and referenced, for [`Locked::adopt`] on any thread.
    pub(crate) fn detach(self) -> FolioId {
        self.lock.detach_lock();
        self.folio.into_id()
    }

    /// Takes over the lock and the reference from [`Locked::detach`].
    pub(crate) fn adopt(folios: &'a Folios, id: FolioId) -> Self {
        let folio = folios.adopt(id);
        Self { lock: folio.adopt_lock(), folio, was_resident: false }
    }
}

/// Run of adjacent folios that one transfer fills.
#[derive(Debug)]
pub(crate) struct ReadIo {
    pub(super) inode: Arc<Inode>,
    pub(super) first: u64,
    pub(super) folios: SmallVec<[FolioId; 1]>,
    /// Staging memory, for a file in a region: holds the bytes until whole pages are installed.
    pub(super) staged: Option<Staged>,
    /// Pages counted as in read (`Load::begin_read`).
    counted_pages: u64,
    /// Set if raw stores to its pages are expected soon.
    pub(crate) will_be_stored: bool,
    /// Bytes that the backing had for the run when it was started. It may have grown since.
    pub(super) expected_bytes: u64,
    pub(super) cleared_before: ClearedBefore,
}

/// Resources of a fill other than frames: a share of the pages that its device may have in reads,
/// and staging memory for a file in a region. They are taken in this order, before frames and folio
/// locks, so that a thread that waits for them holds nothing that other threads wait for.
#[derive(Debug)]
pub(crate) struct Room<'h> {
    pub(super) inode: &'h Inode,
    /// Pages counted as in read; 0 for a folio that is not expected to be read.
    pub(super) pages: u64,
    pub(super) staged: Option<Staged>,
}

impl Room<'_> {
    /// Counts `pages` as in read if none are counted yet: they are read after all.
    pub(super) fn of_at_least(mut self, pages: u64) -> Self {
        if self.pages < pages {
            self.inode.load.begin_read_at_once(pages - self.pages);
            self.pages = pages;
        }
        self
    }

    /// Transfers the resources to a run: the number of counted pages, and the staging memory.
    fn into_run(mut self) -> (u64, Option<Staged>) {
        (std::mem::take(&mut self.pages), self.staged.take())
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.inode.load.end_read(self.pages);
    }
}

impl ReadIo {
    /// Creates a run without folios that starts at page `first` and takes as many as `room` allows.
    pub(crate) fn new(inode: &Arc<Inode>, first: u64, room: Room<'_>) -> Self {
        let (counted_pages, staged) = room.into_run();
        Self {
            inode: Arc::clone(inode),
            first,
            folios: SmallVec::new(),
            staged,
            counted_pages,
            will_be_stored: false,
            expected_bytes: 0,
            cleared_before: ClearedBefore::default(),
        }
    }

    /// Returns `true` if the run can take one more folio of `folio_pages` pages.
    pub(super) fn has_room(&self, folio_pages: u64) -> bool {
        let staged_pages = self.staged.as_ref().map_or(u64::MAX, |staged| staged.pages() as u64);
        let most = self.counted_pages.min(staged_pages);
        self.folios.is_empty() || self.pages() + folio_pages <= most
    }

    /// Makes room for up to `pages` more pages, without waiting.
    pub(crate) fn make_room(&mut self, pages: u64) {
        let least = 1 << self.inode.mapping.order();
        let more_pages = self.inode.load.try_begin_read(least, pages).unwrap_or(0);
        self.counted_pages += more_pages;
        if let Some(staged) = &mut self.staged {
            staged.extend(more_pages as usize);
        }
    }

    /// Appends a folio, with its lock and its reference.
    pub(crate) fn push(&mut self, locked: Locked<'_>) {
        debug_assert_eq!(locked.lock.index(), self.end_page());
        self.folios.push(locked.detach());
    }

    /// Returns `true` if the folio at an Entry `seen` can be read by the same transfer as the
    /// others.
    pub(super) fn can_go_on_with(&self, seen: Entry) -> bool {
        let Some(last) = self.folios.last() else { return true };
        self.inode.store.continues(self.inode.memory.folio(*last), seen)
    }

    pub(crate) fn inode(&self) -> Arc<Inode> {
        Arc::clone(&self.inode)
    }

    pub(crate) fn first_page(&self) -> u64 {
        self.first
    }

    /// Returns the first page after the last folio.
    pub(crate) fn end_page(&self) -> u64 {
        self.first + self.pages()
    }

    pub(crate) fn pages(&self) -> u64 {
        (self.folios.len() as u64) << self.inode.mapping.order()
    }

    pub(crate) fn folios(&self) -> &[FolioId] {
        &self.folios
    }

    /// Returns the address that the bytes of a folio are read to.
    pub(super) fn target(&self, number: usize, id: FolioId) -> *mut u8 {
        match &self.staged {
            Some(staged) => staged.address(number),
            None => self.inode.memory.arena.address(id),
        }
    }

    /// FILL-T1: returns the transfer that fills the run; `None` if the storage has no bytes of it.
    fn transfer(&mut self) -> Option<Transfer> {
        self.give_back_unused();
        let (inode, counters) = (&*self.inode, &self.inode.memory.counters);
        self.cleared_before = inode.clearing.cleared_before();
        let (first, folio_bytes) =
            (inode.memory.folio(self.folios[0]), inode.mapping.folio_bytes());
        let length_bytes = self.folios.len() as u64 * folio_bytes;
        let Some(source) = inode.store.source(first, length_bytes) else {
            counters.add(Counter::MissWithoutRead, self.folios.len() as u64);
            return None;
        };
        self.expected_bytes = source.length_bytes;
        if self.staged.is_some() {
            inode.memory.region_reads.note_read(self.pages());
        }
        counters.add(Counter::ReadRequest, 1);
        let targets = self.folios.iter().enumerate().map(|(number, id)| self.target(number, *id));
        Some(Transfer {
            backing: source.backing,
            operation: Operation::Read,
            position_bytes: source.position_bytes,
            // Whole folios: the end of the storage may move until they are read.
            pieces: Pieces::of(length_bytes, targets.map(|start| (start, folio_bytes))),
        })
    }

    /// Gives back the room for folios that were not claimed.
    fn give_back_unused(&mut self) {
        if let Some(staged) = &mut self.staged {
            staged.shrink(self.folios.len());
        }
        let unused_pages = self.counted_pages.saturating_sub(self.pages());
        self.counted_pages -= unused_pages;
        self.inode.load.end_read(unused_pages);
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
        for id in self.folios.drain(..) {
            let folios = &inode.memory.folios;
            let Locked { folio, lock, .. } = Locked::adopt(folios, id);
            drop(inode.remove_unfilled(&folio, &lock));
        }
        inode.load.end_read(self.counted_pages);
    }
}
