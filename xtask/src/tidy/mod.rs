//! `cargo x tidy`: the part of the project's style that a program can check.
//!
//! Where it stands: a step of [`crate::step`]. It walks the folders of `ROOTS`, reads each Rust
//! file into a [`Source`] and hands it to every rule of `RULES`. A rule is a pure function from a
//! source to findings, and is tested on text that it must flag and text that it must not.
//!
//! | file | rules |
//! |---|---|
//! | `rules` | head, columns, ascii, leftover, file-name, length, unsafe, seqcst, ordering |
//! | `layers` | layers |
//! | `prose` | prose-start, prose-person, prose-word |
//!
//! Beside that, every mutant of the torture tool must still apply to the sources.
//!
//! It does not look at what rustfmt, rustc or clippy check already.

mod layers;
mod prose;
mod rules;
pub mod source;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use walkdir::WalkDir;

use crate::cargo::workspace_root;
use source::Source;

/// The folders and files that are checked.
const ROOTS: [&str; 8] = [
    "crates",
    "doors/bifolio-redb",
    "doors/engine-bench",
    "xtask",
    "docs",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
];

const RULES: [fn(&Source) -> Vec<Finding>; 8] = [
    rules::head,
    rules::characters,
    rules::leftover,
    rules::file_name,
    rules::length,
    rules::danger,
    rules::orderings,
    layers::layers,
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

/// Options of `cargo x tidy`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Print every prose hit in files whose path starts with PATH, pending or not, and stop.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "")]
    prose: Option<String>,
    /// Lower the counts in xtask/prose_pending.txt to what the files have now.
    #[arg(long)]
    update_prose: bool,
}

/// Checks the workspace, prints every finding, and fails when there is one.
pub fn run(arguments: &Arguments) -> Result<()> {
    let root = workspace_root();
    let texts = texts(&root)?;
    ensure!(!texts.is_empty(), "no file to check in {}", root.display());
    if let Some(prefix) = &arguments.prose {
        let wanted = texts.iter().filter(|(path, _)| path.starts_with(prefix.as_str()));
        let hits: Vec<Finding> = wanted.flat_map(|(path, text)| check(path, text).1).collect();
        hits.iter().for_each(|hit| println!("{hit}"));
        eprintln!("{} hits", hits.len());
        return Ok(());
    }
    let pending = prose::Pending::read(&root)?;
    let (mut findings, mut hits) = (Vec::new(), BTreeMap::new());
    for (path, text) in &texts {
        let (found, of_prose) = check(path, text);
        findings.extend(found);
        hits.insert(path.clone(), of_prose);
    }
    let (found, now) = pending.judge(&hits);
    findings.extend(found);
    findings.iter().for_each(|finding| println!("{finding}"));
    let mutants = crate::mutants::check(&root)?;
    crate::house::check_paths(&root)?;
    let (files, rules) = (texts.len(), RULES.len());
    eprintln!("{files} files, {rules} rules, {} findings; {mutants} mutants apply", findings.len());
    let left: usize = now.0.values().sum();
    eprintln!("prose: {left} hits are left in {} files", now.0.len());
    if arguments.update_prose {
        now.write(&root)?;
    } else if now != pending {
        eprintln!("prose: `cargo x tidy --update-prose` lowers the counts");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

/// The files to check, by their paths from the root: Rust files and documents.
fn texts(root: &Path) -> Result<Vec<(String, String)>> {
    let mut texts = Vec::new();
    for name in ROOTS {
        for entry in WalkDir::new(root.join(name)).sort_by_file_name() {
            let path = entry?.into_path();
            if !path.extension().is_some_and(|it| it == "rs" || it == "md") {
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
    let rust = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
    Ok(rust.filter_map(|(path, text)| Source::new(path, text).ok()).collect())
}

/// All findings in one file, in the order of its lines, and its prose hits.
fn check(path: &str, text: &str) -> (Vec<Finding>, Vec<Finding>) {
    if !path.ends_with(".rs") {
        return (Vec::new(), prose::in_document(path, text));
    }
    let source = match Source::new(path, text) {
        Ok(source) => source,
        Err(finding) => return (vec![finding], Vec::new()),
    };
    let mut findings: Vec<Finding> = RULES.iter().flat_map(|rule| rule(&source)).collect();
    findings.sort();
    findings.dedup();
    (findings, prose::in_source(&source))
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
            check("crates/bifolio/src/io/disk.rs", text).0.iter().map(|found| found.rule).collect()
        };
        assert_eq!(rules(&text), ["tokens"]);
        assert_eq!(rules(&format!("{text}}}\n")), ["columns", "ascii"]);
    }
}
