//! Opens: an inode for the first handle of a file, and handles.

use super::membership::OpenMembership;
use super::open_file::Open;
use super::slots::{Busy, Found, Retire};
use super::{FileKey, Registry, no_table};
use crate::config;
use crate::error::{Error, Result};
use crate::file::handle::Attached;
use crate::file::readahead::Readahead;
use crate::file::{File, Handle, OpenOptions};
use crate::inode::{Codec, FileShape, Inode, MappedPages, SealingRoom};
use crate::io::{DirectBacking, DiskFile, FileIdentity, Located};
use crate::sync::Ordering;
use crate::sys::probe::Features;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The outcome of a look at an open file.
enum Joined {
    Handle(Arc<Handle>),
    /// This is its first writable handle: it needs a backing that accepts writes.
    WantsWritable,
}

/// The outcome of a look at a slot that has a file.
enum Met<R> {
    Open(Result<R>),
    /// It has no handle, and could not be made durable.
    Kept,
}

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

    /// Opens a handle of the file that the caller's descriptor is of. A descriptor that is refused
    /// stays open with the file, if that is open here (REGISTRY-2).
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
        let key = FileKey::Identified(identity);
        let found = self.find(key, |open| {
            let admitted = self.admit(open, options);
            if admitted.is_ok() && options.write && !open.inode.store.is_writable() {
                return Ok(Joined::WantsWritable);
            }
            open.spare.append(&mut unused);
            admitted.and_then(|()| self.make_handle(key, open, options)).map(Joined::Handle)
        })?;
        let busy = match found {
            Found::Open(Joined::Handle(handle)) => return opened(handle, options),
            Found::Open(Joined::WantsWritable) => None,
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
        self.files.look(FileKey::Identified(identity), |open| open.spare.append(unused));
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
        let key = backing.identity().map_or_else(|| self.single_key(), FileKey::Identified);
        let found = self.find(key, |open| {
            open.disks.extend(disk.clone());
            self.join(key, open, backing, options)
        })?;
        match found {
            Found::Vacant(busy) => self.open_first(busy, backing, disk, options),
            Found::Open(handle) => opened(handle, options),
        }
    }

    /// Creates the inode of a file and its first handle. The caller has taken the slot.
    fn open_first(
        self: &Arc<Self>,
        busy: Busy<'_, FileKey, Open>,
        backing: &Arc<dyn DirectBacking>,
        disk: Option<Arc<DiskFile>>,
        options: &OpenOptions,
    ) -> Result<File> {
        let mut open = Open::new(self.inode_for(busy.key, backing, options)?);
        open.disks.extend(disk);
        match self.join(busy.key, &mut open, backing, options) {
            Ok(handle) => {
                let key = busy.key;
                busy.fill(open);
                self.note_open(key);
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

    /// Creates a memory file, and its first handle.
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
        let shape = self.shape_of(options, 0).map_err(|error| error.in_file(name))?;
        let mapped = self.mapped_for(options, shape)?;
        let inode = Inode::new_in_memory(&self.services, mapped, name, shape);
        let mut open = Open::new(inode.map_err(no_table)?);
        let key = self.single_key();
        let handle = self.make_handle(key, &mut open, options)?;
        self.files.insert_new(key, open);
        Ok(File::new(handle))
    }

    fn single_key(&self) -> FileKey {
        // Relaxed: only the uniqueness of the number matters.
        FileKey::Single(self.next_single.fetch_add(1, Ordering::Relaxed))
    }

    /// Looks up the file, and waits while another thread creates or releases it. `join` makes
    /// another handle of an open one, if the options allow.
    fn find<R>(
        &self,
        key: FileKey,
        mut join: impl FnMut(&mut Open) -> Result<R>,
    ) -> Result<Found<'_, FileKey, Open, R>> {
        let mut is_tried = false;
        loop {
            let found = self.files.find(key, |open| {
                if open.is_kept && !is_tried { Met::Kept } else { Met::Open(join(open)) }
            });
            match found {
                Found::Vacant(busy) => return Ok(Found::Vacant(busy)),
                Found::Open(Met::Open(joined)) => return joined.map(Found::Open),
                Found::Open(Met::Kept) => {
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
        key: FileKey,
        open: &mut Open,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<Arc<Handle>> {
        self.admit(open, options)?;
        if options.write {
            open.inode.store.allow_writes(backing);
        }
        self.make_handle(key, open, options)
    }

    fn shape_of(&self, options: &OpenOptions, len_bytes: u64) -> Result<FileShape> {
        let chunk_bytes = self.reclaim.memory.arena.chunk_bytes();
        let order = config::folio_order_in(chunk_bytes, options.folio_bytes)?;
        let class = self.class_of(options)?.unwrap_or_default();
        let len_max_bytes = options.len_max_bytes(len_bytes)?;
        Ok(FileShape { order, class, len_bytes, len_max_bytes })
    }

    /// Creates the inode of a file that has none here, with its table, the memory for maps, and its
    /// codec.
    pub(super) fn make_inode(
        &self,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<Arc<Inode>> {
        let len_bytes = crate::io::len_bytes(&**backing)?;
        let shape = self.shape_of(options, len_bytes);
        let shape = shape.map_err(|error| error.in_file(backing.describe()))?;
        let mapped = self.mapped_for(options, shape)?;
        let codec = self.codec_for(options).map_err(|error| error.in_file(backing.describe()))?;
        if codec.is_some() && !len_bytes.is_multiple_of(options.folio_bytes) {
            let text = format!(
                "with a codec: its length, {len_bytes}, is no multiple of {}",
                options.folio_bytes
            );
            return Err(Error::conflict(backing.describe(), text).numbered(libc::EINVAL));
        }
        let inode = Inode::new(&self.services, mapped, backing, shape).map_err(no_table)?;
        if let Some(codec) = codec {
            let set = inode.codec.set(codec);
            debug_assert!(set.is_ok(), "the inode is new");
        }
        Ok(inode)
    }

    /// Creates the memory for the pages of a file that can be mapped; `None` for other files.
    fn mapped_for(
        &self,
        options: &OpenOptions,
        shape: FileShape,
    ) -> Result<Option<Arc<dyn MappedPages>>> {
        if !options.mappable {
            return Ok(None);
        }
        let absent = || Error::cannot_map("", "built without the feature `maps`");
        let mapper = self.host.mapper.as_ref().ok_or_else(absent)?;
        mapper.new_pages(&self.reclaim, shape.len_max_bytes, options.faults).map(Some)
    }

    /// Returns the codec that the options want, with the memory for sealed pages, which all files
    /// share and the first one charges.
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

    /// Makes a handle of an open file, already admitted, and counts it. The caller holds the file's
    /// slot.
    pub(super) fn make_handle(
        self: &Arc<Self>,
        key: FileKey,
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
            host: Arc::clone(&self.host),
            error_cursor: open.inode.errors.sample(),
            readahead: Readahead::new(self.window_bytes_max(open), Arc::clone(&open.fronts)),
            readable: options.read,
            writable: options.write,
            write_hints: Default::default(),
            call_server: Attached::default(),
            membership: Box::new(OpenMembership::new(self, key, options)),
        });
        if let Some(mapper) = handle.mapper() {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::io::DirectIo;
    use crate::page::PAGE_BYTES;
    use bifolio_testing::skip;

    /// A guarantee to one handle holds for the file: no transfer falls back from there on.
    #[test]
    fn direct_transfers_that_a_later_open_requires_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; PAGE_BYTES as usize]).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let _first = cache.open(&path, &OpenOptions::new()).unwrap();
        let registry = cache.registry();
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
}
