//! Shared helpers of the tests in this folder: directories, files, their bytes, and checks of
//! errors.
// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::fmt::Debug;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bifolio::backing::{Backing, DiskFile};
use bifolio::{Cache, CacheBuilder, Error, Feature, FeatureReport, File, OpenOptions, Stats};
use bifolio_testing::{FaultyBacking, MemoryBacking, fill_bytes, skip};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, gettid, set_capabilities};
use tempfile::TempDir;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Folio sizes from the smallest to the largest. The largest needs a cache of [`MEMORY_FOR_ALL`].
pub const FOLIO_SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 2 << 20];
/// Folio sizes that every cache has.
pub const SMALL_FOLIO_SIZES: [u64; 3] = [4 << 10, 16 << 10, 64 << 10];
/// The smallest bound, in bytes, of a cache for folios of every size.
pub const MEMORY_FOR_ALL: u64 = 64 << 20;

/// Returns a directory beside the build, which is on a real disk on any normal machine.
pub fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Creates a file in `directory` that holds `bytes`.
pub fn file_of(directory: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Creates a file in `directory` with `length` random bytes. Returns both.
pub fn random_file(directory: &TempDir, name: &str, length: usize) -> (PathBuf, Vec<u8>) {
    let bytes = fill_bytes(length as u64, length);
    (file_of(directory, name, &bytes), bytes)
}

/// Returns `true` if all caches of this run are in shared memory, which has no fallback, and is no
/// data of the process.
pub fn is_shared() -> bool {
    std::env::var_os("BIFOLIO_TEST_SHARED").is_some()
}

/// Creates a cache with this bound.
pub fn cache_of(memory_bytes: u64) -> Cache {
    Cache::builder().memory(memory_bytes).build().unwrap()
}

/// Returns what the probe of the kernel found about `feature`.
pub fn report_of(feature: Feature) -> FeatureReport {
    bifolio::features().into_iter().find(|report| report.feature == feature).unwrap()
}

/// Returns `true` if the kernel has `feature`; otherwise the test skips what needs it.
#[track_caller]
pub fn has(feature: Feature) -> bool {
    let report = report_of(feature);
    if !report.available {
        skip(feature, report.reason);
    }
    report.available
}

/// Returns `true` if files can be mapped; otherwise the test skips what needs maps.
#[track_caller]
pub fn files_can_be_mapped() -> bool {
    cfg!(feature = "maps") && has(Feature::UserFaults)
}

/// Returns `options` with `mappable`; the same in a build without maps, where
/// [`files_can_be_mapped`] returns `false`.
pub fn mappable(options: OpenOptions) -> OpenOptions {
    #[cfg(feature = "maps")]
    let options = options.mappable(true);
    options
}

/// Returns options to read and write.
pub fn writable() -> OpenOptions {
    OpenOptions::new().read(true).write(true)
}

/// Opens a file to read and write.
pub fn open(cache: &Cache, path: &Path) -> File {
    cache.open(path, &writable()).unwrap()
}

/// Reads up to `length` bytes of the file at `position`.
pub fn read(file: &File, position: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; length];
    let count = file.read_at(&mut bytes, position).unwrap();
    bytes.truncate(count);
    bytes
}

/// Returns all bytes of the file.
pub fn read_all(file: &File) -> Vec<u8> {
    read(file, 0, file.len() as usize)
}

/// Returns the length on the disk, read independently.
pub fn length_on_disk(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

/// Compares without printing megabytes.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8]) {
    let model = bifolio_testing::Model::new(expected.to_vec());
    if let Err(problem) = model.compare(found) {
        panic!("{problem}");
    }
}

/// Returns the error of a call that must fail, after a check that its message is one line and
/// contains `needles`.
#[track_caller]
pub fn error_of<T: Debug>(result: Result<T, Error>, needles: &[&str]) -> Error {
    let error = result.expect_err("this cannot work");
    let line = error.to_string();
    assert!(!line.contains('\n'), "{line:?} is more than a line");
    for needle in needles {
        assert!(line.contains(needle), "{line:?} does not name {needle:?}");
    }
    error
}

/// Syncs a file on a device that works again. The flusher may have tried once more before it did,
/// after the last report: the first sync reports that failure.
#[track_caller]
pub fn sync_after_trouble(file: &File) {
    file.sync_data().or_else(|_| file.sync_data()).unwrap();
}

/// Calls `body` on a thread that has no privileges on files, even if root runs the test.
pub fn without_root<R: Send>(body: impl Send + FnOnce() -> R) -> R {
    thread::scope(|scope| {
        let unprivileged = scope.spawn(|| {
            // The kernel keeps capabilities for each thread.
            let none = CapabilitySet::empty();
            let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, none).unwrap();
            body()
        });
        unprivileged.join().unwrap()
    })
}

/// Runs the test `name` of this binary again, alone in a separate process, with `variable` set to
/// `value`.
pub fn run_alone(name: &str, variable: &str, value: &str) -> Output {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(variable, value)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {value}: {}\n{text}\n{errors}", output.status);
    assert!(text.contains("1 passed"), "{name} is not the name of a test:\n{text}");
    output
}

/// The kinds of transfers of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A file on the disk, by io_uring.
    Ring,
    /// A file on the disk, by threads.
    Threads,
    /// Memory, by threads.
    Memory,
}

/// Storage that can be made to fail, and its initial content.
pub struct Faulty {
    pub way: Way,
    pub backing: Arc<FaultyBacking>,
    pub bytes: Vec<u8>,
    stored: Stored,
}

enum Stored {
    Disk { _directory: TempDir, path: PathBuf },
    Memory(Arc<MemoryBacking>),
}

impl Faulty {
    /// Storage that holds `length` bytes, drawn from `seed`.
    pub fn new(way: Way, length: usize, seed: u64) -> Self {
        let bytes = fill_bytes(seed, length);
        let (backing, stored) = match way {
            Way::Memory => {
                let memory = Arc::new(MemoryBacking::new(bytes.clone()));
                (FaultyBacking::over(memory.clone()), Stored::Memory(memory))
            }
            Way::Ring | Way::Threads => {
                let directory = directory();
                let path = file_of(&directory, &format!("file-{seed}"), &bytes);
                let options = OpenOptions::new().write(true);
                let disk = DiskFile::open(&path, &options).unwrap();
                (FaultyBacking::new(disk), Stored::Disk { _directory: directory, path })
            }
        };
        Self { way, backing: Arc::new(backing), bytes, stored }
    }

    /// Returns a cache builder for this kind of transfers, without background work: neither
    /// readahead nor write-back as long as half of it is clean.
    pub fn builder(&self, memory_bytes: u64) -> CacheBuilder {
        let builder = Cache::builder().memory(memory_bytes).readahead_max(0);
        let builder = builder
            .dirty_age_max(Duration::from_millis(3_600_000))
            .dirty_background(memory_bytes / 2);
        let builder = builder.dirty_max(memory_bytes / 2);
        if self.way == Way::Ring { builder } else { builder.disable(Feature::IoUring) }
    }

    /// Opens the file to read and write.
    pub fn open(&self, cache: &Cache) -> File {
        cache.open_backing(self.backing.clone(), &writable()).unwrap()
    }

    /// Returns the bytes of the file, read independently of the cache.
    pub fn stored(&self) -> Vec<u8> {
        match &self.stored {
            Stored::Disk { path, .. } => std::fs::read(path).unwrap(),
            Stored::Memory(memory) => memory.bytes(),
        }
    }

    /// Changes a bit behind the cache's back.
    pub fn flip_bit(&self, position: u64, bit: u32) {
        match &self.stored {
            Stored::Disk { path, .. } => {
                let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
                let mut byte = [0];
                file.read_exact_at(&mut byte, position).unwrap();
                file.write_all_at(&[byte[0] ^ 1 << bit], position).unwrap();
            }
            Stored::Memory(memory) => memory.flip_bits(position, 1 << bit),
        }
    }

    /// Sets its length to `length` bytes behind the cache's back.
    pub fn set_len_from_outside(&self, length: u64) {
        match &self.stored {
            Stored::Disk { path, .. } => {
                std::fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap();
            }
            Stored::Memory(memory) => memory.set_len(length).unwrap(),
        }
    }
}

/// Runs `test` for each kind of transfers possible here, over new storage of `length` bytes; and
/// checks that this kind was used.
pub fn for_each_way(length: usize, test: impl Fn(&Faulty)) {
    for way in [Way::Ring, Way::Threads, Way::Memory] {
        if way == Way::Ring && !has(Feature::IoUring) {
            continue;
        }
        let faulty = Faulty::new(way, length, 1);
        test(&faulty);
        let submitted = faulty.backing.submitted();
        assert_eq!(submitted > 0, way == Way::Ring, "{way:?}: {submitted} by io_uring");
    }
}

/// Waits for an effect of other threads.
#[track_caller]
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    wait_for(what, &is_so, |is_so| *is_so);
}

/// A call on another thread, to find out whether that thread sleeps in the kernel, where it must
/// wait.
#[derive(Default)]
pub struct ThreadState {
    /// Kernel thread id, 0 before the call.
    number: AtomicI32,
    has_returned: AtomicBool,
}

impl ThreadState {
    /// Calls `body` on the calling thread, whose state is followed meanwhile.
    pub fn follow<R>(&self, body: impl FnOnce() -> R) -> R {
        self.number.store(gettid().as_raw_nonzero().get(), Ordering::Release);
        let result = body();
        self.has_returned.store(true, Ordering::Release);
        result
    }

    /// Waits until the call sleeps.
    ///
    /// # Panics
    /// If the call has returned.
    #[track_caller]
    pub fn wait_until_asleep(&self) {
        wait_until("the thread sleeps", || {
            let number = self.number.load(Ordering::Acquire);
            assert!(!self.has_returned.load(Ordering::Acquire), "the call waits for nothing");
            let state = fs::read_to_string(format!("/proc/self/task/{number}/stat"));
            number > 0 && state.is_ok_and(|state| state.contains(") S "))
        });
    }
}

/// Waits until the statistics fulfil a condition. Returns them.
#[track_caller]
pub fn wait_for_stats(cache: &Cache, what: &str, is_so: impl Fn(&Stats) -> bool) -> Stats {
    wait_for(what, || cache.stats(), is_so)
}

#[track_caller]
fn wait_for<T: Debug>(what: &str, look: impl Fn() -> T, is_it: impl Fn(&T) -> bool) -> T {
    let begun = Instant::now();
    loop {
        let seen = look();
        if is_it(&seen) {
            return seen;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}: not in 30 seconds: {seen:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Calls `body` while the process can open only `left` more descriptors: for a test that runs
/// alone.
pub fn with_descriptors_left<R>(left: usize, body: impl FnOnce() -> R) -> R {
    let mut all = Vec::new();
    let before = getrlimit(Resource::Nofile);
    // More than are open, so that few have to be taken.
    let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = Rlimit { current: Some(open + 64), ..before };
    setrlimit(Resource::Nofile, limit).unwrap();
    while let Ok(file) = fs::File::open("/dev/null") {
        all.push(file);
    }
    all.truncate(all.len() - left);
    let result = body();
    drop(all);
    setrlimit(Resource::Nofile, before).unwrap();
    result
}

/// Returns the error of the library that caused another.
pub fn cause_of(error: &Error) -> &Error {
    let cause = std::error::Error::source(error).expect("a cause");
    cause.downcast_ref().expect("an error of the library")
}

/// Returns the error number behind an error of the library.
pub fn errno_of(error: &Error) -> Option<i32> {
    let first: &dyn std::error::Error = error;
    let mut causes = std::iter::successors(Some(first), |error| error.source());
    causes.find_map(|error| error.downcast_ref::<std::io::Error>()?.raw_os_error())
}
