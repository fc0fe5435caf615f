//! The LRU (`lru/`): batches, drains, isolation, and the last put of a listed folio.
//!
//! A batch has two slots in a model run.

use super::world::{World, model, spawn};
use crate::memory::ListKind;
use crate::page::{ClassId, Flag, FolioId};
use std::sync::Arc;

fn is_listed(world: &World, id: FolioId) -> bool {
    world.folios.get(id).flags.get(Flag::OnLru)
}

fn references(world: &World, id: FolioId) -> u64 {
    world.folios.get(id).references()
}

fn listed_pages(world: &World) -> u64 {
    world.lru.sizes().listed_pages()
}

/// Adds a new folio to the batch of `cpu`, which takes its own reference. The test keeps one, with
/// the id.
fn add(world: &World, cpu: usize) -> FolioId {
    let folio = world.allocate(0);
    world.lru.add(&world.folios, folio.try_clone().expect("the count is far from its limit"), cpu);
    folio.into_id()
}

/// Returns a world with `folios` folios on the list of new ones, each with one reference, the
/// caller's.
fn world_with_listed(folios: u32) -> Arc<World> {
    let world = World::new(folios, 0, 1);
    for _ in 0..folios {
        add(&world, 0);
    }
    world.lru.drain_all(&world.folios);
    world
}

/// LRU-3: after a drain returns, what was added before it is listed and the slot's reference put,
/// even if another drain of the same batch is running.
/// Dies with: a drain that takes the batch's content and lists it after unlocking.
#[test]
fn loom_lru_drains_return_when_all_is_done() {
    model(|| {
        let world = World::new(1, 0, 1);
        let id = add(&world, 0);
        let drain_and_check = move |world: &World| {
            world.lru.drain_all(&world.folios);
            assert!(is_listed(world, id));
            assert_eq!(references(world, id), 1);
        };
        let other = spawn(&world, drain_and_check);
        drain_and_check(&world);
        other.join().unwrap();
        assert_eq!(listed_pages(&world), 1);
    });
}

/// Adds, the second of which fills the batch, against a drain and a drain of all: nothing is lost
/// or listed twice, and what the draining thread added itself is listed.
/// Dies with: a slot's reference that is not put.
#[test]
fn loom_lru_add_vs_drain_vs_drain_all() {
    model(|| {
        let world = World::new(3, 0, 2);
        let adder = spawn(&world, |world| [add(world, 0), add(world, 0)]);
        let drainer = spawn(&world, |world| world.lru.drain(&world.folios, 0));
        let own = add(&world, 1);
        world.lru.drain_all(&world.folios);
        assert!(is_listed(&world, own));
        assert_eq!(references(&world, own), 1);
        let added = adder.join().unwrap();
        drainer.join().unwrap();
        // The second add of a batch of two drained it, or a drain had taken the first.
        world.lru.drain_all(&world.folios);
        for id in added {
            assert!(is_listed(&world, id));
            assert_eq!(references(&world, id), 1);
        }
        assert_eq!(listed_pages(&world), 3);
    });
}

/// A drain puts the slot's reference, which may be the last: the folio is removed from the list and
/// freed.
/// Dies with: putting the slots' references under the lists' lock (a deadlock).
#[test]
fn loom_lru_add_vs_drain_vs_last_put() {
    model(|| {
        let world = World::new(1, 0, 1);
        let id = add(&world, 0);
        let drainer = spawn(&world, |world| world.lru.drain(&world.folios, 0));
        drop(world.folios.adopt(id));
        drainer.join().unwrap();
        assert_eq!(world.free_frames(), 1);
        assert_eq!(listed_pages(&world), 0);
    });
}

/// Isolation against the last put: the folio is isolated with a reference, or freed and on no list;
/// a freed folio is never listed, where the next use of its frame would be linked twice.
/// Dies with: `isolate` clearing ON_LRU before it has the reference (found by this test);
/// `put_cold` freeing without its CAS, or Relaxed there (PIN-A5).
#[test]
fn loom_lru_isolate_vs_last_put() {
    model(|| {
        let world = world_with_listed(1);
        let isolator = spawn(&world, |world| {
            let mut isolated = Vec::new();
            world.lru.isolate(&world.folios, (ClassId::DEFAULT, ListKind::Fresh), 1, &mut isolated);
            for folio in &isolated {
                world.frame(folio.id()).content.look();
            }
        });
        drop(world.folios.adopt(FolioId(0)));
        isolator.join().unwrap();
        assert_eq!(world.free_frames(), 1);
        assert_eq!(listed_pages(&world), 0);
    });
}

/// An add in progress against isolation and the last put of the folio listed before.
/// Dies with: `isolate` clearing ON_LRU before it has the reference.
#[test]
fn loom_lru_add_vs_isolate_vs_last_put() {
    model(|| {
        let world = World::new(2, 0, 1);
        let dying = add(&world, 0);
        world.lru.drain_all(&world.folios);
        let isolator = spawn(&world, |world| {
            let mut isolated = Vec::new();
            world.lru.isolate(&world.folios, (ClassId::DEFAULT, ListKind::Fresh), 2, &mut isolated);
            world.lru.put_back(&world.folios, &mut isolated, None);
        });
        let adder = spawn(&world, |world| {
            let id = add(world, 0);
            world.lru.drain(&world.folios, 0);
            id
        });
        drop(world.folios.adopt(dying));
        isolator.join().unwrap();
        let added = adder.join().unwrap();
        // The freed folio's frame is free, or was free and now belongs to the added one.
        assert_eq!(world.free_frames(), 1);
        assert_eq!(references(&world, added), 1);
        assert!(is_listed(&world, added));
        assert_eq!(listed_pages(&world), 1);
    });
}

/// LRU-1: a folio is in one isolation at a time, whatever is put back meanwhile, and returns to the
/// list with the references it had.
/// Dies with: `isolate` leaving the folio listed.
#[test]
fn loom_lru_put_back_vs_isolate() {
    fn isolate_and_put_back(world: &World) {
        let mut isolated = Vec::new();
        world.lru.isolate(&world.folios, (ClassId::DEFAULT, ListKind::Fresh), 1, &mut isolated);
        for folio in &isolated {
            world.frame(folio.id()).content.change();
        }
        world.lru.put_back(&world.folios, &mut isolated, None);
    }
    model(|| {
        let world = world_with_listed(2);
        let other = spawn(&world, isolate_and_put_back);
        isolate_and_put_back(&world);
        other.join().unwrap();
        assert_eq!(listed_pages(&world), 2);
        for id in [FolioId(0), FolioId(1)] {
            assert!(is_listed(&world, id));
            assert_eq!(references(&world, id), 1);
        }
    });
}

/// CLASS-1: a class has no more pages than its ceiling, and those of a freed folio are for another
/// one.
/// Dies with: a load and an add instead of one exchange in `try_count`; the number of the class
/// left in the flags by `forget`.
#[test]
fn loom_lru_a_class_is_counted_up_to_its_ceiling() {
    model(|| {
        let world = World::new(2, 0, 1);
        let class = world.lru.classes.find_or_add("class").unwrap();
        let limit = world.lru.classes.change_limits(class, |limits, _| {
            limits.ceiling_pages = 1;
            Ok::<(), ()>(())
        });
        limit.unwrap();
        let fill = move |world: &World| {
            let Some(counted) = world.lru.classes.try_count(class, 1) else { return false };
            assert_eq!(world.lru.classes.counts(class).pages, 1);
            let folio = world.allocate(0);
            counted.keep_for(folio.folio());
            // The last put.
            drop(folio);
            true
        };
        let other = spawn(&world, fill);
        let is_first = fill(&world);
        assert!(other.join().unwrap() || is_first);
        assert_eq!(world.lru.classes.counts(class).pages, 0);
        assert!(fill(&world));
    });
}
