//! Pins: access to cached bytes without a copy.
//!
//! A [`PageRef`] is one reference to a folio, taken with one unconditional add and checked against
//! the table (READ-L1..L4); an [`OwnedPageRef`] has no lifetime, and holds the folios of a part of
//! a map, too. A [`PageRefMut`] is the folio lock and a write section.
//!
//! # Safety
//! Returns addresses in frames that are not reused while a reference is held (FRAMES-3). Moves the
//! fields of a pin to one of another type.
#![allow(unsafe_code)]

use super::read_with::PageView;
use super::{File, Handle, ImmutableFile, MapInUse};
use crate::config::PinMode;
use crate::dirt::ChangeLsn;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::own_pins::OwnPin;
use crate::fill::{AccessMode, Locked, ReadIoClaim, Wait};
use crate::page::{
    Entry, Folio, FolioId, FolioRef, Folios, LockedFolio, PAGE_BYTES, PAGE_SHIFT, TryGet,
    WriteSection, pages_of,
};
use crate::stats::Counter;
use crate::sync::{Ordering, blocking};
use crate::sys::copy;
use std::iter;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::ops::{Deref, Range, RangeBounds};
use std::ptr;
use std::sync::Arc;

/// Pinned bytes of one folio: they stay resident until the reference is dropped. Not `Send`; see
/// [`PageRef::into_owned`].
///
/// The reference of an [`ImmutableFile`] dereferences to `[u8]`. In a file that can be written,
/// other handles may change the bytes at any time, so the reference dereferences to a [`PageView`],
/// which copies, compares and loads them. During a concurrent write it finds a mixture of old and
/// new bytes; [`File::read_at`] is atomic within a page.
///
/// In a forked child the bytes of all pins read as zeros, and those of a file that can be mapped
/// must not be accessed at all. Dropping a pin in the child has no effect.
///
/// ```
/// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
/// # std::fs::write(&path, b"0123456789")?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
/// let page = file.pin(2..6)?;
/// let mut bytes = [0; 4];
/// page.copy_to(0, &mut bytes);
/// assert_eq!(&bytes, b"2345");
/// let owned = page.into_owned();
/// std::thread::spawn(move || assert_eq!(owned.len(), 4)).join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PageRef<'a, F = File> {
    file: &'a File,
    /// The folio, with a reference: a [`FolioRef`] without the address of the folios, because a
    /// long list of pins costs as much as its cache lines.
    folio: &'a Folio,
    /// The bytes. Its raw pointer keeps a reference on the thread that took it.
    view: PageView<'a>,
    of: PhantomData<F>,
}

/// Two results of `pin_many` in a cache line.
const _: () = assert!(size_of::<Result<PageRef<'_>>>() == 32);

impl<F> Drop for PageRef<'_, F> {
    #[inline(always)]
    fn drop(&mut self) {
        self.folio.put(|| &self.file.handle.inode.memory.folios);
    }
}

impl<F> PageRef<'_, F> {
    pub(super) fn id(&self) -> FolioId {
        self.file.handle.inode.memory.folios.id_of(self.folio)
    }

    /// Ends the pin, and returns the folio, with its reference.
    fn into_id(self) -> FolioId {
        let id = self.id();
        mem::forget(self);
        id
    }

    /// Returns the same reference without a lifetime: it can be stored, cloned and sent.
    pub fn into_owned(self) -> OwnedPageRef<F> {
        OwnedPageRef {
            handle: Arc::clone(&self.file.handle),
            // SAFETY: the counted reference keeps the frame.
            view: unsafe { PageView::new(self.view.as_ptr(), self.view.len()) },
            first: self.into_id(),
            others: Box::default(),
            guard: None,
            of: PhantomData,
        }
    }
}

impl Deref for PageRef<'_, ImmutableFile> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: a resident, initialised frame that our reference keeps; no handle that can write
        // the file exists while an immutable one, which this borrows, is open.
        unsafe { std::slice::from_raw_parts(self.view.as_ptr(), self.view.len()) }
    }
}

impl<'a> Deref for PageRef<'a> {
    type Target = PageView<'a>;

    #[inline(always)]
    fn deref(&self) -> &PageView<'a> {
        &self.view
    }
}

/// Pinned bytes without a lifetime: `Send`, `Sync` and `Clone`. Keeps its file handle open.
///
/// From [`PageRef::into_owned`], or from [`Map::pin`](crate::Map::pin): then the bytes may span
/// folios, and the cache cannot be closed while the reference exists.
#[derive(Debug)]
pub struct OwnedPageRef<F = File> {
    handle: Arc<Handle>,
    /// Folios of which each is referenced once.
    first: FolioId,
    others: Box<[FolioId]>,
    view: PageView<'static>,
    /// Of a pin of a map. Dropped last: what was written under the pin is dirty by then.
    guard: Option<MapInUse>,
    of: PhantomData<fn() -> F>,
}

// SAFETY: the address is of frames that our counted references keep; any thread may read them.
unsafe impl<F> Send for OwnedPageRef<F> {}
// SAFETY: all methods only read memory that any thread may read.
unsafe impl<F> Sync for OwnedPageRef<F> {}

impl<F> OwnedPageRef<F> {
    /// Returns the same pin as one of a file of another kind, which the caller knows it to be.
    pub(crate) fn of_kind<G>(self) -> OwnedPageRef<G> {
        let pin = ManuallyDrop::new(self);
        OwnedPageRef {
            // SAFETY: moved out of a value that is neither dropped nor used again.
            handle: unsafe { ptr::read(&raw const pin.handle) },
            first: pin.first,
            // SAFETY: as above.
            others: unsafe { ptr::read(&raw const pin.others) },
            // SAFETY: the counted references, which the new value owns, keep the frames.
            view: unsafe { PageView::new(pin.view.as_ptr(), pin.view.len()) },
            // SAFETY: as above.
            guard: unsafe { ptr::read(&raw const pin.guard) },
            of: PhantomData,
        }
    }

    fn folios(&self) -> impl Iterator<Item = FolioId> {
        iter::once(self.first).chain(self.others.iter().copied())
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.handle.host.cache_state.is_forked()
    }
}

impl OwnedPageRef {
    /// Pins the mapped bytes of `range`, which begin at `start`. Blocks for the device.
    pub(crate) fn of_map(
        file: &File,
        range: Range<u64>,
        start: *const u8,
        guard: MapInUse,
    ) -> Result<Self> {
        file.fill_range(range.clone())?;
        let pin = |index: u64| {
            let page = index * PAGE_BYTES..(index + 1).saturating_mul(PAGE_BYTES);
            file.pin(page.start.max(range.start)..page.end.min(range.end))
        };
        let mut indices = pages_of(&range);
        let first = pin(indices.next().unwrap_or(range.start >> PAGE_SHIFT))?;
        let others = indices.map(pin).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            handle: Arc::clone(&file.handle),
            first: first.into_id(),
            others: others.into_iter().map(PageRef::into_id).collect(),
            // SAFETY: the counted references keep the pages.
            view: unsafe { PageView::new(start, (range.end - range.start) as usize) },
            guard: Some(guard),
            of: PhantomData,
        })
    }

    /// Marks the pages as stored to through a map, as far as the file still has them. Waits for the
    /// folio locks.
    pub(crate) fn mark_stored(&self) {
        let inode = &self.handle.inode;
        for id in self.folios() {
            let index = inode.memory.folios.get(id).index();
            // After a truncation and a growth the page may belong to another folio (REGION-4).
            if let Some(Locked { folio, lock, .. }) = self.handle.fill().find_resident(index) {
                inode.mark_stored(&lock, folio.id());
            }
        }
    }
}

impl Deref for OwnedPageRef<ImmutableFile> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: as for `PageRef`; this owns the immutable handle.
        unsafe { std::slice::from_raw_parts(self.view.as_ptr(), self.view.len()) }
    }
}

impl Deref for OwnedPageRef {
    type Target = PageView<'static>;

    #[inline(always)]
    fn deref(&self) -> &PageView<'static> {
        &self.view
    }
}

impl AsRef<[u8]> for OwnedPageRef<ImmutableFile> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<F> Clone for OwnedPageRef<F> {
    fn clone(&self) -> Self {
        let reference = |id: FolioId| {
            // Our own reference keeps the folio allocated: this fails only if the count overflows.
            let reference = self.handle.inode.memory.folios.try_get(id);
            reference.expect("2^38 references to one folio").into_id()
        };
        Self {
            handle: Arc::clone(&self.handle),
            first: reference(self.first),
            others: self.others.iter().copied().map(reference).collect(),
            // SAFETY: the counted references keep the frames.
            view: unsafe { PageView::new(self.view.as_ptr(), self.view.len()) },
            guard: self.guard.clone(),
            of: PhantomData,
        }
    }
}

impl<F> Drop for OwnedPageRef<F> {
    fn drop(&mut self) {
        if self.is_forked() {
            // The references belong to the parent process.
            return;
        }
        for id in self.folios() {
            drop(self.handle.inode.memory.folios.adopt(id));
        }
    }
}

/// Pinned bytes of one folio, writable in place; dereferences to a [`PageView`]. While it exists,
/// no other call of the cache reads or writes the folio; pins taken before still refer to the
/// bytes.
///
/// Marks the folio dirty, even if nothing is changed. Holds the folio lock. A call of the same
/// thread that needs this folio (a read, write, sync or close, for example) would deadlock, so it
/// fails with [`ErrorKind::PinnedByCaller`]. Calls of other threads wait until the pin is dropped,
/// so do not wait for such a thread while you hold it.
///
/// A call for other folios never waits for a thread that waits for this one, with two exceptions:
/// that thread holds one of the other folios as a `PageRefMut`, or the call changes the length of
/// the same file, and that thread is truncating it, clearing a range of it (`punch_hole`,
/// `zero_range`), discarding its changes, or writing across its end.
#[derive(Debug)]
pub struct PageRefMut<'a, F = File> {
    // Dropped in this order: the record is noted as missing and the section ends under the lock,
    // the lock under the reference.
    pub(super) record: PinRecord<'a>,
    _unlocked: Unlocked,
    _section: WriteSection<'a>,
    _lock: LockedFolio<'a>,
    _folio: FolioRef<'a>,
    _own: OwnPin,
    /// The bytes. Its raw pointer keeps the pin on the thread that took the lock.
    view: PageView<'a>,
    of: PhantomData<fn() -> F>,
}

/// Log record of the changes through a pin of a file with a write gate.
#[derive(Debug)]
pub(super) struct PinRecord<'a> {
    file: &'a File,
    id: FolioId,
    /// Set until the LSN is known: GATE-P2.
    is_due: bool,
    /// Set once the bytes may have been changed.
    has_changed: bool,
}

impl PinRecord<'_> {
    pub(super) fn assign(&mut self, lsn: u64) {
        self.file.handle.inode.dirty.with_lsns(|lsns| lsns.log_pin(self.id, lsn));
        self.is_due = false;
    }
}

impl Drop for PinRecord<'_> {
    fn drop(&mut self) {
        // The LSNs of a forked child belong to the parent process.
        if self.is_due && !self.file.handle.host.cache_state.is_forked() {
            // Also while a panic unwinds.
            let lsns_of = &self.file.handle.inode.dirty;
            lsns_of.with_lsns(|lsns| lsns.end_pin(self.id, self.has_changed));
        }
    }
}

/// Counts the lock for this thread again, as it was not while the pin existed.
#[derive(Debug)]
struct Unlocked;

impl Drop for Unlocked {
    fn drop(&mut self) {
        blocking::track(1);
    }
}

impl<'a, F> PageRefMut<'a, F> {
    /// Replaces the bytes from `offset` on with `bytes`. Returns `None`, and changes nothing, if
    /// they reach past the last pinned byte.
    #[must_use = "nothing was written if this is `None`"]
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) -> Option<()> {
        if offset.checked_add(bytes.len())? > self.view.len() {
            return None;
        }
        // SAFETY: inside a frame, checked above; we hold its folio lock and write section.
        unsafe { copy::copy_in(self.as_mut_ptr().wrapping_add(offset), bytes) };
        Some(())
    }

    /// Returns the address of the first byte. Other threads may be reading it through pins: create
    /// a unique reference only if you can rule that out.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.record.has_changed = true;
        self.view.as_ptr().cast_mut()
    }
}

impl<'a, F> Deref for PageRefMut<'a, F> {
    type Target = PageView<'a>;

    fn deref(&self) -> &PageView<'a> {
        &self.view
    }
}

impl File {
    /// Pins the bytes of `range`, which must lie in one folio and in the file. Blocks for I/O on a
    /// miss. Sequential pins start readahead, as reads do.
    ///
    /// # Errors
    /// A range that spans folios ([`ErrorKind::PinSpansFolios`]) or reaches past the end of file
    /// ([`ErrorKind::PastEnd`]), and every error of [`File::read_at`].
    #[inline(always)]
    pub fn pin(&self, range: impl RangeBounds<u64>) -> Result<PageRef<'_>> {
        self.pin_for(self.range_of(range))
    }

    #[inline(always)]
    pub(super) fn pin_for<F>(&self, range: Range<u64>) -> Result<PageRef<'_, F>> {
        match self.pin_hit(&range) {
            Some(pin) => Ok(pin),
            None => {
                let id = self.pin_miss(range.start, range.end)?;
                Ok(self.pin_of(&range, id))
            }
        }
    }

    /// Returns the pin of a range whose folio is resident and marked as used.
    #[inline(always)]
    pub(super) fn pin_hit<F>(&self, range: &Range<u64>) -> Option<PageRef<'_, F>> {
        let pin = self.pin_uncounted(range)?;
        self.handle.inode.memory.counters.add(Counter::Pin, 1);
        Some(pin)
    }

    /// Returns a pin like [`Self::pin_hit`], and leaves the count to the caller.
    #[inline(always)]
    pub(super) fn pin_uncounted<F>(&self, range: &Range<u64>) -> Option<PageRef<'_, F>> {
        let try_get = |folios, id| self.try_get(folios, id);
        let (folio, start) = self.hit_path.pin(range, try_get)?;
        Some(self.pin_at(range, folio, start))
    }

    /// Returns the pin of a range in folio `id`. Takes over a reference that the caller holds.
    pub(super) fn pin_of<F>(&self, range: &Range<u64>, id: FolioId) -> PageRef<'_, F> {
        let folio = self.handle.inode.memory.folios.adopt(id);
        let start = self.address_in(&folio, range.start);
        self.handle.inode.memory.counters.add(Counter::Pin, 1);
        self.pin_at(range, folio, start)
    }

    #[inline(always)]
    fn pin_at<'a, F>(
        &'a self,
        range: &Range<u64>,
        folio: FolioRef<'a>,
        start: *const u8,
    ) -> PageRef<'a, F> {
        let length = (range.end.wrapping_sub(range.start)) as usize;
        // SAFETY: the reference to the folio keeps the frame.
        let view = unsafe { PageView::new(start, length) };
        PageRef { file: self, folio: folio.into_folio(), view, of: PhantomData }
    }

    /// Pins the bytes of `range` for changes in place. Blocks for the folio lock, for I/O on a
    /// miss, and, like [`File::write_at`], while too much is dirty.
    ///
    /// # Errors
    /// The errors of [`File::pin`], a handle that is not open for writing, and, as for
    /// [`File::write_at`], a device that accepts no writes.
    pub fn pin_mut(&self, range: impl RangeBounds<u64>) -> Result<PageRefMut<'_>> {
        self.pin_changes(self.range_of(range), None)
    }

    /// Pins bytes for changes, which get an LSN later if `change` says so.
    pub(super) fn pin_changes<F>(
        &self,
        range: Range<u64>,
        change: Option<ChangeLsn>,
    ) -> Result<PageRefMut<'_, F>> {
        self.check_changeable()?;
        self.check_pin_range(&range)?;
        let inode = &self.handle.inode;
        let Locked { folio, lock, .. } = loop {
            let locked =
                self.handle.fill().lock_folio(range.start >> PAGE_SHIFT, AccessMode::Cache)?;
            // The file may have been truncated while we waited for the lock.
            self.check_pin_range(&range)?;
            let Err(no_room) = inode.try_mark_dirty(&locked.folio, &locked.lock, change) else {
                break locked;
            };
            drop(locked);
            self.handle.make_room(no_room, range.start, range.end - range.start)?;
        };
        let is_due = change == Some(ChangeLsn::Pinned);
        let record = PinRecord { file: self, id: folio.id(), is_due, has_changed: false };
        let section = inode.mapping.begin_write_section(&lock, pages_of(&range));
        let (start, length) =
            (self.address_in(&folio, range.start), (range.end - range.start) as usize);
        inode.memory.counters.add(Counter::WriteBytes, length as u64);
        // The owner of the pin may access maps: their faults do not need this folio.
        blocking::track(-1);
        let own = OwnPin::new(inode, lock.index()..lock.index() + lock.pages());
        // SAFETY: the reference, taken with the lock, keeps the frame.
        let view = unsafe { PageView::new(start, length) };
        Ok(PageRefMut {
            record,
            _unlocked: Unlocked,
            _section: section,
            _lock: lock,
            _folio: folio,
            _own: own,
            view,
            of: PhantomData,
        })
    }

    #[inline(always)]
    fn try_get<'a>(
        &self,
        folios: &'a Folios,
        id: FolioId,
    ) -> std::result::Result<FolioRef<'a>, TryGet> {
        match self.hit_path.ablation.modes().pins {
            PinMode::FrozenBit => folios.try_get(id),
            PinMode::CompareExchange => folios.try_get_compare_exchange(id),
        }
    }

    /// Pins bytes that are not resident, or not marked as used. Returns the id of the folio and
    /// leaves the reference to [`Self::pin_of`]: this result fits in registers, so the inlined hit
    /// path is not forced through memory.
    #[cold]
    #[inline(never)]
    fn pin_miss(&self, start: u64, end: u64) -> Result<FolioId> {
        let range = start..end;
        let try_get = |folios, id| self.try_get(folios, id);
        if let Some((folio, _)) = self.hit_path.pin_elsewhere(&range, try_get) {
            return Ok(folio.into_id());
        }
        self.check_pin(&range)?;
        let index = range.start >> PAGE_SHIFT;
        // Bytes that continue the last read or pin do not count as another use of their page.
        let continues = self.handle.readahead.continues(start);
        let is_first = !(continues && start & (PAGE_BYTES - 1) > 0);
        match self.handle.fill().absent_at(start) {
            Some(seen) => self.read_folio_and_ahead(&range, seen)?,
            // The first use of a page, or one that is being filled: the next window must not wait.
            None => self.handle.note_read(range.clone()),
        }
        let (folio, was_resident) = match self.ready_folio(index) {
            Some(folio) => (folio, true),
            None => {
                let locked = self.handle.fill().lock_folio(index, AccessMode::Cache)?;
                let Locked { folio, lock, was_resident } = locked;
                drop(lock);
                (folio, was_resident)
            }
        };
        // The file may have been truncated meanwhile.
        self.check_pin_range(&range)?;
        if was_resident {
            self.handle.inode.memory.counters.add(Counter::HitSlow, 1);
            if is_first {
                self.note_use(index, continues);
            }
        }
        Ok(folio.into_id())
    }

    /// Returns the pin of a range whose folio is resident and filled. Never waits.
    pub(super) fn pin_resident<F>(&self, range: &Range<u64>) -> Option<PageRef<'_, F>> {
        let index = range.start >> PAGE_SHIFT;
        let folio = self.ready_folio(index)?;
        // The file may have been truncated meanwhile.
        self.check_pin_range(range).ok()?;
        self.handle.inode.memory.counters.add(Counter::HitSlow, 1);
        self.note_use(index, false);
        Some(self.pin_of(range, folio.into_id()))
    }

    /// Returns a reference to the folio of page `index` if it is resident and no thread changes it.
    fn ready_folio(&self, index: u64) -> Option<FolioRef<'_>> {
        let inode = &self.handle.inode;
        // Acquire: pairs with the Release in `set_ready`: the descriptor is set up.
        let seen = inode.mapping.table().load(index, Ordering::Acquire);
        let ready = seen.is_ready().then_some(seen)?;
        inode.mapping.try_get_ready(&inode.memory.folios, index, ready).ok()
    }

    /// Reads the folio of a range and starts to read what follows it, if the reader is sequential.
    /// An error of the folio is returned by the next access. `seen` is the Entry of its page.
    fn read_folio_and_ahead(&self, range: &Range<u64>, seen: Entry) -> Result<()> {
        let (handle, pages) = (&self.handle, pages_of(range));
        let plan = handle.plan_after_miss(pages.clone());
        handle.note_order(range);
        if plan.is_none() {
            return Ok(());
        }
        match handle.fill().claim_run(pages.clone(), seen, Wait::ForFrames)? {
            ReadIoClaim::New(run) => self.read_run(run, pages, plan, &mut |_, read| drop(read)),
            _ => drop(handle.read_ahead(plan)),
        }
        Ok(())
    }

    /// Returns the address of the byte at `position`, which is in the folio.
    pub(super) fn address_in(&self, folio: &FolioRef<'_>, position: u64) -> *mut u8 {
        let in_folio = position - folio.folio().index() * PAGE_BYTES;
        self.handle.inode.frame_of(folio).wrapping_add(in_folio as usize)
    }

    /// Fails if the range cannot be pinned through this handle.
    pub(super) fn check_pin(&self, range: &Range<u64>) -> Result<()> {
        self.handle.check_readable()?;
        self.check_pin_range(range)
    }

    /// Fails unless the range is in one folio and in the file.
    pub(super) fn check_pin_range(&self, range: &Range<u64>) -> Result<()> {
        self.handle.check_not_empty(range, "a pin")?;
        let length_bytes = range.end - range.start;
        self.handle.range_end(range.start, length_bytes)?;
        if range.end > self.len() {
            return Err(self.handle.inode.past_end(range.start, length_bytes));
        }
        let folio_bytes = self.folio_bytes();
        if range.start / folio_bytes != (range.end - 1) / folio_bytes {
            let text = format!(
                "{length_bytes} bytes at position {} are not in one folio of {folio_bytes} bytes",
                range.start
            );
            let error = Error::new(ErrorKind::PinSpansFolios, text);
            return Err(error.in_file(self.handle.inode.name()).at(range.clone()));
        }
        Ok(())
    }
}
