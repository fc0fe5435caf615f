//! The region of a model run: page tables, translations, raw accesses and a device in place of the
//! kernel's, and the steps of the batch protocol over them.
//!
//! The table, the folios, their locks and flags are the real ones. The steps replace code that
//! makes system calls and is not compiled here: UNMAP-B1..B9 for `maps/unmap`,
//! [`Region::sync`] and the functions that mark folios for `writeback`, [`Region::look_up`] for
//! `fill/lookup.rs`. A change of an order there must be made here as well.
//!
//! Model of the kernel and the processors:
//! - An entry of the page tables changes by read-modify-writes (in reality: under a lock). It says
//!   where the page's bytes are, and if the page was stored to since it was protected.
//! - A raw store first gets a translation, then stores, even if the entry has changed meanwhile. A
//!   flush waits until no earlier translation is in use.
//! - A thread that keeps the bytes of a page has them after its unmapping.
//!
//! Longer than 600 lines because all steps act on the private state of one model.

use super::world::{OWNER, World};
use crate::page::{Entry, Flag, Folio, FolioRef, Frozen, Listing, LockedFolio, Lookup, WriteState};
use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// A missing page.
pub(super) const MISSING: u64 = 0;
/// The page is present; the bits from [`NUMBER_SHIFT`] on are the number of its memory.
const PRESENT: u64 = 1;
/// The page was stored to since it was installed or protected.
pub(super) const WRITTEN: u64 = 2;
const NUMBER_SHIFT: u32 = 2;
/// Maximum number of installations in one run.
const MEMORIES: usize = 8;

/// A step that is left out, or made at the wrong time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weakening {
    None,
    /// UNMAP-B4: the search for stores before the copy of pages that seem clean.
    CheckBeforeCopy,
    /// UNMAP-B4: no search for stores.
    NoCheck,
    /// UNMAP-B5: a copy instead of the pages themselves.
    CopyInsteadOfKeep,
    /// UNMAP-B4: the write-out begins, although the unmapping may fail.
    BeginBeforeUnmap,
    /// UNMAP-B6: without a flush.
    NoFlushAfterUnmap,
    /// UNMAP-B7: the bytes are not compared with those of UNMAP-B4.
    NoComparison,
    /// UNMAP-B8 of a clean page before UNMAP-B6.
    EndBeforeUnmap,
    /// UNMAP-B9: frees a folio that other threads wait for.
    NoPutBack,
    /// UNMAP-B9: frees a page that was not written.
    EvictUnwritten,
    /// A reference suffices, even if the page was not READY when it was taken.
    PinWithoutReady,
    /// REGION-3: not taken by the eviction.
    EvictWithoutSection,
    /// REGION-3: not taken by the sync.
    SyncWithoutSection,
    /// A sync does not wait for write-outs that other threads have begun.
    SyncWithoutWait,
    /// A write-out reads the bytes, then protects the page.
    ProtectAfterRead,
    /// A write-out protects without a flush.
    NoFlushAfterProtect,
    /// A write-out changes from dirty to writing after it has read the bytes.
    BeginAfterRead,
    /// PINNED-P1: no reference.
    PinWithoutReference,
    /// PINNED-P2: the search for stores ignores pins.
    PinUnseen,
    /// PINNED-P5: the page is not marked dirty when the pin ends.
    PinWithoutEnd,
    /// PINNED-P6 before PINNED-P5.
    PinForgottenEarly,
    /// PINNED-P5: marks the folio that the pin was made with, not the one that has the page now.
    PinMarksItsOwn,
}

/// Parameters of the eviction of a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// Dirty pages may be written out.
    pub(super) may_write: bool,
    /// The unmapping fails.
    pub(super) unmap_fails: bool,
    /// The write to the device fails.
    pub(super) write_fails: bool,
}

/// Everything succeeds.
pub(super) const WELL: How = How { may_write: true, unmap_fails: false, write_fails: false };

/// The dirty list: which pages are on it, and how many write-outs are in flight.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    pub(super) pages: Vec<u64>,
    in_flight: u64,
}

/// One folio of a batch, from UNMAP-B2 on.
struct Victim<'a> {
    lock: LockedFolio<'a>,
    frozen: Frozen<'a>,
    /// Its bytes when it seemed clean.
    before: Option<u64>,
    /// Its memory, kept beyond the unmapping.
    kept: u64,
    copy: u64,
    state: VictimState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VictimState {
    Evict,
    WriteOut,
    Keep,
    PutBack,
}

/// The shared state of one model run.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) world: Arc<World>,
    weakening: Weakening,
    pub(super) entries: Vec<AtomicU64>,
    memories: Vec<AtomicU64>,
    /// Memory of each installation.
    taken: AtomicU64,
    /// Held by a raw writer while it uses a translation.
    processor: Mutex<()>,
    section: Mutex<()>,
    /// Pages that every search reports as stored to.
    pub(super) unseen: Mutex<Vec<u64>>,
    /// Pages that stay mapped without a folio, or with another one (REGION-4).
    pub(super) held: Mutex<Vec<u64>>,
    pub(super) dirty: Mutex<Dirty>,
    /// Signalled when no write-out is in flight.
    emptied: Condvar,
    pub(super) device: Vec<AtomicU64>,
}

impl Region {
    /// Creates a file of `pages` pages, where page `i` holds `i + 1`, all resident, clean and
    /// protected.
    pub(super) fn new(pages: u64, weakening: Weakening) -> Arc<Self> {
        let words = |count: u64| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let region = Self {
            world: World::with_pages(pages as u32 + 2, pages, 0, 1),
            weakening,
            entries: words(pages),
            memories: words(MEMORIES as u64),
            taken: AtomicU64::new(0),
            processor: Mutex::new(()),
            section: Mutex::new(()),
            unseen: Mutex::default(),
            held: Mutex::default(),
            dirty: Mutex::new(Dirty::default()),
            emptied: Condvar::new(),
            device: (1..=pages).map(AtomicU64::new).collect(),
        };
        for index in 0..pages {
            region.look_up(index, || ());
        }
        Arc::new(region)
    }

    pub(super) fn is(&self, weakening: Weakening) -> bool {
        self.weakening == weakening
    }

    // Model of the kernel and the processors.

    pub(super) fn entry(&self, index: u64) -> u64 {
        // Acquire: pairs with the Release of all changes: a thread that sees a page sees its bytes.
        self.entries[index as usize].load(Ordering::Acquire)
    }

    /// Returns `true` if the page is present.
    pub(super) fn is_present(&self, index: u64) -> bool {
        self.entry(index) & PRESENT != 0
    }

    /// Returns `true` if the folio of the page is dirty.
    pub(super) fn is_dirty(&self, index: u64) -> bool {
        let folio = self.world.folios.get(self.world.entry(index).folio_id());
        folio.flags.write_state().is_dirty()
    }

    fn is_written(&self, index: u64) -> bool {
        self.entry(index) & WRITTEN != 0
    }

    pub(super) fn memory(&self, entry: u64) -> &AtomicU64 {
        &self.memories[(entry >> NUMBER_SHIFT) as usize]
    }

    /// Returns the bytes of a page that the caller knows to be present.
    fn bytes(&self, index: u64) -> u64 {
        let entry = self.entry(index);
        assert!(entry & PRESENT != 0, "a fault inside the cache (REGION-1)");
        // Acquire: pairs with the Release in `store`: a store is found before its bytes are seen.
        self.memory(entry).load(Ordering::Acquire)
    }

    pub(super) fn flush(&self) {
        drop(self.processor.lock());
    }

    /// Installs a page, replacing any other.
    pub(super) fn install(&self, index: u64, bytes: u64, will_be_stored: bool) {
        let number = self.taken.fetch_add(1, Ordering::Relaxed);
        self.memories[number as usize].store(bytes, Ordering::Relaxed);
        let written = if will_be_stored { WRITTEN } else { 0 };
        let entry = (number << NUMBER_SHIFT) | PRESENT | written;
        // AcqRel: pairs with the Acquire in `entry`.
        self.entries[index as usize].swap(entry, Ordering::AcqRel);
    }

    /// Marks a page as not stored to.
    fn protect(&self, index: u64) {
        // AcqRel: pairs with the Acquire in `entry`.
        self.entries[index as usize].fetch_and(!WRITTEN, Ordering::AcqRel);
        if !self.is(Weakening::NoFlushAfterProtect) {
            self.flush();
        }
    }

    /// Stores to a page through a map.
    pub(super) fn store(&self, index: u64, value: u64) {
        while !self.try_store(index, value) {
            self.look_up(index, || ());
        }
    }

    fn try_store(&self, index: u64, value: u64) -> bool {
        let _translation = self.processor.lock();
        let word = &self.entries[index as usize];
        let entry = self.entry(index);
        if entry & PRESENT == 0 {
            return false;
        }
        // AcqRel: pairs with the Acquire in `entry`.
        let exchange = (Ordering::AcqRel, Ordering::Relaxed);
        let written = entry | WRITTEN;
        if entry != written
            && word.compare_exchange(entry, written, exchange.0, exchange.1).is_err()
        {
            return false;
        }
        // Release: pairs with the Acquire in `bytes`.
        self.memory(entry).store(value, Ordering::Release);
        true
    }

    /// Loads from a page through a map.
    pub(super) fn load(&self, index: u64) -> u64 {
        loop {
            let entry = self.entry(index);
            if entry & PRESENT != 0 {
                return self.memory(entry).load(Ordering::Acquire);
            }
            self.look_up(index, || ());
        }
    }

    /// Returns the bytes on the device.
    pub(super) fn on_device(&self, index: u64) -> u64 {
        self.device[index as usize].load(Ordering::Relaxed)
    }

    // `fill/lookup.rs`.

    /// Calls `act` for a resident page, with its folio locked.
    pub(super) fn look_up<R>(&self, index: u64, act: impl FnOnce() -> R) -> R {
        let world = &*self.world;
        loop {
            match world.mapping.get_folio(&world.folios, index) {
                Lookup::Folio(folio) => {
                    let locked = folio.lock();
                    if locked.owner() == OWNER {
                        assert!(locked.flags.get(Flag::Uptodate));
                        self.bytes(index);
                        return act();
                    }
                }
                Lookup::Absent(seen) => {
                    let new = world.allocate(index);
                    let locked = new.lock();
                    let for_table = new.try_clone().expect("the count is far from its limit");
                    if world.mapping.insert(&world.folios, &locked, for_table, seen).is_ok() {
                        self.put_in_place(index, self.on_device(index));
                        world.mapping.mark_uptodate(&locked);
                        return act();
                    }
                }
                Lookup::Refused => panic!("the count is far from its limit"),
            }
        }
    }

    /// Reads the bytes of a page with a reference only, if it is READY, as `file/hit.rs` does.
    pub(super) fn pin(&self, index: u64) -> Option<u64> {
        let world = &*self.world;
        let seen = world.entry(index);
        if !seen.is_ready() {
            return None;
        }
        let folio = if self.is(Weakening::PinWithoutReady) {
            world.mapping.try_get_named(&world.folios, index, seen)
        } else {
            world.mapping.try_get_ready(&world.folios, index, seen)
        };
        folio.is_ok().then(|| self.bytes(index))
    }

    // `writeback`.

    pub(super) fn mark_stored(&self, folio: &Folio) {
        let mut dirty = self.dirty.lock();
        if folio.flags.transition_to_dirty() == Listing::Add {
            dirty.pages.push(folio.index());
        }
    }

    fn begin(&self, folio: &Folio) -> bool {
        let mut dirty = self.dirty.lock();
        assert!(folio.flags.write_state() != WriteState::Redirtied, "two write-outs at a time");
        if folio.flags.transition_to_writing() != Listing::Remove {
            return false;
        }
        dirty.pages.retain(|index| *index != folio.index());
        dirty.in_flight += 1;
        true
    }

    fn end(&self, folio: &Folio, failed: bool) {
        let mut dirty = self.dirty.lock();
        let flags = &folio.flags;
        let listing =
            if failed { flags.transition_to_unwritten() } else { flags.transition_to_written() };
        if listing == Listing::Add {
            dirty.pages.push(folio.index());
        }
        dirty.in_flight -= 1;
        if dirty.in_flight == 0 {
            self.emptied.notify_all();
        }
    }

    fn enter(&self, without: Weakening) -> Option<MutexGuard<'_, ()>> {
        (!self.is(without)).then(|| self.section.lock())
    }

    /// Syncs: what was stored before the call is on the device afterwards.
    pub(super) fn sync(&self) {
        self.mark_all_stored();
        let listed = self.dirty.lock().pages.clone();
        for index in listed {
            self.write_out(index);
        }
        let mut dirty = self.dirty.lock();
        while !self.is(Weakening::SyncWithoutWait) && dirty.in_flight > 0 {
            // A deadline never expires in a model run.
            self.emptied.wait_until(&mut dirty, Instant::now());
        }
    }

    /// Does the first part of a sync.
    pub(super) fn mark_all_stored(&self) {
        let pages = 0..self.entries.len() as u64;
        let stored = {
            let _section = self.enter(Weakening::SyncWithoutSection);
            let unseen = self.unseen.lock();
            let is_stored = |index: &u64| self.is_written(*index) || unseen.contains(index);
            pages.filter(is_stored).collect::<Vec<_>>()
        };
        for index in stored {
            let Some(folio) = self.world.find(index) else { continue };
            let locked = folio.lock();
            if locked.owner() == OWNER && locked.flags.get(Flag::Uptodate) {
                self.mark_stored(&locked);
            }
        }
    }

    /// Writes a page out in place, if it is dirty.
    fn write_out(&self, index: u64) {
        let Some(folio) = self.world.find(index) else { return };
        let locked = folio.lock();
        if locked.owner() != OWNER {
            return;
        }
        locked.flags.wait_for_writeback();
        let is_late = self.is(Weakening::BeginAfterRead);
        if !is_late && !self.begin(&locked) {
            return;
        }
        drop(locked);
        let protect_late = self.is(Weakening::ProtectAfterRead);
        if !protect_late {
            self.protect(index);
        }
        let bytes = self.bytes(index);
        if protect_late {
            self.protect(index);
        }
        if is_late && !self.begin(folio.folio()) {
            return;
        }
        self.device[index as usize].store(bytes, Ordering::Relaxed);
        self.end(folio.folio(), false);
    }

    // `maps/unmap.rs`.

    /// Evicts a batch of pages, except busy ones.
    pub(super) fn evict(&self, pages: &[u64], how: How) {
        let mut batch: Vec<_> = pages.iter().filter_map(|index| self.freeze(*index)).collect();
        self.take(&mut batch, how);
        let mut left = Vec::new();
        for victim in batch {
            left.extend(self.finish(victim));
        }
        for one in left {
            self.write_out_evicted(one, how);
        }
    }

    /// UNMAP-B1, UNMAP-B2.
    fn freeze(&self, index: u64) -> Option<Victim<'_>> {
        let folio = self.world.find(index)?;
        let lock = folio.try_lock()?;
        let is_held = self.held.lock().contains(&index);
        if lock.owner() != OWNER || lock.flags.write_state().is_writing() || is_held {
            return None;
        }
        match self.world.mapping.begin_eviction(folio, &lock) {
            Ok(frozen) => Some(Victim {
                lock,
                frozen,
                before: None,
                kept: 0,
                copy: 0,
                state: VictimState::Evict,
            }),
            Err(folio) => {
                drop((lock, folio));
                None
            }
        }
    }

    /// UNMAP-B3..B7.
    fn take(&self, batch: &mut [Victim<'_>], how: How) {
        let _section = self.enter(Weakening::EvictWithoutSection);
        self.find_stores(batch);
        for victim in batch.iter_mut().filter(|victim| victim.is_dirty()) {
            victim.state = if how.may_write { VictimState::WriteOut } else { VictimState::Keep };
            if how.may_write && self.is(Weakening::BeginBeforeUnmap) {
                assert!(self.begin(&victim.lock));
            }
        }
        let going = |victim: &&mut Victim<'_>| victim.state != VictimState::Keep;
        for victim in batch.iter_mut().filter(going) {
            victim.kept = self.entry(victim.lock.index());
            victim.copy = self.bytes(victim.lock.index());
        }
        if how.unmap_fails {
            return self.stay(batch);
        }
        for victim in batch.iter_mut().filter(going) {
            if self.is(Weakening::EndBeforeUnmap) && victim.state == VictimState::Evict {
                self.world.mapping.end_eviction(&victim.frozen, &victim.lock, |_| Entry::HOLE);
            }
            // AcqRel: pairs with the Acquire in `entry`.
            self.entries[victim.lock.index() as usize].swap(MISSING, Ordering::AcqRel);
        }
        if !self.is(Weakening::NoFlushAfterUnmap) {
            self.flush();
        }
        for victim in batch.iter_mut().filter(going) {
            if !self.is(Weakening::CopyInsteadOfKeep) {
                // Acquire: pairs with the Release in `store`.
                victim.copy = self.memory(victim.kept).load(Ordering::Acquire);
            }
            let is_late = victim.before.is_some_and(|before| before != victim.copy);
            if victim.state == VictimState::Evict && is_late && !self.is(Weakening::NoComparison) {
                self.mark_stored(&victim.lock);
                victim.state =
                    if how.may_write { VictimState::WriteOut } else { VictimState::PutBack };
            }
            if victim.state == VictimState::WriteOut && victim.is_dirty() {
                assert!(self.begin(&victim.lock));
            }
        }
    }

    /// Keeps the folios: they were not unmapped.
    fn stay(&self, batch: &mut [Victim<'_>]) {
        for victim in batch {
            if victim.lock.flags.write_state().is_writing() {
                self.end(&victim.lock, true);
            }
            victim.state = VictimState::Keep;
        }
    }

    /// UNMAP-B4: copies pages that seem clean, then searches for stores.
    fn find_stores(&self, batch: &mut [Victim<'_>]) {
        let look = |batch: &[Victim<'_>]| -> Vec<bool> {
            batch.iter().map(|victim| self.is_written(victim.lock.index())).collect()
        };
        let early = self.is(Weakening::CheckBeforeCopy).then(|| look(batch));
        for victim in batch.iter_mut().filter(|victim| !victim.is_dirty()) {
            victim.before = Some(self.bytes(victim.lock.index()));
        }
        let stored = early.unwrap_or_else(|| look(batch));
        for (victim, is_stored) in batch.iter().zip(stored) {
            if is_stored && !self.is(Weakening::NoCheck) {
                self.mark_stored(&victim.lock);
            }
        }
    }

    /// UNMAP-B8: frees a clean folio. Returns a dirty one, which must be written out.
    fn finish<'a>(&self, victim: Victim<'a>) -> Option<Evicted<'a>> {
        let mapping = &self.world.mapping;
        let Victim { lock, frozen, copy, state, .. } = victim;
        match state {
            VictimState::Evict => self.free(frozen, lock),
            VictimState::WriteOut => return Some((lock, frozen.unfreeze(), copy)),
            VictimState::Keep => {
                let folio = mapping.cancel_eviction(frozen, &lock);
                drop(lock);
                drop(folio);
            }
            VictimState::PutBack => {
                let folio = frozen.unfreeze();
                self.put_back(&lock, copy);
                drop(lock);
                drop(folio);
            }
        }
        None
    }

    fn free(&self, frozen: Frozen<'_>, lock: LockedFolio<'_>) {
        if lock.owner() == OWNER {
            self.world.mapping.end_eviction(&frozen, &lock, |_| Entry::HOLE);
        }
        drop(lock);
        frozen.free();
    }

    fn put_back(&self, lock: &LockedFolio<'_>, copy: u64) {
        self.install(lock.index(), copy, lock.flags.write_state().is_dirty());
        self.world.mapping.restore_ready(lock);
    }

    /// UNMAP-B9.
    fn write_out_evicted(&self, (lock, folio, copy): Evicted<'_>, how: How) {
        if !how.write_fails {
            self.device[lock.index() as usize].store(copy, Ordering::Relaxed);
        }
        self.end(&lock, how.write_fails);
        let stays = lock.flags.write_state().is_dirty() && !self.is(Weakening::EvictUnwritten);
        let frozen = if stays { Err(folio) } else { folio.try_freeze(1) };
        match frozen {
            Ok(frozen) => self.free(frozen, lock),
            Err(folio) => {
                if !self.is(Weakening::NoPutBack) {
                    self.put_back(&lock, copy);
                }
                drop(lock);
                drop(folio);
            }
        }
    }

    // Invariants at the end of a run.

    /// Checks that page `index` holds `value`, and that the device does after a sync.
    pub(super) fn check_at_end(&self, index: u64, value: u64) {
        let entry = self.world.entry(index);
        assert_eq!(entry.is_folio(), self.is_present(index), "REGION-1, REGION-2");
        assert_eq!(entry.is_ready(), entry.is_folio());
        assert_eq!(self.load(index), value, "a store is lost");
        self.sync();
        assert_eq!(self.on_device(index), value, "a store does not reach the device");
        assert_eq!(self.load(index), value);
        let id = self.world.entry(index).folio_id();
        let folio = self.world.folios.get(id);
        assert_eq!(folio.references(), 1);
        assert_eq!(folio.flags.write_state(), WriteState::Clean);
    }
}

/// A folio between UNMAP-B8 and UNMAP-B9, with its last bytes.
type Evicted<'a> = (LockedFolio<'a>, FolioRef<'a>, u64);

impl Victim<'_> {
    fn is_dirty(&self) -> bool {
        self.lock.flags.write_state().is_dirty()
    }
}
