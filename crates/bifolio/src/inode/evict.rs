//! Eviction: removes folios from memory, and leaves in the table what the store needs to find their
//! bytes.
//!
//! # Safety
//! Copies between frames of folios that the caller has locked.
#![allow(unsafe_code)]

use super::Inode;
use crate::memory::Shadow;
use crate::page::{
    EvictError, Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio, OldFolio, PAGE_BYTES,
    WriteState,
};
use crate::sys::copy;

impl Inode {
    /// Evicts a folio (`Mapping::evict`), and leaves in the table where its bytes are.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        shadow: Shadow,
    ) -> std::result::Result<Frozen<'a>, EvictError<'a>> {
        debug_assert!(!self.memory.arena.is_region_page(folio.id()), "it is unmapped first");
        let frozen =
            self.mapping.evict(folio, locked, |_| self.store.entry_after(locked, Some(shadow)))?;
        self.store.note_out_of_table(locked);
        Ok(frozen)
    }

    /// Returns `true` if a locked folio may move to other frames: it is filled, no write-out of it
    /// is in flight, and it is not dirty for a device (WRITEBACK-1).
    pub(crate) fn may_move(&self, locked: &LockedFolio<'_>) -> bool {
        locked.flags.get(Flag::Uptodate)
            && match locked.flags.write_state() {
                WriteState::Clean => true,
                WriteState::Dirty => self.device.is_none(),
                _ => false,
            }
    }

    /// Drops the content of a locked folio, dirty or not, that is about to be removed from the
    /// table. No write-out of it is in flight.
    pub(crate) fn forget_content(&self, folio: &Folio, id: FolioId) {
        self.store.drop_slot(folio);
        self.dirty.forget(&self.memory.folios, id);
        self.store.note_removed_pages(folio.pages());
    }

    /// Replaces the folio `old` by the folio `new` in other frames, just started and locked, and
    /// copies its bytes (`Mapping::relocate`). Returns `None`, with nothing changed, if another
    /// thread uses it. The caller moves the dirty state and the slots before it unlocks `new`.
    pub(crate) fn relocate<'a>(
        &'a self,
        old: OldFolio<'a>,
        new: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Option<Frozen<'a>> {
        let arena = &self.memory.arena;
        let (from, length) = (arena.address(old.folio.id()), locked.pages() * PAGE_BYTES);
        let copy = || {
            // SAFETY: a frame whose lock the caller holds, so that no thread changes it.
            let bytes = unsafe { std::slice::from_raw_parts(from, length as usize) };
            // SAFETY: the frames, of that length, of a folio that is in no table yet and whose lock
            // the caller holds: no other thread writes them.
            unsafe { copy::copy_in(arena.address(new.id()), bytes) };
        };
        let for_table = new.try_clone()?;
        self.mapping.relocate(&self.memory.folios, old, locked, for_table, copy).ok()
    }

    /// Moves the dirty state from `old` to `new`, locked, which has its bytes since a relocation,
    /// in one step.
    pub(crate) fn pass_dirt(&self, old: &Frozen<'_>, new: FolioId) {
        // Done first: a dirty folio has its number where the slot would be (rule 4 of `page`).
        self.store.drop_slot(old.folio());
        self.dirty.replace(&self.memory.folios, old.id(), new);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::page::Lookup;
    use crate::{Cache, File, OpenOptions};
    use std::time::Duration;

    /// A sync that walks the dirty list finds a folio in it until it is written out.
    #[test]
    fn a_folio_that_is_dirty_for_a_device_does_not_move() {
        let hour = Duration::from_secs(60 * 60);
        let cache = Cache::builder().memory(1 << 20).dirty_age_max(hour).build().unwrap();
        let options = OpenOptions::new().write(true);
        let disk = cache.open_fd(tempfile::tempfile().unwrap().into(), &options).unwrap();
        let scratch = cache.memory_file("scratch").unwrap();
        let may_move = |file: &File| {
            let inode = &file.handle.inode;
            let found = inode.mapping.get_folio(&inode.memory.folios, 0);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            inode.may_move(&folio.lock())
        };
        disk.write_all_at(&[1; 100], 0).unwrap();
        scratch.write_all_at(&[1; 100], 0).unwrap();
        assert!(!may_move(&disk) && may_move(&scratch));
        disk.sync_data().unwrap();
        assert!(may_move(&disk));
    }
}
