//! Kills a writer at a random moment, again and again: no damage, and no commit is lost that was
//! reported. `BIFOLIO_KILLS` sets the kills for each journal mode.

use std::io::Write;
use std::time::Duration;

use crate::shell::{Shell, has_sqlite, through_the_system, with_cache};

fn kill_in(mode: &str, synchronous: &str) {
    if !has_sqlite() {
        return;
    }
    let kills = std::env::var("BIFOLIO_KILLS").map_or(5, |text| text.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let mut committed = 0_u64;
    for kill in 0..kills {
        let parameters = format!("bifolio_memory=2MiB&bifolio_exclusive={}", kill % 2);
        let Shell { mut child, mut input, mut lines } =
            Shell::start(with_cache(&path, &parameters));
        let sql = format!(
            "pragma journal_mode={mode}; pragma synchronous={synchronous}; pragma cache_size=50;
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
        let mut number = |line: std::io::Result<String>| {
            if let Some(id) = line.unwrap().strip_prefix("committed|") {
                committed = id.parse().unwrap();
            }
        };
        // The first line is the journal mode.
        lines.by_ref().take(1 + fastrand::usize(1..30)).for_each(&mut number);
        std::thread::sleep(Duration::from_micros(fastrand::u64(0..5000)));
        child.kill().unwrap();
        lines.for_each(&mut number);
        child.wait().unwrap();
        let check = "pragma integrity_check; select count(*), max(id) from t";
        let (out, errors) = through_the_system(&path, check);
        let (result, rest) = out.split_once('\n').unwrap_or((&out, ""));
        assert_eq!(result, "ok", "{mode}: {errors}");
        let (count, max) = rest.trim().split_once('|').expect(&errors);
        let (count, max): (u64, u64) = (count.parse().unwrap(), max.parse().unwrap());
        assert!(count == max && max >= committed, "{mode}: {count} {max} {committed}");
        committed = max;
    }
    println!("{mode}, synchronous={synchronous}: {kills} kills, {committed} commits, no damage");
}

#[test]
fn kills_lose_nothing_with_deleted_journals() {
    kill_in("delete", "full");
}

#[test]
fn kills_lose_nothing_with_truncated_journals() {
    kill_in("truncate", "full");
}

#[test]
fn kills_lose_nothing_with_persistent_journals() {
    kill_in("persist", "full");
}

#[test]
fn kills_lose_nothing_with_a_log() {
    kill_in("wal", "full");
}

#[test]
fn kills_lose_nothing_with_a_log_that_is_not_synced() {
    kill_in("wal", "normal");
}

#[test]
fn kills_lose_nothing_without_syncs() {
    kill_in("truncate", "off");
    kill_in("wal", "off");
}
