//! Removal of pages: truncation, punched holes, the last close.
//!
//! Folios in place are gathered, frozen, until several can be unmapped together ([`Removal`]).
//! Other threads wait for a frozen folio. So this thread waits for nothing while it has any: before
//! it waits, it unmaps those that are gathered. (The owner of a `PageRefMut` on the next folio may
//! need one of them.)

use super::mapped::{MappedRemoval, PinnedPages};
use super::{Inode, MappedPages};
use crate::page::{ALL_BYTES, FolioRef, LockedFolio, Lookup, PAGE_BYTES};
use std::cell::Cell;
use std::ops::Range;

/// Removes every clean folio of `pages`, whole units that hold the bytes of `range`. Waits for
/// fills and write-outs in flight: nothing stays that was read from the storage before the
/// call. Keeps all if the kernel cannot tell which pages of a map were stored to.
pub(crate) fn remove_clean(inode: &Inode, pages: Range<u64>, range: &Range<u64>) {
    let may_all_be_dirty = inode.find_stores(range, true).is_err();
    let is_clean =
        |locked: &LockedFolio<'_>| !may_all_be_dirty && !locked.flags.write_state().is_dirty();
    Removal::new(inode, PinnedPages::Kept).remove_all(pages, is_clean);
}

/// Removes every folio from byte `position_bytes` (a multiple of the unit) on, dirty or not.
///
/// The length has been set, so that a thread that still inserts a folio there removes it again;
/// or there is no handle left.
pub(crate) fn remove_folios_from(inode: &Inode, position_bytes: u64) {
    inode.mapping.begin_walk_behind_end();
    let pages = position_bytes / PAGE_BYTES..u64::MAX;
    Removal::new(inode, PinnedPages::Kept).remove_all(pages, |_| true);
}

/// Removes every unused folio after the last close. For a file that outlives its handles,
/// removes only clean ones, even while writers are active: changed folios stay. All stay if the
/// kernel cannot tell which pages of a map were stored to. No map is in use, so there are no
/// later stores.
pub(crate) fn remove_closed(inode: &Inode) {
    let may_all_be_dirty = inode.find_stores(&ALL_BYTES, true).is_err();
    let is_unwanted = |locked: &LockedFolio<'_>| {
        let is_dirty = may_all_be_dirty || locked.flags.write_state().is_dirty();
        !is_dirty || inode.device.is_none()
    };
    Removal::new(inode, PinnedPages::Kept).remove_all(0..u64::MAX, is_unwanted);
}

/// Removes every dirty folio, and returns the number of their bytes in the file. Concurrent
/// writes are dropped or not. In a region, a referenced page stays visible to maps until it is
/// filled again. Every folio counts as dirty if the kernel cannot tell which pages of a map
/// were stored to. Waits for write-outs in flight.
pub(crate) fn discard_dirty(inode: &Inode) -> u64 {
    let len_bytes = inode.mapping.len_bytes();
    let discarded_bytes = Cell::new(0);
    let may_all_be_dirty = inode.find_stores(&ALL_BYTES, true).is_err();
    let is_unwanted = |locked: &LockedFolio<'_>| {
        let is_dirty = may_all_be_dirty || locked.flags.write_state().is_dirty();
        if is_dirty {
            let start = locked.index() * PAGE_BYTES;
            let bytes = len_bytes.saturating_sub(start).min(locked.pages() * PAGE_BYTES);
            discarded_bytes.update(|sum| sum + bytes);
        }
        is_dirty
    };
    Removal::new(inode, PinnedPages::Kept).remove_all(0..u64::MAX, is_unwanted);
    inode.store.forget_failed_flush();
    discarded_bytes.get()
}

/// Removes a locked folio from the table, dirty or not. No write-out of it is in flight.
pub(crate) fn remove_unwanted<'a>(inode: &'a Inode, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
    Removal::new(inode, PinnedPages::Kept).remove(folio, locked);
}

/// Turns whole units of a memory file into holes.
pub(crate) fn punch(inode: &Inode, pages: Range<u64>) {
    Removal::new(inode, PinnedPages::Zeroed).remove_all(pages, |_| true);
}

/// Folios being removed from the table. Those in place are unmapped several at a time, with one TLB
/// flush.
#[derive(Debug)]
pub(crate) struct Removal<'a> {
    inode: &'a Inode,
    mapped: Option<Box<dyn MappedRemoval<'a> + 'a>>,
}

impl<'a> Removal<'a> {
    pub(crate) fn new(inode: &'a Inode, pinned: PinnedPages) -> Self {
        let begin = |mapped: &'a dyn MappedPages| mapped.begin_removal(inode, pinned);
        Self { inode, mapped: inode.mapped.as_deref().map(begin) }
    }

    /// Removes a folio from the table, dirty or not. No write-out of it is in flight.
    pub(crate) fn remove(&mut self, folio: FolioRef<'a>, locked: LockedFolio<'a>) {
        match &mut self.mapped {
            Some(mapped) => mapped.remove(folio, locked),
            None => self.inode.unlink(folio, locked),
        }
    }

    pub(crate) fn finish(&mut self) {
        if let Some(mapped) = &mut self.mapped {
            mapped.finish();
        }
    }

    /// Removes the folios of `pages`, whole units, that are unwanted.
    pub(super) fn remove_all(
        mut self,
        pages: Range<u64>,
        is_unwanted: impl Fn(&LockedFolio<'_>) -> bool,
    ) {
        let inode = self.inode;
        let (mut index, table) = (pages.start, inode.mapping.table());
        while let Some(found) = table.next_needed(index).filter(|found| *found < pages.end) {
            index = found;
            let folios = &inode.memory.folios;
            let found = inode.mapping.try_get_folio(folios, index).unwrap_or_else(|| {
                self.finish();
                inode.mapping.get_folio(folios, index)
            });
            let folio = match found {
                Lookup::Folio(folio) => folio,
                Lookup::Absent(seen) => {
                    let head = inode.mapping.head_index(index);
                    #[cfg(all(test, not(loom)))]
                    crate::sync::test_hook::reach("before a value is taken");
                    if seen.as_value().is_some() && inode.mapping.take_value(head, seen) {
                        inode.store.give_back(seen, 1 << inode.mapping.order());
                    }
                    continue;
                }
                Lookup::Refused => continue,
            };
            #[cfg(all(test, not(loom)))]
            crate::sync::test_hook::reach("before a folio that goes is locked");
            let locked = folio.try_lock().unwrap_or_else(|| {
                self.finish();
                inode.lock_folio(&folio)
            });
            if locked.owner() != inode.address {
                continue;
            }
            if locked.flags.write_state().is_writing() {
                self.finish();
                locked.flags.wait_for_writeback();
            }
            index = locked.index() + locked.pages();
            if is_unwanted(&locked) {
                self.remove(folio, locked);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::page::PAGE_BYTES;
    use crate::sync::{Ordering, test_hook};
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    /// A page in the swap is read, which takes its slot, while its hole is being made.
    #[test]
    fn a_slot_that_a_reader_takes_first_is_freed_once() {
        const PAGES: u64 = 1024;
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_max(16 << 20);
        let cache = builder.swap_directory(directory.path()).build().unwrap();
        let file = cache.memory_file("swapped").unwrap();
        for page in 0..PAGES {
            file.write_all_at(&[7; PAGE_BYTES as usize], page * PAGE_BYTES).unwrap();
        }
        let table = file.handle.inode.mapping.table();
        let is_swapped = |page: &u64| table.load(*page, Ordering::Relaxed).as_value().is_some();
        let page = (0..PAGES).find(is_swapped).expect("most of the pages do not fit");
        let reader = file.clone();
        test_hook::set("before a value is taken", move || {
            let mut byte = [0];
            reader.read_exact_at(&mut byte, page * PAGE_BYTES).unwrap();
            assert_eq!(byte, [7]);
        });
        let hole = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
        file.punch_hole(hole).unwrap();
        assert!(test_hook::has_run(), "the page was in the swap");
        let mut byte = [1];
        file.read_exact_at(&mut byte, page * PAGE_BYTES).unwrap();
        assert_eq!(byte, [0]);
        file.set_len(0).unwrap();
        assert_eq!(cache.stats().memory.swap_bytes, 0);
    }

    /// The owner of a `PageRefMut` of the second page reads the first, which the hole has removed
    /// before it waits for the second.
    fn punch_beside_a_pin(options: &OpenOptions) {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let Ok(file) = cache.memory_file_with("punched", options) else { return };
        file.write_all_at(&[7; 3 * PAGE_BYTES as usize], 0).unwrap();
        let (pinned, is_pinned) = mpsc::channel();
        let (waits, is_waiting) = mpsc::channel();
        let owner = file.clone();
        let owner = thread::spawn(move || {
            let pin = owner.pin_mut(PAGE_BYTES..2 * PAGE_BYTES).unwrap();
            pinned.send(()).unwrap();
            is_waiting.recv().unwrap();
            let begun = Instant::now();
            let mut byte = [1];
            while owner.try_read_at(&mut byte, 0).is_err() || byte == [7] {
                if begun.elapsed() > Duration::from_secs(20) {
                    return false;
                }
                thread::sleep(Duration::from_millis(1));
            }
            drop(pin);
            true
        });
        is_pinned.recv().unwrap();
        let place = "before a folio that goes is locked";
        test_hook::set(place, move || test_hook::set(place, move || waits.send(()).unwrap()));
        file.punch_hole(0..3 * PAGE_BYTES).unwrap();
        assert!(test_hook::has_run());
        assert!(owner.join().unwrap(), "the first page cannot be read while the hole waits");
    }

    #[test]
    fn a_hole_that_waits_keeps_no_folio_frozen() {
        let options = OpenOptions::new().read(true).write(true);
        punch_beside_a_pin(&options);
        // Its pages are gathered, frozen, to be unmapped together.
        #[cfg(feature = "maps")]
        punch_beside_a_pin(&options.mappable(true));
    }
}
