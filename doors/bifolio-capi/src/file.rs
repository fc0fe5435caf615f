//! A file: reads, writes, its length, syncs, closing it.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, bytes, bytes_mut, guard, handle, range};
use crate::pin::PinCount;
use crate::result::{self, bifolio_result};
use bifolio::{File, GatedFile, PageView, ReadRequest};
use std::ffi::{c_int, c_void};
use std::ops::Range;

/// A file that is open in a cache.
#[derive(Debug)]
pub struct bifolio_file {
    file: File,
    /// File with its write gate, if it was opened with one.
    gated: Option<GatedFile>,
    /// Pins that borrow the file.
    pub(crate) pins: PinCount,
}

impl From<File> for bifolio_file {
    fn from(file: File) -> Self {
        Self { file, gated: None, pins: PinCount::default() }
    }
}

impl From<GatedFile> for bifolio_file {
    fn from(file: GatedFile) -> Self {
        Self { gated: Some(file.clone()), ..Self::from(file.unlogged().clone()) }
    }
}

impl bifolio_file {
    pub(crate) fn into_raw(self) -> *mut Self {
        Box::into_raw(Box::new(self))
    }

    /// Returns the file, for calls that do not change it.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn gated(&self) -> Option<&GatedFile> {
        self.gated.as_ref()
    }

    /// Returns the file, for changes that have no LSN.
    pub(crate) fn changeable(&self) -> Result<&File, Failure> {
        if self.gated.is_none() {
            return Ok(&self.file);
        }
        Err(Failure::GateMisuse(
            "file: it has a write gate: change it with an LSN (bifolio_file_write_logged), or by \
             the handle of bifolio_file_unlogged",
        ))
    }

    fn check_unpinned(&self) -> Result<(), Failure> {
        match self.pins.total() {
            0 => Ok(()),
            pins => Err(Failure::InUse(format!("file: {pins} pins of it were not released"))),
        }
    }
}

/// One read of `bifolio_file_read_many`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_read {
    /// Position to read from, bytes.
    pub offset: u64,
    /// Memory for the bytes. Buffers of one call must not overlap.
    pub buffer: *mut c_void,
    /// Number of bytes to read.
    pub length: usize,
    /// Set by the call, if `result` is `BIFOLIO_OK`: the number of bytes read; fewer than `length`
    /// only at the end of the file.
    pub read: usize,
    /// Set by the call: the result of this read.
    pub result: bifolio_result,
    /// Set by the call: the `errno` behind `result`, or 0.
    pub error_number: c_int,
}

/// Reads `length` bytes at `offset` into `buffer`. `read` gets the number of bytes read: fewer only
/// at the end of the file. Resident pages are copied without a lock; a read within one page never
/// sees half of a write.
///
/// Threads: any, at the same time. Blocks: for the device, for what is not in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_read(
    file: *const bifolio_file,
    offset: u64,
    buffer: *mut c_void,
    length: usize,
    read: *mut usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let output = Output::new(read, "read")?;
        // SAFETY: null, or a buffer of `length` bytes that is the caller's alone.
        let buffer = unsafe { bytes_mut(buffer, length, "buffer")? };
        let count = file.file().read_at(buffer, offset)?;
        // SAFETY: the caller's variable.
        unsafe { output.set(count) };
        Ok(())
    })
}

/// A function that reads `length` bytes of a file in place. Other threads may change them
/// meanwhile: access them through a pointer to volatile, check each offset that comes from them,
/// and keep only results in `context`. The bytes are valid during the call. One read may take
/// several calls, and the last one counts. The function must not throw (declare it `noexcept`), and
/// must not close the file.
pub type bifolio_read_function =
    Option<unsafe extern "C" fn(bytes: *const c_void, length: usize, context: *mut c_void)>;

/// Calls `function` with `length` bytes at `offset`, in place, until a call saw bytes that did not
/// change meanwhile. They must lie in one folio (`bifolio_file_folio_bytes`) and in the file. Bytes
/// of one resident page are read without a copy, a lock, a reference or a shared write: the way to
/// descend a tree that other threads change. If they change at each of a few attempts, `function`
/// gets a copy.
///
/// Threads: any, at the same time. Blocks: for the device, for what is not in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_read_with(
    file: *const bifolio_file,
    offset: u64,
    length: usize,
    function: bifolio_read_function,
    context: *mut c_void,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let function = function.ok_or(Failure::Null("function"))?;
        let range = offset..offset.saturating_add(length as u64);
        // SAFETY: the caller's function, with the bytes that its type describes.
        let read = |page: &PageView<'_>| unsafe {
            function(page.as_ptr().cast(), page.len(), context);
        };
        Ok(file.file().read_with(range, read)?)
    })
}

/// Makes `count` reads: resident pages at once, the rest with transfers that are submitted
/// together. Each read has its own `result`, even if others fail. Returns the result of the first
/// read that failed; if the call could not begin (`file`, `reads` or the buffer of one of the reads
/// null, unless its length is 0; the file not opened for reading), nothing is read and `reads` is
/// not changed.
///
/// Threads: any, at the same time. Blocks: for the device, until all are answered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_read_many(
    file: *const bifolio_file,
    reads: *mut bifolio_read,
    count: usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        if count == 0 {
            return Ok(());
        }
        if reads.is_null() {
            return Err(Failure::Null("reads"));
        }
        if count > isize::MAX as usize / size_of::<bifolio_read>() {
            return Err(Failure::Misuse(format!("count: {count} reads are more than memory has")));
        }
        // SAFETY: not null, and `count` structs that are the caller's alone.
        let reads = unsafe { std::slice::from_raw_parts_mut(reads, count) };
        let mut requests = Vec::with_capacity(count);
        for read in reads.iter() {
            // SAFETY: a buffer of its own, by the caller, which overlaps with no other.
            let buffer = unsafe { bytes_mut(read.buffer, read.length, "buffer")? };
            requests.push(ReadRequest::new(buffer, read.offset));
        }
        file.file().read_many(&mut requests)?;
        let mut first_failure = None;
        for (read, request) in reads.iter_mut().zip(requests) {
            match request.result {
                Ok(count) => {
                    read.read = count;
                    read.result = bifolio_result::BIFOLIO_OK;
                    read.error_number = 0;
                }
                Err(error) => {
                    read.error_number = error.errno();
                    let failure = Failure::Library(error);
                    read.result = result::remember(&failure);
                    first_failure.get_or_insert(failure);
                }
            }
        }
        first_failure.map_or(Ok(()), Err)
    })
}

/// Writes all `length` bytes of `buffer` at `offset`; the file grows if necessary. The bytes are
/// then in memory, and durable after a sync. On an error a part of them may have been written.
///
/// Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
/// memory, and while too much is dirty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_write(
    file: *const bifolio_file,
    offset: u64,
    buffer: *const c_void,
    length: usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        Ok(file.changeable()?.write_all_at(buffer, offset)?)
    })
}

/// Writes all `length` bytes of `buffer` at the end of the file. `offset`, which may be null, gets
/// their position. Appends never overlap, and no other write makes a gap between them. On an error
/// the file has its old length, unless the storage refuses to truncate it.
///
/// Threads: any, at the same time. Blocks: as `bifolio_file_write`, and for other changes of the
/// length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_append(
    file: *const bifolio_file,
    buffer: *const c_void,
    length: usize,
    offset: *mut u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        let position = file.changeable()?.append(buffer)?;
        if let Ok(output) = Output::new(offset, "offset") {
            // SAFETY: the caller's variable.
            unsafe { output.set(position) };
        }
        Ok(())
    })
}

/// Runs `body` on a range of a file.
///
/// # Safety
/// Null, or a live handle.
pub(crate) unsafe fn with_range(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    body: fn(&File, Range<u64>) -> bifolio::Result<()>,
) -> bifolio_result {
    guard(|| {
        // SAFETY: the contract.
        let file = unsafe { handle(file, "file")? };
        Ok(body(file.file(), range(file.file(), offset, length))?)
    })
}

/// Runs `body`, which changes a range of a file.
///
/// # Safety
/// Null, or a live handle.
unsafe fn change_range(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    body: fn(&File, Range<u64>) -> bifolio::Result<()>,
) -> bifolio_result {
    guard(|| {
        // SAFETY: the contract.
        let file = unsafe { handle(file, "file")? }.changeable()?;
        Ok(body(file, range(file, offset, length))?)
    })
}

/// Returns the length of the file, bytes, including unsynced writes; 0 for null.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_len(file: *const bifolio_file) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.map_or(0, |file| file.file().len())
}

/// Returns the folio size of the file, bytes: a pin lies within one folio; 0 for null.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_folio_bytes(file: *const bifolio_file) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.map_or(0, |file| file.file().folio_bytes())
}

/// Sets the length of the file to `len_bytes`: truncates it, or extends it with zeros.
///
/// Threads: any, at the same time. Blocks: for the device, and for write-outs of the file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_set_len(
    file: *const bifolio_file,
    len_bytes: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.changeable()?.set_len(len_bytes)?))
}

/// Returns the length that the file may grow to, bytes; 0 for null.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_len_max(file: *const bifolio_file) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.map_or(0, |file| file.file().len_max())
}

/// Raises the length that the file may grow to, `len_max_bytes` of its open options, for all of its
/// handles until the last one is closed. Other threads may use the file meanwhile, and pins stay
/// valid. Takes address space only. No effect if the file may already grow to `bytes`; on an error
/// nothing changes. Not for mappable files.
///
/// Threads: any, at the same time. Blocks: for other changes of the length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_raise_len_max(
    file: *const bifolio_file,
    bytes: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.file().raise_len_max(bytes)?))
}

/// Makes every write that returned before durable: writes dirty pages out and flushes the device.
/// Concurrent syncs share a flush. A failure, now or since the last sync of this handle, is
/// reported once; the pages stay dirty, and no sync succeeds until they are on the device.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_data(file: *const bifolio_file) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.file().sync_data()?))
}

/// Like `bifolio_file_sync_data`, and also syncs the file's metadata.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_all(file: *const bifolio_file) -> bifolio_result {
    // SAFETY: null, or a live handle.
    guard(|| Ok(unsafe { handle(file, "file")? }.file().sync_all()?))
}

/// Like `bifolio_file_sync_data`, for `length` bytes at `offset` only (`BIFOLIO_TO_END`: to the
/// end).
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_sync_range(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { with_range(file, offset, length, File::sync_range) }
}

/// Punches a hole of `length` bytes at `offset`: they read as zeros, and the memory and storage of
/// whole folios among them is freed. The length stays.
///
/// Threads: any, at the same time. Blocks: for the file system, and for reading the first and the
/// last folio where only a part of them is in the hole.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_punch_hole(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { change_range(file, offset, length, File::punch_hole) }
}

/// Allocates storage for `length` bytes at `offset` of a file, which grows if necessary; in a
/// memory file, memory: later writes there need no more.
///
/// Threads: any, at the same time. Blocks: for the file system, or for memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_allocate(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { change_range(file, offset, length, File::allocate) }
}

/// Discards bytes that were written and are not on storage: the file then has the content of the
/// storage. For storage that refuses writes permanently, where closing would always fail. `bytes`,
/// which may be null, gets their number.
///
/// Threads: any, at the same time. Blocks: for write-outs that are in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_discard_dirty(
    file: *const bifolio_file,
    bytes: *mut u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let discarded = unsafe { handle(file, "file")? }.file().discard_dirty()?;
        if let Ok(output) = Output::new(bytes, "bytes") {
            // SAFETY: the caller's variable.
            unsafe { output.set(discarded) };
        }
        Ok(())
    })
}

/// Makes everything written to the file durable, and frees the handle. On an error the handle is
/// unchanged and nothing is lost: fix the cause and close again, or give up with
/// `bifolio_file_free`. Pins must have been released (`BIFOLIO_ERROR_IN_USE`); maps may still
/// exist.
///
/// Threads: any, while no other call uses the handle. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_close(file: *mut bifolio_file) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let open = unsafe { handle(file, "file")? };
        open.check_unpinned()?;
        open.file().clone().close()?;
        // SAFETY: made by `into_raw`, and no other call uses it.
        drop(unsafe { Box::from_raw(file) });
        Ok(())
    })
}

/// Frees a handle without a result. The last handle of a file makes durable what it can; the rest
/// stays in the cache until `bifolio_cache_close`, which reports it. Null is allowed. If pins were
/// not released, the handle stays and is never freed.
///
/// Threads: any, while no other call uses the handle. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_free(file: *mut bifolio_file) {
    guard(|| {
        // SAFETY: null, or a live handle.
        let Some(open) = (unsafe { file.as_ref() }) else { return Ok(()) };
        open.check_unpinned()?;
        // SAFETY: made by `into_raw`, and no other call uses it.
        drop(unsafe { Box::from_raw(file) });
        Ok(())
    });
}
