//! Every journal mode, with each setting of `synchronous`, on a device that is full, or whose n-th
//! write or sync fails, ended by a kill or a close: the database keeps every commit that SQLite
//! reported, and is sound.
//!
//! Without a journal on storage some faults damage the database with any VFS. So what goes wrong
//! here counts as a defect unless it goes wrong in the same case with the system's VFS, too, for
//! some n. The short form takes a few n of each case; the ignored test takes many, also for errors
//! that last.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs, process, thread};

use bifolio_testing::SmallDisk;

use crate::library::Library;
use crate::supervisor::{Calls, Fault, submit, supervise};

const MODES: [&str; 6] = ["delete", "truncate", "persist", "memory", "off", "wal"];
const SYNCHRONOUS: [&str; 3] = ["off", "normal", "full"];

/// Behaviour of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// It is full after so many KiB more.
    FullAfter(u64),
    /// The n-th call fails, and those after it if it lasts.
    Fails { calls: Calls, nth: u64, is_lasting: bool },
}

/// How the worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    Closed,
}

/// A cell of the matrix, but for the trouble.
#[derive(Clone, Copy, Debug)]
struct Setting {
    mode: &'static str,
    synchronous: &'static str,
    end: End,
}

/// Our VFS, with the smallest cache: pages are evicted within a transaction.
const CACHED: [&str; 2] =
    ["bifolio&bifolio_memory=256KiB", "bifolio&bifolio_memory=256KiB&bifolio_exclusive=1"];

/// Transactions of a worker.
const TRANSACTIONS: u32 = 24;
/// Rows at the beginning; a transaction changes those of one class.
const ROWS: u32 = 400;
const CLASSES: u32 = 5;
const DISK_BYTES: u64 = 16 << 20;

/// A variable of the worker: path, VFS, mode, `synchronous`, end.
const WORK: &str = "BIFOLIO_SQLITE_WORK";

fn make(library: Library, path: &Path, mode: &str) {
    let connection = library.open(&format!("file:{}?vfs=unix", path.display())).unwrap();
    connection.ask(&format!("pragma journal_mode={mode}"));
    connection.ask("create table t(id integer primary key, n integer, v blob)");
    let rows = format!(
        "with recursive i(id) as (select -{ROWS} union all select id+1 from i where id<-1)
         insert into t select id, 0, randomblob(900) from i"
    );
    connection.ask(&rows);
}

/// The worker: makes transactions, and tells which of them SQLite reported as committed.
#[test]
#[ignore = "runs as a process of the other tests"]
fn worker() {
    let Ok(work) = env::var(WORK) else { return };
    let [path, vfs, mode, synchronous, end] =
        <[&str; 5]>::try_from(work.split(';').collect::<Vec<_>>()).unwrap();
    let library = Library::load().unwrap();
    println!("\nlistener {}", submit());
    let uri = format!("file:{path}?vfs={vfs}");
    let opened = library.open(&uri);
    let Ok(connection) = opened else {
        println!("refused {}", opened.err().unwrap());
        return;
    };
    // A mode may be refused after an error; then the mode stays as it was.
    let settings = format!(
        "pragma cache_size=10; pragma synchronous={synchronous}; pragma wal_autocheckpoint=8;
         pragma journal_mode={mode}"
    );
    let _ = connection.run(&settings);
    for number in 1..=TRANSACTIONS {
        let class = number % CLASSES;
        let transaction = format!(
            "begin; update t set n={number}, v=randomblob(900) where id<0 and -id%{CLASSES}={class};
             insert into t values({number}, {number}, randomblob(6000)); commit"
        );
        match connection.run(&transaction) {
            Ok(_) => println!("committed {number}"),
            Err(problem) => {
                println!("failed {number}: {problem}");
                // Fails if SQLite has rolled back.
                let _ = connection.run("rollback");
            }
        }
        match number {
            9 => drop(connection.run("pragma wal_checkpoint(truncate)")),
            14 => drop(connection.run("vacuum")),
            _ => {}
        }
    }
    if end == "Killed" {
        let _ = Command::new("kill").args(["-9", &process::id().to_string()]).status();
    }
    drop(connection);
    println!("closed");
}

/// Result of a worker.
#[derive(Debug, Default)]
struct Outcome {
    committed: BTreeSet<u32>,
    problems: Vec<String>,
    /// Calls that failed.
    failed: u64,
}

/// Runs a worker, until it ends.
fn run_worker(path: &Path, vfs: &str, setting: Setting, fault: Option<Fault>) -> Outcome {
    let Setting { mode, synchronous, end } = setting;
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "faults::worker", "--include-ignored", "--nocapture"]);
    command.env(WORK, format!("{};{vfs};{mode};{synchronous};{end:?}", path.display()));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let listener = lines.find_map(|line| line.strip_prefix("listener ")?.parse().ok());
    let supervisor = supervise(&child, listener.expect("the worker has begun"), fault);
    let mut outcome = Outcome::default();
    for line in lines {
        match line.split_once(' ') {
            Some(("committed", number)) => {
                outcome.committed.insert(number.parse().unwrap());
            }
            Some(("failed" | "refused", problem)) => outcome.problems.push(problem.to_owned()),
            _ => {}
        }
    }
    child.wait().unwrap();
    outcome.failed = supervisor.join().unwrap();
    outcome
}

/// Looks at the database with the system's VFS. Returns what is wrong.
fn look(library: Library, path: &Path, outcome: &Outcome) -> Option<String> {
    let opened = library.open(&format!("file:{}?vfs=unix", path.display()));
    let connection = match opened {
        Ok(connection) => connection,
        Err(problem) => return Some(format!("cannot be opened: {problem}")),
    };
    let run = |sql: &str| connection.run(sql).unwrap_or_else(|problem| vec![problem]);
    let integrity = run("pragma integrity_check");
    if integrity != ["ok"] {
        return Some(format!("integrity_check: {}", integrity.join(", ")));
    }
    let found: BTreeSet<u32> =
        run("select id from t where id>0").iter().filter_map(|id| id.parse().ok()).collect();
    let lost: Vec<_> = outcome.committed.difference(&found).collect();
    if !lost.is_empty() {
        return Some(format!("commits {lost:?} are lost"));
    }
    for class in 0..CLASSES {
        let last = found.iter().rev().find(|number| *number % CLASSES == class).unwrap_or(&0);
        let sql =
            format!("select distinct n from t where id<0 and -id%{CLASSES}={class} order by n");
        let values = run(&sql);
        if values != [last.to_string()] {
            return Some(format!("class {class} has {values:?}, not {last}"));
        }
    }
    None
}

/// Runs a case with one VFS. Returns what went wrong, and whether anything failed.
fn run_case(
    library: Library,
    disk: &SmallDisk,
    vfs: &str,
    setting: Setting,
    trouble: Trouble,
) -> (Option<String>, bool) {
    for entry in fs::read_dir(disk.path()).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let path = disk.path().canonicalize().unwrap().join("x.db");
    make(library, &path, setting.mode);
    let ballast = disk.path().join("ballast");
    let fault = match trouble {
        Trouble::FullAfter(room_kib) => {
            fill(&ballast, room_kib << 10);
            None
        }
        Trouble::Fails { calls, nth, is_lasting } => {
            Some(Fault { calls, path: path.clone(), nth, is_lasting })
        }
    };
    let outcome = run_worker(&path, vfs, setting, fault);
    let _ = fs::remove_file(&ballast);
    let has_failed = outcome.failed > 0 || !outcome.problems.is_empty();
    (look(library, &path, &outcome).map(|wrong| format!("{wrong}; {outcome:?}")), has_failed)
}

/// Fills a file system up to some room.
fn fill(ballast: &Path, room_bytes: u64) {
    let mut file = File::create(ballast).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    file.set_len(file.metadata().unwrap().len().saturating_sub(room_bytes)).unwrap();
}

/// Troubles that differ only in numbers.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Full,
    Fails { calls: Calls, is_lasting: bool },
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Full,
        Self::Fails { calls: Calls::Writes, is_lasting: false },
        Self::Fails { calls: Calls::Syncs, is_lasting: false },
        Self::Fails { calls: Calls::Writes, is_lasting: true },
        Self::Fails { calls: Calls::Syncs, is_lasting: true },
    ];
    /// Of the short form.
    const SOME: usize = 3;

    fn with(self, number: u64) -> Trouble {
        match self {
            Self::Full => Trouble::FullAfter(number * 30),
            Self::Fails { calls, is_lasting } => Trouble::Fails { calls, nth: number, is_lasting },
        }
    }

    /// The troubles of the whole form.
    fn troubles(self) -> Vec<Trouble> {
        let numbers: Vec<u64> = match self {
            Self::Full => (1..20).collect(),
            Self::Fails { .. } => (1..=20).chain((22..80).step_by(5)).collect(),
        };
        numbers.into_iter().map(|number| self.with(number)).collect()
    }

    /// A trouble of the short form.
    fn trouble(self) -> Trouble {
        self.with(match self {
            Self::Full => 5,
            Self::Fails { calls: Calls::Writes, .. } => 3,
            Self::Fails { calls: Calls::Syncs, .. } => 2,
        })
    }
}

/// Runs all cases of a journal mode.
fn check(mode: &'static str, is_whole: bool) {
    let Some(library) = Library::load() else { return };
    let Some(disk) = SmallDisk::mount(DISK_BYTES) else { return };
    let kinds = &Kind::ALL[..if is_whole { Kind::ALL.len() } else { Kind::SOME }];
    let (mut runs, mut with_failures, mut defects) = (0, 0, Vec::new());
    for synchronous in SYNCHRONOUS {
        for end in [End::Killed, End::Closed] {
            let setting = Setting { mode, synchronous, end };
            for kind in kinds {
                let troubles = if is_whole { kind.troubles() } else { vec![kind.trouble()] };
                for trouble in troubles {
                    let vfs = *fastrand::choice(&CACHED).unwrap();
                    let (wrong, has_failed) = run_case(library, &disk, vfs, setting, trouble);
                    (runs, with_failures) = (runs + 1, with_failures + u32::from(has_failed));
                    let Some(wrong) = wrong else { continue };
                    let goes_wrong = |trouble: Trouble| {
                        run_case(library, &disk, "unix", setting, trouble).0.is_some()
                    };
                    if !goes_wrong(trouble) && !kind.troubles().into_iter().any(goes_wrong) {
                        defects.push(format!("{vfs}, {setting:?}, {trouble:?}: {wrong}"));
                    }
                }
            }
        }
    }
    println!("{mode}: {runs} runs, {with_failures} with failures");
    assert!(with_failures * 3 > runs, "{mode}: only {with_failures} of {runs} runs had failures");
    assert!(defects.is_empty(), "{}", defects.join("\n"));
}

#[test]
fn faults_lose_no_commit_with_deleted_journals() {
    check("delete", false);
}

#[test]
fn faults_lose_no_commit_with_truncated_journals() {
    check("truncate", false);
}

#[test]
fn faults_lose_no_commit_with_persistent_journals() {
    check("persist", false);
}

#[test]
fn faults_lose_no_more_than_elsewhere_with_journals_in_memory() {
    check("memory", false);
}

#[test]
fn faults_lose_no_more_than_elsewhere_without_journals() {
    check("off", false);
}

#[test]
fn faults_lose_no_commit_with_a_log() {
    check("wal", false);
}

#[test]
#[ignore = "takes minutes: every n"]
fn faults_at_every_call_lose_no_commit() {
    thread::scope(|scope| {
        for mode in MODES {
            scope.spawn(move || check(mode, true));
        }
    });
}
