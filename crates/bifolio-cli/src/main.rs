//! The `bifolio` program: benchmarks, their comparison, checks of a file through the cache, the
//! kernel's features, and mounts.
//!
//! `cli` parses the command line, each subcommand has its file, `output` is the only way to
//! standard output. Exit status: 0 done, 1 found wrong bytes, missed a figure or found something
//! slower, 2 could not run, 130 interrupted. An error is one line on standard error.

mod bench;
mod check;
mod cli;
mod compare;
mod features;
mod generate;
mod mount;
mod output;
mod terminal;
mod top;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

/// The run found bytes that are not those of the file.
const EXIT_DIFFERENT: u8 = 1;
/// The run could not be done.
const EXIT_CANNOT_RUN: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => return finish(output::print(&error.to_string())),
        Err(error) => return fail(&cli::one_line(&error.to_string()), EXIT_CANNOT_RUN),
    };
    finish(match cli.command {
        Command::Bench(options) => bench::run(&options),
        Command::Check(options) => check::run(&options),
        Command::Compare(options) => compare::run(&options),
        Command::Features => features::run(),
        Command::Generate { directory } => generate::run(&directory),
        Command::Mount { arguments } => mount::run(&arguments),
        Command::Top(options) => top::run(&options),
        Command::BenchChild { request } => bench::run_child(&request),
    })
}

fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the pipe is gone: no error.
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{error:#}"), exit_status(&error)),
    }
}

fn exit_status(error: &anyhow::Error) -> u8 {
    let wrong_bytes = error.downcast_ref::<check::Different>().is_some()
        || error.downcast_ref::<compare::Worse>().is_some()
        || error.downcast_ref::<bench::Missed>().is_some()
        || matches!(error.downcast_ref(), Some(bifolio_bench::Error::WrongBytes { .. }));
    if wrong_bytes { EXIT_DIFFERENT } else { EXIT_CANNOT_RUN }
}

fn fail(message: &str, status: u8) -> ExitCode {
    output::complain(message);
    ExitCode::from(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bytes_and_failures_have_statuses_of_their_own() {
        let wrong = bifolio_bench::Error::WrongBytes { series: "x".into(), pos_bytes: 1 };
        assert_eq!(exit_status(&wrong.into()), EXIT_DIFFERENT);
        let refused = bifolio_bench::Error::Refused("no room".into());
        assert_eq!(exit_status(&refused.into()), EXIT_CANNOT_RUN);
    }
}
