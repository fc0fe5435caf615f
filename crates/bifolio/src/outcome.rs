//! The result of advice to evict: how many folios went, and why the others stay.
//!
//! A leaf open to all layers. After a proposal for `posix_fadvise` of Linux (2026; see
//! `reclaim/invalidate.rs`), whose point it is that a folio stays for one of several reasons, and
//! that only one of them can be cured by draining the LRU batches of other CPUs.

use std::fmt;
use std::ops::AddAssign;

/// Why a folio stays, of the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    Straddling,
    Gone,
    Locked,
    Writeback,
    Private,
    Dirty,
    Mapped,
    Referenced,
}

/// Folios that were to be evicted and stayed, each counted once, under the first reason that
/// applies, in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Remaining {
    /// Reach beyond the range: a folio goes whole, or not at all. (What ends behind the end of the
    /// file does not count as that.)
    pub straddling: u64,
    /// Were being evicted or removed by somebody else.
    pub gone: u64,
    /// Were being read, written or moved by somebody.
    pub locked: u64,
    /// Were on their way to the device.
    pub writeback: u64,
    /// Have no other place than memory: those of a memory file without a swap.
    pub private: u64,
    /// Have bytes that are not on the device yet. Their write-out was started.
    pub dirty: u64,
    /// Are part of a [`Map`](crate::Map).
    pub mapped: u64,
    /// Clean and not mapped, but referenced: by a pin, a read in progress, or, before the drain,
    /// by a batch of the LRU.
    pub referenced: u64,
}

impl Remaining {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// The counts with their names.
    pub fn by_reason(&self) -> [(&'static str, u64); 8] {
        [
            ("straddling", self.straddling),
            ("gone", self.gone),
            ("locked", self.locked),
            ("writeback", self.writeback),
            ("private", self.private),
            ("dirty", self.dirty),
            ("mapped", self.mapped),
            ("referenced", self.referenced),
        ]
    }

    pub(crate) fn add(&mut self, reason: Reason, folios: u64) {
        *self.counts_mut()[reason as usize] += folios;
    }

    /// In the order of [`Reason`], and of [`Self::by_reason`].
    fn counts_mut(&mut self) -> [&mut u64; 8] {
        let Self { straddling, gone, locked, writeback, private, dirty, mapped, referenced } = self;
        [straddling, gone, locked, writeback, private, dirty, mapped, referenced]
    }
}

impl AddAssign for Remaining {
    fn add_assign(&mut self, other: Self) {
        for (count, (_, more)) in self.counts_mut().into_iter().zip(other.by_reason()) {
            *count += more;
        }
    }
}

/// The result of [`File::advise`](crate::File::advise), in folios. All zeros for advice that evicts
/// nothing.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, vec![7; 40_960])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// use bifolio::{Advice, OpenOptions};
/// let file = cache.open(&path, &OpenOptions::new())?;
/// file.read_exact_at(&mut [0; 40_960], 0)?;
/// let pin = file.pin(4096..8192)?;
/// let outcome = file.advise(0..40_960, Advice::DontNeed)?;
/// assert_eq!((outcome.evicted, outcome.remaining.referenced), (9, 1));
/// // With what was drained, if anything was, in between.
/// let sentence = outcome.to_string();
/// assert!(sentence.starts_with("evicted 9 folios"));
/// assert!(sentence.ends_with("; 1 stays: 1 referenced"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Outcome {
    /// Folios that went.
    pub evicted: u64,
    /// Those that stay, by reason.
    pub remaining: Remaining,
    /// How often other CPUs' batches of the LRU had to give up folios.
    pub drains_requested: u64,
    /// Batches that were drained for that.
    pub cpus_drained: u64,
    /// Of the evicted folios, those that went only after such a drain.
    pub second_pass_evicted: u64,
}

impl AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.evicted += other.evicted;
        self.remaining += other.remaining;
        self.drains_requested += other.drains_requested;
        self.cpus_drained += other.cpus_drained;
        self.second_pass_evicted += other.second_pass_evicted;
    }
}

/// A sentence: "evicted 9 folios; 1 stays: 1 referenced".
impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "evicted {}", Counted(self.evicted, "folio"))?;
        if self.drains_requested > 0 {
            let (later, cpus) = (self.second_pass_evicted, Counted(self.cpus_drained, "CPU"));
            write!(formatter, ", {later} of them after draining {cpus}")?;
        }
        let total = self.remaining.total();
        if total == 0 {
            return Ok(());
        }
        write!(formatter, "; {total} {}", if total == 1 { "stays" } else { "stay" })?;
        let reasons = self.remaining.by_reason().into_iter().filter(|(_, count)| *count > 0);
        for (nth, (reason, count)) in reasons.enumerate() {
            write!(formatter, "{} {count} {reason}", if nth == 0 { ":" } else { "," })?;
        }
        Ok(())
    }
}

/// A number of things.
struct Counted(u64, &'static str);

impl fmt::Display for Counted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_reads_like_a_sentence() {
        let mut outcome = Outcome { evicted: 1, ..Outcome::default() };
        assert_eq!(outcome.to_string(), "evicted 1 folio");
        outcome.remaining.add(Reason::Mapped, 2);
        outcome.remaining.add(Reason::Dirty, 1);
        assert_eq!(outcome.to_string(), "evicted 1 folio; 3 stay: 1 dirty, 2 mapped");
        let drained = Outcome {
            evicted: 8,
            drains_requested: 1,
            cpus_drained: 1,
            second_pass_evicted: 8,
            ..Outcome::default()
        };
        assert_eq!(drained.to_string(), "evicted 8 folios, 8 of them after draining 1 CPU");
    }

    #[test]
    fn sums_keep_every_reason_apart() {
        use Reason::{Dirty, Gone, Locked, Mapped, Private, Referenced, Straddling, Writeback};
        let all = [Straddling, Gone, Locked, Writeback, Private, Dirty, Mapped, Referenced];
        let mut remaining = Remaining::default();
        for (reason, count) in all.into_iter().zip(1..) {
            remaining.add(reason, count);
        }
        remaining += remaining;
        assert_eq!(remaining.by_reason().map(|(_, count)| count), [2, 4, 6, 8, 10, 12, 14, 16]);
        assert_eq!(remaining.total(), 72);
    }
}
