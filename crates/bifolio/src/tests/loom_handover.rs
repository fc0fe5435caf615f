//! A fill that begins on one thread and ends on another (`file/run.rs`): the folio's lock and a
//! reference are kept, and taken over where the transfer completes.
//!
//! Property: a thread that looks the folio up meanwhile waits for its lock, and then sees it
//! uptodate with its bytes, or removed; it is not evicted before; it is freed once.

use super::world::{OWNER, World, model, spawn};
use crate::page::{Entry, Flag, FolioId, LockedFolio};
use std::sync::Arc;

/// Returns a world with a folio at page 0 that is being filled: locked, not uptodate.
fn world_with_a_fill_in_flight() -> (Arc<World>, FolioId) {
    let world = World::new(1, 0, 1);
    let id = {
        let folio = world.allocate(0);
        let locked = folio.lock();
        let for_table = folio.try_clone().expect("the count is far from its limit");
        world.mapping.insert(&world.folios, &locked, for_table, Entry::HOLE).unwrap();
        locked.detach_lock();
        folio.into_id()
    };
    (world, id)
}

/// Ends the transfer, on the thread that sees its completion.
fn end_fill(world: &World, id: FolioId, works: bool) {
    let folio = world.folios.adopt(id);
    let locked: LockedFolio<'_> = folio.adopt_lock();
    if works {
        world.frame(id).content.change();
        world.frame(id).store(7);
        world.mapping.mark_uptodate(&locked);
    } else {
        let for_table = world.mapping.remove(&folio, &locked, &world.folios, |_| Entry::HOLE);
        drop(locked);
        drop(for_table);
    }
}

/// A thread that waits for the lock finds the bytes. Dies with: Relaxed in the lock's `release` or
/// `acquire`; a `detach_lock` that unlocks; an `adopt` that never unlocks.
#[test]
fn loom_handover_a_lookup_waits_for_the_end_of_the_fill() {
    model(|| {
        let (world, id) = world_with_a_fill_in_flight();
        let filler = spawn(&world, move |world| end_fill(world, id, true));
        {
            let folio = world.find(0).expect("the folio is in the table");
            let locked = folio.lock();
            assert_eq!(locked.owner(), OWNER);
            assert!(locked.flags.get(Flag::Uptodate), "the lock was free before the fill ended");
            world.frame(id).content.look();
        }
        filler.join().unwrap();
        assert_eq!(world.read(0), Some([7, 7]));
        assert_eq!(world.free_frames(), 0);
    });
}

/// Reclaim cannot evict the folio before the end, only after it. Dies with: a fill that keeps no
/// reference (then the frame is freed under the transfer, and filled when it belongs to another
/// folio).
#[test]
fn loom_handover_a_folio_in_flight_is_not_evicted() {
    model(|| {
        let (world, id) = world_with_a_fill_in_flight();
        let filler = spawn(&world, move |world| end_fill(world, id, true));
        let evicted = world.find(0).is_some_and(|folio| {
            let Some(locked) = folio.try_lock() else { return false };
            assert!(locked.flags.get(Flag::Uptodate));
            drop(locked);
            drop(folio);
            world.evict(0)
        });
        filler.join().unwrap();
        assert_eq!(world.free_frames(), usize::from(evicted));
    });
}

/// A failed fill removes the folio; a thread that waited for it sees that it was removed, and the
/// last reference frees it. Dies with: a `remove` that keeps the owner; a lost or doubled
/// reference.
#[test]
fn loom_handover_a_failed_fill_leaves_nothing() {
    model(|| {
        let (world, id) = world_with_a_fill_in_flight();
        let filler = spawn(&world, move |world| end_fill(world, id, false));
        if let Some(folio) = world.find(0) {
            let locked = folio.lock();
            assert_ne!(locked.owner(), OWNER, "a folio that was never filled has an owner");
        }
        filler.join().unwrap();
        assert_eq!(world.entry(0), Entry::HOLE);
        assert_eq!(world.free_frames(), 1);
    });
}
