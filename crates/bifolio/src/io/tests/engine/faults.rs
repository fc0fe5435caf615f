//! Attempts that are short, interrupted, refused or fail: the same faults through the ring and
//! through calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::ways::*;
use super::world::*;
use crate::error::Error;
use crate::io::*;

const PAGES: usize = 8;

/// Creates a file of eight pages with faults; `body` gets the answers of reads of 4 + 4 pages, each
/// with its first page.
fn with_faults(
    faults: &[(u64, &[Fault])],
    body: impl Fn(&World, &[u8], u64, &Frames, Result<usize, Error>),
) {
    for world in worlds(4) {
        let directory = disk_directory();
        let faulty = Faulty::new(read_write(&directory.path().join("f")).unwrap());
        let bytes = pattern(PAGES * PAGE, 5);
        write(&faulty.inner, &bytes, 0);
        for (position, faults) in faults {
            faulty.strike(*position, faults);
        }
        let backing: Arc<dyn DirectBacking> = Arc::new(Guarded::new(Arc::new(faulty)).unwrap());
        let mut queue = world.engine.queue();
        push_read(&mut queue, &world, &backing, 0, 4, 0);
        push_read(&mut queue, &world, &backing, 4 * PAGE as u64, 4, 4);
        for (page, frames, answer) in complete_all(&mut queue) {
            body(&world, &bytes, page, &frames, answer);
        }
    }
}

fn assert_whole(world: &World, bytes: &[u8], page: u64, frames: &Frames, count: usize) {
    let start = page as usize * PAGE;
    assert_eq!(count, 4 * PAGE, "{}", world.name);
    assert!(frames.bytes(count) == bytes[start..start + count], "{}: page {page}", world.name);
}

#[test]
fn short_and_interrupted_transfers_are_continued() {
    let faults: [(u64, &[Fault]); 4] = [
        (0, &[Fault::Short(PAGE)]),
        (PAGE as u64, &[Fault::Errno(libc::EINTR), Fault::Short(2 * PAGE)]),
        (4 * PAGE as u64, &[Fault::Errno(libc::EAGAIN), Fault::Errno(libc::EINTR)]),
        (7 * PAGE as u64, &[Fault::Errno(libc::EAGAIN)]),
    ];
    with_faults(&faults, |world, bytes, page, frames, answer| {
        assert_whole(world, bytes, page, frames, answer.unwrap());
    });
}

#[test]
fn a_failed_transfer_reports_where_and_the_others_succeed() {
    let faults: [(u64, &[Fault]); 2] =
        [(0, &[Fault::Short(PAGE)]), (PAGE as u64, &[Fault::Errno(libc::EIO)])];
    with_faults(&faults, |world, bytes, page, frames, answer| {
        if page == 4 {
            return assert_whole(world, bytes, page, frames, answer.unwrap());
        }
        let error = answer.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{}", world.name);
        assert_eq!(error.range(), Some(PAGE as u64..4 * PAGE as u64));
        assert!(error.to_string().contains("read of"), "{error}");
    });
}

#[test]
fn a_panic_of_the_backing_fails_its_transfer() {
    with_faults(&[(0, &[Fault::Panic])], |world, bytes, page, frames, answer| {
        if page == 4 {
            return assert_whole(world, bytes, page, frames, answer.unwrap());
        }
        let error = answer.unwrap_err();
        assert!(error.to_string().contains("the backing panicked"), "{}: {error}", world.name);
        assert_eq!(error.range(), Some(0..4 * PAGE as u64));
    });
}

#[test]
fn a_first_attempt_is_reported_once_by_ring_or_call() {
    for world in worlds(4) {
        let directory = disk_directory();
        let faulty = Arc::new(Faulty::new(read_write(&directory.path().join("f")).unwrap()));
        write(&faulty.inner, &pattern(PAGES * PAGE, 6), 0);
        let backing: Arc<dyn DirectBacking> = Arc::clone(&faulty) as _;
        let mut queue = world.engine.queue();
        for page in 0..PAGES {
            push_read(&mut queue, &world, &backing, (page * PAGE) as u64, 1, ());
        }
        assert_eq!(complete_all(&mut queue).len(), PAGES);
        // Relaxed: a count of the test; all transfers are complete.
        assert_eq!(faulty.attempts.load(Ordering::Relaxed), PAGES, "{}", world.name);
    }
}

#[test]
fn short_or_interrupted_writes_store_everything() {
    for world in worlds(4) {
        let directory = disk_directory();
        let path = directory.path().join("f");
        let faulty = Faulty::new(read_write(&path).unwrap());
        faulty.strike(0, &[Fault::Short(PAGE), Fault::Errno(libc::EINTR)]);
        faulty.strike(4 * PAGE as u64, &[Fault::Errno(libc::EINTR), Fault::Short(2 * PAGE)]);
        let backing: Arc<dyn DirectBacking> = Arc::new(faulty);
        let bytes = pattern(7 * PAGE + 100, 7);
        let mut queue = world.engine.queue();
        push_write(&mut queue, &world, &backing, 0, &bytes[..4 * PAGE], 4 * PAGE);
        let rest = &bytes[4 * PAGE..];
        push_write(&mut queue, &world, &backing, 4 * PAGE as u64, rest, rest.len());
        for (length, _, answer) in complete_all(&mut queue) {
            assert_eq!(answer.unwrap(), length, "{}", world.name);
        }
        assert!(std::fs::read(&path).unwrap() == bytes, "{}", world.name);
    }
}

#[test]
fn a_full_disk_is_its_own_error() {
    let Some(directory) = small_file_system() else { return };
    for world in worlds(4) {
        let path = directory.path().join("f");
        let backing: Arc<dyn DirectBacking> = Arc::new(read_write(&path).unwrap());
        let mut queue = world.engine.queue();
        // One after the other: in flight together, either may take the last page of the disk.
        push_write(&mut queue, &world, &backing, 0, &[1; PAGE], ());
        for ((), _, answer) in complete_all(&mut queue) {
            assert_eq!(answer.unwrap(), PAGE, "{}", world.name);
        }
        push_write(&mut queue, &world, &backing, PAGE as u64, &[2; 64 * PAGE], ());
        for ((), _, answer) in complete_all(&mut queue) {
            let error = answer.unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{}: {error}", world.name);
            assert_eq!(error.range().unwrap().end, 65 * PAGE as u64, "{}", world.name);
        }
    }
}

#[test]
fn after_a_refused_direct_transfer_all_are_buffered() {
    for world in worlds(4) {
        let Some((way, mut file)) = direct_way() else { return };
        // The file system will refuse what this code considers aligned.
        file.assume_alignment(Alignment { memory_bytes: 1, offset_bytes: 1 });
        let file = Arc::new(file);
        let backing = Arc::clone(&file) as Arc<dyn DirectBacking>;
        let bytes = pattern(2000, 8);
        let mut queue = world.engine.queue();
        push_write(&mut queue, &world, &backing, 0, &bytes[..1000], ());
        push_write(&mut queue, &world, &backing, 1000, &bytes[1000..], ());
        for ((), _, answer) in complete_all(&mut queue) {
            assert_eq!(answer.unwrap(), 1000, "{}", world.name);
        }
        let DirectStatus::Buffered { reason } = backing.direct() else { panic!("still direct") };
        assert!(reason.contains("refused a direct write"), "{reason}");
        push_read(&mut queue, &world, &backing, 0, 1, ());
        push_read(&mut queue, &world, &backing, 0, 2, ());
        for ((), frames, answer) in complete_all(&mut queue) {
            assert_eq!(answer.unwrap(), 2000, "{}", world.name);
            assert!(frames.bytes(2000) == bytes);
        }
        assert!(std::fs::read(way.path("f")).unwrap() == bytes);
    }
}

#[test]
fn a_partial_block_is_written_to_its_exact_length() {
    for world in worlds(4) {
        let Some((way, file)) = direct_way() else { return };
        let backing: Arc<dyn DirectBacking> = Arc::new(file);
        let bytes = pattern(6 * PAGE + 5 * 512 + 3, 9);
        let mut queue = world.engine.queue();
        push_write(&mut queue, &world, &backing, 0, &bytes[..4 * PAGE], ());
        push_write(&mut queue, &world, &backing, 4 * PAGE as u64, &bytes[4 * PAGE..], ());
        assert!(complete_all(&mut queue).iter().all(|(_, _, answer)| answer.is_ok()));
        assert_eq!(backing.direct(), DirectStatus::Direct, "{}", world.name);
        assert!(std::fs::read(way.path("f")).unwrap() == bytes, "{}", world.name);
        let cached = cached_pages(&way.path("f"));
        assert!(cached <= 8, "{}: {cached} pages", world.name);
    }
}
