//! The rule about steps of protocols: each protocol has a word of its own, and every reference to a
//! step from another file says it, as in `UNMAP-B7`.
//!
//! Called by [`super::run`] with all sources, because it compares files. A head declares a protocol
//! with a line that starts with `PROTOCOL` and the word, and draws its steps, a letter and a digit
//! each, at the beginnings of columns. In that file a step needs no word.

use std::collections::{BTreeMap, BTreeSet};

use super::{Finding, source::Source};

/// Checks the words of all protocols of the library, and all references to their steps.
pub fn steps(sources: &[&Source]) -> Vec<Finding> {
    let mut drawn: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut found = Vec::new();
    let library = || sources.iter().filter(|source| source.library_path().is_some());
    for source in library() {
        let Some(word) = declared(source) else { continue };
        if drawn.insert(word, drawing(source)).is_some() {
            let message = format!("`{word}` is the word of another protocol, too");
            found.push(Finding::new(source, 1, "steps", message));
        }
    }
    for source in library() {
        let own = declared(source).and_then(|word| drawn.get(word));
        for comment in source.all_comments() {
            for (word, code) in references(source, &comment.text) {
                let message = match (word, own) {
                    (Some(word), _) if drawn.get(word).is_some_and(|it| it.contains(code)) => None,
                    (Some(word), _) => Some(format!("no protocol {word} draws a step {code}")),
                    (None, Some(own)) if own.contains(code) => None,
                    (None, _) => Some(format!("`{code}` without the word of its protocol")),
                };
                found.extend(message.map(|it| Finding::new(source, comment.line, "steps", it)));
            }
        }
    }
    found
}

/// Returns the word of the protocol that the head of a file declares.
fn declared(source: &Source) -> Option<&str> {
    source.head().into_iter().find_map(|line| {
        let word = line.strip_prefix("PROTOCOL ")?.split([',', '.', ' ']).next()?;
        (word.len() > 1 && word.chars().all(|letter| letter.is_ascii_uppercase())).then_some(word)
    })
}

/// Returns the steps at the beginnings of columns in the drawings of a head.
fn drawing(source: &Source) -> BTreeSet<String> {
    let mut is_inside = false;
    let mut steps = BTreeSet::new();
    for line in source.head() {
        if line.starts_with("```") {
            is_inside = !is_inside;
        } else if is_inside {
            // Lines without their indentation: the first column begins there.
            steps.extend(line.split("  ").flat_map(|cell| leading(cell.trim_start())));
        }
    }
    steps
}

/// Returns the steps that a cell begins with.
fn leading(cell: &str) -> impl Iterator<Item = String> {
    let words = cell.split(' ').map(|word| word.trim_end_matches(','));
    words.take_while(|word| is_code(word)).map(str::to_owned)
}

fn is_code(text: &str) -> bool {
    matches!(text.as_bytes(), [b'A'..=b'Z', b'0'..=b'9'])
}

/// Returns the steps that a comment names, each with the word before it, if any.
fn references<'a>(source: &Source, comment: &'a str) -> Vec<(Option<&'a str>, &'a str)> {
    let mut references: Vec<(Option<&str>, &str)> = Vec::new();
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    let mut rest = comment;
    while let Some(start) = rest.find(is_part) {
        let before = &rest[..start];
        let end = rest[start..].find(|it| !is_part(it)).map_or(rest.len(), |end| start + end);
        let name = &rest[start..end];
        let (word, code) =
            name.rsplit_once('-').map_or((None, name), |(word, code)| (Some(word), code));
        let is_word = |word: &str| word.bytes().all(|it| it.is_ascii_uppercase()) || is_code(word);
        // Tests list the requirements that they cover, R1 and so on.
        let is_step = is_code(code) && !(source.is_test_file() && code.starts_with('R'));
        if is_step && word.is_none_or(is_word) {
            // The end of a range has the word of its start.
            let of_range = references.last().filter(|_| before == "..").and_then(|last| last.0);
            references.push((word.or(of_range), code));
        }
        rest = &rest[end..];
    }
    references
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "//! PROTOCOL PARK, as two columns:\n//!\n//! ```text\n\
        //!  A1 lock it         B1 wait, then A1\n//!  A2 unlock it\n//! ```\n";

    fn count(texts: &[(&str, &str)]) -> usize {
        let source =
            |(path, text): &(&str, &str)| Source::new(&format!("crates/bifolio/src/{path}"), text);
        let sources: Vec<Source> = texts.iter().map(source).map(Result::unwrap).collect();
        steps(&sources.iter().collect::<Vec<_>>()).len()
    }

    #[test]
    fn steps_are_named_with_the_word_of_their_protocol() {
        for (text, findings) in [
            ("//! After PARK-A1 and PARK-A1..A2; S3-FIFO; page 4K.", 0),
            ("//! After A1.", 1),
            ("//! After PARK-A3, or STOP-A1.", 2),
        ] {
            assert_eq!(count(&[("io/a.rs", HEAD), ("io/b.rs", text)]), findings, "{text}");
        }
        assert_eq!(count(&[("io/a.rs", &format!("{HEAD}// B1, not C1\nfn f() {{}}\n"))]), 1);
    }

    #[test]
    fn a_word_belongs_to_one_protocol() {
        assert_eq!(count(&[("io/a.rs", HEAD), ("io/b.rs", HEAD)]), 1);
    }
}
