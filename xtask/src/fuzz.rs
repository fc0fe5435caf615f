//! `cargo x fuzz`: looks for a case of `bifolio_testing::UpsetCase` that fails, by coverage.
//!
//! Where it stands: called by `main`. It builds `fuzz/` (in the layout of cargo-fuzz, which is not
//! needed) with the nightly toolchain, instrumented for coverage and for the address sanitizer. It
//! is no part of `cargo x ci`, where torture plays the same cases from random bytes (`upsets`).
//!
//! Interesting inputs stay in `target/fuzz/corpus`, where the next run starts.

use anyhow::{Context, Result};

use crate::cargo::{of_toolchain, target_folder};
use crate::san::{self, TARGET};
use crate::{process, ran};

/// The flags that cargo-fuzz gives to the compiler.
const FLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -A warnings";
/// Maximum bytes of a case.
const LENGTH_BYTES_MAX: u32 = 1604;
/// Seconds after which a case counts as hung.
const HANG_S: u32 = 60;

/// Options of `cargo x fuzz`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// How long, seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Arguments for libFuzzer, or a file with a failed case, to repeat it.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Builds and runs the target; fails if a case does.
pub fn run(arguments: &Arguments) -> Result<()> {
    san::check_toolchain(false)?;
    let target = target_folder().join("fuzz");
    let (corpus, artifacts) = (target.join("corpus"), target.join("artifacts"));
    std::fs::create_dir_all(&corpus)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut command = of_toolchain("nightly");
    command.args(["run", "--release", "--target", TARGET, "--manifest-path", "fuzz/Cargo.toml"]);
    command.arg("--target-dir").arg(&target).arg("--");
    command.arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.arg(format!("-max_total_time={}", arguments.seconds));
    command.arg(format!("-max_len={LENGTH_BYTES_MAX}")).arg(format!("-timeout={HANG_S}"));
    command.args(&arguments.arguments);
    let is_replay = arguments.arguments.iter().any(|argument| !argument.starts_with('-'));
    if !is_replay {
        command.arg(&corpus);
    }
    command.env("RUSTFLAGS", FLAGS);
    command.env("ASAN_OPTIONS", "handle_sigbus=0 allow_user_segv_handler=1 detect_leaks=0");
    let printed = process::run_and_read_errors(&mut command)
        .with_context(|| format!("what it failed with is in {}", artifacts.display()))?;
    if !is_replay {
        eprintln!("cargo x fuzz: {} inputs: clean", ran::check_fuzzer(&printed)?);
    }
    Ok(())
}
