//! A small workload at the end of each limit of the system: it works, or its calls fail with errors
//! that name the limit, and what was made durable is on the disk. `main.rs` has the limits of
//! threads, descriptors, locked memory and data.
//!
//! # Safety
//! Uses up resources of forked processes, which run nothing else.
#![allow(unsafe_code)]

use std::fs;
use std::io::Error;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;

use bifolio::Cache;
use bifolio_testing::skip;
use rustix::process::Resource;

use crate::workload::{Child, MOMENTS, Moment, use_files, use_map};
use crate::{can_map, in_a_child, kernel_flags, limit, open_directory};

/// Runs the workloads in forked processes that are restricted by `restrict` at both moments.
/// Returns the texts of all failures.
fn run_restricted(restrict: impl Fn(&Path) + Copy) -> String {
    let mut texts = String::new();
    for moment in MOMENTS {
        let directory = open_directory();
        let path = directory.path().to_owned();
        let child =
            Child::start(&path, |report| use_files(&path, report, moment, || restrict(&path)));
        let report = child.report;
        assert_eq!(child.end(&path), Ok(()), "{moment:?}");
        texts += &report.text();
    }
    if can_map() {
        texts += &run_map(restrict);
    }
    texts
}

fn run_map(restrict: impl Fn(&Path) + Copy) -> String {
    let directory = open_directory();
    let path = directory.path().to_owned();
    let child = Child::start(&path, |report| {
        use_map(&path, report, Moment::Later, || restrict(&path));
    });
    let report = child.report;
    assert_eq!(child.end(&path), Ok(()));
    report.text()
}

/// Checks that each failure names one of the limits.
#[track_caller]
fn assert_named(texts: &str, limits: &[&str]) {
    for line in texts.lines() {
        assert!(limits.iter().any(|limit| line.contains(limit)), "{line}");
    }
}

/// Has the C library take memory for all threads in advance. Without mappings left it gets no more,
/// and an allocation that cannot fail ends the process. Called before other threads start.
fn stock_malloc() {
    const BYTES: libc::c_int = 16 << 20;
    let settings = [
        (libc::M_ARENA_MAX, 1),
        (libc::M_TOP_PAD, BYTES),
        (libc::M_TRIM_THRESHOLD, 2 * BYTES),
        (libc::M_MMAP_THRESHOLD, BYTES),
    ];
    for (name, value) in settings {
        // SAFETY: any numbers are valid arguments.
        assert_eq!(unsafe { libc::mallopt(name, value) }, 1, "mallopt({name}) failed");
    }
    drop(std::hint::black_box(vec![1_u8; 1 << 20]));
}

/// Uses up the mappings of this process until `spare` are left.
fn use_up_mappings(spare: usize) {
    const PAGE: usize = 4096;
    let most: usize =
        fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let bytes = 2 * most * PAGE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED, "{}", Error::last_os_error());
    let protect = |page: usize, protection| {
        let place = start.cast::<u8>().wrapping_add(page * PAGE).cast();
        // SAFETY: a page of the mapping made above, which is not accessed.
        unsafe { libc::mprotect(place, PAGE, protection) }
    };
    // Every second page becomes a mapping, and divides its neighbours.
    let divided = (1..most).step_by(2).take_while(|page| protect(*page, libc::PROT_READ) == 0);
    let last = divided.last().unwrap();
    assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::ENOMEM));
    for page in (1..=last).rev().step_by(2).take(spare.div_ceil(2)) {
        assert_eq!(protect(page, libc::PROT_NONE), 0);
    }
}

#[test]
fn a_process_without_mappings_left_hangs_nowhere() {
    in_a_child("limits::a_process_without_mappings_left_hangs_nowhere", false, || {
        for spare in [0, 2, 6, 20] {
            let texts = run_restricted(|_| use_up_mappings(spare));
            assert_named(&texts, &["vm.max_map_count"]);
            assert!(spare > 0 || !texts.is_empty());
        }
    });
}

/// A thread that finds room for the mappings of its new thread must not lose it to another.
#[test]
fn threads_that_start_at_once_share_the_last_mappings() {
    const STARTERS: usize = 6;
    in_a_child("limits::threads_that_start_at_once_share_the_last_mappings", false, || {
        for spare in (4..60).step_by(4) {
            let directory = open_directory();
            let child = Child::start(directory.path(), |_report| {
                stock_malloc();
                let begin = Barrier::new(STARTERS + 1);
                thread::scope(|scope| {
                    for _ in 0..STARTERS {
                        scope.spawn(|| {
                            begin.wait();
                            // An error is fine.
                            drop(Cache::builder().memory(256 << 10).build());
                        });
                    }
                    use_up_mappings(spare);
                    begin.wait();
                });
            });
            let status = child.wait();
            assert_eq!(status, Ok(()), "{spare} mappings");
        }
    });
}

/// Each would be four, or their limit would be met by a few thousand files.
#[test]
fn a_file_takes_one_mapping_and_a_mappable_one_two() {
    const FILES: usize = 50;
    in_a_child("limits::a_file_takes_one_mapping_and_a_mappable_one_two", false, || {
        let cache = Cache::builder().memory(8 << 20).build().unwrap();
        let mappings = || fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        for mappable in [false, true] {
            if mappable && !can_map() {
                return;
            }
            let options = crate::support::writable().len_max(1 << 20).mappable(mappable);
            let open = |number| cache.memory_file_with(&format!("{mappable} {number}"), &options);
            let mut files = vec![open(0).unwrap()];
            let before = mappings();
            files.extend((1..=FILES).map(|number| open(number).unwrap()));
            let more = mappings() - before;
            // Of a file in shared memory, the length has a mapping of its own.
            let each = if mappable { 2 } else { 1 } + usize::from(crate::support::is_shared());
            assert!(more <= each * FILES + 10, "mappable: {mappable}: {more} mappings");
        }
    });
}

#[test]
fn little_address_space_is_enough_or_the_limit_is_named() {
    in_a_child("limits::little_address_space_is_enough_or_the_limit_is_named", false, || {
        for more in [4 << 20, 16 << 20, 64 << 20, 256 << 20_u64] {
            let texts = run_restricted(|_| {
                let pages = fs::read_to_string("/proc/self/statm").unwrap();
                let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
                limit(Resource::As, pages * 4096 + more);
            });
            assert_named(&texts, &["RLIMIT_AS"]);
        }
    });
}

#[test]
fn a_limit_of_file_lengths_is_named_and_loses_nothing() {
    in_a_child("limits::a_limit_of_file_lengths_is_named_and_loses_nothing", false, || {
        for bytes in [0, 10 * 4096] {
            let texts = run_restricted(|_| {
                // SAFETY: the default action would end this process.
                unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
                limit(Resource::Fsize, bytes);
            });
            assert!(texts.contains("RLIMIT_FSIZE"), "{texts}");
        }
    });
}

/// The stack that every call of the library needs at most, in an optimized build. (Debug builds use
/// up to twice as much.)
const STACK_BYTES: usize = if cfg!(debug_assertions) { 96 << 10 } else { 48 << 10 };

#[test]
fn a_small_stack_is_enough() {
    in_a_child("limits::a_small_stack_is_enough", false, || {
        let directory = open_directory();
        let path = directory.path().to_owned();
        let child = Child::start(&path, |report| {
            let small = std::thread::Builder::new().stack_size(STACK_BYTES);
            std::thread::scope(|scope| {
                let work = || use_files(&path, report, Moment::Start, || {});
                small.spawn_scoped(scope, work).unwrap().join().unwrap();
            });
        });
        let report = child.report;
        assert_eq!(child.end(&path), Ok(()));
        assert_eq!(report.text(), "");
        if can_map() {
            let child = Child::start(&path, |report| {
                let small = std::thread::Builder::new().stack_size(STACK_BYTES);
                std::thread::scope(|scope| {
                    let work = || use_map(&path, report, Moment::Start, || {});
                    small.spawn_scoped(scope, work).unwrap().join().unwrap();
                });
            });
            let report = child.report;
            assert_eq!(child.end(&path), Ok(()));
            assert_eq!(report.text(), "");
        }
    });
}

/// A control group (version 1) with a limit of memory, and one below it.
struct Group(PathBuf);

impl Group {
    const MOUNT: &str = "/sys/fs/cgroup/memory";

    /// Creates the groups; `None` where there is no version 1, or no right to.
    fn new(name: &str, bytes: u64) -> Option<Self> {
        let directory =
            Path::new(Self::MOUNT).join(format!("bifolio-test-{name}-{}", std::process::id()));
        if !Path::new(Self::MOUNT).join("memory.limit_in_bytes").exists()
            || fs::create_dir_all(directory.join("inner")).is_err()
        {
            skip("control-groups", "no memory groups of version 1, or no right to create one");
            return None;
        }
        fs::write(directory.join("memory.limit_in_bytes"), bytes.to_string()).unwrap();
        Some(Self(directory))
    }

    /// Moves this process to the inner group.
    fn enter(&self) {
        let processes = self.0.join("inner/cgroup.procs");
        fs::write(processes, std::process::id().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Processes that have ended leave their group a little later.
        for name in ["inner", ""] {
            for _ in 0..100 {
                if fs::remove_dir(self.0.join(name)).is_ok() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
    }
}

#[test]
fn memory_that_a_control_group_forbids_is_not_populated() {
    in_a_child("limits::memory_that_a_control_group_forbids_is_not_populated", true, || {
        let Some(group) = Group::new("populate", 32 << 20) else { return };
        let directory = open_directory();
        let path = directory.path().to_owned();
        let child = Child::start(&path, |_| {
            group.enter();
            let build = |bytes| Cache::builder().memory(bytes).prefault(true).build();
            let line = build(64 << 20).unwrap_err().to_string();
            let needles = [
                &*group.0.join("memory.limit_in_bytes").display().to_string(),
                &(32 << 20).to_string(),
            ];
            assert!(needles.iter().all(|needle| line.contains(needle)), "{line}");
            build(8 << 20).unwrap();
        });
        assert_eq!(child.end(&path), Ok(()));
    });
}

#[test]
fn a_small_control_group_is_enough() {
    in_a_child("limits::a_small_control_group_is_enough", true, || {
        let Some(group) = Group::new("small", 16 << 20) else { return };
        let texts = run_restricted(|_| group.enter());
        assert_eq!(texts, "");
    });
}

/// Address space is reserved for the memory of the machine, and more; a core dump of it all would
/// take seconds and gibibytes.
#[test]
fn a_core_dump_has_neither_frames_nor_reservations() {
    in_a_child("limits::a_core_dump_has_neither_frames_nor_reservations", false, || {
        let directory = open_directory();
        let path = directory.path().join("file");
        fs::write(&path, [1; 8192]).unwrap();
        let cache = Cache::builder().memory(4 << 20).swap_directory(directory.path()).build();
        let cache = cache.unwrap();
        let file = cache.open(&path, &crate::support::writable()).unwrap();
        let mut frames = vec![file.pin(0..100).unwrap().as_ptr()];
        let mut maps = Vec::new();
        if can_map() {
            let options = crate::support::writable().mappable(true);
            let mapped = cache.memory_file_with("mapped", &options).unwrap();
            mapped.set_len(8192).unwrap();
            maps.push(mapped.map(0..8192).unwrap());
        }
        frames.extend(maps.iter().map(|map| map.as_ptr()));
        for frame in frames {
            assert!(kernel_flags(frame).contains(" dd"), "{}", kernel_flags(frame));
        }
        check_dump();
    });
}

/// Checks that what a core dump has is small.
fn check_dump() {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut dumped_kibibytes = 0_u64;
    let mut size_kibibytes = 0;
    for line in maps.lines() {
        if let Some(size) = line.strip_prefix("Size:") {
            size_kibibytes = size.trim().trim_end_matches(" kB").parse().unwrap();
        } else if let Some(flags) = line.strip_prefix("VmFlags:") {
            // Files and the vDSO are not dumped, or small.
            let is_dumped = flags.contains(" wr") && !flags.contains(" dd");
            dumped_kibibytes += if is_dumped { size_kibibytes } else { 0 };
        }
    }
    // The heap and the stacks of the threads. The C library reserves 64 MiB without access for
    // the heap of each thread, which is not writable.
    assert!(dumped_kibibytes < 64 << 10, "{dumped_kibibytes} KiB are dumped");
}
