//! Times and blocks of files that are written, and what an unmount leaves of them.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use crate::mounted::{Mounted, shell};

/// Returns the modification time and the change time.
fn times(path: &Path) -> [(i64, i64); 2] {
    let status = fs::metadata(path).unwrap();
    [(status.mtime(), status.mtime_nsec()), (status.ctime(), status.ctime_nsec())]
}

/// Waits until a condition holds.
#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_unmount_moves_no_times() {
    let source = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::of(source.path(), &["--dirty-age", "200ms"]) else { return };
    let names = ["closed", "synced", "open", "again"];
    for name in names {
        fs::write(mounted.path(name), vec![1; 10_000]).unwrap();
    }
    let mut options = OpenOptions::new();
    options.write(true);
    let open = |name: &str| options.open(mounted.path(name)).unwrap();
    let [synced, open, again] = ["synced", "open", "again"].map(open);
    synced.write_all_at(b"changed", 5_000).unwrap();
    synced.sync_all().unwrap();
    open.write_all_at(b"changed", 5_000).unwrap();
    again.write_all_at(b"changed", 5_000).unwrap();
    let written = names.map(|name| times(&mounted.path(name))[0]);
    let are_finalized = |names: &[&str]| {
        names.iter().all(|name| times(&mounted.path(name)) == times(&mounted.source(name)))
    };
    wait_until("the storage has the times", || are_finalized(&names));
    let modified = names.map(|name| times(&mounted.path(name))[0]);
    assert_eq!(written, modified, "a write-out moves no modification time");
    // Another change, and the same again.
    again.write_all_at(b"again", 0).unwrap();
    let changed = times(&mounted.path("again"))[0];
    assert!(changed > modified[3]);
    wait_until("the storage has the times again", || are_finalized(&["again"]));
    assert_eq!(times(&mounted.path("again"))[0], changed);
    drop([synced, open, again]);
    let before = names.map(|name| times(&mounted.path(name)));
    mounted.unmount_cleanly_with(|| {
        assert_eq!(names.map(|name| times(&source.path().join(name))), before);
    });
}

#[test]
fn git_reads_no_file_again_after_a_mount() {
    let source = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::of(source.path(), &[]) else { return };
    if !crate::mounted::run("sh", ["-c", "command -v git >/dev/null"]) {
        return bifolio_testing::skip("git", "git is missing");
    }
    let script = r#"
        cd "$1"
        export HOME=$PWD
        git init --quiet --initial-branch main .
        for number in $(seq 50); do echo "$number" > "file$number"; done
        git -c user.email=test@localhost -c user.name=test add .
    "#;
    shell(script, &[&mounted.path("")]);
    let names: Vec<_> = (1..=50).map(|number| format!("file{number}")).collect();
    wait_until("the storage has the times", || {
        names.iter().all(|name| times(&mounted.path(name)) == times(&mounted.source(name)))
    });
    let refresh = r#"cd "$1"; HOME=$PWD git update-index --refresh"#;
    shell(refresh, &[&mounted.path("")]);
    mounted.unmount_cleanly();
    // It lists the files whose times are not those of the index.
    let list = r#"cd "$1"; HOME=$PWD git diff-files --name-only"#;
    assert_eq!(shell(list, &[source.path()]), "");
    let mounted = Mounted::of(source.path(), &[]).unwrap();
    assert_eq!(shell(list, &[&mounted.path("")]), "");
    mounted.unmount_cleanly();
}

#[test]
fn sparse_files_have_few_blocks() {
    let Some(mounted) = Mounted::new(&["--dirty-age", "10m"]) else { return };
    let file = File::create(mounted.path("sparse")).unwrap();
    file.set_len(10 << 30).unwrap();
    file.write_all_at(&[1; 4096], 5 << 30).unwrap();
    let blocks = |path: &Path| fs::metadata(path).unwrap().blocks();
    let estimate = blocks(&mounted.path("sparse"));
    assert!((8..1000).contains(&estimate), "{estimate}");
    file.sync_all().unwrap();
    wait_until("the blocks are those of the storage", || {
        blocks(&mounted.path("sparse")) == blocks(&mounted.source("sparse"))
    });
    // A file without blocks would be taken for one hole.
    let short = File::create(mounted.path("short")).unwrap();
    short.write_all_at(b"bytes", 0).unwrap();
    assert_eq!(blocks(&mounted.path("short")), 8);
    drop((file, short));
    mounted.unmount_cleanly();
}

#[test]
fn times_before_1970_keep_their_fraction() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    File::create(mounted.path("file")).unwrap();
    for (tv_sec, tv_nsec) in [(-2, 500_000_000), (-1, 1_000), (-1, 0), (0, 7_000), (5, 0)] {
        let time = Timespec { tv_sec, tv_nsec };
        let both = Timestamps { last_access: time, last_modification: time };
        utimensat(CWD, mounted.path("file"), &both, AtFlags::empty()).unwrap();
        for path in [mounted.path("file"), mounted.source("file")] {
            assert_eq!(times(&path)[0], (tv_sec, tv_nsec), "{}", path.display());
            let status = fs::metadata(&path).unwrap();
            assert_eq!((status.atime(), status.atime_nsec()), (tv_sec, tv_nsec));
        }
    }
    mounted.unmount_cleanly();
}

#[test]
fn a_write_that_fails_moves_no_time() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    fs::write(mounted.path("file"), b"bytes").unwrap();
    let file = OpenOptions::new().write(true).open(mounted.path("file")).unwrap();
    file.sync_all().unwrap();
    wait_until("the storage has the times", || {
        times(&mounted.path("file")) == times(&mounted.source("file"))
    });
    let before = times(&mounted.path("file"));
    let refused = file.write_at(b"far", (1 << 62) + 1).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EFBIG));
    assert_eq!(file.set_len((1 << 62) + 1).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(times(&mounted.path("file")), before);
    drop(file);
    mounted.unmount_cleanly();
}
