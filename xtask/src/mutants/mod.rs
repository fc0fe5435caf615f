//! `cargo x torture --mutants [NAME]`: measures how well torture finds planted defects.
//!
//! Each mutant (`patch.rs`) is applied to a copy of the tree below `target/mutants`, built there,
//! and tortured until it is found or the time is over, with several seeds and rates of chaos. What
//! comes of it is a row of the table in `docs/correctness.md` (`table.rs`).
//!
//! The time is three times 20 s. On a machine that others use, too, 20 s are few: a part goes on
//! until torture has had 24 s of the CPUs (less than it takes in 20 s with two for itself), but no
//! longer than 45 s. What it had stands beside what was not found.
//!
//! The build is the chaos build with little optimization, without link-time optimization, and
//! incremental: a mutant is built in 5 s instead of 60, and makes as many calls a second, since
//! chaos and the checks take most of the time. Debug assertions are off, as in `cargo x torture`.
//!
//! The table is written after each mutant, so an interrupted run continues with `--left`: with the
//! mutants that the table does not list as found.
//!
//! A mutant that torture does not find each time may name a test of the library that fails with it
//! (a hook between two steps of one thread, or a loom test): then only that test is run.
//!
//! `--sample` tries some mutants, others each day (`rotation.rs`).
//!
//! The user's tree is not changed, except for the table and the record of the samples.

mod patch;
mod rotation;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::cargo::{self, target_folder, workspace_root};
use crate::process;
use patch::Mutant;
pub use patch::check;
pub use rotation::run as run_sample;
use table::Row;

/// Seeds of scenes, and seed and rate of the scheduler, one per slice.
const SLICES: [(u64, &str); 3] = [(1000, "1:2000"), (2000, "2:300"), (3000, "3:20000")];
/// Minimum duration of a slice; the CPU time that is enough, and the maximum duration, in slices.
const SLICE: Duration = Duration::from_secs(20);
const CPU_SHARE: f64 = 1.2;
const SLICES_MAX: f64 = 2.25;
/// Duration of torture that is killed when its slice is over: longer than any.
const TORTURE_S: u64 = 600;
/// Duration of a scene, milliseconds: short scenes give more variety.
const SCENE_MS: &str = "600";
/// Duration after which a test of the library hangs.
const TEST_MAX: Duration = Duration::from_secs(120);
/// Seconds after which a scene counts as hung: longer than any device of a scene hangs.
const HANG_S: u64 = 12;

/// The verdict of torture on a mutant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub seconds: u64,
    /// CPU seconds, in all slices.
    pub cpu_seconds: u64,
    pub seed: String,
    pub class: String,
    pub message: String,
}

/// Tortures the mutants whose names contain `name`, or one of several with commas between, and puts
/// the rows into the table; with `left`, only those that the table does not call found.
pub fn run(name: &str, left: bool) -> Result<()> {
    let root = workspace_root();
    let known = if left { table::known(&root)? } else { BTreeMap::new() };
    let is_wanted = |mutant: &Mutant| {
        let is_found = known.get(&mutant.name) == Some(&true);
        name.split(',').any(|name| mutant.name.contains(name)) && !is_found
    };
    let mut mutants: Vec<Mutant> = patch::all(&root)?.into_iter().filter(is_wanted).collect();
    // First those that were never run.
    mutants.sort_by_key(|mutant| known.contains_key(&mutant.name));
    ensure!(!mutants.is_empty(), "no mutant is left that has `{name}` in its name");
    check(&root)?;
    let place = Place::new(&root)?;
    if mutants.iter().any(|mutant| mutant.test.is_none()) {
        place.build().context("the sources without a mutant")?;
    }
    if name.is_empty() && !left {
        let (clean, _) = place.torture(None)?;
        ensure!(clean.is_none(), "torture finds something without any mutant: {clean:?}");
    }
    let (mut rows, mut broken) = (Vec::new(), 0);
    for (number, mutant) in mutants.iter().enumerate() {
        eprint!("{}/{} {}: ", number + 1, mutants.len(), mutant.name);
        let (found, cpu) = match place.judge(mutant) {
            Ok(judged) => judged,
            Err(error) => {
                eprintln!("{error:#}");
                broken += 1;
                continue;
            }
        };
        match &found {
            Some(found) => eprintln!("{} s, {}: {}", found.seconds, found.class, found.message),
            None => eprintln!("NOT FOUND in {} s of the CPUs", cpu.as_secs()),
        }
        rows.push(Row::new(mutant, found, cpu));
        // After each: a run of an hour that is stopped has not been for nothing.
        table::update(&root, &rows)?;
    }
    let missed = rows.iter().filter(|row| !row.is_found()).count();
    eprintln!("{} of {} found", rows.len() - missed, rows.len());
    ensure!(broken == 0, "{broken} mutants could not be judged");
    let unexplained: Vec<_> =
        rows.iter().filter(|row| !row.is_found() && !row.is_explained()).collect();
    ensure!(unexplained.is_empty(), "{} neither found nor explained", unexplained.len());
    Ok(())
}

/// Copies the compiled dependencies of `cargo x torture --chaos`, which has the same flags, into
/// the folder `to` unless that exists, so that they are not compiled twice. The copies have the
/// times of the originals, which cargo compares.
fn copy_dependencies(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    for folder in [".fingerprint", "build", "deps"].map(|name| from.join(name)) {
        let is_dependency = |entry: &walkdir::DirEntry| {
            let name = entry.file_name().to_string_lossy();
            !name.trim_start_matches("lib").starts_with("bifolio")
        };
        let entries = walkdir::WalkDir::new(folder).into_iter().filter_entry(is_dependency);
        for entry in entries.filter_map(Result::ok).filter(|entry| entry.file_type().is_file()) {
            let target = to.join(entry.path().strip_prefix(from)?);
            fs::create_dir_all(target.parent().unwrap_or(to))?;
            let failed = || format!("cannot copy {}", entry.path().display());
            fs::copy(entry.path(), &target).with_context(failed)?;
            let modified = entry.metadata()?.modified()?;
            fs::File::options().write(true).open(&target)?.set_modified(modified)?;
        }
    }
    Ok(())
}

/// The copy of the tree in which mutants are built and run.
#[derive(Debug)]
struct Place {
    tree: PathBuf,
    target: PathBuf,
    output: PathBuf,
}

impl Place {
    /// A copy of the tree at `root`; files that are as they were keep their times.
    fn new(root: &Path) -> Result<Self> {
        let folder = target_folder().join("mutants");
        let tree = folder.join("tree");
        let arguments = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
        let listed = process::output(Command::new("git").args(arguments).current_dir(root))?;
        let wanted: Vec<&str> = listed.split_terminator('\0').collect();
        for path in &wanted {
            let (from, to) = (root.join(path), tree.join(path));
            // Deleted, and not yet said so.
            let Ok(bytes) = fs::read(&from) else { continue };
            if fs::read(&to).is_ok_and(|before| before == bytes) {
                continue;
            }
            fs::create_dir_all(to.parent().unwrap_or(&tree))?;
            fs::write(&to, bytes).with_context(|| format!("cannot write {}", to.display()))?;
        }
        for entry in walkdir::WalkDir::new(tree.join("crates")) {
            let entry = entry?;
            let relative = entry.path().strip_prefix(&tree)?.to_string_lossy().into_owned();
            let is_gone = !wanted.contains(&relative.as_str()) || !root.join(&relative).exists();
            if entry.file_type().is_file() && is_gone {
                fs::remove_file(entry.path())?;
            }
        }
        // None that the tree itself builds into: to cargo both are the same package, and a mutant
        // is newer than the sources.
        let (target, output) = (folder.join("target"), folder.join("output"));
        copy_dependencies(&target_folder().join("chaos/checks"), &target.join("checks"))?;
        Ok(Self { tree, target, output })
    }

    /// Builds torture, with the scheduler of `cargo x chaos`.
    fn build(&self) -> Result<()> {
        let mut cargo = self.cargo(&self.target, "--cfg bifolio_chaos");
        cargo.args(["build", "--quiet", "--profile", "checks", "-p", "bifolio-torture"]);
        // A mutant leaves much unused: warnings are printed only beside an error.
        let built = cargo.output().context("cannot start cargo")?;
        let told = String::from_utf8_lossy(&built.stderr);
        ensure!(built.status.success(), "it does not compile: {told}");
        Ok(())
    }

    /// Returns a command of cargo in the copy.
    fn cargo(&self, target: &Path, flags: &str) -> Command {
        let mut cargo = Command::new(cargo::program());
        // Incremental, whatever the caller wants for its own builds: a mutant changes a line.
        cargo.env("CARGO_INCREMENTAL", "1").env("CARGO_TARGET_DIR", target);
        cargo.env_remove("CARGO_MANIFEST_DIR").current_dir(&self.tree);
        if !flags.is_empty() {
            cargo.env("RUSTFLAGS", cargo::with_flags("RUSTFLAGS", flags));
        }
        cargo
    }

    /// Applies a mutant, judges it, and reverts its changes.
    fn with<T>(&self, mutant: &Mutant, judge: impl FnOnce() -> Result<T>) -> Result<T> {
        let changed = mutant.apply(&self.tree)?;
        let mut before = Vec::new();
        for (path, text) in &changed {
            before.push((path, fs::read_to_string(path)?));
            fs::write(path, text)?;
        }
        let found = judge();
        for (path, text) in before {
            fs::write(path, text)?;
        }
        found
    }

    /// Runs the test that a mutant names; tortures one that names none.
    fn judge(&self, mutant: &Mutant) -> Result<(Option<Found>, Duration)> {
        self.with(mutant, || {
            if let Some(test) = &mutant.test {
                return Ok((self.test(test)?, Duration::ZERO));
            }
            self.build()?;
            self.torture(mutant.class.as_deref())
        })
    }

    /// Runs a test of the library, which should fail; fails if it cannot be run.
    fn test(&self, test: &str) -> Result<Option<Found>> {
        let (target, flags, words) = match test.strip_prefix("loom ") {
            Some(name) => ("loom", "--cfg loom", format!("--profile checks --lib {name}")),
            None => ("tests", "", test.to_owned()),
        };
        let run = |arguments: &[&str], most: Duration| {
            let mut cargo = self.cargo(&self.target.join(target), flags);
            cargo.args(["test", "-p", "bifolio"]).args(words.split_whitespace()).args(arguments);
            cargo.env("LOOM_MAX_PREEMPTIONS", "3").env("LOOM_MAX_BRANCHES", "10000");
            self.run_until(&mut cargo, |_, since| since >= most)
        };
        let built = run(&["--no-run"], Duration::MAX)?;
        let is_built = built.status.is_some_and(|status| status.success());
        ensure!(is_built, "the tests do not compile: {}", self.told()?);
        let begun = Instant::now();
        let ended = run(&[], TEST_MAX)?;
        if ended.status.is_some_and(|status| status.success()) {
            crate::ran::check_tests(&self.told()?).with_context(|| format!("the test `{test}`"))?;
            return Ok(None);
        }
        let seconds = begun.elapsed().as_secs().max(1);
        let name = test.rsplit(' ').next().unwrap_or(test);
        let verb = if ended.status.is_some() { "fails" } else { "hangs" };
        Ok(Some(Found {
            seconds,
            cpu_seconds: 0,
            seed: String::new(),
            class: "test".to_owned(),
            message: format!("`{name}` {verb}"),
        }))
    }

    /// Tortures the build; returns what it finds first, and the CPU time used.
    fn torture(&self, class: Option<&str>) -> Result<(Option<Found>, Duration)> {
        let (begun, mut cpu) = (Instant::now(), Duration::ZERO);
        for (seed, chaos) in SLICES {
            if let Some(mut found) = self.slice(class, seed, chaos, SLICE, &mut cpu)? {
                found.seconds = begun.elapsed().as_secs().max(1);
                found.cpu_seconds = cpu.as_secs();
                return Ok((Some(found), cpu));
            }
        }
        Ok((None, cpu))
    }

    /// Runs one slice, of at least this duration, and of 1.2 times as much CPU time unless the
    /// machine is too busy for that.
    fn slice(
        &self,
        class: Option<&str>,
        seed: u64,
        chaos: &str,
        duration: Duration,
        cpu: &mut Duration,
    ) -> Result<Option<Found>> {
        let since = Instant::now();
        let ended = self.start(class, seed, chaos, |used| {
            let is_over = since.elapsed() >= duration && used >= duration.mul_f64(CPU_SHARE);
            is_over || since.elapsed() >= duration.mul_f64(SLICES_MAX)
        })?;
        *cpu += ended.used;
        let Some(status) = ended.status else { return Ok(None) };
        let text = self.told()?;
        ensure!(!status.success(), "torture has ended before its time: {text}");
        let (class, scene, message) = judge_output(&text, &status.to_string());
        let seed = format!("{scene}, chaos {chaos}");
        Ok(Some(Found { seconds: 0, cpu_seconds: 0, seed, class, message }))
    }

    /// Starts torture; it ends by itself, or is killed when `is_over` returns `true` for its CPU
    /// time.
    fn start(
        &self,
        class: Option<&str>,
        seed: u64,
        chaos: &str,
        is_over: impl Fn(Duration) -> bool,
    ) -> Result<Ended> {
        let mut command = Command::new(self.target.join("checks/bifolio-torture"));
        command.args(["--trace", "--scene-ms", SCENE_MS]);
        command.arg(format!("--seconds={TORTURE_S}"));
        command.arg(format!("--seed={seed}")).arg(format!("--hang-seconds={HANG_S}"));
        match class {
            Some(class) => command.args(["--only", &class.to_lowercase()]),
            // It makes each of its findings shorter before it tells.
            None => command.args(["--without", "exerciser"]),
        };
        command.env("BIFOLIO_CHAOS", chaos);
        self.run_until(&mut command, |used, _| is_over(used))
    }

    /// Runs a program, whose output goes to a file; it ends by itself, or is killed when `is_over`
    /// returns `true` for its CPU time and its age.
    fn run_until(
        &self,
        command: &mut Command,
        is_over: impl Fn(Duration, Duration) -> bool,
    ) -> Result<Ended> {
        let output = fs::File::create(&self.output)?;
        command.stdin(Stdio::null()).process_group(0);
        command.stderr(output.try_clone()?).stdout(output);
        let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let (begun, mut used) = (Instant::now(), Duration::ZERO);
        loop {
            used = cpu_time(child.id()).unwrap_or(used).max(used);
            if let Some(status) = child.try_wait()? {
                return Ok(Ended { status: Some(status), used });
            }
            if is_over(used, begun.elapsed()) {
                // With its children: some scenes have some.
                let group = format!("-{}", child.id());
                Command::new("kill").args(["-KILL", "--", &group]).status()?;
                child.wait()?;
                return Ok(Ended { status: None, used });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the output of the last program.
    fn told(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(&self.output)?).into_owned())
    }
}

/// The end of a program.
#[derive(Debug)]
struct Ended {
    /// `None` if it was killed because its time was over.
    status: Option<ExitStatus>,
    /// CPU time used.
    used: Duration,
}

/// Returns the CPU time of a process and of the children that it has waited for.
fn cpu_time(process: u32) -> Option<Duration> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let fields = text.rsplit_once(')')?.1.split_whitespace();
    let ticks: u64 = fields.skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    // A hundred in a second, on every Linux there is.
    Some(Duration::from_millis(ticks * 10))
}

/// Returns class and seed of the last scene, and its message.
fn judge_output(text: &str, ended: &str) -> (String, String, String) {
    let scene = text.lines().rev().find_map(|line| line.strip_prefix("scene: "));
    let (class, seed) = scene.and_then(|scene| scene.split_once(' ')).unwrap_or(("?", "?"));
    let panicked = text.lines().skip_while(|line| !line.contains("panicked at")).nth(1);
    let said = text.lines().skip_while(|line| !line.starts_with("torture: class")).nth(1);
    let hung = text.lines().find_map(|line| {
        let (_, hung) = line.strip_prefix("torture: class ")?.split_once(": hangs in ")?;
        Some(hung.split(':').next().unwrap_or(hung))
    });
    let changed = text.lines().find(|line| line.contains("changed while it ran"));
    let message = match (hung, said, panicked) {
        (Some(phase), ..) => format!("hangs in {phase}"),
        (_, Some("a thread panicked") | None, Some(panicked)) => format!("panics: {panicked}"),
        (_, Some(said), _) => said.to_owned(),
        (_, None, None) => changed.unwrap_or(ended).to_owned(),
    };
    (class.to_owned(), seed.to_owned(), shortened(&message))
}

/// Removes from a message what differs from run to run.
fn shortened(message: &str) -> String {
    let message = message.split_once(": changes of this word").map_or(message, |(told, _)| told);
    let message = message.split("; changes of this word").next().unwrap_or(message);
    let words = message.split_whitespace();
    let mut told = String::new();
    for word in words {
        if told.len() + word.len() > 100 {
            told.push_str(" ...");
            break;
        }
        if !told.is_empty() {
            told.push(' ');
        }
        told.push_str(&word.replace('|', "/"));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_torture_says_is_found_in_its_output() {
        let text = "torture: 20 s, first seed 1\nscene: Steady 1\nscene: Cuts 2\n\
                    torture: class Cuts, seed 2\nfile: read saw 7\nagain: ...\n";
        let (class, seed, message) = judge_output(text, "exit status: 1");
        assert_eq!((class.as_str(), seed.as_str()), ("Cuts", "2"));
        assert_eq!(message, "file: read saw 7");
    }

    #[test]
    fn a_signal_a_panic_and_a_hang_are_told_as_such() {
        let told = |text: &str| judge_output(text, "signal: 7 (SIGBUS)").2;
        assert_eq!(told("scene: Maps 2\n"), "signal: 7 (SIGBUS)");
        assert_eq!(
            told("scene: Maps 2\nthread 'x' panicked at y:\nno such page\n"),
            "panics: no such page"
        );
        let hung = "torture: class maps, seed 1: hangs in the last sync: no progress for 60s\n";
        assert_eq!(told(hung), "hangs in the last sync");
    }
}
