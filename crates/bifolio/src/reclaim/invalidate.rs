//! Invalidation: evicts the resident folios of a range of a file on advice of the caller, and
//! reports for each remaining folio why it was not evicted.
//!
//! Modelled on `POSIX_FADV_DONTNEED` of Linux and on a proposal for it (`docs/origins.md`).
//!
//! PROTOCOL INVALIDATE, in two columns:
//!
//! ```text
//!  INVALIDATE (here)                            OTHERS
//!  N1 drain this CPU's batch                    pin, read, write-back: look the folio up and
//!  N2 examine a folio without a reference:        take a reference; or wait for its lock
//!     straddling, locked, under write-back,     store, write_at: dirty, under the folio lock;
//!     private, dirty or mapped: it stays          found by N3, or by the freeze (READ-E2..E3)
//!  N3 take a reference and the lock; examine    fill: DRAIN-A1..A4
//!     it again; more than two references:       drain: DRAIN-D1..D4: the reference is put
//!     note it and the CPU of its batch            under the lock of the batch
//!  N4 else freeze it, remove it from the
//!     table, free it (READ-E1..E5; of a
//!     region UNMAP-B1..B9)
//!  N5 for each CPU noted: drain its batch if
//!     it holds one of the folios noted
//!  N6 N2 to N4 once more for those noted: an
//!     extra reference is a user's now
//! ```
//!
//! - Private folios are on no list, because their file has no store to evict them to (unlisted,
//!   `memory/lru.rs`). Any other folio that N4 finds on no list is in use by another thread.
//! - A folio that only a batch referenced when the call began is evicted: it is in the batch that
//!   its descriptor names (DRAIN-A2), so N5 finds it, or another drain has put that reference,
//!   completely, once N5 has the batch's lock. A folio that a pin or a reader references is in no
//!   batch, so no batch is drained for it.
//! - A pin is never broken: N4 freezes exactly two references, the table's and this thread's.
//!
//! A folio that stays is demoted: it moves to the tail of OLD. The ablation drains the batches of
//! all CPUs, as the kernel does without and with the proposal.

use super::Reclaim;
use super::outcome::{ScanControl, ScanCounts, WriteOut, is_pinned};
use crate::config::DrainPolicy;
use crate::inode::Inode;
use crate::page::{
    BATCH_SLOTS, Entry, EvictError, Folio, FolioId, FolioRef, PAGE_BYTES, PAGE_SHIFT, TryGet,
    WriteState,
};
use crate::stats::Counter;
use crate::sys::process;
use std::ops::{AddAssign, Range};

/// Number of folios that are noted before N5 and N6 run; a range with more takes several rounds.
const DOUBTFUL_MAX: usize = 1024;

/// A folio with an extra reference, which may be a batch's.
#[derive(Clone, Copy, Debug)]
struct Doubtful {
    id: FolioId,
    index: u64,
    cpu: usize,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Index at which the folio's Entry was loaded.
    head: u64,
    entry: Entry,
    reason: Option<Reason>,
}

impl Seen {
    fn pages(self) -> Range<u64> {
        let order = self.entry.order();
        let first = self.head >> order << order;
        first..first + (1 << order)
    }
}

#[derive(Debug)]
pub(super) struct Invalidation<'a> {
    reclaim: &'a Reclaim,
    inode: &'a Inode,
    /// Only folios that are completely in these pages are evicted.
    whole: Range<u64>,
    /// The parts of `whole` that are mapped.
    mapped: Vec<Range<u64>>,
    /// `true` if an extra reference may be a batch's, and N5 and N6 follow.
    may_drain: bool,
    doubtful: Vec<Doubtful>,
    /// Folios of a region to be unmapped. They stay on their lists, without a reference, until this
    /// thread holds the reclaim lock.
    victims: Vec<Seen>,
    demoted: Vec<FolioRef<'a>>,
    outcome: Evicted,
}

impl<'a> Invalidation<'a> {
    pub(super) fn new(reclaim: &'a Reclaim, inode: &'a Inode, range: &Range<u64>) -> Self {
        let mapping = &inode.mapping;
        // No folio straddles the end of the file.
        let reaches_end = range.end >= mapping.len_bytes();
        let end = if reaches_end { u64::MAX } else { range.end >> PAGE_SHIFT };
        let whole = range.start.div_ceil(PAGE_BYTES)..end;
        let mapped = inode.page_space.mapped_among(&whole);
        Self {
            reclaim,
            inode,
            whole,
            mapped,
            may_drain: false,
            doubtful: Vec::new(),
            victims: Vec::new(),
            demoted: Vec::with_capacity(BATCH_SLOTS),
            outcome: Evicted::default(),
        }
    }

    /// Walks the folios of `range`, in bytes.
    pub(super) fn run(mut self, range: &Range<u64>, may_drain: bool) -> Evicted {
        self.may_drain = may_drain;
        let table = self.inode.mapping.table();
        let end = range.end.div_ceil(PAGE_BYTES);
        let mut index = range.start >> PAGE_SHIFT;
        while let Some(found) = table.next_folio(index).filter(|found| *found < end) {
            index = self.visit(found);
            if self.doubtful.len() == DOUBTFUL_MAX {
                self.drain_doubtful();
            }
        }
        self.drain_doubtful();
        self.flush_demoted();
        self.outcome
    }

    /// Does N2 to N4 for the folio at page `index`. Returns the index after its last page.
    fn visit(&mut self, index: u64) -> u64 {
        let Some(seen) = self.look(index) else {
            return self.inode.mapping.end_of_unit(index);
        };
        match seen.reason {
            None => self.try_evict(seen),
            Some(reason @ (Reason::Dirty | Reason::Writeback)) => {
                self.stays(reason);
                let folios = &self.reclaim.memory.folios;
                let named = self.inode.mapping.try_get_named(folios, seen.head, seen.entry);
                named.into_iter().for_each(|folio| self.demote(folio));
            }
            Some(reason) => self.stays(reason),
        }
        seen.pages().end
    }

    fn stays(&mut self, reason: Reason) {
        self.outcome.kept.add(reason, 1);
    }

    /// Does N2. Returns `None` if no folio is there any more.
    fn look(&self, index: u64) -> Option<Seen> {
        let head = self.inode.mapping.head_index(index);
        let mut seen = None;
        let look = |entry, folio: &Folio| {
            let seen = seen.insert(Seen { head, entry, reason: None });
            seen.reason = self.reason_of(seen.pages(), folio);
        };
        let stands = self.inode.mapping.peek(&self.reclaim.memory.folios, head, look).is_ok();
        seen.map(|seen| if stands { seen } else { Seen { reason: Some(Reason::Gone), ..seen } })
    }

    /// Returns the first reason for which a folio stays, without a lock: the outcome is a hint, and
    /// INVALIDATE-N3 looks again.
    fn reason_of(&self, pages: Range<u64>, folio: &Folio) -> Option<Reason> {
        if pages.start < self.whole.start || pages.end > self.whole.end {
            return Some(Reason::Straddling);
        }
        let mapped_before = self.mapped.partition_point(|map| map.end <= pages.start);
        let is_mapped = self.mapped.get(mapped_before).is_some_and(|map| map.start < pages.end);
        let is_private = !self.inode.is_evictable;
        let write_state = folio.flags.write_state();
        let reasons = [
            (folio.is_locked(), Reason::Locked),
            (write_state.is_writing(), Reason::Writeback),
            (is_private, Reason::Private),
            (write_state.is_dirty(), Reason::Dirty),
            (is_mapped, Reason::Mapped),
        ];
        reasons.into_iter().find(|(applies, _)| *applies).map(|(_, reason)| reason)
    }

    /// Does N3 and N4.
    fn try_evict(&mut self, seen: Seen) {
        let memory = &self.reclaim.memory;
        let named = self.inode.mapping.try_get_named(&memory.folios, seen.head, seen.entry);
        let folio = match named {
            Ok(folio) => folio,
            Err(TryGet::Refused) => return self.stays(Reason::Referenced),
            Err(_) => return self.stays(Reason::Gone),
        };
        let Some(lock) = folio.try_lock() else { return self.stays(Reason::Locked) };
        if lock.owner() != self.inode.address {
            return self.stays(Reason::Gone);
        }
        let write_state = lock.flags.write_state();
        if write_state != WriteState::Clean {
            drop(lock);
            self.demote(folio);
            let is_writing = write_state.is_writing();
            return self.stays(if is_writing { Reason::Writeback } else { Reason::Dirty });
        }
        if is_pinned(&folio) {
            drop(lock);
            return self.doubt(folio);
        }
        if self.inode.page_space.is_in_place() {
            drop(lock);
            drop(folio);
            self.victims.push(seen);
            if self.victims.len() >= self.reclaim.unmap_batch_folios {
                self.unmap_victims();
            }
            return;
        }
        let set = self.reclaim.memory.lru.working_set(lock.flags.class());
        match self.inode.evict(folio, &lock, set.make_shadow(lock.pages())) {
            Ok(frozen) => {
                self.reclaim.note_eviction(self.inode, &lock, Counter::EvictFolio);
                self.outcome.folios += 1;
                // READ-E5: the next folio in this frame must not be locked.
                drop(lock);
                frozen.free();
            }
            Err(EvictError::Referenced(folio)) => {
                drop(lock);
                self.doubt(folio);
            }
            Err(EvictError::Dirty(_)) => self.stays(Reason::Dirty),
        }
    }

    /// Clears the readers' marks of a folio that stays, and moves it to the tail of OLD.
    fn demote(&mut self, folio: FolioRef<'a>) {
        let _was_used = self.inode.mapping.test_and_clear_referenced(folio.folio());
        self.demoted.push(folio);
        if self.demoted.len() == BATCH_SLOTS {
            self.flush_demoted();
        }
    }

    fn flush_demoted(&mut self) {
        let memory = &self.reclaim.memory;
        memory.lru.demote(&memory.folios, &mut self.demoted);
    }

    /// Handles a folio with an extra reference: notes it for N5 or counts it as referenced.
    fn doubt(&mut self, folio: FolioRef<'a>) {
        match folio.folio().batch_cpu().filter(|_| self.may_drain) {
            Some(cpu) => {
                let (id, index) = (folio.id(), folio.folio().index());
                self.doubtful.push(Doubtful { id, index, cpu });
            }
            None => {
                self.stays(Reason::Referenced);
                self.demote(folio);
            }
        }
    }

    /// Does N4 for a region: unmaps the collected folios with one TLB flush.
    fn unmap_victims(&mut self) {
        let Some(mapped) = self.reclaim.mapped.as_ref().filter(|_| !self.victims.is_empty()) else {
            return;
        };
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before the reclaim lock");
        let reclaim_lock = self.reclaim.lock();
        let counter = Counter::EvictFolio;
        let control = ScanControl { second_chance: false, write_out: WriteOut::Nothing, counter };
        let mut counts = ScanCounts::default();
        let mut unmapping = mapped.begin(self.reclaim, &reclaim_lock, control);
        let victims = std::mem::take(&mut self.victims);
        let mut folios = victims.into_iter().filter_map(|seen| self.isolate(seen)).collect();
        unmapping.add_all(&mut folios, &mut counts);
        unmapping.finish(&mut counts);
        self.outcome.folios += counts.reclaimed_pages;
        let kept = &mut self.outcome.kept;
        kept.add(Reason::Referenced, counts.pinned_pages);
        kept.add(Reason::Dirty, counts.dirty_pages + counts.unswapped_pages);
        kept.add(Reason::Locked, counts.busy_pages - counts.dirty_pages);
    }

    /// Takes a folio off its list, under the reclaim lock.
    fn isolate(&mut self, seen: Seen) -> Option<FolioRef<'a>> {
        let memory = &self.reclaim.memory;
        match self.inode.mapping.try_get_named(&memory.folios, seen.head, seen.entry) {
            Ok(folio) if memory.lru.isolate_one(&memory.folios, folio.id()) => return Some(folio),
            Ok(folio) => self.doubt(folio),
            Err(TryGet::Refused) => self.stays(Reason::Referenced),
            Err(_) => self.stays(Reason::Gone),
        }
        None
    }

    /// Does N5 and N6 for the folios noted.
    fn drain_doubtful(&mut self) {
        self.unmap_victims();
        let mut doubtful = std::mem::take(&mut self.doubtful);
        if doubtful.is_empty() {
            return;
        }
        doubtful.sort_unstable_by_key(|folio| (folio.cpu, folio.id));
        let batches = doubtful.chunk_by(|one, other| one.cpu == other.cpu);
        let drained = batches.filter(|batch| self.drain_for(batch)).count() as u64;
        self.outcome.drains_requested += u64::from(drained > 0);
        self.outcome.cpus_drained += drained;
        let evicted_before = self.outcome.folios;
        let may_drain = std::mem::replace(&mut self.may_drain, false);
        for folio in doubtful {
            self.visit(folio.index);
        }
        self.unmap_victims();
        self.may_drain = may_drain;
        self.outcome.second_pass_folios += self.outcome.folios - evicted_before;
    }

    /// Does N5 for folios of one CPU, sorted by id. Returns `true` if its batch held any.
    fn drain_for(&self, doubtful: &[Doubtful]) -> bool {
        let memory = &self.reclaim.memory;
        let is_wanted = |id| doubtful.binary_search_by_key(&id, |folio| folio.id).is_ok();
        memory.lru.drain_for(&memory.folios, doubtful[0].cpu, is_wanted)
    }
}

impl Reclaim {
    /// Evicts the resident folios of a range of a file, in bytes. Waits for no I/O, but, for a file
    /// that can be mapped, for other threads that reclaim.
    pub(crate) fn invalidate(&self, inode: &Inode, range: Range<u64>) -> Evicted {
        self.memory.lru.drain(&self.memory.folios, process::current_cpu());
        let walk = |may_drain| Invalidation::new(self, inode, &range).run(&range, may_drain);
        let asks = match self.ablation.modes().drains {
            DrainPolicy::Targeted => return walk(true),
            DrainPolicy::WhenItCanHelp => |kept: &Kept| kept.referenced > 0,
            // The kernel skips folios that are locked, under write-back or straddling.
            DrainPolicy::OnAnyFailure => |kept: &Kept| {
                let passed = kept.locked + kept.writeback + kept.straddling;
                kept.total() > passed
            },
        };
        let first = walk(false);
        if !asks(&first.kept) {
            return first;
        }
        let cpus_drained = self.memory.lru.drain_all(&self.memory.folios) as u64;
        let second = walk(false);
        Evicted {
            folios: first.folios + second.folios,
            drains_requested: 1,
            cpus_drained,
            second_pass_folios: second.folios,
            ..second
        }
    }
}

/// Why a folio was kept: the first reason that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reason {
    Straddling,
    Gone,
    Locked,
    Writeback,
    Private,
    Dirty,
    Mapped,
    Referenced,
}

/// Folios that an eviction kept, each counted once under the first reason that applies, in this
/// order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Kept {
    /// Folios that extend beyond the range; a folio is evicted as a whole. Extending past the end
    /// of the file does not count.
    pub straddling: u64,
    /// Folios that another thread was evicting or removing.
    pub gone: u64,
    /// Folios that another thread had locked: being filled, written or moved.
    pub locked: u64,
    /// Folios being written out.
    pub writeback: u64,
    /// Folios of a memory file without a swap: they exist only in memory.
    pub private: u64,
    /// Dirty folios. Their write-out was started.
    pub dirty: u64,
    /// Folios that are part of a [`Map`](crate::Map).
    pub mapped: u64,
    /// Clean, unmapped folios with a reference: of a pin, a read in progress, or, before the drain,
    /// an LRU batch.
    pub referenced: u64,
}

impl Kept {
    /// Returns the number of folios kept.
    pub fn total(&self) -> u64 {
        let mut counts = *self;
        counts.counts_mut().into_iter().map(|count| *count).sum()
    }

    fn add(&mut self, reason: Reason, folios: u64) {
        *self.counts_mut()[reason as usize] += folios;
    }

    /// Returns the counts in the order of [`Reason`].
    fn counts_mut(&mut self) -> [&mut u64; 8] {
        [
            &mut self.straddling,
            &mut self.gone,
            &mut self.locked,
            &mut self.writeback,
            &mut self.private,
            &mut self.dirty,
            &mut self.mapped,
            &mut self.referenced,
        ]
    }
}

impl AddAssign for Kept {
    fn add_assign(&mut self, mut other: Self) {
        for (count, more) in self.counts_mut().into_iter().zip(other.counts_mut()) {
            *count += *more;
        }
    }
}

/// The result of [`File::evict`](crate::File::evict), in folios.
///
/// ```
/// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
/// # std::fs::write(&path, vec![7; 40_960])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// use bifolio::OpenOptions;
/// let file = cache.open(&path, &OpenOptions::new())?;
/// file.read_exact_at(&mut [0; 40_960], 0)?;
/// let pin = file.pin(4096..8192)?;
/// let evicted = file.evict(0..40_960)?;
/// assert_eq!((evicted.folios, evicted.kept.referenced), (9, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Evicted {
    /// Folios evicted.
    pub folios: u64,
    /// Folios kept, by reason.
    pub kept: Kept,
    /// Drains of other CPUs' LRU batches that were requested.
    pub drains_requested: u64,
    /// LRU batches drained.
    pub cpus_drained: u64,
    /// Folios evicted only after such a drain; included in `evicted`.
    pub second_pass_folios: u64,
}

impl AddAssign for Evicted {
    fn add_assign(&mut self, other: Self) {
        self.folios += other.folios;
        self.kept += other.kept;
        self.drains_requested += other.drains_requested;
        self.cpus_drained += other.cpus_drained;
        self.second_pass_folios += other.second_pass_folios;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::sync::test_hook;

    #[cfg(feature = "maps")]
    #[test]
    fn advice_hides_no_page_while_it_waits_for_the_reclaim_lock() {
        let bytes = 200 * PAGE_BYTES;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; bytes as usize]).unwrap();
        let cache = Cache::builder().memory(4 << 20).build().unwrap();
        let Ok(file) = cache.open(&path, &OpenOptions::new().mappable(true)) else { return };
        file.read_exact_at(&mut vec![0; bytes as usize], 0).unwrap();
        let listed_bytes =
            |cache: &Cache| cache.stats().memory.active_bytes + cache.stats().memory.inactive_bytes;
        let (again, before) = (cache.clone(), listed_bytes(&cache));
        test_hook::set("before the reclaim lock", move || assert!(listed_bytes(&again) >= before));
        let outcome = file.evict(0..bytes).unwrap();
        assert!(test_hook::has_run(), "no folio was to be unmapped");
        assert_eq!(outcome.folios, 200, "{outcome:?}");
    }

    #[test]
    fn sums_are_kept_by_reason() {
        use Reason::{Dirty, Gone, Locked, Mapped, Private, Referenced, Straddling, Writeback};
        let all = [Straddling, Gone, Locked, Writeback, Private, Dirty, Mapped, Referenced];
        let mut kept = Kept::default();
        for (reason, count) in all.into_iter().zip(1..) {
            kept.add(reason, count);
        }
        kept += kept;
        assert_eq!(kept.counts_mut().map(|count| *count), [2, 4, 6, 8, 10, 12, 14, 16]);
        assert_eq!(kept.total(), 72);
    }
}
