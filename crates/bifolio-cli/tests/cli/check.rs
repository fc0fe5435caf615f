//! `bifolio check`, and error messages of the program, as a user sees them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{bifolio, error_line, run};
use tempfile::TempDir;

fn file_of(dir: &TempDir, length: usize) -> PathBuf {
    let path = dir.path().join(format!("file-{length}"));
    let bytes: Vec<u8> = (0..length).map(|index| (index * 31 + index / 251) as u8).collect();
    fs::write(&path, bytes).unwrap();
    path
}

fn check<'a>(path: &'a Path, more: &[&'a str]) -> std::process::Output {
    let mut arguments = vec!["check", path.to_str().unwrap()];
    arguments.extend(more);
    run(&arguments)
}

fn can_map() -> bool {
    let reports = bifolio::features();
    reports.iter().any(|report| report.name == "user-faults" && report.in_use)
}

#[test]
fn equal_files_of_awkward_lengths() {
    let dir = tempfile::tempdir().unwrap();
    for length in [0, 1, 4095, 4096, 4097, 262_144, 1_000_003] {
        let output = check(&file_of(&dir, length), &["--memory", "8M"]);
        assert!(output.status.success(), "{length}: {}", error_line(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        // Every byte in two orders, by three ways; mapped by these and two more.
        let ways = if can_map() { 3 + 5 } else { 3 };
        let compared = format!("{} bytes compared, {ways} ways", length * 2 * ways);
        assert!(text.contains(&compared), "{text}");
        assert_eq!(text.contains("maps skipped: user-faults"), !can_map(), "{text}");
        assert!(output.stderr.is_empty());
    }
}

#[test]
fn larger_than_the_cache_and_with_large_folios() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(&dir, 6_000_001);
    for folio in ["4096", "64K"] {
        let output = check(&file, &["--memory", "4M", "--folio", folio, "--seed", "7"]);
        assert!(output.status.success(), "{folio}: {}", error_line(&output));
    }
}

#[test]
fn a_file_that_cannot_be_checked_is_status_two_and_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(&dir, 100);
    let missing = dir.path().join("missing");
    let refused = [
        check(dir.path(), &["--memory", "8M"]),
        check(&missing, &["--memory", "8M"]),
        check(&file, &["--memory", "1"]),
        check(&file, &["--memory", "8Q"]),
        check(&file, &["--memory", "8M", "--folio", "5000"]),
        run(&["check"]),
        run(&["bench", "no-such-benchmark"]),
        run(&["bench", "--size", "4097"]),
        run(&["bench", "--dir", "/no/such/directory"]),
        run(&["bench", "--json", "/no/such/directory/file"]),
        run(&["no-such-command"]),
    ];
    for output in &refused {
        assert_eq!(output.status.code(), Some(2), "{}", error_line(output));
        assert!(error_line(output).len() > "bifolio: ".len());
        assert!(output.stdout.is_empty());
    }
    assert!(error_line(&refused[0]).contains("directory"));
    assert!(error_line(&refused[3]).contains("unit"));
}

#[test]
fn version_help_and_features_go_to_standard_output() {
    let version = run(&["--version"]);
    let text = String::from_utf8(version.stdout).unwrap();
    assert_eq!(text, format!("bifolio {}\n", env!("CARGO_PKG_VERSION")));
    for arguments in [&["--help"][..], &["bench", "--help"], &["features"]] {
        let output = run(arguments);
        assert!(output.status.success() && output.stderr.is_empty());
        assert!(!output.stdout.is_empty());
    }
}

#[test]
fn features_fit_80_columns() {
    let text = String::from_utf8(run(&["features"]).stdout).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(bifolio::features().iter().all(|feature| text.contains(feature.name)), "{text}");
}

#[test]
fn a_check_needs_no_bound() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = check(&file_of(&dir, 100_000), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_reader_that_went_away_is_no_panic() {
    for arguments in [&["features"][..], &["--help"], &["bench", "--list"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = bifolio(arguments).stdout(writer).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {:?}", output.status);
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
