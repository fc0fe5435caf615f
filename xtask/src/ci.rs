//! `cargo x ci`: every check in one order, cheapest first, up to the first that fails.
//!
//! Where it stands: `.ci/run` calls it after the tests, people call it before a commit. It calls
//! [`crate::step`] for each check and adds only the order and the summary.
//!
//! It does not go on after a failure: what a later check says of broken code is noise.

use std::time::Duration;

use anyhow::Result;

use crate::step::Step;

/// Runs the checks and prints how long each took.
pub fn run(skip_tests: bool) -> Result<()> {
    let mut durations = Vec::new();
    for step in steps(skip_tests) {
        let outcome = step.run();
        if outcome.is_err() {
            eprintln!("\ncargo x ci: stopped here; run this step alone with `{}`", step.alone());
        }
        durations.push((step.name(), outcome?));
    }
    eprintln!("\n{}", summary(&durations));
    Ok(())
}

fn steps(skip_tests: bool) -> Vec<Step> {
    let mut steps = vec![
        Step::Fmt { check: true },
        Step::Tidy,
        Step::Clippy,
        Step::Doc,
        Step::Loom { name: None, arguments: Vec::new() },
    ];
    if !skip_tests {
        steps.push(Step::Test { arguments: Vec::new() });
    }
    steps.extend(TORTURE.map(|line| {
        let arguments = line.split_whitespace().map(str::to_owned).collect();
        Step::Torture { chaos: false, mutants: None, left: false, arguments }
    }));
    steps
}

/// Three minutes, with fresh seeds, which are printed; a failure prints what to type to see it
/// again. The exerciser comes by itself, because it is asked for a number of operations and not
/// for a time.
const TORTURE: [&str; 2] =
    ["--only exerciser --operations 200000 --seconds 180", "--without exerciser --seconds 120"];

fn summary(durations: &[(&str, Duration)]) -> String {
    let total: Duration = durations.iter().map(|(_, duration)| duration).sum();
    let each: Vec<String> = durations
        .iter()
        .map(|(name, duration)| format!("{name} {:.1} s", duration.as_secs_f64()))
        .collect();
    format!("cargo x ci: all passed in {:.1} s ({})", total.as_secs_f64(), each.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(skip_tests: bool) -> Vec<&'static str> {
        steps(skip_tests).iter().map(Step::name).collect()
    }

    #[test]
    fn cheap_checks_come_first_and_only_the_tests_can_be_left_out() {
        let (torture, tests) = (["torture"; 2], ["test"]);
        let cheap = ["fmt", "tidy", "clippy", "doc", "loom"];
        assert_eq!(names(false), [&cheap[..], &tests, &torture].concat());
        assert_eq!(names(true), [&cheap[..], &torture].concat());
    }

    #[test]
    fn formatting_is_checked_and_not_changed() {
        assert!(matches!(steps(true)[0], Step::Fmt { check: true }));
    }

    #[test]
    fn summary_adds_up() {
        let durations =
            [("fmt", Duration::from_millis(1500)), ("tidy", Duration::from_millis(500))];
        assert_eq!(summary(&durations), "cargo x ci: all passed in 2.0 s (fmt 1.5 s, tidy 0.5 s)");
    }
}
