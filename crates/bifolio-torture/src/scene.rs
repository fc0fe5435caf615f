//! A scene: one cache, some files, and what is done to them, all drawn from a seed.

use crate::device::{Device, Faults};
use crate::history::{Clock, History};
use bifolio::{Cache, File, FileIdentity, OpenOptions};
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

/// What a scene is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Class {
    /// Reads, writes, pins and syncs; nobody cuts, nothing fails.
    Steady,
    /// Files are cut and grow, too.
    Cuts,
    /// Devices fail, are short, slow, full or hang for a while.
    Faults,
    /// Memory files, with and without swap: holes are punched, pages swapped.
    Memory,
    /// Files that are mapped: raw loads and stores.
    Maps,
    /// Handles come and go, the last of a file among them.
    Handles,
    /// A child process is killed, again and again.
    Kills,
    /// One thread on one small file, compared with a vector.
    Exerciser,
}

/// All of them.
pub const CLASSES: [Class; 8] = [
    Class::Steady,
    Class::Cuts,
    Class::Faults,
    Class::Memory,
    Class::Maps,
    Class::Handles,
    Class::Kills,
    Class::Exerciser,
];

impl Class {
    /// As it is written on the command line.
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// One file of a scene.
#[derive(Debug)]
pub struct Target {
    /// Its storage; none for a memory file.
    pub device: Option<Arc<Device>>,
    pub history: History,
    pub options: OpenOptions,
    /// A handle for each thread that wants one; taken out while the thread opens it anew.
    pub handles: Vec<Mutex<Option<File>>>,
    pub len_bytes_max: u64,
    /// The file has certainly been so long, if nobody cuts it.
    pub len_bytes_certain: AtomicU64,
    /// A flush or a write has failed, so that syncs may fail.
    pub has_failed: AtomicBool,
}

/// See the head of the file.
#[derive(Debug)]
pub struct Scene {
    pub class: Class,
    pub seed: u64,
    pub cache: Cache,
    pub clock: Arc<Clock>,
    pub targets: Vec<Target>,
    pub threads: usize,
    pub memory_bytes: u64,
    /// How often each operation is drawn.
    pub weights: Vec<u32>,
    pub ends: AtomicBool,
    pub calls: AtomicU64,
    _directory: tempfile::TempDir,
}

impl Scene {
    /// The scene that `seed` describes.
    pub fn new(class: Class, seed: u64, threads: usize) -> anyhow::Result<Self> {
        let mut random = Rng::with_seed(seed);
        let random = &mut random;
        let memory_bytes = (256 << 10) << random.u32(0..5);
        let directory = tempfile::tempdir()?;
        let mut builder = Cache::builder().memory(memory_bytes).memory_max(16 << 20);
        builder = builder.dirty_age_ms_max(random.choice([5, 20, 200, 30_000]).unwrap_or(20));
        builder = builder.reclaim_wait_ms_max(60_000);
        let has_swap = class == Class::Memory && random.bool();
        if has_swap {
            builder = builder.spill_in(directory.path()).spill_bytes_max(64 << 20);
        }
        let cache = builder.build()?;
        let clock = Arc::new(Clock::new(threads + 1));
        let files = random.usize(1..4);
        let mut scene = Self {
            class,
            seed,
            cache,
            clock,
            targets: Vec::new(),
            threads,
            memory_bytes,
            weights: weights(random),
            ends: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            _directory: directory,
        };
        for number in 0..files {
            let target = scene.make_target(number, files, has_swap, random)?;
            scene.targets.push(target);
        }
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
            Class::Maps => random.u32(0..4) == 0,
            _ => false,
        };
        // What cannot be written anywhere must fit.
        let len_bytes_max = if is_memory_file && !has_swap {
            ((self.memory_bytes / 4 / files as u64) & !0xFFFF).max(64 << 10)
        } else {
            (128 << 10) << random.u32(0..6)
        };
        let is_mappable = self.class == Class::Maps;
        let largest = if is_mappable || self.memory_bytes < 1 << 20 { 1 } else { 4 };
        let folio_bytes = 4096 << (2 * random.u64(0..largest)).min(4);
        let options = OpenOptions::new().read(true).write(true).mappable(is_mappable);
        let options = options.folio_bytes(folio_bytes).len_max(len_bytes_max.max(1 << 16));
        let faults = if self.class == Class::Faults { faults(random) } else { Faults::default() };
        let slow = if random.bool() { 0 } else { 100_000 };
        let faults = Faults { slow: faults.slow.max(slow), ..faults };
        let name = format!("seed-{}-file-{number}", self.seed);
        let identity = FileIdentity::custom(1 + number as u64, 1 + number as u64);
        let device = (!is_memory_file).then(|| Device::new(name.clone(), identity, faults));
        let device = device.map(Arc::new);
        let first = match &device {
            Some(device) => {
                let backing: Arc<dyn bifolio::Backing> = Arc::<Device>::clone(device);
                self.cache.open_backing(backing, &options)?
            }
            None => self.cache.memory_file_with(&name, &options)?,
        };
        if self.class != Class::Cuts && self.class != Class::Handles {
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
        })
    }

    /// Whether files get shorter.
    pub fn has_cuts(&self) -> bool {
        matches!(self.class, Class::Cuts | Class::Handles | Class::Memory)
    }

    /// Whether an error of the storage is nothing strange.
    pub fn may_fail(&self) -> bool {
        self.class == Class::Faults
    }
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

/// Some operations are left out, some are wildly common.
fn weights(random: &mut Rng) -> Vec<u32> {
    (0..crate::work::OPERATIONS).map(|_| random.choice([0, 1, 2, 4, 16]).unwrap_or(1)).collect()
}
