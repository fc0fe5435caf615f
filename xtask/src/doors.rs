//! `cargo x check-doors`: the check of each crate by which other software uses Bifolio: the short
//! one, or the whole one.
//!
//! Where it stands: called by `main` and by `.ci/run`. A door whose dependencies are light is a
//! member of the workspace, and `cargo test --workspace` has its tests; one with heavy dependencies
//! is a member of the workspace `doors/`, which nothing but this builds. A command that runs no
//! test is a failure: some name tests, which may get other names.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cargo::{Cargo, workspace_root};
use crate::{process, ran};

/// A door, and the cargo commands of its checks.
struct Door {
    name: &'static str,
    commands: &'static [&'static str],
    /// Instead of `commands` where everything is asked for; none if the short check is all.
    whole: &'static [&'static str],
    /// Script that installs what the tests of `whole` use. None of them may then be skipped.
    install: Option<&'static str>,
    /// Script that is run after the commands, for tests that are no tests of cargo.
    script: Option<&'static str>,
}

const DOORS: &[Door] = &[
    Door {
        name: "capi",
        commands: &["test -p bifolio-capi"],
        whole: &[],
        install: None,
        script: None,
    },
    Door {
        name: "mount",
        commands: &[
            "clippy --manifest-path doors/Cargo.toml -p bifolio-mount --all-targets -- -D warnings",
            "test --manifest-path doors/Cargo.toml -p bifolio-mount",
        ],
        whole: &["test --release --manifest-path doors/Cargo.toml -p bifolio-mount -- \
                  --include-ignored --nocapture --test-threads=1"],
        install: Some("doors/bifolio-mount/tests/install.sh"),
        script: None,
    },
    Door {
        name: "objects",
        commands: &[
            "clippy --manifest-path doors/Cargo.toml -p bifolio-object-store --all-targets \
             --all-features -- -D warnings",
            "test --manifest-path doors/Cargo.toml -p bifolio-object-store --all-features",
        ],
        // DataFusion and Ballista take half an hour to build.
        whole: &[
            "test --manifest-path doors/Cargo.toml -p bifolio-object-store --all-features",
            "test --manifest-path doors/Cargo.toml -p bifolio-slatedb",
            "test --manifest-path doors/Cargo.toml --profile engines -p bifolio-datafusion",
            "test --manifest-path doors/Cargo.toml -p engine-bench --test envelope -- --ignored",
        ],
        install: None,
        script: None,
    },
    Door {
        name: "python",
        commands: &["clippy --manifest-path doors/Cargo.toml -p bifolio-python --all-targets \
             -- -D warnings"],
        whole: &[],
        install: None,
        script: Some("doors/bifolio-python/tests/check.sh"),
    },
    Door {
        name: "redb",
        commands: &[
            "clippy --manifest-path doors/Cargo.toml -p bifolio-redb -p engine-bench --all-targets \
             -- -D warnings",
            // The interface of redb 5.
            "clippy --manifest-path doors/bifolio-redb/Cargo.toml --all-features -- -D warnings",
            "test --manifest-path doors/Cargo.toml -p bifolio-redb -p engine-bench",
            "test --manifest-path doors/Cargo.toml -p engine-bench --features rivals rival",
            "test --manifest-path doors/Cargo.toml -p engine-bench --features rivals pools",
        ],
        whole: &[],
        install: None,
        script: None,
    },
    Door {
        name: "sqlite",
        commands: &["test -p bifolio-sqlite"],
        whole: &["test -p bifolio-sqlite -- --include-ignored --nocapture"],
        install: Some("doors/bifolio-sqlite/tests/install.sh"),
        script: None,
    },
    Door {
        name: "tantivy",
        commands: &[
            "clippy --manifest-path doors/Cargo.toml -p bifolio-tantivy --all-targets \
             -- -D warnings",
            "test --manifest-path doors/Cargo.toml -p bifolio-tantivy",
            "test --manifest-path doors/Cargo.toml -p engine-bench --features tantivy tantivy",
        ],
        whole: &[],
        install: None,
        script: None,
    },
];

/// The command that is run.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only this door.
    name: Option<String>,
    /// Everything: also programs from package registries, and 200 kills in each journal mode.
    #[arg(long)]
    whole: bool,
}

/// Runs the checks of all doors, or of one, up to the first that fails.
pub fn run(arguments: &Arguments) -> Result<()> {
    let is_asked = |door: &&Door| arguments.name.as_ref().is_none_or(|name| name == door.name);
    let doors: Vec<&Door> = DOORS.iter().filter(is_asked).collect();
    if doors.is_empty() {
        let names: Vec<_> = DOORS.iter().map(|door| door.name).collect();
        bail!("there is no such door; there are: {}", names.join(", "));
    }
    for door in doors {
        let is_whole = arguments.whole && !door.whole.is_empty();
        let install = door.install.filter(|_| is_whole);
        if let Some(script) = install {
            run_script(door, script, &[])?;
        }
        for command in if is_whole { door.whole } else { door.commands } {
            let mut cargo = Cargo::new(command);
            if is_whole {
                cargo = cargo.default_variable("BIFOLIO_KILLS", "200");
            }
            if install.is_some() {
                cargo = cargo.default_variable("BIFOLIO_TEST_REQUIRE", "all");
            }
            eprintln!("\n== {}\n$ {cargo}", door.name);
            let is_test = command.starts_with("test ");
            let ran = if is_test { ran::run(&cargo) } else { cargo.run().map(|_| ()) };
            ran.with_context(|| format!("the check of {} failed ({cargo})", door.name))?;
        }
        if let Some(script) = door.script {
            let whole = ["--whole"];
            run_script(door, script, if arguments.whole { &whole } else { &[] })?;
        }
    }
    Ok(())
}

fn run_script(door: &Door, script: &str, arguments: &[&str]) -> Result<()> {
    eprintln!("\n== {}", door.name);
    process::run(Command::new(workspace_root().join(script)).args(arguments))
        .with_context(|| format!("the check of {} failed", door.name))
}
