//! Closing: the last handle of a file, and `Cache::close`.
//!
//! A file gives up its slot only when it is durable: written, and flushed since its last change.
//! Writes in flight count as not written, because the pages become dirty again if they fail. The
//! steps CLOSE-L1..L5 are in `slots.rs`.
//!
//! A close of the cache syncs twice: once with the cache open, when a failure changes nothing, and
//! once with `CacheState` closed, for concurrent writes. If the second sync fails, the `CacheState`
//! opens again.

use super::open_file::Open;
use super::slots::Retire;
use super::visit::{OpenObserver, Stay, Visit};
use super::{FileKey, Registry};
use crate::dirt::is_inside_any;
use crate::error::{Error, ErrorKind, Result};
use crate::file::OpenOptions;
use crate::fill::own_pins;
use crate::inode::{Inode, removal};
use crate::io::{DirectBacking, FileIdentity};
use crate::sync::{Backoff, Ordering};
use crate::writeback::Writeback;
use std::sync::Arc;

impl Registry {
    /// Closes a file that has no handles, and logs a failure, because no caller can receive it.
    /// `has_failed` counts as the first round, so that a failing device is not asked to write
    /// everything again.
    pub(super) fn retire_logged(&self, key: FileKey, has_failed: bool) {
        if let Err(failure) = self.files.retire(key, self, has_failed) {
            log::error!("{failure}; the file has no handle and is kept in the cache");
        }
    }

    fn inode_after_release(&self, key: FileKey) -> Option<Arc<Inode>> {
        self.files.look_after_release(key, |open| Arc::clone(&open.inode))
    }

    /// Makes all files durable. The error lists those that are not.
    fn make_durable(&self, failed: &str) -> Result<()> {
        let files = self.files.keys().into_iter().filter_map(|key| self.inode_after_release(key));
        let failures: Vec<_> = files.filter_map(|inode| durable(&inode).err()).collect();
        if failures.is_empty() { Ok(()) } else { Err(Error::close(failed, &failures)) }
    }

    /// Makes everything durable that was written to any file. One file that fails keeps no other
    /// from it.
    pub(crate) fn sync_all(&self) -> Result<()> {
        if is_inside_any() {
            return Err(Error::inside_gate("the cache".to_owned()));
        }
        self.check()?;
        self.inodes().try_for_each(|inode| own_pins::check(&inode, &own_pins::ALL_PAGES))?;
        self.make_durable("not everything is durable")
    }

    /// Makes everything durable and closes the cache: later calls fail. On an error nothing is
    /// closed and nothing is lost.
    pub(crate) fn close(&self) -> Result<()> {
        if is_inside_any() {
            return Err(Error::inside_gate("the cache".to_owned()));
        }
        let _one_at_a_time = self.closing.lock();
        self.check()?;
        self.host.cache_state.check_maps()?;
        self.inodes().try_for_each(|inode| own_pins::check(&inode, &own_pins::ALL_PAGES))?;
        self.make_durable("the cache was not closed")?;
        self.host.cache_state.close().map_err(Error::maps_alive)?;
        // Bytes that were written between the sync and the change of the cache's state.
        self.make_durable("the cache was not closed")
            .inspect_err(|_| self.host.cache_state.reopen())?;
        self.end_observers();
        for key in self.files.keys() {
            let Some(inode) = self.inode_after_release(key) else { continue };
            // A write in progress may end only now. The inode is freed with the last handle.
            removal::remove_closed(&inode);
            drop(inode);
            self.retire_logged(key, false);
        }
        self.free_kept();
        Ok(())
    }
}

/// Returns `true` for a file without handles whose pages its write gate holds back.
pub(super) fn is_held_back(open: &Open) -> bool {
    open.handles == 0 && open.is_kept && open.inode.has_gate()
}

impl Registry {
    /// Ends files without handles whose write gates hold pages back, now and later. Called when the
    /// last `Cache` is dropped: no caller can open, commit or sync them any more. Otherwise a gate
    /// that owns a file of this cache would keep the registry, which keeps the gate.
    pub(crate) fn note_no_cache(&self) {
        if self.host.cache_state.is_forked() {
            return;
        }
        // Relaxed: as in the drop of `OpenMembership`.
        self.has_no_cache.store(true, Ordering::Relaxed);
        self.end_observers();
        self.files.keys().into_iter().for_each(|key| self.give_up(key, is_held_back));
        self.free_kept();
    }

    /// Tries for the last time to make a file durable if `is_wanted` accepts it, and drops it with
    /// what could not be written.
    pub(super) fn give_up(&self, key: FileKey, is_wanted: impl Fn(&Open) -> bool) {
        if self.files.look(key, |open| is_wanted(open)) != Some(true) {
            return;
        }
        let Err(failure) = self.files.retire(key, self, false) else { return };
        log::error!("{failure}; these bytes are lost, because the cache is dropped");
        if let Some((_busy, open)) = self.files.take_if(key, is_wanted) {
            open.wait_for_visitors();
            removal::remove_folios_from(&open.inode, 0);
            self.reclaim.wait_for_reclaim();
            self.free(open);
        }
    }
}

impl Registry {
    /// Returns the inode of a file that has none here: the one that the last close has kept, or a
    /// new one.
    pub(super) fn inode_for(
        &self,
        key: FileKey,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<Arc<Inode>> {
        if let Some(inode) = self.reopen_kept(key, backing, options) {
            return Ok(inode);
        }
        let made = self.make_inode(backing, options);
        if let (Err(_), Some(keeper), FileKey::Identified(identity)) = (&made, &self.keeper, key) {
            keeper.forget(identity);
        }
        made
    }

    /// Returns the inode of a closed file whose pages are in memory, connected to `backing`, which
    /// was just opened. Watches the file.
    fn reopen_kept(
        &self,
        key: FileKey,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Option<Arc<Inode>> {
        let (Some(keeper), FileKey::Identified(identity)) = (&self.keeper, key) else {
            return None;
        };
        let fits = |inode: &Inode| {
            !options.mappable
                && options.codec.is_none()
                && options.folio_bytes == inode.mapping.folio_bytes()
                && self.class_of(options).is_ok_and(|it| it.unwrap_or_default() == inode.class)
                && options.fits_len_max(inode.mapping.len_bytes(), inode.len_max_bytes())
        };
        match backing.watchable().filter(|_| !options.write) {
            Some(file) => {
                let inode = keeper.open(identity, file, &fits)?;
                inode.store.reopen_storage(backing);
                Some(inode)
            }
            None => {
                keeper.forget(identity);
                None
            }
        }
    }

    /// Returns `true` if the pages of a file without handles may stay in memory after its close.
    fn may_keep(&self, open: &Open) -> bool {
        let (Some(keeper), inode) = (&self.keeper, &open.inode) else { return false };
        // Relaxed: a file that is kept for a cache that no caller has any more is freed with it.
        let has_cache = !self.has_no_cache.load(Ordering::Relaxed);
        has_cache
            && !open.is_kept
            && !inode.page_space.is_in_place()
            && !inode.has_gate()
            && inode.codec.get().is_none()
            && inode.errors.count() == 0
            && self.check().is_ok()
            && identity_of(inode).is_some_and(|identity| keeper.is_watched(identity))
    }

    /// CLOSE-L4: closes the descriptors of a file, and frees its inode unless its pages are kept.
    fn free_or_keep(&self, open: Open) {
        let Open { inode, disks, spare, .. } = open;
        if let Some(mapper) = self.host.mapper_of(&inode) {
            mapper.forget(&inode);
        }
        let keeper = self.keeper.as_ref().zip(identity_of(&inode));
        let Some((keeper, identity)) = keeper else {
            Inode::free(inode);
            return drop((disks, spare));
        };
        // CLOSE-L3 has dropped the pages, unless they may stay.
        if inode.mapping.resident_folios() == 0 {
            keeper.forget(identity);
            Inode::free(inode);
            return drop((disks, spare));
        }
        // Transfers (readahead) that were in flight at the close.
        let mut backoff = Backoff::default();
        while Arc::strong_count(&inode) > 1 {
            backoff.wait();
        }
        inode.store.close_storage();
        drop((disks, spare));
        if let Err(inode) = keeper.close(identity, inode) {
            self.reclaim.free_closed(inode);
        }
    }

    /// Returns `true` if no change of an open file was seen since it is watched.
    pub(super) fn is_unchanged(&self, identity: FileIdentity, inode: &Inode) -> bool {
        let Some(keeper) = &self.keeper else { return false };
        let Some(reader) = inode.store.reader() else { return false };
        reader.watchable().is_some_and(|file| keeper.is_unchanged(identity, file))
    }

    /// Frees all kept files. No call opens one meanwhile, or it is kept anew.
    pub(in crate::file) fn free_kept(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.free_all();
        }
    }
}

impl Registry {
    /// Visits a file if it is open.
    pub(crate) fn visit(&self, identity: FileIdentity) -> Option<Visit<'_>> {
        self.files.look(FileKey::Identified(identity), |open| {
            let _stay = Stay::begin(&open.visitors);
            let (inode, disk) = (Arc::clone(&open.inode), open.disks.first().cloned());
            Visit { reclaim: &self.reclaim, state: &self.host.cache_state, inode, disk, _stay }
        })
    }

    /// Returns the open files that a later open finds again.
    pub(crate) fn identities(&self) -> Vec<FileIdentity> {
        let identity = |key| match key {
            FileKey::Identified(identity) => Some(identity),
            FileKey::Single(_) => None,
        };
        self.files.keys().into_iter().filter_map(identity).collect()
    }

    /// Tells `observer` of each file that is opened from now on, while it exists.
    pub(crate) fn observe(&self, observer: &Arc<dyn OpenObserver>) {
        self.observers.lock().push(Arc::downgrade(observer));
    }

    pub(super) fn note_open(&self, key: FileKey) {
        let FileKey::Identified(identity) = key else { return };
        let observers = {
            let list = self.observers.lock();
            (!list.are_all_dropped()).then(|| list.snapshot())
        };
        observers.into_iter().flatten().for_each(|observer| observer.note_open(identity));
    }

    fn end_observers(&self) {
        let observers = self.observers.lock().snapshot();
        observers.for_each(|observer| observer.note_end());
    }
}

fn identity_of(inode: &Inode) -> Option<FileIdentity> {
    inode.device.as_ref()?;
    inode.store.reader()?.identity()
}

impl Retire<Open> for Registry {
    type Shared = Arc<Inode>;
    type Failure = Error;

    fn share_unused(&self, open: &Open) -> Option<Arc<Inode>> {
        (open.handles == 0).then(|| Arc::clone(&open.inode))
    }

    fn make_durable(&self, inode: Arc<Inode>) -> Result<()> {
        durable(&inode)
    }

    fn may_go(&self, open: &Open) -> bool {
        let inode = &open.inode;
        open.wait_for_visitors();
        if self.may_keep(open) {
            return inode.is_durable();
        }
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before the clean pages are dropped");
        removal::remove_closed(inode);
        self.reclaim.wait_for_reclaim();
        inode.is_durable() && inode.mapping.resident_folios() == 0
    }

    fn free(&self, open: Open) {
        // This closes the descriptors, too, before the slot is free.
        self.free_or_keep(open);
    }

    fn keep(&self, open: &mut Open) {
        open.is_kept = true;
    }
}

/// CLOSE-L1: makes a file durable.
fn durable(inode: &Inode) -> Result<()> {
    Writeback::of(inode).make_durable(&inode.errors.sample()).map_err(|cause| {
        let unwritten = inode.unwritten_bytes();
        let text = format!("{unwritten} bytes are not written, or not flushed: {cause}");
        Error::new(ErrorKind::Close, text).in_file(inode.name()).because(Arc::new(cause))
    })
}

impl Drop for Registry {
    fn drop(&mut self) {
        if self.host.cache_state.is_forked() {
            // The memory and the files belong to the parent process: leave them alone.
            self.files.forget_all();
            std::mem::forget(self.keeper.take());
            return;
        }
        // No handle is left, since each keeps the registry, and so no memory file: the remaining
        // files could not be written.
        for key in self.files.keys() {
            self.give_up(key, |open| open.handles == 0);
        }
        self.free_kept();
        // Its pages are unused now; one that cannot be truncated only stays longer than necessary.
        let _ = self.services.swap.as_ref().map(|swap| swap.cut());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::page::{Lookup, PAGE_BYTES};
    use crate::sync::test_hook;
    use std::time::Duration;

    /// A page becomes dirty between CLOSE-L1 and CLOSE-L3 of the last close, as when the flusher
    /// finds a store. With `is_written` the page is clean again at CLOSE-L3, but not flushed.
    fn check_dirt_before_pages_are_dropped(is_written: bool) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; PAGE_BYTES as usize]).unwrap();
        let age_max = Duration::from_millis(if is_written { 1 } else { 3_600_000 });
        let builder = Cache::builder().memory(1 << 20).dirty_age_max(age_max);
        let cache = builder.build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().read(true).write(true)).unwrap();
        file.read_exact_at(&mut [0; 8], 0).unwrap();
        let registry = Arc::clone(cache.registry());
        let inode = Arc::clone(&file.handle.inode);
        test_hook::set("before the clean pages are dropped", move || {
            let found = inode.mapping.get_folio(&inode.memory.folios, 0);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            inode.mark_dirty(&folio, &folio.lock());
            while is_written && inode.unwritten_bytes() > 0 {
                std::thread::yield_now();
            }
        });
        let before = cache.stats();
        drop(file);
        assert!(test_hook::has_run());
        let after = cache.stats();
        assert_eq!(
            after.storage.written_folios,
            before.storage.written_folios + 1,
            "what became dirty is written"
        );
        assert_eq!(after.storage.flushes, before.storage.flushes + 1, "and flushed");
        assert!(registry.files.keys().is_empty(), "and the file is closed then");
    }

    #[test]
    fn a_page_that_becomes_dirty_during_the_last_close_is_written() {
        check_dirt_before_pages_are_dropped(false);
    }

    #[test]
    fn a_page_that_is_written_during_the_last_close_is_flushed() {
        check_dirt_before_pages_are_dropped(true);
    }
}
