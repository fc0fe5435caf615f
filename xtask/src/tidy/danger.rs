//! The rule about unsafe code: a file opts in, says why it is sound, and is where it may be.
//!
//! Where it stands: called by [`super::check`] for every file. The compiler denies unsafe code
//! without the opt-in, but lets a module hand it down to its files; here each file has its own,
//! so that one search lists all of them. Clippy asks for a comment on each block.

use super::{Finding, source::Source};

/// The modules of the library that may hold unsafe code; the others build on what these offer.
const MODULES: [&str; 11] = [
    "stats",
    "sync",
    "page",
    "memory",
    "io",
    "sys",
    "map",
    "file",
    "cache",
    "writeback",
    "reclaim",
];

/// A file with unsafe code has the opt-in, a `# Safety` head, and a place for it.
pub fn danger(source: &Source) -> Vec<Finding> {
    let Some(first) = source.tokens().iter().find(|token| token.text == "unsafe") else {
        return Vec::new();
    };
    let mut messages = Vec::new();
    if !opts_in(source) {
        messages.push("unsafe code in a file without `#![allow(unsafe_code)]`".to_owned());
    }
    if !source.head().contains(&"# Safety") {
        messages.push("unsafe code in a file without a `//! # Safety` head".to_owned());
    }
    if let Some(module) = module_without_place(source) {
        messages.push(format!("no unsafe code in `{module}`; only in {}", MODULES.join(", ")));
    }
    let found = messages.into_iter();
    found.map(|message| Finding::new(source, first.line, "unsafe", message)).collect()
}

/// Whether the file itself allows unsafe code, alone or together with other lints.
fn opts_in(source: &Source) -> bool {
    let tokens = source.tokens();
    (0..tokens.len()).any(|at| {
        tokens[at].depth == 0
            && source.words(at, 5) == ["#", "!", "[", "allow", "("]
            && tokens[at..source.closing(at + 2)].iter().any(|token| token.text == "unsafe_code")
    })
}

/// The module of the library that the file belongs to, if it may not hold unsafe code.
fn module_without_place(source: &Source) -> Option<&str> {
    let module = *source.library_modules()?.first()?;
    (!source.is_test_file() && !MODULES.contains(&module)).then_some(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/bifolio/src/memory/arena.rs";
    const HEAD: &str = "//! Frames.\n//!\n//! # Safety\n//!\n//! Sound, because.\n";
    const BLOCK: &str = "fn f() { unsafe { g() } }\n";

    fn count(path: &str, text: &str) -> usize {
        danger(&Source::new(path, text).unwrap()).len()
    }

    #[test]
    fn opt_in_and_head_are_both_required() {
        assert_eq!(count(PATH, &format!("{HEAD}\n#![allow(unsafe_code)]\n{BLOCK}")), 0);
        assert_eq!(count(PATH, &format!("{HEAD}#![allow(dead_code, unsafe_code)]\n{BLOCK}")), 0);
        assert_eq!(count(PATH, &format!("{HEAD}{BLOCK}")), 1);
        assert_eq!(count(PATH, &format!("//! Frames.\n#![allow(unsafe_code)]\n{BLOCK}")), 1);
        assert_eq!(count(PATH, BLOCK), 2);
    }

    #[test]
    fn every_form_of_unsafe_counts() {
        for form in [
            "unsafe fn f() {}",
            "unsafe impl Send for A {}",
            "unsafe trait T {}",
            "#[unsafe(no_mangle)] fn f() {}",
            "m!(unsafe { g() });",
        ] {
            assert_eq!(count(PATH, form), 2, "{form}");
        }
    }

    #[test]
    fn the_word_alone_is_not_code() {
        let text = "// unsafe\n/// unsafe\nfn f() { g(\"unsafe\"); unsafe_code() }\n";
        assert_eq!(count(PATH, text), 0);
    }

    #[test]
    fn an_inner_or_outer_attribute_below_is_no_opt_in() {
        assert_eq!(count(PATH, &format!("{HEAD}#[allow(unsafe_code)]\n{BLOCK}")), 1);
        assert_eq!(count(PATH, &format!("{HEAD}mod m {{ #![allow(unsafe_code)] }}\n{BLOCK}")), 1);
    }

    #[test]
    fn only_some_modules_of_the_library_may_hold_it() {
        let text = format!("{HEAD}#![allow(unsafe_code)]\n{BLOCK}");
        for bad in ["crates/bifolio/src/lib.rs", "crates/bifolio/src/config.rs"] {
            assert_eq!(count(bad, &text), 1, "{bad}");
        }
        for good in [
            "crates/bifolio/src/sys/file.rs",
            "crates/bifolio/src/tests/loom_pin.rs",
            "crates/bifolio/tests/pins.rs",
            "crates/bifolio-bench/src/clock.rs",
        ] {
            assert_eq!(count(good, &text), 0, "{good}");
        }
    }
}
