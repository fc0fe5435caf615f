//! Children that tell of each commit that is durable, until they are killed.

use std::env;
use std::ffi::OsStr;
use std::hint;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

/// Runs the test `name` of this program in a child process with one more environment variable,
/// kills it with SIGKILL once it has told of `commits`, and returns the last commit told of. It is
/// killed after `spins` more turns of a loop, probably within its next commit.
///
/// # Panics
/// If the child writes anything else to standard error, or ends by itself.
pub fn run_and_kill(
    name: &str,
    (variable, value): (&str, impl AsRef<OsStr>),
    commits: usize,
    spins: u32,
) -> u64 {
    let mut child = Command::new(env::current_exe().expect("the path of this program"))
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(variable, value)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this program starts");
    let told = BufReader::new(child.stderr.take().expect("it is piped"));
    let mut last = 0;
    for (count, line) in told.lines().enumerate() {
        let line = line.expect("a line of text");
        if count + 1 == commits {
            (0..spins).for_each(|_| hint::spin_loop());
            child.kill().expect("the child is not waited for");
        }
        // The last line may be a part of one, or empty: then it was not told.
        match line.strip_suffix(" done").map(str::parse) {
            Some(Ok(number)) => last = number,
            _ if count + 1 >= commits => {}
            _ => panic!("the child says: {line}"),
        }
    }
    let status = child.wait().expect("the child was started");
    assert_eq!(status.signal(), Some(libc::SIGKILL), "not by this test: {status}");
    last
}

/// Tells [`run_and_kill`], from the child, that a commit is durable.
///
/// # Panics
/// If standard error cannot be written to.
pub fn tell_committed(number: u64) {
    // One call of `write`.
    let line = format!("{number} done\n");
    io::stderr().lock().write_all(line.as_bytes()).expect("the parent reads");
}
