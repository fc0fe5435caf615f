//! Lookups (`page/mapping.rs`) against eviction, removal and insertion.
//!
//! Property: a folio that a lookup returns was at the requested index while the reference was held,
//! whatever happened to its frame before.
//!
//! Weakening two orderings fails no test, because the pin word orders the same accesses: the
//! Release of READ-I1 and the Acquire of READ-L3. A thread that reads a descriptor took a reference
//! first, and `init` (PIN-B5) published it.

use super::world::{OWNER, World, left_at, model, model_bounded, spawn};
use crate::page::{Entry, EvictError, Flag, FolioId, FolioRef, FrozenWaits, Lookup};
use crate::sync::Ordering;
use std::sync::Arc;

/// Checks that a folio returned by a lookup is that of the index, and accesses its content.
fn check_found(world: &World, folio: &FolioRef<'_>, index: u64) {
    assert_eq!(world.mapping.head_index(index), folio.folio().index());
    world.frame(folio.id()).content.look();
}

/// A lookup finds the folio, which then stays, or misses it; it is freed once.
/// Dies with: Relaxed in the CAS of `try_freeze` (PIN-B1) or in `put_and_test` (PIN-A4): the frame
/// is freed while a reader's access is unordered; a failed eviction that does not restore READY.
#[test]
fn loom_lookup_vs_evict_found_folios_stay() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, |world| {
            let Some(folio) = world.find(0) else { return };
            check_found(world, &folio, 0);
        });
        let evicted = world.evict(0);
        reader.join().unwrap();
        assert_eq!(world.free_frames(), usize::from(evicted));
        assert_eq!(world.entry(0).is_ready(), !evicted);
        assert_eq!(world.mapping.resident_folios(), u64::from(!evicted));
    });
}

/// A removal takes the Entry, not the memory: the holder of a reference may read, the last put
/// frees.
/// Dies with: Relaxed in the CAS of `put_cold` (PIN-A5), in `put_and_test` (PIN-A4).
#[test]
fn loom_lookup_vs_remove_found_folios_stay() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, |world| {
            let Some(folio) = world.find(0) else { return };
            check_found(world, &folio, 0);
        });
        world.remove(0);
        reader.join().unwrap();
        assert_eq!(world.free_frames(), 1);
        assert_eq!(world.entry(0), Entry::HOLE);
        assert_eq!(world.mapping.resident_folios(), 0);
    });
}

/// The result of a peek was true of the folio while it was in the table: here it is locked all that
/// time.
/// Dies with: `peek` without its fence or its second load; Relaxed in `FolioLock::release`.
#[test]
fn loom_lookup_vs_evict_a_peek_is_of_the_current_folio() {
    model(|| {
        let world = World::with_page_0(1);
        let folio = world.find(0).expect("just filled");
        let locked = folio.lock();
        let peeker = spawn(&world, |world| {
            let is_locked = world.mapping.peek(&world.folios, 0, |_, folio| folio.is_locked());
            assert_ne!(is_locked, Ok(false));
        });
        let frozen = world.mapping.evict(folio, &locked, left_at).expect("no other reference");
        drop(locked);
        frozen.free();
        peeker.join().unwrap();
    });
}

/// A written page is never mistaken for one that was only allocated, although its descriptor
/// becomes that of such a page during the check.
/// Dies with: `peek` without its fence or its second load; Relaxed in `Flags::get`, together with
/// no fence in `peek`.
#[test]
fn loom_lookup_vs_evict_written_pages_are_no_holes() {
    model(|| {
        let world = World::with_page_0(1);
        let looker = spawn(&world, |world| {
            let is_written = world.mapping.look(&world.folios, 0, |seen, folio| {
                seen.is_ready() || !folio.flags.get(Flag::Allocated)
            });
            assert!(is_written == Ok(true) || is_written == Err(left_at(0)), "{is_written:?}");
        });
        if world.evict(0) {
            let folio = world.allocate(1);
            let locked = folio.lock();
            let for_table = folio.try_clone().expect("the count is far from its limit");
            world.mapping.insert(&world.folios, &locked, for_table, Entry::HOLE).expect("a hole");
            locked.flags.set(Flag::Allocated);
        }
        looker.join().unwrap();
    });
}

/// R12: the frame is evicted and reused for another page; a lookup never returns it as the old one.
/// Dies with: READ-L3 left out; Relaxed in `try_get` (PIN-A2), `init` (PIN-B5), PIN-A4
/// or PIN-B1.
#[test]
fn loom_lookup_r12_never_a_folio_of_another_page() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, |world| {
            let Some(folio) = world.find(0) else { return };
            check_found(world, &folio, 0);
        });
        if world.evict(0) {
            assert!(world.fill(1, Entry::HOLE, 2));
        }
        reader.join().unwrap();
    });
}

/// R12 with an old Entry, as in batched reads.
/// Dies with: READ-L3 left out; Relaxed in `try_get` (PIN-A2), `put_and_test` (PIN-A4) or its CAS
/// (PIN-A5).
#[test]
fn loom_lookup_r12_an_old_entry_gets_no_other_folio() {
    model(|| {
        let world = World::with_page_0(1);
        let reader = spawn(&world, |world| {
            let seen = world.entry(0);
            if seen.is_folio()
                && let Ok(folio) = world.mapping.try_get_named(&world.folios, 0, seen)
            {
                check_found(world, &folio, 0);
            }
        });
        world.remove(0);
        if world.free_frames() > 0 {
            assert!(world.fill(1, Entry::HOLE, 2));
        }
        reader.join().unwrap();
    });
}

/// The page is evicted and claimed again in the same frame, while a pin holds its old READY Entry:
/// the pin never gets a folio that is still being filled.
/// Dies with: `recheck_ready` that only compares the folio; Relaxed in it, together with Relaxed in
/// `try_get` (PIN-A2).
#[test]
fn loom_lookup_r12_a_pin_waits_for_the_fill() {
    model(|| {
        let world = World::with_page_0(1);
        let pinner = spawn(&world, |world| {
            let seen = world.entry(0);
            if seen.is_ready()
                && let Ok(folio) = world.mapping.try_get_ready(&world.folios, 0, seen)
            {
                assert!(folio.folio().flags.get(Flag::Uptodate));
                check_found(world, &folio, 0);
            }
        });
        if world.evict(0) {
            assert!(world.fill(0, left_at(0), 2));
        }
        pinner.join().unwrap();
    });
}

/// Of two fillers of one page one wins; the other finds the winner's folio, set up and, once it
/// holds the lock, filled; its own frame is free again.
/// Dies with: an insertion that stores instead of READ-I1's CAS; Relaxed anywhere in the folio
/// lock.
#[test]
fn loom_lookup_vs_insert_the_loser_finds_the_winners_folio() {
    fn fill_and_find(world: &World, value: u64) -> bool {
        let won = world.fill(0, Entry::HOLE, value);
        let folio = world.find(0).expect("the page is resident now");
        let locked = folio.lock();
        assert!(locked.flags.get(Flag::Uptodate));
        check_found(world, &folio, 0);
        won
    }
    // Three preemptions: two threads that also sleep take a minute without a bound.
    model_bounded(3, || {
        let world = World::new(2, 0, 1);
        let other = spawn(&world, |world| fill_and_find(world, 2));
        let won = fill_and_find(&world, 1);
        assert!(won != other.join().unwrap());
        assert_eq!(world.free_frames(), 1);
        assert_eq!(world.mapping.resident_folios(), 1);
    });
}

/// A thread that finds the loser's folio through the frames does not mistake it for one of the
/// table and evict the winner's folio.
/// Dies with: a failed insertion that leaves the folio its owner.
#[test]
fn loom_lookup_vs_insert_the_losers_folio_has_no_owner() {
    model(|| {
        let world = World::new(2, 0, 1);
        let evacuation = spawn(&world, |world| {
            let Ok(folio) = world.folios.try_get(FolioId(1)) else { return };
            if let Some(locked) = folio.try_lock()
                && locked.owner() == OWNER
                && let Ok(frozen) = world.mapping.evict(folio, &locked, |_| Entry::HOLE)
            {
                drop(locked);
                frozen.free();
            }
        });
        assert!(world.fill(0, Entry::HOLE, 1));
        assert!(!world.fill(0, Entry::HOLE, 2), "another folio is in the table");
        evacuation.join().unwrap();
        assert!(world.entry(0).is_ready(), "{:?}", world.entry(0));
        assert_eq!((world.mapping.resident_folios(), world.free_frames()), (1, 1));
    });
}

/// A fill that uses an old length or a truncation of the file sees the other: no folio stays beyond
/// the end of file.
/// Dies with: `was_cut` left out; without the barrier in it, or in `begin_walk_behind_end`.
#[test]
fn loom_lookup_vs_cut_no_page_stays_beyond_the_end() {
    model(|| {
        let world = World::new(1, 0, 1);
        let filler = spawn(&world, |world| {
            let folio = world.allocate(1);
            let locked = folio.lock();
            let for_table = folio.try_clone().expect("the count is far from its limit");
            world.mapping.insert(&world.folios, &locked, for_table, Entry::HOLE).expect("a hole");
            if world.mapping.was_cut(&locked) {
                let hole = |_| Entry::HOLE;
                drop(world.mapping.remove(&folio, &locked, &world.folios, hole));
            } else {
                world.mapping.mark_uptodate(&locked);
            }
        });
        world.truncate(1);
        filler.join().unwrap();
        assert_eq!(world.entry(1), Entry::HOLE);
        assert_eq!((world.mapping.resident_folios(), world.free_frames()), (0, 1));
    });
}

/// An insertion follows the removal of the folio that was at the index before, even if its filler
/// loaded a hole before that folio existed: the Entry is its own.
/// Dies with: Release instead of AcqRel in READ-I1 (found by this test); Relaxed in READ-E4.
#[test]
fn loom_lookup_vs_insert_follows_the_removal_it_replaces() {
    fn insert_and_remove(world: &World) {
        // A hole loaded before any thread inserted.
        if world.fill(0, Entry::HOLE, 1) {
            world.place.change();
            world.remove(0);
        }
    }
    model(|| {
        let world = World::new(2, 0, 1);
        let other = spawn(&world, insert_and_remove);
        insert_and_remove(&world);
        other.join().unwrap();
        assert_eq!(world.free_frames(), 2);
        assert_eq!(world.mapping.resident_folios(), 0);
    });
}

/// A wait for a frozen folio ends with the freeze: a dirty folio, whose eviction unfreezes it, is
/// always found, after few rounds.
/// Dies with: a wipe (PIN-A3) that stores; a failed eviction that does not restore READY.
#[test]
fn loom_lookup_vs_evict_waiting_is_bounded() {
    model(|| {
        let world = World::with_page_0(1);
        let _listing = world.find(0).expect("resident").folio().flags.transition_to_dirty();
        let reader = spawn(&world, |world| {
            let mut waits = FrozenWaits::default();
            let found = world.mapping.get_folio_and_tell(&world.folios, 0, &mut waits);
            assert!(matches!(found, Lookup::Folio(_)), "{found:?}");
            assert!(waits.rounds <= 4, "{waits:?}");
        });
        assert!(!world.evict(0));
        reader.join().unwrap();
        assert!(world.entry(0).is_ready());
        assert_eq!(world.folios.get(FolioId(0)).references(), 1);
    });
}

/// R13, complete: a holder dirties the folio and puts its reference; the eviction sees the mark or
/// the reference.
/// Dies with: the dirty test before the freeze; Relaxed in `try_freeze` (PIN-B1), `put_and_test`
/// (PIN-A4).
#[test]
fn loom_lookup_vs_evict_r13_no_dirty_folio_is_evicted() {
    model(|| {
        let world = World::with_page_0(1);
        let writer = spawn(&world, |world| {
            let Some(folio) = world.find(0) else { return false };
            // Without the folio lock: the pin word alone must order it.
            let _listing = folio.folio().flags.transition_to_dirty();
            true
        });
        let folio = world.find(0).expect("resident");
        let locked = folio.lock();
        let outcome = world.mapping.evict(folio, &locked, |_| Entry::HOLE);
        let was_dirty = matches!(outcome, Err(EvictError::Dirty(_)));
        let evicted = match outcome {
            Ok(frozen) => {
                drop(locked);
                frozen.free();
                true
            }
            Err(_) => {
                drop(locked);
                false
            }
        };
        let wrote = writer.join().unwrap();
        assert!(!(evicted && wrote), "evicted a dirty folio");
        assert!(!was_dirty || wrote);
    });
}

/// A folio of two pages is found by its second page as by its first; a thread that finds it removed
/// from its head finds it removed from the second page as well (MAPPING-2).
/// Dies with: `unlink` that stores the head first; Relaxed there (READ-E4), or in `get_folio`
/// (READ-L1).
#[test]
fn loom_lookup_large_folio_the_head_goes_last() {
    model(|| {
        let world = World::new(2, 1, 1);
        assert!(world.fill(0, Entry::HOLE, 1));
        let reader = spawn(&world, |world| match world.find(1) {
            Some(folio) => {
                assert_eq!(folio.id(), FolioId(0));
                check_found(world, &folio, 1);
            }
            None => {
                let second = world.mapping.table().load(1, Ordering::Relaxed);
                assert!(!second.is_folio(), "{second:?} outlives its head");
            }
        });
        world.evict(1);
        reader.join().unwrap();
    });
}

/// A page of a folio under insertion names the folio only after the head does (MAPPING-2), and that
/// folio is set up. Dies with: READ-I2 before READ-I1, Relaxed in READ-I2.
#[test]
fn loom_lookup_large_folio_the_head_comes_first() {
    model(|| {
        let world = World::new(2, 1, 1);
        let reader = spawn(&world, |world| {
            let second = world.entry(1);
            let head = world.mapping.table().load(0, Ordering::Relaxed);
            if second.is_folio() {
                assert!(head.is_folio(), "{second:?} came before its head");
                let folio = world.mapping.try_get_named(&world.folios, 1, second);
                let folio = folio.expect("no thread evicts");
                assert_eq!((folio.id(), folio.folio().order()), (FolioId(0), 1));
                assert_eq!((folio.folio().index(), folio.folio().owner()), (0, OWNER));
            }
        });
        assert!(world.fill(0, Entry::HOLE, 1));
        reader.join().unwrap();
    });
}
