//! How a mount begins and ends, and what it says about files that it could not write.

use std::fs::{self, File, OpenOptions};
use std::io::Write;

use crate::mounted::{Mounted, can_mount, program, run, shell};

#[test]
fn a_signal_unmounts_and_writes_everything() {
    for signal in ["INT", "TERM"] {
        let source = tempfile::tempdir().unwrap();
        let Some(mounted) = Mounted::of(source.path(), &[]) else { return };
        fs::write(mounted.path("file"), vec![3; 3_000_000]).unwrap();
        let (status, log) = mounted.signal(signal);
        assert!(status.success() && log.is_empty(), "{status}: {log}");
        assert!(fs::read(source.path().join("file")).unwrap() == vec![3; 3_000_000]);
    }
}

#[test]
fn a_mount_in_use_is_detached_by_a_signal_and_written() {
    let source = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::of(source.path(), &[]) else { return };
    let mut file = File::create(mounted.path("file")).unwrap();
    file.write_all(b"bytes").unwrap();
    let (status, log) = mounted.signal("TERM");
    assert!(status.success() && log.contains("is in use"), "{status}: {log}");
    assert_eq!(fs::read(source.path().join("file")).unwrap(), b"bytes");
    assert!(file.write_all(b"more").is_err());
}

#[test]
fn a_second_mount_of_the_same_source_is_refused() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let other = tempfile::tempdir().unwrap();
    let output = program().arg(mounted.source("")).arg(other.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("mounted already"), "{said}");
    mounted.unmount_cleanly();
}

#[test]
fn a_target_inside_of_the_source_is_refused() {
    if !can_mount() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let target = source.path().join("target");
    fs::create_dir(&target).unwrap();
    let output = program().arg(source.path()).arg(&target).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("contain itself"), "{said}");
}

#[test]
fn a_directory_can_be_mounted_over_itself_in_the_background() {
    if !can_mount() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let path = source.path();
    fs::write(path.join("before"), b"before").unwrap();
    let status = program().args(["--background", "--memory", "4M"]).args([path, path]).status();
    assert!(status.unwrap().success());
    let kind = || shell("stat -f -c %T \"$1\"", &[path]);
    assert_eq!(kind().trim(), "fuseblk");
    assert_eq!(fs::read(path.join("before")).unwrap(), b"before");
    fs::write(path.join("during"), b"during").unwrap();
    // The lock is free when the program has written everything.
    shell("umount \"$1\"; flock \"$1\" true", &[path]);
    assert_eq!(fs::read(path.join("during")).unwrap(), b"during");
}

#[test]
fn a_target_that_is_no_directory_is_refused() {
    if !can_mount() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let target = tempfile::NamedTempFile::new().unwrap();
    let mut mount = program();
    let output = mount.arg("--background").args([source.path(), target.path()]).output().unwrap();
    let (status, said) = (output.status, String::from_utf8_lossy(&output.stderr));
    if status.success() {
        run("umount", [target.path()]);
    }
    assert!(status.code() == Some(2) && said.contains("not a directory"), "{status}: {said}");
}

#[test]
fn a_target_whose_mount_was_killed_must_be_unmounted_first() {
    let Some(mut mounted) = Mounted::new(&[]) else { return };
    mounted.kill_program();
    let arguments = [mounted.source(""), mounted.path("")];
    let output = program().args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("umount it first"), "{said}");
}

#[test]
fn a_write_to_a_read_only_source_is_refused_without_a_line_in_the_log() {
    if !can_mount() {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let script = r#"
        mount -t tmpfs none "$1"
        echo data > "$1/file"
        mount -o remount,ro "$1"
    "#;
    shell(script, &[source.path()]);
    let mounted = Mounted::of(source.path(), &[]).unwrap();
    assert_eq!(fs::read(mounted.path("file")).unwrap(), b"data\n");
    let refused = OpenOptions::new().write(true).open(mounted.path("file")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    let (status, log) = mounted.unmount();
    assert!(run("umount", [source.path()]));
    assert!(status.success() && log.is_empty(), "{status}: {log}");
}
