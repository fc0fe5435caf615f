//! Invalidation (`reclaim/invalidate.rs`) of a folio that a batch may hold, and concurrent drains
//! of all batches (`memory/lru.rs`).
//!
//! A batch has two slots in a model run.

use super::world::{World, left_at, model_bounded, spawn};
use crate::page::{Entry, EvictError, Flag, FolioId};
use std::sync::Arc;

/// Result of an invalidation of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EvictOutcome {
    Evicted,
    Gone,
    Locked,
    Referenced,
}

/// Does INVALIDATE-N3..N6 for one page, as `Invalidation` does.
fn invalidate(world: &World, index: u64) -> EvictOutcome {
    let doubtful = match try_evict(world, index) {
        Ok(outcome) => return outcome,
        Err(id) => id,
    };
    let cpu = world.folios.get(doubtful).batch_cpu().expect("it was added");
    world.lru.drain_for(&world.folios, cpu, |id| id == doubtful);
    try_evict(world, index).unwrap_or(EvictOutcome::Referenced)
}

/// Does INVALIDATE-N3 and INVALIDATE-N4; fails if there is an extra reference.
fn try_evict(world: &World, index: u64) -> Result<EvictOutcome, FolioId> {
    let Some(folio) = world.find(index) else { return Ok(EvictOutcome::Gone) };
    let id = folio.id();
    let Some(lock) = folio.try_lock() else { return Ok(EvictOutcome::Locked) };
    if lock.owner() == 0 {
        return Ok(EvictOutcome::Gone);
    }
    if folio.folio().references() > 2 {
        return Err(id);
    }
    match world.mapping.evict(folio, &lock, |page| left_at(index + page)) {
        Ok(frozen) => {
            drop(lock);
            frozen.free();
            Ok(EvictOutcome::Evicted)
        }
        Err(EvictError::Referenced(_)) => Err(id),
        Err(EvictError::Dirty(_)) => unreachable!("no thread writes"),
    }
}

/// Fills page `index` and adds it to the batch of `cpu`.
fn fill_and_add(world: &World, index: u64, cpu: usize) {
    assert!(world.fill(index, Entry::HOLE, 1));
    let folio = world.find(index).expect("just filled");
    world.lru.add(&world.folios, folio, cpu);
}

/// Returns a world of two CPUs, with page 0 in the batch of CPU 1.
fn world_with_batched_page() -> Arc<World> {
    let world = World::new(2, 0, 2);
    fill_and_add(&world, 0, 1);
    world
}

fn assert_gone(world: &World) {
    assert!(world.find(0).is_none());
    assert_eq!(world.lru.sizes().listed_pages(), 0);
    assert_eq!(world.free_frames(), 2);
}

/// A folio that only a batch references is evicted, even while another thread drains that batch.
/// Dies with: no second try (INVALIDATE-N6) where INVALIDATE-N5 found nothing to drain; a drain
/// that puts the references after it has unlocked the batch (LRU-3), or clears the batch number in
/// the descriptor before it has put them.
#[test]
fn loom_invalidate_vs_drain() {
    model_bounded(4, || {
        let world = world_with_batched_page();
        let drainer = spawn(&world, |world| world.lru.drain(&world.folios, 1));
        assert_eq!(invalidate(&world, 0), EvictOutcome::Evicted);
        drainer.join().unwrap();
        assert_gone(&world);
    });
}

/// Also holds while its batch becomes full and is moved to the lists.
/// Dies with: as above.
#[test]
fn loom_invalidate_vs_add() {
    model_bounded(4, || {
        let world = world_with_batched_page();
        let adder = spawn(&world, |world| fill_and_add(world, 1, 1));
        assert_eq!(invalidate(&world, 0), EvictOutcome::Evicted);
        adder.join().unwrap();
        assert!(world.find(0).is_none() && world.find(1).is_some());
        assert_eq!(world.free_frames(), 1);
    });
}

/// Of two threads that invalidate the same page one evicts it, whichever drains; or each finds the
/// other's reference, and the next attempt finds the folio in no batch.
/// Dies with: a drain that clears the batch number in the descriptor.
#[test]
fn loom_invalidate_vs_invalidate() {
    model_bounded(4, || {
        let world = world_with_batched_page();
        let other = spawn(&world, |world| invalidate(world, 0));
        let outcomes = [invalidate(&world, 0), other.join().unwrap()];
        let evicted = outcomes.iter().filter(|outcome| **outcome == EvictOutcome::Evicted).count();
        if evicted == 0 {
            assert!(!outcomes.contains(&EvictOutcome::Gone), "{outcomes:?}");
            let id = world.find(0).expect("it was not evicted").id();
            assert!(world.folios.get(id).flags.get(Flag::OnLru), "drained");
            assert_eq!(invalidate(&world, 0), EvictOutcome::Evicted);
        }
        assert!(evicted <= 1, "{outcomes:?}");
        assert_gone(&world);
    });
}

/// A pin is never broken: its folio is not reused.
/// Dies with: a freeze of however many references exist.
#[test]
fn loom_invalidate_vs_pin() {
    model_bounded(4, || {
        let world = world_with_batched_page();
        let pinner = spawn(&world, |world| {
            if let Some(pin) = world.find(0) {
                world.frame(pin.id()).content.look();
            }
        });
        let outcome = invalidate(&world, 0);
        assert!(matches!(outcome, EvictOutcome::Evicted | EvictOutcome::Referenced), "{outcome:?}");
        pinner.join().unwrap();
        let second = invalidate(&world, 0);
        let expected = if outcome == EvictOutcome::Evicted {
            EvictOutcome::Gone
        } else {
            EvictOutcome::Evicted
        };
        assert_eq!(second, expected);
        assert_gone(&world);
    });
}

/// R14: concurrent drains of all batches share one, and none returns before what was added before
/// its call is on a list.
/// Dies with: DRAIN-G4 after DRAIN-G5; DRAIN-G2 left out.
#[test]
fn loom_invalidate_coalesced_drains_never_return_early() {
    fn add_and_drain(world: &World, cpu: usize) -> usize {
        let folio = world.allocate(0);
        let id = folio.id();
        world.lru.add(
            &world.folios,
            folio.try_clone().expect("the count is far from its limit"),
            cpu,
        );
        let drained = world.lru.drain_all(&world.folios);
        assert!(world.folios.get(id).flags.get(Flag::OnLru), "returned early");
        assert_eq!(folio.folio().references(), 1);
        drained
    }
    model_bounded(4, || {
        let world = World::new(2, 0, 2);
        let other = spawn(&world, |world| add_and_drain(world, 0));
        let drained = [add_and_drain(&world, 1), other.join().unwrap()];
        assert_eq!(drained.iter().sum::<usize>(), 2, "each batch was drained once: {drained:?}");
    });
}
