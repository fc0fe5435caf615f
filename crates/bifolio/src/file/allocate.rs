//! Allocation in memory files: room that is there when it is needed.

use super::File;
use super::access::Access;
use super::fill::Locked;
use crate::error::Result;
use crate::page::{Flag, pages_of};
use std::ops::Range;

impl File {
    /// Reserves memory for `range` of a memory file: what is a hole there gets folios, which read
    /// as zeros until they are written, and later writes there need no more memory. The file is at
    /// least `range.end` long afterwards, as after `posix_fallocate`. With a swap, what is
    /// reserved may be swapped out like what is written.
    ///
    /// Blocks for memory.
    ///
    /// # Errors
    /// Not a memory file; the bound leaves no room: then the file is as it was; a handle not opened
    /// for writing; a length beyond what the file was made for.
    pub fn allocate(&self, range: Range<u64>) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        handle.check_memory_file("allocate")?;
        let end = handle.range_end(range.start, range.end.saturating_sub(range.start))?;
        handle.check_len(end)?;
        if range.is_empty() {
            return Ok(());
        }
        let mut growth = self.begin_growth(end)?;
        let mut allocated = Vec::new();
        let outcome = self.allocate_pages(pages_of(&range), &mut allocated);
        if outcome.is_err() {
            allocated.into_iter().for_each(|pages| self.take_back(pages));
        } else {
            growth.reach(end);
        }
        outcome
    }

    /// Allocates what is a hole of `pages`; notes in `allocated`, run by run, what it was.
    fn allocate_pages(&self, pages: Range<u64>, allocated: &mut Vec<Range<u64>>) -> Result<()> {
        let mut index = pages.start;
        while index < pages.end {
            let unit_end = self.handle.end_of_folio(index);
            if self.allocate_unit(index)? {
                match allocated.last_mut() {
                    Some(last) if last.end == index => last.end = unit_end,
                    _ => allocated.push(index..unit_end),
                }
            }
            index = unit_end;
        }
        Ok(())
    }

    /// Whether the unit that holds page `index` was a hole.
    fn allocate_unit(&self, index: u64) -> Result<bool> {
        let inode = &self.handle.inode;
        let head = inode.mapping.head_index(index);
        let seen = inode.mapping.table().load(head, crate::sync::Ordering::Relaxed);
        if inode.is_absent(seen) {
            // In the swap: it has its room there.
            return Ok(false);
        }
        let locked = self.handle.lock_folio(index, Access::Falloc)?;
        if !locked.lock.flags.write_state().is_dirty() && locked.lock.slot() == 0 {
            // Zeros that were pinned: what is clean and nowhere else may go.
            inode.mark_dirty(&locked.folio, &locked.lock);
        }
        Ok(!locked.was_resident && locked.lock.flags.get(Flag::Allocated))
    }

    /// Makes holes again of what is allocated and was not used or promised meanwhile.
    fn take_back(&self, pages: Range<u64>) {
        let inode = &self.handle.inode;
        for index in pages.step_by(1 << inode.mapping.order()) {
            if let Some(Locked { folio, lock, .. }) = self.handle.find_resident(index)
                && lock.flags.get(Flag::Allocated)
            {
                inode.remove_unwanted(folio, lock);
            }
        }
    }
}
