//! Open files: one inode per file, shared by all its handles, from the first open to the last
//! close.
//!
//! ```text
//!   open_path --> located by O_PATH --.     open here? another handle; no new descriptor except
//!   open_fd ----> identified ---------+-->    for the first writable handle
//!   open -------> identity -----------'     else take the slot, create an inode and a handle
//!
//!   mod.rs      all open files of a cache; open_file.rs: one of them, and the handles it admits
//!   opening.rs  opens; membership.rs: the place of a handle, until its drop
//!   slots.rs    the states of a file's slot; the protocol of opens and last closes
//!   closing.rs  the last handle, and pages that stay (keeper.rs); `Cache::close`
//!   visit.rs    threads without a handle that read pages
//! ```
//!
//! Invariant REGISTRY-1: an inode is freed only by the thread that took its slot when the file had
//! no handle (so that nothing is inserted any more) and was durable. Before that its table is
//! empty, reclaim has been waited for, so that no thread can find its address in a folio
//! (`Inode::owner`), and all other references to it are dropped. Its slot becomes free last, so its
//! descriptors are closed before the file can be opened again.
//!
//! Invariant REGISTRY-2: while a regular file is open here, no descriptor of it is closed, because
//! the kernel would drop all POSIX locks (`fcntl`) that this process has on the file. So a path is
//! looked up before anything is opened (`Located`, by `O_PATH`, whose close drops no locks). A
//! descriptor that is opened all the same, or passed by the caller, stays open with the file, used
//! or not.
//!
//! Every call checks `CacheState` (`memory`) before it takes a lock.

mod class;
mod closing;
mod keeper;
mod membership;
mod open_file;
mod opening;
mod slots;
mod visit;

use super::Host;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::inode::{Inode, SealingRoom, Services};
use crate::io::{DirectStatus, FileIdentity};
use crate::reclaim::{Reclaim, ReclaimThread};
use crate::stats::FileStats;
use crate::sync::{AtomicBool, AtomicU64, Mutex, WeakList};
use crate::writeback::FlusherThreads;
pub(crate) use keeper::Keeper;
use open_file::Open;
use slots::OpenSlots;
use std::sync::Arc;
pub(crate) use visit::{OpenObserver, Visit};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum FileKey {
    Identified(FileIdentity),
    /// Backing that cannot be opened twice.
    Single(u64),
}

#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) reclaim: Arc<Reclaim>,
    pub(crate) services: Services,
    /// Exit when the last file is closed and every `Cache` is dropped.
    _flusher_threads: FlusherThreads,
    _swap_thread: Option<ReclaimThread>,
    readahead_bytes_max: u64,
    files: OpenSlots<FileKey, Open>,
    next_single: AtomicU64,
    /// Set once every `Cache` is dropped.
    has_no_cache: AtomicBool,
    closing: Mutex<()>,
    /// State that all handles get.
    pub(crate) host: Arc<Host>,
    /// Made, and charged, by the first file with a codec.
    sealing_room: Mutex<Option<Arc<SealingRoom>>>,
    /// `None` if no pages are kept after the last close.
    pub(crate) keeper: Option<Arc<dyn Keeper>>,
    observers: Mutex<WeakList<dyn OpenObserver>>,
}

impl Registry {
    pub(crate) fn new(
        reclaim: Arc<Reclaim>,
        services: Services,
        flusher_threads: FlusherThreads,
        swap_thread: Option<ReclaimThread>,
        host: Host,
        config: &Config,
    ) -> Self {
        Self {
            reclaim,
            services,
            _flusher_threads: flusher_threads,
            _swap_thread: swap_thread,
            readahead_bytes_max: config.readahead_bytes_max,
            files: OpenSlots::default(),
            next_single: AtomicU64::new(0),
            has_no_cache: AtomicBool::new(false),
            closing: Mutex::new(()),
            host: Arc::new(host),
            sealing_room: Mutex::new(None),
            keeper: None,
            observers: Mutex::default(),
        }
    }

    /// Fails if the cache is closed or cannot be relied upon.
    pub(crate) fn check(&self) -> Result<()> {
        self.host.cache_state.check_sound(&self.services.memory.soundness)
    }

    /// Iterates over the open files, except those that are being created or released.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Arc<Inode>> {
        let shared = |key| self.files.look(key, |open| Arc::clone(&open.inode));
        self.files.keys().into_iter().filter_map(shared)
    }

    pub(crate) fn file_stats(&self) -> Vec<FileStats> {
        let stats = |inode: &Inode, is_kept| {
            let folio_bytes = inode.mapping.folio_bytes();
            let mut stats = FileStats {
                file: inode.store.name(),
                len_bytes: inode.mapping.len_bytes(),
                resident_bytes: inode.mapping.resident_folios() * folio_bytes,
                dirty_bytes: inode.dirty_bytes(),
                is_kept,
                ..FileStats::default()
            };
            inode.counts.fill(&mut stats);
            stats
        };
        let open = self.inodes().map(|inode| stats(&inode, false));
        let kept = self.keeper.iter().flat_map(|keeper| keeper.kept());
        open.chain(kept.map(|(_, inode)| stats(&inode, true))).collect()
    }

    pub(crate) fn fallbacks(&self) -> Vec<String> {
        let reason = |inode: &Inode| match inode.store.direct() {
            DirectStatus::Buffered { reason } => {
                Some(format!("direct-io of {}: buffered: {reason}", inode.name()))
            }
            _ => None,
        };
        let kept = self.keeper.iter().flat_map(|keeper| keeper.fallbacks());
        self.inodes().filter_map(|inode| reason(&inode)).chain(kept).collect()
    }
}

pub(super) fn no_table(source: std::io::Error) -> Error {
    Error::memory("a file's table (OpenOptions::len_max)", source)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::memory::CacheState;
    use crate::sys::process::Origin;

    #[test]
    fn a_map_that_begins_and_a_close_see_each_other() {
        let cache_state = CacheState::new(Origin::here());
        cache_state.begin_map();
        assert_eq!(cache_state.close(), Err(1));
        assert!(cache_state.check().is_ok() && cache_state.check_maps().is_err());
        cache_state.end_map();
        cache_state.close().unwrap();
        // A map that starts too late is refused by its own check.
        cache_state.begin_map();
        assert!(cache_state.check().is_err());
        cache_state.end_map();
        cache_state.reopen();
        assert!(cache_state.check().is_ok());
    }
}
