//! The dirty list (`dirt/dirty.rs`) with the write state of a folio (`page/flags.rs`): the two
//! columns at the head of the list.
//!
//! The list and the state are the real ones. The device is replaced: it has one word for the one
//! folio and refuses the first write-outs if told to.

use super::world::{FOLIO, OWNER, join_all, model, model_bounded, one_folio, spawn};
use crate::dirt::dirty::{DirtyFolios, DirtyList};
use crate::dirt::lsns::NO_LSN;
use crate::dirt::throttle::DirtyPages;
use crate::page::{FolioRef, Folios, WriteState};
use crate::sync::{AtomicU64, Ordering};
use std::sync::Arc;

/// A file of one folio.
#[derive(Debug)]
struct Disk {
    folios: Folios,
    list: DirtyList,
    /// Contents of the folio, and of the device.
    memory: AtomicU64,
    device: AtomicU64,
    /// Write-outs that the device will refuse.
    refusals: AtomicU64,
    errors: AtomicU64,
}

impl Disk {
    fn new(refusals: u64) -> Arc<Self> {
        Arc::new(Self {
            folios: one_folio(),
            list: DirtyList::new(DirtyPages::alone(&Arc::new(AtomicU64::new(0)))),
            memory: AtomicU64::new(0),
            device: AtomicU64::new(0),
            refusals: AtomicU64::new(refusals),
            errors: AtomicU64::new(0),
        })
    }

    fn folio(&self) -> FolioRef<'_> {
        self.folios.try_get(FOLIO).expect("the folio is live")
    }

    /// Stores without waiting for a write-out, as through a map.
    fn store(&self, value: u64) {
        let folio = self.folio();
        let _locked = folio.lock();
        self.memory.store(value, Ordering::Relaxed);
        self.list.mark(&self.folios, FOLIO);
    }

    /// Writes the folio out if it is dirty.
    fn write_out(&self) {
        let folio = self.folio();
        let locked = folio.lock();
        locked.flags.wait_for_writeback();
        let Ok(in_flight) = self.list.begin(&self.folios, FOLIO, NO_LSN) else { return };
        drop(locked);
        let ended = std::iter::once((FOLIO, in_flight));
        // Relaxed: in the model, the thread that writes the folio out is the only one here.
        let refusals = self.refusals.load(Ordering::Relaxed);
        if refusals > 0 {
            self.refusals.store(refusals - 1, Ordering::Relaxed);
            self.list.end_failed(&self.folios, ended, || {
                self.errors.fetch_add(1, Ordering::Relaxed);
            });
        } else {
            self.device.store(self.memory.load(Ordering::Relaxed), Ordering::Relaxed);
            self.list.end(&self.folios, ended);
        }
    }

    /// Does SYNC-S1..S5. Returns `true` on success.
    fn sync(&self, gather: impl Fn(&Self, u64) -> bool) -> bool {
        let errors_before = self.errors.load(Ordering::Relaxed);
        let end = self.list.now();
        if gather(self, end) {
            self.write_out();
        }
        self.list.wait_for_in_flight();
        self.errors.load(Ordering::Relaxed) == errors_before
    }

    fn on_device(&self) -> u64 {
        self.device.load(Ordering::Relaxed)
    }
}

/// Returns `true` if the walk of a whole file finds the folio.
fn walked(disk: &Disk, end: u64) -> bool {
    is_found(&disk.list.walk(end).next_folios(&disk.folios, &(0..1), 9, false))
}

/// Returns `true` if a range of one page finds the folio.
fn asked(disk: &Disk, end: u64) -> bool {
    is_found(&disk.list.among(&disk.folios, &[FOLIO], OWNER, end))
}

fn is_found(found: &DirtyFolios<'_>) -> bool {
    !found.folios.is_empty()
}

/// A sync that finds another thread's write-out, successful or failed, succeeds only with the bytes
/// on the device; if it fails, the page is dirty afterwards.
/// Dies with: an error recorded before `end_failed` (the list not locked); a state that is clean
/// between dirty and writing (`transition_to_writing` in two steps); no wait at SYNC-S4.
#[test]
fn loom_dirty_a_sync_meets_a_write_out() {
    for gather in [walked, asked] {
        for refusals in 0..=2 {
            // Three preemptions: an unbounded run takes minutes.
            model_bounded(3, move || {
                let disk = Disk::new(refusals);
                disk.store(7);
                let flusher = spawn(&disk, Disk::write_out);
                if disk.sync(gather) {
                    assert_eq!(disk.on_device(), 7, "the sync returned too early");
                }
                flusher.join().unwrap();
                let is_written = disk.on_device() == 7;
                let state = disk.folio().folio().flags.write_state();
                assert_eq!(state, if is_written { WriteState::Clean } else { WriteState::Dirty });
                assert_eq!(disk.list.is_all_written(), is_written);
            });
        }
    }
}

/// A store before the sync, during a write-out that began earlier, is also on the device.
/// Dies with: `transition_to_written` that forgets that the folio is dirty again.
#[test]
fn loom_dirty_a_store_during_a_write_out_is_synced() {
    for gather in [walked, asked] {
        model_bounded(3, move || {
            let disk = Disk::new(0);
            disk.store(7);
            let flusher = spawn(&disk, Disk::write_out);
            disk.store(8);
            assert!(disk.sync(gather));
            assert_eq!(disk.on_device(), 8);
            flusher.join().unwrap();
            assert!(disk.list.is_all_written());
        });
    }
}

/// A check for the end of all write-outs never mistakes a write-out that will fail for finished.
/// Dies with: `is_all_written` that does not count what is in flight.
#[test]
fn loom_dirty_a_write_out_in_flight_counts_as_pending() {
    model(|| {
        let disk = Disk::new(1);
        disk.store(7);
        let flusher = spawn(&disk, Disk::write_out);
        assert!(!disk.list.is_all_written());
        flusher.join().unwrap();
        assert!(!disk.list.is_all_written());
    });
}

/// Two syncs that wait at the same time are both woken.
/// Dies with: no `notify_all` in `note_ended`; epochs that are not dropped.
#[test]
fn loom_dirty_two_syncs_wait_together() {
    model_bounded(2, || {
        let disk = Disk::new(0);
        disk.store(7);
        let others = [(); 2].map(|()| {
            spawn(&disk, |disk: &Disk| {
                assert!(disk.sync(asked));
                assert_eq!(disk.on_device(), 7);
            })
        });
        disk.write_out();
        join_all(others);
        assert!(disk.list.is_all_written());
    });
}
