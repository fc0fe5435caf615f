//! Runs a small program (`program.rs`) in restricted environments: without privileges, at limits of
//! processes, with forbidden system calls. Each part of it works as elsewhere, by a fallback that
//! `features` names, or is refused with a message that says what to change. It never hangs, panics
//! or is killed.
//!
//! Each environment is set up in a separate process, and ends with it; most need root.
//!
//! # Safety
//! Gives up privileges and resources of the process, which runs only one test.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod calls;
mod descriptors;
mod fallback;
mod fork;
mod limits;
mod posix_locks;
mod program;
#[allow(dead_code)]
#[path = "../maps/setup.rs"]
mod setup;
#[path = "../support/mod.rs"]
mod support;
mod workload;

use bifolio_testing::skip;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use bifolio::{Cache, Feature};
use rustix::pipe::{fcntl_setpipe_size, pipe};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::program::{Answer, Program};
use crate::setup::{refuse_calls, run_child};
use crate::support::{PAGE, files_can_be_mapped, is_shared, report_of, writable};

const VARIABLE: &str = "BIFOLIO_TEST_ENVIRONMENT";
const END: &str = "it has ended well";
/// Seconds after which a process counts as hung and is killed.
const PATIENCE: u32 = 120;

/// Runs `test` in a separate process; `name` is the name of the calling test.
fn in_a_child(name: &str, needs_root: bool, test: impl FnOnce()) {
    if std::env::var(VARIABLE).is_ok() {
        // SAFETY: it only sets a timer, whose signal ends the process.
        unsafe { libc::alarm(PATIENCE) };
        test();
        return println!("{END}");
    }
    if needs_root && !rustix::process::geteuid().is_root() {
        return skip("root", format!("{name} needs root"));
    }
    let output = run_child(name, VARIABLE, "1");
    let (text, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(END), "{name}: {}\n{text}\n{errors}", output.status);
}

/// Returns a directory that any user can write to, on a disk if possible.
fn open_directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(directory.path(), all).unwrap();
    directory
}

/// Continues as a user who has no other processes, pipes, or memory.
fn become_a_user(number: u32) {
    let user = 65_600 + 50 * (std::process::id() % 100_000) + number;
    // SAFETY: it changes what this process may do, in all its threads.
    assert_eq!(unsafe { libc::setgid(user) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setuid(user) }, 0);
}

/// Lets the process read itself in /proc again.
fn become_dumpable() {
    // SAFETY: it only allows others to look at this process.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) }, 0);
}

fn limit(resource: Resource, current: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(current), maximum }).unwrap();
}

/// Checks that the feature is not in use, for a reason that contains `needle`, and that the
/// fallback has a name.
#[track_caller]
fn assert_missing(feature: Feature, needle: &str) {
    let report = report_of(feature);
    assert!(!report.in_use && !report.fallback.is_empty(), "{report:?}");
    assert!(report.reason.contains(needle), "{report:?}");
}

/// Runs each part. Returns its name and result.
fn run(directory: &Path, is_small: bool) -> Vec<(String, Answer)> {
    let program = Program { directory, is_small };
    vec![
        ("files".into(), program.use_files()),
        ("swap".into(), program.use_swap()),
        ("map".into(), program.read_map()),
        ("map_mut".into(), program.write_map()),
    ]
}

/// Checks that every part works except those whose name begins with `refused`, whose messages
/// contain `needles`.
#[track_caller]
fn assert_answers(answers: Vec<(String, Answer)>, refused: &[&str], needles: &[&str]) {
    for (name, answer) in answers {
        match answer {
            Ok(()) if refused.iter().any(|part| name.starts_with(part)) => panic!("{name} works"),
            Ok(()) => {}
            Err(error) => {
                let (is_due, line) =
                    (refused.iter().any(|part| name.starts_with(part)), error.to_string());
                assert!(is_due, "{name}: {line}");
                let says_all = needles.iter().all(|needle| line.contains(needle));
                assert!(says_all && !line.contains('\n'), "{name}: {line}");
            }
        }
    }
}

#[test]
fn all_works_for_a_user_without_privileges() {
    in_a_child("all_works_for_a_user_without_privileges", true, || {
        let directory = open_directory();
        become_a_user(0);
        become_dumpable();
        assert_answers(run(directory.path(), false), mapless(), &[]);
    });
}

/// Returns `true` if files can be mapped in this environment; a refusal is what a test expects.
fn can_map() -> bool {
    report_of(Feature::UserFaults).available
}

/// Returns the features without which maps do not work on this kernel.
fn mapless() -> &'static [&'static str] {
    if can_map() { &[] } else { &["map"] }
}

#[test]
fn a_process_that_changed_its_user_is_told_of_pagemap() {
    in_a_child("a_process_that_changed_its_user_is_told_of_pagemap", true, || {
        if !files_can_be_mapped() {
            return;
        }
        let directory = open_directory();
        become_a_user(0);
        let needles = ["/proc/self/pagemap", "PR_SET_DUMPABLE"];
        assert_missing(Feature::WriteProtectAsync, needles[0]);
        assert_answers(run(directory.path(), false), &["map_mut"], &needles);
    });
}

#[test]
fn few_threads_are_enough_or_the_limit_is_named() {
    in_a_child("few_threads_are_enough_or_the_limit_is_named", true, || {
        let directory = open_directory();
        become_a_user(0);
        become_dumpable();
        for more in [0, 1, 2, 4, 6] {
            let threads = fs::read_dir("/proc/self/task").unwrap().count() as u64;
            limit(Resource::Nproc, threads + more);
            let answers = run(directory.path(), false);
            limit(Resource::Nproc, threads + 1000);
            for (name, answer) in answers {
                let Err(error) = answer else { continue };
                let line = error.to_string();
                assert!(line.contains("RLIMIT_NPROC"), "{more} more: {name}: {line}");
            }
        }
    });
}

#[test]
fn few_descriptors_are_enough_or_the_limit_is_named() {
    in_a_child("few_descriptors_are_enough_or_the_limit_is_named", false, || {
        let directory = open_directory();
        limit(Resource::Nofile, 256);
        assert_answers(run(directory.path(), false), mapless(), &[]);
        let descriptors = fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
        for more in [0, 2, 5, 8, 11] {
            limit(Resource::Nofile, descriptors + more);
            let answers = run(directory.path(), false);
            limit(Resource::Nofile, 256);
            for (name, answer) in answers {
                let Err(error) = answer else { continue };
                let line = error.to_string();
                let is_clear =
                    line.contains("RLIMIT_NOFILE") || line.contains("Too many open files");
                assert!(is_clear && !line.contains("memory"), "{more} more: {name}: {line}");
            }
        }
    });
}

/// Some programs open no further descriptors: maps continue to work.
#[test]
fn faults_are_served_where_no_descriptor_may_be_had() {
    in_a_child("faults_are_served_where_no_descriptor_may_be_had", false, || {
        if !files_can_be_mapped() {
            return;
        }
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file_with("mapped", &writable().mappable(true)).unwrap();
        file.set_len(50 * PAGE).unwrap();
        let mut map = file.map_mut(0..50 * PAGE).unwrap();
        setup::store(map.as_mut_ptr(), 0, b"before");
        let before = getrlimit(Resource::Nofile).current;
        limit(Resource::Nofile, 0);
        for page in 1..50 {
            setup::store(map.as_mut_ptr(), page * PAGE, &[page as u8]);
        }
        limit(Resource::Nofile, before.unwrap());
        assert!((1..50).all(|page| support::read(&file, page * PAGE, 1) == [page as u8]));
    });
}

#[test]
fn all_works_where_no_memory_may_be_locked() {
    in_a_child("all_works_where_no_memory_may_be_locked", true, || {
        let directory = open_directory();
        become_a_user(0);
        become_dumpable();
        limit(Resource::Memlock, 0);
        let ring = report_of(Feature::IoUring);
        assert!(ring.in_use || ring.reason.contains("RLIMIT_MEMLOCK"), "{ring:?}");
        assert_answers(run(directory.path(), false), mapless(), &[]);
    });
}

/// Uses up pipes until this user gets no large one any more.
fn use_up_pipes() -> Vec<(OwnedFd, OwnedFd)> {
    let mut pipes = Vec::new();
    loop {
        let (reader, writer) = pipe().unwrap();
        if fcntl_setpipe_size(&writer, 1 << 20).is_err() {
            return pipes;
        }
        pipes.push((reader, writer));
    }
}

#[test]
fn maps_take_few_descriptors_where_pipes_are_small() {
    in_a_child("maps_take_few_descriptors_where_pipes_are_small", true, || {
        if !files_can_be_mapped() {
            return;
        }
        let directory = open_directory();
        become_a_user(0);
        become_dumpable();
        let _pipes = use_up_pipes();
        assert_missing(Feature::LargePipes, "fs.pipe-user-pages-soft");
        let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        // As much as large pipes would be asked for.
        let cache = Cache::builder().memory(64 << 20).build().unwrap();
        let options = writable().mappable(true);
        let file = cache.memory_file_with("mapped", &options).unwrap();
        file.set_len(PAGE).unwrap();
        let map = file.map_mut(0..PAGE).unwrap();
        assert!(descriptors() - before < 40, "{} descriptors more", descriptors() - before);
        drop((map, file, cache));
        assert_answers(run(directory.path(), false), &[], &[]);
    });
}

/// A forbidden system call, the feature that is then unused, and the parts that do not work.
type Filter = (i64, Feature, &'static [&'static str]);

const FILTERS: [Filter; 5] = [
    (libc::SYS_vmsplice, Feature::WriteProtectAsync, &["map_mut"]),
    (libc::SYS_process_madvise, Feature::VectoredUnmap, &[]),
    (libc::SYS_userfaultfd, Feature::UserFaults, &["map"]),
    (libc::SYS_io_uring_setup, Feature::IoUring, &[]),
    (libc::SYS_io_uring_enter, Feature::IoUring, &[]),
];

fn run_filtered(filter: &Filter) {
    let (call, feature, refused) = filter;
    for errno in [libc::ENOSYS, libc::EPERM] {
        let directory = open_directory();
        // The one that was set last is the one that counts.
        refuse_calls(*call, None, errno);
        assert_missing(*feature, "filter");
        let refused = if can_map() { refused } else { mapless() };
        assert_answers(run(directory.path(), false), refused, &["filter"]);
    }
}

#[test]
fn a_filter_of_vmsplice_is_named() {
    in_a_child("a_filter_of_vmsplice_is_named", false, || run_filtered(&FILTERS[0]));
}

#[test]
fn a_filter_of_process_madvise_is_named() {
    in_a_child("a_filter_of_process_madvise_is_named", false, || run_filtered(&FILTERS[1]));
}

#[test]
fn a_filter_of_userfaultfd_is_named() {
    in_a_child("a_filter_of_userfaultfd_is_named", false, || run_filtered(&FILTERS[2]));
}

#[test]
fn a_filter_of_io_uring_setup_is_named() {
    in_a_child("a_filter_of_io_uring_setup_is_named", false, || run_filtered(&FILTERS[3]));
}

#[test]
fn a_filter_of_io_uring_enter_is_named() {
    in_a_child("a_filter_of_io_uring_enter_is_named", false, || run_filtered(&FILTERS[4]));
}

/// Simulates a system without overcommit, for one process: writable memory counts when it is
/// mapped.
#[test]
fn reserved_memory_that_counts_is_refused_or_kept_small() {
    in_a_child("reserved_memory_that_counts_is_refused_or_kept_small", false, || {
        let directory = open_directory();
        limit(Resource::Data, 256 << 20);
        check_refusal_of_reservations(directory.path());
    });
}

fn check_refusal_of_reservations(directory: &Path) {
    let parts = ["files", "swap", "map"];
    let needles = ["vm.overcommit_memory", "CacheBuilder::"];
    assert_answers(run(directory, false), &parts, &needles);
    assert_answers(run(directory, true), mapless(), &[]);
    if can_map() {
        let cache = Cache::builder().memory(1 << 20).memory_max(1 << 20).build().unwrap();
        let refused = cache.memory_file_with("large", &writable().mappable(true)).map(drop);
        let answers = vec![("map".to_owned(), refused.map_err(Into::into))];
        assert_answers(answers, &["map"], &["vm.overcommit_memory", "OpenOptions::len_max"]);
    }
}

#[test]
fn a_refused_raise_of_len_max_changes_nothing() {
    in_a_child("a_refused_raise_of_len_max_changes_nothing", false, || {
        limit(Resource::Data, 256 << 20);
        // The limit does not count shared memory.
        if !is_shared() {
            check_refusal_of_raises();
        }
    });
}

fn check_refusal_of_raises() {
    let builder = Cache::builder().memory(1 << 20).memory_max(1 << 20);
    let cache = builder.build().unwrap();
    let file = cache.memory_file_with("file", &writable().len_max(8192)).unwrap();
    file.append(&[1; 8000]).unwrap();
    let answers = vec![("raise".to_owned(), file.raise_len_max(1 << 40).map_err(Into::into))];
    assert_answers(answers, &["raise"], &["vm.overcommit_memory", "OpenOptions::len_max"]);
    assert_eq!(file.len_max(), 8192);
    file.append(&[1; 192]).unwrap();
    assert!(file.append(&[1]).is_err());
    file.raise_len_max(1 << 20).unwrap();
    file.append(&[1]).unwrap();
}

#[test]
fn default_reservations_fit_four_gib_of_addresses() {
    in_a_child("default_reservations_fit_four_gib_of_addresses", false, || {
        let directory = open_directory();
        limit(Resource::As, 4 << 30);
        let refused = if can_map() { &[][..] } else { mapless() };
        assert_answers(run(directory.path(), false), refused, &[]);
        let too_much = Cache::builder().memory_max(8 << 30).build().unwrap_err().to_string();
        assert!(too_much.contains("memory_max") && too_much.contains("RLIMIT_AS"), "{too_much}");
    });
}

const OVERCOMMIT: &str = "/proc/sys/vm/overcommit_memory";

/// Restores the setting on drop.
struct Overcommit(String);

impl Drop for Overcommit {
    fn drop(&mut self) {
        fs::write(OVERCOMMIT, &self.0).unwrap();
    }
}

/// Changes the whole machine: others may be refused memory meanwhile.
#[test]
#[ignore = "changes vm.overcommit_memory of the machine while it runs"]
fn reservations_are_refused_where_nothing_is_overcommitted() {
    let directory = open_directory();
    let _before = Overcommit(fs::read_to_string(OVERCOMMIT).unwrap());
    fs::write(OVERCOMMIT, "2").unwrap();
    check_refusal_of_reservations(directory.path());
}

/// Returns the kernel's flags of the mapping at `address`: two letters each.
fn kernel_flags(address: *const u8) -> String {
    let has = |line: &str| {
        let ends = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        let ends = ends.and_then(|(start, end)| Some(number(start)?..number(end)?));
        ends.is_some_and(|range| range.contains(&address.addr()))
    };
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !has(line));
    lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
}

/// A merged page would be copied by the next store: a store during the eviction of the page would
/// go to the copy, and be lost.
#[test]
fn pages_of_maps_are_not_merged_with_others() {
    in_a_child("pages_of_maps_are_not_merged_with_others", false, || {
        // SAFETY: it lets the kernel merge pages of this process that are equal.
        let answer = unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, 1, 0, 0, 0) };
        if answer != 0 {
            return skip("merged-pages", "the kernel merges no pages of a process");
        }
        if !files_can_be_mapped() {
            return;
        }
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file_with("mapped", &writable().mappable(true)).unwrap();
        file.set_len(PAGE).unwrap();
        let flags = kernel_flags(file.map(0..PAGE).unwrap().as_ptr());
        assert!(!flags.contains(" mg"), "{flags}");
    });
}
