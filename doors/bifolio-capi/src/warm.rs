//! Lists of hot pages: what a cache has in memory, for the next one.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head.
#![allow(unsafe_code)]

use crate::boundary::{Output, Versioned, VersionedOutput, guard, handle, path};
use crate::cache::bifolio_cache;
use crate::result::bifolio_result;
use bifolio::{HotRestore, RestoreProgress};
use std::ffi::c_char;

/// A restore of hot pages, in the background. It does not keep the cache.
#[derive(Debug)]
pub struct bifolio_restore {
    restore: HotRestore,
}

/// How far a restore of hot pages is. Set `size` to `sizeof(bifolio_restored)` before the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_restored {
    /// `sizeof(bifolio_restored)` before the call; after it, how many bytes of the struct are set.
    pub size: usize,
    /// Files of the list.
    pub files: u64,
    /// Of these, files that were open, or were opened since.
    pub files_found: u64,
    /// Pages of the list, bytes.
    pub listed_bytes: u64,
    /// Pages read so far, bytes.
    pub read_bytes: u64,
    /// Pages that were in memory already, bytes.
    pub resident_bytes: u64,
    /// 1 if a part of the list was left out: it is damaged, or longer than this cache can hold.
    pub is_cut: u32,
    /// 1 if the restore has ended because no memory was free.
    pub is_full: u32,
    /// 1 if the restore has ended.
    pub is_over: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, begins with its size, integers only.
unsafe impl Versioned for bifolio_restored {
    const SIZE_MIN: usize = 64;
}

impl bifolio_restored {
    fn of(progress: RestoreProgress) -> Self {
        Self {
            size: size_of::<Self>(),
            files: progress.files,
            files_found: progress.files_found,
            listed_bytes: progress.listed_bytes,
            read_bytes: progress.read_bytes,
            resident_bytes: progress.resident_bytes,
            is_cut: progress.is_cut.into(),
            is_full: progress.is_full.into(),
            is_over: progress.is_over.into(),
            reserved: 0,
        }
    }
}

/// Writes a list of the pages in memory to the file at `path`, the hottest first, for
/// `bifolio_cache_restore_hot` of a later cache: their positions, not their bytes. The list
/// replaces the file at once, and is durable then. `page_bytes` may be null; it gets the bytes of
/// the listed pages. Call this before the files are closed.
///
/// Threads: any, at the same time. Blocks: for the file system of `path`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_save_hot(
    cache: *const bifolio_cache,
    path: *const c_char,
    page_bytes: *mut u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let cache = unsafe { handle(cache, "cache")? };
        // SAFETY: null, or text of the caller.
        let path = unsafe { self::path(path, "path")? };
        let saved = cache.cache().save_hot(path)?;
        if !page_bytes.is_null() {
            // SAFETY: the caller's variable.
            unsafe { page_bytes.write(saved.page_bytes) };
        }
        Ok(())
    })
}

/// Starts to read the pages of a list in the background, the hottest first, of files that are open
/// and of files that are opened later, into free memory only: nothing is evicted. A list that is
/// damaged is used as far as it is sound. `restore` may be null; it gets a handle that says how far
/// the restore is, to be freed with `bifolio_restore_free`.
///
/// Threads: any, at the same time. Blocks: for the read of the list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_restore_hot(
    cache: *const bifolio_cache,
    path: *const c_char,
    restore: *mut *mut bifolio_restore,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let cache = unsafe { handle(cache, "cache")? };
        // SAFETY: null, or text of the caller.
        let path = unsafe { self::path(path, "path")? };
        let begun = cache.cache().restore_hot(path)?;
        if let Ok(output) = Output::new(restore, "restore") {
            // SAFETY: the caller's variable.
            unsafe { output.set(Box::into_raw(Box::new(bifolio_restore { restore: begun }))) };
        }
        Ok(())
    })
}

/// Writes how far a restore is to `progress`, whose `size` states its size.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_restore_progress(
    restore: *const bifolio_restore,
    progress: *mut bifolio_restored,
) -> bifolio_result {
    // SAFETY: the same contract.
    unsafe { with_progress(restore, progress, HotRestore::progress) }
}

/// Waits until nothing of the list is left to read for the files that are open now, and writes how
/// far the restore is to `progress`, whose `size` states its size.
///
/// Threads: any, at the same time. Blocks: for the devices of these files.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_restore_wait(
    restore: *const bifolio_restore,
    progress: *mut bifolio_restored,
) -> bifolio_result {
    // SAFETY: the same contract.
    unsafe { with_progress(restore, progress, HotRestore::wait) }
}

/// # Safety
/// As for the functions above.
unsafe fn with_progress(
    restore: *const bifolio_restore,
    progress: *mut bifolio_restored,
    call: impl FnOnce(&HotRestore) -> RestoreProgress,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let restore = unsafe { handle(restore, "restore")? };
        // SAFETY: null, or a struct that begins with its size.
        let output = unsafe { VersionedOutput::new(progress, "progress")? };
        let value = bifolio_restored::of(call(&restore.restore));
        // SAFETY: the caller's struct, as long as its size says.
        unsafe { output.set(&value) };
        Ok(())
    })
}

/// Ends a restore: no further page is read.
///
/// Threads: any, at the same time. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_restore_cancel(restore: *const bifolio_restore) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        unsafe { handle(restore, "restore")? }.restore.cancel();
        Ok(())
    })
}

/// Frees a handle. The restore goes on, unless it was cancelled. Null is allowed.
///
/// Threads: any, while no other call uses the handle. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_restore_free(restore: *mut bifolio_restore) {
    if !restore.is_null() {
        // SAFETY: made by `bifolio_cache_restore_hot`, and no other call uses it.
        let restore = unsafe { Box::from_raw(restore) };
        guard(|| {
            drop(restore);
            Ok(())
        });
    }
}
