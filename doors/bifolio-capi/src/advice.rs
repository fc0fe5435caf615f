//! Advice about later accesses: the order of reads, reading ahead, eviction, write-outs, and how
//! much of a file is in memory.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, choice, guard, handle, range};
use crate::file::{bifolio_file, with_range};
use crate::result::bifolio_result;
use bifolio::{Access, Evicted, File};

/// Order of the reads through a handle, for `bifolio_file_set_access`.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub enum bifolio_access {
    /// Sequential reads are detected and read ahead. The default.
    BIFOLIO_ACCESS_NORMAL = 0,
    /// Reads are sequential.
    BIFOLIO_ACCESS_SEQUENTIAL = 1,
    /// Reads are random; nothing is read ahead.
    BIFOLIO_ACCESS_RANDOM = 2,
    /// Data is read only once; its pages are evicted before others.
    BIFOLIO_ACCESS_NO_REUSE = 3,
}

fn access_of(number: u32) -> Result<Access, Failure> {
    use bifolio_access::*;
    let table = [
        (BIFOLIO_ACCESS_NORMAL as u32, Access::Normal),
        (BIFOLIO_ACCESS_SEQUENTIAL as u32, Access::Sequential),
        (BIFOLIO_ACCESS_RANDOM as u32, Access::Random),
        (BIFOLIO_ACCESS_NO_REUSE as u32, Access::NoReuse),
    ];
    choice(number, &table, "access")
}

/// Result of an eviction, in folios.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_evicted {
    /// Folios that were evicted.
    pub folios: u64,
    /// Folios that stay: dirty, pinned, mapped, or in use by another call.
    pub kept: u64,
    /// Dirty folios among them; their write-out was started.
    pub kept_dirty: u64,
    /// Folios among them that pins or other calls refer to.
    pub kept_referenced: u64,
}

impl bifolio_evicted {
    /// # Safety
    /// Null, or a variable of the caller.
    pub(crate) unsafe fn write(evicted: Evicted, pointer: *mut Self) {
        let value = Self {
            folios: evicted.folios,
            kept: evicted.kept.total(),
            kept_dirty: evicted.kept.dirty,
            kept_referenced: evicted.kept.referenced,
        };
        if !pointer.is_null() {
            // SAFETY: the caller's variable.
            unsafe { pointer.write(value) };
        }
    }
}

/// How much of a range is in memory, in pages of 4 KiB.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_residency {
    /// Pages of the range within the file.
    pub pages: u64,
    /// Pages that are in memory.
    pub resident: u64,
    /// Dirty pages.
    pub dirty: u64,
    /// Pages that were evicted.
    pub evicted: u64,
}

/// Announces the order of later reads through the handle: one of `bifolio_access`.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_set_access(
    file: *const bifolio_file,
    access: u32,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        file.file().set_access(access_of(access)?);
        Ok(())
    })
}

/// Starts to write the dirty pages of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) to
/// the storage, and returns. Pages that a write gate holds back follow when it lets them pass.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_write_out(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { with_range(file, offset, length, File::write_out) }
}

/// Starts to read `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end), and returns.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_prefetch(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { with_range(file, offset, length, File::prefetch) }
}

/// Reads `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) into the cache. An error is that
/// of the first page that cannot be read.
///
/// Threads: any, at the same time. Blocks: for the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_populate(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
) -> bifolio_result {
    // SAFETY: null, or a live handle.
    unsafe { with_range(file, offset, length, File::populate) }
}

/// Evicts the clean, unused folios of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end),
/// and starts the write-out of dirty ones. `evicted` may be null.
///
/// Threads: any, at the same time. Blocks: for no device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_evict(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    evicted: *mut bifolio_evicted,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let found = file.file().evict(range(file.file(), offset, length))?;
        // SAFETY: null, or the caller's variable.
        unsafe { bifolio_evicted::write(found, evicted) };
        Ok(())
    })
}

/// Reports how much of `length` bytes at `offset` (`BIFOLIO_TO_END`: to the end) is in memory.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_file_residency(
    file: *const bifolio_file,
    offset: u64,
    length: u64,
    residency: *mut bifolio_residency,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let file = unsafe { handle(file, "file")? };
        let output = Output::new(residency, "residency")?;
        let found = file.file().residency(range(file.file(), offset, length))?;
        let (pages, resident, dirty, evicted) =
            (found.pages, found.resident, found.dirty, found.evicted);
        // SAFETY: the caller's variable.
        unsafe { output.set(bifolio_residency { pages, resident, dirty, evicted }) };
        Ok(())
    })
}
