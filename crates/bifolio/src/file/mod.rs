//! The file layer: reads, writes, pins, advice and syncs.
//!
//! A [`File`] turns byte ranges into pages and tries, in this order:
//!
//! ```text
//!   read_at    optimistic copy, no reference      hit.rs      one READY page
//!                | the page changed, is not READY, or the range has several pages
//!                v
//!              a run of pages, no reference       read.rs     adjacent frames in one copy
//!              zeros                              allocation.rs  holes of memory files
//!                | not resident, or a writer is active
//!                v
//!              runs of absent folios              fill/       claim, transfer, publish
//!                |  and readahead                 readahead/
//!                v
//!              one folio, under its lock          fill/lookup.rs  if another thread has it locked
//!   read_many  as read_at, all runs in one batch  many.rs
//!   read_with  a closure reads in place            read_with.rs
//!   read_async futures, served by a job per device  async_reads/
//!   pin        one reference                      pin.rs
//!   pin_many   as pin, all misses in one batch    many.rs
//!   immutable  pins that are slices               pin.rs
//!   write_at   the folio lock, a write section    write.rs
//!   set_len    lengths, allocation, holes         resize.rs
//!   advise     access hints, eviction, residency  advice.rs
//! ```
//!
//! [`Handle`] is the state that clones of a `File` share `open` tracks the
//! open files, so that all handles of a file share one inode. Its `closing.rs` syncs and frees the
//! inode after the last handle is closed, and closes the cache.
//!
//! Invariants:
//! - FILE-1: the bytes of a folio past the end of file are zeros, so that growing a file touches no
//!   page.
//! - FILE-2: the length grows under the resizing lock and the lock of the folio that grows it,
//!   after the bytes have been copied in.

mod advice;
mod allocation;
mod async_reads;
mod gate;
mod hit;
mod many;
mod open;
mod options;
mod pin;
mod read;
mod read_with;
mod readahead;
mod resize;
mod write;

pub use advice::{Access, Residency};
pub use async_reads::ReadFuture;
pub use gate::{Checkpoint, GatedFile};
pub use many::ReadRequest;
pub(crate) use open::Registry;
pub use options::OpenOptions;
pub use pin::{ImmutableFile, OwnedPageRef, PageRef, PageRefMut};
pub use read_with::PageView;

use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Fill, own_pins};
use crate::inode::{Cleaner, Inode};
use crate::io::FileIdentity;
use crate::page::pages_of;
use crate::reclaim::Reclaim;
use crate::writeback::{ErrorCursor, NoRoom};
use async_reads::ReadServer;
use hit::HitPath;
use open::Membership;
use readahead::Readahead;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// A file in a cache.
///
/// Cheap to clone and safe to share: all methods take `&self`. Clones share one handle, like
/// duplicated descriptors: they have the same access rights, and a write error is reported to one
/// of them, once.
///
/// Positions and lengths are in bytes, below 2^63. Reads and writes within one 4 KiB page are
/// atomic with respect to each other: a read returns the page as it was before or after a write,
/// never a mixture. The cache assumes that no other program changes the file while it is open here.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
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
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct File {
    hit_path: HitPath,
    pub(crate) handle: Arc<Handle>,
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
        let ablation = handle.registry.ablation;
        Self { hit_path: HitPath::new(&handle.inode, handle.readable, ablation), handle }
    }

    /// Returns the length of the file in bytes. Includes data that is written but not synced.
    #[expect(clippy::len_without_is_empty, reason = "a file is no collection, as in std")]
    pub fn len(&self) -> u64 {
        self.handle.inode.mapping.len_bytes()
    }

    /// Returns the size of a folio of this file in bytes. A folio is the unit of residency, pinning
    /// and I/O.
    pub fn folio_bytes(&self) -> u64 {
        self.handle.inode.mapping.folio_bytes()
    }

    /// Returns the identity by which this cache finds the file when it is opened again: device and
    /// inode of a kernel file, or
    /// [`DirectBacking::identity`](crate::backing::DirectBacking::identity) of your own storage.
    /// Returns `None` if every open makes a separate file, as for memory files.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.handle.membership.identity()
    }

    /// Returns `true` for a memory file; see [`Cache::memory_file`](crate::Cache::memory_file).
    #[doc(hidden)]
    pub fn is_memory_file(&self) -> bool {
        self.handle.inode.is_memory_file()
    }

    /// Makes every write that returned before this call durable: writes back the dirty pages, then
    /// flushes the device. Blocks until the device is done.
    ///
    /// Concurrent syncs of a file, through any of its handles, are grouped: while one is running,
    /// later callers wait, and a single sync then serves them all with one flush. If less than 1
    /// MiB is dirty, they also share one write-back. Threads that each write and sync their own
    /// records therefore need no group commit of their own (`Stats::device_flushes`,
    /// `Stats::syncs_shared`). If several callers shared the last sync, the first to arrive waits
    /// for the others for at most 1/8 of the duration of that sync, capped at 1 ms.
    ///
    /// Syncs through any handle cover the whole file: a handle opened only for reading also writes
    /// back what other handles wrote. Signals do not interrupt a sync.
    ///
    /// # Errors
    /// - [`ErrorKind::Writeback`]: this sync failed, or a write-back
    ///   failed since the last sync through this handle. Each handle reports such an earlier
    ///   failure once.
    ///
    /// - [`ErrorKind::PinnedByCaller`]: the calling thread holds
    ///   a [`PageRefMut`] of a dirty folio.
    ///
    /// Pages that could not be written stay dirty. The next sync writes them again, and no sync
    /// succeeds until they are on the device.
    ///
    /// A failed flush is reported to every caller that shared it. For a file of the kernel (opened
    /// by path or descriptor) the failure is permanent, for every handle and every kind of sync,
    /// because the kernel does not tell what reached the device. To recover, call
    /// [`File::discard_dirty`], close the last handle and open the file again. A
    /// [`Backing`](crate::backing::Backing) of your own decides itself whether a later flush can
    /// succeed.
    pub fn sync_data(&self) -> Result<()> {
        self.sync(None, false)
    }

    fn sync(&self, range: Option<Range<u64>>, metadata: bool) -> Result<()> {
        self.handle.check_sound()?;
        let pages = range.as_ref().map_or(own_pins::ALL_PAGES, pages_of);
        own_pins::check(&self.handle.inode, &pages)?;
        self.handle.inode.sync(&self.handle.error_cursor, range, metadata)
    }

    /// Writes the dirty pages of `range` to the storage, and waits. Does not flush the device: for
    /// a file of the kernel, what was written before the call then survives the end of the process,
    /// but not a loss of power. Bytes of the range that were never written become zeros on the
    /// storage. Blocks for the device. ([`File::write_out`] does not wait.)
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # let options = bifolio::OpenOptions::new().write(true).create(true);
    /// let file = cache.open(&path, &options)?;
    /// file.write_all_at(b"seen by all programs", 0)?;
    /// file.write_back(0..file.len())?;
    /// assert_eq!(std::fs::read(&path)?, b"seen by all programs");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`File::sync_data`], except for failed flushes; a range beyond 2^63.
    pub fn write_back(&self, range: Range<u64>) -> Result<()> {
        self.handle.check_sound()?;
        self.handle.check_range(&range)?;
        own_pins::check(&self.handle.inode, &pages_of(&range))?;
        self.handle.inode.write_back(&self.handle.error_cursor, range)
    }

    /// Syncs data and metadata of the file; otherwise like [`File::sync_data`].
    ///
    /// # Errors
    /// Fails like [`File::sync_data`].
    pub fn sync_all(&self) -> Result<()> {
        self.sync(None, true)
    }

    /// Syncs the bytes of `range`; otherwise like [`File::sync_data`]. Dirty pages outside the
    /// range stay in memory, even adjacent ones. Bytes of the range that were never written become
    /// zeros on the storage, which is then at least as long as the part of the range that lies in
    /// the file.
    ///
    /// A range of up to 512 folios costs one lookup per folio; a longer one walks all dirty folios
    /// of the file. Both wait for write-backs that other threads have in flight anywhere in the
    /// file (about 16 MiB per thread), and for a flush, which covers the whole device.
    ///
    /// # Errors
    /// Fails like [`File::sync_data`], and for a range beyond 2^63.
    pub fn sync_range(&self, range: Range<u64>) -> Result<()> {
        self.handle.check_range(&range)?;
        self.sync(Some(range), false)
    }
}

/// State shared by all clones of a [`File`].
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inode: Arc<Inode>,
    pub(crate) reclaim: Arc<Reclaim>,
    pub(crate) registry: Arc<Registry>,
    error_cursor: ErrorCursor,
    readahead: Readahead,
    readable: bool,
    writable: bool,
    /// Server of asynchronous reads, once one was used.
    read_server: OnceLock<Arc<ReadServer>>,
    /// Last field: the handle has dropped everything else when the registry is told.
    membership: Membership,
}

const POSITION_BYTES_MAX: u64 = i64::MAX as u64;

impl Handle {
    /// Fails if the cache is closed or the process was forked.
    fn check_usable(&self) -> Result<()> {
        self.registry.cache_state.check()
    }

    /// Fails if the cache is poisoned, closed, or belongs to a parent process.
    pub(crate) fn check_sound(&self) -> Result<()> {
        self.registry.check()
    }

    pub(crate) fn fill(&self) -> Fill<'_> {
        let state = &self.registry.cache_state;
        Fill { inode: &self.inode, reclaim: &self.reclaim, state }
    }

    pub(crate) fn check_readable(&self) -> Result<()> {
        self.check_usable()?;
        if self.readable { Ok(()) } else { Err(self.not_opened_for("reading")) }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_sound()?;
        self.inode.check_outside_gate()?;
        if self.writable { Ok(()) } else { Err(self.not_opened_for("writing")) }
    }

    #[cold]
    fn not_opened_for(&self, operation: &'static str) -> Error {
        let text = format!("not opened for {operation}");
        Error::new(ErrorKind::NotOpenedFor, text).in_file(self.inode.name())
    }

    /// Returns the end of a range, or an error if it is beyond 2^63.
    pub(crate) fn range_end(&self, position_bytes: u64, length_bytes: u64) -> Result<u64> {
        let end = position_bytes.checked_add(length_bytes);
        end.filter(|end| *end <= POSITION_BYTES_MAX).ok_or_else(|| {
            let text =
                format!("{length_bytes} bytes at position {position_bytes} lie beyond 2^63 - 1");
            let range = position_bytes..position_bytes.saturating_add(length_bytes);
            Error::new(ErrorKind::OutOfRange, text).in_file(self.inode.name()).at(range)
        })
    }

    /// Fails for a range beyond 2^63.
    fn check_range(&self, range: &Range<u64>) -> Result<()> {
        self.range_end(range.start, range.end.saturating_sub(range.start)).map(drop)
    }

    /// Waits until a folio may become dirty that could not for the reason `no_room`. Called without
    /// a folio lock.
    ///
    /// # Errors
    /// The device, or the swap, or a write gate accepts no writes, and the limit of dirty bytes is
    /// reached; no memory for another LSN.
    fn make_room(&self, no_room: NoRoom, position_bytes: u64, length_bytes: u64) -> Result<()> {
        match no_room {
            NoRoom::DirtyLimit => self.wait_to_be_dirty(position_bytes, length_bytes),
            NoRoom::Lsns => self.grow_lsns(),
        }
    }

    /// Charges a larger table of LSNs, and evicts folios if necessary.
    fn grow_lsns(&self) -> Result<()> {
        let Some(step) = self.inode.lsn_slots_wanted() else { return Ok(()) };
        let bytes = self.inode.lsn_bytes(step);
        self.reclaim.charge(bytes)?;
        if !self.inode.grow_lsns(step) {
            self.inode.memory.arena.uncharge(bytes);
        }
        Ok(())
    }

    /// Waits until another folio may become dirty. Called without a folio lock.
    ///
    /// # Errors
    /// The device, or the swap, accepts no writes, and the limit of dirty bytes is reached.
    fn wait_to_be_dirty(&self, position_bytes: u64, length_bytes: u64) -> Result<()> {
        let inode = &self.inode;
        if inode.store.cleaner() != Cleaner::Swapper {
            return inode.wait_for_room(position_bytes, length_bytes);
        }
        self.reclaim.wait_for_swap(inode, position_bytes..position_bytes + length_bytes)
    }

    /// Fails for a file that can be mapped, whose pages have fixed addresses.
    fn check_unmappable(&self, operation: &'static str) -> Result<()> {
        if self.inode.page_space.is_in_place() {
            return Err(self.unsupported(operation, "it was opened to be mapped"));
        }
        Ok(())
    }

    #[cold]
    fn unsupported(&self, operation: &str, reason: &str) -> Error {
        let text = format!("cannot {operation}: {reason}");
        Error::new(ErrorKind::Unsupported, text).in_file(self.inode.name())
    }

    fn check_len(&self, wanted_bytes: u64) -> Result<()> {
        let len_max_bytes = self.inode.len_max_bytes();
        if wanted_bytes <= len_max_bytes {
            return Ok(());
        }
        let text = format!(
            "cannot grow to {wanted_bytes} bytes, only to {len_max_bytes} \
             (OpenOptions::len_max, File::raise_len_max)"
        );
        Err(Error::new(ErrorKind::TooLong, text).in_file(self.inode.name()))
    }
}
