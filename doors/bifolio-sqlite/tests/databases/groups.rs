//! A program in a control group with little memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bifolio_testing::skip;

use crate::shell::{extension, has_sqlite, run, through_the_system};

const LIMIT_BYTES: u64 = 64 << 20;

/// A control group, of version 1 or 2, with a limit of memory.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<Self> {
        let places = [("memory", "memory.limit_in_bytes"), ("", "memory.max")];
        for (hierarchy, limit) in places {
            let top = Path::new("/sys/fs/cgroup").join(hierarchy);
            let group = Self(top.join(format!("bifolio-sqlite-{}", std::process::id())));
            if fs::create_dir(&group.0).is_ok()
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
        command.env_remove("BIFOLIO_MEMORY");
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Processes that have ended leave their group a little later.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
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
