//! A run of cargo: its arguments and environment, printed before it starts.
//!
//! [`crate::step`] creates and runs it. The printed text can be typed in the root of the workspace
//! to the same effect.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::process::copy_through;

/// A cargo command line and the variables set for it alone.
#[derive(Debug)]
pub struct Cargo {
    variables: Vec<(&'static str, String)>,
    arguments: Vec<String>,
}

impl Cargo {
    /// Makes a command of the words of `line`.
    pub fn new(line: &str) -> Self {
        let arguments = line.split_whitespace().map(str::to_owned).collect();
        Self { variables: Vec::new(), arguments }
    }

    /// Adds arguments as they are.
    pub fn arguments(mut self, extra: &[String]) -> Self {
        self.arguments.extend_from_slice(extra);
        self
    }

    /// Adds the arguments that cargo passes to the program it runs.
    pub fn program_arguments(mut self, extra: &[String]) -> Self {
        if !extra.is_empty() {
            self.arguments.push("--".to_owned());
        }
        self.arguments(extra)
    }

    /// Appends `flags` to those that the caller has set in the variable.
    pub fn flags(mut self, variable: &'static str, flags: &str) -> Self {
        self.variables.push((variable, with_flags(variable, flags)));
        self
    }

    /// Sets the variable unless the caller has set it.
    pub fn default_variable(mut self, variable: &'static str, value: &str) -> Self {
        let value = std::env::var(variable).unwrap_or_else(|_| value.to_owned());
        self.variables.push((variable, value));
        self
    }

    /// Builds into a separate folder, with `flags` for the compiler.
    pub fn separate(self, folder: &str, flags: &str) -> Self {
        let folder = target_folder().join(folder).to_string_lossy().into_owned();
        self.arguments(&["--target-dir".to_owned(), folder]).flags("RUSTFLAGS", flags)
    }

    /// Returns the command, to be started in an environment with variables of these names.
    ///
    /// Those that describe the package `xtask` are removed. Some build scripts (that of `ring`) run
    /// again if they change, so that `cargo x` and plain cargo would undo each other's builds.
    fn command(&self, environment: impl Iterator<Item = OsString>) -> Command {
        let mut command = Command::new(program());
        command.args(&self.arguments).current_dir(workspace_root()).stdout(Stdio::piped());
        for name in environment {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&name);
            }
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs the command and returns its standard output, which is also passed on immediately.
    pub fn run(&self) -> Result<String> {
        let mut command = self.command(std::env::vars_os().map(|(name, _)| name));
        let mut child = command.spawn().context("cannot start cargo")?;
        let output = child.stdout.take().context("cargo has no standard output")?;
        let copied = copy_through(output, std::io::stdout().lock());
        let status = child.wait().context("cannot wait for cargo")?;
        let text = copied.context("cannot pass on what cargo printed")?;
        ensure!(status.success(), "{status}");
        Ok(text)
    }
}

impl fmt::Display for Cargo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.variables {
            write!(out, "{name}={} ", quoted(value))?;
        }
        write!(out, "cargo")?;
        self.arguments.iter().try_for_each(|argument| write!(out, " {}", quoted(argument)))
    }
}

/// Returns `flags` after those that the caller has set in the variable.
pub fn with_flags(variable: &str, flags: &str) -> String {
    let old = std::env::var(variable).unwrap_or_default();
    format!("{old} {flags}").trim().to_owned()
}

/// Returns the program that cargo names to what it runs: the same toolchain is used throughout.
pub fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns a command of cargo with another toolchain than that of this program, in the root.
pub fn of_toolchain(name: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", name, "cargo"]).current_dir(workspace_root());
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "CARGO_MANIFEST_DIR"] {
        command.env_remove(variable);
    }
    command
}

/// The root folder of the workspace this program was started from.
pub fn workspace_root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map_or_else(|| PathBuf::from("."), PathBuf::from)
}

/// The folder that cargo builds into.
pub fn target_folder() -> PathBuf {
    let root = workspace_root();
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |it| root.join(it))
}

/// Quotes a word as a shell needs it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_a_person_would_type_it() {
        let cargo = Cargo::new("test -p bifolio")
            .flags("XTASK_TEST_FLAGS", "--cfg loom")
            .arguments(&["it's".to_owned()])
            .program_arguments(&["--ignored".to_owned()]);
        assert_eq!(
            cargo.to_string(),
            r"XTASK_TEST_FLAGS='--cfg loom' cargo test -p bifolio 'it'\''s' -- --ignored"
        );
        assert_eq!(Cargo::new("test").program_arguments(&[]).to_string(), "cargo test");
    }

    #[test]
    fn variables_of_the_package_of_this_program_are_not_passed_on() {
        let names = ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR", "CARGO_TARGET_DIR", "RUSTFLAGS"];
        let command = Cargo::new("build").command(names.into_iter().map(Into::into));
        let removed: Vec<_> = command.get_envs().filter(|(_, value)| value.is_none()).collect();
        let expected = ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"].map(|name| (name.as_ref(), None));
        assert_eq!(removed, expected);
    }
}
