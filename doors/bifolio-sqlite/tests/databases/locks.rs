//! Other processes are locked out of an exclusive database; other connections of this process are
//! let in.

use std::process::{Child, Command, Stdio};

use crate::connections::{check_locked_out, make};
use crate::library::Library;
use crate::shell::{
    Shell, has_sqlite, through_the_cache, through_the_system, with_cache, with_system,
};

const EXCLUSIVE: &str = "bifolio_exclusive=1";

#[test]
fn other_processes_are_locked_out_until_the_last_close() {
    if !has_sqlite() {
        return;
    }
    for mode in ["delete", "wal"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let made =
            format!("pragma journal_mode={mode}; create table t(a); insert into t values(7)");
        through_the_system(&path, &made);
        let mut shell = Shell::start(with_cache(&path, EXCLUSIVE));
        assert_eq!(shell.ask("select a from t;"), "7");
        let (_, errors) = through_the_system(&path, "select a from t");
        assert!(errors.contains("locked"), "{mode}, the system's VFS: {errors}");
        let (_, errors) = through_the_cache(&path, "", "select a from t;\n");
        assert!(errors.contains("locked"), "{mode}, another process: {errors}");
        let again = format!(
            "attach 'file:{}?vfs=bifolio' as again;\nselect a from again.t;\ndetach again;",
            path.display()
        );
        assert_eq!(shell.ask(&again), "7", "{mode}, this process");
        let (_, errors) = through_the_system(&path, "select a from t");
        assert!(errors.contains("locked"), "{mode}, after a detach: {errors}");
        assert_eq!(shell.end(), "");
        let (out, errors) = through_the_system(&path, "insert into t values(8); select a from t");
        assert_eq!(out, "7\n8\n", "{errors}");
    }
}

/// A program that reads a database again and again, and is killed in the end.
struct Reader(Child);

impl Reader {
    fn start(path: &std::path::Path) -> Self {
        // Each transaction takes some milliseconds.
        let sql = "select count(*) from t, (with recursive i(n) as (select 1 union all select n+1
                   from i where n<20000) select n from i);";
        let mut command = Command::new("sh");
        let repeat = "yes \"$0\" | exec sqlite3 -cmd '.timeout 60000' \"$1\"";
        command.args(["-c", repeat, &sql.replace('\n', " ")]).arg(path).stdout(Stdio::piped());
        Self(std::os::unix::process::CommandExt::process_group(&mut command, 0).spawn().unwrap())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let group = format!("-{}", self.0.id());
        assert!(Command::new("kill").args(["-9", "--", &group]).status().unwrap().success());
        self.0.wait().unwrap();
    }
}

/// There is hardly a moment without a reader: a writer gets in all the same, once it keeps new ones
/// out.
#[test]
fn a_writer_gets_in_beside_steady_readers_of_other_processes() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "delete");
    let mut readers = [(); 3].map(|()| Reader::start(&path));
    // Each has begun.
    for reader in &mut readers {
        use std::io::Read;
        reader.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let mut rest = reader.0.stdout.take().unwrap();
        std::thread::spawn(move || std::io::copy(&mut rest, &mut std::io::sink()));
    }
    for round in 1..=5 {
        let writer = library.open_cached(&path, EXCLUSIVE).unwrap();
        writer.run("pragma busy_timeout=4000").unwrap();
        let written = writer.run("update t set a=a+1; select a from t");
        assert_eq!(written, Ok(vec![(7 + round).to_string()]));
        drop(writer);
    }
    drop(readers);
    assert_eq!(through_the_system(&path, "select a from t").0, "12\n");
}

/// A connection that only reads, and has no transaction, keeps no other process from writing.
#[test]
fn an_idle_reader_lets_others_write() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "delete");
    let parameters = "mode=ro&bifolio_memory=1MiB&bifolio_exclusive=1";
    let reader = library.open_cached(&path, parameters).unwrap();
    for round in 7..12 {
        assert_eq!(reader.ask("select a from t"), round.to_string());
        reader.run("begin; select a from t").unwrap();
        check_locked_out(&path, "a transaction of the reader");
        reader.run("commit").unwrap();
        let (out, errors) = through_the_system(&path, "update t set a=a+1; select a from t");
        assert_eq!(out, format!("{}\n", round + 1), "{errors}");
    }
    // Of a writer, nothing stays but what it wrote.
    let writer = library.open_cached(&path, EXCLUSIVE).unwrap();
    writer.run("update t set a=20, b=zeroblob(20000)").unwrap();
    assert_eq!(reader.ask("select a from t"), "20");
    check_locked_out(&path, "a writer is open");
    drop(writer);
    let (out, errors) =
        through_the_system(&path, "update t set a=a+1, b=zeroblob(90000); vacuum; select a from t");
    assert_eq!(out, "21\n", "{errors}");
    let found = reader.run("select a, length(b) from t; pragma integrity_check");
    assert_eq!(found, Ok(vec!["21|90000".to_owned(), "ok".to_owned()]));
    // The log is that of another process now.
    assert_eq!(through_the_system(&path, "pragma journal_mode=wal; update t set a=22").1, "");
    assert_eq!(reader.ask("select a from t"), "22");
}

/// Pages stay in the cache while no connection has a lock, as long as the file does not change.
#[test]
fn an_idle_reader_keeps_its_pages() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "delete");
    // Changes of a file that is younger might not show.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let reader =
        library.open_cached(&path, "mode=ro&bifolio_memory=1MiB&bifolio_exclusive=1").unwrap();
    let ask = || {
        // SQLite forgets its pages.
        assert_eq!(reader.ask("pragma shrink_memory; select a from t"), "7");
        let stats = reader.ask("pragma bifolio_stats");
        stats.lines().find(|line| line.starts_with("storage_read_requests ")).unwrap().to_owned()
    };
    let first = ask();
    for _ in 0..5 {
        assert_eq!(ask(), first);
    }
}

/// A writer was killed in a transaction: a reader cannot roll it back, and lets another writer do
/// so.
#[test]
fn a_reader_that_failed_lets_a_writer_roll_back() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "delete");
    let mut shell = Shell::start(with_system(&path));
    let sql = "pragma cache_size=5; begin; update t set a=99, b=zeroblob(500000); select a from t;";
    assert_eq!(shell.ask(sql), "99");
    shell.child.kill().unwrap();
    shell.child.wait().unwrap();
    assert!(path.with_extension("db-journal").metadata().unwrap().len() > 0);
    let reader = library.open_cached(&path, "mode=ro&bifolio_exclusive=1").unwrap();
    reader.run("select a from t").unwrap_err();
    let (out, errors) = through_the_system(&path, "pragma integrity_check; select a from t");
    assert_eq!(out, "ok\n7\n", "{errors}");
    assert_eq!(reader.run("select a, length(b) from t"), Ok(vec!["7|2000".to_owned()]));
}
