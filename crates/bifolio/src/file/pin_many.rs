//! Pins of many folios at once: those of resident folios first; the others follow after transfers
//! that are submitted together.

use super::File;
use super::fill::Locked;
use super::pin::Pin;
use super::read_io::{Batch, Delivery};
use crate::error::Result;
use crate::page::pages_of;
use std::ops::Range;

impl File {
    /// Pins the bytes of each range, like [`File::pin`]. Misses are read by transfers that are
    /// submitted together. The results are in the order of the ranges; an error of one range does
    /// not affect the others. Blocks until all ranges have a result.
    ///
    /// All pins count against the memory bound at the same time: ranges that do not fit get
    /// [`ErrorKind::Full`](crate::ErrorKind::Full).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new().immutable(true))?;
    /// let pins = file.pin_many(&[0..100, 50_000..50_100, 99_999..100_001]);
    /// assert_eq!(pins[1].as_ref().unwrap().as_bytes(), Some(&[7; 100][..]));
    /// assert!(pins[2].is_err(), "it ends past the end of file");
    /// # Ok(())
    /// # }
    /// ```
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<Pin<'_>>> {
        let mut pins: Vec<Option<Result<Pin<'_>>>> = Vec::new();
        pins.resize_with(ranges.len(), || None);
        let mut batch = Batch::new(&self.handle.inode);
        let deliver = |pins: &mut Vec<_>, number: usize, delivery: Delivery<'_>| {
            pins[number] = match delivery {
                Delivery::Folio(locked) => self.pin_locked(&ranges[number], &locked).map(Ok),
                Delivery::Failed { error, .. } => Some(Err(error)),
            };
        };
        for (number, range) in ranges.iter().enumerate() {
            pins[number] = self.pin_hit(range).map(Ok);
            if pins[number].is_some() || self.check_pin(range).is_err() {
                continue;
            }
            let is_absent = self.handle.absent_at(range.start).is_some();
            let mut deliver = |number, delivery| deliver(&mut pins, number, delivery);
            // If the batch cannot take a range, `pin` below reports why.
            let _ = batch.add(&self.handle, pages_of(range), number, &mut deliver);
            if !is_absent {
                self.handle.note_read(range.clone());
            } else if let plan @ Some(_) = self.handle.plan_after_miss(pages_of(range)) {
                // Before the pages that follow: these are read first.
                batch.begin();
                self.handle.read_ahead(plan);
            }
        }
        batch.finish(&mut |number, delivery| deliver(&mut pins, number, delivery));
        let alone = |(number, pin): (usize, Option<_>)| {
            // Not in the batch, being filled by another thread, or evicted again.
            pin.unwrap_or_else(|| self.pin(ranges[number].clone()))
        };
        pins.into_iter().enumerate().map(alone).collect()
    }

    /// Returns a pin of a range in a folio that has just been read.
    pub(super) fn pin_locked(&self, range: &Range<u64>, locked: &Locked<'_>) -> Option<Pin<'_>> {
        // The file may have been truncated since.
        if range.end > self.len() {
            return None;
        }
        let reference = locked.folio.try_clone()?;
        Some(self.pin_of(range, reference.into_id()))
    }
}
