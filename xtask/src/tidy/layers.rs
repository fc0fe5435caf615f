//! The layer rule: a module of the library names only modules below it, the leaves, and itself.
//!
//! Called by [`super::check`]; only files under `crates/bifolio/src` are looked at. The file or
//! folder right under `src` is the module. `lib.rs` (it names all) and test code are exempt.
//!
//! A name counts as `crate::io::read` and grouped as `crate::{io, memory::List}`; `super` must not
//! reach the root of the crate. A doc comment may name anything. What `lib.rs` re-exports must be
//! named by its module, so that the law can be seen where it is used.

use super::{Finding, source::Source, source::Token};

/// The layers, each a folder, lowest first, in the order of `ARCHITECTURE.md`.
pub const LAYERS: [&str; 17] = [
    "sys",
    "sync",
    "page",
    "memory",
    "io",
    "store",
    "dirt",
    "inode",
    "writeback",
    "reclaim",
    "fill",
    "file",
    "keep",
    "warm",
    "share",
    "maps",
    "cache",
];

/// Modules that every module may name, and that name only each other.
pub const LEAVES: [&str; 3] = ["error", "config", "stats"];

/// No module of the library names one above it.
pub fn layers(source: &Source) -> Vec<Finding> {
    let Some(modules) = source.library_modules() else { return Vec::new() };
    if source.is_test_file() || source.library_path() == Some("lib.rs") {
        return Vec::new();
    }
    let module = modules[0];
    if place(module).is_none() {
        let message = format!("`{module}` has no place in the layer law ({})", law());
        return vec![Finding::new(source, 1, "layers", message)];
    }
    let mut found = Vec::new();
    for (at, token) in source.tokens().iter().enumerate() {
        if source.is_test_line(token.line) {
            continue;
        }
        if token.text == "crate" {
            for name in names_after(source, at + 1) {
                let problem = problem(module, &name.text);
                found.extend(problem.map(|it| Finding::new(source, token.line, "layers", it)));
            }
        } else if reaches_root(source, at, modules.len()) {
            let message = "`super` reaches the root of the crate; write `crate`".to_owned();
            found.push(Finding::new(source, token.line, "layers", message));
        }
    }
    found
}

/// Returns the height of a layer, or 0 for a leaf.
fn place(module: &str) -> Option<usize> {
    let layer = LAYERS.iter().position(|layer| *layer == module).map(|height| height + 1);
    layer.or(LEAVES.contains(&module).then_some(0))
}

/// The fault of `module` naming `named`; none when it may.
fn problem(module: &str, named: &str) -> Option<String> {
    match (place(module)?, place(named)) {
        (_, None) => Some(format!("`crate::{named}` is no layer; name the module that holds it")),
        (own, Some(other)) if other <= own => None,
        // The public error wraps what `io` answers; it calls nothing there.
        (0, _) if module == "error" && named == "io" => None,
        (0, _) => Some(format!("the leaf `{module}` names `{named}`; a leaf names only leaves")),
        _ => Some(format!("`{module}` names `{named}`, a layer above it ({})", law())),
    }
}

fn law() -> String {
    format!("{}; leaves: {}", LAYERS.join(" < "), LEAVES.join(", "))
}

/// Returns `true` if the path that starts at `start` goes up from a file `depth` modules deep, and
/// from the modules inside the file, to the root.
fn reaches_root(source: &Source, start: usize, depth: usize) -> bool {
    let is_super = |count: &usize| source.words(start + 3 * count, 1) == ["super"];
    let supers = (0..).take_while(is_super).count();
    if supers < depth || (start > 0 && source.words(start - 1, 1) == [":"]) {
        return false;
    }
    let opens = |at: &usize| source.words(*at, 1) == ["mod"] && source.words(at + 2, 1) == ["{"];
    let around = (0..start).filter(opens).filter(|at| source.closing(at + 2) > start).count();
    supers == depth + around && source.words(start + 3 * supers - 2, 1) == [":"]
}

/// Returns the module after the `::` at `at`, or the modules of the group there.
fn names_after(source: &Source, at: usize) -> Vec<&Token> {
    if source.words(at, 2) == [":", ":"] { source.first_names(at + 2) } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(path: &str, text: &str) -> usize {
        layers(&Source::new(&format!("crates/bifolio/src/{path}"), text).unwrap()).len()
    }

    #[test]
    fn a_lower_layer_a_leaf_and_itself_may_be_named() {
        let text = "use crate::io::read; use crate::error::Error; use crate::writeback::Flusher;\n\
            use crate::{sys::file, page::{cache, map}, stats::Counter}; use std::io;\n\
            fn f() { crate::memory::take() } pub(crate) fn g() {}";
        assert_eq!(count("writeback/mod.rs", text), 0);
    }

    #[test]
    fn a_layer_above_is_flagged_in_every_form() {
        for bad in [
            "use crate::reclaim::Watermarks;",
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
    fn super_must_not_reach_the_root() {
        for (path, text, findings) in [
            ("memory/mod.rs", "use super::reclaim::run;", 1),
            ("memory/batch.rs", "use super::super::sys;", 1),
            ("memory/batch.rs", "mod m { use super::super::super::reclaim::run; }", 1),
            ("memory/batch.rs", "use super::reclaim::run; pub(super) fn f() {}", 0),
            ("memory/mod.rs", "mod m { use super::reclaim::run; use super::*; }", 0),
        ] {
            assert_eq!(count(path, text), findings, "{path}: {text}");
        }
    }

    #[test]
    fn maps_are_named_by_the_cache_alone() {
        let text = "use crate::maps::region::Region; use crate::{maps::{kernel, region::A}, page};";
        assert_eq!(count("memory/mod.rs", text) + count("file/mod.rs", text), 4);
        assert_eq!(count("cache/builder.rs", text) + count("maps/region/mod.rs", text), 0);
        assert_eq!(count("maps/unmap.rs", "use crate::reclaim::Reclaim; use super::region;"), 0);
    }

    #[test]
    fn the_root_and_modules_without_a_place_are_flagged() {
        for bad in ["use crate::File;", "use crate::*;"] {
            assert_eq!(count("memory/lru.rs", bad), 1, "{bad}");
        }
        assert_eq!(count("helpers.rs", "use crate::cache::Cache; use crate::file::File;"), 1);
        assert_eq!(count("error.rs", "use crate::config::Limits; use crate::sys::Errno;"), 1);
    }

    #[test]
    fn tests_lib_docs_and_other_crates_are_free() {
        let bad = "use crate::cache::Cache;";
        assert_eq!(count("lib.rs", bad) + count("tests/loom_pin.rs", bad), 0);
        assert_eq!(count("sys/mod.rs", "//! See [`crate::cache`].\nfn f() {}"), 0);
        assert_eq!(count("sys/mod.rs", &format!("#[cfg(test)]\nmod tests {{\n{bad}\n}}")), 0);
        assert_eq!(count("sys/mod.rs", &format!("#[cfg(loom)]\nmod tests {{\n{bad}\n}}")), 1);
        let elsewhere = Source::new("crates/bifolio-cli/src/cli.rs", bad).unwrap();
        assert!(layers(&elsewhere).is_empty());
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
