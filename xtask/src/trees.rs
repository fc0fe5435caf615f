//! `cargo x compare-trees OLD NEW`: all benchmarks of two trees, and the rows that changed.
//!
//! Called by `main`. A tree is a commit or a folder; `TREE+COMMIT` is the library of one with the
//! benchmarks of another. Each is built for release below `target/trees`; the program of a commit
//! is kept there. In each of several rounds every benchmark runs once for each tree, one run right
//! after the other, alternately the old one and the new one first.
//! [`bifolio_report::compare_rounds`] judges.
//!
//! ```text
//! target/trees/tree-COMMIT        work tree of git, removed after the build
//!              build              cargo's folder, shared: dependencies are built once
//!              programs/NAME      the program of a tree
//!              reports/OLD..NEW   a report for each round, benchmark and tree
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use bifolio_report::{Report, Round};

use crate::cargo::{self, target_folder, workspace_root};
use crate::process;

/// Crates that a benchmark consists of.
const BENCHMARKS: [&str; 3] =
    ["crates/bifolio-bench", "crates/bifolio-cli", "crates/bifolio-report"];

/// Options of `cargo x compare-trees`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The tree before the change: a commit, a folder, or `TREE+COMMIT`, a tree with the benchmarks
    /// of a commit.
    old: String,
    /// The tree after the change.
    new: String,
    /// Only these benchmarks.
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Number of rounds.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Changes of less are none, percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0)]
    at_least: f64,
    /// How thorough each run is: smoke, quick or full.
    #[arg(long, default_value = "quick")]
    set: String,
    /// Also show what earlier runs measured of the same trees, in other benchmarks: for a run in
    /// pieces.
    #[arg(long)]
    add: bool,
    /// Only build.
    #[arg(long)]
    build: bool,
}

/// A tree, built.
#[derive(Debug)]
struct Tree {
    /// Name in the table and of files.
    name: String,
    program: PathBuf,
}

/// Builds both trees, runs the benchmarks, and prints what changed; fails if a row is worse.
pub fn run(arguments: &Arguments) -> Result<()> {
    let trees = [&arguments.old, &arguments.new].map(|tree| Tree::build(tree));
    let [old, new] = trees;
    let trees = [old?, new?];
    ensure!(trees[0].name != trees[1].name, "both trees are called {}", trees[0].name);
    if arguments.build {
        return Ok(());
    }
    let folder = folder().join("reports").join(format!("{}..{}", trees[0].name, trees[1].name));
    fs::create_dir_all(&folder)?;
    let benches = chosen(&trees, &arguments.only)?;
    let begun = Instant::now();
    forget(&folder, |bench| !arguments.add || benches.contains_key(bench))?;
    let mut failed = 0;
    for round in 0..arguments.rounds as usize {
        for (bench, has) in &benches {
            // The second run of a round would otherwise always be that of the same tree.
            for number in [round % 2, 1 - round % 2] {
                let tree = &trees[number];
                let path = report_path(&folder, bench, tree, round);
                if has[number] && !tree.measure(bench, &arguments.set, &path)? {
                    failed += 1;
                }
            }
            eprintln!("round {}, {bench}: {:.0} s", round + 1, begun.elapsed().as_secs_f64());
        }
    }
    let rounds = read(&folder, &trees)?;
    let names = trees.each_ref().map(|tree| tree.name.as_str());
    let found = bifolio_report::compare_rounds(names, &rounds, arguments.at_least / 100.0);
    println!("cargo x compare-trees {} {}", names[0], names[1]);
    println!("{}", found.text.trim_end());
    ensure!(failed == 0, "{failed} runs left no report");
    ensure!(found.worse == 0, "{} rows are worse beyond noise", found.worse);
    Ok(())
}

/// Folder of trees, programs and reports.
fn folder() -> PathBuf {
    target_folder().join("trees")
}

fn report_path(folder: &Path, bench: &str, tree: &Tree, round: usize) -> PathBuf {
    folder.join(format!("{round},{bench},{}", tree.name))
}

/// Returns the benchmarks of the trees that are asked for, and which tree has each.
fn chosen(trees: &[Tree; 2], only: &[String]) -> Result<BTreeMap<String, [bool; 2]>> {
    let mut benches: BTreeMap<String, [bool; 2]> = BTreeMap::new();
    for (number, tree) in trees.iter().enumerate() {
        let listed = process::output(Command::new(&tree.program).args(["bench", "--list"]))?;
        for name in listed.lines().filter_map(|line| line.split_whitespace().next()) {
            benches.entry(name.to_owned()).or_default()[number] = true;
        }
    }
    for name in only {
        ensure!(benches.contains_key(name), "no benchmark of these trees is called `{name}`");
    }
    benches.retain(|name, _| only.is_empty() || only.contains(name));
    Ok(benches)
}

/// Removes reports of benchmarks that are to be measured again, or are not shown.
fn forget(folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_wanted(name.split(',').nth(1).unwrap_or_default()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Reads all reports, sorted into rounds.
fn read(folder: &Path, trees: &[Tree; 2]) -> Result<Vec<Round>> {
    let mut rounds: BTreeMap<String, Round> = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut parts = name.splitn(3, ',');
        let round = parts.next().unwrap_or_default().to_owned();
        let tree = parts.nth(1).unwrap_or_default();
        let number = usize::from(tree == trees[1].name);
        let reports =
            Report::read_lines(&fs::read_to_string(&path)?).map_err(|(line, error)| {
                anyhow!("{}, line {line}: not a report: {error}", path.display())
            })?;
        rounds.entry(round).or_default()[number].extend(reports);
    }
    Ok(rounds.into_values().collect())
}

impl Tree {
    /// Builds a tree of the command line: a folder with a workspace, or a commit.
    fn build(text: &str) -> Result<Self> {
        let (library, benchmarks) = match text.split_once('+') {
            Some((library, benchmarks)) => (library, Some(benchmarks)),
            None => (text, None),
        };
        let path = Path::new(library);
        if path.join("Cargo.toml").is_file() {
            ensure!(
                benchmarks.is_none(),
                "{library} is a folder: benchmarks of another tree need a commit"
            );
            let path = path.canonicalize()?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let program = build_in(&path)?;
            return Self { program, name }.kept();
        }
        let commit = commit_of(library)?;
        let benchmarks = benchmarks.map(commit_of).transpose()?;
        let name = match &benchmarks {
            Some(benchmarks) => format!("{commit}+{benchmarks}"),
            None => commit.clone(),
        };
        let program = folder().join("programs").join(&name);
        if !program.is_file() {
            let tree = folder().join(format!("tree-{name}"));
            if tree.exists() {
                // Of a run that was interrupted.
                git(&["worktree", "remove", "--force", &tree.to_string_lossy()])?;
            }
            git(&["worktree", "add", "--force", "--detach", &tree.to_string_lossy(), &commit])?;
            let built = benchmarks
                .map_or(Ok(()), |benchmarks| use_benchmarks(&tree, &benchmarks))
                .and_then(|()| build_in(&tree))
                .and_then(|built| Self { program: built, name: name.clone() }.kept());
            git(&["worktree", "remove", "--force", &tree.to_string_lossy()])?;
            built.with_context(|| format!("the build of {name}"))?;
        }
        Ok(Self { name, program })
    }

    /// Copies the program to where it stays.
    fn kept(self) -> Result<Self> {
        let program = folder().join("programs").join(&self.name);
        fs::create_dir_all(folder().join("programs"))?;
        fs::copy(&self.program, &program)?;
        Ok(Self { program, ..self })
    }

    /// Runs a benchmark; its report goes to `path`. Returns `false` if there is none.
    fn measure(&self, bench: &str, set: &str, path: &Path) -> Result<bool> {
        let mut command = Command::new(&self.program);
        command.args(["bench", bench, "--set", set, "--json"]).arg(path);
        let output = command.output().context("cannot start the program")?;
        // The report is written even if one of its series failed.
        if !output.status.success() {
            let told = String::from_utf8_lossy(&output.stderr);
            eprintln!("{}: {bench}: {}: {}", self.name, output.status, told.trim_end());
        }
        Ok(fs::metadata(path).is_ok_and(|file| file.len() > 0))
    }
}

/// Builds the program of a tree; returns its path.
fn build_in(tree: &Path) -> Result<PathBuf> {
    let target = folder().join("build");
    let mut command = Command::new(cargo::program());
    command.args(["build", "--release", "-p", "bifolio-cli", "--target-dir"]).arg(&target);
    command.current_dir(tree).env_remove("CARGO_MANIFEST_DIR");
    process::run(&mut command)?;
    Ok(target.join("release/bifolio"))
}

/// Replaces the benchmarks of a work tree by those of a commit.
fn use_benchmarks(tree: &Path, commit: &str) -> Result<()> {
    let run = |arguments: &[&str]| {
        process::run(Command::new("git").args(arguments).args(BENCHMARKS).current_dir(tree))
    };
    run(&["rm", "-r", "--quiet", "--force", "--ignore-unmatch", "--"])?;
    // A crate that the commit does not have stays gone.
    let listed = process::output(
        Command::new("git")
            .args(["ls-tree", "--name-only", commit])
            .args(BENCHMARKS)
            .current_dir(tree),
    )?;
    let known: Vec<&str> = listed.lines().collect();
    process::run(Command::new("git").args(["checkout", commit, "--"]).args(known).current_dir(tree))
}

/// Returns the short name of a commit.
fn commit_of(name: &str) -> Result<String> {
    let commit = format!("{name}^{{commit}}");
    let mut command = Command::new("git");
    command.args(["rev-parse", "--short=10", "--verify", "--quiet", &commit]);
    let output = process::output(command.current_dir(workspace_root()))
        .with_context(|| format!("`{name}` is neither a folder with a workspace nor a commit"))?;
    Ok(output.trim().to_owned())
}

fn git(arguments: &[&str]) -> Result<()> {
    process::run(Command::new("git").args(arguments).current_dir(workspace_root()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed with the test.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn reports_are_sorted_by_round_and_tree_and_old_ones_are_forgotten() {
        let path = std::env::temp_dir().join(format!("compare-trees-{}", std::process::id()));
        let folder = Folder(path);
        fs::create_dir_all(&folder.0).unwrap();
        let tree = |name: &str| Tree { name: name.to_owned(), program: PathBuf::new() };
        let trees = [tree("1a"), tree("2b+1a")];
        for (round, bench, number) in
            [(0, "scan", 0), (0, "scan", 1), (1, "scan", 1), (1, "gone", 0)]
        {
            let path = report_path(&folder.0, bench, &trees[number], round);
            let report = format!(r#"{{"schema":1,"bench":"{bench}","host":{{}},"config":null,"#);
            fs::write(path, format!("{report}\"rows\":[]}}\n")).unwrap();
        }
        let found = || -> Vec<[Vec<String>; 2]> {
            let benches =
                |reports: &Vec<Report>| reports.iter().map(|it| it.bench.to_string()).collect();
            let rounds = read(&folder.0, &trees).unwrap();
            rounds.iter().map(|round| round.each_ref().map(benches)).collect()
        };
        let scan = || vec!["scan".to_owned()];
        assert_eq!(found(), [[scan(), scan()], [vec!["gone".to_owned()], scan()]]);
        forget(&folder.0, |bench| bench == "gone").unwrap();
        assert_eq!(found(), [[scan(), scan()], [vec![], scan()]]);
    }
}
