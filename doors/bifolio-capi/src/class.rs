//! Classes of files, and memory of the program within the bound.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head. States that structs have
//! the layout that `Versioned` demands.
#![allow(unsafe_code)]

use crate::boundary::{Failure, Output, Versioned, VersionedOutput, guard, handle, options, text};
use crate::cache::bifolio_cache;
use crate::result::bifolio_result;
use bifolio::{Class, Reserved};
use std::ffi::c_char;

/// For `bifolio_class_limits.ceiling_bytes`: no ceiling.
pub const BIFOLIO_CEILING_NONE: u64 = u64::MAX;

/// Limits of a class of files. Set `size` to `sizeof(bifolio_class_limits)` and everything else to
/// zero, which selects the defaults; then change what you need.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_class_limits {
    /// `sizeof(bifolio_class_limits)`.
    pub size: usize,
    /// Memory that others cannot take from the class, bytes. While it has less, others use it.
    /// Default 0. The floors of all classes are seven eighths of the bound at most.
    pub floor_bytes: u64,
    /// The most memory that pages of the class may have, bytes: 64 KiB or more, and the floor or
    /// more. Default, and `BIFOLIO_CEILING_NONE`: as much as the bound allows.
    pub ceiling_bytes: u64,
    /// Classes above their floors give pages in this order, 1 to 255, the lowest first. Default
    /// 128, as for files without a class.
    pub order: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, begins with its size, integers only.
unsafe impl Versioned for bifolio_class_limits {
    const SIZE_MIN: usize = 32;
}

/// Memory of a class of files, and what has happened to its pages. Later versions append fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bifolio_class_stats {
    /// `sizeof(bifolio_class_stats)` before the call; after it, how many bytes of the struct are
    /// set.
    pub size: usize,
    /// Pages of the files of the class in memory, bytes.
    pub resident_bytes: u64,
    /// Lookups that found no page, since the class was made.
    pub misses: u64,
    /// Of these, misses of pages that had been evicted and left a shadow.
    pub refaults: u64,
    /// Bytes of pages that were evicted, by reclaim or on request.
    pub evicted_bytes: u64,
}

// SAFETY: `repr(C)`, begins with its size, integers only.
unsafe impl Versioned for bifolio_class_stats {
    const SIZE_MIN: usize = 40;
}

/// Memory of the program that counts within the bound of a cache.
#[derive(Debug)]
pub struct bifolio_reserved {
    reserved: Reserved,
}

/// Returns the class of this name, which is made if there is none.
///
/// # Safety
/// Null, or a live handle; null, or text of the caller.
unsafe fn class(cache: *const bifolio_cache, name: *const c_char) -> Result<Class, Failure> {
    // SAFETY: the contract.
    let cache = unsafe { handle(cache, "cache")? };
    // SAFETY: the contract.
    let name = unsafe { text(name, "name")? };
    Ok(cache.cache().class(&name.to_string_lossy())?)
}

/// Makes a class of files, or changes the limits of the one with this name: a part of the memory of
/// the cache, for the files that are opened in it (`class_name` of `bifolio_open_options`).
/// `limits` may be null for the defaults. When memory is short, classes give pages in proportion to
/// what they have above their floors; a class at its ceiling evicts its own pages for new ones. On
/// an error the limits are unchanged, or only some of them are changed. A cache has room for 15
/// classes.
///
/// Threads: any, at the same time. Blocks: for another thread that evicts pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_class_set(
    cache: *const bifolio_cache,
    name: *const c_char,
    limits: *const bifolio_class_limits,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or limits that begin with their size.
        let limits = unsafe { options(limits, "limits")? };
        let order = match limits.order {
            0 => 128,
            order => u8::try_from(order)
                .map_err(|_| Failure::Misuse(format!("limits: order {order} is above 255")))?,
        };
        // SAFETY: null, or a live handle and text of the caller.
        let class = unsafe { class(cache, name)? };
        let ceiling =
            Some(limits.ceiling_bytes).filter(|bytes| ![0, BIFOLIO_CEILING_NONE].contains(bytes));
        // First what allows more.
        if ceiling.is_none_or(|bytes| bytes >= class.stats().ceiling_bytes) {
            class.set_ceiling(ceiling)?;
            class.set_floor(limits.floor_bytes)?;
        } else {
            class.set_floor(limits.floor_bytes)?;
            class.set_ceiling(ceiling)?;
        }
        class.set_order(order);
        Ok(())
    })
}

/// Writes the memory of a class and its counters to `stats`, whose `size` states its size. A class
/// that does not exist is made.
///
/// Threads: any, at the same time. Blocks: never for storage.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_class_get_stats(
    cache: *const bifolio_cache,
    name: *const c_char,
    stats: *mut bifolio_class_stats,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a struct that begins with its size.
        let output = unsafe { VersionedOutput::new(stats, "stats")? };
        // SAFETY: null, or a live handle and text of the caller.
        let stats = unsafe { class(cache, name)? }.stats();
        let stats = bifolio_class_stats {
            size: 0,
            resident_bytes: stats.resident_bytes,
            misses: stats.misses,
            refaults: stats.refaults,
            evicted_bytes: stats.evicted_bytes,
        };
        // SAFETY: the caller's struct, as long as its size says.
        unsafe { output.set(&stats) };
        Ok(())
    })
}

/// Counts `length` bytes of the program's own memory within the bound, until
/// `bifolio_reserved_free`: the cache has that much less for pages. Allocates nothing. Evicts pages
/// to make room.
///
/// Threads: any, at the same time. Blocks: for write-outs of dirty pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_reserve(
    cache: *const bifolio_cache,
    length: u64,
    reserved: *mut *mut bifolio_reserved,
) -> bifolio_result {
    guard(|| {
        let output = Output::new(reserved, "reserved")?;
        // SAFETY: null, or a live handle.
        let reserved = unsafe { handle(cache, "cache")? }.cache().reserve(length)?;
        // SAFETY: the caller's variable.
        unsafe { output.set(Box::into_raw(Box::new(bifolio_reserved { reserved }))) };
        Ok(())
    })
}

/// Changes how many bytes count. On an error nothing changes.
///
/// Threads: one at a time for each `reserved`. Blocks: as `bifolio_cache_reserve`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_reserved_resize(
    reserved: *mut bifolio_reserved,
    length: u64,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle that no other thread uses.
        let reserved = unsafe { reserved.as_mut() }.ok_or(Failure::Null("reserved"))?;
        Ok(reserved.reserved.resize(length)?)
    })
}

/// Ends a reservation. Null is allowed.
///
/// Threads: any. Blocks: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_reserved_free(reserved: *mut bifolio_reserved) {
    if !reserved.is_null() {
        // SAFETY: made by `bifolio_cache_reserve`, and not freed yet.
        drop(unsafe { Box::from_raw(reserved) });
    }
}
