//! The first use of a page that was read ahead (`page/optimistic.rs`), while its folio is moved.

use super::world::{World, model, spawn};
use crate::page::{Entry, Flag};
use std::sync::Arc;

/// Returns a world with a folio at page 0, read ahead, and two more frames.
fn world_with_page_read_ahead() -> Arc<World> {
    let world = World::new(3, 0, 1);
    assert!(world.fill(0, Entry::HOLE, 1));
    world.find(0).expect("a folio").folio().flags.set(Flag::Readahead);
    world
}

fn is_unused(world: &World) -> bool {
    world.find(0).expect("a folio").folio().flags.get(Flag::Readahead)
}

/// A use is recorded wherever the folio moves, and only once. A move is not a use.
/// Dies with: USE-F1 left out, USE-F1 after USE-F2; USE-F3 left out, USE-F3 before USE-F2; USE-U1
/// Relaxed; a USE-U3 or a CAS of USE-U2 that ignores its failure.
#[test]
fn loom_first_use_vs_move() {
    model(|| {
        let world = world_with_page_read_ahead();
        assert!(world.relocate(0) && is_unused(&world), "it was not used yet");
        let reader = spawn(&world, |world| world.mapping.note_use(&world.folios, 0, true, || true));
        assert!(world.relocate(0), "readers hold nothing");
        reader.join().unwrap();
        assert!(!is_unused(&world), "the use was recorded");
        assert!(!world.entry(0).is_referenced(), "the use was recorded once");
    });
}
