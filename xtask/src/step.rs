//! The steps: the command that each runs, and their order in `cargo x ci`.
//!
//! `main` runs one step, or all of them. A step is a [`Cargo`] command, except `tidy`, `house`,
//! `package` and `torture --mutants`, which run inside this program. Name, command and duration go
//! to standard error, where cargo's own progress goes, so that they stay in order.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::cargo::Cargo;
use crate::{house, mutants, package, ran, surface, tidy};

/// The scheduler's settings and the arguments of torture in `cargo x ci`, with fresh seeds, which
/// are printed; a failure prints a command that repeats it. The exerciser has one thread, so
/// nothing interferes, and is limited by operations. For the others, the rate and the short scenes
/// of `cargo x torture --mutants`, which says what they find in less time than this.
const TORTURE: [(&str, &str); 2] = [
    ("1:0", "--only exerciser --operations 100000 --seconds 90"),
    ("1:2000", "--without exerciser --scene-ms 600 --seconds 75"),
];
/// The mutants of the day that `cargo x ci` tries last: four minutes at most.
const SAMPLE: usize = 3;

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
    /// Print structural metrics; fails if a recorded one has risen.
    House(house::Arguments),
    /// Package the crates that are to be published, and check what the packages hold.
    Package(package::Arguments),
    /// Run clippy on all targets and features, warnings denied.
    Clippy,
    /// Build the documentation with private items, warnings denied.
    Doc,
    /// Compare the public surface of the library with docs/surface.txt.
    Surface(surface::Arguments),
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
    /// Check the library without the feature `maps`, and run the tests of its core.
    Core {
        /// Arguments for the test programs, after `--`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Run threads that use the whole API, checked by their histories.
    Torture {
        /// With the scheduler of `cargo x chaos`.
        #[arg(
            long,
            value_name = "SEED:RATE",
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = "1:2000"
        )]
        chaos: Option<String>,
        /// Measure which mutants torture finds, those whose names contain NAME or all; rewrites the
        /// table in docs/correctness.md.
        #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "")]
        mutants: Option<String>,
        /// Only mutants that the table does not list as found: continues an interrupted run.
        #[arg(long, requires = "mutants")]
        left: bool,
        /// Only so many mutants, others each day, where the table says that torture finds them.
        #[arg(long, value_name = "N", requires = "mutants", conflicts_with = "left")]
        sample: Option<usize>,
        /// First seed of the scenes; with `--sample` the number of the day, today unless given.
        #[arg(long)]
        seed: Option<u64>,
        /// As a step of `cargo x ci`, which changes no file.
        #[arg(skip)]
        is_in_ci: bool,
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

/// Runs the checks in order, cheapest first, up to the first that fails, and prints how long each
/// took.
pub fn run_all(skip_tests: bool) -> Result<()> {
    let mut durations = Vec::new();
    for step in all(skip_tests) {
        let took = step.run().inspect_err(|_| {
            eprintln!("\ncargo x ci: stopped here; `cargo x {}` runs this step", step.name());
        })?;
        durations.push(format!("{} {:.1} s", step.name(), took.as_secs_f64()));
    }
    eprintln!("\ncargo x ci: all passed ({})", durations.join(", "));
    Ok(())
}

fn all(skip_tests: bool) -> Vec<Step> {
    let mut steps = vec![
        Step::Fmt { check: true },
        Step::Tidy,
        Step::House(house::Arguments::default()),
        Step::Package(package::Arguments::default()),
        Step::Clippy,
        Step::Doc,
        Step::Surface(surface::Arguments::default()),
        Step::Loom { name: None, arguments: Vec::new() },
        Step::Core { arguments: Vec::new() },
    ];
    if !skip_tests {
        steps.push(Step::Test { arguments: Vec::new() });
    }
    steps.extend(TORTURE.map(|(chaos, line)| {
        let arguments = line.split_whitespace().map(str::to_owned).collect();
        torture(Some(chaos), None, arguments)
    }));
    steps.push(torture(None, Some(SAMPLE), Vec::new()));
    steps
}

/// Returns a torture step of `cargo x ci`.
fn torture(chaos: Option<&str>, sample: Option<usize>, arguments: Vec<String>) -> Step {
    let (chaos, mutants) = (chaos.map(str::to_owned), sample.map(|_| String::new()));
    let (left, seed, is_in_ci) = (false, None, true);
    Step::Torture { chaos, mutants, left, sample, seed, is_in_ci, arguments }
}

impl Step {
    /// Returns the name of the step on the command line.
    fn name(&self) -> &'static str {
        match self {
            Self::Fmt { .. } => "fmt",
            Self::Tidy => "tidy",
            Self::House(_) => "house",
            Self::Package(_) => "package",
            Self::Clippy => "clippy",
            Self::Doc => "doc",
            Self::Surface(_) => "surface",
            Self::Loom { .. } => "loom",
            Self::Chaos { .. } => "chaos",
            Self::Torture { .. } => "torture",
            Self::Core { .. } => "core",
            Self::Test { .. } => "test",
        }
    }

    /// Runs the step; prints its name, its command and its duration.
    pub fn run(&self) -> Result<Duration> {
        let (name, command) = (self.name(), self.cargo());
        let shown = command.as_ref().map_or_else(|| format!("cargo x {name}"), Cargo::to_string);
        eprintln!("\n== {name}\n$ {shown}");
        let start = Instant::now();
        let outcome = match (self, &command) {
            (Self::Tidy, _) => tidy::run(),
            (Self::House(arguments), _) => house::run(*arguments),
            (Self::Package(arguments), _) => package::run(*arguments),
            (Self::Surface(arguments), _) => surface::run(*arguments),
            (Self::Torture { mutants: Some(_), sample: Some(count), seed, is_in_ci, .. }, _) => {
                mutants::run_sample(*count, *seed, !is_in_ci)
            }
            (Self::Torture { mutants: Some(name), left, .. }, _) => mutants::run(name, *left),
            (Self::Fmt { check }, Some(cargo)) => {
                let arguments = if *check { "--all --check" } else { "--all" };
                // The other workspaces, whose dependencies rustfmt does not need.
                let others = ["doors", "fuzz"].map(|folder| {
                    Cargo::new(&format!("fmt --manifest-path {folder}/Cargo.toml {arguments}"))
                });
                [cargo].into_iter().chain(&others).try_for_each(|cargo| cargo.run().map(|_| ()))
            }
            (Self::Core { .. }, Some(cargo)) => {
                let clippy = "clippy -p bifolio --no-default-features -- -D warnings";
                Cargo::new(clippy).run().and_then(|_| ran::run(cargo))
            }
            (Self::Loom { .. } | Self::Chaos { .. } | Self::Test { .. }, Some(cargo)) => {
                ran::run(cargo)
            }
            (_, Some(cargo)) => cargo.run().map(|_| ()),
            (_, None) => unreachable!("every other step is a command"),
        };
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        eprintln!("-- {name}: {verdict} in {:.1} s", start.elapsed().as_secs_f64());
        outcome.with_context(|| format!("{name} failed ({shown})"))?;
        Ok(start.elapsed())
    }

    /// The command of the step, if it is one.
    fn cargo(&self) -> Option<Cargo> {
        let chaos = |cargo: Cargo, settings: &str| {
            let cargo = cargo.separate("chaos", "--cfg bifolio_chaos");
            cargo.default_variable("BIFOLIO_CHAOS", settings)
        };
        let cargo = match self {
            Self::Tidy
            | Self::House(_)
            | Self::Package(_)
            | Self::Torture { mutants: Some(_), .. } => return None,
            Self::Fmt { check: false } => Cargo::new("fmt --all"),
            Self::Fmt { check: true } => Cargo::new("fmt --all --check"),
            Self::Clippy => {
                Cargo::new("clippy --workspace --all-targets --all-features -- -D warnings")
            }
            Self::Doc => {
                Cargo::new("doc --workspace --all-features --no-deps --document-private-items")
                    .flags("RUSTDOCFLAGS", "-D warnings")
            }
            Self::Surface(_) => surface::command(),
            Self::Loom { name, arguments } => {
                loom(name.as_deref().unwrap_or_default()).program_arguments(arguments)
            }
            Self::Chaos { name, arguments } => {
                chaos(Cargo::new("test --release -p bifolio --lib --tests"), "1:2000")
                    .arguments(name.as_slice())
                    .program_arguments(arguments)
            }
            Self::Torture { chaos: settings, seed, arguments, .. } => {
                let cargo = Cargo::new("run --profile checks -p bifolio-torture");
                let cargo = match settings {
                    Some(settings) => chaos(cargo, settings),
                    None => cargo,
                };
                let seed = seed.map(|seed| format!("--seed={seed}"));
                let arguments: Vec<_> = seed.into_iter().chain(arguments.iter().cloned()).collect();
                cargo.program_arguments(&arguments)
            }
            Self::Core { arguments } => Cargo::new("test -p bifolio --no-default-features --lib")
                .program_arguments(arguments),
            Self::Test { arguments } => {
                Cargo::new("test --workspace --all-features").program_arguments(arguments)
            }
        };
        Some(cargo)
    }
}

/// Returns the command for tests whose names contain `loom_` and `name`. `--cfg loom` changes every
/// type behind the library's `sync` shim. The bounds apply unless the caller has set the variables:
/// more preemptions find little more, and loom's own default of 1000 branches is too short for a
/// batch.
fn loom(name: &str) -> Cargo {
    let filter = format!("loom_{}", name.strip_prefix("loom_").unwrap_or(name));
    Cargo::new("test --profile checks -p bifolio --lib")
        .separate("loom", "--cfg loom")
        .default_variable("LOOM_MAX_PREEMPTIONS", "3")
        .default_variable("LOOM_MAX_BRANCHES", "10000")
        .arguments(&[filter])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cheap_checks_come_first_and_only_the_tests_can_be_left_out() {
        let names = |skip| all(skip).iter().map(Step::name).collect::<Vec<_>>();
        let (torture, tests) = (["torture"; 3], ["test"]);
        let cheap = ["fmt", "tidy", "house", "package", "clippy", "doc", "surface", "loom", "core"];
        assert_eq!(names(false), [&cheap[..], &tests, &torture].concat());
        assert_eq!(names(true), [&cheap[..], &torture].concat());
    }

    #[test]
    fn chaos_and_loom_have_their_own_cfg_and_folder() {
        let shown = |step: &Step| step.cargo().unwrap().to_string();
        let (name, arguments) = (Some("loom_pin".to_owned()), Vec::new());
        let loom = shown(&Step::Loom { name: name.clone(), arguments: arguments.clone() });
        assert!(loom.contains("--cfg loom") && loom.contains("/loom "), "{loom}");
        assert!(loom.ends_with(" loom_pin"), "{loom}");
        let tests = shown(&Step::Chaos { name, arguments: arguments.clone() });
        assert!(tests.contains("--cfg bifolio_chaos") && tests.contains("/chaos"), "{tests}");
        let mut plain = torture(None, None, vec!["--only".to_owned(), "kills".to_owned()]);
        if let Step::Torture { seed, .. } = &mut plain {
            *seed = Some(7);
        }
        let plain = shown(&plain);
        assert!(!plain.contains("chaos") && plain.ends_with("-- --seed=7 --only kills"), "{plain}");
        let chaos = shown(&torture(Some("1:300"), None, Vec::new()));
        assert!(chaos.contains("BIFOLIO_CHAOS=") && chaos.contains("/chaos"), "{chaos}");
    }
}
