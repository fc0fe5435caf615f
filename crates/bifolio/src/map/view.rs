//! What both kinds of map are: part of a region, while the file is kept open.

use crate::error::{Error, ErrorKind, Result};
use crate::file::{File, MapGuard};
use crate::frames::Region;
use crate::sync::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct View {
    /// Goes first.
    _guard: MapGuard,
    file: File,
    region: Arc<Region>,
    range: Range<u64>,
    /// How many faults of the file had failed when this was last asked for.
    errors_seen: Mutex<u64>,
}

impl View {
    pub(super) fn new(file: &File, range: Range<u64>) -> Result<Self> {
        let (region, guard) = file.begin_map(&range)?;
        let errors_seen = Mutex::new(region.errors().count());
        Ok(Self { _guard: guard, file: file.clone(), region, range, errors_seen })
    }

    pub(super) fn new_mut(file: &File, range: Range<u64>) -> Result<Self> {
        file.check_writable()?;
        let view = Self::new(file, range)?;
        let purpose = "watching the stores of a map";
        view.region.track().map_err(|source| ErrorKind::Memory { purpose, source })?;
        Ok(view)
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.region.base().wrapping_add(self.range.start as usize)
    }

    pub(super) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Where bytes of the map are in the file.
    pub(super) fn in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
        if range.start > range.end || range.end > self.len() {
            let problem = format!("{range:?} of a map of {} bytes", self.len());
            return Err(ErrorKind::Config { name: "range", problem }.into());
        }
        Ok(self.range.start + range.start..self.range.start + range.end)
    }

    pub(super) fn prefetch(&self, range: Range<u64>) -> Result<()> {
        self.file.populate(self.in_file(&range)?)
    }

    pub(super) fn take_error(&self) -> Option<Error> {
        let found = self.region.errors().since(&mut self.errors_seen.lock());
        found.map(|error| ErrorKind::Fault(error).into())
    }
}
