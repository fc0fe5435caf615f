//! Open files: one inode per file, shared by all its handles, from the first open to the last
//! close.
//!
//! ```text
//!   open_path --> located by O_PATH --.     open here? another handle; no new descriptor except
//!   open_fd ----> identified ---------+-->    for the first writable handle
//!   open -------> identity -----------'     else take the slot, create an inode and a handle
//!
//!   slots.rs    the states of a file's slot; the protocol of opens and last closes
//!   closing.rs  the last handle, and pages that stay (keeper.rs); `File::close`, `Cache::close`
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

mod closing;
mod keeper;
mod slots;

use super::async_calls::ReadServers;
use super::readahead::{Fronts, Readahead};
use super::{FaultMode, File, Handle, Mapper, OpenOptions};
use crate::config::{self, Ablation, Config};
use crate::error::{Error, ErrorKind, Result};
use crate::inode::{Codec, FileSize, Inode, SealingRoom, Services};
use crate::io::{DirectBacking, DirectIo, DirectStatus, DiskFile, FileIdentity, Located};
use crate::memory::CacheState;
use crate::reclaim::{Reclaim, ReclaimThread};
use crate::stats::FileStats;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::sys::probe::Features;
use crate::writeback::FlusherThreads;
use slots::{Busy, Found, OpenSlots, Retire};
use std::iter;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};

pub(super) use closing::Membership;
pub(crate) use keeper::Keeper;

/// Open file: its inode, and the counts of its handles by kind.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) inode: Arc<Inode>,
    pub(super) handles: u64,
    pub(super) writable: u64,
    pub(super) immutable: u64,
    /// Readahead that handles continue of one another.
    pub(super) fronts: Arc<Fronts>,
    /// Set if the last handle is closed and the file could not be made durable.
    pub(super) is_kept: bool,
    /// Open files of the backing (REGISTRY-2).
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
    pub(crate) reclaim: Arc<Reclaim>,
    pub(crate) services: Services,
    /// Exit when the last file is closed and every `Cache` is dropped.
    _flusher_threads: FlusherThreads,
    _swap_thread: Option<ReclaimThread>,
    readahead_bytes_max: u64,
    pub(crate) cache_state: CacheState,
    pub(super) files: OpenSlots<Key, Open>,
    next_single: AtomicU64,
    /// Set once every `Cache` is dropped.
    pub(super) has_no_cache: AtomicBool,
    pub(super) closing: Mutex<()>,
    /// `None` in a build without maps.
    pub(super) mapper: Option<Box<dyn Mapper>>,
    pub(super) read_servers: ReadServers,
    /// Made, and charged, by the first file with a codec.
    sealing_room: Mutex<Option<Arc<SealingRoom>>>,
    /// `None` if no pages are kept after the last close.
    pub(crate) keeper: Option<Arc<dyn Keeper>>,
    pub(super) ablation: Ablation,
}

impl Registry {
    pub(crate) fn new(
        reclaim: Arc<Reclaim>,
        services: Services,
        flusher_threads: FlusherThreads,
        swap_thread: Option<ReclaimThread>,
        cache_state: CacheState,
        mapper: Option<Box<dyn Mapper>>,
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
            mapper,
            read_servers: ReadServers::default(),
            sealing_room: Mutex::new(None),
            keeper: None,
            ablation: config.ablation,
        }
    }

    /// Fails if the cache is closed or cannot be relied upon.
    pub(crate) fn check(&self) -> Result<()> {
        self.cache_state.check_sound(&self.services.memory.soundness)
    }

    /// Iterates over the open files, except those that are being created or released.
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

/// Another handle of an open file; `None` if the file must be opened anew for these options; or the
/// reason for refusing the open.
type Joined = Result<Option<Arc<Handle>>>;

impl Registry {
    pub(crate) fn open(
        self: &Arc<Self>,
        backing: Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate(|| backing.describe())?;
        self.open_backing(&backing, None, options)
    }

    /// Opens a handle of the regular file at `path`. If the file is open already, opens no
    /// descriptor of it, unless this is its first writable handle, and closes none.
    pub(crate) fn open_path(
        self: &Arc<Self>,
        path: &Path,
        options: &OpenOptions,
        features: &Features,
    ) -> Result<File> {
        self.check()?;
        options.validate(|| path.display().to_string())?;
        let disk_options = options.disk_options();
        let open = |unused: &mut _| DiskFile::open_keeping(path, &disk_options, features, unused);
        let Some(located) = Located::find(path, &disk_options)? else {
            return self.open_disk(open(&mut Vec::new())?, options);
        };
        located.check_rights(options.write)?;
        let identity = located.identity;
        // Descriptors may be scarce.
        drop(located);
        self.open_identified(identity, Vec::new(), open, options)
    }

    pub(crate) fn open_fd(
        self: &Arc<Self>,
        descriptor: OwnedFd,
        options: &OpenOptions,
        features: &Features,
    ) -> Result<File> {
        self.check()?;
        options.validate(|| DiskFile::name_of(&descriptor))?;
        let disk_options = options.disk_options();
        let identity = match DiskFile::check_fd(&descriptor, &disk_options) {
            Ok(identity) => identity,
            Err(error) => {
                if let Ok(identity) = FileIdentity::of_file(&descriptor) {
                    self.keep(identity, &mut vec![descriptor]);
                }
                return Err(error);
            }
        };
        let open = |unused: &mut Vec<_>| {
            let descriptor = unused.pop().expect("the descriptor was passed, and is not used");
            DiskFile::from_fd(descriptor, &disk_options, features, unused)
        };
        self.open_identified(identity, vec![descriptor], open, options)
    }

    /// Opens a handle of a regular file. Calls `open` only if the file is not open here, or this is
    /// its first writable handle. Descriptors that the caller passes or `open` leaves belong to
    /// that file, and stay open with it (REGISTRY-2).
    fn open_identified(
        self: &Arc<Self>,
        identity: FileIdentity,
        mut unused: Vec<OwnedFd>,
        open: impl FnOnce(&mut Vec<OwnedFd>) -> Result<DiskFile>,
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
                let backing: Arc<dyn DirectBacking> = Arc::clone(&disk) as _;
                self.open_first(busy, &backing, Some(disk), options)
            }
            // The file is open, or the path names another file now.
            busy => {
                drop(busy);
                self.open_disk(disk, options)
            }
        }
    }

    /// Keeps unused descriptors of a file open if the file is (REGISTRY-2).
    fn keep(&self, identity: FileIdentity, unused: &mut Vec<OwnedFd>) {
        self.files.look(Key::Identified(identity), |open| open.spare.append(unused));
    }

    /// Opens a handle of a file that has just been opened, and that may be open here already.
    fn open_disk(self: &Arc<Self>, disk: DiskFile, options: &OpenOptions) -> Result<File> {
        let disk = Arc::new(disk);
        let backing: Arc<dyn DirectBacking> = Arc::clone(&disk) as _;
        self.open_backing(&backing, Some(disk), options)
    }

    /// Opens a handle of the file behind `backing`, open here or not. `disk` is the same file, and
    /// stays open with it.
    fn open_backing(
        self: &Arc<Self>,
        backing: &Arc<dyn DirectBacking>,
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
            Found::Open(None) => unreachable!("an open file is joined or refused"),
        }
    }

    /// Creates the inode of a file and its first handle. The caller has taken the slot.
    fn open_first(
        self: &Arc<Self>,
        busy: Busy<'_, Key, Open>,
        backing: &Arc<dyn DirectBacking>,
        disk: Option<Arc<DiskFile>>,
        options: &OpenOptions,
    ) -> Result<File> {
        let mut open = Open::new(self.inode_for(busy.key, backing, options)?);
        open.disks.extend(disk);
        match self.join(busy.key, &mut open, backing, options) {
            Ok(handle) => {
                busy.fill(open);
                opened(handle, options)
            }
            Err(error) => {
                // Before the slot becomes free.
                self.may_go(&open);
                self.free(open);
                Err(error)
            }
        }
    }

    pub(crate) fn open_in_memory(
        self: &Arc<Self>,
        name: &str,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate(|| name.to_owned())?;
        if options.codec.is_some() {
            let problem = "a memory file has no storage that a codec could be for";
            return Err(Error::config("open options", problem).in_file(name));
        }
        let size = self.size_of(options, 0).map_err(|error| error.in_file(name))?;
        let mapped = self.mapped_for(options, size)?;
        let inode = Inode::new_in_memory(&self.services, mapped, name, size);
        let mut open = Open::new(inode.map_err(no_table)?);
        let key = self.single_key();
        let handle = self.make_handle(key, &mut open, options)?;
        self.files.insert_new(key, open);
        Ok(File::new(handle))
    }

    fn single_key(&self) -> Key {
        // Relaxed: only the uniqueness of the number matters.
        Key::Single(self.next_single.fetch_add(1, Ordering::Relaxed))
    }

    /// Looks up the file, and waits while another thread creates or releases it. `join` makes
    /// another handle of an open one, if the options allow.
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
                    // The backing may be writable by now. Then the file is opened anew, because
                    // other programs may have changed it since its last handle was dropped.
                    is_tried = true;
                    let _ = self.files.retire(key, self, false);
                }
            }
        }
    }

    /// Makes another handle of a file, through `backing` if it is the first writable one.
    fn join(
        self: &Arc<Self>,
        key: Key,
        open: &mut Open,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<Arc<Handle>> {
        open.admit(options)?;
        if options.write {
            open.inode.store.allow_writes(backing);
        }
        self.make_handle(key, open, options)
    }

    fn size_of(&self, options: &OpenOptions, len_bytes: u64) -> Result<FileSize> {
        let chunk_bytes = self.reclaim.memory.arena.chunk_bytes();
        let order = config::folio_order_in(chunk_bytes, options.folio_bytes)?;
        Ok(FileSize { order, len_bytes, len_max_bytes: options.len_max_bytes(len_bytes)? })
    }

    fn make_inode(
        &self,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<Arc<Inode>> {
        let len_bytes = crate::io::len_bytes(&**backing)?;
        let size = self.size_of(options, len_bytes);
        let size = size.map_err(|error| error.in_file(backing.describe()))?;
        let mapped = self.mapped_for(options, size)?;
        let codec = self.codec_for(options).map_err(|error| error.in_file(backing.describe()))?;
        if codec.is_some() && !len_bytes.is_multiple_of(options.folio_bytes) {
            let text = format!(
                "with a codec: its length, {len_bytes}, is no multiple of {}",
                options.folio_bytes
            );
            return Err(Error::conflict(backing.describe(), text).numbered(libc::EINVAL));
        }
        let inode = Inode::new(&self.services, mapped, backing, size).map_err(no_table)?;
        if let Some(codec) = codec {
            let set = inode.codec.set(codec);
            debug_assert!(set.is_ok(), "the inode is new");
        }
        Ok(inode)
    }

    fn codec_for(&self, options: &OpenOptions) -> Result<Option<Codec>> {
        let Some(codec) = &options.codec else { return Ok(None) };
        let bytes = SealingRoom::bytes_of(self.reclaim.memory.arena.bound_bytes());
        let known = self.sealing_room.lock().clone();
        let room = match known {
            Some(room) => room,
            None => {
                // May wait for memory: without the lock.
                self.reclaim.charge(bytes)?;
                let room = Arc::new(SealingRoom::new(bytes));
                let mut known = self.sealing_room.lock();
                if known.is_some() {
                    self.reclaim.memory.arena.uncharge(bytes);
                }
                Arc::clone(known.get_or_insert(room))
            }
        };
        Ok(Some(Codec::new(Arc::clone(codec), room)))
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
            readahead: Readahead::new(self.readahead_bytes_max, Arc::clone(&open.fronts)),
            readable: options.read,
            writable: options.write,
            write_hints: Default::default(),
            read_server: OnceLock::new(),
            membership: Membership::new(self, key, options),
        });
        if let Some(mapper) = self.mapper_of(&handle.inode) {
            mapper.enlist(&handle);
        }
        Ok(handle)
    }
}

fn opened(handle: Arc<Handle>, options: &OpenOptions) -> Result<File> {
    let file = File::new(handle);
    if options.truncate {
        file.set_len(0)?;
    }
    Ok(file)
}

pub(super) fn no_table(source: std::io::Error) -> Error {
    Error::memory("a file's table (OpenOptions::len_max)", source)
}

impl Open {
    fn new(inode: Arc<Inode>) -> Self {
        Self {
            inode,
            handles: 0,
            writable: 0,
            immutable: 0,
            fronts: Arc::default(),
            is_kept: false,
            disks: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Returns an error if another handle with `options` conflicts with the open ones. Changes
    /// nothing.
    fn admit(&self, options: &OpenOptions) -> Result<()> {
        let file = || self.inode.name();
        let (wanted, open) = match options {
            OpenOptions { immutable: true, .. } if self.writable > 0 => ("immutable", "writable"),
            OpenOptions { write: true, .. } if self.immutable > 0 => ("writable", "immutable"),
            _ => ("", ""),
        };
        if !wanted.is_empty() {
            let text = format!("{wanted}: it is open {open} in this cache");
            return Err(Error::conflict(file(), text));
        }
        if options.mappable {
            self.inode.page_space.mappable(file)?;
        }
        if let (Some(wanted), Some(mapped)) = (options.faults, &self.inode.mapped) {
            let is_in_thread = mapped.serves_in_thread();
            let open = if is_in_thread { FaultMode::InThread } else { FaultMode::Threads };
            if wanted != open {
                let text =
                    format!("with faults {wanted:?}: it is open in this cache with {open:?}");
                return Err(Error::conflict(file(), text));
            }
        }
        let has_same_codec = match (&options.codec, self.inode.codec.get()) {
            (Some(wanted), Some(open)) => open.is(wanted),
            (wanted, open) => wanted.is_none() && open.is_none(),
        };
        if !has_same_codec {
            let text = "with another codec: it is open in this cache with a different one, or none";
            return Err(Error::conflict(file(), text.to_owned()));
        }
        let (wanted, open) = (options.folio_bytes, self.inode.mapping.folio_bytes());
        if wanted != open {
            let text = format!("with folios of {wanted} bytes: it has {open}");
            return Err(Error::conflict(file(), text).numbered(libc::EINVAL));
        }
        let len_max = self.inode.len_max_bytes();
        if let Some(wanted) = options.len_max_bytes.filter(|wanted| *wanted > len_max) {
            let text = format!("with len_max {wanted}: it is open in this cache with {len_max}");
            return Err(Error::conflict(file(), text));
        }
        self.check_way(options.direct)
    }

    /// Binds the file to what another handle with `options`, already admitted, requires.
    fn bind(&self, options: &OpenOptions) -> Result<()> {
        if options.direct == DirectIo::Require {
            self.disks.iter().for_each(|disk| disk.require_direct());
        }
        // A transfer may have fallen back since the check; from here on none does.
        self.check_way(options.direct)?;
        if options.exclusive { self.lock_exclusively() } else { Ok(()) }
    }

    /// Locks the file against other programs. It may be locked already.
    fn lock_exclusively(&self) -> Result<()> {
        if self.inode.is_memory_file() {
            return Ok(());
        }
        let Some(disk) = self.disks.iter().find(|disk| disk.is_writable()) else {
            let problem = "an exclusive lock needs a file opened by path or descriptor";
            return Err(Error::config("open options", problem).in_file(self.inode.name()));
        };
        disk.lock_exclusively().map_err(|source| match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => {
                let text = "cannot be opened exclusively: another program or cache has locked it";
                Error::new(ErrorKind::Locked, text).in_file(self.inode.name())
            }
            _ => Error::cannot_open(Path::new(&self.inode.name()), source),
        })
    }

    /// Fails if transfers are not direct, or buffered, as wanted.
    fn check_way(&self, wanted: DirectIo) -> Result<()> {
        // Of two backings of the file, the one used for writes may have fallen back and the other
        // not.
        let disks = self.disks.iter().map(|disk| disk.direct());
        let mut ways = iter::once(self.inode.store.direct()).chain(disks);
        let reason = match wanted {
            DirectIo::Require => ways.find_map(|way| match way {
                DirectStatus::Buffered { reason } => {
                    Some(format!("transfers go through the page cache: {reason}"))
                }
                DirectStatus::Custom => Some("its storage is a user-supplied backing".to_owned()),
                DirectStatus::Direct => None,
            }),
            DirectIo::Never if matches!(ways.next(), Some(DirectStatus::Direct)) => {
                Some("transfers go directly to the device".to_owned())
            }
            _ => None,
        };
        let Some(reason) = reason else { return Ok(()) };
        let text = format!("with {wanted:?}: it is open in this cache, and {reason}");
        Err(Error::conflict(self.inode.name(), text))
    }
}
#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::page::PAGE_BYTES;
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
