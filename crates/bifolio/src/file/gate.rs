//! Files of engines with a write-ahead log: writes with an LSN behind a write gate.
//!
//! `writeback/gate.rs` has the protocol; [`WriteGate`] states what a gate guarantees.

use super::{File, PageRefMut};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::own_pins;
use crate::page::{Lookup, pages_of};
use crate::writeback::WriteGate;
use std::ops::{Deref, Range};
use std::sync::Arc;

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
/// - The cache asks the gate in the background, on a thread that exists only meanwhile, when the
///   flusher has passed pages over or memory is short ([`Stats::gate_asks`]).
/// - Dirty pages of files with gates leave a quarter of the dirty limit ([`dirty_max`]) to other
///   files, so that a log in the same cache can be written.
/// - Each dirty page with an LSN costs 32 to 64 bytes, charged to the bound.
/// - If everything dirty is behind the gate, writers and readers that need memory wait for it like
///   for a slow device: up to 10 s, or
///   [`reclaim_wait_max`](crate::CacheBuilder::reclaim_wait_max). Then, or at once if the gate
///   fails or nothing is committed, the call fails with [`ErrorKind::Unwritable`] or
///   [`ErrorKind::Full`], which name the gate.
/// - [`set_len`](File::set_len) changes the storage at once: make its log record durable first.
///
/// The cache keeps `gate` until the file is closed; a gate that itself owns a handle of the file
/// keeps it open forever. A file whose last handle is dropped while the gate holds pages back stays
/// in the cache; [`Cache::close`](crate::Cache::close) names it, and [`File::discard_dirty`] gives
/// its pages up once it is opened again. The drop of the last [`Cache`](crate::Cache), or a later
/// one of the file's last handle, asks the gate for the last time and logs what is lost.
///
/// [`Stats::gate_asks`]: crate::Stats::gate_asks
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
/// # Ok::<(), Box<dyn std::error::Error>>(())
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
    pub fn new(file: File, gate: Arc<dyn WriteGate>) -> Result<Self> {
        file.handle.check_writable()?;
        let inode = &file.handle.inode;
        let reason = if inode.is_memory_file() {
            "a memory file is never durable"
        } else if inode.page_space.is_in_place() {
            "its pages can be mapped, and changed without an LSN"
        } else {
            inode.set_gate(gate);
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

    /// Pins the bytes of `range` for changes in place, like [`File::pin_mut`], with its errors; the
    /// changes get their LSN from [`PageRefMut::assign_lsn`].
    pub fn pin_mut(&self, range: Range<u64>) -> Result<PageRefMut<'_, Self>> {
        Ok(self.file.pin_mut(range)?.of())
    }

    /// Gives the pages of `range` that have changes with the LSN [`u64::MAX`] the LSN of their
    /// commit record instead: they can be written out once that is durable. A page counts as a
    /// whole, so transactions that do not steal must not change one page at the same time. For an
    /// abort, write the old bytes back first, and pass the LSN of the record of that, or 0.
    ///
    /// Waits for other threads that work on the pages. The cost grows with the resident pages.
    ///
    /// # Errors
    /// A handle that is not open for writing; [`ErrorKind::PinnedByCaller`].
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
    /// the file's [`WriteGate`] has made that durable. While the pin exists the page is not written
    /// out anyway, so the record may be appended after the change, as long as this is called before
    /// the pin is dropped. The page keeps the highest LSN of its changes. With [`u64::MAX`] it
    /// stays in memory until [`GatedFile::assign_lsn`].
    pub fn assign_lsn(&mut self, lsn: u64) {
        let has_room = self.file.handle.inode.try_add_lsn(self.folio.id(), lsn);
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
