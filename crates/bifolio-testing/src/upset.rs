//! A case of one thread and one file whose storage fails at the n-th call: created from bytes, so
//! that a fuzzer can search for them.
//!
//! A case is a file of one's own backing or a memory file beyond the bound whose swap is one, and
//! steps: operations, faults, the end of all faults, a close and another opening, dirty bytes that
//! are given up. Every sequence of bytes is a case, and neighbours are similar ones:
//!
//! ```text
//!   byte 0        kind of file, needed alignment
//!   byte 1        size of folios        byte 2   bound      byte 3   greatest length
//!   then          8 bytes a step: what, place (3), length (2), variety (2)
//! ```
//!
//! Checks: as long as no fault has struck, nothing fails; afterwards an operation that
//! fails has changed nothing, but for what its documentation says; once nothing fails any more, a
//! second sync succeeds, every byte is what the model says, and the storage holds it.

use std::sync::Arc;
use std::time::Duration;

use bifolio::backing::{Alignment, FileIdentity};
use bifolio::{Access, Cache, File, OpenOptions};

use crate::op::{Advice, FILL_ZEROS};
use crate::{Call, Fault, FaultyBacking, MemoryBacking, Model, Op, Runner, fill_bytes};

const PAGE: u64 = 4096;
/// Bytes of a step.
const STEP_BYTES: usize = 8;
/// Bytes before the first one.
const HEAD_BYTES: usize = 4;
/// Maximum number of steps.
const STEPS_MAX: usize = 400;
/// Errors of the storage.
const ERRNOS: [i32; 4] = [libc::EIO, libc::ENOSPC, libc::EINTR, libc::EAGAIN];
const ADVICE: [Advice; 7] = [
    Advice::Access(Access::Normal),
    Advice::Access(Access::Sequential),
    Advice::Access(Access::Random),
    Advice::Access(Access::NoReuse),
    Advice::Prefetch,
    Advice::Evict,
    Advice::Populate,
];

/// A case: the initial state and a sequence of steps with injected faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpsetCase {
    is_memory_file: bool,
    block_bytes: u64,
    folio_bytes: u64,
    memory_bytes: u64,
    length_bytes_max: u64,
    steps: Vec<UpsetStep>,
}

/// One step of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpsetStep {
    /// An operation.
    Op(Op),
    /// The n-th call of a kind, and `times` in total, fail or are short.
    Fail {
        /// Which calls.
        call: Call,
        /// First affected call; 1 is the next.
        nth: u64,
        /// Number of affected calls.
        times: u64,
        /// Error number; 0 for a short transfer.
        errno: i32,
        /// Bytes by which a short transfer is shorter.
        short_bytes: usize,
    },
    /// Removes all faults: the second sync then writes everything.
    Heal,
    /// Closes the file and opens it again, without faults.
    Reopen,
    /// Discards bytes that are not on storage.
    Discard,
}

/// The outcome of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpsetTally {
    /// Steps that were made.
    pub steps: u64,
    /// Calls that were affected by faults.
    pub struck: u64,
    /// Operations that were refused.
    pub refused: u64,
}

impl UpsetCase {
    /// Creates the case that bytes encode; missing bytes are zeros.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let head = |number: usize| bytes.get(number).copied().unwrap_or(0);
        let folio_bytes = PAGE << [0, 0, 0, 0, 1, 2, 4, 4][usize::from(head(1) % 8)];
        let memory_bytes = (256 << 10) << [0, 0, 1, 2][usize::from(head(2) % 4)];
        let folio_bytes = if memory_bytes < 1 << 20 { PAGE } else { folio_bytes };
        let mut case = Self {
            is_memory_file: head(0) & 3 == 3,
            block_bytes: [1, 512, PAGE][usize::from(head(0) >> 2) % 3],
            folio_bytes,
            memory_bytes,
            length_bytes_max: (64 << 10) * u64::from(head(3) % 16 + 1) + u64::from(head(3)),
            steps: Vec::new(),
        };
        let steps = bytes.get(HEAD_BYTES..).unwrap_or_default().chunks_exact(STEP_BYTES);
        let steps: Vec<_> =
            steps.take(STEPS_MAX).map(|step| case.step(step.try_into().expect("8"))).collect();
        case.steps = steps;
        case
    }

    /// The steps.
    pub fn steps(&self) -> &[UpsetStep] {
        &self.steps
    }

    /// Returns the case with other steps, for example fewer.
    pub fn with_steps(&self, steps: &[UpsetStep]) -> Self {
        Self { steps: steps.to_vec(), ..self.clone() }
    }

    fn step(&self, bytes: [u8; STEP_BYTES]) -> UpsetStep {
        let [what, ..] = bytes;
        let variety = u16::from_le_bytes([bytes[6], bytes[7]]);
        let (position_bytes, length) = self.range(bytes);
        let fill = if variety & 7 == 7 { FILL_ZEROS } else { u64::from(variety) };
        let ranges = || {
            let count = u64::from(variety & 3) + 1;
            let step = u64::from(variety >> 2) * 512;
            let places = (0..count).map(|number| (position_bytes + number * step) % self.length());
            places.map(|place| (place, length.min((self.length() - place) as usize))).collect()
        };
        let op = match what % 32 {
            0..4 => Op::Write { position_bytes, length, fill },
            4..7 => Op::Read { position_bytes, length },
            7 => Op::ReadMany { ranges: ranges() },
            8 => Op::Pin { position_bytes, length },
            9 => Op::Hold { position_bytes, length },
            10 | 11 => Op::PinMut { position_bytes, length, fill },
            12 | 13 => Op::PinMany { ranges: ranges() },
            14 | 15 => Op::SetLen { length_bytes: position_bytes },
            16 => Op::SyncData,
            17 => Op::SyncAll,
            18 => Op::SyncRange { position_bytes, length },
            19 => {
                let most = self.memory_bytes;
                let least =
                    (256 << 10) + if self.folio_bytes == PAGE { 0 } else { 2 * self.folio_bytes };
                Op::SetMemory {
                    bytes: most - (most - least.min(most)) * u64::from(variety % 256) / 256,
                }
            }
            20 | 21 => {
                let advice = ADVICE[usize::from(variety) % ADVICE.len()];
                Op::Advise { position_bytes, length, advice }
            }
            22 if self.is_memory_file => Op::Allocate { position_bytes, length },
            22 | 23 if self.is_memory_file => Op::PunchHole { position_bytes, length },
            22 => return UpsetStep::Discard,
            23 => return UpsetStep::Reopen,
            24 => return UpsetStep::Heal,
            _ => return self.fault(bytes),
        };
        UpsetStep::Op(op)
    }

    fn fault(&self, bytes: [u8; STEP_BYTES]) -> UpsetStep {
        let [_, which, nth, times, errno, short @ ..] = bytes;
        let call = match which % 8 {
            0..3 => Call::Read,
            3..6 => Call::Write,
            // A memory file is never flushed.
            6 if variety_of(short) => Call::SyncAll,
            6 => Call::SyncData,
            _ => Call::SetLen,
        };
        let is_transfer = matches!(call, Call::Read | Call::Write);
        let errno = ERRNOS.get(usize::from(errno) % 6).copied().unwrap_or(0);
        let errno = if errno == 0 && !is_transfer { libc::EIO } else { errno };
        let short_bytes = usize::from(u16::from_le_bytes([short[0], short[1]]));
        UpsetStep::Fail {
            call,
            nth: u64::from(nth % 16) + 1,
            times: u64::from(times % 3) + 1,
            errno,
            short_bytes: if short_bytes == 0 { usize::MAX } else { short_bytes },
        }
    }

    fn length(&self) -> u64 {
        self.length_bytes_max
    }

    /// Returns a position and a length within the maximum length of the file; often at edges.
    fn range(&self, bytes: [u8; STEP_BYTES]) -> (u64, usize) {
        let place = (u64::from(u16::from_le_bytes([bytes[1], bytes[2]])) * self.length()) >> 16;
        let side = u64::from(bytes[3] >> 3);
        let position = match bytes[3] & 7 {
            0 | 1 => place,
            2 => place / PAGE * PAGE,
            3 => place / PAGE * PAGE + side,
            4 => (place / PAGE * PAGE).saturating_sub(side),
            5 => place / self.folio_bytes * self.folio_bytes,
            6 => self.length() - 1 - side,
            _ => side * PAGE % self.length(),
        };
        let position = position.min(self.length() - 1);
        let length = match bytes[5] >> 6 {
            0 => u64::from(bytes[4]),
            1 => PAGE * u64::from(bytes[4] % 8 + 1),
            2 => self.folio_bytes * u64::from(bytes[4] % 4 + 1),
            _ => u64::from(u16::from_le_bytes([bytes[4], bytes[5] & 63])) * 8,
        };
        (position, length.clamp(1, self.length() - position) as usize)
    }

    /// Runs the case; the error says what is wrong, and at which step.
    pub fn check(&self) -> Result<UpsetTally, String> {
        let start = match self.is_memory_file {
            true => Vec::new(),
            false => fill_bytes(1, (self.length() / 2) as usize),
        };
        let alignment =
            Alignment { memory_bytes: self.block_bytes, offset_bytes: self.block_bytes };
        let memory = MemoryBacking::strict(start.clone(), alignment);
        let memory = Arc::new(memory.identified(FileIdentity::custom(1, 1)));
        let faulty = Arc::new(FaultyBacking::over(memory.clone()));
        // Pages are written in the background when the steps say so, and not by the clock.
        let builder = Cache::builder()
            .memory(self.memory_bytes)
            .dirty_age_max(Duration::from_millis(600_000));
        let builder = match self.is_memory_file {
            true => builder.swap_backing(faulty.clone()).swap_max(16 << 20),
            false => builder,
        };
        let cache = builder.build().map_err(text)?;
        let mut model = Model::new(start);
        if self.is_memory_file {
            model = model.in_memory(self.folio_bytes);
        }
        let mut made = Made { case: self, memory, faulty, cache, tally: UpsetTally::default() };
        made.run(model)?;
        made.cache.close().map_err(text)?;
        made.tally.struck = made.faulty.struck();
        Ok(made.tally)
    }
}

/// A case in progress.
struct Made<'c> {
    case: &'c UpsetCase,
    memory: Arc<MemoryBacking>,
    faulty: Arc<FaultyBacking>,
    cache: Cache,
    tally: UpsetTally,
}

impl Made<'_> {
    fn open(&self) -> Result<File, String> {
        let options = OpenOptions::new().read(true).write(true);
        let options = options.folio_bytes(self.case.folio_bytes);
        match self.case.is_memory_file {
            true => self.cache.memory_file_with("file", &options),
            false => self.cache.open_backing(self.faulty.clone(), &options),
        }
        .map_err(text)
    }

    fn run(&mut self, mut model: Model) -> Result<(), String> {
        let mut file = self.open()?;
        let mut steps = self.case.steps.iter().enumerate();
        loop {
            let ended = self.live(&file, model, &mut steps)?;
            let Some((number, step)) = ended.stopped else { break };
            model = ended.model;
            let told = |problem: String| format!("step {number}, {step:?}: {problem}");
            match step {
                UpsetStep::Discard => {
                    file.discard_dirty().map_err(|error| told(text(error)))?;
                    // It tells once of what failed before.
                    let _ = file.sync_data();
                    model = Model::new(self.memory.bytes());
                }
                _ => {
                    file.close().map_err(|error| told(text(error)))?;
                    model.compare(&self.memory.bytes()).map_err(told)?;
                    file = self.open()?;
                }
            }
        }
        file.close().map_err(text)
    }

    /// Runs the steps up to the next that ends a runner; all faults are then removed.
    fn live<'s>(
        &mut self,
        file: &File,
        model: Model,
        steps: &mut impl Iterator<Item = (usize, &'s UpsetStep)>,
    ) -> Result<Ended<'s>, String> {
        let mut struck = self.faulty.struck();
        let cache = self.cache.clone();
        let mut runner = Runner::new(&cache, file, model);
        let mut stopped = None;
        for (number, step) in steps {
            self.tally.steps += 1;
            // As soon as something may be refused.
            runner.set_may_fail(self.faulty.has_faults() || self.faulty.struck() > struck);
            let told = |problem: String| format!("step {number}, {step:?}: {problem}");
            match step {
                UpsetStep::Op(op) => {
                    runner.apply(op).map_err(|failure| told(failure.problem))?;
                }
                UpsetStep::Fail { call, nth, times, errno, short_bytes } => {
                    let fault = Fault::on(*call).nth(*nth).times(*times);
                    self.faulty.inject(match errno {
                        0 => fault.short_by(*short_bytes),
                        errno => fault.fails(*errno),
                    });
                }
                UpsetStep::Heal => {
                    self.heal(file, &mut runner).map_err(told)?;
                    struck = self.faulty.struck();
                }
                UpsetStep::Discard => {
                    self.faulty.heal();
                    stopped = Some((number, step));
                    break;
                }
                UpsetStep::Reopen => {
                    self.heal(file, &mut runner).map_err(told)?;
                    stopped = Some((number, step));
                    break;
                }
            }
        }
        if stopped.is_none() {
            self.heal(file, &mut runner).map_err(|problem| format!("at the end: {problem}"))?;
        }
        self.tally.refused += runner.refused();
        Ok(Ended { model: runner.into_model(), stopped })
    }

    /// Removes all faults and compares every byte, in the cache and on the storage.
    fn heal(&self, file: &File, runner: &mut Runner<'_>) -> Result<(), String> {
        self.faulty.heal();
        // A sync tells once of what failed before.
        let _ = file.sync_data();
        file.sync_data().map_err(|error| format!("a healed sync failed: {error}"))?;
        runner.set_may_fail(false);
        runner.check_all().map_err(text)?;
        if self.case.is_memory_file {
            return Ok(());
        }
        let dirty = self.cache.stats().memory.dirty_bytes;
        if dirty > 0 {
            return Err(format!("{dirty} bytes are dirty after a sync"));
        }
        let found = self.memory.bytes();
        runner.model().compare(&found).map_err(|problem| format!("on the storage: {problem}"))
    }
}

/// The bytes of the file when its runner ends, and the step that ended it.
struct Ended<'s> {
    model: Model,
    stopped: Option<(usize, &'s UpsetStep)>,
}

fn variety_of(bytes: [u8; 3]) -> bool {
    bytes[2] & 1 == 1
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::with_seeds;
    use fastrand::Rng;

    fn random_bytes(seed: u64) -> Vec<u8> {
        let mut random = Rng::with_seed(seed);
        let mut bytes = vec![0; random.usize(..800)];
        random.fill(&mut bytes);
        bytes
    }

    #[test]
    fn any_bytes_are_a_case_that_stays_within_its_length() {
        assert_eq!(UpsetCase::from_bytes(&[]).steps(), []);
        for seed in 0..500 {
            let case = UpsetCase::from_bytes(&random_bytes(seed));
            for step in case.steps() {
                let UpsetStep::Op(Op::Write { position_bytes, length, .. }) = step else {
                    continue;
                };
                assert!(position_bytes + *length as u64 <= case.length(), "{step:?}");
            }
        }
    }

    #[test]
    fn random_cases_agree_with_their_models() {
        let mut struck = 0;
        with_seeds(20, |seed| {
            let case = UpsetCase::from_bytes(&random_bytes(seed));
            let tally = case.check().unwrap_or_else(|problem| panic!("{problem}"));
            assert_eq!(tally.steps, case.steps().len() as u64);
        });
        for seed in 0..20 {
            struck += UpsetCase::from_bytes(&random_bytes(seed)).check().unwrap().struck;
        }
        assert!(struck > 0, "no fault strikes in any of them");
    }
}
