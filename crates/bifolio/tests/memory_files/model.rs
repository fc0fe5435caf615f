//! Random operations on memory files of one thread, against a vector with holes.
//!
//! A run that fails is made again with fewer operations, and those are printed with the seed.

use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bifolio_testing::{Limits, Model, Op, OpKind, Runner, Workload, shrink, with_seeds};

use crate::setup::{Setup, check_memory, resident_bytes};
use crate::support::FOLIO_SIZES;

/// Runs with fewer operations are tried this often.
const SHRINK_ATTEMPTS_MAX: usize = 300;

/// The kinds of operations of a memory file.
pub fn kinds() -> Vec<OpKind> {
    [&OpKind::ANY_FILE[..], &OpKind::MEMORY_FILE].concat()
}

/// Operations on one memory file, and how much of it there may be.
struct Run {
    setup: Setup,
    length_bytes_max: u64,
    memory_bytes: RangeInclusive<u64>,
    steps: usize,
}

impl Run {
    fn limits(&self) -> Limits {
        Limits {
            length_bytes_max: self.length_bytes_max,
            transfer_bytes_max: (self.length_bytes_max / 8) as usize,
            folio_bytes: self.setup.folio_bytes,
            memory_bytes: self.memory_bytes.clone(),
            kinds: kinds(),
        }
    }

    fn may_be_full(&self) -> bool {
        self.setup.keeps_in_memory() && *self.memory_bytes.start() < 2 * self.length_bytes_max
    }

    /// Runs what `seed` stands for; how many operations were refused for lack of memory.
    fn check(&self, seed: u64) -> u64 {
        let ops: Vec<_> = Workload::new(seed, self.limits()).take(self.steps).collect();
        let Err(problem) = self.agrees(&ops) else { return self.refusals(&ops) };
        let fails = |ops: &[Op]| {
            catch_unwind(AssertUnwindSafe(|| self.agrees(ops).err()))
                .unwrap_or_else(|_| Some("a panic".to_owned()))
        };
        match shrink(&ops, SHRINK_ATTEMPTS_MAX, fails) {
            Some((ops, problem)) => panic!("{:?}: {problem}\n{ops:#?}", self.setup),
            None => panic!("{:?}: {problem}; not again", self.setup),
        }
    }

    fn refusals(&self, ops: &[Op]) -> u64 {
        if self.may_be_full() { self.agrees(ops).unwrap_or(0) } else { 0 }
    }

    /// Whether the file agrees with the model; how many operations were refused.
    fn agrees(&self, ops: &[Op]) -> Result<u64, String> {
        let cache = self.setup.cache();
        let file = self.setup.file(&cache);
        let start = resident_bytes(&cache.stats());
        let model = Model::new(Vec::new()).in_memory(self.setup.folio_bytes);
        let mut runner = Runner::new(&cache, &file, model);
        if self.may_be_full() {
            runner = runner.may_be_full();
        }
        for op in ops {
            let refused = runner.refused();
            runner.apply(op).map_err(|failure| failure.to_string())?;
            let room = self.setup.keeps_in_memory().then(|| runner.model().room_bytes());
            check_memory(&cache, room).map_err(|problem| format!("{op:?}: {problem}"))?;
            if runner.refused() > refused {
                self.check_full(&runner, cache.stats().bound_bytes, op)?;
            }
        }
        runner.check_all().map_err(|failure| failure.to_string())?;
        let refused = runner.refused();
        drop(file);
        match resident_bytes(&cache.stats()) {
            left if left == start => Ok(refused),
            left => Err(format!("{left} bytes stay behind the file")),
        }
    }

    /// A cache that refuses has to be about as full as it can be.
    fn check_full(&self, runner: &Runner<'_>, bound_bytes: u64, op: &Op) -> Result<(), String> {
        let wanted = self.length_bytes_max / 8 + 2 * self.setup.folio_bytes;
        let room = runner.model().room_bytes();
        // An eighth for descriptors and tables.
        if room + wanted >= bound_bytes / 8 * 7 {
            return Ok(());
        }
        Err(format!("{op:?} was refused with {room} of {bound_bytes} bytes in use"))
    }
}

/// Lengths that go with the folio sizes.
fn length_bytes_max(folio_bytes: u64) -> u64 {
    match folio_bytes {
        4096 => 700_000,
        65_536.. if folio_bytes > 1 << 20 => 9_000_000,
        _ => 1_500_000,
    }
}

#[test]
fn a_file_agrees_with_the_model_in_every_folio_size() {
    for folio_bytes in FOLIO_SIZES {
        let length_bytes_max = length_bytes_max(folio_bytes);
        let memory_bytes = 2 * length_bytes_max + (4 << 20);
        let run = Run {
            setup: Setup::new(memory_bytes, folio_bytes),
            length_bytes_max,
            memory_bytes: 2 * length_bytes_max..=memory_bytes,
            steps: if folio_bytes > 1 << 20 { 60 } else { 250 },
        };
        with_seeds(if folio_bytes > 1 << 20 { 2 } else { 5 }, |seed| {
            run.check(seed);
        });
    }
}

#[test]
fn a_file_larger_than_the_memory_is_refused_room_and_agrees_with_the_model() {
    for folio_bytes in FOLIO_SIZES {
        let length_bytes_max = length_bytes_max(folio_bytes);
        let memory_bytes = (length_bytes_max / 2).max(2 * folio_bytes + (1 << 19));
        let run = Run {
            setup: Setup::new(memory_bytes, folio_bytes),
            length_bytes_max,
            memory_bytes: memory_bytes / 8 * 7..=memory_bytes,
            steps: if folio_bytes > 1 << 20 { 60 } else { 250 },
        };
        let refused = std::cell::Cell::new(0);
        with_seeds(if folio_bytes > 1 << 20 { 2 } else { 5 }, |seed| {
            refused.set(refused.get() + run.check(seed));
        });
        eprintln!("folios of {folio_bytes}: {} operations refused", refused.get());
    }
}
