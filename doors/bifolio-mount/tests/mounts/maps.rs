//! Stores to shared maps beside writes, by one process and by several.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::mounted::{Mounted, have, shell};

/// Writes to each page of the file `$1` in the way `$2`: by `pwrite`, and by stores to two maps.
/// Prints how many of the written and stored bytes a program that has the file open for reading
/// does not find.
const BESIDE: &str = r#"
import mmap, os, signal, struct, sys, threading, time
path, way, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
PAGES, PAGE = 1024, 4096
def write(value):
    descriptor = os.open(path, os.O_WRONLY if "write_only" in way else os.O_RDWR)
    for page in range(PAGES):
        os.pwrite(descriptor, value, page * PAGE + 8)
        if "fsync" in way and page % 64 == 0: os.fsync(descriptor)
        if "status" in way: os.stat(path)
        if "open" in way: os.close(os.open(path, os.O_RDONLY))
    os.close(descriptor)
def store(value, at):
    descriptor = os.open(path, os.O_RDWR)
    shared = mmap.mmap(descriptor, PAGES * PAGE)
    for page in range(PAGES):
        shared[page * PAGE + at:page * PAGE + at + 8] = value
        if "fsync" in way and page % 64 == 32: shared.flush()
        if "truncate" in way and page % 64 == 32: os.ftruncate(descriptor, PAGES * PAGE + 1 + page)
    os.close(descriptor)
def run(*jobs):
    if "processes" in way:
        looker = os.fork() if "maps" in way else None
        if looker == 0:
            os.nice(5)
            share = mmap.MAP_PRIVATE if "private" in way else mmap.MAP_SHARED
            while True: mmap.mmap(reader, PAGES * PAGE, share, mmap.PROT_READ).close()
        children = []
        for job, *arguments in jobs:
            child = os.fork()
            if child == 0:
                job(*arguments)
                os._exit(0)
            children.append(child)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
        if looker:
            os.kill(looker, signal.SIGKILL)
            os.waitpid(looker, 0)
    else:
        threads = [threading.Thread(target=job, args=arguments) for job, *arguments in jobs]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
lost = 0
for round in range(1, rounds + 1):
    value = struct.pack("<q", round)
    truncate = os.O_TRUNC if round % 2 else 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | truncate)
    os.ftruncate(descriptor, PAGES * PAGE)
    os.close(descriptor)
    # The mount learns of a close later: then the file is not open for writing any more.
    if "maps" in way: time.sleep(0.05)
    reader = os.open(path, os.O_RDONLY)
    run((write, value), (store, value, 64), (store, value, 2048))
    seen = os.pread(reader, PAGES * PAGE, 0)
    for page in range(PAGES):
        for at in (8, 64, 2048):
            lost += seen[page * PAGE + at:page * PAGE + at + 8] != value
    os.close(reader)
print(lost)
"#;

/// Runs [`BESIDE`] in several ways, and compares with the source directory afterwards.
fn write_beside_stores(arguments: &[&str], rounds: u32) {
    if !have(&["python3"]) {
        return;
    }
    let Some(mounted) = Mounted::new(arguments) else { return };
    let ways = [
        "threads",
        "threads-truncate",
        "threads-status-fsync",
        "processes",
        "processes-open",
        "processes-write_only",
        "processes-fsync-truncate",
        // The reader, which has the file open since before the writers, maps it meanwhile.
        "processes-maps",
        "processes-maps-private",
    ];
    for way in ways {
        let script = format!("exec python3 - \"$1\" \"$2\" \"$3\" <<'END'{BESIDE}END");
        let (path, rounds) = (mounted.path(way), rounds.to_string());
        let arguments = [&*path, Path::new(way), Path::new(&rounds)];
        assert_eq!(shell(&script, &arguments).trim(), "0", "{way}: bytes are lost");
    }
    let source = mounted.source("");
    let seen = ways.map(|way| fs::read(mounted.path(way)).unwrap());
    mounted.unmount_cleanly_with(|| {
        for (way, seen) in ways.iter().zip(seen) {
            assert!(fs::read(source.join(way)).unwrap() == seen, "{way}");
        }
    });
}

#[test]
fn writes_and_stores_beside_them_are_both_kept() {
    write_beside_stores(&["--memory", "16M"], 3);
    // Pages are written back and read again all the time.
    write_beside_stores(&["--memory", "1M", "--dirty-age", "5ms", "--kept-files", "1"], 1);
}

#[test]
#[ignore = "takes a minute"]
fn writes_and_stores_beside_them_are_both_kept_in_many_rounds() {
    write_beside_stores(&["--memory", "16M"], 60);
    write_beside_stores(&["--memory", "16M", "--kernel-cache"], 20);
}

/// The program reads past the kernel's page cache, and the writer goes through it.
#[test]
fn a_reader_from_before_the_writer_sees_writes_stores_and_truncates() {
    let Some(mounted) = Mounted::new(&[]) else { return };
    let path = mounted.path("file");
    fs::write(&path, [1; 8192]).unwrap();
    let reader = File::open(&path).unwrap();
    let mut options = OpenOptions::new();
    let writer = options.read(true).write(true).open(&path).unwrap();
    let late = File::open(&path).unwrap();
    let seen = |position: u64| {
        let mut bytes = [[0; 1]; 2];
        for (reader, byte) in [&reader, &late].into_iter().zip(&mut bytes) {
            assert_eq!(reader.read_at(byte, position).unwrap(), 1);
        }
        assert_eq!(bytes[0], bytes[1]);
        bytes[0][0]
    };
    assert_eq!(seen(100), 1);
    writer.write_at(&[2; 10], 100).unwrap();
    assert_eq!(seen(100), 2);
    // Stores, which stay in the kernel's page cache.
    let script = r#"
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
shared = mmap.mmap(descriptor, 8192)
shared[104] = 3
print(os.pread(os.open(sys.argv[1], os.O_RDONLY), 1, 104)[0])
"#;
    let said = shell(&format!("exec python3 - \"$1\" <<'END'{script}END"), &[&path]);
    assert_eq!((said.trim(), seen(104)), ("3", 3));
    writer.set_len(50).unwrap();
    writer.set_len(200).unwrap();
    assert_eq!((seen(49), seen(50), seen(104)), (1, 0, 0));
    drop((reader, late, writer));
    mounted.unmount_cleanly();
}

/// A copy by the mount, past the kernel's pages, would lose what programs store beside it.
#[test]
fn ranges_are_copied_into_a_mapped_file_without_loss() {
    if !have(&["python3"]) {
        return;
    }
    let Some(mounted) = Mounted::new(&[]) else { return };
    let script = r#"
import mmap, os, sys, threading
source = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
target = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
PAGES, PAGE = 256, 4096
os.pwrite(source, b"c" * PAGE * PAGES, 0)
os.ftruncate(target, PAGES * PAGE)
shared = mmap.mmap(target, PAGES * PAGE)
def store():
    for page in range(PAGES):
        shared[page * PAGE + 8] = 0x73
        if page % 16 == 0: shared.flush()
def copy():
    for page in range(PAGES):
        assert os.copy_file_range(source, target, 100, page * PAGE, page * PAGE + 100) == 100
threads = [threading.Thread(target=job) for job in (store, copy)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
seen = os.pread(target, PAGES * PAGE, 0)
print(sum(seen[page * PAGE + 8] != 0x73 or seen[page * PAGE + 100:page * PAGE + 200] != b"c" * 100
    for page in range(PAGES)))
"#;
    let script = format!("exec python3 - \"$1\" \"$2\" <<'END'{script}END");
    for _ in 0..5 {
        assert_eq!(shell(&script, &[&mounted.path("from"), &mounted.path("to")]).trim(), "0");
    }
    mounted.unmount_cleanly();
}

#[test]
fn a_mount_without_the_kernels_cache_refuses_shared_maps() {
    let Some(mounted) = Mounted::new(&["--direct"]) else { return };
    let path = mounted.path("file");
    fs::write(&path, [1; 4096]).unwrap();
    let script = r#"
import errno, mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
private = mmap.mmap(descriptor, 4096, mmap.MAP_PRIVATE)
assert private[0] == 1
try: mmap.mmap(descriptor, 4096)
except OSError as error: print(errno.errorcode[error.errno])
"#;
    let said = shell(&format!("exec python3 - \"$1\" <<'END'{script}END"), &[&path]);
    assert_eq!(said, "ENODEV\n");
    mounted.unmount_cleanly();
}
