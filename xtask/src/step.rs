//! The steps: what each runs, and the frame around it (name, exact command, duration).
//!
//! Where it stands: [`crate::ci`] runs them in order, `main` runs one alone. A step is a
//! [`Cargo`] command, except `tidy` and `torture --mutants`, which run inside this program.
//!
//! The frame goes to standard error, where cargo's own progress goes, so the two stay in order.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::cargo::Cargo;
use crate::{loom, mutants, tidy};

/// One check.
#[derive(Debug, Subcommand)]
pub enum Step {
    /// Format the sources.
    Fmt {
        /// Only say what is not formatted; change nothing.
        #[arg(long)]
        check: bool,
    },
    /// Check the style that a program can check.
    Tidy,
    /// Run clippy on all targets and features, warnings denied.
    Clippy,
    /// Build the documentation with private items, warnings denied.
    Doc,
    /// Run the loom tests of the library whose names start with `loom_NAME`; all without a name.
    Loom {
        /// The test or group of tests, with or without `loom_` before it.
        name: Option<String>,
        /// Arguments for the test program, after `--`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Run the library's tests whose names contain NAME while a seeded scheduler interferes; all
    /// without a name. `BIFOLIO_CHAOS=seed:rate` says how.
    Chaos {
        /// The test or group of tests.
        name: Option<String>,
        /// Arguments for the test programs, after `--`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Run threads that use everything at once, checked by what their history allows.
    Torture {
        /// With the scheduler of `cargo x chaos`.
        #[arg(long)]
        chaos: bool,
        /// The measure of the tool: whether it finds the mutants whose names contain NAME, or all;
        /// rewrites the table in docs/correctness.md.
        #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "")]
        mutants: Option<String>,
        /// Only mutants that the table does not call found: goes on with a run that was stopped.
        #[arg(long, requires = "mutants")]
        left: bool,
        /// Arguments for the program: `--seconds`, `--seed`, `--only` ...
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run the tests of the workspace with all features.
    Test {
        /// Arguments for the test programs, after `--`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
}

impl Step {
    /// The word that names the step on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fmt { .. } => "fmt",
            Self::Tidy => "tidy",
            Self::Clippy => "clippy",
            Self::Doc => "doc",
            Self::Loom { .. } => "loom",
            Self::Chaos { .. } => "chaos",
            Self::Torture { .. } => "torture",
            Self::Test { .. } => "test",
        }
    }

    /// The command that runs the step alone, or mends its findings.
    pub fn alone(&self) -> String {
        format!("cargo x {}", self.name())
    }

    /// Runs the step between two lines that name it, show its command and say how long it took.
    pub fn run(&self) -> Result<Duration> {
        let command = self.cargo();
        let shown = command.as_ref().map_or_else(|| self.alone(), Cargo::to_string);
        framed(self.name(), &shown, || match (self, &command) {
            (Self::Loom { .. }, Some(cargo)) => loom::run(cargo),
            (Self::Torture { mutants: Some(name), left, .. }, _) => mutants::run(name, *left),
            (_, Some(cargo)) => cargo.run(),
            (_, None) => tidy::run(),
        })
    }

    fn cargo(&self) -> Option<Cargo> {
        let cargo = match self {
            Self::Tidy | Self::Torture { mutants: Some(_), .. } => return None,
            Self::Fmt { check: false } => Cargo::new("fmt --all"),
            Self::Fmt { check: true } => Cargo::new("fmt --all --check"),
            Self::Clippy => {
                Cargo::new("clippy --workspace --all-targets --all-features -- -D warnings")
            }
            Self::Doc => {
                Cargo::new("doc --workspace --all-features --no-deps --document-private-items")
                    .flags("RUSTDOCFLAGS", "-D warnings")
            }
            Self::Loom { name, arguments } => loom::cargo(name.as_deref(), arguments),
            Self::Chaos { name, arguments } => {
                chaos(Cargo::new("test --release -p bifolio --lib --tests"))
                    .arguments(name.as_slice())
                    .program_arguments(arguments)
            }
            Self::Torture { chaos: false, arguments, .. } => {
                Cargo::new("run --release -p bifolio-torture").program_arguments(arguments)
            }
            Self::Torture { chaos: true, arguments, .. } => {
                chaos(Cargo::new("run --release -p bifolio-torture")).program_arguments(arguments)
            }
            Self::Test { arguments } => {
                Cargo::new("test --workspace --all-features").program_arguments(arguments)
            }
        };
        Some(cargo)
    }
}

/// The same with every use of an atomic or a lock a point of the chaos scheduler: a build of its
/// own, in a folder of its own.
fn chaos(cargo: Cargo) -> Cargo {
    let folder = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned());
    let folder = Path::new(&folder).join("chaos").to_string_lossy().into_owned();
    cargo
        .arguments(&["--target-dir".to_owned(), folder])
        .flags("RUSTFLAGS", "--cfg bifolio_chaos")
        .default_variable("BIFOLIO_CHAOS", "1:2000")
}

fn framed(name: &str, shown: &str, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    eprintln!("\n== {name}\n$ {shown}");
    let start = Instant::now();
    let outcome = work();
    let duration = start.elapsed();
    let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
    eprintln!("-- {name}: {verdict} in {:.1} s", duration.as_secs_f64());
    outcome.with_context(|| format!("{name} failed ({shown})"))?;
    Ok(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(step: &Step) -> String {
        step.cargo().map_or_else(String::new, |cargo| cargo.to_string())
    }

    #[test]
    fn warnings_are_denied_everywhere() {
        assert!(shown(&Step::Clippy).ends_with("-- -D warnings"));
        let doc = shown(&Step::Doc);
        assert!(doc.starts_with("RUSTDOCFLAGS=") && doc.contains("-D warnings"), "{doc}");
    }

    #[test]
    fn chaos_has_its_own_cfg_and_folder() {
        let (name, arguments) = (Some("pin".to_owned()), Vec::new());
        let tests = shown(&Step::Chaos { name, arguments: arguments.clone() });
        assert!(tests.contains("--cfg bifolio_chaos") && tests.contains("/chaos"), "{tests}");
        assert!(tests.ends_with(" pin"), "{tests}");
        let torture = shown(&Step::Torture {
            chaos: true,
            mutants: None,
            left: false,
            arguments: arguments.clone(),
        });
        assert!(torture.contains("bifolio-torture") && torture.contains("--cfg bifolio_chaos"));
        let torture = shown(&Step::Torture { chaos: false, mutants: None, left: false, arguments });
        assert!(!torture.contains("chaos"), "{torture}");
    }

    #[test]
    fn formatting_writes_only_when_asked_to() {
        assert_eq!(shown(&Step::Fmt { check: true }), "cargo fmt --all --check");
        assert_eq!(shown(&Step::Fmt { check: false }), "cargo fmt --all");
    }

    #[test]
    fn test_hands_its_arguments_to_the_test_programs() {
        let arguments = vec!["--ignored".to_owned()];
        assert_eq!(
            shown(&Step::Test { arguments }),
            "cargo test --workspace --all-features -- --ignored"
        );
    }

    #[test]
    fn a_failed_step_names_itself_its_command_and_the_cause() {
        let error = framed("clippy", "cargo clippy", || anyhow::bail!("exit status: 101"));
        let text = format!("{:#}", error.unwrap_err());
        assert_eq!(text, "clippy failed (cargo clippy): exit status: 101");
    }
}
