//! Changing the length of a file: who may, and what has to stand still meanwhile.
//!
//! Everything that changes the length comes through [`Resizing`], the proof that one thread does.
//! Calls the backing, which is cut or grows.
//!
//! | change | who | the file's length | the backing's |
//! |---|---|---|---|
//! | [`Resizing::extend`] | writes, `allocate` | after the bytes are there | by write-outs, later |
//! | [`Resizing::set_len`], shorter | `set_len` | first: readers see no missing bytes | then |
//! | [`Resizing::set_len`], longer | `set_len` | then | first: it may refuse |
//! | [`Resizing::undo_cut`] | a cut that fails | as before | as before |
//! | [`Resizing::cut_to_backing`] | `discard_dirty` | as the backing's, if longer | is asked |
//!
//! Lock order: `resizing`, then folio locks, one at a time and not during a change, then `cutting`.
//! `set_len` has `cutting` alone, so that it meets no write-out: those end at the length
//! (WRITEBACK-4), and beside a change of the length a kernel's direct writes fail, with bytes lost.
//! So what the store takes for the backing's length changes in two places: write-outs raise it with
//! `cutting` shared, and it is set here with `cutting` alone.

use super::inode::Inode;
use crate::io::IoError;
use crate::sync::{MutexGuard, blocking};

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Resizing<'a> {
    inode: &'a Inode,
    _alone: MutexGuard<'a, ()>,
}

impl Inode {
    /// Waits until nobody else changes the length. The caller has no folio locked.
    pub(crate) fn lock_resizing(&self) -> Resizing<'_> {
        blocking::check_user("`resizing`");
        Resizing { inode: self, _alone: self.resizing.lock() }
    }
}

impl Resizing<'_> {
    /// The file is `len_bytes` long, if it was shorter: what it gets is in memory, or zeros.
    pub(crate) fn extend(&self, len_bytes: u64) {
        let mapping = &self.inode.mapping;
        if len_bytes > mapping.len_bytes() {
            mapping.set_len_bytes(len_bytes);
        }
    }

    /// Cuts the file and its backing, or lets both grow by zeros. If the backing refuses, the old
    /// length stands, and nothing was written out by the new one. Blocks for write-outs.
    pub(crate) fn set_len(&self, len_bytes: u64) -> Result<(), IoError> {
        let inode = self.inode;
        let before_bytes = inode.mapping.len_bytes();
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        if len_bytes < before_bytes {
            inode.mapping.set_len_bytes(len_bytes);
        }
        let result = inode.store.set_len(len_bytes);
        match &result {
            Ok(()) => inode.mapping.set_len_bytes(len_bytes),
            Err(_) => self.undo_cut(before_bytes),
        }
        result
    }

    /// The file has the length again that it had before a cut of which only the length was seen.
    pub(crate) fn undo_cut(&self, before_bytes: u64) {
        self.inode.mapping.set_len_bytes(before_bytes);
        self.inode.page_space.end_growth();
    }

    /// Cuts the file to the length of its backing, if it is longer; returns its length then. Blocks
    /// for write-outs.
    pub(crate) fn cut_to_backing(&self) -> Result<u64, IoError> {
        let inode = self.inode;
        blocking::check("`cutting`, and the backing");
        let _no_write_out = inode.cutting.write();
        let before_bytes = inode.mapping.len_bytes();
        let len_bytes = inode.store.take_len()?.unwrap_or(before_bytes).min(before_bytes);
        inode.mapping.set_len_bytes(len_bytes);
        Ok(len_bytes)
    }
}
