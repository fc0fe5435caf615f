//! A scene: one cache, some files, and the operations on them, all drawn from a seed.

use crate::codec::WordKeys;
use crate::device::{Device, Faults};
use crate::history::{Clock, History};
use crate::met::Seen;
use crate::shares;
use bifolio::OpenOptions;
use bifolio::backing::{Backing, FileIdentity};
use bifolio::{Cache, CacheBuilder, FaultMode, Feature, File, HugePages};
use bifolio::{Refusable, refuse};
use fastrand::Rng;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The subject of a scene.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Class {
    /// Reads, writes, pins and syncs; no truncation, no failure.
    Steady,
    /// Files are also truncated and extended.
    Cuts,
    /// Devices fail, are short, slow, full or hang for a while.
    Faults,
    /// Memory files, with and without swap: holes are punched, pages swapped.
    Memory,
    /// Files that are mapped: raw loads and stores.
    Maps,
    /// Handles are opened and closed, including the last of a file.
    Handles,
    /// A child process is killed, again and again.
    Kills,
    /// One thread on one small file, compared with a vector.
    Exerciser,
    /// One thread on one file whose storage fails at the n-th call, compared with a vector.
    Upsets,
    /// A file with a write gate over a simulated log.
    Gates,
    /// Asynchronous calls on real files, whose futures are dropped.
    Drops,
    /// Closed files whose pages are kept, changed by another program.
    Kept,
    /// Real files, on a device that loses its power, again and again.
    PowerFiles,
}

/// All of them that run where none is asked for.
pub const CLASSES: [Class; 12] = [
    Class::Steady,
    Class::Cuts,
    Class::Faults,
    Class::Memory,
    Class::Maps,
    Class::Handles,
    Class::Kills,
    Class::Exerciser,
    Class::Upsets,
    Class::Gates,
    Class::Drops,
    Class::Kept,
];

/// Returns `true` if files can be mapped for writing on this kernel.
pub fn can_map() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    let has = |name| bifolio::features().iter().any(|f| f.name == name && f.available);
    *CAN.get_or_init(|| has("user-faults") && has("write-protect-async"))
}

pub fn fault_mode(is_in_thread: bool) -> FaultMode {
    if is_in_thread { FaultMode::InThread } else { FaultMode::Threads }
}

impl Class {
    /// Returns the name on the command line.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Cuts => "cuts",
            Self::Faults => "faults",
            Self::Memory => "memory",
            Self::Maps => "maps",
            Self::Handles => "handles",
            Self::Kills => "kills",
            Self::Exerciser => "exerciser",
            Self::Upsets => "upsets",
            Self::Gates => "gates",
            Self::Drops => "drops",
            Self::Kept => "kept",
            Self::PowerFiles => "power-files",
        }
    }
}

/// Number of recent writes kept per file.
const RECENT_MAX: usize = 64;
/// Mask of the seed for further parameters.
const MORE: u64 = 0x5EED_0002;
/// Mask of the seed for parameters that were added later.
const LATER: u64 = 0x5EED_0003;

/// Mask of the seed for parameters that were added last.
const LAST: u64 = 0x5EED_0004;

/// Mask of the seed for the threads that serve the faults of a file.
const FAULTS: u64 = 0x5EED_0005;

/// Mask of the seed for the files that have a codec.
const CODEC: u64 = 0x5EED_0006;

/// Mask of the seed for classes of files.
const SHARES: u64 = 0x5EED_0007;

/// One file of a scene.
#[derive(Debug)]
pub struct Target {
    /// Its storage; none for a memory file.
    pub device: Option<Arc<Device>>,
    pub history: History,
    pub options: OpenOptions,
    /// A handle for each thread that has one; taken out while the thread reopens it.
    pub handles: Vec<Mutex<Option<File>>>,
    pub len_bytes_max: u64,
    /// Length that the file has certainly reached, if it is not truncated.
    pub len_bytes_certain: AtomicU64,
    /// Set if a flush or a write has failed, so that syncs may fail.
    pub has_failed: AtomicBool,
    /// Recently written ranges, where a sync that misses something does so.
    pub recent: Mutex<VecDeque<Range<u64>>>,
    /// One more than the page at which a thread waits for another; 0 if none does.
    pub invitation: AtomicU64,
    /// Position of a recent access of any thread, where others can meet it, bytes.
    pub met: AtomicU64,
}

impl Target {
    /// Notes that these bytes were written.
    pub fn note_written(&self, range: Range<u64>) {
        let mut recent = self.recent.lock().expect("no panic");
        recent.truncate(RECENT_MAX - 1);
        recent.push_front(range);
    }
}

/// A scene: a cache, its devices, its files, and their histories.
#[derive(Debug)]
pub struct Scene {
    pub class: Class,
    pub seed: u64,
    pub cache: Cache,
    pub clock: Arc<Clock>,
    pub targets: Vec<Target>,
    pub threads: usize,
    pub memory_bytes: u64,
    /// Weight of each operation.
    pub weights: Vec<u32>,
    pub ends: AtomicBool,
    pub calls: AtomicU64,
    /// Events that it is for.
    pub seen: Seen,
    /// Calls of threads that do not use the hung device.
    pub free_calls: AtomicU64,
    /// Set if errors of the storage are expected.
    pub may_fail: bool,
    /// Set if handles are dropped and reopened.
    pub has_reopens: bool,
    /// Set if handles are dropped after most operations, so that most closes are last ones.
    pub is_fleeting: bool,
    /// Rates of kernel calls for maps that fail, in 1024.
    refusals: [(Refusable, u32); 3],
    /// In scenes with memory files; see `looks.rs`.
    pub log: Mutex<Option<File>>,
    /// Twice the number of restarts, plus one during a restart.
    pub log_epoch: AtomicU64,
    dirty_bytes_max: u64,
    folio_bytes_max: u64,
    /// Set if files may be in classes.
    has_shares: bool,
    /// Owned by the harness, so that it outlives the cache.
    _swap: Option<Arc<Device>>,
    _directory: tempfile::TempDir,
}

impl Scene {
    /// Creates the scene that `seed` describes.
    pub fn new(class: Class, seed: u64, threads: usize) -> anyhow::Result<Self> {
        let mut random = Rng::with_seed(seed);
        let random = &mut random;
        let memory_bytes = (256 << 10) << random.u32(0..5);
        let directory = tempfile::tempdir()?;
        let mut builder = Cache::builder().memory(memory_bytes);
        builder = builder.dirty_age_max(Duration::from_millis(
            random.choice([5, 20, 200, 30_000]).unwrap_or(20),
        ));
        builder = builder.reclaim_wait_max(Duration::from_millis(60_000));
        let mut more = Rng::with_seed(seed ^ MORE);
        let mut later = Rng::with_seed(seed ^ LATER);
        // As far as `resize` goes, or further: where there are few addresses to spare, what is
        // given back must come again.
        let memory_bytes_max = if more.bool() { 16 << 20 } else { 2 * memory_bytes };
        builder = builder.memory_max(memory_bytes_max);
        let has_swap = match class {
            Class::Memory => random.bool(),
            Class::Maps => more.bool(),
            _ => false,
        };
        let mut swap = None;
        if has_swap {
            (builder, swap) = swap_in(builder, directory.path(), &mut more);
        }
        let (builder, dirty_bytes_max) = vary(builder, memory_bytes, &mut more);
        let cache = builder.dirty_max(dirty_bytes_max).build()?;
        let has_shares = shares::make(&cache, memory_bytes, &mut Rng::with_seed(seed ^ SHARES))?;
        let clock = Arc::new(Clock::new(threads + 1));
        let files = random.usize(1..4).min(files_max(class, has_swap, memory_bytes));
        let has_refusals = later.bool();
        let refusals = refusals(has_refusals, &mut later);
        let has_reopens = class == Class::Handles || class == Class::Maps && later.bool();
        let mut scene = Self {
            class,
            seed,
            cache,
            clock,
            targets: Vec::new(),
            threads,
            memory_bytes,
            weights: weights(random, &mut more),
            ends: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            free_calls: AtomicU64::new(0),
            seen: Seen::default(),
            may_fail: class == Class::Faults
                || matches!(class, Class::Handles | Class::Maps) && more.u32(0..3) == 0
                || class == Class::Maps && has_refusals,
            has_reopens,
            is_fleeting: has_reopens && (seed / CLASSES.len() as u64).is_multiple_of(2),
            refusals,
            dirty_bytes_max,
            folio_bytes_max: 0,
            has_shares,
            log: Mutex::default(),
            log_epoch: AtomicU64::new(0),
            _swap: swap,
            _directory: directory,
        };
        if class == Class::Memory {
            *scene.log.get_mut().expect("no panic") = Some(scene.cache.memory_file("log")?);
        }
        for number in 0..files {
            let target = scene.make_target(number, files, has_swap, random)?;
            scene.targets.push(target);
        }
        scene.folio_bytes_max = scene.largest_folio_bytes();
        Ok(scene)
    }

    fn make_target(
        &self,
        number: usize,
        files: usize,
        has_swap: bool,
        random: &mut Rng,
    ) -> anyhow::Result<Target> {
        let is_memory_file = match self.class {
            Class::Memory => true,
            Class::Maps => random.u32(0..4) == 0 && (has_swap || self.fits_another(files)),
            _ => false,
        };
        // Pages that cannot be written anywhere must fit.
        let len_bytes_max = if is_memory_file && !has_swap {
            self.unwritable_bytes_max(files)
        } else {
            (128 << 10) << random.u32(0..6)
        };
        let is_mappable = self.class == Class::Maps;
        let largest = if is_mappable || self.memory_bytes < 1 << 20 { 1 } else { 4 };
        let folio_bytes = 4096 << (2 * random.u64(0..largest)).min(4);
        let options = OpenOptions::new().read(true).write(true).mappable(is_mappable);
        // Not of `random`, so that what a seed chose before is chosen still.
        let is_in_thread = Rng::with_seed(self.seed ^ FAULTS ^ number as u64).bool();
        let options = options.faults(fault_mode(is_in_thread)).folio_bytes(folio_bytes);
        let options = self.in_share(options.len_max(len_bytes_max.max(1 << 16)), number);
        let low_bytes = 1 << Rng::with_seed(self.seed ^ LAST ^ number as u64).u32(12..22);
        let is_low = self.has_low_limits() && low_bytes < len_bytes_max;
        let first_options =
            if is_low { options.clone().len_max(low_bytes) } else { options.clone() };
        let faults = if self.may_fail { faults(random) } else { Faults::default() };
        // A load of a page that cannot be read is a signal.
        let faults = Faults { read: if is_mappable { 0 } else { faults.read }, ..faults };
        let slow = if random.bool() { 0 } else { 100_000 };
        let faults = Faults { slow: faults.slow.max(slow), ..faults };
        let name = format!("seed-{}-file-{number}", self.seed);
        let identity = FileIdentity::custom(1 + number as u64, 1 + number as u64);
        let device = (!is_memory_file).then(|| Device::new(name.clone(), identity, faults));
        let is_sealed = self.is_sealed(number);
        let device = device.map(|device| if is_sealed { device.sealed() } else { device });
        let (options, first_options) = sealed(is_sealed, options, first_options);
        let device = device.map(Arc::new);
        let first = match &device {
            Some(device) => {
                let backing: Arc<dyn bifolio::backing::Backing> = Arc::<Device>::clone(device);
                self.cache.open_backing(backing, &first_options)?
            }
            None => self.cache.memory_file_with(&name, &first_options)?,
        };
        if self.class != Class::Cuts && self.class != Class::Handles {
            first.raise_len_max(len_bytes_max)?;
            first.set_len(len_bytes_max)?;
        }
        let len_bytes_certain = AtomicU64::new(first.len());
        let handles = (0..self.threads).map(|_| Mutex::new(Some(first.clone()))).collect();
        let history = History::new(name, Arc::clone(&self.clock), len_bytes_max);
        let has_failed = AtomicBool::new(false);
        Ok(Target {
            device,
            history,
            options,
            handles,
            len_bytes_max,
            len_bytes_certain,
            has_failed,
            recent: Mutex::default(),
            invitation: AtomicU64::default(),
            met: AtomicU64::default(),
        })
    }

    /// Puts a file into a class, if files may be in one.
    fn in_share(&self, options: OpenOptions, number: usize) -> OpenOptions {
        let mut random = Rng::with_seed(self.seed ^ SHARES ^ (1 + number as u64));
        if self.has_shares { shares::choose(options, &mut random) } else { options }
    }

    /// Returns `true` if a file has a codec: one whose length does not change.
    fn is_sealed(&self, number: usize) -> bool {
        matches!(self.class, Class::Steady | Class::Faults)
            && Rng::with_seed(self.seed ^ CODEC ^ number as u64).u32(0..3) == 0
    }

    /// Returns the maximum length of a memory file without a swap, one of `files`: together they
    /// have a quarter of the lowest bound, because a chunk, metadata and the share of other files
    /// are not theirs.
    fn unwritable_bytes_max(&self, files: usize) -> u64 {
        ((lowest_bytes(self.memory_bytes) / 4 / files as u64) & !0xFFFF).max(64 << 10)
    }

    /// Returns `true` if another memory file without a swap fits in the lowest bound. In a map, the
    /// first store beyond the limit on such files is a signal.
    fn fits_another(&self, files: usize) -> bool {
        let known = self.targets.iter().filter(|target| target.device.is_none()).count() as u64;
        (known + 1) * self.unwritable_bytes_max(files) <= lowest_bytes(self.memory_bytes) / 4
    }

    /// Returns `true` if files are opened for less than they grow to, and their limit is raised.
    pub fn has_low_limits(&self) -> bool {
        let may_be_low = !self.has_reopens && self.class != Class::Maps;
        may_be_low && Rng::with_seed(self.seed ^ LAST).bool()
    }

    /// Returns `true` if files get shorter.
    pub fn has_cuts(&self) -> bool {
        let is_cut_map = self.class == Class::Maps && self.is_every_third();
        matches!(self.class, Class::Cuts | Class::Handles | Class::Memory) || is_cut_map
    }

    /// Returns `true` if raw loads and stores to its files raise no signals.
    pub fn has_maps(&self) -> bool {
        self.class == Class::Maps && !self.has_cuts()
    }

    fn is_every_third(&self) -> bool {
        (self.seed / CLASSES.len() as u64).is_multiple_of(3)
    }

    /// Turns refusals of kernel calls on or off.
    pub fn set_refusals(&self, is_on: bool) {
        for (call, share) in self.refusals {
            let is_on = is_on && self.class == Class::Maps;
            refuse(call, if is_on { share } else { 0 });
        }
    }

    /// Returns `true` if its first device is full until the scene ends.
    pub fn has_stuck_device(&self) -> bool {
        self.class == Class::Faults && self.is_every_third()
    }

    /// Returns `true` if its first device hangs until the threads that do not use it have made
    /// enough calls: one device must not block others.
    pub fn has_hung_device(&self) -> bool {
        let is_drawn = (self.seed / CLASSES.len() as u64) % 3 == 1;
        self.class == Class::Faults && self.targets.len() > 1 && is_drawn
    }

    /// Returns `true` if a thread never uses the hung device: half of the threads, in such scenes.
    pub fn is_free(&self, thread: usize) -> bool {
        self.has_hung_device() && thread >= self.threads / 2
    }

    /// Returns `true` if a thread only writes to the hung device, so that this device exhausts its
    /// share.
    pub fn is_greedy(&self, thread: usize) -> bool {
        self.has_hung_device() && thread == 0 && self.threads > 1
    }

    /// Returns the maximum of dirty bytes: the setting, or two of the largest folios. The rest of a
    /// truncated page is dirty independently of the limit, and stores through maps are counted when
    /// they are found.
    pub fn dirty_bytes_max(&self) -> u64 {
        let most = self.dirty_bytes_max.max(2 * self.folio_bytes_max);
        match self.class {
            Class::Maps => u64::MAX,
            _ if self.has_cuts() => most.max(self.memory_bytes / 2),
            _ => most,
        }
    }

    /// Returns the largest folio size of its files.
    pub fn largest_folio_bytes(&self) -> u64 {
        let handles = self.targets.iter().flat_map(|target| &target.handles);
        let sizes = handles
            .filter_map(|slot| slot.lock().expect("no panic").as_ref().map(File::folio_bytes));
        sizes.max().unwrap_or(4096)
    }
}

/// Returns the options of the first and the other opens of a file, with a codec if it has one.
fn sealed(is_sealed: bool, all: OpenOptions, first: OpenOptions) -> (OpenOptions, OpenOptions) {
    if !is_sealed {
        return (all, first);
    }
    let all = all.codec(Arc::new(WordKeys));
    (all.clone(), all)
}

/// Returns the kernel calls for maps that fail, each with its rate, in 1024.
fn refusals(has_refusals: bool, random: &mut Rng) -> [(Refusable, u32); 3] {
    [Refusable::Scan, Refusable::Protect, Refusable::Unmap].map(|call| {
        let share = random.choice([0, 32, 400]).unwrap_or(0);
        (call, if has_refusals { share } else { 0 })
    })
}

/// Creates storage for the pages of memory files: a temporary file, or a slow device that may
/// refuse some writes.
fn swap_in(
    builder: CacheBuilder,
    directory: &Path,
    random: &mut Rng,
) -> (CacheBuilder, Option<Arc<Device>>) {
    let builder = builder.swap_max(64 << 20);
    match random.u32(0..3) {
        0 | 1 => (builder.swap_directory(directory), None),
        _ => {
            let write = if random.bool() { 0 } else { 100_000 };
            let faults = Faults { write, short: 50_000, slow: 50_000, ..Faults::default() };
            let identity = FileIdentity::custom(100, 100);
            let device = Arc::new(Device::new("swap".to_owned(), identity, faults));
            let backing: Arc<dyn Backing> = Arc::<Device>::clone(&device);
            (builder.swap_backing(backing), Some(device))
        }
    }
}

/// Returns the maximum number of files: memory files without a swap, and the log, must stay below
/// the limit on such files, or writes to them fail.
fn files_max(class: Class, has_swap: bool, memory_bytes: u64) -> usize {
    let is_tight = class == Class::Memory && !has_swap && memory_bytes < 1 << 20;
    if is_tight { 1 } else { usize::MAX }
}

/// Returns the bound to which `Worker::resize` lowers that of `memory_bytes` at most.
fn lowest_bytes(memory_bytes: u64) -> u64 {
    (memory_bytes / 2).max(256 << 10)
}

/// Varies settings of batch sizes, mechanisms and dirty limits.
fn vary(mut builder: CacheBuilder, memory_bytes: u64, random: &mut Rng) -> (CacheBuilder, u64) {
    let mut dirty_bytes_max = memory_bytes / 3;
    builder = builder.readahead_max(random.choice([0, 64 << 10, 8 << 20]).unwrap_or(0));
    builder = builder.unmap_batch_folios(random.choice([1, 31, 31, 512]).unwrap_or(31));
    builder = builder.io_depth(random.choice([1, 4, 64, 64]).unwrap_or(64));
    if random.u32(0..4) == 0 {
        dirty_bytes_max = memory_bytes / random.choice([2, 4]).unwrap_or(2);
        builder = builder.dirty_background(dirty_bytes_max / 2);
    }
    if random.u32(0..4) == 0 {
        builder = builder.huge_pages(HugePages::Never).prefault(true);
    }
    let builder = match random.choice([Feature::IoUring, Feature::DirectIo]) {
        Some(feature) if random.u32(0..4) == 0 => builder.disable(feature),
        _ => builder,
    };
    (builder, dirty_bytes_max)
}

fn faults(random: &mut Rng) -> Faults {
    let mut rate = |most: u32| if random.bool() { 0 } else { random.u32(0..most) };
    Faults {
        read: rate(50_000),
        write: rate(200_000),
        short: rate(300_000),
        slow: rate(300_000),
        flush: rate(300_000),
    }
}

/// Draws the weights: some operations are left out, some are very frequent.
fn weights(random: &mut Rng, more: &mut Rng) -> Vec<u32> {
    let draw = |random: &mut Rng| random.choice([0, 1, 2, 4, 16]).unwrap_or(1);
    let mut weights: Vec<_> = (0..crate::work::FREQUENT).map(|_| draw(random)).collect();
    weights.extend((crate::work::FREQUENT..crate::work::OPERATIONS).map(|_| draw(more).min(4)));
    weights
}
