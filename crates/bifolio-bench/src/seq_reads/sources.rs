//! The ways to read: the kernel's tmpfs, a memory file in each way, and plain memory.

use std::fs::File;

use rustix::io::pread;

use super::layout::{Layout, Plan};
use super::source::Source;
use crate::error::{Error, Result};
use crate::harness::cached::{Cached, count_of};
use crate::harness::plain_memory::PlainMemory;
use crate::harness::tmpfs::Tmpfs;

/// `kernel_tmpfs`: `pread` of a file in memory. The mount goes with it.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) file: File,
    pub(super) _tmpfs: Tmpfs,
}

impl Source for Kernel {
    fn name(&self) -> &'static str {
        "kernel_tmpfs"
    }

    #[inline(always)]
    fn read(&self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        pread(&self.file, block, pos_bytes).map_err(Error::system("read a file on tmpfs"))
    }
}

/// A way to read a memory file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    /// `read_at`.
    Batched,
    /// With a reference for each page, and briefly the folio lock if `locked`.
    OneByOne { locked: bool },
}

/// A memory file, and how it is read.
#[derive(Debug)]
pub(super) struct MemoryFile {
    pub(super) name: &'static str,
    pub(super) way: Way,
    pub(super) cached: Cached,
}

impl Source for MemoryFile {
    fn name(&self) -> &'static str {
        self.name
    }

    #[inline(always)]
    fn read(&self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        let file = &self.cached.file;
        Ok(match self.way {
            Way::Batched => file.read_at(block, pos_bytes)?,
            Way::OneByOne { locked } => file.read_one_by_one(block, pos_bytes, locked)?,
        })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let stats = self.cached.stats();
        let counters = [("refs", "references_taken"), ("entries", "entries_loaded")];
        let count = |(shown, name)| Some((shown, count_of(&stats, name)?));
        counters.into_iter().filter_map(count).collect()
    }
}

/// `memcpy_limit` of what was written: a copy from memory laid out in the same way.
#[derive(Debug)]
pub(super) struct Copied {
    memory: PlainMemory,
    /// Index of each folio of the file, if not all are in order.
    places: Option<Vec<usize>>,
    folio_bytes: usize,
}

impl Copied {
    pub(super) fn new(plan: &Plan) -> Result<Self> {
        let memory =
            PlainMemory::filled(plan.size_bytes as usize, |bytes| plan.fill_in_order(bytes))?;
        let places = (plan.layout == Layout::Scattered).then(|| plan.places());
        Ok(Self { memory, places, folio_bytes: plan.folio_bytes as usize })
    }

    #[inline(always)]
    fn copy_scattered(&self, places: &[usize], block: &mut [u8], pos_bytes: usize) {
        let bytes = self.memory.bytes();
        // Blocks and folios divide each other, so no piece crosses the end of a folio.
        let piece_bytes = block.len().min(self.folio_bytes);
        let positions = (pos_bytes..).step_by(piece_bytes);
        for (piece, pos_bytes) in block.chunks_mut(piece_bytes).zip(positions) {
            let source = places[pos_bytes / self.folio_bytes] + pos_bytes % self.folio_bytes;
            piece.copy_from_slice(&bytes[source..source + piece.len()]);
        }
    }
}

impl Source for Copied {
    fn name(&self) -> &'static str {
        "memcpy_limit"
    }

    #[inline(always)]
    fn read(&self, block: &mut [u8], pos_bytes: u64) -> Result<usize> {
        // A position of a file in memory fits.
        let pos_bytes = pos_bytes as usize;
        match &self.places {
            None => {
                let bytes = self.memory.bytes();
                block.copy_from_slice(&bytes[pos_bytes..pos_bytes + block.len()]);
            }
            Some(places) => self.copy_scattered(places, block, pos_bytes),
        }
        Ok(block.len())
    }
}

/// `memcpy_limit` of what was not written: zeros into the buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Zeroed;

impl Source for Zeroed {
    fn name(&self) -> &'static str {
        "memcpy_limit"
    }

    #[inline(always)]
    fn read(&self, block: &mut [u8], _pos_bytes: u64) -> Result<usize> {
        block.fill(0);
        Ok(block.len())
    }
}
