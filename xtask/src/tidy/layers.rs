//! The layer law: a module of the library names only modules below it, the leaves, and itself.
//!
//! Where it stands: called by [`super::check`]; only files under `crates/bifolio/src` are looked
//! at. The file or folder right under `src` is the module. `lib.rs` (it names all) and test code
//! are free of the law.
//!
//! A name counts in every form that reaches the root of the crate: `crate::io::read`, grouped as
//! `crate::{io, memory::List}`, and `super::super::io` from a file two modules deep. A doc comment
//! may name anything. What `lib.rs` re-exports must be named by its module, so that the law can
//! be seen where it is used.

use super::{Finding, source::Source, source::Token};

/// The layers, lowest first. The same order stands in `ARCHITECTURE.md`.
const LAYERS: [&str; 11] =
    ["sys", "sync", "page", "memory", "io", "swap", "writeback", "reclaim", "file", "map", "cache"];

/// Modules that every other may name, and that name only each other.
const LEAVES: [&str; 5] = ["ablation", "error", "config", "stats", "outcome"];

/// No module of the library names one above it.
pub fn layers(source: &Source) -> Vec<Finding> {
    let Some(modules) = source.library_modules() else {
        return Vec::new();
    };
    let module = modules[0];
    if source.is_test_file() || source.library_path() == Some("lib.rs") {
        return Vec::new();
    }
    if place(module) == Place::Unknown {
        let message = format!("`{module}` has no place in the layer law ({})", law());
        return vec![Finding::new(source, 1, "layers", message)];
    }
    let found = names_from_root(source, modules.len()).into_iter().filter_map(|name| {
        let problem = problem(module, &name.text)?;
        let finding = Finding::new(source, name.line, "layers", problem);
        (!source.is_test_line(name.line)).then_some(finding)
    });
    found.collect()
}

/// Where a module stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Leaf,
    Layer(usize),
    Unknown,
}

fn place(module: &str) -> Place {
    if LEAVES.contains(&module) {
        return Place::Leaf;
    }
    LAYERS.iter().position(|layer| *layer == module).map_or(Place::Unknown, Place::Layer)
}

/// The fault of `module` naming `named`; none when it may.
fn problem(module: &str, named: &str) -> Option<String> {
    if named == module {
        return None;
    }
    match (place(module), place(named)) {
        (_, Place::Unknown) => {
            Some(format!("`crate::{named}` is no layer; name the module that holds it"))
        }
        (_, Place::Leaf) => None,
        (Place::Layer(own), Place::Layer(other)) if other < own => None,
        // The public error wraps what `io` answers; it calls nothing there.
        (Place::Leaf, _) if module == "error" && named == "io" => None,
        (Place::Leaf, _) => {
            Some(format!("the leaf `{module}` names `{named}`; a leaf names only leaves"))
        }
        _ => Some(format!("`{module}` names `{named}`, a layer above it ({})", law())),
    }
}

fn law() -> String {
    format!("{}; leaves: {}", LAYERS.join(" < "), LEAVES.join(", "))
}

/// The names that the file takes from the root of the crate, in a file `depth` modules deep.
fn names_from_root(source: &Source, depth: usize) -> Vec<&Token> {
    let inner = inner_modules(source);
    let mut names = Vec::new();
    for (at, token) in source.tokens().iter().enumerate() {
        let supers = supers(source, at);
        if token.text == "crate" {
            names.extend(names_after(source, at + 1));
        } else if supers > 0 {
            let around = inner.iter().filter(|(open, close)| (open..close).contains(&&at)).count();
            if supers == depth + around {
                names.extend(names_after(source, at + 3 * supers - 2));
            }
        }
    }
    names
}

/// How many `super`, joined by `::`, there are from `start` on. The end of a longer path has fewer
/// than the root needs, so it need not be told from the start of one.
fn supers(source: &Source, start: usize) -> usize {
    let is_super = |at: usize| source.words(at, 1) == ["super"];
    let is_joined = |at: usize| source.words(at, 3) == [":", ":", "super"];
    let more = (0..).take_while(|count| is_joined(start + 1 + 3 * count)).count();
    if is_super(start) { 1 + more } else { 0 }
}

/// The name after the `::` at `at`, or the first names of the group there.
fn names_after(source: &Source, at: usize) -> Vec<&Token> {
    let tokens = source.tokens();
    if source.words(at, 2) != [":", ":"] || at + 2 >= tokens.len() {
        return Vec::new();
    }
    let first = at + 2;
    if tokens[first].text != "{" {
        return vec![&tokens[first]];
    }
    let depth = tokens[first].depth + 1;
    let starts = |index: &usize| {
        let before = &tokens[index - 1];
        index - 1 == first || (before.depth == depth && before.text == ",")
    };
    (first + 1..source.closing(first)).filter(starts).map(|index| &tokens[index]).collect()
}

/// The brackets of each `mod name { ... }` in the file.
fn inner_modules(source: &Source) -> Vec<(usize, usize)> {
    let is_module = |at: &usize| {
        let words = source.words(*at, 3);
        words.len() == 3 && words[0] == "mod" && words[2] == "{"
    };
    let starts = (0..source.tokens().len()).filter(is_module);
    starts.map(|at| (at + 2, source.closing(at + 2))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        let source = Source::new(&format!("crates/bifolio/src/{path}"), text).unwrap();
        layers(&source).into_iter().map(|finding| finding.message).collect()
    }

    fn count(path: &str, text: &str) -> usize {
        messages(path, text).len()
    }

    #[test]
    fn a_lower_layer_a_leaf_and_itself_may_be_named() {
        let text = "use crate::io::read; use crate::error::Error; use crate::writeback::Flusher;\n\
            use crate::{sys, page::{Pin, lock}, stats::Counter};\n\
            fn f() { crate::memory::take() }";
        assert_eq!(messages("writeback/mod.rs", text), [""; 0]);
    }

    #[test]
    fn a_layer_above_is_flagged_in_every_form() {
        for bad in [
            "use crate::reclaim::Watermarks;",
            "use crate::reclaim;",
            "fn f() { crate::reclaim::run(); }",
            "fn f() { log!(\"{}\", crate::reclaim::count()); }",
            "use crate::{error::Error, reclaim::{scan, evict}};",
            "use crate::{\n    sys::{self, file},\n    reclaim,\n};",
            "macro_rules! m { () => { $crate::reclaim::run() } }",
        ] {
            assert_eq!(count("memory/lru.rs", bad), 1, "{bad}");
            assert_eq!(count("file/mod.rs", bad), 0, "{bad}");
        }
    }

    #[test]
    fn super_reaches_the_root_from_as_deep_as_the_file_is() {
        assert_eq!(count("memory/mod.rs", "use super::reclaim::run;"), 1);
        assert_eq!(count("memory.rs", "use super::{sys, reclaim::run};"), 1);
        assert_eq!(count("memory/batch.rs", "use super::super::reclaim::run;"), 1);
        assert_eq!(count("memory/mod.rs", "struct A { a: super::reclaim::Scan }"), 1);
        assert_eq!(count("memory/batch.rs", "mod m { use super::super::super::reclaim::run; }"), 1);
        // These stay inside `memory`.
        assert_eq!(count("memory/batch.rs", "use super::reclaim::run; pub(super) fn f() {}"), 0);
        assert_eq!(count("memory/mod.rs", "mod m { use super::reclaim::run; use super::*; }"), 0);
        assert_eq!(count("memory/mod.rs", "use self::reclaim::run;"), 0);
    }

    #[test]
    fn words_deeper_in_a_path_or_group_are_not_layers() {
        assert_eq!(
            count("memory/mod.rs", "use crate::{page::{cache, map}, sys::file}; use std::io;"),
            0
        );
    }

    #[test]
    fn a_leaf_names_only_leaves() {
        assert_eq!(count("error.rs", "use crate::config::Limits;"), 0);
        assert_eq!(count("error.rs", "use crate::sys::Errno;"), 1);
    }

    #[test]
    fn the_root_itself_is_no_module() {
        assert_eq!(count("memory/lru.rs", "use crate::File;"), 1);
        assert_eq!(count("memory/lru.rs", "use crate::*;"), 1);
        assert_eq!(
            count("memory/lru.rs", "pub(crate) fn f() {} pub(in crate::memory) fn g() {}"),
            0
        );
    }

    #[test]
    fn a_module_without_a_place_is_flagged_once() {
        assert_eq!(count("helpers.rs", "use crate::cache::Cache; use crate::file::File;"), 1);
    }

    #[test]
    fn tests_lib_and_other_crates_are_free() {
        let bad = "use crate::cache::Cache;";
        assert_eq!(count("lib.rs", bad), 0);
        assert_eq!(count("tests/loom_pin.rs", bad), 0);
        assert_eq!(count("sys/mod.rs", &format!("#[cfg(test)]\nmod tests {{\n{bad}\n}}")), 0);
        assert_eq!(count("sys/mod.rs", &format!("#[cfg(loom)]\nmod tests {{\n{bad}\n}}")), 1);
        let elsewhere = Source::new("crates/bifolio-cli/src/cli.rs", bad).unwrap();
        assert!(layers(&elsewhere).is_empty());
    }

    #[test]
    fn doc_comments_may_name_anything() {
        assert_eq!(
            count("sys/mod.rs", "//! See [`crate::cache`].\n/// [`crate::file`]\nfn f() {}"),
            0
        );
    }

    #[test]
    fn the_law_is_a_strict_order() {
        for (own, module) in LAYERS.iter().enumerate() {
            for (other, named) in LAYERS.iter().enumerate() {
                assert_eq!(problem(module, named).is_none(), other <= own, "{module} {named}");
            }
        }
    }
}
