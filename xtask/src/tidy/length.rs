//! Rules about length: a file and a function fit into a head.
//!
//! Where it stands: called by [`super::check`] for every file. A file that is longer for a good
//! reason gives it in its head, on a line with the word `Length` and a colon before the reason.
//! Test code does not count towards a file's lines, but a test function is a function.

use super::{Finding, source::Source};

/// The longest file, in lines that are not test code.
const FILE_LINES_MAX: usize = 600;

/// The longest function, in lines from its `fn` to its closing bracket.
const FUNCTION_LINES_MAX: usize = 70;

/// A file has at most `FILE_LINES_MAX` lines that are not test code.
pub fn file(source: &Source) -> Vec<Finding> {
    let lines = source.lines().filter(|(line, _)| !source.is_test_line(*line)).count();
    if lines <= FILE_LINES_MAX || has_reason(source) {
        return Vec::new();
    }
    let message = format!(
        "{lines} lines without tests; at most {FILE_LINES_MAX}, or `Length:` and why in the head"
    );
    vec![Finding::new(source, 1, "file-length", message)]
}

/// A function has at most `FUNCTION_LINES_MAX` lines.
pub fn function(source: &Source) -> Vec<Finding> {
    if has_reason(source) {
        return Vec::new();
    }
    let tokens = source.tokens();
    let starts = (0..tokens.len()).filter(|at| tokens[*at].text == "fn");
    let found = starts.filter_map(|start| {
        let lines = tokens[body_end(source, start)?].line - tokens[start].line + 1;
        let name = &tokens[start + 1].text;
        let message = format!(
            "`{name}` has {lines} lines; at most {FUNCTION_LINES_MAX}, or `Length:` and why in \
             the head"
        );
        let finding = Finding::new(source, tokens[start].line, "function-length", message);
        (lines > FUNCTION_LINES_MAX).then_some(finding)
    });
    found.collect()
}

/// The closing bracket of the function whose `fn` is at `start`; nothing for a function without a
/// body, and for the type of a function, which has no name behind its `fn`.
fn body_end(source: &Source, start: usize) -> Option<usize> {
    let tokens = source.tokens();
    let depth = tokens[start].depth;
    if tokens.get(start + 1)?.text == "(" {
        return None;
    }
    let ends =
        |at: &usize| tokens[*at].depth == depth && ["{", ";"].contains(&tokens[*at].text.as_str());
    let end = (start + 1..tokens.len()).find(ends)?;
    (tokens[end].text == "{").then(|| source.closing(end))
}

/// Whether the head gives a reason for its length.
fn has_reason(source: &Source) -> bool {
    source
        .head()
        .iter()
        .any(|line| line.split_once("Length:").is_some_and(|(_, reason)| !reason.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(rule: fn(&Source) -> Vec<Finding>, text: &str) -> usize {
        rule(&Source::new("crates/bifolio/src/io/disk.rs", text).unwrap()).len()
    }

    fn function_of(lines: usize) -> String {
        format!("fn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn file_limit_counts_lines_that_are_not_tests() {
        let at_limit = "//! Head.\n".repeat(FILE_LINES_MAX);
        assert_eq!(findings(file, &at_limit), 0);
        assert_eq!(findings(file, &format!("{at_limit}fn f() {{}}\n")), 1);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// a\n".repeat(900));
        assert_eq!(findings(file, &format!("{at_limit}{tests}")), 0);
    }

    #[test]
    fn file_of_tests_may_be_long() {
        let text = "//! Head.\n".repeat(FILE_LINES_MAX + 1);
        assert!(file(&Source::new("crates/bifolio/tests/model.rs", &text).unwrap()).is_empty());
    }

    #[test]
    fn function_limit_includes_signature_and_bracket() {
        assert_eq!(findings(function, &function_of(FUNCTION_LINES_MAX)), 0);
        assert_eq!(findings(function, &function_of(FUNCTION_LINES_MAX + 1)), 1);
    }

    #[test]
    fn function_is_found_in_impl_and_test_code() {
        let long = function_of(FUNCTION_LINES_MAX + 1);
        assert_eq!(findings(function, &format!("impl A {{\n{long}}}\n")), 1);
        assert_eq!(findings(function, &format!("#[cfg(test)]\nmod tests {{\n{long}}}\n")), 1);
    }

    #[test]
    fn function_without_a_body_is_not_charged_for_what_follows() {
        let lines = "    const A: u8 = 1;\n".repeat(FUNCTION_LINES_MAX);
        let declared = format!("trait T {{\nfn f();\n{lines}fn g() {{}}\n}}");
        assert_eq!(findings(function, &declared), 0);
        let pointer = format!("impl A for fn(u8) {{\n{lines}}}");
        assert_eq!(findings(function, &pointer), 0);
    }

    #[test]
    fn function_with_types_and_bounds_in_its_signature_is_measured() {
        let body = "    step();\n".repeat(FUNCTION_LINES_MAX);
        for signature in [
            "fn f<T: Iterator<Item = u8>>(a: T)",
            "fn f(a: [u8; 4]) -> impl Iterator<Item = u8>",
            "unsafe extern \"C\" fn f(a: fn(u8) -> u8) where A: B<C = D>",
        ] {
            assert_eq!(
                findings(function, &format!("{signature} {{\n{body}}}\n")),
                1,
                "{signature}"
            );
        }
    }

    #[test]
    fn a_reason_in_the_head_lifts_both_limits() {
        let long = function_of(FILE_LINES_MAX + 1);
        let with_reason = format!("//! Head.\n//!\n//! Length: one table of errno texts.\n{long}");
        assert_eq!(findings(file, &with_reason) + findings(function, &with_reason), 0);
        let without = format!("//! Head.\n//!\n//! Length:\n{long}// Length: not in the head\n");
        assert_eq!((findings(file, &without), findings(function, &without)), (1, 1));
    }
}
