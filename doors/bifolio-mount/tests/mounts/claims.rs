//! Mounts at the same path, one after the other or one below the other, and mounts of directories
//! that share files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bifolio_testing::skip;

use crate::mounted::{Mounted, can_mount, program, run, shell};

fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_bifolio-mount"))
}

#[test]
fn a_file_system_below_the_mount_keeps_its_files() {
    if !can_mount() {
        return;
    }
    let (source, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let script = r#"
        program=$1; source=$2; target=$3
        mount -t tmpfs none "$target"
        trap 'umount -l "$target"; umount -l "$target" 2>/dev/null || :' EXIT
        echo below > "$target/file"
        for round in 1 2 3 4 5 6; do
            "$program" --background --memory 1M "$source" "$target"
            ! test -e "$target/file"
            umount "$target"
            # The lock ends with the program.
            flock "$source" true
            cat "$target/file"
        done
    "#;
    let found = shell(script, &[binary(), source.path(), target.path()]);
    assert_eq!(found, "below\n".repeat(6));
}

#[test]
fn a_mount_that_follows_at_once_at_the_same_path_survives() {
    if !can_mount() {
        return;
    }
    let [one, two, target] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    fs::write(one.path().join("file"), "one\n").unwrap();
    fs::write(two.path().join("file"), "two\n").unwrap();
    let script = r#"
        program=$1; one=$2; two=$3; target=$4
        trap 'umount -l "$target" 2>/dev/null || :' EXIT
        for round in $(seq 20); do
            "$program" --background --memory 1M "$one" "$target"
            cat "$target/file"
            umount "$target"
            "$program" --background --memory 1M "$two" "$target"
            flock "$one" true
            cat "$target/file"
            umount "$target"
            flock "$two" true
        done
    "#;
    let found = shell(script, &[binary(), one.path(), two.path(), target.path()]);
    assert_eq!(found, "one\ntwo\n".repeat(20));
}

#[test]
fn a_signal_leaves_a_file_system_alone_that_covers_the_mount() {
    let Some(mut mounted) = Mounted::new(&[]) else { return };
    fs::write(mounted.path("file"), "bytes").unwrap();
    let target = mounted.path("");
    shell("mount -t tmpfs none \"$1\"; echo over > \"$1/file\"", &[&target]);
    assert!(run("kill", ["-TERM", &mounted.pid().to_string()]));
    let (status, log) = mounted.wait();
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "over\n");
    shell("umount \"$1\"; umount \"$1\"", &[&target]);
    assert!(status.success() && log.contains("another file system is mounted there"), "{log}");
    assert_eq!(fs::read_to_string(mounted.source("file")).unwrap(), "bytes");
}

#[test]
fn the_type_in_the_list_of_mounts_names_the_program_and_the_source() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("a,b c\\");
    fs::create_dir(&source).unwrap();
    let Some(mounted) = Mounted::of(&source, &[]) else { return };
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let target = mounted.path("").display().to_string();
    let target = target.trim_end_matches('/');
    let line = mounts.lines().find(|line| line.contains(target)).unwrap();
    let source = source.display().to_string().replace('\\', "\\134").replace(' ', "\\040");
    assert!(
        line.starts_with(&format!("{source} {target} fuse.bifolio rw,nosuid,nodev,")),
        "{line}"
    );
    mounted.unmount_cleanly();
}

#[test]
fn a_user_is_told_that_the_helper_is_missing() {
    if !can_mount() {
        return;
    }
    if !run("sh", ["-c", "command -v setpriv >/dev/null"]) {
        return skip("fusermount3", "setpriv is missing");
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let script = r#"
        setpriv=$(command -v setpriv)
        cd "$2"
        cp "$1" program
        mkdir source target
        chown daemon source target
        status=0
        PATH=/nowhere "$setpriv" --reuid daemon --regid daemon --clear-groups \
            ./program --background source target 2>&1 || status=$?
        echo "$status"
    "#;
    let said = shell(script, &[binary(), directory.path()]);
    assert!(said.contains("needs fusermount3") && said.ends_with("\n2\n"), "{said}");
}

/// Tries to mount, and returns the reason of the refusal.
#[track_caller]
fn refusal(source: &Path, target: &Path) -> String {
    let mut mount = program();
    let output = mount.arg("--background").args([source, target]).output().unwrap();
    if output.status.success() {
        run("umount", [target]);
        panic!("mounted: {}", source.display());
    }
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn directories_above_and_within_a_mounted_one_are_refused() {
    if !can_mount() {
        return;
    }
    let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = |name: &str| directory.path().join(name);
    fs::create_dir_all(path("above/source/within/deep")).unwrap();
    fs::create_dir(path("above/sibling")).unwrap();
    fs::create_dir(path("bound")).unwrap();
    std::os::unix::fs::symlink(path("above/source"), path("symbolic")).unwrap();
    let mounted = Mounted::of(&path("above/source"), &[]).unwrap();
    for above in ["above", ""] {
        let said = refusal(&path(above), other.path());
        assert!(said.contains("a directory within"), "{said}");
    }
    for within in ["within", "within/deep"] {
        let said = refusal(&mounted.source(within), other.path());
        let named = format!("is within {}", path("above/source").display());
        assert!(said.contains(&named), "{said}");
    }
    assert!(refusal(&path("symbolic"), other.path()).contains("mounted already"));
    for (bound, expected) in [
        ("above/source", "mounted already"),
        ("above/source/within", "is within"),
        ("above", "a directory within"),
    ] {
        let bind = r#"mount --bind "$1" "$2""#;
        shell(bind, &[&path(bound), &path("bound")]);
        let said = refusal(&path("bound"), other.path());
        shell(r#"umount "$1""#, &[&path("bound")]);
        assert!(said.contains(expected), "{bound}: {said}");
    }
    // What the mount serves must not be served again, nor a mount appear in what it serves.
    assert!(refusal(&mounted.path("within"), other.path()).contains("is a mount of bifolio-mount"));
    let target = mounted.path("").parent().unwrap().to_owned();
    let said = refusal(other.path(), &mounted.source("within"));
    assert!(said.contains("it would serve this mount"), "{said}");
    drop(target);
    let sibling = Mounted::of(&path("above/sibling"), &[]).unwrap();
    sibling.unmount_cleanly();
    mounted.unmount_cleanly();
}

#[test]
fn a_directory_above_one_that_was_bound_elsewhere_is_refused() {
    if !can_mount() {
        return;
    }
    let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bound = tempfile::tempdir().unwrap();
    fs::create_dir_all(directory.path().join("above/source")).unwrap();
    shell(r#"mount --bind "$1" "$2""#, &[&directory.path().join("above/source"), bound.path()]);
    let mounted = Mounted::of(bound.path(), &[]).unwrap();
    let said = refusal(&directory.path().join("above"), other.path());
    mounted.unmount_cleanly();
    shell(r#"umount "$1""#, &[bound.path()]);
    assert!(said.contains("a directory within"), "{said}");
}
