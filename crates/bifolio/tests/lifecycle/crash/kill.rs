//! `kill -9` during writes and syncs, repeatedly, on one pair of files.
//!
//! ```text
//!   this test (parent)                                the same program (child.rs)
//!     starts, listens  <---- "durable 17:3 40:4" ----   writes records, syncs, tells
//!     kills at any moment                               dies
//!     looks at the files with std::fs
//! ```
//!
//! Everything reported is in the files; unreported writes may be in them or not, each page whole;
//! nothing else is. The kernel survives the kill and keeps the bytes it has been given: so this
//! shows that a sync is correct about the order of writing and acknowledging, that no page is half
//! written, and that nothing depends on a destructor. It shows nothing about a loss of power: that
//! is `power.rs`.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use bifolio_testing::with_seeds;
use fastrand::Rng;

use super::child::{CALM_SLOTS, DATA, Job, LOG, SLOTS};
use super::contents::{Expected, RECORD_BYTES};
use crate::support;

const NAME: &str = "crash::kill::a_killed_process_loses_nothing_it_had_acknowledged";
/// Set for the child.
const VARIABLE: &str = "BIFOLIO_TEST_CRASH_KILL";
const ROUNDS: u32 = 25;
/// Time without a report after which a child counts as hung.
const SILENCE_MAX: Duration = Duration::from_secs(60);

#[test]
fn a_killed_process_loses_nothing_it_had_acknowledged() {
    if let Ok(job) = env::var(VARIABLE) {
        super::child::run(&Job::parse(&job));
    }
    with_seeds(1, |seed| {
        let directory = support::directory();
        let mut random = Rng::with_seed(seed);
        let mut expected = create(directory.path());
        let mut rounds_in_the_middle = 0;
        for round in 1..=ROUNDS {
            let directory = directory.path().to_owned();
            let log_bytes = expected.log_bytes;
            let job = Job { round, seed: random.u64(..), log_bytes, directory };
            run_and_kill(&job, &mut expected, &mut random);
            rounds_in_the_middle += u32::from(check(&mut expected, &job));
        }
        assert!(rounds_in_the_middle > 0, "never was anything going on when the child died");
    });
}

/// Creates both files. Returns their content.
fn create(directory: &Path) -> Expected {
    fs::write(directory.join(DATA), vec![0; (SLOTS * RECORD_BYTES) as usize]).unwrap();
    fs::write(directory.join(LOG), []).unwrap();
    Expected::new(SLOTS)
}

/// Checks both files after the child of `job` has died. Returns `true` if they have more than was
/// reported.
fn check(expected: &mut Expected, job: &Job) -> bool {
    let context = format!("with {job}");
    let data = fs::read(job.directory.join(DATA)).unwrap();
    let found = expected.check_records(&data, &context);
    let is_whole = |found: &RangeInclusive<u32>| found.start() == found.end();
    for (slot, found) in found.iter().take(CALM_SLOTS as usize).enumerate() {
        assert!(is_whole(found), "record {slot} is a mixture of {found:x?}, {context}");
    }
    let log = fs::read(job.directory.join(LOG)).unwrap();
    expected.check_log(&log, &context);
    // The kernel has it: it stays.
    expected.log_bytes_max = log.len() as u64;
    let oldest: Vec<u32> = found.iter().map(|found| *found.start()).collect();
    let before = std::mem::replace(&mut expected.sequences, oldest);
    before != expected.sequences
}

/// Adds a line from a child; `None` if it is not a report.
fn take(expected: &mut Expected, line: &str) -> Option<()> {
    let (first, rest) = line.split_once(' ')?;
    match first {
        "durable" => {
            for pair in rest.split(' ') {
                let (slot, sequence) = pair.split_once(':')?;
                expected.note_record(slot.parse().ok()?, sequence.parse().ok()?);
            }
        }
        "asked" => expected.log_bytes_max = rest.parse::<u64>().ok()?.max(expected.log_bytes_max),
        "logged" => expected.log_bytes = rest.parse().ok()?,
        _ => return None,
    }
    Some(())
}

/// Runs a child until it has reported a random number of times, and a little longer.
fn run_and_kill(job: &Job, expected: &mut Expected, random: &mut Rng) {
    let mut child = Command::new(env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, job.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let lines_before = random.usize(0..200);
    let delay = Duration::from_micros(random.u64(0..10_000));
    let (enough, is_enough) = mpsc::channel();
    let killer = thread::spawn(move || kill_after(child, &is_enough, delay));
    let mut line = String::new();
    for number in 0.. {
        if number == lines_before {
            enough.send(()).unwrap();
        }
        line.clear();
        // The last line may be a part of one: then it was not told.
        if told.read_line(&mut line).unwrap() == 0 || !line.ends_with('\n') {
            break;
        }
        if take(expected, line.trim_end()).is_none() {
            // It is a panic, which has more lines.
            drop(enough);
            let rest: Vec<_> = told.lines().map_while(Result::ok).collect();
            panic!("the child says, with {job}:\n{line}{}", rest.join("\n"));
        }
    }
    drop(enough);
    let status = killer.join().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "not by our hand: {status}");
}

/// Kills the child a short time after `is_enough` is signalled, or after too long a wait for it.
fn kill_after(mut child: Child, is_enough: &Receiver<()>, delay: Duration) -> ExitStatus {
    let is_stuck = is_enough.recv_timeout(SILENCE_MAX) == Err(RecvTimeoutError::Timeout);
    thread::sleep(delay);
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(!is_stuck, "the child told too little");
    status
}
