//! Hits of another process (`share/window.rs`, SHARE-H1..H4) against memory that is given back
//! (SHARE-G1..G4).
//!
//! Another process is another thread here: it has the same words. What it reads in a hole are
//! zeros, which the kernel puts there under its locks: they are seen only after what the owner did
//! before it made the hole. The model has a Release fence in place of the kernel.

use super::world::{AFTER, World, model, read_page_0, spawn};
use crate::page::{Entry, FolioId};
use crate::sync::{Ordering, fence};
use std::sync::Arc;

const IN_A_HOLE: u64 = 0;

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
        let world = World::with_page_0(1);
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
        let world = World::with_page_0(1);
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
