//! One file of the cache: what all its handles share.
//!
//! # Safety
//! A folio in a table names its inode by address (rule 2 of `folio`); [`Inode::owner`] turns that
//! back into a reference, and its caller answers for the inode's life. Windows on frames are made
//! here for `io`.
#![allow(unsafe_code)]

use super::dirty::DirtyList;
use super::errors::{ErrorCursor, WriteErrors};
use super::flusher::Flusher;
use crate::folio::{Flag, FolioId, FolioRef, LockedFolio};
use crate::io::{self, Backing, Engine, IoError, Operation, Pieces, Transfer};
use crate::lru::Memory;
use crate::mapping::{Lookup, Mapping, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering, RwLock};
use crate::sys::copy;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// What all files of a cache share.
#[derive(Clone, Debug)]
pub(crate) struct Services {
    pub(crate) memory: Arc<Memory>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) flusher: Arc<Flusher>,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) mapping: Mapping,
    pub(crate) memory: Arc<Memory>,
    pub(crate) engine: Arc<Engine>,
    pub(super) flusher: Arc<Flusher>,
    /// What the file was first opened with.
    opened: Arc<dyn Backing>,
    /// The same, as the engine knows it.
    reader: Arc<dyn Backing>,
    /// Set by the first handle that may write.
    pub(super) writer: OnceLock<Arc<dyn Backing>>,
    /// Length of the backing as we made or found it: behind it there is nothing to read.
    len_on_backing_bytes: AtomicU64,
    pub(super) dirty: DirtyList,
    pub(super) errors: WriteErrors,
    /// Held by whoever changes the length.
    resizing: Mutex<()>,
    /// Shared by write-outs, held alone by a cut: see WRITEBACK-4.
    pub(super) cutting: RwLock<()>,
    /// The most the file may grow to, bytes.
    pub(crate) len_max_bytes: u64,
}

impl Inode {
    /// A file over `backing`, which has `len_bytes` bytes now.
    pub(crate) fn new(
        services: &Services,
        backing: &Arc<dyn Backing>,
        order: u8,
        len_bytes: u64,
        len_max_bytes: u64,
    ) -> std::io::Result<Self> {
        Ok(Self {
            mapping: Mapping::new(order, len_bytes, len_max_bytes)?,
            memory: Arc::clone(&services.memory),
            engine: Arc::clone(&services.engine),
            flusher: Arc::clone(&services.flusher),
            opened: Arc::clone(backing),
            reader: services.engine.enroll(Arc::clone(backing)),
            writer: OnceLock::new(),
            len_on_backing_bytes: AtomicU64::new(len_bytes),
            dirty: DirtyList::default(),
            errors: WriteErrors::default(),
            resizing: Mutex::new(()),
            cutting: RwLock::new(()),
            len_max_bytes,
        })
    }

    /// The inode a locked folio belongs to; `None` once it has left its table.
    ///
    /// # Safety
    /// An inode that was not freed when the folio was locked must not be freed during `'a`.
    pub(crate) unsafe fn owner<'a>(locked: &LockedFolio<'_>) -> Option<&'a Inode> {
        let address = NonNull::new(locked.owner() as *mut Inode)?;
        // SAFETY: `set_up` got the address of a live inode from `address`; it is cleared under the
        // folio lock when the folio leaves the table, and an inode is freed only after its table
        // is empty: so it was alive when the folio was locked, and the caller keeps it so.
        Some(unsafe { address.as_ref() })
    }

    /// What `owner` finds in a folio of this file.
    pub(crate) fn address(&self) -> u64 {
        std::ptr::from_ref(self).expose_provenance() as u64
    }

    /// The file's name, for messages.
    pub(crate) fn name(&self) -> String {
        self.reader.describe()
    }

    /// The backing that reads go to.
    pub(crate) fn reader(&self) -> &dyn Backing {
        &*self.reader
    }

    /// Lets writes go to `backing` from now on, unless they go somewhere already.
    pub(crate) fn allow_writes(&self, backing: &Arc<dyn Backing>) {
        self.writer.get_or_init(|| {
            let is_reader = Arc::ptr_eq(backing, &self.opened);
            if is_reader {
                Arc::clone(&self.reader)
            } else {
                self.engine.enroll(Arc::clone(backing))
            }
        });
    }

    /// Takes the lock that serialises changes of the length.
    pub(crate) fn lock_resizing(&self) -> MutexGuard<'_, ()> {
        self.resizing.lock()
    }

    /// Bytes the backing has from `position_bytes` on, at most `length_bytes`.
    pub(crate) fn bytes_on_backing(&self, position_bytes: u64, length_bytes: u64) -> u64 {
        let len = self.len_on_backing_bytes.load(Ordering::Relaxed);
        len.saturating_sub(position_bytes).min(length_bytes)
    }

    /// A cursor for a new handle.
    pub(crate) fn sample_errors(&self) -> ErrorCursor {
        self.errors.sample()
    }

    /// Whether there is anything that has not been written out.
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty.len() > 0
    }

    /// The folio's bytes are about to become newer than the device's. Waits for a write-out of it
    /// that is in flight (WRITEBACK-3).
    pub(crate) fn mark_dirty(&self, folio: &FolioRef<'_>, locked: &LockedFolio<'_>) {
        if locked.flags.get(Flag::Writeback) {
            self.memory.counters.add(Counter::WritebackWait, 1);
            locked.flags.wait_for_writeback();
        }
        self.dirty.mark(&self.memory, folio.id());
        self.flusher.note_dirty(&self.memory);
    }

    /// The folio `new` has taken the place of `old` in the table: it is as dirty as that was. Both
    /// are locked; nobody has a reference to `old`.
    pub(crate) fn replace_dirty(&self, old: FolioId, new: FolioId) {
        self.dirty.replace(&self.memory, old, new);
    }

    /// Holds the caller, who writes, while too much is dirty. No folio lock is held.
    pub(crate) fn hold_writer(&self) {
        self.flusher.hold_writer(&self.memory);
    }

    /// The transfer of consecutive whole folios from page `first` on, into their frames.
    pub(crate) fn read_transfer(&self, first: u64, folios: &[FolioId]) -> Transfer {
        let length = folios.len() as u64 * self.mapping.folio_bytes();
        let ids = folios.iter().copied();
        self.transfer(Operation::Read, first * PAGE_BYTES, length, ids)
    }

    /// The transfer of `length` bytes from `position` on, the first byte of the first folio,
    /// between the backing and the frames of `folios`.
    pub(super) fn transfer(
        &self,
        operation: Operation,
        position: u64,
        length: u64,
        folios: impl Iterator<Item = FolioId>,
    ) -> Transfer {
        let mut pieces = Pieces::default();
        let mut left = length;
        for id in folios {
            let part = left.min(self.mapping.folio_bytes());
            let start = NonNull::new(self.memory.arena.address(id));
            let start = start.expect("the arena is not at address 0");
            pieces.push(start, part as usize);
            left -= part;
        }
        let backing = match operation {
            Operation::Write => self.writer.get().unwrap_or(&self.reader),
            _ => &self.reader,
        };
        Transfer { backing: Arc::clone(backing), operation, position_bytes: position, pieces }
    }

    /// Zeroes a locked folio's bytes from `offset` on, in memory.
    pub(crate) fn zero_folio_from(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
        offset: u64,
    ) {
        let length = (locked.pages() * PAGE_BYTES).saturating_sub(offset) as usize;
        let target = self.memory.arena.address(folio.id()).wrapping_add(offset as usize);
        // SAFETY: the rest of a frame whose lock the caller holds, so it is its only writer.
        unsafe { copy::zero(target, length) };
    }

    /// The backing is at least `end_bytes` long now.
    pub(super) fn note_written(&self, end_bytes: u64) {
        self.len_on_backing_bytes.fetch_max(end_bytes, Ordering::Relaxed);
    }

    /// Cuts the file and its backing. If the backing refuses, the old length stands again, and
    /// nothing was written out by the new one (WRITEBACK-4). The caller holds the resizing lock.
    pub(crate) fn cut(&self, len_bytes: u64) -> std::result::Result<(), IoError> {
        let before_bytes = self.mapping.len_bytes();
        let _no_write_out = self.cutting.write();
        self.mapping.set_len_bytes(len_bytes);
        let result = self.set_len_on_backing(len_bytes);
        if result.is_err() {
            self.mapping.set_len_bytes(before_bytes);
        }
        result
    }

    /// Lets the file and its backing grow by zeros. The caller holds the resizing lock.
    pub(crate) fn grow(&self, len_bytes: u64) -> std::result::Result<(), IoError> {
        self.set_len_on_backing(len_bytes)?;
        self.mapping.set_len_bytes(len_bytes);
        Ok(())
    }

    fn set_len_on_backing(&self, len_bytes: u64) -> std::result::Result<(), IoError> {
        let writer = self.writer.get().unwrap_or(&self.reader);
        io::set_len(&**writer, len_bytes)?;
        self.len_on_backing_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Drops every folio from byte `position_bytes` (a multiple of the folio) on, dirty or not.
    ///
    /// Nobody may be inserting there: the length has been set, or there is no handle left.
    pub(crate) fn remove_folios_from(&self, position_bytes: u64) {
        self.remove_folios(position_bytes / PAGE_BYTES, |_| true);
    }

    /// Drops every folio that is clean. Writers may be at work: what they have changed stays.
    pub(crate) fn remove_clean_folios(&self) {
        self.remove_folios(0, |locked| !locked.flags.get(Flag::Dirty));
    }

    fn remove_folios(&self, first: u64, is_unwanted: impl Fn(&LockedFolio<'_>) -> bool) {
        let mut index = first;
        while let Some(found) = self.mapping.table().next_folio(index) {
            index = found;
            let folios = &self.memory.folios;
            let Lookup::Folio(folio) = self.mapping.get_folio(folios, index, &mut 0) else {
                continue;
            };
            let locked = folio.lock();
            if locked.owner() != self.address() {
                continue;
            }
            locked.flags.wait_for_writeback();
            if !is_unwanted(&locked) {
                index = locked.index() + locked.pages();
                continue;
            }
            self.dirty.forget(&self.memory, folio.id());
            let table_reference = self.mapping.remove(&folio, &locked, folios);
            drop(locked);
            drop(table_reference);
        }
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        debug_assert_eq!(self.mapping.resident_folios(), 0, "an inode outlives its folios");
        self.memory.arena.uncharge(self.mapping.table().charged_bytes());
    }
}
