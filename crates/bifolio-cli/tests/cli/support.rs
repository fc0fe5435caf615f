//! Runs the program and checks what it leaves on the machine.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use rustix::process::Pid;

/// The program, with nothing on its standard input.
pub fn bifolio(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bifolio"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs it to its end.
pub fn run(arguments: &[&str]) -> Output {
    bifolio(arguments).output().expect("the program starts")
}

/// Returns the only line on standard error, which begins with the program's name.
pub fn error_line(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    let line = text.strip_suffix('\n').expect("a whole line");
    assert!(line.starts_with("bifolio: ") && !line.contains('\n'), "{text:?}");
    line.to_owned()
}

/// Returns the remaining entries of `dir`, and mounts at or below it.
pub fn left_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir)
        .expect("the directory exists")
        .map(|entry| entry.expect("an entry").path().display().to_string());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let below = dir.to_str().expect("UTF-8").to_owned();
    let mounted = mounts.lines().filter(|line| line.contains(&below)).map(str::to_owned);
    entries.chain(mounted).collect()
}

/// A process that has `text` in its command line.
pub fn process_naming(text: &str) -> Option<Pid> {
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    processes.filter_map(|process| process.file_name().into_string().ok()).find_map(|name| {
        let command_line = fs::read(format!("/proc/{name}/cmdline")).ok()?;
        let names_it = String::from_utf8_lossy(&command_line).contains(text);
        (names_it && name != own).then(|| Pid::from_raw(name.parse().ok()?))?
    })
}
