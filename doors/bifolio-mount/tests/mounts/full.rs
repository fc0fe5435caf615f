//! File systems that fill up: what calls said is there after the unmount, or a call said that there
//! is no space.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use bifolio_testing::{SmallDisk, skip};
use tempfile::TempDir;

use crate::mounted::{Mounted, can_mount, have, shell};

/// Size of the small file systems. Half of it is plenty for a mount of little memory.
const DISK_BYTES: u64 = 40 << 20;
/// Size of each of the files that do not fit all.
const FILE_BYTES: usize = 8 << 20;
const FILES: usize = 6;

/// A file system in a file, in a directory of its own; unmounted on drop.
struct Image(TempDir);

impl Image {
    /// A file system of [`DISK_BYTES`]. `None`, after a report, where loop devices cannot be used.
    #[track_caller]
    fn ext4(options: &str) -> Option<Self> {
        let script = r#"
            truncate -s 40M image
            mkfs.ext4 -q $1 image
            mkdir mount
            mount -o loop image mount
        "#;
        Self::mount("mkfs.ext4", script, options)
    }

    /// A file system with a quota of [`DISK_BYTES`] for the directory `quota`, and plenty beside
    /// it. The free space that it reports does not show the quota.
    #[track_caller]
    fn btrfs_with_quota() -> Option<Self> {
        let script = r#"
            truncate -s 256M image
            mkfs.btrfs -q --mixed image
            mkdir mount
            mount -o loop image mount
            btrfs quota enable mount
            btrfs subvolume create mount/quota
            btrfs qgroup limit 40M mount/quota
        "#;
        Self::mount("mkfs.btrfs", script, "")
    }

    #[track_caller]
    fn mount(program: &str, script: &str, options: &str) -> Option<Self> {
        if !have(&[program]) {
            return None;
        }
        let disk = Self(tempfile::tempdir().unwrap());
        let mut sh = Command::new("sh");
        sh.args(["-euc", script, "sh", options]).current_dir(disk.0.path());
        let output = sh.output().unwrap();
        if !output.status.success() {
            let problem = String::from_utf8_lossy(&output.stderr).into_owned();
            skip("root", format!("cannot mount a file: {problem}"));
            return None;
        }
        Some(disk)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mount")
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// Writes the file `$2` to `$3` in the way `$1`. Fails if a call does.
const WRITE: &str = r#"
import ctypes, mmap, os, sys
way, source, target = sys.argv[1:]
data = open(source, "rb").read()
flags = os.O_RDWR | os.O_CREAT
descriptor = os.open(target, flags | (os.O_APPEND if way == "append" else 0), 0o666)
def write_all(data, position):
    while data:
        if way == "append": written = os.write(descriptor, data[:1 << 16])
        else: written = os.pwrite(descriptor, data[:size], position)
        data, position = data[written:], position + written
size = 4096 if way == "pages" else 1 << 20
if way in ("write", "append"): write_all(data, 0)
elif way == "pages":
    for first in (0, size):
        for position in range(first, len(data), 2 * size):
            write_all(data[position:position + size], position)
elif way == "fallocate":
    os.posix_fallocate(descriptor, 0, len(data))
    write_all(data, 0)
elif way == "map":
    os.ftruncate(descriptor, len(data))
    map = mmap.mmap(descriptor, len(data))
    map[:] = data
    map.flush()
elif way == "copy":
    pattern = os.open(os.path.join(os.path.dirname(target), "pattern"), flags, 0o666)
    if os.fstat(pattern).st_size == 0:
        os.pwrite(pattern, data[:1 << 20], 0)
    position = 0
    while position < len(data):
        os.pwrite(pattern, data[position:position + (1 << 20)], 0)
        length = os.copy_file_range(pattern, descriptor, 1 << 20, 0, position)
        assert length > 0
        position += length
os.close(descriptor)
"#;

/// Ways to write a file `$1/in/$2` to `$3`.
const WAYS: &[(&str, &str)] = &[
    ("write", r#"python3 "$1/script" write "$1/in/$2" "$3/$2""#),
    ("pages", r#"python3 "$1/script" pages "$1/in/$2" "$3/$2""#),
    ("append", r#"python3 "$1/script" append "$1/in/$2" "$3/$2""#),
    ("map", r#"python3 "$1/script" map "$1/in/$2" "$3/$2""#),
    ("fallocate", r#"python3 "$1/script" fallocate "$1/in/$2" "$3/$2""#),
    ("copy", r#"python3 "$1/script" copy "$1/in/$2" "$3/$2""#),
    ("cp", r#"cp "$1/in/$2" "$3""#),
    ("mv", r#"cp "$1/in/$2" "$1/moved" && mv "$1/moved" "$3/$2""#),
    ("tar", r#"tar -C "$1/in" -cf - "$2" | tar -C "$3" -xf -"#),
    ("rsync", r#"rsync "$1/in/$2" "$3""#),
];

/// Writes files until the file system is full, in one of the [`WAYS`].
fn fill(disk: &Path, memory: &str, (way, command): (&str, &str)) {
    let mounted = Mounted::of(disk, &["--memory", memory]).unwrap();
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("script"), WRITE).unwrap();
    fs::create_dir(other.path().join("in")).unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    let mut confirmed = Vec::new();
    let mut errors = String::new();
    for name in (0..FILES).map(|number| format!("file{number}")) {
        let mut bytes = vec![0; FILE_BYTES];
        random.fill(&mut bytes);
        fs::write(other.path().join("in").join(&name), &bytes).unwrap();
        let mut sh = Command::new("sh");
        sh.args(["-c", command, "sh"]).arg(other.path()).arg(&name).arg(mounted.path(""));
        let output = sh.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() {
            confirmed.push((name, bytes));
        } else {
            // `tar` tells of a short write.
            let reasons = ["No space left on device", "Disk quota exceeded", "Wrote only"];
            let is_said = reasons.iter().any(|reason| said.contains(reason));
            assert!(is_said, "{way}, {memory}: {said}");
        }
        errors.push_str(&said);
    }
    assert!(!errors.is_empty(), "{way}, {memory}: all fits");
    let (status, log) = mounted.unmount();
    // Bytes that a call has refused are named once more.
    let named: Vec<_> = log.lines().filter(|line| line.contains("not written: ")).collect();
    assert_eq!(status.success(), named.is_empty(), "{way}, {memory}: {status}: {log}");
    let is_named = |name: &str| named.iter().any(|line| line.contains(&format!("/{name}:")));
    assert!(confirmed.iter().all(|(name, _)| !is_named(name)), "{way}, {memory}: {log}");
    for (name, bytes) in &confirmed {
        let found = fs::read(disk.join(name)).unwrap();
        assert!(found == *bytes, "{way}, {memory}: {name} is not what was written");
    }
    let count = confirmed.len();
    assert!((3..FILES).contains(&count), "{way}, {memory}: {count} files");
}

#[test]
fn what_calls_said_is_there_after_the_unmount_or_a_call_said_no_space() {
    if !can_mount() || !have(&["python3", "tar", "rsync"]) {
        return;
    }
    for way in WAYS {
        let Some(disk) = Image::ext4("-m 0") else { return };
        // More memory than space, so that all of it can be dirty.
        fill(&disk.path(), "128M", *way);
    }
}

#[test]
fn what_calls_said_is_there_after_the_unmount_or_a_call_said_quota() {
    if !can_mount() || !have(&["python3", "tar", "rsync"]) {
        return;
    }
    for way in WAYS.iter().filter(|(way, _)| ["write", "map", "copy", "mv"].contains(way)) {
        let Some(disk) = Image::btrfs_with_quota() else { return };
        fill(&disk.path().join("quota"), "128M", *way);
    }
}

#[test]
#[ignore = "takes a minute"]
fn what_calls_said_is_there_with_little_memory_and_on_other_file_systems() {
    if !can_mount() || !have(&["python3", "tar", "rsync"]) {
        return;
    }
    for way in WAYS {
        let Some(disk) = Image::ext4("-m 0") else { return };
        fill(&disk.path(), "4M", *way);
        drop(disk);
        // Cannot allocate: each write is written out when there is less than plenty.
        let Some(disk) = Image::ext4("-m 0 -t ext2") else { return };
        fill(&disk.path(), "64M", *way);
        drop(disk);
        let Some(disk) = Image::btrfs_with_quota() else { return };
        fill(&disk.path().join("quota"), "8M", *way);
        drop(disk);
        for memory in ["4M", "512M"] {
            let Some(disk) = SmallDisk::mount(DISK_BYTES) else { return };
            fill(disk.path(), memory, *way);
        }
    }
}

#[test]
fn writers_of_many_files_together_fill_a_disk_without_loss() {
    let Some(disk) = SmallDisk::mount(32 << 20) else { return };
    let Some(mounted) = Mounted::of(disk.path(), &["--memory", "128M"]) else { return };
    let written: Vec<u64> = std::thread::scope(|scope| {
        let write = |number: u64| {
            let path = mounted.path(format!("file{number}"));
            move || {
                let mut file = File::create(path).unwrap();
                let mut written = 0;
                for _ in 0..(8 << 20) / 50_000 {
                    match file.write(&[number as u8 + 1; 50_000]) {
                        Ok(length) => written += length as u64,
                        Err(error) => {
                            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
                            break;
                        }
                    }
                }
                written
            }
        };
        let writers: Vec<_> = (0..8).map(|number| scope.spawn(write(number))).collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    assert!((28 << 20..=32 << 20).contains(&written.iter().sum::<u64>()), "{written:?}");
    mounted.unmount_cleanly_with(|| {
        for (number, length) in written.iter().enumerate() {
            let bytes = fs::read(disk.path().join(format!("file{number}"))).unwrap();
            assert_eq!(bytes.len() as u64, *length);
            assert!(bytes.iter().all(|byte| usize::from(*byte) == number + 1), "{number}");
        }
    });
}

#[test]
fn a_full_disk_takes_changes_of_what_it_has() {
    let Some(disk) = SmallDisk::mount(4 << 20) else { return };
    let Some(mounted) = Mounted::of(disk.path(), &["--memory", "64M"]) else { return };
    fs::write(mounted.path("fits"), vec![1; 100_000]).unwrap();
    let file = File::create(mounted.path("too-long")).unwrap();
    let told = (0..16).try_for_each(|index| file.write_all_at(&[2; 1 << 20], index << 20));
    assert_eq!(told.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let other = OpenOptions::new().write(true).open(mounted.path("fits")).unwrap();
    other.write_all_at(b"changed", 10).unwrap();
    other.sync_all().unwrap();
    // Also when there is room again.
    drop(file);
    fs::remove_file(mounted.path("too-long")).unwrap();
    fs::write(mounted.path("more"), vec![3; 2 << 20]).unwrap();
    drop(other);
    mounted.unmount_cleanly_with(|| {
        assert_eq!(&fs::read(disk.path().join("fits")).unwrap()[10..17], b"changed");
        assert_eq!(fs::read(disk.path().join("more")).unwrap(), vec![3; 2 << 20]);
    });
}

#[test]
fn sparse_files_stay_sparse() {
    let Some(disk) = SmallDisk::mount(16 << 20) else { return };
    let Some(mounted) = Mounted::of(disk.path(), &["--memory", "64M"]) else { return };
    let script = r#"
        cd "$1"
        truncate -s 1G empty
        truncate -s 1G some
        printf x | dd of=some bs=1 seek=500000000 conv=notrunc status=none
        cp --sparse=always some copy
    "#;
    shell(script, &[&mounted.path("")]);
    mounted.unmount_cleanly_with(|| {
        for name in ["empty", "some", "copy"] {
            let found = fs::metadata(disk.path().join(name)).unwrap();
            assert_eq!(found.len(), 1 << 30);
            assert!(found.blocks() <= 2048, "{name}: {} blocks", found.blocks());
        }
    });
}

#[test]
fn blocks_reserved_for_root_are_not_given_to_others() {
    if !can_mount() || !have(&["setpriv"]) {
        return;
    }
    let Some(disk) = Image::ext4("-m 40") else { return };
    fs::set_permissions(disk.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mounted = Mounted::of(&disk.path(), &["--memory", "64M"]).unwrap();
    // The directory of the target belongs to root.
    let target = mounted.path("");
    fs::set_permissions(target.parent().unwrap(), fs::Permissions::from_mode(0o1777)).unwrap();
    let script = r#"
        cd "$1"
        ! setpriv --reuid 12345 --regid 12346 --clear-groups \
            dd if=/dev/zero of=of-user bs=1M count=100 2>/dev/null
        dd if=/dev/zero of=of-root bs=1M count=8 status=none
        stat -c %s of-user
    "#;
    let length: u64 = shell(script, &[&target]).trim().parse().unwrap();
    assert!((8 << 20..24 << 20).contains(&length), "{length}");
    mounted.unmount_cleanly();
}

#[test]
fn a_removed_file_makes_room_at_once() {
    let Some(disk) = SmallDisk::mount(8 << 20) else { return };
    let Some(mounted) = Mounted::of(disk.path(), &["--memory", "64M"]) else { return };
    for round in 0..30 {
        let path = mounted.path(format!("file{round}"));
        fs::write(&path, vec![round; 6 << 20]).unwrap_or_else(|error| panic!("{round}: {error}"));
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        let told = (0..6).try_for_each(|_| file.write_all(&[round; 1 << 20]));
        assert_eq!(told.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        if round % 2 == 0 {
            drop(file);
            fs::remove_file(&path).unwrap();
        } else {
            fs::remove_file(&path).unwrap();
            drop(file);
        }
    }
    mounted.unmount_cleanly();
}
