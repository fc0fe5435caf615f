//! `cargo x house`: structural metrics of the tree beside their records and their goals.
//!
//! A step of [`crate::step`]. It reads the sources as [`crate::tidy`] does and prints one line for
//! each metric. A missed goal is no error. But the figures that `xtask/house.txt` records may only
//! fall: one above its record and its goal fails the step, and `--write` lowers the records.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::cargo::workspace_root;
use crate::tidy::source::{Source, Token};
use crate::tidy::sources;

/// Files that may ask which kind of store or page space a file has: the seams, the public
/// description of a file, and code for maps only.
const SEAMS: [&str; 4] = ["inode/store", "memory/mod.rs", "file/mod.rs", "maps/"];

/// Files that exist for maps only. The core is the rest of the library.
const MAPS: [&str; 1] = ["maps/"];

/// Files of the plain fill, scan, write-out and sync.
const PLAIN: [&str; 5] = [
    "fill/claim.rs",
    "fill/transfer.rs",
    "reclaim/scan.rs",
    "writeback/batch.rs",
    "writeback/sync.rs",
];

/// Optional features, and the words in names of the code that mention them.
const FEATURES: [(&str, &[&str]); 4] = [
    ("maps", &["mapped", "region", "regions", "staging", "stored", "tracked", "unmap", "unmapped"]),
    ("gates", &["gate", "gated", "gates", "lsn", "lsns"]),
    ("punches", &["cleared", "clearing", "punch", "punched"]),
    ("swap", &["slot", "slots", "swap", "swapped", "swapper"]),
];

/// Calls that ask for the kind of a file, directly or by a consequence.
const QUESTIONS: [&str; 10] = [
    "cleaner",
    "is_in_place",
    "is_memory_file",
    "is_region_page",
    "keeps_values",
    "outlives_handles",
    "region",
    "staging",
    "tracked",
    "zeroes_what_is_cut",
];

/// Files below this length are counted as short.
const SHORT_FILE_LINES: usize = 60;

/// Files on the path of each operation, in sections.
const PATHS: &str = "xtask/paths.txt";
/// Sections, and the goal for the number of their files.
const SECTIONS: [(&str, usize); 4] =
    [("hit", 7), ("miss", 20), ("write-out", 24), ("mapped-eviction", 38)];

/// Figures that may only fall, by their names.
const RECORDS: &str = "xtask/house.txt";

/// Maximum length of a test name.
const TEST_NAME_MAX: usize = 60;

#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Arguments {
    /// Lower the records of figures that have fallen, and add those that are missing.
    #[arg(long)]
    write: bool,
}

/// One metric of the tree.
struct Figure {
    name: String,
    now: usize,
    goal: usize,
    /// Set if it may not exceed its record, except up to the goal.
    is_held: bool,
}

/// Prints the metrics; an error if one has risen.
pub fn run(arguments: Arguments) -> Result<()> {
    let (root, sources) = (workspace_root(), sources()?);
    let mut figures = held(&sources);
    for (section, files) in check_paths(&root)? {
        let goal = SECTIONS.iter().find(|(name, _)| *name == section).map_or(0, |it| it.1);
        let name = format!("files on the way: {section}");
        figures.push(Figure { name, now: files.len(), goal, is_held: true });
    }
    figures.extend(printed(&sources));
    let records = root.join(RECORDS);
    let text = std::fs::read_to_string(&records).unwrap_or_default();
    let (old, new) = (parse(&text)?, lowered(&parse(&text)?, &figures));
    if arguments.write {
        let lines = new.iter().map(|(name, record)| format!("{name}: {record}\n"));
        std::fs::write(&records, lines.collect::<String>())
            .with_context(|| format!("cannot write {RECORDS}"))?;
    }
    println!("{:56} {:>8} {:>8} {:>8}", "", "now", "record", "goal");
    for Figure { name, now, goal, .. } in &figures {
        let record = old.get(name).map_or_else(String::new, usize::to_string);
        println!("{name:56} {now:>8} {record:>8} {goal:>8}");
    }
    println!("\ntypes with inherent impl blocks in more than two files:");
    for (name, files) in scattered(&sources) {
        println!("  {name:54} {files:>8}");
    }
    println!("\nimport circles between files of a folder:");
    for circle in circles(&sources) {
        println!("  {}", circle.join(" "));
    }
    let risen = risen(if arguments.write { &new } else { &old }, &figures);
    ensure!(
        risen.is_empty(),
        "{}; remove as much as was added, or raise the record in {RECORDS} by hand and say why in \
         the commit",
        risen.join("; ")
    );
    Ok(())
}

/// Reads records, one a line: the name of a figure, a colon, the figure.
fn parse(text: &str) -> Result<BTreeMap<String, usize>> {
    let record = |line: &str| {
        let (name, figure) = line.rsplit_once(": ")?;
        Some((name.to_owned(), figure.parse().ok()?))
    };
    let wrong = |line| format!("{RECORDS}: `{line}` is no `name: figure`");
    text.lines().map(|line| record(line).with_context(|| wrong(line))).collect()
}

/// Returns the records of the held figures, each the lower one of what it was and what is.
fn lowered(old: &BTreeMap<String, usize>, figures: &[Figure]) -> BTreeMap<String, usize> {
    let held = figures.iter().filter(|it| it.is_held);
    let record = |it: &Figure| old.get(&it.name).map_or(it.now, |old| *old.min(&it.now));
    held.map(|it| (it.name.clone(), record(it))).collect()
}

/// Names the held figures that exceed both their records and their goals, or have no record.
fn risen(records: &BTreeMap<String, usize>, figures: &[Figure]) -> Vec<String> {
    let problem = |it: &Figure| match records.get(&it.name) {
        Some(record) if it.now <= *record.max(&it.goal) => None,
        Some(record) => Some(format!("{}: {} exceeds the record of {record}", it.name, it.now)),
        None => Some(format!("{}: no record; `cargo x house --write` adds it", it.name)),
    };
    figures.iter().filter(|it| it.is_held).filter_map(problem).collect()
}

/// Figures with a record, except the files on the ways.
fn held(sources: &[Source]) -> Vec<Figure> {
    let library: Vec<&Source> = sources.iter().filter(|source| is_library(source)).collect();
    let (maps, core): (Vec<&Source>, Vec<&Source>) =
        library.iter().partition(|source| is_of(source, &MAPS));
    let plain = library.iter().filter(|source| is_of(source, &PLAIN));
    let lines = |files: &[&Source]| files.iter().map(|it| lines_without_tests(it)).sum();
    let mut figures = vec![
        ("lines of the core, without its tests".to_owned(), lines(&core), 28_500),
        ("files of the core, without its tests".to_owned(), core.len(), 95),
        ("lines for maps only, without their tests".to_owned(), lines(&maps), 5_200),
        (
            "questions of kind outside the seams, with synonyms".to_owned(),
            library.iter().map(|it| questions(it)).sum(),
            12,
        ),
        ("import circles between files of a folder".to_owned(), circles(sources).len(), 3),
    ];
    for (feature, words) in FEATURES {
        let mentions = plain.clone().map(|it| mentions(it, words)).sum();
        figures.push((format!("names of {feature} in fill, scan, write-out, sync"), mentions, 0));
    }
    let figures = figures.into_iter();
    figures.map(|(name, now, goal)| Figure { name, now, goal, is_held: true }).collect()
}

/// Figures without a record.
fn printed(sources: &[Source]) -> Vec<Figure> {
    let lines = |path: &str| -> usize {
        let files = sources.iter().filter(|source| source.path().starts_with(path));
        files.map(|source| source.lines().count()).sum()
    };
    let library: Vec<&Source> = sources.iter().filter(|source| is_library(source)).collect();
    let of_library = |count: fn(&Source) -> usize| library.iter().copied().map(count).sum();
    let is_short = |source: &Source| usize::from(source.lines().count() < SHORT_FILE_LINES);
    let figures = [
        ("files of the library under 60 lines", of_library(is_short), 0),
        ("lines of the benchmarks", lines("crates/bifolio-bench/src"), 9_000),
        ("lines of xtask", lines("xtask/src"), 2_500),
        ("places that the feature `ablation` changes", of_library(ablations), 15),
        ("types with impl blocks in more than two files", scattered(sources).len(), 6),
        (
            "test names of more than 60 characters",
            sources
                .iter()
                .flat_map(Source::test_names)
                .filter(|(_, name)| name.len() > TEST_NAME_MAX)
                .count(),
            0,
        ),
    ];
    let figure = |(name, now, goal): (&str, usize, usize)| Figure {
        name: name.to_owned(),
        now,
        goal,
        is_held: false,
    };
    figures.map(figure).into()
}

/// Returns `true` for a file of the library whose path starts with one of `paths`.
fn is_of(source: &Source, paths: &[&str]) -> bool {
    source.library_path().is_some_and(|path| paths.iter().any(|start| path.starts_with(start)))
}

/// Counts the names in code outside tests that contain one of `words`.
fn mentions(source: &Source, words: &[&str]) -> usize {
    let code = source.tokens().iter().filter(|token| !source.is_test_line(token.line));
    code.filter(|token| name_words(&token.text).iter().any(|it| words.contains(&it.as_str())))
        .count()
}

/// Splits a name into its words, in lower case.
fn name_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut after_capital = true;
    for letter in name.chars() {
        let is_capital = letter.is_uppercase();
        if letter == '_' || (is_capital && !after_capital) {
            words.push(String::new());
        }
        after_capital = is_capital || letter == '_';
        let last = words.len() - 1;
        words[last].extend(letter.to_lowercase().filter(|letter| *letter != '_'));
    }
    words
}

/// Reads the sections of `xtask/paths.txt`; an error if a section or a file is missing.
pub fn check_paths(root: &Path) -> Result<Vec<(String, Vec<String>)>> {
    let text = std::fs::read_to_string(root.join(PATHS))
        .with_context(|| format!("cannot read {PATHS}"))?;
    let (mut sections, mut missing): (Vec<(String, Vec<String>)>, _) = (Vec::new(), Vec::new());
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            sections.push((name.to_owned(), Vec::new()));
        } else if !line.is_empty() {
            if !root.join(line).is_file() {
                missing.push(line);
            }
            let section = sections.last_mut().with_context(|| format!("{PATHS}: no section"))?;
            section.1.push(line.to_owned());
        }
    }
    ensure!(missing.is_empty(), "{PATHS} names files that do not exist: {}", missing.join(", "));
    for (name, _) in SECTIONS {
        ensure!(sections.iter().any(|section| section.0 == name), "{PATHS} lacks [{name}]");
    }
    Ok(sections)
}

fn is_library(source: &Source) -> bool {
    source.library_path().is_some() && !source.is_test_file()
}

fn lines_without_tests(source: &Source) -> usize {
    source.lines().filter(|(number, _)| !source.is_test_line(*number)).count()
}

/// Counts the calls without arguments that ask for the kind, outside the seams.
fn questions(source: &Source) -> usize {
    let path = source.library_path().unwrap_or_default();
    if SEAMS.iter().any(|seam| path.starts_with(seam)) {
        return 0;
    }
    let calls = source.tokens().windows(3).filter(|window| !source.is_test_line(window[0].line));
    let is_question = |words: &&[Token]| {
        words[0].text == "." && QUESTIONS.contains(&words[1].text.as_str()) && words[2].text == "("
    };
    calls.filter(is_question).count()
}

fn ablations(source: &Source) -> usize {
    source.lines().filter(|(_, line)| line.contains("feature = \"ablation\"")).count()
}

/// Returns the groups of files of one folder of the library that import each other in a circle.
fn circles(sources: &[Source]) -> Vec<Vec<String>> {
    let mut folders: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in sources.iter().filter(|source| is_library(source)) {
        let (folder, _) = source.path().rsplit_once('/').unwrap_or_default();
        folders.entry(folder).or_default().push(source);
    }
    folders.remove("crates/bifolio/src");
    folders.into_values().flat_map(|files| circles_of(&files)).collect()
}

/// Finds circles: sets of files each of which reaches each other by imports.
fn circles_of(files: &[&Source]) -> Vec<Vec<String>> {
    let stems: Vec<&str> = files.iter().map(stem).collect();
    let root = files.iter().find(|file| stem(file) == "mod");
    let exports = root.map(|root| exports(root)).unwrap_or_default();
    let target = |name: &str| {
        let name = exports.get(name).map_or(name, String::as_str);
        stems.iter().position(|stem| *stem == name).or(stems.iter().position(|it| *it == "mod"))
    };
    let mut reach: Vec<BTreeSet<usize>> = Vec::new();
    for file in files {
        reach.push(imports(file).iter().filter_map(|name| target(name)).collect());
    }
    for _ in files {
        for at in 0..files.len() {
            let next: BTreeSet<usize> =
                reach[at].iter().flat_map(|to| reach[*to].iter().copied()).collect();
            reach[at].extend(next);
        }
    }
    let mut circles: Vec<Vec<String>> = Vec::new();
    for (at, reached) in reach.iter().enumerate() {
        let circle: Vec<String> = reached
            .iter()
            .filter(|other| reach[**other].contains(&at))
            .map(|other| files[*other].library_path().unwrap_or_default().to_owned())
            .collect();
        if circle.len() > 1 && !circles.contains(&circle) {
            circles.push(circle);
        }
    }
    circles
}

fn stem<'a>(file: &&'a Source) -> &'a str {
    file.path().rsplit('/').next().and_then(|name| name.strip_suffix(".rs")).unwrap_or_default()
}

/// Returns the names that `mod.rs` passes on with `pub use` from its files.
fn exports(root: &Source) -> BTreeMap<String, String> {
    let words: Vec<&str> = root.tokens().iter().map(|token| token.text.as_str()).collect();
    let mut exports = BTreeMap::new();
    for (at, word) in words.iter().enumerate() {
        if *word == "use" && matches!(words[at.saturating_sub(1)], "pub" | ")") {
            let names = words[at + 2..].iter().take_while(|word| **word != ";");
            exports.extend(names.map(|name| ((*name).to_owned(), words[at + 1].to_owned())));
        }
    }
    exports
}

/// Returns the first names behind `super::` in a file outside its tests; in `mod.rs`, the modules
/// that it imports for itself.
fn imports(file: &Source) -> BTreeSet<String> {
    let is_root = stem(&file) == "mod";
    let mut names = BTreeSet::new();
    for (at, token) in file.tokens().iter().enumerate() {
        if file.is_test_line(token.line) {
            continue;
        }
        if is_root {
            let own =
                token.text == "use" && !matches!(file.words(at.max(1) - 1, 1)[..], ["pub" | ")"]);
            names.extend(file.words(at + 1, usize::from(own)).into_iter().map(str::to_owned));
        } else if token.text == "super" && file.words(at + 1, 2) == [":", ":"] {
            names.extend(file.first_names(at + 3).iter().map(|token| token.text.clone()));
        }
    }
    names.remove("super");
    names
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
    fn names_that_mention_a_feature_are_counted_outside_tests() {
        assert_eq!(name_words("BATCH_SLOTS"), ["batch", "slots"]);
        assert_eq!(name_words("SwapStore"), ["swap", "store"]);
        let text = "// slots\nfn take_slots(a: SwapStore) { b.swapping(); }\n\
                    #[cfg(test)]\nmod tests { fn slot() {} }\n";
        assert_eq!(mentions(&source(text), FEATURES[3].1), 2);
    }

    #[test]
    fn a_record_may_only_fall() {
        let figure = |now, is_held| Figure { name: "lines: all".to_owned(), now, goal: 5, is_held };
        let records = parse("lines: all: 7\nfiles: 3\n").unwrap();
        assert_eq!(records["lines: all"], 7);
        for (now, recorded, problems) in [(6, 6, 0), (7, 7, 0), (8, 7, 1)] {
            let figures = [figure(now, true)];
            assert_eq!(lowered(&records, &figures), [("lines: all".to_owned(), recorded)].into());
            assert_eq!(risen(&records, &figures).len(), problems);
        }
        assert_eq!(risen(&BTreeMap::new(), &[figure(1, true), figure(2, false)]).len(), 1);
        let reached = parse("lines: all: 3").unwrap();
        assert!(risen(&reached, &[figure(5, true)]).is_empty());
        assert!(parse("lines 7").is_err());
    }

    #[test]
    fn a_circle_is_found_through_what_mod_passes_on() {
        let file = |name: &str, text: &str| {
            Source::new(&format!("crates/bifolio/src/io/{name}.rs"), text).unwrap()
        };
        let files = [
            file("mod", "mod a; mod b; pub(crate) use a::{A, B}; use c::C;"),
            file("a", "use super::b::Y;"),
            file("b", "use super::{A, c};"),
            file("c", "#[cfg(test)]\nmod tests {\nuse super::b;\n}"),
        ];
        assert_eq!(circles(&files), [["io/a.rs", "io/b.rs"]]);
    }
}
