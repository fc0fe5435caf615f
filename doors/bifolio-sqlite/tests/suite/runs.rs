//! A run of one test file of SQLite's suite, in a process and a directory of its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A test file that runs longer is ended: the longest takes a minute on an idle machine.
const LIMIT: Duration = Duration::from_secs(300);

/// SQLite's program for its tests, and the folders that it uses.
pub(crate) struct Suite {
    pub(crate) program: PathBuf,
    pub(crate) source: PathBuf,
    /// Directories of the runs, and their output.
    pub(crate) folder: PathBuf,
    pub(crate) extension: PathBuf,
}

/// The default VFS of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vfs {
    System,
    Bifolio,
}

impl Vfs {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::System => "unix",
            Self::Bifolio => "bifolio",
        }
    }
}

/// The results of a test file.
pub(crate) struct Run {
    /// The tests that ran, and `true` for those that passed.
    pub(crate) tests: BTreeMap<String, bool>,
    /// The reason why the file did not come to its end.
    pub(crate) interruption: Option<String>,
    pub(crate) duration: Duration,
}

impl Suite {
    /// The test files: `file`, or `permutation/file` if that is not `veryquick`.
    pub(crate) fn files(&self) -> Vec<String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/select.tcl");
        let directory = tempfile::tempdir_in(&self.folder).unwrap();
        let mut command = Command::new(&self.program);
        command.arg(script).arg(&self.source).current_dir(directory.path());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let files = text.lines().filter_map(|line| line.strip_prefix("file: "));
        let files = files.map(|file| file.strip_prefix("veryquick/").unwrap_or(file));
        let files: Vec<String> = files.map(str::to_owned).collect();
        assert!(!files.is_empty(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        files
    }

    /// The output of a run, which stays until the next.
    pub(crate) fn log(&self, file: &str, vfs: Vfs) -> PathBuf {
        self.folder.join(format!("{}.{}.txt", file.replace('/', "."), vfs.name()))
    }

    /// Runs a test file.
    pub(crate) fn run(&self, file: &str, vfs: Vfs) -> Run {
        let directory = tempfile::tempdir_in(&self.folder).unwrap();
        let log = self.log(file, vfs);
        let output = File::create(&log).unwrap();
        let mut command = Command::new(&self.program);
        command.arg(self.source.join("test/permutations.test"));
        let (permutation, name) = file.split_once('/').unwrap_or(("veryquick", file));
        command.args([permutation, name, "--verbose=1", "--maxerror=1000000"]);
        command.current_dir(directory.path()).process_group(0);
        command.stdin(Stdio::null()).stderr(output.try_clone().unwrap()).stdout(output);
        match vfs {
            Vfs::System => command.env_remove("BIFOLIO_EXTENSION"),
            Vfs::Bifolio => command.env("BIFOLIO_EXTENSION", &self.extension),
        };
        let start = Instant::now();
        let status = wait(command.spawn().unwrap());
        let duration = start.elapsed();
        let text = std::fs::read(log).unwrap();
        let text = String::from_utf8_lossy(&text);
        let tests = tests(&text);
        Run { tests, interruption: interruption(&text, status), duration }
    }
}

/// Waits for a process, and ends it with its children at the limit: then there is no status.
fn wait(mut child: Child) -> Option<ExitStatus> {
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > LIMIT {
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    // Children that a test left behind are ended too.
    let mut end = Command::new("kill");
    let group = format!("-{}", child.id());
    let _ = end.args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
    let _ = child.wait();
    status
}

/// A test prints its name, three dots and ` Ok`. What its processes print may come between, and
/// where ` Ok` does not follow, the test failed.
fn tests(text: &str) -> BTreeMap<String, bool> {
    let mut tests = BTreeMap::new();
    let mut last = None;
    for line in text.lines() {
        if line == " Ok" {
            last.take().map(|name| tests.insert(name, true));
            continue;
        }
        // The dots of a test of threads.
        let line = line.trim_start_matches('.');
        let Some((name, rest)) = line.split_once("...") else { continue };
        let passed = rest == " Ok";
        if name.is_empty() || name.contains(' ') && !passed && !rest.is_empty() {
            continue;
        }
        // Names are words in the list of differences.
        let name = name.replace(' ', "_");
        let before = tests.entry(name.clone()).or_insert(true);
        *before &= passed;
        last = (!passed).then_some(name);
    }
    tests
}

fn interruption(text: &str, status: Option<ExitStatus>) -> Option<String> {
    let Some(status) = status else {
        return Some(format!("did not end within {} s", LIMIT.as_secs()));
    };
    if let Some(signal) = status.signal() {
        return Some(format!("was ended by signal {signal}"));
    }
    if text.contains(" errors out of ") {
        return None;
    }
    Some(format!("stopped with {status}"))
}
