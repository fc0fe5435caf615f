//! The store of a memory file: slots of the cache's swap, which choose a place for folios that are
//! written when memory is short.
//!
//! A page has no fixed position in the swap, so folios that are evicted together go to adjacent
//! slots. A folio gets its slot when its write-out has succeeded.
//! # Safety
//! Creates slices of the bytes of folios that the caller has locked, or whose write-out is in
//! flight.
#![allow(unsafe_code)]

use super::swap::{GROUP_BYTES, SlotRun, Swap, position_bytes};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::memory::{Arena, Shadow};
use crate::page::{Entry, Flag, Folio, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::{Counter, Counters};
use crate::sync::Ordering;
use std::io;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct SwapStore {
    pub(super) name: String,
    pub(super) swap: Option<Arc<Swap>>,
}

impl SwapStore {
    pub(super) fn swap(&self) -> &Swap {
        self.swap.as_ref().expect("folios are written only if there is a swap")
    }

    /// Transfers the slot in `seen` to the folio that was just inserted there, or counts the pages
    /// of a new one.
    pub(super) fn take_over(&self, locked: &LockedFolio<'_>, seen: Entry) {
        let Some(swap) = &self.swap else { return };
        match seen.as_value() {
            Some(slot) => locked.set_slot(slot as u32),
            None => drop(swap.pages.fetch_add(locked.pages(), Ordering::Relaxed)),
        }
    }

    /// Returns the Entry that a folio leaves when it is evicted: its slot, in which the shadow is
    /// recorded, or a hole.
    pub(super) fn entry_after(&self, locked: &LockedFolio<'_>, shadow: Option<Shadow>) -> Entry {
        let slot = locked.slot();
        if slot == 0 {
            return Entry::HOLE;
        }
        if let (Some(swap), Some(shadow)) = (&self.swap, shadow) {
            swap.words.set_shadow(slot, shadow);
        }
        Entry::value(slot.into())
    }

    /// Compares each page that was read from the swap with the checksum of its slot,
    /// before the folio is READY.
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
                    &swap.name
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
    pub(super) fn place<'f>(
        &self,
        first: &Folio,
        folios: impl Iterator<Item = &'f Folio> + Clone,
        arena: &Arena,
    ) -> Result<(SlotRun, usize)> {
        let swap = self.swap();
        let pages_of = |folio: &Folio| folio.pages() as u32;
        let (wanted, least) = (folios.clone().map(pages_of).sum(), pages_of(first));
        let Some(slots) = take_slots(swap, wanted, least, arena) else {
            return Err(why_no_slots(swap, least));
        };
        let (mut pages, mut count) = (0, 0);
        for folio in folios {
            if pages + pages_of(folio) > slots.pages {
                break;
            }
            pages += pages_of(folio);
            count += 1;
        }
        swap.give_back(slots.first + pages, slots.pages - pages);
        Ok((SlotRun { first: slots.first, pages }, count))
    }

    /// Computes the checksums of folios that are about to be written to slots (SWAP-4), each from
    /// its bytes at an address.
    pub(super) fn seal<'f, 'r: 'f>(
        &self,
        slots: SlotRun,
        folios: impl Iterator<Item = (&'f FolioRef<'r>, *mut u8)>,
    ) {
        let swap = self.swap();
        let pages = folios.flat_map(|(folio, start)| pages_of_still(folio, start));
        (slots.first..).zip(pages).for_each(|(slot, page)| swap.words.seal(slot, page));
    }

    pub(super) fn release(&self, slots: SlotRun) {
        self.swap().slots.note_written(slots, false);
        self.swap().give_back(slots.first, slots.pages);
    }

    /// Assigns the slots of a write-out that has ended to its folios, or frees them if it failed.
    pub(super) fn note_end<'f>(
        &self,
        slots: Option<SlotRun>,
        folios: impl Iterator<Item = &'f Folio>,
        error: Option<&Error>,
        counters: &Counters,
    ) {
        let swap = self.swap();
        swap.note_end(error);
        let Some(slots) = slots.filter(|_| error.is_none()) else {
            return slots.into_iter().for_each(|slots| self.release(slots));
        };
        swap.slots.note_written(slots, true);
        let mut slot = slots.first;
        for folio in folios {
            // No other thread reads it while the write-out is in flight (rule 4 of `page`).
            folio.set_slot(slot);
            slot += folio.pages() as u32;
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
fn why_no_slots(swap: &Swap, pages: u32) -> Error {
    let refusal = swap.answers().last_refusal.filter(|_| swap.has_free_slots());
    refusal.unwrap_or_else(|| {
        let source = io::Error::new(io::ErrorKind::StorageFull, "the swap is full (swap_max)");
        write_error(&swap.name, 0..position_bytes(pages), source)
    })
}

/// Returns the bytes of a folio at `start`, page by page. No thread may change them: the folio is
/// locked and not yet uptodate, or a write-out of it is in flight.
fn pages_of_still<'a>(
    folio: &'a FolioRef<'_>,
    start: *const u8,
) -> impl Iterator<Item = &'a [u8; PAGE_BYTES as usize]> {
    let descriptor = folio.folio();
    let is_writing = descriptor.flags.write_state().is_writing();
    debug_assert!(is_writing || !descriptor.flags.get(Flag::Uptodate));
    let pages = descriptor.pages() as usize;
    // SAFETY: the pages of a frame whose reference the caller holds, or of the buffer that the
    // folio is filled or written from. No thread changes them: a writer needs the lock and waits
    // for the write-out (WRITEBACK-3).
    let bytes = unsafe { std::slice::from_raw_parts(start.cast(), pages) };
    bytes.iter()
}
