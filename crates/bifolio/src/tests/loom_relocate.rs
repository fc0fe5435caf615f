//! Moving a folio to other frames (`mapping/relocate.rs`) against readers, lookups and writers.
//!
//! What must hold: the page is never absent, never anybody else's, and no write to it is lost.

use super::world::{OWNER, World, model, model_bounded, spawn};
use crate::folio::FolioId;
use crate::mapping::Entry;
use crate::sync::Ordering;
use std::sync::Arc;

/// What pages 0 and 1 hold.
const BEFORE: u64 = 1;
const AFTER: u64 = 2;
const OTHER_PAGE: u64 = 9;

/// A world of two frames with a folio at page 0.
fn world_with_page_0() -> Arc<World> {
    let world = World::new(2, 0, 1);
    assert!(world.fill(0, Entry::HOLE, BEFORE));
    world
}

/// An optimistic read of page `index`, which holds `value` if it is there.
fn read(world: &World, index: u64, value: u64) {
    let found = world.read(index);
    assert!(found.is_none_or(|words| words == [value, value]), "{found:?}");
}

/// An optimistic reader sees the page's bytes, though its old frame gets others at once.
/// Dies with: an Entry that is READY before the copy; Relaxed in M4.
#[test]
fn loom_relocate_vs_read_of_the_moved_page() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| read(world, 0, BEFORE));
        assert!(world.relocate(0));
        assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
        reader.join().unwrap();
        assert_eq!(world.read(0), Some([BEFORE, BEFORE]));
    });
}

/// An optimistic reader of the page that was in the new frame before does not see the moved one.
/// Dies with: the fence of M3 left out.
#[test]
fn loom_relocate_vs_read_of_the_new_frames_last_page() {
    model(|| {
        let world = world_with_page_0();
        assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
        let reader = spawn(&world, |world| read(world, 1, OTHER_PAGE));
        assert!(world.evict(1));
        assert!(world.relocate(0));
        reader.join().unwrap();
    });
}

/// To other frames and back: the Entry is another one than before.
/// Dies with: `save_versions` left out.
#[test]
fn loom_relocate_there_and_back_moves_the_version_on() {
    model(|| {
        let world = world_with_page_0();
        let before = world.entry(0);
        assert!(world.relocate(0));
        assert!(world.relocate(0));
        let after = world.entry(0);
        assert_eq!(before.frame(), after.frame());
        assert_ne!(before.version(), after.version());
    });
}

/// A lookup always finds the page, in its old frame or its new one; who finds it holds it there.
/// Dies with: a hole between the two Entries; Relaxed in M4; an Entry that is READY before the
/// copy; a freeze that does not count (M2).
#[test]
fn loom_relocate_vs_lookup_the_page_is_never_absent() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| {
            let folio = world.find(0).expect("it only moves");
            assert_eq!((folio.folio().index(), folio.folio().order()), (0, 0));
            world.frame(folio.id()).content.look();
        });
        let moved = world.relocate(0);
        reader.join().unwrap();
        assert_eq!(world.entry(0).folio_id(), FolioId(u32::from(moved)));
        assert!(world.entry(0).is_ready());
        assert_eq!((world.free_frames(), world.mapping.resident_folios()), (1, 1));
        assert_eq!(world.folios.get(world.entry(0).folio_id()).references(), 1);
        assert_eq!(world.folios.get(world.entry(0).folio_id()).owner(), OWNER);
    });
}

/// A write is made before the move, and moved with it, or after it; or there is no move.
/// Dies with: a freeze that does not count (M2).
#[test]
fn loom_relocate_vs_write_no_write_is_lost() {
    model_bounded(3, || {
        let world = world_with_page_0();
        let writer = spawn(&world, |world| world.write(0, AFTER));
        world.relocate(0);
        writer.join().unwrap();
        assert_eq!(world.read(0), Some([AFTER, AFTER]));
    });
}

/// The mark that a reader set before the move is there after it, as after a move that gives up.
/// Dies with: a move that forgets the mark.
#[test]
fn loom_relocate_keeps_the_readers_mark() {
    model(|| {
        let world = world_with_page_0();
        world.mapping.table().mark_referenced(0, world.entry(0));
        assert!(world.relocate(0));
        assert!(world.entry(0).is_referenced());
    });
}

/// A folio of two pages: its second page names the new frames only after the head does
/// (MAPPING-2), and by that page it is found as by its first.
/// Dies with: the other Entries stored before the head's.
#[test]
fn loom_relocate_large_folio_the_head_comes_first() {
    model(|| {
        let world = world_with_large_folio();
        let reader = spawn(&world, |world| {
            let second = world.entry(1);
            let head = world.mapping.table().load(0, Ordering::Relaxed);
            if second.is_folio() && second.folio_id() != FolioId(0) {
                assert_eq!(second.folio_id(), head.folio_id(), "named before its head did");
            }
            let folio = world.find(1).expect("it only moves");
            assert_eq!(folio.folio().index(), 0);
        });
        world.relocate(0);
        reader.join().unwrap();
        assert_eq!(world.entry(1).folio_id(), world.entry(0).folio_id());
    });
}

/// The old frames are gone from the second page before they are from the head (MAPPING-2).
/// Dies with: the other Entries left as they were while the head's is stored.
#[test]
fn loom_relocate_large_folio_the_head_goes_last() {
    model(|| {
        let world = world_with_large_folio();
        let reader = spawn(&world, |world| {
            let head = world.entry(0);
            let second = world.mapping.table().load(1, Ordering::Relaxed);
            if head.folio_id() != FolioId(0) && second.is_folio() {
                assert_eq!(second.folio_id(), head.folio_id(), "outlives its head");
            }
        });
        assert!(world.relocate(0));
        reader.join().unwrap();
    });
}

/// The same for optimistic readers of the second page.
/// Dies with: an Entry of the second page that is READY before the copy; Relaxed in M4.
#[test]
fn loom_relocate_large_folio_vs_read_of_its_second_page() {
    model(|| {
        let world = world_with_large_folio();
        let reader = spawn(&world, |world| read(world, 1, BEFORE));
        assert!(world.relocate(0));
        reader.join().unwrap();
        assert_eq!(world.read(1), Some([BEFORE, BEFORE]));
    });
}

/// A world of four frames with a folio of two at page 0.
fn world_with_large_folio() -> Arc<World> {
    let world = World::new(4, 1, 1);
    assert!(world.fill(0, Entry::HOLE, BEFORE));
    world
}
