//! The program `sqlite3`, with the extension and without.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};

use bifolio_testing::skip;

pub(crate) const MODES: [&str; 4] = ["delete", "truncate", "persist", "wal"];
/// Parameters of shared databases and of exclusive ones: their reads and writes differ.
pub(crate) const KINDS: [&str; 2] = ["bifolio_exclusive=0", "bifolio_exclusive=1"];

/// Returns each journal mode with each kind of database.
pub(crate) fn modes_and_kinds() -> impl Iterator<Item = (&'static str, &'static str)> {
    MODES.into_iter().flat_map(|mode| KINDS.map(|kind| (mode, kind)))
}

/// Returns `false` if the program is missing: the test is skipped.
pub(crate) fn has_sqlite() -> bool {
    let found = Command::new("sqlite3").arg("--version").output().is_ok();
    if !found {
        skip("sqlite3", "the program is not installed");
    }
    found
}

/// The extension beside this test.
pub(crate) fn extension() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join("libbifolio_sqlite.so")
}

/// The program with a database opened through the VFS; `parameters` go on the URI.
pub(crate) fn with_cache(path: &Path, parameters: &str) -> Command {
    let mut command = Command::new("sqlite3");
    command.arg("-cmd").arg(format!(".load {}", extension().display()));
    let uri = format!("file:{}?vfs=bifolio&{parameters}", path.display());
    command.arg("-cmd").arg(format!(".open '{uri}'"));
    command
}

/// The program with a database opened through the VFS of the system.
pub(crate) fn with_system(path: &Path) -> Command {
    let mut command = Command::new("sqlite3");
    command.arg(path);
    command
}

/// The output and the errors of statements.
pub(crate) fn run(mut command: Command, sql: &str) -> (String, String) {
    let mut child = spawn(&mut command);
    child.stdin.take().unwrap().write_all(sql.as_bytes()).unwrap();
    texts(child.wait_with_output().unwrap())
}

/// The output and the errors of statements that run through a cache of 2 MiB, on a database of a
/// kind.
pub(crate) fn through_the_cache(path: &Path, kind: &str, sql: &str) -> (String, String) {
    run(with_cache(path, &format!("bifolio_memory=2MiB&{kind}")), sql)
}

/// The output and the errors of statements that run through the VFS of the system. They wait half a
/// second for locks: a program that another test starts has copies of all descriptors between its
/// fork and its `exec`, and with them locks that this test has just released.
pub(crate) fn through_the_system(path: &Path, sql: &str) -> (String, String) {
    run(with_system(path), &format!(".timeout 500\n{sql}"))
}

fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn texts(output: Output) -> (String, String) {
    assert!(output.status.code().is_some(), "sqlite3 was ended by a signal: {}", output.status);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr))
}

/// A running program that answers one statement after the other.
pub(crate) struct Shell {
    pub(crate) child: Child,
    pub(crate) input: ChildStdin,
    pub(crate) lines: Lines<BufReader<ChildStdout>>,
}

impl Shell {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = spawn(&mut command);
        let input = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, input, lines }
    }

    /// The first line that a statement prints.
    pub(crate) fn ask(&mut self, sql: &str) -> String {
        writeln!(self.input, "{sql}").unwrap();
        self.lines.next().expect("the program is alive").unwrap()
    }

    /// Ends the input, and returns the errors.
    pub(crate) fn end(self) -> String {
        drop(self.input);
        texts(self.child.wait_with_output().unwrap()).1
    }
}
