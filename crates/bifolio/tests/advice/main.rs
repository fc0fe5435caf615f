//! Advice: what is evicted on it, and why the rest stays (`outcomes.rs`), whose batches are drained
//! for that (`drains.rs`), what the other kinds do (`kinds.rs`), against everybody else at the same
//! time (`races.rs`); and what a cache says that it has (`residency.rs`).

mod drains;
mod kinds;
mod outcomes;
mod races;
mod residency;
#[path = "../support/mod.rs"]
mod support;

use bifolio::{Advice, Cache, File, Outcome, Stats};

/// Evicts what can go of the whole file.
fn evict(file: &File) -> Outcome {
    file.advise(0..file.len(), Advice::DontNeed).unwrap()
}

/// Pages of the file that are in memory.
fn resident_pages(file: &File) -> u64 {
    file.residency(0..file.len()).unwrap().resident
}

/// The counters of advice say the same as the outcomes, whose sum this is.
#[track_caller]
fn assert_counted(cache: &Cache, sum: &Outcome) {
    let Stats {
        advise_evicted,
        advise_second_pass_evicted,
        advise_straddling,
        advise_gone,
        advise_locked,
        advise_writeback,
        advise_private,
        advise_dirty,
        advise_mapped,
        advise_referenced,
        advise_drains,
        advise_drained_cpus,
        ..
    } = cache.stats();
    let remaining = [
        advise_straddling,
        advise_gone,
        advise_locked,
        advise_writeback,
        advise_private,
        advise_dirty,
        advise_mapped,
        advise_referenced,
    ];
    assert_eq!(remaining, sum.remaining.by_reason().map(|(_, count)| count));
    assert_eq!(
        (advise_evicted, advise_second_pass_evicted),
        (sum.evicted, sum.second_pass_evicted)
    );
    assert_eq!((advise_drains, advise_drained_cpus), (sum.drains_requested, sum.cpus_drained));
}
