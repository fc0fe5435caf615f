//! Calls for engines with a write-ahead log: write gates, writes with an LSN, and checkpoints.
//!
//! `writeback/gate.rs` has the protocol; [`WriteGate`] states what a gate guarantees.

use super::{File, PageRefMut};
use crate::error::{Error, Result};
use crate::fill::own_pins;
use crate::page::{Lookup, PAGE_BYTES, pages_of};
use crate::writeback::{CheckpointMark, WriteGate};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A point in time of a file, returned by [`File::checkpoint`]: a later sync can be limited to
/// what was dirty then. Keeps a handle of the file open.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    file: File,
    mark: CheckpointMark,
}

impl Checkpoint {
    /// Makes everything durable that was written to the file before the checkpoint was taken;
    /// otherwise like [`File::sync_data`]. A page that was dirty then and has been changed since is
    /// written with its present bytes. Pages that became dirty since stay in memory, unless they
    /// are adjacent to such a page. Can be called again after a failure.
    ///
    /// # Errors
    /// Fails like [`File::sync_data`], and if a write-back of the file has failed since the
    /// checkpoint was taken: take another one then.
    pub fn sync(&self) -> Result<()> {
        let handle = &self.file.handle;
        handle.check_sound()?;
        own_pins::check(&handle.inode, &own_pins::ALL_PAGES)?;
        handle.inode.sync_checkpoint(&handle.error_cursor, self.mark)
    }
}

/// A file with a write gate, for engines with a write-ahead log: no page is written to the storage,
/// by a sync or in the background, before the gate says that the log is durable up to the highest
/// LSN of the page's changes. From [`Cache::open_gated`](crate::Cache::open_gated).
///
/// Dereferences to the [`File`], for all other calls. Writes of the [`File`] have no LSN and are
/// not held back, unless the page has other changes that are. Cheap to clone; clones share one
/// handle.
///
/// # Effects of a gate
/// - Syncs, and closes that sync, call [`WriteGate::make_durable`] first and block for it.
/// - The cache asks the gate in the background, on a thread that exists only meanwhile, when
///   the flusher has passed pages over or memory is short ([`Stats::gate_asks`]).
/// - Dirty pages of files with gates leave a quarter of the dirty limit
///   ([`dirty_max`]) to other files, so that a log in the same cache can be written.
/// - Each dirty page with an LSN costs 32 to 64 bytes, charged to the bound.
/// - If everything dirty is behind the gate, writers and readers that need memory wait for it
///   like for a slow device: up to 10 s, or
///   [`reclaim_wait_max`](crate::CacheBuilder::reclaim_wait_max). Then, or at once if the
///   gate fails or nothing is committed, the call fails with
///   [`ErrorKind::Unwritable`](crate::ErrorKind::Unwritable) or
///   [`ErrorKind::Full`](crate::ErrorKind::Full), which name the gate.
/// - [`set_len`](File::set_len) changes the storage at once: make its log record durable first.
///
/// The cache keeps `gate` until the file is closed. A gate that itself owns a handle of the
/// file keeps it open forever. A file whose last handle is dropped while the gate holds pages
/// back stays in the cache, with the gate and what that owns, such as the log's [`File`].
/// [`Cache::close`](crate::Cache::close) names the file, and [`File::discard_dirty`] gives its
/// pages up once it is opened again. Once the last [`Cache`](crate::Cache) is dropped, no call
/// can commit them: that drop, or a later one of the file's last handle, asks the gate for the
/// last time and logs what is lost, like a crash.
///
/// [`Stats::gate_asks`]: crate::Stats::gate_asks
/// [`dirty_max`]: crate::CacheBuilder::dirty_max
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// use bifolio::{Cache, File, OpenOptions, WriteGate};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// LSNs are positions in the log.
/// #[derive(Debug)]
/// struct Log {
///     file: File,
///     durable: AtomicU64,
/// }
///
/// impl WriteGate for Log {
///     fn durable_lsn(&self) -> u64 {
///         self.durable.load(Ordering::Acquire)
///     }
///
///     fn make_durable(&self, _lsn: u64) -> std::io::Result<()> {
///         let end = self.file.len();
///         self.file.sync_data()?;
///         self.durable.fetch_max(end, Ordering::Release);
///         Ok(())
///     }
/// }
///
/// let cache = Cache::builder().memory(16 << 20).build()?;
/// let options = OpenOptions::new().write(true).create(true);
/// let file = cache.open(directory.path().join("log"), &options)?;
/// let log = Arc::new(Log { file, durable: AtomicU64::new(0) });
/// let tree = cache.open_gated(directory.path().join("tree"), &options, log.clone())?;
///
/// let lsn = log.file.append(b"page 0 is 'new'")? + 15;
/// tree.write_at(b"new", 0, lsn)?;
/// assert_eq!(log.durable_lsn(), 0);
/// tree.sync_data()?; // makes the log durable first
/// assert_eq!(log.durable_lsn(), 15);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct GatedFile {
    file: File,
}

impl GatedFile {
    /// Sets the write gate of a file, for all its handles and until the last one is closed; for
    /// files of [`Cache::open_backing`](crate::Cache::open_backing). A gate that is set already is
    /// replaced: the new one must be for the same log.
    ///
    /// # Errors
    /// [`ErrorKind::GateMisuse`](crate::ErrorKind::GateMisuse) for a memory file, which is not
    /// durable, and for a mappable file, whose pages can be changed without a call; a handle that
    /// is not open for writing.
    pub fn new(file: File, gate: Arc<dyn WriteGate>) -> Result<Self> {
        file.handle.check_writable()?;
        let inode = &file.handle.inode;
        let reason = match () {
            () if inode.is_memory_file() => "a memory file is never durable",
            () if inode.page_space.is_in_place() => {
                "its pages can be mapped, and changed without an LSN"
            }
            () => {
                inode.set_gate(gate);
                return Ok(Self { file });
            }
        };
        Err(Error::cannot_gate(inode.name(), reason))
    }

    /// Writes all of `buffer` at `position`, as a change whose log record ends at `lsn`: the pages
    /// are not written out before the gate has made that durable. Otherwise like
    /// [`File::write_all_at`].
    ///
    /// The record must have its LSN before this call, but need not be durable, nor written. With
    /// [`u64::MAX`] the pages stay in memory until [`GatedFile::assign_lsn`]; with 0 this is
    /// [`File::write_all_at`]. Do not hold a lock that the gate's
    /// [`make_durable`](WriteGate::make_durable) takes: this call may wait for the gate.
    ///
    /// # Errors
    /// Fails like [`File::write_all_at`]. If a gate keeps too much dirty:
    /// [`ErrorKind::Unwritable`](crate::ErrorKind::Unwritable),
    /// [`ErrorKind::Full`](crate::ErrorKind::Full).
    pub fn write_at(&self, buffer: &[u8], position: u64, lsn: u64) -> Result<()> {
        self.begin()?;
        let mut done = 0;
        while done < buffer.len() {
            done += self.file.write_with(&buffer[done..], position + done as u64, Some(lsn))?;
        }
        Ok(())
    }

    /// Appends `buffer` as a change whose log record ends at `lsn`, and returns its position;
    /// otherwise like [`File::append`] and [`GatedFile::write_at`]. The storage is not longer
    /// than before until the gate has let the pages pass.
    ///
    /// # Errors
    /// Fails like [`File::append`] and [`GatedFile::write_at`].
    pub fn append(&self, buffer: &[u8], lsn: u64) -> Result<u64> {
        self.begin()?;
        self.file.append_with(buffer, Some(lsn))
    }

    /// Pins the bytes of `range` for changes in place, like [`File::pin_mut`]; the changes get
    /// their LSN from [`PageRefMut::assign_lsn`].
    ///
    /// # Errors
    /// As [`File::pin_mut`].
    pub fn pin_mut(&self, range: Range<u64>) -> Result<PageRefMut<'_, Self>> {
        Ok(self.file.pin_mut(range)?.of())
    }

    /// Gives the pages of `range` that have changes with the LSN [`u64::MAX`] the LSN of their
    /// commit record instead: they can be written out once that is durable. Other pages are not
    /// changed. A page counts as a whole, so transactions that do not steal must not change one
    /// page at the same time. For an abort, write the old bytes back first, and pass the LSN of the
    /// record of that, or 0.
    ///
    /// Waits for other threads that work on the pages. The cost grows with the resident pages.
    ///
    /// # Errors
    /// A handle that is not open for writing;
    /// [`ErrorKind::PinnedByCaller`](crate::ErrorKind::PinnedByCaller).
    pub fn assign_lsn(&self, range: Range<u64>, lsn: u64) -> Result<()> {
        let (handle, inode) = (&self.file.handle, &self.file.handle.inode);
        handle.check_writable()?;
        let pages = pages_of(&range);
        own_pins::check(inode, &pages)?;
        let table = inode.mapping.table();
        let mut index = inode.mapping.head_index(pages.start);
        while let Some(found) = table.next_folio(index).filter(|found| *found < pages.end) {
            let head = inode.mapping.head_index(found);
            if let Lookup::Folio(folio) = inode.mapping.get_folio(&inode.memory.folios, head) {
                let locked = folio.lock();
                if locked.owner() == inode.address {
                    inode.dirty.with_lsns(|lsns| lsns.commit(folio.id(), lsn));
                }
            }
            index = head + (1 << inode.mapping.order());
        }
        Ok(())
    }

    /// Returns the lowest LSN of a change that is not durable in the file; `None` if there is none.
    /// The log must be kept from the record with this LSN on: from its first byte, although an LSN
    /// is often the position of its last; and from the first record of its transaction, if the LSN
    /// came with [`GatedFile::assign_lsn`].
    ///
    /// Changes that are not committed ([`u64::MAX`]) do not count, and neither do LSNs whose write
    /// has not been called yet: an engine takes the minimum with those of its running operations.
    /// Takes time proportional to the dirty pages.
    pub fn oldest_dirty_lsn(&self) -> Option<u64> {
        self.file.handle.inode.dirty.with_lsns(|lsns| lsns.oldest())
    }

    fn begin(&self) -> Result<()> {
        self.file.handle.check_writable()?;
        // On this thread, because neither the flusher nor reclaim calls the gate.
        self.file.handle.inode.refresh_gate();
        Ok(())
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

impl Deref for GatedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl From<GatedFile> for File {
    fn from(gated: GatedFile) -> Self {
        gated.file
    }
}

impl File {
    /// Takes a checkpoint: remembers what is dirty now, for [`Checkpoint::sync`]. Takes no time, so
    /// it can be called under an engine's lock, and the sync later without it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
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
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The cache is closed.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        self.handle.check_usable()?;
        Ok(Checkpoint { file: self.clone(), mark: self.handle.inode.checkpoint() })
    }

    /// Starts to write the dirty pages of `range` to the storage, in the background and without a
    /// flush: a later sync has less to do. Returns at once. Pages that a write gate holds back
    /// follow when it lets them pass.
    ///
    /// At most 256 ranges wait for a device; more are written when they reach the age limit. An
    /// empty range starts nothing, and asks only for earlier errors.
    ///
    /// # Errors
    /// The cache is closed; a range beyond 2^63. Also the last error of an earlier write-back that
    /// this handle has not reported yet, whatever its range: the write of `range` has been started
    /// then, too. The write-back that this call starts fails later, and its error is returned by
    /// the next call or sync.
    pub fn write_out(&self, range: Range<u64>) -> Result<()> {
        self.handle.check_sound()?;
        self.handle.check_range(&range)?;
        let inode = &self.handle.inode;
        if !range.is_empty() {
            let start = range.start / PAGE_BYTES * PAGE_BYTES;
            inode.write_soon(start..range.end.next_multiple_of(PAGE_BYTES));
        }
        let error = inode.errors.check_since(&self.handle.error_cursor, inode.errors.count());
        error.map_or(Ok(()), |error| Err(Error::writeback(error)))
    }
}
