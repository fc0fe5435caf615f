//! Many reads at once: hits are copied, misses leave together.
//!
//! Two passes. The first answers what is resident and gives everything else to a [`Batch`], which
//! copies each folio to its request while the folio is at hand. The second reads, one after the
//! other, what the first left open: pages that somebody else was filling (another request of the
//! same call, perhaps), and runs that failed as a whole, where only the byte that cannot be read
//! shall be an error.
//!
//! A [`Batch`] brings in runs of several places, or of several files, for reads, pins and
//! readahead: they are claimed and handed to one queue of the engine, which keeps as many transfers
//! in flight as its depth and hands them out in whatever order they complete. While anything is in
//! flight nobody here waits for a folio lock or for frames (IO-5): what somebody else is filling is
//! left out, and when frames run short, what is in flight ends first. So batches never wait for
//! each other, and a batch of any length works in a cache of any size.
//!
//! # Safety
//! Copies out of frames whose lock it holds.
#![allow(unsafe_code)]

use super::fill::{Locked, ReadIoClaim, Wait};
use super::handle::Handle;
use super::hit::Hit;
use super::read_io::ReadIo;
use super::{File, Registry, faults};
use crate::error::{Error, ErrorKind, Result};
use crate::io::{IoError, Queue};
use crate::page::{Flag, Folios, PAGE_BYTES, PAGE_SHIFT, is_in_one_page, pages_of};
use crate::reclaim::CallScope;
use crate::sys::copy;
use crate::writeback::Inode;
use std::ops::Range;
use std::sync::Arc;

/// How many requests ahead the Entry of the first page is touched: requests stand in no order, so
/// each waits for memory otherwise.
const REQUESTS_TOUCHED_AHEAD: usize = 4;

/// One read of many: where, into what, and what came of it.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, vec![7; 100_000])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// use bifolio::{OpenOptions, ReadRequest};
/// let file = cache.open(&path, &OpenOptions::new())?;
/// let (mut a, mut b) = ([0; 512], [0; 4096]);
/// let mut requests = [ReadRequest::new(90_000, &mut a), ReadRequest::new(8192, &mut b)];
/// file.read_many(&mut requests)?;
/// for request in requests {
///     assert_eq!(request.result?, request.buffer.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ReadRequest<'b> {
    /// Where to read, bytes.
    pub position: u64,
    /// The buffer to fill.
    pub buffer: &'b mut [u8],
    /// How many bytes were read, as [`File::read_at`] would say, and what `buffer` holds behind
    /// them; `Ok(0)` before the call.
    pub result: Result<usize>,
}

impl<'b> ReadRequest<'b> {
    /// A request to fill `buffer` with the bytes at `position`.
    pub fn new(position: u64, buffer: &'b mut [u8]) -> Self {
        Self { position, buffer, result: Ok(0) }
    }

    /// Bytes read so far; all of them after an error.
    pub(super) fn done(&self) -> usize {
        *self.result.as_ref().unwrap_or(&self.buffer.len())
    }

    fn is_finished(&self) -> bool {
        self.result.is_err() || self.done() == self.buffer.len()
    }

    /// The position of the next byte.
    fn next(&self) -> u64 {
        self.position + self.done() as u64
    }

    /// Whether the next byte is in the folio whose first page is `page`.
    fn is_at(&self, page: u64) -> bool {
        self.next() >> PAGE_SHIFT >= page
    }

    /// Takes its part of a folio of `inode` that has just been filled, if that holds the next byte.
    /// If what is before it is not there yet, it was read ahead, and is used when its turn comes.
    pub(super) fn take(&mut self, inode: &Inode, locked: &Locked<'_>) {
        let (next, done) = (self.next(), self.done());
        let folio_start = locked.lock.index() * PAGE_BYTES;
        let folio_end = folio_start + locked.lock.pages() * PAGE_BYTES;
        let folio_end = folio_end.min(inode.mapping.len_bytes());
        if next < folio_start {
            // A use since it became READY is forgotten: a hint, no more.
            locked.lock.flags.set(Flag::Readahead);
            return;
        }
        if self.is_finished() || next >= folio_end {
            return;
        }
        let length = ((folio_end - next) as usize).min(self.buffer.len() - done);
        let start = inode.frame_of(&locked.folio);
        let source = start.wrapping_add((next - folio_start) as usize);
        // SAFETY: inside a frame whose lock `locked` is: nobody writes it now; `buffer` is the
        // caller's memory.
        unsafe { copy::copy_out(source, &mut self.buffer[done..done + length]) };
        self.result = Ok(done + length);
    }
}

/// A request and the file it is for.
type Addressed<'r, 'b> = (&'r File, &'r mut ReadRequest<'b>);

impl File {
    /// Answers all `requests`: those in memory at once, the others by transfers that are submitted
    /// together and complete in any order. Each request has its own result; one that fails leaves
    /// the others alone. Blocks until all are answered.
    ///
    /// Up to [`CacheBuilder::io_depth`](crate::CacheBuilder::io_depth) transfers are in flight at
    /// a time, so a call with more requests than that keeps the device busy from end to end.
    ///
    /// # Errors
    /// The handle was not opened for reading, or the cache is closed: then no request was begun.
    pub fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        self.handle.check_readable()?;
        read_all(&mut requests.iter_mut().map(|request| (self, request)).collect::<Vec<_>>());
        Ok(())
    }

    /// [`File::read_many`] for requests of several files of the cache that `registry` is of.
    pub(crate) fn read_many_of(
        registry: &Arc<Registry>,
        requests: &mut [(&File, ReadRequest<'_>)],
    ) -> Result<()> {
        for (file, _) in requests.iter() {
            file.handle.check_readable()?;
            if !Arc::ptr_eq(registry, &file.handle.registry) {
                let problem = format!("{} is open in another cache", file.handle.inode.name());
                return Err(ErrorKind::Config { name: "requests", problem }.into());
            }
        }
        let addressed = requests.iter_mut().map(|(file, request)| (*file, request));
        read_all(&mut addressed.collect::<Vec<_>>());
        Ok(())
    }

    /// Brings the Entry of the page at `position` closer, if there is one.
    fn touch_entry(&self, position: u64) {
        if position < self.len() {
            self.handle.inode.mapping.table().touch(position >> PAGE_SHIFT);
        }
    }

    /// Copies the resident part of a request; answers whether that is all there is to do.
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

    /// Answers the requests that neither a hit nor the batch has answered.
    fn read_rest(&self, request: &mut ReadRequest<'_>) {
        let done = request.done();
        if request.is_finished() {
            return;
        }
        let next = request.next();
        match self.read_plainly(&mut request.buffer[done..], next) {
            Ok(count) => request.result = Ok(done + count),
            // The bytes so far are good; a request that reached nothing learns why.
            Err(error) if done == 0 => request.result = Err(error),
            Err(_) => {}
        }
    }
}

fn read_all(requests: &mut [Addressed<'_, '_>]) {
    let Some((first, _)) = requests.first() else { return };
    let inode = &first.handle.inode;
    let _call = CallScope::begin();
    // To copy into a map may be a fault. Who serves it may wait for what a batch holds, so that no
    // batch of this thread may be under way then (IO-5).
    let hits_come_first = requests.iter().any(|(_, request)| faults::is_mapped(request.buffer));
    let mut open = Vec::new();
    let mut batch = Batch::new(inode);
    for number in 0..requests.len() {
        if let Some((file, request)) = requests.get(number + REQUESTS_TOUCHED_AHEAD) {
            file.touch_entry(request.position);
        }
        let (file, request) = &mut requests[number];
        if file.read_hits(request) {
            continue;
        }
        open.push(number);
        if !hits_come_first {
            start(requests, number, &mut batch);
        }
    }
    if hits_come_first {
        open.iter().for_each(|number| start(requests, *number, &mut batch));
    }
    batch.finish(&mut |number, delivery| deliver(requests, number, delivery));
    for number in open {
        let (file, request) = &mut requests[number];
        file.read_rest(request);
    }
}

/// Starts to read what a request misses.
fn start<'r>(requests: &mut [Addressed<'r, '_>], number: usize, batch: &mut Batch<'r>) {
    let (file, request) = &requests[number];
    if faults::is_mapped(request.buffer) {
        // Nothing is copied there with a folio's lock in hand, nor while anything is in flight.
        return;
    }
    let end = (request.position + request.buffer.len() as u64).min(file.len());
    let pages = pages_of(&(request.next()..end));
    let file = *file;
    let added = batch.add(&file.handle, pages, number, &mut |number, delivery| {
        deliver(requests, number, delivery);
    });
    if let Err(error) = added {
        fail(requests[number].1, error);
    }
}

fn deliver(requests: &mut [Addressed<'_, '_>], number: usize, delivery: Delivery<'_>) {
    let (file, request) = &mut requests[number];
    match delivery {
        Delivery::Folio(locked) => request.take(&file.handle.inode, &locked),
        Delivery::Failed { error, folios: 1, page } if request.is_at(page) => fail(request, error),
        // Each folio by itself, in the second pass.
        Delivery::Failed { .. } => {}
    }
}

/// A request that reached nothing fails; any other ends before the byte that cannot be read.
fn fail(request: &mut ReadRequest<'_>, error: Error) {
    if request.done() == 0 && !request.is_finished() {
        request.result = Err(error);
    }
}

/// The fewest completions of small transfers that are worth a system call.
const COMPLETIONS_WANTED: usize = 16;

/// A result of a batch, with the number the caller gave to the place.
#[derive(Debug)]
pub(super) enum Delivery<'a> {
    /// A folio that has just become READY.
    Folio(Locked<'a>),
    /// The run of so many folios from `page` on could not be read. If there are several, some may
    /// be readable alone.
    Failed { error: Error, page: u64, folios: usize },
}

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    folios: &'a Folios,
    queue: Queue<'a, (ReadIo, usize)>,
    /// How many transfers, claimed or complete, are worth a system call.
    wanted: usize,
    /// How many are in flight or claimed before some must complete.
    most: usize,
}

impl<'a> Batch<'a> {
    /// An empty batch for files of the cache that `inode` belongs to.
    pub(super) fn new(inode: &'a Inode) -> Self {
        let (folios, queue) = (&inode.memory.folios, inode.engine.queue());
        // Half of what is in flight is claimed, and later handed out, while the device works on the
        // other half. As much again stands ready for the moment when it has answered all.
        let half = queue.depth() / 2;
        let (wanted, most) = (COMPLETIONS_WANTED.max(half), queue.depth() + half);
        Self { folios, queue, wanted, most }
    }

    /// The same for large runs that somebody is waiting for in their order: each is handed out as
    /// soon as it is there.
    pub(super) fn in_order(inode: &'a Inode) -> Self {
        let (folios, queue) = (&inode.memory.folios, inode.engine.queue());
        let most = queue.depth();
        Self { folios, queue, wanted: 1, most }
    }

    /// Starts to read what is absent of `pages` of a file, as the place `number`. Folios that
    /// others are filling are left out.
    ///
    /// # Errors
    /// No frames can be had, and nothing is in flight that could free some.
    pub(super) fn add(
        &mut self,
        handle: &Handle,
        pages: Range<u64>,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) -> Result<()> {
        let mut left = pages;
        while let Some((absent, seen)) = handle.next_absent(left.clone()) {
            let wait = if self.queue.in_flight() == 0 { Wait::ForFrames } else { Wait::Never };
            left.start = match handle.claim_read_io(absent..left.end, seen, wait)? {
                ReadIoClaim::New(run) => {
                    let end = run.first_page() + run.pages();
                    self.start(run, number, deliver);
                    end
                }
                ReadIoClaim::Taken => handle.end_of_folio(absent),
                ReadIoClaim::NoFrame => {
                    self.complete(1, deliver);
                    absent
                }
            };
        }
        Ok(())
    }

    /// Starts a run that was claimed already.
    pub(super) fn start(
        &mut self,
        run: ReadIo,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) {
        if self.queue.in_flight() >= self.most {
            self.complete(self.wanted, deliver);
        } else if self.queue.waiting() == self.wanted {
            // Only now is it known that there are more: a smaller batch leaves in one call.
            self.queue.feed();
        }
        let folios = self.folios;
        run.start(&mut self.queue, number, |run, number| {
            hand_out(folios, run, number, Ok(0), deliver);
        });
    }

    /// Lets the device have what was started.
    pub(super) fn begin(&mut self) {
        self.queue.begin();
    }

    /// Waits for everything that is in flight.
    pub(super) fn finish(mut self, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        loop {
            let in_flight = self.queue.in_flight();
            if in_flight == 0 {
                return;
            }
            let is_last = in_flight <= 2 * self.wanted;
            let wanted = if is_last { in_flight } else { in_flight - self.wanted };
            self.complete(if self.wanted == 1 { 1 } else { wanted }, deliver);
        }
    }

    fn complete(&mut self, wanted: usize, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        let folios = self.folios;
        self.queue.complete_exactly(wanted, |(run, number), answer| {
            hand_out(folios, run, number, answer, deliver);
        });
    }
}

fn hand_out<'a>(
    folios: &'a Folios,
    run: ReadIo,
    number: usize,
    answer: std::result::Result<usize, IoError>,
    deliver: &mut impl FnMut(usize, Delivery<'a>),
) {
    let (page, count) = (run.first_page(), run.folios().len());
    let ended = run.finish(folios, answer, |locked| deliver(number, Delivery::Folio(locked)));
    if let Err(error) = ended {
        deliver(number, Delivery::Failed { error, page, folios: count });
    }
}
