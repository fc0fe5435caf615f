//! A queue of runs: the one way in which many fills are in progress at a time, for batches
//! (`batch.rs`), readahead (`file/readahead/worker.rs`) and asynchronous reads
//! (`file/async_reads/server.rs`).
//!
//! The engine's queue keeps as many transfers in flight as its depth and returns them in completion
//! order. A run whose transfer has ended stays in this queue, with its folios locked, until its
//! user takes it and publishes it. While runs are in the queue, its thread waits for nothing else:
//! for no folio lock and for no frame (IO-5). So queues never wait for each other.

use super::Locked;
use super::transfer::ReadIo;
use crate::error::Result;
use crate::io::{Engine, Queue};
use crate::page::Folios;
use crate::sys::ring::Bell;
use std::collections::VecDeque;
use std::sync::Arc;

/// Minimum number of completions of small transfers that is worth a system call.
const COMPLETIONS_WANTED: usize = 16;

type Transfers<'e, T> = Queue<'e, (ReadIo, T)>;
type OnDone<'d, T> = dyn FnMut((ReadIo, T), Result<usize>) + 'd;

/// Runs in progress, each with a note of the user about it.
#[derive(Debug)]
pub(crate) struct FillQueue<'e, T> {
    transfers: Transfers<'e, T>,
    ended: VecDeque<Ended<T>>,
    /// Pages of the runs whose transfers have not ended.
    pages: u64,
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

    /// Returns the maximum number of transfers in flight; further ones wait to be started.
    pub(crate) fn depth(&self) -> usize {
        self.transfers.depth()
    }

    /// Returns the number of small transfers, in flight or prepared, at which no more are started:
    /// the depth is in flight, and half as many are prepared for the case that the device completes
    /// all at once.
    pub(crate) fn prepared_max(&self) -> usize {
        self.depth() + self.depth() / 2
    }

    /// Returns the number of completions of small transfers that is worth a system call. While the
    /// device works on half of the depth, the other half is claimed, and later published.
    pub(crate) fn completions_wanted(&self) -> usize {
        COMPLETIONS_WANTED.max(self.depth() / 2)
    }

    pub(crate) fn runs(&self) -> usize {
        self.transfers.in_flight() + self.ended.len()
    }

    /// Returns the pages of the runs whose transfers have not ended.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the number of transfers that were added but not started.
    pub(super) fn waiting(&self) -> usize {
        self.transfers.waiting()
    }

    /// Adds a run (FILL-T1); the next [`Self::begin`] or wait starts its transfer. A run that the
    /// storage has no bytes of has ended at once.
    pub(crate) fn add(&mut self, run: ReadIo, note: T) {
        let pages = run.pages();
        match run.start(&mut self.transfers, note) {
            Some((run, note)) => self.ended.push_back(Ended { run, note, answer: Ok(0) }),
            None => self.pages += pages,
        }
    }

    pub(crate) fn begin(&mut self) {
        self.transfers.begin();
    }

    /// Submits some of the added transfers if few or none are in flight.
    pub(super) fn feed(&mut self) {
        self.transfers.feed();
    }

    pub(crate) fn next_ended(&mut self) -> Option<Ended<T>> {
        self.ended.pop_front()
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
