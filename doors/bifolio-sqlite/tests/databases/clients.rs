//! The recipes of docs/sqlite.md, as they are printed there, with the real clients; and the program
//! in C. Those that need packages from a registry are ignored.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use bifolio_testing::{attempt, skip};
use tempfile::TempDir;

use crate::others::{folder, succeed};
use crate::shell::{extension, has_sqlite, run, through_the_system};

const PAGE: &str = include_str!("../../../../docs/sqlite.md");
/// Bound of the cache, and of the output of each recipe.
const BOUND: &str = "12582912";

/// Returns the recipe below a heading of the page.
fn recipe(heading: &str) -> &'static str {
    let (_, section) = PAGE.split_once(&format!("\n### {heading}\n")).expect(heading);
    let (_, fenced) = section.split_once("\n```").expect(heading);
    let (_, code) = fenced.split_once('\n').expect(heading);
    code.split_once("\n```").expect(heading).0
}

/// A directory in which a recipe runs.
struct Kitchen(TempDir);

impl Kitchen {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// A command in the directory, whose loader finds the extension by its name.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.0.path()).env("BIFOLIO_MEMORY", BOUND);
        command.env("LD_LIBRARY_PATH", extension().parent().unwrap());
        command
    }

    /// Runs a recipe, which prints the bound of the cache and leaves a database.
    fn serve(&self, command: &mut Command) {
        assert_eq!(succeed(command).trim(), BOUND, "{command:?}");
        self.check();
    }

    fn check(&self) {
        let path = self.0.path().join("x.db");
        let (out, errors) = through_the_system(&path, "pragma integrity_check; select a from t");
        assert_eq!(out, "ok\n7\n", "{errors}");
    }
}

/// Runs a command that installs packages once, in a folder that is kept.
pub(crate) fn install(folder: &Path, command: &mut Command, feature: &str) -> Option<()> {
    let (mark, line) = (folder.join("installed"), format!("{command:?}"));
    if fs::read_to_string(&mark).ok().as_ref() != Some(&line) {
        attempt(command.current_dir(folder), feature)?;
        fs::write(mark, line).unwrap();
    }
    Some(())
}

#[test]
fn the_recipe_of_the_shell_works() {
    if !has_sqlite() {
        return;
    }
    let kitchen = Kitchen::new();
    let mut command = kitchen.command("sh");
    command.arg("-c").arg(recipe("Shell"));
    let sql = "create table t(a); insert into t values(7); pragma bifolio_memory;";
    let (out, errors) = run(command, sql);
    assert_eq!(out.trim(), BOUND, "{errors}");
    kitchen.check();
}

#[test]
fn the_recipe_of_python_works() {
    let Some(python) = able_python() else { return };
    Kitchen::new().serve_script(python, "recipe.py", "Python");
}

/// Returns a Python whose `sqlite3` loads extensions, as some builds of it do not.
pub(crate) fn able_python() -> Option<&'static str> {
    let can = "import sqlite3; sqlite3.Connection.enable_load_extension";
    let is_able = |python: &&str| {
        Command::new(python).args(["-c", can]).output().is_ok_and(|tried| tried.status.success())
    };
    let found = ["python3", "/usr/bin/python3"].into_iter().find(is_able);
    if found.is_none() {
        skip("python3", "there is no Python whose sqlite3 loads extensions");
    }
    found
}

impl Kitchen {
    /// Runs a recipe that an interpreter takes as it is.
    fn serve_script(&self, interpreter: impl AsRef<std::ffi::OsStr>, name: &str, heading: &str) {
        let script = self.write(name, recipe(heading));
        self.serve(self.command(interpreter).arg(script));
    }
}

/// The static library beside this test, whose name may have a hash: the newest.
fn static_library() -> PathBuf {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("libbifolio_sqlite") && name.ends_with(".a")
    };
    let files = fs::read_dir(extension().parent().unwrap()).unwrap();
    let modified = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    let ours = files.map(|entry| entry.unwrap().path()).filter(is_ours);
    ours.max_by_key(modified).expect("a static library beside the test")
}

#[test]
fn the_program_in_c_links_the_static_library() {
    if !has_sqlite() {
        return;
    }
    let kitchen = Kitchen::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let line = recipe("C, without a file to load");
    assert!(line.starts_with("cc auto_extension.c -o program libbifolio_sqlite.a"), "{line}");
    fs::copy(root.join("examples/auto_extension.c"), kitchen.0.path().join("auto_extension.c"))
        .unwrap();
    std::os::unix::fs::symlink(static_library(), kitchen.0.path().join("libbifolio_sqlite.a"))
        .unwrap();
    let mut compile = kitchen.command("sh");
    compile.arg("-c").arg(format!("{line} -Wall -Wextra -Werror"));
    if attempt(&mut compile, "libsqlite3-dev").is_none() {
        return;
    }
    let program = kitchen.0.path().join("program");
    kitchen.serve(&mut kitchen.command(program));
}

#[test]
#[ignore = "installs the package better-sqlite3"]
fn the_recipe_of_node_works() {
    let Some(modules) = better_sqlite3() else { return };
    let kitchen = Kitchen::new();
    let script = kitchen.write("recipe.js", recipe("Node, better-sqlite3"));
    let mut node = kitchen.command("node");
    kitchen.serve(node.arg(script).env("NODE_PATH", modules));
}

/// Returns the folder of the modules of Node with better-sqlite3.
pub(crate) fn better_sqlite3() -> Option<PathBuf> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = INSTALLING.lock().unwrap();
    let folder = folder("better-sqlite3");
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--prefix", ".", "better-sqlite3@12"]);
    // Its own programs come from elsewhere: it is built with the headers of the system.
    npm.env("npm_config_build_from_source", "true").env("npm_config_nodedir", "/usr");
    install(&folder, &mut npm, "better-sqlite3")?;
    Some(folder.join("node_modules"))
}

#[test]
#[ignore = "builds the module github.com/mattn/go-sqlite3"]
fn the_recipe_of_go_works() {
    let folder = folder("go-sqlite3");
    fs::write(folder.join("main.go"), recipe("Go, mattn/go-sqlite3")).unwrap();
    let build = "[ -e go.mod ] || go mod init recipe
                 go get github.com/mattn/go-sqlite3@v1.14.32 && go build -o recipe .";
    let mut go = Command::new("sh");
    go.args(["-euc", build]).current_dir(&folder).env("CGO_ENABLED", "1");
    if attempt(&mut go, "go-sqlite3").is_none() {
        return;
    }
    let kitchen = Kitchen::new();
    kitchen.serve(&mut kitchen.command(folder.join("recipe")));
}

#[test]
#[ignore = "fetches the package org.xerial:sqlite-jdbc"]
fn the_recipe_of_java_works() {
    let folder = folder("sqlite-jdbc");
    let project = "<project><modelVersion>4.0.0</modelVersion><groupId>recipe</groupId>
        <artifactId>recipe</artifactId><version>1</version><dependencies><dependency>
        <groupId>org.xerial</groupId><artifactId>sqlite-jdbc</artifactId>
        <version>3.50.3.0</version></dependency></dependencies></project>";
    fs::write(folder.join("pom.xml"), project).unwrap();
    let mut maven = Command::new("mvn");
    maven.args(["-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]);
    if install(&folder, &mut maven, "sqlite-jdbc").is_none() {
        return;
    }
    let kitchen = Kitchen::new();
    let source = kitchen.write("Recipe.java", recipe("Java, xerial sqlite-jdbc"));
    let mut java = kitchen.command("java");
    java.arg("-cp").arg(format!("{}/jars/*", folder.display())).arg(source);
    kitchen.serve(&mut java);
}

#[test]
#[ignore = "installs the package apsw"]
fn the_recipe_of_apsw_works() {
    let Some(python) = crate::others::python_with_apsw() else { return };
    Kitchen::new().serve_script(python, "recipe.py", "Python, apsw");
}

#[test]
#[ignore = "builds the crate rusqlite"]
fn the_recipe_of_rust_works() {
    let folder = folder("rusqlite");
    let manifest = "[package]\nname = \"recipe\"\nedition = \"2024\"\n[workspace]\n
        [dependencies]\nrusqlite = { version = \"0.43\", features = [\"load_extension\"] }\n";
    fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    fs::create_dir_all(folder.join("src")).unwrap();
    fs::write(folder.join("src/main.rs"), recipe("Rust, rusqlite")).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--target-dir", "target"]).current_dir(&folder);
    if attempt(&mut cargo, "rusqlite").is_none() {
        return;
    }
    let kitchen = Kitchen::new();
    kitchen.serve(&mut kitchen.command(folder.join("target/debug/recipe")));
}

#[test]
#[ignore = "builds the crate sqlx"]
fn the_recipe_of_sqlx_works() {
    let folder = folder("sqlx");
    let manifest = r#"
        [package]
        name = "recipe"
        edition = "2024"
        [workspace]
        [profile.dev]
        debug = false
        [dependencies.sqlx]
        version = "0.8"
        default-features = false
        features = ["runtime-tokio", "sqlite"]
        [dependencies.tokio]
        version = "1"
        features = ["macros", "rt-multi-thread"]
    "#;
    fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    fs::create_dir_all(folder.join("src")).unwrap();
    fs::write(folder.join("src/main.rs"), recipe("Rust, sqlx")).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--target-dir", "target"]).current_dir(&folder);
    if attempt(&mut cargo, "sqlx").is_none() {
        return;
    }
    let kitchen = Kitchen::new();
    kitchen.serve(&mut kitchen.command(folder.join("target/debug/recipe")));
}
