//! Page codecs: what a page is on storage, if it is not the bytes that the cache has.
//!
//! ```text
//!   a fill:       storage --transfer--> frame --> check --> READY                 fill/transfer.rs
//!   a write-out:  frame --copy--> sealed page --seal--> transfer --> storage  writeback/sealed.rs
//! ```
//!
//! A page is checked with its folio locked, before any reader can find it. The frame of a page is
//! never sealed: its copy is. So readers, pins and writers have nothing to do with a codec.
//!
//! THE MEMORY OF COPIES belongs to the bound: the first file with a codec charges it, for all files
//! of the cache. A batch whose transfers have it all waits for those; one that has none in flight
//! copies one folio beside it.
//!
//! # Safety
//! Copies from and to the frame of a folio that the caller has locked or is writing out. Pages of
//! memory are seen as their bytes.
#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind, Result};
use crate::page::PAGE_BYTES;
use crate::sync::{AtomicU64, Ordering};
use crate::sys::copy;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Part of the bound that copies may have.
const ROOM_DIVISOR: u64 = 32;
/// Least and most bytes of copies: a transfer of some pages, and a few transfers of 1 MiB.
const ROOM_BYTES_MIN: u64 = 64 << 10;
const ROOM_BYTES_MAX: u64 = 8 << 20;

/// Makes pages into what the storage has, and back: a checksum, or encryption. Given to
/// [`OpenOptions::codec`](crate::OpenOptions::codec).
///
/// A page is a folio of the file ([`OpenOptions::folio_bytes`](crate::OpenOptions::folio_bytes)),
/// and has the same length on storage. So a codec that stores more than the page, such as a
/// checksum, needs bytes of each page that the program does not use: its last ones, for example.
/// They are ordinary bytes of the page in memory, with what `check` left in them.
///
/// The file's length is a multiple of the page. Storage can have pages of zeros that were never
/// sealed: those of a file that grew, or of a hole that was punched. The codec says if they are
/// valid.
///
/// The calls come from any thread, several at once, with locks of the cache held: a codec must not
/// call into the cache, nor wait. One that panics has refused the page.
///
/// ```
/// use std::io;
///
/// /// Keeps the sum of the words of a page in its last word.
/// struct Sum;
///
/// fn sum_of(bytes: &[u8]) -> u64 {
///     let words = bytes[..bytes.len() - 8].chunks_exact(8);
///     words.fold(1, |sum, word| sum.rotate_left(5) ^ u64::from_le_bytes(word.try_into().unwrap()))
/// }
///
/// impl bifolio::PageCodec for Sum {
///     fn check(&self, _position: u64, page: &mut [u8]) -> io::Result<()> {
///         let is_whole = page.ends_with(&sum_of(page).to_le_bytes());
///         let was_never_written = page.iter().all(|byte| *byte == 0);
///         if is_whole || was_never_written {
///             return Ok(());
///         }
///         Err(io::Error::other("the sum is wrong"))
///     }
///
///     fn seal(&self, _position: u64, page: &mut [u8]) -> io::Result<()> {
///         let (sum, start) = (sum_of(page), page.len() - 8);
///         page[start..].copy_from_slice(&sum.to_le_bytes());
///         Ok(())
///     }
/// }
/// ```
pub trait PageCodec: Send + Sync {
    /// Checks a page that was read from `position` of the file, and changes it into what the
    /// program sees, before any reader finds it.
    ///
    /// # Errors
    /// The page is refused: each access fails with
    /// [`ErrorKind::CorruptPage`], and no byte of it is seen.
    fn check(&self, position: u64, page: &mut [u8]) -> io::Result<()>;

    /// Changes a copy of a page into what is written to `position` of the file. The page in memory
    /// stays as it is.
    ///
    /// # Errors
    /// The page is not written, as if the storage had refused it: it stays dirty.
    fn seal(&self, position: u64, page: &mut [u8]) -> io::Result<()>;
}

/// The codec of a file.
pub(crate) struct Codec {
    codec: Arc<dyn PageCodec>,
    room: Arc<SealingRoom>,
}

impl fmt::Debug for Codec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Codec").finish_non_exhaustive()
    }
}

impl Codec {
    pub(crate) fn new(codec: Arc<dyn PageCodec>, room: Arc<SealingRoom>) -> Self {
        Self { codec, room }
    }

    pub(crate) fn is(&self, other: &Arc<dyn PageCodec>) -> bool {
        Arc::ptr_eq(&self.codec, other)
    }

    /// Checks the `length` bytes at `start`, which are those of a locked folio at `position` of the
    /// file called `name`, which no reader can find yet.
    pub(crate) fn check(
        &self,
        name: impl FnOnce() -> String,
        position: u64,
        start: *mut u8,
        length: usize,
    ) -> Result<()> {
        let mut page = vec![0; length];
        // SAFETY: bytes of a frame whose folio the caller has locked: no thread writes them.
        unsafe { copy::copy_out(start, &mut page) };
        let checked = guarded(|| self.codec.check(position, &mut page));
        checked.map_err(|cause| {
            let text =
                format!("its codec refuses the {length} bytes at position {position}: {cause}");
            let error = Error::new(ErrorKind::CorruptPage, text).in_file(name());
            error.at(position..position + length as u64).because(Arc::new(cause))
        })?;
        // SAFETY: as above; no reader uses the bytes before the folio is READY.
        unsafe { copy::copy_in(start, &page) };
        Ok(())
    }

    /// Seals copies of folios at `starts`, which are written to `position` of the file on, where
    /// `length` bytes of the file are. No thread changes the folios meanwhile (WRITEBACK-3).
    pub(crate) fn seal(
        &self,
        copies: &mut SealedPages,
        starts: impl Iterator<Item = *mut u8>,
        position: u64,
        length: u64,
        folio_bytes: u64,
    ) -> io::Result<()> {
        let bytes = copies.bytes();
        for (number, start) in starts.enumerate() {
            let offset = number as u64 * folio_bytes;
            let in_file = length.saturating_sub(offset).min(folio_bytes) as usize;
            let page = &mut bytes[offset as usize..][..in_file];
            // SAFETY: the frame of a folio that the write-out has a reference to, of at least so
            // many bytes.
            unsafe { copy::copy_out(start, page) };
            if in_file > 0 {
                guarded(|| self.codec.seal(position + offset, page))?;
            }
        }
        Ok(())
    }

    /// Returns memory for the copies of up to `pages` pages, whole folios of `least` pages each.
    /// Returns `None` if there is none, and `is_alone` is not set.
    pub(crate) fn memory_for(&self, pages: u64, least: u64, is_alone: bool) -> Option<SealedPages> {
        let taken = self.room.take(pages, least);
        if taken == 0 && !is_alone {
            return None;
        }
        let memory = vec![AlignedPage([0; PAGE_BYTES as usize]); taken.max(least) as usize];
        Some(SealedPages { pages: memory, taken, room: Arc::clone(&self.room) })
    }
}

/// Calls a codec. A panic is an error.
fn guarded(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let called = catch_unwind(AssertUnwindSafe(call));
    called.unwrap_or_else(|_| Err(io::Error::other("the codec has panicked")))
}

/// Memory of copies that the files of a cache share.
#[derive(Debug)]
pub(crate) struct SealingRoom {
    free_pages: AtomicU64,
}

impl SealingRoom {
    /// Returns the bytes that a cache with this bound charges for copies.
    pub(crate) fn bytes_of(bound_bytes: u64) -> u64 {
        let bytes = (bound_bytes / ROOM_DIVISOR).clamp(ROOM_BYTES_MIN, ROOM_BYTES_MAX);
        bytes / PAGE_BYTES * PAGE_BYTES
    }

    /// Creates a room of so many bytes, which the caller has charged.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { free_pages: AtomicU64::new(bytes / PAGE_BYTES) }
    }

    /// Takes up to `pages` pages, a multiple of `least`.
    fn take(&self, pages: u64, least: u64) -> u64 {
        let part = |free: u64| free.min(pages) / least * least;
        // Relaxed: only the number counts; the memory is the allocator's.
        let relaxed = (Ordering::Relaxed, Ordering::Relaxed);
        let taken =
            self.free_pages.fetch_update(relaxed.0, relaxed.1, |free| Some(free - part(free)));
        taken.map_or(0, part)
    }
}

#[derive(Clone, Debug)]
#[repr(align(4096))]
struct AlignedPage(#[expect(dead_code, reason = "seen as bytes alone")] [u8; PAGE_BYTES as usize]);

/// Adjacent copies of folios, aligned for direct transfers.
#[derive(Debug)]
pub(crate) struct SealedPages {
    pages: Vec<AlignedPage>,
    /// Pages of the room.
    taken: u64,
    room: Arc<SealingRoom>,
}

impl SealedPages {
    pub(crate) fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    fn bytes(&mut self) -> &mut [u8] {
        let length = self.pages.len() * PAGE_BYTES as usize;
        // SAFETY: the pages are adjacent, initialised bytes without padding, borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), length) }
    }

    /// Returns the address of the first copy.
    pub(crate) fn address(&self) -> *mut u8 {
        self.pages.as_ptr().cast_mut().cast()
    }
}

impl Drop for SealedPages {
    fn drop(&mut self) {
        // Relaxed: as in `take`.
        self.room.free_pages.fetch_add(self.taken, Ordering::Relaxed);
    }
}
