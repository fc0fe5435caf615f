//! Changes that other programs make to the storage of a file: what the cache has of it is forgotten
//! on request.
//!
//! The cache does not watch its storage. A program that knows when another one has changed a file,
//! from a lock or a counter in it, says so here; after that, reads return what the storage has.
//! Folios that are being filled may have old bytes: their locks are waited for.
//!
//! A program that has the bytes itself gives them to the cache instead, and nothing is read again.
//!
//! Bytes that the other program appends after the last folio was filled read as zeros in it. So a
//! file that has grown records the length of its storage, removes that folio, and becomes longer
//! last: a fill in between reads the new bytes.
//!
//! # Safety
//! Copies bytes into frames whose folios are locked.
#![allow(unsafe_code)]

use super::{File, Handle, is_mapped};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{AccessMode, own_pins};
use crate::inode::removal;
use crate::page::{Flag, Lookup, PAGE_BYTES, PAGE_SHIFT, pages_of};
use crate::sys::copy;
use std::ops::{Range, RangeBounds};

impl File {
    /// Forgets the clean pages of `range`, so that later reads return what the storage has. For a
    /// file that another program has changed. Bytes that were not written out stay in the cache.
    ///
    /// Pages that lie partly in the range are forgotten, too. Waits for fills and write-outs of the
    /// range that are in flight, and for no other I/O. A read that runs meanwhile returns old or
    /// new bytes. Pinned bytes stay readable through the pin, with any content. Has no effect on a
    /// memory file.
    ///
    /// # Errors
    /// A closed cache; a handle that is not opened for reading; a range beyond 2^63; a page that
    /// the calling thread has pinned to change it ([`ErrorKind::PinnedByCaller`]).
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, [1; 5000])?;
    /// use std::os::unix::fs::FileExt;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// file.populate(..)?;
    /// std::fs::File::options().write(true).open(&path)?.write_all_at(&[2], 4999)?;
    /// file.invalidate(4999..)?;
    /// let mut byte = [0];
    /// file.read_exact_at(&mut byte, 4999)?;
    /// assert_eq!(byte, [2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn invalidate(&self, range: impl RangeBounds<u64>) -> Result<()> {
        let range = self.range_of(range);
        if !self.has_outside(&range)? {
            return Ok(());
        }
        let inode = &self.handle.inode;
        let pages = self.units_of(&range);
        removal::remove_clean(inode, pages.clone(), &range);
        self.fill_orphans(pages);
        Ok(())
    }

    /// Takes `bytes` that the storage has at `position` by now, written past the cache: resident
    /// pages have them at once, and stay clean. Other pages read them from the storage. For a
    /// program whose own writes reach the storage another way, as [`File::invalidate`] without the
    /// reads that follow it. The caller makes sure that no other program writes these bytes
    /// meanwhile.
    ///
    /// Waits for fills and write-outs of the range that are in flight, and for no other I/O. Bytes
    /// past the length of the file are left out: see [`File::refresh_len`]. Bytes that were not
    /// written out stay in the cache. Pages of a file that can be mapped are forgotten. Has no
    /// effect on a memory file.
    ///
    /// # Errors
    /// Those of [`File::invalidate`]. Pages before the one that fails have the bytes.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, [1; 5000])?;
    /// use std::os::unix::fs::FileExt;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// file.populate(..)?;
    /// std::fs::File::options().write(true).open(&path)?.write_all_at(&[2], 4999)?;
    /// file.update(&[2], 4999)?;
    /// let mut byte = [0];
    /// file.read_exact_at(&mut byte, 4999)?;
    /// assert_eq!(byte, [2]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn update(&self, bytes: &[u8], position: u64) -> Result<()> {
        let range = position..position.saturating_add(bytes.len() as u64);
        if !self.has_outside(&range)? {
            return Ok(());
        }
        // Bytes of a map may not be resident, and a fault must not wait for a lock of this thread.
        if self.handle.inode.mapped.is_some() || is_mapped(bytes) {
            return self.invalidate(range);
        }
        for index in pages_of(&range) {
            let start = range.start.max(index * PAGE_BYTES);
            let end = range.end.min((index + 1) * PAGE_BYTES);
            self.update_page(
                &bytes[(start - position) as usize..(end - position) as usize],
                start,
            )?;
        }
        Ok(())
    }

    /// Returns `true` if the bytes of a range are on a storage that others may change. Fails if the
    /// calling thread has pinned one of its pages to change it.
    fn has_outside(&self, range: &Range<u64>) -> Result<bool> {
        self.handle.check_readable()?;
        self.handle.check_range(range)?;
        let inode = &self.handle.inode;
        if range.is_empty() || inode.is_memory_file() {
            return Ok(false);
        }
        own_pins::check(inode, &self.units_of(range))?;
        Ok(true)
    }

    /// Copies bytes of one page into its folio, if that is resident and clean.
    fn update_page(&self, bytes: &[u8], position: u64) -> Result<()> {
        let (inode, index) = (&*self.handle.inode, position >> PAGE_SHIFT);
        let folio = match inode.mapping.get_folio(&inode.memory.folios, index) {
            Lookup::Folio(folio) => folio,
            // A fill that begins now reads what the storage has.
            Lookup::Absent(_) => return Ok(()),
            Lookup::Refused => return Err(inode.too_many_pins(index)),
        };
        let locked = inode.lock_folio(&folio);
        if locked.owner() != inode.address {
            return Ok(());
        }
        locked.flags.wait_for_writeback();
        let is_clean = locked.flags.get(Flag::Uptodate) && !locked.flags.write_state().is_dirty();
        let inside = inode.mapping.len_bytes().saturating_sub(position).min(bytes.len() as u64);
        if is_clean && inside > 0 {
            let _section = inode.mapping.begin_write_section(&locked, index..index + 1);
            let target = self.address_in(&folio, position);
            // SAFETY: inside a frame whose lock and write section this thread holds; `bytes` is
            // memory of the caller.
            unsafe { copy::copy_in(target, &bytes[..inside as usize]) };
        }
        Ok(())
    }

    /// Returns `true` if no program, this one included, has changed the file since the cache
    /// watches it: since its first open or, if that found pages of a closed file
    /// ([`CacheBuilder::kept_files`](crate::CacheBuilder::kept_files)), since before these were
    /// read. So everything in the cache is what the file has. `false` if the cache cannot tell:
    /// always without `kept_files`, and for a file that a program had open for writing at its first
    /// open.
    ///
    /// For a program that would otherwise forget the pages, because another one may have changed
    /// them before it got a lock. A change that is still in progress may be missed; so may a store
    /// through a shared map. Never blocks.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, [1; 5000])?;
    /// let cache = bifolio::Cache::builder().memory(4 << 20).kept_files(100).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let is_known = file.is_unchanged(); // on ext4, XFS, Btrfs and F2FS
    /// std::fs::write(&path, [2; 5000])?;
    /// assert!(!file.is_unchanged());
    /// # let _ = is_known;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn is_unchanged(&self) -> bool {
        let Handle { inode, membership, .. } = &*self.handle;
        self.handle.check_usable().is_ok() && membership.is_unchanged(inode)
    }

    /// Sets the length of the file to that of its storage, which another program has changed, and
    /// returns it. What was cached past a new end is forgotten, and so is the last page of a file
    /// that has grown. Has no effect on a memory file.
    ///
    /// Blocks for the storage, and for write-outs of the file that are in flight.
    ///
    /// # Errors
    /// The error of the storage; a closed cache; a handle that is not opened for reading;
    /// [`ErrorKind::Unsupported`] for a file with bytes that were not written out: sync or discard
    /// them first; a length beyond the maximum of a file that can be mapped. The length is
    /// unchanged then.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// std::fs::write(&path, "as of another program")?;
    /// assert_eq!((file.len(), file.refresh_len()?, file.len()), (0, 21, 21));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refresh_len(&self) -> Result<u64> {
        let handle = &self.handle;
        handle.check_readable()?;
        let inode = &handle.inode;
        if inode.is_memory_file() {
            return Ok(self.len());
        }
        own_pins::check(inode, &own_pins::ALL_PAGES)?;
        let resizing = inode.lock_resizing();
        if inode.unwritten_bytes() > 0 {
            let text = "cannot take the length of the storage: the file has dirty bytes";
            return Err(Error::new(ErrorKind::Unsupported, text).in_file(inode.name()));
        }
        let before_bytes = self.len();
        let len_bytes = resizing.query_backing()?;
        if len_bytes < before_bytes {
            // No memory file, so this does not fail.
            self.forget_behind(len_bytes)?;
        } else if len_bytes > before_bytes {
            self.raise_to(&resizing, len_bytes)?;
            let _growing = self.uncover(&resizing, len_bytes)?;
            let last = self.units_of(&(before_bytes.saturating_sub(1)..before_bytes + 1));
            removal::remove_clean(inode, last, &(0..before_bytes + 1));
            resizing.extend(len_bytes);
        }
        Ok(len_bytes)
    }

    /// Returns the pages of whole folios that hold bytes of a range.
    fn units_of(&self, range: &Range<u64>) -> Range<u64> {
        let unit_pages = self.folio_bytes() >> PAGE_SHIFT;
        let pages = pages_of(range);
        pages.start / unit_pages * unit_pages..pages.end.next_multiple_of(unit_pages)
    }

    /// Fills pages that were removed and that maps can still see (REGION-4). If that fails, the
    /// next access to the page returns the error.
    pub(super) fn fill_orphans(&self, pages: Range<u64>) {
        let handle = &self.handle;
        // The file may end before them.
        let end = pages.end.min(self.len().div_ceil(PAGE_BYTES));
        let held = handle.inode.page_space.orphaned_among(pages.start.min(end)..end);
        held.into_iter().for_each(|index| drop(handle.fill().lock_folio(index, AccessMode::Cache)));
    }
}
