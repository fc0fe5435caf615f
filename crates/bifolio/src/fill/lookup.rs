//! Lookups that return a folio locked, and fill it if it is not resident (FILL-L1..L3).

use super::claim::{Claim, Wait};
use super::transfer::{ReadIo, Room, mark_cleared};
use super::{AccessMode, Fill, Locked, own_pins};
use crate::error::Result;
use crate::page::{Flag, FolioRef, FrozenWaits, LockedFolio, Lookup, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::{CallScope, blocking};
use std::time::Instant;

impl<'h> Fill<'h> {
    /// Returns the folio that holds page `index`, locked and in the table. `access` must be one
    /// that allocates holes. Blocks for the lock and for I/O.
    pub(crate) fn lock_folio(self, index: u64, access: AccessMode) -> Result<Locked<'h>> {
        debug_assert!(access.fills_holes());
        self.find_folio(index, access)?.ok_or_else(|| self.inode.past_end(index * PAGE_BYTES, 1))
    }

    /// Returns the folio that holds page `index`, locked and in the table. Returns `None` if
    /// `access` allocates none there ([`AccessMode`]): the page reads as zeros or lies past the end
    /// of file. Blocks for the lock and for I/O.
    pub(crate) fn find_folio(self, index: u64, access: AccessMode) -> Result<Option<Locked<'h>>> {
        self.find_folio_while(index, access, None)
    }

    /// Finds a folio like [`Self::find_folio`]. Also returns `None` once the caller no longer wants
    /// it, which is polled while the thread waits for the lock.
    pub(crate) fn find_folio_while(
        self,
        index: u64,
        access: AccessMode,
        wants: Option<&dyn Fn() -> bool>,
    ) -> Result<Option<Locked<'h>>> {
        let mapping = &self.inode.mapping;
        let memory = &*self.inode.memory;
        let call = CallScope::begin();
        loop {
            if !access.may_pass_end() && index * PAGE_BYTES >= mapping.len_bytes() {
                return Ok(None);
            }
            let mut waits = FrozenWaits::default();
            let found = mapping.get_folio_and_tell(&memory.folios, index, &mut waits);
            if waits.rounds > 0 {
                memory.note_stall(waits.since);
            }
            match found {
                Lookup::Folio(folio) => {
                    // The holder of the lock is writing it out to evict it.
                    let is_writing = folio.folio().flags.write_state().is_writing();
                    let since = is_writing.then(Instant::now);
                    let lock = self.lock_unless_own(&folio, index, wants)?;
                    memory.note_stall(since);
                    let Some(lock) = lock else { return Ok(None) };
                    // It may have been removed from the table while we waited for its lock.
                    if lock.owner() == self.inode.address {
                        let locked = Locked { lock, folio, was_resident: true };
                        return self.with_content(locked, access);
                    }
                }
                Lookup::Absent(seen) => {
                    self.state.check_sound(&memory.soundness)?;
                    let is_hole = self.inode.store.is_hole(seen);
                    if is_hole && !access.fills_holes() {
                        return Ok(None);
                    }
                    let head = mapping.head_index(index);
                    // Checked again with the folio locked.
                    let reads = !is_hole && !self.is_replaced(head, access);
                    let wait = Wait::ForFrames;
                    let Some(room) = self.room(1, reads, wait) else { continue };
                    #[cfg(all(test, not(loom)))]
                    crate::sync::test_hook::reach("before a page is claimed");
                    let claimed = self.claim(head, seen, wait, access.may_pass_end())?;
                    if let Claim::New(locked) = claimed {
                        if !matches!(access, AccessMode::Write { .. }) {
                            // A page of a write is counted when it may become dirty.
                            call.note_page();
                        }
                        return self.fill(locked, room, is_hole, access).map(Some);
                    }
                }
                Lookup::Refused => return Err(self.inode.too_many_pins(index)),
            }
        }
    }

    /// Returns the folio that holds page `index`, locked, if it is resident. Blocks for the lock.
    pub(crate) fn find_resident(self, index: u64) -> Option<Locked<'h>> {
        let found = self.inode.mapping.get_folio(&self.inode.memory.folios, index);
        let Lookup::Folio(folio) = found else { return None };
        let lock = self.inode.lock_folio(&folio);
        let is_ours = lock.owner() == self.inode.address;
        is_ours.then_some(Locked { lock, folio, was_resident: true })
    }

    /// Locks a folio, or fails if the calling thread has it as a `PageRefMut`. Returns `None` once
    /// the caller no longer wants it.
    fn lock_unless_own(
        self,
        folio: &FolioRef<'h>,
        index: u64,
        wants: Option<&dyn Fn() -> bool>,
    ) -> Result<Option<LockedFolio<'h>>> {
        if wants.is_none() {
            blocking::check_user("a folio lock");
        }
        if let Some(lock) = folio.try_lock() {
            return Ok(Some(lock));
        }
        own_pins::check(self.inode, &(index..index + 1))?;
        Ok(match wants {
            Some(wants) => folio.lock_while(wants),
            None => Some(self.inode.lock_folio(folio)),
        })
    }

    /// Gives a resident folio the bytes that `access` needs: one that was allocated and never
    /// written is zeroed, or treated as a hole.
    pub(super) fn with_content(
        self,
        locked: Locked<'h>,
        access: AccessMode,
    ) -> Result<Option<Locked<'h>>> {
        if locked.is_uptodate() {
            return Ok(Some(locked));
        }
        debug_assert!(locked.lock.flags.get(Flag::Allocated), "not uptodate, and not being filled");
        match access {
            AccessMode::Read => return Ok(None),
            AccessMode::Write { .. } if self.is_replaced(locked.lock.index(), access) => {}
            _ => self.inode.fill_with_zeros(&locked.folio, &locked.lock)?,
        }
        Ok(Some(locked))
    }

    /// Fills a folio that was just claimed: reads it on this thread, marks it allocated, or leaves
    /// it to a write that replaces all of it.
    fn fill(
        self,
        locked: Locked<'h>,
        room: Room<'_>,
        is_hole: bool,
        access: AccessMode,
    ) -> Result<Locked<'h>> {
        match access {
            AccessMode::Write { .. } if self.is_replaced(locked.lock.index(), access) => {
                self.inode.memory.counters.add(Counter::MissWithoutRead, 1);
                mark_cleared(self.inode, &locked.lock, None);
                Ok(locked)
            }
            AccessMode::Falloc if is_hole => {
                locked.lock.flags.set(Flag::Allocated);
                self.inode.mark_dirty(&locked.folio, &locked.lock);
                Ok(locked)
            }
            _ => {
                let room = room.of_at_least(locked.lock.pages());
                let mut run = ReadIo::new(self.inode, locked.lock.index(), room);
                run.push(locked);
                run.read_first(self.inode)
            }
        }
    }

    /// Returns `true` if `access` is a write that replaces all bytes of the file in the folio that
    /// starts at page `head`. Stays true while the folio is locked: bytes that the file gains there
    /// by growing elsewhere are zeros.
    pub(super) fn is_replaced(self, head: u64, access: AccessMode) -> bool {
        let AccessMode::Write { start, end } = access else { return false };
        let (folio_start, mapping) = (head * PAGE_BYTES, &self.inode.mapping);
        let folio_bytes = mapping.folio_bytes();
        let on_backing = folio_start + self.inode.store.bytes_from(folio_start, folio_bytes);
        let len_bytes = mapping.len_bytes().min(folio_start + folio_bytes);
        start == folio_start && end >= len_bytes.max(on_backing)
    }
}
