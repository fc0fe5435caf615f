//! Pins of maps: bytes that stay resident.

use crate::error::Result;
use crate::file::{File, Hold};
use std::ops::Range;

/// Bytes of a map that stay resident while this lives, and are not evicted. A pin guarantees
/// residency, not that the bytes stay what they are.
#[derive(Debug)]
pub struct MapPin {
    holds: Vec<Hold>,
}

impl MapPin {
    /// Pins every page that holds bytes of `range`, a range of the file.
    pub(super) fn new(file: &File, range: Range<u64>) -> Result<Self> {
        file.populate(range.clone())?;
        let holds = file.pins(range).map(|pin| pin.map(|pin| pin.hold()));
        Ok(Self { holds: holds.collect::<Result<_>>()? })
    }

    /// How many pages are pinned.
    pub fn pages(&self) -> usize {
        self.holds.len()
    }
}
