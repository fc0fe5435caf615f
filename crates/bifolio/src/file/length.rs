//! Changes of the length, and of what of the file is not on its storage.
//!
//! The length and the backing change while no write-back is in flight (WRITEBACK-4). A truncation
//! sets the length and truncates the backing, zeroes the rest of the folio that contains the end
//! (FILE-1), and removes the folios past the end, dirty or not. If the backing or the swap fails,
//! the old length is restored and nothing is lost.

use super::open::no_table;
use super::options::check_len_max;
use super::write::Growth;
use super::{File, Handle};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{AccessMode, Locked, own_pins};
use crate::inode::{Resizing, removal};
use crate::page::{LockedFolio, PAGE_BYTES, PAGE_SHIFT};

impl File {
    /// Sets the length of the file to `len_bytes`: truncates it, or grows it with zeros. The file
    /// on the device has that length when the call returns; it is durable after a sync. Blocks for
    /// its own I/O, and for write-backs of the file that are in flight.
    ///
    /// Pinned bytes past the new end stay readable through the pin, with any content.
    ///
    /// # Errors
    /// An error of the storage or the swap, after which the length is unchanged; a handle that is
    /// not open for writing; a length beyond the maximum that the file was opened with.
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        let handle = &self.handle;
        self.check_changeable()?;
        handle.range_end(len_bytes, 0)?;
        handle.check_len(len_bytes)?;
        handle.check_growth(len_bytes)?;
        let inode = &handle.inode;
        let resizing = inode.lock_resizing();
        if len_bytes >= inode.mapping.len_bytes() {
            let _growing = self.uncover(&resizing, len_bytes)?;
            return resizing.set_len(len_bytes);
        }
        own_pins::check(inode, &(inode.mapping.head_index(len_bytes >> PAGE_SHIFT)..u64::MAX))?;
        // Where no backing zeroes them, the bytes must be read first: this may fail.
        let is_inside = len_bytes & (self.folio_bytes() - 1) != 0;
        let _tail = if is_inside && !inode.store.zeroes_what_is_cut() {
            handle.fill().find_folio(len_bytes >> PAGE_SHIFT, AccessMode::Read)?
        } else {
            None
        }
        .map(|locked| locked.folio);
        self.cut(&resizing, len_bytes)
    }

    /// Returns the length in bytes that the file may grow to:
    /// [`OpenOptions::len_max`](crate::OpenOptions::len_max) of the first open, or as raised since.
    #[doc(hidden)]
    pub fn len_max(&self) -> u64 {
        self.handle.inode.len_max_bytes()
    }

    /// Raises the length that the file may grow to, `len_max`, to `bytes`, for all of its handles
    /// until the last one is closed. Has no effect if the file may already grow to that. Pins stay
    /// valid. Blocks only for other changes of the length, which may wait for their I/O.
    ///
    /// Costs a few hundred bytes outside of the bound, and address space: 8 bytes for each 4 KiB of
    /// file up to `bytes`, at least as much as the file had before. Hits on pages above the
    /// `len_max` of the open take about twice as long: say there how long the file will be, if you
    /// know. Raise it by much rather than often.
    ///
    /// # Errors
    /// A handle that is not open for writing; a file that can be mapped
    /// ([`ErrorKind::Unsupported`]); more than 4 PiB ([`ErrorKind::Config`]); address space that
    /// the system refuses ([`ErrorKind::Memory`]). Nothing has changed then.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let options = bifolio::OpenOptions::new().write(true).len_max(1 << 20);
    /// let log = cache.memory_file_with("log", &options)?;
    /// assert_eq!(log.set_len(1 << 30).unwrap_err().kind(), bifolio::ErrorKind::TooLong);
    /// log.raise_len_max(1 << 30)?;
    /// log.set_len(1 << 30)?;
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn raise_len_max(&self, bytes: u64) -> Result<()> {
        let handle = &self.handle;
        handle.check_writable()?;
        if bytes <= self.len_max() {
            return Ok(());
        }
        self.raise_to(&handle.inode.lock_resizing(), bytes)
    }

    /// Raises the length that the file may grow to, unless it is that large already.
    pub(super) fn raise_to(&self, resizing: &Resizing<'_>, bytes: u64) -> Result<()> {
        if bytes <= self.len_max() {
            return Ok(());
        }
        let inode = &self.handle.inode;
        if inode.page_space.is_in_place() {
            let text = "cannot raise len_max: it was opened to be mapped";
            return Err(Error::new(ErrorKind::Unsupported, text).in_file(inode.name()));
        }
        check_len_max(bytes, 0).map_err(|error| error.in_file(inode.name()))?;
        resizing.raise_len_max(bytes).map_err(no_table)
    }

    pub(super) fn cut(&self, resizing: &Resizing<'_>, len_bytes: u64) -> Result<()> {
        let before_bytes = self.len();
        resizing.set_len(len_bytes)?;
        // The last page of a memory file may have been a hole, and been written and swapped out
        // since: then it may be unreadable.
        self.forget_behind(len_bytes).inspect_err(|_| resizing.undo_cut(before_bytes))
    }

    /// Removes everything past the new end. Fails only for a memory file, and changes nothing then.
    pub(super) fn forget_behind(&self, len_bytes: u64) -> Result<()> {
        let inode = &self.handle.inode;
        inode.mapping.begin_walk_behind_end();
        self.handle.zero_tail(len_bytes)?;
        removal::remove_folios_from(inode, len_bytes.next_multiple_of(self.folio_bytes()));
        Ok(())
    }

    /// Waits until no other thread changes the length, and prepares the file to grow to
    /// `len_bytes`.
    pub(super) fn begin_growth(&self, len_bytes: u64) -> Result<Growth<'_>> {
        self.handle.check_growth(len_bytes)?;
        let resizing = self.handle.inode.lock_resizing();
        Ok(Growth { growing: self.uncover(&resizing, len_bytes)?, resizing })
    }

    /// Discards the changes of the file that are not on its storage: the file then has the content
    /// and the length of the storage. Returns the number of bytes discarded. For storage that
    /// accepts no writes; has no effect on a memory file.
    ///
    /// If the last flush of the file failed, the writes before it are discarded, too, but not
    /// counted. Syncs of the file continue to fail. If the kernel cannot tell which pages of a map
    /// were stored to, all resident ones are discarded and counted. Pinned bytes stay readable
    /// through the pin, with any content. Blocks for write-backs in flight.
    ///
    /// # Errors
    /// A handle that is not open for writing; an error of the storage when asked for its length:
    /// the changes are discarded then, and the file has the length that the storage had after the
    /// last successful write.
    pub fn discard_dirty(&self) -> Result<u64> {
        let handle = &self.handle;
        handle.check_writable()?;
        let inode = &handle.inode;
        if !inode.store.is_writable() {
            return Ok(0);
        }
        own_pins::check(inode, &own_pins::ALL_PAGES)?;
        let resizing = inode.lock_resizing();
        let bytes = removal::discard_dirty(inode);
        let before_bytes = self.len();
        let (len_bytes, queried) = resizing.cut_to_backing();
        if len_bytes < before_bytes {
            self.forget_behind(len_bytes)?;
        }
        self.fill_orphans(0..u64::MAX);
        queried?;
        Ok(bytes)
    }
}

impl Handle {
    /// Zeroes the bytes past the end in the folio that contains the end; in a file with a backing,
    /// only if the folio is resident.
    pub(crate) fn zero_tail(&self, len_bytes: u64) -> Result<()> {
        let inode = &self.inode;
        let head = inode.mapping.head_index(len_bytes >> PAGE_SHIFT);
        if len_bytes == head * PAGE_BYTES {
            return Ok(());
        }
        own_pins::check(inode, &(head..head + 1))?;
        let tail = |lock: &LockedFolio<'_>| len_bytes..(lock.index() + lock.pages()) * PAGE_BYTES;
        if !inode.store.zeroes_what_is_cut() {
            // Resident, unless the page was written and swapped out since the check.
            return self.zero_in_memory(head, tail);
        }
        if let Some(Locked { folio, lock, .. }) = self.fill().find_resident(head) {
            inode.zero_in_place(&folio, &lock, tail(&lock));
        }
        Ok(())
    }
}
