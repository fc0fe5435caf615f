//! The slots of files (`file/open/slots.rs`): opens and last closes of one file, as described in
//! its head.
//!
//! A file is a word in memory and one on the device; each thread opens it, sets a bit of its own,
//! and closes it. Descriptors are a count: two inodes of the file at a time would be an error.

use super::world::{join_all, model, model_bounded, spawn};
use crate::file::open::slots::{Found, OpenSlots, Retire};
use crate::sync::{AtomicU64, Backoff, Ordering};
use std::sync::Arc;

const KEY: u32 = 7;

#[derive(Debug)]
struct Inode {
    memory: AtomicU64,
}

#[derive(Debug)]
struct Open {
    inode: Arc<Inode>,
    handles: u64,
    is_kept: bool,
}

#[derive(Debug)]
struct World {
    slots: OpenSlots<u32, Open>,
    device: AtomicU64,
    /// Inodes of the file.
    inodes: AtomicU64,
    /// 1 if the device refuses the next write.
    refuses: AtomicU64,
    /// Number of opens that created an inode.
    made: AtomicU64,
}

impl World {
    fn new(refuses: u64) -> Arc<Self> {
        Arc::new(Self {
            slots: OpenSlots::default(),
            device: AtomicU64::new(0),
            inodes: AtomicU64::new(0),
            refuses: AtomicU64::new(refuses),
            made: AtomicU64::new(0),
        })
    }

    fn open(&self) -> Arc<Inode> {
        let found = self.slots.find(KEY, |open| {
            open.handles += 1;
            open.is_kept = false;
            Arc::clone(&open.inode)
        });
        let busy = match found {
            Found::Open(inode) => return inode,
            Found::Vacant(busy) => busy,
        };
        // Relaxed: no other thread may be here, except one that has not finished its close.
        assert_eq!(self.inodes.fetch_add(1, Ordering::Relaxed), 0, "two inodes of one file");
        self.made.fetch_add(1, Ordering::Relaxed);
        let memory = AtomicU64::new(self.device.load(Ordering::Relaxed));
        let inode = Arc::new(Inode { memory });
        assert_eq!(busy.key, KEY);
        busy.fill(Open { inode: Arc::clone(&inode), handles: 1, is_kept: false });
        inode
    }

    fn close(&self, inode: Arc<Inode>) -> Result<(), &'static str> {
        drop(inode);
        let is_last = self.slots.look(KEY, |open| {
            open.handles -= 1;
            open.handles == 0
        });
        if is_last == Some(true) { self.slots.retire(KEY, self, false) } else { Ok(()) }
    }

    fn use_once(&self, bit: u64) -> Result<(), &'static str> {
        let inode = self.open();
        inode.memory.fetch_or(bit, Ordering::Relaxed);
        self.close(inode)
    }

    fn has_all(&self, inode: &Inode) -> bool {
        inode.memory.load(Ordering::Relaxed) == self.device.load(Ordering::Relaxed)
    }
}

impl Retire<Open> for World {
    type Shared = Arc<Inode>;
    type Failure = &'static str;

    fn share_unused(&self, open: &Open) -> Option<Arc<Inode>> {
        (open.handles == 0).then(|| Arc::clone(&open.inode))
    }

    fn make_durable(&self, inode: Arc<Inode>) -> Result<(), &'static str> {
        // Relaxed: only the value counts; several threads may be here.
        if !self.has_all(&inode) && self.refuses.swap(0, Ordering::Relaxed) == 1 {
            return Err("refused");
        }
        self.device.fetch_or(inode.memory.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }

    fn may_go(&self, open: &Open) -> bool {
        assert_eq!(open.handles, 0, "the file is in use");
        self.has_all(&open.inode)
    }

    fn free(&self, open: Open) {
        let mut shared = open.inode;
        let mut backoff = Backoff::default();
        while let Err(other) = Arc::try_unwrap(shared).map(drop) {
            shared = other;
            backoff.wait();
        }
        self.inodes.fetch_sub(1, Ordering::Relaxed);
    }

    fn keep(&self, open: &mut Open) {
        open.is_kept = true;
    }
}

/// Two threads open, write and close a file: it has one inode at a time, everything written is on
/// the device when both are done, and nothing is left over.
/// Dies with: a slot that is free before the inode is (CLOSE-L5 before CLOSE-L4); `open_or_free`
/// that wakes no thread; `find` that takes a slot which is being released; CLOSE-L2 that does not
/// check for handles; CLOSE-L3 whose result is ignored.
#[test]
fn loom_slots_a_file_is_open_once_and_nothing_is_lost() {
    let shared = &*Box::leak(Box::new([0, 0].map(std::sync::atomic::AtomicU64::new)));
    model_bounded(3, || {
        let world = World::new(0);
        let other = spawn(&world, |world| world.use_once(1));
        assert_eq!(world.use_once(2), Ok(()));
        assert_eq!(other.join().unwrap(), Ok(()));
        assert_eq!(world.device.load(Ordering::Relaxed), 3);
        assert_eq!(world.inodes.load(Ordering::Relaxed), 0);
        assert!(world.slots.keys().is_empty());
        let made = world.made.load(Ordering::Relaxed) as usize - 1;
        shared[made].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    let seen = |made: usize| shared[made].load(std::sync::atomic::Ordering::Relaxed) > 0;
    assert!(seen(0) && seen(1), "the inode was shared in no run, or in all");
}

/// A device refuses one write: the bytes stay in memory, and the next open finds them.
/// Dies with: CLOSE-L3 whose result is ignored; a failure that is not reported; `take_if` that does
/// not wait: then a file may be kept that is durable.
#[test]
fn loom_slots_unwritten_bytes_are_kept() {
    model_bounded(2, || {
        let world = World::new(1);
        let others = [1, 2].map(|bit| spawn(&world, move |world: &World| world.use_once(bit)));
        let failures = join_all(others).into_iter().filter(Result::is_err).count();
        assert!(failures <= 1, "more than one failure was reported");
        // A check as in a close of the cache.
        let is_kept = world.slots.look_after_release(KEY, |open| (open.is_kept, open.handles));
        assert!(is_kept.is_none_or(|kept| kept == (true, 0)), "{is_kept:?}");
        assert!(is_kept.is_none() || failures == 1, "no failure was reported");
        assert_eq!(is_kept.is_none(), world.device.load(Ordering::Relaxed) == 3);
        assert_eq!(world.slots.retire(KEY, &*world, false), Ok(()));
        assert_eq!(world.device.load(Ordering::Relaxed), 3);
        assert!(world.slots.keys().is_empty());
        assert_eq!(world.inodes.load(Ordering::Relaxed), 0);
    });
}

/// A thread that takes an unused file in order to give it up has exclusive access.
/// Dies with: `open_or_free` that wakes no thread.
#[test]
fn loom_slots_one_thread_takes_a_file_to_give_it_up() {
    model(|| {
        let world = World::new(0);
        let inode = world.open();
        drop(inode);
        world.slots.look(KEY, |open| open.handles = 0);
        let give_up = |world: &World| {
            let Some((busy, open)) = world.slots.take_if(KEY, |open| open.handles == 0) else {
                return 0;
            };
            world.free(open);
            drop(busy);
            1
        };
        let other = spawn(&world, move |world| give_up(world));
        let given_up = give_up(&world);
        assert_eq!(other.join().unwrap() + given_up, 1);
        assert_eq!(world.inodes.load(Ordering::Relaxed), 0);
        world.use_once(1).unwrap();
    });
}
