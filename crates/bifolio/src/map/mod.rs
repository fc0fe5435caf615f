//! Maps: files as memory, paged in on demand, within the cache's bound.
//!
//! The top of the data's way for callers who want plain pointers. A map is an address in the region
//! of its file (`memory/region/`) and a promise that the file stays open; it owns no memory. What
//! happens when a page is not there is in `file/faults`, how one is evicted under a raw writer in
//! `reclaim/unmap.rs`. The same bytes through [`File::read_at`], [`File::write_at`], pins and any
//! number of maps are one copy.
//!
//! Against `mmap`: memory is bounded, because the cache evicts, and not the kernel; nothing is
//! written before a sync, the age of dirt, or pressure; and what cannot be read is told by
//! [`Map::prefetch`] and [`Map::take_error`], though who touches it gets SIGBUS all the same.
//!
//! # Safety
//! Gives out raw addresses, and slices of them under the caller's promise.
#![allow(unsafe_code)]

mod pinned;

pub use pinned::{MapPin, MapPinMut};

use crate::error::{Error, ErrorKind, Result};
use crate::file::{Advice, File, MapGuard};
use crate::memory::Region;
use crate::outcome::Outcome;
use crate::sync::Mutex;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A file's bytes as memory, for reading.
///
/// Any load from it works, whether the page is resident or not: a page that is not is read, and the
/// thread waits for that. Offsets are counted from the map's first byte. A map keeps its file open;
/// dropping it ends nothing but that. A cache cannot be closed while a map, or a pin of one, lives.
///
/// A page that cannot be read, or that lies behind the end of the file since that was cut, raises
/// SIGBUS, as with `mmap`: read with [`Map::prefetch`] first where that must not be, or through
/// [`File::read_at`].
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
/// let map = file.map(0..file.len())?;
/// map.prefetch(0..map.len())?;
/// // SAFETY: nobody writes to the file while the slice lives, and it is not cut.
/// let bytes = unsafe { map.as_slice() };
/// assert_eq!(bytes[99_999], 7);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Map {
    /// Goes first.
    guard: MapGuard,
    file: File,
    region: Arc<Region>,
    range: Range<u64>,
    /// How many faults of the file had failed when this was last asked for.
    errors_seen: Mutex<u64>,
}

/// A file's bytes as memory, for reading and writing.
///
/// All that a [`Map`] can do, and stores work, too: a page that was stored to is written out by the
/// next sync of the file, by the flusher when its age comes, or before it is evicted. No store is
/// ever lost to an eviction. Stores are not atomic with respect to anything: see
/// [`MapMut::as_mut_slice`].
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
/// // SAFETY: nobody else uses these bytes now.
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
    /// Maps the bytes of `range`, which must lie in the file, for reading. Reads nothing yet.
    ///
    /// # Errors
    /// A file that was not opened [`mappable`](crate::OpenOptions::mappable)
    /// ([`ErrorKind::NotMappable`]) or not for reading; a range that is empty or leaves the file;
    /// for a memory file, no memory for the tables of the first 128 MiB of the range
    /// ([`ErrorKind::Full`]).
    pub fn map(&self, range: Range<u64>) -> Result<Map> {
        let (region, guard) = self.begin_map(&range)?;
        let mut errors_seen = 0;
        region.error_since(&mut errors_seen);
        let errors_seen = Mutex::new(errors_seen);
        Ok(Map { guard, file: self.clone(), region, range, errors_seen })
    }

    /// Maps the bytes of `range`, which must lie in the file, for reading and writing. The first
    /// call for a file waits for what of it is being written out.
    ///
    /// Stores are found in the page tables. What the kernel or a device writes into a map without
    /// them (a read with `O_DIRECT`, `io_uring`, RDMA) it must write under a [`MapMut::pin_mut`]:
    /// else it may be lost.
    ///
    /// # Errors
    /// As [`File::map`]; a handle not opened for writing; a kernel that cannot tell which pages
    /// were stored to, or lets us keep none beyond their eviction ([`ErrorKind::CannotMapMut`];
    /// Linux 6.7 and later can, unless a filter of system calls forbids it).
    pub fn map_mut(&self, range: Range<u64>) -> Result<MapMut> {
        let map = self.map(range)?;
        self.admit_raw_writers(&map.region)?;
        Ok(MapMut { map })
    }
}

impl Map {
    /// The first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.start().cast_const()
    }

    /// How many bytes are mapped.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Never: a map of no bytes is refused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The bytes.
    ///
    /// # Safety
    /// While the slice lives nobody may change any of its bytes: through a map, `write_at`, a
    /// pin, or a cut of the file. Touching a page that cannot be read raises SIGBUS.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: address space of the region, which the file keeps; each page of it can be
        // read or raises a signal; that nobody changes them is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len() as usize) }
    }

    /// Brings the bytes of `range` in, with as few system calls as there are for that, so that
    /// touching them raises no fault until they are evicted. Tries again what could not be
    /// read before. Blocks for the device.
    ///
    /// # Errors
    /// The first page that cannot be had; those before it are there. A range that leaves the
    /// map.
    pub fn prefetch(&self, range: Range<u64>) -> Result<()> {
        self.file.populate(self.in_file(&range)?)
    }

    /// Takes advice for the bytes of `range`: [`File::advise`].
    ///
    /// # Errors
    /// As [`File::advise`]; a range that leaves the map.
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<Outcome> {
        self.file.advise(self.in_file(&range)?, advice)
    }

    /// Keeps the bytes of `range` resident, as `mlock` does, for as long as the pin lives:
    /// touching them raises no fault. Blocks for the device.
    ///
    /// # Errors
    /// As [`Self::prefetch`]; more than the bound allows
    /// ([`ErrorKind::Full`]).
    pub fn pin(&self, range: Range<u64>) -> Result<MapPin> {
        MapPin::new(&self.guard, &self.file, self.in_file(&range)?)
    }

    /// Why a page of the file could not be had when it was touched, if that has happened since
    /// the map was made or was last asked: the last such error.
    pub fn take_error(&self) -> Option<Error> {
        let found = self.region.error_since(&mut self.errors_seen.lock());
        found.map(|error| ErrorKind::Fault(error).into())
    }

    /// The bytes, if the file was opened [`immutable`](crate::OpenOptions::immutable): then nobody
    /// can change them. Touching a page that cannot be read raises SIGBUS.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        // SAFETY: while the handle lives, which the map keeps, there is no writer and no cut.
        self.file.is_immutable().then(|| unsafe { self.as_slice() })
    }

    fn start(&self) -> *mut u8 {
        self.region.base().wrapping_add(self.range.start as usize)
    }

    /// Where bytes of the map are in the file.
    fn in_file(&self, range: &Range<u64>) -> Result<Range<u64>> {
        if range.start > range.end || range.end > self.len() {
            let problem = format!("{range:?} of a map of {} bytes", self.len());
            return Err(ErrorKind::Config { name: "range", problem }.into());
        }
        Ok(self.range.start + range.start..self.range.start + range.end)
    }
}

impl Deref for MapMut {
    type Target = Map;

    fn deref(&self) -> &Map {
        &self.map
    }
}

impl MapMut {
    /// The first byte. Stores to it and the bytes behind are found by the cache; they are not
    /// ordered with its own calls but by what the caller does.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.start()
    }

    /// The bytes.
    ///
    /// # Safety
    /// While the slice lives nobody else may read or change any of its bytes through another map,
    /// a call of the file, or a pin, and the file must not be cut. (Write-outs and evictions by the
    /// cache read them, through the kernel; those are no concern of the language.)
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`; that nobody else uses them is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len() as usize) }
    }

    /// Lets the kernel or a device write to the bytes of `range` while the pin lives, by whatever
    /// way: a read with `O_DIRECT`, `io_uring`, RDMA. (Such a transfer stores to memory that it has
    /// looked up before; without a pin, what it stores while the page is evicted or written out is
    /// lost.) Its pages stay resident, and count as stored to. Blocks for the device.
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
    /// // SAFETY: the bytes are there, and nobody else uses them.
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
    pub fn pin_mut(&self, range: Range<u64>) -> Result<MapPinMut> {
        let map = &self.map;
        MapPinMut::new(&map.guard, &map.file, &map.region, map.in_file(&range)?)
    }

    /// Makes what was stored to `range` before the call durable, and whatever else of the file
    /// was changed there: [`File::sync_range`].
    ///
    /// # Errors
    /// As [`File::sync_range`]; a range that leaves the map.
    pub fn sync(&self, range: Range<u64>) -> Result<()> {
        self.map.file.sync_range(self.map.in_file(&range)?)
    }
}
