//! Which files are open: one inode for each, shared by all handles; born at the first open,
//! released after the last handle is gone (`closing.rs`).
//!
//! Each file has a *slot*. The registry's lock is held for a look at the slots and never while
//! storage, another file or another lock is waited for: a thread that makes or releases an inode
//! takes the slot and lets go of the lock, and whoever wants that very file waits for the slot.
//!
//! ```text
//!   none --first open--> making: length asked for, tables made ----------> open: handles, or kept
//!     ^                                                                     |   ^
//!     |                                            no handle, made durable  |   | not durable
//!     '--- free --- releasing: pages dropped, descriptors closed  <---------'---'
//! ```
//!
//! The slot stays open, without a handle, while the last close makes the file durable: an open that
//! comes meanwhile shares the inode. A file that cannot be made durable is *kept*: nothing is lost,
//! the next open of it and `Cache::close` try again.
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

use super::closing::{Busy, Membership};
use super::handle::Handle;
use super::mappables::Mappables;
use super::readahead::Readahead;
use super::{File, OpenOptions, faults};
use crate::config;
use crate::error::{Error, ErrorKind, Result};
use crate::frames::Frames;
use crate::io::{Backing, DirectIo, DirectStatus, DiskFile, FileIdentity, Located};
use crate::mapping::PAGE_BYTES;
use crate::reclaim::Reclaim;
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};
use crate::sys::fork::ForkGuard;
use crate::sys::probe::Features;
use crate::writeback::{FileSize, FlusherThreads, Inode, Services};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Whether the cache may be used: not closed, not in a forked child; and how many maps are in use,
/// which a close must not meet.
#[derive(Debug)]
pub(crate) struct Gate {
    /// The number of maps in use, and `CLOSED`. One word: a map that begins and a close that comes
    /// see each other, whichever is first.
    state: AtomicU64,
    fork_guard: ForkGuard,
}

/// Set in the state of a gate that is closed.
const CLOSED: u64 = 1 << 63;

impl Gate {
    pub(crate) fn new(fork_guard: ForkGuard) -> Self {
        Self { state: AtomicU64::new(0), fork_guard }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.fork_guard.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        let is_closed = self.state.load(Ordering::Acquire) & CLOSED != 0;
        if is_closed { Err(ErrorKind::Closed.into()) } else { Ok(()) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.fork_guard.is_forked()
    }

    /// Counts a map; the caller checks the gate afterwards.
    pub(super) fn begin_map(&self) {
        // Relaxed: a close changes the same word, so one of the two sees the other.
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end_map(&self) {
        // Release: pairs with the Acquire in `close`: what was stored through the map is found.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the gate, unless maps are in use: then answers how many.
    pub(super) fn close(&self) -> std::result::Result<(), u64> {
        // AcqRel/Acquire: pairs with the Release in `end_map`, and with the Acquire in `check`.
        let closed = self.state.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|state| state & !CLOSED)
    }

    /// Opens the gate again: the close has failed.
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

/// A file and how many handles of which kind it has.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) inode: Arc<Inode>,
    pub(super) handles: u64,
    pub(super) writable: u64,
    pub(super) immutable: u64,
    /// Its last handle is gone, and it could not be made durable.
    pub(super) is_kept: bool,
    /// What was opened for it. None of its descriptors is closed before the file is: a close drops
    /// all the locks (`fcntl`) that this process has on the file.
    pub(super) disks: Vec<Arc<DiskFile>>,
    /// Descriptors that were given for it and were not needed.
    pub(super) spare: Vec<OwnedFd>,
}

/// What the registry finds a file by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Identified(FileIdentity),
    /// A backing that cannot be opened twice.
    Single(u64),
}

/// See the head of the file.
#[derive(Debug)]
pub(super) enum Slot {
    /// Somebody makes the inode.
    Making,
    /// Somebody releases it, or finds that it must be kept.
    Releasing,
    Open(Open),
}

impl Slot {
    fn inode_if(&self, is_wanted: impl FnOnce(&Open) -> bool) -> Option<Arc<Inode>> {
        match self {
            Self::Open(open) => is_wanted(open).then(|| Arc::clone(&open.inode)),
            Self::Making | Self::Releasing => None,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) slots: HashMap<Key, Slot>,
    next_single: u64,
}

/// What a look at a slot has come to.
enum Found<'r> {
    /// Another handle of a file that is open.
    Handle(Arc<Handle>),
    /// The file is open, but not so that it can be opened like this.
    Unsuitable,
    /// The file is not open: the slot is the caller's, who makes the inode.
    Vacant(Busy<'r>),
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(super) reclaim: Arc<Reclaim>,
    pub(super) services: Services,
    /// End when the last file is closed, and every `Cache` is gone.
    _flusher_threads: FlusherThreads,
    readahead_bytes_max: u64,
    pub(super) gate: Gate,
    pub(super) files: Mutex<Files>,
    /// Signalled when a slot is not somebody's any more.
    pub(super) changed: Condvar,
    /// One close at a time.
    pub(super) closing: Mutex<()>,
    mappables: Mappables,
    #[cfg(feature = "ablation")]
    pin_mode: config::PinMode,
    #[cfg(feature = "ablation")]
    read_mode: config::ReadMode,
}

impl Registry {
    pub(crate) fn new(
        reclaim: Arc<Reclaim>,
        services: Services,
        flusher_threads: FlusherThreads,
        gate: Gate,
        features: &Features,
        config: &config::Config,
    ) -> Self {
        Self {
            reclaim,
            services,
            _flusher_threads: flusher_threads,
            readahead_bytes_max: config.readahead_bytes_max,
            gate,
            files: Mutex::default(),
            changed: Condvar::new(),
            closing: Mutex::new(()),
            mappables: Mappables::new(features, config.unmap_batch_folios),
            #[cfg(feature = "ablation")]
            pin_mode: config.pin_mode,
            #[cfg(feature = "ablation")]
            read_mode: config.read_mode,
        }
    }

    /// Whether the cache may be used, and can be relied upon.
    pub(crate) fn check(&self) -> Result<()> {
        self.gate.check()?;
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
        let key = backing.identity().map_or_else(|| self.single_key(), Key::Identified);
        let found = self.find(key, |open| self.join(key, open, &backing, options).map(Some))?;
        match found {
            Found::Vacant(busy) => self.open_first(busy, &backing, None, options),
            Found::Handle(handle) => opened(handle, options),
            Found::Unsuitable => unreachable!("it is joined, or refused"),
        }
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
        let open = || Ok::<_, Error>(Arc::new(DiskFile::open(path, &disk_options, features)?));
        let Some(located) = Located::find(path)? else { return self.open_disk(open()?, options) };
        let may_join = located.may_open(options.write)?;
        let key = Key::Identified(located.identity);
        let found = self.find(key, |open| {
            open.admit(options)?;
            let is_enough = may_join && (!options.write || open.inode.is_writable());
            Ok(is_enough.then(|| self.make_handle(key, open, options)))
        })?;
        match found {
            Found::Handle(handle) => opened(handle, options),
            Found::Unsuitable => self.open_disk(open()?, options),
            Found::Vacant(busy) => {
                let disk = open()?;
                if disk.identity() == Some(located.identity) {
                    let backing: Arc<dyn Backing> = Arc::clone(&disk) as _;
                    return self.open_first(busy, &backing, Some(disk), options);
                }
                // Another file has that name now.
                drop(busy);
                self.open_disk(disk, options)
            }
        }
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
        let key = Key::Identified(DiskFile::check_fd(&descriptor, &disk_options)?);
        let mut descriptor = Some(descriptor);
        let found = self.find(key, |open| {
            if options.write && !open.inode.is_writable() {
                return open.admit(options).map(|()| None);
            }
            // Also if it is refused: to close it would drop locks.
            open.spare.extend(descriptor.take());
            open.admit(options)?;
            Ok(Some(self.make_handle(key, open, options)))
        })?;
        if let Found::Handle(handle) = found {
            return opened(handle, options);
        }
        let descriptor = descriptor.expect("it was not needed yet");
        let disk = Arc::new(DiskFile::from_fd(descriptor, &disk_options, features)?);
        match found {
            Found::Vacant(busy) => {
                let backing: Arc<dyn Backing> = Arc::clone(&disk) as _;
                self.open_first(busy, &backing, Some(disk), options)
            }
            _ => self.open_disk(disk, options),
        }
    }

    /// Opens a handle of a file that has just been opened, though it may be open already.
    fn open_disk(self: &Arc<Self>, disk: Arc<DiskFile>, options: &OpenOptions) -> Result<File> {
        let backing: Arc<dyn Backing> = Arc::clone(&disk) as _;
        let key = backing.identity().map_or_else(|| self.single_key(), Key::Identified);
        let found = self.find(key, |open| {
            open.disks.push(Arc::clone(&disk));
            self.join(key, open, &backing, options).map(Some)
        })?;
        match found {
            Found::Vacant(busy) => self.open_first(busy, &backing, Some(disk), options),
            Found::Handle(handle) => opened(handle, options),
            Found::Unsuitable => unreachable!("it is joined, or refused"),
        }
    }

    /// Makes the inode of a file whose slot is the caller's, and its first handle.
    fn open_first(
        self: &Arc<Self>,
        busy: Busy<'_>,
        backing: &Arc<dyn Backing>,
        disk: Option<Arc<DiskFile>>,
        options: &OpenOptions,
    ) -> Result<File> {
        let mut open = Open::new(self.make_inode(backing, options)?);
        open.disks.extend(disk);
        let handle = self.join(busy.key(), &mut open, backing, options)?;
        busy.fill(open);
        opened(handle, options)
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
        let frames = self.frames_for(options, size)?;
        let inode = Inode::new_in_memory(&self.services, frames, name, size);
        let mut open = Open::new(inode.map_err(no_table)?);
        let key = self.single_key();
        let handle = self.make_handle(key, &mut open, options);
        self.files.lock().slots.insert(key, Slot::Open(open));
        Ok(File::new(handle))
    }

    /// The key of a file that cannot be opened twice.
    fn single_key(&self) -> Key {
        let mut files = self.files.lock();
        files.next_single += 1;
        Key::Single(files.next_single)
    }

    /// Looks for the file, and waits for it, and for no other, while somebody makes or releases it.
    /// `join` makes a handle of one that is open, if it is suitable.
    fn find<'r>(
        &'r self,
        key: Key,
        mut join: impl FnMut(&mut Open) -> Result<Option<Arc<Handle>>>,
    ) -> Result<Found<'r>> {
        let mut is_tried = false;
        loop {
            let mut files = self.files.lock();
            match files.slots.get_mut(&key) {
                None => {
                    files.slots.insert(key, Slot::Making);
                    return Ok(Found::Vacant(Busy::new(self, key)));
                }
                Some(Slot::Making | Slot::Releasing) => self.changed.wait(&mut files),
                Some(Slot::Open(open)) if open.is_kept && !is_tried => {
                    // It may be writable by now. If so it is opened anew: others may have changed
                    // it since its last handle was dropped.
                    drop(files);
                    is_tried = true;
                    self.retire_logged(key, false);
                }
                Some(Slot::Open(open)) => {
                    return Ok(join(open)?.map_or(Found::Unsuitable, Found::Handle));
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
            open.inode.allow_writes(backing);
        }
        Ok(self.make_handle(key, open, options))
    }

    fn size_of(&self, options: &OpenOptions, len_bytes: u64) -> Result<FileSize> {
        let bound_bytes = self.reclaim.memory.arena.usage().bound_bytes;
        config::validate_folio_fits(options.folio_bytes, bound_bytes)?;
        let order = config::folio_order(options.folio_bytes)?;
        Ok(FileSize { order, len_bytes, len_max_bytes: options.len_max_bytes(len_bytes)? })
    }

    /// Where the pages of a new file will be.
    fn frames_for(&self, options: &OpenOptions, size: FileSize) -> Result<Frames> {
        if !options.mappable {
            return Ok(Frames::Arena(Arc::clone(&self.services.memory.arena)));
        }
        let region =
            self.mappables.new_region(&self.reclaim, size.len_max_bytes, options.faults)?;
        Ok(Frames::Region(Arc::new(region)))
    }

    fn make_inode(&self, backing: &Arc<dyn Backing>, options: &OpenOptions) -> Result<Arc<Inode>> {
        let size = self.size_of(options, crate::io::len_bytes(&**backing)?)?;
        let frames = self.frames_for(options, size)?;
        Inode::new(&self.services, frames, backing, size).map_err(no_table)
    }

    fn make_handle(
        self: &Arc<Self>,
        key: Key,
        open: &mut Open,
        options: &OpenOptions,
    ) -> Arc<Handle> {
        open.is_kept = false;
        open.handles += 1;
        open.writable += u64::from(options.write);
        open.immutable += u64::from(options.immutable);
        let handle = Arc::new(Handle {
            inode: Arc::clone(&open.inode),
            reclaim: Arc::clone(&self.reclaim),
            registry: Arc::clone(self),
            error_cursor: open.inode.sample_errors(),
            readahead: Readahead::new(self.readahead_bytes_max),
            readable: options.read || options.immutable,
            writable: options.write,
            immutable: options.immutable,
            #[cfg(feature = "ablation")]
            pin_mode: self.pin_mode,
            #[cfg(feature = "ablation")]
            read_mode: self.read_mode,
            membership: Membership::new(self, key, options),
        });
        if let Some(region) = open.inode.frames.region() {
            faults::enlist(region, &handle);
        }
        handle
    }

    /// The files that are open, one after the other: only the one that the caller is at work with
    /// is held. Those that are being made or released are passed over.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Arc<Inode>> {
        let files = move |key| Slot::inode_if(self.files.lock().slots.get(&key)?, |_| true);
        self.keys().into_iter().filter_map(files)
    }

    pub(super) fn keys(&self) -> Vec<Key> {
        self.files.lock().slots.keys().copied().collect()
    }

    /// The file of a slot, if it is as wanted. Waits while it is being released: it may be kept.
    pub(super) fn settled(
        &self,
        key: Key,
        is_wanted: impl FnOnce(&Open) -> bool,
    ) -> Option<Arc<Inode>> {
        let mut files = self.files.lock();
        while let Some(Slot::Releasing) = files.slots.get(&key) {
            self.changed.wait(&mut files);
        }
        Slot::inode_if(files.slots.get(&key)?, is_wanted)
    }

    /// Bytes of the spill that are in use.
    pub(crate) fn spill_bytes(&self) -> u64 {
        let spill = self.services.spill.as_ref();
        spill.map_or(0, |spill| u64::from(spill.used_slots()) * PAGE_BYTES)
    }

    /// What is done instead of direct I/O, file by file.
    pub(crate) fn fallbacks(&self) -> Vec<String> {
        let reason = |inode: &Inode| match inode.direct() {
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
    fn new(inode: Arc<Inode>) -> Self {
        let (disks, spare) = (Vec::new(), Vec::new());
        Self { inode, handles: 0, writable: 0, immutable: 0, is_kept: false, disks, spare }
    }

    /// Whether another handle with `options` goes with those there are.
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
        if options.mappable && self.inode.frames.region().is_none() {
            return Err(ErrorKind::NotMappable { file: file() }.into());
        }
        let (wanted_bytes, open_bytes) = (options.folio_bytes, self.inode.mapping.folio_bytes());
        if wanted_bytes != open_bytes {
            let kind = ErrorKind::FolioSizeConflict { file: file(), wanted_bytes, open_bytes };
            return Err(kind.into());
        }
        self.admit_way(options.direct).map_err(|reason| {
            let (file, wanted) = (file(), options.direct);
            ErrorKind::DirectConflict { file, wanted, reason }.into()
        })
    }

    /// Whether transfers go the way that is wanted, and will.
    fn admit_way(&self, wanted: DirectIo) -> std::result::Result<(), String> {
        match (wanted, self.inode.direct()) {
            (DirectIo::Require, DirectStatus::Buffered { reason }) => {
                Err(format!("transfers go through the page cache: {reason}"))
            }
            (DirectIo::Require, DirectStatus::Custom) => {
                Err("its storage is not a file of the kernel".to_owned())
            }
            (DirectIo::Require, DirectStatus::Direct) => {
                self.disks.iter().try_for_each(|disk| disk.require_direct())
            }
            (DirectIo::Never, DirectStatus::Direct) => {
                Err("transfers go directly to the device".to_owned())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_map_that_begins_and_a_close_see_each_other() {
        let gate = Gate::new(ForkGuard::new(&Features::probe(&[])).unwrap());
        gate.begin_map();
        assert_eq!(gate.close(), Err(1));
        assert!(gate.check().is_ok() && gate.check_maps().is_err());
        gate.end_map();
        gate.close().unwrap();
        // One that comes too late is refused by its own check.
        gate.begin_map();
        assert!(gate.check().is_err());
        gate.end_map();
        gate.reopen();
        assert!(gate.check().is_ok());
    }
}
