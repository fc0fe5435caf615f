//! The ablation of reads: with references, in batches as proposed for Linux's tmpfs (the mode
//! `SGP_GET`, 2026), or a page at a time, as tmpfs does without it.
//!
//! One by one, each page is looked up, referenced, copied and put before the next is looked at; in
//! the locked mode the folio lock is taken for a moment in between, to check whose it is and what
//! it holds. In batches, up to 31 references are taken before the copies and put after them. Pages
//! stay atomic: each is validated by its Entry, as everywhere. One by one, large folios go page by
//! page, too, though tmpfs without the proposal copies as much of one as was asked for: at 2 MiB
//! the figure is what a reference for each page costs. What is not resident is read as in the
//! default mode. Compiled for benchmarks only.
//!
//! # Safety
//! Copies out of frames that a reference keeps.
#![allow(unsafe_code)]

use super::File;
use super::read::goes_on;
use crate::ablation::ReadMode;
use crate::page::{
    Entry, Flag, FolioRef, Lookup, PAGE_BYTES, PAGE_SHIFT, is_in_one_page, read_validated,
};
use crate::stats::Counter;
use crate::sys::copy;

impl File {
    /// The way of [`File::read_resident`](super::File) in the other modes; `None` in the default
    /// one, and where a file can be mapped.
    #[inline(always)]
    pub(super) fn read_by_mode(&self, buffer: &mut [u8], position: u64) -> Option<usize> {
        match self.handle.ablation.modes().reads {
            ReadMode::Batched => None,
            // Its references are another thing.
            _ if self.handle.inode.page_space.is_in_place() => None,
            ReadMode::BatchedReferences => Some(self.read_by_references(buffer, position)),
            mode => Some(self.read_one_by_one(buffer, position, mode)),
        }
    }

    fn read_by_references(&self, buffer: &mut [u8], position: u64) -> usize {
        let file = self.handle.inode.mapping.hot();
        let goes_on = goes_on(file, position, buffer.len() as u64);
        let continues = self.handle.readahead.continues(position);
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            let is_whole = is_in_one_page(at, left.len() as u64);
            let batch = self.gather(at, left.len() as u64);
            let copied = self.copy_resident(left, at, batch.end, continues || done > 0, goes_on);
            done += copied;
            if copied == 0 || is_whole {
                break;
            }
        }
        done
    }

    fn read_one_by_one(&self, buffer: &mut [u8], position: u64, mode: ReadMode) -> usize {
        let continues = self.handle.readahead.continues(position);
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let in_order = continues || done > 0;
            let locked = mode == ReadMode::LockedOneByOne;
            let is_whole = is_in_one_page(at, (buffer.len() - done) as u64);
            let copied = self.read_page(&mut buffer[done..], at, locked, in_order);
            done += copied;
            if copied == 0 || is_whole {
                break;
            }
        }
        done
    }

    /// Reads what the page at `position` has of the bytes; 0 if it is absent, busy, or behind the
    /// end.
    fn read_page(&self, buffer: &mut [u8], position: u64, locked: bool, in_order: bool) -> usize {
        let inode = &self.handle.inode;
        let counters = &inode.memory.counters;
        let index = position >> PAGE_SHIFT;
        let in_page = position & (PAGE_BYTES - 1);
        let in_page_left = (PAGE_BYTES - in_page).min(buffer.len() as u64);
        if position >= inode.mapping.len_bytes() {
            return 0;
        }
        let visible = || inode.mapping.len_bytes().saturating_sub(position).min(in_page_left);
        match inode.mapping.get_folio(&inode.memory.folios, index) {
            Lookup::Folio(folio) if self.has_bytes(&folio, locked) => {
                counters.note_lookups(1, 4);
                let word = inode.mapping.table().word(index);
                let copied = read_validated(word, Entry::is_ready, |entry| {
                    let source = inode.page_space.page_address(index, entry);
                    let target = &mut buffer[..visible() as usize];
                    // SAFETY: every Entry leads to a frame of the arena (ENTRY-1), which stays
                    // mapped (FRAMES-2); the bytes end inside the frame; `target` is not in it.
                    unsafe { copy::copy_out(source.wrapping_add(in_page as usize), target) };
                    target.len()
                });
                if copied.is_some() {
                    counters.add(Counter::HitPinned, 1);
                    if in_page == 0 || !in_order {
                        self.note_use(index, in_order);
                    }
                }
                copied.unwrap_or(0)
            }
            Lookup::Refused => 0,
            _ => {
                counters.note_lookups(0, 1);
                let bytes = visible() as usize;
                // Looked at after the length: an append fills a hole before it sets the length.
                let zeros = if self.reads_as_zeros(index) { bytes } else { 0 };
                buffer[..zeros].fill(0);
                zeros
            }
        }
    }

    /// Whether the folio is this file's and uptodate.
    fn has_bytes(&self, folio: &FolioRef<'_>, locked: bool) -> bool {
        if !locked {
            return folio.folio().flags.get(Flag::Uptodate);
        }
        let lock = folio.lock();
        lock.owner() == self.handle.inode.address() && lock.flags.get(Flag::Uptodate)
    }
}
