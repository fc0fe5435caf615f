//! A mutant: a small change of the library that breaks it, in a file of the torture tool.
//!
//! ```text
//! breaks: <one line: what goes wrong>
//! was: <optional: the defect of an earlier version that this brings back, in a few words>
//! loom: <optional: the loom tests of that protocol, which it passes>
//! class: <optional: the only class of scenes that makes sense>
//! missed: <optional: why torture does not find it>
//! test: <optional: arguments of `cargo test -p bifolio` for a test that fails with it, or
//!       `loom NAME`, all on one line>
//!
//! file: crates/bifolio/src/...
//! <<<<
//! text that stands there exactly once
//! ====
//! text that takes its place
//! >>>>
//! ```
//!
//! There may be several changes, each with its `file:`. A text that is not found exactly once is an
//! error, so a change of the source that a mutant does not survive is noticed (`cargo x tidy`).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Folder of the mutants, from the root of the workspace.
pub const FOLDER: &str = "crates/bifolio-torture/mutants";

/// A mutant: its description, and the changes of sources that make it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Mutant {
    pub name: String,
    pub breaks: String,
    pub was: Option<String>,
    pub loom: Option<String>,
    pub class: Option<String>,
    pub missed: Option<String>,
    pub test: Option<String>,
    pub changes: Vec<Change>,
}

/// A text of a file, and its replacement.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub path: String,
    pub old: String,
    pub new: String,
}

impl Change {
    /// Returns `text` with the change applied.
    pub fn apply(&self, text: &str) -> Result<String> {
        let found = text.matches(&self.old).count();
        ensure!(found == 1, "{} has the old text {found} times, not once", self.path);
        Ok(text.replacen(&self.old, &self.new, 1))
    }
}

impl Mutant {
    /// Reads the text of a file.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let mut mutant = Self { name: name.to_owned(), ..Self::default() };
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if line.trim().is_empty() {
                continue;
            }
            let (key, value) = line.split_once(": ").with_context(|| format!("`{line}`?"))?;
            let value = value.trim().to_owned();
            match key {
                "breaks" => mutant.breaks = value,
                "was" => mutant.was = Some(value),
                "loom" => mutant.loom = Some(value),
                "class" => mutant.class = Some(value),
                "missed" => mutant.missed = Some(value),
                "test" => mutant.test = Some(value),
                "file" => mutant.changes.push(read_change(value, &mut lines)?),
                _ => bail!("`{key}` means nothing"),
            }
        }
        ensure!(!mutant.breaks.is_empty(), "it does not say what it breaks");
        ensure!(!mutant.changes.is_empty(), "it changes nothing");
        Ok(mutant)
    }

    /// The changed files below `root`: paths and texts.
    pub fn apply(&self, root: &Path) -> Result<Vec<(PathBuf, String)>> {
        let mut changed: Vec<(PathBuf, String)> = Vec::new();
        for change in &self.changes {
            let path = root.join(&change.path);
            let before = match changed.iter().position(|(other, _)| *other == path) {
                Some(at) => changed.swap_remove(at).1,
                None => std::fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", change.path))?,
            };
            changed.push((path, change.apply(&before)?));
        }
        Ok(changed)
    }
}

fn read_change<'a>(path: String, lines: &mut impl Iterator<Item = &'a str>) -> Result<Change> {
    ensure!(lines.next() == Some("<<<<"), "{path}: no `<<<<` after it");
    let mut part = |end: &str| -> Result<String> {
        let mut text = String::new();
        for line in lines.by_ref() {
            if line == end {
                return Ok(text);
            }
            text.push_str(line);
            text.push('\n');
        }
        bail!("{path}: no `{end}`")
    };
    let (old, new) = (part("====")?, part(">>>>")?);
    ensure!(old != new && !old.is_empty(), "{path}: nothing is changed");
    Ok(Change { path, old, new })
}

/// All mutants of the workspace at `root`, sorted by name.
pub fn all(root: &Path) -> Result<Vec<Mutant>> {
    let folder = root.join(FOLDER);
    let mut mutants = Vec::new();
    let entries = std::fs::read_dir(&folder).with_context(|| format!("cannot list {FOLDER}"))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "mutant") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path)?;
        mutants.push(Mutant::parse(&name, &text).with_context(|| format!("mutant {name}"))?);
    }
    mutants.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(mutants)
}

/// Checks that every mutant still applies to the sources; returns their number.
pub fn check(root: &Path) -> Result<usize> {
    let mutants = all(root)?;
    let mut errors = Vec::new();
    for mutant in &mutants {
        if let Err(error) = mutant.apply(root) {
            errors.push(format!("{FOLDER}/{}.mutant: {error:#}", mutant.name));
        }
    }
    ensure!(errors.is_empty(), "mutants that do not apply:\n{}", errors.join("\n"));
    Ok(mutants.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "breaks: reads\nclass: Cuts\n\nfile: a.rs\n<<<<\nlet a = 1;\n====\n\
                        let a = 2;\n>>>>\n";

    #[test]
    fn a_mutant_is_read_and_applied() {
        let mutant = Mutant::parse("reads", TEXT).unwrap();
        assert_eq!(mutant.class.as_deref(), Some("Cuts"));
        assert_eq!(mutant.changes[0].apply("x\nlet a = 1;\n").unwrap(), "x\nlet a = 2;\n");
    }

    #[test]
    fn a_text_that_is_not_there_once_is_an_error() {
        let mutant = Mutant::parse("reads", TEXT).unwrap();
        for text in ["", "let a = 1;\nlet a = 1;\n"] {
            let error = mutant.changes[0].apply(text).unwrap_err().to_string();
            assert!(error.starts_with("a.rs has the old text"), "{error}");
        }
    }

    #[test]
    fn a_mutant_that_says_or_changes_nothing_is_refused() {
        for text in ["", "breaks: x\n", "file: a\n<<<<\nb\n====\nc\n>>>>\n", "nonsense: 1\n"] {
            assert!(Mutant::parse("x", text).is_err(), "{text}");
        }
    }
}
