//! The content of the benchmarks' files: every 8-byte word encodes its position.
//!
//! The word at position `pos` is `pos * MULTIPLIER + ADDEND` (wrapping), in the machine's byte
//! order. The multiplier is odd, so no two words of a file are equal; the function is linear, so
//! that [`Sums`] can check any number of reads with two additions each. Benchmarks that write put
//! later versions of the same words; a new file holds version 0.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::access::PAGE_BYTES;
use super::memory_group::patiently;
use crate::error::{Error, Result};
use crate::progress::Progress;

const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const ADDEND: u64 = 0xd1b5_4a32_d192_ed03;
const WORD_BYTES: usize = size_of::<u64>();

/// Returns the word at `pos_bytes` in that version.
pub(crate) fn word_at(pos_bytes: u64, version: u32) -> u64 {
    let addend = ADDEND.wrapping_add(u64::from(version) << 32);
    pos_bytes.wrapping_mul(MULTIPLIER).wrapping_add(addend)
}

/// Bytes written, read or compared at once.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// Fills `bytes` with a version of the content at `pos_bytes`, both whole words.
pub(crate) fn fill(bytes: &mut [u8], pos_bytes: u64, version: u32) {
    assert_eq!(pos_bytes % WORD_BYTES as u64, 0);
    assert_eq!(bytes.len() % WORD_BYTES, 0);
    let positions = (pos_bytes..).step_by(WORD_BYTES);
    for (word, pos_bytes) in bytes.chunks_exact_mut(WORD_BYTES).zip(positions) {
        word.copy_from_slice(&word_at(pos_bytes, version).to_ne_bytes());
    }
}

/// Returns `true` if `bytes` are that version of the content at `pos_bytes`.
pub(crate) fn matches(bytes: &[u8], pos_bytes: u64, version: u32) -> bool {
    let positions = (pos_bytes..).step_by(WORD_BYTES);
    pos_bytes.is_multiple_of(WORD_BYTES as u64)
        && bytes.len().is_multiple_of(WORD_BYTES)
        && bytes
            .chunks_exact(WORD_BYTES)
            .zip(positions)
            .all(|(word, pos_bytes)| word == word_at(pos_bytes, version).to_ne_bytes())
}

/// Creates the file `path` of `size_bytes`, durable when this returns.
pub(crate) fn make_file(path: &Path, size_bytes: u64, progress: &mut dyn Progress) -> Result<()> {
    let write = || Error::system(format!("write {}", path.display()));
    let mut file = File::create_new(path).map_err(write())?;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut pos_bytes = 0;
    while pos_bytes < size_bytes {
        let left = usize::try_from(size_bytes - pos_bytes).unwrap_or(usize::MAX);
        let part = &mut chunk[..left.min(CHUNK_BYTES)];
        fill(part, pos_bytes, 0);
        let mut rest = &part[..];
        while !rest.is_empty() {
            // In a control group, which a file that is written fills with dirty pages.
            let written = patiently(|| file.write(rest)).map_err(write())?;
            rest = &rest[written..];
        }
        pos_bytes += part.len() as u64;
        progress.advance(part.len() as u64);
    }
    file.sync_all().map_err(write())
}

/// Checks words of the file, all at once.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    sum: u64,
    positions: u64,
    words: u64,
}

impl Sums {
    /// Adds the first word of a block.
    #[inline(always)]
    pub(crate) fn add<const BLOCK: usize>(&mut self, block: &[u8; BLOCK], pos_bytes: u64) {
        const { assert!(BLOCK >= WORD_BYTES) };
        let word = block.first_chunk().copied().unwrap_or_default();
        self.sum = self.sum.wrapping_add(u64::from_ne_bytes(word));
        self.positions = self.positions.wrapping_add(pos_bytes);
        self.words += 1;
    }

    /// Adds all words of a block.
    #[inline]
    pub(crate) fn add_all(&mut self, block: &[u8], pos_bytes: u64) {
        let (words, _) = block.as_chunks::<WORD_BYTES>();
        let sum = words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_ne_bytes(*word)));
        let count = words.len() as u64;
        self.sum = self.sum.wrapping_add(sum);
        // The sum of the positions of words that follow each other.
        let offsets = count * count.saturating_sub(1) / 2 * WORD_BYTES as u64;
        self.positions =
            self.positions.wrapping_add(pos_bytes.wrapping_mul(count)).wrapping_add(offsets);
        self.words += count;
    }

    pub(crate) fn words(&self) -> u64 {
        self.words
    }

    /// Returns `true` if the words were those of their positions. Exact: all of it is arithmetic
    /// modulo 2^64.
    pub(crate) fn agree(&self) -> bool {
        let scaled = self.positions.wrapping_mul(MULTIPLIER);
        self.sum == scaled.wrapping_add(self.words.wrapping_mul(ADDEND))
    }
}

/// Interval of blocks that are compared as a whole.
const WHOLE_INTERVAL: u64 = 64;

/// Checks the bytes that a timed loop of one thread reads, cheaply: the first word of every page,
/// and every 64th block as a whole.
#[derive(Debug)]
pub(crate) struct Checker {
    series: &'static str,
    sums: Sums,
    blocks: u64,
    verified_bytes: u64,
}

impl Checker {
    /// Creates a checker; `series` is named when bytes are wrong.
    pub(crate) fn new(series: &'static str) -> Self {
        Self { series, sums: Sums::default(), blocks: 0, verified_bytes: 0 }
    }

    /// Adds one block of whole pages.
    #[inline]
    pub(crate) fn add(&mut self, block: &[u8], pos_bytes: u64) -> Result<()> {
        let (pages, rest) = block.as_chunks::<PAGE_BYTES>();
        debug_assert!(rest.is_empty());
        for (page, pos_bytes) in pages.iter().zip((pos_bytes..).step_by(PAGE_BYTES)) {
            self.sums.add(page, pos_bytes);
        }
        if self.blocks.is_multiple_of(WHOLE_INTERVAL) {
            if !matches(block, pos_bytes, 0) {
                return Err(self.wrong(pos_bytes));
            }
            self.verified_bytes += block.len() as u64;
        }
        self.blocks += 1;
        Ok(())
    }

    /// Returns the number of bytes compared.
    pub(crate) fn finish(self) -> Result<u64> {
        if !self.sums.agree() {
            return Err(self.wrong(0));
        }
        Ok(self.verified_bytes + self.sums.words() * size_of::<u64>() as u64)
    }

    /// Returns the error of this series for a read at `pos_bytes`.
    pub(crate) fn wrong(&self, pos_bytes: u64) -> Error {
        Error::WrongBytes { series: self.series.to_owned(), pos_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn a_file_holds_the_pattern_and_a_word_out_of_place_does_not_match() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let size_bytes = CHUNK_BYTES as u64 + 4096;
        make_file(&path, size_bytes, &mut Silent).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, size_bytes);
        assert!(matches(&bytes, 0, 0) && !matches(&bytes, 8, 0));
        bytes[4095] ^= 1;
        assert!(!matches(&bytes, 0, 0));
        fill(&mut bytes, 4096, 3);
        assert!(matches(&bytes, 4096, 3) && !matches(&bytes, 4096, 2));
        assert!(make_file(&path, 8, &mut Silent).is_err(), "never overwrites");
    }

    #[test]
    fn sums_tell_a_block_of_another_position() {
        let (mut sums, mut all) = (Sums::default(), Sums::default());
        let mut block = [0; 64];
        for pos_bytes in [0, 640, 64, 640, 1 << 40] {
            fill(&mut block, pos_bytes, 0);
            sums.add(&block, pos_bytes);
            all.add_all(&block, pos_bytes);
        }
        assert!(sums.agree() && all.agree());
        assert_eq!((sums.words(), all.words()), (5, 40));
        sums.add(&block, 192);
        block[63] ^= 1;
        all.add_all(&block, 1 << 40);
        assert!(!sums.agree() && !all.agree());
    }
}
