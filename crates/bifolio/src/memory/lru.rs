//! The LRU: who was used lately, and in which order the others go.
//!
//! Called by `file` when a folio is filled, by `reclaim` when one is needed. Two lists and, before
//! them, a batch for each CPU, so that adding a folio takes the lists' lock once in 31 times:
//!
//! ```text
//!   fill --> batch of this CPU (31) --full, or drained--> INACTIVE head
//!                                                          |      ^
//!   refault that was near --> batch --> ACTIVE head        v      | rotated when referenced
//!                                        |  ^           tail: isolate --> reclaim --> shadow
//!                                        |  '--second chance: referenced--'
//!                                        '--tail, not referenced--> INACTIVE head
//! ```
//!
//! Readers never come here: they set REFERENCED in the Entry, and reclaim finds it.
//!
//! Folios of files that have nowhere to put their pages (memory files without a swap) come to no
//! batch and no list. They are marked as unlisted, until they are freed, and their pages counted
//! ([`Lru::unlisted_pages`]): so reclaim does not wait for them, as it does for others that it does
//! not find on a list because somebody is in the middle of something with them.
//!
//! Invariants:
//! - LRU-1: a folio is in at most one of: a batch, a list, an isolation. A batch slot and an
//!   isolation hold a reference each; a list does not (the last put takes the folio off it).
//! - LRU-2: ON_LRU is set exactly while the folio is linked in a list, both under the lists' lock.
//!   Only who holds a reference, or frees, changes it: so the last put may look without the lock.
//! - LRU-3: when a drain returns, every folio that was in a drained batch before the call is on a
//!   list and the batch's reference to it is put: the whole of it happens under the batch's lock.
//!
//! Lock order: the lock of the drains of all, a batch's lock, then the lists' lock. References are
//! put after the lists' lock is released, because the last put takes it.

use super::batches::CpuBatch;
use super::lists::{ListKind, ListSizes, Lists};
use crate::page::{BATCH_SLOTS, Flag, Folio, FolioId, FolioRef, Folios};
use crate::sync::{AtomicU64, Mutex, Ordering};

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Lru {
    pub(super) lists: Mutex<Lists>,
    /// Mirror of the lists', for who only looks.
    pub(super) active_pages: AtomicU64,
    /// Pages of folios that come to no list.
    pub(super) unlisted_pages: AtomicU64,
    pub(super) cpus: Box<[Mutex<CpuBatch>]>,
    /// Drains of all batches that have begun (G4 of `batches.rs`).
    pub(super) generation: AtomicU64,
    /// Held by a drain of all batches.
    pub(super) draining: Mutex<()>,
    /// Evictions and activations so far: the clock of refault distances.
    pub(super) clock: AtomicU64,
}

impl Lru {
    /// Empty lists, with a batch for each of `cpus` CPUs.
    pub(crate) fn new(cpus: usize) -> Self {
        Self {
            lists: Mutex::new(Lists::default()),
            active_pages: AtomicU64::new(0),
            unlisted_pages: AtomicU64::new(0),
            cpus: (0..cpus.max(1)).map(|_| Mutex::default()).collect(),
            generation: AtomicU64::new(0),
            draining: Mutex::new(()),
            clock: AtomicU64::new(0),
        }
    }

    /// Pages on the lists now.
    pub(crate) fn sizes(&self) -> ListSizes {
        self.lists.lock().sizes()
    }

    /// Pages of folios that come to no list, and are alive.
    pub(crate) fn unlisted_pages(&self) -> u64 {
        self.unlisted_pages.load(Ordering::Relaxed)
    }

    /// A new folio, locked, will be on no list: its file has nowhere to put its pages.
    pub(crate) fn note_unlisted(&self, folio: &Folio) {
        if folio.flags.set(Flag::Unlisted) {
            // Relaxed: only a count.
            self.unlisted_pages.fetch_add(folio.pages(), Ordering::Relaxed);
        }
    }

    /// Changes the lists.
    pub(super) fn change<T>(&self, work: impl FnOnce(&mut Lists) -> T) -> T {
        let mut lists = self.lists.lock();
        let answer = work(&mut lists);
        self.active_pages.store(lists.sizes().active_pages, Ordering::Relaxed);
        answer
    }

    /// Takes folios off the tail of a list, each with a reference: a batch, or so many that they
    /// have `pages_max` pages together, whichever is less.
    ///
    /// A folio that is frozen or going away is left to whoever has it, at the other end.
    pub(crate) fn isolate<'a>(
        &self,
        folios: &'a Folios,
        kind: ListKind,
        pages_max: u64,
        isolated: &mut Vec<FolioRef<'a>>,
    ) {
        self.change(|lists| {
            let mut pages = 0;
            for _ in 0..BATCH_SLOTS {
                let Some(id) = lists.tail(kind).filter(|_| pages < pages_max) else { break };
                pages += folios.get(id).pages();
                match folios.try_get(id) {
                    Ok(folio) => {
                        lists.remove(folios, id);
                        isolated.push(folio);
                    }
                    Err(_) => lists.rotate(folios, id, kind),
                }
            }
        });
    }

    /// Puts isolated folios back at the head of a list and drops the isolation's references.
    pub(crate) fn put_back(
        &self,
        folios: &Folios,
        isolated: &mut Vec<FolioRef<'_>>,
        kind: ListKind,
    ) {
        self.change(|lists| {
            for folio in isolated.iter() {
                lists.add(folios, folio.id(), kind);
            }
        });
        isolated.clear();
    }

    /// Moves folios to the tail of the inactive list, those that are on a list: they go next. Puts
    /// the references.
    pub(crate) fn demote(&self, folios: &Folios, unwanted: &mut Vec<FolioRef<'_>>) {
        self.change(|lists| {
            for folio in unwanted.iter() {
                if folio.folio().flags.get(Flag::OnLru) {
                    lists.demote(folios, folio.id());
                }
            }
        });
        unwanted.clear();
    }

    /// Takes one folio off its list, if it is on one. The caller has a reference.
    pub(crate) fn isolate_one(&self, folios: &Folios, id: FolioId) -> bool {
        self.change(|lists| {
            let listed = folios.get(id).flags.get(Flag::OnLru);
            if listed {
                lists.remove(folios, id);
            }
            listed
        })
    }

    /// Those of `ids` that are on the inactive list, in the oldest quarter of it.
    pub(crate) fn old_among(&self, folios: &Folios, ids: &[FolioId]) -> Vec<FolioId> {
        let lists = self.lists.lock();
        ids.iter().copied().filter(|id| lists.is_old(folios, *id)).collect()
    }

    /// Puts the folio `new` where `old` is on its list, if that is on one, and takes that off. The
    /// caller owns `old`, frozen, and has a reference to `new`, which is on no list.
    pub(crate) fn replace(&self, folios: &Folios, old: FolioId, new: FolioId) {
        if folios.get(old).flags.get(Flag::Unlisted) {
            return self.note_unlisted(folios.get(new));
        }
        self.change(|lists| lists.replace(folios, old, new));
    }

    /// Takes a dead folio off whatever list it is on. The caller owns it, frozen.
    pub(crate) fn forget(&self, folios: &Folios, id: FolioId) {
        // LRU-2: nobody links it any more (that takes a reference), so a clear flag stays clear.
        let folio = folios.get(id);
        if folio.flags.get(Flag::OnLru) {
            let _was_listed = self.isolate_one(folios, id);
        }
        if folio.flags.get(Flag::Unlisted) {
            self.unlisted_pages.fetch_sub(folio.pages(), Ordering::Relaxed);
        }
    }
}
