//! Pins: bytes that stay where they are, without a copy.
//!
//! A [`Pin`] is one reference to a folio, taken with one unconditional add and checked against the
//! table (L1-L4 of `page/mapping.rs`); it borrows the file and stays on its thread, so that it can
//! become cheaper still. A [`Hold`] is the same for keeps. A [`PinMut`] is the folio lock and a
//! write section. A pin guarantees residency, not immutability: another handle may write the bytes
//! meanwhile, unless the file is immutable. Of many pins, those of resident folios are taken at
//! once, and the others after transfers that leave together.
//!
//! # Safety
//! Hands out addresses in frames that a reference keeps from being given to others (FRAMES-3).
#![allow(unsafe_code)]

use super::File;
use super::fill::Locked;
use super::handle::{Access, Handle};
use super::own_pins::OwnPin;
use super::read_many::{Batch, Delivery};
use crate::ablation::PinMode;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Memory;
use crate::page::{
    FolioId, FolioRef, Folios, LockedFolio, PAGE_BYTES, PAGE_SHIFT, TryGet, WriteSection, pages_of,
};
use crate::stats::Counter;
use crate::sync::inside;
use crate::sys::copy;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of one folio, resident for as long as this lives. Not `Send`: see [`Pin::hold`].
///
/// In a forked child the bytes read as zeros; those of a file that can be mapped cannot be touched
/// there at all. Dropping a pin there does nothing. The same goes for [`Hold`] and [`PinMut`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, b"0123456789")?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let file = cache.open(&path, &bifolio::OpenOptions::new().immutable(true))?;
/// let pin = file.pin(2..6)?;
/// assert_eq!(pin.as_bytes(), Some(&b"2345"[..]));
/// let hold = pin.hold();
/// std::thread::spawn(move || assert_eq!(hold.len(), 4)).join().unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pin<'a> {
    file: &'a File,
    folio: FolioRef<'a>,
    start: *const u8,
    length: usize,
    /// Short pins belong to their thread.
    not_send: PhantomData<*const ()>,
}

macro_rules! byte_accessors {
    () => {
        /// How many bytes are pinned.
        #[inline]
        pub fn len(&self) -> usize {
            self.length
        }

        /// Whether no bytes are pinned.
        pub fn is_empty(&self) -> bool {
            self.length == 0
        }

        /// The first byte. The bytes may change while other handles write them; make no reference
        /// of them unless you know that nobody does.
        #[inline]
        pub fn as_ptr(&self) -> *const u8 {
            self.start
        }

        /// Copies the first `buffer.len()` bytes out. While somebody writes them, the copy may be
        /// a mixture of old and new; [`File::read_at`] is atomic within a page.
        ///
        /// # Panics
        /// If fewer bytes are pinned.
        #[inline]
        pub fn copy_to(&self, buffer: &mut [u8]) {
            check_fits(buffer.len(), self.length);
            // SAFETY: the bytes are in a frame our reference keeps, long enough (checked), and
            // changed by others only through `sys::copy`; `buffer` is not frame memory.
            unsafe { copy::copy_out(self.start, buffer) }
        }

        /// The bytes, if the file is immutable; `None` on any other file, where another handle
        /// could change them under the borrow.
        #[inline]
        pub fn as_bytes(&self) -> Option<&[u8]> {
            if !self.is_immutable() {
                return None;
            }
            // SAFETY: the file is immutable, and stays so while the handle lives, which this
            // borrows or owns: nobody writes the bytes.
            Some(unsafe { self.as_slice() })
        }

        /// The bytes as a slice.
        ///
        /// # Safety
        /// Nobody may write these bytes (through any handle of the file, `write_at`, `pin_mut` or
        /// `set_len`) while the slice lives: the caller's own latch must keep writers away.
        #[inline]
        pub unsafe fn as_slice(&self) -> &[u8] {
            // SAFETY: a resident, initialised frame that our reference keeps; the caller vouches
            // that nobody changes it.
            unsafe { std::slice::from_raw_parts(self.start, self.length) }
        }
    };
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

impl<'a> Pin<'a> {
    byte_accessors!();

    fn is_immutable(&self) -> bool {
        self.file.handle.immutable
    }

    /// A counted reference of its own, which can be kept, cloned and sent.
    pub fn hold(&self) -> Hold {
        // Our own reference keeps the folio alive, so this fails only at the limit of counts,
        // which would take 2^38 holds: more than there is memory for.
        let folio = self.folio.try_clone().expect("2^38 references to one folio");
        Hold {
            handle: Arc::clone(&self.file.handle),
            memory: Arc::clone(&self.file.handle.inode.memory),
            id: folio.into_id(),
            start: self.start,
            length: self.length,
        }
    }
}

/// A pin for keeps: `Send`, `Sync`, `Clone`, without a lifetime. Keeps its handle open.
#[derive(Debug)]
pub struct Hold {
    handle: Arc<Handle>,
    memory: Arc<Memory>,
    id: FolioId,
    start: *const u8,
    length: usize,
}

// SAFETY: the address is of a frame our counted reference keeps; it may be read from any thread.
unsafe impl Send for Hold {}
// SAFETY: all methods only read what may be read from any thread.
unsafe impl Sync for Hold {}

impl Hold {
    byte_accessors!();

    fn is_immutable(&self) -> bool {
        self.handle.immutable
    }

    /// The page counts as stored to through a map, if the file has it. Waits for its lock.
    pub(crate) fn mark_stored(&self) {
        let index = self.memory.folios.get(self.id).index();
        // After a cut and a growth it may be another folio's (REGION-4).
        if let Some(Locked { folio, lock, .. }) = self.handle.find_resident(index) {
            self.handle.inode.mark_stored(&lock, folio.id());
        }
    }

    /// Whether this is a process that the cache was not made in.
    pub(crate) fn is_forked(&self) -> bool {
        self.handle.registry.cache_state.is_forked()
    }
}

impl Clone for Hold {
    fn clone(&self) -> Self {
        let folio = self.memory.folios.try_get(self.id).expect("2^38 references to one folio");
        Self {
            handle: Arc::clone(&self.handle),
            memory: Arc::clone(&self.memory),
            id: folio.into_id(),
            start: self.start,
            length: self.length,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.is_forked() {
            // The reference is the parent's.
            return;
        }
        drop(self.memory.folios.adopt(self.id));
    }
}

/// Bytes of one folio, to be changed in place: nobody else reads or writes the folio through the
/// cache's calls while this lives; pins taken before still point to it.
///
/// The folio is dirty, whether it was changed or not. Holds the folio's lock: a call of the same
/// thread that needs the folio (a read, a write, a sync or a close among them) would wait for
/// itself, so it is refused ([`ErrorKind::PinnedByCaller`]). A call of another thread waits, so do
/// not wait for that thread with the pin in hand. Calls for
/// other folios wait for no thread that waits for this one, unless it has one of them as a
/// `PinMut`, or, where they change the length of the same file, is about to cut it or to write
/// across its end.
#[derive(Debug)]
pub struct PinMut<'a> {
    // In the order they must go: the section ends under the lock, the lock under the reference.
    _section: WriteSection<'a>,
    _lock: LockedFolio<'a>,
    _folio: FolioRef<'a>,
    _own: OwnPin,
    start: *mut u8,
    length: usize,
    not_send: PhantomData<*const ()>,
}

impl Drop for PinMut<'_> {
    fn drop(&mut self) {
        // The lock counts again until it goes.
        inside::add(1);
    }
}

impl PinMut<'_> {
    /// How many bytes are pinned.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no bytes are pinned.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies the first `buffer.len()` bytes out.
    ///
    /// # Panics
    /// If fewer bytes are pinned.
    pub fn copy_to(&self, buffer: &mut [u8]) {
        check_fits(buffer.len(), self.length);
        // SAFETY: the bytes are in a frame we hold the lock of; `buffer` is not frame memory.
        unsafe { copy::copy_out(self.start, buffer) }
    }

    /// Replaces `bytes.len()` bytes from `offset` on.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn copy_from(&mut self, offset: usize, bytes: &[u8]) {
        check_fits(offset.saturating_add(bytes.len()), self.length);
        // SAFETY: inside a frame we hold the lock and the write section of, checked above.
        unsafe { copy::copy_in(self.start.wrapping_add(offset), bytes) }
    }

    /// The first byte. Others may be reading it: make no unique reference of it unless you know
    /// that no pin of these bytes is being read.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }
}

/// Iterator over pins of consecutive folios; see [`File::pins`].
#[derive(Debug)]
pub struct Pins<'a> {
    file: &'a File,
    left: Range<u64>,
}

impl<'a> Iterator for Pins<'a> {
    type Item = Result<Pin<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left.is_empty() {
            return None;
        }
        let folio_bytes = self.file.folio_bytes();
        let folio_end = (self.left.start / folio_bytes + 1).saturating_mul(folio_bytes);
        let end = folio_end.min(self.left.end);
        let pin = self.file.pin(self.left.start..end);
        // After an error there is nothing sensible to go on with.
        self.left.start = if pin.is_ok() { end } else { self.left.end };
        Some(pin)
    }
}

impl File {
    /// Pins the bytes of `range`, which must lie in one folio and in the file. Blocks for I/O if
    /// they are not resident.
    ///
    /// # Errors
    /// A range that leaves its folio ([`ErrorKind::PinSpansFolios`]) or the file
    /// ([`ErrorKind::PastEnd`]), and all that a read can fail with.
    #[inline(always)]
    pub fn pin(&self, range: Range<u64>) -> Result<Pin<'_>> {
        match self.pin_hit(&range) {
            Some(pin) => Ok(pin),
            None => {
                let id = self.pin_miss(range.start, range.end)?;
                Ok(self.pin_of(&range, id))
            }
        }
    }

    /// The pin of a range whose folio is resident and marked as used.
    #[inline(always)]
    pub(super) fn pin_hit(&self, range: &Range<u64>) -> Option<Pin<'_>> {
        let try_get = |folios, id| self.try_get(folios, id);
        let (folio, start) = self.hit_path.pin(range, try_get)?;
        self.handle.inode.memory.counters.add(Counter::Pin, 1);
        Some(self.pin_at(range, folio, start))
    }

    /// The pin of a range whose folio a reference was left for.
    pub(super) fn pin_of(&self, range: &Range<u64>, id: FolioId) -> Pin<'_> {
        let memory = &self.handle.inode.memory;
        memory.counters.add(Counter::Pin, 1);
        let folio = memory.folios.adopt(id);
        let start = self.address_in(&folio, range.start);
        self.pin_at(range, folio, start)
    }

    #[inline(always)]
    fn pin_at<'a>(&'a self, range: &Range<u64>, folio: FolioRef<'a>, start: *const u8) -> Pin<'a> {
        let length = (range.end.wrapping_sub(range.start)) as usize;
        Pin { file: self, folio, start, length, not_send: PhantomData }
    }

    /// Whether the range can be pinned at all.
    pub(super) fn check_pin(&self, range: &Range<u64>) -> Result<()> {
        self.handle.check_readable()?;
        self.check_pin_range(range)
    }

    /// Pins of all folios that `range` touches, one after the other, each with its part of it.
    ///
    /// Stops after the first error.
    pub fn pins(&self, range: Range<u64>) -> Pins<'_> {
        Pins { file: self, left: range }
    }

    /// Pins the bytes of `range` for changing them in place. Blocks for the folio's lock and I/O,
    /// and as [`File::write_at`] while too much is dirty.
    ///
    /// # Errors
    /// As [`File::pin`]; a handle not opened for writing; a device that takes nothing, as for
    /// [`File::write_at`].
    pub fn pin_mut(&self, range: Range<u64>) -> Result<PinMut<'_>> {
        self.handle.check_writable()?;
        self.check_pin_range(&range)?;
        let inode = &self.handle.inode;
        let Locked { folio, lock, .. } = loop {
            let locked = self.handle.lock_folio(range.start >> PAGE_SHIFT, Access::Cache)?;
            // The file may have been cut while we waited for the lock.
            self.check_pin_range(&range)?;
            if inode.try_mark_dirty(&locked.folio, &locked.lock).is_ok() {
                break locked;
            }
            drop(locked);
            self.handle.wait_to_be_dirty(range.start, range.end - range.start)?;
        };
        let start = self.address_in(&folio, range.start);
        let pages = range.start >> PAGE_SHIFT..((range.end - 1) >> PAGE_SHIFT) + 1;
        let section = inode.mapping.begin_write_section(&lock, pages);
        let length = (range.end - range.start) as usize;
        inode.memory.counters.add(Counter::WriteBytes, length as u64);
        // Its owner may touch maps, whose faults do not need this folio.
        inside::add(-1);
        let own = OwnPin::new(inode, lock.index()..lock.index() + lock.pages());
        Ok(PinMut {
            _section: section,
            _lock: lock,
            _folio: folio,
            _own: own,
            start,
            length,
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

    /// Pins bytes that are not resident, or not marked as used, and leaves the reference to
    /// [`Self::pin_of`]. In this shape the answer fits in registers, and the hit beside it is not
    /// forced through memory.
    #[cold]
    #[inline(never)]
    fn pin_miss(&self, start: u64, end: u64) -> Result<FolioId> {
        let range = start..end;
        self.check_pin(&range)?;
        let inode = &self.handle.inode;
        let index = range.start >> PAGE_SHIFT;
        let locked = self.handle.lock_folio(index, Access::Cache)?;
        // The file may have been cut while we waited for the lock.
        self.check_pin_range(&range)?;
        if locked.was_resident {
            inode.memory.counters.add(Counter::HitSlow, 1);
            self.note_use(index, false);
        }
        let Locked { folio, lock, .. } = locked;
        drop(lock);
        Ok(folio.into_id())
    }

    fn address_in(&self, folio: &FolioRef<'_>, position: u64) -> *mut u8 {
        let in_folio = position - folio.folio().index() * PAGE_BYTES;
        self.handle.inode.frame_of(folio).wrapping_add(in_folio as usize)
    }

    fn check_pin_range(&self, range: &Range<u64>) -> Result<()> {
        let length_bytes = range.end.saturating_sub(range.start);
        self.handle.range_end(range.start, length_bytes)?;
        if range.is_empty() {
            return Err(self.empty_pin());
        }
        if range.end > self.len() {
            return Err(self.handle.past_end(range.start, length_bytes));
        }
        let folio_bytes = self.folio_bytes();
        if range.start / folio_bytes != (range.end - 1) / folio_bytes {
            let file = self.handle.inode.name();
            let position_bytes = range.start;
            let kind =
                ErrorKind::PinSpansFolios { file, position_bytes, length_bytes, folio_bytes };
            return Err(kind.into());
        }
        Ok(())
    }

    #[cold]
    fn empty_pin(&self) -> Error {
        let problem = "a pin of no bytes".to_owned();
        ErrorKind::Config { name: "range", problem }.into()
    }

    /// Pins the bytes of each range, as [`File::pin`] would; what is not resident is read by
    /// transfers that are submitted together. The answers stand in the order of the ranges, and a
    /// range that fails leaves the others alone. Blocks until all are answered.
    ///
    /// All pins count against the bound at the same time: a call for more than fits gets
    /// [`ErrorKind::Full`] for those that do not.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new().immutable(true))?;
    /// let pins = file.pin_many(&[0..100, 50_000..50_100, 99_999..100_001]);
    /// assert_eq!(pins[1].as_ref().unwrap().as_bytes(), Some(&[7; 100][..]));
    /// assert!(pins[2].is_err(), "it ends behind the end of the file");
    /// # Ok(())
    /// # }
    /// ```
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<Pin<'_>>> {
        let mut pins: Vec<Option<Result<Pin<'_>>>> = Vec::new();
        pins.resize_with(ranges.len(), || None);
        let mut batch = Batch::new(&self.handle.inode);
        let deliver = |pins: &mut Vec<_>, number: usize, delivery: Delivery<'_>| {
            pins[number] = match delivery {
                Delivery::Folio(locked) => self.pin_locked(&ranges[number], &locked).map(Ok),
                Delivery::Failed { error, .. } => Some(Err(error)),
            };
        };
        for (number, range) in ranges.iter().enumerate() {
            pins[number] = self.pin_hit(range).map(Ok);
            if pins[number].is_some() || self.check_pin(range).is_err() {
                continue;
            }
            let mut deliver = |number, delivery| deliver(&mut pins, number, delivery);
            // A pin that cannot be started is tried, and answered, by itself.
            let _ = batch.add(&self.handle, pages_of(range), number, &mut deliver);
        }
        batch.finish(&mut |number, delivery| deliver(&mut pins, number, delivery));
        let alone = |(number, pin): (usize, Option<_>)| {
            // Refused, being filled by others, or gone again.
            pin.unwrap_or_else(|| self.pin(ranges[number].clone()))
        };
        pins.into_iter().enumerate().map(alone).collect()
    }

    /// A pin of a range in a folio that has just been read.
    fn pin_locked(&self, range: &Range<u64>, locked: &Locked<'_>) -> Option<Pin<'_>> {
        // The file may have been cut meanwhile.
        if range.end > self.len() {
            return None;
        }
        let reference = locked.folio.try_clone()?;
        Some(self.pin_of(range, reference.into_id()))
    }
}
