//! Gathers through a cache: `read_many` copies the rows, `pin_many` leaves them where they are.

use std::ops::Range;

use bifolio::{Access, Cache, ImmutableFile, OpenOptions, ReadRequest};

use super::sums::RowSums;
use super::task::{Gatherer, Task};
use crate::error::{Error, Result};

/// The file of the task, and its cache.
#[derive(Debug)]
struct Rows {
    file: ImmutableFile,
    _cache: Cache,
}

impl Rows {
    fn open(task: &Task) -> Result<Self> {
        let cache = Cache::builder().memory(task.sizes.memory_bytes).populate(true).build()?;
        let file = cache.open_immutable(&task.file, &OpenOptions::new())?;
        file.set_access(Access::Random);
        Ok(Self { file, _cache: cache })
    }

    fn forget(&self) -> Result<()> {
        self.file.evict(0..self.file.len())?;
        Ok(())
    }
}

/// Rows of a call of `read_many`: many times the device's depth, and few enough that the copies
/// are in the processor's cache when they are summed.
const CALL_ROWS: usize = 1024;

/// `read_many`.
#[derive(Debug)]
pub(crate) struct ReadMany {
    rows: Rows,
    buffer: Vec<u8>,
    row_bytes: usize,
}

impl ReadMany {
    pub(crate) fn open(task: &Task) -> Result<Self> {
        let buffer = vec![0; task.rows.min(CALL_ROWS) * task.row_bytes];
        Ok(Self { rows: Rows::open(task)?, buffer, row_bytes: task.row_bytes })
    }
}

impl Gatherer for ReadMany {
    fn forget(&mut self) -> Result<()> {
        self.rows.forget()
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        for positions in positions.chunks(CALL_ROWS) {
            let rows = self.buffer.chunks_exact_mut(self.row_bytes);
            let request = |(row, position): (_, &u64)| ReadRequest::new(*position, row);
            let mut requests: Vec<ReadRequest<'_>> = rows.zip(positions).map(request).collect();
            self.rows.file.read_many(&mut requests)?;
            for request in requests {
                if request.result? != self.row_bytes {
                    let (series, pos_bytes) = ("read_many".to_owned(), request.position);
                    return Err(Error::WrongBytes { series, pos_bytes });
                }
                sums.add(request.buffer, request.position);
            }
        }
        Ok(())
    }
}

/// `pin_many`.
#[derive(Debug)]
pub(crate) struct PinMany {
    rows: Rows,
    ranges: Vec<Range<u64>>,
    row_bytes: u64,
}

impl PinMany {
    pub(crate) fn open(task: &Task) -> Result<Self> {
        Ok(Self { rows: Rows::open(task)?, ranges: Vec::new(), row_bytes: task.row_bytes as u64 })
    }
}

impl Gatherer for PinMany {
    fn forget(&mut self) -> Result<()> {
        self.rows.forget()
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.ranges.clear();
        self.ranges.extend(positions.iter().map(|&start| start..start + self.row_bytes));
        let pins = self.rows.file.pin_many(&self.ranges);
        for (pin, position) in pins.into_iter().zip(positions) {
            sums.add(&pin?, *position);
        }
        Ok(())
    }
}
