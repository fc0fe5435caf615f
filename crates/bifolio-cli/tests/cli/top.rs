//! `bifolio top`: one screen of a cache in this process.

use std::fs;
use std::os::unix::net::UnixListener;

use bifolio::{Cache, OpenOptions};

use crate::support::{error_line, run};

#[test]
fn a_screen_shows_the_cache_of_another_process() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cache = Cache::builder().memory(16 << 20).build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = cache.open(dir.path().join("table"), &options).unwrap();
    file.write_all_at(&[7; 8192], 0).unwrap();
    let name = dir.path().to_str().unwrap();
    let _server = bifolio_stats::serve(&cache, name).unwrap();
    let shown = run(&["top", name, "--once", "--interval", "0.1"]);
    assert_eq!(shown.status.code(), Some(0), "{shown:?}");
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.contains("bound 16.0 MiB"), "{text}");
    assert!(text.contains("/table\n") && text.contains("8.0 KiB"), "{text}");
}

#[test]
fn a_process_without_statistics_is_named_in_the_error() {
    let refused = run(&["top", "no-such-cache", "--once"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(error_line(&refused).contains("no cache of no-such-cache"), "{refused:?}");
}

/// A process that is killed leaves its socket behind.
#[test]
fn a_socket_without_a_process_does_not_hide_that_no_cache_has_the_name() {
    let directory = bifolio_stats::directory();
    fs::create_dir_all(&directory).unwrap();
    let socket = directory.join(format!("{}-without-process.sock", std::process::id()));
    drop(UnixListener::bind(&socket).unwrap());
    let refused = run(&["top", "no-such-cache", "--once"]);
    fs::remove_file(&socket).unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let line = error_line(&refused);
    assert!(line.contains("no cache of no-such-cache"), "{line}");
    assert!(line.contains("without-process.sock"), "{line}");
}
