//! The ablation: each mechanism can be set back to its "before", the way of the kernel, and be
//! measured beside it. Compiled for benchmarks only (the feature `ablation`).
//!
//! Every build has the code of both ways, and asks [`Ablation`] which is wanted. Without the
//! feature that has no size, its answers are constants, and the compiler drops what they never
//! choose. A flush of the TLBs for each page needs no mode: `CacheBuilder::unmap_batch_folios(1)`.

/// How a pin takes its reference; for benchmarks only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PinMode {
    /// One unconditional add and a frozen bit: how it is.
    #[default]
    FrozenBit,
    /// A loop of compare-and-swap: how the kernel does it.
    CompareExchange,
}

/// How a read copies what is resident; for benchmarks only.
///
/// The two that go one by one are for reads of all lengths, and go page by page also through a
/// large folio: each page is looked up, referenced, copied and put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReadMode {
    /// Up to 64 Entries at once and no reference, neighbouring frames in one copy, the next page
    /// touched ahead: how it is.
    #[default]
    Batched,
    /// The same with up to 31 references at once for more than one page: as proposed for
    /// tmpfs.
    BatchedReferences,
    /// A reference a page.
    OneByOne,
    /// A reference a page, and the folio lock to check what it is: how tmpfs does it.
    LockedOneByOne,
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
    pub(crate) reads: ReadMode,
    pub(crate) drains: DrainPolicy,
}

/// See the head of the file.
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
