//! One run of cargo: its arguments and the environment it adds, shown before it is started.
//!
//! Where it stands: [`crate::step`] and [`crate::loom`] build a [`Cargo`] and run it. What is
//! printed is what a person would type in the root of the workspace to get the same.
//!
//! It does not interpret what cargo prints; [`Cargo::run_captured`] hands it to the caller.

use std::fmt;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// A cargo command line and the variables set for it alone.
#[derive(Debug)]
pub struct Cargo {
    variables: Vec<(&'static str, String)>,
    arguments: Vec<String>,
}

impl Cargo {
    /// A command made of the words of `line`.
    pub fn new(line: &str) -> Self {
        let arguments = line.split_whitespace().map(str::to_owned).collect();
        Self { variables: Vec::new(), arguments }
    }

    /// Adds arguments as they stand.
    pub fn arguments(mut self, extra: &[String]) -> Self {
        self.arguments.extend_from_slice(extra);
        self
    }

    /// Adds the arguments that cargo hands on to the program it runs.
    pub fn program_arguments(mut self, extra: &[String]) -> Self {
        if !extra.is_empty() {
            self.arguments.push("--".to_owned());
        }
        self.arguments(extra)
    }

    /// Adds `flags` behind those the caller has in the variable already.
    pub fn flags(mut self, variable: &'static str, flags: &str) -> Self {
        let value = match std::env::var(variable) {
            Ok(old) if !old.trim().is_empty() => format!("{old} {flags}"),
            _ => flags.to_owned(),
        };
        self.variables.push((variable, value));
        self
    }

    /// Sets the variable unless the caller has set it.
    pub fn default_variable(mut self, variable: &'static str, value: &str) -> Self {
        let value = std::env::var(variable).unwrap_or_else(|_| value.to_owned());
        self.variables.push((variable, value));
        self
    }

    /// Runs the command; an error when it cannot start or does not succeed.
    pub fn run(&self) -> Result<()> {
        let status = self.command().status().context("cannot start cargo")?;
        succeeded(status)
    }

    /// As [`Cargo::run`], passing standard output on as it comes and also returning it.
    pub fn run_captured(&self) -> Result<String> {
        let mut child =
            self.command().stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
        let output = child.stdout.take().context("cargo has no standard output")?;
        let copied = copy_through(output, std::io::stdout().lock());
        // Wait before looking at the copy, so that no child is left behind when it failed.
        let status = child.wait().context("cannot wait for cargo")?;
        let text = copied.context("cannot pass on what cargo printed")?;
        succeeded(status)?;
        Ok(text)
    }

    fn command(&self) -> Command {
        // Cargo names itself to what it runs, so the same toolchain is used throughout.
        let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(program);
        command
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .current_dir(workspace_root());
        command
    }
}

impl fmt::Display for Cargo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.variables {
            write!(out, "{name}={} ", quoted(value))?;
        }
        write!(out, "cargo")?;
        for argument in &self.arguments {
            write!(out, " {}", quoted(argument))?;
        }
        Ok(())
    }
}

/// The root folder of the workspace this program was started from.
pub fn workspace_root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map_or_else(|| PathBuf::from("."), PathBuf::from)
}

fn succeeded(status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{status}");
    }
    Ok(())
}

/// Copies chunk by chunk, not line by line: the name of a test that hangs has no line end yet.
fn copy_through(mut from: impl Read, mut out: impl Write) -> std::io::Result<String> {
    let mut all = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let length = from.read(&mut chunk)?;
        if length == 0 {
            return Ok(String::from_utf8_lossy(&all).into_owned());
        }
        out.write_all(&chunk[..length])?;
        out.flush()?;
        all.extend_from_slice(&chunk[..length]);
    }
}

/// The word as a shell would need it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn shows_what_a_person_would_type() {
        let cargo = Cargo::new("test -p bifolio")
            .flags("XTASK_TEST_FLAGS", "--cfg loom")
            .arguments(&["loom_pin".to_owned()])
            .program_arguments(&["--ignored".to_owned()]);
        assert_eq!(
            cargo.to_string(),
            "XTASK_TEST_FLAGS='--cfg loom' cargo test -p bifolio loom_pin -- --ignored"
        );
    }

    #[test]
    fn no_program_arguments_leave_no_separator() {
        assert_eq!(Cargo::new("test").program_arguments(&[]).to_string(), "cargo test");
    }

    #[test]
    fn quotes_only_what_a_shell_would_split() {
        assert_eq!(quoted("target/loom"), "target/loom");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }

    #[test]
    fn a_failing_command_is_an_error_with_its_status() {
        let error = succeeded(ExitStatus::from_raw(101 << 8)).unwrap_err();
        assert_eq!(error.to_string(), "exit status: 101");
        assert!(succeeded(ExitStatus::from_raw(0)).is_ok());
    }

    #[test]
    fn captured_output_is_passed_on_and_returned_complete() {
        let printed = "test loom_pin ... ok\n".repeat(1000);
        let mut shown = Vec::new();
        assert_eq!(copy_through(printed.as_bytes(), &mut shown).unwrap(), printed);
        assert_eq!(shown, printed.as_bytes());
    }
}
