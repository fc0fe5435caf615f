//! Gathers past every cache: io_uring with as many reads in flight as a cache has.

use super::sums::RowSums;
use super::task::{Gatherer, Task};
use crate::error::Result;
use crate::harness::direct;
use crate::harness::raw_ring::{RawRing, Transfer};

/// The default of `CacheBuilder::io_depth`.
const DEPTH: u16 = 64;
/// The thread sleeps until one in so many of the reads in flight is complete.
const AWAITED_SHARE: usize = 2;

/// A ring over the file.
pub(crate) struct Raw(RawRing);

impl Raw {
    pub(crate) fn open(task: &Task) -> Result<Self> {
        let file = direct::open(&task.file, false)?;
        Ok(Self(RawRing::new(&file, task.row_bytes, DEPTH)?))
    }
}

impl Gatherer for Raw {
    fn forget(&mut self) -> Result<()> {
        Ok(())
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        let mut left = positions.iter();
        loop {
            while let Some(position) = left.as_slice().first() {
                let Some(block) = self.0.take_idle() else { break };
                self.0.start(block, Transfer::Read, *position)?;
                left.next();
            }
            let in_flight = self.0.in_flight();
            if in_flight == 0 {
                return Ok(());
            }
            self.0.complete(in_flight.div_ceil(AWAITED_SHARE), |row| {
                sums.add(row.bytes, row.pos_bytes);
                Ok(())
            })?;
        }
    }
}
