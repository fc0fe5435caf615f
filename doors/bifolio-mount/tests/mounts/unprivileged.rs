//! A mount by a user without privileges, with the help of `fusermount3`.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use bifolio_testing::skip;

use crate::mounted::{can_mount, run, shell};

/// Runs as `daemon`: mounts, clones a repository, unmounts, and waits until all is written.
const USE: &str = r#"
    "$1" --background --memory 16M source,1 target
    grep -c "$PWD/source,1 $PWD/target fuse.bifolio rw,nosuid,nodev,.*user_id=$(id -u)" /proc/mounts
    cd target
    export HOME=$PWD
    git init --quiet --initial-branch main one
    cd one
    git config user.email test@localhost
    git config user.name test
    for number in $(seq 100); do echo "$number" > "file$number"; done
    git add .
    git commit --quiet --message first
    cd ..
    git clone --quiet --no-local one two
    git -C two fsck --full --strict
    echo text > read-only
    chmod 400 read-only
    ! echo more >> read-only 2>/dev/null
    ! chown 0 read-only 2>/dev/null
    echo text > append-only
    chmod 200 append-only
    echo more >> append-only
    test "$(stat -c %a append-only)" = 200
    chmod 600 append-only
    tail -n 1 append-only
    cp /bin/true run-only
    chmod 111 run-only
    ./run-only
    test "$(stat -c %a run-only)" = 111
    cd ..
    fusermount3 -u target
    flock source,1 true
    cat source,1/two/file100
    stat -c %U source,1/two/file100
"#;

#[test]
fn a_user_without_privileges_mounts_clones_and_unmounts() {
    if !can_mount() {
        return;
    }
    if !run("sh", ["-c", "command -v fusermount3 git setpriv unshare >/dev/null"]) {
        return skip("fusermount3", "fusermount3, git, setpriv or unshare is missing");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_bifolio-mount"), path.join("program")).unwrap();
    fs::write(path.join("use"), USE).unwrap();
    // Some machines keep `/dev/fuse` for root. The test has one of its own.
    let script = r#"
        cd "$1"
        mkdir source,1 target
        chown daemon source,1 target
        exec unshare --mount sh -euc '
            mknod fuse c 10 229
            chmod 666 fuse
            mount --bind fuse /dev/fuse
            setpriv --reuid daemon --regid daemon --clear-groups sh -eu use ./program
        '
    "#;
    assert_eq!(shell(script, &[path]), "1\nmore\n100\ndaemon\n");
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(&*path.to_string_lossy()), "{mounts}");
}
