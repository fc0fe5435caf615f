//! `cargo x house`: structural metrics of the tree, and the records of those that may only fall.
//!
//! A step of [`crate::step`]. It reads the sources as [`crate::tidy`] does and prints one line for
//! each metric. Lines are for information: code and comments are counted apart, and nothing has a
//! budget. Import circles of the library, and imports of a file on a floor above, are held by
//! `xtask/house.txt`. One more fails the step, and so does a record that is higher than the figure:
//! `--write` lowers it.
//!
//! Not here, because it runs the library: `xtask/entered.py` lists the files that a hit, a miss and
//! a write-out enter.

mod imports;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use crate::cargo::workspace_root;
use crate::tidy::layers::{LAYERS, LEAVES};
use crate::tidy::source::Source;
use crate::tidy::sources;
use imports::Imports;

/// Figures that may only fall, by their names.
const RECORDS: &str = "xtask/house.txt";

/// Maximum length of a test name.
const TEST_NAME_MAX: usize = 60;
/// Number of methods above which a type is listed.
const METHODS_MAX: usize = 40;

#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Arguments {
    /// Lower the records of figures that have fallen.
    #[arg(long)]
    write: bool,
}

/// Figures by their names; none is 0.
type Figures = BTreeMap<String, usize>;

/// Prints the metrics; an error if a held one differs from its record.
pub fn run(arguments: Arguments) -> Result<()> {
    let (path, sources) = (workspace_root().join(RECORDS), sources()?);
    let imports = Imports::of(&sources);
    let held = held(&imports);
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let mut records = parse(&text)?;
    if arguments.write {
        records = lowered(&records, &held);
        let lines = records.iter().map(|(name, record)| format!("{name}: {record}\n"));
        std::fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("cannot write {RECORDS}"))?;
    }
    println!("{:56} {:>8} {:>8}", "", "now", "record");
    for (name, now) in printed(&sources) {
        println!("{name:56} {now:>8}");
    }
    let names: BTreeSet<&String> = held.keys().chain(records.keys()).collect();
    for name in names {
        let figure = |figures: &Figures| figures.get(name).copied().unwrap_or(0);
        println!("{name:56} {:>8} {:>8}", figure(&held), figure(&records));
    }
    println!("\ntypes with more than {METHODS_MAX} methods, or with them in more than two files:");
    for (name, Methods { count, files }) in large_types(&sources) {
        println!("  {name:54} {count:>8} in {}", files.len());
    }
    println!("\nimport circles:");
    for circle in imports.circles() {
        println!("  {}", circle.join(" "));
    }
    println!("\nimports of a file on a floor above:");
    for (from, to) in upward(&imports) {
        println!("  {from} -> {to}");
    }
    let problems = problems(&records, &held);
    ensure!(problems.is_empty(), "{}", problems.join("; "));
    Ok(())
}

/// Reads records, one a line: the name of a figure, a colon, the figure.
fn parse(text: &str) -> Result<Figures> {
    let record = |line: &str| {
        let (name, figure) = line.rsplit_once(": ")?;
        Some((name.to_owned(), figure.parse().ok()?))
    };
    let wrong = |line| format!("{RECORDS}: `{line}` is no `name: figure`");
    text.lines().map(|line| record(line).with_context(|| wrong(line))).collect()
}

/// Returns the records, each no higher than its figure now, without those that are 0.
fn lowered(records: &Figures, now: &Figures) -> Figures {
    let least = |(name, record): (&String, &usize)| {
        let now = now.get(name).copied().unwrap_or(0);
        (name.clone(), now.min(*record))
    };
    records.iter().map(least).filter(|(_, record)| *record > 0).collect()
}

/// Names the figures that exceed their records, and the records that exceed their figures.
fn problems(records: &Figures, now: &Figures) -> Vec<String> {
    let names: BTreeSet<&String> = now.keys().chain(records.keys()).collect();
    let problem = |name: &String| {
        let figure = |figures: &Figures| figures.get(name).copied().unwrap_or(0);
        let (now, record) = (figure(now), figure(records));
        match now.cmp(&record) {
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Greater => Some(format!(
                "{name}: {now} exceeds the record of {record}; turn the import, or raise the \
                 record in {RECORDS} by hand and say why in the commit"
            )),
            std::cmp::Ordering::Less => Some(format!(
                "{name}: the record of {record} is no longer needed, it is {now}; `cargo x house \
                 --write` lowers it"
            )),
        }
    };
    names.into_iter().filter_map(problem).collect()
}

/// Returns the figures that have a record.
fn held(imports: &Imports<'_>) -> Figures {
    let mut figures = Figures::new();
    let circles = imports.circles();
    if !circles.is_empty() {
        figures.insert("files in import circles".to_owned(), circles.iter().map(Vec::len).sum());
        figures.insert("import circles".to_owned(), circles.len());
    }
    for (from, to) in upward(imports) {
        let name = format!("upward imports: {} -> {}", folder(from), folder(to));
        *figures.entry(name).or_default() += 1;
    }
    figures
}

/// Returns the pairs of files of which the first imports from the second, on a floor above.
fn upward<'s>(imports: &Imports<'s>) -> Vec<(&'s str, &'s str)> {
    let pairs = imports.pairs.iter().map(|(from, to)| (imports.files[*from], imports.files[*to]));
    // The law that `cargo x tidy` holds by the names of modules; here names are followed to the
    // file that has the item. A folder that the law does not name is above all.
    let floors: Vec<_> = LEAVES.iter().chain(&LAYERS).collect();
    let floor = |path| floors.iter().position(|it| **it == folder(path)).unwrap_or(floors.len());
    pairs.filter(|(from, to)| floor(from) < floor(to)).collect()
}

/// Returns the folder of a file of the library, or the name of a file in no folder.
fn folder(path: &str) -> &str {
    let first = path.split('/').next().unwrap_or(path);
    first.strip_suffix(".rs").unwrap_or(first)
}

/// Returns the figures without a record.
fn printed(sources: &[Source]) -> Vec<(&'static str, usize)> {
    let library: Vec<&Source> = sources.iter().filter(|source| is_library(source)).collect();
    let is_of_maps = |source: &&&Source| folder(source.library_path().unwrap_or("")) == "maps";
    let maps: Vec<&Source> = library.iter().filter(is_of_maps).copied().collect();
    let core: Vec<&Source> = library.iter().filter(|it| !is_of_maps(it)).copied().collect();
    let below = |path: &str| -> Vec<&Source> {
        sources.iter().filter(|source| source.path().starts_with(path)).collect()
    };
    let count = |files: &[&Source], count: fn(&Source) -> usize| -> usize {
        files.iter().map(|source| count(source)).sum()
    };
    let long_names = sources.iter().flat_map(Source::test_names);
    vec![
        ("core: lines of code, without tests", count(&core, code_lines)),
        ("core: lines of comments, without tests", count(&core, comment_lines)),
        ("core: files", core.len()),
        ("maps: lines of code, without tests", count(&maps, code_lines)),
        ("maps: lines of comments, without tests", count(&maps, comment_lines)),
        ("benchmarks: lines of code", count(&below("crates/bifolio-bench/src"), code_lines)),
        ("xtask: lines of code, without tests", count(&below("xtask/src"), code_lines)),
        ("places that the feature `ablation` changes", count(&library, ablations)),
        (
            "test names of more than 60 characters",
            long_names.filter(|(_, name)| name.len() > TEST_NAME_MAX).count(),
        ),
    ]
}

fn is_library(source: &Source) -> bool {
    source.library_path().is_some() && !source.is_test_file()
}

/// Counts the lines with code outside tests.
fn code_lines(source: &Source) -> usize {
    lines_without_tests(source, source.tokens().iter().map(|token| token.line)).len()
}

/// Counts the lines outside tests that have a comment and no code.
fn comment_lines(source: &Source) -> usize {
    let code = lines_without_tests(source, source.tokens().iter().map(|token| token.line));
    let comments = source.all_comments().map(|comment| comment.line);
    lines_without_tests(source, comments).difference(&code).count()
}

fn lines_without_tests(source: &Source, lines: impl Iterator<Item = usize>) -> BTreeSet<usize> {
    let lines: BTreeSet<usize> = lines.collect();
    lines.into_iter().filter(|line| !source.is_test_line(*line)).collect()
}

fn ablations(source: &Source) -> usize {
    source.lines().filter(|(_, line)| line.contains("feature = \"ablation\"")).count()
}

/// Methods of a type, in all its inherent impl blocks outside tests.
#[derive(Debug, Default)]
struct Methods<'s> {
    count: usize,
    files: BTreeSet<&'s str>,
}

/// Returns the types of the library with many methods, or with methods in more than two files.
fn large_types(sources: &[Source]) -> Vec<(String, Methods<'_>)> {
    let mut types: BTreeMap<String, Methods<'_>> = BTreeMap::new();
    for source in sources.iter().filter(|source| is_library(source)) {
        for (name, count) in inherent_impls(source) {
            let methods = types.entry(name.to_owned()).or_default();
            methods.count += count;
            methods.files.insert(source.path());
        }
    }
    let is_large = |it: &Methods<'_>| it.count > METHODS_MAX || it.files.len() > 2;
    let mut large: Vec<_> = types.into_iter().filter(|(_, it)| is_large(it)).collect();
    large.sort_by_key(|(_, it)| std::cmp::Reverse(it.count));
    large
}

/// Returns the type and the number of methods of each inherent `impl` block outside tests.
fn inherent_impls(source: &Source) -> Vec<(&str, usize)> {
    let tokens = source.tokens();
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        if token.text != "impl" || token.depth > 0 || source.is_test_line(token.line) {
            continue;
        }
        let is_body = |open: &usize| tokens[*open].text == "{" && tokens[*open].depth == 0;
        let Some(open) = (at..tokens.len()).find(is_body) else { continue };
        let head = &tokens[at + 1..open];
        // Skips the parameters of `impl<..>`.
        let mut angles = 0;
        let is_outside = |token: &&crate::tidy::source::Token| {
            angles += i32::from(token.text == "<") - i32::from(token.text == ">");
            angles == 0 && token.text != ">"
        };
        let Some(name) = head.iter().find(is_outside) else { continue };
        if head.iter().any(|token| token.text == "for") {
            continue;
        }
        let body = &tokens[open + 1..source.closing(open)];
        let methods = body.iter().filter(|it| it.depth == 1 && it.text == "fn").count();
        found.push((name.text.as_str(), methods));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source::new(&format!("crates/bifolio/src/{path}"), text).unwrap()
    }

    #[test]
    fn methods_of_inherent_impl_blocks_are_counted() {
        let text = "impl<'a, T: Into<u8>> Batch<'a, T> { fn f() { fn g() {} } pub fn h() {} }\n\
                    impl Drop for Batch<'_, u8> { fn drop(&mut self) {} }\n\
                    impl Cache { const A: u8 = 1; fn i() -> impl Fn() { || {} } }\n\
                    #[cfg(test)]\nmod tests { impl Cache { fn j() {} } }";
        let source = source("a.rs", text);
        assert_eq!(inherent_impls(&source), [("Batch", 2), ("Cache", 1)]);
    }

    #[test]
    fn code_and_comments_are_counted_apart_without_tests() {
        let text = "//! Head.\n\nfn f() {\n    g(); // one\n    // two\n}\n\
                    #[cfg(test)]\nmod tests {\n    // three\n    fn h() {}\n}\n";
        let source = source("a.rs", text);
        assert_eq!((code_lines(&source), comment_lines(&source)), (3, 2));
    }

    #[test]
    fn a_record_is_what_it_is_now() {
        let now = |count| Figures::from([("upward imports: a -> b".to_owned(), count)]);
        let records = parse("upward imports: a -> b: 7\n").unwrap();
        for (count, problem) in [(6, "no longer needed"), (7, ""), (8, "exceeds")] {
            let found = problems(&records, &now(count));
            assert_eq!(found.len(), usize::from(!problem.is_empty()), "{count}");
            assert!(found.iter().all(|it| it.contains(problem)), "{found:?}");
        }
        assert_eq!(lowered(&records, &now(6)), now(6));
        assert_eq!(lowered(&records, &now(8)), records);
        assert_eq!(problems(&Figures::new(), &now(1)).len(), 1);
        assert_eq!(problems(&records, &Figures::new()).len(), 1);
        assert!(lowered(&records, &Figures::new()).is_empty());
        assert!(parse("lines 7").is_err());
    }

    #[test]
    fn an_import_from_a_floor_above_is_counted_by_folders() {
        let sources = [
            source("io/disk.rs", "use crate::file::File; use crate::page::Entry;"),
            source("io/mod.rs", "fn f() { crate::file::open() } use crate::other::A;"),
            source("file/mod.rs", "use crate::io::g;"),
            source("page.rs", ""),
            source("other.rs", ""),
        ];
        let held = held(&Imports::of(&sources));
        let figures = [
            ("files in import circles", 2),
            ("import circles", 1),
            ("upward imports: io -> file", 2),
            ("upward imports: io -> other", 1),
        ];
        assert_eq!(held, figures.map(|(name, count)| (name.to_owned(), count)).into());
    }
}
