//! Files: what a caller reads, writes, pins and syncs.
//!
//! The top of the data's way. A [`File`] turns byte ranges into pages and tries, in this order:
//!
//! ```text
//!   read_at    optimistic copy, no reference      hit.rs      a READY page, no other test
//!                | the page changed, is not READY, or the range has several pages
//!                v
//!              a stretch of pages, no reference   read.rs     neighbouring frames at once
//!              zeros                              holes.rs    holes of memory files, one fill
//!                | not resident, or a writer inside
//!                v
//!              runs of absent folios              fill.rs     allocate, insert, locked
//!                |  and what will be wanted next  readahead/
//!                v                                read_io.rs  one transfer, READY folio by folio
//!              one folio, under its lock          fill.rs     if somebody else has it
//!   read_many  the same, all runs in one batch    read_many.rs
//!   pin        one reference                      pin.rs
//!   write_at   the folio lock, a write section    write.rs
//!   set_len    lengths, allocation, holes         resize.rs
//!   advise     what readers will do; what there is in memory   advice.rs
//!   copy_to_fd a batch of references              copy_to_fd.rs  up to 31 folios, no folio lock
//! ```
//!
//! [`Handle`] is what clones of a `File` share (`handle.rs`); `registry.rs` knows which files are
//! open and gives one inode to all handles of a file; `closing.rs` makes it durable and frees it
//! after the last, and closes the cache.
//!
//! Invariants:
//! - FILE-1: the bytes of a folio behind the length of the file are zeros. So growing a file needs
//!   to touch nothing.
//! - FILE-2: the length grows under the resizing lock and the lock of the folio that grows it,
//!   after the bytes are in place.

mod advice;
mod closing;
mod copy_to_fd;
mod cursor;
mod faults;
mod fill;
mod handle;
mod hit;
mod holes;
mod map;
mod mappables;
mod options;
mod own_pins;
mod pin;
mod read;
mod read_io;
mod read_many;
#[cfg(feature = "ablation")]
mod read_one_by_one;
mod readahead;
mod registry;
mod resize;
mod slots;
mod write;

pub use advice::Advice;
pub use advice::{PageResidency, Residency};
pub use cursor::FileCursor;
pub(crate) use map::MapGuard;
pub use options::OpenOptions;
pub use pin::{Hold, Pin, PinMut, Pins};
pub use read_many::ReadRequest;
pub(crate) use registry::CacheState;
pub(crate) use registry::Registry;

use crate::error::Result;
use crate::io::FileIdentity;
use crate::page::pages_of;
use handle::Handle;
use hit::HitPath;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A file in a cache.
///
/// Cheap to clone and safe to share: all methods take `&self`. Clones are one handle, like
/// duplicated descriptors: they share access rights and are told of a write error once.
///
/// Positions and lengths are in bytes, below 2^63. Reads and writes that lie in one 4 KiB page are
/// atomic with respect to each other: a read returns the page as it was before or after a write,
/// never a mixture. The cache assumes that nobody else changes the file while it is open in it.
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
    handle: Arc<Handle>,
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
        Self { hit_path: HitPath::new(&handle), handle }
    }

    /// Length of the file, bytes, with everything that was written, synced or not.
    pub fn len(&self) -> u64 {
        self.handle.inode.mapping.len_bytes()
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of a folio of this file: the unit of residency, pinning and I/O.
    pub fn folio_bytes(&self) -> u64 {
        self.handle.inode.mapping.folio_bytes()
    }

    /// The identity by which opens of this cache find the file: device and inode of a file of the
    /// kernel, [`Backing::identity`](crate::Backing::identity) of storage of your own. `None` if
    /// each open is a file of its own, as with memory files.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.handle.membership.identity()
    }

    /// Whether this is a memory file: see [`Cache::memory_file`](crate::Cache::memory_file).
    pub fn is_memory_file(&self) -> bool {
        self.handle.inode.is_memory_file()
    }

    /// Whether the file was opened immutable.
    pub fn is_immutable(&self) -> bool {
        self.handle.immutable
    }

    /// Makes every write that returned before this call durable: writes dirty pages out, then
    /// flushes the device. Blocks for the device.
    ///
    /// Syncs of a file that come at the same time, through whatever handles, go together: while one
    /// is under way all others wait, and one more serves them all, with one flush, and one
    /// write-out if less than 1 MiB is dirty. So threads that each write and sync their own records
    /// need no group commit of their own (`Stats::device_flushes`, `Stats::syncs_shared`). If
    /// several came to the sync before, the first to come waits for the others, for an eighth of
    /// the time that one took or a millisecond at the most.
    ///
    /// A sync through any handle is one of the file: one that was opened for reading writes out
    /// what others wrote. Signals do not end it.
    ///
    /// # Errors
    /// Failures of now, or, once for each handle, failures since its last sync
    /// ([`ErrorKind::Writeback`](crate::ErrorKind::Writeback)); a folio that the calling thread
    /// has as a [`PinMut`] ([`ErrorKind::PinnedByCaller`](crate::ErrorKind::PinnedByCaller)).
    /// Pages that could not be written
    /// are dirty as before: the next sync tries them again, and no sync succeeds until they are on
    /// the device. A flush that fails is told to all who shared it. One of a file of the system
    /// stays failed, for every handle and every kind of sync, until it is given up
    /// ([`File::discard_dirty`]), the last handle is closed and the file is opened again, as nobody
    /// can tell what reached the device then; with a [`Backing`](crate::Backing) of your own that
    /// is yours to say.
    pub fn sync_data(&self) -> Result<()> {
        self.handle.check_sound()?;
        own_pins::check(&self.handle.inode, &own_pins::ALL_PAGES)?;
        self.handle.inode.sync(&self.handle.error_cursor, None, false)
    }

    /// As [`File::sync_data`], and the file's metadata too.
    ///
    /// # Errors
    /// As [`File::sync_data`].
    pub fn sync_all(&self) -> Result<()> {
        self.handle.check_sound()?;
        own_pins::check(&self.handle.inode, &own_pins::ALL_PAGES)?;
        self.handle.inode.sync(&self.handle.error_cursor, None, true)
    }

    /// As [`File::sync_data`], for the bytes of `range` only: other dirty pages stay in memory,
    /// even beside those of the range. What of the range was never written is zeros on the storage,
    /// too, which is as long at least as the range reaches into the file.
    ///
    /// A range of up to 512 folios costs a look at each of them, a longer one a walk over all dirty
    /// folios of the file; both wait for write-outs that others have in flight anywhere in the
    /// file, 16 MiB or so a caller, and for a flush, which is of the whole device.
    ///
    /// # Errors
    /// As [`File::sync_data`]; a range beyond 2^63.
    pub fn sync_range(&self, range: Range<u64>) -> Result<()> {
        self.handle.check_sound()?;
        let length_bytes = range.end.saturating_sub(range.start);
        self.handle.range_end(range.start, length_bytes)?;
        own_pins::check(&self.handle.inode, &pages_of(&range))?;
        self.handle.inode.sync(&self.handle.error_cursor, Some(range), false)
    }
}
