//! Work in a separate process: this program again, with a hidden subcommand.
//!
//! A resident size belongs to a process, and the benchmark's own buffers must not count as the
//! library's. The parent calls [`ask`], the program's hidden subcommand calls [`run_child`], and
//! the result is returned as one line of JSON. A child is killed when its parent dies, from its
//! first instruction on, and owns nothing that must be removed.
//!
//! # Safety
//! Code that runs between fork and exec makes system calls and nothing else.

#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::benchmark;
use crate::error::{Error, Result};

/// Attempts at a task whose process is killed: the kernel kills one in a control group that is full
/// of dirty pages if the disk is slow at that moment.
const ATTEMPTS_MAX: usize = 3;

#[derive(Debug, Serialize, Deserialize)]
struct Request {
    bench: String,
    task: Value,
}

/// Runs `task` of benchmark `bench` in a child of this process.
pub(crate) fn ask<A: DeserializeOwned>(
    child_command: &[String],
    bench: &str,
    task: &impl Serialize,
) -> Result<A> {
    let [program, arguments @ ..] = child_command else {
        return Err(Error::Child("no command was given to start it".into()));
    };
    let request = Request { bench: bench.to_owned(), task: serde_json::to_value(task)? };
    let mut command = Command::new(program);
    command.args(arguments).arg(serde_json::to_string(&request)?).stdin(Stdio::null());
    die_with_this_process(&mut command);
    let mut run = || command.output().map_err(Error::system(format!("start {program}")));
    let mut output = run()?;
    for _ in 1..ATTEMPTS_MAX {
        if output.status.signal() == Some(libc::SIGKILL) {
            output = run()?;
        }
    }
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Child(format!("{}: {complaint}", output.status)));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn die_with_this_process(command: &mut Command) {
    let parent = getpid();
    let ask = move || -> io::Result<()> {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A parent that is dead already sends no signal any more.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    // SAFETY: `ask` makes two system calls; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(ask) };
}

/// Runs the request in the child. Returns the text to print.
///
/// # Errors
/// The request is invalid, or the task failed.
pub fn run_child(request: &str) -> Result<String> {
    let request: Request = serde_json::from_str(request)?;
    let benchmark = benchmark::find(&request.bench)
        .ok_or_else(|| Error::Child(format!("no benchmark is called {}", request.bench)))?;
    Ok(serde_json::to_string(&benchmark.run_in_child(request.task)?)?)
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Child(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<String> {
        ["sh", "-c", script].map(str::to_owned).to_vec()
    }

    #[test]
    fn the_request_arrives_and_the_answer_comes_back() {
        let answer: Value = ask(&shell("printf '%s' \"$0\""), "b", &[1, 2]).unwrap();
        assert_eq!(answer, serde_json::json!({"bench": "b", "task": [1, 2]}));
    }

    #[test]
    fn a_failing_child_is_quoted() {
        let error = ask::<Value>(&shell("echo no room >&2; exit 3"), "b", &()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("no room") && message.contains('3'), "{message}");
        assert!(ask::<Value>(&[], "b", &()).is_err());
        assert!(ask::<Value>(&shell("echo not json"), "b", &()).is_err());
    }

    #[test]
    fn a_child_that_is_killed_is_started_again() {
        let directory = tempfile::tempdir().unwrap();
        let mark = directory.path().join("mark");
        let first =
            format!("[ -e {0} ] && echo 7 || {{ touch {0}; kill -KILL $$; }}", mark.display());
        assert_eq!(ask::<i32>(&shell(&first), "b", &()).unwrap(), 7);
        let error = ask::<i32>(&shell("kill -KILL $$"), "b", &()).unwrap_err();
        assert!(error.to_string().contains('9'), "{error}");
    }
}
