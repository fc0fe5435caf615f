//! Write-outs of memory files to the swap, when memory is short.
//!
//! An extension of [`WriteBatch`]: a folio goes from dirty to writing, a transfer is in flight,
//! both end. But a page has no fixed position in the swap. So folios that are evicted together,
//! however far apart in their file, go to adjacent slots, in one transfer of up to 1 MiB, and
//! folios that are adjacent in the file can be read back in one. A folio gets its slot when its
//! write-out has succeeded. After a failure the slot is freed, and the folio stays dirty.

use super::batch::{WriteBatch, WriteIo, WriteVictim};
use super::inode::pages_of_still;
use super::lsns::NO_LSN;
use crate::error::{Error, write_error};
use crate::io::{Operation, RUN_PAGES_MAX, Transfer};
use crate::page::{Flag, FolioRef};
use crate::stats::Counter;
use crate::swap::{GROUP_BYTES, SlotRun, Swap};
use smallvec::SmallVec;
use std::io;
use std::sync::Arc;

impl<'a> WriteBatch<'a> {
    /// Starts to swap out `folios`, which are in the order of their positions. Busy ones are moved
    /// to `busy`.
    pub(super) fn swap_out_all(&mut self, folios: Vec<FolioRef<'a>>, busy: &mut Vec<FolioRef<'a>>) {
        let mut run: SmallVec<[WriteVictim<'a>; 1]> = SmallVec::new();
        let mut run_pages = 0;
        for folio in folios {
            let pages = folio.folio().pages();
            if run_pages + pages > RUN_PAGES_MAX {
                self.swap_run(std::mem::take(&mut run));
                run_pages = 0;
            }
            if let Some(victim) = self.begin_swap_out(folio, busy) {
                run.push(victim);
                run_pages += pages;
            }
        }
        self.swap_run(run);
    }

    fn begin_swap_out(
        &mut self,
        folio: FolioRef<'a>,
        busy: &mut Vec<FolioRef<'a>>,
    ) -> Option<WriteVictim<'a>> {
        let Some(locked) = folio.try_lock() else {
            busy.push(folio);
            return None;
        };
        let inode = self.inode;
        if locked.owner() != inode.address() {
            return None;
        }
        let folios = &inode.memory.folios;
        // A memory file has no gate.
        let in_flight = inode.dirty.begin(folios, folio.id(), NO_LSN).ok()?;
        locked.set_slot(0);
        if locked.flags.get(Flag::Allocated) {
            let filled = inode.fill_with_zeros(&folio, &locked);
            debug_assert!(filled.is_ok(), "a folio of the arena takes no memory to fill");
        }
        drop(locked);
        self.begun_folios += 1;
        Some(WriteVictim { folio, in_flight, copy: None })
    }

    /// Starts to write folios whose write-out has begun, as many in one transfer as there are
    /// adjacent slots.
    pub(super) fn swap_run(&mut self, folios: SmallVec<[WriteVictim<'a>; 1]>) {
        let Some(swap) = self.slots else { unreachable!("a batch that swaps out has a swap") };
        let mut left_pages: u64 = folios.iter().map(|victim| victim.folio.folio().pages()).sum();
        let mut left = folios.into_iter().peekable();
        while let Some(first) = left.peek() {
            let least = first.folio.folio().pages() as u32;
            let Some(slots) = self.take_slots(swap, left_pages as u32, least) else {
                // Only this folio may be too large for the free slots: those after it may need
                // fewer.
                let error = why_no_slots(swap, least.into());
                let folios = left.next().into_iter().collect();
                left_pages -= u64::from(least);
                let run = WriteIo { folios, position: 0, length: 0, slots: None, copies: None };
                self.end(run, Some(error));
                continue;
            };
            let mut run = SmallVec::new();
            let mut pages = 0;
            while let Some(victim) =
                left.next_if(|next| pages + next.folio.folio().pages() <= u64::from(slots.pages))
            {
                pages += victim.folio.folio().pages();
                run.push(victim);
            }
            swap.give_back(slots.first + pages as u32, slots.pages - pages as u32);
            left_pages -= pages;
            self.start_swap_out(swap, run, SlotRun { first: slots.first, pages: pages as u32 });
        }
    }

    /// Takes adjacent slots for a folio of `least_pages`, and up to `wanted_pages` for the folios
    /// after it. Slots are charged by the page, and may be free only in pieces: for a larger folio
    /// another group of slots is added, if memory for it is available.
    fn take_slots(&self, swap: &Swap, wanted_pages: u32, least_pages: u32) -> Option<SlotRun> {
        let arena = &self.inode.memory.arena;
        let found = swap.take(wanted_pages, least_pages);
        if found.is_some() || !swap.wants_adjacent_slots(least_pages) || !arena.charge(GROUP_BYTES)
        {
            return found;
        }
        if !swap.grow() {
            arena.uncharge(GROUP_BYTES);
        }
        swap.take(wanted_pages, least_pages)
    }

    /// Starts the transfer of folios to their slots.
    fn start_swap_out(
        &mut self,
        swap: &Swap,
        folios: SmallVec<[WriteVictim<'a>; 1]>,
        slots: SlotRun,
    ) {
        let inode = self.inode;
        let mut slot = slots.first;
        for victim in &folios {
            for page in pages_of_still(&victim.folio, victim.start(inode)) {
                swap.seal(slot, page);
                slot += 1;
            }
        }
        let position = Swap::position_bytes(slots.first);
        let length = Swap::position_bytes(slots.pages);
        inode.memory.counters.add(Counter::WriteRequest, 1);
        let run = WriteIo { folios, position, length, slots: Some(slots), copies: None };
        let (backing, pieces) = (Arc::clone(swap.backing()), run.pieces(inode));
        let transfer =
            Transfer { backing, operation: Operation::Write, position_bytes: position, pieces };
        self.join(transfer, run);
    }

    /// Assigns the slots of a completed run to its folios, or frees them after a failure.
    pub(super) fn assign_slots(&self, run: &WriteIo<'a>, is_written: bool) {
        let (Some(swap), Some(slots)) = (self.slots, run.slots) else { return };
        swap.note_written(slots, is_written);
        if !is_written {
            return swap.give_back(slots.first, slots.pages);
        }
        let mut slot = slots.first;
        for WriteVictim { folio, .. } in &run.folios {
            // No other thread reads it while the write-out is in flight (rule 4 of `page`).
            folio.folio().set_slot(slot);
            slot += folio.folio().pages() as u32;
        }
        self.inode.memory.counters.add(Counter::SwapOut, u64::from(slots.pages));
    }
}

/// Returns the reason why there are no adjacent slots: all are taken, or the storage refuses the
/// free ones.
#[cold]
fn why_no_slots(swap: &Swap, pages: u64) -> Error {
    let refusal = swap.answers().last_refusal.filter(|_| swap.has_free_slots());
    refusal.unwrap_or_else(|| no_slots(swap, pages))
}

#[cold]
fn no_slots(swap: &Swap, pages: u64) -> Error {
    let source = io::Error::new(io::ErrorKind::StorageFull, "the swap is full (swap_max)");
    write_error(swap.name(), 0..Swap::position_bytes(pages as u32), source)
}
