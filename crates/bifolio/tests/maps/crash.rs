//! `kill -9` during mapped stores and syncs, and forks.
//!
//! ```text
//!   this test (parent)                                the same program (child)
//!     starts, listens  <---- "durable 17:3 40:4" ----   stores words through maps, syncs, tells
//!     kills at any moment                               dies
//!     looks at the file with std::fs
//! ```
//!
//! Each word encodes its index and the number of its store.
//!
//! # Safety
//! Words of a map are used as atomic ones; a forked child only makes calls that are refused, and
//! ends with `_exit`.
#![allow(unsafe_code)]

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write as _};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use bifolio::{ErrorKind, Feature, File, Result};
use bifolio_testing::with_seeds;
use fastrand::Rng;

use crate::setup::{Way, load, store, touch, word};
use crate::support::{PAGE, assert_same, directory, file_of, random_file, read_all, run_alone};

const NAME: &str = "crash::a_killed_process_loses_no_store_that_was_synced";
const VARIABLE: &str = "BIFOLIO_TEST_MAP_CRASH";
const ROUNDS: u32 = 16;
const SLOTS: u64 = 4096;
const SLOT_BYTES: u64 = 512;
/// Seconds after which the process to be killed ends by itself.
const CHILD_SECONDS_MAX: u32 = 60;

/// Returns the way of a round.
fn way_of(round: u32) -> Way {
    if round % 4 == 3 { Way::without(Feature::VectoredUnmap) } else { Way::new() }
}

fn value(slot: u64, sequence: u64) -> u64 {
    (slot + 1) << 32 | sequence
}

/// Works until it is killed: `round seed path`.
fn child(job: &str) -> ! {
    let mut parts = job.splitn(3, ' ');
    let mut next = || parts.next().unwrap();
    let (round, seed): (u32, u64) = (next().parse().unwrap(), next().parse().unwrap());
    // SAFETY: it only sets a timer, whose signal ends the process.
    unsafe { libc::alarm(CHILD_SECONDS_MAX) };
    let way = way_of(round);
    let age_ms = [3, 5000][round as usize / 2 % 2];
    let cache =
        way.builder(512 << 10).dirty_age_max(Duration::from_millis(age_ms)).build().unwrap();
    let file = cache.open(next(), &way.options()).unwrap();
    thread::scope(|scope| {
        for number in 0..2 {
            let slots = number * SLOTS / 2..(number + 1) * SLOTS / 2;
            let file = &file;
            scope.spawn(move || store_and_sync(file, round, slots, Rng::with_seed(seed ^ number)));
        }
    });
    unreachable!("nothing but a signal ends this")
}

fn store_and_sync(file: &File, round: u32, slots: Range<u64>, mut random: Rng) {
    let bytes = slots.start * SLOT_BYTES..slots.end * SLOT_BYTES;
    let mut map = file.map_mut(bytes.clone()).unwrap();
    let mut sequence = u64::from(round) << 24;
    loop {
        let mut line = "durable".to_owned();
        for _ in 0..random.u32(1..60) {
            let slot = random.u64(slots.clone());
            sequence += 1;
            let place = slot * SLOT_BYTES - bytes.start;
            word(map.as_mut_ptr(), place).store(value(slot, sequence), Ordering::Relaxed);
            write!(line, " {slot}:{sequence}").unwrap();
        }
        match random.u32(0..3) {
            0 => map.sync(0..map.len()).unwrap(),
            1 => file.sync_data().unwrap(),
            _ => file.sync_range(bytes.clone()).unwrap(),
        }
        line.push('\n');
        io::stderr().write_all(line.as_bytes()).unwrap();
    }
}

/// Runs a child, records its reports, and kills it after `lines` of them.
fn run_and_kill(job: &str, lines: usize, durable: &mut [u64]) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
        .env(VARIABLE, job)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    for number in 0.. {
        if number == lines {
            thread::sleep(Duration::from_micros(fastrand::u64(..5000)));
            child.kill().unwrap();
        }
        line.clear();
        if told.read_line(&mut line).unwrap() == 0 || !line.ends_with('\n') {
            break;
        }
        let Some(pairs) = line.trim_end().strip_prefix("durable ") else {
            panic!("the child says, with {job}: {line}");
        };
        for pair in pairs.split(' ') {
            let (slot, sequence) = pair.split_once(':').unwrap();
            let (slot, sequence): (usize, u64) = (slot.parse().unwrap(), sequence.parse().unwrap());
            durable[slot] = durable[slot].max(sequence);
        }
    }
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "not by our hand: {status}, {job}");
}

/// Checks the file after a child has died. Returns the number of words with unreported stores.
fn check(path: &Path, durable: &mut [u64], job: &str) -> usize {
    let data = std::fs::read(path).unwrap();
    assert_eq!(data.len() as u64, SLOTS * SLOT_BYTES, "{job}");
    let mut untold = 0;
    for ((slot, bytes), known) in (0..).zip(data.chunks(SLOT_BYTES as usize)).zip(durable) {
        let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let sequence = found & u64::from(u32::MAX);
        let is_its_own = found == 0 || found == value(slot, sequence);
        assert!(is_its_own, "slot {slot} has {found:#x}, which is not its own: {job}");
        assert!(sequence >= *known, "slot {slot}: {known:#x} was durable, {sequence:#x}: {job}");
        assert!(bytes[8..].iter().all(|byte| *byte == 0), "slot {slot}: {job}");
        untold += usize::from(sequence > *known);
        *known = sequence;
    }
    untold
}

#[test]
fn a_killed_process_loses_no_store_that_was_synced() {
    if let Ok(job) = std::env::var(VARIABLE) {
        child(&job);
    }
    if Way::whole().is_empty() {
        return;
    }
    with_seeds(1, |seed| {
        let directory = directory();
        let path = file_of(&directory, "slots", &vec![0; (SLOTS * SLOT_BYTES) as usize]);
        let mut random = Rng::with_seed(seed);
        let mut durable = vec![0; SLOTS as usize];
        let mut untold = 0;
        for round in 1..=ROUNDS {
            let job = format!("{round} {} {}", random.u64(..), path.display());
            run_and_kill(&job, random.usize(0..60), &mut durable);
            untold += check(&path, &mut durable, &job);
        }
        assert!(untold > 0, "never was anything going on when the child died");
    });
}

const FORK: &str = "crash::a_forked_child_is_refused_and_the_parent_is_unharmed";
const FORK_VARIABLE: &str = "BIFOLIO_TEST_MAP_FORK";

fn is_forked<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::Forked)
}

/// Forks while pages of maps are dirty, and others are faulted in by another thread.
fn fork(way: Way) {
    let directory = directory();
    let (path, mut bytes) = random_file(&directory, "mapped", 2_000_000);
    let cache = way.builder(512 << 10).build().unwrap();
    let file = cache.open(&path, &way.options()).unwrap();
    let mut map = file.map_mut(0..file.len()).unwrap();
    for page in (0..400_u64).step_by(7) {
        store(map.as_mut_ptr(), page * PAGE, b"before");
        bytes[(page * PAGE) as usize..][..6].copy_from_slice(b"before");
    }
    // SAFETY: see the head of the file.
    let forked = unsafe { libc::fork() };
    if forked == 0 {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(120) };
        let answers = [
            is_forked(map.populate(0..PAGE)),
            is_forked(map.sync(0..PAGE)),
            is_forked(map.pin(0..PAGE)),
            is_forked(file.map(0..PAGE)),
            is_forked(file.map_mut(0..PAGE)),
            is_forked(cache.memory_file_with("other", &way.options())),
            is_forked(file.read_at(&mut [0; 9], 0)),
        ];
        let wrong = answers.iter().position(|answer| !answer).map_or(0, |call| call as i32 + 1);
        // SAFETY: it ends the process, as it is meant to.
        unsafe { libc::_exit(wrong) };
    }
    assert!(forked > 0, "{}", io::Error::last_os_error());
    touch(map.as_ptr(), 300 * PAGE + 5);
    let mut status = 0;
    // SAFETY: `status` is ours to write, and `forked` is our child.
    assert_eq!(unsafe { libc::waitpid(forked, &raw mut status, 0) }, forked);
    assert!(libc::WIFEXITED(status), "the child was killed by {}", libc::WTERMSIG(status));
    assert_eq!(libc::WEXITSTATUS(status), 0, "the number of the call");
    assert_same(&load(map.as_ptr(), 0..map.len()), &bytes);
    store(map.as_mut_ptr(), 9, b"after");
    bytes[9..14].copy_from_slice(b"after");
    assert_same(&read_all(&file), &bytes);
    map.sync(0..map.len()).unwrap();
    assert_same(&std::fs::read(&path).unwrap(), &bytes);
    drop((map, file));
    cache.close().unwrap();
}

#[test]
fn a_forked_child_is_refused_and_the_parent_is_unharmed() {
    let ways = Way::whole();
    if let Ok(number) = std::env::var(FORK_VARIABLE) {
        return fork(ways[number.parse::<usize>().unwrap()]);
    }
    for number in 0..ways.len() {
        run_alone(FORK, FORK_VARIABLE, &number.to_string());
    }
}
