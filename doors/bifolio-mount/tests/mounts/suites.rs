//! Other people's suites over a mounted directory. The long ones are ignored by default.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bifolio_testing::skip;

use crate::mounted::{Mounted, can_mount, have, shell};

/// Installs a program from the registry, once, and returns its path.
#[track_caller]
fn install(name: &str, version: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{version}"));
    let arguments = ["install", "--quiet", "--locked", "--root"].map(OsStr::new);
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(arguments).arg(&root).args([name, "--version", version]);
    let is_installed = root.join("bin").join(name).exists() || cargo.status().unwrap().success();
    if !is_installed {
        skip(name, "it cannot be installed");
    }
    is_installed.then(|| root.join("bin").join(name))
}

/// Runs the file system exerciser with every operation that the mount serves.
fn exercise(program: &Path, bound: &str, seed: u32, operations: u32) {
    let mounted = Mounted::new(&["--memory", bound, "--kept-files", "1"]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let configuration = directory.path().join("fsx.toml");
    let weights = [
        ("close_open", 1),
        ("invalidate", 1),
        ("mapread", 10),
        ("mapwrite", 10),
        ("read", 10),
        ("write", 10),
        ("truncate", 5),
        ("fsync", 1),
        ("fdatasync", 1),
        ("sendfile", 2),
        ("posix_fadvise", 2),
        ("copy_file_range", 5),
        ("posix_fallocate", 2),
        ("punch_hole", 3),
    ];
    let weights = weights.map(|(name, weight)| format!("{name} = {weight}.0\n")).concat();
    let lines = format!("flen = 3000000\n[opsize]\nmax = 200000\n[weights]\n{weights}");
    fs::write(&configuration, lines).unwrap();
    let mut fsx = Command::new(program);
    fsx.arg("-f").arg(configuration).arg("-P").arg(directory.path());
    fsx.args(["-S", &seed.to_string(), "-N", &operations.to_string()]);
    let output = fsx.arg(mounted.path("file")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = said + &String::from_utf8_lossy(&output.stdout);
    let tail: Vec<_> = said.lines().rev().take(30).collect();
    assert!(output.status.success(), "bound {bound}, seed {seed}: {tail:#?}");
    mounted.unmount_cleanly();
}

#[test]
#[ignore = "takes minutes"]
fn fsx_finds_nothing_in_120_000_operations() {
    if !can_mount() {
        return;
    }
    let Some(fsx) = install("fsx", "0.3.2") else { return };
    for (seed, bound) in (1..).zip(["512K", "1M", "2M", "8M"]) {
        exercise(&fsx, bound, seed, 30_000);
    }
}

#[test]
#[ignore = "takes a minute"]
fn fio_verifies_what_it_wrote_by_each_engine() {
    if !can_mount() || !have(&["fio"]) {
        return;
    }
    for arguments in [&["--memory", "8M"][..], &["--memory", "8M", "--kernel-cache"]] {
        let mounted = Mounted::new(arguments).unwrap();
        for engine in ["psync", "libaio", "io_uring", "mmap"] {
            let script = r#"
                least=512
                test "$2" != mmap || least=4096
                fio --name=job --filename="$1" --ioengine="$2" --rw=randwrite \
                    --bsrange=$least-128k --blockalign=$least --size=48M --iodepth=8 \
                    --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=50 --end_fsync=1 \
                    --fallocate=none --verify_state_save=0 --minimal
            "#;
            shell(script, &[&mounted.path(engine), Path::new(engine)]);
        }
        mounted.unmount_cleanly();
    }
}

/// Transactions in each journal mode, each checked by the mount and by the source directory.
const SQLITE: &str = r#"
    for mode in delete truncate persist memory off wal; do
        sqlite3 -batch "$1/$mode.db" >/dev/null <<END
            PRAGMA journal_mode=$mode;
            PRAGMA mmap_size=1000000;
            CREATE TABLE t(id INTEGER PRIMARY KEY, word TEXT);
            BEGIN;
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < $2)
                INSERT INTO t SELECT i, hex(randomblob(50)) FROM n;
            COMMIT;
            CREATE INDEX words ON t(word);
            UPDATE t SET word = word || id WHERE id % 7 = 0;
            DELETE FROM t WHERE id % 5 = 0;
            VACUUM;
END
        for turn in 1 2 3 4 5; do
            sqlite3 "$1/$mode.db" "INSERT INTO t(word) VALUES('turn $turn')"
        done
        sqlite3 "$1/$mode.db" 'PRAGMA integrity_check; SELECT count(*) FROM t'
    done
"#;

fn use_sqlite(rows: u32) {
    if !can_mount() || !have(&["sqlite3"]) {
        return;
    }
    let mounted = Mounted::new(&["--memory", "1M"]).unwrap();
    let found = shell(SQLITE, &[&mounted.path(""), Path::new(&rows.to_string())]);
    let expected = format!("ok\n{}\n", rows / 5 * 4 + 5);
    assert_eq!(found, expected.repeat(6));
    let source = mounted.source("");
    mounted.unmount_cleanly_with(|| {
        let script = "for file in \"$1\"/*.db; do sqlite3 \"$file\" 'PRAGMA integrity_check'; done";
        assert_eq!(shell(script, &[&source]), "ok\n".repeat(6));
    });
}

#[test]
fn sqlite_keeps_a_small_database_in_each_journal_mode() {
    use_sqlite(500);
}

#[test]
#[ignore = "takes a minute"]
fn sqlite_keeps_a_large_database_in_each_journal_mode() {
    use_sqlite(50_000);
}

#[test]
#[ignore = "takes a minute"]
fn a_clone_of_a_repository_and_a_build_succeed() {
    if !can_mount() || !have(&["git", "cc"]) {
        return;
    }
    for arguments in [&["--memory", "4M"][..], &["--memory", "64M", "--kernel-cache"]] {
        let mounted = Mounted::new(arguments).unwrap();
        let script = r#"
            cd "$1"
            mkdir one
            cd one
            git init --quiet --initial-branch main
            git config user.email test@localhost
            git config user.name test
            cp -r "$2" .
            git add .
            git commit --quiet --message first
            git repack --quiet -a -d
            cd ..
            git clone --quiet --no-local one two
            git -C two fsck --full --strict
            git -C two status --short
            diff -r --no-dereference one two --exclude .git
            git -C two gc --quiet --aggressive
            git -C two fsck --full --strict
            unset CARGO_TARGET_DIR
            cargo new --quiet --vcs none program
            cd program
            cargo build --quiet --offline
            cargo test --quiet --offline >/dev/null
            ./target/debug/program
        "#;
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates");
        assert_eq!(shell(script, &[&mounted.path(""), &sources]), "Hello, world!\n");
        mounted.unmount_cleanly();
    }
}

/// Returns the names of the tests of `pjdfstest` that fail in a directory.
fn failures_of_pjdfstest(program: &Path, directory: &Path) -> BTreeSet<String> {
    let configuration = tempfile::tempdir().unwrap();
    let file = configuration.path().join("pjdfstest.toml");
    fs::write(
        &file,
        "[settings]\nnaptime = 0.02\n[features]\n[dummy_auth]\n\
         entries = [[\"daemon\", \"daemon\"], [\"bin\", \"bin\"]]\n",
    )
    .unwrap();
    let output =
        Command::new(program).arg("-c").arg(file).arg("-p").arg(directory).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let results: Vec<_> = said.lines().filter(|line| line.contains("::")).collect();
    assert!(results.len() > 200, "{said} {}", String::from_utf8_lossy(&output.stderr));
    let is_failure = |line: &&&str| !line.ends_with("ok") && !line.ends_with("skipped");
    let failed = results.iter().filter(is_failure);
    failed.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

#[test]
#[ignore = "takes minutes"]
fn pjdfstest_fails_nowhere_that_the_source_does_not() {
    if !can_mount() {
        return;
    }
    let Some(program) = install("pjdfstest", "0.2.2") else { return };
    let mounted = Mounted::new(&[]).unwrap();
    let plain = tempfile::tempdir().unwrap();
    let expected = failures_of_pjdfstest(&program, plain.path());
    let found = failures_of_pjdfstest(&program, &mounted.path(""));
    let worse: Vec<_> = found.difference(&expected).collect();
    assert!(worse.is_empty(), "{worse:#?}, beyond {expected:#?}");
    mounted.unmount_cleanly();
}
