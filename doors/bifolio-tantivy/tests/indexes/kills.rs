//! kill -9 while a child commits and merges: every acknowledged document is found.
//!
//! The child is this program again. `BIFOLIO_TANTIVY_KILLS` says how often; 20 times without it.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use fastrand::Rng;

use super::model::{assert_holds, cache, commit, last_commit, open, searcher, writer};

const NAME: &str = "kills::acknowledged_documents_survive_kills";
/// The index of the child.
const PATH_VARIABLE: &str = "BIFOLIO_TANTIVY_KILLED_INDEX";
const KILLS_VARIABLE: &str = "BIFOLIO_TANTIVY_KILLS";
const CACHE_BYTES: u64 = 4 << 20;
/// The check of an index grows with it: begin anew before that takes long.
const KILLS_PER_INDEX: u32 = 10;

#[test]
fn acknowledged_documents_survive_kills() {
    if let Some(path) = env::var_os(PATH_VARIABLE) {
        commit_for_ever(path.as_ref());
    }
    let kills: u32 = env::var(KILLS_VARIABLE).map_or(20, |kills| kills.parse().unwrap());
    let mut random = Rng::with_seed(3);
    let mut folder = tempfile::tempdir().unwrap();
    let mut last = 0;
    for kill in 0..kills {
        if kill % KILLS_PER_INDEX == 0 {
            (folder, last) = (tempfile::tempdir().unwrap(), 0);
        }
        let acknowledged = run_and_kill(folder.path(), &mut random).max(last);
        let index = open(folder.path(), &cache(CACHE_BYTES));
        last = last_commit(&index);
        assert!((acknowledged..=acknowledged + 1).contains(&last), "{acknowledged} {last}");
        assert_holds(&searcher(&index), last);
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
    let enough = random.usize(1..4);
    // Somewhere in the next commit.
    let spins = random.u32(0..20_000_000);
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
    let index = open(path, &cache(CACHE_BYTES));
    let mut writer = writer(&index);
    let mut number = last_commit(&index);
    loop {
        number += 1;
        commit(&mut writer, number).unwrap();
        // One call of `write`.
        std::io::stderr().lock().write_all(format!("{number} done\n").as_bytes()).unwrap();
    }
}
