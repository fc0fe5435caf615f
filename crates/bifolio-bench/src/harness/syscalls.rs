//! The number of system calls of this process, counted by the kernel.
//!
//! A perf counter on the tracepoint `raw_syscalls:sys_enter` for each thread, inherited by every
//! later thread: all calls are counted, whichever library makes them. It needs the right to trace
//! the kernel (usually root's) and the number of the tracepoint, from tracefs: where that is not
//! mounted, it is mounted briefly. Counting slows down a system call by a fraction of a
//! microsecond, for all series alike.

use std::fs;
use std::path::Path;

use perf_event::events::Tracepoint;
use perf_event::{Builder, Counter};
use rustix::mount::{MountFlags, mount};

use super::cleanup::{CleanupItem, Removal};
use super::workspace::Workspace;
use crate::error::{Error, Result};

const NUMBER_FILE: &str = "events/raw_syscalls/sys_enter/id";
const USUAL_PLACES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Returns the number of the tracepoint, after a test that counting works.
///
/// # Errors
/// The tracepoint or the right to count is missing; the message is the reason.
pub(crate) fn tracepoint(workspace: &Workspace) -> Result<u64> {
    let number = USUAL_PLACES.iter().find_map(|place| number_in(Path::new(place)).ok());
    let number = number.map_or_else(|| number_in_own_tracefs(workspace), Ok)?;
    SyscallCount::start(number)?.stop()?;
    Ok(number)
}

fn number_in(tracefs: &Path) -> Result<u64> {
    let text = fs::read_to_string(tracefs.join(NUMBER_FILE))
        .map_err(Error::system("read the number of a tracepoint"))?;
    text.trim().parse().map_err(|_| Error::Refused(format!("`{text}` numbers no tracepoint")))
}

fn number_in_own_tracefs(workspace: &Workspace) -> Result<u64> {
    let path = workspace.path().join("tracefs");
    fs::create_dir(&path).map_err(Error::system(format!("make {}", path.display())))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    let removal = Removal::of(|| {
        mount("bifolio-bench", &path, "tracefs", flags, None)
            .map_err(Error::system("mount a tracefs"))?;
        Ok(CleanupItem::Mount(path))
    })?;
    number_in(removal.path())
}

/// Running counters.
#[derive(Debug)]
pub(crate) struct SyscallCount(Vec<Counter>);

impl SyscallCount {
    /// Starts counting.
    pub(crate) fn start(tracepoint: u64) -> Result<Self> {
        let refused = || Error::system("count system calls");
        let mut counters = Vec::new();
        for thread in fs::read_dir("/proc/self/task").map_err(refused())? {
            let name = thread.map_err(refused())?.file_name();
            let Some(thread_id) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let mut builder = Builder::new(Tracepoint::with_id(tracepoint));
            builder.observe_pid(thread_id).inherit(true).include_kernel().enabled(true);
            match builder.build() {
                Ok(counter) => counters.push(counter),
                // The thread ended meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(refused()(error)),
            }
        }
        Ok(Self(counters))
    }

    /// Returns the count, including the few calls of this function.
    pub(crate) fn stop(mut self) -> Result<u64> {
        let counts = self.0.iter_mut().map(Counter::read);
        counts.sum::<std::io::Result<u64>>().map_err(Error::system("read the count of calls"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn counts_every_call_of_threads_there_are_and_threads_to_come() {
        let parent = tempfile::tempdir().unwrap();
        let workspace = Workspace::create(Some(parent.path()), 0).unwrap();
        let Ok(number) = tracepoint(&workspace) else {
            return;
        };
        let call_often = || {
            for _ in 0..1000 {
                let _ = rustix::process::getppid();
            }
        };
        let (start, started) = channel::<()>();
        let earlier = std::thread::spawn(move || {
            started.recv().unwrap();
            call_often();
        });
        let count = SyscallCount::start(number).unwrap();
        start.send(()).unwrap();
        earlier.join().unwrap();
        std::thread::spawn(call_often).join().unwrap();
        let calls = count.stop().unwrap();
        // Other tests of this process call too: only the least is certain.
        assert!(calls >= 2000, "{calls}");
    }
}
