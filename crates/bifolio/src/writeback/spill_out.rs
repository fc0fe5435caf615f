//! Write-outs of a memory file: to the spill, for lack of memory.
//!
//! A part of [`WriteBatch`], and much like it: a folio goes from dirty to writing, a transfer is in
//! flight, both end. But a page has no place of its own in the spill. So folios that leave
//! together, however far apart in their file, go to slots in a row, in one transfer of up to 1 MiB,
//! and those that are neighbours in the file can come back in one. A slot becomes the folio's when
//! its write-out has ended well; one that failed is given back, and the folio is dirty as before.

use super::batch::{Leaving, Run, WriteBatch};
use super::inode::pages_of_still;
use crate::folio::{Flag, FolioRef};
use crate::io::{IoError, Operation, RUN_PAGES_MAX, Transfer};
use crate::spill::{SlotRun, Spill};
use crate::stats::Counter;
use smallvec::SmallVec;
use std::io;
use std::sync::Arc;

impl<'a> WriteBatch<'a> {
    /// Starts to spill `folios`, which are in the order of their places; those that are busy go to
    /// `busy`.
    pub(super) fn spill_all(&mut self, folios: Vec<FolioRef<'a>>, busy: &mut Vec<FolioRef<'a>>) {
        let mut run: SmallVec<[Leaving<'a>; 1]> = SmallVec::new();
        let mut run_pages = 0;
        for folio in folios {
            let pages = folio.folio().pages();
            if run_pages + pages > RUN_PAGES_MAX {
                self.spill_run(std::mem::take(&mut run));
                run_pages = 0;
            }
            if let Some(leaving) = self.begin_spilling(folio, busy) {
                run.push(leaving);
                run_pages += pages;
            }
        }
        self.spill_run(run);
    }

    fn begin_spilling(
        &mut self,
        folio: FolioRef<'a>,
        busy: &mut Vec<FolioRef<'a>>,
    ) -> Option<Leaving<'a>> {
        let Some(locked) = folio.try_lock() else {
            busy.push(folio);
            return None;
        };
        let inode = self.inode;
        if locked.owner() != inode.address() {
            return None;
        }
        let in_flight = inode.dirty.begin(&inode.memory.folios, folio.id())?;
        locked.set_slot(0);
        if locked.flags.get(Flag::Allocated) {
            let filled = inode.fill_with_zeros(&folio, &locked);
            debug_assert!(filled.is_ok(), "a folio of the arena takes no memory to fill");
        }
        drop(locked);
        self.begun_folios += 1;
        Some(Leaving { folio, in_flight, copy: None })
    }

    /// Starts to write folios whose write-out has begun, as many in one transfer as there are slots
    /// in a row.
    pub(super) fn spill_run(&mut self, folios: SmallVec<[Leaving<'a>; 1]>) {
        let Some(spill) = self.inode.spill() else { unreachable!("who spills has a spill") };
        let mut left_pages: u64 = folios.iter().map(|leaving| leaving.folio.folio().pages()).sum();
        let mut left = folios.into_iter().peekable();
        while let Some(first) = left.peek() {
            let least = first.folio.folio().pages() as u32;
            let Some(slots) = spill.take(left_pages as u32, least) else {
                let error = Arc::new(no_slots(spill, left_pages));
                let run = Run {
                    folios: left.collect(),
                    position: 0,
                    length: 0,
                    slots: None,
                    copies: None,
                };
                return self.end(run, Some(error));
            };
            let mut run = SmallVec::new();
            let mut pages = 0;
            while let Some(leaving) =
                left.next_if(|next| pages + next.folio.folio().pages() <= u64::from(slots.pages))
            {
                pages += leaving.folio.folio().pages();
                run.push(leaving);
            }
            spill.give_back(slots.first + pages as u32, slots.pages - pages as u32);
            left_pages -= pages;
            self.start_spilling(spill, run, SlotRun { first: slots.first, pages: pages as u32 });
        }
    }

    /// Starts the transfer of folios to slots of their own.
    fn start_spilling(
        &mut self,
        spill: &Spill,
        folios: SmallVec<[Leaving<'a>; 1]>,
        slots: SlotRun,
    ) {
        let inode = self.inode;
        let mut slot = slots.first;
        for leaving in &folios {
            for page in pages_of_still(&leaving.folio, leaving.start(inode)) {
                spill.seal(slot, page);
                slot += 1;
            }
        }
        let position = Spill::position_bytes(slots.first);
        let length = Spill::position_bytes(slots.pages);
        inode.memory.counters.add(Counter::WriteRequest, 1);
        let run = Run { folios, position, length, slots: Some(slots), copies: None };
        let (backing, pieces) = (Arc::clone(spill.backing()), run.pieces(inode));
        let transfer =
            Transfer { backing, operation: Operation::Write, position_bytes: position, pieces };
        self.join(transfer, run);
    }

    /// The slots of a run whose transfer has ended become its folios', or are free again.
    pub(super) fn settle_slots(&self, run: &Run<'a>, is_written: bool) {
        let (Some(spill), Some(slots)) = (self.inode.spill(), run.slots) else { return };
        spill.note_written(slots, is_written);
        if !is_written {
            return spill.give_back(slots.first, slots.pages);
        }
        let mut slot = slots.first;
        for Leaving { folio, .. } in &run.folios {
            // Nobody else looks at it while the write-out is in flight (rule 4 of `folio`).
            folio.folio().set_slot(slot);
            slot += folio.folio().pages() as u32;
        }
        self.inode.memory.counters.add(Counter::SpillOut, u64::from(slots.pages));
    }
}

#[cold]
fn no_slots(spill: &Spill, pages: u64) -> IoError {
    IoError {
        file: spill.name().to_owned(),
        operation: Operation::Write,
        position_bytes: 0,
        length_bytes: Spill::position_bytes(pages as u32),
        source: io::Error::new(io::ErrorKind::StorageFull, "the spill is full (spill_bytes_max)"),
    }
}
