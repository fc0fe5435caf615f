//! The batches: up to 31 folios for each CPU on their way to the lists.
//!
//! PROTOCOL, as two columns:
//!
//! ```text
//!  ADD (on CPU c)                             DRAIN (by anybody)
//!  A1 lock batch c                            D1 lock batch c
//!  A2 push: the slot owns the reference       D2 lock the lists, link every folio, unlock
//!  A3 full, or large folio? D2, D3            D3 put every slot's reference; empty the batch
//!  A4 unlock batch c                          D4 unlock batch c
//! ```
//!
//! Which CPU's batch is only a matter of speed: a thread that moved between looking up its CPU and
//! A1 uses a neighbour's batch. A drain needs no help from the other CPU, unlike the kernel's.

use super::{ListKind, Lru};
use crate::folio::{Flag, FolioBatch, FolioRef, Folios};
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
        folio.folio().batch.store(cpu as u16 + 1, Ordering::Relaxed);
        // A large folio would keep too much from reclaim: it does not wait in a batch.
        let large = folio.folio().order() > 0;
        let full = batch.adds.push(folio.into_id()) || large;
        if full {
            self.move_to_lists(folios, &mut batch);
        }
        full
    }

    /// Moves what the batch of `cpu` holds to the lists (LRU-3).
    pub(crate) fn drain(&self, folios: &Folios, cpu: usize) {
        let mut batch = self.cpus[cpu % self.cpus.len()].lock();
        self.move_to_lists(folios, &mut batch);
    }

    /// Drains the batches of all CPUs.
    pub(crate) fn drain_all(&self, folios: &Folios) {
        for cpu in 0..self.cpus.len() {
            self.drain(folios, cpu);
        }
    }

    fn move_to_lists(&self, folios: &Folios, batch: &mut CpuBatch) {
        let adds = std::mem::take(&mut batch.adds);
        if adds.is_empty() {
            return;
        }
        {
            let mut lists = self.lists.lock();
            for id in adds.as_slice() {
                let folio = folios.get(*id);
                folio.batch.store(0, Ordering::Relaxed);
                let active = folio.flags.get(Flag::Active);
                let kind = if active { ListKind::Active } else { ListKind::Inactive };
                lists.add(folios, *id, kind);
            }
        }
        for id in adds.as_slice() {
            drop(folios.adopt(*id));
        }
    }
}
