//! Storage that is full, that can only be read, or that another process cuts; and the memory that
//! a database takes.
//!
//! # Safety
//! Calls the kernel with the structs that its documentation gives.
#![allow(unsafe_code)]

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use bifolio_testing::{SmallDisk, skip};
use tempfile::TempDir;

use crate::library::Library;
use crate::shell::{
    KINDS, Shell, extension, has_sqlite, modes_and_kinds, run, through_the_cache,
    through_the_system, with_cache, with_system,
};

const INSERT: &str = "with recursive n(i) as (select 1 union all select i+1 from n where i<:rows)
     insert into t(v) select randomblob(1000) from n;";

fn insert(rows: u64) -> String {
    INSERT.replace(":rows", &rows.to_string())
}

/// Makes a database through the system's VFS.
fn make(path: &Path, mode: &str, rows: u64) {
    let sql = format!(
        "pragma journal_mode={mode}; create table t(id integer primary key, v blob); {}",
        insert(rows)
    );
    let (_, errors) = through_the_system(path, &sql);
    assert_eq!(errors, "");
}

#[test]
fn a_full_disk_fails_a_commit_and_loses_none() {
    if !has_sqlite() {
        return;
    }
    for (mode, kind) in modes_and_kinds() {
        let Some(disk) = SmallDisk::mount(4 << 20) else { return };
        let path = disk.path().join("x.db");
        let ballast = disk.path().join("ballast");
        fs::write(&ballast, vec![1; 512 << 10]).unwrap();
        let sql = format!(
            "pragma journal_mode={mode}; pragma cache_size=20;
             create table t(id integer primary key, v blob);
             {}
             begin; {}; commit;
             rollback;
             select count(*) from t;
             pragma integrity_check;
             delete from t where id<=50;
             insert into t values(1, 'again');
             select count(*) from t;
             ",
            insert(100),
            insert(20_000),
        );
        let (out, errors) = through_the_cache(&path, kind, &sql);
        assert!(errors.contains("database or disk is full"), "{mode}, {kind}: {errors}");
        assert_eq!(out, format!("{mode}\n100\nok\n51\n"), "{kind}: {errors}");
        // The system's VFS needs room for the index of the log.
        fs::remove_file(&ballast).unwrap();
        let (out, errors) =
            through_the_system(&path, "pragma integrity_check; select count(*) from t;");
        assert_eq!(out, "ok\n51\n", "{mode}, {kind}: {errors}");
    }
}

/// The log is reused only when the database has what it had: without syncs, SQLite hears of a full
/// disk from the cut at the end of a checkpoint.
#[test]
fn a_full_disk_loses_no_commit_of_a_log_without_syncs() {
    if !has_sqlite() {
        return;
    }
    for (is_killed, kind) in
        [false, true].into_iter().flat_map(|is_killed| KINDS.map(|kind| (is_killed, kind)))
    {
        let Some(disk) = SmallDisk::mount(4 << 20) else { return };
        let path = disk.path().join("x.db");
        let ballast = disk.path().join("ballast");
        fs::write(&ballast, vec![1; 512 << 10]).unwrap();
        let mut shell = Shell::start(with_cache(&path, &format!("bifolio_memory=16MiB&{kind}")));
        let sql = "pragma journal_mode=wal; pragma synchronous=off; pragma wal_autocheckpoint=50;
                   create table t(id integer primary key, v blob); select 'made';";
        shell.ask(sql);
        let mut input = shell.input;
        let feeder = std::thread::spawn(move || {
            for id in 1..600 {
                let insert = format!("insert into t values({id}, randomblob(10000));");
                writeln!(input, "{insert}\nselect 'found', count(*) from t;").unwrap();
            }
            writeln!(input, "select 'end';").unwrap();
            input
        });
        let mut found = 0_u64;
        for line in shell.lines.by_ref().map(Result::unwrap).take_while(|line| line != "end") {
            if let Some(count) = line.strip_prefix("found|") {
                found = count.parse().unwrap();
            }
        }
        let input = feeder.join().unwrap();
        if is_killed {
            shell.child.kill().unwrap();
        }
        drop(input);
        let output = shell.child.wait_with_output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains("database or disk is full"), "{found} rows: {errors}");
        fs::remove_file(&ballast).unwrap();
        let sql = "pragma integrity_check; select count(*) from t;";
        let (out, errors) = through_the_system(&path, sql);
        assert_eq!(out, format!("ok\n{found}\n"), "killed: {is_killed}, {kind}: {errors}");
    }
}

/// A directory that another user can come into, with a copy of the extension.
fn public_directory() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let copy = directory.path().join("libbifolio_sqlite.so");
    fs::copy(extension(), &copy).unwrap();
    (directory, copy)
}

/// Runs statements through the VFS without the rights of root, which no permissions bind.
fn as_a_plain_user(extension: &Path, path: &Path, sql: &str) -> (String, String) {
    let mut command = Command::new("sqlite3");
    command.arg("-cmd").arg(format!(".load {}", extension.display()));
    command.arg("-cmd").arg(format!(".open 'file:{}?vfs=bifolio'", path.display()));
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        command.uid(65534).gid(65534);
    }
    command.current_dir("/");
    run(command, sql)
}

#[test]
fn a_file_that_can_only_be_read_is_read() {
    if !has_sqlite() {
        return;
    }
    let (directory, extension) = public_directory();
    let path = directory.path().join("x.db");
    make(&path, "delete", 300);
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    let sql = "select sum(length(v)) from t;\ninsert into t values(null, 1);\nselect 7;";
    let (out, errors) = as_a_plain_user(&extension, &path, sql);
    assert_eq!(out, "300000\n7\n", "{errors}");
    assert!(errors.contains("attempt to write a readonly database"), "{errors}");
    // Others may read meanwhile.
    let mut reader = Shell::start(with_cache(&path, "mode=ro"));
    assert_eq!(reader.ask("select count(*) from t;"), "300");
    let (out, errors) = through_the_system(&path, "select count(*) from t");
    assert_eq!(out, "300\n", "{errors}");
    assert_eq!(reader.end(), "");
}

#[test]
fn a_log_of_an_exclusive_database_needs_a_file_that_can_be_written() {
    if !has_sqlite() {
        return;
    }
    let (directory, extension) = public_directory();
    let path = directory.path().join("x.db");
    make(&path, "wal", 300);
    fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    // Told by the open, also to those who may not write to the directory; and by an `attach`.
    let open =
        format!(".open 'file:{}?vfs=bifolio&bifolio_exclusive=1'\n.vfsname\n", path.display());
    let (out, errors) = as_a_plain_user(&extension, &directory.path().join("z.db"), &open);
    assert!(errors.contains("is in WAL mode and its file cannot be written"), "{errors}");
    assert!(errors.contains("PRAGMA journal_mode=DELETE"), "{errors}");
    assert!(!out.contains("bifolio"), "{out}");
    let attach = format!("attach 'file:{}?vfs=bifolio&bifolio_exclusive=1' as a;", path.display());
    let other = directory.path().join("y.db");
    make(&other, "delete", 3);
    let (_, errors) = as_a_plain_user(&extension, &other, &attach);
    assert!(errors.contains("unable to open database"), "{errors}");
}

#[test]
fn a_directory_that_can_only_be_read_has_no_journal() {
    if !has_sqlite() {
        return;
    }
    let (directory, extension) = public_directory();
    let path = directory.path().join("x.db");
    make(&path, "delete", 300);
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o555)).unwrap();
    let sql = "select count(*) from t;\ndelete from t;\nselect count(*) from t;
               pragma journal_mode=memory; insert into t values(null, 1);
               select count(*) from t;";
    let (out, errors) = as_a_plain_user(&extension, &path, sql);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    assert_eq!(out, "300\n300\nmemory\n301\n", "{errors}");
    assert!(errors.contains("attempt to write a readonly database"), "{errors}");
}

#[test]
fn a_file_that_another_process_cuts_is_an_error() {
    if !has_sqlite() {
        return;
    }
    for (mode, kind) in modes_and_kinds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        make(&path, mode, 8000);
        let mut shell = Shell::start(with_cache(&path, &format!("bifolio_memory=1MiB&{kind}")));
        assert_eq!(shell.ask("select length(v) from t where id=1;"), "1000");
        File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
        let sql = "select 'sum', sum(length(v)) from t;\nselect 'alive';";
        assert_eq!(shell.ask(sql), "alive");
        let errors = shell.end();
        let is_told = errors.contains("disk I/O error") || errors.contains("malformed");
        assert!(is_told, "{mode}, {kind}: {errors}");
    }
}

/// The largest resident size of a process so far, bytes.
fn resident_bytes_max(child: &Child) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The bound counts what the cache has; what SQLite has is the same with both.
#[test]
fn resident_memory_stays_within_the_bound() {
    if !has_sqlite() {
        return;
    }
    const BOUND_BYTES: u64 = 4 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    make(&path, "wal", 32_000);
    let resident_with = |command: Command| {
        let mut shell = Shell::start(command);
        let sql = "select sum(length(v)) from t where id%2=0;
                   update t set v=randomblob(1000) where id%20=0; pragma wal_checkpoint;
                   select sum(length(v)) from t;";
        assert_eq!(shell.ask(sql), "16000000");
        assert_eq!(shell.lines.next().unwrap().unwrap().split('|').next(), Some("0"));
        assert_eq!(shell.lines.next().unwrap().unwrap(), "32000000");
        let bytes = resident_bytes_max(&shell.child);
        assert_eq!(shell.end(), "");
        bytes
    };
    let system_bytes = resident_with(with_system(&path));
    let allowed_bytes = system_bytes + BOUND_BYTES * 102 / 100 + (8 << 20);
    for kind in KINDS {
        let parameters = format!("bifolio_memory={BOUND_BYTES}&{kind}");
        let bytes = resident_with(with_cache(&path, &parameters));
        println!(
            "{kind}: resident {bytes} of {allowed_bytes} bytes, without a cache {system_bytes}"
        );
        assert!(bytes <= allowed_bytes, "{kind}: {bytes} > {allowed_bytes}, {system_bytes}");
    }
}

/// Returns the bytes of a file's first page if the kernel has them in memory.
fn kernel_page(path: &Path) -> Option<Vec<u8>> {
    let file = fs::File::open(path).unwrap();
    let mut page = vec![0_u8; 4096];
    let vector = libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: page.len() };
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
    // SAFETY: an open file, and a buffer.
    let count = unsafe { libc::preadv2(descriptor, &raw const vector, 1, 0, libc::RWF_NOWAIT) };
    (count == 4096).then_some(page)
}

/// Without syncs, a commit is in the kernel when it returns, and the device has not been waited
/// for: a write that bypasses the kernel's memory leaves nothing in it.
fn commit_without_syncs(mode: &str, kind: &str) {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let parameters = format!("bifolio_memory=1MiB&{kind}");
    let connection = library.open_cached(&path, &parameters).unwrap();
    let sql = format!("pragma journal_mode={mode}; create table t(a)");
    connection.run(&sql).unwrap();
    connection.run("insert into t values(1); pragma wal_checkpoint(truncate)").unwrap();
    // Writes of shared databases go through the kernel's memory in any case.
    if kind == KINDS[1] && kernel_page(&path).is_some() {
        return skip("direct-io", "the file system has no direct I/O");
    }
    connection.run("pragma synchronous=off").unwrap();
    for number in 2..5 {
        let sql = format!("insert into t values({number}); pragma user_version={number};");
        connection.run(&sql).unwrap();
        connection.run("pragma wal_checkpoint(truncate)").unwrap();
        let page = kernel_page(&path).expect("written through the kernel's memory");
        assert_eq!(page[60..64], u32::to_be_bytes(number), "{mode}, {kind}");
    }
    connection.run("pragma synchronous=full; insert into t values(5)").unwrap();
    drop(connection);
    let (out, errors) = through_the_system(&path, "select sum(a) from t");
    assert_eq!(out, "15\n", "{mode}, {kind}: {errors}");
}

#[test]
fn a_commit_without_syncs_does_not_wait_for_the_device() {
    for mode in ["delete", "wal"] {
        KINDS.into_iter().for_each(|kind| commit_without_syncs(mode, kind));
    }
}
