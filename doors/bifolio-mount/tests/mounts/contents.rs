//! Bytes, sizes and times of files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{FallocateFlags, SeekFrom as SeekWhere, fallocate};

use crate::mounted::{Mounted, shell};

/// With these options a file is closed in the cache soon after its last close by a program.
const FEW_FILES: [&str; 4] = ["--memory", "8M", "--kept-files", "1"];

#[test]
fn written_bytes_are_read_back_and_reach_the_source() {
    let Some(mounted) = Mounted::new(&["--memory", "2M"]) else { return };
    let mut bytes = vec![0; 5_000_001];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    fs::write(mounted.path("file"), &bytes).unwrap();
    assert_eq!(fs::read(mounted.path("file")).unwrap(), bytes);
    let source = mounted.source("file");
    assert_eq!(fs::metadata(mounted.path("file")).unwrap().len(), 5_000_001);
    mounted.unmount_cleanly_with(|| assert_eq!(fs::read(source).unwrap(), bytes));
}

#[test]
fn appends_truncates_and_holes_have_the_right_size() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let path = mounted.path("file");
    let mut file = OpenOptions::new().append(true).create(true).read(true).open(&path).unwrap();
    file.write_all(b"one").unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"two").unwrap();
    file.write_all(b"three").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"onetwothree");
    file.set_len(4).unwrap();
    file.write_all(b"!").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"onet!");
    file.set_len(10_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 10_000);
    let mut end = [1; 100];
    assert_eq!(file.read_at(&mut end, 9_950).unwrap(), 50);
    assert_eq!(end[..50], [0; 50]);
    File::create(&path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 0);
    assert_eq!(file.read(&mut end).unwrap(), 0);
    drop(file);
    mounted.unmount_cleanly();
}

#[test]
fn the_modification_time_outlives_the_write_out() {
    let Some(mounted) = Mounted::new(&FEW_FILES) else { return };
    let path = mounted.path("file");
    fs::write(&path, b"bytes").unwrap();
    let written = fs::metadata(&path).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let synced = fs::metadata(&path).unwrap();
    assert_eq!(synced.modified().unwrap(), written.modified().unwrap());
    assert!((synced.ctime(), synced.ctime_nsec()) >= (written.ctime(), written.ctime_nsec()));

    // A time that a program sets is not that of a later write-out.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_at(b"more", 2).unwrap();
    let past = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 7);
    file.set_modified(past).unwrap();
    drop(file);
    for other in 0..4 {
        fs::write(mounted.path(format!("other{other}")), b"x").unwrap();
    }
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), past);
    let source = mounted.source("file");
    mounted.unmount_cleanly_with(|| {
        let metadata = fs::metadata(&source).unwrap();
        assert_eq!((metadata.modified().unwrap(), metadata.len()), (past, 6));
    });
}

#[test]
fn sizes_and_times_never_go_backwards() {
    let Some(mounted) = Mounted::new(&FEW_FILES) else { return };
    let path = mounted.path("file");
    fs::write(&path, b"").unwrap();
    let (mut len, mut times) = (0, (0, 0, 0, 0));
    for round in 0..100_u64 {
        OpenOptions::new().append(true).open(&path).unwrap().write_all(&[1; 700]).unwrap();
        fs::write(mounted.path(format!("other{}", round % 7)), b"x").unwrap();
        let now = fs::metadata(&path).unwrap();
        let now_times = (now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec());
        assert!(now_times >= times && now.len() == len + 700, "{now_times:?} {times:?}");
        (len, times) = (now.len(), now_times);
    }
    mounted.unmount_cleanly();
}

#[test]
fn a_shared_map_sees_writes_and_is_seen_by_reads() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let script = r#"
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 1 << 20)
shared = mmap.mmap(descriptor, 1 << 20)
os.pwrite(descriptor, b"written", 5000)
assert shared[5000:5007] == b"written"
shared[9000:9006] = b"stored"
assert os.pread(descriptor, 6, 9000) == b"stored"
shared[0:5] = b"early"
shared.flush()
os.close(descriptor)
shared[100:104] = b"late"
"#;
    let path = mounted.path("file");
    shell(&format!("exec python3 - \"$1\" <<'END'{script}END"), &[&path]);
    let bytes = fs::read(&path).unwrap();
    assert_eq!((&bytes[..5], &bytes[100..104]), (&b"early"[..], &b"late"[..]));
    let source = mounted.source("file");
    mounted.unmount_cleanly_with(|| assert_eq!(fs::read(&source).unwrap(), bytes));
}

#[test]
fn ranges_are_copied_between_files() {
    let Some(mounted) = Mounted::new(&["--memory", "4M"]) else { return };
    let mut bytes = vec![0; 20 << 20];
    fastrand::Rng::with_seed(2).fill(&mut bytes);
    fs::write(mounted.path("from"), &bytes).unwrap();
    // `io::copy` uses `copy_file_range`, as does `fs::copy`.
    fs::copy(mounted.path("from"), mounted.path("to")).unwrap();
    assert!(fs::read(mounted.path("to")).unwrap() == bytes);
    let mut from = File::open(mounted.path("from")).unwrap();
    from.seek(SeekFrom::Start(12_345)).unwrap();
    let mut to = File::create(mounted.path("part")).unwrap();
    io::copy(&mut from.take(1_000_000), &mut to).unwrap();
    drop(to);
    assert!(fs::read(mounted.path("part")).unwrap() == bytes[12_345..1_012_345]);
    mounted.unmount_cleanly();
}

#[test]
fn holes_are_punched_zeroed_allocated_and_found() {
    let Some(mounted) = Mounted::new(&FEW_FILES) else { return };
    let path = mounted.path("file");
    fs::write(&path, vec![1; 1 << 20]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let (keep, punch) = (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE);
    fallocate(&file, keep | punch, 100_000, 200_000).unwrap();
    fallocate(&file, FallocateFlags::ZERO_RANGE | keep, 900_000, 10).unwrap();
    fallocate(&file, keep, 1 << 20, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    fallocate(&file, FallocateFlags::empty(), 1 << 20, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().len(), (1 << 20) + 4096);
    let insert = fallocate(&file, FallocateFlags::INSERT_RANGE, 0, 4096);
    assert_eq!(insert.unwrap_err(), rustix::io::Errno::OPNOTSUPP);
    let mut expected = vec![1; 1 << 20];
    expected[100_000..300_000].fill(0);
    expected[900_000..900_010].fill(0);
    expected.resize((1 << 20) + 4096, 0);
    assert!(fs::read(&path).unwrap() == expected);
    let hole = rustix::fs::seek(&file, SeekWhere::Hole(0)).unwrap();
    assert!((100_000..106_000).contains(&hole), "{hole}");
    let data = rustix::fs::seek(&file, SeekWhere::Data(hole)).unwrap();
    assert!((290_000..=300_000).contains(&data), "{data}");
    drop(file);
    let source = mounted.source("file");
    mounted.unmount_cleanly_with(|| assert!(fs::read(&source).unwrap() == expected));
}

#[test]
fn the_kernels_cache_sees_writes_and_truncates() {
    let Some(mounted) = Mounted::new(&["--kernel-cache"]) else { return };
    let path = mounted.path("file");
    fs::write(&path, vec![1; 100_000]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), vec![1; 100_000]);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_at(&[2; 10], 50_000).unwrap();
    file.set_len(60_000).unwrap();
    drop(file);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(
        (bytes.len(), &bytes[49_999..50_011]),
        (60_000, &[1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1][..])
    );
    mounted.unmount_cleanly();
}

#[test]
fn files_may_be_longer_than_a_tebibyte() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let path = mounted.path("file");
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    file.write_all_at(b"end", (3 << 40) - 3).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 3 << 40);
    file.set_len(5 << 40).unwrap();
    let mut bytes = [0; 4];
    assert_eq!(file.read_at(&mut bytes, (3 << 40) - 3).unwrap(), 4);
    assert_eq!(&bytes, b"end\0");
    // Longer than file systems allow: said by the call.
    for refused in [file.set_len(1 << 61), file.write_all_at(b"x", 1 << 61)] {
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EFBIG));
    }
    let source = File::open(mounted.source("file")).unwrap();
    file.sync_all().unwrap();
    drop(file);
    mounted.unmount_cleanly_with(|| {
        assert_eq!(source.metadata().unwrap().len(), 5 << 40);
        assert_eq!(source.read_at(&mut bytes, (3 << 40) - 3).unwrap(), 4);
        assert_eq!(&bytes, b"end\0");
    });
}
