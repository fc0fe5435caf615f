//! The example of a B-tree with a write-ahead log: threads that commit at the same time leave a
//! whole tree, and what it has acknowledged survives when the process is killed.

use std::path::Path;
use std::process::Command;

#[path = "../../examples/wal_btree.rs"]
mod example;

/// Directory of the child that is killed.
const CHILD: &str = "BIFOLIO_WAL_BTREE";

#[test]
fn eight_committing_threads_leave_a_whole_tree() {
    let directory = super::support::directory();
    // It checks the tree. The number of flushes depends on the machine: the example prints it.
    example::group_commit(directory.path(), 60).unwrap();
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
