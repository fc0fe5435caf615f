//! One cache for all databases of the process: its bound, its threads, and files that cannot be
//! made durable when they are closed.
//!
//! # Safety
//! The limit of descriptors is raised before threads open any.
#![allow(unsafe_code)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use bifolio_testing::{SmallDisk, skip};

use crate::library::{Connection, Library};
use crate::shell::{KINDS, has_sqlite, run, through_the_system, with_cache};

/// The work of a worker: directory, VFS, number of databases.
const WORK: &str = "BIFOLIO_TEST_DATABASES";
/// Descriptors of a database: the system's VFS, the cache's two, and a journal.
const DESCRIPTORS: u64 = 4;

/// Threads of a cache whose device answers: reclaim, memory pressure, two of the flusher, some for
/// transfers.
const THREADS_MAX: u64 = 21;

/// Returns the value of a line of `/proc/self/status`.
fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

/// Returns the number of threads, without workers of the kernel, which come and go.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name =
        |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let names = tasks.map(|task| name(task.unwrap()));
    names.filter(|name| !name.is_empty() && !name.starts_with("iou-")).count()
}

/// Raises the limit of descriptors as far as the process may.
fn raise_descriptors() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a variable.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    limit.rlim_cur
}

/// Opens all databases, reads them whole and changes them, twice, and prints what that took.
#[test]
#[ignore = "runs as a process of the other tests"]
fn worker() {
    let Ok(work) = env::var(WORK) else { return };
    let [directory, vfs, count] =
        <[&str; 3]>::try_from(work.split(';').collect::<Vec<_>>()).unwrap();
    let count: u64 = count.parse().unwrap();
    let library = Library::load().unwrap();
    raise_descriptors();
    let before = threads();
    let start = Instant::now();
    let open = |number| {
        let connection = library.open(&format!("file:{directory}/{number}.db?vfs={vfs}")).unwrap();
        connection.run("pragma cache_size=10; pragma synchronous=off").unwrap();
        assert_eq!(connection.ask("select v is null from t where id=1"), "0");
        connection
    };
    let connections: Vec<Connection> = (0..count).map(open).collect();
    let opened = start.elapsed();
    for round in 0..2 {
        for connection in &connections {
            let sql = "select sum(length(v)) from t; update t set n=n+1 where id%50=1";
            assert_eq!(connection.run(sql).unwrap(), ["1000000"], "round {round}");
        }
    }
    println!("\nthreads {}", threads() - before);
    println!("resident {}", status("VmHWM") << 10);
    println!("opens {:.0}", count as f64 / opened.as_secs_f64());
}

/// Runs the worker, and returns its threads, its resident size and its opens per second.
fn work(directory: &Path, vfs: &str, count: u64, bound: &str) -> [u64; 3] {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "process_cache::worker", "--include-ignored", "--nocapture"]);
    command.env(WORK, format!("{};{vfs};{count}", directory.display()));
    let output = command.env("BIFOLIO_MEMORY", bound).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    ["threads ", "resident ", "opens "]
        .map(|name| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap())
}

/// Databases of 1 MB, all open at once, stay within one bound.
fn check_many(count: u64, bound_mib: u64) {
    let Some(library) = Library::load() else { return };
    if raise_descriptors() < count * DESCRIPTORS {
        return skip("descriptors", "the limit of open files is too low");
    }
    let directory = tempfile::tempdir().unwrap();
    let first = directory.path().join("0.db");
    let made = library.open(&format!("file:{}?vfs=unix", first.display())).unwrap();
    let sql = "create table t(id integer primary key, n, v blob);
               with recursive i(id) as (select 1 union all select id+1 from i where id<1000)
                   insert into t select id, 0, randomblob(1000) from i";
    made.run(sql).unwrap();
    drop(made);
    for number in 1..count {
        fs::copy(&first, directory.path().join(format!("{number}.db"))).unwrap();
    }
    let work = |vfs: &str| work(directory.path(), vfs, count, &format!("{bound_mib}MiB"));
    let system = work("unix");
    println!("{count} databases: threads, resident, opens/s: {system:?}");
    let allowed_bytes = system[1] + (bound_mib << 20) * 102 / 100 + (8 << 20);
    for kind in KINDS {
        let cached = work(&format!("bifolio&{kind}"));
        println!("in the cache, {kind}: {cached:?}");
        assert!(cached[0] <= THREADS_MAX, "{kind}: {} threads", cached[0]);
        assert!(cached[1] <= allowed_bytes, "{kind}: {} of {allowed_bytes} bytes", cached[1]);
    }
    for number in [0, count / 2, count - 1] {
        let path = directory.path().join(format!("{number}.db"));
        let check = library.open(&format!("file:{}?vfs=unix", path.display())).unwrap();
        let rows = check.run("pragma integrity_check; select sum(n) from t").unwrap();
        assert_eq!(rows, ["ok", "120"], "{number}: two rounds in each run");
    }
}

#[test]
fn a_hundred_databases_share_one_bound() {
    check_many(100, 8);
}

#[test]
#[ignore = "writes 1 GB"]
fn a_thousand_databases_share_one_bound() {
    check_many(1000, 64);
}

#[test]
fn the_bound_is_that_of_the_environment_or_of_the_pragma() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [path, other] = ["x.db", "y.db"].map(|name| directory.path().join(name));
    let opened = |memory: &str| {
        let mut command = with_cache(&path, "");
        command.env("BIFOLIO_MEMORY", memory);
        command
    };
    let attach = |parameters: &str| {
        format!("attach 'file:{}?vfs=bifolio{parameters}' as y;", other.display())
    };
    let sql = format!(
        "pragma bifolio_memory; {} pragma y.bifolio_memory='16MiB'; pragma bifolio_memory;
         pragma bifolio_memory=8388608; create table t(a); insert into t values(7);
         create table y.t(a); insert into y.t select a+1 from t; select a from y.t;
         pragma bifolio_memory='much';\npragma bifolio_memory=1;\npragma bifolio_memory;",
        attach("")
    );
    let (out, errors) = run(opened("4MiB"), &sql);
    assert_eq!(out, "4194304\n16777216\n16777216\n8388608\n8\n8388608\n", "{errors}");
    assert!(errors.contains("bifolio_memory=much: a size is a number of bytes"), "{errors}");
    assert!(errors.contains("1 bytes is outside 262144 (256 KiB)"), "{errors}");
    // A bound of its own is a cache of its own.
    let sql = format!(
        "{} pragma y.bifolio_memory; pragma y.bifolio_memory='3MiB'; pragma bifolio_memory;",
        attach("&bifolio_memory=2MiB")
    );
    let (out, errors) = run(opened("4MiB"), &sql);
    assert_eq!(out, "2097152\n3145728\n4194304\n", "{errors}");
    let (_, errors) = run(opened("4MB"), "select 1;");
    assert!(errors.contains("BIFOLIO_MEMORY=4MB: a size is a number of bytes"), "{errors}");
}

#[test]
fn the_pages_of_the_last_process_are_read_again() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (path, hot) = (directory.path().join("x.db"), directory.path().join("hot"));
    let hot = hot.display();
    let sql = format!(
        "create table t(v); insert into t values(randomblob(100000));
         pragma bifolio_save='{hot}'; pragma bifolio_save;\npragma bifolio_save='{}';",
        path.display()
    );
    let (out, errors) = run(with_cache(&path, ""), &sql);
    let saved: u64 = out.trim().parse().unwrap_or_else(|_| panic!("{out} {errors}"));
    assert!(saved >= 4096, "{out}");
    assert!(errors.contains("bifolio_save needs the path"), "{errors}");
    assert!(errors.contains("is not replaced"), "{errors}");
    let sql = format!(
        "pragma bifolio_warm='{hot}'; select length(v) from t;
         pragma bifolio_warm='{}';\npragma bifolio_warm='{hot}.absent';",
        path.display()
    );
    let (out, errors) = run(with_cache(&path, ""), &sql);
    assert_eq!(out, format!("{saved}\n100000\n"), "{errors}");
    assert!(errors.contains("no list of hot pages"), "{errors}");
    assert!(errors.contains("No such file"), "{errors}");
}

#[test]
fn the_counters_of_a_database_are_its_own() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [path, other] = ["x.db", "y.db"].map(|name| directory.path().join(name));
    let sql = "create table t(a); insert into t values(zeroblob(100000));";
    for path in [&path, &other] {
        assert_eq!(through_the_system(path, sql).1, "");
    }
    let sql = format!(
        "attach 'file:{}?vfs=bifolio' as y; select length(hex(a)) from t; select count(*) from y.t;
         pragma bifolio_stats('x.db'); pragma bifolio_stats('{}');\npragma bifolio_stats('z.db');",
        other.display(),
        other.display()
    );
    let (out, errors) = run(with_cache(&path, ""), &sql);
    let of = |name: &str| -> Vec<u64> {
        let lines = out.lines().filter_map(|line| line.strip_prefix(name));
        lines.map(|bytes| bytes.trim().parse().unwrap()).collect()
    };
    assert_eq!(of("len_bytes"), [fs::metadata(&path).unwrap().len(); 2], "{out}");
    let resident = of("resident_bytes");
    assert!(resident[0] > 100_000 && (1..50_000).contains(&resident[1]), "{out}");
    assert_eq!(of("dirty_bytes"), [0, 0], "{out}");
    assert!(
        errors.contains("bifolio_stats=z.db: no such file") && errors.contains("x.db"),
        "{errors}"
    );
}

/// Pages that a close cannot write are gone when the lock is released: another program may change
/// the file from then on.
fn close_on_a_full_disk(kind: &str) {
    let Some(library) = Library::load() else { return };
    let Some(disk) = SmallDisk::mount(4 << 20) else { return };
    let path = disk.path().join("x.db");
    let ballast = disk.path().join("ballast");
    fs::write(&ballast, vec![1; 1 << 20]).unwrap();
    let connection = library.open_cached(&path, kind).unwrap();
    connection
        .run("pragma journal_mode=off; create table t(a, b); insert into t values(7, '')")
        .unwrap();
    // Without a journal, a commit that fails leaves its pages behind.
    let sql = "insert into t select 1, zeroblob(5000000)";
    let problem = connection.run(sql).unwrap_err();
    assert!(problem.contains("full"), "{problem}");
    drop(connection);
    fs::remove_file(&ballast).unwrap();
    // Another program makes the database anew, in the same file.
    let other = disk.path().join("y.db");
    let (_, errors) = through_the_system(&other, "create table t(a); insert into t values(8)");
    assert_eq!(errors, "");
    fs::copy(&other, &path).unwrap();
    // Longer than the age at which the cache writes what is dirty.
    thread::sleep(Duration::from_secs(7));
    assert!(
        fs::read(&path).unwrap() == fs::read(&other).unwrap(),
        "{kind}: written after the close"
    );
    let connection = library.open_cached(&path, kind).unwrap();
    assert_eq!(connection.run("select a from t; pragma integrity_check").unwrap(), ["8", "ok"]);
}

#[test]
fn what_a_close_cannot_write_is_not_written_later() {
    KINDS.into_iter().for_each(close_on_a_full_disk);
}
