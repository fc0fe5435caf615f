//! Access modes: what a call wants of the folio at an index, and what becomes of one that is not
//! there.
//!
//! After the kernel's `enum sgp_type` as the thread S leaves it (`kernel-notes`, A2): on a hole the
//! first three answer "no folio, and no error", and the caller reads zeros, or refuses. Holes and
//! allocated pages are those of memory files; a file with a backing has none, because whatever is
//! not in memory is on the backing.
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
//! "As it is" and "any bytes" is what a write gets that replaces the whole folio. That `Falloc`
//! makes an allocated page uptodate keeps a promise: an `allocate` that fails takes back the pages
//! it allocated itself, and knows them by their not being uptodate; one that another call was
//! promised meanwhile stays.

/// See the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Get,
    Read,
    NoAlloc,
    Cache,
    Write {
        /// The caller replaces all bytes that the file has, or will have, in the folio. Then it
        /// may come not uptodate, with any bytes, and the caller must mark it.
        whole: bool,
    },
    Falloc,
}

/// What a mode makes of an allocated page that was never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnAllocated {
    /// No folio: it reads as zeros.
    None,
    /// The folio as it is.
    AsIs,
    /// The folio, zeroed and uptodate.
    Zeroed,
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
            Self::Write { whole: true } => OnAllocated::AsIs,
            Self::NoAlloc | Self::Cache | Self::Write { whole: false } | Self::Falloc => {
                OnAllocated::Zeroed
            }
        }
    }
}
