//! Which files are open: one inode for each, shared by all handles; born at the first open,
//! released after the last handle is gone (`closing.rs`).
//!
//! Each file has a *slot* (`slots.rs`, which has the protocol): whoever makes or releases an inode
//! takes it, and holds no lock meanwhile.
//!
//! ```text
//!   open_path --> located by O_PATH --.     open here? another handle, and nothing is opened
//!   open_fd ----> looked at ----------+-->    but to be written for the first time
//!   open -------> identity -----------'     else the slot is taken; an inode, its first handle
//! ```
//!
//! Invariant REGISTRY-1: an inode is freed only by whoever took its slot when it had no handle (so
//! nothing is inserted any more) and was durable; after its table is empty and reclaim has been
//! waited for, so that nobody can find its address in a folio (`Inode::owner`), and after every
//! other reference to it is gone. Its slot is free only after that: its descriptors are closed
//! before the file can be opened anew.
//!
//! Invariant REGISTRY-2: while a regular file is open here, no descriptor of it is closed: the
//! kernel would drop all POSIX locks (`fcntl`) that this process has on the file. So a path is
//! looked up before anything is opened ([`Located`], by `O_PATH`, whose closing drops none), and
//! what is opened all the same, or given, stays with the file, used or not.
//!
//! [`CacheState`] says whether the cache may be used: not closed, not in a forked child; and how
//! many maps are in use, which a close must not meet. Every call asks it before it takes a lock.

use super::closing::Membership;
use super::handle::Handle;
use super::mappables::Mappables;
use super::readahead::Readahead;
use super::slots::{Busy, Found, Slots};
use super::{File, OpenOptions, faults};
use crate::ablation::Ablation;
use crate::config::{self, FaultMode};
use crate::error::{ErrorKind, Result};
use crate::io::{Backing, DirectIo, DirectStatus, DiskFile, FileIdentity, Located, OpenDiskError};
use crate::memory::PageSpace;
use crate::page::PAGE_BYTES;
use crate::reclaim::{Reclaim, SwapThread};
use crate::sync::{AtomicU64, Mutex, Ordering};
use crate::sys::probe::Features;
use crate::sys::process::Origin;
use crate::writeback::{FileSize, FlusherThreads, Inode, Services};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// A file and how many handles of which kind it has.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) inode: Arc<Inode>,
    pub(super) handles: u64,
    pub(super) writable: u64,
    pub(super) immutable: u64,
    /// The threads that serve faults, if the file can be mapped.
    faults: FaultMode,
    /// Its last handle is gone, and it could not be made durable.
    pub(super) is_kept: bool,
    /// The files that were opened for it. None of their descriptors is closed before the file is: a
    /// close drops all the locks (`fcntl`) that this process has on the file.
    pub(super) disks: Vec<Arc<DiskFile>>,
    /// Descriptors that were given for it and were not needed.
    pub(super) spare: Vec<OwnedFd>,
}

/// The key that the registry finds a file by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Identified(FileIdentity),
    /// A backing that cannot be opened twice.
    Single(u64),
}

/// Another handle of a file, or why not; `None`: its slot is open, but not so that it can be opened
/// like this.
type Joined = Result<Option<Arc<Handle>>>;

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(super) reclaim: Arc<Reclaim>,
    pub(super) services: Services,
    /// End when the last file is closed, and every `Cache` is gone.
    _flusher_threads: FlusherThreads,
    _swap_thread: Option<SwapThread>,
    readahead_bytes_max: u64,
    pub(crate) cache_state: CacheState,
    pub(super) files: Slots<Key, Open>,
    /// Counts the keys of backings that cannot be opened twice.
    next_single: AtomicU64,
    /// One close at a time.
    pub(super) closing: Mutex<()>,
    mappables: Mappables,
    ablation: Ablation,
}

impl Registry {
    pub(crate) fn new(
        reclaim: Arc<Reclaim>,
        services: Services,
        flusher_threads: FlusherThreads,
        swap_thread: Option<SwapThread>,
        cache_state: CacheState,
        features: &Features,
        config: &config::Config,
    ) -> Self {
        Self {
            reclaim,
            services,
            _flusher_threads: flusher_threads,
            _swap_thread: swap_thread,
            readahead_bytes_max: config.readahead_bytes_max,
            cache_state,
            files: Slots::default(),
            next_single: AtomicU64::new(0),
            closing: Mutex::new(()),
            mappables: Mappables::new(features, config.unmap_batch_folios),
            ablation: config.ablation,
        }
    }

    /// Whether the cache may be used, and can be relied upon.
    pub(crate) fn check(&self) -> Result<()> {
        self.cache_state.check()?;
        self.services.memory.soundness.check()
    }

    /// Opens a handle of the file that `backing` is.
    pub(crate) fn open(
        self: &Arc<Self>,
        backing: Arc<dyn Backing>,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate()?;
        self.open_backing(&backing, None, options)
    }

    /// Opens a handle of the regular file at `path`. If that is open already, nothing of it is
    /// opened, unless it is to be written for the first time, and nothing is closed.
    pub(crate) fn open_path(
        self: &Arc<Self>,
        path: &Path,
        options: &OpenOptions,
        features: &Features,
    ) -> Result<File> {
        self.check()?;
        options.validate()?;
        let disk_options = options.disk_options();
        let open = |unused: &mut _| DiskFile::open_keeping(path, &disk_options, features, unused);
        let Some(located) = Located::find(path, &disk_options)? else {
            return self.open_disk(open(&mut Vec::new())?, options);
        };
        located.check_rights(options.write)?;
        let identity = located.identity;
        // There may be few descriptors left.
        drop(located);
        self.open_identified(identity, Vec::new(), open, options)
    }

    /// Opens a handle of the regular file that `descriptor` is of.
    pub(crate) fn open_fd(
        self: &Arc<Self>,
        descriptor: OwnedFd,
        options: &OpenOptions,
        features: &Features,
    ) -> Result<File> {
        self.check()?;
        options.validate()?;
        let disk_options = options.disk_options();
        let identity = match DiskFile::check_fd(&descriptor, &disk_options) {
            Ok(identity) => identity,
            Err(error) => {
                if let Ok(identity) = FileIdentity::of_file(&descriptor) {
                    self.keep(identity, &mut vec![descriptor]);
                }
                return Err(error.into());
            }
        };
        let open = |unused: &mut Vec<_>| {
            let descriptor = unused.pop().expect("it was given, and is not used");
            DiskFile::from_fd(descriptor, &disk_options, features, unused)
        };
        self.open_identified(identity, vec![descriptor], open, options)
    }

    /// Opens a handle of a regular file, which is opened, by `open`, only if it is not open here or
    /// is to be written for the first time. The descriptors that are given, or left by `open`, are
    /// of that file: they stay with it (REGISTRY-2).
    fn open_identified(
        self: &Arc<Self>,
        identity: FileIdentity,
        mut unused: Vec<OwnedFd>,
        open: impl FnOnce(&mut Vec<OwnedFd>) -> std::result::Result<DiskFile, OpenDiskError>,
        options: &OpenOptions,
    ) -> Result<File> {
        let key = Key::Identified(identity);
        let found = self.find(key, |open| {
            let admitted = open.admit(options);
            if admitted.is_ok() && options.write && !open.inode.store.is_writable() {
                return Ok(None);
            }
            open.spare.append(&mut unused);
            admitted.and_then(|()| self.make_handle(key, open, options)).map(Some)
        })?;
        let busy = match found {
            Found::Open(Some(handle)) => return opened(handle, options),
            Found::Open(None) => None,
            Found::Vacant(busy) => Some(busy),
        };
        let disk = open(&mut unused);
        if busy.is_none() {
            self.keep(identity, &mut unused);
        }
        let disk = disk?;
        match busy {
            Some(busy) if disk.identity() == Some(identity) => {
                let disk = Arc::new(disk);
                let backing: Arc<dyn Backing> = Arc::clone(&disk) as _;
                self.open_first(busy, &backing, Some(disk), options)
            }
            // It is open, or another file has that name now.
            busy => {
                drop(busy);
                self.open_disk(disk, options)
            }
        }
    }

    /// Descriptors of a file are not used: if it is open they stay with it (REGISTRY-2).
    fn keep(&self, identity: FileIdentity, unused: &mut Vec<OwnedFd>) {
        self.files.look(Key::Identified(identity), |open| open.spare.append(unused));
    }

    /// Opens a handle of a file that has just been opened, though it may be open already.
    fn open_disk(self: &Arc<Self>, disk: DiskFile, options: &OpenOptions) -> Result<File> {
        let disk = Arc::new(disk);
        let backing: Arc<dyn Backing> = Arc::clone(&disk) as _;
        self.open_backing(&backing, Some(disk), options)
    }

    /// Opens a handle of the file that `backing` is, open or not; `disk` is the same, and stays
    /// with the file.
    fn open_backing(
        self: &Arc<Self>,
        backing: &Arc<dyn Backing>,
        disk: Option<Arc<DiskFile>>,
        options: &OpenOptions,
    ) -> Result<File> {
        let key = backing.identity().map_or_else(|| self.single_key(), Key::Identified);
        let found = self.find(key, |open| {
            open.disks.extend(disk.clone());
            self.join(key, open, backing, options).map(Some)
        })?;
        match found {
            Found::Vacant(busy) => self.open_first(busy, backing, disk, options),
            Found::Open(Some(handle)) => opened(handle, options),
            Found::Open(None) => unreachable!("it is joined, or refused"),
        }
    }

    /// Makes the inode of a file whose slot is the caller's, and its first handle.
    fn open_first(
        self: &Arc<Self>,
        busy: Busy<'_, Key, Open>,
        backing: &Arc<dyn Backing>,
        disk: Option<Arc<DiskFile>>,
        options: &OpenOptions,
    ) -> Result<File> {
        let mut open = Open::new(self.make_inode(backing, options)?, options);
        open.disks.extend(disk);
        match self.join(busy.key(), &mut open, backing, options) {
            Ok(handle) => {
                busy.fill(open);
                opened(handle, options)
            }
            Err(error) => {
                // Before the slot is free.
                self.free_unused(open);
                Err(error)
            }
        }
    }

    /// Opens the first handle of a new file without a backing.
    pub(crate) fn open_in_memory(
        self: &Arc<Self>,
        name: &str,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate_in_memory()?;
        let size = self.size_of(options, 0)?;
        let page_space = self.page_space_for(options, size)?;
        let inode = Inode::new_in_memory(&self.services, page_space, name, size);
        let mut open = Open::new(inode.map_err(no_table)?, options);
        let key = self.single_key();
        let handle = self.make_handle(key, &mut open, options)?;
        self.files.insert_new(key, open);
        Ok(File::new(handle))
    }

    /// The key of a file that cannot be opened twice.
    fn single_key(&self) -> Key {
        // Relaxed: a number that no other has is all that is wanted.
        Key::Single(self.next_single.fetch_add(1, Ordering::Relaxed))
    }

    /// Looks for the file, and waits for it, and for no other, while somebody makes or releases it.
    /// `join` makes a handle of one that is open, if it is suitable.
    fn find(
        &self,
        key: Key,
        mut join: impl FnMut(&mut Open) -> Joined,
    ) -> Result<Found<'_, Key, Open, Option<Arc<Handle>>>> {
        let mut is_tried = false;
        loop {
            let found = self
                .files
                .find(key, |open| if open.is_kept && !is_tried { None } else { Some(join(open)) });
            match found {
                Found::Vacant(busy) => return Ok(Found::Vacant(busy)),
                Found::Open(Some(joined)) => return joined.map(Found::Open),
                Found::Open(None) => {
                    // It may be writable by now. If so it is opened anew: others may have changed
                    // it since its last handle was dropped.
                    // What cannot be written was told when the file was kept; the handle's syncs
                    // tell it again.
                    is_tried = true;
                    let _ = self.retire(key, false);
                }
            }
        }
    }

    /// Makes another handle of a file, through `backing` if that is its first that may write.
    fn join(
        self: &Arc<Self>,
        key: Key,
        open: &mut Open,
        backing: &Arc<dyn Backing>,
        options: &OpenOptions,
    ) -> Result<Arc<Handle>> {
        open.admit(options)?;
        if options.write {
            open.inode.store.allow_writes(backing);
        }
        self.make_handle(key, open, options)
    }

    fn size_of(&self, options: &OpenOptions, len_bytes: u64) -> Result<FileSize> {
        let bound_bytes = self.reclaim.memory.arena.usage().bound_bytes;
        config::validate_folio_fits(options.folio_bytes, bound_bytes)?;
        let order = config::folio_order(options.folio_bytes)?;
        Ok(FileSize { order, len_bytes, len_max_bytes: options.len_max_bytes(len_bytes)? })
    }

    /// Where the pages of a new file will be.
    fn page_space_for(&self, options: &OpenOptions, size: FileSize) -> Result<PageSpace> {
        if !options.mappable {
            return Ok(PageSpace::Arena(Arc::clone(&self.services.memory.arena)));
        }
        let region = self.mappables.new_region(
            &self.reclaim,
            size.len_max_bytes,
            options.faults.unwrap_or_default(),
        )?;
        Ok(PageSpace::Region(Arc::new(region)))
    }

    fn make_inode(&self, backing: &Arc<dyn Backing>, options: &OpenOptions) -> Result<Arc<Inode>> {
        let size = self.size_of(options, crate::io::len_bytes(&**backing)?)?;
        let page_space = self.page_space_for(options, size)?;
        Inode::new(&self.services, page_space, backing, size).map_err(no_table)
    }

    fn make_handle(
        self: &Arc<Self>,
        key: Key,
        open: &mut Open,
        options: &OpenOptions,
    ) -> Result<Arc<Handle>> {
        open.bind(options)?;
        open.is_kept = false;
        open.handles += 1;
        open.writable += u64::from(options.write);
        open.immutable += u64::from(options.immutable);
        let handle = Arc::new(Handle {
            inode: Arc::clone(&open.inode),
            reclaim: Arc::clone(&self.reclaim),
            registry: Arc::clone(self),
            error_cursor: open.inode.errors.sample(),
            readahead: Readahead::new(self.readahead_bytes_max),
            readable: options.read || options.immutable,
            writable: options.write,
            immutable: options.immutable,
            ablation: self.ablation,
            membership: Membership::new(self, key, options),
        });
        faults::enlist(&handle);
        Ok(handle)
    }

    /// The files that are open, one after the other: only the one that the caller is at work with
    /// is held. Those that are being made or released are passed over.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Arc<Inode>> {
        let shared = |key| self.files.look(key, |open| Arc::clone(&open.inode));
        self.files.keys().into_iter().filter_map(shared)
    }

    /// Bytes of the swap that are in use.
    pub(crate) fn swap_bytes(&self) -> u64 {
        let swap = self.services.swap.as_ref();
        swap.map_or(0, |swap| u64::from(swap.used_slots()) * PAGE_BYTES)
    }

    /// The fallbacks from direct I/O, file by file.
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

/// The end of every open.
fn opened(handle: Arc<Handle>, options: &OpenOptions) -> Result<File> {
    let file = File::new(handle);
    if options.truncate {
        file.set_len(0)?;
    }
    Ok(file)
}

fn no_table(source: std::io::Error) -> crate::error::Error {
    let purpose = "a file's table (OpenOptions::len_max)";
    ErrorKind::Memory { purpose, source }.into()
}

impl Open {
    fn new(inode: Arc<Inode>, options: &OpenOptions) -> Self {
        let (disks, spare) = (Vec::new(), Vec::new());
        let faults = options.faults.unwrap_or_default();
        Self { inode, handles: 0, writable: 0, immutable: 0, faults, is_kept: false, disks, spare }
    }

    /// Whether another handle with `options` goes with those there are; changes nothing.
    fn admit(&self, options: &OpenOptions) -> Result<()> {
        let file = || self.inode.name();
        let (wanted, open) = match options {
            OpenOptions { immutable: true, .. } if self.writable > 0 => ("immutable", "writable"),
            OpenOptions { write: true, .. } if self.immutable > 0 => ("writable", "immutable"),
            _ => ("", ""),
        };
        if !wanted.is_empty() {
            return Err(ErrorKind::ImmutableConflict { file: file(), wanted, open }.into());
        }
        if options.mappable && !self.inode.page_space.is_in_place() {
            return Err(ErrorKind::NotMappable { file: file() }.into());
        }
        let (wanted_bytes, open_bytes) = (options.folio_bytes, self.inode.mapping.folio_bytes());
        if wanted_bytes != open_bytes {
            let kind = ErrorKind::FolioSizeConflict { file: file(), wanted_bytes, open_bytes };
            return Err(kind.into());
        }
        let faults = self.inode.page_space.is_in_place().then_some(self.faults);
        options.check_decided(self.inode.len_max_bytes, faults, file)?;
        self.check_way(options.direct)
    }

    /// From now on the file keeps what another handle with `options`, which has been admitted, is
    /// promised.
    fn bind(&self, options: &OpenOptions) -> Result<()> {
        if options.direct == DirectIo::Require {
            self.disks.iter().for_each(|disk| disk.require_direct());
        }
        // A transfer may have fallen back since that was looked at; from here on none does.
        self.check_way(options.direct)?;
        if options.exclusive { self.lock_exclusively() } else { Ok(()) }
    }

    /// Locks the file against other programs; it may be locked by this file already.
    fn lock_exclusively(&self) -> Result<()> {
        if self.inode.is_memory_file() {
            return Ok(());
        }
        let Some(disk) = self.disks.iter().find(|disk| disk.is_writable()) else {
            let problem = "exclusive needs a file of the kernel".into();
            return Err(ErrorKind::Config { name: "open options", problem }.into());
        };
        let file = || self.inode.name();
        disk.lock_exclusively().map_err(|source| match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => ErrorKind::Locked { file: file() }.into(),
            _ => ErrorKind::Open(OpenDiskError::System { path: file().into(), source }).into(),
        })
    }

    /// Whether transfers go the way that is wanted.
    fn check_way(&self, wanted: DirectIo) -> Result<()> {
        let reason = match (wanted, self.inode.store.direct()) {
            (DirectIo::Require, DirectStatus::Buffered { reason }) => {
                format!("transfers go through the page cache: {reason}")
            }
            (DirectIo::Require, DirectStatus::Custom) => {
                "its storage is not a file of the kernel".to_owned()
            }
            (DirectIo::Require, DirectStatus::Direct) => {
                // One that is written by may have fallen back, and another not.
                let ways = self.disks.iter().map(|disk| disk.direct());
                let mut reasons = ways.filter_map(|way| match way {
                    DirectStatus::Buffered { reason } => Some(reason),
                    _ => None,
                });
                let Some(reason) = reasons.next() else { return Ok(()) };
                format!("transfers go through the page cache: {reason}")
            }
            (DirectIo::Never, DirectStatus::Direct) => {
                "transfers go directly to the device".to_owned()
            }
            _ => return Ok(()),
        };
        Err(ErrorKind::DirectConflict { file: self.inode.name(), wanted, reason }.into())
    }
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct CacheState {
    /// The number of maps in use, and `CLOSED`. One word: a map that begins and a close that comes
    /// see each other, whichever is first.
    state: AtomicU64,
    origin: Origin,
}

/// Set in the state of a gate that is closed.
const CLOSED: u64 = 1 << 63;

impl CacheState {
    pub(crate) fn new(origin: Origin) -> Self {
        Self { state: AtomicU64::new(0), origin }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.origin.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        let is_closed = self.state.load(Ordering::Acquire) & CLOSED != 0;
        if is_closed { Err(ErrorKind::Closed.into()) } else { Ok(()) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.origin.is_forked()
    }

    /// Counts a map; the caller checks the cache_state afterwards.
    pub(super) fn begin_map(&self) {
        // Relaxed: a close changes the same word, so one of the two sees the other.
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end_map(&self) {
        // Release: pairs with the Acquire in `close`: what was stored through the map is found.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the cache_state, unless maps are in use: then answers how many.
    pub(super) fn close(&self) -> std::result::Result<(), u64> {
        // AcqRel/Acquire: pairs with the Release in `end_map`, and with the Acquire in `check`.
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|state| state & !CLOSED)
    }

    /// Opens the cache_state again: the close has failed.
    pub(super) fn reopen(&self) {
        // Release: pairs with the Acquire in `check`.
        self.state.fetch_and(!CLOSED, Ordering::Release);
    }

    /// Refuses while maps are in use.
    pub(super) fn check_maps(&self) -> Result<()> {
        // Acquire: pairs with the Release in `end_map`, as in `close`.
        match self.state.load(Ordering::Acquire) & !CLOSED {
            0 => Ok(()),
            maps => Err(ErrorKind::MapsAlive { maps }.into()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use bifolio_testing::skip;

    /// A promise to one handle holds for the file: no transfer falls back from there on.
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
        // One that comes too late is refused by its own check.
        cache_state.begin_map();
        assert!(cache_state.check().is_err());
        cache_state.end_map();
        cache_state.reopen();
        assert!(cache_state.check().is_ok());
    }
}
