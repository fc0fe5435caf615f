//! The `sqlite3` program with the extension: journal modes, locks, and kills during transactions.
//!
//! A machine without the program skips them and says so. `BIFOLIO_KILLS` sets the kills for each
//! journal mode.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const MODES: [&str; 4] = ["delete", "truncate", "persist", "wal"];

fn has_sqlite() -> bool {
    let found = Command::new("sqlite3").arg("--version").output().is_ok();
    if !found {
        println!("skipped: the program sqlite3 is not installed");
    }
    found
}

/// The extension beside this test.
fn extension() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join("libbifolio_sqlite.so")
}

/// A running program with a database in it, through the VFS.
fn start(path: &Path) -> Child {
    let mut command = Command::new("sqlite3");
    command.arg("-cmd").arg(format!(".load {}", extension().display()));
    let uri = format!("file:{}?vfs=bifolio&bifolio_memory=2MiB", path.display());
    command.arg("-cmd").arg(format!(".open '{uri}'"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// The output, and the errors, of statements that run through the VFS.
fn through_the_cache(path: &Path, sql: &str) -> (String, String) {
    let mut child = start(path);
    child.stdin.take().unwrap().write_all(sql.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

/// The output and the errors of statements that run through the system's VFS.
fn through_the_system(path: &Path, sql: &str) -> (String, String) {
    let output = Command::new("sqlite3").arg(path).arg(sql).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

#[test]
fn every_journal_mode_keeps_its_rows() {
    if !has_sqlite() {
        return;
    }
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let sql = format!(
            "pragma journal_mode={mode};
             create table t(id integer primary key, v blob);
             with recursive n(i) as (select 1 union all select i+1 from n where i<20000)
                 insert into t select i, randomblob(200) from n;
             update t set v=randomblob(300) where id%3=0;
             begin; delete from t; rollback;
             select count(*), sum(length(v)) from t;
             delete from t where id%2=0;
             vacuum;
             pragma integrity_check;\n.vfsname\n"
        );
        let (out, errors) = through_the_cache(&path, &sql);
        assert_eq!(out, format!("{mode}\n20000|4666600\nok\nbifolio\n"), "{errors}");
        let (out, errors) =
            through_the_system(&path, "pragma integrity_check; select count(*) from t");
        assert_eq!(out, "ok\n10000\n", "{mode}: {errors}");
        let (out, _) = through_the_cache(&path, "select count(*) from t; pragma bifolio_stats;\n");
        assert!(out.starts_with("10000\nbound_bytes 2097152\n"), "{out}");
    }
}

#[test]
fn other_connections_are_locked_out_until_the_close() {
    if !has_sqlite() {
        return;
    }
    for mode in ["delete", "wal"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let made =
            format!("pragma journal_mode={mode}; create table t(a); insert into t values(7)");
        through_the_system(&path, &made);
        let mut child = start(&path);
        let mut input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        writeln!(input, "select a from t;").unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "7\n");
        let (_, errors) = through_the_system(&path, "select a from t");
        assert!(errors.contains("locked"), "{mode}, the system's VFS: {errors}");
        let (_, errors) = through_the_cache(&path, "select a from t;\n");
        assert!(errors.contains("locked"), "{mode}, another process: {errors}");
        let same = format!(
            "attach 'file:{}?vfs=bifolio' as again;\nselect a from again.t;\nselect a from t;",
            path.display()
        );
        writeln!(input, "{same}").unwrap();
        line.clear();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "7\n", "the connection is as before");
        let (_, errors) = through_the_system(&path, "select a from t");
        assert!(errors.contains("locked"), "{mode}, after an attach was refused: {errors}");
        drop(input);
        child.wait().unwrap();
        let (out, errors) = through_the_system(&path, "insert into t values(8); select a from t");
        assert_eq!(out, "7\n8\n", "{errors}");
    }
}

#[test]
fn a_wrong_parameter_is_refused() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let uri = format!("file:{}/x.db?vfs=bifolio&bifolio_memory=8x", directory.path().display());
    let output = Command::new("sqlite3")
        .arg("-cmd")
        .arg(format!(".load {}", extension().display()))
        .arg("-cmd")
        .arg(format!(".open '{uri}'"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("unable to open database"), "{errors}");
}

/// Kills a writer at a random moment, again and again: no damage, and no commit is lost that was
/// reported.
#[test]
fn kills_lose_no_commit_and_damage_nothing() {
    if !has_sqlite() {
        return;
    }
    let kills = std::env::var("BIFOLIO_KILLS").map_or(5, |text| text.parse().unwrap());
    for mode in MODES {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let mut committed = 0_u64;
        for _ in 0..kills {
            let mut child = start(&path);
            let mut input = child.stdin.take().unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            let sql = format!(
                "pragma journal_mode={mode}; pragma synchronous=full; pragma cache_size=50;
                 create table if not exists t(id integer primary key, v blob);\n"
            );
            input.write_all(sql.as_bytes()).unwrap();
            let first = committed + 1;
            std::thread::spawn(move || {
                for id in first..first + 100_000 {
                    let written = writeln!(
                        input,
                        "begin; update t set v=randomblob(500) where id%7={};
                         insert or replace into t values({id}, randomblob(3000)); commit;
                         select 'committed', {id};",
                        id % 7
                    );
                    if written.is_err() {
                        return;
                    }
                }
            });
            let rounds = fastrand::u64(1..30);
            let mut lines = output.lines().map_while(Result::ok);
            let mut seen = 0;
            while seen < rounds {
                let Some(line) = lines.next() else { break };
                if let Some(id) = line.strip_prefix("committed|") {
                    committed = id.parse().unwrap();
                    seen += 1;
                }
            }
            std::thread::sleep(std::time::Duration::from_micros(fastrand::u64(0..5000)));
            child.kill().unwrap();
            for line in lines {
                if let Some(id) = line.strip_prefix("committed|") {
                    committed = id.parse().unwrap();
                }
            }
            child.wait().unwrap();
            let check = "pragma integrity_check; select count(*), max(id) from t";
            let (out, errors) = through_the_system(&path, check);
            let (result, rest) = out.split_once('\n').unwrap_or((&out, ""));
            assert_eq!(result, "ok", "{mode}: {errors}");
            let (count, max) = rest.trim().split_once('|').unwrap();
            let (count, max): (u64, u64) = (count.parse().unwrap(), max.parse().unwrap());
            assert!(count == max && max >= committed, "{mode}: {count} {max} {committed}");
            committed = max;
        }
    }
}
