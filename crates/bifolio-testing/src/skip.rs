//! Skips tests that need features that a machine may lack. A skip prints its reason; if the
//! variable `BIFOLIO_TEST_REQUIRE` requires the feature, it is a failure.

use std::env;
use std::fmt::Display;
use std::process::{Command, Output};

/// The variable that requires features: `all`, or names separated by commas.
const VARIABLE: &str = "BIFOLIO_TEST_REQUIRE";

/// Prints why a test, or a part of it, is skipped for lack of `feature`: a feature that `bifolio
/// features` lists, or one of `cpus`, `huge-pages-now`, `merged-pages`, `power-disk`, `root`,
/// `seccomp`, `swap`, `sysfs`, `tmpfile`, `tmpfs`.
///
/// # Panics
/// If `BIFOLIO_TEST_REQUIRE` is `all` or lists `feature`.
#[track_caller]
pub fn skip(feature: impl Display, reason: impl Display) {
    let feature = feature.to_string();
    let required = env::var(VARIABLE).unwrap_or_default();
    assert!(!demands(&required, &feature), "{VARIABLE}={required}, but {feature}: {reason}");
    eprintln!("skipped: {feature}: {reason}");
}

/// Runs a command that needs a tool or a registry. If it fails, the test is skipped for lack of
/// `feature`, and there is no output.
///
/// # Panics
/// As [`skip`] does.
#[track_caller]
pub fn attempt(command: &mut Command, feature: impl Display) -> Option<Output> {
    let refusal = match command.output() {
        Ok(output) if output.status.success() => return Some(output),
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    skip(feature, format!("{command:?}: {refusal}"));
    None
}

fn demands(required: &str, feature: &str) -> bool {
    required.split(',').any(|name| name.trim() == feature || name.trim() == "all")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_fails_only_where_its_feature_is_demanded() {
        for required in ["all", "root", "io-uring,root", " io-uring , root "] {
            assert!(demands(required, "root"), "{required:?}");
        }
        for required in ["", "io-uring", "roots", "io-uring,"] {
            assert!(!demands(required, "root"), "{required:?}");
        }
    }
}
