//! What is registered is let go in time: files when they are closed, chunks before their pages go.
//!
//! Where rings or their tables cannot be had, these tests say so and pass.

use std::fs;
use std::sync::Arc;
use std::thread;

use super::super::ways::*;
use super::world::*;
use crate::io::*;
use crate::memory::{CHUNK_BYTES, Purpose};
use crate::sys::probe::Feature;

/// Reads the first page twice, by the ring.
fn read_by_ring(world: &World, backing: &Arc<dyn Backing>) -> Vec<u8> {
    // On a thread of its own: the caller may have a queue with transfers in flight (IO-5).
    thread::scope(|scope| scope.spawn(|| read_by_ring_here(world, backing)).join().unwrap())
}

fn read_by_ring_here(world: &World, backing: &Arc<dyn Backing>) -> Vec<u8> {
    let mut queue = world.engine.queue();
    let before = world.engine.counts().ring_transfers;
    push_read(&mut queue, world, backing, 0, 1, ());
    push_read(&mut queue, world, backing, 0, 1, ());
    let (_, frames, answer) = complete_all(&mut queue).swap_remove(0);
    assert_eq!(world.engine.counts().ring_transfers, before + 2);
    frames.bytes(answer.unwrap())
}

#[test]
fn a_closed_file_is_closed_in_every_ring() {
    let Some(world) = world_with(Feature::RegisteredFiles, 4) else { return };
    let Some(directory) = small_file_system() else { return };
    for round in 0..3 {
        // Fifteen of the sixteen pages there are: the next round needs them back.
        let path = directory.path().join(format!("f{round}"));
        fs::write(&path, vec![round; 15 * PAGE]).unwrap();
        let backing = world.engine.register(Arc::new(read_write_kept(&path)));
        assert_eq!(read_by_ring(&world, &backing), [round; PAGE]);
        assert!(world.engine.registered_files() > 0);
        fs::remove_file(&path).unwrap();
        drop(backing);
        assert_eq!(world.engine.registered_files(), 0);
    }
}

#[test]
fn a_slot_that_changes_hands_never_shows_the_old_file() {
    let Some(world) = world_with(Feature::RegisteredFiles, 4) else { return };
    let directory = disk_directory();
    for round in 0..5 {
        let path = directory.path().join(format!("f{round}"));
        fs::write(&path, [round; PAGE]).unwrap();
        // The same slot, and most likely descriptors of the same numbers, each time.
        let backing = world.engine.register(Arc::new(read_write_kept(&path)));
        assert_eq!(read_by_ring(&world, &backing), [round; PAGE]);
    }
}

#[test]
fn more_files_than_slots_can_be_registered() {
    let Some(world) = world_with(Feature::RegisteredFiles, 4) else { return };
    let directory = disk_directory();
    let path = directory.path().join("f");
    fs::write(&path, [9; PAGE]).unwrap();
    let file: Arc<dyn Backing> = Arc::new(read_write_kept(&path));
    let registered: Vec<_> = (0..1030).map(|_| world.engine.register(Arc::clone(&file))).collect();
    assert_eq!(read_by_ring(&world, &registered[1029]), [9; PAGE]);
    assert_eq!(world.engine.registered_files(), 0);
    assert_eq!(read_by_ring(&world, &registered[0]), [9; PAGE]);
    assert_eq!(world.engine.registered_files(), 1);
    drop(registered);
    let again = world.engine.register(file);
    assert_eq!(read_by_ring(&world, &again), [9; PAGE]);
    assert_eq!(world.engine.registered_files(), 1);
}

fn read_write_kept(path: &std::path::Path) -> DiskFile {
    let options = DiskOptions { read: true, write: true, ..DiskOptions::default() };
    DiskFile::open(path, &options, &crate::sys::probe::Features::probe(&[])).unwrap()
}

/// A file whose pages hold the number given.
fn file_of(directory: &tempfile::TempDir, number: u8) -> Arc<dyn Backing> {
    let path = directory.path().join(format!("f{number}"));
    fs::write(&path, [number; PAGE]).unwrap();
    Arc::new(read_write_kept(&path))
}

#[test]
fn a_chunk_that_goes_and_comes_back_is_read_into_its_new_pages() {
    let Some(world) = world_with(Feature::RegisteredBuffers, 4) else { return };
    let directory = disk_directory();
    for number in 1..4 {
        let file = file_of(&directory, number);
        assert_eq!(read_by_ring(&world, &file), [number; PAGE]);
        assert_eq!(world.engine.registered_chunks(), 1, "the tests of this file test something");
        let evacuation = world.arena.begin_evacuation(Purpose::Vacate, &[]).unwrap();
        assert!(world.arena.finish_evacuation(&evacuation, Purpose::Vacate), "nothing is in use");
        assert_eq!(world.arena.usage().frame_bytes, 0);
        assert_eq!(world.engine.registered_chunks(), 0);
    }
}

#[test]
fn a_slot_that_goes_and_comes_back_is_read_into_its_new_pages() {
    let Some(world) = world_with(Feature::RegisteredBuffers, 4) else { return };
    let directory = disk_directory();
    let kept = world.frames(1);
    assert_eq!(read_by_ring(&world, &file_of(&directory, 1)), [1; PAGE]);
    assert_eq!(world.engine.registered_chunks(), 1);
    // The lowest free page: the one that was just read into.
    assert_eq!(world.arena.retire_pages(1), 1);
    assert_eq!(world.engine.registered_chunks(), 0);
    assert_eq!(read_by_ring(&world, &file_of(&directory, 2)), [2; PAGE]);
    assert_eq!(world.engine.registered_chunks(), 0, "a chunk with a hole would fill it");
    assert_eq!(world.arena.usage().frame_bytes, CHUNK_BYTES - PAGE as u64);
    // Everything else goes, up to the bound, so that the retired page must come back.
    world.arena.set_bound(world.arena.usage().used_bytes + PAGE as u64);
    let all = world.frames(CHUNK_BYTES as usize / PAGE - 1);
    assert_eq!(world.arena.usage().frame_bytes, CHUNK_BYTES);
    drop(all);
    for number in 3..6 {
        assert_eq!(read_by_ring(&world, &file_of(&directory, number)), [number; PAGE]);
        assert_eq!(world.engine.registered_chunks(), 1, "the chunk is whole again");
    }
    drop(kept);
}

#[test]
fn a_chunk_that_lacks_pages_is_not_registered_and_not_filled() {
    let Some(world) = world_with(Feature::RegisteredBuffers, 4) else { return };
    let directory = disk_directory();
    world.arena.set_bound(1 << 20);
    assert_eq!(read_by_ring(&world, &file_of(&directory, 1)), [1; PAGE]);
    assert!(world.arena.usage().frame_bytes < CHUNK_BYTES);
    assert_eq!(world.engine.registered_chunks(), 0);
}

#[test]
fn a_chunk_is_let_go_while_another_ring_works() {
    let Some(world) = world_with(Feature::RegisteredBuffers, 4) else { return };
    let directory = disk_directory();
    let file = file_of(&directory, 1);
    let pipe = Arc::new(Pipe::new());
    let slow: Arc<dyn Backing> = Arc::clone(&pipe) as _;
    let mut queue = world.engine.queue();
    push_read(&mut queue, &world, &slow, 0, 1, ());
    push_read(&mut queue, &world, &slow, 0, 1, ());
    queue.complete(0, |_, _| panic!("nothing was written to the pipe"));
    assert_eq!(read_by_ring(&world, &file), [1; PAGE]);
    assert_eq!(world.engine.registered_chunks(), 2, "one chunk in two rings");
    assert_eq!(world.arena.retire_pages(1), 1);
    assert_eq!(world.engine.registered_chunks(), 0);
    assert_eq!(read_by_ring(&world, &file), [1; PAGE]);
    pipe.release();
    pipe.release();
    for ((), frames, answer) in complete_all(&mut queue) {
        assert_eq!(answer.unwrap(), PAGE);
        assert_eq!(frames.bytes(PAGE), [7; PAGE]);
    }
}

#[test]
fn a_chunk_let_go_before_submission_costs_another_call() {
    let Some(world) = world_with(Feature::RegisteredBuffers, 4) else { return };
    let directory = disk_directory();
    let file = file_of(&directory, 5);
    assert_eq!(read_by_ring(&world, &file), [5; PAGE]);
    let mut queue = world.engine.queue();
    for tag in ["first", "second"] {
        push_read(&mut queue, &world, &file, 0, 1, tag);
    }
    // Both are complete, and a panic keeps the second from being handed out.
    let handing_out = std::panic::AssertUnwindSafe(|| {
        queue.complete(2, |_, _| std::panic::resume_unwind(Box::new("no more")));
    });
    assert!(std::panic::catch_unwind(handing_out).is_err());
    for tag in ["third", "fourth"] {
        push_read(&mut queue, &world, &file, 0, 1, tag);
    }
    // The two are pushed, the second is handed out, and only then is the kernel entered.
    let mut tags = Vec::new();
    queue.complete(3, |(frames, tag), answer| {
        if tags.is_empty() {
            assert_eq!((tag, world.engine.registered_chunks()), ("second", 1));
            assert_eq!(world.arena.retire_pages(1), 1);
        }
        assert_eq!(answer.unwrap(), PAGE);
        assert_eq!(frames.bytes(PAGE), [5; PAGE]);
        tags.push(tag);
    });
    assert_eq!((tags.len(), world.engine.registered_chunks()), (3, 0));
}
