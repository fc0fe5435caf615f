//! `cargo x release`: what is checked before a release, and takes too long for every change.
//!
//! Called by `main`. Programs that a check needs are built into `target/tools`, once; a toolchain
//! is installed by rustup.

use std::process::Command;

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::cargo::{Cargo, of_toolchain, target_folder, workspace_root};
use crate::{package, process};

/// Options of `cargo x release`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only these checks.
    checks: Vec<Check>,
    /// Leave out known defects of dependencies, whose list is fetched from GitHub.
    #[arg(long)]
    without_advisories: bool,
}

/// One check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Check {
    /// Every package, built from its archive alone.
    Packages,
    /// Published crates, with the oldest toolchain that `rust-version` allows.
    Minimum,
    /// Licences, sources, duplicates and known defects of dependencies (cargo-deny); dependencies
    /// that nothing uses (cargo-machete).
    Dependencies,
    /// The library's interface beside that of the last release (cargo-semver-checks).
    Interface,
}

/// Runs the checks; without names all but that of the interface, which needs a release before this.
pub fn run(arguments: &Arguments) -> Result<()> {
    let all = [Check::Packages, Check::Minimum, Check::Dependencies];
    let checks = if arguments.checks.is_empty() { &all[..] } else { &arguments.checks };
    for check in checks {
        match check {
            Check::Packages => package::run(package::Arguments { build: true })?,
            Check::Minimum => minimum()?,
            Check::Dependencies => dependencies(arguments.without_advisories)?,
            Check::Interface => {
                tool("cargo-semver-checks")?;
                run_tool("cargo-semver-checks", &["semver-checks", "-p", "bifolio"])?;
            }
        }
    }
    Ok(())
}

/// Builds the published crates with the oldest toolchain. Clippy's `incompatible_msrv` finds newer
/// functions of the standard library with every change; this also finds newer syntax, and
/// dependencies that ask for more.
fn minimum() -> Result<()> {
    for ((manifest, version), names) in package::published()? {
        let toolchain = format!("{version}.0");
        run_in_root(Command::new("rustup").args([
            "toolchain",
            "install",
            &toolchain,
            "--profile",
            "minimal",
            "--no-self-update",
        ]))?;
        let mut command = of_toolchain(&toolchain);
        command.args(["check", "--manifest-path", manifest]);
        command.arg("--target-dir").arg(target_folder().join("minimum"));
        for name in &names {
            command.args(["-p", name]);
        }
        process::run(&mut command).with_context(|| format!("Rust {version} does not suffice"))?;
    }
    Ok(())
}

fn dependencies(without_advisories: bool) -> Result<()> {
    ["cargo-deny", "cargo-machete"].into_iter().try_for_each(tool)?;
    for manifest in package::WORKSPACES {
        let mut arguments = vec!["--manifest-path", manifest, "--config", "deny.toml", "check"];
        arguments.extend(["--hide-inclusion-graph", "bans", "licenses", "sources"]);
        if !without_advisories {
            arguments.push("advisories");
        }
        run_tool("cargo-deny", &arguments)?;
    }
    run_tool("cargo-machete", &["crates", "doors", "xtask"])
}

/// Makes sure that a program of the registry is in `target/tools`.
fn tool(name: &str) -> Result<()> {
    let folder = target_folder().join("tools");
    if folder.join("bin").join(name).exists() {
        return Ok(());
    }
    let cargo = Cargo::new("install --debug --locked --root")
        .arguments(&[folder.to_string_lossy().into_owned(), name.to_owned()]);
    eprintln!("$ {cargo}");
    cargo.run().map(|_| ())
}

fn run_tool(name: &str, arguments: &[&str]) -> Result<()> {
    run_in_root(Command::new(target_folder().join("tools/bin").join(name)).args(arguments))
}

/// Runs a program of the release, in the root of the workspace.
fn run_in_root(command: &mut Command) -> Result<()> {
    // `cargo x` runs inside rustup's choice of a toolchain, which the command may make anew.
    command.current_dir(workspace_root()).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    process::run(command)
}
