//! Rounding, and where a range of bytes may lie: pure arithmetic, no memory, no calls.
//!
//! Used by the rest of `io`. Alignments are powers of two, so rounding is masking.

use std::io;

use thiserror::Error;

/// No backing may ask for more: frames lie at, and folios start at, multiples of this.
pub(crate) const ALIGNMENT_BYTES_MAX: u64 = 4096;

/// The last position there is: the kernel counts with a sign.
pub(crate) const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

/// What transfers of a backing must be multiples of: powers of two, from 1 to 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// For addresses in memory.
    pub memory_bytes: u64,
    /// For positions and lengths.
    pub offset_bytes: u64,
}

impl Alignment {
    /// Anything goes.
    pub const NONE: Self = Self { memory_bytes: 1, offset_bytes: 1 };

    /// Whether both are powers of two that frames and folios can honour.
    pub fn is_valid(self) -> bool {
        [self.memory_bytes, self.offset_bytes]
            .into_iter()
            .all(|bytes| bytes.is_power_of_two() && bytes <= ALIGNMENT_BYTES_MAX)
    }

    /// The distance between places where a transfer can be taken up again.
    pub(crate) fn granule_bytes(self) -> u64 {
        self.memory_bytes.max(self.offset_bytes)
    }
}

/// A range of bytes that does not lie below 2^63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{length_bytes} bytes at position {position_bytes} do not end below 2^63")]
pub struct PositionOutOfRange {
    /// Where the range starts.
    pub position_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
}

impl From<PositionOutOfRange> for io::Error {
    fn from(error: PositionOutOfRange) -> Self {
        Self::new(io::ErrorKind::InvalidInput, error)
    }
}

/// The end of a range, if the range lies where files can.
pub(crate) fn range_end(position_bytes: u64, length: usize) -> Result<u64, PositionOutOfRange> {
    let length_bytes = length as u64;
    position_bytes
        .checked_add(length_bytes)
        .filter(|end| *end <= POSITION_BYTES_MAX)
        .ok_or(PositionOutOfRange { position_bytes, length_bytes })
}

/// `value` without what is above the last multiple of `granule`, a power of two.
pub(crate) fn round_down(value: usize, granule: u64) -> usize {
    debug_assert!(granule.is_power_of_two());
    value & !(granule as usize - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_down_keeps_multiples_and_cuts_the_rest() {
        for granule in [1, 2, 512, 4096] {
            for value in [0, 1, 511, 512, 513, 4095, 4096, 4097, usize::MAX] {
                let rounded = round_down(value, granule);
                assert_eq!(rounded, value / granule as usize * granule as usize);
            }
        }
    }

    #[test]
    fn ranges_end_below_two_to_the_63() {
        assert_eq!(range_end(0, 0), Ok(0));
        assert_eq!(range_end(POSITION_BYTES_MAX, 0), Ok(POSITION_BYTES_MAX));
        assert_eq!(range_end(POSITION_BYTES_MAX - 1, 1), Ok(POSITION_BYTES_MAX));
        for (position_bytes, length) in
            [(POSITION_BYTES_MAX, 1), (1 << 63, 0), (u64::MAX, 1), (u64::MAX, usize::MAX)]
        {
            let error = range_end(position_bytes, length).unwrap_err();
            assert_eq!(error.position_bytes, position_bytes);
            let error = io::Error::from(error);
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert!(error.get_ref().is_some_and(|inner| inner.is::<PositionOutOfRange>()));
        }
    }

    #[test]
    fn alignments_are_powers_of_two_that_a_page_can_honour() {
        let valid =
            |memory_bytes, offset_bytes| Alignment { memory_bytes, offset_bytes }.is_valid();
        assert!(Alignment::NONE.is_valid());
        assert!(valid(4, 512) && valid(512, 4096) && valid(4096, 1));
        assert!(!valid(0, 512) && !valid(512, 0) && !valid(3, 512) && !valid(512, 8192));
    }

    #[test]
    fn a_transfer_is_taken_up_again_at_multiples_of_both() {
        let alignment = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert_eq!(alignment.granule_bytes(), 512);
        assert_eq!(Alignment { memory_bytes: 4096, offset_bytes: 512 }.granule_bytes(), 4096);
    }
}
