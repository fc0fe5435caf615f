//! SQLite's own suite, with the VFS as the default and with the system's: the tests that differ
//! are those of `differences.txt`.
//!
//! Ignored, since the suite comes from Debian's source package. The command
//! `cargo x check-doors sqlite --whole` installs what it needs. `BIFOLIO_SUITE=wal*,lock.test`
//! selects test files.
//!
//! A difference counts if a second run of the file, on its own, has it too. `build.sh` says what is
//! changed in the suite.

mod differences;
mod runs;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bifolio_testing::attempt;

use crate::differences::{Expectations, SKIP, differences, matches};
use crate::runs::{Run, Suite, Vfs};

/// Processes at a time.
const WORKERS: usize = 2;
/// Duration of a file above which it is reported.
const SLOW_SECONDS: u64 = 30;

fn script(name: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name));
    command
}

/// Fetches and builds the suite; `None` if the machine lacks what that takes.
fn prepare() -> Option<Suite> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sqlite-suite");
    let build = folder.join("build");
    std::fs::create_dir_all(&build).unwrap();
    let source = sources(&folder)?;
    attempt(script("suite/build.sh").arg(&build).arg(&source), "sqlite-suite")?;
    let runs = folder.join("runs");
    std::fs::create_dir_all(&runs).unwrap();
    let extension = std::env::current_exe().unwrap().with_file_name("libbifolio_sqlite.so");
    Some(Suite { program: build.join("testfixture"), source, folder: runs, extension })
}

fn sources(folder: &Path) -> Option<PathBuf> {
    attempt(script("fetch_source.sh").arg(folder), "sqlite-suite")?;
    Some(folder.join("source"))
}

/// The results of a file, and the tests that differ.
struct Pair {
    ours: Run,
    systems: Run,
    differing: Vec<String>,
}

impl Pair {
    fn run(suite: &Suite, file: &str) -> Self {
        let systems = suite.run(file, Vfs::System);
        let ours = suite.run(file, Vfs::Bifolio);
        let differing = differences(&ours, &systems);
        Self { ours, systems, differing }
    }
}

fn run_all(suite: &Suite, files: &[String]) -> BTreeMap<String, Pair> {
    let queue = Mutex::new(files.iter());
    let pairs = Mutex::new(BTreeMap::new());
    let work = || {
        loop {
            let Some(file) = queue.lock().unwrap().next() else { return };
            let pair = Pair::run(suite, file);
            let (ours, systems) = (seconds(&pair.ours), seconds(&pair.systems));
            let (tests, count) = (pair.systems.tests.len(), pair.differing.len());
            if count > 0 || ours > SLOW_SECONDS {
                println!("{file}: {tests} tests, {count} differ; {systems} s, ours {ours} s");
            }
            pairs.lock().unwrap().insert(file.clone(), pair);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(work);
        }
    });
    pairs.into_inner().unwrap()
}

fn seconds(run: &Run) -> u64 {
    run.duration.as_secs()
}

/// Compares with the list. Returns the tests that are not as it says, in its form.
fn surprises(
    suite: &Suite,
    pairs: &BTreeMap<String, Pair>,
    list: &mut Expectations,
) -> Vec<String> {
    let mut lines = Vec::new();
    for (file, pair) in pairs {
        let is_new = |list: &mut Expectations, test: &String| !list.contains(file, test);
        let mut new: Vec<_> = pair.differing.iter().filter(|test| is_new(list, test)).collect();
        let mut unused = list.unused(file);
        if new.is_empty() && unused.is_empty() {
            continue;
        }
        println!("{file}: again, since {} differ and {unused:?} do not", new.len());
        let again = Pair::run(suite, file);
        new.retain(|test| again.differing.contains(test));
        unused.retain(|pattern| !again.differing.iter().any(|test| matches(pattern, test)));
        if !new.is_empty() {
            let names: Vec<&str> = new.iter().map(|test| test.as_str()).collect();
            let end = again.ours.interruption.as_deref().unwrap_or("came to its end");
            let log = suite.log(file, Vfs::Bifolio);
            lines.push(format!("differ and are not listed ({end}; see {}):", log.display()));
            lines.push(format!("    {file} {}", names.join(" ")));
        }
        if !unused.is_empty() {
            lines.push(format!("are listed and do not differ:\n    {file} {}", unused.join(" ")));
        }
    }
    lines
}

#[test]
#[ignore = "fetches, builds and runs SQLite's own suite"]
fn sqlites_own_suite_differs_where_the_list_says() {
    let Some(suite) = prepare() else { return };
    let mut list = Expectations::new(include_str!("differences.txt"));
    let mut files = suite.files();
    for file in list.files() {
        assert!(
            files.iter().any(|other| matches(file, other)),
            "{file} is listed, and does not exist"
        );
    }
    if let Ok(selection) = std::env::var("BIFOLIO_SUITE") {
        files.retain(|file| selection.split(',').any(|pattern| matches(pattern, file)));
    }
    files.retain(|file| !list.contains(file, SKIP));
    let start = Instant::now();
    let pairs = run_all(&suite, &files);
    let surprises = surprises(&suite, &pairs, &mut list);
    let count = |run: fn(&Pair) -> &Run| pairs.values().map(|pair| run(pair).tests.len()).sum();
    let time = |run: fn(&Pair) -> &Run| pairs.values().map(|pair| run(pair).duration).sum();
    let (tests, ours): (usize, usize) = (count(|pair| &pair.systems), count(|pair| &pair.ours));
    let (system_time, our_time): (Duration, Duration) =
        (time(|pair| &pair.systems), time(|pair| &pair.ours));
    let differing: usize = pairs.values().map(|pair| pair.differing.len()).sum();
    println!(
        "{} files of SQLite's suite in {} s: {tests} tests with the system's VFS ({} s), {ours} \
         with this one ({} s), {differing} differ, {} of them not as the list says",
        files.len(),
        start.elapsed().as_secs(),
        system_time.as_secs(),
        our_time.as_secs(),
        surprises.len()
    );
    assert!(surprises.is_empty(), "\n{}", surprises.join("\n"));
}
