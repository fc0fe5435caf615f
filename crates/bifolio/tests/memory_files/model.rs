//! Random operations of one thread on memory files, compared with a vector with holes.
//!
//! A failed run is reduced to fewer operations, which are printed with the seed.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bifolio_testing::{Limits, Model, Op, OpKind, Runner, Workload, shrink, with_seeds};

use crate::setup::{Setup, check_empty, check_memory};
use crate::support::{FOLIO_SIZES, MEMORY_FOR_ALL, SMALL_FOLIO_SIZES};

/// Maximum attempts of the reduction.
const SHRINK_ATTEMPTS_MAX: usize = 60;

/// Returns the kinds of operations of a memory file.
pub fn kinds() -> Vec<OpKind> {
    [&OpKind::ANY_FILE[..], &OpKind::ALLOCATION].concat()
}

/// Operations on one memory file, and limits of its size.
struct Run {
    setup: Setup,
    length_bytes_max: u64,
    memory_bytes: RangeInclusive<u64>,
    steps: usize,
    /// Pages that were swapped out.
    swapped: Cell<u64>,
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

    /// Runs the operations of `seed`. Returns how many were refused for lack of memory.
    fn check(&self, seed: u64) -> u64 {
        let mut ops: Vec<_> = Workload::new(seed, self.limits()).take(self.steps).collect();
        if seed.is_multiple_of(2) {
            // A full file to begin with.
            let length = self.length_bytes_max as usize;
            ops.insert(0, Op::Write { position_bytes: 0, length, fill: seed });
        }
        let problem = match self.agrees(&ops) {
            Ok(refused) => return refused,
            Err(problem) => problem,
        };
        let fails = |ops: &[Op]| {
            catch_unwind(AssertUnwindSafe(|| self.agrees(ops).err()))
                .unwrap_or_else(|_| Some("a panic".to_owned()))
        };
        match shrink(&ops, SHRINK_ATTEMPTS_MAX, fails) {
            Some((ops, problem)) => panic!("{:?}: {problem}\n{ops:?}", self.setup),
            None => panic!("{:?}: {problem}; not again", self.setup),
        }
    }

    /// Checks that the file agrees with the model. Returns how many operations were refused.
    fn agrees(&self, ops: &[Op]) -> Result<u64, String> {
        let cache = self.setup.cache();
        let file = self.setup.file(&cache);
        let model = Model::new(Vec::new()).in_memory(self.setup.folio_bytes);
        let mut runner = Runner::new(&cache, &file, model);
        if self.may_be_full() {
            runner = runner.may_be_full();
        }
        if !self.setup.keeps_in_memory() {
            runner = runner.may_be_in_use();
        }
        for op in ops {
            let refused = runner.refused();
            runner.apply(op).map_err(|failure| failure.to_string())?;
            let room = self.setup.keeps_in_memory().then(|| runner.model().room_bytes());
            check_memory(&cache, room).map_err(|problem| format!("{op:?}: {problem}"))?;
            if runner.refused() > refused {
                self.check_full(&runner, cache.stats().memory.bound_bytes, op)?;
            }
        }
        runner.check_all().map_err(|failure| failure.to_string())?;
        let refused = runner.refused();
        self.swapped.set(self.swapped.get() + cache.stats().storage.swapped_out_pages);
        drop(file);
        check_empty(&cache, &self.setup, self.setup.folio_bytes).map(|()| refused)
    }

    /// Checks that a cache that refuses is almost full.
    fn check_full(&self, runner: &Runner<'_>, bound_bytes: u64, op: &Op) -> Result<(), String> {
        let wanted = match op {
            Op::Write { length, .. } => *length as u64,
            _ => self.length_bytes_max / 8,
        };
        let wanted = wanted + 2 * self.setup.folio_bytes;
        let room = *runner.model().room_bytes().end();
        // A quarter for descriptors, tables, and slots that a smaller bound has taken.
        if room + wanted >= bound_bytes / 4 * 3 {
            return Ok(());
        }
        Err(format!("{op:?} was refused with {room} of {bound_bytes} bytes in use"))
    }
}

/// Returns a maximum length suitable for the folio size.
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
        let memory_bytes = MEMORY_FOR_ALL + (2 << 20);
        let run = Run {
            setup: Setup::new(memory_bytes, folio_bytes),
            length_bytes_max,
            memory_bytes: memory_bytes - (2 << 20)..=memory_bytes,
            steps: if folio_bytes > 1 << 20 { 60 } else { 250 },
            swapped: Cell::new(0),
        };
        with_seeds(if folio_bytes > 1 << 20 { 2 } else { 5 }, |seed| {
            run.check(seed);
        });
    }
}

#[test]
fn a_file_larger_than_memory_is_refused_and_agrees() {
    let refused = Cell::new(0);
    for folio_bytes in SMALL_FOLIO_SIZES {
        let length_bytes_max = length_bytes_max(folio_bytes);
        let memory_bytes = (length_bytes_max / 2).max(2 * folio_bytes + (1 << 19));
        let run = Run {
            setup: Setup::new(memory_bytes, folio_bytes),
            length_bytes_max,
            memory_bytes: memory_bytes / 8 * 7..=memory_bytes,
            steps: 250,
            swapped: Cell::new(0),
        };
        with_seeds(5, |seed| {
            refused.set(refused.get() + run.check(seed));
        });
    }
    assert!(refused.get() > 0, "nothing was refused");
}

#[test]
fn a_file_larger_than_memory_agrees_with_the_model() {
    for folio_bytes in SMALL_FOLIO_SIZES {
        let length_bytes_max = length_bytes_max(folio_bytes);
        let memory_bytes = (length_bytes_max / 3).max(2 * folio_bytes + (1 << 19));
        let run = Run {
            setup: Setup::swapping(memory_bytes, folio_bytes),
            length_bytes_max,
            memory_bytes: (memory_bytes / 8 * 7).max(2 * folio_bytes + (1 << 18))..=memory_bytes,
            steps: 250,
            swapped: Cell::new(0),
        };
        with_seeds(5, |seed| {
            run.check(seed & !1);
        });
        assert!(run.swapped.get() > 0, "nothing was swapped");
    }
}
