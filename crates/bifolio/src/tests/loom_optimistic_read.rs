//! R16: the optimistic read (`page/optimistic.rs`) against everything that changes a page.
//!
//! A frame has two words; a change stores them one after the other, Relaxed, and a read loads them
//! likewise. A read must return one value, and one that the page had.
//!
//! Leaving out READ-E1 fails no test: the bytes change only after the frame was freed, so after
//! READ-E4, and READ-E4 alone makes READ-O4 differ. READ-E1 keeps readers from starting a read that
//! an eviction is about to invalidate.

use super::world::{AFTER, BEFORE, World, model, model_bounded, read_page_0, spawn};
use crate::page::{Entry, Flag, FolioId, read_held};
use std::sync::Arc;

/// Content of page 1.
const OTHER_PAGE: u64 = 9;

/// Reads the first `N` pages under a reference to their folio, as `File::read_with` does.
fn read_held_pages<const N: usize>(world: &World) -> Option<[[u64; 2]; N]> {
    let folio = world.find(0)?;
    let frame_of = |page: usize| world.frame(FolioId(folio.id().0 + page as u32));
    let read = || Some(std::array::from_fn(|page| frame_of(page).load()));
    read_held(world.mapping.table(), 0..N as u64, folio.id(), read)
}

/// Against a write. Dies with: the fence of `read_validated` (READ-O3) or of `begin_write_section`
/// (READ-W2) left out; Relaxed in READ-O1 or in READ-W4; READ-W1 left out; a section that keeps the
/// version.
#[test]
fn loom_optimistic_read_vs_write() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, read_page_0);
        world.write(0, AFTER);
        reader.join().unwrap();
        assert_eq!(world.read(0), Some([AFTER, AFTER]));
    });
}

/// Against two writes: the version reveals a change that was made and reverted.
/// Dies with: what `..._vs_write` dies with.
#[test]
fn loom_optimistic_read_vs_two_writes() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, read_page_0);
        world.write(0, AFTER);
        world.write(0, BEFORE);
        reader.join().unwrap();
    });
}

/// Against eviction and reuse of the frame for another page.
/// Dies with: the fence of `insert` or of `read_validated` (READ-O3) left out.
#[test]
fn loom_optimistic_read_vs_refill_of_another_page() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, read_page_0);
        if world.evict(0) {
            assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
        }
        reader.join().unwrap();
    });
}

/// As before, when another thread does the refill: the transfer of the frame orders READ-E4 before
/// it. Dies with: the fence of `insert` or of `read_validated` (READ-O3) left out.
#[test]
fn loom_optimistic_read_vs_refill_by_another_thread() {
    model(|| {
        let world = World::with_page_0(1);
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

/// As before, when a third thread, to which the inserter has handed the folio, stores the bytes.
/// Dies with: the fence of `begin_fill` left out there, or that of `read_validated` (READ-O3).
#[test]
fn loom_optimistic_read_vs_fill_by_a_thread_that_did_not_insert() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, read_page_0);
        if world.evict(0) {
            let folio = world.allocate(1);
            let locked = folio.lock();
            let for_table = folio.try_clone().expect("the count is far from its limit");
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

/// Against eviction and reuse of the frame for the same page, with other bytes.
/// Dies with: `save_versions` left out; a version that is not incremented in `insert`; either fence
/// left out; Relaxed in READ-O1 or in `set_ready` (READ-I3).
#[test]
fn loom_optimistic_read_vs_refill_of_the_same_page() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, read_page_0);
        if world.evict(0) {
            assert!(world.fill(0, world.entry(0), AFTER));
        }
        reader.join().unwrap();
    });
}

/// Against removal, and reuse of the frame for another page after the last put.
/// Dies with: the fence of `insert` or of `read_validated` (READ-O3) left out.
#[test]
fn loom_optimistic_read_vs_remove_and_refill() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, read_page_0);
        world.remove(0);
        assert!(world.fill(1, Entry::HOLE, OTHER_PAGE));
        reader.join().unwrap();
    });
}

/// Against a partial truncate of a folio of two pages, which zeroes everything after the new end,
/// from the middle of the first page on, in one section.
/// Dies with: READ-W1, READ-W2 or READ-O3 left out; Relaxed in READ-O1 or in READ-W4; a section
/// that keeps the version.
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

/// Against an eviction that gives up: the page is READY again with its previous version, and reads
/// in between are right or refused. Dies with: a failed eviction that does not restore READY.
#[test]
fn loom_optimistic_read_vs_failed_evict() {
    model(|| {
        let world = World::with_page_0(1);
        let _listing = world.folios.get(FolioId(0)).flags.transition_to_dirty();
        let reader = spawn(&world, read_page_0);
        let version = world.entry(0).version();
        assert!(!world.evict(0));
        reader.join().unwrap();
        assert_eq!(world.entry(0).version(), version);
        assert_eq!(world.read(0), Some([BEFORE, BEFORE]));
    });
}

/// A reader that finds the page sees all of the fill.
/// Dies with: Relaxed in `set_ready` (READ-I3) or in READ-O1.
#[test]
fn loom_optimistic_read_vs_first_fill() {
    model(|| {
        let world = World::new(1, 0, 1);
        let reader = spawn(&world, read_page_0);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        reader.join().unwrap();
    });
}

/// The reader's mark may be set and cleared during a read and a write; it never restores an old
/// Entry.
/// Dies with: a mark that is stored instead of its CAS (`exchange_mark`).
#[test]
fn loom_optimistic_read_marks_restore_no_old_entry() {
    model(|| {
        let world = World::with_page_0(1);
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

/// Under a reference, against a write: the reference keeps the frame, not its bytes.
/// Dies with: the fence of `FrameRun::unchanged` (READ-O3) or of `begin_write_section` (READ-W2)
/// left out; Relaxed in `FrameRun::load` (READ-O1); READ-W1 left out; a section that keeps the
/// version.
#[test]
fn loom_optimistic_read_held_vs_write() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, |world| {
            let found = read_held_pages(world);
            assert!([None, Some([[BEFORE; 2]]), Some([[AFTER; 2]])].contains(&found), "{found:?}");
        });
        world.write(0, AFTER);
        reader.join().unwrap();
        assert_eq!(read_held_pages(&world), Some([[AFTER; 2]]));
    });
}

/// Both pages of a folio, against a partial truncate that changes them in one section: the result
/// is of one moment. Dies with: what `..._held_vs_write` dies with.
#[test]
fn loom_optimistic_read_held_vs_partial_truncate() {
    model(|| {
        let world = World::new(2, 1, 1);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        let before = [[BEFORE, BEFORE], [BEFORE, BEFORE]];
        let after = [[BEFORE, 0], [0, 0]];
        let reader = spawn(&world, move |world| {
            let found = read_held_pages::<2>(world);
            assert!(found.is_none_or(|pages| [before, after].contains(&pages)), "{found:?}");
        });
        world.zero_from_middle(0);
        reader.join().unwrap();
        assert_eq!(read_held_pages(&world), Some(after));
    });
}

/// All pages of a folio that takes two runs, likewise. Dies with: `read_held_in_runs` that checks
/// only its last run, or that checks each run before the next is loaded.
#[test]
fn loom_optimistic_read_held_in_runs_vs_partial_truncate() {
    model_bounded(2, || {
        let world = World::new(4, 2, 1);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        let before = [[BEFORE; 2]; 4];
        let after = [[BEFORE, 0], [0; 2], [0; 2], [0; 2]];
        let reader = spawn(&world, move |world| {
            let found = read_held_pages::<4>(world);
            assert!(found.is_none_or(|pages| [before, after].contains(&pages)), "{found:?}");
        });
        world.zero_from_middle(0);
        reader.join().unwrap();
        assert_eq!(read_held_pages(&world), Some(after));
    });
}

/// Against a removal, and a fill of the page in another frame: the old frame is never taken for the
/// page of the new Entry. Dies with: `read_held` without its look at the folio.
#[test]
fn loom_optimistic_read_held_vs_removal_and_refill() {
    model_bounded(3, || {
        let world = World::new(2, 0, 1);
        assert!(world.fill(0, Entry::HOLE, BEFORE));
        let reader = spawn(&world, |world| {
            let Some(folio) = world.find(0) else { return };
            let read = || Some((world.entry(0), world.frame(folio.id()).load()));
            let found = read_held(world.mapping.table(), 0..1, folio.id(), read);
            // Validated, so the Entry in between is that of both loads.
            if let Some((entry, [first, second])) = found {
                assert_eq!(entry.folio_id(), folio.id());
                assert_eq!(first, second, "torn");
            }
        });
        world.remove(0);
        assert!(world.fill(0, Entry::HOLE, AFTER));
        reader.join().unwrap();
    });
}
