//! The rule that the library opens descriptors in one place, `sys/file.rs`, which gives them
//! numbers of 3 or more: a call that opens one is an argument of a function of that file.
//!
//! Called by [`super::check`] for every Rust file. It recognises the calls by their names.

use super::{Finding, source::Source};

/// The file that opens descriptors.
const PLACE: &str = "sys/file.rs";
/// Its functions that call a closure which opens a descriptor.
const OPENERS: [&str; 2] = ["above_standard", "with_standard_occupied"];
/// Calls that open a descriptor.
const CALLS: [&str; 21] = [
    "File::open(",
    "File::create(",
    "File::options(",
    "fs::open(",
    "fs::openat(",
    "fs::read(",
    "fs::read_to_string(",
    "fs::read_dir(",
    "fs::write(",
    "fs::OpenOptions::",
    "eventfd(",
    "pipe_with(",
    "epoll::create(",
    "userfaultfd(",
    "memfd_create(",
    "UnixListener::bind(",
    "UnixStream::connect(",
    "TcpListener::bind(",
    "accept()",
    "IoUring::new(",
    "build(entries)",
];
/// The tokens of the longest call.
const TOKENS_MAX: usize = 7;

/// Checks that each call which opens a descriptor is an argument of an opener.
pub fn descriptors(source: &Source) -> Vec<Finding> {
    if source.library_path().is_none_or(|path| path == PLACE) {
        return Vec::new();
    }
    let tokens = source.tokens();
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let text = source.words(at, TOKENS_MAX).concat();
        let opens = CALLS.iter().any(|call| text.starts_with(call));
        let is_declared = at > 0 && tokens[at - 1].text == "fn";
        if opens && !is_declared && !source.is_test_line(token.line) && !is_argument(source, at) {
            let message = format!(
                "`{}` opens a descriptor outside of `{PLACE}`: pass it to `{}`",
                token.text, OPENERS[0]
            );
            found.push(Finding::new(source, token.line, "descriptor", message));
        }
    }
    found
}

/// Returns `true` if a bracket around the token is that of an opener.
fn is_argument(source: &Source, at: usize) -> bool {
    let tokens = source.tokens();
    let mut depth = tokens[at].depth;
    for outer in (1..at).rev() {
        let token = &tokens[outer];
        if token.depth < depth && ["(", "{", "["].contains(&token.text.as_str()) {
            depth = token.depth;
            if token.text == "(" && OPENERS.contains(&tokens[outer - 1].text.as_str()) {
                return true;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_at(path: &str, text: &str) -> Vec<usize> {
        let source = Source::new(path, text).unwrap();
        descriptors(&source).iter().map(|finding| finding.line).collect()
    }

    const PATH: &str = "crates/bifolio/src/sys/probe.rs";

    #[test]
    fn a_call_that_opens_a_descriptor_is_flagged() {
        for bad in [
            "fn f() {\n    let file = File::open(path)?;\n}",
            "fn f() {\n    std::fs::read_to_string(path)\n}",
            "fn f() {\n    eventfd(0, flags)\n}",
            "fn f() {\n    (listener.accept(), above_standard(g))\n}",
        ] {
            assert_eq!(lines_at(PATH, bad), [2], "{bad}");
        }
    }

    #[test]
    fn an_argument_of_an_opener_is_not() {
        for good in [
            "fn f() { above_standard(|| File::open(path)) }",
            "fn f() { above_standard(|| g(unsafe { userfaultfd(flags) })) }",
            "fn f() { with_standard_occupied(|| fs::read_dir(path)) }",
            "fn f() { file::open(path); fs::remove_file(path) }",
            "#[cfg(test)]\nmod tests { fn f() { File::open(path); } }",
        ] {
            assert!(lines_at(PATH, good).is_empty(), "{good}");
        }
        let bad = "fn f() { File::open(path) }";
        assert!(lines_at("crates/bifolio/src/sys/file.rs", bad).is_empty());
        assert!(lines_at("crates/bifolio-bench/src/host.rs", bad).is_empty());
    }
}
