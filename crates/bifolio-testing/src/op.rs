//! One operation on an open file, as data: printed when a run fails, replayed from a seed.
//!
//! Positions and lengths are requests: where a rule of the API restricts them (a pin lies in one
//! folio and before the end), the runner adjusts them with the model.

use bifolio::Access;
use fastrand::Rng;

/// A hint about a file, or a request for a range of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// `File::set_access`, for the handle.
    Access(Access),
    /// `File::prefetch`.
    Prefetch,
    /// `File::populate`.
    Populate,
    /// `File::evict`.
    Evict,
}

/// The kind of an operation; weights are drawn for kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// [`Op::Read`].
    Read,
    /// [`Op::ReadMany`].
    ReadMany,
    /// [`Op::Write`].
    Write,
    /// [`Op::Pin`].
    Pin,
    /// [`Op::Hold`].
    Hold,
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
    /// [`Op::Allocate`].
    Allocate,
    /// [`Op::PunchHole`].
    PunchHole,
    /// [`Op::SeekData`].
    SeekData,
    /// [`Op::SeekHole`].
    SeekHole,
    /// [`Op::SyncRange`].
    SyncRange,
    /// [`Op::Advise`].
    Advise,
    /// [`Op::PinMany`].
    PinMany,
    /// [`Op::MapRead`].
    MapRead,
    /// [`Op::MapWrite`].
    MapWrite,
}

impl OpKind {
    /// Operations of every file.
    pub const ANY_FILE: [Self; 10] = [
        Self::Read,
        Self::ReadMany,
        Self::Write,
        Self::Pin,
        Self::Hold,
        Self::PinMut,
        Self::SetLen,
        Self::SyncData,
        Self::SyncAll,
        Self::SetMemory,
    ];

    /// Operations of the allocation, which every file has.
    pub const ALLOCATION: [Self; 4] =
        [Self::Allocate, Self::PunchHole, Self::SeekData, Self::SeekHole];

    /// Operations of every file, for the exerciser only: advice moves pages, which tests that count
    /// pages cannot allow.
    pub const EXERCISER: [Self; 3] = [Self::SyncRange, Self::Advise, Self::PinMany];

    /// Operations only of files that can be mapped.
    pub const MAPPABLE_FILE: [Self; 2] = [Self::MapRead, Self::MapWrite];
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
    /// Reads several ranges at once, each like [`Op::Read`].
    ReadMany {
        /// Where, and how much.
        ranges: Vec<(u64, usize)>,
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
    /// Pins a range and compares it.
    Pin {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Pins a range, creates a hold from the pin, drops the pin, and compares the hold.
    Hold {
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
    /// Truncates the file or extends it.
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
    /// Reserves memory for a range, which may end behind the file.
    Allocate {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Punches a hole, which may end past the end of file.
    PunchHole {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Seeks data.
    SeekData {
        /// From where on.
        position_bytes: u64,
    },
    /// Seeks a hole.
    SeekHole {
        /// From where on.
        position_bytes: u64,
    },
    /// Makes a range durable.
    SyncRange {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Advice for a range, or for the handle.
    Advise {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
        /// What.
        advice: Advice,
    },
    /// Pins several ranges at once and compares each.
    PinMany {
        /// Where, and how much.
        ranges: Vec<(u64, usize)>,
    },
    /// Maps a range and loads it.
    MapRead {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
    },
    /// Maps a range for writing and stores to it.
    MapWrite {
        /// Where.
        position_bytes: u64,
        /// How much.
        length: usize,
        /// What: the argument of [`fill_bytes`].
        fill: u64,
        /// Set if its pages are pinned meanwhile.
        is_pinned: bool,
    },
}

/// The argument of [`fill_bytes`] that stands for zeros.
pub(crate) const FILL_ZEROS: u64 = u64::MAX;

/// Returns the bytes that an operation writes: they identify operation and position, so that a byte
/// in the wrong position, or from an earlier write, is detected. The fill `u64::MAX` is zeros.
pub fn fill_bytes(fill: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    if fill == FILL_ZEROS {
        return bytes;
    }
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
