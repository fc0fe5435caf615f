//! The cache: what a caller builds, opens files in, watches, resizes and closes.
//!
//! Owns everything below: the memory, reclaim with its background thread, the registry of files.
//! Files keep what they need alive by themselves; dropping the last `Cache` with files still open
//! takes nothing from them.

mod builder;

pub use builder::CacheBuilder;

use crate::config;
use crate::error::{Discarded, Result};
use crate::file::{Advice, File, OpenOptions, ReadRequest, Registry};
use crate::io::{Backing, Engine, Guarded, IoError, Operation};
use crate::outcome::Outcome;
use crate::page::PAGE_BYTES;
use crate::reclaim::{Background, Reclaim};
use crate::stats::Stats;
use crate::sync::Ordering;
use crate::sys::file;
use crate::sys::probe::{FeatureReport, Features};
use crate::writeback::Flusher;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// A page cache with a hard bound on memory. Cheap to clone; all clones are one cache.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use bifolio::Cache;
/// let cache = Cache::builder().memory(64 << 20).build()?;
/// assert!(cache.stats().used_bytes <= 64 << 20);
/// cache.set_memory(32 << 20)?;
/// cache.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    registry: Arc<Registry>,
    reclaim: Arc<Reclaim>,
    /// Address space was reserved for this much.
    memory_bytes_max: u64,
    features: Features,
    engine: Arc<Engine>,
    flusher: Arc<Flusher>,
    /// Ends with the last `Cache`; files that live on reclaim by themselves.
    _background: Background,
}

impl fmt::Debug for Cache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = formatter.debug_struct("Cache");
        if self.inner.registry.cache_state.is_forked() {
            return fields.finish_non_exhaustive();
        }
        let usage = self.inner.reclaim.memory.arena.usage();
        fields.field("bound_bytes", &usage.bound_bytes).field("used_bytes", &usage.used_bytes);
        fields.finish_non_exhaustive()
    }
}

impl Cache {
    /// Settings for a new cache.
    pub fn builder() -> CacheBuilder {
        CacheBuilder::new()
    }

    /// Opens the regular file at `path`.
    ///
    /// A file that is open in this cache already (by device and inode) is shared: one mapping, one
    /// length, one copy of its pages. Blocks for the file system, and, if another thread is just
    /// opening or closing this very file, for that.
    ///
    /// # What an open file costs
    /// Some 2 KiB of memory beside the bound, for it and its first handle, and a few hundred bytes
    /// for each further handle. The kernel has as much again for the one or two descriptors, and a
    /// few KiB of page tables unless [`OpenOptions::len_max`] is below 1 GiB. Within the bound it
    /// takes only what of it is in memory. So 100,000 files can be open in a cache of 64 MiB, if
    /// address space and descriptors are enough; a program that keeps so many open gives the cache
    /// 200 MiB less. To open, use, sync and close one costs the same however many are
    /// open.
    ///
    /// Where there are no more descriptors (`RLIMIT_NOFILE`) the error is `EMFILE`, and nothing is
    /// left open by it; others can be closed, and the file opened then.
    ///
    /// # Locks of the process (`fcntl`)
    /// A process that closes a descriptor of a file loses all its POSIX locks on that file. While a
    /// file is open in the cache, no descriptor of it is closed: not by opening it again, with
    /// other rights, or by another name, and not by closing all but the last of its handles. When
    /// the last handle is closed, so are the descriptors, before `close` or the drop returns. (A
    /// file that could not be made durable then keeps them until it is, or is given up.) An open
    /// that fails may close a descriptor of a file that was not open in the cache. Locks of open
    /// file descriptions (`F_OFD_SETLK`, `flock`) are not affected at all.
    ///
    /// # Signals
    /// With a limit on the size of files (`RLIMIT_FSIZE`) the kernel ends the process by `SIGXFSZ`
    /// when the cache writes beyond it, which may be long after `write_at`. Programs that have such
    /// a limit ignore that signal; then it is an error of the write-out, `EFBIG`.
    ///
    /// # Errors
    /// The file system's refusal; anything but a regular file; options that contradict each other,
    /// or those of other handles: immutable and writable, another folio size, another
    /// [`DirectIo`](crate::DirectIo).
    pub fn open(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        self.inner.registry.open_path(path.as_ref(), options, &self.inner.features)
    }

    /// Makes the names in a directory durable (`fsync`): of files that were created, renamed or
    /// removed there. A sync of a file does not. Blocks for the device.
    ///
    /// # Errors
    /// The file system's, with the path.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(1 << 20).build()?;
    /// let options = OpenOptions::new().write(true).create_new(true);
    /// let file = cache.open(directory.path().join("data.db"), &options)?;
    /// file.write_at(b"bytes", 0)?;
    /// file.sync_data()?;
    /// cache.sync_directory(directory.path())?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn sync_directory(&self, path: impl AsRef<Path>) -> Result<()> {
        self.inner.registry.check()?;
        let path = path.as_ref();
        Ok(file::sync_directory(path).map_err(|source| IoError {
            file: path.display().to_string(),
            operation: Operation::SyncAll,
            position_bytes: 0,
            length_bytes: 0,
            source,
        })?)
    }

    /// Opens the regular file that `descriptor` is of; it needs no name. The descriptor is open
    /// until the file is closed, as those that [`Cache::open`] makes, and whether it is used or
    /// not. For direct transfers the file is opened once more, by `/proc/self/fd`: where that is
    /// refused, they go through the page cache.
    ///
    /// # Errors
    /// As [`Cache::open`]; a descriptor that was not opened for reading, or, if the file is to be
    /// written, not for writing or with `O_APPEND`. On errors the descriptor is closed, unless the
    /// file is open in the cache.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use bifolio::{Cache, OpenOptions};
    /// let unnamed = tempfile::tempfile()?;
    /// let cache = Cache::builder().memory(16 << 20).build()?;
    /// let file = cache.open_fd(unnamed.into(), &OpenOptions::new().write(true))?;
    /// file.write_at(b"no name", 0)?;
    /// file.close()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn open_fd(&self, descriptor: OwnedFd, options: &OpenOptions) -> Result<File> {
        self.inner.registry.open_fd(descriptor, options, &self.inner.features)
    }

    /// Opens a file over storage of your own. If a file of its
    /// [`identity`](crate::Backing::identity) is open already, that is shared, and `backing` is let
    /// go, unless it is the first that may write.
    ///
    /// # Errors
    /// As [`Cache::open`], and what the backing answers when asked for its length; an alignment
    /// that is no power of two from 1 to 4096.
    pub fn open_backing(&self, backing: Arc<dyn Backing>, options: &OpenOptions) -> Result<File> {
        let guarded = Guarded::new(backing)?;
        self.inner.registry.open(Arc::new(guarded), options)
    }

    /// Makes an empty file without a file behind it, for scratch space, temporary tables, sort
    /// runs: the same interface, and the bytes are gone with the last handle. `name` is for
    /// messages only: each call makes another file. Open for reading and writing, folios of 4 KiB.
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
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let runs = cache.memory_file("sort runs")?;
    /// runs.write_all_at(b"sorted", 1 << 30)?;
    /// assert_eq!(runs.seek_data(0)?, Some(1 << 30));
    /// runs.punch_hole(0..runs.len())?;
    /// assert_eq!(runs.seek_data(0)?, None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn memory_file(&self, name: &str) -> Result<File> {
        self.memory_file_with(name, &OpenOptions::new().read(true).write(true))
    }

    /// As [`Cache::memory_file`], with rights, folio size and length limit of your own.
    ///
    /// # Errors
    /// As [`Cache::memory_file`]; options that contradict each other.
    pub fn memory_file_with(&self, name: &str, options: &OpenOptions) -> Result<File> {
        self.inner.registry.open_in_memory(name, options)
    }

    /// [`File::read_many`] for requests of several files of this cache, together.
    ///
    /// # Errors
    /// A file that was not opened for reading or belongs to another cache; the cache is closed:
    /// then no request was begun.
    pub fn read_many(&self, requests: &mut [(&File, ReadRequest<'_>)]) -> Result<()> {
        self.inner.registry.check()?;
        File::read_many_of(&self.inner.registry, requests)
    }

    /// Takes advice for all files that are open: [`Advice::DontNeed`] evicts what is clean and
    /// nobody's, as [`File::advise`] does, and starts the write-out of the rest; [`Advice::Cold`]
    /// makes everything equally unwanted.
    ///
    /// # Errors
    /// Other advice, which is for one file; the cache is closed.
    pub fn advise_all(&self, advice: Advice) -> Result<Outcome> {
        self.inner.registry.advise_all(advice)
    }

    /// The work and the holdings of the cache: a snapshot, cheap enough to take every second.
    /// (It looks at each file that is open: some milliseconds for 100,000.) In a forked child all
    /// of it is zero.
    pub fn stats(&self) -> Stats {
        if self.inner.registry.cache_state.is_forked() {
            // Locks may be held by threads that are not in this process.
            return Stats::default();
        }
        let memory = &self.inner.reclaim.memory;
        let usage = memory.arena.usage();
        let lists = memory.lru.sizes();
        let dirty_pages = memory.dirty_pages.load(Ordering::Relaxed);
        let transfers = self.inner.engine.counts();
        Stats {
            bound_bytes: usage.bound_bytes,
            used_bytes: usage.used_bytes,
            frame_bytes: usage.frame_bytes,
            free_bytes: usage.free_pages * PAGE_BYTES,
            metadata_bytes: usage.used_bytes - usage.frame_bytes,
            dirty_bytes: dirty_pages * PAGE_BYTES,
            unswapped_bytes: memory.unswapped_pages.load(Ordering::Relaxed) * PAGE_BYTES,
            swap_bytes: self.inner.registry.swap_bytes(),
            inactive_bytes: lists.inactive_pages * PAGE_BYTES,
            active_bytes: lists.active_pages * PAGE_BYTES,
            ring_enters: transfers.ring_enters,
            ring_transfers: transfers.ring_transfers,
            plain_transfers: transfers.plain_transfers,
            throttle_ns_max: self.inner.flusher.stall_ns_max(),
            fallbacks: self.fallbacks(),
            devices: self.inner.flusher.device_stats(),
            ..memory.counters.snapshot()
        }
    }

    fn fallbacks(&self) -> Vec<String> {
        let reports = self.inner.features.reports().into_iter();
        let unused = reports.filter(|report| !report.in_use);
        let general = unused.map(|report| format!("{}: {}", report.name, report.fallback));
        general.chain(self.inner.registry.fallbacks()).collect()
    }

    /// The features that were probed for this cache when it was built, and which of them are in
    /// use.
    pub fn features(&self) -> Vec<FeatureReport> {
        self.inner.features.reports()
    }

    /// Changes the bound on memory. Shrinking evicts, writes out what is dirty, and gives memory
    /// back to the system before it returns. Blocks for that. Calls that find no memory meanwhile
    /// wait for the bound that stands in the end.
    ///
    /// # Errors
    /// A bound outside what was reserved for, or below the minimum; too much pinned or unwritable
    /// memory: then the old bound stands.
    pub fn set_memory(&self, bytes: u64) -> Result<()> {
        self.inner.registry.check()?;
        config::validate_memory(bytes)?;
        if bytes > self.inner.memory_bytes_max {
            let problem = format!(
                "{bytes} bytes is more than the {} that address space was reserved for \
                 (CacheBuilder::memory_max)",
                self.inner.memory_bytes_max
            );
            return Err(crate::error::ErrorKind::Config { name: "memory", problem }.into());
        }
        self.inner.reclaim.set_bound(bytes)
    }

    /// Makes everything durable that was written and not synced since, and closes the cache: every
    /// later call on it or its files answers [`ErrorKind::Closed`](crate::ErrorKind::Closed),
    /// [`File::close`] among them. Pins and holds stay readable. Blocks for the devices, file after
    /// file.
    ///
    /// That goes for files whose handles are gone, too: dropping the last handle makes a file
    /// durable as well as it can; what it cannot is logged as an error (file, bytes, cause), kept
    /// in the cache, and tried again here. Dropping the last `Cache` and file tries once more, and
    /// logs what is lost then: call `close` to be told. Calls that run at the same time on other
    /// threads may answer `Closed` although the close fails in the end.
    ///
    /// # Errors
    /// [`ErrorKind::Close`](crate::ErrorKind::Close), which lists every file that is not durable;
    /// all others are. Then the cache is still open, and nothing is lost: find room and close
    /// again, or give the bytes up ([`File::discard_dirty`], [`Cache::discard_closed`]).
    /// [`ErrorKind::MapsAlive`](crate::ErrorKind::MapsAlive) while a map, or a pin of a map, lives.
    pub fn close(&self) -> Result<()> {
        self.inner.registry.close()
    }

    /// Gives up what could not be written of files that have no handle any more, and tells how much
    /// that was. For files that have one there is [`File::discard_dirty`]. Blocks for write-outs
    /// that are in flight.
    ///
    /// # Errors
    /// The cache is closed.
    pub fn discard_closed(&self) -> Result<Vec<Discarded>> {
        self.inner.registry.discard_closed()
    }
}
