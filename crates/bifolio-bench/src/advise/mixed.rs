//! A mixed range: a quarter of its pages each is clean, dirty, mapped, and clean in an LRU batch.
//! If the batch belongs to the other CPU, that batch must be drained, although the half that stays
//! does not depend on it. If it belongs to this CPU, no other CPU is drained, although the other
//! CPU's batch holds folios of another file.
//!
//! There is no series of the kernel: its call starts the write-out of the dirty quarter itself, so
//! the number of evicted pages depends on whether the drain or the disk is faster; and it does not
//! report why pages stay.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use bifolio::{Cache, DrainPolicy, Evicted, File, Map, OpenOptions};

use super::advised::{Advised, POLICIES};
use super::parameters::{QUARTER_BYTES, SMALL_MEMORY_BYTES};
use super::round::{Drains, Round};
use super::{Series, Stage};
use crate::error::{Error, Result};
use crate::harness::access::PAGE_BYTES;
use crate::harness::cached::Cached;
use crate::harness::failures::skip_on_error;
use crate::harness::pattern;
use crate::harness::threads::run_on;
use crate::progress::Silent;
use bifolio_report::Report;

const RANGE_BYTES: u64 = 4 * QUARTER_BYTES;
const QUARTER_PAGES: u64 = QUARTER_BYTES / PAGE_BYTES as u64;

const CLEAN: Range<u64> = 0..QUARTER_BYTES;
const DIRTY: Range<u64> = QUARTER_BYTES..2 * QUARTER_BYTES;
const MAPPED: Range<u64> = 2 * QUARTER_BYTES..3 * QUARTER_BYTES;
const BATCHED: Range<u64> = 3 * QUARTER_BYTES..RANGE_BYTES;

/// Age at which the flusher writes, milliseconds: longer than a run, so that nothing is written
/// back in the background.
const DIRTY_AGE_MS: u64 = 3_600_000;

/// The CPU whose batch holds the last quarter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batched {
    Elsewhere,
    Here,
}

impl Batched {
    fn drains(self) -> Drains {
        match self {
            Self::Elsewhere => Drains::ONE_OF_ONE_CPU,
            Self::Here => Drains::default(),
        }
    }
}

/// Returns every series, over the same files.
pub(super) fn series<'a>(
    stage: &Stage<'a>,
    batched: Batched,
    report: &mut Report,
) -> Result<Vec<Series<'a>>> {
    let names = ["mixed", "beside"].map(|name| stage.directory.join(format!("{name}-{batched:?}")));
    for path in &names {
        pattern::make_file(path, RANGE_BYTES, &mut Silent)?;
    }
    let cpus = stage.cpus;
    let mut all: Vec<Series<'a>> = Vec::new();
    for (name, policy) in POLICIES {
        let mixed = Mixed::new(name, policy, batched, &names);
        if let Some(mixed) = skip_on_error(report, &[name], mixed)? {
            all.push((name, Box::new(move || mixed.round(cpus))));
        }
    }
    Ok(all)
}

struct Mixed {
    name: &'static str,
    batched: Batched,
    file: File,
    map: Map,
    /// Another file, which the other CPU reads.
    beside: File,
    _cache: Cached,
}

impl Mixed {
    fn new(
        name: &'static str,
        policy: DrainPolicy,
        batched: Batched,
        [path, beside]: &[impl AsRef<Path>; 2],
    ) -> Result<Self> {
        let builder = Cache::builder().memory(SMALL_MEMORY_BYTES).readahead_max(0);
        let builder =
            builder.dirty_age_max(Duration::from_millis(DIRTY_AGE_MS)).drain_policy(policy);
        let options = OpenOptions::new().read(true).write(true).mappable(true);
        let cached = Cached::open_with(builder, path.as_ref(), &options)?;
        let file = cached.file.clone();
        let (map, beside) = (file.map(MAPPED)?, cached.open_beside(beside.as_ref())?);
        Ok(Self { name, batched, file, map, beside, _cache: cached })
    }

    fn round(&self, [here, there]: [usize; 2]) -> Result<Round> {
        let mut verified_bytes = run_on(here, || self.prepare())?;
        verified_bytes += match self.batched {
            Batched::Elsewhere => run_on(there, || self.read(&self.file, BATCHED))?,
            Batched::Here => {
                run_on(there, || self.read(&self.beside, CLEAN))?
                    + run_on(here, || self.read(&self.file, BATCHED))?
            }
        };
        let mut round = run_on(here, || {
            let mut round = Round::default();
            round.advise(&self.file, 0..RANGE_BYTES)?;
            Ok(round)
        })?;
        round.verified_bytes = verified_bytes;
        round.resident_pages = self.file.resident_pages()?;
        round.exact = round.drained(self.batched.drains()) && round.outcome().is_some_and(is_half);
        Ok(round)
    }

    /// Puts three quarters into their states, and empties the batches.
    fn prepare(&self) -> Result<u64> {
        self.file.sync()?;
        self.file.dont_need(0..RANGE_BYTES)?;
        self.beside.dont_need(0..RANGE_BYTES)?;
        self.map.populate(0..QUARTER_BYTES)?;
        let mut page = [0; PAGE_BYTES];
        for pos_bytes in DIRTY.step_by(PAGE_BYTES) {
            pattern::fill(&mut page, pos_bytes);
            self.file.write_page(&page, pos_bytes)?;
        }
        self.read(&self.file, CLEAN)
    }

    /// Reads page by page, so that each page is added to the batch of this CPU. Returns the number
    /// of bytes.
    fn read(&self, file: &File, range: Range<u64>) -> Result<u64> {
        let mut page = [0; PAGE_BYTES];
        let len_bytes = range.end - range.start;
        for pos_bytes in range.step_by(PAGE_BYTES) {
            file.read_exact_at(&mut page, pos_bytes)?;
            if !pattern::matches(&page, pos_bytes) {
                return Err(Error::WrongBytes { series: self.name.to_owned(), pos_bytes });
            }
        }
        Ok(len_bytes)
    }
}

/// Returns `true` if the clean half was evicted, and the other stays for its reasons.
fn is_half(outcome: &Evicted) -> bool {
    let kept = outcome.kept;
    (kept.dirty, kept.mapped) == (QUARTER_PAGES, QUARTER_PAGES)
        && (outcome.folios, kept.total()) == (2 * QUARTER_PAGES, 2 * QUARTER_PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_range_goes_and_each_of_the_others_has_its_reason() {
        let mut outcome = Evicted::default();
        outcome.folios = 16;
        (outcome.kept.dirty, outcome.kept.mapped) = (8, 8);
        assert!(is_half(&outcome));
        outcome.kept.referenced = 1;
        assert!(!is_half(&outcome));
        outcome.kept.referenced = 0;
        (outcome.kept.dirty, outcome.kept.writeback) = (7, 1);
        assert!(!is_half(&outcome));
    }
}
