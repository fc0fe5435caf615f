//! The ways in which maps are tested: the threads that serve faults, and the feature that is
//! disabled; and loads and stores.
//!
//! # Safety
//! Offsets are compared with the length of the map. The caller makes sure that the page can be
//! filled: otherwise the process is killed. Only bytes are copied, and no Rust reference to a byte
//! of a map exists.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::AsRawFd;
use std::process::{Command, Output};
use std::sync::atomic::AtomicU64;

use bifolio::{Cache, CacheBuilder, FaultMode, Feature, File, Map, MapMut, OpenOptions};
use bifolio_testing::filter::{self, EQUAL, LOAD, NUMBER_AT, allow, argument_at, fail, step};

use crate::support::{files_can_be_mapped, writable};

/// Threads that serve faults, and the feature that is disabled, if any.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub faults: FaultMode,
    pub masked: Option<Feature>,
}

/// Features that maps can work without.
pub const MASKS: [Feature; 3] =
    [Feature::FaultPoison, Feature::VectoredUnmap, Feature::KernelFaults];

impl Way {
    /// Creates a way with all features of the kernel, whose faults are served by threads.
    pub fn new() -> Self {
        Self { faults: FaultMode::Threads, masked: None }
    }

    pub fn in_thread() -> Self {
        Self { faults: FaultMode::InThread, ..Self::new() }
    }

    pub fn without(feature: Feature) -> Self {
        Self { masked: Some(feature), ..Self::new() }
    }

    pub fn is_in_thread(self) -> bool {
        self.faults == FaultMode::InThread
    }

    /// Returns both ways to serve faults, with all features.
    pub fn whole() -> Vec<Self> {
        skip_all_unless_mapped(vec![Self::new(), Self::in_thread()])
    }

    /// Returns the ways with all features, and those without each feature that maps can work
    /// without.
    pub fn all() -> Vec<Self> {
        let masked = MASKS.map(Self::without);
        let all = [Self::new(), Self::in_thread()];
        skip_all_unless_mapped(all.into_iter().chain(masked).collect())
    }

    /// Returns the ways with all features and without `feature`.
    pub fn with_and_without(feature: Feature) -> Vec<Self> {
        let without = Self::without(feature);
        let in_thread = Self { masked: Some(feature), ..Self::in_thread() };
        skip_all_unless_mapped(vec![Self::new(), without, Self::in_thread(), in_thread])
    }

    /// Returns the way in which a system call waits for a page that is not resident.
    pub fn waiting() -> Vec<Self> {
        skip_all_unless_mapped(vec![Self::new()])
    }

    /// Returns those ways with all features and without `feature`.
    pub fn waiting_with_and_without(feature: Feature) -> Vec<Self> {
        skip_all_unless_mapped(vec![Self::new(), Self::without(feature)])
    }

    pub fn builder(self, memory_bytes: u64) -> CacheBuilder {
        self.mask(Cache::builder().memory(memory_bytes))
    }

    /// Disables the feature in a cache that is to be built.
    pub fn mask(self, builder: CacheBuilder) -> CacheBuilder {
        match self.masked {
            Some(feature) => builder.disable(feature),
            None => builder,
        }
    }

    /// Creates a cache with a swap.
    pub fn swapping(self, memory_bytes: u64) -> Cache {
        self.builder(memory_bytes).swap_directory(env!("CARGO_TARGET_TMPDIR")).build().unwrap()
    }

    /// Returns options to read, write and map.
    pub fn options(self) -> OpenOptions {
        writable().mappable(true).faults(self.faults)
    }

    /// Creates a memory file of `length` zeros.
    pub fn memory_file(self, cache: &Cache, length: u64) -> File {
        let file = cache.memory_file_with("mapped", &self.options()).unwrap();
        file.set_len(length).unwrap();
        file
    }
}

/// Returns no ways where files cannot be mapped.
fn skip_all_unless_mapped(ways: Vec<Way>) -> Vec<Way> {
    if files_can_be_mapped() { ways } else { Vec::new() }
}

/// Either kind of map, and its position in the file.
#[derive(Debug)]
pub enum View {
    Read(Map),
    Write(MapMut),
}

impl View {
    pub fn pointer(&self) -> *const u8 {
        match self {
            Self::Read(map) => map.as_ptr(),
            Self::Write(map) => map.as_ptr(),
        }
    }
}

/// Loads a range of a map, byte by byte.
pub fn load(start: *const u8, range: Range<u64>) -> Vec<u8> {
    let length = (range.end - range.start) as usize;
    let mut bytes = vec![0xEE; length];
    // SAFETY: see the head of the file.
    let source = unsafe { start.add(range.start as usize) };
    // SAFETY: as above; `bytes` is as long, and elsewhere.
    unsafe { source.copy_to_nonoverlapping(bytes.as_mut_ptr(), length) };
    bytes
}

/// Loads one byte, and nothing else of its page.
pub fn touch(start: *const u8, position: u64) -> u8 {
    // SAFETY: see the head of the file.
    let source = unsafe { start.add(position as usize) };
    // SAFETY: as above.
    unsafe { source.read_volatile() }
}

/// Lets the kernel load a byte, which raises no signal. Returns `true` if it could.
pub fn kernel_loads(start: *const u8, position: u64) -> bool {
    let (_read, write) = std::io::pipe().unwrap();
    let source = start.wrapping_add(position as usize);
    // SAFETY: one byte of a map that lives, which the kernel only reads.
    unsafe { libc::write(write.as_raw_fd(), source.cast(), 1) == 1 }
}

/// Stores bytes from `position` on.
pub fn store(start: *mut u8, position: u64, bytes: &[u8]) {
    // SAFETY: see the head of the file.
    let target = unsafe { start.add(position as usize) };
    // SAFETY: as above; `bytes` is elsewhere.
    unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

/// Returns a word of a map, which threads may use at the same time.
pub fn word<'a>(start: *mut u8, position: u64) -> &'a AtomicU64 {
    assert!(position.is_multiple_of(8));
    // SAFETY: see the head of the file; the caller drops it before the map.
    let target = unsafe { start.add(position as usize) }.cast();
    // SAFETY: aligned, as the start of a map of a whole file is, and used only as this type.
    unsafe { AtomicU64::from_ptr(target) }
}

/// An address that other threads may use.
#[derive(Clone, Copy, Debug)]
pub struct Address(pub *mut u8);

// SAFETY: an address; each use of it gives its own reason.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// Runs the test `name` of this binary again, alone in a separate process, with `variable` set to
/// `value`. Returns its exit status in any case.
pub fn run_child(name: &str, variable: &str, value: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(variable, value)
        .output()
        .unwrap()
}

/// Prints the library's log from now on.
pub fn log_to_stderr() {
    struct Printer;
    impl log::Log for Printer {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }
        fn log(&self, record: &log::Record<'_>) {
            // One write: the process may be about to die.
            let line = format!("{}: {}\n", record.level(), record.args());
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        }
        fn flush(&self) {}
    }
    // A second call changes nothing.
    let _ = log::set_logger(&Printer);
    log::set_max_level(log::LevelFilter::Warn);
}

/// Makes the kernel refuse a system call of this process from now on, in all threads and
/// permanently: every call, or those whose second argument is `argument`.
pub fn refuse_calls(call: i64, argument: Option<u32>, errno: i32) {
    let call = call as u32;
    let mut steps = vec![step(LOAD, 0, 0, NUMBER_AT), step(EQUAL, 0, 3, call)];
    match argument {
        Some(argument) => {
            steps.extend([step(LOAD, 0, 0, argument_at(1)), step(EQUAL, 0, 1, argument)]);
        }
        None => steps.extend([step(LOAD, 0, 0, NUMBER_AT), step(EQUAL, 0, 1, call)]),
    }
    steps.extend([fail(errno), allow()]);
    filter::install(steps, libc::SECCOMP_FILTER_FLAG_TSYNC).unwrap();
}
