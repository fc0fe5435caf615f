//! The opaque copy where there is no hand-written one: relaxed atomic words.
//!
//! The frame side is only ever touched as aligned 64-bit atomics, never with another size: racing
//! accesses of mixed sizes have no defined meaning. A partial word is read whole and cut, and is
//! written by reading it, replacing the bytes and storing it (one writer at a time by contract).
//! Frames are page-aligned and a whole number of words long, so the containing word always exists.
//!
//! # Safety
//! Each function turns a frame address into references to atomics that live as long as the frame.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a cache line.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const LINE_BYTES: usize = 64;

const WORD: usize = 8;

/// # Safety
/// `source` lies in a frame and is readable for `length` bytes; `target` writable for `length`.
#[inline]
pub(super) unsafe fn copy_out(source: *const u8, target: *mut u8, length: usize) {
    for_each_word(source.addr(), length, |word_address, skip, done, count| {
        let word = source.with_addr(word_address);
        // SAFETY: the aligned word that holds a byte of the frame is in the frame.
        let bytes = unsafe { load_word(word) }.to_ne_bytes();
        // SAFETY: done + count <= length; `bytes` is ours and skip + count <= 8.
        unsafe {
            target.wrapping_add(done).copy_from_nonoverlapping(bytes[skip..].as_ptr(), count)
        };
    });
}

/// # Safety
/// As [`copy_out`], with `length` `N`.
#[inline]
pub(super) unsafe fn load<const N: usize>(source: *const u8) -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: the caller's contract; `bytes` is `N` long.
    unsafe { copy_out(source, bytes.as_mut_ptr(), N) };
    bytes
}

/// # Safety
/// `target` lies in a frame and is writable for `length` bytes; `source` readable for `length`.
#[inline]
pub(super) unsafe fn copy_in(target: *mut u8, source: *const u8, length: usize) {
    for_each_word(target.addr(), length, |word_address, skip, done, count| {
        let word = target.with_addr(word_address);
        // SAFETY: the aligned word that holds a byte of the frame is in the frame.
        let mut bytes = unsafe { load_word(word) }.to_ne_bytes();
        let part = bytes[skip..skip + count].as_mut_ptr();
        // SAFETY: done + count <= length; `part` is `count` bytes of our own array.
        unsafe { part.copy_from_nonoverlapping(source.wrapping_add(done), count) };
        // SAFETY: as for the load; only this thread writes these bytes (the caller's contract).
        unsafe { store_word(word, u64::from_ne_bytes(bytes)) };
    });
}

/// # Safety
/// `target` lies in a frame and is writable for `length` bytes.
#[inline]
pub(super) unsafe fn zero(target: *mut u8, length: usize) {
    for_each_word(target.addr(), length, |word_address, skip, _, count| {
        let word = target.with_addr(word_address);
        // SAFETY: the aligned word that holds a byte of the frame is in the frame.
        let mut bytes = unsafe { load_word(word) }.to_ne_bytes();
        bytes[skip..skip + count].fill(0);
        // SAFETY: as for the load; only this thread writes these bytes (the caller's contract).
        unsafe { store_word(word, u64::from_ne_bytes(bytes)) };
    });
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch is a hint; it neither faults nor reads in the sense of the language.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{a}]", a = in(reg) address,
                        options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "aarch64"))]
    let _ = address;
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn prefetch_to_write(address: *const u8) {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint, as above.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{a}]", a = in(reg) address,
                        options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "aarch64"))]
    let _ = address;
}

/// Walks the aligned words that cover `length` bytes at `address`: word address, bytes to skip in
/// it, bytes done before it, bytes of it that count.
fn for_each_word(address: usize, length: usize, mut visit: impl FnMut(usize, usize, usize, usize)) {
    let mut done = 0;
    while done < length {
        let at = address + done;
        let skip = at % WORD;
        let count = (WORD - skip).min(length - done);
        visit(at - skip, skip, done, count);
        done += count;
    }
}

/// # Safety
/// `word` is aligned to 8 bytes, in a mapped frame, and accessed by others only through this file.
unsafe fn load_word(word: *const u8) -> u64 {
    // SAFETY: the caller's contract is that of a shared atomic.
    unsafe { AtomicU64::from_ptr(word.cast_mut().cast()) }.load(Ordering::Relaxed)
}

/// # Safety
/// As [`load_word`], and no other thread stores to the word now.
unsafe fn store_word(word: *mut u8, value: u64) {
    // SAFETY: the caller's contract is that of a shared atomic.
    unsafe { AtomicU64::from_ptr(word.cast()) }.store(value, Ordering::Relaxed);
}
