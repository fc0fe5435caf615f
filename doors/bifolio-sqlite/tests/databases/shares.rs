//! Databases that several processes use at the same time, with and without the
//! VFS.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs, iter};

use crate::histories::{FEW, History, MODES, SYSTEM, Worker};
use crate::library::{Connection, Library};
use crate::shell::{has_sqlite, through_the_system};

/// With a cache that holds the database, and with one from which pages are evicted.
const FITS: &str = "bifolio&bifolio_memory=16MiB";
const SMALL: &str = "bifolio&bifolio_memory=1MiB";
const KEPT: &str = "bifolio";

fn open(library: Library, path: &Path) -> Connection {
    let connection = library.open_cached(path, "").unwrap();
    connection.run("pragma busy_timeout=10000; pragma cache_size=0").unwrap();
    connection
}

/// Sees the changes of other processes in the next transaction, with all pages in the cache.
#[test]
fn commits_of_other_processes_are_seen() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for mode in MODES {
        let path = directory.path().join(format!("{mode}.db"));
        let other = |sql: &str| {
            let (out, errors) = through_the_system(&path, &format!(".timeout 10000\n{sql}"));
            assert_eq!(errors, "", "{mode}: {sql}");
            out.lines().last().unwrap_or_default().to_owned()
        };
        other(&format!(
            "pragma journal_mode={mode}; create table t(id integer primary key, a, b);
             with recursive n(i) as (select 1 union all select i+1 from n where i<2000)
                 insert into t select i, 0, zeroblob(1000) from n;"
        ));
        let ours = open(library, &path);
        // Keeps the log, and the pages of the cache.
        let also = open(library, &path);
        let sum = |of: &Connection| of.ask("select sum(a)||' '||count(*) from t");
        let mut expected = 0;
        for step in 0..12 {
            assert_eq!(sum(&ours), format!("{expected} 2000"), "{mode}, {step}");
            assert_eq!(sum(&also), format!("{expected} 2000"), "{mode}, {step}, another");
            other(&format!("update t set a=a+1 where id%7={}", step % 7));
            expected += 2000 / 7 + u32::from((1..=5).contains(&(step % 7)));
            match step % 4 {
                1 => drop(other("pragma wal_checkpoint(passive)")),
                2 => drop(ours.run("pragma wal_checkpoint(restart)").unwrap()),
                3 => {
                    assert_eq!(sum(&ours), format!("{expected} 2000"), "{mode}, {step}");
                    drop(other("pragma wal_checkpoint(truncate)"));
                }
                _ => {}
            }
            ours.run("update t set a=a+1 where id=8").unwrap();
            expected += 1;
            assert_eq!(other("select sum(a) from t"), expected.to_string(), "{mode}, {step}");
        }
        let stats = ours.run("pragma bifolio_stats").unwrap().join("\n");
        assert!(stats.contains("reads"), "{stats}");
        other("delete from t where id>500; vacuum");
        assert_eq!(ours.ask("select count(*) from t"), "500", "{mode}");
        other("insert into t select id+1000, 0, zeroblob(3000) from t");
        assert_eq!(ours.ask("select count(*)||' '||sum(length(b)) from t"), "1000 2000000");
        assert_eq!(ours.ask("pragma integrity_check"), "ok");
    }
}

/// Programs exchange databases under all of their locks and have the index made anew, as SQLite's
/// example `superlock` does: one log without a frame is like another.
#[test]
fn a_file_that_is_replaced_beside_an_empty_log_is_read_again() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let contents = ["one", "two"].map(|value| {
        let path = directory.path().join(value);
        let connection = library.open_cached(&path, "").unwrap();
        let fill = format!("create table t(a); insert into t values('{value}')");
        connection.run(&format!("pragma journal_mode=wal; {fill}")).unwrap();
        drop(connection);
        fs::read(path).unwrap()
    });
    let path = directory.path().join("one");
    let ours = open(library, &path);
    let also = open(library, &path);
    for step in 0..6 {
        let expected = ["one", "two"][step % 2];
        assert_eq!(ours.ask("select a from t"), expected, "{step}");
        assert_eq!(also.ask("select a from t"), expected, "{step}");
        fs::write(&path, &contents[(step + 1) % 2]).unwrap();
        let index = fs::File::options().write(true).open(directory.path().join("one-shm"));
        index.unwrap().write_all_at(&[0; 32], 0).unwrap();
    }
}

/// Reads are served by the cache where nothing has changed.
#[test]
fn pages_stay_in_the_cache_between_transactions() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    for (mode, locking) in [("delete", "normal"), ("wal", "normal"), ("wal", "exclusive")] {
        let path = directory.path().join(format!("{mode}-{locking}.db"));
        // Its own cache, and so its own counters.
        let parameters = "bifolio_memory=16MiB";
        let connection = library.open_cached(&path, parameters).unwrap();
        connection
            .run(&format!(
                "pragma cache_size=0; pragma journal_mode={mode}; create table t(a, b);
                 with recursive n(i) as (select 1 union all select i+1 from n where i<1000)
                     insert into t select i, zeroblob(1000) from n;
                 pragma wal_checkpoint(restart);"
            ))
            .unwrap();
        let filled = || {
            let stats = connection.run("pragma bifolio_stats").unwrap().join("\n");
            let pages = stats.lines().find_map(|line| line.strip_prefix("storage_read_bytes "));
            pages.map_or(0, |number| number.parse::<u64>().unwrap())
        };
        let read = || connection.ask("select sum(length(b)) from t");
        // The index is mapped by now: with exclusive locking, SQLite takes no more slots of it.
        connection.run(&format!("pragma locking_mode={locking}; update t set a=a+1")).unwrap();
        read();
        let before = filled();
        for step in 0..20 {
            assert_eq!(read(), "1000000", "{mode}, {step}");
            connection.run("update t set a=a+1 where rowid=500").unwrap();
        }
        let read_bytes = filled() - before;
        println!("{mode}, {locking}: {read_bytes} bytes were read again");
        assert!(read_bytes < 20_000, "{mode}: {read_bytes} bytes were read again");
    }
}

/// A program that opens a database for each request reads three pages of it: the header, the root
/// of a table and a leaf.
#[test]
fn a_point_after_an_open_reads_only_its_pages() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let rows = "create table t(id integer primary key, b);
                with recursive n(i) as (select 1 union all select i+1 from n where i<1000)
                    insert into t select i, zeroblob(1000) from n";
    library.open_cached(&path, "").unwrap().run(rows).unwrap();
    let connection = library.open_cached(&path, "bifolio_memory=16MiB").unwrap();
    assert_eq!(connection.ask("select length(b) from t where id=700"), "1000");
    let stats = connection.ask("pragma bifolio_stats");
    let bytes = stats.lines().find_map(|line| line.strip_prefix("storage_read_bytes "));
    let bytes: u64 = bytes.unwrap().parse().unwrap();
    assert!(bytes <= 4 * 4096, "{bytes} bytes");
}

/// As a file of a CD, or one that Datasette serves: no lock is taken, and reads are cached all the
/// same. Without locks and without that promise, they bypass the cache.
#[test]
fn an_immutable_database_is_read_through_the_cache_without_a_lock() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for mode in ["delete", "wal"] {
        let path = directory.path().join(format!("{mode}.db"));
        let rows = "with recursive n(i) as (select 1 union all select i+1 from n where i<1000)
                    insert into t select zeroblob(1000) from n";
        through_the_system(
            &path,
            &format!("pragma journal_mode={mode}; create table t(b); {rows}"),
        );
        let sql = "pragma cache_size=0; select sum(length(b)) from t";
        for (parameters, is_cached) in [("immutable=1", true), ("nolock=1", false)] {
            let own = format!("{parameters}&bifolio_memory=16MiB");
            let connection = library.open_cached(&path, &own).unwrap();
            let read = || connection.run(sql).map(|rows| rows.concat());
            if mode == "wal" && !is_cached {
                // As with the system's VFS: a log needs locks.
                read().unwrap_err();
                continue;
            }
            for _ in 0..2 {
                assert_eq!(read(), Ok("1000000".to_owned()), "{mode}, {parameters}");
                let stats = connection.ask("pragma bifolio_stats");
                let filled =
                    stats.lines().find_map(|line| line.strip_prefix("storage_read_bytes "));
                let bytes: u64 = filled.map_or(0, |text| text.parse().unwrap());
                // Once, with what is read ahead.
                let expected = if is_cached { 1_000_000..1_300_000 } else { 0..1 };
                assert!(expected.contains(&bytes), "{mode}, {parameters}: {stats}");
            }
        }
        assert_eq!(through_the_system(&path, "update t set b=null").1, "");
    }
}

/// A reader of a database with a log beside writers of other processes, which come and go.
#[test]
fn a_connection_that_may_only_read_sees_what_others_commit() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let sql = "pragma journal_mode=wal; create table t(a); insert into t values(0)";
    through_the_system(&path, sql);
    let reader = library.open_cached(&path, "mode=ro").unwrap();
    reader.run("pragma cache_size=0").unwrap();
    for step in 1..=20 {
        let sql = match step % 4 {
            0 => "update t set a=a+1; pragma wal_checkpoint(truncate)",
            1 => "update t set a=a+1; pragma wal_checkpoint(restart)",
            _ => "update t set a=a+1",
        };
        assert_eq!(through_the_system(&path, sql).1, "");
        assert_eq!(reader.ask("select a from t"), step.to_string());
    }
    assert!(reader.run("update t set a=0").unwrap_err().contains("readonly"));
}

/// Two copies of the system's VFS in one process could not do this with a log: the one that closes
/// first takes itself for the last, and deletes the log of the other.
#[test]
fn another_copy_of_the_library_sees_commits_and_is_seen() {
    let (Some(library), Some(copy)) = (Library::load(), Library::load_copy()) else { return };
    let directory = tempfile::tempdir().unwrap();
    for mode in MODES {
        let path = directory.path().join(format!("{mode}.db"));
        let ours = open(library, &path);
        let sql = "create table t(a); insert into t values(0)";
        ours.run(&format!("pragma journal_mode={mode}; {sql}")).unwrap();
        for turn in 0..10 {
            let other = copy.open_plainly(&path);
            other.run("update t set a=a+1").unwrap();
            assert_eq!(ours.ask("select a from t"), (2 * turn + 1).to_string(), "{mode}");
            ours.run("update t set a=a+1").unwrap();
            assert_eq!(other.ask("select a from t"), (2 * turn + 2).to_string(), "{mode}");
        }
        assert_eq!(ours.ask("pragma integrity_check"), "ok");
    }
}

/// The index is in the connection's own memory then, without barriers.
#[test]
fn an_exclusive_locking_mode_reads_what_others_have_written() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for mode in ["delete", "wal"] {
        let path = directory.path().join(format!("{mode}.db"));
        let sql = "create table t(a); insert into t values(0)";
        through_the_system(&path, &format!("pragma journal_mode={mode}; {sql}"));
        let ours = open(library, &path);
        assert_eq!(ours.ask("select a from t"), "0");
        through_the_system(&path, "update t set a=1; pragma wal_checkpoint(truncate)");
        ours.run("pragma locking_mode=exclusive; update t set a=a+1").unwrap();
        let (_, errors) = through_the_system(&path, "update t set a=a+1");
        assert!(errors.contains("locked"), "{mode}: {errors}");
        assert_eq!(ours.ask("select a from t"), "2", "{mode}");
        ours.run("pragma locking_mode=normal; select a from t").unwrap();
        assert_eq!(through_the_system(&path, "update t set a=a+1"), Default::default(), "{mode}");
        assert_eq!(ours.ask("select a from t"), "3", "{mode}");
    }
}

#[test]
fn a_database_is_shared_or_not_for_all_connections_of_a_process() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    for (first, second) in
        [("bifolio_exclusive=1", "bifolio_exclusive=0"), ("", "bifolio_exclusive=1")]
    {
        let ours = library.open_cached(&path, first).unwrap();
        ours.run("create table if not exists t(a)").unwrap();
        let refusal = library.open_cached(&path, second).err().unwrap();
        assert!(refusal.contains(second), "{refusal}");
        library.open_cached(&path, "").unwrap().run("select * from t").unwrap();
    }
}

/// Processes that change a database together; each is killed after some commits. No sum is read
/// that no commit had, and no commit that SQLite reported is lost.
fn check_processes(
    mode: &str,
    all: &[&str],
    (threads, reopens): (usize, u32),
    commits: usize,
    goes_on: impl Fn(usize) -> bool,
) {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let history = History { library, path: &path, vfs: SYSTEM, reopens: 30 };
    history.make(mode);
    let (mut versions, mut kills) = (Vec::new(), 0);
    for round in (0..).take_while(|round| goes_on(*round)) {
        let start = |vfs: &&str| Worker::start(&path, vfs, threads, reopens);
        let workers = all.iter().map(start).collect::<Vec<_>>();
        let kill = |worker: Worker| {
            let count = fastrand::usize(1..=commits);
            thread::spawn(move || worker.kill_after(count))
        };
        let waiting: Vec<_> = workers.into_iter().map(kill).collect();
        kills += waiting.len();
        versions.extend(waiting.into_iter().flat_map(|waiting| waiting.join().unwrap()));
        let version = history.check([SYSTEM, FITS][round % 2]);
        assert!(versions.iter().all(|reported| *reported <= version), "{mode}: {version}");
    }
    let count = versions.len();
    versions.sort_unstable();
    versions.dedup();
    assert_eq!(versions.len(), count, "{mode}: a version was committed twice");
    println!("{mode}: {kills} kills, {count} commits");
}

#[test]
fn three_processes_lose_no_commit() {
    for mode in MODES {
        check_processes(mode, &[FITS, SMALL, SYSTEM], (8, 30), 30, |round| round < 2);
    }
}

/// With the cache of the process, which keeps pages of a closed database.
#[test]
fn programs_that_open_a_database_for_each_transaction_lose_no_commit() {
    for mode in MODES {
        check_processes(mode, &[KEPT, SYSTEM], (1, FEW), 8, |round| round < 2);
    }
}

/// As long as `BIFOLIO_SHARE_SECONDS` says, in all modes together.
#[test]
#[ignore = "takes minutes"]
fn three_processes_lose_no_commit_for_long() {
    let seconds = env::var("BIFOLIO_SHARE_SECONDS").map_or(120, |text| text.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut modes = MODES.iter().cycle();
    for number in iter::successors(Some(0), |number| Some(number + 1)) {
        if Instant::now() >= end {
            break;
        }
        let (all, opens, commits) = [
            (&[FITS, SMALL, SYSTEM][..], (8, 30), 200),
            (&[FITS, FITS, SYSTEM][..], (8, 30), 200),
            (&[KEPT, SYSTEM][..], (1, FEW), 30),
            (&[KEPT, KEPT, SYSTEM][..], (2, FEW), 50),
        ][number / 4 % 4];
        check_processes(modes.next().unwrap(), all, opens, commits, |round| round < 5);
    }
}
