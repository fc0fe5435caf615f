//! `cargo x install --prefix DIR`: installs the programs, the C interface and the extension of
//! SQLite, with what belongs to them.
//!
//! Called by `main` and by [`crate::deb`]. It builds for release and copies, all or `--only` some:
//!
//! ```text
//!  program  bin/bifolio
//!  mount    bin/bifolio-mount                      built in the workspace `doors/`
//!           sbin/mount.fuse.bifolio                a link to it, for mount(8)
//!  both     share/man/man1/*.1
//!           share/bash-completion/completions/*, share/fish/vendor_completions.d/*.fish,
//!           share/zsh/site-functions/_*
//!  c        include/bifolio.h
//!           lib/libbifolio.so.0.1.0                the shared library
//!           lib/libbifolio.so.0.1       ->   it,   for the loader: its soname
//!           lib/libbifolio.so           ->   it,   for the compiler
//!           lib/libbifolio.a
//!           lib/pkgconfig/bifolio.pc
//!  sqlite   lib/libbifolio_sqlite.so               found by `.load libbifolio_sqlite`
//!           lib/libbifolio_sqlite.a
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::cargo::{Cargo, target_folder, workspace_root};
use crate::process;

/// Options of `cargo x install`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Directory in which the files are used.
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
    /// Directory that stands for `/` while files are copied, for those who make packages.
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
    /// Only these parts, with commas between.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
}

/// A part that can be installed by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The program `bifolio`.
    Program,
    /// The program `bifolio-mount`.
    Mount,
    /// The C interface.
    C,
    /// The extension of SQLite.
    Sqlite,
}

impl Arguments {
    /// Returns the options that install everything for `/usr`, below `destdir`.
    pub fn staged(destdir: PathBuf) -> Self {
        Self { prefix: "/usr".into(), destdir: Some(destdir), only: Vec::new() }
    }
}

/// Builds and copies.
pub fn run(arguments: &Arguments) -> Result<()> {
    let is_asked = |part| arguments.only.is_empty() || arguments.only.contains(&part);
    let prefix = std::path::absolute(&arguments.prefix).context("--prefix")?;
    let target = match &arguments.destdir {
        Some(destdir) => destdir.join(prefix.strip_prefix("/").unwrap_or(&prefix)),
        None => prefix.clone(),
    };
    let built = build(&is_asked)?;
    if is_asked(Part::Program) {
        install_program(&built.join("bifolio"), "generate", &target)?;
    }
    if is_asked(Part::Mount) {
        install_program(&doors_folder().join("bifolio-mount"), "--generate", &target)?;
        // By this name `mount` starts it.
        link("../bin/bifolio-mount", &target.join("sbin/mount.fuse.bifolio"))?;
    }
    if is_asked(Part::C) {
        install_c(&built, &prefix, &target)?;
    }
    if is_asked(Part::Sqlite) {
        for name in ["libbifolio_sqlite.so", "libbifolio_sqlite.a"] {
            copy(&built.join(name), &target.join("lib").join(name))?;
        }
    }
    eprintln!("installed {} in {}", env!("CARGO_PKG_VERSION"), target.display());
    Ok(())
}

/// Builds the parts, and returns the folder of those of the main workspace.
fn build(is_asked: &impl Fn(Part) -> bool) -> Result<PathBuf> {
    let crates = [
        (Part::Program, "bifolio-cli"),
        (Part::C, "bifolio-capi"),
        (Part::Sqlite, "bifolio-sqlite"),
    ];
    let names = crates.iter().filter(|(part, _)| is_asked(*part));
    let packages: Vec<String> =
        names.flat_map(|(_, name)| ["-p".to_owned(), (*name).to_owned()]).collect();
    if !packages.is_empty() {
        let cargo = Cargo::new("build --release").arguments(&packages);
        cargo.run().context("the build failed")?;
    }
    if is_asked(Part::Mount) {
        let line = "build --release --manifest-path doors/Cargo.toml -p bifolio-mount";
        Cargo::new(line).run().context("the build of bifolio-mount failed")?;
    }
    Ok(target_folder().join("release"))
}

/// Folder into which the workspace `doors/` is built.
fn doors_folder() -> PathBuf {
    let own = workspace_root().join("doors/target");
    std::env::var_os("CARGO_TARGET_DIR").map_or(own, |_| target_folder()).join("release")
}

/// Installs a program, and what it generates: manual pages and completions.
fn install_program(program: &Path, generate: &str, target: &Path) -> Result<()> {
    let name = program.file_name().context("a program has a name")?;
    copy(program, &target.join("bin").join(name))?;
    let generated = target_folder().join("generated").join(name);
    let _ = fs::remove_dir_all(&generated);
    fs::create_dir_all(&generated)?;
    process::output(Command::new(program).arg(generate).arg(&generated))?;
    for entry in fs::read_dir(&generated)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a generated file")?;
        let place = place_of(name).with_context(|| format!("what is {name}?"))?;
        copy(&path, &target.join("share").join(place))?;
    }
    Ok(())
}

/// Returns the path of a generated file below `share`.
fn place_of(name: &str) -> Option<String> {
    if let Some(command) = name.strip_suffix(".bash") {
        return Some(format!("bash-completion/completions/{command}"));
    }
    match name {
        _ if name.ends_with(".1") => Some(format!("man/man1/{name}")),
        _ if name.ends_with(".fish") => Some(format!("fish/vendor_completions.d/{name}")),
        _ if name.starts_with('_') => Some(format!("zsh/site-functions/{name}")),
        _ => None,
    }
}

/// Installs header, libraries and the file for pkg-config, which names `prefix`.
fn install_c(built: &Path, prefix: &Path, target: &Path) -> Result<()> {
    let (include, lib) = (target.join("include"), target.join("lib"));
    let version = env!("CARGO_PKG_VERSION");
    let shared = format!("libbifolio.so.{version}");
    let header = workspace_root().join("doors/bifolio-capi/include/bifolio.h");
    copy(&header, &include.join("bifolio.h"))?;
    copy(&built.join("libbifolio_capi.a"), &lib.join("libbifolio.a"))?;
    copy(&built.join("libbifolio_capi.so"), &lib.join(&shared))?;
    for name in [soname(version), "libbifolio.so".to_owned()] {
        link(&shared, &lib.join(name))?;
    }
    let file = lib.join("pkgconfig/bifolio.pc");
    fs::create_dir_all(lib.join("pkgconfig"))?;
    fs::write(&file, pkg_config(prefix, version)?)
        .with_context(|| format!("cannot write {}", file.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file is in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // A program may be running the old library: it keeps it.
    let _ = fs::remove_file(to);
    let copied = fs::copy(from, to);
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Makes a symbolic link, and replaces an older one.
fn link(to: &str, path: &Path) -> Result<()> {
    let folder = path.parent().context("a link is in a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let _ = fs::remove_file(path);
    symlink(to, path).with_context(|| format!("cannot make {}", path.display()))
}

/// Returns the name by which programs load the library: before 1.0 each minor version has its own.
/// The build script of the crate sets it in the library.
fn soname(version: &str) -> String {
    let minor = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    format!("libbifolio.so.{minor}")
}

fn pkg_config(prefix: &Path, version: &str) -> Result<String> {
    let prefix = prefix.to_str().context("--prefix is not UTF-8")?;
    ensure!(!prefix.contains(char::is_whitespace), "pkg-config takes no prefix with spaces");
    Ok(format!(
        "prefix={prefix}\n\
         includedir=${{prefix}}/include\n\
         libdir=${{prefix}}/lib\n\
         \n\
         Name: bifolio\n\
         Description: A user-space page cache\n\
         Version: {version}\n\
         Cflags: -I${{includedir}}\n\
         Libs: -L${{libdir}} -lbifolio\n\
         Libs.private: -lgcc_s -lutil -lpthread -lm -ldl\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generated_file_has_a_place() {
        let places = ["bifolio-bench.1", "bifolio.bash", "bifolio.fish", "_bifolio"].map(place_of);
        let expected = [
            "man/man1/bifolio-bench.1",
            "bash-completion/completions/bifolio",
            "fish/vendor_completions.d/bifolio.fish",
            "zsh/site-functions/_bifolio",
        ];
        assert_eq!(places, expected.map(|it| Some(it.to_owned())));
        assert_eq!(place_of("bifolio.exe"), None);
    }

    #[test]
    fn the_loader_asks_for_the_minor_version() {
        assert_eq!(soname("0.1.0"), "libbifolio.so.0.1");
        assert_eq!(soname("0.12.3"), "libbifolio.so.0.12");
    }

    #[test]
    fn pkg_config_names_the_prefix_once() {
        let text = pkg_config(Path::new("/opt/bifolio"), "0.1.0").unwrap();
        assert!(text.starts_with("prefix=/opt/bifolio\n"), "{text}");
        assert_eq!(text.matches("/opt").count(), 1, "{text}");
        assert!(pkg_config(Path::new("/a b"), "0.1.0").is_err());
    }
}
