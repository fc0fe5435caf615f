//! Which files are open: one inode for each, shared by all handles; born at the first open, buried
//! after the last.
//!
//! An inode that cannot be buried, because its dirty pages cannot be written, stays: nothing is
//! lost, the next open of the file finds it, `Cache::close` tries again and reports.
//!
//! Invariant REGISTRY-1: an inode is dropped from here only when it has no handle (so nothing is
//! inserted any more), its table is empty, and reclaim has been waited for: then nobody can find
//! its address in a folio (`Inode::owner`).

use super::handle::Handle;
use super::mappables::Mappables;
use super::readahead::Readahead;
use super::{File, OpenOptions, faults};
use crate::config;
use crate::error::{ErrorKind, Result};
use crate::frames::Frames;
use crate::io::{Backing, DirectStatus, FileIdentity};
use crate::mapping::PAGE_BYTES;
use crate::reclaim::Reclaim;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::sys::fork::ForkGuard;
use crate::sys::probe::Features;
use crate::writeback::{FileSize, Inode, Services};
use std::collections::{HashMap, hash_map};
use std::sync::Arc;

/// Whether the cache may be used: not closed, not in a forked child.
#[derive(Debug)]
pub(crate) struct Gate {
    closed: AtomicBool,
    fork_guard: ForkGuard,
}

impl Gate {
    pub(crate) fn new(fork_guard: ForkGuard) -> Self {
        Self { closed: AtomicBool::new(false), fork_guard }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.fork_guard.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        // Acquire: pairs with the Release in `close`: what it flushed is flushed.
        if self.closed.load(Ordering::Acquire) { Err(ErrorKind::Closed.into()) } else { Ok(()) }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.fork_guard.is_forked()
    }

    fn close(&self) {
        // Release: pairs with the Acquire in `check`.
        self.closed.store(true, Ordering::Release);
    }
}

/// A file and how many handles of which kind it has.
#[derive(Debug)]
struct Open {
    inode: Arc<Inode>,
    handles: u64,
    writable: u64,
    immutable: u64,
}

/// What the registry finds a file by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Identified(FileIdentity),
    /// A backing that cannot be opened twice.
    Single(u64),
}

#[derive(Debug, Default)]
struct Files {
    open: HashMap<Key, Open>,
    next_single: u64,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(super) reclaim: Arc<Reclaim>,
    services: Services,
    readahead_bytes_max: u64,
    pub(super) gate: Gate,
    files: Mutex<Files>,
    mappables: Mappables,
    /// Maps that are in use.
    pub(crate) maps: AtomicU64,
    #[cfg(feature = "ablation")]
    pin_mode: config::PinMode,
    #[cfg(feature = "ablation")]
    read_mode: config::ReadMode,
}

impl Registry {
    pub(crate) fn new(
        reclaim: Arc<Reclaim>,
        services: Services,
        gate: Gate,
        features: &Features,
        config: &config::Config,
    ) -> Self {
        Self {
            reclaim,
            services,
            readahead_bytes_max: config.readahead_bytes_max,
            gate,
            files: Mutex::default(),
            mappables: Mappables::new(features, config.unmap_batch_folios),
            maps: AtomicU64::new(0),
            #[cfg(feature = "ablation")]
            pin_mode: config.pin_mode,
            #[cfg(feature = "ablation")]
            read_mode: config.read_mode,
        }
    }

    /// Whether the cache may be used.
    pub(crate) fn check(&self) -> Result<()> {
        self.gate.check()
    }

    /// Opens a handle of the file that `backing` is.
    pub(crate) fn open(
        self: &Arc<Self>,
        backing: Arc<dyn Backing>,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate()?;
        let mut files = self.files.lock();
        let key = backing.identity().map_or_else(|| files.single_key(), Key::Identified);
        let open = match files.open.entry(key) {
            hash_map::Entry::Occupied(known) => known.into_mut(),
            hash_map::Entry::Vacant(new) => {
                new.insert(Open::new(self.make_inode(&backing, options)?))
            }
        };
        open.admit(options)?;
        if options.write {
            open.inode.allow_writes(&backing);
        }
        let handle = self.make_handle(key, open, options);
        drop(files);
        let file = File::new(handle);
        if options.truncate {
            file.set_len(0)?;
        }
        Ok(file)
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
        let inode = Arc::new(inode.map_err(no_table)?);
        let mut files = self.files.lock();
        let key = files.single_key();
        let open = files.open.entry(key).or_insert(Open::new(inode));
        let handle = self.make_handle(key, open, options);
        drop(files);
        Ok(File::new(handle))
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
        let inode = Inode::new(&self.services, frames, backing, size);
        let inode = Arc::new(inode.map_err(no_table)?);
        self.services.flusher.enlist(&inode);
        Ok(inode)
    }

    fn make_handle(
        self: &Arc<Self>,
        key: Key,
        open: &mut Open,
        options: &OpenOptions,
    ) -> Arc<Handle> {
        open.handles += 1;
        open.writable += u64::from(options.write);
        open.immutable += u64::from(options.immutable);
        let handle = Arc::new(Handle {
            key,
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
        });
        if let Some(region) = open.inode.frames.region() {
            faults::enlist(region, &handle);
        }
        handle
    }

    /// A handle is gone. After the last one the file is written out and buried.
    pub(super) fn release(&self, handle: &Handle) {
        if self.gate.is_forked() {
            return;
        }
        let last = {
            let mut files = self.files.lock();
            let Some(open) = files.open.get_mut(&handle.key) else { return };
            open.handles -= 1;
            open.writable -= u64::from(handle.writable);
            open.immutable -= u64::from(handle.immutable);
            open.handles == 0
        };
        if last {
            if !handle.inode.is_memory_file() {
                handle.inode.write_out_all();
            }
            self.bury(handle.key);
        }
    }

    /// Forgets a file that has no handles, unless it has dirty pages or was opened again.
    fn bury(&self, key: Key) {
        let mut files = self.files.lock();
        let Some(open) = files.open.get(&key) else { return };
        if open.handles > 0 {
            return;
        }
        if open.inode.is_dirty() {
            let name = open.inode.name();
            log::error!("{name}: closed, but dirty pages could not be written; they are kept");
            return;
        }
        let inode = Arc::clone(&open.inode);
        // Under the registry's lock: nobody opens the file meanwhile.
        inode.remove_folios_from(0);
        self.reclaim.wait_for_turn();
        if let Some(region) = inode.frames.region() {
            faults::forget(region);
        }
        files.open.remove(&key);
    }

    /// The inodes of all files.
    pub(super) fn inodes(&self) -> Vec<(Key, Arc<Inode>)> {
        let files = self.files.lock();
        files.open.iter().map(|(key, open)| (*key, Arc::clone(&open.inode))).collect()
    }

    /// Writes everything out and makes it durable; then no call works any more. On an error
    /// nothing is closed and nothing lost.
    pub(crate) fn close(&self) -> Result<()> {
        self.check()?;
        // Acquire: pairs with the Release in `MapGuard::drop`: what was stored through a map that
        // is gone is found.
        let maps = self.maps.load(Ordering::Acquire);
        if maps > 0 {
            return Err(ErrorKind::MapsAlive { maps }.into());
        }
        for (_, inode) in self.inodes() {
            inode.sync(&inode.sample_errors(), None, false)?;
        }
        self.gate.close();
        // What was written between the sync and the closing of the gate.
        for (key, inode) in self.inodes() {
            inode.sync(&inode.sample_errors(), None, false)?;
            if inode.is_memory_file() {
                inode.remove_folios_from(0);
            } else {
                // A write that was under way may end only now: it goes home with the last handle.
                inode.remove_clean_folios();
            }
            self.bury(key);
        }
        Ok(())
    }

    /// Bytes of the spill that are in use.
    pub(crate) fn spill_bytes(&self) -> u64 {
        let spill = self.services.spill.as_ref();
        spill.map_or(0, |spill| u64::from(spill.used_slots()) * PAGE_BYTES)
    }

    /// What is done instead of direct I/O, file by file.
    pub(crate) fn fallbacks(&self) -> Vec<String> {
        let inodes = self.inodes();
        let reason = |inode: &Inode| match inode.direct() {
            DirectStatus::Buffered { reason } => {
                Some(format!("direct-io of {}: buffered: {reason}", inode.name()))
            }
            _ => None,
        };
        inodes.iter().filter_map(|(_, inode)| reason(inode)).collect()
    }
}

impl Files {
    /// The key of a file that cannot be opened twice.
    fn single_key(&mut self) -> Key {
        self.next_single += 1;
        Key::Single(self.next_single)
    }
}

fn no_table(source: std::io::Error) -> crate::error::Error {
    let purpose = "a file's table (OpenOptions::len_max)";
    ErrorKind::Memory { purpose, source }.into()
}

impl Open {
    fn new(inode: Arc<Inode>) -> Self {
        Self { inode, handles: 0, writable: 0, immutable: 0 }
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
        Ok(())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if self.gate.is_forked() {
            // The memory is not ours; leave it, and the parent's files, alone.
            std::mem::take(&mut self.files.lock().open).into_values().for_each(std::mem::forget);
            return;
        }
        for (_, inode) in self.inodes() {
            // No handle is left (each keeps the registry), so no memory file: what is here could
            // not be written.
            inode.write_out_all();
            if inode.is_dirty() {
                log::error!(
                    "{}: the cache ends with dirty pages that cannot be written",
                    inode.name()
                );
            }
            inode.remove_folios_from(0);
        }
        self.reclaim.wait_for_turn();
        if let Some(spill) = &self.services.spill {
            // Its pages are nobody's now. Who cannot cut it finds it longer than it need be.
            let _ = spill.cut_to_header();
        }
    }
}
