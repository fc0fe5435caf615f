//! Building a cache: settings, probes, reservations, threads.

use super::pressure::{PressureWatch, validate_floor};
use super::{Cache, CacheParts};
use crate::config::{self, Config, HugePages};
use crate::dirt::FlusherSettings;
use crate::error::{Error, ErrorKind, Result};
use crate::file::{Host, Mapper, Registry};
use crate::inode::{Flusher, Services};
use crate::io::{Backing, Engine};
use crate::keep::KeptFiles;
#[cfg(feature = "maps")]
use crate::maps::kernel::trials::probe as try_for_maps;
use crate::memory::{Arena, CacheState, Memory};
use crate::page::{MemorySource, PAGE_BYTES};
use crate::reclaim::{MappedVictims, Reclaim, ReclaimThread};
use crate::store::{Swap, SwapStorage};
use crate::sys::probe::{Feature, Features};
use crate::sys::process::Origin;
use crate::sys::shared::SharedMemory;
use crate::sys::{memory, process};
use crate::writeback::FlusherThreads;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Divisor of a limited address space: this part of it is reserved by default for
/// [`Cache::set_memory`], and the same for a swap.
const ADDRESS_SPACE_DIVISOR: u64 = 8;

/// Metadata per page of the swap, bytes, rounded up.
const SWAP_METADATA_BYTES: u64 = 9;

/// Settings of a cache. All sizes are in bytes.
#[derive(Clone, Debug, Default)]
pub struct CacheBuilder {
    config: Config,
    swap: Option<SwapStorage>,
    /// Bound under memory pressure; `None` to keep the bound.
    floor_bytes: Option<u64>,
    disabled: Vec<Feature>,
}

impl Cache {
    /// Returns settings for a new cache.
    pub fn builder() -> CacheBuilder {
        CacheBuilder::default()
    }
}

impl CacheBuilder {
    /// Sets the bound on memory, bytes: frames, descriptors and tables together. 256 MiB by
    /// default, at least 256 KiB. The bound is hard: pages that do not fit are not cached, and a
    /// call that needs memory when nothing can be evicted fails. The 2 KiB or so that each open
    /// file costs are not included ([`Cache::open`](crate::Cache::open)).
    ///
    /// Frames are taken from the system in *chunks*: of 2 MiB, which can be huge pages, from a
    /// bound of 32 MiB on, otherwise of a 32nd of this bound, rounded down to a power of two, and
    /// at least 64 KiB. No folio is larger than a chunk
    /// ([`OpenOptions::folio_bytes`](crate::OpenOptions::folio_bytes)).
    pub fn memory(mut self, bytes: u64) -> Self {
        self.config.memory_bytes = bytes;
        self
    }

    /// Sets the maximum for [`Cache::set_memory`], bytes: address space is reserved for it. The
    /// default is all of the machine's memory, or less: an eighth of the address space if that is
    /// limited (`RLIMIT_AS`). It cannot be below the bound.
    pub fn memory_max(mut self, bytes: u64) -> Self {
        self.config.memory_bytes_max = Some(bytes);
        self
    }

    /// Lets the bound fall, step by step and to no less than `floor_bytes`, while tasks wait for
    /// memory, and rise again when they do not: to what [`Self::memory`] or
    /// [`Cache::set_memory`] has set last. The tasks are those of the control group of the process
    /// (version 2), or else all of the machine while that has little memory left.
    ///
    /// A thread of the cache reads the kernel's count (PSI) every two seconds. If tasks waited for
    /// a tenth of that time, the bound falls by an eighth. Without the count it stays, which
    /// [`Stats::fallbacks`](crate::Stats::fallbacks) says. Without this setting, which is the
    /// default, the bound is only the program's. `floor_bytes` is at least 256 KiB and four chunks,
    /// and at most the bound.
    ///
    /// ```
    /// let cache = bifolio::Cache::builder()
    ///     .memory(64 << 20)
    ///     .memory_under_pressure(16 << 20)
    ///     .build()?;
    /// assert!((16 << 20..=64 << 20).contains(&cache.stats().memory.bound_bytes));
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn memory_under_pressure(mut self, floor_bytes: u64) -> Self {
        self.floor_bytes = Some(floor_bytes);
        self
    }

    /// Selects whether frames are backed by 2 MiB pages. A cache of less than 32 MiB has none.
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.config.huge_pages = huge_pages;
        self
    }

    /// Selects whether memory is made resident when the cache is built, except the 1/32 of the
    /// bound that is left for tables. By default memory becomes resident when needed, a chunk at a
    /// time. Building fails if the machine does not have the memory, or a control group of the
    /// process does not allow it now. Not for caches of mapped files, whose memory is separate.
    pub fn prefault(mut self, prefault: bool) -> Self {
        self.config.prefault = prefault;
        self
    }

    /// Selects whether frames, tables and lengths are in memory that other processes can read, for
    /// the owner of a cache that serves them. Not yet public: no crate serves it.
    #[doc(hidden)]
    pub fn shared(mut self, shared: bool) -> Self {
        self.config.is_shared = shared;
        self
    }

    /// Sets how long a call waits for memory that other calls hold briefly (I/O in flight) before
    /// it fails with [`ErrorKind::Full`]. 10 s by default, at most an hour.
    ///
    /// The time covers all waits of a call for memory, and starts anew with each page that the call
    /// gets, and once after a change of the bound that left the call without memory. The transfers
    /// of the call itself do not count.
    pub fn reclaim_wait_max(mut self, time: Duration) -> Self {
        self.config.reclaim_wait_max = time;
        self
    }

    /// Sets the maximum number of transfers that one call has in flight, 1 to 1024; 64 by default.
    /// Misses of [`File::read_many`](crate::File::read_many) and write-outs are submitted in
    /// batches of up to this many.
    pub fn io_depth(mut self, transfers: usize) -> Self {
        self.config.io_depth = transfers;
        self
    }

    /// Sets the maximum readahead window, bytes; 8 MiB by default, 0 turns readahead off. Up to two
    /// windows are ahead of a reader, each at most as long as what it has read so far, unless it
    /// began at the start of the file or was announced ([`Access::Sequential`](crate::Access)). In
    /// a small cache the maximum is an eighth of the bound.
    pub fn readahead_max(mut self, bytes: u64) -> Self {
        self.config.readahead_bytes_max = bytes;
        self
    }

    /// Sets the dirty bytes above which the flusher writes in the background. The default is a
    /// quarter of the bound, the maximum `dirty_max`. It applies per device, to what other
    /// devices leave.
    pub fn dirty_background(mut self, bytes: u64) -> Self {
        self.config.dirty_bytes_background = Some(bytes);
        self
    }

    /// Sets the maximum of dirty bytes, of all files together: writers are throttled until the
    /// device has accepted some. The default and the maximum are two thirds of the bound. One
    /// device ([`FileIdentity`](crate::backing::FileIdentity)) may have three quarters of what
    /// other devices leave (half of the bound if it is alone); if it refuses writes, a writer then
    /// gets [`ErrorKind::Unwritable`].
    pub fn dirty_max(mut self, bytes: u64) -> Self {
        self.config.dirty_bytes_max = Some(bytes);
        self
    }

    /// Sets the age at which the flusher writes a dirty page out, however little is dirty. 5 s
    /// by default; from 1 ms to an hour.
    pub fn dirty_age_max(mut self, age: Duration) -> Self {
        self.config.dirty_age_max = age;
        self
    }

    /// Sets how many pages of mapped files are unmapped in one batch when they are evicted, with
    /// one TLB flush of the other CPUs: 1 to 512, 31 by default. A run of up to as many adjacent
    /// pages counts as one page. A batch needs memory for four times its pages; if that is more
    /// than 1/16 of the bound, it is unmapped in parts.
    #[doc(hidden)]
    pub fn unmap_batch_folios(mut self, folios: usize) -> Self {
        self.config.unmap_batch_folios = folios;
        self
    }

    /// Lets memory files be larger than memory: under memory pressure, their pages are written to a
    /// temporary file in `directory`, which no other program can open and which is deleted with the
    /// cache. The file grows ahead of need, 64 MiB at a time, to at most 17/16 of the pages of all
    /// memory files, or twice that if folios of several pages find no contiguous slots. Without a
    /// swap, which is the default, memory files stay within the bound and leave 8 to 64 pages of it
    /// to other files (at most 1/8): a write beyond that fails with [`ErrorKind::Full`].
    pub fn swap_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.swap = Some(SwapStorage::In(directory.into()));
        self
    }

    /// Uses your own storage as the swap; otherwise like [`Self::swap_directory`].
    #[doc(hidden)]
    pub fn swap_backing(mut self, backing: Arc<dyn Backing>) -> Self {
        self.swap = Some(SwapStorage::Backing(backing));
        self
    }

    /// Sets the maximum size of the swap, bytes. The default and the maximum are 1 TiB; the default
    /// is less where the address space is limited (`RLIMIT_AS`): an eighth of that is reserved for
    /// checksums, 9 bytes per page. Pages that do not fit stay in memory.
    pub fn swap_max(mut self, bytes: u64) -> Self {
        self.config.swap_bytes_max = Some(bytes);
        self
    }

    /// Sets how many closed files keep their pages, which the next open finds again. 0 by default:
    /// the pages of a file are freed with its last handle. For programs that open the same files
    /// again and again: 1,000 is enough for most.
    ///
    /// # What is kept
    /// The clean pages of a file that was opened first for reading. They are evicted like those of
    /// open files, and count in the bound. A kept file has no descriptor and no lock, so its file
    /// system can be unmounted; it costs about 2 KiB outside the bound, the address space of
    /// [`OpenOptions::len_max`](crate::OpenOptions::len_max), and an inotify watch. The file that
    /// was closed first goes if there are too many. [`Cache::evict_all`](crate::Cache::evict_all)
    /// frees all.
    ///
    /// # When they are used
    /// If nothing has changed the file since its pages were read, by any program or this one: then
    /// an open for reading finds them. It holds a read lease for a moment, which shows that no
    /// program has the file open for writing, and looks at an inotify watch and at the times, the
    /// length and the identity of the file. A file that cannot be checked is read anew: one that a
    /// program has open for writing or stays mapped so; one that neither belongs to the user of the
    /// process nor can be leased by it (`CAP_LEASE`, `fs.leases-enable`); one without a watch
    /// (`fs.inotify.max_user_watches`); one on another file system than ext4, XFS, Btrfs and F2FS.
    /// [`Stats::fallbacks`](crate::Stats::fallbacks) has the reason. Pages are not kept of mappable
    /// files, of files with a codec, a gate or failed writes, or that were opened by descriptor.
    ///
    /// # What others notice
    /// A program that opens the file for writing in the moment of the lease waits for its end, some
    /// microseconds; with `O_NONBLOCK` its open fails with `EWOULDBLOCK`. This process may get
    /// `SIGURG` then, which has no effect unless it has a handler.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("table");
    /// # std::fs::write(&path, "leaf")?;
    /// use bifolio::{Cache, OpenOptions};
    /// let cache = Cache::builder().memory(16 << 20).kept_files(1000).build()?;
    /// for _ in 0..3 {
    ///     let table = cache.open(&path, &OpenOptions::new())?;
    ///     table.read_exact_at(&mut [0; 4], 0)?; // from the storage once
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn kept_files(mut self, files: usize) -> Self {
        self.config.kept_files = files;
        self
    }

    /// Disables a feature of the kernel, as if its probe had failed, to test the fallback.
    #[doc(hidden)]
    pub fn disable(mut self, feature: Feature) -> Self {
        self.disabled.push(feature);
        self
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// The first invalid setting, with the valid values.
    #[doc(hidden)]
    pub fn validate(&self) -> Result<()> {
        self.config.validate()?;
        self.floor_bytes.map_or(Ok(()), |floor| validate_floor(floor, self.config.memory_bytes))
    }

    /// Builds the cache: probes the system, reserves address space, starts its background threads.
    ///
    /// # Errors
    /// An invalid setting; a system that refuses address space, a thread, or memory to populate, or
    /// that does not allow what was required; a kernel whose pages are not of 4 KiB.
    pub fn build(self) -> Result<Cache> {
        self.validate()?;
        check_page_size(rustix::param::page_size())?;
        memory::warn_of_bound(self.config.memory_bytes);
        let features = Features::probe(&self.disabled);
        if self.config.huge_pages == HugePages::Require
            && let Some(reason) = features.why_not(Feature::TransparentHugePages)
        {
            let problem = format!("2 MiB pages are required, but {reason}");
            return Err(Error::config("huge_pages", problem));
        }
        let (memory_bytes_max, swap_bytes_max) = (self.memory_bytes_max(), self.swap_bytes());
        let source = match self.config.is_shared {
            true => MemorySource::Shared(Arc::new(SharedMemory::new().map_err(shared_error)?)),
            false => MemorySource::Private,
        };
        let arena = Arena::new(
            &source,
            self.config.memory_bytes,
            memory_bytes_max,
            self.config.huge_pages,
            features.clone(),
        )
        .map_err(reservation_error)?;
        let memory = Memory::new(arena, process::possible_cpus()).map_err(reservation_error)?;
        let memory = Arc::new(memory);
        let engine = Engine::new(&features, self.config.io_depth);
        let settings = FlusherSettings {
            background_bytes: self.config.dirty_bytes_background,
            max_bytes: self.config.dirty_bytes_max,
            age_max: self.config.dirty_age_max,
        };
        let flusher = Flusher::new(settings, self.config.memory_bytes);
        let open = |storage| Swap::open(storage, swap_bytes_max, &features).map(Arc::new);
        let (flusher, swap) = (Arc::new(flusher), self.swap.map(open).transpose()?);
        let services = Services { memory, engine, flusher, swap };
        let (victims, mapper) = maps(&features, self.config.unmap_batch_folios);
        let reclaim = Arc::new(Reclaim::new(&services, &self.config, victims));
        if self.config.prefault {
            reclaim.prefault()?;
        }
        let background = ReclaimThread::background(&reclaim)?;
        let watch = |floor_bytes| {
            PressureWatch::start(&reclaim, &features, (self.config.memory_bytes, floor_bytes))
        };
        let pressure = self.floor_bytes.map(watch).transpose()?.flatten();
        let flusher = Arc::clone(&services.flusher);
        let flusher_threads = FlusherThreads::start(flusher, &services.memory)?;
        let has_mark = features.has(Feature::WipeOnFork);
        let cache_state =
            CacheState::new(if has_mark { Origin::here() } else { Origin::by_process() });
        let mut registry = Registry::new(
            Arc::clone(&reclaim),
            services,
            flusher_threads,
            ReclaimThread::swapper(&reclaim)?,
            Host::new(cache_state, mapper, self.config.ablation),
            &self.config,
        );
        registry.keeper = KeptFiles::keeping(self.config.kept_files, &reclaim, &features);
        let inner = CacheParts {
            registry: Arc::new(registry),
            memory_bytes_max,
            features,
            pressure,
            _background: background,
        };
        Ok(Cache { inner: Arc::new(inner) })
    }

    fn swap_bytes(&self) -> u64 {
        let metadata_bytes = memory::address_space_bytes_max() / ADDRESS_SPACE_DIVISOR;
        let room_bytes = (metadata_bytes / SWAP_METADATA_BYTES).saturating_mul(PAGE_BYTES);
        let default_bytes = config::SWAP_BYTES_MAX.min(room_bytes).max(config::SWAP_BYTES_MIN);
        self.config.swap_bytes_max.unwrap_or(default_bytes)
    }

    fn memory_bytes_max(&self) -> u64 {
        let chosen = self.config.memory_bytes_max.unwrap_or_else(|| {
            let room_bytes = memory::address_space_bytes_max() / ADDRESS_SPACE_DIVISOR;
            memory::machine_memory_bytes().min(room_bytes)
        });
        chosen.clamp(self.config.memory_bytes, config::MEMORY_BYTES_MAX)
    }
}

/// Turns mechanisms back, for benchmarks.
#[cfg(feature = "ablation")]
impl CacheBuilder {
    /// Selects how pins take their reference; only for benchmarks.
    pub fn pin_mode(mut self, pin_mode: crate::config::PinMode) -> Self {
        self.config.ablation.modes.pins = pin_mode;
        self
    }

    /// Selects when advice to evict drains the LRU batches of other CPUs; only for benchmarks.
    pub fn drain_policy(mut self, drain_policy: crate::config::DrainPolicy) -> Self {
        self.config.ablation.modes.drains = drain_policy;
        self
    }
}

type Maps = (Option<Box<dyn MappedVictims>>, Option<Box<dyn Mapper>>);

/// Creates what evicts the pages of files that can be mapped, and what serves those files.
#[cfg(feature = "maps")]
fn maps(features: &Features, unmap_batch_folios: usize) -> Maps {
    use crate::maps::{mappable::MapResources, unmap::RegionVictims};
    let mapper = MapResources::new(features, unmap_batch_folios);
    (Some(Box::new(RegionVictims)), Some(Box::new(mapper)))
}

#[cfg(not(feature = "maps"))]
fn maps(_: &Features, _: usize) -> Maps {
    (None, None)
}

#[cfg(not(feature = "maps"))]
fn try_for_maps(_: Feature) -> crate::sys::probe::Finding {
    Err("built without the feature `maps`".to_owned())
}

impl Features {
    /// Probes every feature; those in `disabled` are reported but not used.
    pub(crate) fn probe(disabled: &[Feature]) -> Self {
        Self::probe_with(disabled, try_for_maps)
    }
}

fn shared_error(source: std::io::Error) -> Error {
    Error::memory("a file for shared memory (memfd_create)", source)
}

fn reservation_error(source: std::io::Error) -> Error {
    Error::memory("address space (CacheBuilder::memory_max)", source)
}

/// Fails if the kernel's pages, of `page_bytes`, are not the library's: direct I/O, maps and advice
/// are all by pages of 4 KiB.
fn check_page_size(page_bytes: usize) -> Result<()> {
    if page_bytes as u64 == PAGE_BYTES {
        return Ok(());
    }
    let text = format!(
        "no cache can be built on this kernel: its pages have {page_bytes} bytes, and a cache \
         needs pages of 4096; boot a kernel with 4 KiB pages"
    );
    Err(Error::new(ErrorKind::Unsupported, text))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_with_larger_pages_is_refused_by_name() {
        assert!(check_page_size(4096).is_ok());
        for page_bytes in [16 << 10, 64 << 10] {
            let error = check_page_size(page_bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(&page_bytes.to_string()), "{error}");
        }
    }
}
