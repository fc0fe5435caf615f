//! A mount for a test.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bifolio_testing::skip;
use tempfile::TempDir;

/// A running `bifolio-mount`.
#[derive(Debug)]
pub struct Mounted {
    child: Option<Child>,
    /// Lines of standard error.
    log: Option<JoinHandle<String>>,
    target: TempDir,
    source: PathBuf,
    source_directory: Option<TempDir>,
}

/// Returns the program with the arguments that all tests use.
pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bifolio-mount"))
}

/// Returns `false`, after a report, if file systems cannot be mounted here.
#[track_caller]
pub fn can_mount() -> bool {
    let problem = if !Path::new("/dev/fuse").exists() {
        "/dev/fuse does not exist"
    } else if !rustix::process::geteuid().is_root() {
        "only root may mount without fusermount3"
    } else {
        return true;
    };
    skip("fuse", problem);
    false
}

/// Returns `false`, after a report, if one of the programs is missing.
#[track_caller]
pub fn have(programs: &[&str]) -> bool {
    let is_missing =
        |program: &&&str| !run("sh", ["-c", &format!("command -v {program} >/dev/null")]);
    match programs.iter().find(is_missing) {
        Some(program) => skip(program, "the program is missing"),
        None => return true,
    }
    false
}

impl Mounted {
    /// Mounts a new directory, or returns `None`, after a report, where that is not possible.
    #[track_caller]
    pub fn new(arguments: &[&str]) -> Option<Self> {
        let source = tempfile::tempdir().unwrap();
        let mut mounted = Self::of(source.path(), arguments)?;
        mounted.source_directory = Some(source);
        Some(mounted)
    }

    /// Mounts a directory.
    #[track_caller]
    pub fn of(source: &Path, arguments: &[&str]) -> Option<Self> {
        Self::by(program(), source, arguments)
    }

    /// Mounts a directory by a program without the right to exceed a limit of descriptors.
    #[track_caller]
    pub fn limited(source: &Path, descriptors: usize, arguments: &[&str]) -> Option<Self> {
        let script = r#"ulimit -n "$1"; shift; exec setpriv --bounding-set -sys_resource \
            --inh-caps -sys_resource "$@""#;
        let mut command = Command::new("sh");
        command.args(["-euc", script, "sh", &descriptors.to_string()]);
        command.arg(program().get_program());
        Self::by(command, source, arguments)
    }

    #[track_caller]
    fn by(mut program: Command, source: &Path, arguments: &[&str]) -> Option<Self> {
        if !can_mount() {
            return None;
        }
        let target = tempfile::tempdir().unwrap();
        let mut child = program
            .args(arguments)
            .arg(source)
            .arg(target.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let log = thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).unwrap();
            text
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let source = source.to_owned();
        let mounted =
            Self { child: Some(child), log: Some(log), target, source, source_directory: None };
        if line.trim_end() != "mounted" {
            panic!("not mounted: {:?}", mounted.finish());
        }
        Some(mounted)
    }

    /// Returns a path in the mount.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.target.path().join(name)
    }

    /// Returns the same path in the source directory.
    pub fn source(&self, name: impl AsRef<Path>) -> PathBuf {
        self.source.join(name)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Returns the number of descriptors that the program has open.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    /// Unmounts. Returns the program's exit status and what it said.
    pub fn unmount(self) -> (ExitStatus, String) {
        // A program that another test starts has copies of all descriptors for a moment.
        let is_unmounted = (0..200).any(|_| {
            run("umount", [self.target.path()]) || {
                thread::sleep(Duration::from_millis(50));
                false
            }
        });
        assert!(is_unmounted, "{}", self.target.path().display());
        self.finish()
    }

    /// Sends a signal. Returns the program's exit status and what it said.
    pub fn signal(self, signal: &str) -> (ExitStatus, String) {
        assert!(run("kill", [format!("-{signal}"), self.pid().to_string()]));
        self.finish()
    }

    /// Waits until the program ends.
    pub fn finish(mut self) -> (ExitStatus, String) {
        self.wait()
    }

    /// Waits until the program ends. What it leaves is unmounted on drop.
    pub fn wait(&mut self) -> (ExitStatus, String) {
        let status = self.child.take().unwrap().wait().unwrap();
        (status, self.log.take().unwrap().join().unwrap())
    }

    /// Unmounts, and fails unless everything was written without a word.
    pub fn unmount_cleanly(self) {
        self.unmount_cleanly_with(|| {});
    }

    /// Acts as [`Self::unmount_cleanly`], and looks at the source directory before it is removed.
    pub fn unmount_cleanly_with(mut self, look: impl FnOnce()) {
        let _source = self.source_directory.take();
        let (status, log) = self.unmount();
        assert!(status.success() && log.is_empty(), "{status}: {log}");
        look();
    }

    /// Kills the program, and detaches the mount.
    pub fn kill(mut self) {
        self.kill_program();
    }

    /// Kills the program. The mount stays, and answers nothing any more.
    pub fn kill_program(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let lazily = [OsStr::new("-l"), self.target.path().as_os_str()];
        let _ = Command::new("umount").args(lazily).stderr(Stdio::null()).status();
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a program. Returns `true` if it succeeds.
pub fn run(program: &str, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> bool {
    Command::new(program).args(arguments).status().unwrap().success()
}

/// Runs a shell script with `$1` and the following set. Returns what it prints.
#[track_caller]
pub fn shell(script: &str, arguments: &[&Path]) -> String {
    let mut command = Command::new("sh");
    command.args(["-euc", script, "sh"]).args(arguments);
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {}: {error}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}
