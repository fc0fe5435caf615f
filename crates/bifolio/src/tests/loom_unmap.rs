//! The batch protocol of mapped files (UNMAP-B1..B9) against raw stores and loads,
//! lookups, syncs and write-outs in place.
//!
//! Property: the last value stored is in the page, or on its way to where the next lookup finds it;
//! a sync that returns has written what was stored before it began; a thread that holds a folio's
//! lock has its page.
//!
//! The steps are those of the model (`region.rs`), so the weakenings are made there, by name; a
//! separate test checks that the runs named for each find it
//! (`loom_unmap_every_weakening_is_found`):
//!
//! - UNMAP-B4: the search before the copy; no search; the write-out begun there, before the
//!   unmapping can fail.
//! - UNMAP-B5: a copy instead of the pages. UNMAP-B6: no flush. UNMAP-B7: no comparison. UNMAP-B8
//!   of a clean page too early: before UNMAP-B6.
//! - UNMAP-B9: a folio with waiters does not get its page back; a page that was not written is
//!   freed.
//! - REGION-3: no section, on either side. A sync that does not wait for write-outs of other
//!   threads.
//! - A write-out in place that protects the page after it has read the bytes, or without a flush,
//!   or whose write-out begins after that.
//! - A pin that does not check READY once it has its reference.
//!
//! Besides, with a weaker table: `begin_eviction` that does not clear READY (`vs_pin`), or does not
//! freeze; `try_freeze` that ignores references.

use super::region::{How, Region, WELL, Weakening};
use super::world::{model_bounded, spawn};
use std::sync::Arc;

/// A run of a model, with the region weakened.
type Run = fn(Weakening);

fn holds(run: Run) {
    model_bounded(3, move || run(Weakening::None));
}

/// Returns a region with a store that no search has found yet.
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
    region.check_at_end(0, 2);
}

/// A store to a clean page is not lost, through any translation: it is found by UNMAP-B4, or by the
/// comparison, or reaches the page that is filled again.
#[test]
fn loom_unmap_vs_store() {
    holds(vs_store);
}

fn vs_store_dirty(weakening: Weakening) {
    let region = region_with_store(weakening);
    let writer = spawn(&region, |region| region.store(0, 3));
    region.evict(&[0], WELL);
    writer.join().unwrap();
    region.check_at_end(0, 3);
}

/// A store to a page that was stored to before is not lost: it is in the copy that is written out,
/// or in the page that is restored.
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
    region.check_at_end(0, 3);
}

/// A store to a page that is already dirty, of which UNMAP-B4 makes no copy, is not lost.
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
    region.check_at_end(0, 3);
}

/// The second of two stores is not lost, wherever the first was found.
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
    region.check_at_end(0, 4);
    region.check_at_end(1, 5);
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
    region.check_at_end(0, 2);
}

/// A store that is found late restores the page, if the caller may not write it out.
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
    region.check_at_end(0, 1);
}

/// A page that is filled while its batch is being evicted is not wiped by the unmapping (REGION-2).
#[test]
fn loom_unmap_vs_refill() {
    holds(vs_refill);
}

fn vs_lookup(weakening: Weakening) {
    let region = region_with_store(weakening);
    let reader = spawn(&region, |region| region.look_up(0, || assert_eq!(region.load(0), 2)));
    region.evict(&[0], WELL);
    reader.join().unwrap();
    region.check_at_end(0, 2);
}

/// A lookup of a folio that is being evicted returns one whose page is present (REGION-1): the same
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
    region.check_at_end(0, 2);
}

/// A sync finds a store, or waits for the write-out of the thread that found it.
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
    region.check_at_end(0, 2);
}

/// A sync right after a store that UNMAP-B4 did not find (REGION-3).
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
    region.check_at_end(0, 3);
}

/// A store, a sync and an eviction at once.
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
    region.check_at_end(0, 3);
}

/// R15: a write-out in place writes what was stored when it began, or more; a later store is found
/// again.
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
    region.check_at_end(0, 3);
}

/// R15, with a sync that finds the store during the write-out: the page is dirty again, and is
/// written once more.
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
    region.check_at_end(0, 3);
}

/// UNMAP-B9: a page that was not written is restored, dirty, with its bytes.
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
    region.check_at_end(0, 3);
}

/// A page that is not unmapped stays unchanged.
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
    region.check_at_end(0, 2);
}

/// A sync during a write-out that will fail does not mistake it for finished.
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
    region.check_at_end(0, 2);
}

/// A thread that takes a reference to a READY folio, without its lock, has its page.
#[test]
fn loom_unmap_vs_pin() {
    holds(vs_pin);
}

/// Each weakening of the head of the file fails the runs that cover it.
#[test]
fn loom_unmap_every_weakening_is_found() {
    let all: &[(Weakening, &[Run])] = &[
        (Weakening::CheckBeforeCopy, &[vs_store, vs_store_and_sync]),
        (Weakening::NoCheck, &[vs_store_dirty]),
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
            // In a thread of its own, because it panics.
            let seen = std::thread::spawn(move || model_bounded(3, move || run(weakening)));
            assert!(seen.join().is_err(), "{weakening:?} is not found by its run {at}");
        }
    }
}
