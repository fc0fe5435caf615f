//! Write gates (`writeback/gate.rs`): a page never reaches the storage before the log record of its
//! changes.
//!
//! The dirty list with its LSNs, the write state, the folio lock and the durable LSN are the real
//! ones. The log, the device and the page have one word each: the LSN up to which the log is
//! durable, and the LSN of the last change of the page.

use super::world::{FOLIO, model_bounded, one_folio, spawn};
use crate::dirt::dirty::{DirtyList, NotBegun};
use crate::dirt::lsns::{ChangeLsn, KnownDurable, UNCOMMITTED};
use crate::dirt::throttle::DirtyPages;
use crate::page::{FolioRef, Folios};
use crate::sync::{AtomicU64, Ordering};
use std::sync::Arc;

/// A file of one folio, and its log.
#[derive(Debug)]
struct Engine {
    folios: Folios,
    list: DirtyList,
    known: KnownDurable,
    /// LSN up to which the log's storage has it.
    log: AtomicU64,
    /// LSN of the last change, in memory and on the device.
    memory: AtomicU64,
    device: AtomicU64,
    /// Write-outs that the device will refuse.
    refusals: AtomicU64,
}

impl Engine {
    fn new(refusals: u64) -> Arc<Self> {
        let list = DirtyList::new(DirtyPages::alone(&Arc::new(AtomicU64::new(0))));
        list.keep_lsns();
        list.with_lsns(|lsns| lsns.grow(4));
        Arc::new(Self {
            folios: one_folio(),
            list,
            known: KnownDurable::default(),
            log: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            device: AtomicU64::new(0),
            refusals: AtomicU64::new(refusals),
        })
    }

    fn folio(&self) -> FolioRef<'_> {
        self.folios.try_get(FOLIO).expect("the folio is live")
    }

    /// GATE-W1..W5.
    fn write(&self, lsn: u64) {
        let folio = self.folio();
        let locked = folio.lock();
        locked.flags.wait_for_writeback();
        assert!(
            self.list.with_lsns(|lsns| lsns.add(FOLIO, ChangeLsn::Known(lsn))),
            "there is room"
        );
        self.list.mark(&self.folios, FOLIO);
        self.memory.store(lsn, Ordering::Relaxed);
    }

    /// GATE-P1..P5. The pin gets no LSN.
    fn pin(&self, written: u64) {
        let folio = self.folio();
        let locked = folio.lock();
        locked.flags.wait_for_writeback();
        assert!(self.list.with_lsns(|lsns| lsns.add(FOLIO, ChangeLsn::Pinned)), "there is room");
        self.list.mark(&self.folios, FOLIO);
        self.memory.store(written, Ordering::Relaxed);
        self.list.with_lsns(|lsns| lsns.end_pin(FOLIO, true));
    }

    /// Stands for `make_durable`, and for the thread that called it.
    fn flush_log(&self, lsn: u64) {
        self.log.fetch_max(lsn, Ordering::Relaxed);
        self.known.raise(lsn);
    }

    /// GATE-O1..O5. Returns `false` if the gate has held the folio back.
    fn write_out(&self) -> bool {
        let durable = self.known.get();
        let folio = self.folio();
        let Some(locked) = folio.try_lock() else { return true };
        let in_flight = match self.list.begin(&self.folios, FOLIO, durable) {
            Ok(in_flight) => in_flight,
            Err(NotBegun::NotDirty) => return true,
            Err(NotBegun::HeldBack { lsn }) => {
                assert!(lsn > durable);
                return false;
            }
        };
        drop(locked);
        let lsn = self.memory.load(Ordering::Relaxed);
        let ended = std::iter::once((FOLIO, in_flight));
        // Relaxed: in the model, one thread writes the folio out.
        let refusals = self.refusals.load(Ordering::Relaxed);
        if refusals > 0 {
            self.refusals.store(refusals - 1, Ordering::Relaxed);
            self.list.end_failed(&self.folios, ended, || ());
        } else {
            let log = self.log.load(Ordering::Relaxed);
            assert!(lsn <= log, "LSN {lsn} is on the device, and the log ends at {log}");
            self.device.store(lsn, Ordering::Relaxed);
            self.list.end(&self.folios, ended);
        }
        true
    }
}

/// A writer changes the page twice while the flusher writes it out twice and the log is flushed.
/// Dies with: GATE-W2 after GATE-W5; GATE-O3 before GATE-O2 (the LSN read without the lock); a
/// `begin` that does not check; `Relaxed` in `KnownDurable::get`.
#[test]
fn loom_gate_no_page_is_ahead_of_its_log() {
    model_bounded(3, || {
        let engine = Engine::new(0);
        engine.write(1);
        let log = spawn(&engine, |engine: &Engine| engine.flush_log(1));
        let writer = spawn(&engine, |engine: &Engine| engine.write(2));
        engine.write_out();
        engine.write_out();
        log.join().unwrap();
        writer.join().unwrap();
        assert!(!engine.write_out(), "LSN 2 is not durable");
        engine.flush_log(2);
        assert!(engine.write_out());
        assert_eq!(engine.device.load(Ordering::Relaxed), 2);
    });
}

/// A failed write-out keeps the LSNs: the oldest one stays the oldest.
/// Dies with: LSNs that are removed when a write-out begins, or when it fails.
#[test]
fn loom_gate_a_failed_write_out_keeps_the_lsn() {
    model_bounded(3, || {
        let engine = Engine::new(1);
        engine.write(1);
        engine.flush_log(1);
        let writer = spawn(&engine, |engine: &Engine| engine.write(2));
        engine.write_out();
        engine.write_out();
        writer.join().unwrap();
        assert_eq!(engine.list.with_lsns(|lsns| lsns.highest_of(FOLIO)), 2);
        assert!(!engine.write_out(), "LSN 2 is not durable");
        // No flush has made LSN 1 durable, whether it was written or not.
        assert_eq!(engine.list.with_lsns(|lsns| lsns.oldest()), Some(1));
    });
}

/// A page that is not committed is not written, however far the log is durable.
/// Dies with: `may_pass` without its second condition.
#[test]
fn loom_gate_an_uncommitted_page_stays() {
    model_bounded(3, || {
        let engine = Engine::new(0);
        engine.write(UNCOMMITTED);
        let commit = spawn(&engine, |engine: &Engine| {
            let folio = engine.folio();
            let _locked = folio.lock();
            engine.memory.store(5, Ordering::Relaxed);
            engine.list.with_lsns(|lsns| lsns.commit(FOLIO, 5));
        });
        engine.known.raise(4);
        engine.write_out();
        assert_eq!(engine.device.load(Ordering::Relaxed), 0);
        commit.join().unwrap();
        engine.flush_log(5);
        assert!(engine.write_out());
        assert_eq!(engine.device.load(Ordering::Relaxed), 5);
    });
}

/// A page with a pending LSN is written out while a pin changes it and is dropped without an LSN.
/// Dies with: GATE-P4 after GATE-P5; an `end_pin` that forgets the change.
#[test]
fn loom_gate_a_pin_without_an_lsn_stays() {
    model_bounded(3, || {
        let engine = Engine::new(0);
        engine.write(1);
        engine.flush_log(1);
        let pinned = spawn(&engine, |engine: &Engine| engine.pin(9));
        engine.write_out();
        engine.write_out();
        pinned.join().unwrap();
        assert!(!engine.write_out(), "the change has no log record");
        assert!(engine.device.load(Ordering::Relaxed) <= 1);
        engine.list.with_lsns(|lsns| lsns.commit(FOLIO, 9));
        engine.flush_log(9);
        assert!(engine.write_out());
        assert_eq!(engine.device.load(Ordering::Relaxed), 9);
    });
}
