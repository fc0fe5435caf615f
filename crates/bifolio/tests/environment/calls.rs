//! Each system call of the library is refused in turn, in a forked process, as a sandbox refuses
//! it: with ENOSYS, EPERM, EACCES and ENOMEM, from the start and after the cache has worked. The
//! workload goes on by a fallback, or its calls fail with errors. It never hangs, panics, is
//! killed, or loses a byte that was made durable.
//!
//! [`CALLS`] lists the calls. A call that is neither there nor in [`EXEMPT`] ends the process of
//! [`every_system_call_is_listed`].
//!
//! # Safety
//! Installs filters and a signal handler in forked processes, which run nothing else.
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

use bifolio::{Cache, Feature, OpenOptions, ReadRequest};
use bifolio_testing::filter::{
    self, AND, EQUAL, LOAD, NUMBER_AT, RETURN, allow, argument_at, fail, step,
};
use tempfile::TempDir;

use crate::support::{PAGE, files_can_be_mapped, has, is_shared};
use crate::workload::{Child, MOMENTS, Moment, Report, UNLISTED_CALL, exit, use_files, use_map};
use crate::{can_map, in_a_child, open_directory};

/// A condition on an argument: its lower half has this value under a mask.
#[derive(Clone, Copy, Debug)]
struct Argument {
    number: u32,
    mask: u32,
    value: u32,
}

/// A system call that is refused.
#[derive(Clone, Copy, Debug)]
struct Call {
    name: &'static str,
    number: i64,
    /// Set if not every call is refused.
    argument: Option<Argument>,
    /// `true` if only maps use the call.
    is_of_maps: bool,
}

const fn listed(name: &'static str, number: i64) -> Call {
    Call { name, number, argument: None, is_of_maps: false }
}

const fn of_maps(name: &'static str, number: i64) -> Call {
    Call { name, number, argument: None, is_of_maps: true }
}

const fn with_argument(name: &'static str, number: i64, argument: Argument) -> Call {
    Call { name, number, argument: Some(argument), is_of_maps: false }
}

const RESERVATION: Argument = Argument { number: 2, mask: u32::MAX, value: 0 };
const SHARED: Argument = Argument { number: 3, mask: 3, value: libc::MAP_SHARED as u32 };
const WRITABLE: Argument = Argument { number: 2, mask: u32::MAX, value: 3 };

/// The calls of the library.
const CALLS: [Call; 51] = [
    listed("open", libc::SYS_open),
    listed("openat", libc::SYS_openat),
    listed("close", libc::SYS_close),
    listed("fcntl", libc::SYS_fcntl),
    listed("fchmod", libc::SYS_fchmod),
    listed("fstat", libc::SYS_fstat),
    listed("newfstatat", libc::SYS_newfstatat),
    listed("statx", libc::SYS_statx),
    listed("fstatfs", libc::SYS_fstatfs),
    listed("faccessat", libc::SYS_faccessat),
    listed("faccessat2", libc::SYS_faccessat2),
    listed("readlink", libc::SYS_readlink),
    listed("unlink", libc::SYS_unlink),
    listed("read", libc::SYS_read),
    listed("write", libc::SYS_write),
    listed("pread64", libc::SYS_pread64),
    listed("pwrite64", libc::SYS_pwrite64),
    listed("preadv", libc::SYS_preadv),
    listed("pwritev", libc::SYS_pwritev),
    listed("fsync", libc::SYS_fsync),
    listed("fdatasync", libc::SYS_fdatasync),
    listed("ftruncate", libc::SYS_ftruncate),
    listed("fallocate", libc::SYS_fallocate),
    listed("lseek", libc::SYS_lseek),
    listed("eventfd2", libc::SYS_eventfd2),
    listed("poll", libc::SYS_poll),
    listed("io_uring_setup", libc::SYS_io_uring_setup),
    listed("io_uring_enter", libc::SYS_io_uring_enter),
    listed("io_uring_register", libc::SYS_io_uring_register),
    // The mappings of the C library are not refused: without memory of its own, a Rust program
    // aborts.
    with_argument("mmap of a reservation", libc::SYS_mmap, RESERVATION),
    with_argument("mmap of a ring", libc::SYS_mmap, SHARED),
    // Threads of the standard library make their guard pages inaccessible, or panic.
    with_argument("mprotect", libc::SYS_mprotect, WRITABLE),
    listed("munmap", libc::SYS_munmap),
    listed("madvise", libc::SYS_madvise),
    listed("munlock", libc::SYS_munlock),
    listed("mincore", libc::SYS_mincore),
    listed("process_madvise", libc::SYS_process_madvise),
    listed("clone3", libc::SYS_clone3),
    listed("sched_getaffinity", libc::SYS_sched_getaffinity),
    listed("prctl", libc::SYS_prctl),
    listed("sysinfo", libc::SYS_sysinfo),
    listed("prlimit64", libc::SYS_prlimit64),
    listed("memfd_create", libc::SYS_memfd_create),
    listed("inotify_init1", libc::SYS_inotify_init1),
    listed("inotify_add_watch", libc::SYS_inotify_add_watch),
    listed("inotify_rm_watch", libc::SYS_inotify_rm_watch),
    of_maps("rt_sigaction", libc::SYS_rt_sigaction),
    of_maps("userfaultfd", libc::SYS_userfaultfd),
    of_maps("ioctl", libc::SYS_ioctl),
    of_maps("pipe2", libc::SYS_pipe2),
    of_maps("vmsplice", libc::SYS_vmsplice),
];

/// Calls of both workloads that matter to maps.
const SHARED_WITH_MAPS: [&str; 6] =
    ["madvise", "process_madvise", "mincore", "fcntl", "read", "pwrite64"];

/// Further calls of maps that wait for messages: refused from the start, files cannot be mapped.
const WAITING: [Call; 3] = [
    of_maps("epoll_create1", libc::SYS_epoll_create1),
    of_maps("epoll_ctl", libc::SYS_epoll_ctl),
    of_maps("epoll_pwait", libc::SYS_epoll_pwait),
];

/// Calls that are not refused, because no program of the C library or of Rust runs without them.
const EXEMPT: [i64; 34] = [
    // Locks, sleeping and the end of threads: the standard library panics, or waits for ever.
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    // The seeds of hash tables: the standard library panics.
    libc::SYS_getrandom,
    // Memory of the C library.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    // Threads of the C library; `clone` is its fallback for `clone3`.
    libc::SYS_clone,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_membarrier,
    libc::SYS_tgkill,
    libc::SYS_kill,
    // Numbers of the process, which cannot fail.
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getcpu,
    // The workload itself.
    libc::SYS_alarm,
    libc::SYS_seccomp,
    libc::SYS_wait4,
    libc::SYS_access,
    libc::SYS_getdents64,
];

const ERRORS: [i32; 4] = [libc::ENOSYS, libc::EPERM, libc::EACCES, libc::ENOMEM];

/// Installs a filter in all threads of this process.
fn install(steps: Vec<libc::sock_filter>) {
    filter::install(steps, libc::SECCOMP_FILTER_FLAG_TSYNC).unwrap();
}

/// Refuses a call from now on.
fn refuse(call: &Call, errno: i32) {
    let refused = call.number as u32;
    install(match call.argument {
        None => vec![step(LOAD, 0, 0, NUMBER_AT), step(EQUAL, 0, 1, refused), fail(errno), allow()],
        Some(Argument { number, mask, value }) => vec![
            step(LOAD, 0, 0, NUMBER_AT),
            step(EQUAL, 0, 4, refused),
            step(LOAD, 0, 0, argument_at(number)),
            step(AND, 0, 0, mask),
            step(EQUAL, 0, 1, value),
            fail(errno),
            allow(),
        ],
    });
}

/// The report for the signal handler.
static UNLISTED: AtomicPtr<Report> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn note_unlisted(
    _: libc::c_int,
    information: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    /// Offset of the number of the system call in the description of SIGSYS.
    const NUMBER_AT: usize = 24;
    let place = information.wrapping_byte_add(NUMBER_AT).cast::<i32>();
    // SAFETY: the kernel's description of the signal, which is longer; aligned for an integer.
    let number = unsafe { place.read() };
    // SAFETY: a report that stays mapped.
    if let Some(report) = unsafe { UNLISTED.load(Ordering::Relaxed).as_ref() } {
        report.unlisted.store(number, Ordering::Relaxed);
    }
    exit(UNLISTED_CALL);
}

/// Ends the process at the first system call that is not listed.
fn allow_listed_only(report: &'static Report) {
    UNLISTED.store(std::ptr::from_ref(report).cast_mut(), Ordering::Relaxed);
    // SAFETY: all zeros is a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note_unlisted as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: a handler that only stores a number and ends the process.
    let installed =
        unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
    assert_eq!(installed, 0);
    let listed = CALLS.iter().chain(&WAITING).map(|call| call.number).chain(EXEMPT);
    let mut steps = vec![step(LOAD, 0, 0, NUMBER_AT)];
    for call in listed {
        steps.push(step(EQUAL, 0, 1, call as u32));
        steps.push(allow());
    }
    steps.push(step(RETURN, 0, 0, libc::SECCOMP_RET_TRAP));
    install(steps);
}

/// Work of a process.
#[derive(Clone, Copy, Debug)]
enum Use {
    Files,
    Map,
}

impl Use {
    fn run(self, directory: &Path, report: &Report, moment: Moment, restrict: impl FnOnce()) {
        match self {
            Self::Files => use_files(directory, report, moment, restrict),
            Self::Map => use_map(directory, report, moment, restrict),
        }
    }
}

#[test]
fn every_system_call_is_listed() {
    in_a_child("calls::every_system_call_is_listed", false, || {
        let mut uses = vec![Use::Files];
        if files_can_be_mapped() {
            uses.push(Use::Map);
        }
        for one in uses {
            let directory = open_directory();
            let path = directory.path().to_owned();
            let child = Child::start(&path, |report| {
                one.run(&path, report, Moment::Start, || allow_listed_only(report));
            });
            let report = child.report;
            assert_eq!(child.end(&path), Ok(()), "{one:?}");
            assert_eq!(report.failures(), 0, "{one:?}: {}", report.text());
            assert!(report.successes() > 10, "{one:?}: {}", report.text());
        }
    });
}

/// A case: the call, the error, the moment, and the work of the process.
type Case = (Call, i32, Moment, Use);

/// Returns `true` if the work of a process succeeds without the call.
fn has_fallback(call: &Call) -> bool {
    WITH_FALLBACK.contains(&call.name) && !(is_shared() && call.name == "memfd_create")
}

/// Calls whose fallback is as good: no call of the cache fails if a sandbox refuses one of them.
const WITH_FALLBACK: [&str; 17] = [
    "close",
    "statx",
    "fstatfs",
    "faccessat2",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "munlock",
    "mincore",
    "process_madvise",
    "sched_getaffinity",
    "sysinfo",
    "prlimit64",
    "memfd_create",
    "inotify_init1",
    "inotify_add_watch",
    "inotify_rm_watch",
];

/// Number of processes at a time.
const PROCESSES: usize = 4;

fn run_cases(cases: &[Case]) {
    let mut wrong = Vec::new();
    let mut fallbacks = 0;
    for group in cases.chunks(PROCESSES) {
        let started: Vec<(TempDir, Child, &Case)> = group
            .iter()
            .map(|case| {
                let directory = open_directory();
                let path = directory.path().to_owned();
                let (call, errno, moment, one) = *case;
                let child = Child::start(&path, |report| {
                    one.run(&path, report, moment, || refuse(&call, errno));
                });
                (directory, child, case)
            })
            .collect();
        for (directory, child, (call, errno, moment, one)) in started {
            let report = child.report;
            let place = format!("{} {errno} {moment:?} {one:?}", call.name);
            match child.end(directory.path()) {
                Ok(()) if report.failures() == 0 => fallbacks += 1,
                Ok(()) if has_fallback(call) && *errno != libc::ENOMEM => {
                    wrong.push(format!("{place}: no fallback: {}", report.text()));
                }
                Ok(()) => println!("{place}: {}", report.text().lines().next().unwrap_or("")),
                Err(why) => wrong.push(format!("{place}: {why}")),
            }
        }
    }
    println!("{} cases, {fallbacks} of them without any error", cases.len());
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

fn cases_of(calls: &[Call], uses: &[Use], moments: &[Moment]) -> Vec<Case> {
    let mut cases = Vec::new();
    for call in calls {
        for errno in ERRORS {
            for moment in moments {
                cases.extend(uses.iter().map(|one| (*call, errno, *moment, *one)));
            }
        }
    }
    cases
}

#[test]
fn files_survive_the_refusal_of_each_system_call() {
    in_a_child("calls::files_survive_the_refusal_of_each_system_call", false, || {
        let calls: Vec<_> = CALLS.into_iter().filter(|call| !call.is_of_maps).collect();
        run_cases(&cases_of(&calls, &[Use::Files], &MOMENTS));
    });
}

#[test]
fn maps_survive_the_refusal_of_each_of_their_system_calls() {
    in_a_child("calls::maps_survive_the_refusal_of_each_of_their_system_calls", false, || {
        if !can_map() {
            return;
        }
        let is_used = |call: &Call| call.is_of_maps || SHARED_WITH_MAPS.contains(&call.name);
        let calls: Vec<_> = CALLS.into_iter().filter(is_used).collect();
        let uses = [Use::Map];
        let mut cases = cases_of(&calls, &uses, &MOMENTS);
        cases.extend(cases_of(&WAITING, &uses, &[Moment::Start]));
        run_cases(&cases);
    });
}

#[test]
fn rings_that_were_given_up_are_listed_as_a_fallback() {
    in_a_child("calls::rings_that_were_given_up_are_listed_as_a_fallback", false, || {
        if !has(Feature::IoUring) {
            return;
        }
        let directory = open_directory();
        let path = directory.path().join("file");
        std::fs::write(&path, [1; 16 * PAGE as usize]).unwrap();
        let cache = Cache::builder().memory(1 << 20).readahead_max(0).build().unwrap();
        let file = cache.open(&path, &OpenOptions::new()).unwrap();
        let is_listed = || cache.stats().fallbacks.iter().any(|line| line.contains("io-uring"));
        assert!(!is_listed());
        let enter = CALLS.into_iter().find(|call| call.name == "io_uring_enter").unwrap();
        refuse(&enter, libc::EPERM);
        let mut buffers = [[0_u8; 8]; 8];
        let mut requests: Vec<_> = buffers
            .iter_mut()
            .zip(0_u64..)
            .map(|(buffer, page)| ReadRequest::new(buffer, 2 * page * PAGE))
            .collect();
        file.read_many(&mut requests).unwrap();
        drop(requests);
        assert_eq!(buffers, [[1; 8]; 8]);
        assert!(is_listed(), "{:?}", cache.stats().fallbacks);
    });
}
