//! A process that forbids io_uring: before a cache is created, and while it is in use.
//!
//! # Safety
//! Installs a seccomp filter on one thread, which ends with its test.
#![allow(unsafe_code)]

use bifolio_testing::skip;
use std::sync::Arc;
use std::thread;

use super::super::ways::*;
use super::world::*;
use crate::io::*;
use crate::sys::probe::{Feature, Features};

/// Makes the system call `number` fail with EPERM on this thread.
fn forbid(number: libc::c_long) -> bool {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let give = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        line(load, 0, 0, 0),
        line(jump, 0, 1, number as u32),
        line(give, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        line(give, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: plain numbers; it only removes privileges of this thread.
    let gives_up_rights = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: the program has the stated length, and outlives the call.
    let answer =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if gives_up_rights != 0 || answer != 0 {
        skip("seccomp", std::io::Error::last_os_error());
    }
    gives_up_rights == 0 && answer == 0
}

#[test]
fn a_filter_at_start_is_found_and_named() {
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        thread::spawn(move || {
            if !forbid(call) {
                return;
            }
            let features = Features::probe(&[]);
            assert!(!features.has(Feature::IoUring));
            let reports = features.reports();
            let report = reports.iter().find(|report| report.feature == Feature::IoUring).unwrap();
            assert!(report.reason.contains("seccomp"), "{}", report.reason);
        })
        .join()
        .unwrap();
    }
}

#[test]
fn a_later_filter_disables_the_rings_and_fails_no_transfer() {
    let Some(world) = world_with(Feature::IoUring, 4) else { return };
    let directory = disk_directory();
    let file = read_write(&directory.path().join("f")).unwrap();
    let bytes = pattern(8 * PAGE, 1);
    write(&file, &bytes, 0);
    let backing: Arc<dyn Backing> = Arc::new(file);
    let read = |world: &World| {
        let mut queue = world.engine.queue();
        for page in 0..8 {
            push_read(&mut queue, world, &backing, page * PAGE as u64, 1, page as usize * PAGE);
        }
        for (start, frames, answer) in complete_all(&mut queue) {
            assert!(frames.bytes(answer.unwrap()) == bytes[start..start + PAGE]);
        }
    };
    read(&world);
    let by_ring = world.engine.counts();
    assert_eq!((by_ring.ring_transfers, by_ring.plain_transfers), (8, 0));
    thread::scope(|scope| {
        let (world, read) = (&world, &read);
        let filtered = scope.spawn(move || forbid(libc::SYS_io_uring_enter).then(|| read(world)));
        if filtered.join().unwrap().is_none() {
            return;
        }
        let counts = world.engine.counts();
        assert_eq!(counts.plain_transfers, 8);
        // Rings are not used again, not even by threads without a filter.
        read(world);
        assert_eq!(world.engine.counts().ring_enters, counts.ring_enters);
        assert_eq!(world.engine.counts().plain_transfers, 16);
    });
}
