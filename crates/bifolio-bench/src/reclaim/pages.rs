//! Accesses of a worker to the words of its pages: mapped, or without a cache.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::direct::Page;
use crate::harness::span::Span;

const WORD_BYTES: usize = size_of::<u64>();

/// Access of one worker to its pages; all accesses between two calls of `leave_page` are in one
/// page.
pub(super) trait Pages: Send {
    fn load(&mut self, pos_bytes: u64) -> Result<u64>;
    fn store(&mut self, pos_bytes: u64, word: u64) -> Result<()>;
    /// Ends the accesses to the current page.
    fn leave_page(&mut self) -> Result<()>;
}

/// Mapped memory: plain loads and stores.
impl Pages for Span {
    #[inline(always)]
    fn load(&mut self, pos_bytes: u64) -> Result<u64> {
        Ok(Self::load(self, pos_bytes))
    }

    #[inline(always)]
    fn store(&mut self, pos_bytes: u64, word: u64) -> Result<()> {
        Self::store(self, pos_bytes, word);
        Ok(())
    }

    #[inline(always)]
    fn leave_page(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A file without a cache: a page is read at its first access and, if it was changed, written at
/// its last.
#[derive(Debug)]
pub(super) struct Uncached<'a> {
    file: &'a File,
    page: Box<Page>,
    start_bytes: Option<u64>,
    changed: bool,
}

impl<'a> Uncached<'a> {
    /// Creates it for a file that is open past the page cache.
    pub(super) fn new(file: &'a File) -> Self {
        Self { file, page: Page::zeroed(), start_bytes: None, changed: false }
    }

    /// Returns the word at `pos_bytes`, after reading its page.
    fn word(&mut self, pos_bytes: u64) -> Result<&mut [u8]> {
        let at_bytes = (pos_bytes % PAGE_BYTES as u64) as usize;
        if self.start_bytes.is_none() {
            let start_bytes = pos_bytes - at_bytes as u64;
            let failed = Error::system("read past the page cache");
            self.file.read_exact_at(&mut self.page.0, start_bytes).map_err(failed)?;
            self.start_bytes = Some(start_bytes);
        }
        debug_assert_eq!(self.start_bytes, Some(pos_bytes - at_bytes as u64));
        Ok(&mut self.page.0[at_bytes..at_bytes + WORD_BYTES])
    }
}

impl Pages for Uncached<'_> {
    fn load(&mut self, pos_bytes: u64) -> Result<u64> {
        let mut word = [0; WORD_BYTES];
        word.copy_from_slice(self.word(pos_bytes)?);
        Ok(u64::from_ne_bytes(word))
    }

    fn store(&mut self, pos_bytes: u64, word: u64) -> Result<()> {
        self.word(pos_bytes)?.copy_from_slice(&word.to_ne_bytes());
        self.changed = true;
        Ok(())
    }

    fn leave_page(&mut self) -> Result<()> {
        let changed = std::mem::take(&mut self.changed);
        match self.start_bytes.take() {
            Some(start_bytes) if changed => self
                .file
                .write_all_at(&self.page.0, start_bytes)
                .map_err(Error::system("write past the page cache")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_written_when_it_is_left_and_forgotten() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * PAGE_BYTES as u64).unwrap();
        let mut pages = Uncached::new(&file);
        pages.store(4096, 7).unwrap();
        pages.store(8184, 8).unwrap();
        pages.leave_page().unwrap();
        file.write_all_at(&9u64.to_ne_bytes(), 4096).unwrap();
        assert_eq!((pages.load(4096).unwrap(), pages.load(8184).unwrap()), (9, 8));
        pages.leave_page().unwrap();
        assert_eq!(pages.load(0).unwrap(), 0);
        file.write_all_at(&1u64.to_ne_bytes(), 8).unwrap();
        pages.leave_page().unwrap();
        assert_eq!(pages.load(8).unwrap(), 1, "a page that was only read is not written");
    }
}
