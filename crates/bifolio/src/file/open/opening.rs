//! Opens: from a path, a descriptor or a backing to a handle; what the handles of one file require
//! of each other, and of the file.
//!
//! ```text
//!   open_path --> located by O_PATH --.     open here? another handle; no new descriptor except
//!   open_fd ----> identified ---------+-->    for the first writable handle
//!   open -------> identity -----------'     else take the slot, create an inode and a handle
//! ```

use super::closing::Membership;
use super::slots::{Busy, Found};
use super::{Key, Open, Registry};
use crate::config;
use crate::error::{Error, ErrorKind, Result};
use crate::file::readahead::Readahead;
use crate::file::{File, Handle, ImmutableFile, OpenOptions};
use crate::inode::{FileSize, Inode};
use crate::io::{DirectBacking, DirectIo, DirectStatus, DiskFile, FileIdentity, Located};
use crate::maps::faults;
use crate::memory::PageSpace;
use crate::sync::Ordering;
use crate::sys::probe::Features;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Another handle of a file, or the reason for refusing it. `None`: the file is open, but must be
/// opened anew for these options.
type Joined = Result<Option<Arc<Handle>>>;

impl Registry {
    pub(crate) fn open(
        self: &Arc<Self>,
        backing: Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate()?;
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
        options.validate()?;
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

    pub(crate) fn open_immutable(
        self: &Arc<Self>,
        path: &Path,
        options: &OpenOptions,
        features: &Features,
    ) -> Result<ImmutableFile> {
        let options = options.clone().immutable();
        Ok(ImmutableFile { file: self.open_path(path, &options, features)? })
    }

    /// Opens a handle of the regular file behind `descriptor`.
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
        let mut open = Open::new(self.make_inode(backing, options)?);
        open.disks.extend(disk);
        match self.join(busy.key(), &mut open, backing, options) {
            Ok(handle) => {
                busy.fill(open);
                opened(handle, options)
            }
            Err(error) => {
                // Before the slot becomes free.
                self.drop_pages(&open.inode);
                self.free_unused(open);
                Err(error)
            }
        }
    }

    /// Opens the first handle of a new memory file.
    pub(crate) fn open_in_memory(
        self: &Arc<Self>,
        name: &str,
        options: &OpenOptions,
    ) -> Result<File> {
        self.check()?;
        options.validate()?;
        let size = self.size_of(options, 0)?;
        let page_space = self.page_space_for(options, size)?;
        let inode = Inode::new_in_memory(&self.services, page_space, name, size);
        let mut open = Open::new(inode.map_err(no_table)?);
        let key = self.single_key();
        let handle = self.make_handle(key, &mut open, options)?;
        self.files.insert_new(key, open);
        Ok(File::new(handle))
    }

    /// Returns a new key for a file that cannot be opened twice.
    fn single_key(&self) -> Key {
        // Relaxed: only the uniqueness of the number matters.
        Key::Single(self.next_single.fetch_add(1, Ordering::Relaxed))
    }

    /// Looks up the file. Waits while another thread creates or releases this file, but not for
    /// other files. `join` makes another handle of an open one, if the options allow.
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
                    // other programs may have changed it since its last handle was dropped. If it
                    // still cannot be written, the error was reported when the file was kept, and
                    // syncs of the new handle report it again.
                    is_tried = true;
                    let _ = self.retire(key, false);
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
        config::validate_folio_fits(options.folio_bytes, chunk_bytes)?;
        let order = config::folio_order(options.folio_bytes)?;
        Ok(FileSize { order, len_bytes, len_max_bytes: options.len_max_bytes(len_bytes)? })
    }

    fn page_space_for(&self, options: &OpenOptions, size: FileSize) -> Result<PageSpace> {
        if !options.mappable {
            return Ok(PageSpace::Arena(Arc::clone(&self.services.memory.arena)));
        }
        let region = self.map_resources.new_region(&self.reclaim, size.len_max_bytes)?;
        Ok(PageSpace::Region(Arc::new(region)))
    }

    fn make_inode(
        &self,
        backing: &Arc<dyn DirectBacking>,
        options: &OpenOptions,
    ) -> Result<Arc<Inode>> {
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
            readable: options.read,
            writable: options.write,
            read_server: OnceLock::new(),
            membership: Membership::new(self, key, options),
        });
        faults::enlist(&handle);
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

pub(in crate::file) fn no_table(source: std::io::Error) -> Error {
    let purpose = "a file's table (OpenOptions::len_max)";
    Error::memory(purpose, source)
}

impl Open {
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
        if options.mappable && !self.inode.page_space.is_in_place() {
            return Err(Error::not_mappable(file()));
        }
        let (wanted, open) = (options.folio_bytes, self.inode.mapping.folio_bytes());
        if wanted != open {
            let text = format!("with folios of {wanted} bytes: it has {open}");
            return Err(Error::conflict(file(), text).numbered(libc::EINVAL));
        }
        options.check_decided(self.inode.len_max_bytes(), file)?;
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
            return Err(Error::config("open options", problem));
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
        let reason = match (wanted, self.inode.store.direct()) {
            (DirectIo::Require, DirectStatus::Buffered { reason }) => {
                format!("transfers go through the page cache: {reason}")
            }
            (DirectIo::Require, DirectStatus::Custom) => {
                "its storage is a user-supplied backing".to_owned()
            }
            (DirectIo::Require, DirectStatus::Direct) => {
                // Of two backings of the file, the one used for writes may have fallen back and the
                // other not.
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
        let text = format!("with {wanted:?}: it is open in this cache, and {reason}");
        Err(Error::conflict(self.inode.name(), text))
    }
}
