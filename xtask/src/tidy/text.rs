//! Rules about the text of a file: its head, its characters, its leftovers, its name.
//!
//! Where it stands: called by [`super::check`] for every file. These rules need little or nothing
//! of the code's structure, so they hold for test code too.

use std::path::Path;

use super::{Finding, source::Source};

/// The longest line, in characters; the same number stands in `rustfmt.toml`.
const COLUMNS_MAX: usize = 100;

/// Words that mark something left for later. Split, so that this file does not hold them.
const MARKERS: [&str; 3] = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")];

/// Macros that have no place in finished code.
const MACROS: [&str; 3] = ["dbg", "todo", "unimplemented"];

/// Names that say nothing of what a file holds.
const VAGUE_NAMES: [&str; 2] = ["utils", "common"];

/// Every file starts with a `//!` head that says something.
pub fn head(source: &Source) -> Vec<Finding> {
    if source.head().iter().any(|line| !line.is_empty()) {
        return Vec::new();
    }
    let message = "a file starts with a `//!` head: what it is, where it stands, its invariants";
    vec![Finding::new(source, 1, "head", message.to_owned())]
}

/// Sources are ASCII: what looks alike is alike.
pub fn ascii(source: &Source) -> Vec<Finding> {
    let found = source.lines().filter_map(|(line, text)| {
        let (at, other) = text.chars().enumerate().find(|(_, character)| !character.is_ascii())?;
        let code = u32::from(other);
        let message = format!("column {}: U+{code:04X} is not ASCII; write an escape", at + 1);
        Some(Finding::new(source, line, "ascii", message))
    });
    found.collect()
}

/// A line fits a narrow window.
pub fn columns(source: &Source) -> Vec<Finding> {
    let found = source.lines().filter_map(|(line, text)| {
        let columns = text.chars().count();
        let message = format!("{columns} columns; at most {COLUMNS_MAX}");
        (columns > COLUMNS_MAX).then(|| Finding::new(source, line, "columns", message))
    });
    found.collect()
}

/// Nothing is left for later: no marker in the text, no macro of unfinished code.
pub fn leftover(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    let is_part = |character: char| character.is_alphanumeric() || character == '_';
    for (line, text) in source.lines() {
        for word in text.split(|character| !is_part(character)) {
            if MARKERS.contains(&word) {
                let message = format!("`{word}`: do it now, or write an issue");
                found.push(Finding::new(source, line, "leftover", message));
            }
        }
    }
    for pair in source.tokens().windows(2) {
        let name = pair[0].text.as_str();
        if MACROS.contains(&name) && pair[1].text == "!" {
            let message = format!("`{name}!` has no place in finished code");
            found.push(Finding::new(source, pair[0].line, "leftover", message));
        }
    }
    found
}

/// A file or folder under `src` is named after what it holds.
pub fn file_name(source: &Source) -> Vec<Finding> {
    let Some((_, below)) = source.path().split_once("/src/") else {
        return Vec::new();
    };
    let parts = below.split('/').map(|part| Path::new(part).file_stem().unwrap_or_default());
    let vague = parts.filter_map(|stem| VAGUE_NAMES.iter().find(|name| stem == **name));
    let found = vague.map(|name| {
        let message = format!("`{name}` says nothing; name it after the one thing it holds");
        Finding::new(source, 1, "file-name", message)
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/bifolio/src/io/backing.rs";

    fn lines(rule: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text).unwrap()).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn head_is_required_and_must_not_be_empty() {
        for bad in ["", "fn f() {}\n", "// A plain comment.\nfn f() {}\n", "//!\nfn f() {}\n"] {
            assert_eq!(lines(head, PATH, bad), [1], "{bad:?}");
        }
        // A `//!` in an inner module is not the head of the file.
        assert_eq!(lines(head, PATH, "mod m {\n//! Inner.\n}\n"), [1]);
        assert!(lines(head, PATH, "//! Rounding.\nfn f() {}\n").is_empty());
        assert!(lines(head, PATH, "#![allow(unsafe_code)]\n//! Rounding.\n").is_empty());
    }

    #[test]
    fn ascii_flags_each_line_once() {
        assert_eq!(lines(ascii, PATH, "//! \u{2014}\u{2014}\n// ok\n// \u{e9}\n"), [1, 3]);
        assert!(lines(ascii, PATH, "//! \\u{2014} -- ok\n").is_empty());
    }

    #[test]
    fn columns_are_characters_and_the_limit_is_allowed() {
        assert_eq!(lines(columns, PATH, &format!("//{}\n", "a".repeat(99))), [1]);
        assert!(lines(columns, PATH, &format!("//{}\n", "a".repeat(98))).is_empty());
        assert!(lines(columns, PATH, &format!("//{}\n", "\u{e9}".repeat(98))).is_empty());
    }

    #[test]
    fn leftover_markers_are_found_as_whole_words() {
        for marker in MARKERS {
            assert_eq!(lines(leftover, PATH, &format!("fn f() {{}}\n// {marker}: x\n")), [2]);
            assert_eq!(lines(leftover, PATH, &format!("fn f() {{ p(\"{marker}\") }}\n")), [1]);
            assert!(lines(leftover, PATH, &format!("// {marker}ED {marker}_LIST\n")).is_empty());
        }
        assert!(lines(leftover, PATH, "// todo lists, to do\n").is_empty());
    }

    #[test]
    fn leftover_macros_are_found_as_code_only() {
        for name in MACROS {
            assert_eq!(lines(leftover, PATH, &format!("fn f() {{\n    {name}!(1)\n}}\n")), [2]);
            assert!(lines(leftover, PATH, &format!("fn f() {{ g(\"{name}!\") }}\n")).is_empty());
            assert!(lines(leftover, PATH, &format!("fn f() {{ {name}(1) }}\n")).is_empty());
        }
    }

    #[test]
    fn vague_names_are_flagged_under_src() {
        for bad in ["utils.rs", "io/common.rs", "common/align.rs"] {
            assert_eq!(lines(file_name, &format!("crates/bifolio/src/{bad}"), ""), [1], "{bad}");
        }
        for good in ["src/io/backing.rs", "src/uncommon.rs", "tests/common.rs"] {
            assert!(lines(file_name, &format!("crates/bifolio/{good}"), "").is_empty(), "{good}");
        }
    }
}
