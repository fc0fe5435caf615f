//! One operation on an open file, as data: printed when a run fails, replayed from a seed.
//!
//! Positions and lengths are wishes: where a rule of the API narrows them (a pin lies in one folio
//! and before the end), the runner does, with the model at hand.

use fastrand::Rng;

/// What kind of operation; what weights are drawn for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// [`Op::Read`].
    Read,
    /// [`Op::Write`].
    Write,
    /// [`Op::Pin`].
    Pin,
    /// [`Op::Hold`].
    Hold,
    /// [`Op::Pins`].
    Pins,
    /// [`Op::PinMut`].
    PinMut,
    /// [`Op::SetLen`].
    SetLen,
    /// [`Op::SyncData`].
    SyncData,
    /// [`Op::SyncAll`].
    SyncAll,
    /// [`Op::SetMemory`].
    SetMemory,
}

impl OpKind {
    /// Every kind.
    pub const ALL: [Self; 10] = [
        Self::Read,
        Self::Write,
        Self::Pin,
        Self::Hold,
        Self::Pins,
        Self::PinMut,
        Self::SetLen,
        Self::SyncData,
        Self::SyncAll,
        Self::SetMemory,
    ];
}

/// An operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads a range, which may end behind the file.
    Read {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Writes a range, which may end behind the file or begin there.
    Write {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
        /// What: the argument of [`fill_bytes`].
        fill: u64,
    },
    /// Pins a range and looks at it.
    Pin {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Pins a range, makes a hold of the pin, drops the pin, and looks at the hold.
    Hold {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Walks the pins of a range and looks at each.
    Pins {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Pins a range for writing and fills it.
    PinMut {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
        /// What: the argument of [`fill_bytes`].
        fill: u64,
    },
    /// Cuts the file or lets it grow.
    SetLen {
        /// To how many bytes.
        length_bytes: u64,
    },
    /// `sync_data`.
    SyncData,
    /// `sync_all`.
    SyncAll,
    /// Changes the bound of the cache.
    SetMemory {
        /// To how many bytes.
        bytes: u64,
    },
}

/// The bytes an operation writes: they tell operation and place apart, so that a byte that ends up
/// in the wrong place, or is left from an earlier write, is seen.
pub fn fill_bytes(fill: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Rng::with_seed(fill).fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_differ_by_operation_and_by_place() {
        let (one, two) = (fill_bytes(1, 8192), fill_bytes(2, 8192));
        assert_eq!(one, fill_bytes(1, 8192));
        let same = one.iter().zip(&two).filter(|(a, b)| a == b).count();
        assert!(same < 8192 / 64, "{same} bytes are the same");
        assert_ne!(one[..4096], one[4096..]);
    }
}
