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

use anyhow::{Context, Result, bail};

use crate::cargo::{of_toolchain, target_folder, workspace_root};
use crate::process;

/// The target triple: passed explicitly, so that build scripts are not instrumented.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Tests that exercise memory and threads, and do not measure time.
const TESTS: [&str; 7] = ["-p", "bifolio", "--lib", "--test", "writes", "--test", "faults"];

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
        start(sanitizer, &run, &program).context("torture")?;
    }
    if !arguments.no_tests {
        let test = [&["test"][..], &TESTS].concat();
        start(sanitizer, &test, &["--test-threads=2", "--skip=devices::"]).context("tests")?;
    }
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

fn start(sanitizer: Sanitizer, cargo: &[&str], program: &[&str]) -> Result<()> {
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
    // Resident memory is not the cache's alone.
    command.env("BIFOLIO_SANITIZED", "1");
    process::run(&mut command)
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
