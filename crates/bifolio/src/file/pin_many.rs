//! Many pins at once: those of resident folios at once, the others after transfers that leave
//! together.

use super::batch::{Batch, Delivery};
use super::fill::Locked;
use super::{File, Pin};
use crate::error::Result;
use crate::page::pages_of;
use std::ops::Range;

impl File {
    /// Pins the bytes of each range, as [`File::pin`] would; what is not resident is read by
    /// transfers that are submitted together. The answers stand in the order of the ranges, and a
    /// range that fails leaves the others alone. Blocks until all are answered.
    ///
    /// All pins count against the bound at the same time: a call for more than fits gets
    /// [`ErrorKind::Full`](crate::ErrorKind::Full) for those that do not.
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
    /// assert!(pins[2].is_err(), "it ends behind the end of the file");
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
            let mut deliver = |number, delivery| deliver(&mut pins, number, delivery);
            // What cannot be started is tried, and answered, by itself.
            let _ = batch.add(&self.handle, pages_of(range), number, &mut deliver);
        }
        batch.finish(&mut |number, delivery| deliver(&mut pins, number, delivery));
        let alone = |(number, pin): (usize, Option<_>)| {
            // Refused, being filled by others, or gone again.
            pin.unwrap_or_else(|| self.pin(ranges[number].clone()))
        };
        pins.into_iter().enumerate().map(alone).collect()
    }

    /// A pin of a range in a folio that has just been read.
    fn pin_locked(&self, range: &Range<u64>, locked: &Locked<'_>) -> Option<Pin<'_>> {
        // The file may have been cut meanwhile.
        if range.end > self.len() {
            return None;
        }
        let reference = locked.folio.try_clone()?;
        Some(self.pin_of(range, reference.into_id()))
    }
}
