//! Reads in place: a closure reads the bytes of a resident page, and its result counts only if the
//! page did not change meanwhile.
//!
//! The protocol is that of the optimistic read (READ-O1..O4), with the closure as the copy.
//!
//! ```text
//!   HitPath::look   hit.rs    one page of the arena, resident and marked: no reference
//!   look_held                 under a pin, which fills the page and keeps it resident; then a copy
//! ```
//!
//! # Safety
//! Reads frames that stay mapped (FRAMES-2) or that a pin keeps (FRAMES-3), through `sys::copy`
//! only: other threads may change them at any moment.
#![allow(unsafe_code)]

use super::File;
use crate::error::Result;
use crate::fill::{AccessMode, Locked};
use crate::memory::Arena;
use crate::page::{PAGE_SHIFT, pages_of, read_held};
use crate::sys::copy;
use std::cmp::Ordering;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};

/// Attempts under a pin before the bytes are copied under the folio lock.
const ATTEMPTS_MAX: u32 = 4;
/// Bytes of a copy that are not charged to the bound, like the buffer of a call.
const COPY_BYTES_FREE: u64 = 64 << 10;

/// Charge for a copy, until it is dropped.
struct Charge<'a> {
    arena: &'a Arena,
    bytes: u64,
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.arena.uncharge(self.bytes);
    }
}

/// Bytes of a file that are read in place: those of a [`PageRef`](super::PageRef), or by
/// [`File::read_with`].
///
/// Other threads may change the bytes while they are read, so two loads may disagree, and any load
/// may return bytes of an unfinished change; in [`File::read_with`] also of another page, and what
/// the closure returns then is discarded. Each load returns `None` past the range: an offset that
/// was computed from changing bytes cannot reach other memory.
///
/// ```
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// # let file = cache.memory_file("nodes")?;
/// file.write_all_at(&[7, 0, 0, 0, b'k', b'e', b'y'], 0)?;
/// file.read_with(0..7, |page| {
///     assert_eq!((page.len(), page.u32_le(0), page.u32_be(4)), (7, Some(7), None));
///     assert_eq!(page.slice(4..7).map(|key| key.to_vec()), Some(b"key".to_vec()));
///     assert_eq!((page.array(4), page.array::<4>(4)), (Some(*b"key"), None));
///     assert_eq!(page.compare(4..7, b"kex"), Some(std::cmp::Ordering::Greater));
/// })?;
/// # Ok::<(), bifolio::Error>(())
/// ```
#[derive(Debug)]
pub struct PageView<'a> {
    start: *const u8,
    length: usize,
    bytes: PhantomData<&'a [u8]>,
}

#[allow(clippy::len_without_is_empty, reason = "a range of bytes, not a collection")]
impl PageView<'_> {
    /// Returns the view of `length` bytes at `start`.
    ///
    /// # Safety
    /// The bytes stay mapped for the lifetime of the view, and are changed through `sys::copy` or
    /// by the kernel only.
    #[inline(always)]
    pub(super) unsafe fn new(start: *const u8, length: usize) -> Self {
        Self { start, length, bytes: PhantomData }
    }

    /// Returns the number of bytes: the length of the range.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns the address of the first byte, which is valid as long as the pin, or until the
    /// closure returns. Other threads may be writing the bytes: read them with volatile loads, and
    /// create a reference only if you can rule that out, never in [`File::read_with`].
    #[inline(always)]
    pub fn as_ptr(&self) -> *const u8 {
        self.start
    }

    /// Returns the `N` bytes at `offset`, which needs no alignment; `None` if they reach past the
    /// end. 2, 4 and 8 bytes are one load.
    #[inline(always)]
    pub fn array<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let source = self.address(offset, N)?;
        // SAFETY: inside of the view, checked by `address`.
        Some(unsafe { copy::load(source) })
    }

    /// Returns the two bytes at `offset` as a little-endian number; `None` past the end, as for all
    /// numbers.
    #[inline(always)]
    pub fn u16_le(&self, offset: usize) -> Option<u16> {
        self.array(offset).map(u16::from_le_bytes)
    }

    /// Returns the two bytes at `offset` as a big-endian number.
    #[inline(always)]
    pub fn u16_be(&self, offset: usize) -> Option<u16> {
        self.array(offset).map(u16::from_be_bytes)
    }

    /// Returns the four bytes at `offset` as a little-endian number.
    #[inline(always)]
    pub fn u32_le(&self, offset: usize) -> Option<u32> {
        self.array(offset).map(u32::from_le_bytes)
    }

    /// Returns the four bytes at `offset` as a big-endian number.
    #[inline(always)]
    pub fn u32_be(&self, offset: usize) -> Option<u32> {
        self.array(offset).map(u32::from_be_bytes)
    }

    /// Returns the eight bytes at `offset` as a little-endian number.
    #[inline(always)]
    pub fn u64_le(&self, offset: usize) -> Option<u64> {
        self.array(offset).map(u64::from_le_bytes)
    }

    /// Returns the eight bytes at `offset` as a big-endian number.
    #[inline(always)]
    pub fn u64_be(&self, offset: usize) -> Option<u64> {
        self.array(offset).map(u64::from_be_bytes)
    }

    /// Returns the view of the bytes of `range`, such as a cell of a node; `None` if it reaches
    /// past the end or ends before it starts.
    #[inline(always)]
    pub fn slice(&self, range: Range<usize>) -> Option<PageView<'_>> {
        let length = range.end.checked_sub(range.start)?;
        let start = self.address(range.start, length)?;
        Some(PageView { start, length, bytes: PhantomData })
    }

    /// Copies all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.length];
        // SAFETY: as many bytes as the view has, to memory that is no frame.
        unsafe { copy::copy_out(self.start, &mut bytes) };
        bytes
    }

    /// Copies `buffer.len()` bytes from `offset` on to `buffer`. Returns `None`, and leaves
    /// `buffer` unchanged, if they reach past the end.
    #[inline]
    pub fn copy_to(&self, offset: usize, buffer: &mut [u8]) -> Option<()> {
        let source = self.address(offset, buffer.len())?;
        // SAFETY: inside of the view, checked by `address`; `buffer` is a unique borrow, which
        // is not frame memory.
        unsafe { copy::copy_out(source, buffer) };
        Some(())
    }

    /// Compares the bytes of `range` with `bytes`, byte by byte, as slices compare. Returns `None`
    /// if `range` reaches past the end or ends before it starts.
    pub fn compare(&self, range: Range<usize>, bytes: &[u8]) -> Option<Ordering> {
        let length = range.end.checked_sub(range.start)?;
        self.address(range.start, length)?;
        let common = length.min(bytes.len());
        let (words, rest) = bytes[..common].as_chunks::<8>();
        for (at, word) in (range.start..).step_by(8).zip(words) {
            let order = self.array(at).map(u64::from_be_bytes)?.cmp(&u64::from_be_bytes(*word));
            if order.is_ne() {
                return Some(order);
            }
        }
        for (at, byte) in (range.start + words.len() * 8..).zip(rest) {
            let order = self.array(at).map(u8::from_ne_bytes)?.cmp(byte);
            if order.is_ne() {
                return Some(order);
            }
        }
        Some(length.cmp(&bytes.len()))
    }

    /// Returns the address of `offset` if `length` bytes from there lie inside of the view.
    #[inline(always)]
    fn address(&self, offset: usize, length: usize) -> Option<*const u8> {
        let fits = length <= self.length && offset <= self.length - length;
        fits.then(|| self.start.wrapping_add(offset))
    }
}

impl File {
    /// Calls `read` with the bytes of `range`, in place, and returns its result if the bytes did
    /// not change meanwhile; otherwise calls it again. The range must lie in one folio and in the
    /// file, as for [`File::pin`].
    ///
    /// Bytes of one resident page are read without a copy, a lock, a reference or a shared write:
    /// any number of threads may read the same page at full speed. A page that is not resident is
    /// pinned first, as are several pages, and those of a mappable file; blocks for I/O then. If
    /// writers change the pages at each of a few attempts, `read` gets a copy that was taken under
    /// the folio lock. A copy of more than 64 KiB counts in the bound of the cache until `read`
    /// returns.
    ///
    /// The result is that of one state of the bytes: no call of this cache changed one of them
    /// between the first load and the last. Stores through a [`MapMut`](crate::MapMut) and changes
    /// by other programs are not noticed. A page counts its writes with 24 bits: a run of `read`
    /// during which a page is written exactly 2^24 times, or a multiple, which takes seconds, may
    /// return torn bytes. A caller that may be stopped for so long between two loads of pages
    /// that are written all the time uses [`File::read_at`], or checks a sum of its own.
    ///
    /// `read` may run several times: what a run left in its captures stays, also when its result is
    /// discarded. It may run on bytes that are torn or belong to another page or file
    /// of the cache. So it must not panic, loop or act on what it finds: the caller acts on what it
    /// returns. It may call other methods of the cache.
    ///
    /// # Errors
    /// The errors of [`File::pin`]; [`ErrorKind::Full`](crate::ErrorKind::Full), if there is no
    /// memory for a large copy.
    ///
    /// ```
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # let file = cache.memory_file("nodes")?;
    /// // A node of sorted keys, 8 bytes each, behind their number.
    /// for (at, number) in [3_u64, 10, 20, 30].into_iter().enumerate() {
    ///     file.write_all_at(&number.to_le_bytes(), at as u64 * 8)?;
    /// }
    /// file.set_len(4096)?;
    /// let rank = |key: u64| {
    ///     file.read_with(0..4096, |node| {
    ///         let count = node.u64_le(0)?;
    ///         let (mut low, mut high) = (0, count.min(511) as usize);
    ///         while low < high {
    ///             let middle = low.midpoint(high);
    ///             let found = node.u64_le(8 + middle * 8)?;
    ///             if found < key { low = middle + 1 } else { high = middle }
    ///         }
    ///         Some(low)
    ///     })
    /// };
    /// assert_eq!((rank(20)?, rank(31)?), (Some(1), Some(3)));
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    #[inline]
    pub fn read_with<T>(
        &self,
        range: impl RangeBounds<u64>,
        mut read: impl FnMut(&PageView<'_>) -> T,
    ) -> Result<T> {
        let range = self.range_of(range);
        let length = range.end.wrapping_sub(range.start) as usize;
        // SAFETY: a frame of the arena, which stays mapped (FRAMES-2) and holds the whole range.
        let view = |start| read(&unsafe { PageView::new(start, length) });
        match self.hit_path.look(&range, view) {
            Some(result) => Ok(result),
            None => self.look_held(&range, &mut read),
        }
    }

    /// Calls `read` with a pin, as often as a writer changes the pages meanwhile; after some
    /// attempts with a copy, which is taken under the folio lock and charged to the bound.
    #[cold]
    #[inline(never)]
    fn look_held<T>(
        &self,
        range: &Range<u64>,
        read: &mut impl FnMut(&PageView<'_>) -> T,
    ) -> Result<T> {
        let pin = self.pin(range.clone())?;
        let mapping = &self.handle.inode.mapping;
        let mut look = || {
            // Checked after the Entries: a truncation sets the length before it changes the bytes
            // past it.
            let is_inside = range.end <= mapping.len_bytes();
            // SAFETY: the pin keeps the frames while `look` runs.
            is_inside.then(|| read(&unsafe { PageView::new(pin.as_ptr(), pin.len()) }))
        };
        for _ in 0..ATTEMPTS_MAX {
            let found = read_held(mapping.table(), pages_of(range), pin.id(), &mut look);
            if let Some(result) = found {
                return Ok(result);
            }
        }
        drop(pin);
        // A copy, taken under the folio lock: writers cannot starve it. Charged before the lock.
        let _charge = self.charge_copy(range.end - range.start)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let index = range.start >> PAGE_SHIFT;
        let Locked { folio, lock, .. } = self.handle.fill().lock_folio(index, AccessMode::Cache)?;
        // The file may have been truncated meanwhile.
        self.check_pin_range(range)?;
        // SAFETY: inside of the folio, whose lock and reference we hold; `bytes` is as long.
        unsafe { copy::copy_out(self.address_in(&folio, range.start), &mut bytes) };
        drop(lock);
        drop(folio);
        // SAFETY: `bytes` outlives the view, and nothing changes it.
        Ok(read(&unsafe { PageView::new(bytes.as_ptr(), bytes.len()) }))
    }

    /// Charges the memory of a large copy, and evicts pages for it if necessary.
    fn charge_copy(&self, bytes: u64) -> Result<Option<Charge<'_>>> {
        if bytes <= COPY_BYTES_FREE {
            return Ok(None);
        }
        self.handle.reclaim.charge(bytes)?;
        Ok(Some(Charge { arena: &self.handle.inode.memory.arena, bytes }))
    }
}
