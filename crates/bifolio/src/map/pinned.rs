//! Pins of maps: bytes that stay resident; and those that the kernel or a device writes.
//!
//! A store of a program is found in the page tables. What the kernel stores on behalf of a transfer
//! with direct I/O, or a device, is not: the transfer has looked the page up when it began, and
//! its bytes come whenever they come, perhaps behind a write-out that has made the page clean. So
//! the pages of a [`MapPinMut`] count as stored to whenever somebody looks, and once more at its
//! end:
//!
//! ```text
//!  PIN (here)                                   OTHERS
//!  P1 a reference to each folio                 eviction: B2 of `reclaim/unmap.rs` fails
//!  P2 its pages count as stored to              sync: S0 look for stores; pages of pins are among
//!  P3 dirty, under the folio's lock               them; S1 to S5 of `writeback/dirty.rs`
//!  P4 (the device writes, until it ends)        write-out: clean, protect, copy
//!  P5 dirty, under the lock of the folio        cut: the folio leaves the table, the page stays
//!     that has the page now                       (REGION-4); growth: another folio has it, and
//!  P6 they count as stored to no more             it is zeros then
//!  P7 the references go
//! ```
//!
//! What was written before a sync's S0 is in what it writes: the page is among those that count as
//! stored to, or P5 is done, and it is dirty. What comes after a write-out's copy was made is found
//! by the next look, or by P5. What the device writes to a page that was cut off is nobody's, as
//! with `mmap`; if the file has grown again it may be the file's, and is not lost then.
//! `loom_map_pin` has this as a model.
//!
//! A pin outlives its map, and then counts as one: the cache is not closed before P7.

use crate::error::Result;
use crate::file::{File, Hold, MapGuard};
use crate::memory::Region;
use crate::page::pages_of;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a map that stay resident while this lives, and are not evicted. A pin guarantees
/// residency, not that the bytes stay what they are. Keeps the file open, and the cache from being
/// closed, also when the map is gone.
#[derive(Debug)]
pub struct MapPin {
    holds: Vec<Hold>,
    /// Goes last: what was written under the pin is dirty then.
    _guard: MapGuard,
}

impl MapPin {
    /// Pins every page that holds bytes of `range`, a range of the file.
    pub(super) fn new(guard: &MapGuard, file: &File, range: Range<u64>) -> Result<Self> {
        file.populate(range.clone())?;
        let holds = file.pins(range).map(|pin| pin.map(|pin| pin.hold()));
        Ok(Self { holds: holds.collect::<Result<_>>()?, _guard: guard.for_pin() })
    }

    /// How many pages are pinned.
    pub fn pages(&self) -> usize {
        self.holds.len()
    }
}

/// Bytes of a map that the kernel or a device may write to while this lives; see
/// [`MapMut::pin_mut`](crate::MapMut::pin_mut).
///
/// Its pages stay resident, and count as stored to: each sync meanwhile, and the flusher, writes
/// them as they are then. When it is dropped they are dirty. Until then the file stays open and
/// the cache cannot be closed, also when the map is gone. Can be sent to another thread, and be
/// dropped by the one that learns of the end of the transfer. Dropping it waits for the thread that
/// has the lock of one of the pages ([`PinMut`](crate::PinMut)).
#[derive(Debug)]
pub struct MapPinMut {
    pin: MapPin,
    region: Arc<Region>,
    range: Range<u64>,
}

impl MapPinMut {
    /// Pins every page that holds bytes of `range`, a range of the file that is mapped.
    pub(super) fn new(
        guard: &MapGuard,
        file: &File,
        region: &Arc<Region>,
        range: Range<u64>,
    ) -> Result<Self> {
        let pin = MapPin::new(guard, file, range.clone())?;
        region.written_unseen.add(pages_of(&range));
        pin.holds.iter().for_each(Hold::mark_stored);
        Ok(Self { pin, region: Arc::clone(region), range })
    }

    /// The first byte of the range: where the kernel or the device is to write.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.region.base().wrapping_add(self.range.start as usize)
    }

    /// How many bytes are pinned.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether no bytes are pinned.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl Drop for MapPinMut {
    fn drop(&mut self) {
        let holds = &self.pin.holds;
        // In a forked child, locks may be held by threads that are not there.
        if holds.first().is_some_and(Hold::is_forked) {
            return;
        }
        holds.iter().for_each(Hold::mark_stored);
        self.region.written_unseen.remove(&pages_of(&self.range));
    }
}
