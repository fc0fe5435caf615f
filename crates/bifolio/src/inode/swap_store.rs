//! The store of a memory file: slots of the cache's swap, which choose a place for folios that are
//! written when memory is short.
//!
//! A page has no fixed position in the swap. So folios that are evicted together, however far apart
//! in their file, go to adjacent slots, in one transfer of up to 1 MiB, and folios that are
//! adjacent in the file can be read back in one. A folio gets its slot when its write-out has
//! succeeded. After a failure the slot is freed, and the folio stays dirty.

use super::{Inode, Place, Source, pages_of_still};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::io::DirectBacking;
use crate::memory::{Arena, Shadow};
use crate::page::{Entry, Folio, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::{Counter, Counters};
use crate::swap::{GROUP_BYTES, SlotRun, Swap, position_bytes};
use crate::writeback::{WriteIo, WriteVictim};
use std::io;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct SwapStore {
    name: String,
    /// Swap that folios go to when memory is short.
    swap: Option<Arc<Swap>>,
}

impl SwapStore {
    pub(super) fn new(name: String, swap: Option<Arc<Swap>>) -> Self {
        Self { name, swap }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the swap whose slots the pages have, if any.
    pub(super) fn slots(&self) -> Option<&Arc<Swap>> {
        self.swap.as_ref()
    }

    fn swap(&self) -> &Swap {
        self.swap.as_ref().expect("folios are written only if there is a swap")
    }

    /// Returns the storage of the swap that folios are written to.
    pub(super) fn backing(&self) -> Arc<dyn DirectBacking> {
        Arc::clone(self.swap().backing())
    }

    /// Transfers the slot in `seen` to the folio that was just inserted there, or counts the pages
    /// of a new one.
    pub(super) fn take_over(&self, locked: &LockedFolio<'_>, seen: Entry) {
        let Some(swap) = &self.swap else { return };
        match seen.as_value() {
            Some(slot) => locked.set_slot(slot as u32),
            None => swap.note_new_pages(locked.pages()),
        }
    }

    /// Returns the slots of a folio and of those after it.
    pub(super) fn source(&self, folio: &Folio, length_bytes: u64) -> Option<Source> {
        let swap = self.swap.as_ref().filter(|_| folio.slot() != 0)?;
        let position_bytes = position_bytes(folio.slot());
        Some(Source { backing: Arc::clone(swap.backing()), position_bytes, length_bytes })
    }

    /// Returns the Entry stored at the head of a unit when a clean folio is evicted, with its slot
    /// and shadow.
    pub(super) fn evicted_entry(
        &self,
        locked: &LockedFolio<'_>,
        page: u64,
        shadow: Option<Shadow>,
    ) -> Entry {
        let slot = locked.slot();
        if slot == 0 {
            return Entry::HOLE;
        }
        if let (Some(swap), Some(shadow)) = (&self.swap, shadow) {
            swap.words.set_shadow(slot + page as u32, shadow);
        }
        Entry::value(u64::from(slot) + page)
    }

    /// Checks the bytes at `start` that a locked folio was just filled with (SWAP-4).
    pub(super) fn check_filled(
        &self,
        folio: &FolioRef<'_>,
        start: *const u8,
        counters: &Counters,
    ) -> Result<()> {
        let descriptor = folio.folio();
        let Some(swap) = self.swap.as_ref().filter(|_| descriptor.slot() != 0) else {
            return Ok(());
        };
        let pages = pages_of_still(folio, start);
        for ((slot, page), index) in (descriptor.slot()..).zip(pages).zip(descriptor.index()..) {
            swap.words.check(slot, page).map_err(|mismatch| {
                let (position, swap_position) = (index * PAGE_BYTES, position_bytes(slot));
                let text = format!(
                    "the page at position {position} is corrupt in the swap ({}, position \
                     {swap_position}): {mismatch}",
                    swap.name()
                );
                let error = Error::new(ErrorKind::SwapCorrupt, text).in_file(self.name.clone());
                error.at(position..position + PAGE_BYTES)
            })?;
        }
        counters.add(Counter::SwapIn, descriptor.pages());
        Ok(())
    }

    /// Returns as many adjacent slots as there are for folios, and the number of folios that they
    /// are for. Only the first may be too large for the free slots: those after it may need fewer.
    pub(super) fn place(
        &self,
        folios: &[WriteVictim<'_>],
        arena: &Arena,
    ) -> Result<(Place, usize)> {
        let swap = self.swap();
        let pages_of = |victim: &WriteVictim<'_>| victim.folio.folio().pages() as u32;
        let (wanted, least) = (folios.iter().map(pages_of).sum(), pages_of(&folios[0]));
        let Some(slots) = take_slots(swap, wanted, least, arena) else {
            return Err(why_no_slots(swap, least.into()));
        };
        let (mut pages, mut count) = (0, 0);
        for victim in folios {
            if pages + pages_of(victim) > slots.pages {
                break;
            }
            pages += pages_of(victim);
            count += 1;
        }
        swap.give_back(slots.first + pages, slots.pages - pages);
        let place = Place {
            position_bytes: position_bytes(slots.first),
            length_bytes: position_bytes(pages),
            slots: Some(SlotRun { first: slots.first, pages }),
        };
        Ok((place, count))
    }

    /// Computes the checksums of pages that are about to be written (SWAP-4).
    pub(super) fn seal(&self, run: &WriteIo<'_>, inode: &Inode) {
        let swap = self.swap();
        let Some(slots) = run.place.slots else { return };
        let victims = run.folios.iter();
        let pages = victims.flat_map(|it| pages_of_still(&it.folio, it.start(inode)));
        (slots.first..).zip(pages).for_each(|(slot, page)| swap.words.seal(slot, page));
    }

    pub(super) fn release(&self, place: Place) {
        let Some(slots) = place.slots else { return };
        self.swap().slots.note_written(slots, false);
        self.swap().give_back(slots.first, slots.pages);
    }

    /// Assigns the slots of a write-out that has ended to its folios, or frees them if it failed.
    pub(super) fn note_end(
        &self,
        place: Place,
        folios: &[WriteVictim<'_>],
        error: Option<&Error>,
        counters: &Counters,
    ) {
        let swap = self.swap();
        swap.note_end(error);
        let Some(slots) = place.slots.filter(|_| error.is_none()) else {
            return self.release(place);
        };
        swap.slots.note_written(slots, true);
        let mut slot = slots.first;
        for WriteVictim { folio, .. } in folios {
            // No other thread reads it while the write-out is in flight (rule 4 of `page`).
            folio.folio().set_slot(slot);
            slot += folio.folio().pages() as u32;
        }
        counters.add(Counter::SwapOut, u64::from(slots.pages));
    }
}

/// Takes adjacent slots for a folio of `least_pages`, and up to `wanted_pages` for the folios after
/// it. Slots are charged by the page, and may be free only in pieces: for a larger folio another
/// group of slots is added, if memory for it is available.
fn take_slots(swap: &Swap, wanted_pages: u32, least_pages: u32, arena: &Arena) -> Option<SlotRun> {
    let found = swap.slots.take(wanted_pages, least_pages);
    if found.is_some() || !swap.wants_adjacent_slots(least_pages) || !arena.charge(GROUP_BYTES) {
        return found;
    }
    if !swap.slots.grow() {
        arena.uncharge(GROUP_BYTES);
    }
    swap.slots.take(wanted_pages, least_pages)
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
    write_error(swap.name(), 0..position_bytes(pages as u32), source)
}
