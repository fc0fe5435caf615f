//! The pool of rings.
//!
//! A queue leases a ring when it has several transfers to start, and gives it back when none is in
//! flight any more. Rings are made when all that exist are leased, up to a small number (twice
//! the CPUs: a ring is leased for as long as the device is at work, not the CPU); then leasing
//! waits. Nobody keeps a ring while others wait for one: after a turn (`lease.rs`) a queue lets its
//! ring run empty and leases again, behind those who wait. And nobody who has one waits for another
//! (IO-5: while transfers are in flight their queue's owner waits for nothing else).
//!
//! A device that does not answer may keep every ring there is. So nobody waits for one for long:
//! after [`WAIT_MAX`] without a ring given back the pool is *stalled*, and until one is given back
//! transfers are made with plain calls, as if there were no rings.
//!
//! Rings live as long as the pool, with their tables: whatever is registered stays registered for
//! the next lease. The pool is the arena's watcher and lets go of chunks before their pages go.
//!
//! Lock order: arena, pool, tables of a ring. None is held during a transfer.

use std::sync::Arc;
use std::time::Duration;

use super::chunks::Chunks;
use super::counts::Counts;
use super::lease::Lease;
use super::tables::{SLOTS, Tables};
use crate::memory::ChunkWatcher;
use crate::sync::{Condvar, Mutex};
use crate::sys::fork::Origin;
use crate::sys::ring::{self, RingQueues};

/// How long a queue waits for a ring while none is given back. A turn with one takes less, unless
/// its transfers are large or the device is slow: plain calls are as good then.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Rings {
    plan: Plan,
    pool: Mutex<Pool>,
    returned: Condvar,
    counts: Counts,
    /// A forked child must not touch the rings it seems to have.
    origin: Origin,
}

/// What rings are made of.
#[derive(Debug)]
pub(super) struct Plan {
    /// How many; 0 if there is no io_uring.
    pub(super) rings_max: usize,
    /// Transfers in flight in each.
    pub(super) depth: usize,
    /// Whether they have a table of files.
    pub(super) files: bool,
    /// The memory to register, if they have a table of that.
    pub(super) chunks: Option<Chunks>,
}

#[derive(Debug)]
struct Pool {
    free: Vec<Ring>,
    all: Vec<Arc<Tables>>,
    slots: Vec<u32>,
    waiting: usize,
    /// Somebody has waited in vain, and no ring has been given back since.
    is_stalled: bool,
    /// The kernel does not let us use rings any more.
    is_broken: bool,
}

/// One ring, with what is registered in it.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) queues: RingQueues,
    pub(super) tables: Arc<Tables>,
}

impl Rings {
    /// No rings yet.
    pub(super) fn new(plan: Plan) -> Self {
        let pool = Pool {
            free: Vec::new(),
            all: Vec::new(),
            slots: if plan.files { (0..SLOTS).rev().collect() } else { Vec::new() },
            waiting: 0,
            is_stalled: false,
            is_broken: plan.rings_max == 0,
        };
        Self {
            plan,
            pool: Mutex::new(pool),
            returned: Condvar::new(),
            counts: Counts::default(),
            origin: Origin::here(),
        }
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// The memory that is registered, if any is.
    pub(super) fn chunks(&self) -> Option<&Chunks> {
        self.plan.chunks.as_ref()
    }

    /// A ring of the caller's own; waits while all are leased, but not for long. `None`: there are
    /// no rings here, or those that are do not come back.
    pub(super) fn lease(&self) -> Option<Lease<'_>> {
        let mut pool = self.pool.lock();
        let mut has_waited = false;
        while !pool.is_broken {
            // Who comes later stands behind those who wait.
            let is_next = has_waited || pool.waiting == 0;
            if is_next && let Some(ring) = pool.free.pop().or_else(|| self.make_ring(&mut pool)) {
                if !pool.free.is_empty() {
                    self.returned.notify_one();
                }
                return Some(Lease::new(self, ring));
            }
            if pool.all.is_empty() || pool.is_stalled {
                return None;
            }
            pool.waiting += 1;
            let timed_out = self.returned.wait_for(&mut pool, WAIT_MAX).timed_out();
            pool.waiting -= 1;
            has_waited = true;
            // One that was given back just now is for whoever is woken for it.
            pool.is_stalled = timed_out && pool.free.is_empty();
        }
        None
    }

    /// Another ring, if there may be one and the kernel has one now.
    fn make_ring(&self, pool: &mut Pool) -> Option<Ring> {
        if pool.all.len() >= self.plan.rings_max {
            return None;
        }
        let (queues, tables) = match ring::open(self.plan.depth as u32) {
            Ok(ends) => ends,
            Err(error) => {
                log::debug!("no other ring can be had: {error}");
                return None;
            }
        };
        let chunks = self.plan.chunks.as_ref().map_or(0, Chunks::len);
        let tables = Arc::new(Tables::new(tables, self.plan.files, chunks));
        pool.all.push(Arc::clone(&tables));
        Some(Ring { queues, tables })
    }

    /// Takes a ring back whose lease has ended.
    pub(super) fn give_back(&self, ring: Ring) {
        let mut pool = self.pool.lock();
        pool.free.push(ring);
        pool.is_stalled = false;
        drop(pool);
        self.returned.notify_one();
    }

    /// Does without rings from now on: `ring` cannot be used, nor will any other.
    pub(super) fn give_up(&self, ring: Ring) {
        let mut pool = self.pool.lock();
        pool.is_broken = true;
        pool.all.retain(|tables| !Arc::ptr_eq(tables, &ring.tables));
        self.returned.notify_all();
    }

    /// Whether somebody waits for a ring.
    pub(super) fn is_wanted(&self) -> bool {
        self.pool.lock().waiting > 0
    }

    /// A number for a file that no other has, if there is any left.
    pub(super) fn take_slot(&self) -> Option<u32> {
        self.pool.lock().slots.pop()
    }

    /// Lets every ring forget the file, and the number be given to another.
    pub(super) fn free_slot(&self, slot: u32) {
        if self.origin.is_forked() {
            return;
        }
        for tables in self.all() {
            tables.forget_file(slot);
        }
        self.pool.lock().slots.push(slot);
    }

    pub(super) fn all(&self) -> Vec<Arc<Tables>> {
        self.pool.lock().all.clone()
    }
}

impl ChunkWatcher for Rings {
    fn chunk_is_whole(&self, chunk: usize) {
        if let Some(chunks) = &self.plan.chunks {
            chunks.set_whole(chunk, true);
        }
    }

    // Race: A: lock tables, is whole, register, unlock | B: not whole, lock tables, unregister.
    // Whoever locks the tables second sees what the first did: either B finds A's entry, or A finds
    // the chunk not whole. A ring made meanwhile locked the pool after `all` did, and sees it too.
    fn before_release(&self, chunk: usize) {
        let Some(chunks) = self.plan.chunks.as_ref().filter(|_| !self.origin.is_forked()) else {
            return;
        };
        chunks.set_whole(chunk, false);
        for tables in self.all() {
            tables.forget_chunk(chunk);
        }
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        if self.origin.is_forked() {
            // The mappings were not inherited: something else may have their addresses.
            let pool = self.pool.get_mut();
            std::mem::forget((std::mem::take(&mut pool.free), std::mem::take(&mut pool.all)));
        }
    }
}
