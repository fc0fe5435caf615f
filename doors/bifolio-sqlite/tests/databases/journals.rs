//! Every journal mode: what is written is read again, through the cache and without it.

use std::process::Command;

use crate::shell::{
    extension, has_sqlite, modes_and_kinds, run, through_the_cache, through_the_system, with_cache,
};

#[test]
fn every_journal_mode_keeps_its_rows() {
    if !has_sqlite() {
        return;
    }
    for (mode, kind) in modes_and_kinds() {
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
        let (out, errors) = through_the_cache(&path, kind, &sql);
        assert_eq!(out, format!("{mode}\n20000|4666600\nok\nbifolio\n"), "{errors}");
        let (out, errors) =
            through_the_system(&path, "pragma integrity_check; select count(*) from t");
        assert_eq!(out, "ok\n10000\n", "{mode}, {kind}: {errors}");
        let (out, _) =
            through_the_cache(&path, kind, "select count(*) from t; pragma bifolio_stats;\n");
        assert!(
            out.starts_with("10000\n") && out.contains("\nmemory_bound_bytes 2097152\n"),
            "{out}"
        );
    }
}

/// Random updates, deletions, an index and VACUUM over a database of 8 x the memory, with every
/// row checked: `c` is a function of `id` and `v`.
#[test]
fn a_database_of_8_times_the_memory_stays_whole() {
    if !has_sqlite() {
        return;
    }
    for (mode, kind) in modes_and_kinds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let check = "select count(*) from t where c<>id*7+length(v);";
        let sql = format!(
            "pragma journal_mode={mode}; pragma cache_size=50;
             create table t(id integer primary key, v blob, c int);
             with recursive n(i) as (select 1 union all select i+1 from n where i<9000)
                 insert into t select i, randomblob(900), i*7+900 from n;
             create index by_c on t(c);
             {check}
             update t set v=randomblob(abs(random())%1500) where id%3=0;
             update t set c=id*7+length(v);
             delete from t where id%10=9; {check}
             vacuum; {check}
             begin; update t set c=0; {check} rollback; {check}
             pragma integrity_check;"
        );
        let (out, errors) = run(with_cache(&path, &format!("bifolio_memory=1MiB&{kind}")), &sql);
        assert_eq!(out, format!("{mode}\n0\n0\n0\n8100\n0\nok\n"), "{errors}");
        assert_eq!(errors, "", "{mode}, {kind}");
        assert!(std::fs::metadata(&path).unwrap().len() > 7 << 20);
        let (out, errors) = through_the_system(&path, &format!("pragma integrity_check; {check}"));
        assert_eq!(out, "ok\n0\n", "{mode}, {kind}: {errors}");
    }
}

/// Clients show the message of a failed open: the shell, and every binding.
#[test]
fn a_wrong_parameter_is_refused_with_its_name() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    for (parameters, part) in [
        ("bifolio_memory=8x", "bifolio_memory=8x: a size is a number of bytes"),
        ("bifolio_memry=8MiB", "bifolio_memry: no such parameter"),
        ("immutable=1&bifolio_exclusive=1", "immutable=1: an exclusive database has a lock"),
        ("mode=rwc&nolock=1&bifolio_exclusive=1", "nolock=1: an exclusive database has a lock"),
    ] {
        let (out, errors) = run(with_cache(&path, parameters), "select 7;\n.vfsname\n");
        assert!(errors.contains(part), "{parameters}: {errors}");
        assert!(!out.contains("bifolio"), "{out}");
        assert!(!path.exists(), "{parameters}");
        let attach = format!("attach 'file:{}?vfs=bifolio&{parameters}' as a;", path.display());
        let (_, errors) = run(with_cache(&directory.path().join("y.db"), ""), &attach);
        assert_ne!(errors, "", "{parameters}");
    }
    let (out, errors) = run(with_cache(&path, "immutable=0&nolock=off"), "select 7;\n.vfsname\n");
    assert_eq!(out, "7\nbifolio\n", "{errors}");
}

/// An entry point and a variable of the environment make the VFS that of databases without a URI.
#[test]
fn a_database_without_a_uri_uses_the_default() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    for (entry, variable, expected) in [
        ("", "", "unix"),
        ("", "0", "unix"),
        ("", "1", "bifolio"),
        ("sqlite3_bifoliodefault_init", "", "bifolio"),
    ] {
        let mut command = Command::new("sqlite3");
        command.env("BIFOLIO_DEFAULT", variable);
        command.arg("-cmd").arg(format!(".load {} {entry}", extension().display()));
        command.arg("-cmd").arg(format!(".open '{}'", path.display()));
        let sql = "create table if not exists t(a); insert into t values(7);
                   select max(a) from t;\n.vfsname\n";
        let (out, errors) = run(command, sql);
        assert_eq!(out, format!("7\n{expected}\n"), "{entry}, {variable}: {errors}");
    }
}

/// The shell opens the database of its command line before it loads what `-cmd` says, so the lines
/// load and then open.
#[test]
fn the_lines_of_the_readme_work() {
    if !has_sqlite() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let readme = include_str!("../../../../README.md");
    let extension = extension();
    let mut count = 0;
    for line in readme.lines().filter(|line| line.starts_with("sqlite3 ")) {
        let line = line.split(" #").next().unwrap();
        let line = line.replace("/tmp/bifolio/lib/libbifolio_sqlite", extension.to_str().unwrap());
        let mut command = Command::new("sh");
        command.arg("-c").arg(&line).current_dir(directory.path());
        let (out, errors) = run(command, "select 7;\n.vfsname\n");
        assert_eq!(out, "7\nbifolio\n", "{line}: {errors}");
        count += 1;
    }
    assert!(count > 0, "README has no line with sqlite3");
}
