//! The ablation: each mechanism can be replaced by the older one of the kernel, for comparison in
//! benchmarks. Compiled only with the feature `ablation`.
//!
//! Every build has the code of both mechanisms, and [`Ablation`] selects one. Without the feature
//! it has no size, its results are constants, and the compiler removes the unused code. A TLB flush
//! for each page needs no mode: `CacheBuilder::unmap_batch_folios(1)`.

/// Way of taking the reference of a pin; for benchmarks only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PinMode {
    /// One unconditional add and a frozen bit: the default.
    #[default]
    FrozenBit,
    /// A compare-and-swap loop, as in the kernel.
    CompareExchange,
}

/// Policy of draining LRU batches of other CPUs on advice to evict; for benchmarks only.
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

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Modes {
    pub(crate) pins: PinMode,
    pub(crate) drains: DrainPolicy,
}

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
