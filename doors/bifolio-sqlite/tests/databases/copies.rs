//! Two copies of SQLite in one process, one of which has the VFS: POSIX locks of a process do not
//! conflict with each other, and are dropped when any descriptor of the file is closed.
//!
//! # Safety
//! Sets a limit of a process that runs one test.
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::connections::{check_locked_out, make};
use crate::forks::is_alone;
use crate::library::{Connection, Library};
use crate::shell::{KINDS, has_sqlite, through_the_system};

#[track_caller]
fn check_locked(connection: &Connection, sql: &str, when: &str) {
    let refusal = connection.run(sql).unwrap_err();
    assert!(refusal.contains("locked"), "{when}: {refusal}");
}

#[test]
fn another_copy_of_the_library_is_kept_out_of_an_exclusive_database() {
    let (Some(library), Some(copy)) = (Library::load(), Library::load_copy()) else { return };
    let directory = tempfile::tempdir().unwrap();
    for mode in ["delete", "wal"] {
        let path = directory.path().join(format!("{mode}.db"));
        make(&path, mode);
        let ours = library.open_cached(&path, "bifolio_exclusive=1").unwrap();
        ours.run("update t set a=8").unwrap();
        let other = copy.open_plainly(&path);
        check_locked(&other, "update t set a=a+1", mode);
        check_locked(&other, "select a from t", mode);
        drop(other);
        ours.run("update t set a=a+1").unwrap();
        drop(ours);
        let other = copy.open_plainly(&path);
        // A program that another test starts has copies of all descriptors for a moment, and the
        // lock of this one lasts as long.
        other.run("pragma busy_timeout=20000; update t set a=a+10").unwrap();
        drop(other);
        let ours = library.open_cached(&path, "mode=ro&bifolio_exclusive=1").unwrap();
        assert_eq!(ours.run("select a from t; pragma integrity_check").unwrap(), ["19", "ok"]);
        let other = copy.open_plainly(&path);
        if mode == "delete" {
            ours.run("begin; select a from t").unwrap();
            assert_eq!(other.ask("select a from t"), "19", "two readers");
        }
        check_locked(&other, "update t set a=0", "beside a reader");
    }
}

/// Closes and failed opens through the VFS leave the locks of the other copy alone.
#[test]
fn closes_drop_no_lock_of_another_copy() {
    let (Some(library), Some(copy)) = (Library::load(), Library::load_copy()) else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for mode in ["delete", "wal"] {
        let path = directory.path().join(format!("{mode}.db"));
        make(&path, mode);
        let other = copy.open_plainly(&path);
        other.run("begin immediate; update t set a=8").unwrap();
        let check = || match mode {
            "wal" => {
                // Leaving the log needs the only lock of the file.
                let alone = "pragma locking_mode=exclusive; pragma journal_mode=delete";
                let (_, errors) = through_the_system(&path, alone);
                assert!(errors.contains("locked"), "{errors}");
            }
            _ => check_locked_out(&path, "the other copy writes"),
        };
        for access in ["", "mode=ro", "bifolio_exclusive=1", "mode=ro&bifolio_exclusive=1"] {
            for _ in 0..3 {
                let ours = library.open_cached(&path, access).unwrap();
                ours.run("pragma busy_timeout=0").unwrap();
                let found = ours.run("select a from t");
                let is_kept_out =
                    access.contains("exclusive") && (mode == "wal" || !access.contains("mode=ro"));
                assert_eq!(found.is_err(), is_kept_out, "{mode}, {access}: {found:?}");
                drop(ours);
                library.open_cached(&path, "bifolio_direct=wrong").err().unwrap();
                check();
            }
        }
        other.run("commit").unwrap();
        drop(other);
        let ours = library.open_cached(&path, "").unwrap();
        assert_eq!(ours.run("select a from t; pragma integrity_check").unwrap(), ["8", "ok"]);
        drop(ours);
        assert_eq!(through_the_system(&path, "select a from t").0, "8\n");
    }
}

/// Opens files until the process may have no more, calls `call` with them, and closes the rest.
fn without_descriptors<T>(call: impl FnOnce(&mut Vec<std::fs::File>) -> T) -> T {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a variable.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits) }, 0);
    let few = libc::rlimit { rlim_cur: 200, ..limits };
    // SAFETY: a value.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &few) }, 0);
    let mut files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    let answer = call(&mut files);
    drop(files);
    // SAFETY: a value.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limits) }, 0);
    answer
}

/// An open that fails halfway, since the process has no further descriptor, closes nothing either.
#[test]
fn an_open_without_descriptors_drops_no_lock_of_another_copy() {
    if !is_alone("copies::an_open_without_descriptors_drops_no_lock_of_another_copy") {
        return;
    }
    let (Some(library), Some(copy)) = (Library::load(), Library::load_copy()) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "delete");
    let other = copy.open_plainly(&path);
    other.run("begin immediate; update t set a=8").unwrap();
    // The cache of the process has descriptors of its own.
    drop(library.open_cached(&directory.path().join("other.db"), "").unwrap());
    for kind in KINDS {
        let opened = |count: usize| {
            let opened = without_descriptors(|files| {
                files.truncate(files.len() - count);
                library.open_cached(&path, kind)
            });
            check_locked_out(&path, "the other copy writes");
            opened.is_ok()
        };
        // Each number of descriptors, up to those with which it succeeds.
        let count = (1..20).find(|count| opened(*count));
        assert!(count.is_some_and(|count| count > 2), "{kind}: {count:?}");
        check_locked_out(&path, "the other copy writes");
    }
    other.run("commit").unwrap();
    drop(other);
    let ours = library.open_cached(&path, "").unwrap();
    assert_eq!(ours.run("select a from t; pragma integrity_check").unwrap(), ["8", "ok"]);
}

/// A program that closes a file after each open that failed gets its database: what an open could
/// not use, the next one does.
#[test]
fn opens_that_lack_descriptors_keep_none_from_the_next() {
    if !is_alone("copies::opens_that_lack_descriptors_keep_none_from_the_next") {
        return;
    }
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    for kind in KINDS {
        let path = directory.path().join(format!("{kind}.db"));
        make(&path, "delete");
        // The cache of the process has descriptors of its own.
        drop(library.open_cached(&path, kind).unwrap());
        let tries = without_descriptors(|files| {
            (0..50).position(|_| {
                let read =
                    library.open_cached(&path, kind).and_then(|ours| ours.run("update t set a=9"));
                files.pop();
                read.is_ok()
            })
        });
        assert!(tries.is_some_and(|tries| tries > 0 && tries < 8), "{kind}: {tries:?}");
        assert_eq!(through_the_system(&path, "select a from t").0, "9\n", "{kind}");
    }
}

const ACCOUNTS: u32 = 200;
const ROUNDS: u32 = if cfg!(debug_assertions) { 30 } else { 300 };

/// Moves amounts between accounts, and notes each acknowledged commit in a row. Returns their
/// number. A database that is locked is tried again.
fn transfer(open: impl Fn() -> Connection, name: u32) -> u64 {
    let mut acknowledged = 0;
    for round in 0..ROUNDS {
        let connection = open();
        for step in 0..3 {
            let (from, to) = (fastrand::u32(0..ACCOUNTS), fastrand::u32(0..ACCOUNTS));
            let sql = format!(
                "begin immediate;
                 update account set amount=amount-1 where id={from};
                 update account set amount=amount+1 where id={to};
                 insert into done values({name}, {round}, {step});
                 commit"
            );
            match connection.run(&sql) {
                Ok(_) => acknowledged += 1,
                Err(problem) => {
                    assert!(problem.contains("locked"), "{problem}");
                    let _ = connection.run("rollback");
                }
            }
        }
    }
    acknowledged
}

fn read_sums(open: impl Fn() -> Connection, stops: &AtomicBool, sums: &AtomicU64) {
    // Relaxed: only the value counts.
    while !stops.load(Ordering::Relaxed) {
        let connection = open();
        for _ in 0..5 {
            match connection.run("select sum(amount), sum(length(filler)) from account") {
                Ok(found) => {
                    assert_eq!(found, [format!("0|{}", ACCOUNTS * 1000)]);
                    // Relaxed: only the value counts.
                    sums.fetch_add(1, Ordering::Relaxed);
                }
                Err(problem) => assert!(problem.contains("locked"), "{problem}"),
            }
        }
    }
}

fn make_accounts(path: &Path, mode: &str) {
    let sql = format!(
        "pragma journal_mode={mode};
         create table account(id integer primary key, amount integer, filler blob);
         create table done(name, round, step);
         with recursive i(id) as (select 0 union all select id+1 from i where id<{ACCOUNTS}-1)
             insert into account select id, 0, zeroblob(1000) from i"
    );
    assert_eq!(through_the_system(path, &sql).1, "");
}

#[test]
fn two_copies_in_turns_lose_no_commit_and_read_right_sums() {
    let (Some(library), Some(copy)) = (Library::load(), Library::load_copy()) else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (mode, exclusive) in [("delete", 0), ("delete", 1), ("wal", 0), ("wal", 1)] {
        let path = directory.path().join(format!("{mode}-{exclusive}.db"));
        make_accounts(&path, mode);
        let timeout = |connection: Connection, milliseconds: u32| {
            connection.run(&format!("pragma busy_timeout={milliseconds}")).unwrap();
            connection
        };
        let cached = |access: &str| {
            let parameters = format!("{access}&bifolio_exclusive={exclusive}");
            timeout(library.open_cached(&path, &parameters).unwrap(), 500)
        };
        let plain = || timeout(copy.open_plainly(&path), 500);
        let (stops, sums) = (AtomicBool::new(false), AtomicU64::new(0));
        let acknowledged = thread::scope(|scope| {
            let readers = [
                scope.spawn(|| read_sums(|| cached("mode=ro"), &stops, &sums)),
                scope.spawn(|| read_sums(plain, &stops, &sums)),
            ];
            let writers =
                [scope.spawn(|| transfer(|| cached(""), 1)), scope.spawn(|| transfer(plain, 2))];
            let counts = writers.map(|writer| writer.join());
            stops.store(true, Ordering::Relaxed);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            counts.map(Result::unwrap)
        });
        let sql = "pragma integrity_check; select sum(amount) from account;
                   select count(*) from done where name=1; select count(*) from done where name=2";
        let (out, errors) = through_the_system(&path, sql);
        let [ours, others] = acknowledged;
        println!("{mode}: {ours} and {others} commits, {sums:?} sums");
        assert_eq!(out, format!("ok\n0\n{ours}\n{others}\n"), "{mode}: {errors}");
        assert!(ours > 0 && others > 0 && sums.into_inner() > 0, "{mode}: {acknowledged:?}");
    }
}
