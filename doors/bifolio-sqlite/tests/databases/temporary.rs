//! Temporary files of sorters and statements, which are in the cache of the process.

use std::fs;
use std::path::Path;

use bifolio_testing::SmallDisk;

use crate::shell::{has_sqlite, run, through_the_system, with_cache};

/// Rows whose index does not fit in the memory of a sorter.
const ROWS: &str = "pragma cache_size=20; pragma synchronous=off; create table t(a, b);
    with recursive i(id) as (select 1 union all select id+1 from i where id<20000)
        insert into t select id, hex(randomblob(250)) from i;";

/// Returns the bytes that were written through the cache of the process.
fn written(answer: &str) -> u64 {
    counted(answer, "writes_bytes ")
}

/// Returns a count of the cache of the process.
fn counted(answer: &str, name: &str) -> u64 {
    let line = answer.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |number| number.parse().unwrap())
}

/// Runs `sql` with a cache of the process of 4 MiB, and temporary files in `directory`.
fn run_sorting(path: &Path, directory: &Path, sql: &str) -> (String, String) {
    let mut command = with_cache(path, "");
    command.env("BIFOLIO_MEMORY", "4MiB").env("SQLITE_TMPDIR", directory);
    run(command, sql)
}

#[test]
fn a_sorter_spills_into_the_cache() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    // The database is shared, so its own writes do not go through the cache.
    let sql = format!(
        "{ROWS} create index tb on t(b); pragma bifolio_stats; pragma integrity_check;
         select count(*) from (select distinct b from t);"
    );
    let (out, errors) = run_sorting(&path, directory.path(), &sql);
    assert_eq!(errors, "");
    assert!(out.ends_with("ok\n20000\n"), "{out}");
    assert!(written(&out) > 10_000_000, "{out}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing has a name");
}

#[test]
fn the_runs_of_a_sorter_are_read_ahead() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    // 30 runs of 1 MiB, of which memory holds a few.
    let rows = ROWS.replace("20000", "60000");
    assert_eq!(through_the_system(&path, &rows).1, "");
    let mut command = with_cache(&path, "");
    command.env("BIFOLIO_MEMORY", "8MiB").env("SQLITE_TMPDIR", directory.path());
    let sql = "pragma cache_size=20; pragma synchronous=off; create index tb on t(b);
               pragma bifolio_stats;";
    let (out, errors) = run(command, sql);
    assert_eq!(errors, "");
    assert!(written(&out) > 30_000_000, "{out}");
    let (bytes, requests) =
        (counted(&out, "storage_read_bytes "), counted(&out, "storage_read_requests "));
    // Without it, 15 KiB.
    assert!(bytes > 50_000_000 && bytes / requests > 40 << 10, "{bytes} in {requests}: {out}");
}

#[test]
fn a_sorter_that_finds_its_disk_full_fails_alone() {
    if !has_sqlite() {
        return;
    }
    let Some(disk) = SmallDisk::mount(2 << 20) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    // As many bytes as a disk of this size has no room for, and the cache has none either.
    let sql = format!("{ROWS}\ncreate index tb on t(b);\nselect count(*) from t; drop table t;");
    let (out, errors) = run_sorting(&path, disk.path(), &sql);
    assert!(errors.contains("full"), "{errors}");
    assert!(out.ends_with("20000\n"), "{out}");
    let (out, errors) = run_sorting(&path, directory.path(), "pragma integrity_check;");
    assert_eq!((out.as_str(), errors.as_str()), ("ok\n", ""));
}

#[test]
fn a_database_with_a_cache_of_its_own_leaves_temporary_files_to_the_system() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let mut command = with_cache(&path, "&bifolio_memory=4MiB");
    command.env("SQLITE_TMPDIR", directory.path());
    let sql = format!("{ROWS} create index tb on t(b); pragma bifolio_stats;");
    let (out, errors) = run(command, &sql);
    assert_eq!(errors, "");
    assert_eq!(written(&out), 0, "{out}");
}
