//! Random operations of one thread on one small file, each compared with a plain vector.
//!
//! A case is a cache, a file and some thousand operations, all drawn from a seed. The operations,
//! the model and the comparison are those of the library's own tests (`bifolio-testing`); this adds
//! kinds of operations (maps, advice, syncs of ranges, reopening), all kinds of files, and many
//! more of each. A failed case is reduced to fewer operations, which are printed: with `--keep` the
//! program repeats exactly these.
//!
//! Checks: after each operation the bytes read and the length; sometimes the bound; when a handle
//! closes, the file on the disk; at the end every byte, the resident size, and that the cache is
//! empty.

use crate::history::Violation;
use crate::memory;
use crate::scene::{can_map, fault_mode};
use crate::watchdog;
use bifolio::{Cache, DirectIo, FaultMode, File, OpenOptions};
use bifolio_testing::{Limits, Model, Op, OpKind, Runner, Workload, fill_bytes, shrink};
use fastrand::Rng;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Operations of a case.
pub const STEPS: usize = 2000;
/// Time limit for the reduction of a failed case.
const SHRINK_TIME: Duration = Duration::from_secs(120);
const SHRINK_ATTEMPTS_MAX: usize = 2000;
/// Maximum operations of a printed list that could not be reduced.
const TOLD_MAX: usize = 60;

/// Storage of the pages of a case that are not in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    Direct,
    Buffered,
    /// None.
    Memory,
    Swapped,
}

/// Settings of the exerciser: one thread, one small file.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    storage: Storage,
    is_mappable: bool,
    /// Threads that serve its faults, if it is mappable.
    faults: FaultMode,
    memory_bytes: u64,
    folio_bytes: u64,
    length_bytes_max: u64,
    /// Initial length of a file on the disk.
    length_bytes: u64,
}

/// An operation, or a step that the runner cannot do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Op(Op),
    /// Closes the file, compares it with the disk, and opens it again.
    Reopen,
}

/// Runs the case of a seed, or the steps of it that `keep` lists. Returns their number.
pub fn play(seed: u64, keep: &[usize]) -> Result<u64, Violation> {
    let case = Case::new(seed);
    let all: Vec<(usize, Step)> = case.steps().into_iter().enumerate().collect();
    let kept: Vec<_> = match keep {
        [] => all,
        keep => all.into_iter().filter(|(number, _)| keep.contains(number)).collect(),
    };
    match case.agrees(&kept) {
        Ok(()) => Ok(kept.len() as u64),
        Err(problem) => Err(Violation(case.tell(&kept, problem))),
    }
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let storages = [Storage::Direct, Storage::Buffered, Storage::Memory, Storage::Swapped];
        let storage = random.choice(storages).unwrap_or(Storage::Direct);
        let is_mappable = random.u32(0..4) >= 2 && can_map();
        let memory_bytes = (256 << 10) << random.u32(0..6);
        let mut folio_bytes = if is_mappable { 4096 } else { 4096 << random.u32(0..10) };
        let folio_bytes_max = (memory_bytes / 32).max(64 << 10);
        while 2 * folio_bytes + (256 << 10) > memory_bytes && folio_bytes > 4096
            || folio_bytes > folio_bytes_max
        {
            folio_bytes /= 2;
        }
        let most = (random.u64(1..=3) * (64 << 10)) << random.u32(0..5);
        // Pages that have nowhere to go must about fit; an uneven end otherwise.
        let length_bytes_max = match storage {
            Storage::Memory => most.min(memory_bytes / 2),
            _ => most + random.u64(0..8192),
        };
        let length_bytes = random.u64(0..=length_bytes_max);
        // The last, so that what a seed chose before is chosen still.
        let faults = fault_mode(random.bool());
        let case = Self {
            seed,
            storage,
            is_mappable,
            faults,
            memory_bytes,
            folio_bytes,
            length_bytes_max,
            length_bytes,
        };
        assert!(case.memory_bytes_min() <= memory_bytes);
        case
    }

    fn is_memory_file(&self) -> bool {
        matches!(self.storage, Storage::Memory | Storage::Swapped)
    }

    /// Returns the bound to which it is lowered.
    fn memory_bytes_min(&self) -> u64 {
        let needed = if self.folio_bytes == 4096 { 0 } else { 2 * self.folio_bytes };
        (needed + (256 << 10)).max(self.memory_bytes / 8 * 5)
    }

    fn kinds(&self) -> Vec<OpKind> {
        let mut kinds = [&OpKind::ANY_FILE[..], &OpKind::EXERCISER].concat();
        match (self.is_memory_file(), self.is_mappable) {
            // A map faults in neighbours, so that the holes are unspecified.
            (true, true) => kinds.extend([OpKind::Allocate, OpKind::PunchHole]),
            _ => kinds.extend(OpKind::ALLOCATION),
        }
        if self.is_mappable {
            kinds.extend(OpKind::MAPPABLE_FILE);
        }
        kinds
    }

    fn steps(&self) -> Vec<Step> {
        let limits = Limits {
            length_bytes_max: self.length_bytes_max,
            transfer_bytes_max: (self.length_bytes_max / 4) as usize,
            folio_bytes: self.folio_bytes,
            memory_bytes: self.memory_bytes_min()..=self.memory_bytes,
            kinds: self.kinds(),
        };
        let mut random = Rng::with_seed(self.seed ^ 1);
        let workload = Workload::new(self.seed, limits);
        let step = |op| match !self.is_memory_file() && random.u32(0..100) == 0 {
            true => Step::Reopen,
            false => Step::Op(op),
        };
        workload.take(STEPS).map(step).collect()
    }

    /// Runs the steps on a new file; the error describes a difference.
    fn agrees(&self, steps: &[(usize, Step)]) -> Result<(), String> {
        let directory = tempfile::tempdir().map_err(text)?;
        let path = directory.path().join("file");
        let start = match self.is_memory_file() {
            true => Vec::new(),
            false => fill_bytes(self.seed, self.length_bytes as usize),
        };
        std::fs::write(&path, &start).map_err(text)?;
        let mut model = Model::new(start);
        if self.is_memory_file() {
            model = model.in_memory(self.folio_bytes);
        }
        let mut builder = Cache::builder()
            .memory(self.memory_bytes)
            .reclaim_wait_max(Duration::from_millis(20_000));
        builder =
            builder.dirty_age_max(Duration::from_millis([5, 50, 30_000][self.seed as usize % 3]));
        if self.storage == Storage::Swapped {
            builder = builder.swap_directory(directory.path()).swap_max(64 << 20);
        }
        let cache = builder.build().map_err(text)?;
        let mut file = self.open(&cache, &path)?;
        let mut sessions = steps.split(|(_, step)| *step == Step::Reopen).peekable();
        while let Some(session) = sessions.next() {
            model = self.live(&cache, &file, model, session)?;
            if sessions.peek().is_some() {
                file.close().map_err(text)?;
                compare_with_disk(&model, &path)?;
                file = self.open(&cache, &path)?;
            }
        }
        let (stats, resident) = (cache.stats(), memory::resident_bytes());
        file.close().map_err(text)?;
        if !self.is_memory_file() {
            compare_with_disk(&model, &path)?;
        }
        memory::check_empty(&cache, self.folio_bytes).map_err(|told| told.0)?;
        cache.close().map_err(text)?;
        drop(cache);
        memory::check_resident(&stats, resident, memory::resident_bytes()).map_err(|told| told.0)
    }

    fn open(&self, cache: &Cache, path: &Path) -> Result<File, String> {
        let options = OpenOptions::new().read(true).write(true).folio_bytes(self.folio_bytes);
        let options = options.mappable(self.is_mappable).faults(self.faults).len_max(16 << 20);
        match self.storage {
            Storage::Memory | Storage::Swapped => cache.memory_file_with("file", &options),
            Storage::Direct => cache.open(path, &options),
            Storage::Buffered => cache.open(path, &options.direct(DirectIo::Never)),
        }
        .map_err(text)
    }

    /// Runs the steps from one open of the file to the next. Returns the model.
    fn live(
        &self,
        cache: &Cache,
        file: &File,
        model: Model,
        steps: &[(usize, Step)],
    ) -> Result<Model, String> {
        let mut runner = Runner::new(cache, file, model);
        if self.storage == Storage::Memory {
            runner = runner.may_be_full();
        }
        if self.storage == Storage::Swapped {
            runner = runner.may_be_in_use();
        }
        for (number, step) in steps {
            watchdog::progress();
            let Step::Op(op) = step else { continue };
            runner.apply(op).map_err(|failure| format!("step {number}: {}", failure.problem))?;
            if number % 16 == 0 {
                let stats = cache.stats();
                if stats.memory.used_bytes > stats.memory.bound_bytes {
                    return Err(format!("step {number}: beyond the bound: {stats:?}"));
                }
            }
        }
        runner.check_all().map_err(|failure| failure.to_string())?;
        Ok(runner.into_model())
    }

    /// Returns the failure, with as few steps as possible.
    fn tell(&self, steps: &[(usize, Step)], problem: String) -> String {
        let begun = Instant::now();
        println!("torture: the exerciser's seed {} failed ({problem}); shrinking", self.seed);
        let fails = |steps: &[(usize, Step)]| {
            if begun.elapsed() > SHRINK_TIME {
                return None;
            }
            catch_unwind(AssertUnwindSafe(|| self.agrees(steps).err()))
                .unwrap_or_else(|_| Some("a panic".to_owned()))
        };
        let (steps, problem, again) = match shrink(steps, SHRINK_ATTEMPTS_MAX, fails) {
            Some((steps, problem)) => (steps, problem, true),
            None => (steps.to_vec(), format!("{problem} (not again)"), false),
        };
        let mut told = format!("{self:?}\n{problem}\n");
        for (number, step) in steps.iter().take(TOLD_MAX) {
            let _ = writeln!(told, "  {number}: {step:?}");
        }
        if steps.len() > TOLD_MAX {
            let _ = writeln!(told, "  and {} more", steps.len() - TOLD_MAX);
        }
        if again {
            let numbers: Vec<_> = steps.iter().map(|(number, _)| number.to_string()).collect();
            let _ = writeln!(
                told,
                "just these: cargo x torture --only exerciser --seed {} --keep {}",
                self.seed,
                numbers.join(",")
            );
        }
        told
    }
}

fn compare_with_disk(model: &Model, path: &Path) -> Result<(), String> {
    let found = std::fs::read(path).map_err(text)?;
    model.compare(&found).map_err(|problem| format!("on the disk, after a close: {problem}"))
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_one_case_and_some_of_its_steps_can_be_made_alone() {
        let _alone = memory::alone();
        let (case, again) = (Case::new(5), Case::new(5));
        assert_eq!(case.steps(), again.steps());
        assert_eq!(play(5, &[1, 2, 3, 1500]).ok(), Some(4));
    }

    #[test]
    fn a_failure_is_told_with_few_steps() {
        let _alone = memory::alone();
        let case = Case { storage: Storage::Buffered, is_mappable: false, ..Case::new(7) };
        let mut steps: Vec<_> = case.steps().into_iter().enumerate().take(40).collect();
        // No call can write there.
        let wrong = Op::Write { position_bytes: 1 << 30, length: 1, fill: 0 };
        steps[20].1 = Step::Op(wrong);
        let problem = case.agrees(&steps).unwrap_err();
        let told = case.tell(&steps, problem);
        assert!(told.contains("--keep 20\n"), "{told}");
    }
}
