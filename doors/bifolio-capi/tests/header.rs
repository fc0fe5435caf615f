//! Checks that `include/bifolio.h` is what cbindgen generates from the sources, and what the
//! libraries export.
//!
//! `cargo x header` sets `BIFOLIO_HEADER=write`: then the header is written, and not compared.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn header_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include/bifolio.h")
}

#[test]
fn the_header_is_what_the_sources_say() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    let modules = [
        "result", "boundary", "cache", "stats", "file", "advice", "pin", "calls", "gated",
        "outside", "map", "warm", "text", "class",
    ];
    for module in modules {
        builder = builder.with_src(folder.join(format!("src/{module}.rs")));
    }
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    if std::env::var_os("BIFOLIO_HEADER").is_some_and(|mode| mode == "write") {
        std::fs::write(header_path(), made).unwrap();
        return;
    }
    let found = std::fs::read_to_string(header_path()).unwrap();
    let differs = found.lines().zip(made.lines()).position(|(found, made)| found != made);
    assert!(
        found == made,
        "include/bifolio.h is not what the sources say (first at line {:?}): cargo x header",
        differs.map(|line| line + 1)
    );
}

#[test]
fn the_shared_library_exports_what_the_header_declares() {
    let Ok(nm) = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output() else {
        println!("skipped: there is no nm");
        return;
    };
    assert!(nm.status.success(), "{}", String::from_utf8_lossy(&nm.stderr));
    let symbols = String::from_utf8(nm.stdout).unwrap();
    let exported: BTreeSet<&str> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|symbol| !symbol.starts_with("rust_eh_personality"))
        .collect();
    let header = std::fs::read_to_string(header_path()).unwrap();
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(|line| !line.trim_start().starts_with(['*', '/']))
        .filter_map(|line| line.split_once('(').map(|(before, _)| before))
        .filter_map(|before| before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next())
        .filter(|word| word.starts_with("bifolio_"))
        .collect();
    assert!(declared.len() > 30, "{declared:?}");
    assert_eq!(exported, declared);
}

/// Text of a source of the library.
fn source(path: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/bifolio/src");
    std::fs::read_to_string(folder.join(path)).unwrap()
}

/// Words of the header.
fn header_words() -> BTreeSet<String> {
    let header = std::fs::read_to_string(header_path()).unwrap();
    let words = header.split(|c: char| !c.is_alphanumeric() && c != '_');
    words.map(str::to_owned).collect()
}

/// Returns the names between `before` and `after` of the lines of `text`.
fn names<'t>(text: &'t str, before: &str, after: char) -> Vec<&'t str> {
    let found = text.lines().filter_map(|line| line.strip_prefix(before)?.split_once(after));
    found.map(|(name, _)| name).collect()
}

#[test]
fn every_counter_of_the_library_is_in_the_header() {
    let words = header_words();
    let stats = bifolio::Stats::default();
    let known: Vec<_> = stats.counts().into_iter().chain(stats.levels()).collect();
    assert!(known.len() > 50, "{known:?}");
    for (name, _) in &known {
        assert!(words.contains(*name), "bifolio_stats lacks {name}");
    }
}

#[test]
fn every_setting_of_the_library_is_in_the_header() {
    let words = header_words();
    // For storage and codecs of one's own, and for tests.
    let absent = [
        "swap_backing",
        "codec",
        "open_or_keep",
        "unmap_batch_folios",
        "disable",
        "pin_mode",
        "drain_policy",
    ];
    let (builder, mut options) = (source("cache/builder.rs"), source("file/options.rs"));
    options +=
        source("maps/mappable.rs").split("impl ").find(|it| it.starts_with("OpenOptions")).unwrap();
    let settings = [&builder, &options].map(|text| names(text, "    pub fn ", '('));
    let [builder, options] = settings.map(|found| {
        let is_setting = |name: &&str| !["builder", "new", "validate", "build"].contains(name);
        found.into_iter().filter(is_setting).collect::<Vec<_>>()
    });
    assert!(builder.len() > 14 && options.len() > 10, "{builder:?} {options:?}");
    for name in builder.into_iter().chain(options) {
        let in_capitals = name.to_uppercase();
        // In C, the names of numbers have units.
        let is_field =
            words.iter().any(|word| word.replace("_bytes", "").replace("_ms", "") == name);
        let is_flag = ["OPEN", "CACHE"]
            .iter()
            .any(|what| words.contains(&format!("BIFOLIO_{what}_{in_capitals}")));
        let is_in_header = words.contains(name) || is_field || is_flag;
        assert!(is_in_header || absent.contains(&name), "the header lacks {name}");
    }
}

#[test]
fn every_error_of_the_library_has_a_number() {
    let errors = source("error.rs");
    let (_, kinds) = errors.split_once("pub enum ErrorKind {").unwrap();
    let (kinds, _) = kinds.split_once("\n}").unwrap();
    let variants = kinds.lines().filter_map(|line| {
        let rest = line.strip_prefix("    ").filter(|rest| rest.starts_with(char::is_uppercase))?;
        rest.split(|c: char| !c.is_alphanumeric()).next()
    });
    let variants: Vec<_> = variants.collect();
    assert!(variants.len() > 30, "{variants:?}");
    // Of page codecs and calls that never wait, which C does not have.
    let absent = ["CorruptPage", "WouldBlock"];
    let words = header_words();
    for name in variants {
        let mut number = "BIFOLIO_ERROR".to_owned();
        for letter in name.chars() {
            number += if letter.is_uppercase() { "_" } else { "" };
            number.extend(letter.to_uppercase());
        }
        assert!(words.contains(&number) != absent.contains(&name), "{name}: {number}");
    }
}

/// The shared library beside this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.parent().unwrap().join("libbifolio_capi.so")
}
