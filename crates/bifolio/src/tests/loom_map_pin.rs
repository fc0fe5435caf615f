//! Pins of maps (PINNED-P1..P7): what a device writes under one, bypassing the page
//! tables, against syncs, evictions, write-outs and truncations.
//!
//! Property: what the device wrote before a sync began is on storage when the sync returns; what it
//! wrote last is what the page holds and what the next sync writes, even if the file was truncated
//! and has grown meanwhile, so that the page belongs to another folio.
//!
//! The other steps are those of the model (`region.rs`). The weakenings there, and the run that
//! finds each (`loom_map_pin_every_weakening_is_found`): no reference (`vs_evict`); a search for
//! stores that ignores pins, or no longer includes one whose page is not dirty yet (`vs_sync`); an
//! end that does not mark the page dirty (`vs_write_out`), or marks the wrong folio (`vs_cut`).

use super::region::{MISSING, Region, WELL, WRITTEN, Weakening};
use super::world::{OWNER, model_bounded, spawn};
use crate::page::{Entry, Flag, Folio, FolioRef, Listing};
use crate::sync::{AtomicU64, Ordering};
use std::sync::Arc;

/// A page that a device may write to, regardless of the page tables.
struct Pin<'r> {
    region: &'r Region,
    folio: Option<FolioRef<'r>>,
    index: u64,
    /// Address that the device has looked up.
    entry: u64,
}

impl<'r> Pin<'r> {
    /// Does PINNED-P1..P3.
    fn new(region: &'r Region, index: u64) -> Self {
        let world = &region.world;
        let folio = loop {
            region.look_up(index, || ());
            let seen = world.entry(index);
            if let Ok(folio) = world.mapping.try_get_ready(&world.folios, index, seen) {
                break folio;
            }
        };
        let entry = region.entry(index);
        let folio = Some(folio).filter(|_| !region.is(Weakening::PinWithoutReference));
        if !region.is(Weakening::PinUnseen) {
            region.unseen.lock().push(index);
        }
        let pin = Self { region, folio, index, entry };
        pin.mark();
        pin
    }

    /// Does PINNED-P4.
    fn write(&self, value: u64) {
        // AcqRel: Release pairs with the Acquire in `Region::bytes`, Acquire with the Release of
        // the store that it overwrites: a thread that learns of the end of a transfer sees what was
        // there before.
        self.region.memory(self.entry).swap(value, Ordering::AcqRel);
    }

    /// Does PINNED-P3 and PINNED-P5.
    fn mark(&self) {
        let own = self.folio.as_ref().filter(|_| self.region.is(Weakening::PinMarksItsOwn));
        let own = own.map(|folio| folio.try_clone().expect("the count is far from its limit"));
        let Some(folio) = own.or_else(|| self.region.world.find(self.index)) else { return };
        let locked = folio.lock();
        if locked.owner() == OWNER && locked.flags.get(Flag::Uptodate) {
            self.region.mark_stored(&locked);
        }
    }

    /// Does PINNED-P5 and PINNED-P6.
    fn end(self) {
        let forget = || self.region.unseen.lock().retain(|index| *index != self.index);
        if self.region.is(Weakening::PinForgottenEarly) {
            forget();
        }
        if !self.region.is(Weakening::PinWithoutEnd) {
            self.mark();
        }
        forget();
        drop(self.folio);
        self.region.release_page(self.index);
    }
}

impl Region {
    /// Installs the page of a new folio: over the bytes of a page that is pinned.
    pub(super) fn put_in_place(&self, index: u64, bytes: u64) {
        if !self.held.lock().contains(&index) {
            return self.install(index, bytes, false);
        }
        // AcqRel: pairs with the Acquire in `entry`.
        let entry = self.entries[index as usize].fetch_or(WRITTEN, Ordering::AcqRel);
        // AcqRel: Release pairs with the Acquire in `bytes`; Acquire, because the model orders two
        // stores to one word only in this way.
        self.memory(entry).swap(bytes, Ordering::AcqRel);
    }

    /// Unmaps a page that has lost its folio, for its last holder, unless it belongs to another
    /// folio.
    fn release_page(&self, index: u64) {
        let mut held = self.held.lock();
        let Some(at) = held.iter().position(|it| *it == index) else { return };
        held.swap_remove(at);
        if !held.contains(&index) && !self.world.entry(index).is_folio() {
            self.unmap(index);
        }
    }

    fn unmap(&self, index: u64) {
        // AcqRel: pairs with the Acquire in `entry`.
        self.entries[index as usize].swap(MISSING, Ordering::AcqRel);
        self.flush();
    }

    /// Discards the bytes of a folio.
    fn forget(&self, folio: &Folio) {
        let mut dirty = self.dirty.lock();
        if folio.flags.transition_to_clean() == Listing::Remove {
            dirty.pages.retain(|index| *index != folio.index());
        }
    }

    /// Truncates a page of the file, as `inode/removal.rs` does, and extends the file by
    /// one.
    fn cut(&self, index: u64) {
        let world = &self.world;
        let Some(folio) = world.find(index) else { return };
        let locked = folio.lock();
        locked.flags.wait_for_writeback();
        self.device[index as usize].store(0, Ordering::Relaxed);
        match world.mapping.begin_eviction(folio, &locked) {
            Ok(frozen) => {
                self.unmap(index);
                self.forget(&locked);
                world.mapping.end_eviction(&frozen, &locked, |_| Entry::HOLE);
                drop(locked);
                frozen.free();
            }
            Err(folio) => {
                // Once for this reference, once for that of the pin.
                self.held.lock().extend([index; 2]);
                self.forget(&locked);
                let in_table =
                    world.mapping.remove(&folio, &locked, &world.folios, |_| Entry::HOLE);
                drop(locked);
                drop((in_table, folio));
                self.release_page(index);
            }
        }
        // The page is part of the file again; its holder continues to use it.
        self.look_up(index, || ());
    }
}

/// A run of a model, with the region weakened.
type Run = fn(Weakening);

fn holds(run: Run) {
    model_bounded(3, move || run(Weakening::None));
}

fn vs_evict(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let device = spawn(&region, |region| {
        let pin = Pin::new(region, 0);
        pin.write(2);
        pin.end();
    });
    region.evict(&[0], WELL);
    device.join().unwrap();
    region.check_at_end(0, 2);
}

/// A page is not evicted while a device may write to it.
#[test]
fn loom_map_pin_vs_evict() {
    holds(vs_evict);
}

fn vs_write_out(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let device = spawn(&region, |region| {
        let pin = Pin::new(region, 0);
        pin.write(2);
        pin.end();
    });
    region.sync();
    device.join().unwrap();
    region.check_at_end(0, 2);
}

/// Bytes that the device writes after a write-out has read the page are found when the pin ends.
#[test]
fn loom_map_pin_vs_write_out() {
    holds(vs_write_out);
}

fn vs_sync(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let written = Arc::new(AtomicU64::new(0));
    let device = spawn(&region, {
        let written = Arc::clone(&written);
        move |region| {
            let pin = Pin::new(region, 0);
            pin.write(2);
            // Release: pairs with the Acquire below: the transfer has ended.
            written.store(1, Ordering::Release);
            pin.end();
        }
    });
    region.sync();
    // Acquire: pairs with the Release above.
    if written.load(Ordering::Acquire) == 1 {
        region.sync();
        assert_eq!(region.on_device(0), 2, "synced");
    }
    device.join().unwrap();
    region.check_at_end(0, 2);
}

/// A sync writes what a completed transfer has stored, even if the pin still exists.
#[test]
fn loom_map_pin_vs_sync() {
    holds(vs_sync);
}

fn vs_cut(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let device = spawn(&region, |region| {
        let pin = Pin::new(region, 0);
        pin.write(2);
        pin.end();
    });
    region.cut(0);
    region.sync();
    device.join().unwrap();
    // The device may have written before the zeros, or before the page was part of the file again.
    let value = region.load(0);
    assert!([0, 2].contains(&value));
    region.check_at_end(0, value);
    region.evict(&[0], WELL);
    region.check_at_end(0, value);
}

/// A write of a device to a page that was truncated and is part of the file again is not lost.
#[test]
fn loom_map_pin_vs_cut() {
    // Two preemptions: three take half a minute.
    model_bounded(2, || vs_cut(Weakening::None));
}

/// Each weakening of the head of the file fails the run that covers it.
#[test]
fn loom_map_pin_every_weakening_is_found() {
    let all: [(Weakening, Run); 5] = [
        (Weakening::PinWithoutReference, vs_evict),
        (Weakening::PinUnseen, vs_sync),
        (Weakening::PinForgottenEarly, vs_sync),
        (Weakening::PinWithoutEnd, vs_write_out),
        (Weakening::PinMarksItsOwn, vs_cut),
    ];
    for (weakening, run) in all {
        // In a thread of its own, because it panics.
        let seen = std::thread::spawn(move || model_bounded(3, move || run(weakening)));
        assert!(seen.join().is_err(), "{weakening:?} is not found by its run");
    }
}
