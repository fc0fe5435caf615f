//! Batches: runs at several positions, or of several files, that one call reads together.
//!
//! A batch claims its runs and adds them to a [`FillQueue`]. With runs in the queue it skips folios
//! that another thread is filling, and when frames run short, it completes its own transfers first
//! (IO-5). So a batch of any length works in a cache of any size.

use super::claim::{ReadIoClaim, Wait};
use super::queue::FillQueue;
use super::transfer::ReadIo;
use super::{Fill, Locked};
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::page::Folios;
use crate::reclaim::Haste;
use std::ops::Range;

/// Result of a run of a batch, delivered with the number that the caller gave to the run.
#[derive(Debug)]
pub(crate) enum Delivery<'a> {
    /// Folio that has just become READY.
    Folio(Locked<'a>),
    /// Run of `folios` folios from `page` on that could not be read. Some folios of a longer run
    /// may be readable alone.
    Failed { error: Error, page: u64, folios: usize },
}

/// Set of runs that are claimed and read together by one queue.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    folios: &'a Folios,
    queue: FillQueue<'a, usize>,
    /// Number of transfers, claimed or complete, that is worth a system call.
    wanted: usize,
    /// Number of transfers in flight or claimed at which `add` waits for completions.
    most: usize,
    is_hasty: bool,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch for files of the cache that `inode` belongs to.
    pub(crate) fn new(inode: &'a Inode) -> Self {
        let queue = FillQueue::new(&inode.engine);
        let (wanted, most) = (queue.completions_wanted(), queue.prepared_max());
        Self { folios: &inode.memory.folios, queue, wanted, most, is_hasty: false }
    }

    /// Creates a batch for large runs that a reader consumes in order: each run is delivered as
    /// soon as it completes.
    pub(crate) fn in_order(inode: &'a Inode) -> Self {
        let queue = FillQueue::new(&inode.engine);
        let most = queue.depth();
        Self { folios: &inode.memory.folios, queue, wanted: 1, most, is_hasty: false }
    }

    /// From now on, fails if nothing can be evicted, instead of waiting.
    pub(crate) fn hurry(&mut self) {
        self.is_hasty = true;
    }

    /// Starts to read the absent folios of `pages` of a file, under `number`. Skips folios that
    /// other threads are filling.
    ///
    /// # Errors
    /// No frames are available, and nothing is in flight whose completion could free some.
    pub(crate) fn add(
        &mut self,
        fill: Fill<'_>,
        pages: Range<u64>,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) -> Result<()> {
        let mut left = pages;
        while let Some((absent, seen)) = fill.next_absent(left.clone()) {
            let wait = if self.queue.runs() == 0 { Wait::ForFrames } else { Wait::Never };
            let claimed = {
                let _haste = self.is_hasty.then(Haste::begin);
                fill.claim_run(absent..left.end, seen, wait)?
            };
            left.start = match claimed {
                ReadIoClaim::New(run) => {
                    let end = run.end_page();
                    self.start(run, number, deliver);
                    end
                }
                ReadIoClaim::Taken => fill.inode.mapping.end_of_unit(absent),
                ReadIoClaim::NoFrame => {
                    self.complete(1, deliver);
                    absent
                }
            };
        }
        Ok(())
    }

    pub(crate) fn start(
        &mut self,
        run: ReadIo,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) {
        if self.queue.runs() >= self.most {
            self.complete(self.wanted, deliver);
        } else if self.queue.waiting() == self.wanted {
            // Only now the batch is known to be larger than this; a smaller one is submitted in one
            // call.
            self.queue.feed();
        }
        self.queue.add(run, number);
        self.hand_out(deliver);
    }

    pub(crate) fn begin(&mut self) {
        self.queue.begin();
    }

    /// Waits for everything in flight.
    pub(crate) fn finish(mut self, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        loop {
            let in_flight = self.queue.runs();
            if in_flight == 0 {
                return;
            }
            let is_last = in_flight <= 2 * self.wanted;
            let wanted = if is_last { in_flight } else { in_flight - self.wanted };
            self.complete(if self.wanted == 1 { 1 } else { wanted }, deliver);
        }
    }

    fn complete(&mut self, wanted: usize, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        self.queue.wait_for(wanted);
        self.hand_out(deliver);
    }

    fn hand_out(&mut self, deliver: &mut impl FnMut(usize, Delivery<'a>)) {
        while let Some(ended) = self.queue.next_ended() {
            let (page, folios, number) =
                (ended.run.first_page(), ended.run.folios().len(), ended.note);
            let published =
                ended.publish(self.folios, |locked| deliver(number, Delivery::Folio(locked)));
            if let Err(error) = published {
                deliver(number, Delivery::Failed { error, page, folios });
            }
        }
    }
}
