//! `--background`: the program goes on in a process of its own, and the caller's ends when the
//! directory is mounted.
//!
//! ```text
//!   caller's process        starts the server's process, and waits for its message or its end
//!   server's process        a new session, without the descriptors that the caller's had open
//!                           mounts; errors go to the caller's standard error
//!                           mounted: `/` is its directory, the standard streams are /dev/null
//!                           sends the message
//! ```
//!
//! So nothing of the caller stays in use: not its terminal, its directory, its pipes, nor a lock
//! that it has passed on.
//!
//! # Safety
//! `fork` is called while there is one thread, so the new process may do everything. It closes
//! descriptors by number, which nothing in it has yet taken.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::process::ExitCode;

use anyhow::{Context, Result};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::{EXIT_NOT_MOUNTED, messages};

/// The process that goes on.
pub enum Process {
    /// The caller's, which ends with this status.
    Caller(ExitCode),
    /// The server's.
    Server(Background),
}

/// The step that follows the mount: the caller goes on without this process.
pub struct Background {
    caller: PipeWriter,
}

/// Starts the server's process. Returns in both.
pub fn start() -> Result<Process> {
    let (reader, writer) = std::io::pipe().context("cannot create a pipe")?;
    // SAFETY: `main` calls this before it starts a thread.
    match unsafe { fork() }.context("cannot start a background process")? {
        ForkResult::Parent { child } => {
            drop(writer);
            Ok(Process::Caller(wait(reader, child)))
        }
        ForkResult::Child => {
            drop(reader);
            rustix::process::setsid().context("cannot start a session")?;
            close_inherited(writer.as_raw_fd())?;
            Ok(Process::Server(Background { caller: writer }))
        }
    }
}

/// Waits until the server has mounted, or has ended. Returns the exit status.
fn wait(mut server: PipeReader, child: Pid) -> ExitCode {
    if matches!(server.read(&mut [0]), Ok(1)) {
        return ExitCode::SUCCESS;
    }
    match waitpid(child, None) {
        // It has said why.
        Ok(WaitStatus::Exited(_, code)) => {
            ExitCode::from(u8::try_from(code).unwrap_or(EXIT_NOT_MOUNTED))
        }
        status => {
            eprintln!("bifolio-mount: the background process ended early: {status:?}");
            ExitCode::from(EXIT_NOT_MOUNTED)
        }
    }
}

/// Closes the descriptors that this process did not open, but for the standard streams and `kept`.
fn close_inherited(kept: RawFd) -> Result<()> {
    let list = fs::read_dir("/proc/self/fd").context("cannot list descriptors")?;
    let numbers: Vec<RawFd> =
        list.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|number| *number > 2 && *number != kept) {
        // SAFETY: nothing in this process has the descriptor: there is one thread, and it has only
        // opened `kept`, and the list, whose number is free again.
        unsafe { libc::close(number) };
    }
    Ok(())
}

impl Background {
    /// Leaves what is the caller's, and lets it go on.
    pub fn release_caller(self) -> Result<()> {
        messages::leave_standard_error();
        std::env::set_current_dir("/").context("cannot change to /")?;
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.context("cannot open /dev/null")?;
        rustix::stdio::dup2_stdin(&null).context("cannot replace standard input")?;
        rustix::stdio::dup2_stdout(&null).context("cannot replace standard output")?;
        rustix::stdio::dup2_stderr(&null).context("cannot replace standard error")?;
        // A caller that was killed does not read it.
        let _ = (&self.caller).write_all(b"m");
        Ok(())
    }
}
