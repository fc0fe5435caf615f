//! Reads one page at a time, as tmpfs does: the baseline that batched reads are measured against.
//!
//! Compiled for benchmarks only. Each page is looked up, referenced, copied and released before the
//! next one, even within a large folio. Pages that are not resident are read by [`File::read_at`].
//!
//! # Safety
//! Copies from frames that a reference keeps.
#![allow(unsafe_code)]

use super::File;
use crate::error::Result;
use crate::page::{
    Entry, Flag, FolioRef, Lookup, PAGE_BYTES, PAGE_SHIFT, is_in_one_page, read_validated,
};
use crate::stats::Counter;
use crate::sys::copy;

impl File {
    /// Reads like [`File::read_at`], with a reference for each page; for benchmarks only. With
    /// `locked`, also takes the folio lock briefly, to check the owner and the content of the page.
    /// Files that can be mapped are read by `read_at`.
    ///
    /// # Errors
    /// Fails like [`File::read_at`].
    pub fn read_one_by_one(&self, buffer: &mut [u8], position: u64, locked: bool) -> Result<usize> {
        if self.handle.inode.page_space.is_in_place() {
            return self.read_at(buffer, position);
        }
        self.handle.check_readable()?;
        self.handle.range_end(position, buffer.len() as u64)?;
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let left = &mut buffer[done..];
            let is_whole = is_in_one_page(at, left.len() as u64);
            let copied = match self.copy_one_by_one(left, at, locked) {
                0 => {
                    let in_page_left = (PAGE_BYTES - (at & (PAGE_BYTES - 1))) as usize;
                    let end = left.len().min(in_page_left);
                    self.read_at(&mut left[..end], at)
                }
                copied => Ok(copied),
            };
            match copied {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(error) if done == 0 => return Err(error),
                // The bytes read so far are valid; the next call returns the error.
                Err(_) => break,
            }
            self.handle.note_read(at..position + done as u64);
            if is_whole {
                break;
            }
        }
        Ok(done)
    }

    /// Copies from resident pages, one by one, from the first byte on. Returns 0 if the first page
    /// is not resident.
    fn copy_one_by_one(&self, buffer: &mut [u8], position: u64, locked: bool) -> usize {
        let continues = self.handle.readahead.continues(position);
        let mut done = 0;
        while done < buffer.len() {
            let at = position + done as u64;
            let is_whole = is_in_one_page(at, (buffer.len() - done) as u64);
            let copied = self.read_page(&mut buffer[done..], at, locked, continues || done > 0);
            done += copied;
            if copied == 0 || is_whole {
                break;
            }
        }
        done
    }

    /// Reads the part of the bytes that lies in the page at `position`. Returns 0 if the page is
    /// absent, locked, or past the end of file.
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
                self.fill_zeros(&mut buffer[..in_page_left as usize], position)
            }
        }
    }

    /// Returns `true` if the folio belongs to this file and is uptodate.
    fn has_bytes(&self, folio: &FolioRef<'_>, locked: bool) -> bool {
        if !locked {
            return folio.folio().flags.get(Flag::Uptodate);
        }
        let lock = folio.lock();
        lock.owner() == self.handle.inode.address && lock.flags.get(Flag::Uptodate)
    }
}
