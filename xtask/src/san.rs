//! `cargo x san thread|address|leak`: torture, and a part of the tests, under a sanitizer.
//!
//! Where it stands: called by `main`. It needs the nightly toolchain, and says so where there is
//! none; the thread sanitizer also needs its `rust-src`, because the standard library must be
//! instrumented, too. Nothing of it is part of `cargo x ci`.
//!
//! | sanitizer | standard library | what is passed over |
//! |---|---|---|
//! | thread | instrumented | copies that are validated afterwards (`xtask/san-thread.supp`) |
//! | address | as it is | - |
//! | leak | as it is | - |
//!
//! `docs/correctness.md` lists what no sanitizer sees.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::cargo::{of_toolchain, target_folder, workspace_root};
use crate::{process, ran};

/// The target triple: passed explicitly, so that build scripts are not instrumented.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Tests that exercise memory and threads, and do not measure time.
const TESTS: [&str; 7] = ["-p", "bifolio", "--lib", "--test", "writes", "--test", "faults"];
/// Number of test programs among them.
const TEST_PROGRAMS: usize = 3;

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sanitizer {
    /// Data races.
    Thread,
    /// Accesses outside of what was allocated.
    Address,
    /// Memory that is never freed.
    Leak,
}

/// Options of `cargo x san`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The sanitizer.
    sanitizer: Sanitizer,
    /// How long torture runs, seconds; 0 for not at all.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Without the tests.
    #[arg(long)]
    no_tests: bool,
}

/// Runs torture and tests, and fails if the sanitizer reports anything.
pub fn run(arguments: &Arguments) -> Result<()> {
    let sanitizer = arguments.sanitizer;
    check_toolchain(sanitizer == Sanitizer::Thread)?;
    if arguments.seconds > 0 {
        let seconds = arguments.seconds.to_string();
        let run = ["run", "-p", "bifolio-torture"];
        // Kills end a child before it could tell of anything.
        let program = ["--without", "kills", "--seconds", &seconds];
        start(sanitizer, &run, &program)
            .and_then(|text| check_torture(&text))
            .context("torture")?;
    }
    if !arguments.no_tests {
        let test = [&["test"][..], &TESTS].concat();
        let ran = start(sanitizer, &test, &["--test-threads=2", "--skip=devices::"]);
        ran.and_then(|text| ran::check_each(&text, TEST_PROGRAMS)).context("tests")?;
    }
    ensure!(
        arguments.seconds > 0 || !arguments.no_tests,
        "neither torture nor tests ran, so nothing was checked"
    );
    eprintln!("cargo x san {}: clean", sanitizer.name());
    Ok(())
}

/// Checks the toolchain; the error says what is missing and how to install it.
pub fn check_toolchain(needs_std: bool) -> Result<()> {
    let listed = |arguments: &[&str]| {
        process::output(Command::new("rustup").args(arguments))
            .context("rustup is missing: this needs a nightly toolchain")
    };
    if !listed(&["toolchain", "list"])?.lines().any(|line| line.starts_with("nightly")) {
        bail!("this needs the nightly toolchain: rustup toolchain install nightly");
    }
    let components = ["component", "list", "--toolchain", "nightly", "--installed"];
    if needs_std && !listed(&components)?.contains("rust-src") {
        bail!(
            "the thread sanitizer needs the sources of the standard library: \
             rustup component add rust-src --toolchain nightly"
        );
    }
    Ok(())
}

/// Fails unless torture says that it ended without a finding after some calls.
fn check_torture(output: &str) -> Result<()> {
    let calls = output.lines().rev().find_map(|line| {
        let before = line.strip_suffix(" calls a second: clean")?;
        before.split(" calls, ").next()?.rsplit(' ').next()?.parse::<u64>().ok()
    });
    let calls = calls.context("torture does not say that it ended")?;
    ensure!(calls > 0, "torture made no call, so nothing was checked");
    Ok(())
}

/// Runs cargo with the sanitizer; returns what the program printed.
fn start(sanitizer: Sanitizer, cargo: &[&str], program: &[&str]) -> Result<String> {
    let mut command = of_toolchain("nightly");
    command.args(cargo).args(["--release", "--target", TARGET]);
    // Built in a fraction of the time, and most of the time is the sanitizer's anyway.
    command.args(["--config", "profile.release.opt-level=1"]);
    command.args(["--config", "profile.release.lto='off'"]);
    command.args(["--config", "profile.release.codegen-units=16"]);
    command.arg("--target-dir").arg(target_folder().join(format!("san-{}", sanitizer.name())));
    if sanitizer == Sanitizer::Thread {
        command.arg("-Zbuild-std");
    }
    command.arg("--").args(program);
    command.env("RUSTFLAGS", format!("-Zsanitizer={} -A warnings", sanitizer.name()));
    let supp = workspace_root().join("xtask/san-thread.supp");
    command.env("TSAN_OPTIONS", format!("suppressions={} history_size=4", supp.display()));
    // The library handles faults of its own.
    command.env("ASAN_OPTIONS", "handle_sigbus=0 allow_user_segv_handler=1 detect_leaks=0");
    // The sanitizer has an allocator of its own, and resident memory is not the cache's alone.
    command.env("BIFOLIO_SANITIZED", "1");
    process::run_and_read(&mut command)
}

impl Sanitizer {
    fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::Address => "address",
            Self::Leak => "leak",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torture_without_a_call_or_an_end_is_a_failure() {
        let told = |calls: u64| {
            let rest = "40 calls a second: clean\n";
            check_torture(&format!("torture: 3 scenes, seeds 1 to 3, {calls} calls, {rest}"))
        };
        assert!(told(120).is_ok());
        assert!(told(0).is_err() && check_torture("torture: 60 s, first seed 1\n").is_err());
    }
}
