//! A child process that measures in rounds: it keeps a database open and runs one round per line.
//!
//! Called by the benchmarks. The child reads tasks from standard input and answers each with one
//! line. It ends when the pipe is closed, so it outlives its parent by a round at most.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use bifolio_bench::{Error, Result};
use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The parent's end of a child.
#[derive(Debug)]
pub(crate) struct MeasuringChild {
    child: Child,
    tasks: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl MeasuringChild {
    /// Starts `command` with `task` as its last argument.
    pub(crate) fn start(command: &[String], task: &impl Serialize) -> Result<Self> {
        let [program, arguments @ ..] = command else {
            return Err(Error::Child("no command was given to start it".into()));
        };
        let mut child = Command::new(program)
            .args(arguments)
            .arg(serde_json::to_string(task)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Error::Child(format!("cannot start {program}: {error}")))?;
        let tasks = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Self { child, tasks, answers })
    }

    /// Has the child do `task`.
    pub(crate) fn run_round<A: DeserializeOwned>(&mut self, task: &impl Serialize) -> Result<A> {
        let mut line = serde_json::to_string(task)?;
        line.push('\n');
        let Some(tasks) = &mut self.tasks else { return Err(self.end()) };
        let sent = tasks.write_all(line.as_bytes());
        line.clear();
        let answered = sent.and_then(|()| self.answers.read_line(&mut line));
        match answered {
            Ok(1..) => Ok(serde_json::from_str(&line)?),
            Ok(0) => Err(self.end()),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(self.end()),
            Err(error) => Err(Error::Child(format!("it does not answer: {error}"))),
        }
    }

    /// Returns how a child ended that ended before its round did.
    fn end(&mut self) -> Error {
        drop(self.tasks.take());
        match self.child.wait() {
            Ok(status) if status.signal() == Some(Signal::KILL.as_raw()) => {
                Error::Killed { attempts: 1 }
            }
            Ok(status) => Error::Child(format!("it ended before its round did: {status}")),
            Err(error) => Error::Child(format!("it ended before its round did: {error}")),
        }
    }
}

impl Drop for MeasuringChild {
    fn drop(&mut self) {
        drop(self.tasks.take());
        let _ = self.child.wait();
    }
}

/// The child's side: answers tasks until there are no more.
pub(crate) fn serve<T: DeserializeOwned, A: Serialize>(
    mut work: impl FnMut(T) -> anyhow::Result<A>,
) -> anyhow::Result<()> {
    for line in std::io::stdin().lock().lines() {
        let answer = serde_json::to_string(&work(serde_json::from_str(&line?)?)?)?;
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(answer.as_bytes())?;
        stdout.write_all(b"\n")?;
        stdout.flush()?;
    }
    Ok(())
}
