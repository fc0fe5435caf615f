//! Closed files whose pages stay in memory for the next open.
//!
//! Called by `file::closing`. A closed file is an inode without handle, without storage and so
//! without descriptors. Its pages are clean and on the LRU lists: reclaim evicts them like those of
//! open files. At the limit
//! [`CacheBuilder::closed_bytes_max`](crate::CacheBuilder::closed_bytes_max) the least recently
//! closed file is freed. Files without pages are freed when memory for metadata is short.
//!
//! The lock is held to find and remove a file only. A thread that has removed one owns it.

use super::{Reclaim, ReclaimLock};
use crate::io::{FileIdentity, Stamp};
use crate::sync::Mutex;
use crate::sys::process;
use crate::writeback::Inode;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Memory of a closed file besides its pages and its table, bytes: the inode, and its entries here.
/// Charged against the bound.
const CLOSED_FILE_BYTES: u64 = 2048;
const _: () = assert!(size_of::<Inode>() <= 1536, "the rest is for its name and small parts");
/// The kernel's page tables for the table of a file, bytes. Not charged, as for open files.
const PAGE_TABLE_BYTES: u64 = 8192;
/// Part of a process's address space, 2^47 bytes or its limit, that tables of closed files may use.
const ADDRESS_SPACE_DIVISOR: u64 = 4;
/// Least recently closed files that a search for files without pages looks at.
const LOOKED_AT_MAX: usize = 64;

/// Closed files of a cache.
#[derive(Debug)]
pub(super) struct ClosedFiles {
    bytes_max: u64,
    /// Upper bound on the address space of their tables, bytes.
    space_bytes_max: u64,
    list: Mutex<ClosedList>,
}

#[derive(Debug, Default)]
struct ClosedList {
    /// By the number of their closes, so the least recently closed first.
    files: BTreeMap<u64, ClosedFile>,
    numbers: HashMap<FileIdentity, u64>,
    next_number: u64,
    /// Sums over the files.
    bytes: u64,
    space_bytes: u64,
}

#[derive(Debug)]
struct ClosedFile {
    identity: FileIdentity,
    inode: Arc<Inode>,
    stamp: Stamp,
    /// Memory of the file when it was last counted, bytes. It can only have become less.
    bytes: u64,
}

/// Returns the memory of a closed file, bytes.
fn bytes_of(inode: &Inode) -> u64 {
    let pages_bytes = inode.mapping.resident_folios() * inode.mapping.folio_bytes();
    pages_bytes + inode.mapping.table().charged_bytes() + CLOSED_FILE_BYTES + PAGE_TABLE_BYTES
}

/// Returns the address space of a file's table, bytes.
fn space_of(inode: &Inode) -> u64 {
    inode.mapping.table().pages() * size_of::<u64>() as u64
}

impl ClosedFiles {
    pub(super) fn new(bytes_max: u64) -> Self {
        let space_bytes = process::address_space_bytes_max().min(1 << 47);
        let space_bytes_max = space_bytes / ADDRESS_SPACE_DIVISOR;
        Self { bytes_max, space_bytes_max, list: Mutex::default() }
    }
}

impl ClosedList {
    fn remove(&mut self, number: u64) -> Option<ClosedFile> {
        let file = self.files.remove(&number)?;
        self.numbers.remove(&file.identity);
        self.bytes -= file.bytes;
        self.space_bytes -= space_of(&file.inode);
        Some(file)
    }

    /// Counts the least recently closed file again. Removes and returns it if the files still
    /// exceed a limit.
    fn remove_excess(&mut self, bytes_max: u64, space_bytes_max: u64) -> Option<ClosedFile> {
        while self.bytes > bytes_max || self.space_bytes > space_bytes_max {
            let (number, file) = self.files.iter_mut().next()?;
            let counted_bytes = bytes_of(&file.inode);
            if file.inode.mapping.resident_folios() == 0 || counted_bytes >= file.bytes {
                let number = *number;
                return self.remove(number);
            }
            self.bytes -= file.bytes - counted_bytes;
            file.bytes = counted_bytes;
        }
        None
    }
}

impl Reclaim {
    /// Returns `true` if files are kept after their last close.
    pub(crate) fn keeps_closed_files(&self) -> bool {
        self.closed_files.bytes_max > 0
    }

    /// Returns the memory of all closed files when they were counted last, bytes.
    pub(crate) fn closed_bytes(&self) -> u64 {
        self.closed_files.list.lock().bytes
    }

    /// Keeps a file without handles and without storage, or frees it if there is no memory for it.
    /// Frees the least recently closed files that exceed the limits then.
    pub(crate) fn keep_closed_file(&self, identity: FileIdentity, inode: Arc<Inode>, stamp: Stamp) {
        let bytes = bytes_of(&inode);
        let fits = bytes <= self.closed_files.bytes_max && inode.mapping.resident_folios() > 0;
        if !fits || !self.charge_in_one_round(CLOSED_FILE_BYTES) {
            return self.free_file(inode);
        }
        {
            let mut list = self.closed_files.list.lock();
            let number = list.next_number;
            list.next_number += 1;
            list.bytes += bytes;
            list.space_bytes += space_of(&inode);
            let earlier = list.numbers.insert(identity, number);
            debug_assert!(earlier.is_none(), "an open takes the file off the list");
            list.files.insert(number, ClosedFile { identity, inode, stamp, bytes });
        }
        let limits = (self.closed_files.bytes_max, self.closed_files.space_bytes_max);
        loop {
            let excess = self.closed_files.list.lock().remove_excess(limits.0, limits.1);
            let Some(file) = excess else { return };
            self.free_closed(file);
        }
    }

    /// Takes a file off the list, with its stamp. The caller reopens or frees it.
    pub(crate) fn take_closed_file(&self, identity: FileIdentity) -> Option<(Arc<Inode>, Stamp)> {
        let file = {
            let mut list = self.closed_files.list.lock();
            let number = *list.numbers.get(&identity)?;
            list.remove(number)?
        };
        self.arena().uncharge(CLOSED_FILE_BYTES);
        Some((file.inode, file.stamp))
    }

    /// Frees all closed files. Returns their number, and that of their folios.
    pub(crate) fn free_closed_files(&self) -> (u64, u64) {
        let (mut files, mut folios) = (0, 0);
        loop {
            let first = {
                let mut list = self.closed_files.list.lock();
                let number = list.files.keys().next().copied();
                number.and_then(|number| list.remove(number))
            };
            let Some(file) = first else { return (files, folios) };
            files += 1;
            folios += file.inode.mapping.resident_folios();
            self.free_closed(file);
        }
    }

    fn free_closed(&self, file: ClosedFile) {
        self.free_file(file.inode);
        self.arena().uncharge(CLOSED_FILE_BYTES);
    }

    /// Frees a file without handles and without dirty pages, and its pages.
    pub(crate) fn free_file(&self, inode: Arc<Inode>) {
        inode.remove_closed();
        self.wait_for_reclaim();
        Inode::free(inode);
    }

    /// Frees closed files whose pages were all evicted, among those that were closed first. Returns
    /// `true` if there were any.
    pub(super) fn free_empty_closed_files(&self, _reclaim_lock: &ReclaimLock<'_>) -> bool {
        let removed: Vec<_> = {
            let mut list = self.closed_files.list.lock();
            let is_empty = |file: &ClosedFile| file.inode.mapping.resident_folios() == 0;
            let first = list.files.iter().take(LOOKED_AT_MAX);
            let empty = first.filter(|(_, file)| is_empty(file)).map(|(number, _)| *number);
            let empty: Vec<_> = empty.collect();
            empty.into_iter().filter_map(|number| list.remove(number)).collect()
        };
        // RECLAIM-2: no other thread reclaims, so none has found the inode in a folio. The flusher
        // may have a reference for a moment: then it frees the inode.
        self.arena().uncharge(removed.len() as u64 * CLOSED_FILE_BYTES);
        !removed.is_empty()
    }

    /// Leaks the files, in a process that did not create the cache.
    pub(crate) fn forget_closed_files(&self) {
        std::mem::forget(std::mem::take(&mut *self.closed_files.list.lock()));
    }
}
