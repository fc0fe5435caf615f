//! Collapse (`page/collapse.rs`): two folios become one, against everything else.
//!
//! Pages 0 and 1 are in frames 0 and 1; the new folio takes frames 2 and 3.

use super::world::{World, left_at, model, model_bounded, spawn};
use crate::page::{Entry, FolioId, Lookup};
use std::sync::Arc;

/// Contents of pages 0 and 1, and another content that a page may have.
const BYTES: [u64; 2] = [1, 2];
const AFTER: u64 = 3;
const OTHER_PAGE: u64 = 9;

/// Returns a world with folios at pages 0 and 1, two more frames, and a file of six pages.
fn world_with_two_folios() -> Arc<World> {
    let world = World::with_pages(4, 6, 0, 1);
    fill_two(&world, BYTES);
    world
}

fn fill_two(world: &World, values: [u64; 2]) {
    for (index, value) in (0..).zip(values) {
        assert!(world.fill(index, world.entry(index), value));
    }
}

/// Reads a page once: whole, or `None`.
fn read_whole(world: &World, index: u64) -> Option<u64> {
    world.read(index).map(|[first, second]| {
        assert_eq!(first, second, "torn");
        first
    })
}

/// Checks the end state: everything collapsed, or nothing, with these bytes.
fn check_at_end(world: &World, collapsed: bool, bytes: [u64; 2]) {
    let frames = if collapsed { [2, 3] } else { [0, 1] };
    for index in 0..2 {
        let entry = world.entry(index);
        assert!(entry.is_ready(), "{entry:?}");
        assert_eq!(entry.frame(), frames[index as usize]);
        assert_eq!(entry.order(), u8::from(collapsed));
        assert_eq!(world.folios.get(entry.folio_id()).references(), 1);
        assert_eq!(read_whole(world, index), Some(bytes[index as usize]));
    }
    assert_eq!(world.mapping.resident_folios(), if collapsed { 1 } else { 2 });
    assert_eq!(world.free_frames(), 2);
}

/// A reader sees each page whole and unchanged, and never finds it missing: the one change of its
/// Entry can fail one read, the next one succeeds.
/// Dies with: COLLAPSE-C2 after COLLAPSE-C5; Relaxed in COLLAPSE-C5; Entries stored before they are
/// READY; READY cleared before COLLAPSE-C4.
#[test]
fn loom_collapse_vs_optimistic_read() {
    model(|| {
        let world = world_with_two_folios();
        let reader = spawn(&world, |world| {
            for index in 0..2 {
                let read = read_whole(world, index).or_else(|| read_whole(world, index));
                assert_eq!(read, Some(BYTES[index as usize]), "page {index}");
            }
        });
        assert!(world.collapse(0, 1), "optimistic readers hold nothing");
        check_at_end(&world, true, BYTES);
        reader.join().unwrap();
    });
}

/// A reader of the previous use of a new frame never sees what is copied there.
/// Dies with: COLLAPSE-C1 left out, COLLAPSE-C1 after COLLAPSE-C2; READ-O3 left out.
#[test]
fn loom_collapse_vs_optimistic_read_of_a_reused_new_frame() {
    model(|| {
        let world = World::with_pages(4, 6, 0, 1);
        fill_two(&world, BYTES);
        assert!(world.fill(2, Entry::HOLE, OTHER_PAGE));
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 2) {
                assert_eq!(read, OTHER_PAGE);
            }
        });
        assert!(world.evict(2) && world.collapse(0, 1));
        check_at_end(&world, true, BYTES);
        reader.join().unwrap();
    });
}

/// A reader of an old frame never sees what is stored there next, not even by another page.
/// Dies with: the fence of `insert` or of `read_validated` (READ-O3) left out; Relaxed in
/// COLLAPSE-C5.
#[test]
fn loom_collapse_vs_optimistic_read_old_frames_are_reused() {
    model(|| {
        let world = world_with_two_folios();
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 0) {
                assert_eq!(read, BYTES[0]);
            }
        });
        assert!(world.collapse(0, 1));
        assert!(world.fill(2, Entry::HOLE, OTHER_PAGE));
        assert_eq!(world.entry(2).frame(), 0, "the frame of page 0");
        reader.join().unwrap();
    });
}

/// Also holds if the page itself returns to its old frame, with other bytes.
/// Dies with: COLLAPSE-C3 left out; the fence of `insert` or READ-O3 left out.
#[test]
fn loom_collapse_vs_optimistic_read_old_frames_come_back() {
    model(|| {
        let world = world_with_two_folios();
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 0) {
                assert!([BYTES[0], AFTER].contains(&read), "{read} was never in the page");
            }
        });
        assert!(world.collapse(0, 1) && world.evict(0));
        fill_two(&world, [AFTER; 2]);
        assert_eq!(world.entry(0).frame(), 0);
        reader.join().unwrap();
    });
}

/// Also holds if the next collapse of the pages takes the same frames as the last one.
/// Dies with: COLLAPSE-C5 that keeps the version of the new frame; `save_versions` left out in
/// `unlink`, or after its stores; READ-O3 left out.
#[test]
fn loom_collapse_vs_optimistic_read_new_frames_come_back() {
    model(|| {
        let world = world_with_two_folios();
        assert!(world.collapse(0, 1));
        let reader = spawn(&world, |world| {
            if let Some(read) = read_whole(world, 0) {
                assert!([BYTES[0], AFTER].contains(&read), "{read} was never in the page");
            }
        });
        assert!(world.evict(0));
        fill_two(&world, [AFTER; 2]);
        assert!(world.collapse(0, 1));
        assert_eq!(world.entry(0).frame(), 2);
        reader.join().unwrap();
    });
}

/// A folio that a lookup returns stays that of its page while it is referenced: then the collapse
/// fails, and nothing has changed. A lookup always finds a folio.
/// Dies with: COLLAPSE-C4 that ignores references; COLLAPSE-C5 before COLLAPSE-C4; a failed
/// COLLAPSE-C4 that does not unfreeze; Relaxed in COLLAPSE-C5, in `try_freeze` (PIN-B1), in
/// `put_and_test` (PIN-A4).
#[test]
fn loom_collapse_vs_lookup_found_folios_stay() {
    model(|| {
        let world = world_with_two_folios();
        let reader = spawn(&world, |world| {
            let folio = world.find(1).expect("the page is always resident");
            let second = FolioId(folio.id().0 + (1 - folio.folio().index()) as u32);
            world.frame(second).content.look();
            let entry = world.entry(1);
            assert_eq!(entry.folio_id(), folio.id(), "no longer the folio of its page");
            assert!(entry.is_ready());
        });
        let collapsed = world.collapse(0, 1);
        reader.join().unwrap();
        check_at_end(&world, collapsed, BYTES);
    });
}

/// A write under the folio lock is never lost, whichever folio it finds.
/// Dies with: the old folios unlocked during COLLAPSE-C2; COLLAPSE-C4 that ignores references;
/// COLLAPSE-C5 before COLLAPSE-C4; a failed COLLAPSE-C4 that does not unfreeze; a new folio without
/// the owner.
#[test]
fn loom_collapse_vs_write() {
    model(|| {
        let world = world_with_two_folios();
        let writer = spawn(&world, |world| world.write(1, AFTER));
        let collapsed = world.collapse(0, 1);
        writer.join().unwrap();
        check_at_end(&world, collapsed, [BYTES[0], AFTER]);
    });
}

/// A reader beside a writer never reads older bytes after newer ones.
/// Dies with: what `..._vs_write` dies with; COLLAPSE-C2 after COLLAPSE-C5; Relaxed in COLLAPSE-C5.
#[test]
fn loom_collapse_vs_write_and_read() {
    // Two preemptions: three threads.
    model_bounded(2, || {
        let world = world_with_two_folios();
        let writer = spawn(&world, |world| world.write(1, AFTER));
        let reader = spawn(&world, |world| {
            let reads = [(); 2].map(|()| read_whole(world, 1));
            assert_ne!(reads, [Some(AFTER), Some(BYTES[1])], "read older bytes after newer ones");
        });
        world.collapse(0, 1);
        writer.join().unwrap();
        reader.join().unwrap();
        assert_eq!(read_whole(&world, 1), Some(AFTER));
    });
}

/// A punched page stays punched: it is a hole, and the folios were not collapsed, or it is zeroed
/// in the new one.
/// Dies with: COLLAPSE-C4 that ignores references; the old folios unlocked during COLLAPSE-C2;
/// COLLAPSE-C5 before COLLAPSE-C4; a new folio without the owner, a removed one that keeps it.
#[test]
fn loom_collapse_vs_punch() {
    model(|| {
        let world = world_with_two_folios();
        let punch = spawn(&world, |world| world.punch(1));
        let collapsed = world.collapse(0, 1);
        punch.join().unwrap();
        check_cut(&world, collapsed);
    });
}

/// Checks that page 1 was truncated or punched.
fn check_cut(world: &World, collapsed: bool) {
    assert_eq!(read_whole(world, 0), Some(BYTES[0]));
    if collapsed {
        check_at_end(world, true, [BYTES[0], 0]);
    } else {
        assert_eq!(world.entry(1), Entry::HOLE);
        assert_eq!((world.mapping.resident_folios(), world.free_frames()), (1, 3));
    }
}

/// A truncation walks the table beyond the new end; it has the same guarantee as a punch.
/// Dies with: what `..._vs_punch` dies with.
#[test]
fn loom_collapse_vs_truncate() {
    model(|| {
        let world = world_with_two_folios();
        let cut = spawn(&world, |world| world.truncate(1));
        let collapsed = world.collapse(0, 1);
        cut.join().unwrap();
        check_cut(&world, collapsed);
    });
}

/// A folio that is removed as a whole leaves holes that stay, in all of its pages.
/// Dies with: what `..._vs_punch` dies with; `new` unlocked in the middle of COLLAPSE-C5.
#[test]
fn loom_collapse_vs_remove() {
    fn remove_while_collapsing(index: u64) {
        let world = world_with_two_folios();
        let remover = spawn(&world, move |world| world.remove(index));
        let collapsed = world.collapse(0, 1);
        remover.join().unwrap();
        assert_eq!(world.entry(index), Entry::HOLE);
        assert_eq!(world.entry(1 - index) == Entry::HOLE, collapsed);
        assert_eq!(world.mapping.resident_folios(), u64::from(!collapsed));
        assert_eq!(world.free_frames(), if collapsed { 4 } else { 3 });
    }
    model(|| remove_while_collapsing(0));
    model(|| remove_while_collapsing(1));
}

/// Either a collapse or an eviction of one of its folios comes first; each may fail, and nothing is
/// freed twice or leaked.
/// Dies with: COLLAPSE-C5 before COLLAPSE-C4; a failed COLLAPSE-C4 that does not unfreeze; a new
/// folio that is not UPTODATE; `unlink` that calls `entry_after` for the head of the folio only.
#[test]
fn loom_collapse_vs_evict() {
    model(|| {
        let world = world_with_two_folios();
        let evictor = spawn(&world, |world| world.evict(1));
        let collapsed = world.collapse(0, 1);
        let evicted = evictor.join().unwrap();
        if !evicted {
            return check_at_end(&world, collapsed, BYTES);
        }
        assert_eq!(world.entry(1), left_at(1));
        assert_eq!(world.entry(0) == left_at(0), collapsed);
        assert_eq!(world.mapping.resident_folios(), u64::from(!collapsed));
        assert_eq!(world.free_frames(), if collapsed { 4 } else { 3 });
    });
}

/// At most one of two collapses of the same run succeeds.
/// Dies with: COLLAPSE-C5 before COLLAPSE-C4; old folios freed before COLLAPSE-C5.
#[test]
fn loom_collapse_vs_collapse() {
    model(|| {
        let world = World::with_pages(6, 6, 0, 1);
        fill_two(&world, BYTES);
        let other = spawn(&world, |world| world.collapse(0, 1));
        let collapsed = world.collapse(0, 1);
        let others = other.join().unwrap();
        assert!(!(collapsed && others), "collapsed twice");
        assert_eq!(world.mapping.resident_folios(), if collapsed || others { 1 } else { 2 });
        assert_eq!(world.free_frames(), 4);
        assert_eq!([0, 1].map(|index| read_whole(&world, index)), BYTES.map(Some));
    });
}

/// The new folio is evicted during a lookup: each unit gets its own value, and may be filled at
/// once, while the other unit still names the frozen folio. Dies with: `unlink` that calls
/// `entry_after` for the head of the folio only; a new folio that is not UPTODATE; Relaxed in
/// `try_freeze` (PIN-B1), in `put_and_test` (PIN-A4).
#[test]
fn loom_collapse_then_evict_vs_lookup_and_fill() {
    model(|| {
        let world = world_with_two_folios();
        assert!(world.collapse(0, 1));
        let reader = spawn(&world, |world| match world.mapping.get_folio(&world.folios, 1) {
            Lookup::Folio(folio) => {
                assert_eq!((folio.id(), folio.folio().index()), (FolioId(2), 0));
                world.frame(FolioId(3)).content.look();
                false
            }
            Lookup::Absent(seen) => {
                assert_eq!(seen, left_at(1));
                assert!(world.fill(1, seen, AFTER), "no other thread fills it");
                true
            }
            Lookup::Refused => panic!("the count is far from its limit"),
        });
        let evicted = world.evict(0);
        let filled = reader.join().unwrap();
        assert!(evicted || !filled);
        if !evicted {
            return check_at_end(&world, true, BYTES);
        }
        assert_eq!(world.entry(0), left_at(0));
        assert_eq!(read_whole(&world, 1), filled.then_some(AFTER));
        assert_eq!(world.entry(1) == left_at(1), !filled);
        assert_eq!(world.mapping.resident_folios(), u64::from(filled));
        assert_eq!(world.free_frames(), if filled { 3 } else { 4 });
    });
}

/// Optimistic reads of the new folio's pages while it is evicted, and its frames reused.
/// Dies with: the fence of `insert` or of `read_validated` (READ-O3) left out.
#[test]
fn loom_collapse_then_evict_vs_optimistic_read() {
    model(|| {
        let world = world_with_two_folios();
        assert!(world.collapse(0, 1));
        // In the old frames, so that the next page gets a frame of the new folio.
        assert!(world.fill(2, Entry::HOLE, OTHER_PAGE) && world.fill(3, Entry::HOLE, OTHER_PAGE));
        let reader = spawn(&world, |world| {
            for index in 0..2 {
                let read = read_whole(world, index);
                assert!([None, Some(BYTES[index as usize])].contains(&read), "{read:?}");
            }
        });
        assert!(world.evict(0) && world.fill(4, Entry::HOLE, OTHER_PAGE));
        assert_eq!(world.entry(4).frame(), 2, "the new frame of page 0");
        reader.join().unwrap();
    });
}
