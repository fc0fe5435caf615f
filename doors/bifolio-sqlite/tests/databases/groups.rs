//! A program in a control group with little memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bifolio_testing::skip;

use crate::shell::{extension, has_sqlite, run, through_the_system};

const LIMIT_BYTES: u64 = 64 << 20;

/// Returns the name of a group that no other test has.
fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("bifolio-sqlite-{}-{count}", std::process::id())
}

/// A control group, of version 1 or 2, with a limit of memory.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<Self> {
        let places = [("memory", "memory.limit_in_bytes"), ("", "memory.max")];
        for (hierarchy, limit) in places {
            let top = Path::new("/sys/fs/cgroup").join(hierarchy);
            let group = Self(top.join(unique_name()));
            if fs::create_dir(&group.0).is_ok()
                && group.0.join("cgroup.procs").exists()
                && fs::write(group.0.join(limit), LIMIT_BYTES.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        skip("control-groups", "no control groups of memory, or no right to create one");
        None
    }

    /// A command that runs a shell in the group, with the VFS as the default.
    fn command(&self, path: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        command.arg(self.0.join("cgroup.procs")).arg("sqlite3").arg("-cmd");
        command.arg(format!(".load {} sqlite3_bifoliodefault_init", extension().display()));
        command.arg("-cmd").arg(format!(".open {}", path.display()));
        command.env_remove("BIFOLIO_MEMORY").env_remove("BIFOLIO_MEMORY_MIN");
        command
    }
}

/// A control group of version 2 whose waits for memory are counted, which it need not limit.
struct CountedGroup(PathBuf);

impl CountedGroup {
    /// Creates one, unless `limited` is one.
    fn beside(limited: &Group) -> Option<Self> {
        if limited.0.join("memory.pressure").exists() {
            return Some(Self(limited.0.clone()));
        }
        let tops = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let name = unique_name();
        let made = tops.map(|top| Path::new(top).join(&name)).into_iter().find(|group| {
            let _ = fs::create_dir(group);
            let is_counted = fs::read_to_string(group.join("memory.pressure")).is_ok();
            if !is_counted {
                let _ = fs::remove_dir(group);
            }
            is_counted
        });
        if made.is_none() {
            skip("memory-pressure", "the kernel does not count waits for memory");
        }
        made.map(Self)
    }
}

impl Drop for CountedGroup {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(group: &Path) {
    // Processes that have ended leave their group a little later.
    for _ in 0..100 {
        if fs::remove_dir(group).is_ok() || !group.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_default_bound_fits_into_a_control_group() {
    if !has_sqlite() {
        return;
    }
    let Some(group) = Group::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let sql = "create table t(a integer primary key, v);
               with recursive i(n) as (select 1 union all select n+1 from i where n<30000)
                   insert into t select n, zeroblob(4000) from i";
    assert_eq!(through_the_system(&path, sql).1, "");
    let sql = "pragma bifolio_memory; select sum(length(v)) from t;
               update t set v=zeroblob(3999) where a%7=0; select sum(length(v)) from t;";
    let (out, errors) = run(group.command(&path), sql);
    assert_eq!(out, "16777216\n120000000\n119995715\n", "{errors}");
    let mut asked = group.command(&path);
    let (out, errors) = run(
        {
            asked.env("BIFOLIO_MEMORY", "60MiB");
            asked
        },
        "select 7 from t limit 1;",
    );
    assert!(out.is_empty() && errors.contains("67108864 bytes"), "{out}: {errors}");
    let sql = "pragma bifolio_memory='32MiB'; pragma bifolio_memory='1GiB';";
    let (out, errors) = run(group.command(&path), sql);
    assert!(out == "33554432\n" && errors.contains("bifolio_memory=1GiB"), "{out}: {errors}");
}

#[test]
fn the_bound_falls_while_a_control_group_is_short_of_memory() {
    if !has_sqlite() {
        return;
    }
    let Some(group) = Group::new() else { return };
    let Some(counted) = CountedGroup::beside(&group) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    assert_eq!(through_the_system(&path, "create table t(a); insert into t values(7)").1, "");
    // Larger than the group: its pages are read, and written, dropped and read again.
    let (large, other) = (directory.path().join("large"), directory.path().join("other"));
    fs::write(&large, vec![7; 2 * LIMIT_BYTES as usize]).unwrap();
    let hog = format!("while :; do cp {} {}; done", large.display(), other.display());
    let sql = format!(
        "select a from t;\npragma bifolio_memory;\n.shell timeout 9 sh -c '{hog}'\n\
         pragma bifolio_memory;\nselect a from t;\n"
    );
    let bounds = |floor: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(counted.0.join("cgroup.procs"));
        let shell = group.command(&path);
        command.arg(shell.get_program()).args(shell.get_args());
        command.env_remove("BIFOLIO_MEMORY").env("BIFOLIO_MEMORY_MIN", floor);
        let (out, errors) = run(command, &sql);
        let numbers: Vec<u64> = out.lines().map(|line| line.parse().unwrap()).collect();
        assert!(matches!(numbers[..], [7, _, _, 7]), "{out}: {errors}");
        (numbers[1], numbers[2])
    };
    let (before, after) = bounds("4MiB");
    assert!(before == 16 << 20 && (4 << 20..14 << 20).contains(&after), "{before} {after}");
    assert_eq!(bounds("16MiB"), (16 << 20, 16 << 20));
}
