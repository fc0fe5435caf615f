//! The imports of the library: which file names an item of which other file.
//!
//! Called by [`super::run`]. A path counts wherever it stands, in a `use` or in an expression, and
//! is followed through every `use` by which a module passes a name on, to the file that has the
//! item. So `crate::io::Queue` is an import of `io/engine/queue.rs`, and a module that only
//! re-exports is no part of a circle.
//!
//! It does not see methods, which are named without their file, nor macros. Test code is left out,
//! and so is `lib.rs`, which names everything.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::source::Source;

/// Names that are followed from one `use` to the next, at most: a circle of them would not end.
const FOLLOWED_MAX: usize = 16;

/// A file of the library, and what its `use` items bring into it.
struct File<'s> {
    source: &'s Source,
    module: Vec<String>,
    /// Modules that the file has, or declares.
    modules: BTreeSet<String>,
    /// Absolute paths, by the names that they have in the file.
    names: BTreeMap<String, Vec<String>>,
}

/// A name that a `use` item brings into its file.
struct Used {
    name: String,
    path: Vec<String>,
    /// Set if it is passed on: then it counts only where the file itself mentions it.
    is_public: bool,
}

/// Files of the library by their paths below `src`, and their imports.
pub struct Imports<'s> {
    /// Paths of the files, in order.
    pub files: Vec<&'s str>,
    /// Pairs of files, by their numbers: the first imports from the second.
    pub pairs: BTreeSet<(usize, usize)>,
}

impl<'s> Imports<'s> {
    /// Finds the imports of the library's files among `sources`.
    pub fn of(sources: &'s [Source]) -> Self {
        let files: Vec<File<'s>> = sources.iter().filter_map(File::read).collect();
        let mut pairs = BTreeSet::new();
        for (from, file) in files.iter().enumerate() {
            for path in file.paths(&files) {
                let to = target(&files, &path, FOLLOWED_MAX).map(|(file, _)| file);
                pairs.extend(to.filter(|to| *to != from).map(|to| (from, to)));
            }
        }
        let files = files.iter().filter_map(|file| file.source.library_path()).collect();
        Self { files, pairs }
    }

    /// Returns the circles: sets of files each of which reaches all others by imports.
    pub fn circles(&self) -> Vec<Vec<&'s str>> {
        let mut reach = vec![BTreeSet::new(); self.files.len()];
        for (from, to) in &self.pairs {
            reach[*from].insert(*to);
        }
        loop {
            let sizes: usize = reach.iter().map(BTreeSet::len).sum();
            for at in 0..reach.len() {
                let next: Vec<usize> = reach[at].iter().flat_map(|to| reach[*to].clone()).collect();
                reach[at].extend(next);
            }
            if reach.iter().map(BTreeSet::len).sum::<usize>() == sizes {
                break;
            }
        }
        let mut circles = BTreeSet::new();
        for (at, reached) in reach.iter().enumerate().filter(|(at, it)| it.contains(at)) {
            let circle = reached.iter().filter(|other| reach[**other].contains(&at));
            circles.insert(circle.copied().collect::<Vec<_>>());
        }
        let names = |circle: Vec<usize>| circle.iter().map(|at| self.files[*at]).collect();
        circles.into_iter().map(names).collect()
    }
}

impl<'s> File<'s> {
    fn read(source: &'s Source) -> Option<Self> {
        if source.is_test_file() || source.library_path()? == "lib.rs" {
            return None;
        }
        let module = source.library_modules()?.into_iter().map(str::to_owned).collect();
        let declared = source.tokens().windows(2).filter(|words| words[0].text == "mod");
        let modules = declared.map(|words| words[1].text.clone()).collect();
        let mut file = Self { source, module, modules, names: BTreeMap::new() };
        // Names that a `use` brings may start the paths of others.
        for _ in 0..2 {
            for used in file.uses() {
                file.names.insert(used.name, used.path);
            }
        }
        Some(file)
    }

    /// Returns what the `use` items of the file bring into it.
    fn uses(&self) -> Vec<Used> {
        let mut used = Vec::new();
        for at in self.use_items() {
            let is_public = at > 0 && matches!(self.source.words(at - 1, 1)[..], ["pub" | ")"]);
            let mut paths = Vec::new();
            self.read_tree(at + 1, &mut Vec::new(), &mut paths);
            for (name, path) in paths {
                let path = self.absolute(at, &path);
                used.extend(path.map(|path| Used { name, path, is_public }));
            }
        }
        used
    }

    /// Positions of the `use` items outside tests.
    fn use_items(&self) -> impl Iterator<Item = usize> {
        let tokens = self.source.tokens();
        let is_use = |at: &usize| {
            tokens[*at].text == "use"
                // Not `impl Trait + use<>`.
                && self.source.words(at + 1, 1) != ["<"]
                && !self.source.is_test_line(tokens[*at].line)
        };
        (0..tokens.len()).filter(is_use)
    }

    /// Reads the tree of paths at `at`, below `prefix`, into names and their paths. Returns the
    /// position after it.
    fn read_tree(
        &self,
        mut at: usize,
        prefix: &mut Vec<String>,
        found: &mut Vec<(String, Vec<String>)>,
    ) -> usize {
        let depth = prefix.len();
        let word = |at: usize| self.source.words(at, 1).first().copied().unwrap_or(";");
        loop {
            match word(at) {
                "{" => {
                    let end = self.source.closing(at);
                    at += 1;
                    while at < end {
                        at = self.read_tree(at, prefix, found);
                        at += usize::from(word(at) == ",");
                    }
                    at += 1;
                    break;
                }
                "*" => {
                    at += 1;
                    break;
                }
                "self" if depth > 0 => {}
                name => prefix.push(name.to_owned()),
            }
            at += 1;
            if word(at) == ":" {
                at += 2;
                continue;
            }
            let mut name = prefix.last().cloned().unwrap_or_default();
            if word(at) == "as" {
                word(at + 1).clone_into(&mut name);
                at += 2;
            }
            found.push((name, prefix.clone()));
            break;
        }
        prefix.truncate(depth);
        at
    }

    /// Returns the absolute path of `path`, which stands at the token `at`; `None` if it leads out
    /// of the library.
    fn absolute(&self, at: usize, path: &[String]) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        let mut absolute = match first.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => self.module_at(at),
            name if self.modules.contains(name) => [&self.module[..], &[name.to_owned()]].concat(),
            name => self.names.get(name)?.clone(),
        };
        let mut rest = rest;
        if first == "super" {
            absolute.pop();
            while let Some(("super", above)) =
                rest.split_first().map(|(name, above)| (name.as_str(), above))
            {
                absolute.pop();
                rest = above;
            }
        }
        absolute.extend_from_slice(rest);
        Some(absolute)
    }

    /// Returns the module around the token `at`: that of the file, or one inside it.
    fn module_at(&self, at: usize) -> Vec<String> {
        let opens = |open: &usize| {
            self.source.words(*open, 1) == ["mod"] && self.source.words(open + 2, 1) == ["{"]
        };
        let inside = (0..at).filter(opens).filter(|open| self.source.closing(open + 2) > at);
        let names = inside.map(|open| self.source.tokens()[open + 1].text.clone());
        self.module.iter().cloned().chain(names).collect()
    }

    /// Returns the absolute paths that the file names outside tests, in `use` items or elsewhere.
    fn paths(&self, files: &[Self]) -> Vec<Vec<String>> {
        let tokens = self.source.tokens();
        let mut is_in_use = vec![false; tokens.len()];
        for at in self.use_items() {
            let end = (at..tokens.len()).find(|at| tokens[*at].text == ";");
            is_in_use[at..end.unwrap_or(tokens.len())].fill(true);
        }
        let is_code = |at: &usize| !is_in_use[*at] && !self.source.is_test_line(tokens[*at].line);
        let code: Vec<usize> = (0..tokens.len()).filter(is_code).collect();
        let mentioned: BTreeSet<&str> = code.iter().map(|at| tokens[*at].text.as_str()).collect();
        let mut paths = Vec::new();
        for Used { name, path, is_public } in self.uses() {
            // A module is imported by what is named in it.
            let is_module = target(files, &path, FOLLOWED_MAX).is_some_and(|(_, whole)| whole);
            if !is_module && (!is_public || mentioned.contains(name.as_str())) {
                paths.push(path);
            }
        }
        for at in code {
            let path = self.path_at(at);
            if path.len() > 1 {
                paths.extend(self.absolute(at, &path));
            }
        }
        paths
    }

    /// Returns the names of the path that begins at the token `at`; none if no path begins there.
    fn path_at(&self, at: usize) -> Vec<String> {
        let is_name = |text: &str| text.starts_with(|it: char| it.is_alphabetic() || it == '_');
        let before = at.checked_sub(2).map_or_else(Vec::new, |at| self.source.words(at, 2));
        // A later name of a path, a method, or the range of a `pub`.
        if matches!(before[..], [":", ":"] | ["(", "in"])
            || matches!(before[..], [one, "."] if one != ".")
        {
            return Vec::new();
        }
        let mut path = Vec::new();
        let mut at = at;
        while let [name] = self.source.words(at, 1)[..]
            && is_name(name)
        {
            path.push(name.to_owned());
            if self.source.words(at + 1, 2) != [":", ":"] {
                break;
            }
            at += 3;
        }
        path
    }
}

/// Returns the file that has the item of an absolute path, and `true` if the path names the file as
/// a whole; `None` for a path to an item of `lib.rs`.
fn target(files: &[File<'_>], path: &[String], followed_max: usize) -> Option<(usize, bool)> {
    let file_of = |module: &[String]| files.iter().position(|file| file.module == module);
    let length = (1..=path.len()).rev().find(|length| file_of(&path[..*length]).is_some())?;
    let found = file_of(&path[..length])?;
    let Some(name) = path.get(length) else { return Some((found, true)) };
    match files[found].names.get(name) {
        Some(other) if followed_max > 0 => {
            let path = [other, &path[length + 1..]].concat();
            target(files, &path, followed_max - 1).or(Some((found, false)))
        }
        _ => Some((found, false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Vec<Source> {
        let read = |(path, text): &(&str, &str)| {
            Source::new(&format!("crates/bifolio/src/{path}"), text).unwrap()
        };
        files.iter().map(read).collect()
    }

    fn pairs(files: &[(&str, &str)]) -> Vec<String> {
        let sources = sources(files);
        let imports = Imports::of(&sources);
        let name = |at: usize| imports.files[at].trim_end_matches(".rs");
        imports.pairs.iter().map(|(from, to)| format!("{} {}", name(*from), name(*to))).collect()
    }

    #[test]
    fn a_path_is_followed_to_the_file_that_has_the_item() {
        let io = [
            ("io/mod.rs", "mod engine; pub(crate) use engine::{Queue, rings as r};"),
            ("io/engine/mod.rs", "mod queue; mod rings; pub(crate) use queue::{Queue as Queue};"),
            ("io/engine/queue.rs", "use super::super::r::Ring;"),
            ("io/engine/rings.rs", "struct Ring;"),
        ];
        for (text, to) in [
            ("use crate::io::Queue;", &["io/engine/queue"][..]),
            ("fn f(q: crate::io::Queue) {}", &["io/engine/queue"]),
            ("use crate::{io, sys}; fn f() { io::Queue::new(); sys::g() }", &["io/engine/queue"]),
            ("use crate::io::{self as other, r::{Ring, Other}};", &["io/engine/rings"]),
            ("use crate::io; fn f() { io.g(); io::h() }", &["io/mod"]),
            ("mod inner { fn f() { super::super::io::Queue::new() } }", &["io/engine/queue"]),
            ("use crate::io;", &[]),
            ("use std::io; fn f() { io::Queue::new(); a.io::<u8>() }", &[]),
            ("#[cfg(test)]\nmod tests {\nuse crate::io::Queue;\n}", &[]),
        ] {
            let found = pairs(&[&io[..], &[("page.rs", text)]].concat());
            let expected = to.iter().map(|to| format!("page {to}"));
            let own = "io/engine/queue io/engine/rings".to_owned();
            assert_eq!(found, [own].into_iter().chain(expected).collect::<Vec<_>>(), "{text}");
        }
    }

    #[test]
    fn what_is_passed_on_counts_where_it_is_mentioned() {
        let text = "mod b; pub(crate) use b::B; use b::C; struct A;";
        let b = ("a/b.rs", "use super::A; struct B; struct C;");
        assert_eq!(pairs(&[("a/mod.rs", text), b]), ["a/mod a/b", "a/b a/mod"]);
        let text = "mod b; pub(crate) use b::{B, C}; struct A;";
        assert_eq!(pairs(&[("a/mod.rs", text), b]), ["a/b a/mod"]);
        let text = "mod b; pub(crate) use b::{B, C}; struct A(B);";
        assert_eq!(pairs(&[("a/mod.rs", text), b]), ["a/mod a/b", "a/b a/mod"]);
    }

    #[test]
    fn a_circle_may_have_files_of_several_folders() {
        let sources = sources(&[
            ("a/mod.rs", "mod x; pub use x::X;"),
            ("a/x.rs", "use crate::b::Y;"),
            ("b.rs", "use crate::c::Z;"),
            ("c.rs", "fn f() { crate::a::X::new() }"),
            ("d.rs", "use crate::{a::X, e::E};"),
            ("e.rs", ""),
        ]);
        assert_eq!(Imports::of(&sources).circles(), [["a/x.rs", "b.rs", "c.rs"]]);
    }
}
