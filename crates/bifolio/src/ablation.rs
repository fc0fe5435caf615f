//! The ablation: each mechanism can be set back to its "before", the way of the kernel, and be
//! measured beside it. Compiled for benchmarks only (the feature `ablation`).
//!
//! Every build has the code of both ways, and asks [`Ablation`] which is wanted. Without the
//! feature that has no size, its answers are constants, and the compiler drops what they never
//! choose. A read of one page at a time is a call of its own
//! (`File::read_one_by_one`), and a flush of the TLBs for each page needs no mode:
//! `CacheBuilder::unmap_batch_folios(1)`.

/// How a pin takes its reference; for benchmarks only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PinMode {
    /// One unconditional add and a frozen bit: how it is.
    #[default]
    FrozenBit,
    /// A loop of compare-and-swap: how the kernel does it.
    CompareExchange,
}

/// When advice to evict drains the LRU batches of other CPUs; for benchmarks only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DrainPolicy {
    /// Those that hold a folio of the range: how it is.
    #[default]
    Targeted,
    /// All, where a clean folio that is not mapped is referenced: as proposed for the kernel.
    WhenItCanHelp,
    /// All, where any folio stays: how the kernel does it.
    OnAnyFailure,
}

/// The choice for each.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Modes {
    pub(crate) pins: PinMode,
    pub(crate) drains: DrainPolicy,
}

/// Mechanisms that a benchmark can disable.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ablation {
    #[cfg(feature = "ablation")]
    pub(crate) modes: Modes,
}

impl Ablation {
    /// The choices.
    #[inline(always)]
    pub(crate) fn modes(self) -> Modes {
        #[cfg(feature = "ablation")]
        return self.modes;
        #[cfg(not(feature = "ablation"))]
        Modes::default()
    }
}
