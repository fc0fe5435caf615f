//! `cargo x house`: the measures of the house, counted: how much there is, and how far it is from
//! what it is to be.
//!
//! Where it stands: a task of `main`. It reads the sources as [`crate::tidy`] does and prints one
//! line a measure. It fails for nothing: a goal that is not reached yet is no error.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::tidy::source::{Source, Token};
use crate::tidy::sources;

/// Files that may ask which kind of store or of pages a file has: the seams, what the API says of a
/// file, and what exists for maps alone.
const SEAMS: [&str; 6] = [
    "writeback/store.rs",
    "memory/page_space.rs",
    "file/mod.rs",
    "file/map.rs",
    "file/faults/",
    "reclaim/unmap",
];

/// Calls that ask it.
const QUESTIONS: [&str; 3] = ["is_memory_file", "is_region_page", "region"];

/// A short file is one that a reader opens for little.
const SHORT_FILE_LINES: usize = 60;

const TEST_NAME_MAX: usize = 60;

/// One measure: what is counted, how much it is, and how much it may be.
struct Measure {
    name: &'static str,
    count: usize,
    goal: usize,
}

/// Counts, and prints a table.
pub fn run() -> Result<()> {
    let sources = sources()?;
    println!("{:56} {:>8} {:>8}", "", "now", "goal");
    for Measure { name, count, goal } in measures(&sources) {
        println!("{name:56} {count:>8} {goal:>8}");
    }
    println!("\ntypes with inherent impl blocks in more than two files:");
    for (name, files) in scattered(&sources) {
        println!("  {name:54} {files:>8}");
    }
    Ok(())
}

fn measures(sources: &[Source]) -> Vec<Measure> {
    let lines = |path: &str| -> usize {
        let files = sources.iter().filter(|source| source.path().starts_with(path));
        files.map(|source| source.lines().count()).sum()
    };
    let library: Vec<&Source> = sources.iter().filter(|source| is_library(source)).collect();
    let of_library = |count: fn(&Source) -> usize| library.iter().copied().map(count).sum();
    let measure = |name, count, goal| Measure { name, count, goal };
    vec![
        measure("lines of the library, without its tests", of_library(lines_without_tests), 22_000),
        measure("files of the library, without its tests", library.len(), 90),
        measure(
            "files of it under 60 lines",
            of_library(|source| usize::from(is_short(source))),
            0,
        ),
        measure("lines of the benchmarks", lines("crates/bifolio-bench/src"), 7_000),
        measure("lines of xtask", lines("xtask/src"), 1_000),
        measure("questions of kind outside the seams", of_library(questions), 0),
        measure("places that the feature `ablation` changes", of_library(ablations), 15),
        measure("types with impl blocks in more than two files", scattered(sources).len(), 6),
        measure(
            "test names of more than 60 characters",
            sources.iter().map(long_test_names).sum(),
            0,
        ),
    ]
}

fn is_library(source: &Source) -> bool {
    source.library_path().is_some() && !source.is_test_file()
}

fn lines_without_tests(source: &Source) -> usize {
    source.lines().filter(|(number, _)| !source.is_test_line(*number)).count()
}

fn is_short(source: &Source) -> bool {
    source.lines().count() < SHORT_FILE_LINES
}

/// Calls without arguments that ask for the kind, outside the seams.
fn questions(source: &Source) -> usize {
    let path = source.library_path().unwrap_or_default();
    if SEAMS.iter().any(|seam| path.starts_with(seam)) {
        return 0;
    }
    let texts =
        |window: &[Token]| window.iter().map(|token| token.text.clone()).collect::<Vec<_>>();
    let calls = source.tokens().windows(3).filter(|window| !source.is_test_line(window[0].line));
    calls.filter(|window| is_question(&texts(window))).count()
}

fn is_question(words: &[String]) -> bool {
    words[0] == "." && QUESTIONS.contains(&words[1].as_str()) && words[2] == "("
}

fn ablations(source: &Source) -> usize {
    source.lines().filter(|(_, line)| line.contains("feature = \"ablation\"")).count()
}

fn long_test_names(source: &Source) -> usize {
    let words: Vec<&str> = source.tokens().iter().map(|token| token.text.as_str()).collect();
    let is_long = |found: &&[&str]| found[..4] == ["test", "]", "fn", found[3]];
    words.windows(4).filter(is_long).filter(|found| found[3].len() > TEST_NAME_MAX).count()
}

/// Types of the library with inherent impl blocks in more than two files, and in how many.
fn scattered(sources: &[Source]) -> Vec<(String, usize)> {
    let mut files: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for source in sources.iter().filter(|source| is_library(source)) {
        for (_, line) in source.lines().filter(|(number, _)| !source.is_test_line(*number)) {
            if let Some(name) = implemented(line) {
                files.entry(name.to_owned()).or_default().insert(source.path());
            }
        }
    }
    let counts = files.into_iter().map(|(name, files)| (name, files.len()));
    let mut scattered: Vec<_> = counts.filter(|(_, files)| *files > 2).collect();
    scattered.sort_by_key(|(_, files)| std::cmp::Reverse(*files));
    scattered
}

/// The type of an inherent `impl` block that begins on this line.
fn implemented(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(parameters) => parameters.split_once("> ")?.1,
        None => rest.strip_prefix(' ')?,
    };
    let name = rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()?;
    (!rest.contains(" for ") && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::new("crates/bifolio/src/file/read.rs", text).unwrap()
    }

    #[test]
    fn inherent_impl_blocks_are_told_from_those_of_traits() {
        assert_eq!(implemented("impl File {"), Some("File"));
        assert_eq!(implemented("impl<'a> WriteBatch<'a> {"), Some("WriteBatch"));
        assert_eq!(implemented("impl Drop for File {"), None);
        assert_eq!(implemented("    impl File {"), None);
    }

    #[test]
    fn questions_of_kind_are_calls_outside_tests() {
        let text = "fn f() { if a.is_memory_file() { b.region(); c.region = 1; } }\n\
                    #[cfg(test)]\nmod tests { fn g() { a.region(); } }\n";
        assert_eq!(questions(&source(text)), 2);
    }

    #[test]
    fn long_names_of_tests_are_counted() {
        let name = "a".repeat(61);
        let text = format!("#[test]\nfn {name}() {{}}\n#[test]\nfn short() {{}}\n");
        assert_eq!(long_test_names(&source(&text)), 1);
    }
}
