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
use super::hit::{GROUP, Hit};
use super::pin::PageRef;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Batch, Delivery, Locked, copy_filled};
use crate::inode::Inode;
use crate::page::{PAGE_SHIFT, is_in_one_page, pages_of};
use crate::stats::Counter;
use crate::sync::CallScope;
use crate::sys::copy::LINE_BYTES;
use std::mem;
use std::ops::Range;
use std::sync::LazyLock;

/// Cache lines of the next request that are prefetched: the processor then reads ahead itself.
const LINES_AHEAD: usize = 8;
/// First pins of a call whose bytes are prefetched, too: the caller reads them after the call, and
/// those of more are no longer in the second cache of a processor by then.
const TOUCHED_PINS: usize = 512;

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

    /// Uses a folio of a run, or the error of one: that of a run of several folios is left for the
    /// second pass.
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
            self.touch_ahead(requests, number);
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

    /// Prefetches what the hits from request `number` on read: for the first of a group, Entries
    /// and first bytes of all; then more of the next one.
    #[inline(always)]
    fn touch_ahead(&self, requests: &[ReadRequest<'_>], number: usize) {
        if number.is_multiple_of(GROUP) {
            let group = &requests[number..requests.len().min(number + GROUP)];
            self.hit_path.touch_pages(group.iter().map(|request| request.position));
        }
        if let Some(next) = requests.get(number + 1) {
            let lines = (next.buffer.len() / LINE_BYTES).min(LINES_AHEAD);
            self.hit_path.touch_bytes(next.position, lines);
        }
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

    /// Adds the transfers of what a request misses to the batch. A request into a map is left for
    /// the second pass.
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
        self.pin_each(ranges.iter().cloned())
    }

    /// Pins the bytes of each range, like [`File::pin_many`], into a list that the caller keeps: a
    /// list that is used again needs no memory of its own for each call. The iterator, such as a
    /// map of record numbers, needs none for the ranges.
    ///
    /// Drops what is in `pages` first, before it pins anything. Afterwards `pages` has one result
    /// for each range, in their order. If the iterator panics, `pages` is empty. The iterator is
    /// cloned, and may run twice: once more if memory ran out beside pins of this call.
    ///
    /// Read the pages in place, and leave the pins for the next call to drop: a thread that drops
    /// each pin before it reads the next page waits for one page after the other.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let mut pages = Vec::new();
    /// for records in [[3_u64, 90, 41], [7, 3, 55]] {
    ///     let range = |record| record * 1024..(record + 1) * 1024;
    ///     file.pin_many_into(records.iter().map(range), &mut pages);
    ///     for page in &pages {
    ///         assert_eq!(page.as_ref().unwrap().array(0), Some([7; 8]));
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pin_many_into<'a>(
        &'a self,
        ranges: impl IntoIterator<Item = Range<u64>, IntoIter: Clone>,
        pages: &mut Vec<Result<PageRef<'a>>>,
    ) {
        self.pin_each_into(ranges.into_iter(), pages);
    }

    pub(super) fn pin_each<'a, F>(
        &'a self,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
    ) -> Vec<Result<PageRef<'a, F>>> {
        let mut pins = Vec::new();
        self.pin_each_into(ranges, &mut pins);
        pins
    }

    /// Runs the iterator only while no transfer is in flight and no lock is held: it is code of the
    /// caller, which may call the cache.
    pub(super) fn pin_each_into<'a, F>(
        &'a self,
        ranges: impl Iterator<Item = Range<u64>> + Clone,
        pins: &mut Vec<Result<PageRef<'a, F>>>,
    ) {
        pins.clear();
        if self.try_pin_each(ranges.clone(), true, pins).is_none() {
            let ranges: Vec<_> = ranges.collect();
            let _alone = self.handle.reclaim.pin_alone();
            let done = self.try_pin_each(ranges.into_iter(), false, pins);
            debug_assert!(done.is_some(), "only a hasty attempt fails");
        }
    }

    /// Pins all ranges. A hasty attempt returns `None`, and drops its pins, if there is no memory
    /// for one of them.
    fn try_pin_each<'a, F>(
        &'a self,
        ranges: impl Iterator<Item = Range<u64>>,
        is_hasty: bool,
        pins: &mut Vec<Result<PageRef<'a, F>>>,
    ) -> Option<()> {
        pins.reserve(ranges.size_hint().0);
        let pins = Unfinished(pins);
        let mut misses = Vec::new();
        let mut group = [const { 0..0 }; GROUP];
        let mut count = 0;
        for range in ranges {
            group[count] = range;
            count += 1;
            if count == GROUP {
                self.pin_hits(&group, pins.0, &mut misses);
                count = 0;
            }
        }
        self.pin_hits(&group[..count], pins.0, &mut misses);
        if !misses.is_empty() {
            self.pin_misses(misses, is_hasty, pins.0)?;
        }
        mem::forget(pins);
        Some(())
    }

    /// Pins the pages among the next ranges that are resident and marked as used.
    fn pin_hits<'a, F>(
        &'a self,
        group: &[Range<u64>],
        pins: &mut Vec<Result<PageRef<'a, F>>>,
        misses: &mut Vec<PinMiss>,
    ) {
        self.hit_path.touch_folios(group, pins.len() < TOUCHED_PINS);
        let (first, misses_before) = (pins.len(), misses.len());
        // Not `push`: it may grow the list, and would move each result there from the stack.
        pins.extend(group.iter().zip(first..).map(|(range, number)| {
            self.pin_uncounted(range).ok_or_else(|| pending(range, number, misses))
        }));
        let hits = group.len() - (misses.len() - misses_before);
        self.handle.inode.memory.counters.add(Counter::Pin, hits as u64);
    }

    /// Pins the other ranges of a call. Returns `None` if a hasty attempt has failed.
    #[inline(never)]
    fn pin_misses<'a, F>(
        &'a self,
        mut misses: Vec<PinMiss>,
        is_hasty: bool,
        pins: &mut [Result<PageRef<'a, F>>],
    ) -> Option<()> {
        let handle = &self.handle;
        let mut batch = Batch::new(&handle.inode);
        batch.is_hasty = is_hasty;
        let mut full: Option<Error> = None;
        for index in 0..misses.len() {
            let PinMiss { number, ref range, ref mut is_done } = misses[index];
            if self.check_pin(range).is_err() {
                continue;
            }
            if handle.fill().absent_at(range.start).is_none() {
                handle.note_read(range.clone());
                if let Some(pin) = self.pin_resident(range) {
                    (pins[number], *is_done) = (Ok(pin), true);
                }
                continue;
            }
            if let Some(full) = &full {
                (pins[number], *is_done) = (Err(full.clone()), true);
                continue;
            }
            let pages = pages_of(range);
            let mut deliver =
                |index, delivery| self.deliver_pin(pins, &mut misses, index, delivery);
            // If the batch cannot take a range for another reason, `pin_for` below reports it.
            full = batch.add(handle.fill(), pages.clone(), index, &mut deliver).err();
            full = full.filter(|error| error.kind() == ErrorKind::Full);
            if full.is_some() && is_hasty {
                return None;
            }
            if let plan @ Some(_) = handle.plan_after_miss(pages) {
                // Before the pages that follow: these are read first.
                batch.begin();
                handle.read_ahead(plan);
            }
        }
        batch.finish(&mut |index, delivery| self.deliver_pin(pins, &mut misses, index, delivery));
        // Not in the batch, or being filled by another thread.
        for PinMiss { number, range, .. } in misses.into_iter().filter(|miss| !miss.is_done) {
            let is_evicted_again =
                || self.check_pin(&range).is_ok() && handle.fill().absent_at(range.start).is_some();
            if is_hasty && is_evicted_again() {
                return None;
            }
            pins[number] = self.pin_for(range);
        }
        Some(())
    }

    pub(super) fn pin_locked<F>(
        &self,
        range: &Range<u64>,
        locked: &Locked<'_>,
    ) -> Option<PageRef<'_, F>> {
        // The file may have been truncated since.
        if range.end > self.len() {
            return None;
        }
        let reference = locked.folio.try_clone()?;
        Some(self.pin_of(range, reference.into_id()))
    }

    /// Pins a folio that has just been read for the range that misses it, or keeps its error.
    fn deliver_pin<'a, F>(
        &'a self,
        pins: &mut [Result<PageRef<'a, F>>],
        misses: &mut [PinMiss],
        index: usize,
        delivery: Delivery<'_>,
    ) {
        let PinMiss { number, range, is_done } = &mut misses[index];
        let pin = match delivery {
            Delivery::Folio(locked) => self.pin_locked(range, &locked).map(Ok),
            Delivery::Failed { error, .. } => Some(Err(error)),
        };
        if let Some(pin) = pin {
            pins[*number] = pin;
            *is_done = true;
        }
    }
}

/// List of results that becomes empty if the call does not finish.
struct Unfinished<'v, T>(&'v mut Vec<T>);

impl<T> Drop for Unfinished<'_, T> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// A range whose page was no hit.
struct PinMiss {
    /// Index of its result, [`PENDING`] at first.
    number: usize,
    range: Range<u64>,
    is_done: bool,
}

#[cold]
#[inline(never)]
fn pending(range: &Range<u64>, number: usize, misses: &mut Vec<PinMiss>) -> Error {
    misses.push(PinMiss { number, range: range.clone(), is_done: false });
    PENDING.clone()
}

static PENDING: LazyLock<Error> =
    LazyLock::new(|| Error::new(ErrorKind::WouldBlock, "the page is being read"));
