//! Applies operations to a file of the cache and to its model, and compares after each.
//!
//! Both directions are checked: what a read gives is what the model holds, and after a change the
//! file has the model's length. [`Runner::check_all`] compares every byte at the end.

use std::fmt;
use std::ops::Range;

use bifolio::{Cache, ErrorKind, File};
use thiserror::Error;

use crate::model::compare;
use crate::{Model, Op, fill_bytes};

/// A file, its model, and the way from one step to the next.
#[derive(Debug)]
pub struct Runner<'a> {
    cache: &'a Cache,
    file: &'a File,
    model: Model,
    step: u64,
}

/// An operation that did not do what the model says.
#[derive(Clone, Debug, Error)]
#[error("step {step}, {op}: {problem}")]
pub struct Failure {
    /// The number of the operation, from 0.
    pub step: u64,
    /// The operation, as text.
    pub op: String,
    /// What was wrong.
    pub problem: String,
}

impl<'a> Runner<'a> {
    /// `file`, a file of `cache`, holds what `model` says.
    pub fn new(cache: &'a Cache, file: &'a File, model: Model) -> Self {
        Self { cache, file, model, step: 0 }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, when the run is over.
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
        let result = self.read(whole).and_then(|()| self.check_len());
        result.map_err(|problem| self.failure(&"check of every byte", problem))
    }

    fn failure(&self, op: &impl fmt::Debug, problem: String) -> Failure {
        Failure { step: self.step, op: format!("{op:?}"), problem }
    }

    fn apply_op(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Read { position_bytes, length } => self.read(self.placed(position_bytes, length)),
            Op::Write { position_bytes, length, fill } => {
                let range = self.placed(position_bytes, length);
                self.write(range, fill)
            }
            Op::Pin { position_bytes, length } => self.pin(position_bytes, length, false),
            Op::Hold { position_bytes, length } => self.pin(position_bytes, length, true),
            Op::Pins { position_bytes, length } => self.pins(position_bytes, length),
            Op::PinMut { position_bytes, length, fill } => {
                self.pin_mut(position_bytes, length, fill)
            }
            Op::SetLen { length_bytes } => self.set_len(length_bytes),
            Op::SyncData => self.file.sync_data().map_err(text),
            Op::SyncAll => self.file.sync_all().map_err(text),
            Op::SetMemory { bytes } => self.set_memory(bytes),
        }
    }

    fn read(&self, range: Range<u64>) -> Result<(), String> {
        // Filled with what no read should leave behind.
        let mut found = vec![0xEE; length_of(&range)];
        let count = self.file.read_at(&mut found, range.start).map_err(text)?;
        let position_bytes = range.start;
        compare(position_bytes, &found[..count], self.model.read(range))?;
        if found[count..].iter().any(|byte| *byte != 0xEE) {
            return Err(format!("bytes behind the {count} read at {position_bytes} were changed"));
        }
        Ok(())
    }

    fn write(&mut self, range: Range<u64>, fill: u64) -> Result<(), String> {
        let bytes = fill_bytes(fill, length_of(&range));
        let count = self.file.write_at(&bytes, range.start).map_err(text)?;
        if count != bytes.len() {
            return Err(format!("wrote {count} of {} bytes", bytes.len()));
        }
        self.model.write(range.start, &bytes);
        Ok(())
    }

    fn pin(&self, position_bytes: u64, length: usize, hold: bool) -> Result<(), String> {
        let Some(range) = self.pinnable(position_bytes, length) else { return Ok(()) };
        let pin = self.file.pin(range.clone()).map_err(text)?;
        let mut found = vec![0xEE; pin.len()];
        if hold {
            let held = pin.hold();
            drop(pin);
            held.copy_to(&mut found);
        } else {
            pin.copy_to(&mut found);
        }
        compare(range.start, &found, self.model.read(range))
    }

    fn pins(&self, position_bytes: u64, length: usize) -> Result<(), String> {
        let Some(range) = self.existing(position_bytes, length) else { return Ok(()) };
        let mut found = Vec::new();
        for pin in self.file.pins(range.clone()) {
            let pin = pin.map_err(text)?;
            let mut part = vec![0xEE; pin.len()];
            pin.copy_to(&mut part);
            found.extend(part);
        }
        compare(range.start, &found, self.model.read(range))
    }

    fn pin_mut(&mut self, position_bytes: u64, length: usize, fill: u64) -> Result<(), String> {
        let Some(range) = self.pinnable(position_bytes, length) else { return Ok(()) };
        let bytes = fill_bytes(fill, length_of(&range));
        let mut pin = self.file.pin_mut(range.clone()).map_err(text)?;
        let mut found = vec![0xEE; bytes.len()];
        pin.copy_to(&mut found);
        compare(range.start, &found, self.model.read(range.clone()))?;
        // In two parts, the later one first.
        let half = bytes.len() / 2;
        pin.copy_from(half, &bytes[half..]);
        pin.copy_from(0, &bytes[..half]);
        drop(pin);
        self.model.write(range.start, &bytes);
        Ok(())
    }

    fn set_len(&mut self, length_bytes: u64) -> Result<(), String> {
        if self.model.is_region() {
            return Ok(());
        }
        self.file.set_len(length_bytes).map_err(text)?;
        self.model.set_len(length_bytes);
        Ok(())
    }

    /// A bound below what other threads have pinned right now is rightly refused.
    fn set_memory(&self, bytes: u64) -> Result<(), String> {
        match self.cache.set_memory(bytes) {
            Err(error) if !matches!(error.kind(), ErrorKind::Full { .. }) => Err(text(error)),
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

    /// The range where the operation takes place: a region is all there is for its user.
    fn placed(&self, position_bytes: u64, length: usize) -> Range<u64> {
        if !self.model.is_region() {
            return position_bytes..position_bytes + length as u64;
        }
        self.existing(position_bytes, length).unwrap_or(0..0)
    }

    /// A range like this one, with bytes in it; `None` if there are none at all.
    fn existing(&self, position_bytes: u64, length: usize) -> Option<Range<u64>> {
        let available = self.model.bytes().len() as u64;
        let offset = position_bytes.checked_rem(available)?;
        let start = self.model.start_bytes() + offset;
        Some(start..self.model.end_bytes().min(start + length as u64))
    }

    /// As [`existing`](Self::existing), cut where its first folio ends.
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

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}
