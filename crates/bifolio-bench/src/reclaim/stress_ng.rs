//! `stress-ng --vm` itself, under the same control group and swap, where it is installed.
//!
//! Its "bogo ops" are larger than those of this benchmark: a separate row, never compared. It joins
//! the group through a child of this program, and is killed with the group.

use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::parameters::Parameters;
use super::{ChildTask, NAME, UNIT, case};
use crate::benchmark::Context;
use crate::error::{Error, Result};
use crate::harness::child;
use crate::harness::failures::skip_on_error;
use crate::harness::memory_group::Membership;
use crate::progress::Progress;
use bifolio_report::{Counts, Report, Row};

pub(super) const STRESS_NG: &str = "stress_ng";

/// Its share of the timed seconds, in addition to them: about that of every other series.
const TIME_SHARE: f64 = 0.1;

/// Minimum duration, seconds: it starts with memory that is not filled yet, and completes no
/// operation before it is.
const SECONDS_MIN: u64 = 5;

/// The task of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    group: Membership,
    workers: usize,
    size_bytes: u64,
    seconds: u64,
}

/// Measures a row for every number of workers; the error is the reason why it does not run.
pub(super) fn measure(
    context: &Context<'_>,
    parameters: &Parameters,
    group: &Membership,
    report: &mut Report,
    progress: &mut dyn Progress,
) -> Result<()> {
    progress.start("stress-ng", parameters.workers.len() as u64);
    let share = parameters.timed_seconds * TIME_SHARE / parameters.workers.len() as f64;
    for &workers in &parameters.workers {
        let task = ChildTask::StressNg(Task {
            group: group.clone(),
            workers,
            size_bytes: parameters.sizes.size_bytes,
            seconds: (share as u64).max(SECONDS_MIN),
        });
        let rate = child::ask::<f64>(&context.config.child_command, NAME, &task);
        if let Some(rate) = skip_on_error(report, &[STRESS_NG], rate)? {
            let mut row = Row::new(case(workers, "stress-ng"), UNIT);
            row.add(STRESS_NG, vec![rate], Counts::new());
            report.rows.push(row);
        }
        progress.advance(1);
    }
    Ok(())
}

/// Runs the child's side. Returns its rate, by wall-clock time.
pub(super) fn run(task: &Task) -> Result<f64> {
    task.group.join()?;
    let arguments = [
        "--vm".to_owned(),
        task.workers.to_string(),
        "--vm-bytes".to_owned(),
        task.size_bytes.to_string(),
        "--vm-keep".to_owned(),
        "--timeout".to_owned(),
        task.seconds.to_string(),
        "--metrics-brief".to_owned(),
    ];
    let output = Command::new("stress-ng").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(Error::system("start stress-ng"))?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    rate_in(&text).ok_or_else(|| Error::Refused(format!("stress-ng gave no rate: {}", text.trim())))
}

/// Parses the line of the stressor: its name, operations, three times, and operations per second,
/// first by wall-clock time.
fn rate_in(text: &str) -> Option<f64> {
    const RATE: usize = 4;
    let rate = |line: &str| {
        let numbers = line.split_whitespace().skip_while(|word| *word != "vm").skip(1);
        let numbers: Option<Vec<f64>> = numbers.map(|word| word.parse().ok()).collect();
        numbers?.get(RATE).copied()
    };
    text.lines().find_map(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_the_one_by_the_clock_on_the_wall() {
        let text = "stress-ng: info:  [7] dispatching hogs: 2 vm\n\
            stress-ng: info:  [7] stressor   bogo ops real time  usr time  sys time  bogo ops/s\n\
            stress-ng: info:  [7] vm            61880      1.02      1.48      0.55    60620.91 \
            30482.76\n";
        assert_eq!(rate_in(text), Some(60620.91));
        assert_eq!(rate_in("stress-ng: info: [7] successful run completed"), None);
    }
}
