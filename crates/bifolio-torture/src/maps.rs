//! Maps: raw loads and stores, and pins that outlive their maps.
//!
//! # Safety
//! Loads and stores raw words inside the ranges of maps and pins, one aligned word at a time; the
//! files of such scenes (`Scene::has_maps`) are never cut.
#![allow(unsafe_code)]

use crate::history::{Kind, Violation, WORD_BYTES};
use crate::scene::Target;
use crate::work::{Outcome, Worker};
use bifolio::{File, MapMut, MapPinMut};
use std::ops::Range;

/// A page of a map that is pinned for writes of a device, and outlives its map.
#[derive(Debug)]
pub struct HeldPin<'s> {
    pub target: &'s Target,
    /// Of the file.
    pub range: Range<u64>,
    pin: MapPinMut,
}

impl<'s> HeldPin<'s> {
    /// Pins a range of whole words; `None` if the call is refused.
    pub fn new(target: &'s Target, file: &File, range: Range<u64>) -> Option<Self> {
        let map = file.map_mut(range.clone()).ok()?;
        let pin = map.pin_mut(0..map.len()).ok()?;
        Some(Self { target, range, pin })
    }

    /// Writes as the device, for the thread `number`.
    pub fn store(&mut self, number: usize) {
        store(self.target, number, self.pin.as_mut_ptr(), self.range.clone());
    }
}

/// Maps the first page of a file, which is resident before it is stored to: only the page table
/// shows the store. `None` if a call is refused.
pub fn stored_unseen(target: &Target, file: &File, number: usize) -> Option<MapMut> {
    let mut map = file.map_mut(0..4096).ok()?;
    map.populate(0..4096).ok()?;
    file.sync_data().ok()?;
    store(target, number, map.as_mut_ptr(), 0..4096);
    Some(map)
}

/// Stores to a range of a file, which is mapped or pinned at `start`.
fn store(target: &Target, number: usize, start: *mut u8, range: Range<u64>) {
    let change = target.history.begin("raw store", number, Kind::Store, range.clone());
    for (offset, index) in (range.start / WORD_BYTES..range.end / WORD_BYTES).enumerate() {
        let word = start.wrapping_add(offset * 8).cast::<u64>();
        // SAFETY: an aligned word of the map or the pin, of a file that is not truncated.
        unsafe { word.write_volatile(change.word(index)) };
    }
    target.history.end(&change, range.end - range.start);
}

impl<'s> Worker<'s> {
    pub fn map(&mut self, target: &Target, file: &File) -> Outcome {
        if !self.scene.has_maps() {
            return Ok(());
        }
        let range = self.range(target, 64 << 10);
        let words = range.start / WORD_BYTES..range.end / WORD_BYTES;
        let begun = self.scene.clock.begin_call(self.number);
        if self.random.bool() {
            let Ok(map) = file.map(range.clone()) else { return Ok(()) };
            let part = 0..map.len().min(4 * 4096);
            let pinned = match self.random.u32(0..8) {
                0 => map.pin(part).ok(),
                1 => map.populate(part).map(|()| None).unwrap_or_default(),
                _ => None,
            };
            let load = |offset: usize| {
                let word = map.as_ptr().wrapping_add(offset * 8).cast::<u64>();
                // SAFETY: an aligned word inside the map, of a file that is not truncated.
                unsafe { word.read_volatile() }
            };
            let bytes: Vec<u8> =
                words.enumerate().flat_map(|(offset, _)| load(offset).to_le_bytes()).collect();
            drop(pinned);
            return target.history.check("map", &bytes, range.start, begun);
        }
        let Ok(mut map) = file.map_mut(range.clone()) else { return Ok(()) };
        let part = 0..map.len().min(4 * 4096);
        let pinned = (self.random.u32(0..8) == 0).then(|| map.pin_mut(part));
        store(target, self.number, map.as_mut_ptr(), range.clone());
        drop(pinned);
        if self.random.u32(0..8) > 0 {
            return Ok(());
        }
        let begun = self.scene.clock.begin_call(self.number);
        match map.sync(0..map.len()) {
            Ok(()) => self.cut_power("power cut after a map's sync", target, range, 4, begun),
            Err(error) => self.refused("map sync", target, &error),
        }
    }

    /// Pins a page of a map until the next call of this thread.
    pub fn hold_pin(&mut self, target: &'s Target, file: &File) -> Outcome {
        if !self.scene.has_maps() {
            return Ok(());
        }
        self.release_pin()?;
        let range = self.folio_range(target, file);
        self.held = HeldPin::new(target, file, range);
        Ok(())
    }

    /// Lets the device write under the thread's pin, and ends the pin. Until then the cache cannot
    /// be closed.
    pub fn release_pin(&mut self) -> Outcome {
        let Some(mut held) = self.held.take() else { return Ok(()) };
        if self.random.bool() && self.scene.cache.close().is_ok() {
            return Err(Violation("the cache was closed under a pin of a map".to_owned()));
        }
        self.scene.clock.begin_call(self.number);
        held.store(self.number);
        drop(held);
        self.scene.clock.end_call(self.number);
        Ok(())
    }
}
