//! Stores: locations of a file's pages while they are not in memory. The kinds of files differ
//! behind this interface; no other module asks for the kind.
//!
//! | Entry without a folio | on a disk | of a memory file |
//! |---|---|---|
//! | hole | on the backing | zeros, nowhere |
//! | value | on the backing; the shadow of an eviction | in the swap; the slot |
//!
//! Which owner a slot has when is drawn at the head of `swap/mod.rs`. Nothing here knows an inode:
//! a write-out passes its folios, and the addresses of their bytes.

mod swap;
mod swap_store;

pub(crate) use swap::{GROUP_BYTES, GROUP_SLOTS, Swap, SwapStorage};

use crate::error::{Error, ErrorKind, Result, io_error, of_range};
use crate::io::{self, ClosedStorage, DirectBacking, DirectStatus, FallocateMode};
use crate::memory::{Arena, Shadow};
use crate::page::{Entry, Flag, Folio, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counters;
use crate::sync::{AtomicU64, Ordering, RwLock};
use std::ops::Range;
use std::sync::Arc;
use swap::SlotRun;
use swap_store::SwapStore;

/// Place on the storage of folios that are written by one transfer. Of no bytes by default.
#[derive(Debug, Default)]
pub(crate) struct Place {
    pub(crate) position_bytes: u64,
    /// Number of bytes to write: those of the folios that were in the file when it was chosen.
    pub(crate) length_bytes: u64,
    /// Slots of the swap, owned until the write-out has ended.
    pub(crate) slots: Option<SlotRun>,
}

/// Part of the storage that folios are filled from.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) backing: Arc<dyn DirectBacking>,
    pub(crate) position_bytes: u64,
    /// Number of bytes that can be read: at least 1.
    pub(crate) length_bytes: u64,
}

#[derive(Debug)]
pub(crate) enum Store {
    Disk(DiskStore),
    Swap(SwapStore),
}

/// Store of a file with a backing: reader, writer, and length.
#[derive(Debug)]
pub(crate) struct DiskStore {
    /// Replaced only while the file has no handle. Each transfer has its own reference.
    backings: RwLock<Backings>,
    /// Length of the backing as last set or queried, in bytes: nothing past it can be read.
    /// `inode/resize.rs` has the rules for changing it.
    len_bytes: AtomicU64,
    changes: AtomicU64,
    /// Value of `changes` when the last successful flush began.
    flushed_changes: AtomicU64,
    /// Value of `changes` when the last failed flush began.
    failed_changes: AtomicU64,
}

#[derive(Debug)]
struct Backings {
    reader: Arc<dyn DirectBacking>,
    /// Backing that writes go to; set by the first writable handle.
    writer: Option<Arc<dyn DirectBacking>>,
}

impl DiskStore {
    fn reader(&self) -> Arc<dyn DirectBacking> {
        Arc::clone(&self.backings.read().reader)
    }

    fn writer(&self) -> Arc<dyn DirectBacking> {
        let backings = self.backings.read();
        Arc::clone(backings.writer.as_ref().unwrap_or(&backings.reader))
    }

    fn set_len(&self, len_bytes: u64) -> Result<()> {
        let resized = io::set_len(&*self.writer(), len_bytes);
        // A failed change may have been made in part.
        self.note_change();
        resized?;
        self.len_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Changes the allocation of the backing. If it fails, the backing is not longer than before.
    /// The caller holds `cutting` exclusively.
    pub(crate) fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> Result<()> {
        let (writer, end_bytes) = (self.writer(), bytes.end);
        let changed = io::fallocate(&*writer, mode, bytes);
        // A failed change may have been made in part.
        self.note_change();
        if mode != FallocateMode::Allocate {
            return changed;
        }
        if changed.is_ok() {
            self.len_bytes.fetch_max(end_bytes, Ordering::Relaxed);
            return changed;
        }
        let before_bytes = self.len_bytes.load(Ordering::Relaxed);
        let undone = io::len_bytes(&*writer).and_then(|len_bytes| {
            if len_bytes > before_bytes { self.set_len(before_bytes) } else { Ok(()) }
        });
        if let Err(error) = undone {
            log::warn!("{error}; the file may stay longer after a failed allocation");
        }
        changed
    }

    /// Counts a change of the backing: it is durable after the next flush that begins now or later.
    fn note_change(&self) {
        // Release: pairs with the Acquire in `flush` and `is_flushed`.
        self.changes.fetch_add(1, Ordering::Release);
    }
}

impl Store {
    /// Creates the store of a file over `backing`, which has `len_bytes` bytes now.
    pub(crate) fn on_disk(backing: &Arc<dyn DirectBacking>, len_bytes: u64) -> Self {
        Self::Disk(DiskStore {
            backings: RwLock::new(Backings { reader: Arc::clone(backing), writer: None }),
            len_bytes: AtomicU64::new(len_bytes),
            changes: AtomicU64::new(0),
            flushed_changes: AtomicU64::new(0),
            failed_changes: AtomicU64::new(0),
        })
    }

    /// Creates the store of a memory file.
    pub(crate) fn in_swap(name: String, swap: Option<Arc<Swap>>) -> Self {
        Self::Swap(SwapStore { name, swap })
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Self::Disk(disk) => disk.reader().describe(),
            Self::Swap(swap) => swap.name.clone(),
        }
    }

    pub(crate) fn direct(&self) -> DirectStatus {
        let Self::Disk(disk) = self else { return DirectStatus::Custom };
        disk.reader().direct()
    }

    pub(crate) fn is_writable(&self) -> bool {
        matches!(self, Self::Disk(disk) if disk.backings.read().writer.is_some())
    }

    /// Directs writes to `backing` from now on, unless there is a writer already.
    pub(crate) fn allow_writes(&self, backing: &Arc<dyn DirectBacking>) {
        if let Self::Disk(disk) = self {
            disk.backings.write().writer.get_or_insert_with(|| Arc::clone(backing));
        }
    }

    /// Drops the backings of a file without handles, and with them its descriptors.
    pub(crate) fn close_storage(&self) {
        let Self::Disk(disk) = self else { return };
        let reader = disk.reader();
        let storage = ClosedStorage { name: reader.describe(), identity: reader.identity() };
        let closed = Backings { reader: Arc::new(storage), writer: None };
        let open = std::mem::replace(&mut *disk.backings.write(), closed);
        // Closes descriptors, without the lock.
        drop((reader, open));
    }

    /// Connects a closed file to its storage again, for reading.
    pub(crate) fn reopen_storage(&self, backing: &Arc<dyn DirectBacking>) {
        if let Self::Disk(disk) = self {
            let reader = Arc::clone(backing);
            *disk.backings.write() = Backings { reader, writer: None };
        }
    }

    /// Returns the number of bytes the backing has from `position_bytes` on, at most
    /// `length_bytes`.
    pub(crate) fn bytes_from(&self, position_bytes: u64, length_bytes: u64) -> u64 {
        let Self::Disk(disk) = self else { return 0 };
        disk.len_bytes.load(Ordering::Relaxed).saturating_sub(position_bytes).min(length_bytes)
    }

    /// Returns `true` if it has none of the bytes of a folio that is not in memory, at
    /// `position_bytes`. Its Entry is `seen`.
    pub(crate) fn has_no_bytes(&self, position_bytes: u64, length_bytes: u64, seen: Entry) -> bool {
        match self {
            Self::Disk(_) => self.bytes_from(position_bytes, length_bytes) == 0,
            Self::Swap(_) => seen.as_value().is_none(),
        }
    }

    /// Returns `true` if a truncation of the storage zeroes the bytes past the end; otherwise they
    /// are zeroed in memory.
    pub(crate) fn zeroes_what_is_cut(&self) -> bool {
        matches!(self, Self::Disk(_))
    }

    /// Returns `end_bytes` if there is a backing that is shorter.
    pub(crate) fn missing_end(&self, end_bytes: u64) -> Option<u64> {
        let Self::Disk(disk) = self else { return None };
        (disk.len_bytes.load(Ordering::Relaxed) < end_bytes).then_some(end_bytes)
    }

    /// Truncates the backing, or grows it with zeros. The caller holds `cutting` exclusively.
    pub(crate) fn set_len(&self, len_bytes: u64) -> Result<()> {
        if let Self::Disk(disk) = self { disk.set_len(len_bytes) } else { Ok(()) }
    }

    /// Queries and records the length of the backing, if there is one. The caller holds `cutting`
    /// exclusively.
    pub(crate) fn query_len(&self) -> Result<()> {
        let Self::Disk(disk) = self else { return Ok(()) };
        let len_bytes = io::len_bytes(&*disk.writer())?;
        disk.len_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Returns `true` if there are pages that have no bytes anywhere, and read as zeros.
    pub(crate) fn has_holes(&self) -> bool {
        matches!(self, Self::Swap(_))
    }

    /// Returns `true` if a page with Entry `seen` has no bytes anywhere, and reads as zeros.
    pub(crate) fn is_hole(&self, seen: Entry) -> bool {
        self.has_holes() && seen == Entry::HOLE
    }

    /// Returns `true` if a page with Entry `seen` has bytes, and no folio.
    pub(crate) fn is_absent(&self, seen: Entry) -> bool {
        !seen.is_folio() && !self.is_hole(seen)
    }

    /// Returns `true` if a new page with Entry `seen` must reserve slots of the swap first.
    pub(crate) fn reserves_slots(&self, seen: Entry) -> bool {
        self.slots().is_some() && seen == Entry::HOLE
    }

    /// Returns `true` if a folio in the table is data that [`Self::first_data`] does not find. Its
    /// Entry is `seen`.
    pub(crate) fn is_data(&self, seen: Entry, folio: &Folio) -> bool {
        let state = folio.flags.write_state();
        match self {
            Self::Disk(_) => state.is_dirty() || state.is_writing(),
            Self::Swap(_) => seen.is_ready() || !folio.flags.get(Flag::Allocated),
        }
    }

    pub(crate) fn first_data(&self, position: u64) -> Result<Option<u64>> {
        let Self::Disk(disk) = self else { return Ok(None) };
        io::seek_data(&*disk.reader(), position)
    }

    /// Returns the position of the first hole of the backing from `position` on; `position` if
    /// there is no backing.
    pub(crate) fn first_hole(&self, position: u64) -> Result<Option<u64>> {
        let Self::Disk(disk) = self else { return Ok(Some(position)) };
        io::seek_hole(&*disk.reader(), position)
    }

    /// Returns the shadow that the last eviction of the page left for the replacement policy.
    pub(crate) fn shadow_of(&self, seen: Entry) -> Option<Shadow> {
        let value = seen.as_value()?;
        Some(self.slots().map_or(Shadow(value), |swap| swap.words.shadow(value as u32)))
    }

    /// Transfers the location in `seen` to the folio that was just inserted there. Returns the
    /// shadow that the last eviction of the page left for the replacement policy.
    pub(crate) fn take_over(&self, locked: &LockedFolio<'_>, seen: Entry) -> Option<Shadow> {
        if let Self::Swap(swap) = self {
            swap.take_over(locked, seen);
        }
        self.shadow_of(seen)
    }

    /// Returns the Entry that replaces a clean folio at the head of a unit: after an eviction, with
    /// its shadow; or, for a folio that was never filled, the one that it took over.
    pub(crate) fn entry_after(&self, locked: &LockedFolio<'_>, shadow: Option<Shadow>) -> Entry {
        match self {
            Self::Disk(_) => shadow.map_or(Entry::HOLE, |shadow| Entry::value(shadow.0)),
            Self::Swap(swap) => swap.entry_after(locked, shadow),
        }
    }

    /// Frees the locations of `pages` pages whose bytes are no longer needed; `seen` names the
    /// first.
    pub(crate) fn give_back(&self, seen: Entry, pages: u32) {
        if let (Some(swap), Some(slot)) = (self.slots(), seen.as_value()) {
            swap.give_back(slot as u32, pages);
            self.note_removed_pages(u64::from(pages));
        }
    }

    /// Frees the slot of a folio, locked or frozen, whose bytes are about to change. No write-out
    /// of it is in flight.
    pub(crate) fn drop_slot(&self, folio: &Folio) {
        if let Some(swap) = self.slots()
            && !folio.flags.write_state().is_dirty()
            && folio.slot() != 0
        {
            swap.give_back(folio.slot(), folio.pages() as u32);
            folio.set_slot(0);
        }
    }

    /// Records that a folio is removed from its table: its pages are gone unless a slot has their
    /// bytes.
    pub(crate) fn note_out_of_table(&self, locked: &LockedFolio<'_>) {
        if locked.slot() == 0 {
            self.note_removed_pages(locked.pages());
        }
    }

    /// Records that `pages` pages have their bytes neither in memory nor in a slot.
    pub(crate) fn note_removed_pages(&self, pages: u64) {
        if let Some(swap) = self.slots() {
            swap.pages.fetch_sub(pages, Ordering::Relaxed);
        }
    }

    /// Returns the swap whose slots its pages have, if any.
    pub(crate) fn slots(&self) -> Option<&Arc<Swap>> {
        let Self::Swap(it) = self else { return None };
        it.swap.as_ref()
    }

    /// Returns `None` for a memory file without a swap.
    pub(crate) fn reader(&self) -> Option<Arc<dyn DirectBacking>> {
        match self {
            Self::Disk(disk) => Some(disk.reader()),
            Self::Swap(it) => it.swap.as_ref().map(|swap| Arc::clone(&swap.backing)),
        }
    }

    /// Returns the part of the storage that has the bytes of a folio in the table, and of those
    /// after it, `length_bytes` in all. Returns `None` if it has none of them.
    pub(crate) fn source(&self, folio: &Folio, length_bytes: u64) -> Option<Source> {
        match self {
            Self::Disk(disk) => {
                let position_bytes = folio.index() * PAGE_BYTES;
                let length_bytes = self.bytes_from(position_bytes, length_bytes);
                let backing = (length_bytes > 0).then(|| disk.reader())?;
                Some(Source { backing, position_bytes, length_bytes })
            }
            Self::Swap(it) => {
                let swap = it.swap.as_ref().filter(|_| folio.slot() != 0)?;
                let position_bytes = swap::position_bytes(folio.slot());
                Some(Source { backing: Arc::clone(&swap.backing), position_bytes, length_bytes })
            }
        }
    }

    /// Returns `true` if one transfer can read the folio `last` and, directly after it, one whose
    /// Entry is `seen`.
    pub(crate) fn continues(&self, last: &Folio, seen: Entry) -> bool {
        let slot_after = || u64::from(last.slot()) + last.pages();
        matches!(self, Self::Disk(_)) || seen.as_value() == Some(slot_after())
    }

    /// Checks the bytes at `start` that a locked folio was just filled with: bytes from the swap
    /// must be those that were written there (SWAP-4).
    pub(crate) fn check_filled(
        &self,
        folio: &FolioRef<'_>,
        start: *const u8,
        counters: &Counters,
    ) -> Result<()> {
        let Self::Swap(swap) = self else { return Ok(()) };
        swap.check_filled(folio, start, counters)
    }

    /// Returns the error for a failed read of the file from `position_bytes` on.
    #[cold]
    pub(crate) fn read_error(&self, position_bytes: u64, source: Error) -> Error {
        match self {
            Self::Disk(_) => source,
            Self::Swap(swap) => Error::swap_read(swap.name.clone(), position_bytes, source),
        }
    }

    /// Returns the error for a short read: the backing file, or the swap, has shrunk.
    #[cold]
    pub(crate) fn cut_short(
        &self,
        folio: &Folio,
        position_bytes: u64,
        expected_bytes: u64,
        got_bytes: u64,
    ) -> Error {
        let file = self.name();
        match self.slots() {
            None => {
                let text = format!(
                    "another program truncated it: {expected_bytes} bytes expected at position \
                     {position_bytes}, {got_bytes} found; File::set_len to its length now drops \
                     the rest"
                );
                let range = position_bytes..position_bytes + expected_bytes;
                Error::new(ErrorKind::CutShort, text).in_file(file).at(range)
            }
            Some(swap) => {
                let kind = std::io::ErrorKind::UnexpectedEof;
                let source = std::io::Error::new(kind, "another process has truncated it");
                let start = swap::position_bytes(folio.slot());
                let missing = start + got_bytes..start + expected_bytes;
                let operation = format!("read of {}", of_range(&missing));
                let error = io_error(&swap.name, operation, Some(missing), source);
                Error::swap_read(file, position_bytes, error)
            }
        }
    }

    pub(crate) fn writer(&self) -> Arc<dyn DirectBacking> {
        match self {
            Self::Disk(disk) => disk.writer(),
            Self::Swap(swap) => Arc::clone(&swap.swap().backing),
        }
    }

    /// Returns the place where folios are written that are in the order of their positions, and the
    /// number of those, from the first on, that it is for. The file has `len_bytes` bytes.
    ///
    /// # Errors
    /// There is no place for the first of them.
    pub(crate) fn place<'f>(
        &self,
        folios: impl ExactSizeIterator<Item = &'f Folio> + Clone,
        len_bytes: u64,
        arena: &Arena,
    ) -> Result<(Place, usize)> {
        let first = folios.clone().next().expect("a write-out has a folio");
        match self {
            Self::Disk(_) => {
                let position_bytes = first.index() * PAGE_BYTES;
                let run_bytes = folios.len() as u64 * first.pages() * PAGE_BYTES;
                let length_bytes = len_bytes.saturating_sub(position_bytes).min(run_bytes);
                let place = Place { position_bytes, length_bytes, slots: None };
                Ok((place, folios.len()))
            }
            Self::Swap(swap) => {
                let (slots, count) = swap.place(first, folios, arena)?;
                let place = Place {
                    position_bytes: swap::position_bytes(slots.first),
                    length_bytes: swap::position_bytes(slots.pages),
                    slots: Some(slots),
                };
                Ok((place, count))
            }
        }
    }

    /// Records that the write-out of folios to their place is about to start, each from the bytes
    /// at an address.
    pub(crate) fn note_start<'f, 'r: 'f>(
        &self,
        place: &Place,
        folios: impl Iterator<Item = (&'f FolioRef<'r>, *mut u8)>,
    ) {
        if let (Self::Swap(swap), Some(slots)) = (self, place.slots) {
            swap.seal(slots, folios);
        }
    }

    pub(crate) fn release(&self, place: Place) {
        if let (Self::Swap(swap), Some(slots)) = (self, place.slots) {
            swap.release(slots);
        }
    }

    /// Records the end of a write-out. The backing of a file is then at least as long as what was
    /// written; a write of 0 bytes does not extend it: nothing is written of a folio past the end
    /// of file that is about to be removed. The caller holds `cutting` shared, so the length does
    /// not change.
    pub(crate) fn note_end<'f>(
        &self,
        place: Place,
        folios: impl Iterator<Item = &'f Folio>,
        error: Option<&Error>,
        counters: &Counters,
    ) {
        match self {
            Self::Disk(disk) if error.is_none() => {
                if place.length_bytes > 0 {
                    let end_bytes = place.position_bytes + place.length_bytes;
                    disk.len_bytes.fetch_max(end_bytes, Ordering::Relaxed);
                }
                disk.note_change();
            }
            Self::Disk(_) => {}
            Self::Swap(swap) => swap.note_end(place.slots, folios, error, counters),
        }
    }

    /// Flushes the device, for a backing that was written; a memory file has none. Blocks. Records
    /// which changes the flush covers, or that it failed: a later one does not make those durable.
    pub(crate) fn flush(&self, metadata: bool) -> Result<()> {
        let Self::Disk(disk) = self else { return Ok(()) };
        let Some(writer) = disk.backings.read().writer.clone() else { return Ok(()) };
        // Acquire: pairs with the Release in `note_change`: the device has what is counted.
        let changes = disk.changes.load(Ordering::Acquire);
        let flushed = if metadata { io::sync_all(&*writer) } else { io::sync_data(&*writer) };
        match flushed {
            // Release: pairs with the Acquire in `is_flushed`.
            Ok(()) => disk.flushed_changes.fetch_max(changes, Ordering::Release),
            // Relaxed: only the value counts.
            Err(_) => disk.failed_changes.fetch_max(changes, Ordering::Relaxed),
        };
        flushed
    }

    /// Returns `true` if the backing was flushed since its last change.
    pub(crate) fn is_flushed(&self) -> bool {
        let Self::Disk(disk) = self else { return true };
        // Acquire: pairs with the Release in `flush` and `note_change`.
        let flushed_changes = disk.flushed_changes.load(Ordering::Acquire);
        // Acquire: as above.
        disk.changes.load(Ordering::Acquire) <= flushed_changes
    }

    /// Discards the changes that a failed flush was to make durable, but no later ones.
    pub(crate) fn forget_failed_flush(&self) {
        let Self::Disk(disk) = self else { return };
        // Relaxed: only the value counts.
        let failed_changes = disk.failed_changes.load(Ordering::Relaxed);
        // Release: pairs with the Acquire in `is_flushed`.
        disk.flushed_changes.fetch_max(failed_changes, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::Cache;
    use crate::page::{Entry, Lookup, PAGE_BYTES};
    use crate::sync::Ordering;

    #[test]
    fn one_transfer_reads_only_slots_that_are_adjacent() {
        const PAGES: u64 = 600;
        let directory = tempfile::tempdir().unwrap();
        let builder = Cache::builder().memory(1 << 20).swap_directory(directory.path());
        let cache = builder.build().unwrap();
        let file = cache.memory_file("swapped").unwrap();
        for page in 0..PAGES {
            file.write_all_at(&[7; PAGE_BYTES as usize], page * PAGE_BYTES).unwrap();
        }
        let inode = &file.handle.inode;
        let is_swapped =
            |page: &u64| inode.mapping.table().load(*page, Ordering::Relaxed).as_value().is_some();
        let page = (0..PAGES).find(is_swapped).expect("most of the pages do not fit");
        file.read_exact_at(&mut [0], page * PAGE_BYTES).unwrap();
        let found = inode.mapping.get_folio(&inode.memory.folios, page);
        let Lookup::Folio(folio) = found else { panic!("{found:?}") };
        let slot = u64::from(folio.folio().slot());
        assert!(slot > 0, "a page that was only read keeps its slot");
        let continues = |seen: Entry| inode.store.continues(folio.folio(), seen);
        assert!(continues(Entry::value(slot + 1)));
        for other in [slot - 1, slot, slot + 2] {
            assert!(!continues(Entry::value(other)), "{slot} {other}");
        }
        assert!(!continues(Entry::HOLE));
    }
}
