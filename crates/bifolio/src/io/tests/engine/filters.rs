//! A process that forbids io_uring: before a cache is created, and while it is in use.

use bifolio_testing::filter;
use std::sync::Arc;
use std::thread;

use super::super::ways::*;
use super::world::*;
use crate::io::*;
use crate::sys::probe::{Feature, Features};

#[test]
fn a_filter_at_start_is_found_and_named() {
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        thread::spawn(move || {
            if !filter::refuse(call, libc::EPERM) {
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
    let backing: Arc<dyn DirectBacking> = Arc::new(file);
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
        let filtered = scope.spawn(move || {
            filter::refuse(libc::SYS_io_uring_enter, libc::EPERM).then(|| read(world))
        });
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
