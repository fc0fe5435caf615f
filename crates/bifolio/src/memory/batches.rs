//! The batches: up to 31 folios for each CPU on their way to the lists.
//!
//! PROTOCOL, as three columns:
//!
//! ```text
//!  ADD (on CPU c)                  DRAIN (by anybody)            DRAIN OF ALL
//!  A1 lock batch c                 D1 lock batch c               G1 remember the generation
//!  A2 push: the slot owns the      D2 lock the lists, link       G2 lock the drains
//!     reference; c is noted in        every folio, unlock        G3 another generation now? then
//!     the descriptor               D3 put every slot's              unlock: done
//!  A3 full, or large folio?           reference; empty it        G4 begin the next generation
//!     D2, D3                       D4 unlock batch c             G5 D1 to D4 for each CPU
//!  A4 unlock batch c                                             G6 unlock the drains
//! ```
//!
//! Which CPU's batch is only a matter of speed: a thread that moved between looking up its CPU and
//! A1 uses a neighbour's batch. A drain needs no help from the other CPU, unlike the kernel's.
//!
//! - G3 (the kernel's `__lru_add_drain_all`; R14 of the notes): who finds a new generation behind
//!   the lock was waited for by a drain that began, at G4, after G1: what was added before G1 is
//!   on the lists. G4 before G5: if it came after, one that began too early would count.
//! - A drain *for some folios* ([`Lru::drain_for`]) is D1 to D4 if one of the slots holds one of
//!   them, which is exact: a folio is in the batch it was given to last (A2), or in none. When D1
//!   has the lock, no other drain is between D2 and D3. So requests that meet need no generation:
//!   the second finds nothing.

use super::{ListKind, Lru};
use crate::page::{FolioBatch, FolioId, FolioRef, Folios};
use crate::sync::Ordering;

/// The folios one CPU has gathered.
#[derive(Debug, Default)]
pub(super) struct CpuBatch {
    adds: FolioBatch,
}

impl Lru {
    /// Hands a new folio to the batch of `cpu`; the reference becomes the slot's. It goes to the
    /// active list if its ACTIVE flag is set. Tells whether the batch went to the lists.
    pub(crate) fn add(&self, folios: &Folios, folio: FolioRef<'_>, cpu: usize) -> bool {
        let cpu = cpu % self.cpus.len();
        let mut batch = self.cpus[cpu].lock();
        folio.folio().set_batch_cpu(cpu);
        // A large folio would keep too much from reclaim: it does not wait in a batch.
        let large = folio.folio().order() > 0;
        let full = batch.adds.push(folio.into_id()) || large;
        if full {
            self.move_to_lists(folios, &mut batch);
        }
        full
    }

    /// Moves what the batch of `cpu` holds to the lists (LRU-3); tells whether that was anything.
    pub(crate) fn drain(&self, folios: &Folios, cpu: usize) -> bool {
        self.drain_for(folios, cpu, |_| true)
    }

    /// Drains the batch of `cpu` if it holds one of the `wanted` folios; tells whether it did. None
    /// of them is in it then.
    pub(crate) fn drain_for(
        &self,
        folios: &Folios,
        cpu: usize,
        wanted: impl Fn(FolioId) -> bool,
    ) -> bool {
        let mut batch = self.cpus[cpu % self.cpus.len()].lock();
        let found = batch.adds.as_slice().iter().any(|id| wanted(*id));
        if found {
            self.move_to_lists(folios, &mut batch);
        }
        found
    }

    /// Drains the batches of all CPUs; tells how many held anything. Calls that meet share one.
    pub(crate) fn drain_all(&self, folios: &Folios) -> usize {
        // Relaxed: the batches' locks order it. A drain that missed what was added before this
        // load had its generation stored before that was added.
        let asked = self.generation.load(Ordering::Relaxed);
        let _turn = self.draining.lock();
        if self.generation.load(Ordering::Relaxed) != asked {
            return 0;
        }
        self.generation.store(asked + 1, Ordering::Relaxed);
        (0..self.cpus.len()).filter(|cpu| self.drain(folios, *cpu)).count()
    }

    fn move_to_lists(&self, folios: &Folios, batch: &mut CpuBatch) {
        let adds = std::mem::take(&mut batch.adds);
        self.change(|lists| {
            for id in adds.as_slice() {
                lists.add(folios, *id, ListKind::of(folios.get(*id)));
            }
        });
        for id in adds.as_slice() {
            drop(folios.adopt(*id));
        }
    }
}
