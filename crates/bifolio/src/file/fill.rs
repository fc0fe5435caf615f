//! The miss: finding a folio's frame, putting it in the table, getting its bytes.
//!
//! Everything that needs a folio under its lock comes through [`Handle::lock_folio`]: it finds the
//! resident one, or fills a new one; losers of a race to fill wait for the winner's lock and take
//! its folio. A fill that fails takes the folio out again, so that the next one tries anew.

use super::handle::Handle;
use crate::error::{Error, ErrorKind, Result};
use crate::folio::{COUNT_MAX, Flag, Folio, FolioId, FolioRef, LockedFolio};
use crate::lru::Shadow;
use crate::mapping::{Entry, Lookup, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::sys::cpu;

/// What the caller will do with the folio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Intent {
    /// Use its bytes: it comes back uptodate.
    Read,
    /// Replace all its bytes that the file has or will have: it may come back with any bytes and
    /// not uptodate; then the caller must write all of it and mark it.
    Overwrite,
}

/// A folio with its lock. The lock goes before the reference.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    pub(super) lock: LockedFolio<'a>,
    pub(super) folio: FolioRef<'a>,
    /// Whether it was resident before.
    pub(super) was_resident: bool,
}

impl Locked<'_> {
    pub(super) fn is_uptodate(&self) -> bool {
        self.lock.flags.get(Flag::Uptodate)
    }
}

impl Handle {
    /// The folio that holds page `index`, locked and in the table. Blocks for the lock and for I/O.
    pub(super) fn lock_folio(&self, index: u64, intent: Intent) -> Result<Locked<'_>> {
        let mapping = &self.inode.mapping;
        let memory = &*self.inode.memory;
        let mut frozen_waits = 0;
        loop {
            let found = mapping.get_folio(&memory.folios, index, &mut frozen_waits);
            if frozen_waits > 0 {
                memory.counters.add(Counter::FrozenWait, std::mem::take(&mut frozen_waits));
            }
            match found {
                Lookup::Folio(folio) => {
                    let lock = folio.lock();
                    // It may have left the table while we waited for its lock.
                    if lock.owner() == self.inode.address() {
                        return Ok(Locked { lock, folio, was_resident: true });
                    }
                }
                Lookup::Absent(seen) => {
                    if let Some(locked) = self.fill(mapping.head_index(index), seen, intent)? {
                        return Ok(locked);
                    }
                }
                Lookup::Refused => return Err(self.too_many_pins(index)),
            }
        }
    }

    /// Fills the folio whose first page is `index`, where `seen` stands now. `None` if somebody
    /// else was faster.
    fn fill(&self, index: u64, seen: Entry, intent: Intent) -> Result<Option<Locked<'_>>> {
        self.check_usable()?;
        let mapping = &self.inode.mapping;
        let memory = &*self.inode.memory;
        self.reclaim.charge_table(mapping.table(), index)?;
        let order = mapping.order();
        let id = self.reclaim.allocate(order, self.neighbour(index))?;
        // Without an owner until it is locked: reclaim may come by, on its way through the chunk,
        // and must not take it for a folio that is in its table.
        let folio = memory.folios.start(id, 0, index, order);
        let lock = folio.lock();
        Folio::set_owner(&lock, self.inode.address());
        let references = (folio.try_clone(), folio.try_clone());
        let (Some(for_table), Some(for_lru)) = references else {
            unreachable!("a new folio has no other references");
        };
        if mapping.insert(&memory.folios, &lock, for_table, seen).is_err() {
            return Ok(None);
        }
        memory.counters.add(Counter::Miss, 1);
        self.note_refault(&lock, seen);
        if memory.lru.add(&memory.folios, for_lru, cpu::current()) {
            memory.counters.add(Counter::LruBatch, 1);
        }
        let locked = Locked { lock, folio, was_resident: false };
        match self.fill_bytes(&locked, intent) {
            Ok(()) => Ok(Some(locked)),
            Err(error) => {
                drop(mapping.remove(&locked.folio, &locked.lock, &memory.folios));
                Err(error)
            }
        }
    }

    /// The frame of the folio before this one, so that neighbours become neighbours.
    fn neighbour(&self, index: u64) -> Option<FolioId> {
        let mapping = &self.inode.mapping;
        let before = index.checked_sub(1 << mapping.order())?;
        let entry = mapping.table().load(before, Ordering::Relaxed);
        entry.is_folio().then(|| entry.folio_id())
    }

    fn note_refault(&self, lock: &LockedFolio<'_>, seen: Entry) {
        let Some(value) = seen.as_value() else { return };
        let memory = &self.inode.memory;
        let shadow = Shadow(value);
        memory.counters.add(Counter::Refault, 1);
        if shadow.is_workingset() {
            lock.flags.set(Flag::Workingset);
        }
        if memory.lru.is_near_refault(shadow, memory.lru.sizes()) {
            memory.counters.add(Counter::RefaultActivate, 1);
            lock.flags.set(Flag::Active);
        }
    }

    /// Gets the bytes of a new folio: from the backing, or zeros where it has none.
    fn fill_bytes(&self, locked: &Locked<'_>, intent: Intent) -> Result<()> {
        let counters = &self.inode.memory.counters;
        if intent == Intent::Overwrite {
            counters.add(Counter::MissWithoutRead, 1);
            return Ok(());
        }
        let position = locked.lock.index() * PAGE_BYTES;
        let folio_bytes = locked.lock.pages() * PAGE_BYTES;
        let expected = self.inode.bytes_on_backing(position, folio_bytes);
        let mut valid = 0;
        if expected == 0 {
            counters.add(Counter::MissWithoutRead, 1);
        } else {
            valid = self.inode.read_folio(&locked.folio, &locked.lock)?.min(expected);
            // Fewer bytes than there were are an error, unless we cut the file ourselves just now:
            // a cut sets the length first.
            let visible = self.inode.mapping.len_bytes().saturating_sub(position);
            if valid < expected.min(visible) {
                return Err(self.cut_short(position, expected.min(visible), valid));
            }
        }
        self.inode.zero_folio_from(&locked.folio, &locked.lock, valid);
        self.inode.mapping.mark_uptodate(&locked.lock);
        Ok(())
    }

    #[cold]
    fn cut_short(&self, position_bytes: u64, expected_bytes: u64, got_bytes: u64) -> Error {
        let file = self.inode.name();
        ErrorKind::CutShort { file, position_bytes, expected_bytes, got_bytes }.into()
    }

    #[cold]
    pub(super) fn too_many_pins(&self, index: u64) -> Error {
        let file = self.inode.name();
        let position_bytes = index * PAGE_BYTES;
        ErrorKind::TooManyPins { file, position_bytes, pins: COUNT_MAX }.into()
    }
}
