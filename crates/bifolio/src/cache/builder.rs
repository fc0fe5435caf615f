//! Building a cache: settings, probes, reservations, the thread.

use super::{Cache, Inner};
use crate::config::{self, Config, HugePages};
use crate::error::{ErrorKind, Result};
use crate::file::{CacheState, Registry};
use crate::io::{Backing, Engine};
use crate::memory::{Arena, Memory};
use crate::page::PAGE_BYTES;
use crate::reclaim::{Background, Reclaim, SwapThread};
use crate::swap::{Swap, SwapPlace};
use crate::sys::copy;
use crate::sys::probe::{Feature, Features};
use crate::sys::process;
use crate::sys::process::Origin;
use crate::writeback::{Flusher, FlusherSettings, FlusherThreads, Services};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The part of a limited address space that is reserved by default for [`Cache::set_memory`], and
/// for a swap, is one of so many.
const ADDRESS_SPACE_PARTS: u64 = 8;

/// Metadata of a page of the swap, bytes, rounded up.
const SWAP_METADATA_BYTES: u64 = 9;

/// Settings of a cache; every limit has its unit in its name.
#[derive(Clone, Debug, Default)]
pub struct CacheBuilder {
    config: Config,
    swap: Option<SwapPlace>,
    disabled: Vec<Feature>,
}

impl CacheBuilder {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// The bound on memory, bytes: frames, descriptors and tables together. 256 MiB by default,
    /// 256 KiB at the least. Hard: what does not fit is not cached, and what cannot be evicted is
    /// an error. What a file costs just by being open, some 2 KiB, is beside it
    /// ([`Cache::open`](crate::Cache::open)).
    pub fn memory(mut self, bytes: u64) -> Self {
        self.config.memory_bytes = bytes;
        self
    }

    /// The most [`Cache::set_memory`] may ever be given, bytes: address space is reserved for it.
    /// By default all of the machine's memory, or an eighth of the address space if that is limited
    /// (`RLIMIT_AS`) and less; and the bound at the least, below which it cannot be.
    pub fn memory_max(mut self, bytes: u64) -> Self {
        self.config.memory_bytes_max = Some(bytes);
        self
    }

    /// Whether frames are backed by 2 MiB pages.
    pub fn huge_pages(mut self, huge_pages: HugePages) -> Self {
        self.config.huge_pages = huge_pages;
        self
    }

    /// Whether the memory is made resident when the cache is built, all but what tables of files
    /// may want, a 32nd of the bound. By default it is made so as it is needed, 2 MiB at a time. It
    /// takes the kernel 0.2 ms to find and zero so much, several where a hypervisor has to find it
    /// first: no miss waits for that then, and a machine that has not got the memory says so at
    /// once. Files that are mapped have memory beside it, and would have to take it back: not for
    /// caches of those.
    pub fn populate(mut self, populate: bool) -> Self {
        self.config.populate = populate;
        self
    }

    /// How long, in milliseconds, a call waits for memory that others hold only for the moment (I/O
    /// in flight), before it fails with [`ErrorKind::Full`]. 10,000 by default.
    ///
    /// The time is that of the whole call, whatever it waits for, and begins anew with each page
    /// that the call gets: a long write through a slow swap goes on for as long as the swap takes
    /// pages. Not counted are transfers of the call itself, which take as long as the device does.
    pub fn reclaim_wait_ms_max(mut self, milliseconds: u64) -> Self {
        self.config.reclaim_wait_ms_max = milliseconds;
        self
    }

    /// The most transfers one call has in flight, 1 to 1024; 64 by default. Misses of
    /// [`File::read_many`](crate::File::read_many) and write-outs leave together up to this many.
    pub fn io_depth(mut self, transfers: usize) -> Self {
        self.config.io_depth = transfers;
        self
    }

    /// The largest window of readahead, bytes; 8 MiB by default, 0 for none. Two windows may be
    /// ahead of a reader. In a small cache an eighth of the bound is the most, for several readers
    /// of one handle less.
    pub fn readahead_bytes_max(mut self, bytes: u64) -> Self {
        self.config.readahead_bytes_max = bytes;
        self
    }

    /// How much may be dirty before the flusher writes it out in the background, bytes: by default
    /// a quarter of the bound; at the most `dirty_bytes_max`. For each device, what others leave of
    /// that.
    pub fn dirty_bytes_background(mut self, bytes: u64) -> Self {
        self.config.dirty_bytes_background = Some(bytes);
        self
    }

    /// How much may be dirty before writers are held until the device has taken some, bytes: by
    /// default two thirds of the bound, which is also the most. That is for all files together, and
    /// no write exceeds it; one device ([`Backing::device`]) may have three quarters of what others
    /// leave (half of the bound, if it is alone), so that one which takes nothing leaves room to
    /// the others. A writer whose device takes nothing gets [`ErrorKind::Unwritable`] then.
    pub fn dirty_bytes_max(mut self, bytes: u64) -> Self {
        self.config.dirty_bytes_max = Some(bytes);
        self
    }

    /// After how many milliseconds the flusher writes a dirty page out, however little is dirty.
    /// 5,000 by default.
    pub fn dirty_age_ms_max(mut self, milliseconds: u64) -> Self {
        self.config.dirty_age_ms_max = milliseconds;
        self
    }

    /// How many pages of mapped files are unmapped together when they are evicted, with one flush
    /// of the other CPUs' address translations: from 1 to 512, 31 by default. Neighbours that leave
    /// one after the other, up to as many, count as one page: a pass over a file, in order, has 256
    /// pages to a flush, where memory allows. Larger batches interrupt the other CPUs less often,
    /// and keep the pages of a batch from being used a little longer. A batch needs four pages of
    /// memory for each of its own; where that is more than a sixteenth of the bound, it is unmapped
    /// in parts.
    pub fn unmap_batch_folios(mut self, folios: usize) -> Self {
        self.config.unmap_batch_folios = folios;
        self
    }

    /// Lets memory files have more bytes than memory: under pressure, their pages go to a temporary
    /// file in `directory`, which nobody else can open and which is gone with the cache. Put it on
    /// a fast disk; on a tmpfs it would take the memory it is to save. Once memory is short the
    /// file takes room 64 MiB at a time, ahead of need, at the most what the pages of all memory
    /// files and a sixteenth more take; twice that where folios of several pages find no room in
    /// one piece. Without a swap, which is the default, memory files stay within the bound, and
    /// leave 8 to 64 pages of it to other files (at most a sixteenth): a write beyond that fails
    /// with [`ErrorKind::Full`].
    pub fn swap_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.swap = Some(SwapPlace::In(directory.into()));
        self
    }

    /// As [`Self::swap_directory`], to storage of your own.
    pub fn swap_backing(mut self, backing: Arc<dyn Backing>) -> Self {
        self.swap = Some(SwapPlace::Backing(backing));
        self
    }

    /// The most the swap file may have, bytes: 1 TiB by default, which is also the most there can
    /// be; less where the address space is limited (`RLIMIT_AS`): an eighth of that is reserved for
    /// checksums, 9 bytes for a page. What does not fit stays in memory.
    pub fn swap_bytes_max(mut self, bytes: u64) -> Self {
        self.config.swap_bytes_max = Some(bytes);
        self
    }

    /// Does without a feature of the kernel, as if the probe had failed: to test its fallback.
    pub fn disable(mut self, feature: Feature) -> Self {
        self.disabled.push(feature);
        self
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// The first setting that cannot be, with what would be right.
    pub fn validate(&self) -> Result<()> {
        self.config.validate()
    }

    /// Builds the cache: probes the system, reserves address space, starts one thread.
    ///
    /// # Errors
    /// A setting that cannot be; a system that refuses address space, a thread, or the memory that
    /// is to be made resident, or does not allow what was required.
    pub fn build(self) -> Result<Cache> {
        self.validate()?;
        let features = Features::probe(&self.disabled);
        copy::page_copy();
        self.check_huge_pages(&features)?;
        let (memory_bytes_max, swap_bytes_max) = (self.memory_bytes_max(), self.swap_bytes());
        let arena = Arena::new(
            self.config.memory_bytes,
            memory_bytes_max,
            self.config.huge_pages,
            features.clone(),
        )
        .map_err(reservation_error)?;
        let descriptors_max = Arena::descriptors_max(memory_bytes_max) as usize;
        let memory = Memory::new(arena, descriptors_max, process::possible_cpus())
            .map_err(reservation_error)?;
        let memory = Arc::new(memory);
        let engine = Engine::new(&features, self.config.io_depth);
        let flusher = Flusher::new(self.flusher_settings(), self.config.memory_bytes);
        let swap = match self.swap {
            Some(place) => Some(Swap::open(place, swap_bytes_max, &features)?),
            None => None,
        };
        let (flusher, swap) = (Arc::new(flusher), swap.map(Arc::new));
        let services = Services { memory, engine, flusher, swap };
        let reclaim = Arc::new(Reclaim::new(&services, &self.config));
        if self.config.populate {
            reclaim.populate()?;
        }
        let background = Background::start(Arc::clone(&reclaim))?;
        let (engine, flusher) = (Arc::clone(&services.engine), Arc::clone(&services.flusher));
        let flusher_threads = FlusherThreads::start(Arc::clone(&flusher), &services.memory)?;
        let has_mark = features.has(Feature::WipeOnFork);
        let cache_state =
            CacheState::new(if has_mark { Origin::here() } else { Origin::by_process() });
        let registry = Registry::new(
            Arc::clone(&reclaim),
            services,
            flusher_threads,
            SwapThread::start(&reclaim)?,
            cache_state,
            &features,
            &self.config,
        );
        let inner = Inner {
            registry: Arc::new(registry),
            reclaim,
            memory_bytes_max,
            features,
            engine,
            flusher,
            _background: background,
        };
        Ok(Cache { inner: Arc::new(inner) })
    }

    fn check_huge_pages(&self, features: &Features) -> Result<()> {
        if self.config.huge_pages != HugePages::Require {
            return Ok(());
        }
        let Some(reason) = features.why_not(Feature::TransparentHugePages) else { return Ok(()) };
        let problem = format!("2 MiB pages are required, but {reason}");
        Err(ErrorKind::Config { name: "huge_pages", problem }.into())
    }

    fn flusher_settings(&self) -> FlusherSettings {
        FlusherSettings {
            background_bytes: self.config.dirty_bytes_background,
            max_bytes: self.config.dirty_bytes_max,
            age_max: Duration::from_millis(self.config.dirty_age_ms_max),
        }
    }

    fn swap_bytes(&self) -> u64 {
        let metadata_bytes = process::address_space_bytes_max() / ADDRESS_SPACE_PARTS;
        let room_bytes = (metadata_bytes / SWAP_METADATA_BYTES).saturating_mul(PAGE_BYTES);
        let default_bytes = config::SWAP_BYTES_MAX.min(room_bytes).max(config::SWAP_BYTES_MIN);
        self.config.swap_bytes_max.unwrap_or(default_bytes)
    }

    fn memory_bytes_max(&self) -> u64 {
        let chosen = self.config.memory_bytes_max.unwrap_or_else(|| {
            let room_bytes = process::address_space_bytes_max() / ADDRESS_SPACE_PARTS;
            process::machine_memory_bytes().min(room_bytes)
        });
        chosen.clamp(self.config.memory_bytes, config::MEMORY_BYTES_MAX)
    }
}

/// Each mechanism set back, for benchmarks.
#[cfg(feature = "ablation")]
impl CacheBuilder {
    /// How pins take their reference; for benchmarks only.
    pub fn pin_mode(mut self, pin_mode: crate::ablation::PinMode) -> Self {
        self.config.ablation.modes.pins = pin_mode;
        self
    }

    /// When advice to evict drains the LRU batches of other CPUs; for benchmarks only.
    pub fn drain_policy(mut self, drain_policy: crate::ablation::DrainPolicy) -> Self {
        self.config.ablation.modes.drains = drain_policy;
        self
    }
}

fn reservation_error(source: std::io::Error) -> crate::error::Error {
    ErrorKind::Memory { purpose: "address space (CacheBuilder::memory_max)", source }.into()
}
