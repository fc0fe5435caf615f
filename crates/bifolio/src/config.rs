//! Settings: every limit of a cache, checked in one place.
//!
//! A leaf open to all layers.

use crate::error::{Error, Result};
use std::time::Duration;

pub(crate) const MEMORY_BYTES_MIN: u64 = 256 << 10;
/// Maximum memory of a cache, bytes: descriptors have 32-bit numbers.
pub(crate) const MEMORY_BYTES_MAX: u64 = 1 << 42;
/// Maximum number of folios of regions that are unmapped in one batch.
const UNMAP_BATCH_MAX: usize = 512;
pub(crate) const CHUNK_BYTES_MIN: u64 = 64 << 10;
/// Maximum size of a chunk, bytes: a huge page.
pub(crate) const CHUNK_BYTES_MAX: u64 = 2 << 20;
/// Minimum number of chunks in the bound that a cache is built with, where chunks are not smallest.
const CHUNKS_MIN: u64 = 32;
/// Minimum number of largest chunks, which are worth a coarser division: they are huge pages.
const LARGEST_CHUNKS_MIN: u64 = 16;
/// Minimum number of chunks in any bound that is set later.
const CHUNKS_MIN_LATER: u64 = 4;
pub(crate) const FOLIO_BYTES_MIN: u64 = 4 << 10;
pub(crate) const FOLIO_BYTES_MAX: u64 = 2 << 20;

const HOUR: Duration = Duration::from_secs(3600);
pub(crate) const IO_DEPTH_MAX: usize = 1024;
pub(crate) const READAHEAD_BYTES_MAX: u64 = 1 << 30;

/// Minimum size of a swap, bytes: the unused slot 0 and one page.
pub(crate) const SWAP_BYTES_MIN: u64 = 8 << 10;
/// Maximum size of a swap, bytes: a value Entry has 28 bits for the slot.
pub(crate) const SWAP_BYTES_MAX: u64 = 1 << 40;

/// Selects whether frames are backed by 2 MiB pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Use them where the system allows it (`madvise`) and the cache has a bound of 32 MiB or more:
    /// fewer TLB misses, faster filling.
    #[default]
    Auto,
    /// Use base pages only.
    Never,
    /// Use them, and fail to build the cache where the system does not allow it or the bound is too
    /// small.
    Require,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) memory_bytes: u64,
    pub(crate) memory_bytes_max: Option<u64>,
    pub(crate) huge_pages: HugePages,
    pub(crate) prefault: bool,
    /// `true` if other processes may read frames, tables and lengths.
    pub(crate) is_shared: bool,
    pub(crate) reclaim_wait_max: Duration,
    pub(crate) unmap_batch_folios: usize,
    pub(crate) io_depth: usize,
    pub(crate) readahead_bytes_max: u64,
    pub(crate) dirty_bytes_background: Option<u64>,
    pub(crate) dirty_bytes_max: Option<u64>,
    pub(crate) dirty_age_max: Duration,
    pub(crate) swap_bytes_max: Option<u64>,
    pub(crate) kept_files: usize,
    pub(crate) ablation: Ablation,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            memory_bytes_max: None,
            huge_pages: HugePages::Auto,
            prefault: false,
            is_shared: is_shared_by_default(),
            reclaim_wait_max: Duration::from_secs(10),
            unmap_batch_folios: 31,
            io_depth: 64,
            readahead_bytes_max: 8 << 20,
            dirty_bytes_background: None,
            dirty_bytes_max: None,
            dirty_age_max: Duration::from_secs(5),
            swap_bytes_max: None,
            kept_files: 0,
            ablation: Ablation::default(),
        }
    }
}

/// Returns `true` in a debug build whose environment has `BIFOLIO_TEST_SHARED`: all tests can then
/// run with shared memory.
fn is_shared_by_default() -> bool {
    cfg!(debug_assertions) && std::env::var_os("BIFOLIO_TEST_SHARED").is_some()
}

fn check(is_valid: bool, name: &str, problem: impl FnOnce() -> String) -> Result<()> {
    if is_valid { Ok(()) } else { Err(Error::config(name, problem())) }
}

impl Config {
    /// Checks all settings. The error names the first invalid one, with the valid values.
    pub(crate) fn validate(&self) -> Result<()> {
        let bound = self.memory_bytes;
        validate_memory(bound)?;
        let chunk_bytes = chunk_bytes(bound);
        let has_huge = self.huge_pages != HugePages::Require || chunk_bytes == CHUNK_BYTES_MAX;
        check(has_huge, "huge_pages", || {
            format!(
                "2 MiB pages are required, and a bound of {bound} bytes has chunks of \
                 {chunk_bytes}; it needs {} or more",
                CHUNK_BYTES_MAX * LARGEST_CHUNKS_MIN
            )
        })?;
        let max = self.memory_bytes_max.unwrap_or(bound);
        check((bound..=MEMORY_BYTES_MAX).contains(&max), "memory_max", || {
            format!("{max} bytes is not from the bound ({bound}) to {MEMORY_BYTES_MAX} (4 TiB)")
        })?;
        let folios = self.unmap_batch_folios;
        check((1..=UNMAP_BATCH_MAX).contains(&folios), "unmap_batch_folios", || {
            format!("{folios} is not from 1 to {UNMAP_BATCH_MAX}")
        })?;
        check(self.reclaim_wait_max <= HOUR, "reclaim_wait_max", || {
            format!("{:?} is more than an hour", self.reclaim_wait_max)
        })?;
        check((1..=IO_DEPTH_MAX).contains(&self.io_depth), "io_depth", || {
            format!("{} is not from 1 to {IO_DEPTH_MAX}", self.io_depth)
        })?;
        let window = self.readahead_bytes_max;
        check(window <= READAHEAD_BYTES_MAX, "readahead_max", || {
            format!("{window} bytes is more than {READAHEAD_BYTES_MAX} (1 GiB)")
        })?;
        let swap = self.swap_bytes_max.unwrap_or(SWAP_BYTES_MIN);
        check((SWAP_BYTES_MIN..=SWAP_BYTES_MAX).contains(&swap), "swap_max", || {
            format!("{swap} bytes is not from {SWAP_BYTES_MIN} to 1 TiB")
        })?;
        let (background, max) = (self.dirty_bytes_background, self.dirty_bytes_max);
        let most = dirty_bytes_max(self.memory_bytes);
        for (name, bytes) in [("dirty_background", background), ("dirty_max", max)] {
            let bytes = bytes.unwrap_or(0);
            check(bytes <= most, name, || {
                format!("{bytes} bytes is more than two thirds of the bound ({most})")
            })?;
        }
        let (background, max) = (background.unwrap_or(0), max.unwrap_or(u64::MAX));
        check(background <= max, "dirty_background", || {
            format!("{background} bytes is more than dirty_max ({max})")
        })?;
        let age = self.dirty_age_max;
        check((Duration::from_millis(1)..=HOUR).contains(&age), "dirty_age_max", || {
            format!("{age:?} is not from 1 ms to an hour")
        })
    }
}

pub(crate) fn dirty_bytes_max(bound_bytes: u64) -> u64 {
    bound_bytes / 3 * 2
}

/// Returns the most bytes of a bound that may be promised, to floors of classes and to reservations
/// each: an eighth of it is left for pages.
pub(crate) fn promised_bytes_max(bound_bytes: u64) -> u64 {
    bound_bytes - bound_bytes / 8
}

pub(crate) fn validate_memory(bytes: u64) -> Result<()> {
    check((MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX).contains(&bytes), "memory", || {
        format!(
            "{bytes} bytes is outside {MEMORY_BYTES_MIN} (256 KiB) to {MEMORY_BYTES_MAX} (4 TiB)"
        )
    })
}

/// Returns the size of the chunks in which a cache that is built with this bound takes memory.
pub(crate) fn chunk_bytes(bound_bytes: u64) -> u64 {
    if bound_bytes >= CHUNK_BYTES_MAX * LARGEST_CHUNKS_MIN {
        return CHUNK_BYTES_MAX;
    }
    let most_bytes = (bound_bytes / CHUNKS_MIN).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX);
    1 << most_bytes.ilog2()
}

/// Returns the least bound that a cache with such chunks can be set to, bytes.
pub(crate) fn bound_bytes_min(chunk_bytes: u64) -> u64 {
    MEMORY_BYTES_MIN.max(CHUNKS_MIN_LATER * chunk_bytes)
}

pub(crate) fn validate_bound(bytes: u64, chunk_bytes: u64) -> Result<()> {
    let least_bytes = CHUNKS_MIN_LATER * chunk_bytes;
    check(bytes >= least_bytes, "memory", || {
        format!(
            "{bytes} bytes is less than {least_bytes}, four chunks of this cache: their size \
             follows from the bound that it was built with"
        )
    })
}

/// Checks a folio size of a cache with such chunks, and returns log2 of its pages.
pub(crate) fn folio_order_in(chunk_bytes: u64, folio_bytes: u64) -> Result<u8> {
    let order = folio_order(folio_bytes)?;
    check(folio_bytes <= chunk_bytes, "folio_bytes", || {
        format!(
            "a folio of {folio_bytes} bytes does not fit in a chunk of this cache, {chunk_bytes} \
             bytes; it needs a cache that is built with a bound of {} or more \
             (CacheBuilder::memory)",
            (folio_bytes * CHUNKS_MIN).min(CHUNK_BYTES_MAX * LARGEST_CHUNKS_MIN)
        )
    })?;
    Ok(order)
}

/// Checks a folio size and returns log2 of its pages.
pub(crate) fn folio_order(folio_bytes: u64) -> Result<u8> {
    let allowed = FOLIO_BYTES_MIN..=FOLIO_BYTES_MAX;
    let is_valid = folio_bytes.is_power_of_two() && allowed.contains(&folio_bytes);
    check(is_valid, "folio_bytes", || {
        format!("{folio_bytes} bytes is not a power of two from 4096 to 2097152")
    })?;
    Ok((folio_bytes / FOLIO_BYTES_MIN).trailing_zeros() as u8)
}

/// Way of taking the reference of a pin; for benchmarks only.
#[cfg_attr(not(feature = "ablation"), allow(dead_code, reason = "unused without benchmarks"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PinMode {
    /// One unconditional add and a frozen bit: the default.
    #[default]
    FrozenBit,
    /// A compare-and-swap loop, as in the kernel.
    CompareExchange,
}

/// Policy of draining LRU batches of other CPUs on advice to evict; for benchmarks only.
#[cfg_attr(not(feature = "ablation"), allow(dead_code, reason = "unused without benchmarks"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DrainPolicy {
    /// Drains the batches that hold a folio of the range: the default.
    #[default]
    Targeted,
    /// Drains all if a clean, unmapped folio is referenced, as proposed for the kernel.
    WhenItCanHelp,
    /// Drains all if any folio stays, as the kernel does.
    OnAnyFailure,
}

/// Mechanisms that benchmarks replace by the older ones of the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Modes {
    pub(crate) pins: PinMode,
    pub(crate) drains: DrainPolicy,
}

/// The choice of mechanisms; without the feature `ablation` it has no size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ablation {
    #[cfg(feature = "ablation")]
    pub(crate) modes: Modes,
}

impl Ablation {
    #[inline(always)]
    pub(crate) fn modes(self) -> Modes {
        #[cfg(feature = "ablation")]
        return self.modes;
        #[cfg(not(feature = "ablation"))]
        Modes::default()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn folio_sizes_are_powers_of_two_within_bounds() {
        assert_eq!(folio_order(4096).unwrap(), 0);
        assert_eq!(folio_order(16384).unwrap(), 2);
        assert_eq!(folio_order(2 << 20).unwrap(), 9);
        for wrong in [0, 1, 2048, 4095, 4097, 12288, 4 << 20, u64::MAX] {
            let message = folio_order(wrong).unwrap_err().to_string();
            assert!(message.contains("folio_bytes") && message.contains(&wrong.to_string()));
        }
    }
}
