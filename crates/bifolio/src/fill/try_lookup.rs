//! Lookups that return a folio locked and wait for nothing, for asynchronous pins and writes
//! (`file/async_calls`).
//!
//! Like `lookup.rs`, but every place that would wait is an outcome: the caller registers for what
//! is in the way, or reads the page, and looks it up again. A page without bytes in its store is
//! filled with zeros at once.

use super::claim::{Claim, Wait};
use super::transfer::mark_cleared;
use super::{AccessMode, Fill, Locked, own_pins};
use crate::error::Result;
use crate::page::{Entry, FolioRef, Lookup, PAGE_BYTES};
use crate::stats::Counter;

/// Outcome of a lookup that does not wait.
#[derive(Debug)]
pub(crate) enum TryFind<'h> {
    Locked(Locked<'h>),
    /// The bytes must be read from the store first.
    Absent,
    /// Another thread has locked the folio, or is about to evict or move it.
    Busy,
    /// The folio is being written out.
    WriteOut(FolioRef<'h>),
    NoFrame,
}

impl<'h> Fill<'h> {
    /// Returns the folio that holds page `index`, locked and in the table, as
    /// [`Self::lock_folio`](Fill::lock_folio) does. Waits for nothing but frames, and for these
    /// only if `wait` allows it. A folio for a write has no write-out in flight.
    ///
    /// # Errors
    /// Those of `lock_folio` except for errors of the storage.
    pub(crate) fn try_lock_folio(
        self,
        index: u64,
        access: AccessMode,
        wait: Wait,
    ) -> Result<TryFind<'h>> {
        debug_assert!(access.fills_holes());
        let (mapping, memory) = (&self.inode.mapping, &*self.inode.memory);
        loop {
            if !access.may_pass_end() && index * PAGE_BYTES >= mapping.len_bytes() {
                return Err(self.inode.past_end(index * PAGE_BYTES, 1));
            }
            match mapping.try_get_folio(&memory.folios, index) {
                None => return Ok(TryFind::Busy),
                Some(Lookup::Folio(folio)) => {
                    let Some(lock) = folio.try_lock() else {
                        own_pins::check(self.inode, &(index..index + 1))?;
                        return Ok(TryFind::Busy);
                    };
                    // It may have been removed from the table before it was locked.
                    if lock.owner() != self.inode.address {
                        continue;
                    }
                    let is_write = matches!(access, AccessMode::Write { .. });
                    if is_write && lock.flags.write_state().is_writing() {
                        drop(lock);
                        return Ok(TryFind::WriteOut(folio));
                    }
                    let locked = Locked { lock, folio, was_resident: true };
                    if let Some(locked) = self.with_content(locked, access)? {
                        return Ok(TryFind::Locked(locked));
                    }
                }
                Some(Lookup::Absent(seen)) => {
                    self.state.check_sound(&memory.soundness)?;
                    let head = mapping.head_index(index);
                    if !self.has_no_bytes(head, seen) && !self.is_replaced(head, access) {
                        return Ok(TryFind::Absent);
                    }
                    let Some(_room) = self.room(1, false, wait) else {
                        return Ok(TryFind::NoFrame);
                    };
                    match self.claim(head, seen, wait, access.may_pass_end())? {
                        Claim::New(locked) => return self.fill_without_read(locked, seen, access),
                        Claim::Taken => {}
                        Claim::NoFrame => return Ok(TryFind::NoFrame),
                    }
                }
                Some(Lookup::Refused) => return Err(self.inode.too_many_pins(index)),
            }
        }
    }

    /// Fills a new folio whose bytes are all replaced, or zeros. Another thread may have made bytes
    /// for it since it was looked at: then it is removed, and must be read.
    fn fill_without_read(
        self,
        locked: Locked<'h>,
        seen: Entry,
        access: AccessMode,
    ) -> Result<TryFind<'h>> {
        let (inode, head) = (self.inode, locked.lock.index());
        let is_replaced = self.is_replaced(head, access);
        if !is_replaced && !self.has_no_bytes(head, seen) {
            drop(inode.remove_unfilled(&locked.folio, &locked.lock));
            return Ok(TryFind::Absent);
        }
        inode.memory.counters.add(Counter::MissWithoutRead, 1);
        mark_cleared(inode, &locked.lock, None);
        if !is_replaced && let Err(error) = inode.fill_with_zeros(&locked.folio, &locked.lock) {
            drop(inode.remove_unfilled(&locked.folio, &locked.lock));
            return Err(error);
        }
        Ok(TryFind::Locked(locked))
    }

    /// Returns `true` if the store has no byte of a folio without a frame, whose Entry is `seen`.
    fn has_no_bytes(self, head: u64, seen: Entry) -> bool {
        let (position, bytes) = (head * PAGE_BYTES, self.inode.mapping.folio_bytes());
        self.inode.store.has_no_bytes(position, bytes, seen)
    }
}
