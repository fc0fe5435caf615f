//! Creation of a file: in which order it is written, or that it is not written.
//!
//! The same order is used for the file of the kernel, the files of the caches, and the plain memory
//! of the limit: the i-th piece written is the i-th piece of the memory, because free frames are
//! allocated in order.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};

use crate::error::{Error, Result};
use crate::harness::pattern::{self, CHUNK_BYTES};
use crate::harness::permutation::Permutation;

const SEED: u64 = 5;

/// How the file is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Written from its first byte to its last.
    Written,
    /// Written folio by folio in random order, like in an aged cache.
    Scattered,
    /// Reserved and never written.
    Allocated,
    /// Nothing but a length.
    Hole,
}

impl Layout {
    pub(super) const ALL: [Self; 4] = [Self::Written, Self::Scattered, Self::Allocated, Self::Hole];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Scattered => "scattered",
            Self::Allocated => "allocated",
            Self::Hole => "hole",
        }
    }

    /// Returns `true` if the file holds the pattern, otherwise zeros.
    pub(super) fn is_filled(self) -> bool {
        matches!(self, Self::Written | Self::Scattered)
    }
}

/// A layout of a file of this many bytes in folios of this size; whole folios.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    pub(super) size_bytes: u64,
    pub(super) folio_bytes: u64,
}

impl Plan {
    /// How much is written at once.
    fn piece_bytes(&self) -> usize {
        match self.layout {
            Layout::Scattered => self.folio_bytes as usize,
            _ => CHUNK_BYTES.min(self.size_bytes as usize),
        }
    }

    /// The positions of all pieces, in the order in which they are written.
    fn positions(&self) -> impl Iterator<Item = u64> + use<> {
        let piece_bytes = self.piece_bytes() as u64;
        let pieces = self.size_bytes.div_ceil(piece_bytes);
        let scattered = self.layout == Layout::Scattered;
        let order = scattered.then(|| Permutation::new(pieces, SEED));
        (0..pieces).map(move |index| order.map_or(index, |order| order.apply(index)) * piece_bytes)
    }

    /// Creates such a file in `target`, which is new.
    pub(super) fn make(&self, target: &impl Target) -> Result<()> {
        target.lengthen(self.size_bytes)?;
        match self.layout {
            Layout::Hole => Ok(()),
            Layout::Allocated => target.reserve(self.size_bytes),
            Layout::Written | Layout::Scattered => {
                let mut piece = vec![0; self.piece_bytes()];
                for pos_bytes in self.positions() {
                    let left_bytes = self.size_bytes - pos_bytes;
                    let piece_bytes = left_bytes.min(piece.len() as u64) as usize;
                    pattern::fill(&mut piece[..piece_bytes], pos_bytes);
                    target.put(&piece[..piece_bytes], pos_bytes)?;
                }
                Ok(())
            }
        }
    }

    /// Returns the index of each folio of the file in memory that was filled in the order of
    /// writing.
    pub(super) fn places(&self) -> Vec<usize> {
        let folio_bytes = self.folio_bytes;
        let mut places = vec![0; (self.size_bytes / folio_bytes) as usize];
        for (place, pos_bytes) in self.positions().enumerate() {
            places[(pos_bytes / folio_bytes) as usize] = place * folio_bytes as usize;
        }
        places
    }

    /// Fills such memory.
    pub(super) fn fill_in_order(&self, memory: &mut [u8]) {
        let pieces = memory.chunks_mut(self.piece_bytes());
        pieces.zip(self.positions()).for_each(|(piece, at)| pattern::fill(piece, at));
    }
}

/// A file that can be created.
pub(super) trait Target {
    fn lengthen(&self, len_bytes: u64) -> Result<()>;
    fn reserve(&self, len_bytes: u64) -> Result<()>;
    fn put(&self, bytes: &[u8], pos_bytes: u64) -> Result<()>;
}

impl Target for File {
    fn lengthen(&self, len_bytes: u64) -> Result<()> {
        self.set_len(len_bytes).map_err(Error::system("set the length of a file on tmpfs"))
    }

    fn reserve(&self, len_bytes: u64) -> Result<()> {
        fallocate(self, FallocateFlags::empty(), 0, len_bytes)
            .map_err(Error::system("allocate a file on tmpfs"))
    }

    fn put(&self, bytes: &[u8], pos_bytes: u64) -> Result<()> {
        self.write_all_at(bytes, pos_bytes).map_err(Error::system("write a file on tmpfs"))
    }
}

impl Target for bifolio::File {
    fn lengthen(&self, len_bytes: u64) -> Result<()> {
        Ok(self.set_len(len_bytes)?)
    }

    fn reserve(&self, len_bytes: u64) -> Result<()> {
        Ok(self.allocate(0..len_bytes)?)
    }

    fn put(&self, bytes: &[u8], pos_bytes: u64) -> Result<()> {
        Ok(self.write_all_at(bytes, pos_bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLIO_BYTES: u64 = 8192;

    fn plan(layout: Layout) -> Plan {
        Plan { layout, size_bytes: 3 << 20, folio_bytes: FOLIO_BYTES }
    }

    #[test]
    fn a_file_holds_the_same_bytes_in_whatever_order_it_is_written() {
        for layout in Layout::ALL {
            let file = tempfile::tempfile().unwrap();
            if plan(layout).make(&file).is_err() {
                assert_eq!(layout, Layout::Allocated, "not every file system can");
                continue;
            }
            let mut bytes = vec![1; 3 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert_eq!(pattern::matches(&bytes, 0), layout.is_filled(), "{layout:?}");
            assert_eq!(bytes.iter().all(|&byte| byte == 0), !layout.is_filled(), "{layout:?}");
        }
    }

    #[test]
    fn each_folio_is_found_where_it_was_put() {
        let plan = plan(Layout::Scattered);
        let mut memory = vec![0; 3 << 20];
        plan.fill_in_order(&mut memory);
        let places = plan.places();
        for (folio, place) in places.iter().enumerate() {
            let bytes = &memory[*place..place + FOLIO_BYTES as usize];
            assert!(pattern::matches(bytes, folio as u64 * FOLIO_BYTES));
        }
        let follows = |pair: &&[usize]| pair[1] == pair[0] + FOLIO_BYTES as usize;
        let neighbours = places.windows(2).filter(follows).count();
        assert!(neighbours < 10, "{neighbours} of {}", places.len());
    }
}
