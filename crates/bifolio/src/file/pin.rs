//! Pins: access to cached bytes without a copy.
//!
//! A [`PageRef`] is one reference to a folio, taken with one unconditional add and checked against
//! the table (READ-L1..L4). It borrows the file and stays on its thread;
//! `owned_pin.rs` has the form without a lifetime. A [`PageRefMut`] is the folio lock and a write
//! section. A pin guarantees residency, not immutability: another handle may write the bytes
//! concurrently, unless the file is an [`ImmutableFile`].
//!
//! # Safety
//! Returns addresses in frames that are not reused while a reference is held (FRAMES-3).
#![allow(unsafe_code)]

use super::File;
use super::gate::GatedFile;
use super::owned_pin::OwnedPageRef;
use super::read_with::PageView;
use crate::ablation::PinMode;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::own_pins::OwnPin;
use crate::fill::{AccessMode, Batch, Locked, ReadIoClaim, Wait};
use crate::page::{
    Entry, FolioId, FolioRef, Folios, LockedFolio, PAGE_BYTES, PAGE_SHIFT, TryGet, WriteSection,
    pages_of,
};
use crate::stats::Counter;
use crate::sync::{Ordering, blocking};
use crate::sys::copy;
use crate::writeback::NO_LSN;
use std::marker::PhantomData;
use std::ops::{Deref, Range};

/// Pinned bytes of one folio: they stay resident until the reference is dropped. Not `Send`; see
/// [`PageRef::into_owned`].
///
/// The reference of an [`ImmutableFile`] dereferences to `[u8]`. In a file that can be written,
/// other handles may change the bytes at any time, so the reference dereferences to a [`PageView`],
/// which copies, compares and loads them. During a concurrent write it finds a mixture of old and
/// new bytes; [`File::read_at`] is atomic within a page.
///
/// In a forked child the bytes read as zeros, and those of a file that can be mapped must not be
/// accessed at all. Dropping a reference in the child has no effect. The same holds for
/// [`OwnedPageRef`] and [`PageRefMut`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, b"0123456789")?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
/// let page = file.pin(2..6)?;
/// let mut bytes = [0; 4];
/// page.copy_to(0, &mut bytes);
/// assert_eq!(&bytes, b"2345");
/// let owned = page.into_owned();
/// std::thread::spawn(move || assert_eq!(owned.len(), 4)).join().unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PageRef<'a, F = File> {
    file: &'a File,
    folio: FolioRef<'a>,
    /// The bytes. Its raw pointer keeps a reference on the thread that took it.
    view: PageView<'a>,
    of: PhantomData<F>,
}

#[inline(always)]
#[track_caller]
fn check_fits(wanted: usize, pinned: usize) {
    if wanted > pinned {
        does_not_fit(wanted, pinned);
    }
}

#[cold]
#[track_caller]
fn does_not_fit(wanted: usize, pinned: usize) -> ! {
    panic!("{wanted} bytes wanted, {pinned} pinned");
}

impl<'a, F> PageRef<'a, F> {
    pub(super) fn folio_id(&self) -> FolioId {
        self.folio.id()
    }

    pub(super) fn into_folio(self) -> FolioRef<'a> {
        self.folio
    }

    /// Returns the same reference without a lifetime: it can be stored, cloned and sent.
    pub fn into_owned(self) -> OwnedPageRef<F> {
        OwnedPageRef::new(self.file, self.folio, self.view)
    }
}

impl<'a> PageRef<'a> {
    pub(super) fn of_immutable(self) -> PageRef<'a, ImmutableFile> {
        let Self { file, folio, view, .. } = self;
        PageRef { file, folio, view, of: PhantomData }
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
    // Dropped in this order: the section ends under the lock, the lock under the reference.
    unlocked: Unlocked,
    section: WriteSection<'a>,
    lock: LockedFolio<'a>,
    folio: FolioRef<'a>,
    file: &'a File,
    own: OwnPin,
    start: *mut u8,
    view: PageView<'a>,
    of: PhantomData<fn() -> F>,
    not_send: PhantomData<*const ()>,
}

/// Counts the lock again for this thread, which has not counted it while the pin existed, until it
/// is released.
#[derive(Debug)]
struct Unlocked;

impl Drop for Unlocked {
    fn drop(&mut self) {
        blocking::track(1);
    }
}

impl<F> PageRefMut<'_, F> {
    /// Replaces the bytes from `offset` on with `bytes`.
    ///
    /// # Panics
    /// If `bytes` reaches past the last pinned byte.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) {
        check_fits(offset.saturating_add(bytes.len()), self.view.len());
        // SAFETY: inside a frame, checked above; we hold its folio lock and write section.
        unsafe { copy::copy_in(self.start.wrapping_add(offset), bytes) }
    }

    /// Returns the address of the first byte. Other threads may be reading it through pins: create
    /// a unique reference only if you can rule that out.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }
}

impl<'a, F> Deref for PageRefMut<'a, F> {
    type Target = PageView<'a>;

    fn deref(&self) -> &PageView<'a> {
        &self.view
    }
}

impl<'a> PageRefMut<'a> {
    /// Returns the same bytes as those of a file with a gate.
    pub(super) fn of_gated(self) -> PageRefMut<'a, GatedFile> {
        let Self { unlocked, section, lock, folio, file, own, start, view, .. } = self;
        let (of, not_send) = (PhantomData, PhantomData);
        PageRefMut { unlocked, section, lock, folio, file, own, start, view, of, not_send }
    }
}

impl PageRefMut<'_, GatedFile> {
    /// Notes that the log record of the changes ends at `lsn`: the page is not written out before
    /// the file's [`WriteGate`](crate::WriteGate) has made that durable. While the pin exists the
    /// page is not written out anyway, so the record may be appended after the change, as long as
    /// this is called before the pin is dropped. The page keeps the highest LSN of its changes.
    /// With [`u64::MAX`] it stays in memory until [`GatedFile::assign_lsn`]. Takes two uncontended
    /// locks.
    pub fn assign_lsn(&mut self, lsn: u64) {
        let has_room = self.file.handle.inode.dirty.try_add_lsn(self.folio.id(), lsn);
        assert!(has_room, "a pin of a gated file keeps room for its LSN");
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
    pub fn pin(&self, range: Range<u64>) -> Result<PageRef<'_>> {
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
    pub(super) fn pin_hit(&self, range: &Range<u64>) -> Option<PageRef<'_>> {
        let try_get = |folios, id| self.try_get(folios, id);
        let (folio, start) = self.hit_path.pin(range, try_get)?;
        self.handle.inode.memory.counters.add(Counter::Pin, 1);
        Some(self.pin_at(range, folio, start))
    }

    /// Returns the pin of a range in folio `id`. Takes over a reference that the caller holds.
    pub(super) fn pin_of(&self, range: &Range<u64>, id: FolioId) -> PageRef<'_> {
        let memory = &self.handle.inode.memory;
        memory.counters.add(Counter::Pin, 1);
        let folio = memory.folios.adopt(id);
        let start = self.address_in(&folio, range.start);
        self.pin_at(range, folio, start)
    }

    #[inline(always)]
    fn pin_at<'a>(
        &'a self,
        range: &Range<u64>,
        folio: FolioRef<'a>,
        start: *const u8,
    ) -> PageRef<'a> {
        let length = (range.end.wrapping_sub(range.start)) as usize;
        // SAFETY: the reference to the folio keeps the frame.
        let view = unsafe { PageView::new(start, length) };
        PageRef { file: self, folio, view, of: PhantomData }
    }

    /// Returns `true` if the range can be pinned: it is in one folio and in the file.
    pub(super) fn check_pin(&self, range: &Range<u64>) -> Result<()> {
        self.handle.check_readable()?;
        self.check_pin_range(range)
    }

    /// Pins the bytes of `range` for changes in place. Blocks for the folio lock, for I/O on a
    /// miss, and, like [`File::write_at`], while too much is dirty.
    ///
    /// # Errors
    /// The errors of [`File::pin`], a handle that is not open for writing, and, as for
    /// [`File::write_at`], a device that accepts no writes.
    pub fn pin_mut(&self, range: Range<u64>) -> Result<PageRefMut<'_>> {
        self.handle.check_writable()?;
        self.check_pin_range(&range)?;
        let inode = &self.handle.inode;
        // Room for the LSN that the pin may get.
        let lsn = inode.has_gate().then_some(NO_LSN);
        inode.refresh_gate();
        let Locked { folio, lock, .. } = loop {
            let locked =
                self.handle.fill().lock_folio(range.start >> PAGE_SHIFT, AccessMode::Cache)?;
            // The file may have been truncated while we waited for the lock.
            self.check_pin_range(&range)?;
            let Err(no_room) = inode.try_mark_dirty(&locked.folio, &locked.lock, lsn) else {
                break locked;
            };
            drop(locked);
            self.handle.make_room(no_room, range.start, range.end - range.start)?;
        };
        let start = self.address_in(&folio, range.start);
        let pages = range.start >> PAGE_SHIFT..((range.end - 1) >> PAGE_SHIFT) + 1;
        let section = inode.mapping.begin_write_section(&lock, pages);
        let length = (range.end - range.start) as usize;
        inode.memory.counters.add(Counter::WriteBytes, length as u64);
        // The owner of the pin may access maps: their faults do not need this folio.
        blocking::track(-1);
        let own = OwnPin::new(inode, lock.index()..lock.index() + lock.pages());
        Ok(PageRefMut {
            unlocked: Unlocked,
            section,
            lock,
            folio,
            file: self,
            own,
            start,
            // SAFETY: the reference, taken with the lock, keeps the frame.
            view: unsafe { PageView::new(start, length) },
            of: PhantomData,
            not_send: PhantomData,
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
    pub(super) fn pin_resident(&self, range: &Range<u64>) -> Option<PageRef<'_>> {
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
        handle.note_end(range.end);
        if plan.is_none() {
            return Ok(());
        }
        let claimed = handle.fill().claim_run(pages.clone(), seen, Wait::ForFrames)?;
        let ReadIoClaim::New(mut run) = claimed else {
            handle.read_ahead(plan);
            return Ok(());
        };
        let plan = handle.join_plan(&mut run, &pages, plan);
        if plan.is_none() {
            let _ = run.read(&handle.inode, drop);
            return Ok(());
        }
        let mut batch = Batch::in_order(&handle.inode);
        batch.start(run, 0, &mut |_, delivery| drop(delivery));
        // The transfer that this reader waits for is the first.
        batch.begin();
        handle.read_ahead(plan);
        batch.finish(&mut |_, delivery| drop(delivery));
        Ok(())
    }

    pub(super) fn address_in(&self, folio: &FolioRef<'_>, position: u64) -> *mut u8 {
        let in_folio = position - folio.folio().index() * PAGE_BYTES;
        self.handle.inode.frame_of(folio).wrapping_add(in_folio as usize)
    }

    pub(super) fn check_pin_range(&self, range: &Range<u64>) -> Result<()> {
        let length_bytes = self.check_pin_bytes(range)?;
        let folio_bytes = self.folio_bytes();
        if range.start / folio_bytes != (range.end - 1) / folio_bytes {
            let text = format!(
                "{length_bytes} bytes at position {} are not in one folio of {folio_bytes} bytes; \
                 `pins` walks several",
                range.start
            );
            let error = Error::new(ErrorKind::PinSpansFolios, text);
            return Err(error.in_file(self.handle.inode.name()).at(range.clone()));
        }
        Ok(())
    }

    /// Returns the length of a range that is not empty and lies in the file.
    pub(super) fn check_pin_bytes(&self, range: &Range<u64>) -> Result<u64> {
        let length_bytes = range.end.saturating_sub(range.start);
        self.handle.range_end(range.start, length_bytes)?;
        if range.is_empty() {
            return Err(Error::config("range", "a pin of no bytes"));
        }
        if range.end > self.len() {
            return Err(self.handle.inode.past_end(range.start, length_bytes));
        }
        Ok(length_bytes)
    }
}

/// A file whose bytes do not change while it is open, so that they can be borrowed as `&[u8]`.
/// From [`Cache::open_immutable`](crate::Cache::open_immutable).
///
/// Dereferences to the [`File`], for all calls that read. Cheap to clone; clones share one handle.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, b"0123456789")?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let index = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
/// let page = index.pin(2..6)?;
/// assert_eq!(&page[..], b"2345");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ImmutableFile {
    file: File,
}

impl ImmutableFile {
    /// Returns a file whose handle is registered as immutable.
    pub(super) fn new(file: File) -> Self {
        Self { file }
    }

    /// Pins the bytes of `range`, like [`File::pin`], and lends them as a slice. Blocks for I/O on
    /// a miss.
    ///
    /// # Errors
    /// As [`File::pin`].
    #[inline(always)]
    pub fn pin(&self, range: Range<u64>) -> Result<PageRef<'_, Self>> {
        Ok(self.file.pin(range)?.of_immutable())
    }

    /// Pins the bytes of each range, like [`File::pin_many`], and lends them as slices. Blocks
    /// until all ranges have a result.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let index = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
    /// let pages = index.pin_many(&[0..100, 50_000..50_100, 99_999..100_001]);
    /// assert_eq!(pages[1].as_ref().unwrap()[..], [7; 100]);
    /// assert!(pages[2].is_err(), "it ends past the end of file");
    /// # Ok(())
    /// # }
    /// ```
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<PageRef<'_, Self>>> {
        let pages = self.file.pin_many(ranges).into_iter();
        pages.map(|page| page.map(PageRef::of_immutable)).collect()
    }
}

impl Deref for ImmutableFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl From<ImmutableFile> for File {
    fn from(immutable: ImmutableFile) -> Self {
        immutable.file
    }
}
