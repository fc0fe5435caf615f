//! `cargo x check-doors`: the short check of each door, a crate by which other software comes in.
//!
//! Where it stands: called by `main` and by `.ci/run`. A door whose dependencies are light is a
//! member of the workspace, and `cargo test --workspace` has its tests; one with heavy dependencies
//! is a member of the workspace `doors/`, which nothing but this builds.

use anyhow::{Context, Result, bail};

use crate::cargo::Cargo;

/// A door, and the cargo commands of its check.
struct Door {
    name: &'static str,
    commands: &'static [&'static str],
}

const DOORS: &[Door] = &[
    Door { name: "capi", commands: &["test -p bifolio-capi"] },
    Door {
        name: "redb",
        commands: &[
            "fmt --manifest-path doors/Cargo.toml --all --check",
            "clippy --manifest-path doors/Cargo.toml --all-targets -- -D warnings",
            // The interface of redb 5.
            "clippy --manifest-path doors/bifolio-redb/Cargo.toml --all-features -- -D warnings",
            "test --manifest-path doors/Cargo.toml",
        ],
    },
    Door { name: "sqlite", commands: &["test -p bifolio-sqlite"] },
];

/// The command that is run.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only this door.
    name: Option<String>,
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
        for command in door.commands {
            let cargo = Cargo::new(command);
            eprintln!("\n== {}\n$ {cargo}", door.name);
            cargo.run().with_context(|| format!("the check of {} failed ({cargo})", door.name))?;
        }
    }
    Ok(())
}
