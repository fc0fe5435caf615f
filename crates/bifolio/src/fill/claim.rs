//! Claims: the first step of a fill, a frame and the Entry (FILL-C1..C4).
use super::Fill;
use super::locked::Locked;
use super::transfer::{ReadIo, Room};
use crate::error::{Error, Result};
use crate::io::RUN_PAGES_MAX;
use crate::memory::{Counted, FillTarget, FrameKind};
use crate::page::{Entry, Filling, Folio, FolioId, PAGE_BYTES, PAGE_SHIFT};
use crate::stats::{Counter, FileCounts};
use crate::sync::{CallScope, Ordering, blocking};
use crate::sys::process;
use std::ops::Range;

/// Behaviour of a claim when no frame is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Reclaims memory, and waits for the I/O of other threads if necessary.
    ForFrames,
    /// Evicts clean pages, and fails if that is not enough: the caller has transfers in flight
    /// (IO-5), or the fill is optional.
    Never,
    /// Fails, and evicts nothing.
    NeverNorEvict,
}

/// Result of an attempt to insert a new folio, or those of a new run, into the table.
#[derive(Debug)]
pub(crate) enum Claim<T> {
    New(T),
    /// The first Entry has a folio of another thread.
    Taken,
    NoFrame,
}

pub(crate) type ReadIoClaim = Claim<ReadIo>;

impl<'h> Fill<'h> {
    /// Returns the Entry of the page at `position` if the file has bytes there and no folio.
    pub(crate) fn absent_at(self, position: u64) -> Option<Entry> {
        if position >= self.inode.mapping.len_bytes() {
            return None;
        }
        let index = position >> PAGE_SHIFT;
        self.next_absent(index..index + 1).map(|(_, seen)| seen)
    }

    /// Returns the first of `pages` that has bytes and no folio, and its Entry.
    pub(crate) fn next_absent(self, pages: Range<u64>) -> Option<(u64, Entry)> {
        let mapping = &self.inode.mapping;
        let mut index = pages.start;
        while index < pages.end {
            // Acquire: pairs with the Release in `unlink`, as in `get_folio`.
            let seen = mapping.table().load(mapping.head_index(index), Ordering::Acquire);
            if self.inode.store.is_absent(seen) {
                return Some((index, seen));
            }
            index = mapping.end_of_unit(index);
        }
        None
    }

    /// Claims the next run of absent folios among the pages `left`, which begin after it then, or
    /// at a page without a frame. `Taken`: none is left that no other thread fills.
    pub(crate) fn claim_next(self, left: &mut Range<u64>, wait: Wait) -> Result<ReadIoClaim> {
        while let Some((absent, seen)) = self.next_absent(left.clone()) {
            left.start = absent;
            let claimed = self.claim_run(absent..left.end, seen, wait)?;
            match &claimed {
                ReadIoClaim::New(run) => left.start = run.end_page(),
                ReadIoClaim::Taken => left.start = self.inode.mapping.end_of_unit(absent),
                ReadIoClaim::NoFrame => {}
            }
            if !matches!(claimed, ReadIoClaim::Taken) {
                return Ok(claimed);
            }
        }
        Ok(ReadIoClaim::Taken)
    }

    /// Claims the absent folios that hold `pages`, in order and without gaps: as many as one
    /// transfer of at most 1 MiB can read. `seen` is the Entry of the first page: an absent one.
    /// Waits only before it has claimed a folio.
    pub(crate) fn claim_run(
        self,
        pages: Range<u64>,
        seen: Entry,
        wait: Wait,
    ) -> Result<ReadIoClaim> {
        let head = self.inode.mapping.head_index(pages.start);
        let Some(room) = self.room(pages.end - head, true, wait) else {
            return Ok(ReadIoClaim::NoFrame);
        };
        let mut run = ReadIo::new(self.inode, head, room);
        let call = CallScope::begin();
        match self.claim(head, seen, wait, false)? {
            Claim::New(locked) => {
                call.note_page();
                run.push(locked);
            }
            Claim::Taken => return Ok(ReadIoClaim::Taken),
            Claim::NoFrame => return Ok(ReadIoClaim::NoFrame),
        }
        let wait = if wait == Wait::ForFrames { Wait::Never } else { wait };
        self.extend_run(&mut run, pages.end, wait);
        Ok(ReadIoClaim::New(run))
    }

    /// Claims the absent folios that follow a run, up to page `end`, without waiting: as many as
    /// the run has room for.
    pub(crate) fn extend_run(self, run: &mut ReadIo, end: u64, wait: Wait) {
        let mapping = &self.inode.mapping;
        let folio_pages = 1 << mapping.order();
        let mut head = run.end_page();
        while head < end && run.has_room(folio_pages) {
            // Acquire: pairs with the Release in `unlink`, as in `get_folio`.
            let seen = mapping.table().load(head, Ordering::Acquire);
            let goes_on =
                |last: &FolioId| self.inode.store.continues(self.inode.memory.folio(*last), seen);
            if !self.inode.store.is_absent(seen) || !run.folios.ids().last().is_none_or(goes_on) {
                break;
            }
            let Ok(Claim::New(locked)) = self.claim(head, seen, wait, false) else { break };
            run.push(locked);
            head += folio_pages;
        }
    }

    /// FILL-C1: reserves the resources other than frames for a fill of up to `pages` pages, and at
    /// least one folio. Returns `None` if that would have to wait. A fill without a read counts no
    /// pages.
    pub(crate) fn room(self, pages: u64, is_read: bool, wait: Wait) -> Option<Room<'h>> {
        let inode = &**self.inode;
        let least = 1 << inode.mapping.order();
        let wanted = pages.next_multiple_of(least).min(RUN_PAGES_MAX).max(least);
        let counted_pages = match wait {
            _ if !is_read => 0,
            Wait::ForFrames => inode.load.begin_read(least, wanted),
            Wait::Never | Wait::NeverNorEvict => inode.load.try_begin_read(least, wanted)?,
        };
        let mut room = Room { inode, pages: counted_pages, target: FillTarget::default() };
        let (share, may_wait) = (&inode.load.staging, wait == Wait::ForFrames);
        let pages = counted_pages.max(least);
        room.target = inode.page_space.fill_target(pages, share, may_wait)?;
        Some(room)
    }

    /// FILL-C2..C4: inserts a new folio, locked and not uptodate, into the table. `head` is its
    /// first page, and `seen` the current Entry.
    pub(super) fn claim(
        self,
        head: u64,
        seen: Entry,
        wait: Wait,
        may_pass_end: bool,
    ) -> Result<Claim<Locked<'h>>> {
        let Self { inode, reclaim, state } = self;
        let (mapping, memory) = (&inode.mapping, &*inode.memory);
        debug_assert_eq!(head, mapping.head_index(head), "a folio begins at its head");
        if wait == Wait::ForFrames {
            blocking::check("frames");
        }
        state.check_sound(&memory.soundness)?;
        let of_folio = |error: Error| {
            let start = head * PAGE_BYTES;
            error.wanted_for(|| inode.name(), start..start + mapping.folio_bytes())
        };
        // Before frames are allocated: a file whose pages cannot be evicted must not need them.
        let unlisted = reclaim.count_unlisted(inode).map_err(of_folio)?;
        let counted = match wait {
            _ if unlisted.is_some() => None,
            Wait::ForFrames => Some(reclaim.count_in_class(inode).map_err(of_folio)?),
            Wait::Never | Wait::NeverNorEvict => match self.try_count_in_class(wait) {
                None => return Ok(Claim::NoFrame),
                counted => counted,
            },
        };
        let Some((id, _filling)) = self.take_frame(head, seen, wait).map_err(of_folio)? else {
            return Ok(Claim::NoFrame);
        };
        // Has no owner until it is locked: reclaim may scan the chunk now, and must not take it for
        // a folio that is in its table.
        let folio = memory.folios.start(id, 0, head, mapping.order());
        let lock = folio.lock_new();
        Folio::set_owner(&lock, inode.address);
        if let Some(counted) = counted {
            counted.keep_for(&lock);
        }
        let references = (folio.try_clone(), folio.try_clone());
        let (Some(for_table), Some(for_lru)) = references else {
            unreachable!("a new folio has no other references");
        };
        if mapping.insert(&memory.folios, &lock, for_table, seen).is_err() {
            return Ok(Claim::Taken);
        }
        memory.counters.add(Counter::Miss, 1);
        memory.lru.classes.note_miss(inode.class);
        FileCounts::add(&inode.counts.misses, 1);
        let shadow = inode.store.take_over(&lock, seen);
        if !may_pass_end && mapping.was_cut(&lock) {
            drop(inode.remove_unfilled(&folio, &lock));
            return Ok(Claim::Taken);
        }
        if let Some(shadow) = shadow {
            memory.note_refault(&lock, shadow);
            FileCounts::add(&inode.counts.refaults, 1);
        }
        if let Some(unlisted) = unlisted {
            unlisted.keep_for(&lock);
        } else {
            memory.lru.add(&memory.folios, for_lru, process::current_cpu());
        }
        Ok(Claim::New(Locked { lock, folio, was_resident: false }))
    }

    /// Counts a new folio in the class of the file, without waiting.
    fn try_count_in_class(self, wait: Wait) -> Option<Counted<'h>> {
        let inode = &**self.inode;
        if wait == Wait::Never {
            return self.reclaim.try_count_in_class(inode);
        }
        inode.memory.lru.classes.try_count(inode.class, 1 << inode.mapping.order())
    }

    /// Takes a frame, and charges the page of the table that will name it, which stays while the
    /// guard exists.
    fn take_frame(
        self,
        head: u64,
        seen: Entry,
        wait: Wait,
    ) -> Result<Option<(FolioId, Filling<'h>)>> {
        let Self { inode, reclaim, .. } = self;
        let mapping = &inode.mapping;
        // After the frames of the preceding folio, so that one copy can read both.
        let before = head.checked_sub(1 << mapping.order());
        let before = before.map(|before| mapping.table().load(before, Ordering::Relaxed));
        let near = before.filter(|entry| entry.is_folio()).map(Entry::folio_id);
        inode.memory.arena.note_fill(near.is_some());
        let kind = inode.page_space.frame_kind(mapping.order(), near);
        let filling = mapping.table().fill();
        let found = match wait {
            _ if !reclaim.try_charge_page(inode, head, seen) => None,
            Wait::ForFrames | Wait::NeverNorEvict => reclaim.take_free(kind)?,
            Wait::Never => reclaim.try_allocate(kind)?,
        };
        match (found, wait) {
            (Some(id), _) => Ok(Some((id, filling))),
            (None, Wait::Never | Wait::NeverNorEvict) => Ok(None),
            (None, Wait::ForFrames) => {
                drop(filling);
                self.wait_for_frames(head, seen, kind).map(Some)
            }
        }
    }

    /// Slow path of [`Self::claim`]: reclaims, or waits for other threads, until there are frames,
    /// and the page of the table is charged and stays.
    #[inline(never)]
    fn wait_for_frames(
        self,
        index: u64,
        seen: Entry,
        kind: FrameKind,
    ) -> Result<(FolioId, Filling<'h>)> {
        let Self { inode, reclaim, .. } = self;
        let _call = CallScope::begin();
        let mut _kept = None;
        loop {
            reclaim.charge_page(inode, index, seen, kind)?;
            let id = reclaim.allocate(kind, inode)?;
            // Reclaim may have freed the page of the table for memory, as its last resort. From
            // here on the page stays.
            let filling = inode.mapping.table().fill();
            if reclaim.try_charge_table(inode, index) {
                return Ok((id, filling));
            }
            drop(inode.memory.folios.start(id, 0, index, inode.mapping.order()));
            // It must not be freed to make room in the next attempt either, which waits.
            _kept = Some(filling);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::{File, OpenOptions};
    use crate::memory::ListKind;
    use crate::page::{ClassId, Lookup, PAGE_BYTES};

    #[test]
    fn pages_claimed_by_an_old_length_do_not_stay_past_the_end() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("cut").unwrap();
        file.write_all_at(&[7; 10_000], 0).unwrap();
        file.set_len(PAGE_BYTES).unwrap();
        // Continues like a thread that loaded the length before the truncation.
        let (fill, table) = (file.handle.fill(), file.handle.inode.mapping.table());
        let claimed = fill.claim(2, Entry::HOLE, Wait::ForFrames, false).unwrap();
        assert!(!matches!(claimed, Claim::New(_)), "{claimed:?}");
        assert_eq!(table.next_occupied(1), None);
        assert!(matches!(
            fill.claim_run(1..3, Entry::HOLE, Wait::ForFrames),
            Ok(ReadIoClaim::Taken)
        ));
        assert_eq!(fill.inode.mapping.resident_folios(), 1);
        // A write that is about to grow the file may claim there.
        let claimed = fill.claim(2, Entry::HOLE, Wait::ForFrames, true).unwrap();
        let Claim::New(locked) = claimed else { panic!("{claimed:?}") };
        drop(fill.inode.remove_unfilled(&locked.folio, &locked.lock));
    }

    /// Returns a cache that is full of pages of a file, except for a few pages.
    fn full_cache(options: &OpenOptions) -> (tempfile::TempDir, Cache, File) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 2 << 20]).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.open(&path, options).unwrap();
        file.read_exact_at(&mut vec![0; 2 << 20], 0).unwrap();
        (directory, cache, file)
    }

    /// Another thread asks for more pages than are left while `hold` holds the pages of a full
    /// cache: it waits until it gets them.
    fn check_that_others_wait(hold: impl FnOnce(&File, &dyn Fn())) {
        let (_directory, cache, file) = full_cache(&OpenOptions::new());
        let others = cache.memory_file("others").unwrap();
        let memory = &file.handle.inode.memory;
        memory.lru.drain_all(&memory.folios);
        let has_waited = std::cell::Cell::new(false);
        std::thread::scope(|scope| {
            hold(&file, &|| {
                let before = cache.stats().memory.allocation_waits;
                let others = others.clone();
                let write = scope.spawn(move || others.write_all_at(&[7; 512 << 10], 0).unwrap());
                // More waits than it takes to give up.
                while !write.is_finished() && cache.stats().memory.allocation_waits < before + 30 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                has_waited.set(!write.is_finished());
            });
        });
        assert!(has_waited.get(), "memory was available all the time");
    }

    #[test]
    fn isolated_pages_are_waited_for() {
        check_that_others_wait(|file, check_others| {
            let memory = &file.handle.inode.memory;
            let mut isolated = Vec::new();
            for kind in [ListKind::Fresh, ListKind::Old, ListKind::Active] {
                let mut before = usize::MAX;
                while before != isolated.len() {
                    before = isolated.len();
                    let list = (ClassId::DEFAULT, kind);
                    memory.lru.isolate(&memory.folios, list, u64::MAX, &mut isolated);
                }
            }
            check_others();
            memory.lru.put_back(&memory.folios, &mut isolated, None);
        });
    }

    #[test]
    fn frozen_pages_are_waited_for() {
        check_that_others_wait(|file, check_others| {
            let (mapping, folios) = (&file.handle.inode.mapping, &file.handle.inode.memory.folios);
            // Writes without waiting: reclaim skips pages in use.
            let freeze = |index| {
                let Some(Lookup::Folio(folio)) = mapping.try_get_folio(folios, index) else {
                    return None;
                };
                let lock = folio.try_lock()?;
                let frozen = mapping.begin_eviction(folio, &lock).ok()?;
                Some((lock, frozen))
            };
            let frozen: Vec<_> = (0..512).filter_map(freeze).collect();
            check_others();
            for (lock, frozen) in frozen {
                drop(mapping.cancel_eviction(frozen, &lock));
            }
        });
    }

    #[cfg(feature = "maps")]
    #[test]
    fn pages_on_no_list_are_not_waited_for() {
        for is_mappable in [false, true] {
            let cache = Cache::builder().memory(1 << 20).build().unwrap();
            let options = OpenOptions::new().read(true).write(true).mappable(is_mappable);
            let Ok(file) = cache.memory_file_with("unlisted", &options) else { continue };
            file.set_len(64 * PAGE_BYTES).unwrap();
            file.write_all_at(&[7; 20 * PAGE_BYTES as usize], 0).unwrap();
            (20..30).for_each(|index| drop(file.pin(index * PAGE_BYTES..(index + 1) * PAGE_BYTES)));
            let reclaim = &file.handle.reclaim;
            assert_eq!(reclaim.sweep_once(), (0, 0), "mappable: {is_mappable}");
            assert_eq!(reclaim.memory.lru.unlisted_pages(), 30);
            let held = file.pin(0..8).unwrap().into_owned();
            file.set_len(0).unwrap();
            assert_eq!(reclaim.memory.lru.unlisted_pages(), 1, "mappable: {is_mappable}");
            assert_eq!(reclaim.sweep_once(), (0, 0), "mappable: {is_mappable}");
            drop(held);
            assert_eq!(reclaim.memory.lru.unlisted_pages(), 0);
        }
    }

    /// Returns a file of 2 MiB, without readahead, in a cache of 1 MiB.
    fn absent_file() -> (tempfile::TempDir, Cache, File) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 2 << 20]).unwrap();
        let cache = Cache::builder().memory(1 << 20).readahead_max(0).build().unwrap();
        let file = cache.open(&path, &OpenOptions::new()).unwrap();
        (directory, cache, file)
    }

    /// Pages that the only device of that cache may have in reads.
    const READS_MAX: u64 = (1 << 20) / PAGE_BYTES / 8 * 3;

    #[test]
    fn a_device_leaves_room_for_reads_to_others() {
        let (_directory, cache, file) = absent_file();
        let memory_file = cache.memory_file("of the swap").unwrap();
        let (hung, other) = (&file.handle.inode.load, &memory_file.handle.inode.load);
        assert_eq!(hung.try_begin_read(1, 1000), Some(READS_MAX));
        assert_eq!((hung.try_begin_read(1, 1), hung.try_begin_read(16, 16)), (None, None));
        assert_eq!(other.try_begin_read(4, 1000), Some(24), "whole folios");
        assert_eq!(other.try_begin_read(4, 1000), None);
        other.end_read(24);
        assert_eq!(other.try_begin_read(512, 512), Some(512), "one folio of any size");
        other.end_read(512);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| hung.begin_read(1, 1000));
            hung.end_read(10);
            assert_eq!(waiting.join().unwrap(), 10);
        });
        assert_eq!(hung.try_begin_read(1, 1000), None);
    }

    #[test]
    fn claimed_pages_count_as_in_read_until_they_are_filled() {
        let (_directory, _cache, file) = absent_file();
        let (fill, inode) = (file.handle.fill(), &file.handle.inode);
        let counted_pages = || {
            let left = inode.load.try_begin_read(1, 1000).expect("some are left");
            inode.load.end_read(left);
            READS_MAX - left
        };
        let claimed = fill.claim_run(0..2, Entry::HOLE, Wait::ForFrames).unwrap();
        let ReadIoClaim::New(run) = claimed else { panic!("{claimed:?}") };
        assert_eq!(counted_pages(), 2);
        drop(run);
        assert_eq!(counted_pages(), 0);
        // The second of them is resident already.
        file.read_exact_at(&mut [0; 8], 5 * PAGE_BYTES).unwrap();
        let claimed = fill.claim_run(4..8, Entry::HOLE, Wait::Never).unwrap();
        let ReadIoClaim::New(run) = claimed else { panic!("{claimed:?}") };
        let first = run.read_first(inode).unwrap();
        assert_eq!((first.lock.index(), counted_pages()), (4, 0));
        drop(first);
        file.read_exact_at(&mut vec![0; 2 << 20], 0).unwrap();
        assert_eq!(counted_pages(), 0);
    }

    #[cfg(feature = "maps")]
    #[test]
    fn a_dirty_page_of_a_region_waits_for_the_flusher() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [7; PAGE_BYTES as usize]).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let Ok(file) = cache.open(&path, &options) else { return };
        file.write_all_at(b"dirty", 0).unwrap();
        let inode = &file.handle.inode;
        // No write-back of the file starts during the test.
        let _cutting = inode.cutting.write();
        let _held = inode.mapping.get_folio(&inode.memory.folios, 0);
        assert_eq!(file.handle.reclaim.sweep_once(), (0, 1));
    }

    /// While memory is free, a claim takes none of the locks that all threads of a cache share: the
    /// arena, reclaim, the swapper's queue, the flusher's roster and gate, the LRU lists, the list
    /// of tables, the swap's slots, the pool of rings. The LRU batch belongs to its CPU, the dirty
    /// list to its file. Once in about 16 pages the CPU's stock of frames is filled, and its LRU
    /// batch emptied.
    #[cfg(not(bifolio_chaos))]
    #[test]
    fn a_page_takes_no_lock_that_all_threads_share() {
        use crate::sync::counted::locked_by;
        const CPU_BATCH: &str = "bifolio::memory::lru::CpuBatch";
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let builder = Cache::builder().memory(16 << 20).readahead_max(0);
        let cache = builder.swap_directory(directory.path()).build().unwrap();
        let options = OpenOptions::new().read(true).write(true);
        let file = cache.open(&path, &options).unwrap();
        // Charges a page of the table, and makes a chunk resident.
        file.read_exact_at(&mut [0; 8], 0).unwrap();
        file.write_all_at(&[8; PAGE_BYTES as usize], PAGE_BYTES).unwrap();
        let page = [8; PAGE_BYTES as usize];
        let of_all = |lock: &&str| lock.ends_with("::ArenaState") || lock.ends_with("::ClassLists");
        let mut shared: Vec<&str> = Vec::new();
        // Twice as many pages as a stock has, no two of them adjacent.
        for index in (3..64).step_by(4) {
            let (read_at, write_at) = (index * PAGE_BYTES, (index + 2) * PAGE_BYTES);
            let read = locked_by(|| file.read_exact_at(&mut [0; 8], read_at).unwrap());
            let write = locked_by(|| file.write_all_at(&page, write_at).unwrap());
            let (of_all, own): (Vec<&str>, Vec<&str>) =
                read.into_iter().chain(write).partition(of_all);
            assert_eq!(own, [CPU_BATCH, CPU_BATCH, "bifolio::dirt::dirty::DirtyState"]);
            shared.extend(of_all);
        }
        assert!(shared.len() <= 8, "32 pages took {shared:?}");
    }
}
