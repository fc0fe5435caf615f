//! Checks that a step checked something: test programs and torture succeed, too, if a filter
//! matches nothing or every test is left out.
//!
//! Called by each step that runs tests, with what they printed. Torture fails by itself if it made
//! no call, and so does pytest without a test.

use anyhow::{Context, Result, ensure};

use crate::cargo::Cargo;

/// Runs test programs; fails if no test ran.
pub fn run(cargo: &Cargo) -> Result<()> {
    check_tests(&cargo.run()?)
}

/// Fails if no test ran, according to what test programs printed.
pub fn check_tests(output: &str) -> Result<()> {
    let ran: u64 = tests(output).iter().sum();
    ensure!(ran > 0, "no test ran, so nothing was checked: is the filter right?");
    Ok(())
}

/// Fails unless each of `programs` test programs ran a test.
pub fn check_each(output: &str, programs: usize) -> Result<()> {
    let ran = tests(output);
    let with_tests = ran.iter().filter(|ran| **ran > 0).count();
    ensure!(
        with_tests == programs,
        "{with_tests} of {programs} test programs ran a test, so something was not checked"
    );
    Ok(())
}

/// Returns the number of inputs that a fuzzer tried, according to what it printed last; fails if
/// there are none.
pub fn check_fuzzer(output: &str) -> Result<u64> {
    let rest = output.lines().rev().find_map(|line| line.trim().strip_prefix("Done "));
    let count = rest.and_then(|rest| rest.split_once(" runs in ")).map(|(count, _)| count);
    let count: u64 = count.context("the fuzzer does not say how many inputs it tried")?.parse()?;
    ensure!(count > 0, "the fuzzer tried no input, so nothing was checked");
    Ok(count)
}

/// Returns how many tests each test program ran.
fn tests(output: &str) -> Vec<u64> {
    let results = output.lines().filter_map(|line| line.split_once("test result: "));
    let counts = results.map(|(_, result)| {
        let number = |word: &str| {
            let before = result.split_once(word).map_or("", |(before, _)| before);
            before.split_whitespace().last().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0)
        };
        number(" passed") + number(" failed")
    });
    counts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(counts: &str) -> String {
        format!("running 0 tests\n\ntest result: ok. {counts}; 1 ignored; 0 measured\n")
    }

    #[test]
    fn tests_that_were_left_out_or_ignored_did_not_run() {
        let (none, some) = (result("0 passed; 0 failed"), result("12 passed; 0 failed"));
        assert!(check_tests("").is_err() && check_tests(&none).is_err());
        assert!(check_tests(&some).is_ok() && check_tests(&(none.clone() + &some)).is_ok());
        assert_eq!(tests(&(some.clone() + &result("10 passed; 2 failed"))), [12, 12]);
        // A test that prints may leave text before the result.
        assert_eq!(tests("...test result: FAILED. 0 passed; 1 failed; 0 ignored"), [1]);
    }

    #[test]
    fn each_program_that_is_named_must_run_a_test() {
        let (none, some) = (result("0 passed; 0 failed"), result("12 passed; 0 failed"));
        assert!(check_each(&(some.clone() + &some), 2).is_ok());
        assert!(check_each(&(some.clone() + &none), 2).is_err() && check_each(&some, 2).is_err());
    }

    #[test]
    fn a_fuzzer_that_tried_nothing_has_found_nothing() {
        assert_eq!(check_fuzzer("#8 NEW\nDone 812 runs in 61 second(s)\n").ok(), Some(812));
        assert!(check_fuzzer("Done 0 runs in 61 second(s)\n").is_err());
        assert!(check_fuzzer("INFO: Seed: 1\n").is_err());
    }
}
