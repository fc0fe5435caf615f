//! Folios that were unmapped (B8 and B9 of `unmap.rs`): some are being written out while others
//! are gathered for the next transfer.
//!
//! The bounce buffer of the swapper has two halves: one with the copies of what is in flight, one
//! for what is gathered. When that is enough for a transfer, they change places. Others write
//! nothing out: their bounce buffer is one part, and empty again when the pages are judged.

use crate::memory::{BounceBuffer, Memory, Region};
use crate::page::{FolioRef, LockedFolio};
use crate::stats::Counter;
use crate::sync::MutexGuard;
use crate::writeback::{CopyAt, InFlight, Inode, UnmappedWriteBatch, WriteVictim};
use std::ops::Range;

/// Folios that are written out together, if there are so many: a transfer of 1 MiB.
const TRANSFER_FOLIOS: usize = 256;

/// The same while somebody waits for single pages. Each waits behind no more than this: the device
/// takes 300 us for 1 MiB.
const PORTION_FOLIOS: usize = 32;

/// See the head of the file. All of one file.
#[derive(Debug)]
pub(super) struct UnmappedBatch<'t> {
    inode: &'t Inode,
    /// What is in flight ends before the copies and the locks go. None as long as nothing is to be
    /// written out: whoever may not wait never writes out.
    batch: Option<UnmappedWriteBatch<'t>>,
    in_flight: Vec<Unmapped<'t>>,
    gathered: Vec<Unmapped<'t>>,
    leaving: Vec<WriteVictim<'t>>,
    bounce_buffer: MutexGuard<'t, BounceBuffer>,
    /// Parts of it: two where one is written out while the other fills.
    parts: usize,
    /// Which part of the bounce buffer is for what is gathered, from 0.
    half: usize,
    /// So many pages of it have copies, and gaps: of those that were unmapped with them and did not
    /// leave.
    pages_used: usize,
}

/// One folio: locked, in the table, its page nowhere but at `copy`.
#[derive(Debug)]
pub(super) struct Unmapped<'t> {
    // The lock goes before the reference.
    pub(super) lock: LockedFolio<'t>,
    pub(super) folio: FolioRef<'t>,
    pub(super) copy: CopyAt,
}

impl<'t> UnmappedBatch<'t> {
    /// None yet. Waits until the bounce buffer is free: that of those who write out, or of the
    /// others.
    pub(super) fn new(inode: &'t Inode, region: &'t Region, writes: bool) -> Self {
        let regions = region.regions();
        Self {
            inode,
            batch: None,
            in_flight: Vec::new(),
            gathered: Vec::new(),
            leaving: Vec::new(),
            bounce_buffer: if writes {
                regions.swap_bounce_buffer()
            } else {
                regions.bounce_buffer()
            },
            parts: if writes { 2 } else { 1 },
            half: 0,
            pages_used: 0,
        }
    }

    pub(super) fn inode(&self) -> &'t Inode {
        self.inode
    }

    pub(super) fn is_of(&self, inode: &Inode) -> bool {
        std::ptr::eq(self.inode, inode)
    }

    /// How many there are.
    pub(super) fn folios(&self) -> usize {
        self.in_flight.len() + self.gathered.len()
    }

    /// Whether enough are gathered.
    pub(super) fn is_a_transfer(&self) -> bool {
        self.gathered.len() >= TRANSFER_FOLIOS
    }

    pub(super) fn bounce_buffer(&mut self) -> &mut BounceBuffer {
        &mut self.bounce_buffer
    }

    /// How many pages can be kept beyond their unmapping.
    pub(super) fn places(&self) -> usize {
        self.bounce_buffer.page_pipe.places()
    }

    fn half_pages(&self) -> usize {
        self.bounce_buffer.pages() / self.parts
    }

    /// The pages of the bounce buffer that have no copies.
    pub(super) fn room(&self) -> Range<usize> {
        let half_pages = self.half_pages();
        let first = self.half * half_pages;
        first + self.pages_used..first + half_pages
    }

    /// Gathers a folio whose write-out has begun; its copy is on `page` of the bounce buffer.
    pub(super) fn add(&mut self, page: usize, left: Unmapped<'t>, in_flight: InFlight) {
        self.pages_used = page + 1 - self.half * self.half_pages();
        let again = left.folio.try_clone();
        let folio = again.expect("a folio that was just frozen has two references");
        self.leaving.push(WriteVictim { folio, in_flight, copy: Some(left.copy) });
        self.gathered.push(left);
    }

    /// Waits for what is in flight and gives it back; starts to write out what was gathered, and
    /// waits for all but the last portion of it. Nothing is frozen.
    pub(super) fn rotate(&mut self, memory: &Memory) -> Vec<Unmapped<'t>> {
        if let Some(batch) = &mut self.batch {
            batch.wait();
        }
        let ended = std::mem::take(&mut self.in_flight);
        memory.counters.add(Counter::PageOut, self.gathered.len() as u64);
        let are_single = memory.region_reads.are_single();
        let portion_folios = if are_single { PORTION_FOLIOS } else { TRANSFER_FOLIOS };
        let leaving = std::mem::take(&mut self.leaving);
        if !leaving.is_empty() {
            let batch = self.batch.get_or_insert_with(|| UnmappedWriteBatch::new(self.inode));
            batch.start(leaving, portion_folios);
        }
        self.in_flight = std::mem::take(&mut self.gathered);
        self.half = (self.half + 1) % self.parts;
        self.pages_used = 0;
        ended
    }
}
