//! kill -9 while a child commits: no acknowledged commit is lost, and no commit is torn.
//!
//! The child is this program again. `BIFOLIO_REDB_KILLS` says how often; 40 times without it.

use std::env;
use std::path::Path;

use bifolio_testing::{run_and_kill, tell_committed};
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
        let (commits, spins) = (random.usize(1..12), random.u32(0..200_000));
        let acknowledged = run_and_kill(NAME, (PATH_VARIABLE, &path), commits, spins).max(last);
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

fn commit_for_ever(path: &Path) -> ! {
    let database = open(path, &cache(CACHE_BYTES));
    let mut number = last_commit(&database);
    loop {
        number += 1;
        commit(&database, number).unwrap();
        tell_committed(number);
    }
}
