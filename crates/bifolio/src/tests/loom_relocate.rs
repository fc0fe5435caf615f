//! Relocation (`page/relocate.rs`): a folio moves to other frames, against everything else.
//!
//! Page 0 is in frame 0; the new folio takes frame 1.

use super::world::{World, left_at, model, model_bounded, spawn};
use crate::page::Entry;
use std::sync::Arc;

/// Content of page 0, another content that it may have, and that of another page.
const BYTES: u64 = 1;
const AFTER: u64 = 3;
const OTHER_PAGE: u64 = 9;

/// Returns a world with a folio at page 0, one more frame, and a file of six pages.
fn world_with_page_0() -> Arc<World> {
    let world = World::with_pages(2, 6, 0, 1);
    assert!(world.fill(0, Entry::HOLE, BYTES));
    world
}

/// Reads a page once: whole, or `None`.
fn read_whole(world: &World, index: u64) -> Option<u64> {
    world.read(index).map(|[first, second]| {
        assert_eq!(first, second, "torn");
        first
    })
}

/// Checks the end state: page 0 has these bytes, in the new frame if it was moved.
fn check_at_end(world: &World, is_moved: bool, bytes: u64) {
    let entry = world.entry(0);
    assert!(entry.is_ready(), "{entry:?}");
    assert_eq!(entry.frame(), u32::from(is_moved));
    assert_eq!(world.folios.get(entry.folio_id()).references(), 1);
    assert_eq!(read_whole(world, 0), Some(bytes));
    assert_eq!((world.mapping.resident_folios(), world.free_frames()), (1, 1));
}

/// A reader sees the page whole and unchanged, and never finds it missing: the one change of its
/// Entry can fail one read, the next one succeeds.
/// Dies with: RELOCATE-C2 after RELOCATE-C5; Relaxed in RELOCATE-C5; an Entry stored before it is
/// READY; READY cleared before RELOCATE-C4.
#[test]
fn loom_relocate_vs_optimistic_read() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| {
            let read = read_whole(world, 0).or_else(|| read_whole(world, 0));
            assert_eq!(read, Some(BYTES));
        });
        assert!(world.relocate(0), "optimistic readers hold nothing");
        check_at_end(&world, true, BYTES);
        reader.join().unwrap();
    });
}

/// A reader of the previous use of the new frame never sees what is copied there.
/// Dies with: RELOCATE-C1 left out, RELOCATE-C1 after RELOCATE-C2; READ-O3 left out.
#[test]
fn loom_relocate_vs_optimistic_read_of_a_reused_new_frame() {
    model(|| {
        let world = world_with_page_0();
        assert!(world.fill(2, Entry::HOLE, OTHER_PAGE));
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 2) {
                assert_eq!(read, OTHER_PAGE);
            }
        });
        assert!(world.evict(2) && world.relocate(0));
        check_at_end(&world, true, BYTES);
        reader.join().unwrap();
    });
}

/// A reader of the old frame never sees what is stored there next, not even by another page.
/// Dies with: the fence of `insert` or of `read_validated` (READ-O3) left out; Relaxed in
/// RELOCATE-C5.
#[test]
fn loom_relocate_vs_optimistic_read_the_old_frame_is_reused() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 0) {
                assert_eq!(read, BYTES);
            }
        });
        assert!(world.relocate(0));
        assert!(world.fill(2, Entry::HOLE, OTHER_PAGE));
        assert_eq!(world.entry(2).frame(), 0, "the frame of page 0");
        reader.join().unwrap();
    });
}

/// Also holds if the page itself returns to its old frame, with other bytes.
/// Dies with: RELOCATE-C3 left out; the fence of `insert` or READ-O3 left out.
#[test]
fn loom_relocate_vs_optimistic_read_the_old_frame_comes_back() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 0) {
                assert!([BYTES, AFTER].contains(&read), "{read} was never in the page");
            }
        });
        assert!(world.relocate(0) && world.evict(0));
        assert!(world.fill(0, left_at(0), AFTER));
        assert_eq!(world.entry(0).frame(), 0);
        reader.join().unwrap();
    });
}

/// Also holds if the next relocation of the page takes the same frame as the last one.
/// Dies with: RELOCATE-C5 that keeps the version of the new frame; `save_versions` left out in
/// `unlink`, or after its stores; READ-O3 left out.
#[test]
fn loom_relocate_vs_optimistic_read_the_new_frame_comes_back() {
    model(|| {
        let world = world_with_page_0();
        assert!(world.relocate(0));
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 0) {
                assert!([BYTES, AFTER].contains(&read), "{read} was never in the page");
            }
        });
        assert!(world.evict(0));
        assert!(world.fill(0, left_at(0), AFTER) && world.relocate(0));
        assert_eq!(world.entry(0).frame(), 1);
        reader.join().unwrap();
    });
}

/// A folio that a lookup returns stays that of its page while it is referenced: then the
/// relocation fails, and nothing has changed. A lookup always finds a folio.
/// Dies with: RELOCATE-C4 that ignores references; RELOCATE-C5 before RELOCATE-C4; Relaxed in
/// RELOCATE-C5, in `try_freeze` (PIN-B1), in `put_and_test` (PIN-A4).
#[test]
fn loom_relocate_vs_lookup_found_folios_stay() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| {
            let folio = world.find(0).expect("the page is always resident");
            world.frame(folio.id()).content.look();
            let entry = world.entry(0);
            assert_eq!(entry.folio_id(), folio.id(), "no longer the folio of its page");
            assert!(entry.is_ready());
        });
        let is_moved = world.relocate(0);
        reader.join().unwrap();
        check_at_end(&world, is_moved, BYTES);
    });
}

/// A write under the folio lock is never lost, whichever folio it finds.
/// Dies with: the old folio unlocked during RELOCATE-C2; RELOCATE-C4 that ignores references;
/// RELOCATE-C5 before RELOCATE-C4; a new folio without the owner.
#[test]
fn loom_relocate_vs_write() {
    model(|| {
        let world = world_with_page_0();
        let writer = spawn(&world, |world| world.write(0, AFTER));
        let is_moved = world.relocate(0);
        writer.join().unwrap();
        check_at_end(&world, is_moved, AFTER);
    });
}

/// A reader beside a writer never reads older bytes after newer ones.
/// Dies with: what `..._vs_write` dies with; RELOCATE-C2 after RELOCATE-C5; Relaxed in RELOCATE-C5.
#[test]
fn loom_relocate_vs_write_and_read() {
    // Two preemptions: three threads.
    model_bounded(2, || {
        let world = world_with_page_0();
        let writer = spawn(&world, |world| world.write(0, AFTER));
        let reader = spawn(&world, |world| {
            let reads = [(); 2].map(|()| read_whole(world, 0));
            assert_ne!(reads, [Some(AFTER), Some(BYTES)], "read older bytes after newer ones");
        });
        world.relocate(0);
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(read_whole(&world, 0), Some(AFTER));
    });
}

/// A page that is removed, by a punch or a truncation, stays a hole.
/// Dies with: RELOCATE-C4 that ignores references; the old folio unlocked during RELOCATE-C2;
/// RELOCATE-C5 before RELOCATE-C4; a new folio without the owner, a removed one that keeps it.
#[test]
fn loom_relocate_vs_removal() {
    fn remove_while_relocating(remove: impl FnOnce(&World) + Send + 'static) {
        let world = world_with_page_0();
        let remover = spawn(&world, remove);
        world.relocate(0);
        remover.join().unwrap();
        assert_eq!(world.entry(0), Entry::HOLE);
        assert_eq!((world.mapping.resident_folios(), world.free_frames()), (0, 2));
    }
    model(|| remove_while_relocating(|world| world.punch(0)));
    model(|| remove_while_relocating(|world| world.truncate(0)));
    model(|| remove_while_relocating(|world| world.remove(0)));
}

/// Either a relocation or an eviction of the folio comes first; each may fail, and nothing is freed
/// twice or leaked.
/// Dies with: RELOCATE-C5 before RELOCATE-C4; a new folio that is not UPTODATE.
#[test]
fn loom_relocate_vs_evict() {
    model(|| {
        let world = world_with_page_0();
        let evictor = spawn(&world, |world| world.evict(0));
        let is_moved = world.relocate(0);
        if !evictor.join().unwrap() {
            return check_at_end(&world, is_moved, BYTES);
        }
        assert_eq!(world.entry(0), left_at(0));
        assert_eq!((world.mapping.resident_folios(), world.free_frames()), (0, 2));
    });
}

/// Two relocations of a folio take place one after the other, or one fails.
/// Dies with: RELOCATE-C5 before RELOCATE-C4; the old folio freed before RELOCATE-C5.
#[test]
fn loom_relocate_vs_relocate() {
    model(|| {
        let world = World::with_pages(3, 6, 0, 1);
        assert!(world.fill(0, Entry::HOLE, BYTES));
        let other = spawn(&world, |world| world.relocate(0));
        world.relocate(0);
        other.join().unwrap();
        assert_eq!((world.mapping.resident_folios(), world.free_frames()), (1, 2));
        assert_eq!(read_whole(&world, 0), Some(BYTES));
    });
}
