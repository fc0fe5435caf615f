//! Copies from frames to a descriptor without a buffer in user space, and the gathering of
//! references for it.
//!
//! The kernel copies from the frames (`writev`), which references keep from being reused until the
//! call returns. `vmsplice` would save that copy for a pipe or a socket, but the kernel does not
//! report when it has consumed the bytes: the frames could not be reused until then, and a reader
//! that never reads would keep them forever.
//!
//! The gathering is the batched read proposed for Linux's tmpfs (the mode `SGP_GET`, 2026): up to
//! 31 uptodate folios are referenced at once, without a folio lock. The reference keeps the memory;
//! the Entry guarantees the content. Reads copy optimistically and need no references (`read.rs`).
//!
//! # Safety
//! Passes addresses in frames to the kernel; references keep them readable.
#![allow(unsafe_code)]

use super::File;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::AccessMode;
use crate::page::{BATCH_SLOTS, FolioRef, PAGE_BYTES, PAGE_SHIFT};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::sys::file::IoVector;
use crate::sys::{copy, file as sys_file};
use arrayvec::ArrayVec;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Source of zeros for holes: 16 pages.
static ZEROS: [u8; 16 * PAGE_BYTES as usize] = [0; 16 * PAGE_BYTES as usize];
/// Maximum number of pieces of one call.
const PIECES_MAX: usize = 64;

impl File {
    /// Writes the bytes of `range`, up to the end of file, to a descriptor (a file, a pipe or a
    /// socket) at its own position. The kernel copies them from the cache's memory, without a
    /// buffer in between. Returns the number of bytes written. It is smaller than requested only if
    /// the descriptor is non-blocking and full, or if an error occurred on the way: the next call
    /// returns it.
    ///
    /// Bytes that another thread writes concurrently may be sent as a mixture of old and new, as
    /// with `sendfile`. Blocks for I/O on both sides. As with any write, a pipe or socket whose
    /// reader has closed it raises SIGPIPE, which Rust programs ignore by default.
    ///
    /// # Errors
    /// All errors of [`File::read_at`], and errors of the descriptor ([`ErrorKind::CopyToFd`]),
    /// including a descriptor that accepts no bytes ([`WriteZero`](std::io::ErrorKind::WriteZero)).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::io::Read;
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let scratch = cache.memory_file("scratch")?;
    /// scratch.write_all_at(b"hello", 0)?;
    /// let (mut reader, writer) = std::io::pipe()?;
    /// assert_eq!(scratch.copy_to_fd(1..100, &writer)?, 4);
    /// drop(writer);
    /// let mut text = String::new();
    /// reader.read_to_string(&mut text)?;
    /// assert_eq!(text, "ello");
    /// # Ok(())
    /// # }
    /// ```
    pub fn copy_to_fd(&self, range: Range<u64>, descriptor: impl AsFd) -> Result<u64> {
        self.handle.check_readable()?;
        self.handle.check_range(&range)?;
        let mut at = range.start;
        loop {
            // Read once: the file may be truncated at any moment.
            let end = range.end.min(self.len());
            if at >= end {
                break;
            }
            match self.copy_some(at..end, descriptor.as_fd()) {
                Ok(count) => at += count,
                Err(error) if at == range.start => return Err(error),
                // The bytes so far were written; the next call returns the error.
                Err(_) => break,
            }
        }
        Ok(at - range.start)
    }

    /// Writes at least the first byte of `range`, which is not empty, or nothing if the file was
    /// truncated before it.
    fn copy_some(&self, range: Range<u64>, descriptor: BorrowedFd<'_>) -> Result<u64> {
        let mut held = None;
        loop {
            let batch = self.gather(range.start, range.end - range.start);
            let end = range.end.min(batch.end * PAGE_BYTES);
            if range.start < end {
                let pieces = self.pieces_of(&batch, range.start..end);
                // SAFETY: pieces of frames that the batch has references to, which stay mapped
                // (FRAMES-2), or of ZEROS.
                return match unsafe { sys_file::write_vectored(descriptor, &pieces) } {
                    Ok(0) => Err(self.not_taken(range, io::ErrorKind::WriteZero.into())),
                    Ok(count) => {
                        let pages = (count as u64).div_ceil(PAGE_BYTES);
                        self.handle.inode.memory.counters.add(Counter::HitPinned, pages);
                        Ok(count as u64)
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(source) => Err(self.not_taken(range, source)),
                };
            }
            drop(batch);
            drop(held.take());
            let index = range.start >> PAGE_SHIFT;
            let plan = self.handle.plan_after_miss(index..range.end.div_ceil(PAGE_BYTES));
            self.handle.read_ahead(plan);
            // The reference keeps the folio resident until the batch has its own.
            held =
                self.handle.fill().find_folio(index, AccessMode::Read)?.map(|locked| locked.folio);
            if range.start >= self.len() {
                return Ok(0);
            }
        }
    }

    /// Returns the pieces of `range`, which `batch` covers: frames that it references, and zeros
    /// between them.
    fn pieces_of(&self, batch: &ReadBatch<'_>, range: Range<u64>) -> IoVector<PIECES_MAX> {
        let inode = &self.handle.inode;
        let mut pieces = IoVector::default();
        let mut folios = batch.folios.iter().peekable();
        let mut at = range.start;
        while at < range.end {
            let folio = folios.next_if(|folio| folio.folio().index() * PAGE_BYTES <= at);
            let (start, end) = match (folio, folios.peek()) {
                (Some(folio), _) => {
                    let first = folio.folio().index() * PAGE_BYTES;
                    let start = inode.frame_of(folio).wrapping_add((at - first) as usize);
                    (start.cast_const(), first + folio.folio().pages() * PAGE_BYTES)
                }
                (None, next) => {
                    let hole_end = next.map_or(range.end, |next| next.folio().index() * PAGE_BYTES);
                    (ZEROS.as_ptr(), hole_end.min(at + ZEROS.len() as u64))
                }
            };
            let end = end.min(range.end);
            if !pieces.push(start, (end - at) as usize) {
                break;
            }
            at = end;
        }
        pieces
    }

    #[cold]
    fn not_taken(&self, range: Range<u64>, source: io::Error) -> Error {
        let (position, length) = (range.start, range.end - range.start);
        let text = format!(
            "{length} bytes at position {position} could not be copied to the descriptor: {source}"
        );
        Error::new(ErrorKind::CopyToFd, text)
            .in_file(self.handle.inode.name())
            .at(range)
            .because(Arc::new(source))
    }
}

/// References to folios in order of their index. Pages between them and after the last one read as
/// zeros.
#[derive(Debug, Default)]
struct ReadBatch<'a> {
    folios: ArrayVec<FolioRef<'a>, BATCH_SLOTS>,
    /// Index after the last page of the batch.
    end: u64,
}

impl File {
    /// References up to 31 READY folios in order, from the one at `position` on.
    fn gather(&self, position: u64, length: u64) -> ReadBatch<'_> {
        let mapping = &self.handle.inode.mapping;
        let inode = &self.handle.inode;
        let visible = mapping.len_bytes().saturating_sub(position).min(length);
        let first = position >> PAGE_SHIFT;
        let mut batch = ReadBatch { folios: ArrayVec::new(), end: first };
        if visible == 0 {
            return batch;
        }
        let end = (position + visible).div_ceil(PAGE_BYTES);
        if end - first > 1 {
            self.touch_descriptors(first..end.min(first + BATCH_SLOTS as u64));
        }
        while batch.end < end && !batch.folios.is_full() {
            // Acquire: pairs with the Release in `set_ready`: the folio is uptodate.
            let seen = mapping.table().load(batch.end, Ordering::Acquire);
            if seen.is_ready() {
                let folio = mapping.try_get_ready(&inode.memory.folios, batch.end, seen);
                let Ok(folio) = folio else { break };
                batch.folios.push(folio);
                batch.end = ((batch.end >> seen.order()) + 1) << seen.order();
            } else {
                let zeros_end = self.zeros_end(batch.end, end);
                if zeros_end == batch.end {
                    break;
                }
                batch.end = zeros_end;
            }
        }
        let references = batch.folios.len() as u64;
        inode.memory.counters.note_lookups(references, 2 * references);
        batch
    }

    /// Prefetches the descriptors of pages whose counts will be changed: consecutive atomic adds
    /// would wait for one cache miss after the other, while prefetches overlap. Large folios need
    /// few.
    fn touch_descriptors(&self, pages: Range<u64>) {
        let (mapping, memory) = (&self.handle.inode.mapping, &self.handle.inode.memory);
        if mapping.order() > 0 {
            return;
        }
        for index in pages.start..pages.end.min(mapping.table().pages()) {
            let seen = mapping.table().load(index, Ordering::Relaxed);
            copy::prefetch_lines(std::ptr::from_ref(memory.folio(seen.folio_id())).cast(), 1);
        }
    }
}
