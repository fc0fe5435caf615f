//! The rules about language: plain technical English in comments, string literals, test names and
//! documents.
//!
//! Called by [`super::run`] for each Rust file below `crates` and `xtask`, and for the documents.
//! [`STARTS`] holds what no doc comment may start with, [`PHRASES`] the words and phrases that have
//! a better one. Text between backticks is code and is not checked. [`ALLOWED`] lists right uses.

use super::{Finding, source::Source};

/// Beginnings of doc comments that make the reader look elsewhere for the subject.
const STARTS: [&str; 8] =
    ["Who ", "What ", "Whoever", "The same", "So many", "Nor ", "As [", "See the head"];

/// Words and phrases, and what to write instead. Words of a phrase are separated by spaces and
/// have alternatives separated by `|`; `.` is a punctuation mark or the end of the text. The phrase
/// holds for files whose path starts with the last field.
const PHRASES: [(&str, &str, &str, &str); 23] = [
    ("person", "whoever|whomever|nobody|somebody|anybody|everybody", PERSON, ""),
    ("person", "someone|anyone|everyone", PERSON, ""),
    ("person", "no one", PERSON, ""),
    ("person", "he|him|his|himself", PERSON, ""),
    ("person", "one who", PERSON, ""),
    ("word", "here and there", "at random, scattered", ""),
    ("word", "in vain", "without success; say what failed", ""),
    ("word", "is|are done for", "say what ended", ""),
    ("word", "has|have place", "fits, has room", ""),
    ("word", "look|looks|looked after", "manage, serve", ""),
    ("word", "give|gives|gave|given|giving away", "release, hand over, transfer", ""),
    ("word", "is|are|was|were there .|already|before|yet|while|when", "exists, is present", ""),
    ("word", "settle|settles|settled|settling", "complete, decide, resolve", ""),
    ("word", "a|its|their|whose|every|each|another|next|one turn|turns", TURN, ""),
    ("word", "by turns", TURN, ""),
    ("word", "line of readahead|waiters|threads|requests", QUEUE, ""),
    ("word", "line of the swapper|flusher", QUEUE, ""),
    ("word", "swapper line", QUEUE, ""),
    (
        "word",
        "in|into|take|joins the|a line .|and|with|while",
        QUEUE,
        "crates/bifolio/src/reclaim/",
    ),
    ("word", "row|rows", "run, extent, batch", "crates/bifolio/"),
    ("word", "life", "lifetime", ""),
    ("word", "page|pages|folio|folios|frame|frames|unit|units leave|leaves|leaving", LEAVE, ""),
    ("word", "has|have left the|its|their", LEAVE, ""),
];
const PERSON: &str = "name the thread or the caller";
const TURN: &str = "round, slice, lease";
const QUEUE: &str = "queue";
const LEAVE: &str = "is evicted, is removed";

/// Right uses: the start of a path, a part of the line, and the reason.
const ALLOWED: [(&str, &str, &str); 1] =
    [("xtask/src/tidy/prose.rs", "", "the list itself, and its tests")];

/// Returns every hit in a Rust file.
pub fn in_source(source: &Source) -> Vec<Finding> {
    let mut found: Vec<Finding> = doc_starts(source).collect();
    let names = source.test_names().map(|(line, name)| (line, name.replace('_', " ")));
    let texts = source.all_comments().chain(source.strings());
    for (line, text) in texts.map(|text| (text.line, text.text.clone())).chain(names) {
        found.extend(in_text(source.path(), line, &text));
    }
    found.retain(|hit| !is_allowed(hit, source.lines().nth(hit.line - 1).map_or("", |it| it.1)));
    found
}

/// Returns every hit in a document.
pub fn in_document(path: &str, text: &str) -> Vec<Finding> {
    let lines = (1..).zip(text.lines());
    let hits = lines.flat_map(|(number, line)| {
        let hits = in_text(path, number, line).into_iter();
        hits.filter(move |hit| !is_allowed(hit, line))
    });
    hits.collect()
}

fn is_allowed(hit: &Finding, line: &str) -> bool {
    ALLOWED.iter().any(|(path, part, _)| hit.path.starts_with(path) && line.contains(part))
}

fn doc_starts(source: &Source) -> impl Iterator<Item = Finding> {
    let mark = |line: &str| ["///", "//!"].into_iter().find(|mark| line.starts_with(mark));
    let mut before = None;
    source.lines().filter_map(move |(number, line)| {
        let line = line.trim_start();
        let is_first = mark(line) != std::mem::replace(&mut before, mark(line));
        let text = line.strip_prefix(mark(line)?)?.trim_start();
        let start = STARTS.iter().find(|start| text.starts_with(*start)).filter(|_| is_first)?;
        // The text of a string may look like a comment.
        source.comments(number..=number).next()?;
        let message = format!("a doc comment starts with a verb or a noun, not with `{start}`");
        Some(hit(source.path(), number, "prose-start", message))
    })
}

fn in_text(path: &str, line: usize, text: &str) -> Vec<Finding> {
    let words = words(text);
    let mut found = Vec::new();
    for (rule, phrase, instead, scope) in PHRASES {
        let parts: Vec<&str> = phrase.split(' ').collect();
        for window in words.windows(parts.len()).filter(|_| path.starts_with(scope)) {
            let is_part = |(word, part): (&String, &&str)| part.split('|').any(|it| it == word);
            if window.iter().zip(&parts).all(is_part) {
                let rule = if rule == "person" { "prose-person" } else { "prose-word" };
                let message = format!("`{}`: {instead}", window.join(" "));
                found.push(hit(path, line, rule, message));
            }
        }
    }
    found
}

fn hit(path: &str, line: usize, rule: &'static str, message: String) -> Finding {
    Finding { path: path.to_owned(), line, rule, message }
}

/// Returns the words of `text` in lower case, with `.` for a punctuation mark and for the end, and
/// without what is between backticks.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (number, part) in text.split('`').enumerate() {
        if number % 2 == 1 {
            words.push("`".to_owned());
            continue;
        }
        for word in part.split_whitespace() {
            let bare = word.trim_matches(|it: char| !it.is_alphanumeric() && it != '_');
            if !bare.is_empty() {
                words.push(bare.strip_suffix("'s").unwrap_or(bare).to_lowercase());
            }
            if word.ends_with(|it: char| ".,;:!?)".contains(it)) {
                words.push(".".to_owned());
            }
        }
    }
    words.push(".".to_owned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Vec<&'static str> {
        let source = Source::new("crates/bifolio/src/reclaim/scan.rs", text).unwrap();
        in_source(&source).into_iter().map(|hit| hit.rule).collect()
    }

    #[test]
    fn each_forbidden_start_of_a_doc_comment_is_a_hit() {
        for start in STARTS {
            assert_eq!(rules(&format!("/// {start}x\nfn f() {{}}\n")).len(), 1, "{start}");
            assert!(rules(&format!("/// Reads.\n/// {start}x\nfn f() {{}}\n")).len() <= 1);
        }
        assert_eq!(rules("//! The same, later.\n"), ["prose-start"]);
        assert!(rules("/// Whatever.\n/// What a second line may say.\nfn f() {}\n").is_empty());
    }

    #[test]
    fn each_phrase_is_a_hit() {
        for (_, phrase, _, _) in PHRASES {
            let words: Vec<&str> =
                phrase.split(' ').map(|part| part.split('|').next().unwrap()).collect();
            let text = format!("// Then {}\n", words.join(" "));
            assert!(!rules(&text).is_empty(), "{text}");
        }
    }

    #[test]
    fn comments_strings_and_test_names_are_checked() {
        for (text, rule) in [
            ("// A lock that nobody holds.\n", "prose-person"),
            ("/* A device.\n The one who can. */\n", "prose-person"),
            ("fn f() { g(\"the device waits in vain\") }\n", "prose-word"),
            ("#[test]\nfn folios_leave_together() {}\n", "prose-word"),
        ] {
            assert_eq!(rules(text), [rule], "{text}");
        }
        assert_eq!(in_document("README.md", "# A\nHis page.\n")[0].line, 2);
    }

    #[test]
    fn right_uses_and_code_are_no_hits() {
        for text in [
            "// One of two states; `nobody` and `row` are code. Leaves the folio locked.",
            "// A line of text, a cache line, in turn. Is there a frame? There is.",
            "// Turns it off. The lifetime of a row.",
        ] {
            assert_eq!(in_document("docs/a.md", text), [], "{text}");
        }
    }

    #[test]
    fn the_allow_list_is_short_and_has_reasons() {
        assert!(ALLOWED.len() <= 30 && ALLOWED.iter().all(|(.., reason)| !reason.is_empty()));
    }
}
