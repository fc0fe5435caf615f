//! Changes of a file that were made past the cache: by other programs, or by this one another way.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::boundary::{bytes, guard, handle};
use crate::file::{bifolio_file, with_range};
use crate::result::bifolio_result;
use bifolio::File;
use std::ffi::c_void;

/// Forgets the clean pages of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end), so that
/// later reads return what the storage has: for a file that another program has changed. Bytes that
/// were not written out stay in the cache.
///
/// Threads: any, at the same time. Blocks: for reads and write-outs of these pages in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_invalidate(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { with_range(file, offset, length, File::invalidate) }
}

/// Takes `length` bytes that the storage has at `offset` by now, written past the cache: pages in
/// memory have them at once, and stay clean. For a program whose own writes reach the storage
/// another way; no other program writes these bytes meanwhile. Bytes past the length of the file
/// are left out (`bifolio_file_refresh_len`).
///
/// Threads: any, at the same time. Blocks: as `bifolio_file_invalidate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_update(
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
        Ok(file.file().update(buffer, offset)?)
    })
}

/// Takes the length that the file has on the storage, after another program has appended to it or
/// cut it; `bifolio_file_len` then returns it.
///
/// Threads: any, at the same time. Blocks: for the file system, and as `bifolio_file_invalidate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_refresh_len(file: *const bifolio_file) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        unsafe { handle(file, "file")? }.file().refresh_len()?;
        Ok(())
    })
}
