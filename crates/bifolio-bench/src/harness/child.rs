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

const ATTEMPTS_MAX: usize = 2;

#[derive(Debug, Serialize, Deserialize)]
struct Request {
    bench: String,
    task: Value,
}

/// Output of a child. Any other error is its exit status and its standard error.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Done(Value),
    WrongBytes { series: String, pos_bytes: u64 },
}

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
    for _ in 0..ATTEMPTS_MAX {
        let output = run()?;
        if output.status.signal() == Some(libc::SIGKILL) {
            continue;
        }
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::Child(format!("{}: {complaint}", output.status)));
        }
        return match serde_json::from_slice(&output.stdout)? {
            Reply::Done(answer) => Ok(serde_json::from_value(answer)?),
            Reply::WrongBytes { series, pos_bytes } => Err(Error::WrongBytes { series, pos_bytes }),
        };
    }
    Err(Error::Killed { attempts: ATTEMPTS_MAX })
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

/// Runs a benchmark's `task` in the child.
pub(crate) fn serve<T: DeserializeOwned, A: Serialize>(
    task: Value,
    run: impl FnOnce(&T) -> Result<A>,
) -> Result<Value> {
    Ok(serde_json::to_value(run(&serde_json::from_value(task)?)?)?)
}

/// Runs the request in the child. Returns the text to print.
///
/// # Errors
/// The request is invalid, or the task failed.
pub fn run_child(request: &str) -> Result<String> {
    let request: Request = serde_json::from_str(request)?;
    let benchmark = benchmark::find(&request.bench)
        .ok_or_else(|| Error::Child(format!("no benchmark is called {}", request.bench)))?;
    let reply = match benchmark.run_in_child(request.task) {
        Err(Error::WrongBytes { series, pos_bytes }) => Reply::WrongBytes { series, pos_bytes },
        done => Reply::Done(done?),
    };
    Ok(serde_json::to_string(&reply)?)
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Child(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bytes_in_a_child_are_wrong_bytes_here() {
        let script = "echo '{\"WrongBytes\":{\"series\":\"x\",\"pos_bytes\":8}}'";
        let command = ["sh", "-c", script].map(str::to_owned);
        let error = ask::<i32>(&command, "b", &()).unwrap_err();
        assert!(matches!(error, Error::WrongBytes { pos_bytes: 8, .. }), "{error}");
    }
}
