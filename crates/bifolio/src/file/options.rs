//! Options for opening a file.

use crate::config;
use crate::error::{Error, Result};
use crate::inode::PageCodec;
use crate::io::{DirectIo, DiskFile, DiskOptions};
use crate::sys::memory;
use crate::sys::probe::Features;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Options of an open: access, folio size, limits.
///
/// ```
/// use bifolio::OpenOptions;
/// let engine_pages = OpenOptions::new().read(true).write(true).folio_bytes(16 << 10);
/// let scratch = OpenOptions::new().write(true).create(true).truncate(true);
/// # let _ = (engine_pages, scratch);
/// ```
#[derive(Clone)]
pub struct OpenOptions {
    pub(crate) read: bool,
    pub(crate) write: bool,
    create: bool,
    create_new: bool,
    mode: Option<u32>,
    pub(crate) exclusive: bool,
    pub(crate) truncate: bool,
    /// Set if no writable handle can be opened in this cache at the same time.
    pub(crate) immutable: bool,
    pub(crate) folio_bytes: u64,
    pub(super) len_max_bytes: Option<u64>,
    pub(crate) direct: DirectIo,
    pub(crate) mappable: bool,
    pub(crate) faults: Option<FaultMode>,
    pub(crate) codec: Option<Arc<dyn PageCodec>>,
    pub(crate) class: Option<String>,
}

/// The threads that serve faults of a mapped file: accesses to pages that are not resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultMode {
    /// Threads of the cache, at the cost of two context switches. Works for every load and store.
    /// An access that the kernel makes for a system call (for example `write(2)` from a map) waits
    /// for its page only where the process may serve such faults
    /// ([`Feature::KernelFaults`](crate::Feature::KernelFaults): as root, or with
    /// `vm.unprivileged_userfaultfd` = 1); elsewhere the call fails with `EFAULT` on a page that is
    /// not resident.
    #[default]
    Threads,
    /// The faulting thread, in a handler of SIGBUS, without a context switch. What it asks of the
    /// program:
    ///
    /// - A system call on a page that is not resident fails with `EFAULT`: read or [populate] the
    ///   page first.
    /// - The handler does I/O, allocates, and takes locks of the cache: touch no map inside an
    ///   allocator, or while the thread holds a lock that such code needs, and no map from a stack
    ///   with less than 64 KiB left (a goroutine, a fiber).
    /// - A handler of SIGBUS that was installed before the first such file is opened still gets
    ///   signals that are not ours; one that is installed later must pass on those that are.
    /// - A fault ends the process if the thread blocks SIGBUS. Creating a map in such a thread is
    ///   refused; using one is not checked.
    ///
    /// [populate]: crate::Map::populate
    InThread,
}

/// Minimum length reserved for a file that may grow: 1 TiB, whose table takes 2 GiB of addresses.
const LEN_MAX_BYTES_DEFAULT: u64 = 1 << 40;
/// Minimum length reserved for a file that can be mapped: 64 GiB, because it takes that much
/// address space. A process has room for about 2000 such files.
const MAPPABLE_LEN_MAX_BYTES_DEFAULT: u64 = 1 << 36;
/// Maximum length of a file: 4 PiB, as far as address space for its table reasonably goes.
const LEN_MAX_BYTES_LIMIT: u64 = 1 << 52;

/// The part of a limited address space that a file takes by default is one of so many.
const ADDRESS_SPACE_DIVISOR: u64 = 16;
/// Bytes of a file for each byte of its table.
const TABLE_DIVISOR: u64 = 512;

/// Fails for a maximum length that a file of `len_bytes` bytes cannot have.
pub(super) fn check_len_max(len_max_bytes: u64, len_bytes: u64) -> Result<()> {
    if (len_bytes..=LEN_MAX_BYTES_LIMIT).contains(&len_max_bytes) {
        return Ok(());
    }
    let problem = format!(
        "{len_max_bytes} bytes is not from the file's length ({len_bytes}) to \
         {LEN_MAX_BYTES_LIMIT} (4 PiB)"
    );
    Err(Error::config("len_max", problem))
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read: true,
            write: false,
            create: false,
            create_new: false,
            mode: None,
            exclusive: false,
            truncate: false,
            immutable: false,
            folio_bytes: config::FOLIO_BYTES_MIN,
            len_max_bytes: None,
            direct: DirectIo::Auto,
            mappable: false,
            faults: None,
            codec: None,
            class: None,
        }
    }
}

impl fmt::Debug for OpenOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("OpenOptions");
        fields.field("read", &self.read).field("write", &self.write);
        fields.field("create", &self.create).field("create_new", &self.create_new);
        fields.field("mode", &self.mode).field("exclusive", &self.exclusive);
        fields.field("truncate", &self.truncate).field("immutable", &self.immutable);
        fields.field("folio_bytes", &self.folio_bytes).field("len_max", &self.len_max_bytes);
        fields.field("direct", &self.direct).field("mappable", &self.mappable);
        fields.field("faults", &self.faults).field("has_codec", &self.codec.is_some());
        fields.field("class", &self.class).finish()
    }
}

impl OpenOptions {
    /// Creates options for read access to an existing file, with folios of 4 KiB.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows reading and pinning. On by default.
    pub fn read(mut self, read: bool) -> Self {
        self.read = read;
        self
    }

    /// Allows writing, `pin_mut` and `set_len`. The file itself is opened for reading too, because
    /// a write of part of a page reads the rest.
    pub fn write(mut self, write: bool) -> Self {
        self.write = write;
        self
    }

    /// Creates the file if it does not exist. Needs `write`. The name is durable once its directory
    /// is synced ([`Cache::sync_directory`](crate::Cache::sync_directory)).
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Creates the file, and fails with `EEXIST` if the path exists, even as a dangling symbolic
    /// link. Needs `write`.
    pub fn create_new(mut self, create_new: bool) -> Self {
        self.create_new = create_new;
        self
    }

    /// Permission bits of a file that this open creates, before the process's umask. 0o666 by
    /// default.
    pub fn mode(mut self, mode: u32) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Locks the file against other programs and other caches for as long as it is open in this
    /// cache: a write lock on the whole file (`F_OFD_SETLK`), which ends with its last handle.
    /// Needs `write`, and a file of the kernel.
    ///
    /// The open fails with [`ErrorKind::Locked`](crate::ErrorKind::Locked) if there is a lock
    /// already. The lock is advisory: programs that take none are not kept out.
    pub fn exclusive(mut self, exclusive: bool) -> Self {
        self.exclusive = exclusive;
        self
    }

    /// Truncates the file to length 0, for all its handles in this cache. Needs `write`.
    pub fn truncate(mut self, truncate: bool) -> Self {
        self.truncate = truncate;
        self
    }

    /// Sets the folio size, bytes: a power of two from 4 KiB (the default) to 2 MiB, the same for
    /// all handles of a file. It is at most a chunk of the cache: 2 MiB if that was built with a
    /// bound of 32 MiB or more, otherwise a 32nd of the bound, or 64 KiB if that is more
    /// ([`CacheBuilder::memory`](crate::CacheBuilder::memory)). Others are refused
    /// ([`ErrorKind::Config`](crate::ErrorKind::Config)).
    pub fn folio_bytes(mut self, bytes: u64) -> Self {
        self.folio_bytes = bytes;
        self
    }

    /// The most the file may grow to while it is open, bytes: address space for its table (one
    /// 512th of this) is reserved at the first open, and for a file that can be
    /// [mapped](Self::mappable) for all of its bytes: a process has 128 TiB. By default 1 TiB, or
    /// 64 GiB if it can be mapped, or four times the length, whichever is more, unless the file is
    /// immutable; where the process has a limit on its address space (`RLIMIT_AS`), at most a 16th
    /// of that. Where the system does not overcommit memory (`vm.overcommit_memory` is 2) address
    /// space counts as memory: give the length that the file will have. A later open that asks for
    /// more is refused ([`ErrorKind::OptionConflict`](crate::ErrorKind::OptionConflict)), and one
    /// that asks for less changes nothing; see [`File::raise_len_max`](crate::File::raise_len_max).
    pub fn len_max(mut self, bytes: u64) -> Self {
        self.len_max_bytes = Some(bytes);
        self
    }

    /// Selects whether transfers bypass the kernel's page cache. By default they do where the file
    /// system allows it; [`Stats::fallbacks`](crate::Stats::fallbacks) lists the others. All
    /// handles of a file share one choice: an open that asks for the other one fails
    /// ([`ErrorKind::OptionConflict`](crate::ErrorKind::OptionConflict)).
    pub fn direct(mut self, direct: DirectIo) -> Self {
        self.direct = direct;
        self
    }

    /// Makes each page of the file into something else on storage, and checks it when it is read: a
    /// checksum or encryption. All handles of a file have the same codec, by its address. A file
    /// with a codec cannot be mapped, and its length is a multiple of the folio size: writes and
    /// `set_len` that would make it another are refused
    /// ([`ErrorKind::Config`](crate::ErrorKind::Config)).
    ///
    /// Reads and writes of many pages stay transfers of many pages, direct ones, by io_uring. A
    /// page is written from a copy, for which a 32nd of the bound is reserved when the first file
    /// with a codec is opened, at most 8 MiB.
    pub fn codec(mut self, codec: Arc<dyn PageCodec>) -> Self {
        self.codec = Some(codec);
        self
    }

    /// Opens the file in a [class](crate::Class) of the cache, by its name: its pages count there.
    /// All handles of a file are in the class that the first one was opened in; an open that names
    /// another fails ([`ErrorKind::OptionConflict`](crate::ErrorKind::OptionConflict)), and one
    /// that names none joins it. A name that [`Cache::class`](crate::Cache::class) has not made is
    /// refused ([`ErrorKind::Config`](crate::ErrorKind::Config)).
    pub fn class(mut self, name: impl Into<String>) -> Self {
        self.class = Some(name.into());
        self
    }

    /// Fails, with the name of the file, for options that are wrong or contradict each other.
    pub(crate) fn validate(&self, file: impl Fn() -> String) -> Result<()> {
        config::folio_order(self.folio_bytes).map_err(|error| error.in_file(file()))?;
        let has_large_folios = self.folio_bytes > config::FOLIO_BYTES_MIN;
        let problem = match self {
            Self { mappable: true, .. } if has_large_folios => "mappable needs folios of 4 KiB",
            Self { mappable: true, codec: Some(_), .. } => "a file with a codec cannot be mapped",
            Self { immutable: true, read: false, .. } => "an immutable file is opened for reading",
            Self { read: false, write: false, .. } => "neither read nor write",
            Self { immutable: true, write: true, .. } => "an immutable file cannot be written",
            Self { create: true, write: false, .. } => "create needs write",
            Self { create_new: true, write: false, .. } => "create_new needs write",
            Self { exclusive: true, write: false, .. } => "exclusive needs write",
            Self { truncate: true, write: false, .. } => "truncate needs write",
            _ => return Ok(()),
        };
        Err(Error::config("open options", problem).in_file(file()))
    }

    /// Returns the length for which the table of a file of `len_bytes` bytes is reserved.
    pub(crate) fn len_max_bytes(&self, len_bytes: u64) -> Result<u64> {
        let chosen = self.len_max_bytes.unwrap_or_else(|| {
            let wanted = self.len_max_bytes_wanted(len_bytes);
            let part_bytes = memory::address_space_bytes_max() / ADDRESS_SPACE_DIVISOR;
            let bytes_for_each = if self.mappable { 1 } else { TABLE_DIVISOR };
            let room_bytes = part_bytes.saturating_mul(bytes_for_each);
            wanted.min(room_bytes).min(LEN_MAX_BYTES_LIMIT).max(len_bytes)
        });
        check_len_max(chosen, len_bytes)?;
        Ok(chosen)
    }

    /// Returns the maximum that a file of this length gets if there is address space for it.
    fn len_max_bytes_wanted(&self, len_bytes: u64) -> u64 {
        if self.immutable {
            return len_bytes;
        }
        // Also for a reader: a writer may come later.
        let least =
            if self.mappable { MAPPABLE_LEN_MAX_BYTES_DEFAULT } else { LEN_MAX_BYTES_DEFAULT };
        len_bytes.saturating_mul(4).max(least)
    }

    /// Returns `true` if a file that was opened with a maximum of `len_max_bytes` has what these
    /// options ask for.
    pub(crate) fn fits_len_max(&self, len_bytes: u64, len_max_bytes: u64) -> bool {
        // The limit of the address space is looked at, with a call of the kernel, only if it can
        // make a difference.
        self.len_max_bytes.is_none() && self.len_max_bytes_wanted(len_bytes) <= len_max_bytes
            || self.len_max_bytes(len_bytes).is_ok_and(|wanted_bytes| wanted_bytes <= len_max_bytes)
    }

    pub(crate) fn disk_options(&self) -> DiskOptions {
        DiskOptions {
            read: true,
            write: self.write,
            create: self.create,
            create_new: self.create_new,
            mode: self.mode,
            // Cutting goes through the inode: the file may be open.
            truncate: false,
            direct: self.direct,
        }
    }
}

impl DiskFile {
    /// Opens the file at `path` for a [`Backing`](crate::backing::Backing) of your own, with every
    /// feature that this system has. Of the options, those of access (`read`, `write`), of creation
    /// (`create`, `create_new`, `mode`, `truncate`) and `direct` count.
    ///
    /// Never blocks, whatever `path` names, and changes nothing unless it names a regular file.
    ///
    /// # Errors
    /// Those of [`Cache::open`](crate::Cache::open) that are about the path.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// use bifolio::{Cache, OpenOptions, backing::DiskFile};
    /// let disk = DiskFile::open(&path, &OpenOptions::new().write(true))?;
    /// let cache = Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open_backing(std::sync::Arc::new(disk), &OpenOptions::new())?;
    /// assert_eq!(file.len(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        Self::open_or_keep(path, options, &mut Vec::new())
    }

    /// Opens the file at `path`, as [`Self::open`] does. If that fails halfway, for example because
    /// the process may have no further descriptor, adds what was opened to `unused` instead of
    /// closing it: the close of any descriptor of a file drops all POSIX locks (`fcntl`) that the
    /// process has on it, such as those of a library.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// use bifolio::{OpenOptions, backing::DiskFile};
    /// let mut unused = Vec::new();
    /// let disk = DiskFile::open_or_keep(&path, &OpenOptions::new(), &mut unused)?;
    /// assert!(unused.is_empty());
    /// # drop(disk);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_or_keep(
        path: impl AsRef<Path>,
        options: &OpenOptions,
        unused: &mut Vec<OwnedFd>,
    ) -> Result<Self> {
        let OpenOptions { read, truncate, .. } = *options;
        let options = DiskOptions { read, truncate, ..options.disk_options() };
        Self::open_keeping(path.as_ref(), &options, Features::of_system(), unused)
    }
}
