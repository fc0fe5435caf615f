//! `cargo x`: the project's own tasks, each a command a person can also type by hand.
//!
//! Where it stands: outside the library; people and `.ci/run` call it through the alias in
//! `.cargo/config.toml`. This file reads the command line, [`step`] holds the steps and their
//! order, [`cargo`] runs a command, [`tidy`] checks style.
//!
//! Exit status: 0 when all is well, 1 when a step failed, 2 for a wrong command line.
//!
//! It changes no file, except that `cargo x fmt` formats, `cargo x torture --mutants` rewrites its
//! table, `cargo x benchmarks` its page, `cargo x header` the C header, `cargo x surface --write`
//! the record of the public surface, `cargo x house --write` its records, and `cargo x install`
//! copies to the directory that it is given.

mod arch;
mod benchmarks;
mod cargo;
mod deb;
mod doors;
mod fuzz;
mod house;
mod install;
mod mutants;
mod package;
mod process;
mod ran;
mod release;
mod san;
mod step;
mod surface;
mod tidy;
mod trees;
mod wheels;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::cargo::Cargo;

/// The tasks of the Bifolio workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo x", bin_name = "cargo x")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

/// All checks together, or one step of them.
#[derive(Debug, Subcommand)]
enum Task {
    /// Run every check, cheapest first; stop at the first that fails.
    Ci {
        /// Leave out `cargo x test`, for a caller that has run the tests already.
        #[arg(long)]
        skip_tests: bool,
    },
    /// Run torture and a part of the tests under a sanitizer; needs the nightly toolchain.
    San(san::Arguments),
    /// Search by coverage for sequences of operations and faults that fail; needs the nightly
    /// toolchain.
    Fuzz(fuzz::Arguments),
    /// Print the figures and plots of the documentation from docs/report.json.
    Benchmarks(benchmarks::Arguments),
    /// Run every benchmark of two trees in rounds, and print the rows that changed.
    CompareTrees(trees::Arguments),
    /// Run the tests of the library on an emulated processor of another kind.
    CheckArch(arch::Arguments),
    /// Run the check of each crate by which other software uses Bifolio.
    CheckDoors(doors::Arguments),
    /// Run the checks before a release that take too long for every change.
    Release(release::Arguments),
    /// Rewrite the C header from the sources of bifolio-capi.
    Header,
    /// Build the programs and libraries for release and install them.
    Install(install::Arguments),
    /// Make a package for Debian of what `install` installs.
    Deb,
    /// Build and check packages of the Python door for PyPI.
    Wheels(wheels::Arguments),
    /// Measure a storage engine over Bifolio beside its own storage, with the same memory.
    EngineBench {
        /// The engine (`redb`, `sqlite`, `tantivy`, `objects`), then its options: `--json -`,
        /// `--smoke`, `--help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        arguments: Vec<String>,
    },
    #[command(flatten)]
    Step(step::Step),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Ci { skip_tests } => step::run_all(skip_tests),
        Task::Benchmarks(arguments) => benchmarks::run(&arguments),
        Task::CompareTrees(arguments) => trees::run(&arguments),
        Task::San(arguments) => san::run(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::CheckArch(arguments) => arch::run(&arguments),
        Task::CheckDoors(arguments) => doors::run(&arguments),
        Task::Release(arguments) => release::run(&arguments),
        Task::Header => ran::run(
            &Cargo::new("test -p bifolio-capi --test header the_header_is")
                .default_variable("BIFOLIO_HEADER", "write"),
        ),
        Task::Deb => deb::run(),
        Task::Wheels(arguments) => wheels::run(&arguments),
        Task::Install(arguments) => install::run(&arguments),
        Task::EngineBench { mut arguments } => {
            // Some engines take long to build: only their own benchmarks do.
            let program = match arguments.first().map(String::as_str) {
                Some("objects") => {
                    arguments.remove(0);
                    "--profile engines -p bifolio-datafusion --no-default-features \
                     --bin objects-bench"
                }
                Some("tantivy") => "--release -p engine-bench --features tantivy",
                Some("hit-ratio" | "pools") => "--release -p engine-bench --features rivals",
                _ => "--release -p engine-bench",
            };
            let line = format!("run --quiet --manifest-path doors/Cargo.toml {program}");
            Cargo::new(&line).program_arguments(&arguments).run().map(|_| ())
        }
        Task::Step(step) => step.run().map(|_| ()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo x: {error:#}");
            ExitCode::FAILURE
        }
    }
}
