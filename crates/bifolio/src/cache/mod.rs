//! The cache: building, opening files, statistics, resizing, closing.
//!
//! Files keep alive what they need: dropping the last `Cache` does not affect those that are open.

mod builder;
mod class;
mod pressure;

pub use builder::CacheBuilder;
pub use class::{Class, ClassStats, Reserved};

use crate::config;
use crate::dirt::WriteGate;
use crate::error::{Error, Result, io_error};
use crate::file::{File, GatedFile, ImmutableFile, OpenOptions, Registry};
use crate::io::{Backing, Guarded};
use crate::page::PAGE_BYTES;
use crate::reclaim::{Evicted, ReclaimThread};
use crate::share::FramePlace;
use crate::stats::{FileStats, MemoryStats, Stats, StorageStats, WriteStats};
use crate::sync::Ordering;
use crate::sys::file;
use crate::sys::probe::{FeatureReport, Features};
use crate::warm::{self, HotRestore, SavedHot};
use pressure::PressureWatch;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

/// A page cache with a hard bound on memory. Cheap to clone; all clones are one cache.
///
/// Its calls need at most 48 KiB of stack (debug builds: 96 KiB). Its descriptors are close-on-exec
/// and never standard streams (0, 1, 2). Core dumps leave out its memory.
///
/// ```
/// use bifolio::Cache;
/// let cache = Cache::builder().memory(64 << 20).build()?;
/// assert!(cache.stats().memory.used_bytes <= 64 << 20);
/// cache.set_memory(32 << 20)?;
/// cache.close()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Cache {
    inner: Arc<CacheParts>,
}

/// A reference to a cache that does not keep it open ([`Cache::downgrade`]).
#[derive(Clone, Debug)]
pub struct WeakCache {
    inner: Weak<CacheParts>,
}

impl WeakCache {
    /// Returns the cache, unless its last [`Cache`] was dropped. The result keeps it open: drop it
    /// soon.
    pub fn upgrade(&self) -> Option<Cache> {
        Some(Cache { inner: self.inner.upgrade()? })
    }
}

#[derive(Debug)]
struct CacheParts {
    registry: Arc<Registry>,
    memory_bytes_max: u64,
    features: Features,
    pressure: Option<PressureWatch>,
    /// Ends with the last `Cache`; files that remain reclaim memory themselves.
    _background: ReclaimThread,
}

impl Drop for CacheParts {
    fn drop(&mut self) {
        self.registry.note_no_cache();
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("Cache");
        if self.inner.registry.host.cache_state.is_forked() {
            return fields.finish_non_exhaustive();
        }
        let usage = self.inner.registry.reclaim.memory.arena.usage();
        fields.field("bound_bytes", &usage.bound_bytes).field("used_bytes", &usage.used_bytes);
        fields.finish_non_exhaustive()
    }
}

impl Cache {
    /// Opens the regular file at `path`.
    ///
    /// A file that is already open in this cache (same device and inode) is shared: one mapping,
    /// one length, one copy of its pages. Blocks for the file system, and while another thread
    /// opens or closes the same file.
    ///
    /// # What an open file costs
    /// About 2 KiB of memory outside the bound, and a few hundred bytes for each further handle; in
    /// the kernel about as much for one or two descriptors, and a few KiB of page tables unless
    /// [`OpenOptions::len_max`] is below 1 GiB. Inside the bound a file uses only what is resident.
    /// No call on a file takes longer because many are open. Without free descriptors
    /// (`RLIMIT_NOFILE`) the open fails with `EMFILE`.
    ///
    /// # Locks of the process (`fcntl`)
    /// A process that closes a descriptor of a file loses all its POSIX locks on that file. While a
    /// file is open in the cache, the cache closes none of its descriptors. The close or drop of
    /// the last handle closes them before it returns (later for a file that could not be made
    /// durable). An open that fails may close one of a file that was not open in the cache.
    ///
    /// # Signals
    /// With a limit on file sizes (`RLIMIT_FSIZE`) the kernel kills the process with `SIGXFSZ` when
    /// the cache writes past it, possibly long after `write_at`. Programs with such a limit should
    /// ignore that signal; the write-out then fails with `EFBIG`.
    ///
    /// # Errors
    /// The file system's refusal; anything but a regular file; options that contradict each other,
    /// or those of other handles: immutable and writable, another folio size, another
    /// [`DirectIo`](crate::DirectIo).
    pub fn open(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        self.inner.registry.open_path(path.as_ref(), options, &self.inner.features)
    }

    /// Opens a file that is only read: pins lend its bytes as `&[u8]`. While the handle exists, no
    /// writable handle of the file can be opened in this cache. Blocks like [`Cache::open`].
    ///
    /// # Errors
    /// Every error of [`Cache::open`]; options with `write` or without `read`; a writable handle of
    /// the file ([`ErrorKind::OptionConflict`](crate::ErrorKind::OptionConflict)).
    pub fn open_immutable(
        &self,
        path: impl AsRef<Path>,
        options: &OpenOptions,
    ) -> Result<ImmutableFile> {
        let mut options = options.clone();
        options.immutable = true;
        Ok(ImmutableFile { file: self.open(path, &options)? })
    }

    /// Opens a file of an engine with a write-ahead log: the cache writes none of its pages before
    /// `gate` says that the log is durable up to the page's changes. The gate holds for all handles
    /// of the file, until the last one is closed. Blocks like [`Cache::open`].
    ///
    /// # Errors
    /// Every error of [`Cache::open`]; options without `write`, or with `mappable`, whose pages
    /// change without a call ([`ErrorKind::GateMisuse`](crate::ErrorKind::GateMisuse)).
    pub fn open_gated(
        &self,
        path: impl AsRef<Path>,
        options: &OpenOptions,
        gate: Arc<dyn WriteGate>,
    ) -> Result<GatedFile> {
        GatedFile::new(self.open(path, options)?, gate)
    }

    /// Makes the names in a directory durable (`fsync`): of files that were created, renamed or
    /// removed there. A sync of a file does not. Blocks for the device.
    ///
    /// # Errors
    /// The file system's, with the path.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(1 << 20).build()?;
    /// let options = OpenOptions::new().write(true).create_new(true);
    /// let file = cache.open(directory.path().join("data.db"), &options)?;
    /// file.write_at(b"bytes", 0)?;
    /// file.sync_data()?;
    /// cache.sync_directory(directory.path())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sync_directory(&self, path: impl AsRef<Path>) -> Result<()> {
        self.inner.registry.check()?;
        let path = path.as_ref();
        let failed = |source| io_error(path.display().to_string(), "sync", None, source);
        file::sync_directory(path).map_err(failed)
    }

    /// Opens the regular file behind `descriptor`, which stays open until the file is closed. For
    /// direct transfers the file is opened once more through `/proc/self/fd`; where that is
    /// refused, transfers use the kernel's page cache.
    ///
    /// # Errors
    /// As [`Cache::open`]; a descriptor that was not opened for reading, or, for a writable file,
    /// not for writing or with `O_APPEND`. On errors the descriptor is closed, unless the file is
    /// open in the cache.
    ///
    /// ```
    /// use bifolio::{Cache, OpenOptions};
    /// let unnamed = tempfile::tempfile()?;
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let file = cache.open_fd(unnamed.into(), &OpenOptions::new().write(true))?;
    /// file.write_at(b"no name", 0)?;
    /// file.close()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open_fd(&self, descriptor: OwnedFd, options: &OpenOptions) -> Result<File> {
        self.inner.registry.open_fd(descriptor, options, &self.inner.features)
    }

    /// Returns the place of the frames in memory that other processes can read.
    ///
    /// # Errors
    /// The cache was not built with [`CacheBuilder::shared`]; no descriptor is left.
    #[doc(hidden)]
    pub fn shared_frames(&self) -> Result<FramePlace> {
        FramePlace::of(&self.inner.registry.reclaim.memory)
    }

    /// Opens a file on your own storage. If a file with its
    /// [`identity`](crate::backing::DirectBacking::identity) is already open, that file is shared,
    /// and `backing` is dropped unless it is the first writable one.
    ///
    /// # Errors
    /// As [`Cache::open`], and what the backing answers when asked for its length; an alignment
    /// that is no power of two from 1 to 4096.
    pub fn open_backing(&self, backing: Arc<dyn Backing>, options: &OpenOptions) -> Result<File> {
        let guarded = Guarded::new(backing)?;
        self.inner.registry.open(Arc::new(guarded), options)
    }

    /// Creates an empty anonymous file for scratch space, temporary tables or sort runs, open for
    /// reading and writing, with folios of 4 KiB. Its bytes are freed with the last handle. `name`
    /// is used only in messages: each call creates another file.
    ///
    /// A page that was never written is a hole: it reads as zeros and costs nothing. Without a swap
    /// ([`CacheBuilder::swap_directory`]) all its bytes stay in memory, and a write for which the
    /// bound leaves none fails with [`ErrorKind::Full`](crate::ErrorKind::Full). Nothing of it is
    /// durable: a sync has nothing to do.
    ///
    /// # Errors
    /// The cache is closed; the system refuses address space.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let runs = cache.memory_file("sort runs")?;
    /// runs.write_all_at(b"sorted", 1 << 30)?;
    /// assert_eq!(runs.seek_data(0)?, Some(1 << 30));
    /// runs.punch_hole(..)?;
    /// assert_eq!(runs.seek_data(0)?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn memory_file(&self, name: &str) -> Result<File> {
        self.memory_file_with(name, &OpenOptions::new().read(true).write(true))
    }

    /// Creates a memory file like [`Cache::memory_file`], with your own rights, folio size and
    /// maximum length.
    ///
    /// # Errors
    /// Every error of [`Cache::memory_file`]; options that contradict each other.
    pub fn memory_file_with(&self, name: &str, options: &OpenOptions) -> Result<File> {
        self.inner.registry.open_in_memory(name, options)
    }

    /// Evicts the clean, unreferenced folios of all open files, and starts the write-out of dirty
    /// ones, as [`File::evict`] does.
    ///
    /// # Errors
    /// A closed cache.
    pub fn evict_all(&self) -> Result<Evicted> {
        self.inner.registry.evict_all()
    }

    /// Writes a list of the pages in memory to the file at `path`, the hottest first, for
    /// [`Cache::restore_hot`] of a later cache. The list has positions, not bytes: about 3 bytes
    /// for each run of pages.
    ///
    /// Open files are listed, and closed ones that are kept ([`CacheBuilder::kept_files`]); memory
    /// files are not, and neither are files that each open makes anew ([`File::identity`]), nor
    /// pages that were read ahead and not used. Takes about 30 ms for a million pages, and delays
    /// no other call but the close of a file whose pages it looks at. Call it before the files are
    /// closed; also every few minutes, if the process may be killed.
    ///
    /// The list replaces the file at `path` at once, and is durable then: it is written beside it
    /// (`PATH.PROCESS-NUMBER.tmp`), synced and renamed. Only its owner can read it. Blocks for
    /// that.
    ///
    /// # Errors
    /// A closed cache; a `path` without a name, or of a file that is no list; the file system's
    /// refusal of a step. Then the file at `path` is what it was, unless only the directory could
    /// not be synced.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let table = directory.path().join("table");
    /// # std::fs::write(&table, vec![7; 100_000])?;
    /// use bifolio::{Cache, OpenOptions};
    /// let hot = directory.path().join("hot");
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let file = cache.open(&table, &OpenOptions::new())?;
    /// file.populate(0..40_960)?;
    /// assert_eq!(cache.save_hot(&hot)?.page_bytes, 40_960);
    /// cache.close()?;
    ///
    /// // In the next run of the program:
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// cache.restore_hot(&hot)?;
    /// let file = cache.open(&table, &OpenOptions::new())?; // its pages are read from here on
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_hot(&self, path: impl AsRef<Path>) -> Result<SavedHot> {
        warm::save(&self.inner.registry, path.as_ref())
    }

    /// Starts to read the pages of a list that [`Cache::save_hot`] has written, the hottest first,
    /// on a thread of its own, and returns. Pages are read of files that are open now, and of
    /// others from the moment at which they are opened, until the last `Cache` is dropped or
    /// closed. Files that were written meanwhile are read as they are now; a file that has replaced
    /// a listed one is not read.
    ///
    /// Only free memory is filled: nothing is evicted, and the restore ends where a read would have
    /// to evict. So restore before other reads fill the cache. It has at most half of
    /// [`CacheBuilder::io_depth`] in flight, beside the reads of the program.
    ///
    /// A list that is damaged or cut short is used as far as it is sound
    /// ([`RestoreProgress::is_cut`](crate::RestoreProgress::is_cut)); of one for a larger cache,
    /// the part that fits. A wrong list can only read pages that are not needed: bytes are always
    /// those of the files. The list itself takes up to 1/256 of the bound, beside it, while it is
    /// used.
    ///
    /// # Errors
    /// A closed cache; a file that cannot be opened or read; one that is no list of this version
    /// ([`ErrorKind::Config`](crate::ErrorKind::Config)); no thread. Pages that cannot be read are
    /// left to the reads that need them.
    pub fn restore_hot(&self, path: impl AsRef<Path>) -> Result<HotRestore> {
        let registry = &self.inner.registry;
        warm::restore(registry, &registry.services.engine, path.as_ref())
    }

    /// Returns a snapshot of counters and levels, cheap enough to take every second. In a forked
    /// child all values are zero.
    pub fn stats(&self) -> Stats {
        let CacheParts { registry, features, .. } = &*self.inner;
        if registry.host.cache_state.is_forked() {
            // Locks may be held by threads that are not in this process.
            return Stats::default();
        }
        let services = &registry.services;
        let memory = &services.memory;
        let usage = memory.arena.usage();
        let lists = memory.lru.sizes();
        let transfers = services.engine.counts();
        let slots_used = services.swap.as_ref().map_or(0, |swap| u64::from(swap.slots.used()));
        let counted = memory.counters.snapshot();
        let unused = features.reports().into_iter().filter(|report| !report.in_use);
        let general = unused.map(|report| format!("{}: {}", report.name, report.fallback));
        Stats {
            writes: WriteStats {
                throttle_ns_max: services.flusher.stall_ns_max(),
                ..counted.writes
            },
            storage: StorageStats {
                plain_transfers: counted.storage.plain_transfers + transfers.plain_transfers,
                ring_enters: transfers.ring_enters,
                ring_transfers: transfers.ring_transfers,
                ..counted.storage
            },
            memory: MemoryStats {
                bound_bytes: usage.bound_bytes,
                used_bytes: usage.used_bytes,
                frame_bytes: usage.frame_bytes,
                free_bytes: usage.free_pages * PAGE_BYTES,
                metadata_bytes: memory.metadata_bytes(&usage),
                reserved_bytes: memory.reserved_bytes.load(Ordering::Relaxed),
                dirty_bytes: memory.dirty_pages.load(Ordering::Relaxed) * PAGE_BYTES,
                unswapped_bytes: memory.unswapped_pages.load(Ordering::Relaxed) * PAGE_BYTES,
                swap_bytes: slots_used * PAGE_BYTES,
                inactive_bytes: lists.inactive_pages() * PAGE_BYTES,
                active_bytes: lists.active_pages * PAGE_BYTES,
                ..counted.memory
            },
            fallbacks: general.chain(registry.fallbacks()).collect(),
            devices: services.flusher.device_stats(),
            ..counted
        }
    }

    /// Returns the open files, and closed ones that are kept: name, length, bytes in memory, misses
    /// and evictions. Takes some milliseconds for 100,000. Empty in a forked child.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// file.read_exact_at(&mut [0; 8], 50_000)?;
    /// let found = cache.files().into_iter().find(|found| found.file == path.to_string_lossy());
    /// assert_eq!(found.map(|found| (found.misses, found.is_kept)), Some((1, false)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn files(&self) -> Vec<FileStats> {
        if self.inner.registry.host.cache_state.is_forked() {
            return Vec::new();
        }
        self.inner.registry.file_stats()
    }

    /// Returns a reference that does not keep the cache open: for a thread that observes it.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder().memory(16 << 20).build()?;
    /// let observed = cache.downgrade();
    /// assert_eq!(observed.upgrade().map(|cache| cache.stats().reads.misses), Some(0));
    /// drop(cache);
    /// assert!(observed.upgrade().is_none());
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn downgrade(&self) -> WeakCache {
        WeakCache { inner: Arc::downgrade(&self.inner) }
    }

    /// Returns the kernel features that were probed when the cache was built, and which are in use.
    #[doc(hidden)]
    pub fn features(&self) -> Vec<FeatureReport> {
        self.inner.features.reports()
    }

    /// Changes the bound on memory. Shrinking evicts pages, writes dirty ones out, asks the write
    /// gates of files that have more dirty bytes than the new bound allows, and returns memory to
    /// the system; blocks until this is done. Other calls that find no memory meanwhile wait until
    /// the new bound is in effect.
    ///
    /// The chunks stay as large as [`CacheBuilder::memory`] has made them.
    ///
    /// # Errors
    /// The old bound stays in force after
    /// - a bound above the reserved maximum, or below 256 KiB or four chunks;
    /// - dirty bytes of a device or behind a write gate that exceed their share of the new bound
    ///   and are not written within 10 s ([`ErrorKind::BoundInUse`](crate::ErrorKind::BoundInUse));
    /// - too much memory that is pinned, or in memory files, or busy for longer than a quarter of
    ///   [`CacheBuilder::reclaim_wait_max`] without progress
    ///   ([`ErrorKind::Full`](crate::ErrorKind::Full));
    /// - a bound below the descriptors of pages, 1/64 of the most that the pages of the cache have
    ///   had ([`ErrorKind::Full`](crate::ErrorKind::Full)): they stay until the cache is dropped,
    ///   so a bound that was raised by more than 64 times may not return.
    pub fn set_memory(&self, bytes: u64) -> Result<()> {
        self.inner.registry.check()?;
        config::validate_memory(bytes)?;
        let reclaim = &self.inner.registry.reclaim;
        config::validate_bound(bytes, reclaim.memory.arena.chunk_bytes())?;
        if bytes > self.inner.memory_bytes_max {
            let problem = format!(
                "{bytes} bytes is more than the {} that address space was reserved for \
                 (CacheBuilder::memory_max)",
                self.inner.memory_bytes_max
            );
            return Err(Error::config("memory", problem));
        }
        crate::sys::memory::warn_of_bound(bytes);
        match &self.inner.pressure {
            Some(pressure) => pressure.set_bound(bytes),
            None => reclaim.set_bound(bytes),
        }
    }

    /// Makes everything durable that was written to any file of the cache, also to files without a
    /// handle that could not be written when they were closed. Blocks for the devices, file after
    /// file; one that fails keeps no other from it.
    ///
    /// # Errors
    /// [`ErrorKind::Close`](crate::ErrorKind::Close), which lists every file that is not
    /// durable, as for [`Cache::close`]; otherwise like [`File::sync_data`].
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # use bifolio::{Cache, OpenOptions};
    /// # let cache = Cache::builder().memory(1 << 20).build()?;
    /// let options = OpenOptions::new().write(true).create(true);
    /// let tables = ["a", "b"].map(|name| cache.open(directory.path().join(name), &options));
    /// for table in &tables {
    ///     table.as_ref().unwrap().write_all_at(b"row", 0)?;
    /// }
    /// cache.sync_all()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sync_all(&self) -> Result<()> {
        self.inner.registry.sync_all()
    }

    /// Makes everything durable that was written since the last sync, and closes the cache: every
    /// later call on it or its files fails with [`ErrorKind::Closed`](crate::ErrorKind::Closed).
    /// Pins stay readable. Blocks for the devices, file after file.
    ///
    /// This includes files without a handle: what the drop of a last handle cannot write is logged,
    /// kept in the cache, and tried again here. Dropping the last `Cache` and file tries once more,
    /// and only logs what is lost. Concurrent calls may fail with `Closed` even if the close fails
    /// in the end.
    ///
    /// # Errors
    /// [`ErrorKind::Close`](crate::ErrorKind::Close), which lists every file that is not durable;
    /// all others are. The cache is still open then, and nothing is lost: make room and close
    /// again, or discard the bytes with [`File::discard_dirty`], of a file without a handle after
    /// it is opened again. [`ErrorKind::MapsAlive`](crate::ErrorKind::MapsAlive).
    pub fn close(&self) -> Result<()> {
        self.inner.registry.close()
    }
}

#[cfg(all(test, not(loom)))]
impl Cache {
    /// Returns the pages on each list, once no batch has any.
    pub(crate) fn list_sizes(&self) -> crate::memory::ListSizes {
        let memory = &self.inner.registry.reclaim.memory;
        memory.lru.drain_all(&memory.folios);
        memory.lru.sizes()
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.inner.registry
    }
}
