//! R16: the optimistic read (`page/optimistic.rs`) against everything that changes a page.
//!
//! A frame has two words; a change stores them one after the other, Relaxed, and a read loads them
//! so. What a read returns must be one value, and one that the page had.
//!
//! E1 kills no test: the bytes change only after the frame was freed, so after E4, and E4 alone
//! makes O4 differ. E1 keeps readers from starting what an eviction is about to void.

use super::world::{World, model, spawn};
use crate::page::{Entry, Flag, FolioId};
use std::sync::Arc;

/// What pages 0 and 1 hold.
const BEFORE: u64 = 1;
const AFTER: u64 = 2;
const OTHER_PAGE: u64 = 9;

fn world_with_page_0() -> Arc<World> {
    let world = World::new(1, 0, 1);
    assert!(world.fill(0, Entry::HOLE, BEFORE));
    world
}

/// One read of page 0, which is whole or none.
fn read_page_0(world: &World) {
    if let Some([first, second]) = world.read(0) {
        assert_eq!(first, second, "torn");
        assert!([BEFORE, AFTER].contains(&first), "{first} was never in the page");
    }
}

/// Against a write. Dies with: the fence of `read_validated` (O3) or of `begin_write_section` (W2)
/// left out; Relaxed in O1 or in W4; W1 left out; a section that keeps the version.
#[test]
fn loom_optimistic_read_vs_write() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        world.write(0, AFTER);
        reader.join().unwrap();
        assert_eq!(world.read(0), Some([AFTER, AFTER]));
    });
}

/// Against two writes: a version that came and went is seen by its number.
/// Dies with: what `..._vs_write` dies with.
#[test]
fn loom_optimistic_read_vs_two_writes() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        world.write(0, AFTER);
        world.write(0, BEFORE);
        reader.join().unwrap();
    });
}

/// Against eviction and the frame's return as another page.
/// Dies with: the fence of `insert` or of `read_validated` (O3) left out.
#[test]
fn loom_optimistic_read_vs_refill_of_another_page() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        if world.evict(0) {
            assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
        }
        reader.join().unwrap();
    });
}

/// As before, when another thread does the refill: the frame's hand-over carries E4 to it.
/// Dies with: the fence of `insert` or of `read_validated` (O3) left out.
#[test]
fn loom_optimistic_read_vs_refill_by_another_thread() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        let filler = spawn(&world, |world| {
            if world.free_frames() > 0 {
                assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
            }
        });
        assert!(world.evict(0));
        filler.join().unwrap();
        reader.join().unwrap();
    });
}

/// As before, when the bytes come from a third thread, to which the inserter has given the folio.
/// Dies with: the fence of `begin_fill` left out there, or that of `read_validated` (O3).
#[test]
fn loom_optimistic_read_vs_fill_by_a_thread_that_did_not_insert() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        if world.evict(0) {
            let folio = world.allocate(1);
            let locked = folio.lock();
            let for_table = folio.try_clone().expect("few references");
            world.mapping.insert(&world.folios, &locked, for_table, Entry::HOLE).expect("a hole");
            let filler = spawn(&world, |world| {
                world.mapping.begin_fill();
                world.frame(FolioId(0)).store(OTHER_PAGE);
            });
            filler.join().unwrap();
            world.mapping.mark_uptodate(&locked);
        }
        reader.join().unwrap();
    });
}

/// Against eviction and the frame's return as the same page, with other bytes.
/// Dies with: `save_versions` left out; a version that does not move on in `insert`; either fence
/// left out; Relaxed in O1 or in `set_ready` (I3).
#[test]
fn loom_optimistic_read_vs_refill_of_the_same_page() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        if world.evict(0) {
            assert!(world.fill(0, world.entry(0), AFTER));
        }
        reader.join().unwrap();
    });
}

/// Against removal, and the frame's return as another page by way of the last put.
/// Dies with: the fence of `insert` or of `read_validated` (O3) left out.
#[test]
fn loom_optimistic_read_vs_remove_and_refill() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, read_page_0);
        world.remove(0);
        assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
        reader.join().unwrap();
    });
}

/// Against a partial truncate of a folio of two pages, which zeroes behind the new end, from the
/// middle of the first page on, through one section.
/// Dies with: W1, W2 or O3 left out; Relaxed in O1 or in W4; a section that keeps the version.
#[test]
fn loom_optimistic_read_vs_partial_truncate() {
    model(|| {
        let world = World::new(2, 1, 1);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        let reader = spawn(&world, |world| {
            let first = world.read(0);
            assert!([None, Some([BEFORE, BEFORE]), Some([BEFORE, 0])].contains(&first));
            let second = world.read(1);
            assert!([None, Some([BEFORE, BEFORE]), Some([0, 0])].contains(&second), "{second:?}");
        });
        world.zero_from_middle(0);
        reader.join().unwrap();
        assert_eq!(world.read(1), Some([0, 0]));
    });
}

/// Against an eviction that gives up: the page is READY again at the version it had, and reads in
/// between are right or refused. Dies with: a failed eviction that does not bring READY back.
#[test]
fn loom_optimistic_read_vs_failed_evict() {
    model(|| {
        let world = world_with_page_0();
        let _listing = world.folios.get(FolioId(0)).flags.transition_to_dirty();
        let reader = spawn(&world, read_page_0);
        let version = world.entry(0).version();
        assert!(!world.evict(0));
        reader.join().unwrap();
        assert_eq!(world.entry(0).version(), version);
        assert_eq!(world.read(0), Some([BEFORE, BEFORE]));
    });
}

/// A reader that comes once the page is there sees all of the fill.
/// Dies with: Relaxed in `set_ready` (I3) or in O1.
#[test]
fn loom_optimistic_read_vs_first_fill() {
    model(|| {
        let world = World::new(1, 0, 1);
        let reader = spawn(&world, read_page_0);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        reader.join().unwrap();
    });
}

/// The reader's mark may come and go under a read and a write; it never brings back an Entry.
/// Dies with: a mark that is stored instead of its CAS (`exchange_mark`).
#[test]
fn loom_optimistic_read_marks_revive_nothing() {
    model(|| {
        let world = world_with_page_0();
        let reader = spawn(&world, |world| {
            let seen = world.entry(0);
            if seen.is_ready() {
                world.mapping.table().mark_referenced(0, seen);
            }
            world.mapping.table().test_and_clear_referenced(0);
        });
        assert!(world.evict(0));
        reader.join().unwrap();
        assert!(!world.entry(0).is_folio());
    });
}
