//! Rules about memory orderings: where the strongest may stand, and that each other is explained.
//!
//! Where it stands: called by [`super::check`] for every file. An ordering is told by its name
//! alone, with or without `Ordering::` before it; a `use` that brings the names in is not a use
//! of an ordering.
//!
//! It cannot tell whether the comment is true: that is for the loom tests and for review.

use super::{
    Finding,
    source::{Source, Token},
};

/// Orderings that promise something to another thread; each use says to which.
const EXPLAINED: [&str; 3] = ["Acquire", "Release", "AcqRel"];

/// All names that may stand before the colon of an explanation.
const NAMES: [&str; 5] = ["Relaxed", "Acquire", "Release", "AcqRel", "SeqCst"];

/// How many lines above the use its comment may start.
const COMMENT_LINES_ABOVE_MAX: usize = 12;

/// The one ordering that hides what pairs with what stays behind the named barriers of `sync`.
pub fn seqcst(source: &Source) -> Vec<Finding> {
    if source.path().contains("/src/sync/") {
        return Vec::new();
    }
    let found = source.tokens().iter().filter(|token| token.text == "SeqCst").map(|token| {
        let message = "`SeqCst` stands only in `sync`; use one of its named barriers".to_owned();
        Finding::new(source, token.line, "seqcst", message)
    });
    found.collect()
}

/// Every other ordering but `Relaxed` has a comment near that starts with its name.
pub fn ordering(source: &Source) -> Vec<Finding> {
    if source.library_path().is_none() {
        return Vec::new();
    }
    let unexplained = uses(source).into_iter().filter(|token| {
        !source.is_test_line(token.line) && !is_explained(source, token.line, &token.text)
    });
    let found = unexplained.map(|token| {
        let name = &token.text;
        let message = format!(
            "`{name}` without a comment `// {name}: pairs with ...` on its line or within \
             {COMMENT_LINES_ABOVE_MAX} lines above"
        );
        Finding::new(source, token.line, "ordering", message)
    });
    found.collect()
}

/// The orderings to explain, without those that a `use` only brings in.
fn uses(source: &Source) -> Vec<&Token> {
    let mut uses = Vec::new();
    let mut brings_in = false;
    for (at, token) in source.tokens().iter().enumerate() {
        match token.text.as_str() {
            // `use<'a>` in a type captures a lifetime and has no `;`.
            "use" => brings_in = source.words(at + 1, 1) != ["<"],
            ";" => brings_in = false,
            name if EXPLAINED.contains(&name) && !brings_in => uses.push(token),
            _ => {}
        }
    }
    uses
}

fn is_explained(source: &Source, line: usize, name: &str) -> bool {
    let first = line.saturating_sub(COMMENT_LINES_ABOVE_MAX);
    source.comments(first..=line).any(|comment| explains(comment, name))
}

/// Whether the comment is `NAME: reason`, or `NAME/NAME: reason` for several in one call.
fn explains(comment: &str, name: &str) -> bool {
    let Some((names, reason)) = comment.split_once(':') else {
        return false;
    };
    let names: Vec<&str> = names.split(['/', ',', ' ']).filter(|word| !word.is_empty()).collect();
    let all_orderings = names.iter().all(|word| NAMES.contains(word) || *word == "and");
    all_orderings && names.contains(&name) && !reason.trim().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/bifolio/src/page/pin.rs";

    fn lines(rule: fn(&Source) -> Vec<Finding>, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text).unwrap()).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn seqcst_stays_in_sync() {
        for bad in
            ["fn f() {\n    a.load(Ordering::SeqCst);\n}", "\nuse O::SeqCst;", "\nm!(SeqCst);"]
        {
            assert_eq!(lines(seqcst, PATH, bad), [2], "{bad}");
            assert_eq!(lines(seqcst, "crates/bifolio-bench/tests/smoke.rs", bad), [2], "{bad}");
            assert!(lines(seqcst, "crates/bifolio/src/sync/membarrier.rs", bad).is_empty());
        }
        assert!(lines(seqcst, PATH, "// SeqCst\nfn f() { g(\"SeqCst\") }").is_empty());
    }

    #[test]
    fn an_ordering_without_its_comment_is_flagged() {
        for bad in [
            "fn f() {\n    a.load(Ordering::Acquire);\n}",
            "fn f() {\n    a.load(Acquire); // see below\n}",
            "// Release: pairs with f.\nfn f() { a.load(Acquire); }",
            "// This is Acquire: pairs with g.\nfn f() { a.load(Acquire); }",
            "// Acquire:\nfn f() { a.load(Acquire); }",
            "// Acquires: a lock.\nfn f() { a.load(Acquire); }",
            "// Acquire on success: pairs with g.\nfn f() { a.load(Acquire); }",
        ] {
            assert_eq!(lines(ordering, PATH, bad), [2], "{bad}");
        }
    }

    #[test]
    fn an_explained_ordering_is_not() {
        for good in [
            "// Acquire: pairs with the Release in g.\nfn f() { a.load(Acquire); }",
            "fn f() { a.load(Acquire); // Acquire: pairs with the Release in g.\n}",
            "// AcqRel: both.\n// Acquire: on failure.\nfn f() { a.cas(1, 2, AcqRel, Acquire); }",
            "// AcqRel/Acquire: pairs with g.\nfn f() { a.cas(1, 2, AcqRel, Acquire); }",
            "// Release, Relaxed: pairs with g.\nfn f() { a.cas(1, 2, Release, Relaxed); }",
            "fn f() { a.load(Relaxed); }",
        ] {
            assert!(lines(ordering, PATH, good).is_empty(), "{good}");
        }
    }

    #[test]
    fn each_of_several_orderings_is_named() {
        let text = "// AcqRel: pairs with g.\nfn f() { a.cas(1, 2, AcqRel, Acquire); }";
        assert_eq!(lines(ordering, PATH, text), [2]);
    }

    #[test]
    fn the_comment_must_be_near_and_above() {
        let far = |between: usize| {
            format!("// Acquire: pairs.\n{}fn f() {{ a.load(Acquire); }}", "\n".repeat(between))
        };
        assert!(lines(ordering, PATH, &far(COMMENT_LINES_ABOVE_MAX - 1)).is_empty());
        assert_eq!(lines(ordering, PATH, &far(COMMENT_LINES_ABOVE_MAX)).len(), 1);
        assert_eq!(lines(ordering, PATH, "fn f() { a.load(Acquire); }\n// Acquire: late."), [1]);
    }

    #[test]
    fn bringing_names_in_is_not_using_them() {
        let text = "use core::sync::atomic::Ordering::{Acquire, Release};\npub use O::AcqRel;";
        assert!(lines(ordering, PATH, text).is_empty());
        let after = "use a::b;\nfn f() -> impl A + use<'a> { g(Acquire) }";
        assert_eq!(lines(ordering, PATH, after), [2]);
    }

    #[test]
    fn test_code_and_other_crates_need_no_comment() {
        let text = "fn f() { a.load(Acquire); }";
        assert!(lines(ordering, "crates/bifolio/src/tests/loom_pin.rs", text).is_empty());
        assert!(lines(ordering, "crates/bifolio-bench/src/clock.rs", text).is_empty());
        let inline = format!("#[cfg(test)]\nmod tests {{ {text} }}");
        assert!(lines(ordering, PATH, &inline).is_empty());
    }
}
