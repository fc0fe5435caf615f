//! Programs that others wrote, over the VFS: the Python package `apsw` and SQLite's speed test.
//! Ignored, since both come from package registries.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use bifolio_testing::attempt;

use crate::shell::{MODES, extension};

/// A folder that is kept between runs.
pub(crate) fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{text}{errors}", output.status);
    text
}

/// Returns a Python that has the package apsw.
pub(crate) fn python_with_apsw() -> Option<PathBuf> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = INSTALLING.lock().unwrap();
    let environment = folder("apsw");
    let python = environment.join("bin/python");
    if !python.exists() {
        let mut make = Command::new("python3");
        attempt(make.args(["-m", "venv"]).arg(&environment), "apsw")?;
    }
    let mut install = Command::new(&python);
    attempt(install.args(["-m", "pip", "install", "--quiet", "apsw"]), "apsw")?;
    Some(python)
}

#[test]
#[ignore = "installs the package apsw"]
fn the_package_apsw_works_over_the_cache() {
    let Some(python) = python_with_apsw() else { return };
    let directory = tempfile::tempdir().unwrap();
    let mut script = Command::new(python);
    script.arg(source("apsw_databases.py")).arg(extension()).arg(directory.path());
    println!("{}", succeed(&mut script));
}

/// `speedtest1.c` of the SQLite that is installed: `BIFOLIO_SPEEDTEST1`, or from the source package
/// of Debian.
fn speed_test_source() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("BIFOLIO_SPEEDTEST1") {
        return Some(path.into());
    }
    let folder = folder("sqlite-suite");
    let mut fetch = Command::new("sh");
    attempt(fetch.arg(source("fetch_source.sh")).arg(&folder), "speedtest1")?;
    Some(folder.join("source/test/speedtest1.c"))
}

/// The lines that depend on what was read, without times.
fn verified(output: &str) -> Vec<&str> {
    output.lines().filter(|line| line.starts_with("Verification Hash:")).collect()
}

#[test]
#[ignore = "fetches the source package of SQLite"]
fn the_speed_test_of_sqlite_reads_the_same() {
    let Some(path) = speed_test_source() else { return };
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("speedtest1");
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-w", "-Dmain=speedtest1_main", "-o"]).arg(&program);
    compile.arg(source("speedtest1_main.c")).arg("-x").arg("c").arg(path);
    compile.args(["-lsqlite3", "-lm", "-ldl", "-lpthread"]);
    if attempt(&mut compile, "speedtest1").is_none() {
        return;
    }
    let run = |vfs: &str, mode: &str| {
        let database = directory.path().join(format!("{vfs}-{mode}.db"));
        let mut command = Command::new(&program);
        command.args(["--verify", "--size", "10", "--vfs", vfs, "--journal", mode]);
        let output = succeed(command.arg(&database).env("BIFOLIO_EXTENSION", extension()));
        let mut check = Command::new("sqlite3");
        check.arg(&database).arg("pragma integrity_check; select count(*)>0 from sqlite_schema");
        assert_eq!(succeed(&mut check), "ok\n1\n", "{vfs}, {mode}");
        output
    };
    let expected = run("unix", "delete");
    assert_eq!(verified(&expected).len(), 1, "{expected}");
    for mode in MODES {
        let output = run("bifolio", mode);
        assert_eq!(verified(&output), verified(&expected), "{mode}: {output}");
        let total = output.lines().find(|line| line.contains("TOTAL")).unwrap_or_default();
        println!("{mode}: {}, {total}", verified(&output)[0]);
    }
}
