//! The batch protocol of mapped files (B1..B9 of `reclaim/unmap.rs`) against raw stores and loads,
//! lookups, syncs and write-outs in place.
//!
//! What must hold: the last value stored is in the page, or on its way to where the next lookup
//! finds it; a sync that returns leaves on the device what was stored before it began; whoever has
//! a folio's lock has its page.
//!
//! The steps are those of the model (`region.rs`), so weakenings are made there, by name; that each
//! is seen by the runs it names is a test of its own (`loom_unmap_what_is_left_out_is_missed`):
//!
//! - B4: the look before the copy; no look; the write-out begun there, before the unmapping can
//!   fail.
//! - B5: a copy in place of the pages. B6: no flush. B7: no comparison. B8, of a clean one, too
//!   early: before B6.
//! - B9: who waits is not given the page back; what was not written goes.
//! - REGION-3: no section, on either side. A sync that does not wait for what others have begun.
//! - A write-out in place that protects the page after it has read the bytes, or without a flush,
//!   or whose write-out begins after that.
//! - A pin that does not look for READY once it has its reference.
//!
//! Besides, with a weaker table: `begin_eviction` that does not clear READY (`vs_pin`), does not
//! freeze; `try_freeze` that does not mind references.

use super::region::{How, Region, WELL, Weakening};
use super::world::{model_bounded, spawn};
use std::sync::Arc;

/// A run of a model, with the region weakened.
type Run = fn(Weakening);

fn holds(run: Run) {
    model_bounded(3, move || run(Weakening::None));
}

/// A page that was stored to, which nobody has noticed yet.
fn region_with_store(weakening: Weakening) -> Arc<Region> {
    let region = Region::new(1, weakening);
    region.store(0, 2);
    region
}

fn vs_store(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let writer = spawn(&region, |region| region.store(0, 2));
    region.evict(&[0], WELL);
    writer.join().unwrap();
    region.check_settled(0, 2);
}

/// A store to a clean page is not lost, through whatever translation: it is found by B4, or by
/// comparing, or comes to the page that is filled anew.
#[test]
fn loom_unmap_vs_store() {
    holds(vs_store);
}

fn vs_store_dirty(weakening: Weakening) {
    let region = region_with_store(weakening);
    let writer = spawn(&region, |region| region.store(0, 3));
    region.evict(&[0], WELL);
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// Nor one to a page that was stored to before: it is in the copy that is written out, or in the
/// page that comes back.
#[test]
fn loom_unmap_vs_store_dirty() {
    holds(vs_store_dirty);
}

fn vs_store_marked(weakening: Weakening) {
    let region = region_with_store(weakening);
    region.mark_all_stored();
    let writer = spawn(&region, |region| region.store(0, 3));
    region.evict(&[0], WELL);
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// Nor one to a page that is dirty already, of which no copy is made at B4.
#[test]
fn loom_unmap_vs_store_marked() {
    holds(vs_store_marked);
}

fn vs_two_stores(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let writer = spawn(&region, |region| {
        region.store(0, 2);
        region.store(0, 3);
    });
    region.evict(&[0], WELL);
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// Nor the second of two, wherever the first was found.
#[test]
fn loom_unmap_vs_two_stores() {
    holds(vs_two_stores);
}

fn vs_store_in_batch(weakening: Weakening) {
    let region = Region::new(2, weakening);
    region.store(0, 4);
    let writer = spawn(&region, |region| region.store(1, 5));
    region.evict(&[0, 1], WELL);
    writer.join().unwrap();
    region.check_settled(0, 4);
    region.check_settled(1, 5);
}

/// Each page of a batch has its own state: one is dirty, the other is stored to meanwhile.
#[test]
fn loom_unmap_vs_store_in_batch() {
    holds(vs_store_in_batch);
}

fn late_store_returns(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let writer = spawn(&region, |region| {
        region.store(0, 2);
        region.sync();
        assert_eq!(region.on_device(0), 2);
    });
    region.evict(&[0], How { may_write: false, ..WELL });
    writer.join().unwrap();
    region.check_settled(0, 2);
}

/// A store that is found late brings the page back, if the caller may not write it out.
#[test]
fn loom_unmap_late_store_returns() {
    holds(late_store_returns);
}

fn vs_refill(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let reader = spawn(&region, |region| {
        assert_eq!(region.load(0), 1);
        region.look_up(0, || assert!(region.is_present(0)));
    });
    region.evict(&[0], WELL);
    reader.join().unwrap();
    region.check_settled(0, 1);
}

/// A page that is filled while its batch is under way is not wiped by the unmapping (REGION-2).
#[test]
fn loom_unmap_vs_refill() {
    holds(vs_refill);
}

fn vs_lookup(weakening: Weakening) {
    let region = region_with_store(weakening);
    let reader = spawn(&region, |region| region.look_up(0, || assert_eq!(region.load(0), 2)));
    region.evict(&[0], WELL);
    reader.join().unwrap();
    region.check_settled(0, 2);
}

/// A lookup that meets the folio on its way out gets one whose page is there (REGION-1): the same
/// one, rescued by the reference, or the next one.
#[test]
fn loom_unmap_vs_lookup() {
    holds(vs_lookup);
}

fn vs_sync(weakening: Weakening) {
    let region = region_with_store(weakening);
    let syncer = spawn(&region, |region| {
        region.sync();
        assert_eq!(region.on_device(0), 2, "synced");
    });
    region.evict(&[0], WELL);
    syncer.join().unwrap();
    region.check_settled(0, 2);
}

/// A sync finds a store, or waits for the write-out of who found it.
#[test]
fn loom_unmap_vs_sync() {
    holds(vs_sync);
}

fn vs_store_and_sync(weakening: Weakening) {
    let region = Region::new(1, weakening);
    let writer = spawn(&region, |region| {
        region.store(0, 2);
        region.sync();
        assert_eq!(region.on_device(0), 2, "synced");
    });
    region.evict(&[0], WELL);
    writer.join().unwrap();
    region.check_settled(0, 2);
}

/// A sync right after a store that came too late for B4 (REGION-3).
#[test]
fn loom_unmap_vs_store_and_sync() {
    holds(vs_store_and_sync);
}

fn vs_store_beside_sync(weakening: Weakening) {
    let region = region_with_store(weakening);
    let syncer = spawn(&region, |region| {
        region.sync();
        assert!([2, 3].contains(&region.on_device(0)), "synced");
    });
    let writer = spawn(&region, |region| region.store(0, 3));
    region.evict(&[0], WELL);
    syncer.join().unwrap();
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// All three at once.
#[test]
fn loom_unmap_vs_store_beside_sync() {
    // Two preemptions: three threads.
    model_bounded(2, || vs_store_beside_sync(Weakening::None));
}

fn revoke_vs_store(weakening: Weakening) {
    let region = region_with_store(weakening);
    let writer = spawn(&region, |region| region.store(0, 3));
    region.sync();
    assert!([2, 3].contains(&region.on_device(0)), "synced");
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// R15: what a write-out in place writes is what was stored when it began, or more; what is stored
/// after it is found again.
#[test]
fn loom_unmap_revoke_vs_store() {
    holds(revoke_vs_store);
}

fn revoke_vs_sync(weakening: Weakening) {
    let region = region_with_store(weakening);
    let writer = spawn(&region, |region| {
        region.store(0, 3);
        region.sync();
        assert_eq!(region.on_device(0), 3, "synced");
    });
    region.sync();
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// R15, with a sync that finds the store while the write-out is under way: it is dirty again, and
/// is written once more.
#[test]
fn loom_unmap_revoke_vs_sync() {
    holds(revoke_vs_sync);
}

fn write_fails(weakening: Weakening) {
    let region = region_with_store(weakening);
    let writer = spawn(&region, |region| {
        assert_eq!(region.load(0), 2);
        region.store(0, 3);
    });
    region.evict(&[0], How { write_fails: true, ..WELL });
    assert!(region.is_present(0) && region.is_dirty(0));
    assert_eq!(region.on_device(0), 1);
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// B9: a page that was not written comes back, dirty, with its bytes.
#[test]
fn loom_unmap_write_fails() {
    holds(write_fails);
}

fn unmap_fails(weakening: Weakening) {
    let region = region_with_store(weakening);
    let writer = spawn(&region, |region| region.store(0, 3));
    region.evict(&[0], How { unmap_fails: true, ..WELL });
    assert!(region.is_present(0) && region.is_dirty(0));
    writer.join().unwrap();
    region.check_settled(0, 3);
}

/// A page that is not unmapped stays as it was.
#[test]
fn loom_unmap_fails() {
    holds(unmap_fails);
}

fn unmap_fails_vs_sync(weakening: Weakening) {
    let region = region_with_store(weakening);
    let syncer = spawn(&region, |region| {
        region.sync();
        assert_eq!(region.on_device(0), 2, "synced");
    });
    region.evict(&[0], How { unmap_fails: true, ..WELL });
    syncer.join().unwrap();
    region.check_settled(0, 2);
}

/// A sync that comes while the page seems to be on its way does not take that for the end of it.
#[test]
fn loom_unmap_fails_vs_sync() {
    holds(unmap_fails_vs_sync);
}

fn vs_pin(weakening: Weakening) {
    let region = region_with_store(weakening);
    let reader = spawn(&region, |region| {
        let pinned = region.pin(0);
        assert!([None, Some(2)].contains(&pinned), "{pinned:?}");
    });
    region.evict(&[0], WELL);
    reader.join().unwrap();
    region.check_settled(0, 2);
}

/// Who takes a reference to a folio that was READY, without its lock, has its page.
#[test]
fn loom_unmap_vs_pin() {
    holds(vs_pin);
}

/// Each weakening of the head of the file dies in the runs that are there for it.
#[test]
fn loom_unmap_what_is_left_out_is_missed() {
    let all: &[(Weakening, &[Run])] = &[
        (Weakening::LookBeforeCopy, &[vs_store, vs_store_and_sync]),
        (Weakening::NoLook, &[vs_store_dirty]),
        (Weakening::BeginBeforeUnmap, &[unmap_fails_vs_sync]),
        (Weakening::CopyInsteadOfKeep, &[vs_store, vs_store_dirty]),
        (Weakening::NoFlushAfterUnmap, &[vs_store, vs_store_dirty]),
        (Weakening::NoComparison, &[vs_store, vs_store_and_sync]),
        (Weakening::EndBeforeUnmap, &[vs_refill]),
        (Weakening::NoPutBack, &[vs_lookup]),
        (Weakening::EvictUnwritten, &[write_fails]),
        (Weakening::EvictWithoutSection, &[vs_store_and_sync, late_store_returns]),
        (Weakening::SyncWithoutSection, &[vs_store_and_sync, late_store_returns]),
        (Weakening::SyncWithoutWait, &[vs_sync, vs_store_and_sync]),
        (Weakening::ProtectAfterRead, &[revoke_vs_store]),
        (Weakening::NoFlushAfterProtect, &[revoke_vs_store]),
        (Weakening::BeginAfterRead, &[revoke_vs_sync]),
        (Weakening::PinWithoutReady, &[vs_pin]),
    ];
    for (weakening, runs) in all {
        for (at, run) in runs.iter().enumerate() {
            let (weakening, run) = (*weakening, *run);
            // In a thread of its own: it panics.
            let seen = std::thread::spawn(move || model_bounded(3, move || run(weakening)));
            assert!(seen.join().is_err(), "{weakening:?} is not seen by its run {at}");
        }
    }
}
