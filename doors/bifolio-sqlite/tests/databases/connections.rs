//! Several connections of one process to one database, with a journal and with a log.

use std::path::Path;

use crate::library::{Connection, Library};
use crate::shell::{has_sqlite, through_the_system};

pub(crate) fn make(path: &Path, mode: &str) {
    let sql = format!(
        "pragma journal_mode={mode}; create table t(a, b); create index by_a on t(a);
         insert into t values(7, zeroblob(2000));"
    );
    let (_, errors) = through_the_system(path, &sql);
    assert_eq!(errors, "");
}

/// Writes through the system's VFS, in another process, which has to be kept out.
#[track_caller]
pub(crate) fn check_locked_out(path: &Path, when: &str) {
    let (_, errors) = through_the_system(path, "update t set a=a+1;");
    assert!(errors.contains("locked"), "{when}: {errors}");
}

/// The kernel drops the locks of a process when any of its descriptors of the file is closed.
#[test]
fn closing_one_connection_keeps_the_lock_of_the_others() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (mode, access) in [("delete", "mode=ro"), ("delete", "mode=rw"), ("wal", "mode=rw")] {
        let path = directory.path().join(format!("{mode}-{access}.db"));
        make(&path, mode);
        let access = format!("{access}&bifolio_exclusive=1");
        let first = library.open_cached(&path, &access).unwrap();
        assert_eq!(first.ask("select a from t"), "7");
        let second = library.open_cached(&path, &access).unwrap();
        assert_eq!(second.ask("select a from t"), "7");
        // A connection that only reads locks others out during its transactions.
        first.run("begin; select a from t").unwrap();
        check_locked_out(&path, "two are open");
        drop(second);
        check_locked_out(&path, "one was closed");
        let uri = format!("file:{}?vfs=bifolio&{access}", path.display());
        let third = library.open(":memory:").unwrap();
        third.run(&format!("attach '{uri}' as again; select a from again.t")).unwrap();
        third.run("detach again").unwrap();
        check_locked_out(&path, "another was detached");
        // Refused opens have descriptors, too.
        library.open_cached(&path, &format!("{access}&bifolio_memory=1GiB")).err().unwrap();
        library.open_cached(&path, &format!("{access}&bifolio_direct=never")).err().unwrap();
        check_locked_out(&path, "another was refused");
        assert_eq!(first.ask("select a from t"), "7");
        drop(first);
        let (out, errors) = through_the_system(&path, "update t set a=a+1; select a from t");
        assert_eq!(out, "8\n", "{mode}: {errors}");
    }
}

/// A database with a log that is opened for reading is locked against writers of other processes.
#[test]
fn a_reader_of_a_log_reads_what_is_committed() {
    let Some(library) = Library::load() else { return };
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "wal");
    for log_exists in [false, true] {
        // A shell that is killed leaves its log.
        if log_exists {
            let mut shell = crate::shell::Shell::start(crate::shell::with_system(&path));
            assert_eq!(shell.ask("update t set a=8; select a from t;"), "8");
            shell.child.kill().unwrap();
            shell.child.wait().unwrap();
        }
        let expected = if log_exists { "8" } else { "7" };
        let reader = library.open_cached(&path, "mode=ro&bifolio_exclusive=1").unwrap();
        let sql = "select a from t; pragma integrity_check";
        assert_eq!(reader.run(sql), Ok(vec![expected.to_owned(), "ok".to_owned()]));
        check_locked_out(&path, "a reader is open");
        assert_eq!(reader.run(sql), Ok(vec![expected.to_owned(), "ok".to_owned()]));
        let refusal = reader.run("update t set a=9").unwrap_err();
        assert!(refusal.contains("readonly"), "{refusal}");
        // A writer of this process is let in, before and after.
        let writer = library.open_cached(&path, "bifolio_exclusive=1").unwrap();
        writer.run("update t set a=a+10").unwrap();
        assert_ne!(reader.ask("select a from t"), expected);
        writer.run("update t set a=a-10; pragma wal_checkpoint(truncate)").unwrap();
        assert_eq!(reader.ask("select a from t"), expected);
        drop(reader);
        drop(writer);
    }
}

#[test]
fn readers_and_a_writer_of_one_process_share_a_database() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    for mode in ["delete", "truncate", "persist", "memory", "wal"] {
        let path = directory.path().join(format!("{mode}.db"));
        let open = |parameters: &str| library.open_cached(&path, parameters).unwrap();
        let (writer, reader) = (open("bifolio_memory=1MiB"), open(""));
        let sql = format!("pragma journal_mode={mode}; create table t(a); insert into t values(1)");
        writer.run(&sql).unwrap();
        reader.run(&format!("pragma journal_mode={mode}; pragma busy_timeout=0")).unwrap();
        assert_eq!(reader.ask("select a from t"), "1");
        writer.run("begin immediate; update t set a=2").unwrap();
        assert_eq!(reader.ask("select a from t"), "1", "{mode}");
        let refusal = reader.run("begin immediate").unwrap_err();
        assert!(refusal.contains("locked"), "{mode}: {refusal}");
        writer.run("commit").unwrap();
        assert_eq!(reader.ask("select a from t"), "2", "{mode}");
        reader.run("begin; select a from t").unwrap();
        writer.run("pragma busy_timeout=0").unwrap();
        let written = writer.run("update t set a=3");
        assert_eq!(written.is_ok(), mode == "wal", "{mode}: {written:?}");
        assert_eq!(reader.ask("select a from t"), "2", "{mode}: a snapshot");
        if mode == "wal" {
            let answer = writer.ask("pragma wal_checkpoint(truncate)");
            assert!(answer.starts_with("1|"), "beside a snapshot: {answer}");
        }
        reader.run("commit").unwrap();
        writer.run("update t set a=3").unwrap();
        assert_eq!(reader.ask("select a from t"), "3", "{mode}");
        if mode == "wal" {
            assert_eq!(writer.ask("pragma wal_checkpoint(truncate)"), "0|0|0");
            assert_eq!(reader.ask("select a from t"), "3");
        }
        check_special_cases(&path, &writer, &reader, library);
        drop((writer, reader));
        let (out, errors) = through_the_system(&path, "pragma integrity_check; select a from t");
        assert_eq!(out, "ok\n3\n", "{mode}: {errors}");
    }
}

/// Copies, exclusive mode, shared page caches and VACUUM beside another connection.
fn check_special_cases(path: &Path, writer: &Connection, reader: &Connection, library: Library) {
    reader.run("pragma busy_timeout=20000").unwrap();
    let copy = path.with_extension("copy");
    reader.run(&format!("vacuum into '{}'", copy.display())).unwrap();
    writer.run("vacuum; pragma incremental_vacuum").unwrap();
    assert_eq!(reader.ask("select a from t"), "3");
    let shared = [(); 2].map(|()| library.open_cached(path, "cache=shared").unwrap());
    assert_eq!(shared[0].ask("select a from t"), "3");
    shared[1].run("update t set a=4").unwrap();
    assert_eq!(reader.ask("select a from t"), "4");
    shared[0].run("update t set a=3").unwrap();
    drop(shared);
    let alone = library.open_cached(path, "").unwrap();
    reader.run("pragma busy_timeout=0").unwrap();
    if alone.run("pragma locking_mode=exclusive; update t set a=5").is_ok() {
        let refusal = reader.run("select a from t").unwrap_err();
        assert!(refusal.contains("locked"), "{refusal}");
        alone.run("update t set a=3").unwrap();
    }
    drop(alone);
    assert_eq!(reader.ask("select a from t"), "3");
}
