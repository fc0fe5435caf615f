//! Operations on a memory file that is larger than memory, independent of the kind of memory.
//!
//! Four phases, each timed, and a final comparison of every byte. Bytes read in the phases are only
//! checked cheaply (`checker`), because a full comparison would be timed.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::medium::Medium;
use crate::error::{Error, Result};
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::checker::Checker;
use crate::harness::device_bytes::DeviceBytes;
use crate::harness::meter::{Measured, Meter};
use crate::harness::pattern;
use crate::harness::seen::Seen;
use crate::harness::sizes::Sizes;

/// Bytes written and read in order per call.
const BLOCK_BYTES: usize = 64 << 10;

const READ_SEED: u64 = 11;
const OVERWRITE_SEED: u64 = 12;

/// The version of pages that were written in order, and of those that were overwritten.
const FIRST: u32 = 0;
const SECOND: u32 = 1;

/// One phase of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    WriteInOrder,
    ReadInOrder,
    ReadAtRandom,
    OverwriteAtRandom,
}

impl Phase {
    /// Phases in order.
    pub(super) const ALL: [Self; 4] =
        [Self::WriteInOrder, Self::ReadInOrder, Self::ReadAtRandom, Self::OverwriteAtRandom];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::WriteInOrder => "write in order",
            Self::ReadInOrder => "read in order",
            Self::ReadAtRandom => "read at random",
            Self::OverwriteAtRandom => "overwrite at random",
        }
    }

    pub(super) fn block_bytes(self) -> usize {
        match self {
            Self::WriteInOrder | Self::ReadInOrder => BLOCK_BYTES,
            Self::ReadAtRandom | Self::OverwriteAtRandom => PAGE_BYTES,
        }
    }

    /// Returns the version that is written; `None` if the phase reads.
    fn written_version(self) -> Option<u32> {
        match self {
            Self::WriteInOrder => Some(FIRST),
            Self::OverwriteAtRandom => Some(SECOND),
            Self::ReadInOrder | Self::ReadAtRandom => None,
        }
    }
}

/// Amount of work.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Load {
    pub(super) sizes: Sizes,
    /// Pages read at random, at most all.
    pub(super) random_reads: u64,
    /// Pages overwritten at random, at most all.
    pub(super) overwrites: u64,
}

/// The result of a phase.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    pub(super) measured: Measured,
    /// Bytes written to the disk and read back.
    pub(super) moved: DeviceBytes,
}

impl Load {
    /// Returns position and length of every block of `phase`. Not a list, which would count as
    /// resident.
    fn blocks(&self, phase: Phase) -> impl Iterator<Item = (u64, usize)> + use<> {
        let size_bytes = self.sizes.size_bytes;
        let step_bytes = BLOCK_BYTES as u64;
        let (count, random_seed) = match phase {
            Phase::WriteInOrder | Phase::ReadInOrder => (size_bytes.div_ceil(step_bytes), None),
            Phase::ReadAtRandom => (self.random_reads, Some(READ_SEED)),
            Phase::OverwriteAtRandom => (self.overwrites, Some(OVERWRITE_SEED)),
        };
        let access = random_seed.map(|seed| Access::new(Pattern::Uniform, size_bytes, seed));
        (0..count).map(move |index| match &access {
            Some(access) => (access.pos_bytes(index), PAGE_BYTES),
            None => {
                let pos_bytes = index * step_bytes;
                (pos_bytes, (size_bytes - pos_bytes).min(step_bytes) as usize)
            }
        })
    }

    /// Runs all phases, then compares every byte. Returns the phases, and the number of bytes.
    pub(super) fn run(&self, medium: &impl Medium) -> Result<(Vec<Done>, u64)> {
        let mut done = Vec::new();
        for phase in Phase::ALL {
            done.push(self.run_phase(phase, medium)?);
        }
        Ok((done, self.verify(medium)?))
    }

    fn run_phase(&self, phase: Phase, medium: &impl Medium) -> Result<Done> {
        let mut buffer = vec![0; phase.block_bytes()];
        let mut checker = Checker::new(medium.series());
        let mut seen = Seen::new(self.sizes.expected_pass());
        let mut bytes = 0;
        let before = medium.moved()?;
        let meter = Meter::start(None)?;
        for (pos_bytes, block_bytes) in self.blocks(phase) {
            let block = &mut buffer[..block_bytes];
            let version = phase.written_version();
            if let Some(version) = version {
                pattern::fill_version(block, pos_bytes, version);
            }
            let begin = Instant::now();
            if version.is_some() {
                medium.write(block, pos_bytes)?;
            } else {
                medium.read(block, pos_bytes)?;
            }
            seen.add(meter.started().elapsed(), begin.elapsed());
            if version.is_none() {
                checker.add(block, pos_bytes)?;
            }
            bytes += block_bytes as u64;
        }
        let cost = meter.stop()?;
        let calls = seen.calls();
        let mut measured = seen.measured(bytes, cost, calls);
        measured.verified_bytes = checker.finish()?;
        Ok(Done { measured, moved: medium.moved()? - before })
    }

    /// Compares every byte with the one written last.
    fn verify(&self, medium: &impl Medium) -> Result<u64> {
        let mut overwritten = vec![false; self.sizes.pages() as usize];
        for (pos_bytes, _) in self.blocks(Phase::OverwriteAtRandom) {
            overwritten[(pos_bytes / PAGE_BYTES as u64) as usize] = true;
        }
        let mut buffer = vec![0; BLOCK_BYTES];
        for (start_bytes, block_bytes) in self.blocks(Phase::ReadInOrder) {
            let block = &mut buffer[..block_bytes];
            medium.read(block, start_bytes)?;
            let positions = (start_bytes..).step_by(PAGE_BYTES);
            for (page, pos_bytes) in block.chunks_exact(PAGE_BYTES).zip(positions) {
                let is_second = overwritten[(pos_bytes / PAGE_BYTES as u64) as usize];
                let version = if is_second { SECOND } else { FIRST };
                if !pattern::matches_version(page, pos_bytes, version) {
                    let series = medium.series().to_owned();
                    return Err(Error::WrongBytes { series, pos_bytes });
                }
            }
        }
        Ok(self.sizes.size_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const SIZE_BYTES: usize = (1 << 20) + 8192;

    /// A vector, in which one page is not written the second time.
    struct Vector {
        bytes: RefCell<Vec<u8>>,
        lost_overwrites: bool,
    }

    impl Medium for Vector {
        fn series(&self) -> &'static str {
            "vector"
        }

        fn write(&self, bytes: &[u8], pos_bytes: u64) -> Result<()> {
            let start = pos_bytes as usize;
            let is_overwrite = bytes.len() == PAGE_BYTES;
            if !(is_overwrite && self.lost_overwrites) {
                self.bytes.borrow_mut()[start..start + bytes.len()].copy_from_slice(bytes);
            }
            Ok(())
        }

        fn read(&self, bytes: &mut [u8], pos_bytes: u64) -> Result<()> {
            let start = pos_bytes as usize;
            bytes.copy_from_slice(&self.bytes.borrow()[start..start + bytes.len()]);
            Ok(())
        }

        fn moved(&self) -> Result<DeviceBytes> {
            Ok(DeviceBytes::default())
        }
    }

    #[test]
    fn all_phases_are_done_and_a_lost_overwrite_is_noticed() {
        let sizes = Sizes { size_bytes: SIZE_BYTES as u64, memory_bytes: 1 << 20 };
        let load = Load { sizes, random_reads: 10, overwrites: 20 };
        let run = |lost_overwrites| {
            let bytes = RefCell::new(vec![0; SIZE_BYTES]);
            load.run(&Vector { bytes, lost_overwrites })
        };
        let (done, verified_bytes) = run(false).unwrap();
        let bytes: Vec<u64> = done.iter().map(|done| done.measured.bytes).collect();
        let size_bytes = SIZE_BYTES as u64;
        assert_eq!(bytes, [size_bytes, size_bytes, 40960, 81920]);
        assert_eq!(verified_bytes, size_bytes);
        assert!(matches!(run(true), Err(Error::WrongBytes { .. })));
    }
}
