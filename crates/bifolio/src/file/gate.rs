//! Files of engines with a write-ahead log: writes with an LSN behind a write gate.
//!
//! `writeback/gate.rs` has the protocol; [`WriteGate`] states what a gate guarantees.

use super::{Checkpoint, File, FileFuture, PageRef, PageRefMut, PageView, ReadRequest};
use crate::dirt::{ChangeLsn, WriteGate};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::own_pins;
use crate::page::{Lookup, pages_of};
use crate::writeback::{refresh_gate, set_gate};
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

/// A file with a write gate, for engines with a write-ahead log: no page is written to the storage,
/// by a sync or in the background, before the gate says that the log is durable up to the highest
/// LSN of the page's changes. From [`Cache::open_gated`](crate::Cache::open_gated).
///
/// Reads like a [`File`], and changes bytes only with an LSN: [`GatedFile::write_at`],
/// [`GatedFile::append`], [`GatedFile::pin_mut`]. A change that needs no log record has LSN 0, or
/// is made through [`GatedFile::unlogged`], which also has all other calls of a [`File`]. Each
/// other [`File`] of the same file, older or newer, can read it, but fails to change it, with
/// [`ErrorKind::GateMisuse`]. Cheap to clone; clones share one handle.
///
/// # Effects of a gate
/// - Syncs, and closes that sync, call [`WriteGate::make_durable`] first and block for it.
/// - The cache asks the gate in the background, on a thread that exists only meanwhile, when the
///   flusher has passed pages over or memory is short ([`WriteStats::gate_asks`]).
/// - Dirty pages of files with gates leave a quarter of the dirty limit ([`dirty_max`]) to other
///   files, so that a log in the same cache can be written.
/// - Each dirty page with an LSN costs 32 to 64 bytes, charged to the bound.
/// - If everything dirty is behind the gate, writers and readers that need memory wait for it like
///   for a slow device: up to 10 s, or
///   [`reclaim_wait_max`](crate::CacheBuilder::reclaim_wait_max). Then, or at once if the gate
///   fails or nothing is committed, the call fails with [`ErrorKind::Unwritable`] or
///   [`ErrorKind::Full`], which name the gate.
///
/// The cache keeps `gate` until the file is closed; a gate that itself owns a handle of the file
/// keeps it open forever. A file whose last handle is dropped while the gate holds pages back stays
/// in the cache; [`Cache::close`](crate::Cache::close) names it, and [`File::discard_dirty`] gives
/// its pages up once it is opened again. The drop of the last [`Cache`](crate::Cache), or a later
/// one of the file's last handle, asks the gate for the last time and logs what is lost.
///
/// [`WriteStats::gate_asks`]: crate::WriteStats::gate_asks
/// [`dirty_max`]: crate::CacheBuilder::dirty_max
///
/// ```
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
///
/// // Through a pin the change can come first. Without an LSN it stays in memory.
/// let mut page = tree.pin_mut(0..3)?;
/// page.copy_from(0, b"old").unwrap();
/// drop(page); // as an early return or a panic does
/// assert_eq!(tree.sync_data().unwrap_err().kind(), bifolio::ErrorKind::Gated);
/// let lsn = log.file.append(b"page 0 is 'old'")? + 15;
/// tree.assign_lsn(0..3, lsn)?;
/// tree.sync_data()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// No call of a [`File`] changes it by accident:
/// ```compile_fail,E0599
/// # fn change(tree: bifolio::GatedFile) -> bifolio::Result<()> {
/// tree.write_all_at(b"without a record", 0)
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
    /// [`ErrorKind::GateMisuse`] for a memory file, which is not durable, and for a mappable file,
    /// whose pages can be changed without a call; a handle that is not open for writing.
    pub fn new(mut file: File, gate: Arc<dyn WriteGate>) -> Result<Self> {
        file.handle.check_writable()?;
        let inode = &file.handle.inode;
        let reason = if inode.is_memory_file() {
            "a memory file is never durable"
        } else if inode.page_space.is_in_place() {
            "its pages can be mapped, and changed without an LSN"
        } else {
            set_gate(inode, gate);
            file.passes_gate = true;
            return Ok(Self { file });
        };
        let text = format!("cannot have a write gate: {reason}");
        Err(Error::new(ErrorKind::GateMisuse, text).in_file(inode.name()))
    }

    /// Writes all of `buffer` at `position`, as a change whose log record ends at `lsn`: the pages
    /// are not written out before the gate has made that durable.
    ///
    /// The record must have its LSN before this call, but need not be durable, nor written. With
    /// [`u64::MAX`] the pages stay in memory until [`GatedFile::assign_lsn`]; with 0 this is
    /// [`File::write_all_at`]. Do not hold a lock that the gate's
    /// [`make_durable`](WriteGate::make_durable) takes: this call may wait for the gate.
    ///
    /// # Errors
    /// Every error of [`File::write_all_at`]; if a gate keeps too much dirty,
    /// [`ErrorKind::Unwritable`] or [`ErrorKind::Full`].
    pub fn write_at(&self, buffer: &[u8], position: u64, lsn: u64) -> Result<()> {
        self.begin()?;
        let mut done = 0;
        while done < buffer.len() {
            done += self.file.write_with(&buffer[done..], position + done as u64, Some(lsn))?;
        }
        Ok(())
    }

    /// Appends `buffer` as a change whose log record ends at `lsn`, and returns its position;
    /// otherwise, also in its errors, like [`File::append`] and [`GatedFile::write_at`]. The
    /// storage is not longer than before until the gate has let the pages pass.
    pub fn append(&self, buffer: &[u8], lsn: u64) -> Result<u64> {
        self.begin()?;
        self.file.append_with(buffer, Some(lsn))
    }

    /// Pins the bytes of `range` for changes in place, like [`File::pin_mut`], with its errors. The
    /// changes get their LSN from [`PageRefMut::assign_lsn`]; until then they have no log record,
    /// and the page is not written out.
    ///
    /// If the pin is dropped without an LSN, by an early return or a panic, the page counts as not
    /// committed, as if it had LSN [`u64::MAX`]: it stays in memory, and each sync of it fails with
    /// [`ErrorKind::Gated`]. There are three ways on: log the change and call
    /// [`GatedFile::assign_lsn`]; write the old bytes back first, as for an abort; or give up
    /// everything that is not on the storage, by [`GatedFile::discard_dirty`]. A pin that changed
    /// nothing (neither [`PageRefMut::copy_from`] nor [`PageRefMut::as_mut_ptr`] was called) needs
    /// no LSN.
    ///
    /// A sync waits for the pins of other threads. If one of them has no LSN after 10 s, because it
    /// was leaked for example, the sync fails with [`ErrorKind::Gated`]. The page of a leaked pin
    /// stays locked: other calls that need it wait for ever, as after a leak of [`File::pin_mut`].
    pub fn pin_mut(&self, range: impl RangeBounds<u64>) -> Result<PageRefMut<'_, Self>> {
        self.begin()?;
        self.file.pin_changes(self.file.range_of(range), Some(ChangeLsn::Pinned))
    }

    /// Gives the pages of `range` that have changes with the LSN [`u64::MAX`], or of a
    /// [`PageRefMut`] that was dropped without one, the LSN of their commit record instead: they
    /// can be written out once that is durable. A page counts as a
    /// whole, so transactions that do not steal must not change one page at the same time. For an
    /// abort, write the old bytes back first, and pass the LSN of the record of that, or 0.
    ///
    /// Waits for other threads that work on the pages. The cost grows with the resident pages.
    ///
    /// # Errors
    /// A handle that is not open for writing; [`ErrorKind::PinnedByCaller`].
    pub fn assign_lsn(&self, range: impl RangeBounds<u64>, lsn: u64) -> Result<()> {
        let range = self.file.range_of(range);
        let (handle, inode) = (&self.file.handle, &self.file.handle.inode);
        handle.check_writable()?;
        let pages = pages_of(&range);
        own_pins::check(inode, &pages)?;
        let table = inode.mapping.table();
        let mut index = inode.mapping.head_index(pages.start);
        while let Some(found) = table.next_folio(index).filter(|found| *found < pages.end) {
            let head = inode.mapping.head_index(found);
            if let Lookup::Folio(folio) = inode.mapping.get_folio(&inode.memory.folios, head) {
                let locked = inode.lock_folio(&folio);
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

    /// Returns the file, for changes without a log record, and for all other calls of a [`File`].
    ///
    /// Changes through it may reach the storage before any log record. They are not held back,
    /// unless the page has other changes that are; [`set_len`](File::set_len),
    /// [`punch_hole`](File::punch_hole) and their like change the storage at once: make the log
    /// record durable first, unless recovery does without it. A clone of the file is as free.
    ///
    /// ```
    /// # #[derive(Debug)] struct Log;
    /// # impl bifolio::WriteGate for Log {
    /// #     fn durable_lsn(&self) -> u64 { 0 }
    /// #     fn make_durable(&self, _lsn: u64) -> std::io::Result<()> { Ok(()) }
    /// # }
    /// # let directory = tempfile::tempdir()?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # let options = bifolio::OpenOptions::new().read(true).write(true).create(true);
    /// # let (path, log) = (directory.path().join("tree"), std::sync::Arc::new(Log));
    /// let tree = cache.open_gated(path, &options, log)?;
    /// // Zeros behind the pages that the tree knows of: no recovery needs a record of them.
    /// tree.unlogged().set_len(1 << 20)?;
    /// assert_eq!(tree.unlogged().residency(0..1 << 20)?.resident, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn unlogged(&self) -> &File {
        &self.file
    }

    fn begin(&self) -> Result<()> {
        self.file.handle.check_writable()?;
        // On this thread, because neither the flusher nor reclaim calls the gate.
        refresh_gate(&self.file.handle.inode);
        Ok(())
    }
}

/// Calls of a [`File`] that change no bytes. [`GatedFile::unlogged`] has the others.
impl GatedFile {
    /// Returns the length of the file, like [`File::len`].
    #[expect(clippy::len_without_is_empty, reason = "a file is no collection, as in std")]
    pub fn len(&self) -> u64 {
        self.file.len()
    }

    /// Reads bytes, like [`File::read_at`].
    ///
    /// # Errors
    /// Those of [`File::read_at`].
    #[inline]
    pub fn read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.file.read_at(buffer, position)
    }

    /// Reads exactly as many bytes as `buffer` has, like [`File::read_exact_at`].
    ///
    /// # Errors
    /// Those of [`File::read_exact_at`].
    #[inline]
    pub fn read_exact_at(&self, buffer: &mut [u8], position: u64) -> Result<()> {
        self.file.read_exact_at(buffer, position)
    }

    /// Reads bytes that are in memory, like [`File::try_read_at`]. Never blocks.
    ///
    /// # Errors
    /// Those of [`File::try_read_at`].
    pub fn try_read_at(&self, buffer: &mut [u8], position: u64) -> Result<usize> {
        self.file.try_read_at(buffer, position)
    }

    /// Reads the bytes of `range` in place, like [`File::read_with`].
    ///
    /// # Errors
    /// Those of [`File::read_with`].
    #[inline]
    pub fn read_with<T>(
        &self,
        range: impl RangeBounds<u64>,
        read: impl FnMut(&PageView<'_>) -> T,
    ) -> Result<T> {
        self.file.read_with(range, read)
    }

    /// Completes many reads, like [`File::read_many`].
    ///
    /// # Errors
    /// Those of [`File::read_many`].
    pub fn read_many(&self, requests: &mut [ReadRequest<'_>]) -> Result<()> {
        self.file.read_many(requests)
    }

    /// Returns a read as a future, like [`File::read_async`].
    pub fn read_async(&self, buffer: Vec<u8>, position: u64) -> FileFuture<Vec<u8>> {
        self.file.read_async(buffer, position)
    }

    /// Pins the bytes of `range` for reading, like [`File::pin`].
    ///
    /// # Errors
    /// Those of [`File::pin`].
    #[inline(always)]
    pub fn pin(&self, range: impl RangeBounds<u64>) -> Result<PageRef<'_>> {
        self.file.pin(range)
    }

    /// Pins the bytes of each range for reading, like [`File::pin_many`].
    pub fn pin_many(&self, ranges: &[Range<u64>]) -> Vec<Result<PageRef<'_>>> {
        self.file.pin_many(ranges)
    }

    /// Starts to read the pages of `range`, like [`File::prefetch`].
    ///
    /// # Errors
    /// Those of [`File::prefetch`].
    pub fn prefetch(&self, range: impl RangeBounds<u64>) -> Result<()> {
        self.file.prefetch(range)
    }

    /// Makes every write that returned before this call durable, the log first: like
    /// [`File::sync_data`].
    ///
    /// # Errors
    /// Those of [`File::sync_data`]; [`ErrorKind::Gated`] if the gate holds pages back: all others
    /// are durable.
    pub fn sync_data(&self) -> Result<()> {
        self.file.sync_data()
    }

    /// Takes a checkpoint, like [`File::checkpoint`].
    ///
    /// # Errors
    /// The cache is closed.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        self.file.checkpoint()
    }

    /// Starts to write the dirty pages of `range`, like [`File::write_out`]. Pages that the gate
    /// holds back follow when it lets them pass.
    ///
    /// # Errors
    /// Those of [`File::write_out`].
    pub fn write_out(&self, range: impl RangeBounds<u64>) -> Result<()> {
        self.file.write_out(range)
    }

    /// Gives up all changes that are not on the storage, like [`File::discard_dirty`], whatever
    /// their LSN.
    ///
    /// # Errors
    /// Those of [`File::discard_dirty`].
    pub fn discard_dirty(&self) -> Result<u64> {
        self.file.discard_dirty()
    }

    /// Makes the file durable, the log first, and closes this handle: like [`File::close`].
    ///
    /// # Errors
    /// Those of [`File::close`] and [`GatedFile::sync_data`].
    pub fn close(self) -> Result<()> {
        self.file.close()
    }
}

impl PageRefMut<'_, GatedFile> {
    /// Notes that the log record of the changes ends at `lsn`: the page is not written out before
    /// the file's [`WriteGate`] has made that durable. While the pin exists the page is not written
    /// out anyway, so the record may be appended after the change, as long as this is called before
    /// the pin is dropped. The page keeps the highest LSN of its changes. With [`u64::MAX`] it
    /// stays in memory until [`GatedFile::assign_lsn`], as without a call of this; with 0 the
    /// changes need no record.
    pub fn assign_lsn(&mut self, lsn: u64) {
        self.record.assign(lsn);
    }
}
