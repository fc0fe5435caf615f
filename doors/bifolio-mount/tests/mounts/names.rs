//! Names, links, owners, modes and extended attributes.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with, statvfs};
use rustix::io::Errno;

use crate::mounted::{Mounted, shell};

#[test]
fn renames_replace_exchange_and_refuse() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let [one, two, three] = ["one", "two", "three"].map(|name| mounted.path(name));
    fs::write(&one, b"1").unwrap();
    fs::write(&two, b"2").unwrap();
    let refused = renameat_with(CWD, &one, CWD, &two, RenameFlags::NOREPLACE);
    assert_eq!(refused.unwrap_err(), Errno::EXIST);
    renameat_with(CWD, &one, CWD, &two, RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(&one).unwrap(), fs::read(&two).unwrap()), (b"2".into(), b"1".into()));
    let open = File::open(&two).unwrap();
    fs::rename(&one, &two).unwrap();
    assert_eq!(fs::read(&two).unwrap(), b"2");
    let mut replaced = String::new();
    (&open).read_to_string(&mut replaced).unwrap();
    assert_eq!(replaced, "1");
    drop(open);
    fs::create_dir_all(mounted.path("a/b/c")).unwrap();
    fs::rename(&two, mounted.path("a/b/c/two")).unwrap();
    fs::rename(mounted.path("a"), &three).unwrap();
    assert_eq!(fs::read(three.join("b/c/two")).unwrap(), b"2");
    assert_eq!(fs::rename(&three, three.join("b/x")).unwrap_err().raw_os_error(), Some(22));
    mounted.unmount_cleanly();
}

#[test]
fn a_renamed_file_is_written_first() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    fs::write(mounted.path("old"), b"old version").unwrap();
    let mut file = File::create(mounted.path("new")).unwrap();
    file.write_all(b"new version").unwrap();
    fs::rename(mounted.path("new"), mounted.path("old")).unwrap();
    assert_eq!(fs::read(mounted.source("old")).unwrap(), b"new version");
    drop(file);
    mounted.unmount_cleanly();
}

#[test]
fn a_removed_file_is_used_until_it_is_closed() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let path = mounted.path("file");
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.write_at(&[7; 100_000], 0).unwrap();
    fs::remove_file(&path).unwrap();
    assert!(!path.exists());
    file.write_at(&[8; 10], 99_995).unwrap();
    let mut end = [0; 10];
    assert_eq!(file.read_at(&mut end, 99_995).unwrap(), 10);
    assert_eq!((end, file.metadata().unwrap().len()), ([8; 10], 100_005));
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.sync_all().unwrap();
    // Another file of the same name is another file.
    fs::write(&path, b"another").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100_005);
    drop(file);
    mounted.unmount_cleanly();
}

#[test]
fn hard_links_share_bytes_and_symbolic_links_are_followed() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let [file, link, symbolic] = ["file", "link", "symbolic"].map(|name| mounted.path(name));
    fs::write(&file, b"first").unwrap();
    fs::hard_link(&file, &link).unwrap();
    symlink("link", &symbolic).unwrap();
    OpenOptions::new().append(true).open(&symbolic).unwrap().write_all(b" second").unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"first second");
    let (one, other) = (fs::metadata(&file).unwrap(), fs::metadata(&link).unwrap());
    assert_eq!((one.ino(), one.nlink()), (other.ino(), 2));
    assert_eq!(fs::read_link(&symbolic).unwrap(), Path::new("link"));
    fs::hard_link(&symbolic, mounted.path("symbolic2")).unwrap();
    assert!(fs::symlink_metadata(mounted.path("symbolic2")).unwrap().is_symlink());
    fs::remove_file(&file).unwrap();
    assert_eq!(fs::metadata(&link).unwrap().nlink(), 1);
    assert_eq!(fs::read(&link).unwrap(), b"first second");
    mounted.unmount_cleanly();
}

#[test]
fn directories_of_10_000_names_are_listed_once_each() {
    let Some(mounted) = Mounted::new(&["--kept-files", "50"]) else { return };
    for number in 0..10_000 {
        File::create(mounted.path(format!("file{number}"))).unwrap();
    }
    let mut names: Vec<_> =
        fs::read_dir(mounted.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 10_000);
    for name in names {
        fs::remove_file(mounted.path(name)).unwrap();
    }
    assert_eq!(fs::read_dir(mounted.path("")).unwrap().count(), 0);
    fs::create_dir(mounted.path("directory")).unwrap();
    fs::remove_dir(mounted.path("directory")).unwrap();
    mounted.unmount_cleanly();
}

#[test]
fn special_files_keep_kind_and_device() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let mode = Mode::from_raw_mode(0o640);
    mknodat(CWD, mounted.path("pipe"), FileType::Fifo, mode, 0).unwrap();
    mknodat(CWD, mounted.path("null"), FileType::CharacterDevice, mode, rustix::fs::makedev(1, 3))
        .unwrap();
    mknodat(CWD, mounted.path("plain"), FileType::RegularFile, mode, 0).unwrap();
    let pipe = fs::metadata(mounted.path("pipe")).unwrap();
    assert!(pipe.file_type().is_fifo() && pipe.permissions().mode() & 0o777 == 0o640);
    let null = fs::metadata(mounted.path("null")).unwrap();
    assert!(null.file_type().is_char_device() && null.rdev() == rustix::fs::makedev(1, 3));
    fs::write(mounted.path("plain"), b"bytes").unwrap();
    assert!(statvfs(mounted.path("")).unwrap().f_blocks > 0);
    mounted.unmount_cleanly();
}

#[test]
fn other_users_own_what_they_create_and_are_refused_the_rest() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    fs::set_permissions(mounted.path(""), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(mounted.path("mine"), b"secret").unwrap();
    fs::set_permissions(mounted.path("mine"), fs::Permissions::from_mode(0o600)).unwrap();
    // The directory of the target belongs to root.
    let target = mounted.path("");
    fs::set_permissions(target.parent().unwrap(), fs::Permissions::from_mode(0o1777)).unwrap();
    let script = r#"
        cd "$1"
        umask 027
        setpriv --reuid 12345 --regid 12346 --clear-groups sh -euc '
            echo hello > file
            mkdir directory
            ! cat mine 2>/dev/null
            ! chmod 666 mine 2>/dev/null
            chmod 6755 file
            echo more >> file
        '
        stat -c "%u %g %a" file directory
    "#;
    let found = shell(script, &[&target]);
    assert_eq!(found, "12345 12346 755\n12345 12346 750\n");
    // In a directory with the set-group-id bit the group is that of the directory.
    let script = r#"
        cd "$1"
        mkdir shared
        chown 0:777 shared
        chmod 2777 shared
        setpriv --reuid 12345 --regid 12346 --clear-groups sh -euc 'echo x > shared/file'
        stat -c "%u %g" shared/file
    "#;
    assert_eq!(shell(script, &[&target]), "12345 777\n");
    mounted.unmount_cleanly();
}

#[test]
fn names_of_any_bytes_are_kept() {
    use std::os::unix::ffi::OsStrExt;
    let Some(mounted) = Mounted::new(&[]) else { return };
    let name = OsStr::from_bytes(b"\xff\xfe new\nline");
    fs::write(mounted.path(name), b"x").unwrap();
    assert_eq!(fs::read_dir(mounted.path("")).unwrap().next().unwrap().unwrap().file_name(), name);
    let long = mounted.path("n".repeat(256));
    assert_eq!(fs::write(long, b"x").unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
    mounted.unmount_cleanly();
}
