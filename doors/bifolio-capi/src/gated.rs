//! Files with a write gate: no page reaches the storage before the log record of its changes is
//! durable.
//!
//! # Safety
//! Dereferences what C hands over, and calls functions of the caller, under the contract of the
//! crate's head.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, bytes, bytes_mut, guard, handle, range_in};
use crate::cache::{bifolio_cache, bifolio_open_options, gated_options};
use crate::file::bifolio_read_function;
use crate::result::bifolio_result;
use bifolio::{Checkpoint, GatedFile, PageView, WriteGate};
use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::sync::Arc;

/// The log of a file with a write gate: functions that the cache calls on any thread, several at
/// once, until the file is closed by its last handle and everything of it is durable. They must not
/// use the gated file, nor throw (declare them `noexcept`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_gate {
    /// Returns the LSN up to which the log is durable: records with that LSN or a lower one. Must
    /// not block.
    pub durable_lsn: Option<unsafe extern "C" fn(context: *mut c_void) -> u64>,
    /// Makes the log durable up to `lsn`, and returns 0, or an `errno`. May block.
    pub make_durable: Option<unsafe extern "C" fn(lsn: u64, context: *mut c_void) -> c_int>,
    /// Passed to both.
    pub context: *mut c_void,
}

/// The gate of a file.
struct Gate {
    durable_lsn: unsafe extern "C" fn(*mut c_void) -> u64,
    make_durable: unsafe extern "C" fn(u64, *mut c_void) -> c_int,
    context: *mut c_void,
}

// SAFETY: the caller's functions may be called on any thread, with this context.
unsafe impl Send for Gate {}
// SAFETY: as above, and by several threads at once.
unsafe impl Sync for Gate {}

impl WriteGate for Gate {
    fn durable_lsn(&self) -> u64 {
        // SAFETY: the caller's function and its context.
        unsafe { (self.durable_lsn)(self.context) }
    }

    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        // SAFETY: the caller's function and its context.
        match unsafe { (self.make_durable)(lsn, self.context) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// A file with a write gate: each change has an LSN, and its page stays in memory until the log is
/// durable up to that.
#[derive(Debug)]
pub struct bifolio_gated_file {
    file: GatedFile,
}

/// The dirty pages of a file at one moment, from `bifolio_gated_file_checkpoint`.
#[derive(Debug)]
pub struct bifolio_checkpoint {
    checkpoint: Checkpoint,
}

/// Opens the regular file at `path` with a write gate. It must not be open in this cache without
/// one. Close it with `bifolio_gated_file_close`.
///
/// Threads: any, at the same time. Blocks: for the file system.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_open_gated(
    cache: *const bifolio_cache,
    path: *const c_char,
    options: *const bifolio_open_options,
    gate: *const bifolio_gate,
    file: *mut *mut bifolio_gated_file,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(file, "file")?;
        // SAFETY: null, or a live handle.
        let cache = unsafe { handle(cache, "cache")? };
        // SAFETY: null, or text of the caller.
        let path = unsafe { crate::boundary::path(path, "path")? };
        // SAFETY: null, or options that begin with their size.
        let options = unsafe { gated_options(options)? };
        // SAFETY: null, or the caller's struct.
        let gate = unsafe { handle(gate, "gate")? };
        let gate = Gate {
            durable_lsn: gate.durable_lsn.ok_or(Failure::Null("durable_lsn"))?,
            make_durable: gate.make_durable.ok_or(Failure::Null("make_durable"))?,
            context: gate.context,
        };
        let file = cache.cache().open_gated(path, &options, Arc::new(gate))?;
        // SAFETY: the caller's variable.
        unsafe { output.set(Box::into_raw(Box::new(bifolio_gated_file { file }))) };
        Ok(())
    })
}

/// Like `bifolio_file_read`.
///
/// Threads: any, at the same time. Blocks: for the device, for what is not in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_read(
    file: *const bifolio_gated_file,
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
        let count = file.file.read_at(buffer, offset)?;
        // SAFETY: the caller's variable.
        unsafe { output.set(count) };
        Ok(())
    })
}

/// Like `bifolio_file_read_with`.
///
/// Threads: any, at the same time. Blocks: for the device, for what is not in memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_read_with(
    file: *const bifolio_gated_file,
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
        Ok(file.file.read_with(range, read)?)
    })
}

/// Returns the length of the file, bytes; 0 for a null handle.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_len(file: *const bifolio_gated_file) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.map_or(0, |file| file.file.len())
}

/// Writes all `length` bytes of `buffer` at `offset`, like `bifolio_file_write`: a change whose log
/// record has `lsn`. The record may be written later, but its LSN is known.
///
/// Threads: any, at the same time. Blocks: for the device, for the rest of a page that is not in
/// memory, and while too much is dirty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_write(
    file: *const bifolio_gated_file,
    offset: u64,
    buffer: *const c_void,
    length: usize,
    lsn: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        Ok(file.file.write_at(buffer, offset, lsn)?)
    })
}

/// Appends all `length` bytes of `buffer`, like `bifolio_file_append`: a change whose log record
/// has `lsn`. `offset` gets the position of the first byte; it may be null.
///
/// Threads: any, at the same time. Blocks: as `bifolio_gated_file_write`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_append(
    file: *const bifolio_gated_file,
    buffer: *const c_void,
    length: usize,
    lsn: u64,
    offset: *mut u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        // SAFETY: null, or a buffer of `length` bytes that no thread writes.
        let buffer = unsafe { bytes(buffer, length, "buffer")? };
        let position = file.file.append(buffer, lsn)?;
        if let Ok(output) = Output::new(offset, "offset") {
            // SAFETY: the caller's variable.
            unsafe { output.set(position) };
        }
        Ok(())
    })
}

/// Gives changes that have no LSN yet, of a range, the one of their log record.
///
/// Threads: any, at the same time. Blocks: for folio locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_assign_lsn(
    file: *const bifolio_gated_file,
    offset: u64,
    length: u64,
    lsn: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        Ok(file.file.assign_lsn(range_in(file.file.len(), offset, length), lsn)?)
    })
}

/// Returns the lowest LSN of a change that is not on the storage: the log before it is not needed
/// any more. 0 if there is none.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_oldest_dirty_lsn(
    file: *const bifolio_gated_file,
) -> u64 {
    // SAFETY: null, or a live handle.
    unsafe { file.as_ref() }.and_then(|file| file.file.oldest_dirty_lsn()).unwrap_or(0)
}

/// Starts to write the dirty pages of a range to the storage, in the background. Those that the
/// gate holds back follow when it lets them pass.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_write_out(
    file: *const bifolio_gated_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        Ok(file.file.write_out(range_in(file.file.len(), offset, length))?)
    })
}

/// Makes everything durable that was written before the call, and the log before that.
///
/// Threads: any, at the same time. Blocks: for the log and the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_sync_data(
    file: *const bifolio_gated_file,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        Ok(unsafe { handle(file, "file")? }.file.sync_data()?)
    })
}

/// Remembers what is dirty now, for `bifolio_checkpoint_sync`.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_checkpoint(
    file: *const bifolio_gated_file,
    checkpoint: *mut *mut bifolio_checkpoint,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(checkpoint, "checkpoint")?;
        // SAFETY: null, or a live handle.
        let checkpoint = unsafe { handle(file, "file")? }.file.checkpoint()?;
        // SAFETY: the caller's variable.
        unsafe { output.set(Box::into_raw(Box::new(bifolio_checkpoint { checkpoint }))) };
        Ok(())
    })
}

/// Makes everything durable that was dirty at the checkpoint.
///
/// Threads: any, at the same time. Blocks: for the log and the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_checkpoint_sync(
    checkpoint: *const bifolio_checkpoint,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        Ok(unsafe { handle(checkpoint, "checkpoint")? }.checkpoint.sync()?)
    })
}

/// Frees a checkpoint, which keeps its file open. Null is allowed.
///
/// Threads: any, while no other call uses it. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_checkpoint_free(checkpoint: *mut bifolio_checkpoint) {
    guard(|| {
        if !checkpoint.is_null() {
            // SAFETY: made by `bifolio_gated_file_checkpoint`, and no other call uses it.
            drop(unsafe { Box::from_raw(checkpoint) });
        }
        Ok(())
    });
}

/// Makes everything durable, log and file, and frees the handle. On an error the handle is
/// unchanged and nothing is lost.
///
/// Threads: any, while no other call uses the handle. Blocks: for the log and the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_close(file: *mut bifolio_gated_file) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        unsafe { handle(file, "file")? }.file.clone().close()?;
        // SAFETY: made by `bifolio_cache_open_gated`, and no other call uses it.
        drop(unsafe { Box::from_raw(file) });
        Ok(())
    })
}

/// Frees a handle without a result, like `bifolio_file_free`. Null is allowed.
///
/// Threads: any, while no other call uses the handle. Blocks: for the log and the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_gated_file_free(file: *mut bifolio_gated_file) {
    guard(|| {
        if !file.is_null() {
            // SAFETY: made by `bifolio_cache_open_gated`, and no other call uses it.
            drop(unsafe { Box::from_raw(file) });
        }
        Ok(())
    });
}
