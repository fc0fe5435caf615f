//! Pages of closed files: found again if nothing has changed the file, whatever other programs did
//! to it. A thread with a descriptor of its own stands for another program: to the kernel they are
//! the same. (Random changes: torture's scenes `kept`.)
//!
//! # Safety
//! Stores through shared maps that only the storing thread has.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime};

use bifolio::{Cache, CacheBuilder, DirectIo, Feature, OpenOptions};
use bifolio_testing::{attempt, skip};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use tempfile::TempDir;

use crate::support::{
    PAGE, directory, file_of, files_can_be_mapped, has, mappable, random_file, read_all, run_alone,
    wait_until, without_root, writable,
};

/// Longer than a tick of the kernel's clock, by the library's judgement.
const TICK: Duration = Duration::from_millis(25);

fn keeping(files: usize) -> CacheBuilder {
    Cache::builder().memory(16 << 20).readahead_max(0).kept_files(files)
}

fn cache_of_kept() -> Cache {
    keeping(100).build().unwrap()
}

/// Returns `true` if files in `directory` can be kept; otherwise the test is skipped.
#[track_caller]
fn can_keep(directory: &TempDir) -> bool {
    if !has(Feature::FileWatches) {
        return false;
    }
    let found = rustix::fs::statfs(directory.path()).unwrap().f_type as u64;
    let is_known = [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010].contains(&found);
    if !is_known {
        skip("local-files", format!("the file system has type {found:#x}"));
    }
    is_known
}

fn reader(cache: &Cache, path: &Path) -> bifolio::File {
    cache.open(path, &OpenOptions::new()).unwrap()
}

/// Opens, reads and closes a file. Returns its bytes, and the pages that were not in memory.
fn look(cache: &Cache, path: &Path) -> (Vec<u8>, u64) {
    let before = cache.stats().reads.misses;
    let bytes = read_all(&reader(cache, path));
    (bytes, cache.stats().reads.misses - before)
}

fn misses(cache: &Cache, path: &Path) -> u64 {
    look(cache, path).1
}

/// Checks that a file is found again. Programs that other tests start have copies of all
/// descriptors for a moment, also of those that could write to the file.
#[track_caller]
fn assert_kept(cache: &Cache, path: &Path, what: &str) {
    assert!((0..100).any(|_| misses(cache, path) == 0), "{what}: not kept");
}

/// Checks that a file is found again after `event`.
#[track_caller]
fn assert_kept_after(cache: &Cache, path: &Path, what: &str, event: impl Fn()) {
    let is_kept = |_| {
        assert_kept(cache, path, what);
        event();
        misses(cache, path) == 0
    };
    assert!((0..100).any(is_kept), "{what}: not kept");
}

/// Another program's descriptor.
fn writer(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Returns the descriptors of `path` in this process.
fn descriptors_of(path: &Path) -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap().flatten();
    all.filter(|found| fs::read_link(found.path()).is_ok_and(|target| target == path)).count()
}

/// Another program's shared map of the first page of a file.
struct Shared(*mut u8);

impl Shared {
    fn of(file: impl AsFd) -> Self {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new map, at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), 4096, access, flags, file, 0) };
        Self(start.unwrap().cast())
    }

    fn store_at(&self, position: usize, byte: u8) {
        assert!(position < 4096);
        // SAFETY: the map has a page, and lives as long as `self`.
        unsafe { self.0.wrapping_add(position).write_volatile(byte) };
    }

    fn store(&self, byte: u8) {
        self.store_at(0, byte);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the map, which nothing else has the address of.
        unsafe { munmap(self.0.cast(), 4096) }.unwrap();
    }
}

#[test]
fn a_reopened_file_finds_its_pages_and_kept_no_descriptor() {
    let directory = directory();
    if !can_keep(&directory) {
        return;
    }
    let (path, bytes) = random_file(&directory, "file", 5 * PAGE as usize + 7);
    let cache = cache_of_kept();
    assert_eq!(look(&cache, &path), (bytes.clone(), 6));
    for _ in 0..5 {
        assert_kept(&cache, &path, "closed");
        assert_eq!(look(&cache, &path).0, bytes);
        assert_eq!(descriptors_of(&path), 0);
    }
    // As of every kind of handle that reads.
    let immutable = cache.open_immutable(&path, &OpenOptions::new()).unwrap();
    assert_eq!(immutable.pin(0..10).unwrap()[..], bytes[..10]);
    drop(immutable);
    assert_kept(&cache, &path, "of an immutable handle");
    assert!(cache.stats().fallbacks.iter().all(|text| !text.contains("kept")));
    cache.evict_all().unwrap();
    assert_eq!(misses(&cache, &path), 6);
    cache.close().unwrap();
}

#[test]
fn pages_are_kept_only_if_asked_for_and_known_how() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 8192);
    for builder in [keeping(0), keeping(100).disable(Feature::FileWatches)] {
        let cache = builder.build().unwrap();
        for _ in 0..3 {
            assert_eq!(look(&cache, &path), (bytes.clone(), 2));
        }
    }
    let cache = keeping(100).disable(Feature::FileWatches).build().unwrap();
    let named = |text: &String| text == "file-watches: pages of closed files are not kept";
    assert!(cache.stats().fallbacks.iter().any(named));
}

/// A change of a file of three pages. Afterwards no part of it is in progress.
type Change = fn(&Path);

const CHANGES: [(&str, Change); 13] = [
    ("write", |path| writer(path).write_all_at(b"changed", 4000).unwrap()),
    ("write with the times restored", |path| {
        let file = writer(path);
        let found = file.metadata().unwrap();
        file.write_all_at(b"changed", 4000).unwrap();
        let (modified, accessed) = (found.modified().unwrap(), found.accessed().unwrap());
        file.set_times(FileTimes::new().set_modified(modified).set_accessed(accessed)).unwrap();
    }),
    ("store through a map", |path| Shared::of(writer(path)).store(7)),
    ("store through a map with the times restored", |path| {
        let modified = fs::metadata(path).unwrap().modified().unwrap();
        Shared::of(writer(path)).store(7);
        File::open(path).unwrap().set_modified(modified).unwrap();
    }),
    ("truncation", |path| writer(path).set_len(5000).unwrap()),
    ("truncation and extension", |path| {
        writer(path).set_len(5000).unwrap();
        writer(path).set_len(3 * PAGE).unwrap();
    }),
    ("truncation by path", |path| {
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        for length in [100, 3 * PAGE] {
            // SAFETY: the name ends with a zero.
            let answer = unsafe { libc::truncate(name.as_ptr(), length as i64) };
            assert_eq!(answer, 0);
        }
    }),
    ("hole", |path| {
        use rustix::fs::{FallocateFlags, fallocate};
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(writer(path), flags, 4096, 4096).unwrap();
    }),
    ("copy", |path| {
        let (file, mut from) = (writer(path), 0);
        rustix::fs::copy_file_range(&file, Some(&mut from), &file, Some(&mut 8192), 4096).unwrap();
    }),
    ("rename over", |path| {
        let other = path.with_extension("new");
        fs::write(&other, vec![9; 3 * PAGE as usize]).unwrap();
        fs::rename(other, path).unwrap();
    }),
    ("rename over, with the times of the old file", |path| {
        let other = path.with_extension("new");
        let modified = fs::metadata(path).unwrap().modified().unwrap();
        fs::write(&other, vec![9; 3 * PAGE as usize]).unwrap();
        File::open(&other).unwrap().set_modified(modified).unwrap();
        fs::rename(other, path).unwrap();
    }),
    ("removal and creation", |path| {
        fs::remove_file(path).unwrap();
        fs::write(path, vec![8; 3 * PAGE as usize]).unwrap();
    }),
    ("another program", |path| {
        let command = format!("printf changed | dd of='{}' conv=notrunc", path.display());
        let done = Command::new("sh").args(["-c", &command]).stderr(Stdio::null()).status();
        assert!(done.unwrap().success());
    }),
];

fn check_changes(age: Duration) {
    let directory = directory();
    let cache = cache_of_kept();
    let is_kept = can_keep(&directory);
    let files: Vec<_> = (0..CHANGES.len())
        .map(|number| random_file(&directory, &number.to_string(), 3 * PAGE as usize))
        .collect();
    thread::sleep(age);
    for ((name, change), (path, bytes)) in CHANGES.iter().zip(&files) {
        look(&cache, path);
        if is_kept {
            assert_kept(&cache, path, name);
        }
        assert_eq!(look(&cache, path).0, *bytes, "{name}");
        change(path);
        let now = fs::read(path).unwrap();
        assert_ne!(&now, bytes, "{name} changes something");
        let pages = now.len() as u64;
        let pages = pages.div_ceil(PAGE);
        assert_eq!(look(&cache, path), (now.clone(), pages), "{name}");
        assert_eq!(look(&cache, path).0, now, "{name}");
    }
}

#[test]
fn a_file_that_changed_while_closed_is_read_again() {
    check_changes(TICK);
}

/// The times of a change may be those that the file has.
#[test]
fn a_new_file_that_changed_while_closed_is_read_again() {
    check_changes(Duration::ZERO);
}

#[test]
fn a_file_that_changed_while_it_was_open_is_read_again() {
    let directory = directory();
    for age in [TICK, Duration::ZERO] {
        let cache = cache_of_kept();
        for (name, change) in CHANGES {
            let (path, _) = random_file(&directory, "file", 3 * PAGE as usize);
            thread::sleep(age);
            let file = reader(&cache, &path);
            read_all(&file);
            change(&path);
            assert!(name.contains("re") || !file.is_unchanged(), "{name}");
            drop(file);
            assert_eq!(look(&cache, &path).0, fs::read(&path).unwrap(), "{name}");
        }
    }
}

/// Writes all pages of a large file in one call, which takes a while, and whose times are those of
/// its begin.
fn long_write(path: &Path, bytes: &[u8], meanwhile: impl FnOnce()) {
    let modified = || fs::metadata(path).unwrap().modified().unwrap();
    let before = modified();
    thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let file = File::options().write(true).open(path).unwrap();
            assert_eq!(file.write_at(bytes, 0).unwrap(), bytes.len());
        });
        wait_until("the write begins", || modified() != before || writing.is_finished());
        meanwhile();
    });
}

#[test]
fn one_long_write_is_seen_whenever_the_file_is_closed() {
    const BYTES: usize = 96 << 20;
    let directory = directory();
    let path = file_of(&directory, "file", &vec![1; BYTES]);
    thread::sleep(TICK);
    let last = |file: &bifolio::File| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, BYTES as u64 - 1).unwrap();
        byte[0]
    };
    let (one, two, three) = (vec![1; BYTES], vec![2; BYTES], vec![3; BYTES]);
    let cache = cache_of_kept();
    // It begins before the open, and ends after the close.
    long_write(&path, &two, || {
        let file = reader(&cache, &path);
        last(&file);
        drop(file);
    });
    assert_eq!(last(&reader(&cache, &path)), 2);
    // It begins before the close, and ends after it.
    let file = reader(&cache, &path);
    assert_eq!(last(&file), 2);
    long_write(&path, &three, || {
        last(&file);
        drop(file);
        drop(reader(&cache, &path));
    });
    assert_eq!(last(&reader(&cache, &path)), 3);
    // It begins after the close; opens before it ends find old bytes or new ones.
    long_write(&path, &one, || {
        for _ in 0..10 {
            assert!([1, 3].contains(&last(&reader(&cache, &path))));
        }
    });
    assert_eq!(last(&reader(&cache, &path)), 1);
    cache.close().unwrap();
}

#[test]
fn a_map_of_another_program_is_seen_whenever_it_was_made() {
    let directory = directory();
    let is_kept = can_keep(&directory);
    let cache = cache_of_kept();
    let path = file_of(&directory, "file", &[1; 4096]);
    let first = |path: &Path| look(&cache, path).0[0];
    thread::sleep(TICK);
    // Before the open: no descriptor is left, and the times are set by its first store alone.
    let map = Shared::of(writer(&path));
    map.store(2);
    thread::sleep(TICK);
    for value in 3..6 {
        assert_eq!(first(&path), value - 1);
        map.store(value);
        assert_eq!(first(&path), value);
    }
    drop(map);
    // After the close.
    assert_eq!(first(&path), 5);
    if is_kept {
        assert_kept(&cache, &path, "after the end of the map");
    }
    let map = Shared::of(writer(&path));
    assert_eq!(first(&path), 5);
    map.store(6);
    assert_eq!(first(&path), 6);
    drop(map);
    // While the file is open here, and gone before its close.
    let file = reader(&cache, &path);
    assert_eq!(read_all(&file)[0], 6);
    Shared::of(writer(&path)).store(7);
    drop(file);
    assert_eq!(first(&path), 7);
    // Before the open, and gone before the next one: its second store leaves no time, because a
    // read through the kernel's page cache does not clean the page.
    let options = OpenOptions::new().direct(DirectIo::Never);
    for value in 8..12 {
        let map = Shared::of(writer(&path));
        map.store(value + 100);
        thread::sleep(TICK);
        assert_eq!(read_all(&cache.open(&path, &options).unwrap())[0], value + 100);
        map.store(value);
        drop(map);
        assert_eq!(read_all(&cache.open(&path, &options).unwrap())[0], value);
    }
}

#[test]
fn a_writer_that_keeps_its_descriptor_is_seen() {
    let directory = directory();
    let cache = cache_of_kept();
    let (path, bytes) = random_file(&directory, "file", 8192);
    thread::sleep(TICK);
    look(&cache, &path);
    let file = writer(&path);
    // It could change the file through a map at any time.
    assert_eq!(look(&cache, &path), (bytes.clone(), 2));
    assert_eq!(look(&cache, &path), (bytes, 2));
    file.write_all_at(b"changed", 0).unwrap();
    assert_eq!(look(&cache, &path).0, fs::read(&path).unwrap());
    drop(file);
    if can_keep(&directory) {
        assert_kept(&cache, &path, "after the end of the writer");
    }
}

/// A process that was forked, or started, with a descriptor.
#[test]
fn a_child_that_inherits_a_descriptor_is_seen() {
    let directory = directory();
    let cache = cache_of_kept();
    let (path, bytes) = random_file(&directory, "file", 8192);
    thread::sleep(TICK);
    look(&cache, &path);
    let mut child = Command::new("sh")
        .args(["-c", "read word; printf changed; read word"])
        .stdin(Stdio::piped())
        .stdout(writer(&path))
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    assert_eq!(look(&cache, &path), (bytes.clone(), 2), "this process has closed its own");
    input.write_all(b"go\n").unwrap();
    wait_until("the child writes", || fs::read(&path).unwrap() != bytes);
    assert_eq!(look(&cache, &path), (fs::read(&path).unwrap(), 2));
    drop(input);
    child.wait().unwrap();
    assert_eq!(look(&cache, &path).0, fs::read(&path).unwrap());
}

#[test]
fn programs_that_change_nothing_cost_no_pages() {
    let directory = directory();
    if !can_keep(&directory) {
        return;
    }
    let cache = cache_of_kept();
    let (path, bytes) = random_file(&directory, "file", 8192);
    let read = || assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_kept_after(&cache, &path, "a reader", read);
    thread::sleep(TICK);
    cache.evict_all().unwrap();
    assert_kept_after(&cache, &path, "a writer", || drop(writer(&path)));
    // While it is open here.
    assert_kept_after(&cache, &path, "a writer beside a reader", || {
        let file = reader(&cache, &path);
        drop(writer(&path));
        file.is_unchanged();
    });
}

#[test]
fn a_file_that_this_cache_has_written_is_read_again() {
    let directory = directory();
    let cache = cache_of_kept();
    let (path, mut bytes) = random_file(&directory, "file", 3 * PAGE as usize);
    for age in [TICK, Duration::ZERO] {
        thread::sleep(age);
        look(&cache, &path);
        let file = cache.open(&path, &writable()).unwrap();
        file.write_all_at(b"changed", 4000).unwrap();
        drop(file);
        bytes[4000..4007].copy_from_slice(b"changed");
        assert_eq!(look(&cache, &path).0, bytes);
        // Beside a handle that reads.
        let file = reader(&cache, &path);
        let other = cache.open(&path, &writable()).unwrap();
        other.write_all_at(&[7; 4096], 0).unwrap();
        bytes[..4096].fill(7);
        drop((file, other));
        assert_eq!(look(&cache, &path).0, bytes);
        bytes[4000..4007].fill(0);
        fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn an_inode_number_that_is_used_again_is_another_file() {
    let directory = directory();
    let cache = cache_of_kept();
    let path = file_of(&directory, "file", &[0; 4096]);
    let mut numbers = HashSet::new();
    let mut is_reused = false;
    for value in 1..50 {
        look(&cache, &path);
        is_reused |= !numbers.insert(fs::metadata(&path).unwrap().ino());
        // A descriptor would keep the number from being used again.
        assert_eq!(descriptors_of(&path), 0);
        fs::remove_file(&path).unwrap();
        fs::write(&path, [value; 4096]).unwrap();
        File::open(&path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(look(&cache, &path).0, [value; 4096]);
    }
    if !is_reused {
        skip("inode-numbers", "the file system did not use one again");
    }
}

#[test]
fn a_renamed_file_is_found_or_read_again() {
    let directory = directory();
    let cache = cache_of_kept();
    let (path, bytes) = random_file(&directory, "file", 8192);
    look(&cache, &path);
    let renamed = directory.path().join("renamed");
    fs::rename(&path, &renamed).unwrap();
    assert_eq!(look(&cache, &renamed).0, bytes);
    assert!(cache.open(&path, &OpenOptions::new()).is_err());
    let link = directory.path().join("link");
    fs::hard_link(&renamed, &link).unwrap();
    assert_eq!(look(&cache, &link).0, bytes);
    fs::remove_file(&renamed).unwrap();
    assert_eq!(look(&cache, &link).0, bytes);
}

#[test]
fn an_open_with_other_needs_reads_a_closed_file_again() {
    let directory = directory();
    let (path, bytes) = random_file(&directory, "file", 3 * PAGE as usize);
    let cache = cache_of_kept();
    let small = OpenOptions::new().len_max(1 << 30);
    let mut others =
        vec![small.clone().folio_bytes(16 << 10), small.clone().len_max(1 << 31), writable()];
    if files_can_be_mapped() {
        others.push(mappable(small.clone()));
    }
    for other in others {
        for _ in 0..2 {
            drop(read_all(&cache.open(&path, &small).unwrap()));
        }
        let before = cache.stats().reads.misses;
        let file = cache.open(&path, &other).unwrap();
        assert_eq!(read_all(&file), bytes);
        assert!(cache.stats().reads.misses > before, "{other:?}");
    }
    read_all(&cache.open(&path, &small).unwrap());
    assert_eq!(read_all(&cache.open(&path, &small.len_max(1 << 20)).unwrap()), bytes);
}

#[test]
fn files_of_memory_and_without_a_name_are_not_kept() {
    let memory = Path::new("/dev/shm");
    if !rustix::fs::statfs(memory).is_ok_and(|found| found.f_type as u64 == 0x0102_1994) {
        return skip("tmpfs", "/dev/shm is none");
    }
    let directory = tempfile::tempdir_in(memory).unwrap();
    let (path, bytes) = random_file(&directory, "file", 8192);
    let cache = cache_of_kept();
    for _ in 0..2 {
        assert_eq!(look(&cache, &path), (bytes.clone(), 2));
    }
    if has(Feature::FileWatches) {
        let is_told = |text: &String| text.contains("on a file system of type 0x1021994");
        assert!(cache.stats().fallbacks.iter().any(is_told), "{:?}", cache.stats().fallbacks);
    }
}

const ALONE: &str = "BIFOLIO_TEST_KEPT";

/// Without a watch for each file, the file that was closed first gives its own; without any, no
/// file is kept. All else works.
#[test]
fn watches_that_run_out_cost_only_pages() {
    let name = "kept::watches_that_run_out_cost_only_pages";
    let Ok(limit) = std::env::var(ALONE) else {
        for limit in ["0", "3"] {
            let program = std::env::current_exe().unwrap();
            let command = format!(
                "echo {limit} > /proc/sys/user/max_inotify_watches && exec '{}' {name} --exact \
                 --nocapture --test-threads=1",
                program.display()
            );
            let mut child = Command::new("unshare");
            child.args(["--user", "--map-root-user", "sh", "-c", &command]).env(ALONE, limit);
            let Some(output) = attempt(&mut child, "user-namespaces") else { return };
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
        }
        return;
    };
    let directory = directory();
    let files: Vec<_> =
        (0..5).map(|number| random_file(&directory, &number.to_string(), 4096)).collect();
    let cache = cache_of_kept();
    for _ in 0..2 {
        for (path, bytes) in &files {
            assert_eq!(&look(&cache, path).0, bytes);
        }
    }
    match limit.as_str() {
        "0" => assert_eq!(misses(&cache, &files[4].0), 1),
        _ => assert_kept(&cache, &files[4].0, "closed last"),
    }
    let open: Vec<_> = files.iter().map(|(path, _)| reader(&cache, path)).collect();
    assert!(open.iter().zip(&files).all(|(file, (_, bytes))| read_all(file) == *bytes));
    drop(open);
    let fallbacks = cache.stats().fallbacks;
    let is_told = |text: &String| {
        text.contains("fs.inotify.max_user_watches") || text.contains("file-watches")
    };
    assert!(fallbacks.iter().any(is_told), "{fallbacks:?}");
}

#[test]
fn a_file_of_another_user_cannot_be_leased_and_is_not_kept() {
    let directory = directory();
    if !can_keep(&directory) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return skip("root", "gives a file to another user");
    }
    let (path, bytes) = random_file(&directory, "file", 8192);
    std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
    without_root(|| {
        let cache = cache_of_kept();
        for _ in 0..2 {
            assert_eq!(look(&cache, &path), (bytes.clone(), 2));
        }
        let fallbacks = cache.stats().fallbacks;
        assert!(fallbacks.iter().any(|text| text.contains("CAP_LEASE")), "{fallbacks:?}");
    });
    let cache = cache_of_kept();
    assert_kept(&cache, &path, "with the capability");
}

/// Returns the watches of this process.
fn watches() -> usize {
    let of = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let all = fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    all.map(|found| of(found.path()).matches("inotify wd").count()).sum()
}

#[test]
fn at_most_as_many_files_are_kept_as_asked_for() {
    let directory = directory();
    if !can_keep(&directory) {
        return;
    }
    let cache = keeping(10).build().unwrap();
    let files: Vec<_> =
        (0..20).map(|number| random_file(&directory, &number.to_string(), 4000)).collect();
    for (path, _) in &files {
        look(&cache, path);
    }
    let found = files[10..].iter().filter(|(path, _)| misses(&cache, path) == 0).count();
    assert!(found > 5, "{found}");
    assert_eq!(misses(&cache, &files[3].0), 1);
    assert_eq!(misses(&cache, &files[10].0), 1, "closed before the others");
}

#[test]
fn pages_of_closed_files_give_way_to_others() {
    let directory = directory();
    let small: Vec<_> =
        (0..300).map(|number| random_file(&directory, &number.to_string(), 4096)).collect();
    let (path, bytes) = random_file(&directory, "large", 6 << 20);
    let cache = Cache::builder().memory(2 << 20).kept_files(1000).build().unwrap();
    for (path, _) in &small {
        look(&cache, path);
    }
    let large = reader(&cache, &path);
    for _ in 0..3 {
        assert!(read_all(&large) == bytes);
        let memory = cache.stats().memory;
        assert!(memory.used_bytes <= memory.bound_bytes, "{memory:?}");
    }
    // Tables of closed files make room, too.
    let pins: Vec<_> =
        (0..large.len() / PAGE).map_while(|n| large.pin(n * PAGE..(n + 1) * PAGE).ok()).collect();
    assert!(pins.len() > 250, "{} pages pinned: {:?}", pins.len(), cache.stats().memory);
    drop(pins);
    for (path, bytes) in &small {
        assert_eq!(&look(&cache, path).0, bytes);
    }
    cache.set_memory(1 << 20).unwrap();
    cache.close().unwrap();
}

/// Descriptors, watches and memory stay as they are, however often files are opened and closed.
fn check_rounds(rounds: u64) {
    let directory = directory();
    if !can_keep(&directory) {
        return;
    }
    let files: Vec<_> =
        (0..200).map(|number| file_of(&directory, &number.to_string(), &[number; 5000])).collect();
    let cache = Cache::builder().memory(4 << 20).kept_files(64).build().unwrap();
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let resident_kib = || {
        let text = fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let options = OpenOptions::new().len_max(1 << 20);
    let mut after_first = None;
    for round in 0..rounds {
        // Most opens find a kept file.
        let number = if round % 8 == 0 { round / 8 % 200 } else { round % 32 } as usize;
        let file = cache.open(&files[number], &options).unwrap();
        let mut bytes = [0; 100];
        file.read_exact_at(&mut bytes, 4000).unwrap();
        assert_eq!(bytes, [number as u8; 100]);
        if round % 97 == 0 {
            writer(&files[number]).write_all_at(&bytes, 0).unwrap();
        }
        drop(file);
        if round % (rounds / 4) == rounds / 4 - 1 {
            let now = (descriptors(), resident_kib());
            println!("{round}: {} descriptors, {} KiB, {} watches", now.0, now.1, watches());
            let (files, kib) = *after_first.get_or_insert(now);
            assert!(now.0 <= files && now.1 < kib + (4 << 10), "{now:?} {files} {kib}");
            // One for each kept file, and for one that is open.
            assert!(watches() <= 65, "{} watches", watches());
        }
    }
}

#[test]
fn descriptors_and_memory_stay_as_files_are_opened_and_closed() {
    let name = "kept::descriptors_and_memory_stay_as_files_are_opened_and_closed";
    match std::env::var(ALONE) {
        Ok(_) => check_rounds(20_000),
        Err(_) => drop(run_alone(name, ALONE, "1")),
    }
}

#[test]
#[ignore = "a million opens; minutes"]
fn a_million_opens_and_closes_leave_nothing() {
    let name = "kept::a_million_opens_and_closes_leave_nothing";
    match std::env::var(ALONE) {
        Ok(_) => check_rounds(1_000_000),
        Err(_) => {
            let output = run_alone(name, ALONE, "1");
            println!("{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}
