//! `bifolio generate`: manual pages and completions for shells, from the definition of the command
//! line. `cargo x install` puts them in their places.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};

use crate::cli::Cli;

/// Writes `bifolio.1`, a page for each subcommand, and the completions of three shells.
pub(crate) fn run(directory: &Path) -> anyhow::Result<()> {
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        generate_to(shell, &mut Cli::command(), "bifolio", directory)?;
    }
    Ok(clap_mangen::generate_to(Cli::command(), directory)?)
}
