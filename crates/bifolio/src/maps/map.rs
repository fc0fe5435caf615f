//! Maps: files as memory, paged in on demand, within the cache's bound.
//!
//! The cache finds a program's stores in the page tables. It does not find stores of a direct
//! transfer or a device there: the transfer looked up the page when it began, and its bytes may
//! arrive after a write-out has made the page clean. So every look for stores counts the pages of a
//! [`MapPinMut`] as stored to, and dropping it marks them dirty once more.
//!
//! PROTOCOL PINNED, as two columns:
//!
//! ```text
//!  PIN (here)                                   OTHERS
//!  P1 a reference to each folio                 eviction: UNMAP-B2 fails
//!  P2 its pages count as stored to              sync: look for stores; pinned pages are among
//!  P3 mark them dirty, under the folio lock       them; then SYNC-S1..S5
//!  P4 (the device writes, until it ends)        write-out: clean, protect, copy
//!  P5 mark them dirty, under the lock of        truncate: the folio is removed from the table,
//!     the folio that has the page now             the page stays (REGION-4); growth: another
//!  P6 they no longer count as stored to           folio has the page, zeroed
//!  P7 drop the references
//! ```
//!
//! A sync writes everything that was written before its look for stores: the page counts as stored
//! to, or P5 has marked it dirty. Bytes that arrive after the copy for a write-out are found by the
//! next look, or by P5. Bytes that a device writes to a truncated page are lost, as with `mmap`; if
//! the file has grown again they may become part of it, and are not lost then. `loom_map_pin`
//! models this.
//!
//! # Safety
//! Returns raw addresses, and slices of them under the caller's promise.
#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind, Result};
use crate::file::{File, ImmutableFile, OwnedPageRef, resolve};
use crate::maps::mappable::MapGuard;
use crate::maps::region::Region;
use crate::maps::stores;
use crate::page::pages_of;
use crate::sync::Mutex;
use std::marker::PhantomData;
use std::ops::{Deref, Range, RangeBounds};
use std::sync::Arc;

/// A file's bytes as memory, for reading.
///
/// Any load from the map works: a page that is not resident is read, and the thread waits. Offsets
/// count from the map's first byte. A map keeps its file open, and the cache cannot be closed while
/// a map or a pin of one exists.
///
/// A page that cannot be read, or that is past the end of a file that was truncated, raises SIGBUS,
/// as with `mmap`. Call [`Map::populate`] first, or use [`File::read_at`], to get an error instead.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data");
/// # std::fs::write(&path, vec![7_u8; 100_000])?;
/// # let can_map = |f: &bifolio::FeatureReport| f.name == "user-faults" && f.available;
/// # if !bifolio::features().iter().any(can_map) { return Ok(()) }
/// use bifolio::{Cache, OpenOptions};
///
/// let cache = Cache::builder().memory(16 << 20).build()?;
/// let file = cache.open(&path, &OpenOptions::new().mappable(true))?;
/// let map = file.map(..)?;
/// map.populate(..)?;
/// // SAFETY: the file is not written or truncated while the slice exists.
/// let bytes = unsafe { map.as_slice() };
/// assert_eq!(bytes[99_999], 7);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Map<F = File> {
    /// Dropped before the file.
    guard: MapGuard,
    file: File,
    region: Arc<Region>,
    range: Range<u64>,
    /// Number of failed faults of the file at the last call of `take_error`.
    errors_seen: Mutex<u64>,
    /// Type of the file.
    of: PhantomData<F>,
}

/// A file's bytes as memory, for reading and writing.
///
/// Everything that a [`Map`] does, and stores: a page that was stored to is written out by the next
/// sync of the file, by the flusher at the dirty age, or before it is evicted. Eviction never loses
/// a store. Stores are not atomic with respect to anything: see [`MapMut::as_mut_slice`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let can_map = |f: &bifolio::FeatureReport| f.name == "user-faults" && f.available;
/// # if !bifolio::features().iter().any(can_map) { return Ok(()) }
/// use bifolio::{Cache, OpenOptions};
///
/// let cache = Cache::builder().memory(16 << 20).build()?;
/// let options = OpenOptions::new().read(true).write(true).mappable(true);
/// let scratch = cache.memory_file_with("counters", &options)?;
/// scratch.set_len(1 << 20)?;
/// let mut map = scratch.map_mut(0..1 << 20)?;
/// // SAFETY: no other code uses these bytes now.
/// unsafe { map.as_mut_ptr().add(5000).write(42) };
/// let mut byte = [0];
/// scratch.read_exact_at(&mut byte, 5000)?;
/// assert_eq!(byte, [42]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MapMut {
    map: Map,
}

impl File {
    /// Maps the bytes of `range`, which must lie in the file, for reading. Does no I/O.
    ///
    /// # Errors
    /// A file that was not opened [`mappable`](crate::OpenOptions::mappable)
    /// ([`ErrorKind::Unsupported`]) or not for reading; a range that is empty or ends past the end
    /// of the file; for a memory file, no memory for the tables of the first 128 MiB of the range
    /// ([`ErrorKind::Full`]).
    pub fn map(&self, range: impl RangeBounds<u64>) -> Result<Map> {
        let range = self.range_of(range);
        let (region, guard) = self.begin_map(&range)?;
        let mut errors_seen = 0;
        region.stray_pages.error_since(&mut errors_seen);
        let errors_seen = Mutex::new(errors_seen);
        Ok(Map { guard, file: self.clone(), region, range, errors_seen, of: PhantomData })
    }

    /// Maps the bytes of `range`, which must lie in the file, for reading and writing. The first
    /// call for a file waits for its write-outs in flight.
    ///
    /// The cache finds stores in the page tables. Writes by the kernel or a device that bypass them
    /// (a read with `O_DIRECT`, `io_uring`, RDMA) must be made under a [`MapMut::pin_mut`];
    /// otherwise they may be lost.
    ///
    /// # Errors
    /// As [`File::map`]; a handle not opened for writing; [`ErrorKind::CannotMap`] if the kernel
    /// cannot report which pages were stored to, or keep their bytes through an eviction (Linux 6.7
    /// and later can, unless a system call filter forbids it).
    pub fn map_mut(&self, range: impl RangeBounds<u64>) -> Result<MapMut> {
        let range = self.range_of(range);
        let map = self.map(range)?;
        self.handle.check_writable()?;
        stores::track(&map.region, &self.handle.inode)?;
        Ok(MapMut { map })
    }
}

#[allow(clippy::len_without_is_empty, reason = "is never empty")]
impl<F> Map<F> {
    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.start().cast_const()
    }

    /// Returns the number of mapped bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Returns the bytes as a slice.
    ///
    /// # Safety
    /// While the slice exists none of its bytes may change: through a map, `write_at`, a pin, or a
    /// truncation of the file. Touching a page that cannot be read raises SIGBUS.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is address space of the region, which the file keeps; each page of it
        // can be read or raises a signal; the caller promises that the bytes do not change.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len() as usize) }
    }

    /// Reads the non-resident pages of `range`, in batches, so that touching them raises no fault
    /// until they are evicted. Retries pages that could not be read before. Blocks for the device.
    ///
    /// # Errors
    /// The first page that cannot be read; those before it are resident. A range that is not inside
    /// the map.
    pub fn populate(&self, range: impl RangeBounds<u64>) -> Result<()> {
        self.file.fill_range(self.in_file(range)?)
    }

    /// Keeps the bytes of `range` resident, as `mlock` does, while the pin exists: touching them
    /// raises no fault. Blocks for the device.
    ///
    /// # Errors
    /// Every error of [`Self::populate`]; [`ErrorKind::Full`] if the bound does not allow the pin.
    pub fn pin(&self, range: impl RangeBounds<u64>) -> Result<OwnedPageRef> {
        self.pin_in_file(self.in_file(range)?)
    }

    fn pin_in_file(&self, range: Range<u64>) -> Result<OwnedPageRef> {
        let start = self.region.addresses.base().wrapping_add(range.start as usize);
        OwnedPageRef::of_map(&self.file, range, start, self.guard.in_use.clone())
    }

    /// Returns the last error of a fault of the file since the map was created or this was last
    /// called, if there is one.
    pub fn take_error(&self) -> Option<Error> {
        let error = self.region.stray_pages.error_since(&mut self.errors_seen.lock())?;
        let text = format!("a page of a map could not be read: {error}");
        Some(Error::new(ErrorKind::Fault, text).because(Arc::new(error)))
    }

    fn start(&self) -> *mut u8 {
        self.region.addresses.base().wrapping_add(self.range.start as usize)
    }

    /// Converts a range of the map to a range of the file; an open end is that of the map.
    fn in_file(&self, range: impl RangeBounds<u64>) -> Result<Range<u64>> {
        let range = resolve(range, || self.len());
        if range.start > range.end || range.end > self.len() {
            let problem = format!("{range:?} of a map of {} bytes", self.len());
            return Err(Error::config("range", problem).in_file(self.file.handle.inode.name()));
        }
        Ok(self.range.start + range.start..self.range.start + range.end)
    }
}

/// Returns `true` if a range has bytes, all in one folio.
fn is_in_one_folio(range: &Range<u64>, folio_bytes: u64) -> bool {
    range.start < range.end && range.start / folio_bytes == (range.end - 1) / folio_bytes
}

impl ImmutableFile {
    /// Maps the bytes of `range` for reading, like [`File::map`], and lends them as a slice
    /// ([`Map::as_bytes`]).
    ///
    /// # Errors
    /// Every error of [`File::map`].
    pub fn map(&self, range: impl RangeBounds<u64>) -> Result<Map<Self>> {
        let Map { guard, file, region, range, errors_seen, .. } = File::map(self, range)?;
        Ok(Map { guard, file, region, range, errors_seen, of: PhantomData })
    }

    /// Returns the bytes of `range`, of any length and at any position, as one slice that is kept
    /// in memory: a compressed block, the weights of an expert. No byte is copied. Missing pages
    /// are read in one batch. Blocks for the device.
    ///
    /// The slice can be stored, cloned and sent, and is what `Bytes::from_owner` of the crate
    /// `bytes` takes. It counts against the bound while it exists, and the cache cannot be closed.
    ///
    /// # Errors
    /// Every error of [`File::map`] and [`Map::pin`]. A file that was not opened
    /// [`mappable`](crate::OpenOptions::mappable) has only slices in one folio.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("blocks");
    /// # std::fs::write(&path, vec![7_u8; 1_000_000])?;
    /// # let can_map = |f: &bifolio::FeatureReport| f.name == "user-faults" && f.available;
    /// # if !bifolio::features().iter().any(can_map) { return Ok(()) }
    /// use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let blocks = cache.open_immutable(&path, &OpenOptions::new().mappable(true))?;
    /// let block = blocks.bytes(123_456..654_321)?;
    /// std::thread::spawn(move || assert_eq!(block[..], [7; 530_865])).join().unwrap();
    /// # Ok(())
    /// # }
    /// ```
    pub fn bytes(&self, range: impl RangeBounds<u64>) -> Result<OwnedPageRef<Self>> {
        let range = self.range_of(range);
        if !self.handle.inode.page_space.is_in_place()
            && is_in_one_folio(&range, self.folio_bytes())
        {
            return Ok(self.pin(range)?.into_owned());
        }
        Ok(self.map(range)?.pin(..)?.of_kind())
    }
}

impl Map<ImmutableFile> {
    /// Returns the bytes. Touching a page that cannot be read raises SIGBUS.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the map keeps the immutable handle, so there is no writer and no truncation.
        unsafe { self.as_slice() }
    }
}

impl Deref for MapMut {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.map
    }
}

impl MapMut {
    /// Returns the address of the first byte. The cache finds stores to the mapped bytes; only the
    /// caller orders them with calls of the cache.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.start()
    }

    /// Returns the bytes as a mutable slice.
    ///
    /// # Safety
    /// While the slice exists, no other code may read or change any of its bytes through another
    /// map, a call of the file, or a pin, and the file must not be truncated. (Write-outs and
    /// evictions read the bytes through the kernel, outside of the language's rules.)
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`; the caller promises exclusive use.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len() as usize) }
    }

    /// Lets the kernel or a device write to the bytes of `range` while the pin exists, by a read
    /// with `O_DIRECT`, `io_uring`, RDMA or the like. Such a transfer looks up its memory when it
    /// begins; without a pin, bytes that it stores while the page is evicted or written out are
    /// lost. The pages stay resident and count as stored to. Blocks for the device.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let can_map = |f: &bifolio::FeatureReport| f.name == "user-faults" && f.available;
    /// # if !bifolio::features().iter().any(can_map) { return Ok(()) }
    /// use bifolio::{Cache, OpenOptions};
    /// use std::{io::Read, slice};
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("source");
    /// # std::fs::write(&path, b"from the kernel")?;
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let options = OpenOptions::new().read(true).write(true).mappable(true);
    /// let file = cache.memory_file_with("target", &options)?;
    /// file.set_len(1 << 20)?;
    /// let map = file.map_mut(0..1 << 20)?;
    /// let mut pin = map.pin_mut(4096..4096 + 15)?;
    /// // SAFETY: the bytes are resident, and no other code uses them.
    /// let target = unsafe { slice::from_raw_parts_mut(pin.as_mut_ptr(), 15) };
    /// std::fs::File::open(&path)?.read_exact(target)?;
    /// drop(pin);
    /// let mut found = [0; 15];
    /// file.read_exact_at(&mut found, 4096)?;
    /// assert_eq!(&found, b"from the kernel");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Map::pin`].
    pub fn pin_mut(&self, range: impl RangeBounds<u64>) -> Result<MapPinMut> {
        let in_file = self.map.in_file(range)?;
        let (page, region) = (self.map.pin_in_file(in_file.clone())?, Arc::clone(&self.map.region));
        region.written_unseen.add(pages_of(&in_file));
        page.mark_stored();
        Ok(MapPinMut { page, region, range: in_file })
    }

    /// Makes durable what was stored or written to `range` before the call: [`File::sync_range`].
    ///
    /// # Errors
    /// Every error of [`File::sync_range`]; a range that is not inside the map.
    pub fn sync(&self, range: impl RangeBounds<u64>) -> Result<()> {
        self.map.file.sync_range(self.map.in_file(range)?)
    }
}

/// Pin that lets the kernel or a device write to bytes of a map; see
/// [`MapMut::pin_mut`](crate::MapMut::pin_mut).
///
/// The pages stay resident and count as stored to: each sync, and the flusher, writes them with
/// their current content. Dropping the pin marks them dirty. Until then the file stays open and the
/// cache cannot be closed, even after the map is dropped. The pin may be sent to the thread that
/// learns of the end of the transfer, and dropped there. Dropping it waits for a thread that holds
/// the lock of one of the pages ([`PageRefMut`](crate::PageRefMut)).
#[derive(Debug)]
pub struct MapPinMut {
    page: OwnedPageRef,
    region: Arc<Region>,
    range: Range<u64>,
}

impl MapPinMut {
    /// Returns the address of the first byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.region.addresses.base().wrapping_add(self.range.start as usize)
    }
}

impl Drop for MapPinMut {
    fn drop(&mut self) {
        // In a forked child, locks may be held by threads that do not exist there.
        if self.page.is_forked() {
            return;
        }
        self.page.mark_stored();
        self.region.written_unseen.remove(&pages_of(&self.range));
    }
}
