//! Clears of whole folios with their storage (`inode/clearing.rs`), against fills: the
//! columns at its head.

use super::world::{OWNER, World, model};
use crate::inode::clearing::Clearing;
use crate::page::{Entry, Flag, LockedFolio};
use crate::sync::{AtomicU64, Mutex, Ordering};
use std::sync::Arc;

/// A file of one page, and its storage, whose calls are ordered as system calls are.
#[derive(Debug)]
struct Cleared {
    world: Arc<World>,
    clearing: Clearing,
    storage: Mutex<u64>,
    /// Bytes of the page's folio.
    bytes: AtomicU64,
}

impl Cleared {
    fn new() -> Arc<Self> {
        let (world, clearing) = (World::new(1, 0, 1), Clearing::default());
        Arc::new(Self { world, clearing, storage: Mutex::new(7), bytes: AtomicU64::new(0) })
    }

    fn fill(&self) {
        let world = &self.world;
        let folio = world.allocate(0);
        let locked = folio.lock();
        let for_table = folio.try_clone().expect("the count is far from its limit");
        world.mapping.insert(&world.folios, &locked, for_table, Entry::HOLE).expect("a hole");
        let before = self.clearing.cleared_before();
        let read = *self.storage.lock();
        let clear = self.clearing.of_page(0);
        if clear.is_some() {
            locked.flags.set(Flag::Punched);
        }
        let is_kept = clear.is_none_or(|clear| before == Some(clear));
        self.bytes.store(if is_kept { read } else { 0 }, Ordering::Relaxed);
        world.mapping.mark_uptodate(&locked);
    }

    fn clear(&self) {
        self.clearing.begin(0..1);
        *self.storage.lock() = 0;
        self.clearing.note_storage_cleared();
        self.remove_unless(|locked| locked.flags.get(Flag::Punched));
        self.clearing.end();
    }

    fn remove_unless(&self, stays: impl Fn(&LockedFolio<'_>) -> bool) {
        let world = &self.world;
        let Some(folio) = world.find(0) else { return };
        let locked = folio.lock();
        if locked.owner() == OWNER && !stays(&locked) {
            drop(world.mapping.remove(&folio, &locked, &world.folios, |_| Entry::HOLE));
        }
    }
}

/// A folio that is in the table after a clear has zeros. CLEAR-P6 is left out.
/// Dies with: CLEAR-P4 left out; a fill that keeps its bytes if a clear is in progress.
#[test]
fn loom_clear_leaves_no_old_bytes() {
    model(|| {
        let file = Cleared::new();
        let filler = {
            let file = Arc::clone(&file);
            loom::thread::spawn(move || file.fill())
        };
        file.clear();
        filler.join().unwrap();
        if file.world.find(0).is_some() {
            assert_eq!(file.bytes.load(Ordering::Relaxed), 0, "old bytes");
        }
    });
}

/// The next fill of a page that was cleared finds what was written to it since, even if that was
/// written out and evicted before the clear has ended.
/// Dies with: zeros whenever a clear is in progress.
#[test]
fn loom_clear_keeps_later_writes() {
    model(|| {
        let file = Cleared::new();
        file.clearing.begin(0..1);
        *file.storage.lock() = 0;
        file.clearing.note_storage_cleared();
        *file.storage.lock() = 8;
        let filler = {
            let file = Arc::clone(&file);
            loom::thread::spawn(move || file.fill())
        };
        file.remove_unless(|locked| locked.flags.get(Flag::Punched));
        file.clearing.end();
        filler.join().unwrap();
        if file.world.find(0).is_some() {
            assert_eq!(file.bytes.load(Ordering::Relaxed), 8, "a lost write");
        }
    });
}
