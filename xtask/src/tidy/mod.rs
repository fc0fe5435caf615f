//! `cargo x tidy`: the part of the project's style that a program can check.
//!
//! A step of [`crate::step`]. It reads each Rust file in the folders of `ROOTS` into a [`Source`]
//! and passes it to every rule of `RULES`. A rule is a pure function from a source to findings,
//! tested with text that it must flag and text that it must not.
//!
//! | file | rules |
//! |---|---|
//! | `rules` | head, columns, ascii, leftover, file-name, length, unsafe, seqcst, ordering |
//! | `descriptors` | descriptor |
//! | `layers` | layers |
//! | `prose` | prose-start |
//! | `steps` | steps, over all files together |
//!
//! It also checks that every mutant of the torture tool still applies to the sources.
//!
//! It does not check what rustfmt, rustc or clippy check.

mod descriptors;
pub mod layers;
mod prose;
mod rules;
pub mod source;
mod steps;

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use walkdir::WalkDir;

use crate::cargo::workspace_root;
use source::Source;

/// The folders that are checked.
const ROOTS: [&str; 9] = [
    "crates",
    "doors/bifolio-capi",
    "doors/bifolio-mount",
    "doors/bifolio-python",
    "doors/bifolio-redb",
    "doors/bifolio-sqlite",
    "doors/bifolio-tantivy",
    "doors/engine-bench",
    "xtask",
];

const RULES: [fn(&Source) -> Vec<Finding>; 10] = [
    rules::head,
    rules::characters,
    rules::leftover,
    rules::file_name,
    rules::length,
    rules::danger,
    rules::orderings,
    descriptors::descriptors,
    layers::layers,
    prose::doc_starts,
];

/// A violation of a rule.
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
    let texts = texts(&root)?;
    ensure!(!texts.is_empty(), "no file to check in {}", root.display());
    let (mut findings, mut sources) = (Vec::new(), Vec::new());
    for (path, text) in &texts {
        let (found, source) = check(path, text);
        findings.extend(found);
        sources.extend(source);
    }
    findings.extend(steps::steps(&sources.iter().collect::<Vec<_>>()));
    findings.iter().for_each(|finding| println!("{finding}"));
    let mutants = crate::mutants::check(&root)?;
    eprintln!("{} files, {} findings; {mutants} mutants apply", texts.len(), findings.len());
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

/// The Rust files to check, by their paths from the root.
fn texts(root: &Path) -> Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for name in ROOTS {
        for entry in WalkDir::new(root.join(name)).sort_by_file_name() {
            let path = entry?.into_path();
            if path.extension().is_none_or(|it| it != "rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let relative = path.strip_prefix(root).unwrap_or(&path);
            texts.push((relative.to_string_lossy().into_owned(), text));
        }
    }
    Ok(texts)
}

/// The Rust files of the workspace that can be read as such.
pub fn sources() -> Result<Vec<Source>> {
    let texts = texts(&workspace_root())?;
    Ok(texts.iter().filter_map(|(path, text)| Source::new(path, text).ok()).collect())
}

/// Returns all findings in one file, in the order of its lines, and the file if it is readable.
fn check(path: &str, text: &str) -> (Vec<Finding>, Option<Source>) {
    let source = match Source::new(path, text) {
        Ok(source) => source,
        Err(finding) => return (vec![finding], None),
    };
    let mut findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(&source)).collect();
    findings.sort();
    findings.dedup();
    (findings, Some(source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_prints_as_path_line_rule_message() {
        let (findings, _) = check("crates/bifolio/src/io/disk.rs", "fn read() {}\n");
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
            let (findings, _) = check("crates/bifolio/src/io/disk.rs", text);
            findings.iter().map(|found| found.rule).collect()
        };
        assert_eq!(rules(&text), ["tokens"]);
        assert_eq!(rules(&format!("{text}}}\n")), ["columns", "ascii"]);
    }
}
