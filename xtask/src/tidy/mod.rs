//! `cargo x tidy`: the part of the project's style that a program can check.
//!
//! Where it stands: a step of [`crate::step`]. It walks the folders of `ROOTS`, reads each Rust
//! file into a [`Source`] and hands it to every rule of `RULES`. A rule is a pure function from a
//! source to findings, and is tested on text that it must flag and text that it must not.
//!
//! | file | rules |
//! |---|---|
//! | `text` | head, ascii, columns, leftover, file-name |
//! | `length` | file-length, function-length |
//! | `layers` | layers |
//! | `orderings` | seqcst, ordering |
//! | `danger` | unsafe |
//!
//! Beside that, every mutant of the torture tool must still apply to the sources.
//!
//! It does not look at what rustfmt, rustc or clippy check already.

mod danger;
mod layers;
mod length;
mod orderings;
pub mod source;
mod text;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use walkdir::WalkDir;

use crate::cargo::workspace_root;
use source::Source;

/// The folders whose Rust files are checked; `*` stands for each folder at its place.
const ROOTS: [&str; 3] = ["crates/*/src", "crates/*/tests", "xtask/src"];

const RULES: [fn(&Source) -> Vec<Finding>; 11] = [
    text::head,
    text::ascii,
    text::columns,
    text::leftover,
    text::file_name,
    length::file,
    length::function,
    layers::layers,
    orderings::seqcst,
    orderings::ordering,
    danger::danger,
];

/// One place that breaks one rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: String,
    line: usize,
    rule: &'static str,
    message: String,
}

impl Finding {
    fn new(source: &Source, line: usize, rule: &'static str, message: String) -> Self {
        Self { path: source.path().to_owned(), line, rule, message }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}: {}", self.path, self.line, self.rule, self.message)
    }
}

/// Checks the workspace, prints every finding, and fails when there is one.
pub fn run() -> Result<()> {
    let root = workspace_root();
    let paths = rust_files(&root)?;
    ensure!(!paths.is_empty(), "no Rust file under {} in {}", ROOTS.join(", "), root.display());
    let mut findings = Vec::new();
    for path in &paths {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let relative = path.strip_prefix(&root).unwrap_or(path);
        findings.extend(check(&relative.to_string_lossy().replace('\\', "/"), &text));
    }
    for finding in &findings {
        println!("{finding}");
    }
    let mutants = crate::mutants::check(&root)?;
    let (files, rules) = (paths.len(), RULES.len());
    eprintln!("{files} files, {rules} rules, {} findings; {mutants} mutants apply", findings.len());
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

/// The Rust files of the workspace that can be read as such.
pub fn sources() -> Result<Vec<Source>> {
    let root = workspace_root();
    let read = |path: PathBuf| -> Result<Option<Source>> {
        let relative = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
        Ok(Source::new(&relative, &std::fs::read_to_string(&path)?).ok())
    };
    rust_files(&root)?.into_iter().filter_map(|path| read(path).transpose()).collect()
}

/// All findings in one file, in the order of its lines.
fn check(path: &str, text: &str) -> Vec<Finding> {
    let source = match Source::new(path, text) {
        Ok(source) => source,
        Err(finding) => return vec![finding],
    };
    let mut findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(&source)).collect();
    findings.sort();
    findings.dedup();
    findings
}

/// The Rust files of `ROOTS`, sorted.
fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for folder in folders(root)? {
        for entry in WalkDir::new(folder) {
            let path = entry?.into_path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The folders that `ROOTS` names and that exist.
fn folders(root: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for pattern in ROOTS {
        match pattern.split_once("/*/") {
            None => folders.push(root.join(pattern)),
            Some((parent, below)) => {
                let parent = root.join(parent);
                let entries = std::fs::read_dir(&parent)
                    .with_context(|| format!("cannot list {}", parent.display()))?;
                for entry in entries {
                    folders.push(entry?.path().join(below));
                }
            }
        }
    }
    folders.retain(|folder| folder.is_dir());
    Ok(folders)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_prints_as_path_line_rule_message() {
        let findings = check("crates/bifolio/src/io/disk.rs", "fn read() {}\n");
        let printed: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert_eq!(printed.len(), 1);
        assert!(
            printed[0].starts_with("crates/bifolio/src/io/disk.rs:1: head: "),
            "{}",
            printed[0]
        );
    }

    #[test]
    fn all_findings_of_a_file_are_reported_in_order() {
        let text = format!("//! A head.\n// {}\n// {}\nfn f() {{\n", "a".repeat(100), "\u{e9}");
        let rules = |text: &str| -> Vec<&str> {
            check("crates/bifolio/src/io/disk.rs", text).iter().map(|found| found.rule).collect()
        };
        assert_eq!(rules(&text), ["tokens"]);
        assert_eq!(rules(&format!("{text}}}\n")), ["columns", "ascii"]);
    }

    #[test]
    fn this_program_is_among_the_files_checked() {
        let root = workspace_root();
        let files = rust_files(&root).unwrap();
        assert!(files.contains(&root.join("xtask/src/tidy/mod.rs")));
        assert!(files.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
