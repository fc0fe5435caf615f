//! Cuts the power of the device below a database, again and again, at random writes and flushes of
//! the file system: no damage, and no commit is lost that was reported. `BIFOLIO_CUTS` sets the
//! cuts for each journal mode and file system.

use std::io::Write;

use bifolio_testing::{FileSystem, PowerDisk, skip};

use crate::shell::{KINDS, Shell, has_sqlite, through_the_system, with_cache};

/// Settings with which SQLite promises that a commit survives a loss of power. (With `full`, the
/// removal of a journal may be undone, and the last commit with it: with the system's VFS, too.)
const SETTINGS: [(&str, &str); 4] =
    [("delete", "extra"), ("truncate", "full"), ("persist", "full"), ("wal", "full")];

fn cut_in(kind: FileSystem, mode: &str, synchronous: &str) {
    let cuts = std::env::var("BIFOLIO_CUTS").map_or(25, |text| text.parse().unwrap());
    let disk = match PowerDisk::new(kind, fastrand::u64(..)) {
        Ok(disk) => disk,
        Err(problem) => return skip("power-disk", format!("{problem}")),
    };
    let path = disk.path().join("x.db");
    let mut committed = 0_u64;
    for cut in 0..cuts {
        disk.cut_after(fastrand::u64(0..[10, 100, 400][fastrand::usize(0..3)]));
        let Shell { mut child, mut input, lines } =
            Shell::start(with_cache(&path, &format!("bifolio_memory=2MiB&{}", KINDS[cut % 2])));
        let first = committed + 1;
        // The first error ends the shell.
        let sql = format!(
            ".bail on\npragma journal_mode={mode}; pragma synchronous={synchronous};
             pragma cache_size=50; select 'open', length(file) from pragma_database_list;
             create table if not exists t(id integer primary key, v blob);\n"
        );
        std::thread::spawn(move || {
            if input.write_all(sql.as_bytes()).is_err() {
                return;
            }
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
        // The shell takes a database in memory where it cannot open the file.
        let is_open = |line: &String| line.strip_prefix("open|").is_some_and(|bytes| bytes != "0");
        for line in lines.map_while(Result::ok).skip_while(|line| !is_open(line)) {
            if let Some(id) = line.strip_prefix("committed|") {
                committed = id.parse().unwrap();
            }
        }
        assert!(disk.is_cut(), "{mode}: the shell ended by itself, after commit {committed}");
        let _ = child.kill();
        child.wait().unwrap();
        disk.restart().unwrap();
        let check = "create table if not exists t(id integer primary key, v blob);
                     pragma integrity_check; select count(*), coalesce(max(id), 0) from t";
        let (out, errors) = through_the_system(&path, check);
        let (result, rest) = out.split_once('\n').unwrap_or((&out, ""));
        assert_eq!(result, "ok", "{kind:?}, {mode}, cut {cut}: {errors}");
        let (count, max) = rest.trim().split_once('|').expect(&errors);
        let (count, max): (u64, u64) = (count.parse().unwrap(), max.parse().unwrap());
        assert!(
            count == max && max >= committed,
            "{kind:?}, {mode}, cut {cut}: {count} {max} {committed}"
        );
        committed = max;
    }
    let (lost, kept) = disk.lost_and_kept();
    println!(
        "{kind:?}, {mode}, synchronous={synchronous}: {cuts} cuts, {committed} commits, no damage; \
         {lost} sectors lost, {kept} kept"
    );
}

#[test]
#[ignore = "takes minutes, as root"]
fn power_cuts_lose_no_commit() {
    if !has_sqlite() {
        return;
    }
    for kind in [FileSystem::Ext4, FileSystem::Xfs] {
        for (mode, synchronous) in SETTINGS {
            cut_in(kind, mode, synchronous);
        }
    }
}
