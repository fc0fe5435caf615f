//! Inodes: the state that all handles of a file share (the kernel's term). An
//! inode has a mapping, a store, a dirty list and write errors.
//!
//! # Safety
//! A folio in a table names its inode by address (rule 2 of `page`). [`Inode::owner`] turns that
//! into a reference; its caller guarantees that the inode is still allocated. Zeroes frames whose
//! folios the caller has locked.
#![allow(unsafe_code)]

mod clear;
mod clearing;
mod codec;
mod evict;
mod mapped;
mod mark;
pub(crate) mod removal;
mod resize;
pub(crate) mod seek;

pub(crate) use clearing::ClearedBefore;
pub use codec::PageCodec;
pub(crate) use codec::{Codec, SealedPages, SealingRoom};
pub(crate) use mapped::{MappedRemoval, PinnedPages, WriteSource};
pub(crate) use mark::NoRoom;
pub(crate) use resize::Resizing;

use crate::dirt::{self, DirtyList, DirtyPages, Flushes, Gate, NO_LSN, WriteErrors};
use crate::error::{Error, ErrorKind, Result, of_range, write_error};
use crate::io::{DirectBacking, Engine, Load};
use crate::memory::{InPlace, Memory, PageSpace, StagedPages};
use crate::page::{
    ALL_BYTES, COUNT_MAX, ClassId, Folio, FolioRef, HasTable, LockedFolio, Mapping, PAGE_BYTES,
    Table, Values,
};
use crate::stats::FileCounts;
use crate::store::{Store, Swap};
use crate::sync::{AtomicU64, Backoff, Mutex, Ordering, RwLock};
use crate::sys::copy;
use clearing::Clearing;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Time after which a wait for a folio lock is logged.
const LOCK_WAIT_NOTED: Duration = Duration::from_secs(5);

/// A device of files, and the flusher that serves all devices.
pub(crate) type Device = dirt::Device<Inode>;
pub(crate) type Flusher = dirt::Flusher<Inode>;

/// Parts that all files of a cache share.
#[derive(Clone, Debug)]
pub(crate) struct Services {
    pub(crate) memory: Arc<Memory>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) swap: Option<Arc<Swap>>,
}

#[derive(Debug)]
pub(crate) struct Inode {
    /// Weak reference to itself, for lists of files.
    pub(crate) this: Weak<Inode>,
    /// Address that [`Self::owner`] finds in a folio of this file.
    pub(crate) address: u64,
    pub(crate) mapping: Mapping,
    pub(crate) memory: Arc<Memory>,
    pub(crate) page_space: PageSpace,
    /// That memory once more, if the pages are in place.
    pub(crate) mapped: Option<Arc<dyn MappedPages>>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) flusher: Arc<Flusher>,
    /// Device that the file is written to; `None` for a memory file.
    pub(crate) device: Option<Arc<Device>>,
    /// Shares of the device that the file is read from.
    pub(crate) load: Load,
    pub(crate) store: Store,
    /// Set if reclaim can evict or write folios of this file.
    pub(crate) is_evictable: bool,
    /// Class whose memory the pages of the file are counted in.
    pub(crate) class: ClassId,
    pub(crate) dirty: DirtyList,
    pub(crate) errors: WriteErrors,
    pub(crate) counts: FileCounts,
    pub(crate) flushes: Flushes<Error>,
    pub(crate) gate: OnceLock<Arc<Gate>>,
    /// Set before the first handle exists.
    pub(crate) codec: OnceLock<Codec>,
    /// Held by the thread that changes the length (`resize.rs`).
    pub(crate) resizing: Mutex<()>,
    /// Held shared by write-outs, exclusively by `set_len`: see WRITEBACK-4.
    pub(crate) cutting: RwLock<()>,
    /// Made by the first clear: a fill or write-out of another file asks no more.
    pub(crate) clearing: OnceLock<Box<Clearing>>,
    /// Maximum length of the file, in bytes. Raised by the thread that holds `resizing`.
    pub(crate) len_max_bytes: AtomicU64,
}

/// The pages of a file in place, as its inode and its write-outs use them; the floor `maps`
/// implements it.
pub(crate) trait MappedPages: InPlace {
    /// Finds the pages of `inode` with bytes of `range` that were stored to through maps, and marks
    /// them as dirty. With `patient`, waits for pages whose lock another thread holds; otherwise
    /// the next call finds them. Returns `true` if there may have been stores.
    ///
    /// # Errors
    /// The kernel cannot tell. Then every resident page may have been stored to, and the caller
    /// treats all of them as dirty.
    fn find_stores(&self, inode: &Inode, range: &Range<u64>, patient: bool) -> Result<bool>;

    /// Installs a page of `bytes`, followed by zeros, for a locked folio that is not uptodate, and
    /// makes it uptodate. With `will_be_stored`, it counts as stored to.
    ///
    /// # Errors
    /// The kernel has no memory for it; the folio is unchanged.
    fn install_page(
        &self,
        inode: &Inode,
        locked: &LockedFolio<'_>,
        bytes: &[u8],
        will_be_stored: bool,
    ) -> Result<()>;

    /// Begins to remove folios from the table of `inode`.
    fn begin_removal<'a>(
        &'a self,
        inode: &'a Inode,
        pinned: PinnedPages,
    ) -> Box<dyn MappedRemoval<'a> + 'a>;

    /// Returns the memory that adjacent pages are written from, whose write-outs have begun.
    fn write_source(&self, inode: &Inode, pages: Range<u64>) -> WriteSource;

    /// Copies the first of `pages`, at least one, for a write-out, so that a store after the copy
    /// is found later. Returns `None` if there is no memory for a transfer that is worth its cost,
    /// for the caller to wait for transfers of its own; never if it `is_alone`, with none in
    /// flight.
    fn copy_for_write(
        &self,
        inode: &Inode,
        pages: Range<u64>,
        is_alone: bool,
    ) -> Option<Box<dyn StagedPages>>;

    /// Returns `true` if the thread that touches a missing page serves the fault itself.
    fn serves_in_thread(&self) -> bool;
}

/// Prospect of a dirty folio that reclaim has met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cleaning {
    /// The flusher was asked to write it.
    Asked,
    /// It is written when it is evicted.
    WhenEvicted,
    /// The device refused its last writes, or its file has no storage.
    Refused,
}

/// Properties of a file that its first open fixes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileShape {
    /// log2 of the pages of a unit.
    pub(crate) order: u8,
    pub(crate) class: ClassId,
    pub(crate) len_bytes: u64,
    pub(crate) len_max_bytes: u64,
}

impl Inode {
    /// Creates a file over `backing`, which has `len_bytes` bytes now. Its pages are in the arena,
    /// unless they are `mapped`.
    pub(crate) fn new(
        services: &Services,
        mapped: Option<Arc<dyn MappedPages>>,
        backing: &Arc<dyn DirectBacking>,
        shape: FileShape,
    ) -> std::io::Result<Arc<Self>> {
        let store = Store::on_disk(backing, shape.len_bytes);
        let device = services.flusher.device_of(&**backing, &services.memory, shape.order);
        Self::with_store(services, mapped, store, shape, Values::Hints, Some(device))
    }

    /// Creates an empty file without a backing.
    pub(crate) fn new_in_memory(
        services: &Services,
        mapped: Option<Arc<dyn MappedPages>>,
        name: &str,
        shape: FileShape,
    ) -> std::io::Result<Arc<Self>> {
        let (name, swap) = (name.to_owned(), services.swap.clone());
        let store = Store::in_swap(name, swap);
        let values = if mapped.is_some() { Values::KeptWithPages } else { Values::Kept };
        Self::with_store(services, mapped, store, shape, values, None)
    }

    /// Creates an inode of any kind. A file without a device counts its dirty pages with those that
    /// are not in the swap.
    fn with_store(
        services: &Services,
        mapped: Option<Arc<dyn MappedPages>>,
        store: Store,
        shape: FileShape,
        values: Values,
        device: Option<Arc<Device>>,
    ) -> std::io::Result<Arc<Self>> {
        let source = services.memory.arena.source();
        let (order, len_bytes) = (shape.order, shape.len_bytes);
        let mapping = Mapping::new(&source, order, len_bytes, shape.len_max_bytes, values)?;
        let alone = || DirtyPages::alone(&services.memory.unswapped_pages);
        let dirty_pages = device.as_ref().map_or_else(alone, |it| it.dirty_pages.clone());
        let load = device.as_ref().map_or(&services.flusher.swap_load, |it| &it.load).clone();
        let page_space = match &mapped {
            Some(mapped) => PageSpace::in_place(Arc::clone(mapped) as _),
            None => PageSpace::Arena(Arc::clone(&services.memory.arena)),
        };
        Ok(Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            address: this.as_ptr().expose_provenance() as u64,
            mapping,
            memory: Arc::clone(&services.memory),
            page_space,
            mapped,
            engine: Arc::clone(&services.engine),
            flusher: Arc::clone(&services.flusher),
            is_evictable: device.is_some() || services.swap.is_some(),
            class: shape.class,
            device,
            load,
            store,
            dirty: DirtyList::new(dirty_pages),
            errors: WriteErrors::default(),
            counts: FileCounts::default(),
            flushes: Flushes::default(),
            gate: OnceLock::new(),
            codec: OnceLock::new(),
            resizing: Mutex::new(()),
            cutting: RwLock::new(()),
            clearing: OnceLock::new(),
            len_max_bytes: AtomicU64::new(shape.len_max_bytes),
        }))
    }

    /// Frees a file without pages and handles. Waits until no other thread has a reference to it.
    pub(crate) fn free(mut shared: Arc<Self>) {
        let mut backoff = Backoff::default();
        while let Err(other) = Arc::try_unwrap(shared).map(drop) {
            shared = other;
            backoff.wait();
        }
    }

    /// Returns a reference that keeps the inode allocated; `None` if it is about to be freed.
    pub(crate) fn keep(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    /// Returns the inode that a folio belongs to; `None` once the folio is removed from its table.
    ///
    /// # Safety
    /// The stores made before the folio entered its table are visible: the caller holds its lock,
    /// or has held the lock of a list that it was put on since. An inode that was not freed then
    /// must not be freed during `'a`.
    pub(crate) unsafe fn owner<'a>(folio: &Folio) -> Option<&'a Inode> {
        let address = NonNull::new(folio.owner() as *mut Inode)?;
        // SAFETY: `set_owner` got the address of a live inode from `address`. It is cleared when
        // the folio is removed from the table, and an inode is freed only after its table is empty:
        // so it was allocated when the caller took the lock, and the caller keeps it so.
        Some(unsafe { address.as_ref() })
    }

    pub(crate) fn name(&self) -> String {
        self.store.name()
    }

    /// Blocks until the caller holds the lock of a folio that was found in this file. Logs a long
    /// wait: the owner of the lock may never release it.
    pub(crate) fn lock_folio<'a>(&self, folio: &FolioRef<'a>) -> LockedFolio<'a> {
        folio.lock_noting(LOCK_WAIT_NOTED, || {
            let start = folio.folio().index() * PAGE_BYTES;
            let bytes = start..start + folio.folio().pages() * PAGE_BYTES;
            log::warn!(
                "{}: a call has waited {} s for {}: a PageRefMut of them was not dropped, or their \
                 device does not answer",
                self.name(),
                LOCK_WAIT_NOTED.as_secs(),
                of_range(&bytes)
            );
        })
    }

    pub(crate) fn frame_of(&self, folio: &FolioRef<'_>) -> *mut u8 {
        self.page_space.address(folio.id(), folio.folio().index())
    }

    /// Returns `true` if it is a memory file, for callers that ask about the file itself.
    pub(crate) fn is_memory_file(&self) -> bool {
        self.device.is_none()
    }

    pub(crate) fn len_max_bytes(&self) -> u64 {
        // Acquire: pairs with the Release in `raise_len_max`.
        self.len_max_bytes.load(Ordering::Acquire)
    }

    /// Returns the number of bytes in dirty folios, as far as they are known to be dirty.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty.len() * self.mapping.folio_bytes()
    }

    /// Finds stores through maps ([`MappedPages::find_stores`]). A file that is not in place has
    /// none.
    pub(crate) fn find_stores(&self, range: &Range<u64>, patient: bool) -> Result<bool> {
        let found = self.mapped.as_ref().map(|mapped| mapped.find_stores(self, range, patient));
        found.unwrap_or(Ok(false))
    }

    /// Returns the number of bytes that the backing of a file does not have yet: dirty ones, and
    /// those in flight, which become dirty again on failure. Counts all resident ones if the kernel
    /// cannot tell which pages of a map were stored to.
    pub(crate) fn unwritten_bytes(&self) -> u64 {
        let folios = match self.find_stores(&ALL_BYTES, false) {
            Ok(_) => self.dirty.unwritten(),
            Err(_) => self.mapping.resident_folios(),
        };
        folios * self.mapping.folio_bytes()
    }

    /// Returns `true` if the backing has everything that is known to be dirty, and has been flushed
    /// since its last change. The caller has scanned for stores through maps before.
    pub(crate) fn is_durable(&self) -> bool {
        // In this order: a write-out changes the backing before it is counted as written.
        self.dirty.is_all_written() && self.store.is_flushed()
    }

    /// Returns the error for storage that accepts no writes, for `cause` or without an answer,
    /// while the dirty limit is reached.
    #[cold]
    pub(crate) fn unwritable(&self, bytes: Range<u64>, cause: Option<Error>) -> Error {
        let source = || std::io::ErrorKind::TimedOut.into();
        let no_answer = || write_error(self.name(), bytes.clone(), source());
        let in_memory_alone = || self.memory.unswapped_pages.load(Ordering::Relaxed);
        let dirty_pages =
            self.device.as_ref().map_or_else(in_memory_alone, |it| it.dirty_pages.own());
        let dirty_bytes = dirty_pages * PAGE_BYTES;
        let held_back = || self.held_back().map(|it| it.to_io_error(std::io::ErrorKind::TimedOut));
        let cause = cause.or_else(held_back).unwrap_or_else(no_answer);
        let text = format!(
            "{} cannot be accepted: {dirty_bytes} bytes wait for a device that takes nothing: \
             {cause}",
            of_range(&bytes)
        );
        let error = Error::new(ErrorKind::Unwritable, text).in_file(self.name());
        error.at(bytes).because(Arc::new(cause))
    }

    #[cold]
    pub(crate) fn past_end(&self, position_bytes: u64, length_bytes: u64) -> Error {
        let len_bytes = self.mapping.len_bytes();
        let text = format!(
            "{length_bytes} bytes at position {position_bytes} end past the end of the file, which \
             has {len_bytes} bytes"
        );
        let range = position_bytes..position_bytes.saturating_add(length_bytes);
        Error::new(ErrorKind::PastEnd, text).in_file(self.name()).at(range)
    }

    #[cold]
    pub(crate) fn too_many_pins(&self, index: u64) -> Error {
        let position = index * PAGE_BYTES;
        let text = format!(
            "the page at position {position} is pinned {COUNT_MAX} times, the most allowed"
        );
        let range = position..position + PAGE_BYTES;
        Error::new(ErrorKind::TooManyPins, text).in_file(self.name()).at(range)
    }

    pub(crate) fn has_gate(&self) -> bool {
        self.gate.get().is_some()
    }

    /// Returns the LSN up to which the log is known to be durable. Without a gate it is 0, which is
    /// enough for changes without an LSN: a write-out under way when a gate is set respects it.
    pub(crate) fn known_durable(&self) -> u64 {
        self.gate.get().map_or(NO_LSN, |gate| gate.durable())
    }

    /// CLEAR-O1: returns `true` if a locked folio is about to be removed by a clear whose storage
    /// is cleared, so that its bytes must not be written. The caller holds `cutting` shared.
    pub(crate) fn is_being_cleared(&self, locked: &LockedFolio<'_>) -> bool {
        self.clearing.get().is_some_and(|it| it.will_remove(locked))
    }

    /// Asks the flusher to clean this file, because reclaim has met a dirty folio of it.
    pub(crate) fn clean_soon(&self) -> Cleaning {
        let Some(device) = &self.device else {
            return if self.is_evictable { Cleaning::WhenEvicted } else { Cleaning::Refused };
        };
        device.want_written(1);
        if !device.is_called() {
            self.flusher.call(device);
        }
        if device.is_stuck() { Cleaning::Refused } else { Cleaning::Asked }
    }

    /// Zeroes `bytes` of a locked folio in memory, counted from the folio's first byte.
    pub(crate) fn zero_folio(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        bytes: Range<u64>,
    ) {
        let end = bytes.end.min(locked.pages() * PAGE_BYTES);
        let length = end.saturating_sub(bytes.start) as usize;
        let target = self.frame_of(folio).wrapping_add(bytes.start as usize);
        // SAFETY: part of a frame whose lock the caller holds, so it is its only writer.
        unsafe { copy::zero(target, length) };
    }

    /// Zeroes a locked folio and makes it uptodate.
    ///
    /// # Errors
    /// The kernel has no memory for a page in place.
    pub(crate) fn fill_with_zeros(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> Result<()> {
        if let Some(mapped) = &self.mapped {
            return mapped.install_page(self, locked, &[], false);
        }
        self.zero_folio(folio, locked, 0..u64::MAX);
        self.mapping.mark_uptodate(locked);
        Ok(())
    }
}

impl HasTable for Inode {
    fn table(&self) -> &Table {
        self.mapping.table()
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        debug_assert_eq!(self.mapping.resident_folios(), 0, "an inode outlives its folios");
        self.free_lsns();
        self.memory.arena.uncharge(self.memory.tables.forget(self.mapping.table()));
    }
}
