//! The Entry of a page, its word in the table; pages and folios by their numbers.

use std::ops::Range;

pub(crate) const PAGE_SHIFT: u32 = 12;
/// Bytes of a page: what an Entry stands for, and the smallest folio.
pub(crate) const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;

/// The range of a call that is for a whole file.
pub(crate) const ALL_BYTES: Range<u64> = 0..u64::MAX;

pub(crate) fn pages_of(range: &Range<u64>) -> Range<u64> {
    range.start >> PAGE_SHIFT..range.end.div_ceil(PAGE_BYTES)
}

/// Returns `true` if the bytes lie in one page: reads and writes of it are atomic.
#[inline(always)]
pub(crate) fn is_in_one_page(position: u64, length: u64) -> bool {
    (position & (PAGE_BYTES - 1)) + length <= PAGE_BYTES
}

const KIND_MASK: u64 = 0b11;
const KIND_FOLIO: u64 = 0b01;
const KIND_VALUE: u64 = 0b10;
const READY: u64 = 1 << 2;
const REFERENCED: u64 = 1 << 3;
const ORDER_SHIFT: u32 = 4;
const ORDER_MASK: u64 = 0xF;
const VERSION_SHIFT: u32 = 8;
const VERSION_BITS: u32 = 24;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;
const FRAME_SHIFT: u32 = 32;
const VALUE_SHIFT: u32 = 4;
const _: () = assert!(VERSION_SHIFT + VERSION_BITS == FRAME_SHIFT);

pub(crate) const VALUE_MAX: u64 = (1 << (FRAME_SHIFT - VALUE_SHIFT)) - 1;

/// Id of a folio: the number of its first frame and of its descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FolioId(pub(crate) u32);

/// The word that describes one page of a file in a table. A pure value: the rules for storing it
/// are in `mapping.rs`.
///
/// ```text
///   63            32 31          8 7     4      3        2     1  0
///  +----------------+-------------+-------+------------+-------+----+
///  |    frame id    |   version   | order | REFERENCED | READY | 01 |   folio
///  +----------------+-------------+-------+------------+-------+----+
///  |       0        |   value (28 bits)   |     0      |   0   | 10 |   value
///  +----------------+---------------------+------------+-------+----+
///  |                            0                              | 00 |   hole
///  +-----------------------------------------------------------+----+
/// ```
///
/// The frame id is that of the page's own frame. Frames of a folio are naturally aligned, so the
/// folio (its first frame) is the id rounded down to the order.
///
/// ENTRY-1: a hole and a value have frame id 0, so the frame of every Entry is in the arena: an
/// optimistic read may load from it before it knows the kind of the Entry.
/// ENTRY-2: REFERENCED implies READY, and READY implies a folio: a hit tests one bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

impl Entry {
    /// No information about the page: its bytes, if any, are on the backing.
    pub(crate) const HOLE: Entry = Entry(0);

    /// Returns the Entry of a page in `frame`, of a folio of `order`, without marks.
    pub(crate) fn folio(frame: u32, version: u32, order: u8) -> Self {
        let version = (u64::from(version) & VERSION_MASK) << VERSION_SHIFT;
        let order = u64::from(order) << ORDER_SHIFT;
        Self((u64::from(frame) << FRAME_SHIFT) | version | order | KIND_FOLIO)
    }

    pub(crate) fn value(value: u64) -> Self {
        debug_assert!(value <= VALUE_MAX, "value {value:#x}");
        Self((value << VALUE_SHIFT) | KIND_VALUE)
    }

    pub(crate) fn is_folio(self) -> bool {
        self.0 & KIND_MASK == KIND_FOLIO
    }

    pub(crate) fn as_value(self) -> Option<u64> {
        (self.0 & KIND_MASK == KIND_VALUE).then_some(self.0 >> VALUE_SHIFT)
    }

    #[inline(always)]
    pub(crate) fn is_ready(self) -> bool {
        self.0 & (KIND_MASK | READY) == KIND_FOLIO | READY
    }

    /// Returns `true` if the page is READY and marked for the replacement policy (ENTRY-2).
    #[inline(always)]
    pub(crate) fn is_referenced(self) -> bool {
        self.0 & REFERENCED != 0
    }

    /// Byte offset of the page in the frames: frame id times the page size.
    #[inline(always)]
    pub(crate) fn frame_offset_bytes(self) -> usize {
        let page_mask = !((1 << PAGE_SHIFT) - 1);
        ((self.0 >> (FRAME_SHIFT - PAGE_SHIFT)) & page_mask) as usize
    }

    pub(crate) fn frame(self) -> u32 {
        (self.0 >> FRAME_SHIFT) as u32
    }

    pub(crate) fn order(self) -> u8 {
        ((self.0 >> ORDER_SHIFT) & ORDER_MASK) as u8
    }

    pub(crate) fn version(self) -> u32 {
        ((self.0 >> VERSION_SHIFT) & VERSION_MASK) as u32
    }

    #[inline(always)]
    pub(crate) fn folio_id(self) -> FolioId {
        FolioId(self.frame() >> self.order() << self.order())
    }

    /// Returns `true` if both name the same frame, whatever the version and the marks.
    #[inline(always)]
    pub(crate) fn names_same_folio(self, other: Entry) -> bool {
        let ignored = (VERSION_MASK << VERSION_SHIFT) | READY | REFERENCED;
        (self.0 ^ other.0) & !ignored == 0
    }

    /// Returns `true` if both name the same frame and are READY, whatever the version and the mark.
    /// `other` must be READY.
    #[inline(always)]
    pub(crate) fn names_same_ready_folio(self, other: Entry) -> bool {
        let ignored = (VERSION_MASK << VERSION_SHIFT) | REFERENCED;
        (self.0 ^ other.0) & !ignored == 0
    }

    /// Returns `true` if at most the mark differs: the bytes are the same.
    #[inline(always)]
    pub(crate) fn is_same_version(self, other: Entry) -> bool {
        (self.0 ^ other.0) & !REFERENCED == 0
    }

    pub(crate) fn with_ready(self) -> Self {
        debug_assert!(self.is_folio());
        Self(self.0 | READY)
    }

    pub(crate) fn without_ready(self) -> Self {
        Self(self.0 & !(READY | REFERENCED))
    }

    pub(crate) fn with_referenced(self) -> Self {
        debug_assert!(self.is_ready());
        Self(self.0 | REFERENCED)
    }

    pub(crate) fn without_referenced(self) -> Self {
        Self(self.0 & !REFERENCED)
    }

    pub(crate) fn with_next_version(self) -> Self {
        let version = u64::from(self.version().wrapping_add(1)) & VERSION_MASK;
        Self((self.0 & !(VERSION_MASK << VERSION_SHIFT)) | (version << VERSION_SHIFT))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_overlap() {
        for frame in [0, 1, 511, 512, u32::MAX] {
            for version in [0, 1, (1 << 24) - 1] {
                for order in 0..=9 {
                    let entry = Entry::folio(frame, version, order);
                    assert!(entry.is_folio() && !entry.is_ready() && entry.as_value().is_none());
                    let marked = entry.with_ready().with_referenced();
                    for entry in [entry, marked, entry.with_next_version()] {
                        assert_eq!((entry.frame(), entry.order()), (frame, order));
                        assert_eq!(entry.frame_offset_bytes(), frame as usize * 4096);
                        assert!(entry.names_same_folio(marked));
                    }
                    assert_eq!(marked.version(), version);
                    assert_eq!(entry.with_next_version().version(), (version + 1) & 0xFF_FFFF);
                    assert!(marked.is_referenced() && marked.is_ready());
                    assert_eq!(marked.without_referenced(), entry.with_ready());
                    assert_eq!(marked.without_ready(), entry);
                }
            }
        }
    }

    #[test]
    fn a_value_is_neither_a_folio_nor_a_hole() {
        for value in [0, 1, VALUE_MAX] {
            let entry = Entry::value(value);
            assert_eq!(entry.as_value(), Some(value));
            assert!(!entry.is_folio() && !entry.is_ready() && entry != Entry::HOLE);
            assert!(!entry.is_referenced(), "ENTRY-2");
            assert_eq!(entry.frame_offset_bytes(), 0, "ENTRY-1");
        }
        assert!(!Entry::HOLE.is_folio() && Entry::HOLE.as_value().is_none());
        assert_eq!(Entry::HOLE.frame_offset_bytes(), 0);
    }

    #[test]
    fn the_folio_of_a_page_is_its_first_frame() {
        assert_eq!(Entry::folio(517, 3, 2).folio_id(), FolioId(516));
        assert_eq!(Entry::folio(517, 3, 0).folio_id(), FolioId(517));
        assert_eq!(Entry::folio(1023, 3, 9).folio_id(), FolioId(512));
    }
}
