//! The stock of a CPU: frames taken without the arena's lock while another thread fills or empties
//! it under the lock (STOCK-Q1..Q4).

use super::world::{model, spawn};
use crate::sync::{AtomicRun, AtomicU64, Mutex, Ordering};
use std::sync::Arc;

/// A stock beside the frames that belong to no folio, under the arena's lock.
struct World {
    stock: AtomicRun,
    free: Mutex<Vec<u32>>,
    /// The previous use of frame 1.
    used: AtomicU64,
}

impl World {
    /// STOCK-Q1..Q4.
    fn refill(&self) {
        let mut free = self.free.lock();
        free.extend(self.stock.replace(0..0));
        free.sort_unstable();
        let (Some(first), Some(last)) = (free.first().copied(), free.last().copied()) else {
            return;
        };
        assert_eq!(free.len() as u32, last + 1 - first, "frames twice, or lost: {free:?}");
        free.clear();
        self.stock.replace(first..last + 1);
    }
}

/// Two threads that take, and one that refills: every frame is taken once or is still there.
/// Dies with: a take that stores instead of its exchange; a fill that stores its run (STOCK-Q4)
/// without STOCK-Q1.
#[test]
fn loom_stock_each_frame_is_taken_once() {
    model(|| {
        let world = World {
            stock: AtomicRun::default(),
            free: Mutex::new(Vec::new()),
            used: AtomicU64::new(0),
        };
        world.stock.replace(0..3);
        let world = Arc::new(world);
        let taker = spawn(&world, |world| world.stock.take(None));
        let refiller = spawn(&world, |world| world.refill());
        let own = world.stock.take(None);
        let other = taker.join().unwrap();
        refiller.join().unwrap();
        let left = world.stock.replace(0..0);
        let mut all: Vec<u32> = left.chain([own, other].into_iter().flatten()).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2]);
    });
}

/// A thread that takes a frame sees its previous use, which ended before the fill.
/// Dies with: Relaxed in `AtomicRun::take` or `AtomicRun::replace`.
#[test]
fn loom_stock_a_frame_comes_with_its_previous_use() {
    model(|| {
        let world = World {
            stock: AtomicRun::default(),
            free: Mutex::new(vec![1]),
            used: AtomicU64::new(0),
        };
        let world = Arc::new(world);
        let taker = spawn(&world, |world| {
            if world.stock.take(None) == Some(1) {
                assert_eq!(world.used.load(Ordering::Relaxed), 7);
            }
        });
        world.used.store(7, Ordering::Relaxed);
        world.refill();
        taker.join().unwrap();
    });
}
