//! The rule about language that a program can hold: how a doc comment starts.
//!
//! Called by [`super::check`] for each Rust file. Reviewers see to the rest.

use super::{Finding, source::Source};

/// Beginnings of doc comments that make the reader look elsewhere for the subject.
const STARTS: [&str; 8] =
    ["Who ", "What ", "Whoever", "The same", "So many", "Nor ", "As [", "See the head"];

/// Checks that a doc comment starts with a verb or a noun.
pub fn doc_starts(source: &Source) -> Vec<Finding> {
    let mark = |line: &str| ["///", "//!"].into_iter().find(|mark| line.starts_with(mark));
    let mut before = None;
    let found = source.lines().filter_map(move |(number, line)| {
        let line = line.trim_start();
        let is_first = mark(line) != std::mem::replace(&mut before, mark(line));
        let text = line.strip_prefix(mark(line)?)?.trim_start();
        let start = STARTS.iter().find(|start| text.starts_with(*start)).filter(|_| is_first)?;
        // The text of a string may look like a comment.
        source.comments(number..=number).next()?;
        let message = format!("a doc comment starts with a verb or a noun, not with `{start}`");
        Some(Finding::new(source, number, "prose-start", message))
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        let source = Source::new("crates/bifolio/src/reclaim/scan.rs", text).unwrap();
        doc_starts(&source).into_iter().map(|found| found.line).collect()
    }

    #[test]
    fn each_forbidden_start_of_a_doc_comment_is_a_hit() {
        for start in STARTS {
            assert_eq!(lines(&format!("/// {start}x\nfn f() {{}}\n")), [1], "{start}");
            assert!(lines(&format!("/// Reads.\n/// {start}x\nfn f() {{}}\n")).is_empty());
        }
        assert_eq!(lines("//! The same, later.\n"), [1]);
        assert!(lines("/// Whatever.\nfn f() { g(\"/// What\") }\n").is_empty());
    }
}
