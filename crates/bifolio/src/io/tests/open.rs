//! Opening a `DiskFile`: what is refused, with which words, and what never happens.

use bifolio_testing::skip;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::thread;

use rustix::fs::{CWD, FileType, Mode};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::ways::*;
use crate::io::*;
use crate::sys::file::FileKind;
use crate::sys::probe::{Feature, Features};

#[test]
fn required_direct_io_is_refused_with_the_reason() {
    let options = DiskOptions {
        read: true,
        write: true,
        create: true,
        truncate: false,
        direct: DirectIo::Require,
        ..DiskOptions::default()
    };
    let directory = disk_directory();
    let masked = Features::probe(&[Feature::DirectIo]);
    let error = DiskFile::open(directory.path().join("f"), &options, &masked).unwrap_err();
    assert!(matches!(error, OpenDiskError::DirectRefused { .. }), "{error}");
    let Some(memory) = shared_memory_directory() else { return };
    let all = Features::probe(&[]);
    let error = DiskFile::open(memory.path().join("f"), &options, &all).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("direct I/O was required, but the file is on tmpfs, which is in memory"),
        "{error}"
    );
}

#[test]
fn only_regular_files_are_opened_and_nothing_waits() {
    let directory = disk_directory();
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    assert!(fs::metadata(&fifo).unwrap().file_type().is_fifo());
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(directory.path(), &link).unwrap();
    let cases = [
        (directory.path(), FileKind::Directory),
        (link.as_path(), FileKind::Directory),
        (fifo.as_path(), FileKind::Fifo),
        (socket.as_path(), FileKind::Socket),
        (Path::new("/dev/null"), FileKind::CharacterDevice),
    ];
    for (path, expected) in cases {
        for opened in [read_only(path), read_write(path)] {
            match opened.unwrap_err() {
                OpenDiskError::NotRegular { kind, path: named } => {
                    assert_eq!((kind, named.as_path()), (expected, path));
                }
                other => panic!("{}: {other}", path.display()),
            }
        }
    }
    let message = read_only(&fifo).unwrap_err().to_string();
    assert!(message.ends_with("fifo: it is a named pipe, and only regular files can be cached"));
}

#[test]
fn files_whose_length_the_kernel_does_not_tell_are_refused() {
    // Of length 0, and of a page: neither is what there is to read.
    for path in ["/proc/self/status", "/sys/kernel/mm/transparent_hugepage/enabled"] {
        let path = Path::new(path);
        if !path.exists() {
            skip("sysfs", path.display());
            continue;
        }
        let error = read_only(path).unwrap_err();
        let is_named = matches!(error, OpenDiskError::NotRegular { kind: FileKind::Generated, .. });
        assert!(is_named, "{error:?}");
        assert!(error.to_string().contains("made up by the kernel as it is read"), "{error}");
    }
    // Through procfs, but not in it.
    let directory = disk_directory();
    let file = fs::File::create(directory.path().join("file")).unwrap();
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    read_only(Path::new(&link)).unwrap();
}

/// Calls `attempt` often while another thread keeps exchanging what `a` and `b` name.
fn while_exchanging(a: &Path, b: &Path, mut attempt: impl FnMut()) {
    use rustix::fs::{RenameFlags, renameat_with};
    thread::scope(|scope| {
        let exchanging = scope.spawn(|| {
            for _ in 0..20_000 {
                renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).unwrap();
            }
        });
        while !exchanging.is_finished() {
            attempt();
        }
    });
}

#[test]
fn a_path_that_changes_never_gives_something_else() {
    let directory = disk_directory();
    let names = ["file", "pipe", "first", "second"].map(|name| directory.path().join(name));
    let [file, pipe, first, second] = &names;
    for path in [file, first, second] {
        fs::write(path, "12345").unwrap();
    }
    rustix::fs::mknodat(CWD, pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let options = DiskOptions { read: true, write: true, ..DiskOptions::default() };
    let features = Features::probe(&[]);
    let (mut opened, mut refused) = (0, 0);
    let mut open = |path: &Path| match DiskFile::open(path, &options, &features) {
        Ok(found) => {
            assert_eq!(found.len_bytes().unwrap(), 5, "this is the pipe");
            assert!(found.descriptors_agree(), "half of one file, half of another");
            opened += 1;
        }
        Err(OpenDiskError::NotRegular { .. } | OpenDiskError::Replaced { .. }) => refused += 1,
        Err(other) => panic!("{other}"),
    };
    while_exchanging(file, pipe, || open(file));
    while_exchanging(first, second, || open(first));
    assert!(opened > 0 && refused > 0, "{opened} opened, {refused} refused: no race was run");
}

#[test]
fn a_missing_or_unreadable_file_is_what_the_system_says() {
    let directory = disk_directory();
    let missing = directory.path().join("missing");
    match read_only(&missing).unwrap_err() {
        OpenDiskError::System { source, .. } => assert_eq!(source.kind(), io::ErrorKind::NotFound),
        other => panic!("{other}"),
    }
    assert!(!missing.exists());
    let nowhere = read_write(&missing.join("below")).unwrap_err();
    assert!(matches!(nowhere, OpenDiskError::System { .. }), "{nowhere}");

    let secret = directory.path().join("secret");
    fs::write(&secret, "x").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
    // The kernel keeps capabilities for each thread: without them, root is a user like others.
    let unprivileged = std::thread::spawn(move || {
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        set_capabilities(None, none).unwrap();
        read_only(&secret).unwrap_err()
    });
    match unprivileged.join().unwrap() {
        OpenDiskError::System { source, .. } => {
            assert_eq!(source.kind(), io::ErrorKind::PermissionDenied);
        }
        other => panic!("{other}"),
    }
}

#[test]
fn contradicting_options_are_refused_before_anything_is_touched() {
    let directory = disk_directory();
    let path = directory.path().join("f");
    fs::write(&path, "keep").unwrap();
    let wrong = [
        DiskOptions::default(),
        DiskOptions { read: true, create: true, ..DiskOptions::default() },
        DiskOptions { read: true, truncate: true, ..DiskOptions::default() },
    ];
    for options in wrong {
        let error = DiskFile::open(&path, &options, &Features::probe(&[])).unwrap_err();
        assert!(matches!(error, OpenDiskError::Options { .. }), "{error}");
    }
    assert_eq!(fs::read(&path).unwrap(), b"keep");
}

#[test]
fn create_truncate_and_read_only_mean_what_they_say() {
    let directory = disk_directory();
    let path = directory.path().join("f");
    let file = read_write(&path).unwrap();
    write(&file, b"some bytes", 0);
    assert_eq!(read(&read_only(&path).unwrap(), BLOCK, 0), b"some bytes");
    let reader = read_only(&path).unwrap();
    let refused = reader.write_at(&IoBuffer::from_bytes(b"no").source(), 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
    assert!(reader.set_len(0).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"some bytes");
    reader.sync_all().unwrap();
    drop(read_write(&path).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn one_file_under_two_names_has_one_identity() {
    let directory = disk_directory();
    let (first, second) = (directory.path().join("a"), directory.path().join("b"));
    let file = read_write(&first).unwrap();
    fs::hard_link(&first, &second).unwrap();
    let metadata = fs::metadata(&first).unwrap();
    let expected = FileIdentity::of_file(fs::File::open(&first).unwrap()).unwrap();
    assert_eq!((expected.device().number(), expected.inode()), (metadata.dev(), metadata.ino()));
    assert_ne!(FileIdentity::custom(metadata.dev(), metadata.ino()), expected);
    assert_eq!(file.identity(), Some(expected));
    assert_eq!(read_only(&second).unwrap().identity(), Some(expected));
    let other = read_write(&directory.path().join("c")).unwrap();
    assert_ne!(other.identity(), Some(expected));
}
