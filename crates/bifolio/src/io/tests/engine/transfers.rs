//! Bytes arrive at the right place, whichever way they are transferred.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use super::super::ways::*;
use super::world::*;
use crate::error::Error;
use crate::io::*;
use crate::sys::probe::Feature;

/// Returns a file on a disk twice: transferred by the engine, and by calling it.
fn files(directory: &tempfile::TempDir) -> [Arc<dyn DirectBacking>; 2] {
    let submitted = read_write(&directory.path().join("submitted")).unwrap();
    let mut called = Faulty::new(read_write(&directory.path().join("called")).unwrap());
    called.is_called = true;
    [Arc::new(submitted), Arc::new(called)]
}

/// Reads pages separately, each with its number as the tag.
fn push_reads(
    queue: &mut Queue<'_, (Frames, u64)>,
    world: &World,
    backing: &Arc<dyn DirectBacking>,
    pages: Range<u64>,
) {
    pages.for_each(|page| push_read(queue, world, backing, page * PAGE as u64, 1, page));
}

#[test]
fn transfers_of_all_shapes_to_several_files_arrive() {
    const PAGES: usize = 300;
    for world in worlds(8) {
        let directory = disk_directory();
        let backings = files(&directory);
        let length = PAGES * PAGE - 777;
        let models = [pattern(length, 1), pattern(length, 2)];
        let mut random = fastrand_like(3);
        let mut queue = world.engine.queue();
        for (backing, model) in backings.iter().zip(&models) {
            let mut start = 0;
            while start < length {
                let end = (start + (1 + random() as usize % 9) * PAGE).min(length);
                push_write(&mut queue, &world, backing, start as u64, &model[start..end], start);
                start = end;
            }
        }
        assert!(queue.is_full());
        for (start, frames, answer) in complete_all(&mut queue) {
            let written = answer.unwrap();
            assert!(written > 0 && written <= frames.len() && start + written <= length);
        }
        for (backing, model) in backings.iter().zip(&models) {
            assert_eq!(backing.len_bytes().unwrap(), length as u64, "{}", world.name);
            for page in (0..PAGES).step_by(7) {
                let pages = 1 + random() as usize % 7;
                let frames = world.frames(pages).scattered();
                let position = (page * PAGE) as u64;
                push_read_into(&mut queue, backing, position, frames, page);
                queue.complete(usize::from(page % 3 == 0), |(frames, at), answer| {
                    check(&world, &frames, model, at, answer);
                });
            }
            queue.complete(usize::MAX, |(frames, at), answer| {
                check(&world, &frames, model, at, answer);
            });
        }
    }
}

fn check(world: &World, frames: &Frames, model: &[u8], page: usize, answer: Result<usize, Error>) {
    let start = page * PAGE;
    let end = model.len().min(start + frames.len());
    assert_eq!(answer.unwrap(), end - start, "{}", world.name);
    assert!(frames.bytes(end - start) == model[start..end], "{}: page {page}", world.name);
}

#[test]
fn a_read_ends_where_the_file_does_in_whichever_piece() {
    for world in worlds(4) {
        let directory = disk_directory();
        for backing in files(&directory) {
            let bytes = pattern(2 * PAGE + 1000, 4);
            let mut queue = world.engine.queue();
            push_write(&mut queue, &world, &backing, 0, &bytes, 0);
            complete_all(&mut queue);
            for position in 0..4 {
                push_read(&mut queue, &world, &backing, position * PAGE as u64, 3, position);
            }
            for (position, frames, answer) in complete_all(&mut queue) {
                let start = position as usize * PAGE;
                let expected = bytes.get(start..).unwrap_or_default();
                assert_eq!(answer.unwrap(), expected.len(), "{}: at {start}", world.name);
                assert!(frames.bytes(expected.len()) == expected);
            }
        }
    }
}

#[test]
fn sixteen_transfers_at_once_take_one_system_call() {
    let Some(world) = world_with(Feature::IoUring, 16) else { return };
    let directory = disk_directory();
    let backing = files(&directory)[0].clone();
    backing.set_len(64 * PAGE as u64).unwrap();
    let mut queue = world.engine.queue();
    push_reads(&mut queue, &world, &backing, 0..16);
    assert_eq!(complete_all(&mut queue).len(), 16);
    let counts = world.engine.counts();
    assert_eq!((counts.ring_transfers, counts.plain_transfers), (16, 0));
    assert_eq!(counts.ring_enters, 1);
    push_reads(&mut queue, &world, &backing, 0..1);
    complete_all(&mut queue);
    let counts = world.engine.counts();
    assert_eq!((counts.ring_enters, counts.plain_transfers), (1, 1), "one alone needs no ring");
}

#[test]
fn transfers_are_in_flight_before_the_caller_waits() {
    for world in worlds(4).iter().filter(|world| world.name != "no threads") {
        let pipe = Arc::new(Pipe::new());
        let backing: Arc<dyn DirectBacking> = Arc::clone(&pipe) as _;
        let mut queue = world.engine.queue();
        for _ in 0..2 {
            push_read(&mut queue, world, &backing, 0, 1, ());
        }
        assert_eq!(queue.waiting(), 2);
        queue.begin();
        assert_eq!((queue.waiting(), queue.in_flight()), (0, 2));
        if world.has_rings() {
            let counts = world.engine.counts();
            assert_eq!((counts.ring_enters, counts.ring_transfers), (1, 2));
        } else {
            while pipe.called() < 2 {
                thread::yield_now();
            }
        }
        pipe.release();
        pipe.release();
        for ((), frames, answer) in complete_all(&mut queue) {
            assert_eq!(answer.unwrap(), PAGE);
            assert_eq!(frames.bytes(PAGE), [7; PAGE]);
        }
    }
}

#[test]
fn an_idle_device_is_fed_before_anything_is_handed_out() {
    let Some(world) = world_with(Feature::IoUring, 16) else { return };
    let directory = disk_directory();
    let backing = files(&directory)[0].clone();
    backing.set_len(64 * PAGE as u64).unwrap();
    let mut queue = world.engine.queue();
    push_reads(&mut queue, &world, &backing, 0..24);
    let under_way = || {
        let counts = world.engine.counts();
        (counts.ring_enters, counts.ring_transfers)
    };
    let mut first = None;
    queue.complete_exactly(16, |_, _| _ = first.get_or_insert_with(under_way));
    assert_eq!((first, queue.in_flight()), (Some((2, 16 + 6)), 8), "the head, then the rest");
    queue.complete_exactly(8, |_, _| assert_eq!(under_way(), (3, 24)));
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn a_busy_device_is_fed_with_the_next_wait() {
    let Some(world) = world_with(Feature::IoUring, 16) else { return };
    let directory = disk_directory();
    let file = files(&directory)[0].clone();
    let pipe = Arc::new(Pipe::new());
    let slow: Arc<dyn DirectBacking> = Arc::clone(&pipe) as _;
    let mut queue = world.engine.queue();
    push_reads(&mut queue, &world, &slow, 0..3);
    push_reads(&mut queue, &world, &file, 3..20);
    queue.complete_exactly(13, |(_, tag), _| assert!((3..16).contains(&tag)));
    let enters = world.engine.counts().ring_enters;
    // Before an assertion can fail: a queue that is dropped waits for them.
    (0..3).for_each(|_| pipe.release());
    assert_eq!((enters, queue.waiting(), queue.in_flight()), (1, 4, 7));
    assert_eq!(complete_all(&mut queue).len(), 7);
}

#[test]
fn without_a_ring_none_is_entered() {
    for world in worlds(4).iter().filter(|world| !world.has_rings()) {
        let directory = disk_directory();
        let backing = files(&directory)[0].clone();
        let mut queue = world.engine.queue();
        push_reads(&mut queue, world, &backing, 0..9);
        assert_eq!(complete_all(&mut queue).len(), 9);
        let counts = world.engine.counts();
        assert_eq!((counts.ring_enters, counts.ring_transfers, counts.plain_transfers), (0, 0, 9));
    }
}

#[test]
fn the_first_to_complete_is_handed_out_first() {
    for world in worlds(4) {
        if world.name == "no threads" {
            continue;
        }
        let directory = disk_directory();
        let file = files(&directory)[0].clone();
        let pipe = Arc::new(Pipe::new());
        let slow: Arc<dyn DirectBacking> = Arc::clone(&pipe) as _;
        let mut queue = world.engine.queue();
        push_read(&mut queue, &world, &slow, 0, 1, "slow");
        push_read(&mut queue, &world, &file, 0, 1, "fast");
        let mut order = Vec::new();
        while order.is_empty() {
            queue.complete(0, |(_, tag), answer| order.push((tag, answer.unwrap())));
        }
        assert_eq!(order, [("fast", 0)], "{}", world.name);
        assert_eq!(queue.in_flight(), 1);
        pipe.release();
        queue.complete(1, |(frames, tag), answer| {
            assert_eq!((tag, answer.unwrap()), ("slow", PAGE));
            assert_eq!(frames.bytes(PAGE), [7; PAGE]);
        });
    }
}

#[test]
fn waiting_transfers_start_when_earlier_ones_complete() {
    for world in worlds(2) {
        let directory = disk_directory();
        let faulty = Arc::new(Faulty::new(read_write(&directory.path().join("f")).unwrap()));
        let backing: Arc<dyn DirectBacking> = Arc::clone(&faulty) as _;
        let mut queue = world.engine.queue();
        for page in 0..5 {
            push_read(&mut queue, &world, &backing, page * PAGE as u64, 1, ());
        }
        let mut handed_out = 0;
        queue.complete(0, |_, _| handed_out += 1);
        // Gives helpers time to complete both; if they do not, the test sees nothing.
        std::thread::sleep(std::time::Duration::from_millis(20));
        queue.complete(5 - handed_out, |_, _| handed_out += 1);
        assert_eq!((handed_out, queue.in_flight()), (5, 0), "{}", world.name);
    }
}

#[test]
fn a_range_past_two_to_the_63_is_an_error_and_not_submitted() {
    for world in worlds(4) {
        let directory = disk_directory();
        let file = files(&directory)[0].clone();
        let mut queue = world.engine.queue();
        let last = (1 << 63) - PAGE as u64;
        push_read(&mut queue, &world, &file, last, 1, true);
        push_read(&mut queue, &world, &file, u64::MAX - 4095, 1, true);
        push_read(&mut queue, &world, &file, 0, 1, false);
        for (is_wrong, _, answer) in complete_all(&mut queue) {
            match answer {
                Ok(count) => assert_eq!((count, is_wrong), (0, false)),
                Err(error) => {
                    assert!(is_wrong, "{}: {error}", world.name);
                    assert!(error.to_string().ends_with("do not end below 2^63"), "{error}");
                }
            }
        }
    }
}
