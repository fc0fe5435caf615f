//! The folio lock (`page/descriptor.rs`) and waiting for write-back (`page/flags.rs`).
//!
//! A sleeper in the model sleeps until it is woken (`sync/waiters.rs`): a lost wake-up is a
//! deadlock, which loom reports.

use super::loom_async_reads::waker;
use super::world::{World, join_all, model, model_bounded, spawn};
use crate::page::{Flag, FolioId, Listing};
use std::sync::Arc;

fn world_with_a_folio() -> (Arc<World>, FolioId) {
    let world = World::new(1, 0, 1);
    let id = world.allocate(0).into_id();
    (world, id)
}

fn lock_and_change(world: &World, id: FolioId) {
    let folio = world.folios.try_get(id).expect("the folio is live");
    let locked = folio.lock();
    world.frame(id).content.change();
    drop(locked);
}

/// Only one thread at a time holds the lock, and it sees what the last holder did; no thread sleeps
/// forever. Dies with: Relaxed in `try_acquire`, in `acquire`, in `release`; no wake in `release`;
/// sleepers that take the lock as LOCKED.
#[test]
fn loom_lock_excludes_and_publishes() {
    // Two preemptions: three threads that also sleep take minutes with more.
    model_bounded(2, || {
        let (world, id) = world_with_a_folio();
        let others = [(); 2].map(|()| spawn(&world, move |world| lock_and_change(world, id)));
        lock_and_change(&world, id);
        join_all(others);
    });
}

/// A lock taken by `try_lock` excludes and publishes, too. Dies with: Relaxed anywhere in the lock;
/// no wake in `release`.
#[test]
fn loom_lock_try_lock_excludes_and_publishes() {
    model(|| {
        let (world, id) = world_with_a_folio();
        let other = spawn(&world, move |world| lock_and_change(world, id));
        let folio = world.folios.try_get(id).expect("the folio is live");
        if let Some(_locked) = folio.try_lock() {
            world.frame(id).content.change();
        }
        other.join().unwrap();
    });
}

/// A thread that waited for write-back sees the I/O done, and is woken.
/// Dies with: Relaxed in `change`, in `wait_for_writeback`; no wake in `change`.
#[test]
fn loom_lock_writeback_waiters_see_its_end() {
    model(|| {
        let (world, id) = world_with_a_folio();
        let flags = &world.folios.get(id).flags;
        assert_eq!(flags.transition_to_dirty(), Listing::Add);
        assert_eq!(flags.transition_to_writing(), Listing::Remove);
        let wait = move |world: &World| {
            world.folios.get(id).flags.wait_for_writeback();
            world.frame(id).content.look();
        };
        let waiters = [spawn(&world, wait), spawn(&world, wait)];
        world.frame(id).content.change();
        assert_eq!(world.folios.get(id).flags.transition_to_written(), Listing::Keep);
        join_all(waiters);
        assert!(!world.folios.get(id).flags.get(Flag::WritebackWaiters));
    });
}

/// A thread that sees UPTODATE sees the bytes, without the lock.
/// Dies with: Relaxed in `Flags::get`, in `Flags::set`.
#[test]
fn loom_lock_uptodate_publishes_the_bytes() {
    model(|| {
        let (world, id) = world_with_a_folio();
        let reader = spawn(&world, move |world| {
            if world.folios.get(id).flags.get(Flag::Uptodate) {
                world.frame(id).content.look();
            }
        });
        world.frame(id).content.change();
        world.folios.get(id).flags.set(Flag::Uptodate);
        reader.join().unwrap();
    });
}

/// A waker that was left for the end of a write-out is called, with the I/O done; without a
/// write-out none is left. Dies with: an `is_written_or_wake` that registers after its exchange; no
/// call of the wakers in `change`.
#[test]
fn loom_lock_a_waker_waits_for_the_end_of_a_write_out() {
    model(|| {
        let (world, id) = world_with_a_folio();
        let flags = &world.folios.get(id).flags;
        assert_eq!(flags.transition_to_dirty(), Listing::Add);
        assert_eq!(flags.transition_to_writing(), Listing::Remove);
        let writer = spawn(&world, move |world| {
            world.frame(id).content.change();
            assert_eq!(world.folios.get(id).flags.transition_to_written(), Listing::Keep);
        });
        let (bell, waker) = waker();
        while !flags.is_written_or_wake(waker.clone()) {
            bell.wait();
        }
        world.frame(id).content.look();
        writer.join().unwrap();
        assert!(!flags.get(Flag::WritebackWaiters));
    });
}
