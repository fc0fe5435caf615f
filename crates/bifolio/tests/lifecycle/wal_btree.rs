//! The example of a B-tree with a write-ahead log: its commits share flushes, and what it has
//! acknowledged survives when the process is killed.

use std::path::Path;
use std::process::Command;

#[path = "../../examples/wal_btree.rs"]
mod example;

/// Directory of the child that is killed.
const CHILD: &str = "BIFOLIO_WAL_BTREE";

#[test]
fn eight_committing_threads_share_flushes() {
    let directory = super::support::directory();
    let flushes = example::group_commit(directory.path(), 60).unwrap();
    assert!(flushes <= 0.5, "{flushes} flushes a commit");
}

#[test]
fn a_killed_tree_keeps_what_it_has_acknowledged() {
    if let Some(directory) = std::env::var_os(CHILD) {
        return example::commit_until_killed(Path::new(&directory)).unwrap();
    }
    let directory = super::support::directory();
    let child = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["wal_btree::a_killed_tree_keeps_what_it_has_acknowledged", "--exact"]);
        command.env(CHILD, directory.path());
        command
    };
    example::crash_test(directory.path(), 2, child).unwrap();
}
