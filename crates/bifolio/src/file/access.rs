//! Access modes: what a call wants of the folio at an index, and what becomes of one that is not
//! there.
//!
//! After the kernel's `enum sgp_type` (`mm/shmem.c`), with the mode `SGP_GET` that was proposed in
//! 2026 for batched reads of tmpfs: on a hole the first three answer "no folio, and no error", and
//! the caller reads zeros, or refuses. Holes and allocated pages are those of memory files; a file
//! with a backing has none, because whatever is not in memory is on the backing.
//!
//! | mode | hole | allocated, not written | behind the end | the folio comes | who |
//! |---|---|---|---|---|---|
//! | `Get` | no folio | no folio | no folio | referenced | batched reads, `copy_to_fd` |
//! | `Read` | no folio | no folio | no folio | locked, uptodate | other reads, edges of cuts |
//! | `NoAlloc` | no folio | zeroed, uptodate | no folio | locked, uptodate | `collapse` |
//! | `Cache` | a folio of zeros | zeroed, uptodate | refused | locked, uptodate | pins |
//! | `Write` | a folio | zeroed, or as it is | allowed | locked, any bytes | writes |
//! | `Falloc` | allocated | zeroed, uptodate | allowed | locked | `allocate` |
//!
//! "As it is" and "any bytes" is what a write gets that replaces the whole folio. Whether it does
//! is judged with the folio locked, and good for as long: until then others may append. That
//! `Falloc` makes an allocated page uptodate keeps a promise: an `allocate` that fails takes back
//! the pages it allocated itself, and knows them by their not being uptodate; one that another call
//! was promised meanwhile stays.

/// See the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Get,
    Read,
    NoAlloc,
    Cache,
    /// The caller replaces these bytes, which lie in one unit. If they are all that the file has,
    /// or will have, in the folio, that may come not uptodate, with any bytes, and the caller must
    /// mark it.
    Write {
        start: u64,
        end: u64,
    },
    Falloc,
}

/// What a mode makes of an allocated page that was never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnAllocated {
    /// No folio: it reads as zeros.
    None,
    /// The folio, zeroed and uptodate.
    Zeroed,
    /// The same, unless all of it is replaced: then the folio as it is.
    ZeroedForPart,
}

impl Access {
    /// Whether a hole gets a folio.
    pub(super) fn fills_holes(self) -> bool {
        matches!(self, Self::Cache | Self::Write { .. } | Self::Falloc)
    }

    /// Whether the page may lie behind the end of the file.
    pub(super) fn may_pass_end(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Falloc)
    }

    /// What becomes of an allocated page that was never written.
    pub(super) fn on_allocated(self) -> OnAllocated {
        match self {
            Self::Get | Self::Read => OnAllocated::None,
            Self::Write { .. } => OnAllocated::ZeroedForPart,
            Self::NoAlloc | Self::Cache | Self::Falloc => OnAllocated::Zeroed,
        }
    }
}
