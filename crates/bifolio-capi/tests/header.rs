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
    for module in ["result", "boundary", "cache", "file", "pin", "map", "text"] {
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

/// The shared library beside this test.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    program.parent().unwrap().join("libbifolio_capi.so")
}
