//! One file of the cache: what all its handles share.
//!
//! # Safety
//! A folio in a table names its inode by address (rule 2 of `folio`); [`Inode::owner`] turns that
//! back into a reference, and its caller answers for the inode's life. Windows on frames are made
//! here for `io`.
#![allow(unsafe_code)]

use super::dirty::DirtyList;
use super::errors::{ErrorCursor, WriteErrors};
use crate::error::Result;
use crate::folio::{FolioRef, LockedFolio};
use crate::io::{self, Backing, IoError, IoSource, IoTarget};
use crate::lru::Memory;
use crate::mapping::{Lookup, Mapping, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::{AtomicU64, Backoff, Mutex, MutexGuard, Ordering, RwLock};
use crate::sys::copy;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) mapping: Mapping,
    pub(crate) memory: Arc<Memory>,
    reader: Arc<dyn Backing>,
    /// Set by the first handle that may write.
    writer: OnceLock<Arc<dyn Backing>>,
    /// Length of the backing as we made or found it: behind it there is nothing to read.
    len_on_backing_bytes: AtomicU64,
    dirty: DirtyList,
    errors: WriteErrors,
    /// Held by whoever changes the length.
    resizing: Mutex<()>,
    /// Shared by write-outs, held alone by a cut: see WRITEBACK-4.
    cutting: RwLock<()>,
    /// The most the file may grow to, bytes.
    pub(crate) len_max_bytes: u64,
}

impl Inode {
    /// A file over `backing`, which has `len_bytes` bytes now.
    pub(crate) fn new(
        memory: Arc<Memory>,
        backing: Arc<dyn Backing>,
        order: u8,
        len_bytes: u64,
        len_max_bytes: u64,
    ) -> std::io::Result<Self> {
        Ok(Self {
            mapping: Mapping::new(order, len_bytes, len_max_bytes)?,
            memory,
            reader: backing,
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
    pub(crate) fn allow_writes(&self, backing: Arc<dyn Backing>) {
        let _ = self.writer.set(backing);
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

    /// The folio's bytes are newer than the device's now.
    pub(crate) fn mark_dirty(&self, folio: &FolioRef<'_>, _locked: &LockedFolio<'_>) {
        self.dirty.mark(&self.memory, folio.id());
    }

    /// Reads the folio's bytes from the backing. Returns how many there were before its end.
    ///
    /// The folio is locked and not uptodate: nobody looks at its bytes but late optimistic readers.
    pub(crate) fn read_folio(
        &self,
        folio: &FolioRef<'_>,
        locked: &LockedFolio<'_>,
    ) -> std::result::Result<u64, IoError> {
        let start = self.memory.arena.address(folio.id());
        let length = (locked.pages() * PAGE_BYTES) as usize;
        let start = NonNull::new(start).expect("the arena is not at address 0");
        // SAFETY: IO-1: a whole frame, mapped as long as the arena (FRAMES-2); we are its only
        // writer (folio lock, not uptodate); readers go through `sys::copy`.
        let mut target = unsafe { IoTarget::new(start, length) };
        let position = locked.index() * PAGE_BYTES;
        let bytes = io::read_full(&*self.reader, &mut target, position)? as u64;
        self.memory.counters.add(Counter::ReadRequest, 1);
        self.memory.counters.add(Counter::ReadBytes, bytes);
        Ok(bytes)
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

    /// Writes the folio out if it is dirty, and waits for it. Unlocks it for the I/O.
    ///
    /// The error is recorded for every handle, and the folio is dirty as before.
    pub(crate) fn write_out(
        &self,
        folio: &FolioRef<'_>,
        locked: LockedFolio<'_>,
    ) -> std::result::Result<(), Arc<IoError>> {
        // One write-out of a folio at a time. Holding the lock keeps others from starting one.
        locked.flags.wait_for_writeback();
        // WRITEBACK-4: the length stands until the bytes are written.
        let _no_cut = self.cutting.read();
        let Some(in_flight) = self.dirty.begin(&self.memory, folio.id()) else { return Ok(()) };
        let position = locked.index() * PAGE_BYTES;
        let folio_bytes = locked.pages() * PAGE_BYTES;
        let length = self.mapping.len_bytes().saturating_sub(position).min(folio_bytes);
        drop(locked);
        let result = self.write_bytes(folio, position, length);
        let counters = &self.memory.counters;
        counters.add(Counter::Writeback, 1);
        if let Err(error) = &result {
            counters.add(Counter::WritebackError, 1);
            self.errors.record(Arc::clone(error));
        }
        self.dirty.end(&self.memory, folio.id(), in_flight, result.is_err());
        result
    }

    fn write_bytes(
        &self,
        folio: &FolioRef<'_>,
        position: u64,
        length: u64,
    ) -> std::result::Result<(), Arc<IoError>> {
        if length == 0 {
            return Ok(());
        }
        let writer = self.writer.get().unwrap_or(&self.reader);
        let start = NonNull::new(self.memory.arena.address(folio.id()));
        let start = start.expect("the arena is not at address 0");
        // SAFETY: IO-1: a frame, mapped as long as the arena (FRAMES-2), which `folio` keeps from
        // being given to others; whoever writes it meanwhile goes through `sys::copy`.
        let source = unsafe { IoSource::new(start, length as usize) };
        io::write_full(&**writer, &source, position).map_err(Arc::new)?;
        self.memory.counters.add(Counter::WrittenBytes, length);
        self.len_on_backing_bytes.fetch_max(position + length, Ordering::Relaxed);
        Ok(())
    }

    /// Writes out everything that is dirty at the call and waits for what is in flight.
    ///
    /// Tries every folio, whatever happens to the others; errors are recorded.
    pub(crate) fn write_out_all(&self) {
        let mut backoff = Backoff::default();
        let mut left = self.dirty.len();
        while left > 0 {
            let folio = match self.dirty.rotate(&self.memory) {
                Ok(Some(folio)) => folio,
                Ok(None) => break,
                Err(()) => {
                    backoff.wait();
                    continue;
                }
            };
            left -= 1;
            let locked = folio.lock();
            if locked.owner() == self.address() {
                // The error is recorded; the caller asks for it.
                let _ = self.write_out(&folio, locked);
            }
        }
        self.dirty.wait_for_in_flight();
    }

    /// Makes everything durable that was written before the call.
    ///
    /// `cursor` is the handle's: it is told of errors of others once. Blocks for the device.
    pub(crate) fn sync(&self, cursor: &ErrorCursor, metadata: bool) -> Result<()> {
        let Some(writer) = self.writer.get() else { return Ok(()) };
        let errors_before = self.errors.count();
        self.write_out_all();
        if let Some(error) = self.errors.check_since(cursor, errors_before) {
            return Err(crate::error::ErrorKind::Writeback(error).into());
        }
        self.memory.counters.add(Counter::Sync, 1);
        let synced = if metadata { io::sync_all(&**writer) } else { io::sync_data(&**writer) };
        synced.map_err(crate::error::Error::from)
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
        let mut index = position_bytes / PAGE_BYTES;
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
