//! kill -9 while a child commits and merges: every acknowledged document is found.
//!
//! The child is this program again. `BIFOLIO_TANTIVY_KILLS` says how often; 20 times without it.

use std::env;
use std::path::Path;

use bifolio_testing::{run_and_kill, tell_committed};
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
        let (commits, spins) = (random.usize(1..4), random.u32(0..20_000_000));
        let variable = (PATH_VARIABLE, folder.path());
        let acknowledged = run_and_kill(NAME, variable, commits, spins).max(last);
        let index = open(folder.path(), &cache(CACHE_BYTES));
        last = last_commit(&index);
        assert!((acknowledged..=acknowledged + 1).contains(&last), "{acknowledged} {last}");
        assert_holds(&searcher(&index), last);
    }
}

fn commit_for_ever(path: &Path) -> ! {
    let index = open(path, &cache(CACHE_BYTES));
    let mut writer = writer(&index);
    let mut number = last_commit(&index);
    loop {
        number += 1;
        commit(&mut writer, number).unwrap();
        tell_committed(number);
    }
}
