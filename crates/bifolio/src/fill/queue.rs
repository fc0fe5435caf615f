//! A queue of runs: the one way in which many fills are in progress at a time, for batches
//! ([`Batch`]), readahead (`file/readahead/mod.rs`) and asynchronous reads
//! (`file/async_calls/server.rs`).
//!
//! A run whose transfer has ended stays in this queue, with its folios locked, until its user takes
//! it and publishes it. While runs are in the queue, its thread waits for nothing else: for no
//! folio lock and for no frame (IO-5). A batch skips folios that another thread is filling, and
//! completes its own transfers first when frames run short.

use super::claim::{ReadIoClaim, Wait};
use super::transfer::ReadIo;
use super::{Fill, Locked};
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::io::{Engine, Queue};
use crate::page::Folios;
use crate::reclaim::Haste;
use crate::sys::ring::Bell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Minimum number of completions of small transfers that is worth a system call.
const COMPLETIONS_WANTED: usize = 16;

type Transfers<'e, T> = Queue<'e, (ReadIo, T)>;
type OnDone<'d, T> = dyn FnMut((ReadIo, T), Result<usize>) + 'd;

/// Runs in progress, each with a note of the user about it.
#[derive(Debug)]
pub(crate) struct FillQueue<'e, T> {
    pub(crate) transfers: Transfers<'e, T>,
    pub(crate) ended: VecDeque<Ended<T>>,
    /// Pages of the runs whose transfers have not ended.
    pub(crate) pages: u64,
}

#[derive(Debug)]
pub(crate) struct Ended<T> {
    pub(crate) run: ReadIo,
    pub(crate) note: T,
    answer: Result<usize>,
}

impl<T> Ended<T> {
    pub(crate) fn publish<'a>(
        self,
        folios: &'a Folios,
        visit: impl FnMut(Locked<'a>),
    ) -> Result<()> {
        self.run.finish(folios, self.answer, visit)
    }
}

impl<'e, T> FillQueue<'e, T> {
    pub(crate) fn new(engine: &'e Engine) -> Self {
        Self { transfers: engine.queue(), ended: VecDeque::new(), pages: 0 }
    }

    /// Returns the number of small transfers at which no more are started: the depth is in flight,
    /// and half as many are prepared for the case that the device completes all at once.
    pub(crate) fn prepared_max(&self) -> usize {
        self.transfers.depth() + self.transfers.depth() / 2
    }

    /// Returns the number of completions of small transfers that is worth a system call.
    pub(crate) fn completions_wanted(&self) -> usize {
        COMPLETIONS_WANTED.max(self.transfers.depth() / 2)
    }

    pub(crate) fn runs(&self) -> usize {
        self.transfers.in_flight() + self.ended.len()
    }

    /// Adds a run (FILL-T1); the next begin or wait starts its transfer. A run that the
    /// storage has no bytes of has ended at once.
    pub(crate) fn add(&mut self, run: ReadIo, note: T) {
        let pages = run.pages();
        match run.start(&mut self.transfers, note) {
            Some((run, note)) => self.ended.push_back(Ended { run, note, answer: Ok(0) }),
            None => self.pages += pages,
        }
    }

    /// Waits until a transfer has ended, and collects all that have ended.
    pub(crate) fn wait(&mut self) {
        self.collect(|transfers, on_done| transfers.complete(1, on_done));
    }

    /// Waits for exactly `wanted` transfers, and submits few at a time meanwhile. For users that
    /// add runs all the time.
    pub(crate) fn wait_for(&mut self, wanted: usize) {
        self.collect(|transfers, on_done| transfers.complete_exactly(wanted, on_done));
    }

    /// Waits until a transfer has ended or `bell` is rung, and collects all that have ended.
    pub(crate) fn wait_or_rung(&mut self, bell: &Arc<Bell>) {
        self.collect(|transfers, on_done| transfers.complete_or_rung(bell, on_done));
    }

    fn collect(&mut self, complete: impl FnOnce(&mut Transfers<'e, T>, &mut OnDone<'_, T>)) {
        let Self { transfers, ended, pages } = self;
        complete(transfers, &mut |(run, note), answer| {
            *pages -= run.pages();
            ended.push_back(Ended { run, note, answer });
        });
    }
}

/// Result of a run of a batch, delivered with the number that the caller gave to the run.
#[derive(Debug)]
pub(crate) enum Delivery<'a> {
    /// Folio that has just become READY.
    Folio(Locked<'a>),
    /// Run of `folios` folios from `page` on that could not be read. Some folios of a longer run
    /// may be readable alone.
    Failed { error: Error, page: u64, folios: usize },
}

#[derive(Debug)]
pub(crate) struct Batch<'a> {
    folios: &'a Folios,
    queue: FillQueue<'a, usize>,
    /// Number of transfers, claimed or complete, that is worth a system call.
    wanted: usize,
    /// Number of transfers in flight or claimed at which `add` waits for completions.
    most: usize,
    /// Set if calls fail, instead of waiting, if nothing can be evicted.
    pub(crate) is_hasty: bool,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(inode: &'a Inode) -> Self {
        let queue = FillQueue::new(&inode.engine);
        let (wanted, most) = (queue.completions_wanted(), queue.prepared_max());
        Self { folios: &inode.memory.folios, queue, wanted, most, is_hasty: false }
    }

    /// Creates a batch for large runs that a reader consumes in order: each run is delivered as
    /// soon as it completes.
    pub(crate) fn in_order(inode: &'a Inode) -> Self {
        let batch = Self::new(inode);
        Self { wanted: 1, most: batch.queue.transfers.depth(), ..batch }
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
        loop {
            let wait = if self.queue.runs() == 0 { Wait::ForFrames } else { Wait::Never };
            let claimed = {
                let _haste = self.is_hasty.then(Haste::begin);
                fill.claim_next(&mut left, wait)?
            };
            match claimed {
                ReadIoClaim::New(run) => self.start(run, number, deliver),
                ReadIoClaim::Taken => return Ok(()),
                ReadIoClaim::NoFrame => self.complete(1, deliver),
            }
        }
    }

    /// Starts a run, and waits for others first if enough are in flight. Small batches are
    /// submitted in one call.
    pub(crate) fn start(
        &mut self,
        run: ReadIo,
        number: usize,
        deliver: &mut impl FnMut(usize, Delivery<'a>),
    ) {
        if self.queue.runs() >= self.most {
            self.complete(self.wanted, deliver);
        } else if self.queue.transfers.waiting() == self.wanted {
            // Only now the batch is known to be larger than this; a smaller one is submitted in one
            // call.
            self.queue.transfers.feed();
        }
        self.queue.add(run, number);
        self.hand_out(deliver);
    }

    pub(crate) fn begin(&mut self) {
        self.queue.transfers.begin();
    }

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
        while let Some(ended) = self.queue.ended.pop_front() {
            let (page, folios, number) = (ended.run.first, ended.run.folios.len(), ended.note);
            let published =
                ended.publish(self.folios, |locked| deliver(number, Delivery::Folio(locked)));
            if let Err(error) = published {
                deliver(number, Delivery::Failed { error, page, folios });
            }
        }
    }
}
