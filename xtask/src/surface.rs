//! `cargo x surface`: the public surface of the library, from rustdoc's JSON output, beside the
//! file that records it.
//!
//! Called by [`crate::step`] as a check of `cargo x ci`: a change of the surface that
//! `docs/surface.txt` does not show is an error, so that no name is published unseen. `--write`
//! rewrites the file. `--callers` lists methods that no door, example or page mentions.
//!
//! Items that the documentation hides are public all the same: they are listed, marked `hidden`,
//! and counted.
//!
//! Signatures are taken from the sources, at the positions that rustdoc reports; a method made by a
//! macro is listed by its name alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cargo::{Cargo, target_folder, workspace_root};

/// File that records the surface.
const RECORD: &str = "docs/surface.txt";
/// Wrapper around rustdoc.
const RUSTDOC: &str = "xtask/rustdoc-json";
/// Arguments of rustdoc.
const ARGUMENTS: [&str; 5] =
    ["-Z", "unstable-options", "--output-format", "json", "--document-hidden-items"];
/// Mark of items that the documentation hides.
const HIDDEN: &str = "hidden ";
/// Folders and pages whose mention of a method counts as a call.
const CALLERS: [&str; 10] = [
    "README.md",
    "docs/guide.md",
    "docs/maps.md",
    "docs/engines.md",
    "crates/bifolio/examples",
    "crates/bifolio-bench/src",
    "crates/bifolio-cli/src",
    "crates/bifolio-stats/src",
    "crates/bifolio/src/lib.rs",
    "doors",
];

/// Options of `cargo x surface`.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Arguments {
    /// Rewrite the recorded surface.
    #[arg(long)]
    write: bool,
    /// List the methods that no door, example or page mentions.
    #[arg(long, conflicts_with = "write")]
    callers: bool,
}

/// One public type with what belongs to it.
#[derive(Debug, Default)]
struct Item {
    /// `struct`, `enum`, `trait` or `type`; `fn` and `const` for items that are no types.
    kind: &'static str,
    /// Set if the documentation hides it.
    is_hidden: bool,
    /// Variants and public fields.
    parts: Vec<String>,
    /// Names of public methods, with their signatures.
    methods: BTreeMap<String, String>,
    /// Traits that it implements.
    traits: BTreeSet<String>,
}

/// Public items by their paths below the crate.
type Surface = BTreeMap<String, Item>;

/// Returns the command that writes the description of the library.
pub fn command() -> Cargo {
    Cargo::new("rustdoc -p bifolio --lib")
        .default_variable("RUSTDOC", &workspace_root().join(RUSTDOC).to_string_lossy())
        .program_arguments(&ARGUMENTS.map(Into::into))
}

/// Compares the surface with the record, or does what `arguments` say.
pub fn run(arguments: Arguments) -> Result<()> {
    command().run()?;
    let json = target_folder().join("doc/bifolio.json");
    let text = std::fs::read_to_string(&json).with_context(|| json.display().to_string())?;
    let description: Value = serde_json::from_str(&text).context("rustdoc's description")?;
    let surface = Reader { index: &description["index"] }.surface(&description["root"]);
    let shown = show(&surface);
    let record = workspace_root().join(RECORD);
    if arguments.write {
        return std::fs::write(&record, shown).with_context(|| RECORD.to_owned());
    }
    if arguments.callers {
        return list_without_caller(&surface);
    }
    let recorded = std::fs::read_to_string(&record).unwrap_or_default();
    let difference = difference(&recorded, &shown);
    ensure!(
        difference.is_empty(),
        "the public surface differs from {RECORD}; `cargo x surface --write` records it:\n{}",
        difference.join("\n")
    );
    Ok(())
}

/// Reads rustdoc's description of a crate.
struct Reader<'d> {
    index: &'d Value,
}

impl Reader<'_> {
    fn item(&self, id: &Value) -> &Value {
        &self.index[id.to_string()]
    }

    fn surface(&self, root: &Value) -> Surface {
        let mut surface = Surface::new();
        self.read_module(root, "", false, &mut surface);
        surface
    }

    /// Reads the items of a module, all of them hidden if it `is_hidden`.
    fn read_module(&self, id: &Value, path: &str, is_hidden: bool, surface: &mut Surface) {
        for id in elements(&self.item(id)["inner"]["module"]["items"]) {
            let item = self.item(id);
            let is_hidden = is_hidden || is_marked_hidden(item);
            let reexport = &item["inner"]["use"];
            if reexport["is_glob"] == true {
                self.read_module(&reexport["id"], path, is_hidden, surface);
            } else if let Some(name) = reexport["name"].as_str() {
                self.read_item(&reexport["id"], path, name, is_hidden, surface);
            } else if let Some(name) = item["name"].as_str()
                && item["visibility"] == "public"
            {
                self.read_item(id, path, name, is_hidden, surface);
            }
        }
    }

    fn read_item(
        &self,
        id: &Value,
        path: &str,
        name: &str,
        is_hidden: bool,
        surface: &mut Surface,
    ) {
        let inner = &self.item(id)["inner"];
        let path = if path.is_empty() { name.to_owned() } else { format!("{path}::{name}") };
        let is_hidden = is_hidden || is_marked_hidden(self.item(id));
        let mut item = Item { is_hidden, ..Item::default() };
        if !inner["module"].is_null() {
            return self.read_module(id, &path, is_hidden, surface);
        } else if !inner["struct"].is_null() {
            item.kind = "struct";
            let fields = elements(&inner["struct"]["kind"]["plain"]["fields"]);
            let public = fields.filter(|id| self.item(id)["visibility"] == "public");
            item.parts = public.filter_map(|id| self.name_of(id)).collect();
        } else if !inner["enum"].is_null() {
            item.kind = "enum";
            let variants = elements(&inner["enum"]["variants"]);
            item.parts = variants.filter_map(|id| self.name_of(id)).collect();
        } else if !inner["trait"].is_null() {
            item.kind = "trait";
            self.read_methods(&inner["trait"]["items"], &mut item, true);
        } else if !inner["type_alias"].is_null() {
            item.kind = "type";
        } else if !inner["function"].is_null() {
            item.kind = "fn";
        } else {
            item.kind = "const";
        }
        for kind in ["struct", "enum"] {
            elements(&inner[kind]["impls"]).for_each(|id| self.read_impl(id, &mut item));
        }
        surface.insert(path, item);
    }

    fn read_impl(&self, id: &Value, item: &mut Item) {
        let implementation = &self.item(id)["inner"]["impl"];
        let Some(name) = implementation["trait"]["path"].as_str() else {
            return self.read_methods(&implementation["items"], item, false);
        };
        let is_derived = implementation["is_synthetic"] == true;
        // Derived along with others, and unstable.
        let unstable = ["StructuralPartialEq", "TrivialClone"];
        let is_derived = is_derived || unstable.iter().any(|it| name.ends_with(it));
        if !is_derived && implementation["blanket_impl"].is_null() {
            let name = name.rsplit("::").next().unwrap_or(name);
            item.traits.insert(name.to_owned());
        }
    }

    fn read_methods(&self, ids: &Value, item: &mut Item, are_public: bool) {
        for id in elements(ids) {
            let method = self.item(id);
            let is_public = are_public || method["visibility"] == "public";
            if let (true, Some(name)) = (is_public, method["name"].as_str())
                && !method["inner"]["function"].is_null()
            {
                let mark = if is_marked_hidden(method) { HIDDEN } else { "" };
                let signature = signature(&method["span"], name);
                item.methods.insert(name.to_owned(), format!("{mark}{signature}"));
            }
        }
    }

    fn name_of(&self, id: &Value) -> Option<String> {
        self.item(id)["name"].as_str().map(str::to_owned)
    }
}

/// Returns `true` for an item with `#[doc(hidden)]`.
fn is_marked_hidden(item: &Value) -> bool {
    elements(&item["attrs"]).any(|attribute| attribute.to_string().contains("doc(hidden)"))
}

fn elements(array: &Value) -> impl Iterator<Item = &Value> {
    array.as_array().into_iter().flatten()
}

/// Returns the signature at a position of the sources, on one line.
fn signature(span: &Value, name: &str) -> String {
    let made = || format!("fn {name}(..)");
    let Some(file) = span["filename"].as_str() else { return made() };
    let text = std::fs::read_to_string(workspace_root().join(file)).unwrap_or_default();
    let position = |at: usize| span["begin"][at].as_u64().unwrap_or(1) as usize - 1;
    let lines = text.lines().skip(position(0)).take(40).collect::<Vec<_>>().join("\n");
    let start = lines.get(position(1)..).unwrap_or_default();
    let head = start.split(['{', ';']).next().unwrap_or_default();
    let words = head.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = words.strip_prefix("pub ").unwrap_or(&words);
    let is_written = words.contains(&format!("fn {name}"));
    if is_written { words.replace("( ", "(").replace(", )", ")") } else { made() }
}

/// Returns the surface as the record shows it.
fn show(surface: &Surface) -> String {
    let is_type = |item: &&Item| !["fn", "const"].contains(&item.kind);
    let types = surface.values().filter(is_type).count();
    let methods: usize = surface.values().map(|item| item.methods.len()).sum();
    let is_hidden = |signature: &&String| signature.starts_with(HIDDEN);
    let hidden_of =
        |item: &Item| usize::from(item.is_hidden) + item.methods.values().filter(is_hidden).count();
    let hidden: usize = surface.values().map(hidden_of).sum();
    let mut text =
        format!("bifolio: {types} public types, {methods} methods, {hidden} of both hidden\n");
    for (path, item) in surface {
        let mark = if item.is_hidden { HIDDEN } else { "" };
        let _ = write!(text, "\n{mark}{} {path}", item.kind);
        if !item.traits.is_empty() {
            let traits = item.traits.iter().map(String::as_str).collect::<Vec<_>>();
            let _ = write!(text, ": {}", traits.join(" + "));
        }
        text.push('\n');
        item.parts.iter().chain(item.methods.values()).for_each(|line| {
            let _ = writeln!(text, "    {line}");
        });
    }
    text
}

/// Returns the lines that only one text has, marked with `-` and `+`.
fn difference(old: &str, new: &str) -> Vec<String> {
    let only = |one: &str, other: &str, mark: char| -> Vec<String> {
        let known: BTreeSet<&str> = other.lines().collect();
        let lines = one.lines().filter(|line| !known.contains(line));
        lines.map(|line| format!("{mark} {}", line.trim())).collect()
    };
    let mut lines = only(old, new, '-');
    lines.extend(only(new, old, '+'));
    if lines.is_empty() && old != new {
        lines.push("the order of lines".to_owned());
    }
    lines
}

/// Prints the methods that nothing in [`CALLERS`] mentions.
fn list_without_caller(surface: &Surface) -> Result<()> {
    let mut words = BTreeSet::new();
    for place in CALLERS {
        read_words(&workspace_root().join(place), &mut words)?;
    }
    let mut count = 0;
    for (path, item) in surface {
        let name = path.rsplit("::").next().unwrap_or(path);
        let methods = item.methods.keys().filter(|method| !words.contains(*method));
        let methods: Vec<&str> = methods.map(String::as_str).collect();
        if !words.contains(name) {
            println!("{path}");
            count += 1;
        }
        methods.iter().for_each(|method| println!("{path}::{method}"));
        count += methods.len();
    }
    println!("{count} without a mention in {}", CALLERS.join(", "));
    Ok(())
}

/// Adds the words of the sources and pages at `path`, tests left out.
fn read_words(path: &Path, words: &mut BTreeSet<String>) -> Result<()> {
    for entry in walkdir::WalkDir::new(path) {
        let entry = entry?;
        let shown = entry.path().to_string_lossy();
        let is_text = shown.ends_with(".rs") || shown.ends_with(".md");
        if !is_text || shown.contains("/tests/") || shown.contains("/target/") {
            continue;
        }
        let text = std::fs::read_to_string(entry.path())?;
        let text = text.split("mod tests {").next().unwrap_or_default();
        let split = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.extend(split.map(str::to_owned));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_signature_is_shown_old_and_new() {
        let lines = difference("a\n    fn b()\n", "a\n    fn b(c: u8)\n");
        assert_eq!(lines, ["- fn b()", "+ fn b(c: u8)"]);
        assert!(difference("a\n", "a\n").is_empty());
        assert_eq!(difference("a\nb\n", "b\na\n"), ["the order of lines"]);
    }

    #[test]
    fn reexports_methods_and_traits_are_read() {
        let json = serde_json::json!({
            "0": {"inner": {"module": {"items": [1]}}},
            "1": {"inner": {"use": {"is_glob": false, "name": "Cache", "id": 2}}},
            "2": {"name": "Cache", "inner": {"struct": {
                "kind": {"plain": {"fields": []}}, "impls": [3, 5]}}},
            "3": {"inner": {"impl": {"trait": null, "items": [4, 6]}}},
            "4": {"name": "open", "visibility": "public", "inner": {"function": {}}},
            "6": {"name": "probe", "visibility": "public", "inner": {"function": {}},
                "attrs": [{"other": "#[doc(hidden)]"}]},
            "5": {"inner": {"impl": {"trait": {"path": "std::clone::Clone"},
                "is_synthetic": false, "blanket_impl": null, "items": []}}},
        });
        let surface = Reader { index: &json }.surface(&0.into());
        let expected = "bifolio: 1 public types, 2 methods, 1 of both hidden\n\n\
                        struct Cache: Clone\n    fn open(..)\n    hidden fn probe(..)\n";
        assert_eq!(show(&surface), expected);
    }
}
