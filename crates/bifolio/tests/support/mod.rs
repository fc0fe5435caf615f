//! What the tests of this folder share: places, files, their bytes, and checks of errors.
// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use bifolio::{Cache, Error, File, OpenOptions};
use bifolio_testing::fill_bytes;
use tempfile::TempDir;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Folio sizes from the smallest to the largest.
pub const FOLIO_SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 2 << 20];

/// A directory where the build goes, which is a real disk, and not a tmpfs, on any sane machine.
pub fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file in `directory` that holds `bytes`.
pub fn file_of(directory: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A file in `directory` that holds `length` bytes, and those.
pub fn random_file(directory: &TempDir, name: &str, length: usize) -> (PathBuf, Vec<u8>) {
    let bytes = fill_bytes(length as u64, length);
    (file_of(directory, name, &bytes), bytes)
}

/// A cache with this bound.
pub fn cache_of(memory_bytes: u64) -> Cache {
    Cache::builder().memory(memory_bytes).build().unwrap()
}

/// To read and write.
pub fn writable() -> OpenOptions {
    OpenOptions::new().read(true).write(true)
}

/// Opens to read and write.
pub fn open(cache: &Cache, path: &Path) -> File {
    cache.open(path, &writable()).unwrap()
}

/// What the file holds from `position` on, `length` bytes at most.
pub fn read(file: &File, position: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    let count = file.read_at(&mut bytes, position).unwrap();
    bytes.truncate(count);
    bytes
}

/// All the file holds.
pub fn read_all(file: &File) -> Vec<u8> {
    read(file, 0, file.len() as usize)
}

/// The length on the disk, by an independent look.
pub fn length_on_disk(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

/// Compares without printing megabytes.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8]) {
    let model = bifolio_testing::Model::new(expected.to_vec());
    if let Err(problem) = model.compare(found) {
        panic!("{problem}");
    }
}

/// The error of a call that must fail, after a look at its message: one line that names `needles`.
#[track_caller]
pub fn error_of<T: Debug>(result: Result<T, Error>, needles: &[&str]) -> Error {
    let error = result.expect_err("this cannot work");
    let line = error.to_string();
    assert!(!line.contains('\n'), "{line:?} is more than a line");
    for needle in needles {
        assert!(line.contains(needle), "{line:?} does not name {needle:?}");
    }
    error
}

/// Runs the test `name` of this very binary again, alone in a process of its own, with `variable`
/// set to `value`.
pub fn run_alone(name: &str, variable: &str, value: &str) -> Output {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(variable, value)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {value}: {}\n{text}\n{errors}", output.status);
    assert!(text.contains("1 passed"), "{name} is not the name of a test:\n{text}");
    output
}
