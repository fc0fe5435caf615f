//! The file layer: reads, writes, pins, advice and syncs.
//!
//! ```text
//!   mod.rs        a file: syncs, write-outs
//!   handle.rs     the handle that clones of a file share: checks; what it calls above
//!   read.rs       reads: hits (hit.rs), runs of pages, misses (fill/), reads that never wait
//!   read_with.rs  reads in place
//!   many.rs       read_many, pin_many: all misses in one batch
//!   async_calls/  futures, served by a job per device
//!   readahead/    fills of pages before they are read
//!   pin.rs        pins, for reading and for changes
//!   immutable.rs  files that do not change while they are open: pins are slices
//!   write.rs      writes
//!   length.rs     changes of the length; what is not on the storage
//!   write_hint.rs, write_window.rs   writes whose pages are evicted first
//!   allocation.rs allocation, holes, zeros of memory files
//!   gate.rs       writes behind a write gate
//!   mapper.rs     files that can be mapped: growth, and the count of maps in use
//!   advice.rs     access hints, eviction, residency
//!   open/         the open files: all handles of one share an inode
//! ```
//!
//! Invariants:
//! - FILE-1: the bytes of a folio past the end of file are zeros, so that growing a file touches no
//!   page.
//! - FILE-2: the length grows under the resizing lock and the lock of the folio that grows it,
//!   after the bytes have been copied in.

mod advice;
mod allocation;
mod async_calls;
mod gate;
mod handle;
mod hit;
mod immutable;
mod length;
mod many;
mod mapper;
mod open;
mod options;
mod outside;
mod pin;
mod read;
mod read_with;
mod readahead;
mod write;
mod write_hint;
mod write_window;

pub use advice::Residency;
pub use async_calls::FileFuture;
pub use gate::GatedFile;
pub(crate) use handle::{Handle, Host, MappedGrowth, Mapper};
pub use many::ReadRequest;
pub(crate) use mapper::MapInUse;
pub(crate) use open::{Keeper, OpenObserver, Registry, Visit};
pub use options::{FaultMode, OpenOptions};
pub use pin::{OwnedPageRef, PageRef, PageRefMut};
pub use read_with::PageView;
pub use readahead::Access;
pub use write_hint::WriteHint;

use crate::error::{Error, Result};
use crate::fill::own_pins;
use crate::io::FileIdentity;
use crate::memory::is_mapped;
use crate::page::{PAGE_BYTES, pages_of};
use crate::writeback::{CheckpointMark, Writeback};
use hit::HitPath;
use std::fmt;
use std::ops::{Bound, Deref, Range, RangeBounds};
use std::sync::Arc;

/// A file in a cache.
///
/// Cheap to clone and safe to share: all methods take `&self`. Clones share one handle, like
/// duplicated descriptors: they have the same access rights, and a write error is reported to one
/// of them, once.
///
/// Positions and lengths are in bytes, below 2^63. A range may be any of the language's: an open
/// end is the length of the file at the call. Reads and writes within one 4 KiB page are atomic
/// with respect to each other: a read returns the page as it was before or after a write, never a
/// mixture. The cache assumes that no other program changes the file while it is open here.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("data.db");
/// use bifolio::{Cache, OpenOptions};
///
/// let cache = Cache::builder().memory(16 << 20).build()?;
/// let file = cache.open(&path, &OpenOptions::new().read(true).write(true).create(true))?;
/// file.write_at(b"two leaves, one sheet", 0)?;
/// let mut word = [0; 6];
/// file.read_exact_at(&mut word, 4)?;
/// assert_eq!(&word, b"leaves");
/// file.sync_data()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct File {
    hit_path: HitPath,
    pub(crate) handle: Arc<Handle>,
    /// Set if a file with a write gate can be changed through this value, without LSNs.
    passes_gate: bool,
}

impl fmt::Debug for File {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("File");
        fields.field("name", &self.handle.inode.name()).field("len", &self.len());
        fields.field("folio_bytes", &self.folio_bytes()).finish_non_exhaustive()
    }
}

impl File {
    fn new(handle: Arc<Handle>) -> Self {
        let ablation = handle.host.ablation;
        let hit_path = HitPath::new(&handle.inode, handle.readable, ablation);
        Self { hit_path, handle, passes_gate: false }
    }

    /// Fails if the bytes or the length cannot be changed through this value.
    fn check_changeable(&self) -> Result<()> {
        self.handle.check_writable()?;
        if self.handle.inode.has_gate() && !self.passes_gate {
            return Err(Error::behind_gate(self.handle.inode.name()));
        }
        Ok(())
    }

    /// Returns the length of the file in bytes. Includes data that is written but not synced.
    #[expect(clippy::len_without_is_empty, reason = "a file is no collection, as in std")]
    pub fn len(&self) -> u64 {
        self.handle.inode.mapping.len_bytes()
    }

    /// Returns the bytes that `bounds` names; an open end is the length of the file.
    #[inline(always)]
    pub(crate) fn range_of(&self, bounds: impl RangeBounds<u64>) -> Range<u64> {
        resolve(bounds, || self.len())
    }

    /// Returns the size of a folio of this file in bytes. A folio is the unit of residency, pinning
    /// and I/O.
    pub fn folio_bytes(&self) -> u64 {
        self.handle.inode.mapping.folio_bytes()
    }

    /// Returns the identity by which this cache finds the file when it is opened again: device and
    /// inode of a kernel file, or
    /// [`DirectBacking::identity`](crate::backing::DirectBacking::identity) of your own storage.
    /// `None` if every open makes a separate file, as for memory files.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.handle.membership.identity()
    }

    /// Returns `true` for a memory file; see [`Cache::memory_file`](crate::Cache::memory_file).
    #[doc(hidden)]
    pub fn is_memory_file(&self) -> bool {
        self.handle.inode.is_memory_file()
    }

    /// Makes every write that returned before this call durable: writes back the dirty pages, then
    /// flushes the device. Blocks until the device is done; signals do not interrupt it.
    ///
    /// Covers the whole file, whichever handle wrote. Concurrent syncs of a file are grouped: while
    /// one is running, later callers wait, and a single sync then serves them all with one flush,
    /// and one write-back if less than 1 MiB is dirty (`WriteStats::syncs_shared`). If several
    /// callers shared the last sync, the first to arrive waits for the others for at most 1/8 of
    /// the duration of that sync, capped at 1 ms.
    ///
    /// # Errors
    /// - [`Writeback`](crate::ErrorKind::Writeback): this sync failed, or a write-back failed since
    ///   the last sync through this handle. Each handle reports such an earlier failure once.
    /// - [`PinnedByCaller`](crate::ErrorKind::PinnedByCaller): the calling thread holds a
    ///   [`PageRefMut`] of a dirty folio.
    ///
    /// Pages that could not be written stay dirty. The next sync writes them again, and no sync
    /// succeeds until they are on the device.
    ///
    /// A failed flush is reported to every caller that shared it. For a file of the kernel the
    /// failure is permanent, for every handle, because the kernel does not tell what reached the
    /// device: call [`File::discard_dirty`], close the last handle and open the file again. A
    /// [`Backing`](crate::backing::Backing) of your own decides if a later flush can succeed.
    pub fn sync_data(&self) -> Result<()> {
        self.sync(None, false)
    }

    /// Writes the dirty pages of `range` to the storage, and waits. Does not flush the device: for
    /// a file of the kernel, what was written before the call then survives the end of the process,
    /// but not a loss of power. Bytes of the range that were never written become zeros on the
    /// storage. Blocks for the device. ([`File::write_out`] does not wait.)
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # let options = bifolio::OpenOptions::new().write(true).create(true);
    /// let file = cache.open(&path, &options)?;
    /// file.write_all_at(b"seen by all programs", 0)?;
    /// file.write_back(..)?;
    /// assert_eq!(std::fs::read(&path)?, b"seen by all programs");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`File::sync_data`], except for failed flushes; a range beyond 2^63.
    pub fn write_back(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.handle.check_sound()?;
        self.handle.check_range(&range)?;
        own_pins::check(&self.handle.inode, &pages_of(&range))?;
        Writeback::of(&self.handle.inode).write_back(&self.handle.error_cursor, range)
    }

    /// Syncs data and metadata of the file; otherwise, also in its errors, like
    /// [`File::sync_data`].
    pub fn sync_all(&self) -> Result<()> {
        self.sync(None, true)
    }

    /// Syncs the bytes of `range`; otherwise like [`File::sync_data`]. Dirty pages outside the
    /// range stay in memory, even adjacent ones. Bytes of the range that were never written become
    /// zeros on the storage, which is then at least as long as the part of the range in the file.
    ///
    /// A range of up to 512 folios costs one lookup per folio; a longer one walks all dirty folios
    /// of the file. Both wait for all write-backs of the file in flight, and for a flush, which
    /// covers the whole device.
    ///
    /// # Errors
    /// Those of [`File::sync_data`], and a range beyond 2^63.
    pub fn sync_range(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.handle.check_range(&range)?;
        self.sync(Some(range), false)
    }

    fn sync(&self, range: Option<Range<u64>>, metadata: bool) -> Result<()> {
        self.handle.check_sound()?;
        let pages = range.as_ref().map_or(own_pins::ALL_PAGES, pages_of);
        own_pins::check(&self.handle.inode, &pages)?;
        Writeback::of(&self.handle.inode).sync(&self.handle.error_cursor, range, metadata)
    }

    /// Takes a checkpoint: remembers what is dirty now, for [`Checkpoint::sync`]. Takes no time, so
    /// it can be called under an engine's lock, and the sync later without it.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # use bifolio::{Cache, OpenOptions};
    /// # let cache = Cache::builder().memory(16 << 20).build()?;
    /// # let options = OpenOptions::new().write(true).create(true);
    /// let tree = cache.open(directory.path().join("tree"), &options)?;
    /// tree.write_all_at(b"before", 0)?;
    /// let checkpoint = tree.checkpoint()?;
    /// tree.write_all_at(b"after", 8192)?;
    /// checkpoint.sync()?;
    /// assert_eq!(tree.residency(0..12288)?.dirty, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The cache is closed.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        self.handle.check_usable()?;
        Ok(Checkpoint { file: self.clone(), mark: Writeback::of(&self.handle.inode).checkpoint() })
    }

    /// Starts to write the dirty pages of `range` to the storage, in the background and without a
    /// flush. Returns at once. Pages that a write gate holds back follow when it lets them pass. At
    /// most 256 ranges wait for a device; more are written when they reach the age limit. An empty
    /// range only asks for earlier errors.
    ///
    /// # Errors
    /// The cache is closed; a range beyond 2^63. Also the last error of an earlier write-back that
    /// this handle has not reported yet, whatever its range: the write of `range` has been started
    /// then, too.
    pub fn write_out(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        self.handle.check_sound()?;
        self.handle.check_range(&range)?;
        let inode = &self.handle.inode;
        if !range.is_empty() {
            let start = range.start / PAGE_BYTES * PAGE_BYTES;
            inode.write_soon(start..range.end.next_multiple_of(PAGE_BYTES));
        }
        inode.errors.check_since(&self.handle.error_cursor, inode.errors.count())
    }

    /// Makes everything durable that was written to the file through any handle, and closes this
    /// handle. Blocks for the device; does no I/O if the file was synced since its last change.
    ///
    /// The file itself is closed with its last handle: holds and maps keep one, too.
    ///
    /// # Errors
    /// Those of [`File::sync_data`], and [`Closed`](crate::ErrorKind::Closed) if the cache is
    /// closed. The handle is closed even then, but nothing is lost: what could not be written stays
    /// in the cache. The next open of the file finds it, for [`File::discard_dirty`] for example,
    /// and [`Cache::close`](crate::Cache::close) tries to write it again.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("log");
    /// # use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let log = cache.open(&path, &OpenOptions::new().write(true).create(true))?;
    /// log.write_at(b"entry", 0)?;
    /// log.close()?;
    /// assert_eq!(std::fs::read(&path)?, b"entry");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(self) -> Result<()> {
        if self.handle.host.cache_state.is_forked() {
            return Err(Error::forked());
        }
        let inode = &self.handle.inode;
        let result = own_pins::check(inode, &own_pins::ALL_PAGES)
            .and_then(|()| Writeback::of(inode).make_durable(&self.handle.error_cursor));
        // After the check for data written when the cache closed.
        let usable = self.handle.check_usable();
        // Another clone may still write; its close or drop tries again.
        if let (Err(_), Some(mut handle)) = (&result, Arc::into_inner(self.handle)) {
            handle.membership.note_failed();
        }
        result.and(usable)
    }
}

/// A file whose bytes do not change while it is open, so that they can be borrowed as `&[u8]`.
/// From [`Cache::open_immutable`](crate::Cache::open_immutable).
///
/// Dereferences to the [`File`], for all calls that read. Cheap to clone; clones share one handle.
///
/// ```
/// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
/// # std::fs::write(&path, vec![7; 100_000])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let index = cache.open_immutable(&path, &bifolio::OpenOptions::new())?;
/// let page = index.pin(2..6)?;
/// assert_eq!(page[..], [7; 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ImmutableFile {
    pub(crate) file: File,
}

impl Deref for ImmutableFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

/// A point in time of a file, returned by [`File::checkpoint`]: a later sync can be limited to
/// what was dirty then. Keeps a handle of the file open.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    file: File,
    mark: CheckpointMark,
}

impl Checkpoint {
    /// Makes everything durable that was written to the file before the checkpoint was taken;
    /// otherwise like [`File::sync_data`]. A page that was dirty then is written with its present
    /// bytes. Pages that became dirty since stay in memory, unless they are adjacent to such a one.
    ///
    /// # Errors
    /// Fails like [`File::sync_data`], and if a write-back of the file has failed since the
    /// checkpoint was taken: take another one then.
    pub fn sync(&self) -> Result<()> {
        let handle = &self.file.handle;
        handle.check_sound()?;
        own_pins::check(&handle.inode, &own_pins::ALL_PAGES)?;
        Writeback::of(&handle.inode).sync_checkpoint(&handle.error_cursor, self.mark)
    }
}

/// Returns the bytes that `bounds` names, where `len_bytes` stands for an open end. An open range
/// that starts past the end is empty.
#[inline(always)]
pub(crate) fn resolve(
    bounds: impl RangeBounds<u64>,
    len_bytes: impl FnOnce() -> u64,
) -> Range<u64> {
    let start = match bounds.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match bounds.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len_bytes().max(start),
    };
    start..end
}
