//! kill -9 while a child commits: no acknowledged commit is lost, and no commit is torn.
//!
//! The child is this program again. `BIFOLIO_REDB_KILLS` says how often; 40 times without it.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use fastrand::Rng;

use super::model::{assert_recovered, cache, commit, last_commit, open};

const NAME: &str = "kills::acknowledged_commits_survive_kills";
/// The database of the child.
const PATH_VARIABLE: &str = "BIFOLIO_REDB_KILLED_DATABASE";
const KILLS_VARIABLE: &str = "BIFOLIO_REDB_KILLS";
const CACHE_BYTES: u64 = 1 << 20;

#[test]
fn acknowledged_commits_survive_kills() {
    if let Some(path) = env::var_os(PATH_VARIABLE) {
        commit_for_ever(path.as_ref());
    }
    let kills = env::var(KILLS_VARIABLE).map_or(40, |kills| kills.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("killed.redb");
    let mut random = Rng::with_seed(3);
    let mut last = 0;
    for kill in 0..kills {
        let acknowledged = run_and_kill(&path, &mut random).max(last);
        let mut database = open(&path, &cache(CACHE_BYTES));
        last = assert_recovered(&mut database, acknowledged);
        // Models are made from the first commit on: begin anew before that takes long.
        if kill % 40 == 39 {
            drop(database);
            std::fs::remove_file(&path).unwrap();
            last = 0;
        }
    }
}

/// Runs a child until it has told of some commits, kills it, and returns the last one told.
fn run_and_kill(path: &Path, random: &mut Rng) -> u64 {
    let mut child = Command::new(env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
        .env(PATH_VARIABLE, path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let told = BufReader::new(child.stderr.take().unwrap());
    let enough = random.usize(1..12);
    // Somewhere in the next commit.
    let spins = random.u32(0..200_000);
    let mut last = 0;
    for (count, line) in told.lines().enumerate() {
        let line = line.unwrap();
        if count + 1 == enough {
            (0..spins).for_each(|_| std::hint::spin_loop());
            child.kill().unwrap();
        }
        // The last line may be a part of one, or empty: then it was not told.
        match line.strip_suffix(" done").map(str::parse) {
            Some(Ok(number)) => last = number,
            _ if count + 1 >= enough => {}
            _ => panic!("the child says: {line}"),
        }
    }
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "not by this test: {status}");
    last
}

fn commit_for_ever(path: &Path) -> ! {
    let database = open(path, &cache(CACHE_BYTES));
    let mut number = last_commit(&database);
    loop {
        number += 1;
        commit(&database, number).unwrap();
        // One call of `write`.
        std::io::stderr().lock().write_all(format!("{number} done\n").as_bytes()).unwrap();
    }
}
