//! Programs other than cargo: run for their effect, or for what they print.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Prints the command and runs it.
pub fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", format!("{command:?}").replace('"', ""));
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Runs the command and returns its standard output; what it says of errors is passed on.
pub fn output(command: &mut Command) -> Result<String> {
    command.stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no text"))
}
