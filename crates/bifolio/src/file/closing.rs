//! How files end: the last handle, `File::close`, `Cache::close`, and giving up what cannot be
//! written.
//!
//! A file leaves its slot (`registry.rs`) only when it is durable: written, and flushed since it
//! was last changed. What is in flight counts as unwritten, because it is dirty again if it fails.
//! So does every resident page of a file with maps, if the kernel does not tell which of them were
//! stored to (`Inode::mark_stored_in` decides that): such a file is kept.
//!
//! The steps L1 to L5 of a last close stand in `slots.rs`; what each does for a file is here.
//!
//! A close of the cache syncs twice: with the cache open, when all may fail and nothing has
//! changed, and once more with the cache_state closed, for what was written meanwhile; if that
//! fails the cache_state opens again.

use super::handle::Access;
use super::own_pins;
use super::registry::{Key, Open, Registry};
use super::slots::Retire;
use super::{File, OpenOptions};
use crate::error::{CloseFailure, Discarded, ErrorKind, Result};
use crate::io::FileIdentity;
use crate::page::PAGE_BYTES;
use crate::sync::Backoff;
use crate::writeback::Inode;
use std::sync::Arc;

/// That a handle is one of its file's.
#[derive(Debug)]
pub(super) struct Membership {
    registry: Arc<Registry>,
    key: Key,
    is_writable: bool,
    is_immutable: bool,
    /// The close that drops the handle has tried L1, in vain, and told its caller.
    has_failed: bool,
}

impl Membership {
    pub(super) fn new(registry: &Arc<Registry>, key: Key, options: &OpenOptions) -> Self {
        let registry = Arc::clone(registry);
        let (is_writable, is_immutable) = (options.write, options.immutable);
        Self { registry, key, is_writable, is_immutable, has_failed: false }
    }

    pub(super) fn identity(&self) -> Option<FileIdentity> {
        match self.key {
            Key::Identified(identity) => Some(identity),
            Key::Single(_) => None,
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if self.registry.cache_state.is_forked() {
            return;
        }
        let is_last = self.registry.files.look(self.key, |open| {
            open.handles -= 1;
            open.writable -= u64::from(self.is_writable);
            open.immutable -= u64::from(self.is_immutable);
            open.handles == 0
        });
        if is_last == Some(true) {
            self.registry.retire_logged(self.key, self.has_failed);
        }
    }
}

impl Registry {
    /// As [`Self::retire`]; a failure is logged, for there is nobody to tell.
    fn retire_logged(&self, key: Key, has_failed: bool) {
        if let Err(failure) = self.retire(key, has_failed) {
            log::error!("{failure}; it has no handle any more, and is kept in the cache");
        }
    }

    /// Ends a file, if it has no handles. If L1 `has_failed` just now, and whoever tried was told,
    /// that counts for the first round's: a device that takes nothing is not asked for everything
    /// again.
    pub(super) fn retire(
        &self,
        key: Key,
        has_failed: bool,
    ) -> std::result::Result<(), CloseFailure> {
        self.files.retire(key, self, has_failed)
    }

    /// The file with this key, if there is one. Waits while it is being released: it may be kept.
    fn settled(&self, key: Key) -> Option<Arc<Inode>> {
        self.files.settled(key, |open| Arc::clone(&open.inode))
    }

    /// L3 for a file whose slot is the caller's: tells whether it can go.
    fn drop_pages(&self, inode: &Inode) -> bool {
        #[cfg(all(test, not(loom)))]
        crate::sync::meanwhile::here("before the clean pages leave");
        inode.remove_closed();
        self.reclaim.wait_for_turn();
        inode.is_durable() && inode.mapping.resident_folios() == 0
    }

    /// L4; the caller has the slot, and no page is left.
    pub(super) fn free_unused(&self, open: Open) {
        // Also the descriptors, before the slot is free.
        let Open { inode: mut shared, disks: _disks, spare: _spare, .. } = open;
        super::faults::forget(&shared.page_space);
        let mut backoff = Backoff::default();
        while let Err(other) = Arc::try_unwrap(shared).map(drop) {
            shared = other;
            backoff.wait();
        }
    }

    /// Makes all files durable; an error lists those that are not.
    fn make_durable(&self) -> Result<()> {
        let files = self.files.keys().into_iter().filter_map(|key| self.settled(key));
        let failures: Vec<_> = files.filter_map(|inode| durable(&inode).err()).collect();
        if failures.is_empty() { Ok(()) } else { Err(ErrorKind::Close { failures }.into()) }
    }

    /// Makes everything durable; then no call works any more. On an error nothing is closed and
    /// nothing lost.
    pub(crate) fn close(&self) -> Result<()> {
        let _one_at_a_time = self.closing.lock();
        self.check()?;
        self.cache_state.check_maps()?;
        self.inodes().try_for_each(|inode| own_pins::check(&inode, &own_pins::ALL_PAGES))?;
        self.make_durable()?;
        self.cache_state.close().map_err(|maps| ErrorKind::MapsAlive { maps })?;
        // Bytes that were written between the sync and the change of the cache's state.
        self.make_durable().inspect_err(|_| self.cache_state.reopen())?;
        for key in self.files.keys() {
            let Some(inode) = self.settled(key) else { continue };
            // A write that was under way may end only now: it goes home with the last handle.
            inode.remove_closed();
            drop(inode);
            self.retire_logged(key, false);
        }
        Ok(())
    }

    /// Gives up what cannot be written of files that have no handle any more.
    pub(crate) fn discard_closed(&self) -> Result<Vec<Discarded>> {
        self.check()?;
        let mut discarded = Vec::new();
        for key in self.files.keys() {
            // Judged with the slot taken: another last close may be about to make it durable.
            let is_kept = |open: &Open| open.handles == 0 && open.is_kept;
            let Some((_busy, open)) = self.files.take_if(key, is_kept) else { continue };
            let file = open.inode.name();
            discarded.push(Discarded { file, bytes: open.inode.discard_all() });
            self.reclaim.wait_for_turn();
            self.free_unused(open);
        }
        Ok(discarded)
    }
}

impl Retire<Open> for Registry {
    type Shared = Arc<Inode>;
    type Failure = CloseFailure;

    fn share_unused(&self, open: &Open) -> Option<Arc<Inode>> {
        (open.handles == 0).then(|| Arc::clone(&open.inode))
    }

    fn make_durable(&self, inode: Arc<Inode>) -> std::result::Result<(), CloseFailure> {
        durable(&inode)
    }

    fn may_go(&self, open: &Open) -> bool {
        self.drop_pages(&open.inode)
    }

    fn free(&self, open: Open) {
        self.free_unused(open);
    }

    fn keep(&self, open: &mut Open) {
        open.is_kept = true;
    }
}

/// L1.
fn durable(inode: &Inode) -> std::result::Result<(), CloseFailure> {
    inode.make_durable(&inode.errors.sample()).map_err(|cause| CloseFailure {
        file: inode.name(),
        unwritten_bytes: inode.unwritten_bytes(),
        cause,
    })
}

impl Drop for Registry {
    fn drop(&mut self) {
        let forked = self.cache_state.is_forked();
        if forked {
            // The memory is not ours; leave it, and the parent's files, alone.
            self.files.forget_all();
            return;
        }
        // No handle is left (each keeps the registry), so no memory file: what is here could not
        // be written.
        for key in self.files.keys() {
            let Err(failure) = self.retire(key, false) else { continue };
            log::error!("{failure}; these bytes are lost: the cache ends");
            if let Some((_busy, open)) = self.files.take_if(key, |open| open.handles == 0) {
                open.inode.remove_folios_from(0);
                self.reclaim.wait_for_turn();
                self.free_unused(open);
            }
        }
        if let Some(swap) = &self.services.swap {
            // Its pages are nobody's now. Who cannot cut it finds it longer than it need be.
            let _ = swap.cut();
        }
    }
}

impl File {
    /// Makes everything durable that was written to the file, through whatever handle, and closes
    /// this handle. Blocks for the device; costs nothing if the file was synced since it was last
    /// changed.
    ///
    /// The file itself is closed with its last handle: clones, holds and maps are, or keep,
    /// handles. Its descriptors are closed then, when this returns.
    ///
    /// # Errors
    /// As [`File::sync_data`]; [`ErrorKind::Closed`] if the cache is
    /// closed. The handle is gone all the same, and nothing else is: what could
    /// not be written stays in the cache, dirty. The next open of the file finds it,
    /// [`Cache::close`](crate::Cache::close) tries again and tells, and
    /// [`Cache::discard_closed`](crate::Cache::discard_closed) gives it up. Whoever wants the
    /// handle after a failure calls `sync_data` first.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("log");
    /// # use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let log = cache.open(&path, &OpenOptions::new().write(true).create(true))?;
    /// log.write_at(b"entry", 0)?;
    /// log.close()?;
    /// assert_eq!(std::fs::read(&path)?, b"entry");
    /// # Ok(())
    /// # }
    /// ```
    pub fn close(self) -> Result<()> {
        if self.handle.registry.cache_state.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        let inode = &self.handle.inode;
        let result = own_pins::check(inode, &own_pins::ALL_PAGES)
            .and_then(|()| inode.make_durable(&self.handle.error_cursor));
        // After the look for what was written when the cache closed.
        let usable = self.handle.check_usable();
        // Another clone may write still, and its close or drop tries anew.
        if let (Err(_), Some(mut handle)) = (&result, Arc::into_inner(self.handle)) {
            handle.membership.has_failed = true;
        }
        result.and(usable)
    }

    /// Gives up what was written to the file and is not on its storage: from now on the file holds
    /// what the storage holds, and has its length. Returns how many bytes were given up. This is
    /// the only way to lose them while the cache lives; it is for storage that will not take them,
    /// where [`Cache::close`](crate::Cache::close) would fail for ever.
    ///
    /// If the last flush of the file failed, what it was to make durable is given up, too (it is
    /// not counted: it may be on the device or not); syncs of the file go on failing.
    ///
    /// Where the kernel does not tell which pages of a map were stored to, all that are resident
    /// are given up, and counted.
    ///
    /// What is written while this runs may be given up or not. Bytes that are pinned stay readable
    /// through the pin, with any content. Blocks for write-outs that are in flight. Nothing happens
    /// to a memory file.
    ///
    /// # Errors
    /// A handle not opened for writing; the storage cannot tell its length: then what was given up
    /// is gone, and the length stands.
    pub fn discard_dirty(&self) -> Result<u64> {
        let handle = &self.handle;
        handle.check_writable()?;
        let inode = &handle.inode;
        if !inode.store.outlives_handles() {
            return Ok(0);
        }
        own_pins::check(inode, &own_pins::ALL_PAGES)?;
        let resizing = inode.lock_resizing();
        let bytes = inode.discard_dirty();
        let before_bytes = self.len();
        let len_bytes = resizing.cut_to_backing()?;
        if len_bytes < before_bytes {
            self.forget_behind(len_bytes)?;
        }
        // Maps see what is held (REGION-4): it becomes what the storage holds. Where that cannot be
        // read, the next one who wants it learns why.
        let held = inode.page_space.orphaned_among(0..len_bytes.div_ceil(PAGE_BYTES));
        held.into_iter().for_each(|index| drop(handle.lock_folio(index, Access::Cache)));
        Ok(bytes)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::page::Lookup;
    use crate::sync::meanwhile;

    /// Between L1 and L3 of the last close a page becomes dirty, as those do that the flusher finds
    /// stored to; with `is_written` it is clean again when L3 comes, and was not flushed.
    fn check_dirt_before_the_pages_leave(is_written: bool) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; PAGE_BYTES as usize]).unwrap();
        let dirty_age_ms_max = if is_written { 1 } else { 3_600_000 };
        let builder = Cache::builder().memory(1 << 20).dirty_age_ms_max(dirty_age_ms_max);
        let cache = builder.build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
        file.read_exact_at(&mut [0; 8], 0).unwrap();
        let registry = Arc::clone(&file.handle.registry);
        let inode = Arc::clone(&file.handle.inode);
        meanwhile::at("before the clean pages leave", move || {
            let found = inode.mapping.get_folio(&inode.memory.folios, 0);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            inode.mark_dirty(&folio, &folio.lock());
            while is_written && inode.unwritten_bytes() > 0 {
                std::thread::yield_now();
            }
        });
        let before = cache.stats();
        drop(file);
        assert!(meanwhile::was_there());
        let after = cache.stats();
        assert_eq!(after.writeback, before.writeback + 1, "what became dirty is written");
        assert_eq!(after.device_flushes, before.device_flushes + 1, "and flushed");
        assert!(registry.files.keys().is_empty(), "and the file is closed then");
    }

    #[test]
    fn a_page_that_becomes_dirty_during_the_last_close_is_written() {
        check_dirt_before_the_pages_leave(false);
    }

    #[test]
    fn a_page_that_is_written_during_the_last_close_is_flushed() {
        check_dirt_before_the_pages_leave(true);
    }
}
