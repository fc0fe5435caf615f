//! A Rust file as the rules see it: its text, tokens and comments, and which lines are test code.
//!
//! [`super::check`] creates a [`Source`] for each file. The tokens come from `proc-macro2`, so a
//! word in a string or a comment is never taken for code, and code inside a macro call is seen.
//! Between two tokens there is only white space and comments, so the comments are the text that the
//! tokens do not cover; doc comments come as tokens and are converted back.
//!
//! It does not resolve names.

use std::iter::Peekable;
use std::ops::{Range, RangeInclusive};

use proc_macro2::{Delimiter, Group, Span, TokenStream, TokenTree};

use super::Finding;

/// A word, a sign or a bracket of the code, in the order of the text.
#[derive(Clone, Debug)]
pub struct Token {
    /// The token as written; a literal is `LITERAL`, whatever it holds.
    pub text: String,
    /// Its line, from 1.
    pub line: usize,
    /// Number of open brackets around it; an opening and its closing bracket have the same.
    pub depth: usize,
}

/// The stand-in for the text of any literal.
const LITERAL: &str = "\"\"";

/// One line of a comment, without its marks.
#[derive(Clone, Debug)]
pub struct Comment {
    /// Its line, from 1.
    pub line: usize,
    /// Its text.
    pub text: String,
}

/// A file, read once for all rules.
#[derive(Debug)]
pub struct Source {
    path: String,
    text: String,
    tokens: Vec<Token>,
    comments: Vec<Comment>,
    tests: Vec<RangeInclusive<usize>>,
}

impl Source {
    /// Reads the text of the file at `path`, which is relative to the workspace, with `/`.
    pub fn new(path: &str, text: &str) -> Result<Self, Finding> {
        let mut source = Self {
            path: path.to_owned(),
            text: text.to_owned(),
            tokens: Vec::new(),
            comments: Vec::new(),
            tests: Vec::new(),
        };
        let stream: TokenStream = text.parse().map_err(|error: proc_macro2::LexError| {
            let line = error.span().start().line;
            Finding::new(&source, line, "tokens", format!("not readable as Rust: {error}"))
        })?;
        let mut reader = Reader::new(text);
        reader.stream(stream, 0);
        reader.comments_up_to(text.len());
        source.tokens = reader.tokens;
        source.comments = reader.comments;
        source.tests = test_modules(&source.tokens);
        Ok(source)
    }

    /// Where the file is, from the root of the workspace.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The lines with their numbers, from 1.
    pub fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    /// The tokens of the code.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The texts of the tokens from `start` on, at most `length` of them.
    pub fn words(&self, start: usize, length: usize) -> Vec<&str> {
        self.tokens.iter().skip(start).take(length).map(|token| token.text.as_str()).collect()
    }

    /// The comments on these lines.
    pub fn comments(&self, lines: RangeInclusive<usize>) -> impl Iterator<Item = &str> {
        self.comments
            .iter()
            .filter(move |comment| lines.contains(&comment.line))
            .map(|comment| comment.text.as_str())
    }

    /// All lines of comments.
    pub fn all_comments(&self) -> impl Iterator<Item = &Comment> {
        self.comments.iter()
    }

    /// The names of the tests, with their lines.
    pub fn test_names(&self) -> impl Iterator<Item = (usize, &str)> {
        let is_test = |found: &&[Token]| {
            found[0].text == "test" && found[1].text == "]" && found[2].text == "fn"
        };
        self.tokens.windows(4).filter(is_test).map(|found| (found[3].line, found[3].text.as_str()))
    }

    /// The lines of the file's head: the `//!` lines before the first item, without their marks.
    pub fn head(&self) -> Vec<&str> {
        let before_items =
            |line: &&str| line.is_empty() || line.starts_with("//") || line.starts_with("#![");
        let lines = self.text.lines().map(str::trim).take_while(before_items);
        lines.filter_map(|line| line.strip_prefix("//!")).map(str::trim).collect()
    }

    /// The index of the bracket that closes the one at `open`.
    pub fn closing(&self, open: usize) -> usize {
        closing(&self.tokens, open)
    }

    /// Returns the name at `at`, or the first names of the group there.
    pub fn first_names(&self, at: usize) -> Vec<&Token> {
        let tokens = &self.tokens;
        match tokens.get(at).map(|token| token.text.as_str()) {
            None => return Vec::new(),
            Some("{") => {}
            Some(_) => return vec![&tokens[at]],
        }
        let is_first = |index: &usize| {
            tokens[*index].depth == tokens[at].depth + 1
                && matches!(tokens[index - 1].text.as_str(), "{" | ",")
        };
        (at + 1..self.closing(at)).filter(is_first).map(|index| &tokens[index]).collect()
    }

    /// Returns `true` if the whole file is test code: it is below `tests`, or is `disk_tests.rs`.
    pub fn is_test_file(&self) -> bool {
        let is_tests = |part: &str| {
            let stem = part.strip_suffix(".rs");
            part == "tests" || stem == Some("tests") || stem.is_some_and(|s| s.ends_with("_tests"))
        };
        self.path.split('/').any(is_tests)
    }

    /// Returns `true` if the line is in a test file or in a test module.
    pub fn is_test_line(&self, line: usize) -> bool {
        self.is_test_file() || self.tests.iter().any(|lines| lines.contains(&line))
    }

    /// The path below `src` of the library, `crates/bifolio`; nothing for another file.
    pub fn library_path(&self) -> Option<&str> {
        self.path.strip_prefix("crates/bifolio/src/")
    }

    /// Returns the modules of a file of the library: `io/disk.rs` is `io`, `disk`.
    pub fn library_modules(&self) -> Option<Vec<&str>> {
        let path = self.library_path()?.strip_suffix(".rs")?;
        let path = path.strip_suffix("/mod").unwrap_or(path);
        Some(path.split('/').collect())
    }
}

/// Walks the tokens and keeps what is between them.
struct Reader<'a> {
    text: &'a str,
    line_starts: Vec<usize>,
    /// How far the text has been read, in bytes.
    read_bytes: usize,
    tokens: Vec<Token>,
    comments: Vec<Comment>,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let line_starts = std::iter::once(0).chain(ends.map(|(at, _)| at + 1)).collect();
        Self { text, line_starts, read_bytes: 0, tokens: Vec::new(), comments: Vec::new() }
    }

    fn stream(&mut self, stream: TokenStream, depth: usize) {
        let mut trees = stream.into_iter().peekable();
        while let Some(tree) = trees.next() {
            if self.doc_comment(&tree) {
                skip_attribute(&mut trees);
                continue;
            }
            match tree {
                TokenTree::Group(group) => self.group(&group, depth),
                TokenTree::Literal(literal) => self.token(literal.span(), LITERAL, depth),
                other => self.token(other.span(), &other.to_string(), depth),
            }
        }
    }

    fn group(&mut self, group: &Group, depth: usize) {
        let (open, close) = match group.delimiter() {
            Delimiter::Parenthesis => ("(", ")"),
            Delimiter::Brace => ("{", "}"),
            Delimiter::Bracket => ("[", "]"),
            // Only a macro's expansion has groups without brackets; a file has none.
            Delimiter::None => return self.stream(group.stream(), depth),
        };
        self.token(group.span_open(), open, depth);
        self.stream(group.stream(), depth + 1);
        self.token(group.span_close(), close, depth);
    }

    fn token(&mut self, span: Span, text: &str, depth: usize) {
        let bytes = span.byte_range();
        self.comments_up_to(bytes.start);
        self.read_bytes = self.read_bytes.max(bytes.end);
        let line = self.line_at(bytes.start);
        self.tokens.push(Token { text: text.to_owned(), line, depth });
    }

    /// Takes the tree as a doc comment if it is the `#` of an attribute written as a doc comment.
    fn doc_comment(&mut self, tree: &TokenTree) -> bool {
        let TokenTree::Punct(sign) = tree else {
            return false;
        };
        let bytes = sign.span().byte_range();
        if sign.as_char() != '#' || !self.slice(bytes.clone()).starts_with('/') {
            return false;
        }
        self.comments_up_to(bytes.end);
        true
    }

    fn comments_up_to(&mut self, end: usize) {
        if end <= self.read_bytes {
            return;
        }
        let first = self.line_at(self.read_bytes);
        for (line, text) in (first..).zip(self.slice(self.read_bytes..end).lines()) {
            let text = text.trim().trim_start_matches(['/', '!', '*']).trim();
            if !text.is_empty() {
                self.comments.push(Comment { line, text: text.to_owned() });
            }
        }
        self.read_bytes = end;
    }

    fn slice(&self, bytes: Range<usize>) -> &'a str {
        self.text.get(bytes).unwrap_or_default()
    }

    fn line_at(&self, byte: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= byte)
    }
}

/// Skips the rest of an attribute after its `#`: an optional `!` and the brackets.
fn skip_attribute(trees: &mut Peekable<impl Iterator<Item = TokenTree>>) {
    trees.next_if(|tree| matches!(tree, TokenTree::Punct(sign) if sign.as_char() == '!'));
    trees.next_if(|tree| matches!(tree, TokenTree::Group(_)));
}

fn closing(tokens: &[Token], open: usize) -> usize {
    let depth = tokens[open].depth;
    let inside = tokens[open + 1..].iter().take_while(|token| token.depth > depth).count();
    (open + 1 + inside).min(tokens.len() - 1)
}

/// The lines of each `mod name { ... }` under a `#[cfg(...)]` that asks for `test`.
fn test_modules(tokens: &[Token]) -> Vec<RangeInclusive<usize>> {
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    let mut modules = Vec::new();
    for start in 0..tokens.len() {
        if [text(start), text(start + 1), text(start + 2)] != ["#", "[", "cfg"] {
            continue;
        }
        let attribute_end = closing(tokens, start + 1);
        if !requires_test(&tokens[start + 3..attribute_end]) {
            continue;
        }
        let mut item = attribute_end + 1;
        while text(item) == "#" && text(item + 1) == "[" {
            item = closing(tokens, item + 1) + 1;
        }
        if text(item) == "pub" {
            item += 1;
            if text(item) == "(" {
                item = closing(tokens, item) + 1;
            }
        }
        if text(item) == "mod" && text(item + 2) == "{" {
            modules.push(tokens[start].line..=tokens[closing(tokens, item + 2)].line);
        }
    }
    modules
}

/// Returns `true` if a `cfg` predicate can hold only with `test`: inside `not` and `any` the word
/// does not count.
fn requires_test(predicate: &[Token]) -> bool {
    let mut at = 0;
    while at < predicate.len() {
        let opens = predicate.get(at + 1).is_some_and(|next| next.text == "(");
        match predicate[at].text.as_str() {
            "not" | "any" if opens => at = closing(predicate, at + 1),
            "test" => return true,
            _ => {}
        }
        at += 1;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::new("crates/bifolio/src/io/disk.rs", text).unwrap()
    }

    #[test]
    fn strings_and_comments_are_not_code() {
        let source =
            source("/// doc: unsafe\nfn f() { g(\"unsafe\", 'u'); /* unsafe */ } // unsafe\n");
        let words = source.words(0, usize::MAX);
        assert_eq!(
            words,
            ["fn", "f", "(", ")", "{", "g", "(", LITERAL, ",", LITERAL, ")", ";", "}"]
        );
    }

    #[test]
    fn comments_of_all_kinds_keep_their_lines() {
        let text = "//! head\n\nfn f() {\n    a(); // one\n    /* two\n     * three */\n\
            /// four\nlet s = \"// no\";\n}\n// five";
        let found: Vec<(usize, String)> =
            source(text).comments.into_iter().map(|comment| (comment.line, comment.text)).collect();
        let expected =
            [(1, "head"), (4, "one"), (5, "two"), (6, "three */"), (7, "four"), (10, "five")];
        assert_eq!(found, expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn head_may_follow_inner_attributes_and_ends_at_the_first_item() {
        let text = "#![allow(unsafe_code)]\n//! One.\n//!\n//! # Safety\nuse a;\n//! Late.\n";
        // The last line is no legal place for `//!`, but the tokens do not mind.
        assert_eq!(source(text).head(), ["One.", "", "# Safety"]);
    }

    #[test]
    fn modules_that_need_test_are_test_code() {
        for (cfg, count) in [
            ("test", 4),
            ("all(test, not(loom))", 4),
            ("all(not(loom), test)", 4),
            ("not(test)", 0),
            ("any(test, fuzzing)", 0),
            ("feature = \"test\"", 0),
        ] {
            let text =
                format!("fn f() {{}}\n#[cfg({cfg})]\n#[allow(x)]\nmod m {{\n}}\nfn g() {{}}");
            let source = source(&text);
            assert_eq!((1..=6).filter(|line| source.is_test_line(*line)).count(), count, "{cfg}");
        }
        assert!(!source("#[cfg(test)]\nfn f() {\n}").is_test_line(2));
    }

    #[test]
    fn test_files_are_told_by_their_path() {
        let is_test_file = |path| Source::new(path, "").unwrap().is_test_file();
        assert!(is_test_file("crates/bifolio/tests/model.rs"));
        assert!(is_test_file("crates/bifolio/src/tests/loom_pin.rs"));
        assert!(is_test_file("crates/bifolio/src/page/tests.rs"));
        assert!(!is_test_file("crates/bifolio-testing/src/model.rs"));
        assert!(!is_test_file("crates/bifolio/src/io/contests.rs"));
    }
}
