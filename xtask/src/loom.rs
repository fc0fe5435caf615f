//! `cargo x loom [name]`: the model-checked tests of the library, in a build of their own.
//!
//! Where it stands: [`crate::step`] asks for the command and has it run here, because success of
//! cargo is not enough: a name that matches no test also succeeds. So the tests that ran are
//! counted, and none is a failure.
//!
//! `--cfg loom` changes every type behind the library's `sync` shim, so the build has its own
//! target folder and leaves the ordinary one warm. It is a release build, for the many
//! interleavings. The bounds below hold unless the caller has set the variables.

use std::path::Path;

use anyhow::{Result, ensure};

use crate::cargo::Cargo;

/// How often loom takes the processor from a thread that could go on; more find little more.
const PREEMPTIONS_MAX: &str = "3";
/// How many times one execution may branch; loom's own default of 1000 is short for a batch.
const BRANCHES_MAX: &str = "10000";

/// The command for the tests whose names contain `loom_` and `name`.
pub fn cargo(name: Option<&str>, arguments: &[String]) -> Cargo {
    let name = name.unwrap_or_default();
    let filter = format!("loom_{}", name.strip_prefix("loom_").unwrap_or(name));
    let folder = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned());
    let folder = Path::new(&folder).join("loom").to_string_lossy().into_owned();
    Cargo::new("test -p bifolio --lib --release --target-dir")
        .flags("RUSTFLAGS", "--cfg loom")
        .default_variable("LOOM_MAX_PREEMPTIONS", PREEMPTIONS_MAX)
        .default_variable("LOOM_MAX_BRANCHES", BRANCHES_MAX)
        .arguments(&[folder, filter])
        .program_arguments(arguments)
}

/// Runs the command and fails when no test ran.
pub fn run(cargo: &Cargo) -> Result<()> {
    let ran = tests_ran(&cargo.run_captured()?);
    ensure!(ran > 0, "no loom test ran: is the name right? Their names start with `loom_`");
    eprintln!("{ran} loom tests ran");
    Ok(())
}

/// How many tests passed or failed, by the closing lines of the test programs.
fn tests_ran(output: &str) -> u64 {
    let counts = output.lines().filter_map(|line| {
        let (_, counts) = line.split_once("test result: ")?;
        Some(count_before(counts, " passed") + count_before(counts, " failed"))
    });
    counts.sum()
}

/// The number that stands right before `label`; 0 without one.
fn count_before(text: &str, label: &str) -> u64 {
    text.split_once(label)
        .and_then(|(before, _)| before.rsplit(' ').next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_passed_and_failed_over_all_programs() {
        let output = "running 3 tests\ntest loom_a ... ok\n\n\
            test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 40 filtered out\n\
            test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n";
        assert_eq!(tests_ran(output), 15);
    }

    #[test]
    fn filtered_and_ignored_tests_did_not_run() {
        let output = "running 1 test\n\
            test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 52 filtered out\n";
        assert_eq!(tests_ran(output), 0);
        assert_eq!(tests_ran(""), 0);
    }

    #[test]
    fn the_name_may_carry_the_prefix() {
        for name in ["pin", "loom_pin"] {
            let shown = cargo(Some(name), &[]).to_string();
            assert!(shown.ends_with(" loom_pin"), "{shown}");
        }
        assert!(cargo(None, &[]).to_string().ends_with(" loom_"));
    }

    #[test]
    fn the_build_has_its_own_cfg_and_folder() {
        let shown = cargo(None, &[]).to_string();
        assert!(shown.contains("--cfg loom") && shown.contains("/loom "), "{shown}");
    }
}
