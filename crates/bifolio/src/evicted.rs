//! The result of an eviction that was asked for: how many folios were evicted, and why the others
//! were kept.
//!
//! A leaf open to all layers. A folio is kept for one of several reasons, and draining the LRU
//! batches of other CPUs helps with only one of them (`reclaim/invalidate.rs`).

use std::fmt;
use std::ops::AddAssign;

/// Why a folio was kept: the first reason that applies.
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

/// Folios that an eviction kept, each counted once under the first reason that
/// applies, in this order.
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
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// Returns the counts with their names.
    #[doc(hidden)]
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

    /// Returns the counts in the order of [`Reason`] and of [`Self::by_reason`].
    fn counts_mut(&mut self) -> [&mut u64; 8] {
        let Self { straddling, gone, locked, writeback, private, dirty, mapped, referenced } = self;
        [straddling, gone, locked, writeback, private, dirty, mapped, referenced]
    }
}

impl AddAssign for Kept {
    fn add_assign(&mut self, other: Self) {
        for (count, (_, more)) in self.counts_mut().into_iter().zip(other.by_reason()) {
            *count += more;
        }
    }
}

/// The result of [`File::evict`](crate::File::evict), in folios.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, vec![7; 40_960])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// use bifolio::OpenOptions;
/// let file = cache.open(&path, &OpenOptions::new())?;
/// file.read_exact_at(&mut [0; 40_960], 0)?;
/// let pin = file.pin(4096..8192)?;
/// let evicted = file.evict(0..40_960)?;
/// assert_eq!((evicted.folios, evicted.kept.referenced), (9, 1));
/// // A drain, if there was one, is mentioned in between.
/// let sentence = evicted.to_string();
/// assert!(sentence.starts_with("evicted 9 folios"));
/// assert!(sentence.ends_with("; 1 kept: 1 referenced"));
/// # Ok(())
/// # }
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

/// Formats as a sentence: "evicted 9 folios; 1 kept: 1 referenced".
impl fmt::Display for Evicted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "evicted {}", Counted(self.folios, "folio"))?;
        if self.drains_requested > 0 {
            let (later, cpus) = (self.second_pass_folios, Counted(self.cpus_drained, "CPU"));
            write!(formatter, ", {later} of them after draining {cpus}")?;
        }
        let total = self.kept.total();
        if total == 0 {
            return Ok(());
        }
        write!(formatter, "; {total} kept")?;
        let reasons = self.kept.by_reason().into_iter().filter(|(_, count)| *count > 0);
        for (nth, (reason, count)) in reasons.enumerate() {
            write!(formatter, "{} {count} {reason}", if nth == 0 { ":" } else { "," })?;
        }
        Ok(())
    }
}

/// A number and its noun, in the plural where needed.
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
    fn a_result_reads_like_a_sentence() {
        let mut evicted = Evicted { folios: 1, ..Evicted::default() };
        assert_eq!(evicted.to_string(), "evicted 1 folio");
        evicted.kept.add(Reason::Mapped, 2);
        evicted.kept.add(Reason::Dirty, 1);
        assert_eq!(evicted.to_string(), "evicted 1 folio; 3 kept: 1 dirty, 2 mapped");
        let drained = Evicted {
            folios: 8,
            drains_requested: 1,
            cpus_drained: 1,
            second_pass_folios: 8,
            ..Evicted::default()
        };
        assert_eq!(drained.to_string(), "evicted 8 folios, 8 of them after draining 1 CPU");
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
        assert_eq!(kept.by_reason().map(|(_, count)| count), [2, 4, 6, 8, 10, 12, 14, 16]);
        assert_eq!(kept.total(), 72);
    }
}
