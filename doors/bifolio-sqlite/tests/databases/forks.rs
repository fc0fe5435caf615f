//! Children after a fork: what they inherit, and databases that they open.
//!
//! # Safety
//! A child uses SQLite, whose own locks no other thread of the test's process holds at the fork:
//! the threads use open databases with a log, and SQLite counts no memory.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{env, thread};

use crate::connections::{check_locked_out, make};
use crate::library::Library;
use crate::shell::through_the_system;

/// Set in a process that runs one test.
const ALONE: &str = "BIFOLIO_TEST_FORKS";
/// Time after which a child hangs.
const CHILD_SECONDS: u32 = 60;
/// Children of busy threads.
const FORKS: usize = 40;
/// Threads of a process, and of each child.
const THREADS: usize = 4;

/// Returns `true` in a process of its own, in which no other test uses SQLite; otherwise runs the
/// test in one.
pub(crate) fn is_alone(test: &str) -> bool {
    if env::var_os(ALONE).is_some() {
        return true;
    }
    let mut again = Command::new(env::current_exe().unwrap());
    again.args(["--exact", test, "--nocapture"]);
    let output = again.env(ALONE, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// Forks, and checks that `check` returns `true` in the child, which gets `inherited`, before its
/// time is over. The parent gets it back.
#[track_caller]
fn check_child<T>(inherited: T, check: impl FnOnce(T) -> bool) -> T {
    // SAFETY: the child ends without destructors of the parent; the head says what it uses.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: ends a child that hangs.
        unsafe { libc::alarm(CHILD_SECONDS) };
        let is_right = catch_unwind(AssertUnwindSafe(|| check(inherited))).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { libc::_exit(c_int::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(!libc::WIFSIGNALED(status), "ended by signal {}", libc::WTERMSIG(status));
    assert_eq!(status, 0);
    inherited
}

/// A connection to an exclusive database that a child inherits fails. One to a shared database
/// works on, unless it had a transaction at the fork. The close of either takes nothing from the
/// parent.
#[test]
fn a_child_uses_of_what_it_inherits_only_what_is_shared_and_idle() {
    if !is_alone("forks::a_child_uses_of_what_it_inherits_only_what_is_shared_and_idle") {
        return;
    }
    let Some(library) = Library::load() else { return };
    for (mode, exclusive, transaction) in [
        ("delete", 0, ""),
        ("delete", 1, ""),
        ("wal", 0, ""),
        ("wal", 0, "begin; select a from t"),
        ("wal", 1, ""),
    ] {
        let case = format!("{mode}, bifolio_exclusive={exclusive}, {transaction:?}");
        let parameters = format!("bifolio_exclusive={exclusive}");
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        make(&path, mode);
        let connection = library.open_cached(&path, &parameters).unwrap();
        connection.run("update t set a=8").unwrap();
        connection.run(transaction).unwrap();
        let inherits = exclusive == 0 && transaction.is_empty();
        let connection = check_child(connection, |connection| {
            let is_right = match inherits {
                true => {
                    connection.run("update t set a=a+1; select a from t") == Ok(vec!["9".into()])
                }
                // In a transaction, SQLite has the page itself.
                false => {
                    (!transaction.is_empty() || connection.run("select a from t").is_err())
                        && connection.run("update t set a=9").is_err()
                }
            };
            drop(connection);
            let again = library
                .open_cached(&path, &parameters)
                .and_then(|again| again.run("pragma busy_timeout=0; select a from t"));
            let opens = match again {
                Ok(rows) => {
                    exclusive == 0 && rows.last() == Some(&if inherits { "9" } else { "8" }.into())
                }
                Err(problem) => exclusive == 1 && problem.contains("locked"),
            };
            let other = library.open_cached(&path.with_extension("child"), "").and_then(|other| {
                other.run("create table t(a); insert into t values(5); select a from t")
            });
            let opens_others = other.is_ok_and(|rows| rows == ["5"]);
            is_right && opens && opens_others
        });
        if exclusive == 1 {
            check_locked_out(&path, "the child has ended");
        }
        if !transaction.is_empty() {
            connection.run("commit").unwrap();
        }
        connection.run("update t set a=10").unwrap();
        assert_eq!(connection.ask("select a from t"), "10");
        drop(connection);
        let (out, errors) = through_the_system(&path, "pragma integrity_check; select a from t");
        assert_eq!(out, "ok\n10\n", "{case}: {errors}");
    }
}

/// Connections of a child have locks of their own: they neither count nor release those of the
/// parent.
#[test]
fn a_child_keeps_to_the_slots_of_its_parent() {
    if !is_alone("forks::a_child_keeps_to_the_slots_of_its_parent") {
        return;
    }
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "wal");
    let open = || library.open_cached(&path, "").unwrap();
    let (first, second, reader) = (open(), open(), open());
    first.run("update t set a=8").unwrap();
    second.run("select a from t").unwrap();
    reader.run("begin; select a from t").unwrap();
    let checkpoint = "pragma busy_timeout=0; pragma wal_checkpoint(truncate)";
    let idle = check_child([first, second], |[first, second]| {
        let is_changed =
            first.run("update t set a=a+1").is_ok() && second.ask("select a from t") == "9";
        let also = open();
        also.run("begin; select a from t").unwrap();
        drop(first);
        let refused = second.run(checkpoint).unwrap().pop();
        drop(second);
        is_changed && refused.is_some_and(|row| row.starts_with("1|")) && also.run("commit").is_ok()
    });
    assert_eq!(reader.ask("select a from t"), "8", "as it began");
    let refused = idle[0].run(checkpoint).unwrap().pop();
    assert!(refused.is_some_and(|row| row.starts_with("1|")));
    reader.run("commit").unwrap();
    assert_eq!(idle[0].run(checkpoint).unwrap().pop().unwrap(), "0|0|0");
    assert_eq!(idle[1].run("pragma integrity_check; select a from t").unwrap(), ["ok", "9"]);
}

/// A child that lives longer than a connection of its parent keeps no lock of it.
#[test]
fn a_child_keeps_no_lock_of_its_parent() {
    if !is_alone("forks::a_child_keeps_no_lock_of_its_parent") {
        return;
    }
    let Some(library) = Library::load() else { return };
    for mode in ["delete", "wal"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        make(&path, mode);
        let connection = library.open_cached(&path, "bifolio_exclusive=1").unwrap();
        connection.run("update t set a=8").unwrap();
        // SAFETY: the child only waits for its end.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: ends the child even if its parent fails.
            unsafe { libc::alarm(CHILD_SECONDS) };
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        check_locked_out(&path, "the parent has it open");
        drop(connection);
        let (out, errors) = through_the_system(&path, "update t set a=a+1; select a from t");
        // SAFETY: a child of this process, which is waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: as above.
        unsafe { libc::waitpid(child, &mut 0, 0) };
        assert_eq!(out, "9\n", "{mode}: {errors}");
    }
}

/// Threads of the parent wait for locks of the cache and of the database when it forks.
#[test]
fn a_child_of_busy_threads_opens_databases_of_its_own() {
    if !is_alone("forks::a_child_of_busy_threads_opens_databases_of_its_own") {
        return;
    }
    let Some(library) = Library::load_without_statistics() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let sql = "pragma journal_mode=wal; create table t(id integer primary key, n, v blob);
               with recursive i(id) as (select 1 union all select id+1 from i where id<1000)
                   insert into t select id, 0, randomblob(1000) from i";
    library.open_cached(&path, "bifolio_memory=256KiB").unwrap().run(sql).unwrap();
    // Each thread has the cache evict, and they meet at the locks of the database.
    let work = |path: &Path, goes_on: &(dyn Fn(usize) -> bool + Sync)| {
        let keeps_open = library.open_cached(path, "bifolio_memory=256KiB").unwrap();
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let connection = library.open_cached(path, "").unwrap();
                    connection.run("pragma cache_size=10").unwrap();
                    for round in 0.. {
                        if !goes_on(round) {
                            break;
                        }
                        let first = fastrand::u32(1..900);
                        let found = connection.ask(&format!(
                            "select sum(length(v)) from t where id between {first} and {first}+99"
                        ));
                        assert_eq!(found, "100000");
                    }
                });
            }
        });
        drop(keeps_open);
    };
    let stops = AtomicBool::new(false);
    thread::scope(|scope| {
        // Relaxed: only the value counts.
        scope.spawn(|| work(&path, &|_| !stops.load(Ordering::Relaxed)));
        for number in 0..FORKS {
            let copy = path.with_extension(number.to_string());
            std::fs::copy(&path, &copy).unwrap();
            check_child((), |()| {
                work(&copy, &|round| round < 50);
                true
            });
            std::fs::remove_file(&copy).unwrap();
        }
        stops.store(true, Ordering::Relaxed);
    });
}
