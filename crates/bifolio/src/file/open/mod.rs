//! Open files: one inode per file, shared by all its handles, from the first open to the last
//! close.
//!
//! ```text
//!   mod.rs      the registry, and what it knows of an open file
//!   slots.rs    the states of a file's slot; the protocol of opens and last closes
//!   opening.rs  from a path, a descriptor or a backing to a handle
//!   closing.rs  the last handle, `File::close`, `Cache::close`
//! ```
//!
//! A thread that creates or releases an inode takes the slot of its file, and holds no lock while
//! it does so.
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
//! `CacheState` (`memory`) tells if the cache is usable (not closed, not in a forked child), and
//! counts the maps in use, which a close must not invalidate. Every call checks it before it takes
//! a lock.

mod closing;
mod opening;
mod slots;

use super::async_reads::ReadServers;
use crate::config::{Ablation, Config};
use crate::error::Result;
use crate::inode::{Inode, Services};
use crate::io::{DirectStatus, DiskFile, FileIdentity};
use crate::maps::mappable::MapResources;
use crate::memory::CacheState;
use crate::page::PAGE_BYTES;
use crate::reclaim::{Reclaim, SwapThread};
use crate::stats::FileStats;
use crate::sync::{AtomicBool, AtomicU64, Mutex};
use crate::sys::probe::Features;
use crate::writeback::FlusherThreads;
use slots::OpenSlots;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(super) use closing::Membership;
pub(super) use opening::no_table;

/// Open file: its inode, and the counts of its handles by kind.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) inode: Arc<Inode>,
    pub(super) handles: u64,
    pub(super) writable: u64,
    pub(super) immutable: u64,
    /// Set if the last handle is closed and the file could not be made durable.
    pub(super) is_kept: bool,
    /// Open files of the backing. None of their descriptors is closed before the file is, because a
    /// close drops all locks (`fcntl`) that this process has on the file.
    pub(super) disks: Vec<Arc<DiskFile>>,
    /// Descriptors that callers passed and that are not used.
    pub(super) spare: Vec<OwnedFd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Identified(FileIdentity),
    /// Backing that cannot be opened twice.
    Single(u64),
}

#[derive(Debug)]
pub(crate) struct Registry {
    pub(super) reclaim: Arc<Reclaim>,
    pub(super) services: Services,
    /// Exit when the last file is closed and every `Cache` is dropped.
    _flusher_threads: FlusherThreads,
    _swap_thread: Option<SwapThread>,
    readahead_bytes_max: u64,
    pub(crate) cache_state: CacheState,
    pub(super) files: OpenSlots<Key, Open>,
    /// Next key of a backing that cannot be opened twice.
    next_single: AtomicU64,
    /// Set once every `Cache` is dropped.
    pub(super) has_no_cache: AtomicBool,
    pub(super) closing: Mutex<()>,
    map_resources: MapResources,
    pub(super) read_servers: ReadServers,
    pub(super) ablation: Ablation,
}

impl Registry {
    pub(crate) fn new(
        reclaim: Arc<Reclaim>,
        services: Services,
        flusher_threads: FlusherThreads,
        swap_thread: Option<SwapThread>,
        cache_state: CacheState,
        features: &Features,
        config: &Config,
    ) -> Self {
        Self {
            reclaim,
            services,
            _flusher_threads: flusher_threads,
            _swap_thread: swap_thread,
            readahead_bytes_max: config.readahead_bytes_max,
            cache_state,
            files: OpenSlots::default(),
            next_single: AtomicU64::new(0),
            has_no_cache: AtomicBool::new(false),
            closing: Mutex::new(()),
            map_resources: MapResources::new(features, config.unmap_batch_folios),
            read_servers: ReadServers::default(),
            ablation: config.ablation,
        }
    }

    /// Fails if the cache is closed or cannot be relied upon.
    pub(crate) fn check(&self) -> Result<()> {
        self.cache_state.check_sound(&self.services.memory.soundness)
    }

    /// Iterates over the open files. Holds only the one that the caller is processing. Skips files
    /// that are being created or released.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Arc<Inode>> {
        let shared = |key| self.files.look(key, |open| Arc::clone(&open.inode));
        self.files.keys().into_iter().filter_map(shared)
    }

    pub(crate) fn file_stats(&self) -> Vec<FileStats> {
        let stats = |inode: Arc<Inode>| {
            let folio_bytes = inode.mapping.folio_bytes();
            FileStats {
                file: inode.store.name(),
                len_bytes: inode.mapping.len_bytes(),
                resident_bytes: inode.mapping.resident_folios() * folio_bytes,
                dirty_bytes: inode.dirty_bytes(),
            }
        };
        self.inodes().map(stats).collect()
    }

    pub(crate) fn swap_bytes(&self) -> u64 {
        let swap = self.services.swap.as_ref();
        swap.map_or(0, |swap| u64::from(swap.slots.used()) * PAGE_BYTES)
    }

    pub(crate) fn fallbacks(&self) -> Vec<String> {
        let reason = |inode: &Inode| match inode.store.direct() {
            DirectStatus::Buffered { reason } => {
                Some(format!("direct-io of {}: buffered: {reason}", inode.name()))
            }
            _ => None,
        };
        self.inodes().filter_map(|inode| reason(&inode)).collect()
    }
}

impl Open {
    fn new(inode: Arc<Inode>) -> Self {
        Self {
            inode,
            handles: 0,
            writable: 0,
            immutable: 0,
            is_kept: false,
            disks: Vec::new(),
            spare: Vec::new(),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::io::DirectIo;
    use crate::sync::Ordering;
    use crate::sys::process::Origin;
    use bifolio_testing::skip;

    /// A guarantee to one handle holds for the file: no transfer falls back from there on.
    #[test]
    fn direct_transfers_that_a_later_open_requires_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; PAGE_BYTES as usize]).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let first = cache.open(&path, &OpenOptions::new()).unwrap();
        let registry = &first.handle.registry;
        let is_required = || {
            let of = |disk: &Arc<DiskFile>| disk.direct_required.load(Ordering::Relaxed);
            let key = registry.files.keys()[0];
            registry.files.look(key, |open| open.disks.iter().all(of)).unwrap()
        };
        assert!(!is_required());
        let _second = match cache.open(&path, &OpenOptions::new().direct(DirectIo::Require)) {
            Ok(second) => second,
            Err(error) => return skip(crate::Feature::DirectIo, error),
        };
        assert!(is_required());
    }

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
