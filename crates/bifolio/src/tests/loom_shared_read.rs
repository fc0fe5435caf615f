//! Hits of another process (`share/window.rs`, SHARE-H1..H4) against memory that is given back
//! (SHARE-G1..G4).
//!
//! Another process is another thread here: it has the same words. What it reads in a hole are
//! zeros, which the kernel puts there under its locks: they are seen only after what the owner did
//! before it made the hole. The model has a Release fence in place of the kernel.

use super::world::{World, model, spawn};
use crate::page::{Entry, FolioId};
use crate::sync::{Ordering, fence};
use std::sync::Arc;

const BEFORE: u64 = 1;
const AFTER: u64 = 2;
const IN_A_HOLE: u64 = 0;

fn world_with_page_0() -> Arc<World> {
    let world = World::new(1, 0, 1);
    assert!(world.fill(0, Entry::HOLE, BEFORE));
    world
}

/// Reads page 0 as a client does: whole and of the page, or not at all.
fn read_page_0(world: &World) {
    if let Some([first, second]) = world.read(0) {
        assert_eq!(first, second, "torn");
        assert!([BEFORE, AFTER].contains(&first), "{first} was never in the page");
    }
}

/// Makes a hole in place of the only frame.
fn release_frame(world: &World) {
    // Release: pairs with the Acquire fence in `read_validated`, as the locks of the kernel do.
    fence(Ordering::Release);
    world.frame(FolioId(0)).store(IN_A_HOLE);
}

/// Dies with: the fence of `read_validated` (SHARE-H3) left out.
#[test]
fn loom_shared_read_vs_a_hole_in_its_frame() {
    model(|| {
        let world = world_with_page_0();
        let client = spawn(&world, read_page_0);
        if world.evict(0) {
            release_frame(&world);
        }
        client.join().unwrap();
        assert_eq!(world.read(0), None);
    });
}

/// The table page is given back after the eviction, and the page is filled again in the same frame
/// with other bytes. Dies with: the fence of `read_validated` (SHARE-H3) left out.
#[test]
fn loom_shared_read_vs_a_hole_in_its_table() {
    model(|| {
        let world = world_with_page_0();
        let client = spawn(&world, read_page_0);
        if world.evict(0) {
            release_frame(&world);
            assert_eq!(world.mapping.table().give_back(), 1);
            world.mapping.table().set_charged(0);
            assert!(world.fill(0, Entry::HOLE, AFTER));
        }
        client.join().unwrap();
        assert_eq!(world.read(0), Some([AFTER, AFTER]));
    });
}
