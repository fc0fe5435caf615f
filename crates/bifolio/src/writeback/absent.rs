//! Folios that come into the table and leave it: what they find there, take over and leave behind,
//! as the store says.

use super::inode::Inode;
use super::store::Cleaner;
use crate::memory::Shadow;
use crate::page::{Entry, EvictError, Flag, Folio, FolioId, FolioRef, Frozen, LockedFolio};

impl Inode {
    /// Whether pages without an Entry read as zeros.
    pub(crate) fn has_holes(&self) -> bool {
        self.store.is_hole(Entry::HOLE)
    }

    /// Whether the page has bytes, and no folio.
    pub(crate) fn is_absent(&self, seen: Entry) -> bool {
        !seen.is_folio() && !self.store.is_hole(seen)
    }

    /// The first page from `index` on that has anything in the table that must not be forgotten.
    pub(crate) fn next_occupied(&self, index: u64) -> Option<u64> {
        let table = self.mapping.table();
        let keeps_values = self.store.keeps_values();
        if keeps_values { table.next_occupied(index) } else { table.next_folio(index) }
    }

    /// Whether reclaim can do anything with folios of this file.
    pub(crate) fn is_evictable(&self) -> bool {
        self.store.cleaner() != Cleaner::Nobody
    }

    /// Whether a folio that is put where `seen` stands is one more that may have to be swapped out.
    pub(crate) fn needs_slots(&self, seen: Entry) -> bool {
        self.store.cleaner() == Cleaner::Swapper && self.store.is_hole(seen)
    }

    /// Whether one transfer can read the folio `last` and, next to it, one that finds `seen`.
    pub(crate) fn continues(&self, last: FolioId, seen: Entry) -> bool {
        self.store.continues(self.memory.folio(last), seen)
    }

    /// Evicts a folio (`Mapping::evict`) and leaves what finds its bytes again.
    pub(crate) fn evict<'a>(
        &self,
        folio: FolioRef<'a>,
        locked: &LockedFolio<'_>,
        shadow: Shadow,
    ) -> Result<Frozen<'a>, EvictError<'a>> {
        debug_assert!(!self.page_space.is_in_place(), "a region's pages are unmapped first");
        let frozen =
            self.mapping.evict(folio, locked, |page| self.store.left_by(locked, page, shadow))?;
        self.note_gone_if(locked.slot() == 0, locked.pages());
        Ok(frozen)
    }

    /// Ends the eviction of a folio that is frozen, not dirty, and unmapped; and frees it.
    pub(crate) fn end_eviction(&self, frozen: Frozen<'_>, locked: LockedFolio<'_>, shadow: Shadow) {
        let leave = |page| self.store.left_by(&locked, page, shadow);
        self.mapping.end_eviction(&frozen, &locked, leave);
        self.note_gone_if(locked.slot() == 0, locked.pages());
        // E5: the next life of the frame must not find it locked.
        drop(locked);
        frozen.free();
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
        crate::sync::meanwhile::here("before the page is uptodate");
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
        self.note_gone_if(locked.slot() == 0, locked.pages());
        let leave = |page| self.store.left_by_unfilled(locked, page);
        self.mapping.remove(folio, locked, folios, leave)
    }

    /// The bytes of a locked folio are no longer wanted, dirty or not; no write-out of it is in
    /// flight. It is about to leave the table.
    pub(super) fn forget_content(&self, folio: &Folio, id: FolioId) {
        self.store.drop_slot(folio);
        self.dirty.forget(&self.memory.folios, id);
        self.store.note_gone(folio.pages());
    }

    /// Gives back what `seen`, an Entry without a folio, names at the head `index`, if anything.
    pub(super) fn forget_absent(&self, index: u64, seen: Entry) {
        if seen.as_value().is_some() && self.mapping.take_value(index, seen) {
            self.store.give_back(seen, 1 << self.mapping.order());
        }
    }

    /// The folio `new`, locked, has the bytes of all of `old` since a collapse: it is dirty from
    /// now on, and they are not, in one step.
    pub(crate) fn pass_dirt(&self, old: &[Frozen<'_>], new: FolioId) {
        // Before: what is dirty has a number where the slot would be (rule 4 of `page`).
        old.iter().for_each(|frozen| self.store.drop_slot(frozen.folio()));
        self.dirty.replace(&self.memory.folios, old.iter().map(Frozen::id), new);
    }

    fn note_gone_if(&self, is_gone: bool, pages: u64) {
        if is_gone {
            self.store.note_gone(pages);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::page::PAGE_BYTES;
    use crate::sync::meanwhile;

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
        meanwhile::at("before the page is uptodate", move || {
            assert_eq!(other.read_resident(&mut [1; 8], 0), 0, "readers wait for the lock");
            assert_eq!(other.seek_data(0).unwrap(), Some(0));
        });
        install(&file);
        assert!(meanwhile::was_there(), "the page was put there by this thread");
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
