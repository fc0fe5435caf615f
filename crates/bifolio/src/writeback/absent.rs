//! Entries without a folio: what they mean for each kind of file, and what a folio leaves behind.
//!
//! | Entry | a file with a backing | a memory file |
//! |---|---|---|
//! | hole | on the backing | zeros, nowhere |
//! | value | on the backing; the shadow of an eviction | in the swap; the slot |
//!
//! One place for these decisions: `file` asks here before it fills, `reclaim` when it evicts. The
//! slot of a page wanders between the Entry and the folio's descriptor (SWAP-1):
//!
//! ```text
//!   value(slot) --take_over--> clean folio with the slot --evict--> value(slot)
//!                                 |            ^
//!                              mark_dirty      | its write-out ended (swap_out.rs)
//!                                 v            |
//!                              dirty folio, no slot
//! ```

use super::inode::Inode;
use super::store::Store;
use crate::memory::Shadow;
use crate::page::{Entry, EvictError, Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio};
use crate::swap::Swap;
use std::sync::Arc;

impl Inode {
    /// The swap of a memory file, if there is one.
    pub(crate) fn swap(&self) -> Option<&Arc<Swap>> {
        match &self.store {
            Store::Disk(_) => None,
            Store::Memory(memory) => memory.swap(),
        }
    }

    /// Whether the page has no bytes anywhere, and reads as zeros.
    pub(crate) fn is_hole(&self, seen: Entry) -> bool {
        self.is_memory_file() && seen == Entry::HOLE
    }

    /// Whether the page has bytes, and no folio.
    pub(crate) fn is_absent(&self, seen: Entry) -> bool {
        !seen.is_folio() && !self.is_hole(seen)
    }

    /// The first page from `index` on that has anything in the table; in a memory file swapped out
    /// bytes, too.
    pub(crate) fn next_occupied(&self, index: u64) -> Option<u64> {
        let table = self.mapping.table();
        if self.is_memory_file() { table.next_occupied(index) } else { table.next_folio(index) }
    }

    /// Whether reclaim can do anything with folios of this file.
    pub(crate) fn is_evictable(&self) -> bool {
        !self.is_memory_file() || self.swap().is_some()
    }

    /// What the last eviction of the page left for the replacement policy.
    pub(crate) fn shadow_of(&self, seen: Entry) -> Option<Shadow> {
        let value = seen.as_value()?;
        Some(self.swap().map_or(Shadow(value), |swap| swap.shadow(value as u32)))
    }

    /// A folio that was just put where `seen` stood takes over what that named.
    pub(crate) fn take_over(&self, locked: &LockedFolio<'_>, seen: Entry) {
        let Some(swap) = self.swap() else { return };
        match seen.as_value() {
            Some(slot) => locked.set_slot(slot as u32),
            None => swap.note_born(locked.pages()),
        }
    }

    /// Whether one transfer can read the folio `last` and, next to it, one that finds `seen`.
    pub(crate) fn continues(&self, last: FolioId, seen: Entry) -> bool {
        let last = self.memory.folio(last);
        let slot_after = || u64::from(last.slot()) + last.pages();
        !self.is_memory_file() || seen.as_value() == Some(slot_after())
    }

    /// Evicts a folio (`Mapping::evict`) and leaves what finds its bytes again.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        shadow: Shadow,
    ) -> Result<Frozen<'a>, EvictError<'a>> {
        debug_assert!(self.frames.region().is_none(), "a region's pages are unmapped first");
        let frozen =
            self.mapping.evict(folio, locked, |page| self.left_by(locked, page, shadow))?;
        self.note_gone_if(locked.slot() == 0, locked.pages());
        Ok(frozen)
    }

    /// Ends the eviction of a folio that is frozen, not dirty, and unmapped; and frees it.
    pub(crate) fn end_eviction(&self, frozen: Frozen<'_>, locked: LockedFolio<'_>, shadow: Shadow) {
        let leave = |page| self.left_by(&locked, page, shadow);
        self.mapping.end_eviction(&frozen, &locked, leave);
        self.note_gone_if(locked.slot() == 0, locked.pages());
        // E5: the next life of the frame must not find it locked.
        drop(locked);
        frozen.free();
    }

    /// What a folio that is not dirty leaves at the head of a unit.
    fn left_by(&self, locked: &LockedFolio<'_>, page: u64, shadow: Shadow) -> Entry {
        if !self.is_memory_file() {
            return if page == 0 { Entry::value(shadow.0) } else { Entry::HOLE };
        }
        if let Some(swap) = self.swap().filter(|_| locked.slot() != 0) {
            swap.set_shadow(locked.slot() + page as u32, shadow);
        }
        left_in_memory_file(locked, page)
    }

    /// Puts the page at `source` in the place of a locked folio of a region that is not uptodate,
    /// and makes it uptodate. It stops being one that reads as zeros before it is there: raw
    /// writers go on then, and what they store is to be seen at once.
    ///
    /// # Errors
    /// The kernel has no memory for it: the folio is as it was.
    pub(crate) fn install_page(
        &self,
        locked: &LockedFolio<'_>,
        source: *const u8,
        will_be_stored: bool,
    ) -> crate::error::Result<()> {
        let pages = locked.index()..locked.index() + 1;
        let was_allocated = locked.flags.get(Flag::Allocated);
        // Readers that see the page as it was have begun before it is there: `copy` is a system
        // call, and who waited for it comes after that.
        locked.flags.clear(Flag::Allocated);
        let (_, installed) = self.install(pages, source, will_be_stored);
        #[cfg(all(test, not(loom)))]
        tests::meanwhile();
        if installed.is_ok() {
            self.mapping.mark_uptodate(locked);
        } else if was_allocated {
            locked.flags.set(Flag::Allocated);
        }
        installed
    }

    /// Takes a folio out of the table that never got its bytes: what it took over stands there
    /// again. The table's reference is returned.
    pub(crate) fn remove_unfilled<'a>(
        &'a self,
        folio: &FolioRef<'a>,
        locked: &LockedFolio<'_>,
    ) -> FolioRef<'a> {
        let folios = &self.memory.folios;
        if !self.is_memory_file() {
            return self.mapping.remove(folio, locked, folios, |_| Entry::HOLE);
        }
        self.note_gone_if(locked.slot() == 0, locked.pages());
        self.mapping.remove(folio, locked, folios, |page| left_in_memory_file(locked, page))
    }

    /// The bytes of a locked folio are no longer wanted, dirty or not; no write-out of it is in
    /// flight. It is about to leave the table.
    pub(super) fn forget_content(&self, folio: &Folio, id: FolioId) {
        self.drop_slot(folio);
        self.dirty.forget(&self.memory.folios, id);
        self.note_gone_if(true, folio.pages());
    }

    /// Gives back what `seen`, an Entry without a folio, names at the head `index`.
    pub(super) fn forget_absent(&self, index: u64, seen: Entry) {
        let (Some(swap), Some(slot)) = (self.swap(), seen.as_value()) else { return };
        if self.mapping.take_value(index, seen) {
            let pages = 1 << self.mapping.order();
            swap.give_back(slot as u32, pages);
            self.note_gone_if(true, u64::from(pages));
        }
    }

    /// The bytes of a folio, locked or frozen, will no longer be those of its slot. No write-out of
    /// it is in flight.
    pub(super) fn drop_slot(&self, folio: &Folio) {
        if let Some(swap) = self.swap()
            && !folio.flags.write_state().is_dirty()
            && folio.slot() != 0
        {
            swap.give_back(folio.slot(), folio.pages() as u32);
            folio.set_slot(0);
        }
    }

    /// The folio `new`, locked, has the bytes of all of `old` since a collapse: it is dirty from
    /// now on, and they are not, in one step.
    pub(crate) fn pass_dirt(&self, old: &[Frozen<'_>], new: FolioId) {
        // Before: what is dirty has a number where the slot would be (rule 4 of `page`).
        old.iter().for_each(|frozen| self.drop_slot(frozen.folio()));
        self.dirty.replace(&self.memory.folios, old.iter().map(Frozen::id), new);
    }

    fn note_gone_if(&self, is_gone: bool, pages: u64) {
        if let Some(swap) = self.swap().filter(|_| is_gone) {
            swap.note_gone(pages);
        }
    }
}

/// What a folio of a memory file that is not dirty leaves at the head of a unit.
fn left_in_memory_file(locked: &LockedFolio<'_>, page: u64) -> Entry {
    match locked.slot() {
        0 => Entry::HOLE,
        slot => Entry::value(u64::from(slot) + page),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::page::PAGE_BYTES;
    use std::cell::RefCell;

    thread_local! {
        /// What happens once a page is there, and not uptodate.
        static MEANWHILE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    pub(super) fn meanwhile() {
        if let Some(action) = MEANWHILE.take() {
            action();
        }
    }

    /// Once `install` has put an allocated page there, which raw writers may have stored to then,
    /// nobody takes it for zeros.
    fn check_while_not_uptodate(install: impl FnOnce(&File)) {
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.memory_file_with("stores", &options) else { return };
        file.set_len(PAGE_BYTES).unwrap();
        file.allocate(0..PAGE_BYTES).unwrap();
        assert_eq!(file.read_resident(&mut [1; 8], 0), 8, "allocated and never written");
        assert_eq!(file.seek_data(0).unwrap(), None);
        let other = file.clone();
        MEANWHILE.set(Some(Box::new(move || {
            assert_eq!(other.read_resident(&mut [1; 8], 0), 0, "readers wait for the lock");
            assert_eq!(other.seek_data(0).unwrap(), Some(0));
        })));
        install(&file);
        assert!(MEANWHILE.take().is_none(), "the page was put there by this thread");
    }

    #[test]
    fn an_allocated_page_that_a_map_may_store_to_is_no_hole() {
        check_while_not_uptodate(|file| drop(file.pin(0..8).unwrap()));
    }

    #[test]
    fn an_allocated_page_that_is_being_replaced_is_no_hole() {
        check_while_not_uptodate(|file| {
            file.write_all_at(&[9; PAGE_BYTES as usize], 0).unwrap();
        });
    }
}
