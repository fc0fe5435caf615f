//! Histories: threads with a connection each change a table whose sum is a function of its
//! version. No reader sees a sum that no commit had, or goes back in time, and no commit that
//! SQLite reported is lost: with any number of connections, in two processes, and when a process is
//! killed.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, panic, thread};

use crate::library::{Connection, Library};

/// Rows among which each commit spreads [`STEP`].
const ROWS: u64 = 400;
const STEP: u64 = 1000;
/// VFS with a small cache of its own: pages are evicted within a transaction.
const CACHED: &str = "bifolio&bifolio_memory=1MiB";
const EXCLUSIVE: &str = "bifolio&bifolio_memory=1MiB&bifolio_exclusive=1";
pub(crate) const SYSTEM: &str = "unix";
pub(crate) const MODES: [&str; 4] = ["delete", "truncate", "persist", "wal"];

/// Of a program that opens a database for each transaction, or two: the open is an operation, too.
pub(crate) const FEW: u32 = 2;

/// A database and its connections.
#[derive(Clone, Copy)]
pub(crate) struct History<'a> {
    pub(crate) library: Library,
    pub(crate) path: &'a Path,
    pub(crate) vfs: &'a str,
    /// Operations between two opens of a connection, on the average.
    pub(crate) reopens: u32,
}

impl History<'_> {
    fn open(&self) -> Result<Connection, String> {
        let connection =
            self.library.open(&format!("file:{}?vfs={}", self.path.display(), self.vfs))?;
        connection
            .run("pragma busy_timeout=20000; pragma cache_size=10; pragma synchronous=normal")?;
        Ok(connection)
    }

    pub(crate) fn make(&self, mode: &str) {
        let sql = format!(
            "pragma journal_mode={mode}; create table version(v); insert into version values(0);
             create table t(id integer primary key, a, b); create index by_a on t(a);
             with recursive n(i) as (select 0 union all select i+1 from n where i<{ROWS}-1)
                 insert into t select i, 0, randomblob(3000) from n;"
        );
        self.open().unwrap().run(&sql).unwrap();
    }

    /// Runs transactions on as many threads while `goes_on`, and calls `committed` with each
    /// version that SQLite reported as committed.
    fn run(
        &self,
        threads: usize,
        goes_on: impl Fn() -> bool + Sync,
        committed: impl Fn(u64) + Sync,
    ) {
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let (mut connection, mut seen) = (None, 0);
                    while goes_on() {
                        let done = match &connection {
                            Some(connection) => transact(connection, &committed, &mut seen),
                            None => self.open().map(|opened| connection = Some(opened)),
                        };
                        // Another thread or process may have locked the database for too long.
                        let is_locked = |problem: &String| problem.contains("locked");
                        assert!(done.as_ref().err().is_none_or(is_locked), "{done:?}");
                        if let (Err(_), Some(connection)) = (&done, &connection) {
                            let _ = connection.run("rollback");
                        }
                        if fastrand::u32(0..self.reopens) == 0 {
                            connection = None;
                            if self.reopens == FEW {
                                // Now and then, no process has it open.
                                thread::sleep(Duration::from_millis(fastrand::u64(0..40)));
                            }
                        }
                    }
                });
            }
        });
    }

    /// Checks the database through `vfs`, and returns its version.
    pub(crate) fn check(&self, vfs: &str) -> u64 {
        let connection = History { vfs, ..*self }.open().unwrap();
        let sql = "pragma integrity_check; select v from version; select sum(a) from t";
        let rows = connection.run(sql).unwrap();
        let version: u64 = rows[1].parse().unwrap();
        assert_eq!(rows, ["ok".to_owned(), version.to_string(), (version * STEP).to_string()]);
        version
    }
}

/// Runs one operation of a thread.
fn transact(
    connection: &Connection,
    committed: &impl Fn(u64),
    seen: &mut u64,
) -> Result<(), String> {
    match fastrand::u32(0..20) {
        0..6 => {
            let rows = connection
                .run("begin immediate; update version set v=v+1; select v from version")?;
            let parts = fastrand::u64(1..8);
            for part in 0..parts {
                let amount = STEP / parts + if part == 0 { STEP % parts } else { 0 };
                let id = fastrand::u64(0..ROWS);
                connection.run(&format!(
                    "update t set a=a+{amount}, b=randomblob({}) where id={id}",
                    fastrand::u64(0..3000)
                ))?;
            }
            if fastrand::u32(0..5) == 0 {
                return connection.run("rollback").map(drop);
            }
            connection.run("commit")?;
            committed(rows[0].parse().unwrap());
            Ok(())
        }
        6 => {
            let kind = ["passive", "full", "restart", "truncate"][fastrand::usize(0..4)];
            connection.run(&format!("pragma wal_checkpoint({kind})")).map(drop)
        }
        _ => {
            let by = ["", "indexed by by_a", "not indexed"][fastrand::usize(0..3)];
            let rows = connection.run(&format!(
                "begin; select v from version; select sum(a) from t {by} where a>=0; commit"
            ))?;
            let numbers: Vec<u64> = rows.iter().map(|row| row.parse().unwrap()).collect();
            let (version, sum) = (numbers[0], numbers[1]);
            assert_eq!(sum, version * STEP, "sum of version {version} {by}");
            assert!(version >= *seen, "version {version} after {seen}");
            *seen = version;
            Ok(())
        }
    }
}

fn check_histories(vfs: &str, threads: usize, mode: &str, duration: Duration) {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let history = History { library, path: &path, vfs, reopens: 100 };
    history.make(mode);
    let commits = AtomicU64::new(0);
    let start = Instant::now();
    // Relaxed: only counted. A slow machine runs on until it has some commits.
    let goes_on = || start.elapsed() < duration || commits.load(Ordering::Relaxed) < 20;
    history.run(threads, goes_on, |_| {
        commits.fetch_add(1, Ordering::Relaxed);
    });
    let commits = commits.into_inner();
    assert_eq!(history.check(SYSTEM), commits, "{vfs}, {mode}");
    println!("{vfs}, {mode}, {threads} connections: {commits} commits");
}

#[test]
fn eight_connections_see_only_what_was_committed() {
    for mode in ["delete", "wal"] {
        for vfs in [CACHED, EXCLUSIVE] {
            check_histories(vfs, 8, mode, Duration::from_secs(1));
        }
    }
}

#[test]
#[ignore = "takes four minutes"]
fn many_connections_see_only_what_was_committed() {
    for threads in [1, 8, 32] {
        for mode in MODES {
            for vfs in [CACHED, EXCLUSIVE, SYSTEM] {
                check_histories(vfs, threads, mode, Duration::from_secs(10));
            }
        }
    }
}

/// The work of a worker: path, VFS, threads, operations between opens.
const WORK: &str = "BIFOLIO_TEST_HISTORY";

/// Runs a history until it is killed, and prints what is committed.
#[test]
#[ignore = "runs as a process of the other tests"]
fn worker() {
    let Ok(work) = env::var(WORK) else { return };
    let [path, vfs, threads, reopens] =
        <[&str; 4]>::try_from(work.split(';').collect::<Vec<_>>()).unwrap();
    let library = Library::load().unwrap();
    let (path, reopens) = (Path::new(path), reopens.parse().unwrap());
    let history = History { library, path, vfs, reopens };
    let report = panic::take_hook();
    // The other threads would go on.
    panic::set_hook(Box::new(move |problem| {
        report(problem);
        process::abort();
    }));
    history.run(threads.parse().unwrap(), || true, |version| println!("\ncommitted {version}"));
}

/// A worker in another process.
pub(crate) struct Worker {
    child: Child,
    lines: BufReader<process::ChildStdout>,
}

impl Worker {
    pub(crate) fn start(path: &Path, vfs: &str, threads: usize, reopens: u32) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "histories::worker", "--include-ignored", "--nocapture"]);
        command.env(WORK, format!("{};{vfs};{threads};{reopens}", path.display()));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits for so many commits, kills the process, and returns its commits.
    pub(crate) fn kill_after(mut self, commits: usize) -> Vec<u64> {
        let lines = self.lines.lines().map(Result::unwrap);
        let mut lines =
            lines.filter_map(|line| line.strip_prefix("committed ")?.parse::<u64>().ok());
        let mut versions: Vec<u64> = lines.by_ref().take(commits).collect();
        assert_eq!(versions.len(), commits, "the worker has ended");
        thread::sleep(Duration::from_micros(fastrand::u64(0..5000)));
        self.child.kill().unwrap();
        versions.extend(lines);
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
        versions
    }
}

/// Kills a process with eight connections again and again; the next one recovers, in turn through
/// the cache and through the system's VFS.
fn check_kills(mode: &str, kills: usize) {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let history = History { library, path: &path, vfs: CACHED, reopens: 100 };
    history.make(mode);
    let mut version = 0;
    for kill in 0..kills {
        let worker = Worker::start(&path, [CACHED, EXCLUSIVE][kill % 2], 8, 100);
        let reported = worker.kill_after(fastrand::usize(1..40)).into_iter().max().unwrap();
        let before = version;
        version = history.check([SYSTEM, CACHED, EXCLUSIVE][kill % 3]);
        assert!(version >= reported && reported > before, "{mode}: {version} after {reported}");
    }
    println!("{mode}: {kills} kills, {version} commits");
}

#[test]
fn kills_of_eight_connections_lose_no_commit() {
    for mode in ["delete", "wal"] {
        check_kills(mode, 3);
    }
}

#[test]
#[ignore = "takes minutes"]
fn many_kills_of_eight_connections_lose_no_commit() {
    let kills = env::var("BIFOLIO_KILLS").map_or(20, |text| text.parse().unwrap());
    for mode in MODES {
        check_kills(mode, kills);
    }
}

/// Two processes take turns: each has the database while it has it open.
fn check_two_processes(mode: &str, commits: usize) {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let history = History { library, path: &path, vfs: EXCLUSIVE, reopens: 4 };
    history.make(mode);
    let workers = [EXCLUSIVE, SYSTEM].map(|vfs| Worker::start(&path, vfs, 1, 4));
    let waiting = workers.map(|worker| thread::spawn(move || worker.kill_after(commits)));
    let reported = waiting.map(|waiting| waiting.join().unwrap());
    let mut versions = reported.concat();
    versions.sort_unstable();
    let count = versions.len();
    versions.dedup();
    assert_eq!(versions.len(), count, "{mode}: both committed a version");
    let version = history.check(EXCLUSIVE);
    // A commit may have been made that was not reported any more, by each.
    assert!((count..=count + 2).contains(&(version as usize)), "{mode}: {version} of {count}");
    println!("{mode}: {} and {} commits", reported[0].len(), reported[1].len());
}

#[test]
fn two_processes_take_turns() {
    for mode in ["delete", "wal"] {
        check_two_processes(mode, 20);
    }
}
