//! The rules about one file: its head, characters, name and length, its unsafe code, and the
//! comments at memory orderings.
//!
//! Called by [`super::check`] for every Rust file. The compiler and clippy check the rest: this
//! requires that each file with unsafe code opts in by itself, so that one search lists all of
//! them. An ordering is recognised by its name; whether its comment is true is for loom and for
//! review.

use std::path::Path;

use super::{
    Finding,
    source::{Source, Token},
};

/// The longest line, in characters; the same number stands in `rustfmt.toml`.
const COLUMNS_MAX: usize = 100;
/// The longest file, in lines that are not test code.
const FILE_LINES_MAX: usize = 600;
/// The longest function, in lines from its `fn` to its closing bracket.
const FUNCTION_LINES_MAX: usize = 70;
/// How many lines above an ordering its comment may start.
const COMMENT_LINES_ABOVE_MAX: usize = 12;

/// Words that mark unfinished work. Split, so that this file does not contain them.
const MARKERS: [&str; 3] = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")];
/// Macros of unfinished code.
const MACROS: [&str; 3] = ["dbg", "todo", "unimplemented"];
/// File names that do not describe the content.
const VAGUE_NAMES: [&str; 2] = ["utils", "common"];

/// Orderings that synchronise with another thread; each use is explained.
const EXPLAINED: [&str; 3] = ["Acquire", "Release", "AcqRel"];
/// All names that may stand before the colon of an explanation.
const ORDERINGS: [&str; 5] = ["Relaxed", "Acquire", "Release", "AcqRel", "SeqCst"];

/// The modules of the library that may hold unsafe code; the others build on what these offer.
const UNSAFE_MODULES: [&str; 15] = [
    "stats",
    "sync",
    "page",
    "memory",
    "io",
    "sys",
    "maps",
    "file",
    "cache",
    "store",
    "inode",
    "writeback",
    "reclaim",
    "fill",
    "share",
];

/// Checks that every file starts with a `//!` head.
pub fn head(source: &Source) -> Vec<Finding> {
    if source.head().iter().any(|line| !line.is_empty()) {
        return Vec::new();
    }
    let message = "a file starts with a `//!` head: what it is, where it stands, its invariants";
    vec![Finding::new(source, 1, "head", message.to_owned())]
}

/// Checks that sources are ASCII and lines are short.
pub fn characters(source: &Source) -> Vec<Finding> {
    let mut found = Vec::new();
    for (line, text) in source.lines() {
        let columns = text.chars().count();
        if columns > COLUMNS_MAX {
            let message = format!("{columns} columns; at most {COLUMNS_MAX}");
            found.push(Finding::new(source, line, "columns", message));
        }
        if let Some((at, other)) = text.chars().enumerate().find(|(_, it)| !it.is_ascii()) {
            let code = u32::from(other);
            let message = format!("column {}: U+{code:04X} is not ASCII; write an escape", at + 1);
            found.push(Finding::new(source, line, "ascii", message));
        }
    }
    found
}

/// Checks that no marker or macro of unfinished code remains.
pub fn leftover(source: &Source) -> Vec<Finding> {
    let is_part = |character: char| character.is_alphanumeric() || character == '_';
    let markers = source.lines().flat_map(|(line, text)| {
        let words = text.split(move |character| !is_part(character));
        words.filter(|word| MARKERS.contains(word)).map(move |word| (line, word.to_owned()))
    });
    let macros = source
        .tokens()
        .windows(2)
        .filter(|pair| MACROS.contains(&pair[0].text.as_str()) && pair[1].text == "!");
    let all = markers.chain(macros.map(|pair| (pair[0].line, format!("{}!", pair[0].text))));
    let message = |name: String| format!("`{name}`: do it now, or write an issue");
    all.map(|(line, name)| Finding::new(source, line, "leftover", message(name))).collect()
}

/// Checks that files and folders under `src` are named after their content.
pub fn file_name(source: &Source) -> Vec<Finding> {
    let Some((_, below)) = source.path().split_once("/src/") else { return Vec::new() };
    let stems = below.split('/').map(|part| Path::new(part).file_stem().unwrap_or_default());
    let vague = stems.filter_map(|stem| VAGUE_NAMES.iter().find(|name| stem == **name));
    let message = |name| format!("`{name}` says nothing; name it after the one thing it holds");
    vague.map(|name| Finding::new(source, 1, "file-name", message(name))).collect()
}

/// Checks that files and functions are short, unless the head has a line with `Length:` and a
/// reason.
pub fn length(source: &Source) -> Vec<Finding> {
    let reason = |line: &&str| line.split_once("Length:").is_some_and(|it| !it.1.trim().is_empty());
    if source.head().iter().any(reason) {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut check = |line, rule, name: &str, lines: usize, max: usize| {
        if lines > max {
            let message = format!(
                "{name} has {lines} lines; at most {max}, or `Length:` and why in the head"
            );
            found.push(Finding::new(source, line, rule, message));
        }
    };
    let lines = source.lines().filter(|(line, _)| !source.is_test_line(*line)).count();
    check(1, "file-length", "the file without tests", lines, FILE_LINES_MAX);
    let tokens = source.tokens();
    for start in (0..tokens.len()).filter(|at| tokens[*at].text == "fn") {
        if let Some(end) = body_end(source, start) {
            let lines = tokens[end].line - tokens[start].line + 1;
            let (line, name) = (tokens[start].line, format!("`{}`", tokens[start + 1].text));
            check(line, "function-length", &name, lines, FUNCTION_LINES_MAX);
        }
    }
    found
}

/// Returns the closing bracket of the function whose `fn` is at `start`; nothing for a function
/// without a body, and for the type of a function, which has no name behind its `fn`.
fn body_end(source: &Source, start: usize) -> Option<usize> {
    let tokens = source.tokens();
    if tokens.get(start + 1)?.text == "(" {
        return None;
    }
    let is_end = |token: &Token| {
        token.depth == tokens[start].depth && ["{", ";"].contains(&token.text.as_str())
    };
    let end = (start + 1..tokens.len()).find(|at| is_end(&tokens[*at]))?;
    (tokens[end].text == "{").then(|| source.closing(end))
}

/// Checks that a file with unsafe code has the opt-in and a `# Safety` head, and is in a module
/// that may have unsafe code.
pub fn danger(source: &Source) -> Vec<Finding> {
    let tokens = source.tokens();
    let Some(first) = tokens.iter().find(|token| token.text == "unsafe") else {
        return Vec::new();
    };
    let opts_in = |at: usize| {
        tokens[at].depth == 0
            && source.words(at, 5) == ["#", "!", "[", "allow", "("]
            && tokens[at..source.closing(at + 2)].iter().any(|token| token.text == "unsafe_code")
    };
    let mut messages = Vec::new();
    if !(0..tokens.len()).any(opts_in) {
        messages.push("unsafe code in a file without `#![allow(unsafe_code)]`".to_owned());
    }
    if !source.head().contains(&"# Safety") {
        messages.push("unsafe code in a file without a `//! # Safety` head".to_owned());
    }
    let module = source.library_modules().map(|modules| modules[0]);
    if let Some(module) = module.filter(|it| !UNSAFE_MODULES.contains(it))
        && !source.is_test_file()
    {
        let allowed = UNSAFE_MODULES.join(", ");
        messages.push(format!("no unsafe code in `{module}`; only in {allowed}"));
    }
    let found = messages.into_iter();
    found.map(|message| Finding::new(source, first.line, "unsafe", message)).collect()
}

/// Checks that `SeqCst` stays behind the named barriers of `sync`, and that every other ordering of
/// the library except `Relaxed` has a comment near it that starts with its name.
pub fn orderings(source: &Source) -> Vec<Finding> {
    let is_sync = source.path().contains("/src/sync/") || source.path().ends_with("/chaos.rs");
    let mut found = Vec::new();
    let mut brings_in = false;
    for (at, token) in source.tokens().iter().enumerate() {
        let (name, line) = (token.text.as_str(), token.line);
        match name {
            // `use<'a>` in a type captures a lifetime and has no `;`.
            "use" => brings_in = source.words(at + 1, 1) != ["<"],
            ";" => brings_in = false,
            "SeqCst" if !is_sync => {
                let message = "`SeqCst` stands only in `sync`; use one of its named barriers";
                found.push(Finding::new(source, line, "seqcst", message.to_owned()));
            }
            _ if !EXPLAINED.contains(&name) || brings_in || source.is_test_line(line) => {}
            _ if source.library_path().is_none() || is_explained(source, line, name) => {}
            _ => {
                let message = format!(
                    "`{name}` without a comment `// {name}: pairs with ...` on its line or within \
                     {COMMENT_LINES_ABOVE_MAX} lines above"
                );
                found.push(Finding::new(source, line, "ordering", message));
            }
        }
    }
    found
}

fn is_explained(source: &Source, line: usize, name: &str) -> bool {
    let first = line.saturating_sub(COMMENT_LINES_ABOVE_MAX);
    source.comments(first..=line).any(|comment| explains(comment, name))
}

/// Returns `true` for `NAME: reason`, and for `NAME/NAME: reason` for several in one call.
fn explains(comment: &str, name: &str) -> bool {
    let Some((names, reason)) = comment.split_once(':') else { return false };
    let names: Vec<&str> = names.split(['/', ',', ' ']).filter(|word| !word.is_empty()).collect();
    let all_orderings = names.iter().all(|word| ORDERINGS.contains(word) || *word == "and");
    all_orderings && names.contains(&name) && !reason.trim().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/bifolio/src/page/pin.rs";
    const BENCH: &str = "crates/bifolio-bench/src/clock.rs";

    fn lines_at(rule: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text).unwrap()).iter().map(|finding| finding.line).collect()
    }

    fn lines(rule: fn(&Source) -> Vec<Finding>, text: &str) -> Vec<usize> {
        lines_at(rule, PATH, text)
    }

    #[test]
    fn head_is_required_and_must_not_be_empty() {
        for bad in ["", "// A plain comment.\nfn f() {}\n", "//!\n", "mod m {\n//! Inner.\n}\n"] {
            assert_eq!(lines(head, bad), [1], "{bad:?}");
        }
        assert!(lines(head, "#![allow(unsafe_code)]\n//! Rounding.\n").is_empty());
    }

    #[test]
    fn long_lines_and_other_characters_are_flagged() {
        let text = format!("//{}\n//{}\n// \u{e9}\u{e9}\n", "a".repeat(99), "a".repeat(98));
        assert_eq!(lines(characters, &text), [1, 3]);
    }

    #[test]
    fn markers_are_whole_words_and_macros_are_code() {
        for marker in MARKERS {
            assert_eq!(lines(leftover, &format!("fn f() {{ p(\"{marker}\") }}\n")), [1]);
            assert!(lines(leftover, &format!("// {marker}ED {marker}_LIST\n")).is_empty());
        }
        for name in MACROS {
            assert_eq!(lines(leftover, &format!("fn f() {{\n    {name}!(1)\n}}\n")), [2]);
            assert!(lines(leftover, &format!("fn f() {{ g(\"{name}!\"); {name}(1) }}")).is_empty());
        }
    }

    #[test]
    fn vague_names_are_flagged_under_src() {
        for (path, count) in
            [("src/utils.rs", 1), ("src/common/align.rs", 1), ("tests/common.rs", 0)]
        {
            assert_eq!(lines_at(file_name, &format!("crates/bifolio/{path}"), "").len(), count);
        }
    }

    #[test]
    fn file_limit_counts_lines_that_are_not_tests() {
        let at_limit = "//! Head.\n".repeat(FILE_LINES_MAX);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// a\n".repeat(900));
        assert!(lines(length, &format!("{at_limit}{tests}")).is_empty());
        let over = format!("{at_limit}fn f() {{}}\n");
        assert_eq!(lines(length, &over), [1]);
        assert!(lines_at(length, "crates/bifolio/tests/model.rs", &over).is_empty());
        assert!(lines(length, &format!("//! Length: one table.\n{over}")).is_empty());
        assert_eq!(lines(length, &format!("//! Length:\n{over}// Length: late\n")), [1]);
    }

    #[test]
    fn function_limit_includes_signature_and_bracket() {
        let body = |count| "    step();\n".repeat(count);
        for signature in [
            "fn f()",
            "fn f<T: Iterator<Item = u8>>(a: [u8; 4]) -> impl Iterator<Item = u8>",
            "unsafe extern \"C\" fn f(a: fn(u8) -> u8) where A: B<C = D>",
        ] {
            let text = |count| format!("{signature} {{\n{}}}\n", body(count - 2));
            assert!(lines(length, &text(FUNCTION_LINES_MAX)).is_empty(), "{signature}");
            let long = text(FUNCTION_LINES_MAX + 1);
            assert_eq!(lines(length, &long), [1], "{signature}");
            assert_eq!(lines(length, &format!("#[cfg(test)]\nmod tests {{\n{long}}}\n")), [3]);
        }
        let constants = "    const A: u8 = 1;\n".repeat(FUNCTION_LINES_MAX);
        for text in ["trait T {\nfn f();\n{}fn g() {}\n}", "impl A for fn(u8) {\n{}}"] {
            assert!(lines(length, &text.replace("{}fn", &format!("{constants}fn"))).is_empty());
        }
    }

    #[test]
    fn unsafe_code_needs_the_opt_in_a_head_and_a_place() {
        const HEAD: &str = "//! Frames.\n//!\n//! # Safety\n//! Sound, because.\n";
        const BLOCK: &str = "fn f() { unsafe { g() } }\n";
        let count = |path: &str, text: &str| lines_at(danger, path, text).len();
        let good = format!("{HEAD}#![allow(dead_code, unsafe_code)]\n{BLOCK}");
        for (text, findings) in [
            (good.as_str(), 0),
            (&format!("{HEAD}{BLOCK}"), 1),
            (&format!("{HEAD}#[allow(unsafe_code)]\n{BLOCK}"), 1),
            (&format!("{HEAD}mod m {{ #![allow(unsafe_code)] }}\n{BLOCK}"), 1),
            (&format!("//! Frames.\n#![allow(unsafe_code)]\n{BLOCK}"), 1),
            ("unsafe impl Send for A {}", 2),
            ("m!(unsafe { g() });", 2),
            ("// unsafe\nfn f() { g(\"unsafe\"); unsafe_code() }\n", 0),
        ] {
            assert_eq!(count(PATH, text), findings, "{text}");
        }
        assert_eq!(count("crates/bifolio/src/config.rs", &good), 1);
        assert_eq!(count("crates/bifolio/src/tests/loom_pin.rs", &good) + count(BENCH, &good), 0);
    }

    #[test]
    fn seqcst_stays_in_sync() {
        for bad in ["fn f() {\n    a.load(Ordering::SeqCst);\n}", "\nm!(SeqCst);"] {
            assert_eq!(lines(orderings, bad), [2], "{bad}");
            assert_eq!(lines_at(orderings, BENCH, bad), [2], "{bad}");
            assert!(lines_at(orderings, "crates/bifolio/src/sync/mod.rs", bad).is_empty());
        }
        assert!(lines(orderings, "// SeqCst\nfn f() { g(\"SeqCst\") }").is_empty());
    }

    #[test]
    fn an_ordering_without_its_comment_is_flagged() {
        for bad in [
            "fn f() {\n    a.load(Ordering::Acquire);\n}",
            "// Release: pairs with f.\nfn f() { a.load(Acquire); }",
            "// This is Acquire: pairs with g.\nfn f() { a.load(Acquire); }",
            "// Acquire:\nfn f() { a.load(Acquire); }",
            "// AcqRel: pairs with g.\nfn f() { a.cas(1, 2, AcqRel, Acquire); }",
            "use a::b;\nfn f() -> impl A + use<'a> { g(Acquire) }",
        ] {
            assert_eq!(lines(orderings, bad), [2], "{bad}");
        }
        assert_eq!(lines(orderings, "fn f() { a.load(Acquire); }\n// Acquire: late."), [1]);
    }

    #[test]
    fn an_explained_ordering_is_not() {
        for good in [
            "// Acquire: pairs with the Release in g.\nfn f() { a.load(Acquire); }",
            "fn f() { a.load(Acquire); // Acquire: pairs with the Release in g.\n}",
            "// AcqRel: both.\n// Acquire: on failure.\nfn f() { a.cas(1, 2, AcqRel, Acquire); }",
            "// AcqRel/Acquire: pairs with g.\nfn f() { a.cas(1, 2, AcqRel, Acquire); }",
            "use core::sync::atomic::Ordering::{Acquire, Release};\nfn f() { a.load(Relaxed); }",
            "#[cfg(test)]\nmod tests { fn f() { a.load(Acquire); } }",
        ] {
            assert!(lines(orderings, good).is_empty(), "{good}");
        }
        assert!(lines_at(orderings, BENCH, "fn f() { a.load(Acquire); }").is_empty());
        let far = |between: usize| {
            format!("// Acquire: pairs.\n{}fn f() {{ a.load(Acquire); }}", "\n".repeat(between))
        };
        assert!(lines(orderings, &far(COMMENT_LINES_ABOVE_MAX - 1)).is_empty());
        assert_eq!(lines(orderings, &far(COMMENT_LINES_ABOVE_MAX)).len(), 1);
    }
}
