//! Pins of many folios at once: those of resident folios first; the others follow after transfers
//! that are submitted together.
//!
//! MEMORY. A call that waits for memory while it has pins could wait for another such call. So its
//! first attempt is hasty ([`Batch::hurry`]): if nothing can be evicted, the call drops its pins
//! and waits, without any, until no other call waits for memory while it has pins
//! ([`Reclaim::pin_alone`](crate::reclaim::Reclaim::pin_alone)). Then it begins anew: the calls
//! beside it either get all their pins or drop them.

use super::File;
use super::pin::PageRef;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::Locked;
use crate::fill::{Batch, Delivery};
use crate::page::pages_of;
use std::ops::Range;

impl File {
    /// Pins the bytes of each range, like [`File::pin`]. Misses are read by transfers that are
    /// submitted together. The results are in the order of the ranges; an error of one range does
    /// not affect the others. Blocks until all ranges have a result.
    ///
    /// All pins count against the memory bound at the same time: ranges that do not fit get
    /// [`ErrorKind::Full`]. Calls that fit only one after the other wait for each other, for up to
    /// [`reclaim_wait_max`](crate::CacheBuilder::reclaim_wait_max), and hold no pins meanwhile.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let pages = file.pin_many(&[0..100, 50_000..50_100, 99_999..100_001]);
    /// let mut found = [0; 100];
    /// pages[1].as_ref().unwrap().copy_to(0, &mut found).unwrap();
    /// assert_eq!(found, [7; 100]);
    /// assert!(pages[2].is_err(), "it ends past the end of file");
    /// # Ok(())
    /// # }
    /// ```
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<PageRef<'_>>> {
        if let Some(pins) = self.pin_all(ranges, true) {
            return pins;
        }
        let _alone = self.handle.reclaim.pin_alone();
        self.pin_all(ranges, false).expect("only a hasty attempt fails")
    }

    /// Pins all ranges. A hasty attempt fails if there is no memory for one of them.
    fn pin_all(&self, ranges: &[Range<u64>], is_hasty: bool) -> Option<Vec<Result<PageRef<'_>>>> {
        let mut pins: Vec<Option<Result<PageRef<'_>>>> = Vec::new();
        pins.resize_with(ranges.len(), || None);
        let mut batch = Batch::new(&self.handle.inode);
        if is_hasty {
            batch.hurry();
        }
        let deliver = |pins: &mut Vec<_>, number: usize, delivery: Delivery<'_>| {
            pins[number] = match delivery {
                Delivery::Folio(locked) => self.pin_locked(&ranges[number], &locked).map(Ok),
                Delivery::Failed { error, .. } => Some(Err(error)),
            };
        };
        let mut full: Option<Error> = None;
        for (number, range) in ranges.iter().enumerate() {
            pins[number] = self.pin_hit(range).map(Ok);
            if pins[number].is_some() || self.check_pin(range).is_err() {
                continue;
            }
            if self.handle.fill().absent_at(range.start).is_none() {
                self.handle.note_read(range.clone());
                pins[number] = self.pin_resident(range).map(Ok);
                continue;
            }
            if let Some(full) = &full {
                pins[number] = Some(Err(full.clone()));
                continue;
            }
            let mut deliver = |number, delivery| deliver(&mut pins, number, delivery);
            // If the batch cannot take a range for another reason, `pin` below reports it.
            full = batch.add(self.handle.fill(), pages_of(range), number, &mut deliver).err();
            full = full.filter(|error| error.kind() == ErrorKind::Full);
            if full.is_some() && is_hasty {
                return None;
            }
            if let plan @ Some(_) = self.handle.plan_after_miss(pages_of(range)) {
                // Before the pages that follow: these are read first.
                batch.begin();
                self.handle.read_ahead(plan);
            }
        }
        batch.finish(&mut |number, delivery| deliver(&mut pins, number, delivery));
        let mut all = Vec::with_capacity(ranges.len());
        for (pin, range) in pins.into_iter().zip(ranges) {
            let is_evicted_again = || {
                self.check_pin(range).is_ok() && self.handle.fill().absent_at(range.start).is_some()
            };
            if pin.is_none() && is_hasty && is_evicted_again() {
                return None;
            }
            // Not in the batch, or being filled by another thread.
            all.push(pin.unwrap_or_else(|| self.pin(range.clone())));
        }
        Some(all)
    }

    /// Returns a pin of a range in a folio that has just been read.
    pub(super) fn pin_locked(
        &self,
        range: &Range<u64>,
        locked: &Locked<'_>,
    ) -> Option<PageRef<'_>> {
        // The file may have been truncated since.
        if range.end > self.len() {
            return None;
        }
        let reference = locked.folio.try_clone()?;
        Some(self.pin_of(range, reference.into_id()))
    }
}
