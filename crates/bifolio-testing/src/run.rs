//! Applies operations to a file of the cache and to its model, and compares after each.
//!
//! Both directions are checked: a read returns what the model holds, and after a change the file
//! has the model's length. [`Runner::check_all`] compares every byte at the end.
//!
//! A cache may be too small for its memory files. [`Runner::may_be_full`] takes the error for what
//! it is, if the file is as it was before: the operation did not happen, or, of a write, a part.
//! Storage may fail, too: [`Runner::set_may_fail`] says when.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;

use bifolio::{Cache, Error as CacheError, ErrorKind, File, ReadRequest};
use thiserror::Error;

#[cfg(feature = "maps")]
use crate::mapped;
use crate::model::compare;
use crate::op::Advice;
use crate::{Model, Op, fill_bytes};

/// Maximum bytes of a map pinned at once.
#[cfg(feature = "maps")]
const PIN_BYTES_MAX: u64 = 16 << 10;

/// A file, its model, and the state between steps.
#[derive(Debug)]
pub struct Runner<'a> {
    cache: &'a Cache,
    file: &'a File,
    model: Model,
    step: u64,
    may_be_full: bool,
    may_be_in_use: bool,
    may_fail: bool,
    refused: Cell<u64>,
}

/// An operation whose result differs from the model.
#[derive(Clone, Debug, Error)]
#[error("step {step}, {op}: {problem}")]
pub struct Failure {
    /// The number of the operation, from 0.
    pub step: u64,
    /// The operation, as text.
    pub op: String,
    /// The difference.
    pub problem: String,
}

impl<'a> Runner<'a> {
    /// Creates a runner for `file`, a file of `cache`, which holds the bytes of `model`.
    pub fn new(cache: &'a Cache, file: &'a File, model: Model) -> Self {
        Self {
            cache,
            file,
            model,
            step: 0,
            may_be_full: false,
            may_be_in_use: false,
            may_fail: false,
            refused: Cell::new(0),
        }
    }

    /// Allows operations to be refused because the cache is full.
    pub fn may_be_full(mut self) -> Self {
        self.may_be_full = true;
        self
    }

    /// Allows other references to folios of the file: by reclaim, or by other readers.
    pub fn may_be_in_use(mut self) -> Self {
        self.may_be_in_use = true;
        self
    }

    /// Sets whether operations may fail from now on because the storage does.
    pub fn set_may_fail(&mut self, may_fail: bool) {
        self.may_fail = may_fail;
    }

    /// Returns how many operations were refused because the cache was full, or the storage failed.
    pub fn refused(&self) -> u64 {
        self.refused.get()
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the model at the end of the run.
    pub fn into_model(self) -> Model {
        self.model
    }

    /// Applies all of `ops`, up to the first failure.
    pub fn run(&mut self, ops: impl IntoIterator<Item = Op>) -> Result<(), Failure> {
        ops.into_iter().try_for_each(|op| self.apply(&op))
    }

    /// Applies one operation to both and compares.
    pub fn apply(&mut self, op: &Op) -> Result<(), Failure> {
        let result = self.apply_op(op).and_then(|()| self.check_len());
        let failure = result.map_err(|problem| self.failure(op, problem));
        self.step += 1;
        failure
    }

    /// Compares every byte.
    pub fn check_all(&self) -> Result<(), Failure> {
        let whole = self.model.start_bytes()..self.model.end_bytes();
        let refused = self.refused();
        let result = self.read(whole).and_then(|()| self.check_len());
        let result = result.and_then(|()| match self.refused() == refused {
            true => Ok(()),
            false => Err("the cache has no room for a reader".to_owned()),
        });
        result.map_err(|problem| self.failure(&"check of every byte", problem))
    }

    fn failure(&self, op: &impl fmt::Debug, problem: String) -> Failure {
        Failure { step: self.step, op: format!("{op:?}"), problem }
    }

    fn apply_op(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::ReadMany { ref ranges } => self.read_many(ranges),
            Op::Read { position_bytes, length } => self.read(self.placed(position_bytes, length)),
            Op::Write { position_bytes, length, fill } => {
                let range = self.placed(position_bytes, length);
                self.write(range, fill)
            }
            Op::Pin { position_bytes, length } => self.pin(position_bytes, length, false),
            Op::Hold { position_bytes, length } => self.pin(position_bytes, length, true),
            Op::PinMut { position_bytes, length, fill } => {
                self.pin_mut(position_bytes, length, fill)
            }
            Op::SetLen { length_bytes } => self.set_len(length_bytes),
            Op::SyncData => self.unless_refused(self.file.sync_data()).map(drop),
            Op::SyncAll => self.unless_refused(self.file.sync_all()).map(drop),
            Op::SetMemory { bytes } => self.set_memory(bytes),
            Op::Allocate { position_bytes, length } => {
                self.allocate(self.placed(position_bytes, length))
            }
            Op::PunchHole { position_bytes, length } => {
                self.punch_hole(self.placed(position_bytes, length))
            }
            Op::SeekData { position_bytes } => {
                let position = self.place(position_bytes);
                let found = self.file.seek_data(position).map_err(text)?;
                self.model.check_seek_data(position, found)
            }
            Op::SeekHole { position_bytes } => {
                let position = self.place(position_bytes);
                let found = self.file.seek_hole(position).map_err(text)?;
                self.model.check_seek_hole(position, found)
            }
            Op::SyncRange { position_bytes, length } => {
                let range = self.placed(position_bytes, length);
                self.unless_refused(self.file.sync_range(range)).map(drop)
            }
            Op::Advise { position_bytes, length, advice } => {
                self.advise(self.placed(position_bytes, length), advice)
            }
            Op::PinMany { ref ranges } => self.pin_many(ranges),
            #[cfg(feature = "maps")]
            Op::MapRead { position_bytes, length } => self.map_read(position_bytes, length),
            #[cfg(feature = "maps")]
            Op::MapWrite { position_bytes, length, fill, is_pinned } => {
                self.map_write(position_bytes, length, fill, is_pinned)
            }
            #[cfg(not(feature = "maps"))]
            Op::MapRead { .. } | Op::MapWrite { .. } => Err("built without maps".to_owned()),
        }
    }

    fn read(&self, range: Range<u64>) -> Result<(), String> {
        // Filled with what no read should leave behind.
        let mut found = vec![0xEE; length_of(&range)];
        match self.unless_refused(self.file.read_at(&mut found, range.start))? {
            Some(count) => self.check_read(&range, &found, count),
            None => Ok(()),
        }
    }

    fn read_many(&self, ranges: &[(u64, usize)]) -> Result<(), String> {
        let ranges: Vec<_> =
            ranges.iter().map(|(position, length)| self.placed(*position, *length)).collect();
        let mut buffers: Vec<_> = ranges.iter().map(|range| vec![0xEE; length_of(range)]).collect();
        let requests = ranges.iter().zip(&mut buffers);
        let mut requests: Vec<_> =
            requests.map(|(range, buffer)| ReadRequest::new(buffer, range.start)).collect();
        self.file.read_many(&mut requests).map_err(text)?;
        let results: Vec<_> = requests.into_iter().map(|request| request.result).collect();
        for ((range, found), result) in ranges.iter().zip(&buffers).zip(results) {
            if let Some(count) = self.unless_refused(result)? {
                self.check_read(range, found, count)?;
            }
        }
        Ok(())
    }

    /// Checks a read into `found`, filled with 0xEE before, that returned `count`.
    fn check_read(&self, range: &Range<u64>, found: &[u8], count: usize) -> Result<(), String> {
        let at = range.start + count as u64;
        if at < range.end.min(self.model.end_bytes()) {
            // An error came up on the way: the next call there says which.
            let mut rest = [0];
            let answer = self.unless_refused(self.file.read_at(&mut rest, at))?;
            match answer {
                // It was the end of the file, which is compared below.
                Some(0) => {}
                Some(_) if !self.may_refuse() => {
                    return Err(format!(
                        "a read at {} ends at {at}, and goes on there",
                        range.start
                    ));
                }
                _ => {
                    return compare(range.start, &found[..count], self.model.read(range.start..at));
                }
            }
        }
        compare(range.start, &found[..count], self.model.read(range.clone()))?;
        if found[count..].iter().any(|byte| *byte != 0xEE) {
            let start = range.start;
            return Err(format!("bytes behind the {count} read at {start} were changed"));
        }
        Ok(())
    }

    /// Returns `true` if operations may be refused, so that less is done than requested.
    fn may_refuse(&self) -> bool {
        self.may_be_full || self.may_fail
    }

    /// Returns the result of an operation; `None`, and counts it, if it is rightly refused.
    fn unless_refused<T>(&self, result: Result<T, CacheError>) -> Result<Option<T>, String> {
        match result {
            Ok(answer) => Ok(Some(answer)),
            Err(error)
                if is_unsupported(&error)
                    || self.may_be_full && error.kind() == ErrorKind::Full
                    || self.may_fail && is_of_storage(error.kind()) =>
            {
                self.refused.set(self.refused() + 1);
                Ok(None)
            }
            Err(error) => Err(text(error)),
        }
    }

    fn write(&mut self, range: Range<u64>, fill: u64) -> Result<(), String> {
        let bytes = fill_bytes(fill, length_of(&range));
        let Some(count) = self.unless_refused(self.file.write_at(&bytes, range.start))? else {
            return Ok(());
        };
        if count < bytes.len() {
            // Whole folios, and at least one: else it would have been an error.
            let is_edge = (range.start + count as u64).is_multiple_of(self.file.folio_bytes());
            if !self.may_refuse() || count == 0 || !is_edge {
                return Err(format!("wrote {count} of {} bytes", bytes.len()));
            }
            self.refused.set(self.refused() + 1);
        }
        self.model.write(range.start, &bytes[..count]);
        Ok(())
    }

    fn allocate(&mut self, range: Range<u64>) -> Result<(), String> {
        if self.unless_refused(self.file.allocate(range.clone()))?.is_some() {
            self.model.allocate(range);
        }
        Ok(())
    }

    fn punch_hole(&mut self, range: Range<u64>) -> Result<(), String> {
        if self.unless_refused(self.file.punch_hole(range.clone()))?.is_some() {
            self.model.punch(range);
            return Ok(());
        }
        if self.may_fail && self.file.is_memory_file() {
            // The first folio may be zeroed, if the last one could not be read again after that.
            let first_end = range.start.next_multiple_of(self.file.folio_bytes());
            let first = range.start..range.end.min(first_end);
            let mut found = vec![0xEE; length_of(&first)];
            let read = self.unless_refused(self.file.read_at(&mut found, first.start))?;
            if found[..read.unwrap_or(0)].iter().all(|byte| *byte == 0) {
                self.model.punch(first.start..first.start + read.unwrap_or(0) as u64);
            }
        }
        Ok(())
    }

    fn pin(&mut self, position_bytes: u64, length: usize, hold: bool) -> Result<(), String> {
        let Some(range) = self.pinnable(position_bytes, length) else { return Ok(()) };
        let pinned = self.file.pin(range.clone());
        let Some(pin) = self.unless_refused(pinned)? else { return Ok(()) };
        self.model.note_pinned(range.clone());
        let mut found = vec![0xEE; pin.len()];
        if hold {
            pin.into_owned().copy_to(0, &mut found).unwrap();
        } else {
            pin.copy_to(0, &mut found).unwrap();
        }
        compare(range.start, &found, self.model.read(range))
    }

    /// Pins as many of the ranges as fit into a quarter of the memory.
    fn pin_many(&mut self, ranges: &[(u64, usize)]) -> Result<(), String> {
        let most = self.cache.stats().memory.bound_bytes / (4 * self.file.folio_bytes());
        let ranges: Vec<_> = ranges
            .iter()
            .filter_map(|(position, length)| self.pinnable(*position, *length))
            .take(most.max(1) as usize)
            .collect();
        for (pin, range) in self.file.pin_many(&ranges).into_iter().zip(ranges) {
            let Some(pin) = self.unless_refused(pin)? else { continue };
            self.model.note_pinned(range.clone());
            let mut found = vec![0xEE; pin.len()];
            pin.copy_to(0, &mut found).unwrap();
            compare(range.start, &found, self.model.read(range))?;
        }
        Ok(())
    }

    /// Gives advice. Pages that it allocates for holes may be in memory now, even if it fails
    /// midway.
    fn advise(&mut self, range: Range<u64>, advice: Advice) -> Result<(), String> {
        let done = match advice {
            Advice::Access(access) => {
                self.file.set_access(access);
                return Ok(());
            }
            Advice::Prefetch => self.file.prefetch(range),
            Advice::Populate => {
                let end = range.end.min(self.model.end_bytes());
                self.model.note_pinned(range.start..end);
                self.file.populate(range)
            }
            Advice::Evict => self.file.evict(range).map(drop),
        };
        self.unless_refused(done).map(drop)
    }

    #[cfg(feature = "maps")]
    fn map_read(&mut self, position_bytes: u64, length: usize) -> Result<(), String> {
        let Some(range) = self.existing(position_bytes, length) else { return Ok(()) };
        let map = self.file.map(range.clone()).map_err(text)?;
        // A page that cannot be had is an error here, and a signal below.
        if self.unless_refused(map.populate(0..map.len()))?.is_none() {
            return Ok(());
        }
        self.model.note_pinned(range.clone());
        compare(range.start, &mapped::load(&map), self.model.read(range))
    }

    #[cfg(feature = "maps")]
    fn map_write(
        &mut self,
        position_bytes: u64,
        length: usize,
        fill: u64,
        is_pinned: bool,
    ) -> Result<(), String> {
        let Some(range) = self.existing(position_bytes, length) else { return Ok(()) };
        let bytes = fill_bytes(fill, length_of(&range));
        let mut map = self.file.map_mut(range.clone()).map_err(text)?;
        if self.unless_refused(map.populate(0..map.len()))?.is_none() {
            return Ok(());
        }
        if is_pinned {
            let end = map.len().min(PIN_BYTES_MAX);
            let Some(pin) = self.unless_refused(map.pin_mut(0..end))? else { return Ok(()) };
            mapped::store(&mut map, &bytes);
            drop(pin);
        } else {
            mapped::store(&mut map, &bytes);
        }
        compare(range.start, &mapped::load(&map), &bytes)?;
        self.model.write(range.start, &bytes);
        Ok(())
    }

    fn pin_mut(&mut self, position_bytes: u64, length: usize, fill: u64) -> Result<(), String> {
        let Some(range) = self.pinnable(position_bytes, length) else { return Ok(()) };
        let bytes = fill_bytes(fill, length_of(&range));
        let pinned = self.file.pin_mut(range.clone());
        let Some(mut pin) = self.unless_refused(pinned)? else { return Ok(()) };
        let mut found = vec![0xEE; bytes.len()];
        pin.copy_to(0, &mut found).unwrap();
        compare(range.start, &found, self.model.read(range.clone()))?;
        // In two parts, the later one first.
        let half = bytes.len() / 2;
        pin.copy_from(half, &bytes[half..]).unwrap();
        pin.copy_from(0, &bytes[..half]).unwrap();
        drop(pin);
        self.model.write(range.start, &bytes);
        Ok(())
    }

    fn set_len(&mut self, length_bytes: u64) -> Result<(), String> {
        if self.model.is_region() {
            return Ok(());
        }
        if self.unless_refused(self.file.set_len(length_bytes))?.is_some() {
            self.model.set_len(length_bytes);
        }
        Ok(())
    }

    /// Sets the bound. A bound below what other threads have pinned is rightly refused.
    fn set_memory(&self, bytes: u64) -> Result<(), String> {
        match self.cache.set_memory(bytes) {
            Err(error) if error.kind() != ErrorKind::Full => Err(text(error)),
            _ => Ok(()),
        }
    }

    fn check_len(&self) -> Result<(), String> {
        let (found, expected) = (self.file.len(), self.model.end_bytes());
        if found == expected || self.model.is_region() && found >= expected {
            return Ok(());
        }
        Err(format!("the file has {found} bytes instead of {expected}"))
    }

    /// Returns the range of the operation, moved into the region.
    fn placed(&self, position_bytes: u64, length: usize) -> Range<u64> {
        if !self.model.is_region() {
            return position_bytes..position_bytes + length as u64;
        }
        self.existing(position_bytes, length).unwrap_or(0..0)
    }

    /// Returns the position of an operation without a length, moved into the region.
    fn place(&self, position_bytes: u64) -> u64 {
        if !self.model.is_region() {
            return position_bytes;
        }
        self.existing(position_bytes, 1).map_or(0, |range| range.start)
    }

    /// Returns a similar range that has bytes; `None` if the file is empty.
    fn existing(&self, position_bytes: u64, length: usize) -> Option<Range<u64>> {
        let available = self.model.bytes().len() as u64;
        let offset = position_bytes.checked_rem(available)?;
        let start = self.model.start_bytes() + offset;
        Some(start..self.model.end_bytes().min(start + length as u64))
    }

    /// Returns the range of [`existing`](Self::existing), truncated at the end of its first folio.
    fn pinnable(&self, position_bytes: u64, length: usize) -> Option<Range<u64>> {
        let range = self.existing(position_bytes, length)?;
        let folio_bytes = self.file.folio_bytes();
        let folio_end = (range.start / folio_bytes + 1) * folio_bytes;
        Some(range.start..range.end.min(folio_end))
    }
}

fn length_of(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

/// Returns `true` if the file system does not have the operation.
fn is_unsupported(error: &CacheError) -> bool {
    let kind = || std::io::Error::from(error.clone()).kind();
    error.kind() == ErrorKind::Io && kind() == std::io::ErrorKind::Unsupported
}

/// Returns `true` if storage that fails or refuses writes can cause the error.
fn is_of_storage(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Io
            | ErrorKind::Writeback
            | ErrorKind::SwapRead
            | ErrorKind::CutShort
            | ErrorKind::Unwritable
            | ErrorKind::Full
    )
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}
