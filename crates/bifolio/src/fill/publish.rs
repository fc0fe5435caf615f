//! Publication: the third step of a fill. Each folio of a run whose transfer has ended is checked
//! and becomes READY, or is removed from the table (FILL-P1..P4).
//!
//! # Safety
//! Zeroes and copies parts of frames, and of staging memory, whose folios it has locked.
#![allow(unsafe_code)]

use super::transfer::{Locked, ReadIo};
use crate::error::Result;
use crate::inode::Inode;
use crate::page::{Flag, Folios, PAGE_BYTES};
use crate::stats::Counter;
use crate::sys::copy;
use std::ops::Range;
use std::sync::Arc;

/// Folios of a region that are checked, installed with one call, and unlocked together. The reader
/// of the first page of a transfer continues while the others follow: with all 256 pages at once,
/// the slowest read of a sequential scan takes up to 0.63 ms instead of 0.49 ms; with 16, the scan
/// needs a tenth more CPU.
const INSTALLED_TOGETHER: usize = 64;

impl ReadIo {
    /// Ends the fill. `answer` is the result of the transfer: the number of bytes read from the
    /// start of the run. Each folio whose bytes were read becomes READY and is passed to `visit`,
    /// locked. The first folio that was not read and all after it are removed from the table.
    ///
    /// # Errors
    /// The error of the transfer, or a short read: the backing has shrunk.
    pub(crate) fn finish<'a>(
        mut self,
        folios: &'a Folios,
        answer: Result<usize>,
        mut visit: impl FnMut(Locked<'a>),
    ) -> Result<()> {
        let inode = Arc::clone(&self.inode);
        let answer =
            answer.map_err(|source| inode.store.read_error(self.first * PAGE_BYTES, source))?;
        let bytes = (answer as u64).min(self.expected_bytes);
        inode.memory.counters.add(Counter::ReadBytes, bytes);
        // The zeros past the end are stores of this thread, which may not have inserted the folios.
        inode.mapping.begin_fill();
        let mut done = 0;
        while done < self.folios.len() {
            // The reader copies each frame while it is in the CPU's cache.
            let group = if self.staged.is_some() { INSTALLED_TOGETHER } else { 1 };
            let group_end = self.folios.len().min(done + group);
            let (valid_end, checked) = self.check(folios, done..group_end, bytes);
            // Pages that raw writers can already see stay, even if the rest fails.
            let (there, installed) = self.install(done..valid_end);
            for id in &self.folios[done..done + there] {
                let locked = Locked::adopt(folios, *id);
                inode.mapping.mark_uptodate(&locked.lock);
                visit(locked);
            }
            done += there;
            if let Err(error) = installed.and(checked) {
                // The drop of the rest removes it (FILL-P4).
                self.folios.drain(..done);
                return Err(error);
            }
        }
        self.folios.clear();
        Ok(())
    }

    /// FILL-P1: checks a group of folios, starting at `group.start`, against the `bytes` that the
    /// transfer read. Returns the end of the valid ones, and the error of the next. Zeroes the
    /// bytes past the end of the storage.
    fn check(&self, folios: &Folios, group: Range<usize>, bytes: u64) -> (usize, Result<()>) {
        for number in group.clone() {
            let locked = Locked::adopt(folios, self.folios[number]);
            let checked = self.check_one(number, &locked, bytes);
            let _still_locked = locked.detach();
            if let Err(error) = checked {
                return (number, Err(error));
            }
        }
        (group.end, Ok(()))
    }

    fn check_one(&self, number: usize, locked: &Locked<'_>, bytes: u64) -> Result<()> {
        let (inode, folio_bytes) = (&*self.inode, self.inode.mapping.folio_bytes());
        let offset = number as u64 * folio_bytes;
        let part = |bytes: u64| bytes.saturating_sub(offset).min(folio_bytes);
        let (read, expected) = (part(bytes), part(self.expected_bytes));
        let position = self.first * PAGE_BYTES + offset;
        // A short read is an error, unless this cache truncated the file concurrently: a
        // truncation sets the length first.
        let visible = inode.mapping.len_bytes().saturating_sub(position);
        if read < expected.min(visible) {
            let folio = locked.folio.folio();
            return Err(inode.store.cut_short(folio, position, expected.min(visible), read));
        }
        let start = self.target(number, self.folios[number]);
        let checked = inode.store.check_filled(&locked.folio, start, &inode.memory.counters);
        let is_old = inode.clearing.mark(&locked.lock, self.cleared_before);
        checked?;
        let valid = if is_old { 0 } else { read };
        if valid < folio_bytes {
            let behind = start.wrapping_add(valid as usize);
            // SAFETY: inside the folio's frame, or its part of the staging memory, which only the
            // holder of its lock writes: this thread.
            unsafe { copy::zero(behind, (folio_bytes - valid) as usize) };
        }
        Ok(())
    }

    /// FILL-P2: installs staged folios in the region. Returns the end of the installed ones.
    fn install(&self, group: Range<usize>) -> (usize, Result<()>) {
        let Some(staged) = self.staged.as_ref().filter(|_| !group.is_empty()) else {
            return (group.len(), Ok(()));
        };
        let pages = self.first + group.start as u64..self.first + group.end as u64;
        let source = staged.address(group.start);
        let (there, outcome) = self.inode.install(pages, source, self.will_be_stored);
        (there as usize, outcome)
    }
}

/// Copies the part of a folio that has just been filled to `buffer`, whose first byte has
/// `position`. Returns the number of bytes: 0 if the folio does not hold that byte. A folio further
/// ahead was read early: it is marked as readahead, and copied later.
pub(crate) fn copy_filled(
    inode: &Inode,
    locked: &Locked<'_>,
    buffer: &mut [u8],
    position: u64,
) -> usize {
    let folio_start = locked.lock.index() * PAGE_BYTES;
    let folio_end = folio_start + locked.lock.pages() * PAGE_BYTES;
    let folio_end = folio_end.min(inode.mapping.len_bytes());
    if position < folio_start {
        // This discards a use since the folio became READY, which is only a hint.
        locked.lock.flags.set(Flag::Readahead);
        return 0;
    }
    let length = (folio_end.saturating_sub(position) as usize).min(buffer.len());
    let source = inode
        .page_space
        .address(locked.folio.id(), locked.lock.index())
        .wrapping_add((position - folio_start) as usize);
    // SAFETY: inside a frame whose folio `locked` has locked: no thread writes it now; `buffer` is
    // the caller's memory.
    unsafe { copy::copy_out(source, &mut buffer[..length]) };
    length
}
