//! A file system that is soon full.

use std::path::Path;
use std::process::Command;
use std::thread;

use tempfile::TempDir;

use crate::skip;

/// A file system in memory, in a directory of its own; unmounted on drop.
#[derive(Debug)]
pub struct SmallDisk {
    directory: TempDir,
}

impl SmallDisk {
    /// Mounts a file system of so many bytes. `None` where this process may not: the caller skips
    /// its test, whose feature `root` is reported as missing.
    ///
    /// # Panics
    /// Like [`skip`](crate::skip()), if the feature is required.
    #[track_caller]
    pub fn mount(bytes: u64) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "bifolio-test"]);
        let problem = match mount.arg(directory.path()).output() {
            Ok(output) if output.status.success() => return Some(Self { directory }),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        skip("root", format!("cannot mount a small disk: {problem}"));
        None
    }

    /// Returns the root of the file system.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(self.path()).status();
        let is_unmounted = unmounted.is_ok_and(|status| status.success());
        assert!(is_unmounted || thread::panicking(), "{}: not unmounted", self.path().display());
    }
}
