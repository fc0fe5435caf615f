//! Pins of a range of several folios, whose bytes are a few slices.
//!
//! One batch reads all misses; the transfers are as long as the runs of absent pages. Pages that
//! another thread is filling are pinned afterwards, one by one, without transfers in flight (IO-5).
//!
//! # Safety
//! Returns addresses in frames that the pins keep (FRAMES-3). Frames of one file are parts of one
//! reservation, the arena or the file's region, so adjacent frames are one slice.
#![allow(unsafe_code)]

use super::File;
use super::fill::Locked;
use super::pin::Pin;
use super::read_io::{Batch, Delivery};
use crate::error::{ErrorKind, Result};
use crate::page::{PAGE_BYTES, pages_of};
use crate::sys::copy;
use std::ops::Range;

/// Maximum number of folios, and so of slices, of a [`PinSlices`]: what one `writev` takes.
const FOLIOS_MAX: u64 = 1024;

/// Pinned bytes of several consecutive folios: they stay resident until this is dropped. Like a
/// [`Pin`] it borrows the file and is not `Send`.
///
/// The bytes are in memory in one or several parts, in the order of the file: adjacent frames, as
/// of pages that were read together, are one part.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("file");
/// # std::fs::write(&path, vec![7; 100_000])?;
/// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// use std::io::{IoSlice, Write};
/// let file = cache.open(&path, &bifolio::OpenOptions::new().immutable(true))?;
/// let pins = file.pin_slices(1000..90_000)?;
/// let slices: Vec<_> = pins.as_bytes().unwrap().map(IoSlice::new).collect();
/// let mut socket = Vec::new();
/// assert_eq!(socket.write_vectored(&slices)?, 89_000);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PinSlices<'a> {
    file: &'a File,
    /// One for each folio. They keep the frames.
    pins: Vec<Pin<'a>>,
    /// Address and length of each part.
    parts: Vec<(*const u8, usize)>,
}

impl PinSlices<'_> {
    /// Returns the number of pinned bytes.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|(_, length)| length).sum()
    }

    /// Returns `true` if no bytes are pinned: never.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the number of pinned folios.
    pub fn folios(&self) -> usize {
        self.pins.len()
    }

    /// Returns the address of the first byte and the length of each part, in the order of the file,
    /// for a `writev` or a copy of your own. Other handles may write the bytes at any time; create
    /// references to them only if you can rule that out.
    pub fn as_ptrs(&self) -> impl ExactSizeIterator<Item = (*const u8, usize)> {
        self.parts.iter().copied()
    }

    /// Copies the first `buffer.len()` bytes to `buffer`. During a concurrent write the copy may be
    /// a mixture of old and new bytes; [`File::read_at`] is atomic within a page.
    ///
    /// # Panics
    /// If fewer bytes are pinned than `buffer` has.
    pub fn copy_to(&self, buffer: &mut [u8]) {
        let (wanted, pinned) = (buffer.len(), self.len());
        assert!(wanted <= pinned, "{wanted} bytes wanted, {pinned} pinned");
        let mut left = buffer;
        for (start, length) in &self.parts {
            let (now, later) = left.split_at_mut(left.len().min(*length));
            // SAFETY: the bytes are in frames that our pins keep, long enough, and changed by other
            // threads only through `sys::copy`; `now` is not frame memory.
            unsafe { copy::copy_out(*start, now) }
            left = later;
        }
    }

    /// Returns the parts of an immutable file as slices, in the order of the file. Returns `None`
    /// for any other file, where another handle could change the bytes under the borrow.
    pub fn as_bytes(&self) -> Option<impl ExactSizeIterator<Item = &[u8]>> {
        // SAFETY: the file is immutable, and stays so while the handle is open, which this borrows:
        // no thread writes the bytes.
        self.file.handle.immutable.then(|| unsafe { self.as_slices() })
    }

    /// Returns the parts as slices, in the order of the file.
    ///
    /// # Safety
    /// No thread may write these bytes, through any handle of the file (`write_at`, `pin_mut`,
    /// `set_len`), until the slices are dropped. The caller must exclude writers, with its own
    /// latch for example.
    pub unsafe fn as_slices(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.parts.iter().map(|(start, length)| {
            // SAFETY: resident, initialised frames that our pins keep, adjacent in one reservation;
            // the caller guarantees that no thread changes them.
            unsafe { std::slice::from_raw_parts(*start, *length) }
        })
    }
}

impl File {
    /// Pins the bytes of `range`, which may span up to 1024 folios (4 MiB with the smallest), as a
    /// few slices: for one `writev` or copy of a large range. Blocks for I/O; all misses are read
    /// by transfers that are submitted together, and sequential calls start readahead, as reads do.
    /// Costs one atomic add for each folio.
    ///
    /// All folios count against the memory bound at the same time. The result is that of a
    /// [`pin`](File::pin) for each folio: if one fails, none stays pinned.
    ///
    /// There is no such call for changes in place: it would wait for memory and for the dirty limit
    /// with folios locked, so that two calls, or a call and the flusher, could wait for each other.
    /// Take a [`PinMut`](crate::PinMut) for one folio after the other, or write.
    ///
    /// # Errors
    /// More folios ([`ErrorKind::PinTooLarge`]), a range without bytes, or one that reaches past
    /// the end of file ([`ErrorKind::PastEnd`]); too little memory ([`ErrorKind::Full`]), and every
    /// other error of [`File::read_at`].
    pub fn pin_slices(&self, range: Range<u64>) -> Result<PinSlices<'_>> {
        self.check_pin_slices(&range)?;
        let folio_bytes = self.folio_bytes();
        let first_folio = range.start / folio_bytes;
        let folios = range.end.div_ceil(folio_bytes) - first_folio;
        // The part of the range in its folio with this number.
        let part_of = |number: usize| {
            let start = (first_folio + number as u64) * folio_bytes;
            start.max(range.start)..(start + folio_bytes).min(range.end)
        };
        let mut pins: Vec<_> =
            (0..folios as usize).map(|number| self.pin_hit(&part_of(number))).collect();
        let is_missing = |pin: &Option<_>| pin.is_none();
        if let (Some(first), Some(last)) =
            (pins.iter().position(is_missing), pins.iter().rposition(is_missing))
        {
            let missing = part_of(first).start..part_of(last).end;
            self.read_missing(&missing, |locked| {
                let number = locked.lock.index() * PAGE_BYTES / folio_bytes - first_folio;
                pins[number as usize] = self.pin_locked(&part_of(number as usize), locked);
            });
        }
        let mut parts: Vec<(*const u8, usize)> = Vec::new();
        let pinned = pins.into_iter().enumerate().map(|(number, pin)| {
            // Not read just now: resident, being filled by another thread, or evicted again.
            let pin = pin.map_or_else(|| self.pin(part_of(number)), Ok)?;
            match parts.last_mut() {
                Some((start, length)) if start.wrapping_add(*length) == pin.as_ptr() => {
                    *length += pin.len();
                }
                _ => parts.push((pin.as_ptr(), pin.len())),
            }
            Ok(pin)
        });
        let pins = pinned.collect::<Result<_>>()?;
        Ok(PinSlices { file: self, pins, parts })
    }

    /// Reads the absent folios of `range`, and starts to read what follows it if the reader is
    /// sequential. Calls `deliver` for each folio that was read. An error is returned by the next
    /// access to the page.
    fn read_missing(&self, range: &Range<u64>, mut deliver: impl FnMut(&Locked<'_>)) {
        let pages = pages_of(range);
        let Some((absent, _)) = self.handle.next_absent(pages.clone()) else { return };
        let mut batch = Batch::new(&self.handle.inode);
        let mut deliver = |_, delivery: Delivery<'_>| {
            if let Delivery::Folio(locked) = delivery {
                deliver(&locked);
            }
        };
        let plan = self.handle.plan_after_miss(absent..pages.end);
        self.handle.note_end(range.end);
        // If the batch cannot take a page, `pin` reports why.
        let _ = batch.add(&self.handle, absent..pages.end, 0, &mut deliver);
        // Before the pages that follow: these are read first.
        batch.begin();
        self.handle.read_ahead(plan);
        batch.finish(&mut deliver);
    }

    fn check_pin_slices(&self, range: &Range<u64>) -> Result<()> {
        self.handle.check_readable()?;
        let length_bytes = self.check_pin_bytes(range)?;
        let (position_bytes, folio_bytes) = (range.start, self.folio_bytes());
        let folios = range.end.div_ceil(folio_bytes) - range.start / folio_bytes;
        if folios <= FOLIOS_MAX {
            return Ok(());
        }
        let (file, folios_max) = (self.handle.inode.name(), FOLIOS_MAX);
        Err(ErrorKind::PinTooLarge { file, position_bytes, length_bytes, folios, folios_max }
            .into())
    }
}
