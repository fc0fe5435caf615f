//! Series that fail: the one place that decides what a failure costs.
//!
//! Called by every benchmark and by the loop over trials. A failure costs one series, never the
//! run:
//!
//! | what fails | what it costs |
//! |---|---|
//! | a trial returns an error, or its process ends with one | the series of that row: `failed` |
//! | the process of a trial is killed, twice | the series of that row: `killed` |
//! | a series cannot be prepared, or its first attempt fails | the series: `skipped` |
//! | bytes are wrong, in this process or in a child | the run ends: no figure is valid |
//!
//! A series that failed has no figures in its row, not even of the trials before: those that
//! survive are the fast ones. A slow device is waited for: trials end with their time, and files
//! are written and verified however long that takes; a signal ends the run. Memory that is short
//! makes a process in a [control group](super::memory_group) wait.

use std::ops::Range;

use bifolio_report::{Failure, Report, Row, with_causes};

use crate::error::{Error, Result};

/// Returns the result of `attempt`; after an error, every one of `series` is skipped with the error
/// as the reason.
///
/// # Errors
/// The error ends the run.
pub(crate) fn skip_on_error<T>(
    report: &mut Report,
    series: &[&str],
    attempt: Result<T>,
) -> Result<Option<T>> {
    match attempt {
        Ok(given) => Ok(Some(given)),
        Err(error) => {
            let failure = failure(error)?;
            report.skip(series, &failure.reason);
            Ok(None)
        }
    }
}

/// Returns what is reported of `error`.
///
/// # Errors
/// The error ends the run.
fn failure(error: Error) -> Result<Failure> {
    match error {
        Error::WrongBytes { .. } => Err(error),
        error => Ok(Failure {
            killed: matches!(error, Error::Killed { .. }),
            reason: with_causes(&error),
        }),
    }
}

/// The results of the trials of one series in one row, or in several.
#[derive(Debug)]
pub struct Given<T> {
    results: Vec<T>,
    failure: Option<Failure>,
}

impl<T> Default for Given<T> {
    fn default() -> Self {
        Self { results: Vec::new(), failure: None }
    }
}

impl<T> Given<T> {
    /// Returns no results yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns `true` if a trial failed: there are no results, and no trial is to follow.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Adds the result of a trial; after an error the series has failed.
    ///
    /// # Errors
    /// The error ends the run.
    pub fn add(&mut self, result: Result<T>) -> Result<()> {
        match result {
            Ok(result) => self.results.push(result),
            Err(error) => {
                self.failure = Some(failure(error)?);
                self.results.clear();
            }
        }
        Ok(())
    }

    /// Returns the results so far, in their order.
    pub fn results(&self) -> &[T] {
        &self.results
    }

    /// Returns the results for the rows `of` `series`; `None` if it failed, which the rows then
    /// show.
    pub fn or_fail(
        &self,
        rows: &mut [Row],
        of: Range<usize>,
        series: &'static str,
    ) -> Option<&[T]> {
        let Some(failure) = &self.failure else { return Some(&self.results) };
        for row in &mut rows[of] {
            row.failed.insert(series.into(), failure.clone());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bifolio_report::{Case, Host};

    fn given(results: Vec<Result<i32>>) -> Result<Given<i32>> {
        let mut given = Given::new();
        results.into_iter().try_for_each(|result| given.add(result))?;
        Ok(given)
    }

    #[test]
    fn a_killed_trial_costs_its_series_and_nothing_else() {
        let mut rows = [0, 1, 2].map(|n| Row::new(Case::new().with("n", n), "x"));
        let killed = given(vec![Ok(1), Err(Error::Killed { attempts: 2 })]).unwrap();
        assert!(killed.has_failed() && killed.results().is_empty());
        assert_eq!(killed.or_fail(&mut rows, 1..3, "rival"), None);
        let failed = given(vec![Err(Error::Child("no room".into()))]).unwrap();
        assert_eq!(failed.or_fail(&mut rows, 1..2, "ours"), None);
        assert_eq!(given(vec![Ok(7)]).unwrap().or_fail(&mut rows, 0..1, "x"), Some(&[7][..]));
        let words = rows.each_ref().map(|row| [row.word("rival"), row.word("ours")]);
        assert_eq!(words, [["-", "-"], ["killed", "failed"], ["killed", "-"]]);
        assert!(rows[1].failed["ours"].reason.contains("no room"));
    }

    #[test]
    fn wrong_bytes_end_the_run() {
        let wrong = || Error::WrongBytes { series: "x".into(), pos_bytes: 8 };
        assert!(matches!(given(vec![Ok(1), Err(wrong())]), Err(Error::WrongBytes { .. })));
        let mut report = Report::new("b", &Host::default(), serde_json::Value::Null);
        let skipped = skip_on_error::<()>(&mut report, &["x"], Err(wrong()));
        assert!(matches!(skipped, Err(Error::WrongBytes { .. })));
        let skipped = skip_on_error::<()>(&mut report, &["x"], Err(Error::Refused("no".into())));
        assert!(skipped.unwrap().is_none() && report.skipped[0].reason == "no");
    }
}
