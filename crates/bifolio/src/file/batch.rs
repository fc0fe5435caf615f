//! A batch of fills: runs of several places, or several files, on their way in together.
//!
//! Used by `read_many.rs`, `pin_many` and `readahead`. Runs are claimed and handed to one queue of
//! the engine, which keeps as many transfers in flight as its depth and hands them out in whatever
//! order they complete. While anything is in flight nobody here waits for a folio lock or for
//! frames (IO-5): what somebody else is filling is left out, and when frames run short, what is in
//! flight ends first. So batches never wait for each other, and a batch of any length works in a
//! cache of any size.

use super::fill::{Locked, ReadIoClaim, Wait};
use super::handle::Handle;
use super::read_io::ReadIo;
use crate::error::{Error, Result};
use crate::io::{IoError, Queue};
use crate::page::Folios;
use crate::sync::Ordering;
use crate::writeback::Inode;
use std::ops::Range;

/// The fewest completions of small transfers that are worth a system call.
const COMPLETIONS_WANTED: usize = 16;

/// What a batch hands out, with the number the caller gave to the place.
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
        while let Some(absent) = handle.next_absent(left.clone()) {
            let wait = if self.queue.in_flight() == 0 { Wait::ForFrames } else { Wait::Never };
            left.start = match handle.claim_read_io(absent..left.end, wait)? {
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

impl Handle {
    /// The first page of `pages` that has bytes, and whose folio is neither resident nor on its
    /// way.
    pub(super) fn next_absent(&self, pages: Range<u64>) -> Option<u64> {
        let mapping = &self.inode.mapping;
        let mut index = pages.start;
        while index < pages.end {
            let head = mapping.head_index(index);
            if self.inode.is_absent(mapping.table().load(head, Ordering::Relaxed)) {
                return Some(index);
            }
            index = self.end_of_folio(index);
        }
        None
    }

    /// One page behind the folio that holds page `index`.
    pub(super) fn end_of_folio(&self, index: u64) -> u64 {
        self.inode.mapping.end_of_unit(index)
    }
}
