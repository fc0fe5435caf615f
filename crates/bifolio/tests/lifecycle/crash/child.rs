//! The process that is killed: it writes through a small cache, and reports what is durable.
//!
//! Four threads run until the child is killed: two *calm* writers, a *restless* one, and one that
//! appends to a log. Each writer has its own cells. A calm writer writes each cell once between two
//! syncs, so that no folio is written to during its write-out, and its records must be found whole.
//! The restless writer does not: a record that is overwritten during the write-out of its folio may
//! be found mixed (see `IoBuf`), but never with a word older than the durable one.
//!
//! Lines to the parent, each with one system call on the standard error stream:
//!
//! ```text
//!   durable SLOT:SEQUENCE ...    a sync of these has returned
//!   asked LENGTH                 the log is about to be made this long
//!   logged LENGTH                a sync of the log has returned
//! ```

use std::fmt;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::ops::Range;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use bifolio::{Cache, DirectIo, Feature, File};
use fastrand::Rng;

use super::contents::{RECORD_BYTES, log_bytes, place, record};
use crate::support::writable;

/// The file of records, in its directory.
pub const DATA: &str = "data";
/// The file that is appended to.
pub const LOG: &str = "log";
/// Records in the file.
pub const SLOTS: u64 = CELLS * SLOTS_PER_CELL;
/// Number of records of the calm writers, the first ones.
pub const CALM_SLOTS: u64 = 2 * CALM_CELLS * SLOTS_PER_CELL;

const CELLS: u64 = 512;
/// Cells of each calm writer; the rest belongs to the restless one.
const CALM_CELLS: u64 = 224;
/// A cell is a folio, or more.
const CELL_BYTES: u64 = 16 << 10;
const SLOTS_PER_CELL: u64 = CELL_BYTES / RECORD_BYTES;
/// Sequence numbers of one round.
const SEQUENCES_PER_ROUND: u32 = 1 << 24;

/// Settings of a child.
#[derive(Debug)]
pub struct Job {
    pub round: u32,
    pub seed: u64,
    /// Reported durable length of the log.
    pub log_bytes: u64,
    pub directory: PathBuf,
}

impl fmt::Display for Job {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { round, seed, log_bytes, directory } = self;
        write!(formatter, "{round} {seed} {log_bytes} {}", directory.display())
    }
}

impl Job {
    /// Reads what `Display` has written.
    pub fn parse(text: &str) -> Self {
        let mut parts = text.splitn(4, ' ');
        let mut next = || parts.next().unwrap();
        Self {
            round: next().parse().unwrap(),
            seed: next().parse().unwrap(),
            log_bytes: next().parse().unwrap(),
            directory: next().into(),
        }
    }

    /// Opens a cache and both files in one of many ways.
    fn open(&self) -> (Cache, File, File) {
        let choose = |of: u32| (self.round % of) as usize;
        let mut builder = Cache::builder()
            .memory([512 << 10, 1 << 20, 4 << 20][choose(3)])
            .dirty_background([64 << 10, 200 << 10][choose(2)])
            .dirty_age_max(Duration::from_millis([2, 5000][choose(4) / 2]));
        if choose(2) == 1 {
            builder = builder.disable(Feature::IoUring);
        }
        let direct = if choose(5) == 4 { DirectIo::Never } else { DirectIo::Auto };
        let cache = builder.build().unwrap();
        let options = writable().folio_bytes([4 << 10, 16 << 10][choose(4) / 2]).direct(direct);
        let open = |name| cache.open(self.directory.join(name), &options).unwrap();
        let (data, log) = (open(DATA), open(LOG));
        (cache, data, log)
    }
}

/// Works until it is killed.
pub fn run(job: &Job) -> ! {
    let (_cache, data, log) = job.open();
    thread::scope(|scope| {
        let cells = [0..CALM_CELLS, CALM_CELLS..2 * CALM_CELLS, 2 * CALM_CELLS..CELLS];
        for (number, cells) in (0..).zip(cells) {
            let random = Rng::with_seed(job.seed.wrapping_add(number));
            scope.spawn(|| write_records(&data, job, cells, random));
        }
        append(&log, job, Rng::with_seed(!job.seed))
    });
    unreachable!("nothing but a signal ends this")
}

fn write_records(file: &File, job: &Job, cells: Range<u64>, mut random: Rng) {
    let is_calm = cells.start < 2 * CALM_CELLS;
    let bytes = cells.start * CELL_BYTES..cells.end * CELL_BYTES;
    let mut sequence = job.round * SEQUENCES_PER_ROUND;
    loop {
        let mut line = "durable".to_owned();
        let count = random.usize(1..40);
        let chosen = if is_calm {
            random.choose_multiple(cells.clone(), count)
        } else {
            (0..4 * count)
                .map(|_| cells.start + random.u64(0..cells.end - cells.start) / 4)
                .collect()
        };
        for cell in chosen {
            let slot = cell * SLOTS_PER_CELL + random.u64(0..SLOTS_PER_CELL);
            sequence += 1;
            file.write_all_at(&record(slot, sequence), place(slot)).unwrap();
            write!(line, " {slot}:{sequence}").unwrap();
        }
        match random.u32(0..4) {
            0 => file.sync_range(bytes.clone()).unwrap(),
            1 => file.sync_all().unwrap(),
            _ => file.sync_data().unwrap(),
        }
        tell(&line);
    }
}

fn append(log: &File, job: &Job, mut random: Rng) -> ! {
    // What was not durable may have holes.
    log.set_len(job.log_bytes).unwrap();
    let mut end = job.log_bytes;
    loop {
        for _ in 0..random.u32(1..20) {
            let start = end;
            end += random.u64(1..3000);
            tell(&format!("asked {end}"));
            log.write_all_at(&log_bytes(start..end), start).unwrap();
        }
        match random.bool() {
            true => log.sync_data().unwrap(),
            false => log.sync_range(0..end).unwrap(),
        }
        tell(&format!("logged {end}"));
    }
}

/// Writes a line to the parent.
fn tell(line: &str) {
    io::stderr().write_all(format!("{line}\n").as_bytes()).unwrap();
}
