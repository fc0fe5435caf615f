//! Calls for many ranges, `read_many` and `pin_many`: hits first, misses are submitted together.
//!
//! `read_many` copies hits and adds all misses to a [`Batch`], which copies each folio to its
//! request as soon as the folio is filled. Then it reads the remaining requests one by one: pages
//! that another thread was filling (or another request of the same call), and runs that failed as
//! a whole, so that only the unreadable byte is an error.
//!
//! MEMORY. A call that waits for memory while it has pins could wait for another such call. So the
//! first attempt of `pin_many` is hasty ([`Batch::is_hasty`]): if nothing can be evicted, the call
//! drops its pins, waits until no other call waits for memory while it has pins
//! ([`Reclaim::pin_alone`](crate::reclaim::Reclaim::pin_alone)), and begins anew.

use super::File;
use super::hit::Hit;
use super::pin::PageRef;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Batch, Delivery, Locked, copy_filled};
use crate::inode::Inode;
use crate::page::{PAGE_SHIFT, is_in_one_page, pages_of};
use crate::reclaim::CallScope;
use std::ops::Range;

/// Number of requests ahead whose first Entry is prefetched, because requests are in no order.
const REQUESTS_TOUCHED_AHEAD: usize = 4;

/// One request of [`File::read_many`]: a position, a buffer and the result.
///
/// ```
/// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
/// # std::fs::write(&path, vec![7; 100_000])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// use bifolio::{OpenOptions, ReadRequest};
/// let file = cache.open(&path, &OpenOptions::new())?;
/// let (mut a, mut b) = ([0; 512], [0; 4096]);
/// let mut requests = [ReadRequest::new(&mut a, 90_000), ReadRequest::new(&mut b, 8192)];
/// file.read_many(&mut requests)?;
/// for request in requests {
///     assert_eq!(request.result?, request.buffer.len());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ReadRequest<'b> {
    /// Position of the first byte, in bytes.
    pub position: u64,
    /// The buffer to fill.
    pub buffer: &'b mut [u8],
    /// Number of bytes read, with the contract of [`File::read_at`], also for the rest of `buffer`.
    /// `Ok(0)` before the call.
    pub result: Result<usize>,
}

impl<'b> ReadRequest<'b> {
    /// Creates a request to fill `buffer` with the bytes at `position`.
    pub fn new(buffer: &'b mut [u8], position: u64) -> Self {
        Self { position, buffer, result: Ok(0) }
    }

    /// Returns the number of bytes read so far, or the length of the buffer after an error.
    fn done(&self) -> usize {
        *self.result.as_ref().unwrap_or(&self.buffer.len())
    }

    fn is_finished(&self) -> bool {
        self.result.is_err() || self.done() == self.buffer.len()
    }

    fn next(&self) -> u64 {
        self.position + self.done() as u64
    }

    /// Sets the result to the error; a request that has read bytes ends before the unreadable one.
    fn fail(&mut self, error: Error) {
        if self.done() == 0 && !self.is_finished() {
            self.result = Err(error);
        }
    }

    fn take(&mut self, inode: &Inode, delivery: Delivery<'_>) {
        match delivery {
            Delivery::Folio(locked) => {
                let (done, next) = (self.done(), self.next());
                let copied = copy_filled(inode, &locked, &mut self.buffer[done..], next);
                if copied > 0 {
                    self.result = Ok(done + copied);
                }
            }
            Delivery::Failed { error, folios: 1, page } if self.next() >> PAGE_SHIFT >= page => {
                self.fail(error);
            }
            // The second pass reads each folio alone.
            Delivery::Failed { .. } => {}
        }
    }
}

impl File {
    /// Completes all `requests`: hits are copied, misses are read by transfers that are submitted
    /// together and complete in any order. Each request has its own result; an error of one does
    /// not affect the others. Blocks until all are complete.
    ///
    /// At most [`CacheBuilder::io_depth`](crate::CacheBuilder::io_depth) are in flight at a time.
    ///
    /// # Errors
    /// The handle was not opened for reading, or the cache is closed. No request is started then.
    pub fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        self.handle.check_readable()?;
        let _call = CallScope::begin();
        // A copy into a map may fault. The thread that serves the fault may wait for folios that a
        // batch holds, so no batch of this thread may be in progress then (IO-5).
        let hits_come_first = requests.iter().any(|request| super::is_mapped(request.buffer));
        let mut open = Vec::with_capacity(requests.len());
        let mut batch = Batch::new(&self.handle.inode);
        for number in 0..requests.len() {
            if let Some(request) = requests.get(number + REQUESTS_TOUCHED_AHEAD)
                && request.position < self.len()
            {
                self.handle.inode.mapping.table().touch(request.position >> PAGE_SHIFT);
            }
            if self.read_hits(&mut requests[number]) {
                continue;
            }
            open.push(number);
            if !hits_come_first {
                self.start(requests, number, &mut batch);
            }
        }
        if hits_come_first {
            open.iter().for_each(|number| self.start(requests, *number, &mut batch));
        }
        let inode = &self.handle.inode;
        batch.finish(&mut |number, delivery| requests[number].take(inode, delivery));
        for number in open {
            let request = &mut requests[number];
            if request.is_finished() {
                continue;
            }
            let (done, next) = (request.done(), request.next());
            match self.read_pages(&mut request.buffer[done..], next, false) {
                Ok(count) => request.result = Ok(done + count),
                Err(error) => request.fail(error),
            }
        }
        Ok(())
    }

    /// Copies the resident part of a request. Returns `true` if that completes the request.
    fn read_hits(&self, request: &mut ReadRequest<'_>) -> bool {
        request.result = Ok(0);
        match self.hit_path.read(request.buffer, request.position) {
            Hit::Done => {
                request.result = Ok(request.buffer.len());
                return true;
            }
            hit => hit.forget(request.buffer),
        }
        if let Err(error) = self.handle.range_end(request.position, request.buffer.len() as u64) {
            request.result = Err(error);
            return true;
        }
        let done = self.read_resident(request.buffer, request.position);
        request.result = Ok(done);
        let is_whole = done > 0 && is_in_one_page(request.position, request.buffer.len() as u64);
        is_whole || request.is_finished() || request.next() >= self.len()
    }

    fn start<'f>(&'f self, requests: &mut [ReadRequest<'_>], number: usize, batch: &mut Batch<'f>) {
        let request = &requests[number];
        if super::is_mapped(request.buffer) {
            // No copy into a map happens with a folio lock held, or with transfers in flight.
            return;
        }
        let end = (request.position + request.buffer.len() as u64).min(self.len());
        let pages = pages_of(&(request.next()..end));
        let inode = &self.handle.inode;
        let added = batch.add(self.handle.fill(), pages, number, &mut |number, delivery| {
            requests[number].take(inode, delivery);
        });
        if let Err(error) = added {
            requests[number].fail(error);
        }
    }

    /// Pins the bytes of each range, like [`File::pin`]. Misses are read by transfers that are
    /// submitted together. The results are in the order of the ranges; an error of one range does
    /// not affect the others. Blocks until all ranges have a result.
    ///
    /// All pins count against the memory bound at the same time: ranges that do not fit get
    /// [`ErrorKind::Full`]. Calls that fit only one after the other wait for each other, for up to
    /// [`reclaim_wait_max`](crate::CacheBuilder::reclaim_wait_max), and hold no pins meanwhile.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let pages = file.pin_many(&[0..100, 50_000..50_100, 99_999..100_001]);
    /// let mut found = [0; 100];
    /// pages[1].as_ref().unwrap().copy_to(0, &mut found).unwrap();
    /// assert_eq!(found, [7; 100]);
    /// assert!(pages[2].is_err(), "it ends past the end of file");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
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
        batch.is_hasty = is_hasty;
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
