//! Extended attributes, access lists, capabilities and set-id bits: what programs find is what the
//! file system of the source directory would answer, which runs the same script.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{
    XattrFlags, getxattr, getxattr_query, listxattr, listxattr_query, lsetxattr, removexattr,
    setxattr,
};
use rustix::io::Errno;

use crate::mounted::{Mounted, have, shell};

/// Runs a script in a new directory of a mount and in one beside it, and compares what it prints.
#[track_caller]
fn compare(script: &str) {
    let Some(mounted) = Mounted::new(&["--memory", "8M"]) else { return };
    let plain = tempfile::tempdir().unwrap();
    let target = mounted.path("");
    for path in [plain.path(), &target] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    // The directory of the target belongs to root.
    fs::set_permissions(target.parent().unwrap(), fs::Permissions::from_mode(0o1777)).unwrap();
    let script = format!("cd \"$1\"\numask 022\n{script}");
    let run = |path: &Path| shell(&script, &[path]);
    let (expected, found) = (run(plain.path()), run(&target));
    assert_eq!(found, expected, "the mount, and the file system without it");
    assert!(!found.is_empty());
    mounted.unmount_cleanly();
}

#[test]
fn a_program_that_asks_for_the_size_first_gets_the_value() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let path = mounted.path("file");
    fs::write(&path, b"").unwrap();
    assert_eq!(listxattr_query(&path).unwrap(), 0);
    assert_eq!(getxattr_query(&path, "user.colour").unwrap_err(), Errno::NODATA);
    setxattr(&path, "user.colour", b"blue", XattrFlags::CREATE).unwrap();
    setxattr(&path, "user.empty", b"", XattrFlags::CREATE).unwrap();
    let again = setxattr(&path, "user.colour", b"red", XattrFlags::CREATE);
    assert_eq!(again.unwrap_err(), Errno::EXIST);

    assert_eq!(getxattr_query(&path, "user.colour").unwrap(), 4);
    assert_eq!(getxattr_query(&path, "user.empty").unwrap(), 0);
    let mut value = [0; 64];
    assert_eq!(getxattr(&path, "user.colour", &mut value[..4]).unwrap(), 4);
    assert_eq!(&value[..4], b"blue");
    assert_eq!(getxattr(&path, "user.empty", &mut value[..4]).unwrap(), 0);
    assert_eq!(getxattr(&path, "user.colour", &mut value[..3]).unwrap_err(), Errno::RANGE);

    let length = listxattr_query(&path).unwrap();
    assert_eq!(listxattr(&path, &mut value[..length]).unwrap(), length);
    let mut names: Vec<_> = value[..length].split_inclusive(|byte| *byte == 0).collect();
    names.sort_unstable();
    assert_eq!(names, [b"user.colour\0".as_slice(), b"user.empty\0"]);
    assert_eq!(listxattr(&path, &mut value[..length - 1]).unwrap_err(), Errno::RANGE);

    removexattr(&path, "user.colour").unwrap();
    assert_eq!(getxattr(&path, "user.colour", &mut value[..]).unwrap_err(), Errno::NODATA);
    symlink("file", mounted.path("link")).unwrap();
    let refused = lsetxattr(mounted.path("link"), "user.a", b"", XattrFlags::empty());
    assert_eq!(refused.unwrap_err(), Errno::PERM);
    mounted.unmount_cleanly();
}

#[test]
fn programs_keep_extended_attributes() {
    if !have(&["getfattr", "cp", "tar", "rsync", "getcap"]) {
        return;
    }
    compare(
        r#"
        mkdir from restored
        cp /bin/true from/program
        echo text > from/file
        ln -s file from/link
        setfattr -n user.colour -v blue from/file
        setfattr -n user.empty from/file
        setfattr -n trusted.place -v here from/file
        setfattr -n trusted.place -v there -h from/link
        setfattr -n user.of -v directory from
        setcap cap_net_raw+ep from/program
        setfattr -n user.colour -h -v red from/link 2>/dev/null || echo refused on a link
        cp -a from copied
        tar --xattrs --xattrs-include='*' -cf archive from
        tar --xattrs --xattrs-include='*' -C restored -xf archive
        rsync -aX from/ synced
        for directory in from copied restored/from synced; do
            echo "$directory"
            (cd "$directory" && getfattr -dhRm- . && getcap program)
        done
        setpriv --reuid 12345 --regid 12346 --clear-groups getfattr -dm- from/file
        "#,
    );
}

#[test]
fn default_access_lists_are_inherited_and_others_follow_the_umask() {
    if !have(&["setfacl", "getfacl", "setpriv"]) {
        return;
    }
    compare(
        r#"
        create() {
            mkdir -m 777 "$1"
            [ "$1" = plain ] || setfacl -d -m u:12347:rwx,g:12348:r-x,o::--- "$1"
            setpriv --reuid 12345 --regid 12346 --clear-groups sh -euc '
                cd "$1"
                for mask in 000 022 077; do
                    umask "$mask"
                    echo x > "file$mask"
                    mkdir "directory$mask"
                    mkfifo "pipe$mask"
                    ln -s nowhere "link$mask"
                    mkdir -m 750 "narrow$mask"
                done
                setfacl -m u:12349:rw file022
                chmod 640 file022
                cp -a file022 copy
                ! chmod 777 .
            ' sh "$1" 2>/dev/null
            getfacl -R "$1"
            stat -c "%n %A %u %g" "$1"/*
        }
        create plain
        create listed
        "#,
    );
}

/// Each way to change the contents of `$1`, and of a file to copy from, `source`.
const CHANGES: &str = r#"
import mmap, os, sys
way, name = sys.argv[1:]
def copy(source, target):
    os.copy_file_range(os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR), 100)
if way == "read": open(name, "rb").read()
elif way == "write": open(name, "r+b").write(b"x")
elif way == "append": open(name, "ab").write(b"x")
elif way == "open_truncate": open(name, "wb")
elif way == "truncate": os.truncate(name, 100)
elif way == "ftruncate": os.ftruncate(os.open(name, os.O_RDWR), 50)
elif way == "fallocate": os.posix_fallocate(os.open(name, os.O_RDWR), 0, 100000)
elif way == "copy": copy("source", name)
elif way == "copy_from": copy(name, "target")
elif way == "store":
    map = mmap.mmap(os.open(name, os.O_RDWR), 4096)
    map[0:1] = b"x"
    map.flush()
"#;

#[test]
fn a_change_of_the_contents_clears_capabilities_and_set_id_bits() {
    if !have(&["getcap", "setpriv", "/usr/bin/python3"]) {
        return;
    }
    compare(&format!(
        r#"
        cat > change <<'END'{CHANGES}END
        head -c 10000 /dev/zero > source
        head -c 10000 /dev/zero > target
        chmod 666 source target
        report() {{
            # The write-out of what was stored removes capabilities.
            [ $way = store ] || capability=$(getcap "$1" | sed 's/.* //')
            echo "$way $mode $(stat -c %a "$1") ${{capability-}}"
        }}
        for way in read write append open_truncate truncate ftruncate fallocate copy copy_from \
            store; do
            for mode in 6777 2777 4777; do
                for who in user root; do
                    head -c 10000 /dev/zero > "$way"
                    chown 12347:12348 "$way"
                    chmod $mode "$way"
                    setcap cap_net_raw+ep "$way"
                    run=env
                    [ $who = root ] ||
                        run="setpriv --reuid 12345 --regid 12346 --clear-groups"
                    $run /usr/bin/python3 change "$way" "$way"
                    echo "$who $(report "$way")"
                    rm "$way"
                done
            done
        done
        "#
    ));
}
